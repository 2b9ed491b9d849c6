"""A model folder with a published generation_config.json, whole: through the worker, a web process, and every API."""

import json
import re
import shutil

import msgspec
import pytest
from loop import boot
from processes import Server
from published.configs import BY_DEFAULTS, GENERATION_CONFIGS, REQUESTS, sampling_defaults

from config import DEMO_MODEL
from engine import defaults
from manifest import Manifest


@pytest.fixture
def demo(tmp_path):
    """Makes a folder of the demonstration model with another generation_config.json."""

    def make(generation_config):
        folder = shutil.copytree(DEMO_MODEL, tmp_path / "demo")
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
        return folder

    return make


@pytest.mark.parametrize("name", BY_DEFAULTS.values())
def test_every_api_answers_with_the_defaults_of_a_published_model(demo, booting, name):
    published = GENERATION_CONFIGS[name]
    used = defaults.sampling_defaults(Manifest.read(demo(published)), "host")
    booting.info = msgspec.structs.replace(booting.info, sampling_defaults=used)
    served = booting.get_ready()
    for path, body in REQUESTS.items():
        assert served.post(path, body).status_code == 200
        response = served.post(path, body | {"stream": True})
        assert response.status_code == 200 and not re.search(r'"error": ?["{]', response.get_data(as_text=True))
    assert served.client.get("/info").json["sampling_defaults"] == sampling_defaults(published)


@pytest.mark.processes
def test_a_server_reads_defaults_and_stop_strings_and_names_what_is_not_supported_in_one_line(demo):
    question = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 60, "temperature": 0}
    unsupported = {
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [5],
        "num_beams": 1,
        "bad_words_ids": None,
        "max_new_tokens": 7,
    }
    published = GENERATION_CONFIGS["MiniMaxAI/MiniMax-M2"]
    with Server(MODEL_ID=str(demo(published | {"stop_strings": [" learning"]} | unsupported))) as server:
        server.wait_ready()
        choice = server.post("/v1/chat/completions", question)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Deep", "stop")
        message = server.post("/v1/messages", question)
        assert (message["content"][0]["text"], message["stop_reason"], message["stop_sequence"]) == ("Deep", "end_turn", None)
        message = server.post("/v1/messages", question | {"stop_sequences": ["Deep"]})
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Deep")
        goes_on = server.post("/v1/chat/completions", question | {"ignore_eos": True})["choices"][0]["message"]["content"]
        assert goes_on.startswith("Deep learning")
        for path, body in REQUESTS.items():
            assert server.post(path, body)
        words = "generation_config.json has max_new_tokens, no_repeat_ngram_size, suppress_tokens, which is not supported"
        assert words in server.log
        info = json.loads(server.get("/info")[1])
        assert (info["stop_strings"], info["sampling_defaults"]) == ([" learning"], sampling_defaults(published))


@pytest.mark.models
def test_generation_config_none_leaves_the_models_defaults_out(demo, tmp_path):
    folder = demo({"top_k": 20, "stop_strings": ["a"]})
    info = boot(tmp_path, "--model-id", str(folder), "--generation-config", "none")
    assert (info.sampling_defaults, info.stop_strings) == ({}, [])
    info = boot(tmp_path, "--model-id", str(folder))
    assert (info.sampling_defaults, info.stop_strings) == ({"top_k": 20}, ["a"])
