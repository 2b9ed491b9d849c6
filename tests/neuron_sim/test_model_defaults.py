"""The whole server on the simulator, with a model whose generation_config.json is a published one: what it says reaches the
requests of every API, wherever tokens are sampled."""

import json
import os
import re
import shutil

import pytest
import torch
import transformers
from processes import Server
from published.configs import GENERATION_CONFIGS, MESSAGES, REQUESTS, sampling_defaults

from config import DEMO_MODEL

pytestmark = pytest.mark.timeout(900)

QUESTION = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 12}
LIMITS = {"MAX_BATCH_SIZE": "2", "TP_DEGREE": "1", "MAX_TOTAL_TOKENS": "128", "PREFILL_CHUNK": "0", "DTYPE": "float32"}


@pytest.fixture
def serve(tmp_path):
    """The demonstration model with another generation_config.json."""

    def start(generation_config, sampling):
        folder = shutil.copytree(DEMO_MODEL, tmp_path / "demo")
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
        environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        environment |= {"NEURON_RT_VISIBLE_CORES": "0-1", "NEURON_COMPILE_CACHE_URL": str(tmp_path / "compiled")}
        arguments = ("--device", "neuron", "--model-id", str(folder), "--sampling", sampling)
        return Server(*arguments, **environment, **LIMITS)

    return start


def details_of(server, **parameters):
    return server.post("/generate", {"inputs": "Hello", "parameters": {"details": True, **parameters}})["details"]


def continued(prompt, count):
    """What transformers continues the ids of a prompt with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, torch_dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "hybrid"),
        ("Qwen/Qwen3-8B", "hybrid"),
        ("Qwen/Qwen2.5-7B-Instruct", "host"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "device"),
    ],
)
def test_every_api_answers_with_the_defaults_of_a_published_model(serve, name, sampling):
    published = GENERATION_CONFIGS[name]
    with serve(published, sampling) as server:
        server.wait_ready()
        for path, body in REQUESTS.items():
            for more in ({}, {"stream": True}, {} if path == "/generate" else {"temperature": 0}):
                response = server.request("POST", path, body | more)
                assert response.status == 200 and not re.search(rb'"error": ?["{]', response.read())
        info = json.loads(server.get("/info")[1])
        assert (info["model_device_type"], info["sampling"], info["sampling_defaults"]) == (
            *("neuron", sampling),
            sampling_defaults(published),
        )
        if sampling != "device":  # which knows no seeds
            seeded = MESSAGES | {"seed": 5}
            named, by_default, others = (
                server.post("/v1/chat/completions", seeded | more)["choices"][0]["message"]["content"]
                for more in (sampling_defaults(published), {}, {"temperature": 5.0, "top_p": 1.0, "top_k": 0})
            )
            assert by_default == named != others


def test_every_end_of_sequence_token_of_the_list_ends_a_text_that_the_device_samples(serve):
    prompt = transformers.PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL / "tokenizer.json"))("Hello")["input_ids"]
    expected = continued(prompt, 6)
    end = next(n for n, token in enumerate(expected) if token not in expected[:n] and n > 1)
    published = GENERATION_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
    with serve(published | {"eos_token_id": [128001, expected[end], 128009]}, "hybrid") as server:
        server.wait_ready()
        details = details_of(server, max_new_tokens=6)
        assert [token["id"] for token in details["tokens"]] == expected[: end + 1]
        assert details["finish_reason"] == "eos_token"


def test_defaults_that_the_device_cannot_sample_with_are_named_once_and_the_others_reach_it(serve):
    published = GENERATION_CONFIGS["Qwen/Qwen2.5-7B-Instruct"] | {"top_k": 1, "typical_p": 0.9}
    with serve(published, "device") as server:
        server.wait_ready()
        assert server.log.count("repetition_penalty") == 1
        line = "generation_config.json has typical_p 0.9, repetition_penalty 1.05, which needs --sampling hybrid"
        assert line in server.log
        for path, body in REQUESTS.items():
            assert server.post(path, body)
        greedy, *sampled = (
            server.post("/v1/chat/completions", QUESTION | more)["choices"][0]["message"]["content"]
            for more in ({"temperature": 0}, {}, {"temperature": 9.0}, {})
        )
        assert sampled == [greedy] * 3
