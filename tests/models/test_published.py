"""Published models give what transformers gives, in float32: SmolLM2-135M-Instruct (Llama), Gemma 3 270M (sliding windows)."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from processes import Server
from published import weights
from published.reference import TOKENS
from published.weights import PROMPTS, Published
from tiny_models import run

import models
from config import Config
from models.accuracy import kl_divergence
from models.base import Chunk
from models.openvino import OpenVino
from models.openvino.check_text import CHECK_TEXT
from models.pytorch.model import TorchModel
from run import HERE

pytestmark = [
    pytest.mark.models,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not weights.is_installed("smollm2"), reason=weights.WHY),
]

LIKELY = -20.0  # log-probability; those below are rounded more
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2():
    return Published.of("smollm2")


@pytest.mark.parametrize(("name", "prompts"), [("smollm2", PROMPTS), ("gemma3", PROMPTS[3:6])])
def test_every_prompt_is_continued_as_transformers_does_it(name, prompts):
    """On both engines, in a batch, while others join, leave, and continue prefixes. PyTorch, ten times slower, runs a few."""
    model = Published.of(name)
    ids = [model.ids(prompt) for prompt in prompts]
    config = model.config(max_total_tokens=max(map(len, ids)) + TOKENS, max_batch_size=4)
    config = config.with_manifest(model.prepared.manifest)
    openvino = models.load(OpenVino(config, model.folder, model.prepared.manifest), lambda phase: None)
    assert openvino.engine == "openvino"
    for served, most in ((openvino, len(ids)), (TorchModel(config, model.folder, "cpu"), 6)):
        for sequence in run(served, [list(prompt) for prompt in ids[:most]], new_tokens=TOKENS):
            found = sequence.tokens  # fewer where it was cancelled
            tokens, logprobs = model.continued(tuple(sequence.generate.prompt))
            assert found[: len(tokens)] == tokens[: len(found)]
            for logits, expected in zip(sequence.logits[: len(found)], logprobs):
                ours = torch.log_softmax(torch.from_numpy(np.array(logits)), -1).numpy()
                likely = expected > LIKELY
                assert np.abs(ours - expected)[likely].max() < 1e-3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("smollm2", "auto"),
        ("smollm2", "float32"),
        ("gemma3", "auto"),
        pytest.param("gemma3", "float32", marks=pytest.mark.families),
    ],
)
def test_a_file_as_it_is_gives_the_logits_of_its_dequantized_weights(name, dtype):
    model = Published.of(name)
    ids = model.ids(CHECK_TEXT.read_text())[:200]
    where = {"model_id": str(weights.file(name)), "model_cache": str(weights.CACHE), "device": "cpu", "dtype": dtype}
    config = Config(**where, max_total_tokens=200, max_batch_size=2)
    served = models.load(models.prepare(config), lambda phase: None)
    with torch.no_grad():
        expected = model.model(torch.tensor([ids])).logits[0].numpy()
    most = 1e-3 if dtype == "float32" else 0.03  # activations are quantized
    prompt = served.forward([Chunk(0, ids, 0, all_logits=True)])
    assert kl_divergence(prompt, expected).mean() < most
    served.forward([Chunk(0, ids[:160], 0)])
    steps = np.concatenate([served.forward([Chunk(0, ids[n : n + 1], n)]) for n in range(160, 200)])
    assert kl_divergence(steps, expected[160:]).mean() < most
    (sequence,) = run(served, [model.ids(PROMPTS[0])], new_tokens=TOKENS)
    tokens, _logprobs = model.continued(tuple(model.ids(PROMPTS[0])))
    assert dtype != "float32" or sequence.tokens[: len(tokens)] == tokens


def load_in_bfloat16(smollm2, quantize, max_total_tokens):
    """From the checkpoint that `smollm2` has made of the file: another one of the file would take 20 s."""
    where = {"model_id": str(smollm2.folder), "model_cache": str(weights.CACHE), "device": "cpu", "threads": 2}
    config = Config(**where, dtype="bfloat16", quantize=quantize, max_total_tokens=max_total_tokens)
    served = models.load(models.prepare(config), lambda phase: None)
    assert (served.engine, served.dtype, served.quantize) == ("openvino", "bfloat16", quantize)
    return served


@pytest.mark.parametrize(("quantize", "most"), [(None, 0.02), ("int8", 0.05)])
def test_a_published_model_bears_bfloat16_and_int8(smollm2, quantize, most):
    """Along the answer in float32, token by token: greedy texts differ where a processor rounds near ties otherwise."""
    prompt = smollm2.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens, expected = smollm2.continued(tuple(prompt))
    assert smollm2.tokenizer.decode(tokens).startswith("The capital of France is Paris")
    served = load_in_bfloat16(smollm2, quantize, len(prompt) + len(tokens))
    logits = [served.forward([Chunk(0, prompt, 0)])]
    logits += [served.forward([Chunk(0, [token], len(prompt) + n)]) for n, token in enumerate(tokens[:-1])]
    logprobs = torch.log_softmax(torch.from_numpy(np.concatenate(logits)), -1)
    expected = torch.from_numpy(np.array(expected))
    assert torch.nn.functional.kl_div(logprobs, expected, reduction="batchmean", log_target=True) < most


def perplexity(smollm2, quantize):
    """Of prose that the converter's check does not read, in windows of 256 tokens."""
    served = load_in_bfloat16(smollm2, quantize, 257)
    losses, ids = [], smollm2.ids((HERE / "demo" / "corpus" / "prose.md").read_text())[:1024]
    for begin in range(0, len(ids), 256):
        window, rows = ids[begin : begin + 256], []
        for at in range(0, len(window), served.prefill_chunk):
            rows.append(served.forward([Chunk(0, window[at : at + served.prefill_chunk], at, all_logits=True)]))
        logprobs = torch.log_softmax(torch.from_numpy(np.concatenate(rows)[:-1]).double(), -1)
        losses.append(-logprobs[range(len(window) - 1), list(window[1:])])
    return float(torch.cat(losses).mean().exp())


@pytest.mark.parametrize(("quantize", "most"), [("int8", 1.03), pytest.param("int4", 1.25, marks=pytest.mark.families)])
def test_compressed_weights_lose_little(smollm2, quantize, most):
    exact = perplexity(smollm2, None)
    assert 5 < exact < 100
    assert perplexity(smollm2, quantize) < most * exact


@pytest.fixture(scope="module")
def server(smollm2):
    settings = {
        "MODEL_ID": str(smollm2.folder),
        "MODEL_CACHE": str(weights.CACHE),
        "DTYPE": "float32",
        "MAX_TOTAL_TOKENS": "512",
    }
    with Server("--max-batch-size", "4", **settings) as server:
        yield server.wait_ready()
        assert server.stop() == 0


def test_twenty_clients_get_the_texts_of_transformers_whole_and_streamed(server, smollm2):
    asked = {"max_new_tokens": TOKENS, "details": True}
    with ThreadPoolExecutor(20) as pool:
        whole = list(pool.map(lambda prompt: server.generate(prompt, **asked)[1], PROMPTS))
        streamed = list(pool.map(lambda prompt: server.stream(prompt, **asked), PROMPTS))
    for prompt, answer, events in zip(PROMPTS, whole, streamed):
        expected, logprobs = smollm2.continued(smollm2.ids(prompt))
        tokens = answer["details"]["tokens"]
        assert [token["id"] for token in tokens][: len(expected)] == expected[: len(tokens)]
        for token, row in zip(tokens, logprobs):
            assert token["logprob"] == pytest.approx(row[token["id"]], abs=1e-3)
        assert events[-1]["generated_text"] == answer["generated_text"]
        assert [event["token"]["id"] for event in events] == [token["id"] for token in tokens]


def test_a_chat_and_its_next_turn_are_what_transformers_makes_of_the_template(server, smollm2):
    messages = list(QUESTION)
    for question in (None, "And of Italy?"):
        if question:
            messages.append({"role": "user", "content": question})
        asked = {"messages": messages, "temperature": 0, "max_tokens": TOKENS}
        answer = server.post("/v1/chat/completions", asked)
        prompt = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        expected, _ = smollm2.continued(tuple(prompt))
        text = smollm2.tokenizer.decode(expected, skip_special_tokens=False).split("<|im_end|>")[0]
        said = answer["choices"][0]["message"]["content"]
        assert (said and said.startswith(text)) or text.startswith(said)
        messages.append({"role": "assistant", "content": said})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


def test_json_and_a_tool_that_is_asked_for_fit_their_schemas(server):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 100}
    said = server.post("/v1/chat/completions", {**asked, "response_format": schema})["choices"][0]["message"]["content"]
    assert set(json.loads(said)) == {"city", "country"}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
    choice = server.post(
        "/v1/chat/completions", {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    )["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"city", "country"}
