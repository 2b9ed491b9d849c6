"""A GGUF file that OpenVINO computes as it is gives the logits of the checkpoint that it was made of; one that it would compute
wrongly is not computed as it is; and rows do not depend on each other, to the last bit."""

import itertools
import shutil
import subprocess
import sys

import gguf
import numpy as np
import openvino as ov
import pytest
import torch
import transformers
from ggufs import SCALES, write_gguf, write_keys
from openvino import opset13 as ops
from tiny_models import run, save_checkpoint, write_adapter

import models
from config import Config
from models.accuracy import kl_divergence
from models.base import Chunk
from models.cache import read_entry, write_entry
from models.checkpoint.gguf_folder import write_folder
from models.convert import convert
from models.gguf.container import TYPES, read_gguf
from models.openvino.gguf_files import why_not
from models.openvino.graph import LINEAR_NAME, read_graph
from models.openvino.model import OpenVinoModel, load_entry
from run import HERE

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

TOKENS = 300
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
NEAR = {"rope_type": "default", "rope_theta": 10000.0}
FAR = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
BETAS = {"beta_fast": 4.0, "beta_slow": 0.25}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SHORT, LONG = [1.0, 1.3, 1.6, 1.9, 2.2, 2.5], [1.0, 1.7, 2.4, 3.1, 3.8, 4.5]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 1024}


def rope(theta=10000.0, **more):
    return {"rope_parameters": NEAR | {"rope_theta": theta} | more}


def llama(**changes):
    return transformers.LlamaConfig(**SMALL | rope() | changes)


def phi3(**changes):
    return transformers.Phi3Config(**SMALL | rope() | {"sliding_window": None} | changes)


def gemma3(full, near=NEAR, layers=7):
    """Every sixth layer attends to all tokens, the others to 64."""
    return transformers.Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": layers, "tie_word_embeddings": True},
        head_dim=32,
        query_pre_attn_scalar=32 if layers == 7 else 16,
        sliding_window=64,
        rope_parameters={"full_attention": full, "sliding_attention": near},
    )


GEMMA3 = {"gemma3.attention.sliding_window": 64, "gemma3.rope.freq_base": 1e6}


def mistral3(head_dim=32, **kind):
    """Without `kind` plain; transformers needs the original length and the growth of queries in any case."""
    plain = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 128}
    return transformers.Ministral3Config(**SMALL | rope(1e6, **plain | kind), head_dim=head_dim)


def scaling(architecture, **keys):
    return {f"{architecture}.rope.scaling.{name}": value for name, value in keys.items()}


def divisors():
    plain, scaled = (
        transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(llama(**rope(500000.0, **kind))).inv_freq
        for kind in ({}, LLAMA3)
    )
    return {"rope_freqs.weight": (plain / scaled).numpy()}


LONG_KEYS = {"attn_factor": float(np.sqrt(1 + np.log(2) / np.log(1024))), "original_context_length": 1024}
# What is proved: the configuration, the architecture, the keys and the tensors beside the usual ones.
FAMILIES = {
    "llama": (llama(), "llama", {}, {}),
    "heads of another size": (llama(head_dim=24), "llama", {"llama.rope.dimension_count": 24}, {}),
    "linear": (llama(**rope(**LINEAR)), "llama", scaling("llama", type="linear", factor=4.0), {}),
    "linear is the default": (llama(**rope(**LINEAR)), "llama", scaling("llama", factor=4.0), {}),
    "none": (llama(), "llama", scaling("llama", type="none", factor=4.0), {}),
    "llama yarn": (llama(**rope(**YARN)), "llama", scaling("llama", **YARN_KEYS, attn_factor=1.0), {}),
    "llama 3.1": (llama(**rope(500000.0, **LLAMA3)), "llama", {"llama.rope.freq_base": 500000.0}, divisors),
    "qwen2": (transformers.Qwen2Config(**SMALL | rope(1e6)), "qwen2", {}, {}),
    "yarn with all keys": (
        transformers.Qwen2Config(**SMALL | rope(1e6, **YARN, **BETAS)),
        "qwen2",
        scaling("qwen2", **YARN_KEYS, finetuned=True, yarn_beta_fast=4.0, yarn_beta_slow=0.25, yarn_attn_factor=1.0),
        {},
    ),
    "qwen3": (transformers.Qwen3Config(**SMALL | rope(1e6), head_dim=32), "qwen3", {"qwen3.expert_count": 0}, {}),
    "qwen3 yarn": (
        transformers.Qwen3Config(**SMALL | rope(1e6, **YARN), head_dim=32),
        "qwen3",
        scaling("qwen3", **YARN_KEYS),
        {},
    ),
    "phi3": (phi3(), "phi3", {"phi3.attention.sliding_window": 0}, {}),
    "phi3 window": (phi3(sliding_window=64), "phi3", {"phi3.attention.sliding_window": 64}, {}),
    "phi3 factors": (
        phi3(**rope(**LONGROPE, partial_rotary_factor=0.75), original_max_position_embeddings=1024),
        "phi3",
        {"phi3.rope.dimension_count": 12} | scaling("phi3", **LONG_KEYS),
        {"rope_factors_short.weight": np.array(SHORT), "rope_factors_long.weight": np.array(LONG)},
    ),
    "mistral3": (mistral3(), "mistral3", {"mistral3.attention.temperature_scale": 0.0}, {}),
    "mistral3 yarn": (
        mistral3(**YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        "mistral3",
        {"mistral3.attention.temperature_scale": 0.1} | scaling("mistral3", **YARN_KEYS, yarn_log_multiplier=1.0),
        {},
    ),
    "mistral3 yarn that is not cancelled": (mistral3(**YARN), "mistral3", scaling("mistral3", **YARN_KEYS), {}),
    "gemma3": (gemma3(FAR), "gemma3", GEMMA3, {}),
    "gemma3 factor": (
        gemma3(FAR | {"rope_type": "linear", "factor": 8.0}, NEAR | {"rope_theta": 20000.0}),
        "gemma3",
        GEMMA3 | {"gemma3.rope.freq_base_swa": 20000.0} | scaling("gemma3", type="linear", factor=8.0),
        {},
    ),
    "gemma3 27b": (gemma3(FAR, layers=62), "gemma3", GEMMA3, {}),
}
EXPERTS = {"expert_count": 8, "expert_used_count": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 256}
# Mixtures of experts: the configuration and the keys.
MIXTURES = {
    "olmoe": (
        transformers.OlmoeConfig(**SMALL | WIDE | {"num_key_value_heads": 4}, num_experts=8, num_experts_per_tok=2),
        EXPERTS,
    ),
    "gpt-oss": (
        transformers.GptOssConfig(
            **SMALL | WIDE | rope(150000.0, **YARN | {"factor": 32.0, "truncate": False}),
            head_dim=32,
            sliding_window=64,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        {
            **EXPERTS,
            "attention.sliding_window": 64,
            "expert_feed_forward_length": 256,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
}


def converted(file, tmp_path, **settings):
    """The folder and the entry of a file."""
    assert why_not(read_gguf(file)) is None
    folder, entry = tmp_path / f"{file.stem}-folder", tmp_path / f"{file.stem}-entry"
    for each in (folder, entry):
        each.mkdir()
    write_folder(file, folder)
    convert(Config(model_id=str(file), **{"dtype": "float32"} | settings), folder, entry)
    return folder, entry


def load(entry, tokens=TOKENS, **settings):
    settings = {"threads": 1, "max_batch_size": 6, "kv_cache_dtype": "float32"} | settings
    return load_entry(Config(max_total_tokens=tokens, max_input_tokens=tokens - 1, **settings), entry)


def native(file, tmp_path, **settings):
    return load(converted(file, tmp_path)[1], **settings)


IDS = np.random.default_rng(1).integers(0, 97, TOKENS).tolist()


def logits(model):
    """Of a prompt in two chunks, and decode steps."""
    bounds = [0, 200, 270, *range(271, TOKENS + 1)]
    chunks = [Chunk(0, IDS[begin:end], begin, all_logits=True) for begin, end in itertools.pairwise(bounds)]
    return np.concatenate([model.forward([chunk]) for chunk in chunks])


def reference(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def assert_close(found, expected, most=1e-3):
    assert np.abs(found - expected).max() < most * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    config, architecture, keys, extra = FAMILIES[name]
    checkpoint = save_checkpoint(tmp_path / "original", config)
    extra = extra() if callable(extra) else extra
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture, keys, extra)
    assert_close(logits(native(file, tmp_path)), reference(checkpoint))


def mixture(tmp_path, architecture, kind="F32", **options):
    """A checkpoint and its file, whose experts are in the type `kind`. No bias and no sink is 0."""
    config, keys = MIXTURES[architecture]
    checkpoint = save_checkpoint(tmp_path / "original", config)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            weight.data.normal_(0, 0.5)
    model.save_pretrained(checkpoint)
    options["keys"] = {f"{architecture}.{name}": value for name, value in (keys | options.get("keys", {})).items()}
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture, kinds={3: kind}, **options)
    for name, weight in model.named_parameters():
        if weight.ndim == 3 and kind != "F32":
            weight.data = torch.from_numpy(experts_of(file, name, architecture))
    model.save_pretrained(checkpoint)
    return checkpoint, file


def experts_of(file, name, architecture):
    """What the file holds of a parameter of transformers."""
    parts = []
    tensors = read_gguf(file).tensors
    for part in ["down"] if "down" in name else ["gate", "up"]:
        tensor = tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"]
        stored = np.fromfile(file, np.uint8, tensor.size, offset=tensor.offset).reshape(8, 256, -1)
        parts.append(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[TYPES[tensor.type].name]))
    if architecture == "gpt-oss":  # a gate's row is beside its own; and inputs are rows
        return np.stack(parts, 2).reshape(8, -1, 256).swapaxes(1, 2).copy()
    return np.concatenate(parts, 1)


KINDS_OF_EXPERTS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_K", "Q4_K", "Q6_K", "MXFP4")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*itertools.product(["olmoe"], KINDS_OF_EXPERTS), *itertools.product(["gpt-oss"], ["F32", "Q8_0", "Q4_K", "MXFP4"])],
)
def test_experts_of_each_type_give_the_logits_of_transformers(architecture, kind, tmp_path):
    checkpoint, file = mixture(tmp_path, architecture, kind)
    _folder, entry = converted(file, tmp_path)
    found, expected = logits(load(entry)), reference(checkpoint)
    assert_close(found, expected, 0.01)
    assert kl_divergence(found, expected).mean() < 1e-4
    if kind not in ("F32", "F16"):
        assert ov.Type.f32 not in types_of_experts(entry)


def types_of_experts(entry):
    """The types of their weights in the compiled model of an entry."""
    exactly = {"INFERENCE_PRECISION_HINT": "f32"}
    graph = ov.compile_model(read_graph(entry / "model.xml", read_entry(entry)), "CPU", exactly).get_runtime_model()
    products = [node for node in graph.get_ops() if node.get_rt_info()["layerType"].astype(str) == "GatherMatmul"]
    assert len(products) == 6  # gate, up and down of two layers
    return [node.input_value(1).get_element_type() for node in products]


@pytest.mark.parametrize(("architecture", "kind"), [("olmoe", "Q4_K"), ("gpt-oss", "MXFP4")])
def test_a_second_start_reads_the_entry_and_gives_the_tokens_of_transformers(architecture, kind, tmp_path, monkeypatch):
    checkpoint, file = mixture(tmp_path, architecture, kind)
    where = {"model_id": str(file), "model_cache": str(tmp_path / "cache"), "device": "cpu", "dtype": "float32"}
    config = Config(**where, max_total_tokens=TOKENS, max_batch_size=2)
    models.load(models.prepare(config), lambda phase: None)
    monkeypatch.setattr("models.openvino.run_converter", None)  # nothing is converted again
    (served,) = run(models.load(models.prepare(config), lambda phase: None), [IDS[:100]], new_tokens=20)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert served.tokens == model.generate(torch.tensor([IDS[:100]]), max_new_tokens=20, do_sample=False)[0, 100:].tolist()


@pytest.mark.parametrize("left_out", ["attn_sinks.weight", "attn_output.bias", "ffn_gate_exps.bias", "ffn_gate_inp.bias"])
def test_a_gpt_oss_that_lacks_a_tensor_is_refused(left_out, tmp_path):
    _checkpoint, file = mixture(tmp_path, "gpt-oss", left_out=left_out)
    assert why_not(read_gguf(file)) == f"it lacks the tensor blk.0.{left_out}"


# Keys of other mixtures of experts, which would change what is computed.
REFUSED_OF_MIXTURES = {
    "attention.clamp_kqv": 8.0,
    "expert_gating_func": 2,
    "expert_group_count": 2,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "interleave_moe_layer_step": 2,
    "leading_dense_block_count": 1,
    "rope.scaling.yarn_attn_factor": 1.5,
    "swiglu_clamp_exp": [6.0, 6.0],
}


def test_keys_that_would_be_ignored_in_mixtures_of_experts_are_refused(tmp_path):
    for architecture in MIXTURES:
        (tmp_path / architecture).mkdir()
        _checkpoint, file = mixture(tmp_path / architecture, architecture)
        assert why_not(read_gguf(file)) is None
        refused = REFUSED_OF_MIXTURES | ({"attention.sliding_window": 64} if architecture == "olmoe" else {})
        for key, value in refused.items():
            file = write_keys(
                tmp_path / "keys.gguf", {"general.architecture": architecture, f"{architecture}.{key}": value}, 97
            )
            assert why_not(read_gguf(file)).startswith(f"`{architecture}.{key}` is ")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """With as many kinds of heads as layers, and biases."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", llama(head_dim=32, hidden_size=256))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_biases_of_queries_and_keys_are_in_the_order_of_their_rows(architecture, tmp_path):
    config = llama(attention_bias=True) if architecture == "llama" else transformers.Qwen2Config(**SMALL | rope())
    checkpoint = save_checkpoint(tmp_path / "original", config)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(0, 0 if "o_proj" in name else 1)
    model.save_pretrained(checkpoint)
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture)
    if architecture == "llama":  # no published one has a bias of the output
        assert "attn_output.bias" in why_not(read_gguf(file))
        file = write_gguf(tmp_path / "without.gguf", checkpoint, architecture, left_out="attn_output.bias")
    assert_close(logits(native(file, tmp_path)), reference(checkpoint))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_norms_of_each_type_are_read(checkpoint, kind, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, kinds={1: kind})
    assert_close(logits(native(file, tmp_path)), reference(checkpoint), 0.02)


# Keys that would change what is computed, and their values. (Any other key is not on the list, either.)
REFUSED = {
    "attention.scale": 0.5,
    "attention.sliding_window": 64,
    "attention.temperature_scale": 0.1,
    "attention.value_length": 48,
    "attn_logit_softcapping": 30.0,
    "expert_count": 8,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.5,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.scale_linear": 4.0,
    "rope.scaling.alpha": 1000.0,
    "rope.scaling.attn_factor": 1.2,
    "rope.scaling.type": "longrope",
    "rope.scaling.yarn_attn_factor": 1.2,
    "rope.scaling.yarn_ext_factor": 0.5,
    "rope.scaling.yarn_log_multiplier": 0.1,
}
SIZES = {"attention.value_length": "the sizes of its keys and values", "rope.dimension_count": "a part of each head"}


def why_not_with(checkpoint, tmp_path, **options):
    return why_not(read_gguf(write_gguf(tmp_path / "tiny.gguf", checkpoint, **options)))


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_would_be_ignored_is_refused(checkpoint, tmp_path, key):
    assert SIZES.get(key, f"`llama.{key}` is ") in why_not_with(checkpoint, tmp_path, keys={f"llama.{key}": REFUSED[key]})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "granite"}, "its architecture is granite"),
        ({"keys": {"llama.block_count": 1 << 31}}, "it lacks the tensor blk.10.attn_k.weight"),
        ({"keys": {"llama.attention.head_count": 0}}, "it has no `attention.head_count`"),
        (
            {"architecture": "mistral3", "keys": {"mistral3.attention.temperature_scale": 0.1}},
            "it has no `rope.scaling.original_context_length`",
        ),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "it has no `rope.scaling.original_context_length`"),
        ({"left_out": "blk.1.attn_v.weight"}, "it lacks the tensor blk.1.attn_v.weight"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.ones(32)}}, "it has the tensor blk.0.attn_q_norm.weight"),
        ({"extra": {"rope_factors_long.weight": np.ones(16)}}, "it has no `rope.scaling.original_context_length`"),
        ({"kinds": {2: "TQ1_0"}}, "token_embd.weight is in TQ1_0"),
    ],
)
def test_a_file_that_would_be_read_wrong_is_refused(checkpoint, tmp_path, options, reason):
    assert why_not_with(checkpoint, tmp_path, **options) == reason


def test_a_reason_holds_little_of_what_the_file_says(checkpoint, tmp_path):
    assert len(why_not_with(checkpoint, tmp_path, keys={"llama.rope.scaling.type": "x" * 10_000})) <= 200


QUERIES = "layers.1.self_attn.q_proj"
KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", *SCALES)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_each_type_are_those_of_the_file(checkpoint, tmp_path, kind):
    """A release of OpenVINO that rounds more than a scale or a zero point to float16 fails here."""
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, kinds={2: kind})
    _folder, entry = converted(file, tmp_path)
    tensor = read_gguf(file).tensors["blk.1.attn_q.weight"]
    assert TYPES[tensor.type].name == kind
    stored = np.fromfile(file, np.uint8, tensor.size, offset=tensor.offset).reshape(128, -1)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    graph = ov.Core().read_model(entry / "model.xml")
    (product,) = (node for node in graph.get_ordered_ops() if node.get_friendly_name() == LINEAR_NAME.format(QUERIES))
    activations = ops.parameter([1, 1, 256, 256], np.float32)
    product.input_value(0).replace(activations.output(0))
    (reader,) = product.output(0).get_target_inputs()  # which adds the part of minima
    whole = reader.get_node() if reader.get_node().get_type_name() == "Add" else product
    exactly = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = ov.compile_model(ov.Model([ops.result(whole)], [activations]), "CPU", exactly)
    found = compiled([np.eye(256, dtype=np.float32)[None, None]])[0][0, 0].T
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_embeddings_with_minima_may_be_the_head(tmp_path):
    assert_quantized_is_close(llama(hidden_size=256, tie_word_embeddings=True), "llama", "Q4_1", tmp_path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized_weights_of_ministral_give_the_logits_of_transformers(kind, tmp_path):
    assert_quantized_is_close(mistral3(), "mistral3", kind, tmp_path)


def assert_quantized_is_close(config, architecture, kind, tmp_path):
    """`config` has no sizes for which a file holds float32."""
    checkpoint = save_checkpoint(tmp_path / "original", config)
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture, kinds={2: kind})
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    kind = gguf.GGMLQuantizationType[kind]
    for weight in model.parameters():
        if weight.ndim == 2:
            stored = gguf.quants.quantize(weight.detach().numpy(), kind)
            weight.data = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
    model.save_pretrained(checkpoint)
    found, expected = logits(native(file, tmp_path)), reference(checkpoint)
    assert_close(found, expected, 0.1)
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.95


@pytest.fixture(scope="module", params=["Q8_0", "Q4_K"])
def entry(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("entry")
    return converted(write_gguf(folder / "tiny.gguf", checkpoint, kinds={2: request.param}), folder)[1]


@pytest.mark.parametrize("group", [0, 32])
def test_chunks_copies_and_drafts_change_no_bit(entry, group):
    """Whether activations are quantized or not."""
    assert_no_bit_changes(entry, group)


@pytest.mark.parametrize(("architecture", "kind"), [("olmoe", "Q4_K"), ("gpt-oss", "MXFP4")])
def test_other_rows_of_the_same_experts_change_no_bit(architecture, kind, tmp_path):
    _folder, entry = converted(mixture(tmp_path, architecture, kind)[1], tmp_path)
    for group in (0, 32):
        assert_no_bit_changes(entry, group)


def assert_no_bit_changes(entry, group):
    facts = read_entry(entry) | {"activation_group": group}
    config = Config(threads=1, max_batch_size=6, max_total_tokens=TOKENS, max_input_tokens=TOKENS - 1)
    model = OpenVinoModel(read_graph(entry / "model.xml", facts), facts, config)
    prompts = [IDS[:n] for n in (3, 40, 97, 130)]
    alone = [run(model, [prompt], new_tokens=12)[0] for prompt in prompts]
    for seed, budget in enumerate((7, None)):
        for sequence, own in zip(run(model, prompts * 3, seed, budget=budget, new_tokens=12), alone * 3):
            assert sequence.tokens == own.tokens[: len(sequence.tokens)]
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])
    model.forward([Chunk(1, IDS[:100], 0)])
    steps = np.concatenate([model.forward([Chunk(1, IDS[n : n + 1], n)]) for n in range(100, 108)])
    others = [Chunk(2, IDS[:9], 0), Chunk(3, IDS[5:6], 0)]
    drafts = model.forward([*others, Chunk(1, IDS[100:108], 100, verify=True)])[2:]
    assert np.array_equal(drafts, steps)
    model.copy_prefix(1, 4, 50)
    copied = model.forward([Chunk(4, IDS[50:100], 50, all_logits=True)])
    model.forward([Chunk(1, IDS[:50], 0)])
    assert np.array_equal(copied, model.forward([Chunk(1, IDS[50:100], 50, all_logits=True)]))


def test_a_damaged_entry_is_noticed_at_startup(entry, tmp_path):
    damaged = shutil.copytree(entry, tmp_path / "entry")
    weights = bytearray((damaged / "model.bin").read_bytes())
    weights[:5000] = bytes(5000)  # of the embeddings
    (damaged / "model.bin").write_bytes(weights)
    with pytest.raises(ValueError, match=r"its logits differ|its KL divergence"):
        load(damaged)


def test_an_error_of_quantized_activations_names_the_dtype_that_does_without_them(entry, tmp_path):
    changed = shutil.copytree(entry, tmp_path / "entry")
    facts = read_entry(entry)
    facts["reference"]["logits"] = (-np.array(facts["reference"]["logits"])).tolist()
    write_entry(changed, facts | {"activation_group": 32})
    with pytest.raises(
        ValueError, match=r"its KL divergence .*; with --dtype float32 \(DTYPE\) its activations are not quantized$"
    ):
        load(changed)


@pytest.mark.parametrize("architecture", ["llama", "mistral3"])
def test_adapters_change_the_rows_that_they_name(architecture, tmp_path):
    """In files of Llama and Ministral the rows of queries and keys are in another order."""
    config = llama(head_dim=24) if architecture == "llama" else mistral3(head_dim=24)
    checkpoint = save_checkpoint(tmp_path / "original", config)
    sizes = {"self_attn.q_proj": (64, 96), "self_attn.k_proj": (64, 48), "self_attn.o_proj": (96, 64), "mlp.up_proj": (64, 96)}
    updates = {
        f"model.layers.1.{name}": (0.3 * torch.randn(2, inputs), 0.3 * torch.randn(outputs, 2))
        for name, (inputs, outputs) in sizes.items()
    }
    write_adapter(tmp_path / "adapter", updates)
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, architecture)
    where = {"model_id": str(file), "model_cache": str(tmp_path / "cache"), "device": "cpu", "dtype": "float32"}
    config = Config(**where, lora_adapters=(f"tiny={tmp_path / 'adapter'}",), max_total_tokens=TOKENS, max_batch_size=2)
    served = models.load(models.prepare(config), lambda phase: None)
    plain = reference(checkpoint)
    assert_close(logits(served), plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, (down, up) in updates.items():
        model.get_submodule(name).weight.data += up @ down
    model.save_pretrained(checkpoint)
    found = served.forward([Chunk(1, IDS, 0, all_logits=True, adapter=1)])
    assert_close(found, reference(checkpoint))
    assert np.abs(found - plain).max() > 1


WITHOUT = """
import runpy, sys
for name in ("torch", "transformers", "nncf", "gguf"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.processes
def test_a_file_is_converted_without_torch_and_transformers_and_without_a_notice_of_lost_accuracy(checkpoint, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", checkpoint, kinds={2: "Q4_K"})
    folder, target = tmp_path / "folder", tmp_path / "target"
    for made in (folder, target):
        made.mkdir()
    config = Config(model_id=str(file), max_total_tokens=TOKENS)
    for arguments, given in (
        (["models.checkpoint.gguf_folder", str(file), str(folder)], ""),
        (["models.convert", str(folder), str(target)], config.to_json()),
    ):
        command = [sys.executable, "-c", WITHOUT, *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=HERE, timeout=120)
        assert done.returncode == 0 and "notice" not in done.stderr, done.stderr
    assert read_entry(target)["compressed"] == "Q4_K"
