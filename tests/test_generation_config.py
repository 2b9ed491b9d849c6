"""A model folder with a published generation_config.json, whole: through the worker, a web process, and every API."""

import json
import re
import shutil

import pytest
from processes import Server
from published.configs import BY_DEFAULTS, GENERATION_CONFIGS, REQUESTS, sampling_defaults

from config import DEMO_MODEL

pytestmark = pytest.mark.processes


@pytest.fixture
def serve(tmp_path):
    """The demonstration model with another generation_config.json."""

    def start(generation_config, **settings):
        folder = shutil.copytree(DEMO_MODEL, tmp_path / "demo")
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
        return Server(MODEL_ID=str(folder), **settings)

    return start


@pytest.mark.parametrize("name", BY_DEFAULTS.values())
def test_every_api_answers_with_the_defaults_of_a_published_model(serve, name):
    published = GENERATION_CONFIGS[name]
    with serve(published) as server:
        server.wait_ready()
        for path, body in REQUESTS.items():
            assert server.post(path, body)
            response = server.request("POST", path, body | {"stream": True})
            assert response.status == 200 and not re.search(rb'"error": ?["{]', response.read())
        assert json.loads(server.get("/info")[1])["sampling_defaults"] == sampling_defaults(published)


def test_a_models_own_stop_strings_end_a_chat_and_what_is_not_supported_is_named_in_one_line(serve):
    question = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 60, "temperature": 0}
    unsupported = {"no_repeat_ngram_size": 2, "suppress_tokens": [5], "num_beams": 1, "bad_words_ids": None}
    with serve({"stop_strings": [" learning"], **unsupported}) as server:
        server.wait_ready()
        choice = server.post("/v1/chat/completions", question)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Deep", "stop")
        message = server.post("/v1/messages", question)
        assert (message["content"][0]["text"], message["stop_reason"], message["stop_sequence"]) == ("Deep", "end_turn", None)
        message = server.post("/v1/messages", question | {"stop_sequences": ["Deep"]})
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Deep")
        goes_on = server.post("/v1/chat/completions", question | {"ignore_eos": True})["choices"][0]["message"]["content"]
        assert goes_on.startswith("Deep learning")
        assert "generation_config.json has no_repeat_ngram_size, suppress_tokens, which is not supported" in server.log
        assert json.loads(server.get("/info")[1])["stop_strings"] == [" learning"]


def test_generation_config_none_leaves_the_models_defaults_out(serve):
    with serve({"top_k": 20, "stop_strings": ["a"]}, GENERATION_CONFIG="none") as server:
        server.wait_ready()
        info = json.loads(server.get("/info")[1])
        assert (info["sampling_defaults"], info["stop_strings"]) == ({}, [])
