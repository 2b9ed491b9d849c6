"""Every family on the real library: transformers' logits and texts, whatever else is in the batch."""

import random
import re
import tempfile
from copy import copy, deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from documents import SMALLER, smallest
from family_models import LLAMA3, MODELS, PROMPTS, VOCABULARY, YARN, Made, logits_of
from loop import Driven
from published.configs import CONFIGS
from test_server import WINDOW, as_float32, assert_like, cores, refuse_to_compile, serve  # noqa: F401
from transformers_neuronx import compiler
from transformers_neuronx.layers import attention

from config import Config
from manifest import Manifest
from models.base import Chunk
from models.errors import ModelError
from models.neuron import compile as verb
from models.neuron.build import BuildPlan
from models.neuron.model import NeuronModel
from protocol import Generate
from run import ConfigError


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    kept = {}

    def make(name):
        if name not in kept:
            kept[name] = Made.named(name, tmp_path_factory.mktemp("checkpoint"))
        return kept[name]

    return make


LARGEST = 1e-4  # error of a logit, as a share of their range


def served_logits(model):
    """After prompts in chunks or whole, and after one more token: float32 [6, vocabulary]."""
    found = []
    for slot, prompt in enumerate(PROMPTS):
        size = model.prefill_chunk or len(prompt)
        for begin in range(0, len(prompt), size):
            output = model.forward([Chunk(slot, prompt[begin : begin + size], begin)])
        found.append(as_float32(output)[0].copy())
        found.append(as_float32(model.forward([Chunk(slot, [9], len(prompt))]))[0].copy())
    return torch.from_numpy(np.stack(found))


def errors(found, expected):
    return (found - expected).abs() / (expected.amax(-1) - expected.amin(-1))[:, None]


def mean_error(found, expected):
    return float(errors(found, expected).mean())


@pytest.mark.parametrize(("tp_degree", "prefill_chunk"), [(1, 8), (2, 0), (8, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_transformers_logits(made, tmp_path, name, tp_degree, prefill_chunk):
    reference = made(name)
    settings = {"max_batch_size": 4, "tp_degree": tp_degree, "prefill_chunk": prefill_chunk}
    if name in ("olmo2", "olmo3", "olmoe") and tp_degree == 8:
        with pytest.raises(ConfigError, match=r"tp_degree 8 does not divide 4 attention and [24] key-value heads"):
            serve(reference, tmp_path, **settings)
        return
    model = serve(reference, tmp_path, **settings)
    assert model.prefill_chunk == (prefill_chunk or None)
    assert errors(served_logits(model), logits_of(reference)).max() < LARGEST


@pytest.mark.parametrize(
    ("tp_degree", "prefill_chunk", "sampling"),
    [(1, 0, "device"), (2, 8, "host"), (2, 8, "hybrid")],
    ids=["device", "host", "hybrid"],
)
@pytest.mark.parametrize("name", MODELS)
def test_random_arrivals_get_transformers_text(made, tmp_path, name, tp_degree, prefill_chunk, sampling):
    reference = made(name)
    settings = {"tp_degree": tp_degree, "prefill_chunk": prefill_chunk, "sampling": sampling}
    driven = Driven(served=serve(reference, tmp_path, max_batch_size=4, position_buckets=(16,), **settings))
    chance, requests = random.Random(5), []
    for n, length in enumerate((5, 1, 37, 8, 21, 9, 46, 16)):
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(length)]
        wants = {"ignore_eos": True, "logprobs": n % 3 == 0}  # the host alone has them
        requests.append(Generate(n, prompt, chance.randrange(1, WINDOW - length + 1), **wants))
        driven.arrive(requests[-1])
        for _ in range(chance.randrange(4)):
            if not driven.is_idle or driven.wire.arrivals:
                driven.step()
    driven.run()
    for request in requests:
        assert len(driven.tokens[request.id]) == request.max_new_tokens
        assert_like(reference, request.prompt, [*request.prompt, *driven.tokens[request.id]])


# A model for each type, with which every field of its config.json is tried.
TYPES = ["llama, head_dim", "mistral, window", "qwen2, windows", "qwen3", "phi3", "granite", "smollm3"]
TYPES += ["gemma", "gemma2", "gemma3", "olmo2", "olmo3", "qwen3_moe", "olmoe", "gpt_oss", "mixtral, window"]
ROPES = [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}, YARN]
ROPES += [LLAMA3]
OTHERS = {
    bool: lambda value: [not value],
    int: lambda value: [value + 1, 2 * value],
    float: lambda value: [1.7 * value, 10 * value],
    list: lambda value: [value[::-1], [value[0]] * len(value)] if value else [[0]],
    str: lambda value: ["gelu", "relu", "silu"],
}


def changed_fields(config):
    """Every field of a config with every other value of its kind."""
    pairs = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    longrope = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.5] * pairs, "long_factor": [4.0] * pairs}
    yield from (("rope_scaling", other) for other in [*ROPES, longrope])
    for field, value in config.to_dict().items():
        if field not in ("rope_scaling", "model_type", "architectures", "dtype", "torch_dtype", "initializer_range"):
            yield from ((field, other) for other in OTHERS.get(type(value), lambda value: [True])(value))


@pytest.mark.parametrize("name", TYPES)
def test_every_value_of_every_field_is_computed_as_transformers_does_or_refused(made, tmp_path, name):
    reference, wrong, tried, refused = made(name), [], set(), set()
    usual = logits_of(reference)
    for n, (field, value) in enumerate(changed_fields(reference.model.config)):
        try:
            other = Made.named(name, tmp_path / f"{n}", **{field: value})
            expected = logits_of(other)
        except Exception:  # transformers refuses it, in many ways
            continue
        if expected.shape == usual.shape and torch.equal(expected, usual):
            continue  # it changes nothing
        tried.add(field)
        try:
            found = served_logits(serve(other, tmp_path, max_batch_size=4, sampling="host"))
        except (ConfigError, ModelError) as error:
            refused.add(field)
            assert len(str(error).splitlines()) == 1
            continue
        if not errors(found, expected).max() < LARGEST:
            wrong.append((field, value))
    assert wrong == []
    config = reference.model.config
    has_groups = config.num_key_value_heads < config.num_attention_heads  # else no greater number of them divides the heads
    assert {"rms_norm_eps", "rope_theta", *["num_key_value_heads"] * has_groups} <= tried - refused
    print(name, "computed:", *sorted(tried - refused), "refused:", *sorted(refused))


@pytest.mark.parametrize("name", ["llama, biases", "qwen2", "qwen3", "granite", "gemma3"])
def test_bfloat16_is_no_further_from_float32_than_transformers_own(made, tmp_path, name):
    reference = made(name)
    rounded = copy(reference)
    rounded.model = deepcopy(reference.model).to(torch.bfloat16)
    exact, theirs = logits_of(reference), logits_of(rounded)
    ours = served_logits(serve(reference, tmp_path, max_batch_size=4, prefill_chunk=8, dtype="bfloat16"))
    assert mean_error(ours, exact) < 1.1 * mean_error(theirs, exact)


def rounded_to_int8(reference):
    """With matrices as int8 keeps them: a scale for each row; those of `down` have one over all experts."""
    rounded = copy(reference)
    rounded.model = deepcopy(reference.model)
    largest, matrices = {}, {}
    for name, module in rounded.model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", ".gate")):
            key = re.sub(r"experts\.\d+\.(down_proj|w2)$", r"experts.\1", name)
            largest[key] = torch.maximum(module.weight.abs().amax(1, keepdim=True), largest.get(key, torch.zeros(1)))
            matrices.setdefault(key, []).append(module.weight)
        if name.endswith("mlp.experts") and hasattr(module, "gate_up_proj"):  # gpt-oss', [experts, inputs, outputs]
            for parameter, dims in ((module.gate_up_proj, 1), (module.down_proj, (0, 1))):
                key = f"{name}, {dims}"
                largest[key] = parameter.abs().amax(dims, keepdim=True)
                matrices[key] = [parameter]
    with torch.no_grad():
        for key, weights in matrices.items():
            scale = largest[key] / 127
            for weight in weights:
                weight.copy_((weight / scale).round() * scale)
    return rounded


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "gemma2", "qwen3_moe", "olmoe", "gpt_oss", "mixtral"])
def test_a_family_is_compiled_and_served_from_the_artifact_in_int8(made, tmp_path, monkeypatch, name):
    reference, output = made(name), tmp_path / "compiled"
    words = ["--model-id", reference.folder, "--output", output, "--tp-degree", "2", "--dtype", "float32"]
    words += ["--max-total-tokens", WINDOW, "--max-batch-size", "4", "--prefill-chunk", "8", "--quantize", "int8"]
    assert verb.main(list(map(str, words))) == 0
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron"), output, Manifest.read(output))
    assert build.compiled_config.model_class == f"{build.family.model_type}, revision 2"
    model = NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path)))
    assert model.prefill_chunk == 8
    assert errors(served_logits(model), logits_of(rounded_to_int8(reference))).max() < LARGEST


def small(name):
    """The config.json of a published model with everything as it is there but its sizes: heads stay as many."""
    c = dict(CONFIGS[name])
    layers = c.get("sliding_window_pattern", 3) + 1
    heads = c["num_attention_heads"]
    sizes = {"num_hidden_layers": layers, "hidden_size": 8 * heads, "intermediate_size": 96, "vocab_size": VOCABULARY}
    if "moe_intermediate_size" in c:
        sizes["moe_intermediate_size"] = 24
    if "head_dim" in c:
        sizes |= {"head_dim": 16, "hidden_size": 8 * heads if c["head_dim"] * heads != c["hidden_size"] else 16 * heads}
    if (c.get("sliding_window") or 0) < c["max_position_embeddings"] and c.get("sliding_window"):
        sizes["sliding_window"] = 16
    if "layer_types" in c:
        sizes["layer_types"] = c["layer_types"][:layers]
    if "no_rope_layers" in c:
        sizes["no_rope_layers"] = c["no_rope_layers"][:layers]
    if "short_factor" in (c.get("rope_scaling") or {}):
        pairs = int(8 * c.get("partial_rotary_factor", 1.0)) // 2
        factors = {"short_factor": [1.0 + n / 10 for n in range(pairs)], "long_factor": [4.0] * pairs}
        sizes["rope_scaling"] = c["rope_scaling"] | factors
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "initializer_range": 0.2, "torch_dtype": "float32"}
    if c["model_type"] == "gpt_oss":  # with wider weights transformers' logits in float32 and float64 differ by more
        ids["initializer_range"] = 0.1
    return c | sizes | ids


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_compiled_and_served_from_the_artifact(tmp_path, monkeypatch, name):
    """With the tp_degree that docs/neuron-families.md gives for it."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-31")
    config = small(name)
    _instance, sizing = smallest(name) or smallest(name, **SMALLER)
    known = transformers.AutoConfig.for_model(**config | ({"model_type": "llama"} if "internlm2" in name else {}))
    reference = Made(known, tmp_path / "model", is_internlm2="internlm2" in name)
    output = tmp_path / "compiled"
    words = ["--model-id", reference.folder, "--output", output, "--tp-degree", sizing.tp_degree, "--dtype", "float32"]
    words += ["--max-total-tokens", WINDOW, "--max-batch-size", 4]
    assert verb.main([*map(str, words), "--prefill-chunk", "8"]) == 0
    monkeypatch.setattr(compiler, "compile_hlo_module", refuse_to_compile)
    build = BuildPlan.decide(Config(model_id=str(output), device="neuron"), output, Manifest.read(output))
    model = NeuronModel(build, Path(tempfile.mkdtemp(dir=tmp_path)))
    assert errors(served_logits(model), logits_of(reference)).max() < LARGEST


@pytest.mark.parametrize(
    ("name", "uses_kernel"), [("mistral, window", False), ("gemma2", False), ("gpt_oss", False), ("qwen3", True)]
)
def test_prompts_of_4096_tokens_run_in_the_librarys_kernel_only_where_that_knows_the_layers(
    tmp_path, monkeypatch, name, uses_kernel
):
    reference = Made.named(name, tmp_path / "model", max_position_embeddings=8192)
    kernels, nki_call = [], attention.nki_call
    monkeypatch.setattr(attention, "nki_call", lambda kernel, *a, **b: kernels.append(kernel) or nki_call(kernel, *a, **b))
    limits = {"max_total_tokens": 4096, "max_input_tokens": 4095, "prefill_buckets": (128,), "position_buckets": (4096,)}
    model = serve(reference, tmp_path, max_batch_size=1, prefill_chunk=0, **limits)
    prompt = [step * step % 255 + 3 for step in range(4095)]
    logits = as_float32(model.forward([Chunk(0, prompt, 0)]))
    assert bool(kernels) == uses_kernel
    assert errors(torch.from_numpy(logits.copy()), reference.logits(prompt)[None]).max() < LARGEST
