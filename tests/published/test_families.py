"""Families in folders as they are published, served by the real entrypoint and asked through every API."""

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import Server
from tiny_models import run, settings

from models.torch_model import TorchModel
from published import folders
from published.families import FAMILIES, MECHANISMS, OPENVINO, TORCH
from published.reference import TOKENS, Reference

pytestmark = [
    pytest.mark.models,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = set(MECHANISMS.values())


def rows(families):
    for family in families:
        yield pytest.param(family, id=family.id, marks=[] if family.name in SAMPLES else pytest.mark.families)


SERVED = list(rows(family for family in FAMILIES if not family.refused))
REFUSED = list(rows(family for family in FAMILIES if family.refused))

TOTAL_TOKENS = 512
CLEAR_TOKENS = 8  # fewer say little
SHORT = "The capital of France is"
LONG = (  # longer than the windows
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have "
    "connected them with another, and to assume among the powers of the earth, the separate and equal station to which the "
    "Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should "
    "declare the causes which impel them to the separation."
)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
# API: its route, a request, the text of a whole answer, the text of an event (None: it has none).
TEXTS = {
    "completions": (
        "/v1/completions",
        {"prompt": LONG, **GREEDY},
        lambda answer: answer["choices"][0]["text"],
        lambda event: event["choices"][0]["text"] if event["choices"] else "",
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": CHAT, **GREEDY},
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: event["choices"][0]["delta"].get("content") or "" if event["choices"] else "",
    ),
    "responses": (
        "/v1/responses",
        {"input": CHAT, "temperature": 0, "max_output_tokens": TOKENS},
        lambda answer: "".join(part["text"] for item in answer["output"] for part in item["content"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "messages": (
        "/v1/messages",
        {"messages": CHAT, **GREEDY},
        lambda answer: "".join(block["text"] for block in answer["content"]),
        lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
    ),
}
GENERATE = {"do_sample": False, "max_new_tokens": TOKENS, "details": True}


@contextlib.contextmanager
def serve(folder, record, **environment):
    """A server that is ready, with a model cache of its own: each run converts. Records its engine and its seconds."""
    started_at = time.monotonic()
    with start(folder, **environment) as server:
        server.wait_ready()
        engine = OPENVINO if "OpenVINO: weights in" in server.log else TORCH if "runs in plain PyTorch" in server.log else None
        record(environment.get("DTYPE", "default"), f"{engine} {time.monotonic() - started_at:.1f}")
        yield server, engine
        assert server.stop() == 0


def start(folder, **environment):
    where = {"MODEL_ID": str(folder), "MODEL_CACHE": str(folder.parent / "cache"), "MAX_TOTAL_TOKENS": str(TOTAL_TOKENS)}
    return Server(**where, NUMBA_CACHE_DIR=os.environ["NUMBA_CACHE_DIR"], **environment)


def streamed(server, path, body):
    response = server.request("POST", path, body | {"stream": True})
    assert response.status == 200, response.read()
    lines = [line.removeprefix(b"data:").strip() for line in response if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def until_end(ids, eos):
    """The tokens up to the first of `eos`, which is the last; and whether there is one."""
    ends = [n for n, token in enumerate(ids) if token in eos]
    return (ids[: ends[0] + 1], True) if ends else (ids, False)


class Expected:
    """What transformers continues a prompt with: its tokens, and as a text."""

    def __init__(self, reference, ids, eos, **penalties):
        tokens, _logprobs = reference.continued(ids, **penalties)
        assert len(tokens) >= CLEAR_TOKENS, "too few tokens lead clearly to compare"
        self.ids, ends = until_end(tokens, eos)
        self.is_whole = ends or len(tokens) == TOKENS
        self.text = reference.tokenizer.decode(self.ids[:-1] if ends else self.ids, skip_special_tokens=True)

    def assert_ids(self, found):
        assert found[: len(self.ids)] == self.ids
        assert not self.is_whole or len(found) == len(self.ids)

    def assert_text(self, found):
        if self.is_whole:
            assert found == self.text
        else:
            assert found.startswith(self.text.rstrip("\ufffd"))


def ask(server, api, is_streamed):
    """The ids of /generate, the text of another API."""
    if api == "generate":
        if is_streamed:
            return [event["token"]["id"] for event in server.stream(SHORT, **GENERATE)]
        status, answer = server.generate(SHORT, **GENERATE)
        assert status == 200, answer
        return [token["id"] for token in answer["details"]["tokens"]]
    path, body, of_answer, of_event = TEXTS[api]
    if is_streamed:
        return "".join(map(of_event, streamed(server, path, body)))
    return of_answer(server.post(path, body))


@pytest.mark.parametrize("family", SERVED)
def test_a_family_is_served_and_its_texts_are_those_of_transformers(tmp_path, record_property, family):
    folder = folders.write(tmp_path / "model", family.model, family.config, family.generation_config)
    reference = Reference(folder)
    requests = [(api, is_streamed) for api in ("generate", *TEXTS) for is_streamed in (False, True)]
    with serve(folder, record_property, DTYPE="float32") as (server, engine):
        assert engine == family.engine, server.log
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda request: ask(server, *request), requests))
        info = json.loads(server.get("/info")[1])
    eos = info["eos_token_ids"]
    penalties = {name: value for name, value in info["sampling_defaults"].items() if name.endswith("_penalty")}
    expected = {"generate": Expected(reference, reference.ids(SHORT), eos)}
    expected["completions"] = Expected(reference, reference.ids(LONG), eos, **penalties)
    for api in ("chat", "responses", "messages"):
        expected[api] = Expected(reference, reference.chat_ids(CHAT), eos, **penalties)
    for (api, _is_streamed), answer in zip(requests, found):
        if api == "generate":
            expected[api].assert_ids(answer)
        else:
            expected[api].assert_text(answer)
    if family.on_torch:
        config = settings(folder, len(reference.ids(LONG)) + TOKENS, dtype="float32")
        (sequence,) = run(TorchModel(config, folder, "cpu"), [list(reference.ids(LONG))])
        tokens, _logprobs = reference.continued(reference.ids(LONG))
        assert sequence.tokens[: len(tokens)] == tokens
    with serve(folder, record_property) as (server, engine):
        assert engine == family.default_engine, server.log
        assert server.generate(SHORT, **GENERATE)[0] == 200


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_in_one_line_before_its_weights_are_read(tmp_path, family):
    folder = folders.write_unreadable(tmp_path / "model", family.model, family.config)
    with start(folder) as server:
        assert server.wait_exit() == 2
        errors = [line for line in server.log.splitlines() if "ERROR" in line or line.startswith("error")]
        assert len(errors) == 1 and family.refused in errors[0], server.log
        assert "Traceback" not in server.log
