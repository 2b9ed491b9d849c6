"""A KV cache in FP8 on the real library: what transformers computes with an attention that rounds keys and values so."""

import json
import os
import random
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import VOCABULARY, Made
from published.weights import WHY, is_installed
from test_families import rounded_to_int8
from test_server import WINDOW, as_float32, cores, refuse_to_compile, serve  # noqa: F401
from test_speculation import texts_of
from test_transformers5 import NO_PYTHON, PYTHON
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers_neuronx import compiler

from config import Config
from manifest import Manifest
from models.base import Chunk
from models.neuron import compile as verb
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel
from protocol import Generate
from run import HERE

SETTINGS = {"max_batch_size": 4, "prefill_chunk": 8, "speculate": 3, "position_buckets": (32,), "prefill_buckets": (16,)}
SETTINGS |= {"kv_cache_dtype": "fp8_e4m3fn"}
TOKENS = [random.Random(1).randrange(3, VOCABULARY) for _ in range(42)]


def rounded(tensor):
    return tensor.clamp(-240, 240).to(torch.float8_e4m3fn).float()


def attend(module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_options):
    """The eager attention with rounded keys, their rotated biases left out, and values: [slots, heads, tokens, head_dim]."""
    group = query.shape[1] // key.shape[1]
    tokens, size = key.shape[2:]
    bias = 0.0
    if module.k_proj.bias is not None and not hasattr(module, "k_norm"):
        half = size // 2
        each = module.k_proj.bias.view(-1, 1, size).expand(-1, tokens, -1)
        kind = (module.config.rope_scaling or {}).get("rope_type", "default")
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu")
        angles = torch.arange(tokens)[:, None] * frequencies
        sin, cos = (torch.cat([values, values], 1) * factor for values in (angles.sin(), angles.cos()))
        bias = each * cos + torch.cat([-each[..., half:], each[..., :half]], -1) * sin
    key, value = (t.repeat_interleave(group, 1) for t in (rounded(key - bias) + bias, rounded(value)))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    window = sliding_window or getattr(module, "sliding_window", None) or tokens
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if s_aux is not None:  # gpt-oss' sinks
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("rounded", attend)


@contextmanager
def rounding(reference):
    """The reference with that attention."""
    own = reference.model.config._attn_implementation
    reference.model.config._attn_implementation = "rounded"
    try:
        yield reference
    finally:
        reference.model.config._attn_implementation = own


def all_logits(reference, tokens):
    with torch.inference_mode():
        return reference.model(torch.tensor([tokens])).logits[0].float().numpy()


def in_chunks(model, tokens, slot=1):
    """Logits after each token: float32 [tokens, vocabulary]."""
    size = model.prefill_chunk
    rows = [model.forward([Chunk(slot, tokens[n : n + size], n, True)]) for n in range(0, len(tokens), size)]
    return np.concatenate([as_float32(row) for row in rows])


def in_steps(model, tokens, first=14, slot=1):
    """After a whole prompt of `first` tokens, and after each further one, decoded beside another slot."""
    rows = [model.forward([Chunk(slot, tokens[:first], 0)])]
    model.forward([Chunk(0, tokens[:5], 0)])
    for n in range(first, len(tokens)):
        rows.append(model.forward([Chunk(0, [tokens[n - first]], n - first + 5), Chunk(slot, [tokens[n]], n)])[1:])
    return np.concatenate([as_float32(row) for row in rows])


def verified(model, tokens, first=14, slot=1):
    """The same with draft tokens that are right, of two slots."""
    rows = [model.forward([Chunk(slot, tokens[:first], 0)])]
    model.forward([Chunk(0, tokens[:first], 0)])
    for n in range(first, len(tokens), model.verify_length):
        draft = tokens[n : n + model.verify_length]
        both = model.forward([Chunk(0, draft, n, verify=True), Chunk(slot, draft, n, verify=True)])
        rows.append(both[len(draft) :])
    return np.concatenate([as_float32(row) for row in rows])


def divergence(found, expected):
    """Mean KL divergence, in nats a token."""
    p, q = (torch.tensor(rows).double().log_softmax(-1) for rows in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_same(found, expected):
    assert divergence(found, expected) < 1e-5
    assert (found.argmax(1) == expected.argmax(1)).all()


def made(name, folder, key_bias=0.0):
    reference = Made.named(name, folder)
    if key_bias:
        with torch.no_grad():
            for layer in reference.model.model.layers:
                bias = layer.self_attn.k_proj.bias.view(2, -1)
                bias[:, bias.shape[1] // 2 - 1] += key_bias
                bias[:, -1] -= key_bias
        reference.model.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("tp_degree", [1, 4])
@pytest.mark.parametrize(
    ("name", "key_bias"),
    [
        ("llama", 0.0),
        ("llama, biases", 0.0),
        ("qwen2", 80.0),
        ("qwen2", 300.0),
        ("qwen3", 0.0),
        ("gemma3", 0.0),
        ("qwen3_moe, 128 experts", 0.0),
        ("gpt_oss", 80.0),
    ],
)
def test_chunks_steps_and_draft_tokens_read_what_the_reference_rounds(tmp_path, name, key_bias, tp_degree):
    reference = made(name, tmp_path / "model", key_bias)
    exact = all_logits(reference, TOKENS)
    model = serve(reference, tmp_path, max_total_tokens=64, max_input_tokens=63, tp_degree=tp_degree, **SETTINGS)
    assert (model.kv_cache_dtype, model.prefill_chunk, model.verify_length) == ("fp8_e4m3fn", 8, 4)
    with rounding(reference):
        expected = all_logits(reference, TOKENS)
    assert divergence(expected, exact) > 1e-4  # the rounding can be seen
    assert_same(in_chunks(model, TOKENS), expected)
    assert_same(in_steps(model, TOKENS), expected[13:])
    assert_same(verified(model, TOKENS), expected[13:])


def test_values_beyond_the_range_of_the_device_are_clamped(tmp_path):
    """The simulator's e4m3fn would go on to 448."""
    reference = made("llama", tmp_path / "model")
    with torch.no_grad():
        for layer in reference.model.model.layers:
            layer.self_attn.v_proj.weight *= 200
            layer.self_attn.o_proj.weight /= 200
    reference.model.save_pretrained(reference.folder)
    model = serve(reference, tmp_path, **SETTINGS)
    with rounding(reference):
        assert_same(in_chunks(model, TOKENS), all_logits(reference, TOKENS))


def test_a_prompt_bucket_as_long_as_the_cache_of_the_only_slot_is_read_like_others(tmp_path):
    reference = made("qwen2", tmp_path / "model", 300.0)
    limits = {"max_total_tokens": 48, "max_input_tokens": 47, "max_batch_size": 1, "prefill_buckets": (48,)}
    model = serve(reference, tmp_path, **SETTINGS | limits | {"position_buckets": (48,), "prefill_chunk": 0})
    with rounding(reference):
        expected = all_logits(reference, TOKENS)
    rows = [model.forward([Chunk(0, TOKENS[:14], 0)])]
    rows += [model.forward([Chunk(0, [TOKENS[n]], n)]) for n in range(14, len(TOKENS))]
    assert_same(np.concatenate([as_float32(row) for row in rows]), expected[13:])


@pytest.mark.parametrize(
    ("name", "key_bias", "sampling"),
    [
        *[("qwen2", 80.0, sampling) for sampling in ("host", "hybrid", "device")],
        *[(name, 0.0, "hybrid") for name in ("llama", "gemma3", "qwen3_moe, 128 experts", "gpt_oss")],
        ("mixtral, window", 0.0, "device"),
    ],
)
def test_random_arrivals_get_the_text_of_the_reference(tmp_path, name, key_bias, sampling):
    """With draft tokens, chunks and prefixes."""
    reference = made(name, tmp_path / "model", key_bias)
    model = serve(reference, tmp_path, tp_degree=2, sampling=sampling, **SETTINGS)
    chance = random.Random(3)
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 1, 37, 8, 21, 9, 46, 16)]
    prompts.append([*prompts[2][:20], 5, 6, 7])
    requests = [Generate(n, prompt, WINDOW - len(prompt), ignore_eos=True) for n, prompt in enumerate(prompts)]
    with rounding(reference):
        known = {n: reference.greedy(prompt, WINDOW - len(prompt)) for n, prompt in enumerate(prompts)}
    texts, accepted = texts_of(model, requests, known)
    assert texts == known and accepted > 10


def test_it_is_compiled_with_the_compilers_flag_and_served_from_the_artifact(tmp_path, monkeypatch):
    reference, output = made("qwen3_moe", tmp_path / "model"), tmp_path / "compiled"
    flags, real = set(), compiler.compile_hlo_module
    monkeypatch.setattr(
        compiler, "compile_hlo_module", lambda *a, **o: flags.add(os.environ["NEURON_CC_FLAGS"]) or real(*a, **o)
    )
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    words = ["--model-id", reference.folder, "--output", output, "--tp-degree", 2, "--dtype", "float32", "--speculate", 3]
    words += ["--max-total-tokens", WINDOW, "--max-batch-size", 4, "--prefill-chunk", 8, "--quantize", "int8"]
    assert verb.main([*map(str, words), "--kv-cache-dtype", "fp8"]) == 0
    assert os.environ["NEURON_CC_FLAGS"] == "-O1"
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron"), output, Manifest.read(output))
    model = NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path)))
    assert (model.kv_cache_dtype, model.quantize, model.prefill_chunk, model.verify_length) == ("fp8_e4m3fn", "int8", 8, 4)
    with rounding(rounded_to_int8(reference)) as exact:
        assert_same(in_chunks(model, TOKENS), all_logits(exact, TOKENS))


@NO_PYTHON
@pytest.mark.timeout(900)
def test_published_weights_lose_less_than_a_hundredth_of_a_nat(tmp_path):
    """SmolLM2-135M: on real text the cache costs a KL divergence of 0.009 a token."""
    if not is_installed("smollm2"):
        pytest.skip(WHY)
    command = [PYTHON, "-m", "published.weights", "smollm2"]
    printed = subprocess.check_output(
        command, text=True, env=os.environ | {"PYTHONPATH": f"{HERE}/tests:{HERE}/tests/helpers:{HERE}"}
    )
    made = json.loads(printed.splitlines()[-1])
    tokens = [token for prompt in made["prompts"] for token in prompt][:160]
    limits = {"max_total_tokens": 192, "max_input_tokens": 191, "max_batch_size": 2, "position_buckets": (192,)}
    rows = {}
    for kind in ("auto", "fp8_e4m3fn"):
        settings = {"prefill_chunk": 32, "prefill_buckets": (32,), "sampling": "host", "kv_cache_dtype": kind}
        model = serve(None, tmp_path, made["folder"], tp_degree=1, **limits, **settings)
        assert model.prefill_chunk == 32
        rows[kind] = in_chunks(model, tokens)
    assert 1e-3 < divergence(rows["fp8_e4m3fn"], rows["auto"]) < 0.010
