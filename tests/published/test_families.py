"""Families in folders as they are published, served by the real entrypoint and asked through every API."""

import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor

import made
import pytest
import vision_models
from processes import Server
from tiny_models import run, settings

import models
from config import Config
from models.pytorch.model import TorchModel
from published import folders
from published.families import FAMILIES, MECHANISMS, OPENVINO
from published.reference import TOKENS, Reference

pytestmark = [
    pytest.mark.models,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = set(MECHANISMS.values())
SAMPLES_IN_16_BITS = {"Llama 3.1", "Gemma 3 4B", "Qwen3 MoE", "DeepSeek V2"}


def rows(families, samples=SAMPLES):
    others = pytest.mark.families
    return [pytest.param(family, id=family.id, marks=() if family.name in samples else others) for family in families]


SERVED = [family for family in FAMILIES if not family.refused]
REFUSED = [family for family in FAMILIES if family.refused]

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


def written(family):
    """The folder of a family, made once."""
    lent = folders.tokenizer_folder(family.model).parent.name
    return made.once(f"published/{family.id}-{lent}", lambda folder: folders.write(folder, family))


def load(folder, record, dtype):
    """The model as a first startup loads it; converted in this process, into the cache of `start`."""
    started_at = time.monotonic()
    # Two threads: OpenVINO's kernels for bfloat16 need them.
    where = {"model_id": str(folder), "model_cache": str(folder.parent / "cache"), "device": "cpu", "threads": 2}
    served = models.load(models.prepare(Config(**where, dtype=dtype, max_total_tokens=TOTAL_TOKENS)), lambda phase: None)
    record(dtype, f"{served.engine} {time.monotonic() - started_at:.1f}")
    return served


def start(folder, **environment):
    where = {"MODEL_ID": str(folder), "MODEL_CACHE": str(folder.parent / "cache"), "MAX_TOTAL_TOKENS": str(TOTAL_TOKENS)}
    return Server(**where, **environment)


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


@pytest.mark.parametrize("family", rows(SERVED, SAMPLES_IN_16_BITS))
@pytest.mark.usefixtures("conversions")
def test_a_family_is_served_in_the_type_of_its_checkpoint_by_the_engine_of_its_row(record_property, family):
    assert load(written(family), record_property, "auto").engine == family.default_engine


@pytest.mark.parametrize("family", rows(SERVED))
@pytest.mark.usefixtures("conversions")
def test_a_family_is_served_and_its_texts_are_those_of_transformers(record_property, family):
    folder = written(family)
    reference = Reference(folder)
    short, long, chat = reference.ids(SHORT), reference.ids(LONG), reference.chat_ids(CHAT)
    assert load(folder, record_property, "float32").engine == family.engine
    requests = [(api, is_streamed) for api in ("generate", *TEXTS) for is_streamed in (False, True)]
    with start(folder, DTYPE="float32") as server:
        server.wait_ready()
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda request: ask(server, *request), requests))
        info = json.loads(server.get("/info")[1])
        assert ("OpenVINO: weights in float32" in server.log) == (family.engine == OPENVINO)
        assert server.stop() == 0
    eos = info["eos_token_ids"]
    penalties = {name: value for name, value in info["sampling_defaults"].items() if name.endswith("_penalty")}
    expected = {"generate": Expected(reference, short, eos), "completions": Expected(reference, long, eos, **penalties)}
    for (api, _is_streamed), answer in zip(requests, answers):
        if api == "generate":
            expected[api].assert_ids(answer)
        else:
            expected.get(api, Expected(reference, chat, eos, **penalties)).assert_text(answer)
    torch_model = TorchModel(settings(folder, len(long) + TOKENS, dtype="float32"), folder, "cpu")
    (sequence,) = run(torch_model, [list(long)])
    Expected(reference, long, eos=[]).assert_ids(sequence.tokens)


@pytest.mark.parametrize("family", rows([family for family in SERVED if family.images]))
def test_a_family_reads_images_in_chats_as_transformers_does(family):
    folder = written(family)
    reference = Reference(folder)
    picture = vision_models.picture("small")
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    text = {"type": "text", "text": "What is this?"}
    answer = {"role": "assistant", "content": "A cat."}
    later = [answer, CHAT[0]]

    def chat(image):
        return [{"role": "user", "content": [image, text]}]

    with start(folder, DTYPE="float32") as server:
        server.wait_ready()
        for turns in ([], later):
            found = server.post(
                "/v1/chat/completions",
                {"messages": chat({"type": "image_url", "image_url": {"url": url}}) + turns, **GREEDY},
            )
            tokens = reference.continued_with_image(chat({"type": "image"}) + turns, picture)
            assert len(tokens) >= CLEAR_TOKENS, "too few tokens lead clearly to compare"
            expected = reference.tokenizer.decode(tokens, skip_special_tokens=True)
            assert found["choices"][0]["message"]["content"].startswith(expected.rstrip("\ufffd"))
        details = found["usage"]["prompt_tokens_details"]
        # Recurrent states are kept behind whole tiles, which may end within the image.
        least = 0 if "Qwen3.5" in family.name else details["image_tokens"]
        assert details["cached_tokens"] > least and details["image_tokens"] > 0


@pytest.mark.parametrize("family", rows(REFUSED))
def test_a_family_is_refused_in_one_line_before_its_weights_are_read(tmp_path, family):
    folder = folders.write_unreadable(tmp_path / "model", family)
    with start(folder) as server:
        assert server.wait_exit() == 2
        errors = [line for line in server.log.splitlines() if "ERROR" in line or line.startswith("error")]
        assert len(errors) == 1 and family.refused in errors[0], server.log
        assert "Traceback" not in server.log
