"""`plan` and `serve` size a model by the arithmetic of transformers-neuronx; a refusal holds the numbers and what would fit."""

import json
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from published.configs import OTHERS

from config import TRIAL_REPOSITORY, Config
from models.machine import GIB, Machine
from models.neuron import families, plan
from models.neuron.base_family import padded_heads
from models.neuron.plan import INSTANCES, Sizing
from run import HERE, ConfigError


def llama(layers, hidden, heads, kv_heads, intermediate, vocab, window, **more):
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": window,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | more


MISTRAL = {"model_type": "mistral", "sliding_window": None}
# As in the models' own config.json.
CONFIGS = {
    "Llama-2-7B": llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "Llama-2-13B": llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "Llama-2-70B": llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "Llama-3-8B": llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "Llama-3-70B": llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "Llama-3.2-3B": llama(28, 3072, 24, 8, 8192, 128256, 131072, head_dim=128, tie_word_embeddings=True),
    "TinyLlama": llama(22, 2048, 32, 4, 5632, 32000, 2048),
    "Mistral-7B": llama(32, 4096, 32, 8, 14336, 32000, 32768) | MISTRAL,
    "Mixtral-8x7B": llama(32, 4096, 32, 8, 14336, 32000, 32768, num_local_experts=8) | {"model_type": "mixtral"},
}
QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True}
CONFIGS |= {
    "Qwen3-30B-A3B": llama(48, 2048, 32, 4, 6144, 151936, 40960, moe_intermediate_size=768) | QWEN3_MOE,
    "Qwen3-235B-A22B": llama(94, 4096, 64, 4, 12288, 151936, 40960, moe_intermediate_size=1536) | QWEN3_MOE,
    "OLMoE-1B-7B": llama(16, 2048, 16, 16, 1024, 50304, 4096) | {"model_type": "olmoe"},
}
FAMILIES = {name: families.of(data) for name, data in CONFIGS.items()}
some_family = st.sampled_from(list(FAMILIES.values()))


def choose(family, machine, **settings):
    return plan.choose_sizing(family, machine, Config(model_id="x", **settings))


@pytest.mark.parametrize(
    "name, parameters",
    {
        "Llama-2-7B": 6_738_415_616,
        "Llama-2-13B": 13_015_864_320,
        "Llama-2-70B": 68_976_648_192,
        "Llama-3-8B": 8_030_261_248,
        "Llama-3.2-3B": 3_212_749_824,
        "TinyLlama": 1_100_048_384,
        "Mistral-7B": 7_241_732_096,
        "Mixtral-8x7B": 46_702_792_704,
        "Qwen3-30B-A3B": 30_532_122_624,
        "Qwen3-235B-A22B": 235_093_634_560,
        "OLMoE-1B-7B": 6_919_161_856,
    }.items(),
)
def test_parameters_are_counted_exactly(name, parameters):
    assert FAMILIES[name].parameters == parameters


@pytest.mark.parametrize(
    "name, tp_degree, cached",
    [
        *(("Llama-2-7B", *row) for row in [(12, 36), (24, 48), (32, 32)]),
        *(("Llama-2-13B", *row) for row in [(12, 48), (16, 48), (24, 48), (32, 64)]),
        *(("Llama-2-70B", *row) for row in [(8, 8), (12, 72), (16, 16), (24, 24), (32, 32)]),
        *(
            (name, *row)
            for name in ("Llama-3-8B", "Mistral-7B")
            for row in [(2, 8), (4, 8), (8, 8), (12, 36), (16, 16), (24, 24), (32, 32)]
        ),
        *(("Llama-3.2-3B", *row) for row in [(12, 24), (16, 16), (24, 24)]),
        ("TinyLlama", 8, 8),
    ],
)
def test_cached_heads_are_those_of_the_library(name, tp_degree, cached):
    assert padded_heads(FAMILIES[name].heads, FAMILIES[name].kv_heads, tp_degree)[1] == cached


@given(kv_heads=st.integers(1, 64), group=st.integers(1, 16), tp_degree=st.integers(1, 64))
def test_padded_heads_are_enough_and_even(kv_heads, group, tp_degree):
    heads, cached = padded_heads(kv_heads * group, kv_heads, tp_degree)
    assert heads >= kv_heads * group and heads % tp_degree == 0
    assert kv_heads <= cached <= heads and cached % tp_degree == 0


@pytest.mark.parametrize(
    "tp_degree, batch_size, weights_gb, with_embedding_gb, kv_gb", [(2, 4, 7.5, 8.0, 1.07), (8, 32, 1.9, 2.0, 2.15)]
)
def test_the_memory_of_a_core_is_that_of_two_worked_examples(tp_degree, batch_size, weights_gb, with_embedding_gb, kv_gb):
    sizing = Sizing(FAMILIES["Llama-3-8B"], tp_degree, batch_size, 4096)
    assert round(sizing.weights_bytes / 1e9, 1) == weights_gb  # the embedding stays on the host
    assert round((sizing.weights_bytes + 128256 * 4096 * 2 / tp_degree) / 1e9, 1) == with_embedding_gb
    assert round(sizing.kv_bytes / 1e9, 2) == kv_gb
    assert sizing.fits


def test_recurrent_layers_have_states_of_a_fixed_size_and_no_keys_and_values():
    """Qwen3.5-4B: 24 of its 32 layers have 32 heads with 128 x 128 float32 values, and three inputs of 8192 channels."""
    family = families.of(OTHERS["Qwen/Qwen3.5-4B"])
    assert family.parameters == families.of(OTHERS["Qwen/Qwen3.5-4B, text"]).parameters == 4_205_751_296
    sizing = Sizing(family, 2, 16, 4096, prefill_chunk=128)
    assert 2 * sizing.state_bytes == 16 * 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert 2 * sizing.kv_bytes == 16 * (4096 + 128) * 8 * 2 * 4 * 256 * 2  # fillers of chunks have positions, too
    assert Sizing(family, 24, 16, 4096).state_bytes == 16 * 24 * (2 * 128 * 128 * 4 + 3 * 512 * 2)  # 16 key heads become 24
    assert "+ states 0.38 GiB" in str(sizing)
    assert Sizing(family, 2, 16, 4096, snapshot_memory=1).state_bytes == sizing.state_bytes * (16 + 19) // 16  # of 51.5 MB
    assert Sizing(family, 2, 2, 4096, snapshot_memory=1).snapshots == 8


def test_short_convolutions_have_their_last_inputs():
    """LFM2-1.2B: 10 of its 16 layers have two inputs of 2048 channels, and a number a head of no use."""
    for name in ("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2.5-1.2B-Instruct"):
        family = families.of(OTHERS[name])
        assert family.parameters == 1_170_340_608
        assert 2 * Sizing(family, 2, 16, 4096).state_bytes == 16 * 10 * (2 * 2048 * 2 + 32 * 4)


def test_cores_share_the_heads_of_a_group_and_each_has_its_keys_and_queries():
    """36 of 40 layers of Granite 4 have a group of 48 heads with 128 x 64 values, over 2, 12 and 32 cores."""
    family = families.of(OTHERS["ibm-granite/granite-4.0-h-tiny"] | {"num_local_experts": 0})
    for tp_degree, heads in ((2, 24), (12, 4), (32, 2)):  # 16 heads of 64 are zeros
        expected = 36 * (heads * 128 * 64 * 4 + 3 * (2 * 128 + heads * 64) * 2)
        assert Sizing(family, tp_degree, 1, 4096).state_bytes == expected


def test_what_fits_of_a_model_without_attention_is_named_without_a_shorter_context():
    config = OTHERS["ibm-granite/granite-4.0-h-tiny"] | {"num_local_experts": 0, "layer_types": ["mamba"] * 40}
    reason = Sizing(families.of(config), 2, 4096, 4096).reason([2])
    assert "--max-batch-size" in reason and "--max-total-tokens" not in reason


@pytest.mark.parametrize(
    ("name", "parameters", "tp_degrees"),
    [
        ("Qwen/Qwen3.5-35B-A3B", 34_660_610_688, [1, 2, 4, 8, 16, 32]),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79_674_391_296, [1, 2, 4, 8, 12, 16, 24, 32]),
        ("ibm-granite/granite-4.0-h-tiny", 6_939_037_248, [1, 2, 4, 8, 12, 16, 24, 32]),
    ],
)
def test_experts_beside_recurrent_layers_are_counted_with_the_one_that_all_tokens_share(name, parameters, tp_degrees):
    """As transformers counts them, without the layers of multi-token prediction."""
    family = families.of(OTHERS[name])
    assert family.parameters == parameters
    assert [degree for degree in (1, 2, 4, 8, 12, 16, 24, 32) if not Sizing(family, degree, 1, 128).unsupported] == tp_degrees


def test_int8_halves_the_matrices_of_the_layers_and_nothing_else():
    plain, int8 = (Sizing(FAMILIES["Llama-3-8B"], 8, 4, 4096, "bfloat16", quantize) for quantize in (None, "int8"))
    assert plain.weights_bytes - int8.weights_bytes == 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) / 8
    assert plain.kv_bytes == int8.kv_bytes


def test_the_embedding_table_takes_host_memory_in_float32():
    assert FAMILIES["Llama-3-8B"].host_bytes == FAMILIES["Llama-3-8B"].parameters * 2 + 128256 * 4096 * 4


def test_a_tied_output_matrix_is_one_table_of_the_checkpoint_and_still_takes_device_memory():
    tied, untied = (families.of(CONFIGS["TinyLlama"] | {"tie_word_embeddings": is_tied}) for is_tied in (True, False))
    assert untied.parameters - tied.parameters == 32000 * 2048
    assert Sizing(tied, 2, 1, 2048).total_bytes == Sizing(untied, 2, 1, 2048).total_bytes


@pytest.mark.parametrize("dtype, factor", [("float32", 2), ("bfloat16", 1), ("float16", 1), ("auto", 1)])
def test_memory_follows_the_dtype(dtype, factor):
    family = FAMILIES["TinyLlama"]
    assert Sizing(family, 2, 4, 2048, dtype).total_bytes == factor * Sizing(family, 2, 4, 2048).total_bytes


def test_a_cache_in_fp8_takes_a_byte_a_value():
    plain, fp8 = (Sizing(FAMILIES["Llama-3-8B"], 2, 16, 4096, kv_cache_dtype=kind) for kind in ("auto", "fp8_e4m3fn"))
    assert (plain.weights_bytes, plain.kv_bytes) == (fp8.weights_bytes, 2 * fp8.kv_bytes)
    assert fp8.kv_bytes == 2 * 32 * 4096 * 16 * 4 * 128
    assert "KV cache 2.00 GiB (FP8), " in str(fp8) and "FP8" not in str(plain)


@pytest.mark.parametrize(
    "name, instance, settings, before, after",
    [
        ("Llama-3-8B", "inf2.8xlarge", {}, 16, 32),
        ("Qwen3-30B-A3B", "inf2.24xlarge", {}, 32, 32),
        ("Qwen3-235B-A22B", "inf2.48xlarge", {"quantize": "int8"}, 16, 32),
        ("OLMoE-1B-7B", "inf2.xlarge", {}, 16, 32),
    ],
)
def test_a_cache_in_fp8_doubles_the_slots_and_plan_says_so(name, instance, settings, before, after):
    family, machine = FAMILIES[name], INSTANCES[instance]
    assert choose(family, machine, **settings).batch_size == before
    assert choose(family, machine, **settings, kv_cache_dtype="fp8_e4m3fn").batch_size == after
    offered = f"  with --kv-cache-dtype fp8_e4m3fn: batch size {after}, context length 4096 (not validated on hardware)"
    assert (offered in plan.report(name, family, [machine], Config(model_id="x", **settings))) == (after > before)


def test_a_refusal_names_fp8_where_it_would_fit():
    reason = Sizing(FAMILIES["Llama-3-8B"], 2, 32, 4096).reason([2])
    assert reason.endswith(", or --quantize int8, or --kv-cache-dtype fp8_e4m3fn would fit")


@given(
    family=some_family, tp=st.sampled_from((1, 2, 4, 8, 12, 16, 24, 32)), batch=st.integers(1, 64), length=st.integers(1, 16384)
)
def test_more_or_longer_slots_take_more_memory(family, tp, batch, length):
    sizing = Sizing(family, tp, batch, length)
    for more in (Sizing(family, tp, batch + 1, length), Sizing(family, tp, batch, length + 1)):
        assert more.total_bytes > sizing.total_bytes
        assert sizing.fits or not more.fits


@given(family=some_family, batch=st.integers(1, 32), length=st.integers(128, 8192))
def test_more_cores_never_hold_more_weights_each(family, batch, length):
    weights = [Sizing(family, tp, batch, length).weights_bytes for tp in (1, 2, 4, 8, 16, 32)]
    assert weights == sorted(weights, reverse=True)


@given(family=some_family, tp=st.sampled_from((1, 2, 4, 8)), batch=st.integers(1, 64), length=st.integers(128, 16384))
def test_every_alternative_that_a_refusal_names_fits(family, tp, batch, length):
    sizing = Sizing(family, tp, batch, length)
    reason = sizing.reason(plan.allowed_tp_degrees(None, 32))
    advice = reason.rpartition("; ")[2].removesuffix(" would fit").split(", or ")
    assume("would fit" in reason and not sizing.fits)
    for option in advice:
        name, _, value = option.rpartition(" ")
        changed = {"tp_degree": tp, "batch_size": batch, "length": length, "quantize": None}
        field = {"--max-batch-size": "batch_size", "--max-total-tokens": "length", "--tp-degree": "tp_degree"}.get(
            name, name[2:].replace("-", "_")
        )
        changed[field] = int(value) if value.isdecimal() else value
        assert Sizing(family, **changed).fits, option


@pytest.mark.parametrize("name", ["Llama-3-8B", "Mixtral-8x7B"])
def test_config_files_of_transformers_4_and_5_give_the_same_shape(name):
    old = CONFIGS[name] | {"rope_theta": 500000.0, "rope_scaling": None}
    new = {key: value for key, value in CONFIGS[name].items() if key != "torch_dtype"}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    nested = {"model_type": "mistral3", "text_config": new}
    assert numbers(new) == numbers(old) == numbers(nested) == numbers(CONFIGS[name])


def numbers(data):
    """What the family of a config.json keeps, but for the file itself."""
    family = families.of(data)
    kept = {name: value for name, value in vars(family).items() if name not in ("config", "is_nested")}
    return kept, family.ropes, family.kinds, family.vectors


def test_missing_numbers_default_to_those_of_transformers():
    without = {key: value for key, value in CONFIGS["Llama-2-7B"].items() if key != "num_key_value_heads"}
    assert families.of(without).kv_heads == 32
    assert families.of(without | MISTRAL).kv_heads == 8
    untyped = {key: value for key, value in CONFIGS["Llama-2-7B"].items() if key != "torch_dtype"}
    assert families.of(untyped).dtype == "float32"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "falcon"}, ["'falcon'", "llama, code_llama, mistral, mixtral, qwen2"]),
        ({"model_type": None}, ["None", "not supported"]),
        (
            {"model_type": "gpt2"},
            ["gpt2 models are no longer supported on Neuron", "Llama's architecture, or try --device cpu"],
        ),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"num_attention_heads": 31}, ["31", "4096"]),
        ({"num_key_value_heads": 5}, ["5", "32"]),
        ({"rope_scaling": {"type": "yarn"}}, ["llama model cannot be understood", "'factor'"]),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, ["describes 1 layers and num_hidden_layers is 32"]),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError) as refused:
        families.of(CONFIGS["Llama-3-8B"] | changes)
    assert all(word in str(refused.value) for word in words) and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name, tp_degree, batch_size, quantize, words",
    [
        ("Llama-3-8B", 2, 32, None, ["weights 6.99 + KV cache 8.00 GiB", "80%", "size 23", "tokens 2944", "degree 4", "int8"]),
        ("Llama-2-70B", 8, 1, None, ["weights 16.00", "--tp-degree 16", "int8"]),
        ("Mixtral-8x7B", 12, 1, None, ["12", "8 experts into 3 pieces", "14336", "; 1, 2, 4, 8, 16, 32 would work"]),
        ("Mixtral-8x7B", 24, 1, None, ["24", "8 experts into 3 pieces", "14336", "; 1, 2, 4, 8, 16, 32 would work"]),
        ("OLMoE-1B-7B", 12, 1, None, ["12", "16 attention and 16 key-value heads"]),
    ],
)
def test_what_does_not_fit_says_why_and_what_would(name, tp_degree, batch_size, quantize, words):
    sizing = Sizing(FAMILIES[name], tp_degree, batch_size, 4096, quantize=quantize)
    assert not sizing.fits
    reason = sizing.unsupported or sizing.reason(plan.allowed_tp_degrees(None, 32))
    assert [word for word in words if word not in reason] == []
    assert len(reason.splitlines()) == 1


def test_a_model_that_is_too_large_for_everything_says_so():
    giant = families.of(CONFIGS["Llama-3-70B"] | {"num_hidden_layers": 800})
    assert Sizing(giant, 32, 1, 4096).reason([32]).endswith("no known machine is large enough")


def test_types_that_only_other_devices_have_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"--quantize int4 \(QUANTIZE\) is not supported on Neuron; give int8 or none"):
        choose(FAMILIES["TinyLlama"], Machine(2), quantize="int4")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype u8 \(KV_CACHE_DTYPE\) is not .* give auto or fp8_e4m3fn"):
        choose(FAMILIES["TinyLlama"], Machine(2), kv_cache_dtype="u8")


@pytest.mark.parametrize(
    "name, instance, chosen",
    [
        ("TinyLlama", "inf2.xlarge", (2, 32, 2048)),
        ("Llama-3-8B", "inf2.8xlarge", (2, 16, 4096)),
        ("Llama-3-8B", "inf2.24xlarge", (8, 32, 4096)),  # with 12 each core would keep 3 heads instead of 1
        ("Llama-3-8B", "inf2.48xlarge", (24, 32, 4096)),
        ("Llama-2-70B", "inf2.24xlarge", (12, 1, 1024)),  # 72 heads cached for 8
        ("Llama-2-70B", "inf2.48xlarge", (24, 32, 4096)),
        ("Mixtral-8x7B", "inf2.48xlarge", (8, 16, 4096)),
        ("Mixtral-8x7B", "trn1.32xlarge", (32, 32, 4096)),
    ],
)
def test_the_chosen_sizes_for_a_machine(name, instance, chosen):
    sizing = choose(FAMILIES[name], INSTANCES[instance])
    assert (sizing.tp_degree, sizing.batch_size, sizing.length) == chosen and sizing.fits
    assert str(sizing).startswith("tp_degree {}, batch size {}, context length {}: weights".format(*chosen))


@pytest.mark.parametrize(
    "name, instance, quantize, chosen, weights, kv, step_ms",
    [
        ("Qwen3-30B-A3B", "inf2.24xlarge", None, (12, 32, 4096), 4.8, 3.0, 25),
        ("Qwen3-30B-A3B", "inf2.24xlarge", "int8", (12, 32, 4096), 2.4, 3.0, 16),
        ("Qwen3-30B-A3B", "inf2.48xlarge", None, (24, 32, 4096), 2.4, 3.0, 16),
        ("Qwen3-30B-A3B", "inf2.48xlarge", "int8", (24, 32, 4096), 1.2, 3.0, 11),
        ("Qwen3-235B-A22B", "inf2.48xlarge", "int8", (24, 16, 4096), 9.3, 2.9, 49),
        ("OLMoE-1B-7B", "inf2.xlarge", None, (2, 16, 4096), 6.4, 4.0, 27),
        ("OLMoE-1B-7B", "inf2.xlarge", "int8", (2, 32, 4096), 3.2, 8.0, 15),
    ],
)
def test_a_mixture_of_experts_is_sized_with_all_of_its_experts(name, instance, quantize, chosen, weights, kv, step_ms):
    sizing = choose(FAMILIES[name], INSTANCES[instance], quantize=quantize)
    assert (sizing.tp_degree, sizing.batch_size, sizing.length) == chosen
    assert (round(sizing.weights_bytes / GIB, 1), round(sizing.kv_bytes / GIB, 1)) == (weights, kv)
    assert round(1000 * sizing.step_s) == step_ms


def test_plan_says_what_a_step_and_a_prompt_of_a_mixture_of_experts_cost(run, folder):
    _code, output, _errors = run("--model-id", folder("Qwen3-30B-A3B"), "--instance", "inf2.24xlarge")
    assert (
        "all 128 experts are computed for each token: a decode step takes about 25 ms, a prompt of 2048 tokens about "
        "0.65 s (estimates)"
    ) in " ".join(output.split())
    assert "experts" not in run("--model-id", folder("Llama-3-8B"), "--instance", "inf2.24xlarge")[1]


@pytest.mark.parametrize("tp_degree, seconds", [(12, 0.65), (24, 0.32)])
def test_a_prompt_pays_for_all_experts(tp_degree, seconds):
    assert round(Sizing(FAMILIES["Qwen3-30B-A3B"], tp_degree, 32, 4096).prompt_s(2048), 2) == seconds


@given(
    family=some_family,
    place=st.sampled_from(list(INSTANCES.values())),
    batch=st.none() | st.integers(1, 40),
    length=st.none() | st.integers(16, 1024),
)
def test_given_values_are_kept_and_the_choice_fits(family, place, batch, length):
    try:
        best = choose(family, place, max_batch_size=batch, max_total_tokens=length)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert best.fits and best.tp_degree in plan.TP_DEGREES[place.family] and best.tp_degree <= place.cores
    assert best.batch_size == (batch or best.batch_size) and best.length == (length or best.length)


@pytest.mark.parametrize(
    "settings, chosen",
    [
        ({"max_batch_total_tokens": 16384}, (8, 2048)),
        ({"max_batch_total_tokens": 3 * 2048 + 1}, (3, 2048)),
        ({"max_batch_total_tokens": 1_000_000}, (32, 2048)),
        ({"max_batch_total_tokens": 1000}, (1, 1000)),
        ({"max_batch_total_tokens": 4096, "max_total_tokens": 1024}, (4, 1024)),
        ({"max_batch_total_tokens": 4096, "max_batch_size": 8, "max_total_tokens": 2048}, (2, 2048)),
    ],
)
def test_max_batch_total_tokens_is_a_limit_of_the_slots(settings, chosen):
    sizing = choose(FAMILIES["TinyLlama"], INSTANCES["inf2.xlarge"], **settings)
    assert (sizing.batch_size, sizing.length) == chosen


def test_chunks_of_prompts_are_planned_for_where_a_prompt_can_be_longer():
    family, machine = FAMILIES["Llama-3-8B"], plan.INSTANCES["inf2.48xlarge"]
    chosen = choose(family, machine)
    whole = choose(family, machine, prefill_chunk=0)
    assert (chosen.chunk, whole.chunk) == (128, 0)
    assert chosen.total_bytes - whole.total_bytes == 128 * 2 * -(-family.vocab // chosen.tp_degree)
    assert choose(family, machine, prefill_chunk=64).chunk == 64
    assert choose(family, machine, max_total_tokens=129).chunk == 0


@pytest.mark.parametrize("option", ["shard_over_sequence=true", "sequence_parallel_norm=true"])
def test_prompts_run_whole_with_the_options_that_the_program_of_chunks_does_not_support(option):
    family, machine = FAMILIES["Llama-3-8B"], INSTANCES["inf2.48xlarge"]
    assert choose(family, machine, neuron_config=(option,)).chunk == 0
    assert choose(family, machine, neuron_config=(option,), prefill_chunk=0).chunk == 0
    setting = rf"--prefill-chunk 64 \(PREFILL_CHUNK\) is not supported with --neuron-config {option} \(NEURON_CONFIG\)"
    with pytest.raises(ConfigError, match=setting):
        choose(family, machine, neuron_config=(option,), prefill_chunk=64)


def test_a_length_is_halved_until_it_fits():
    family = FAMILIES["Llama-2-13B"]
    assert choose(family, Machine(2, "inf2")).length == 2048
    assert not Sizing(family, 2, 1, 4096).fits


@pytest.mark.parametrize(
    "name, machine, settings, words",
    [
        ("Llama-2-70B", Machine(2), {}, ["2 cores", "a larger instance with --tp-degree 12 would fit"]),
        (
            "Mixtral-8x7B",
            Machine(12),
            {"dtype": "float32"},
            ["12 cores", "weights 21.69", "a larger instance with --tp-degree 16"],
        ),
        ("Llama-3-8B", Machine(2), {"max_batch_size": 32, "max_total_tokens": 8192}, ["size 11", "tokens 2944"]),
        ("Llama-2-70B", Machine(24, "inf2"), {"tp_degree": 8}, ["24 cores", "; --tp-degree 12, or"]),
        (
            "Mixtral-8x7B",
            Machine(24),
            {"neuron_config": ("sequence_parallel_norm=true",)},
            ["--neuron-config sequence_parallel_norm=true (NEURON_CONFIG)", "mixtral models", "leave it out"],
        ),
        ("Llama-3-8B", Machine(2), {"tp_degree": 8}, ["tp_degree 8", "2 cores", "1, 2 would work"]),
        ("Llama-3-8B", Machine(32, "trn1"), {"tp_degree": 12}, ["trn1", "1, 2, 8, 16, 32"]),
        ("Llama-3-8B", Machine(24, "inf2"), {"tp_degree": 7}, ["tp_degree 7"]),
        ("Llama-3-8B", Machine(24), {"max_total_tokens": 9000}, ["9000", "8192"]),
    ],
)
def test_impossible_settings_are_refused_in_one_line(name, machine, settings, words):
    with pytest.raises(ConfigError) as refused:
        choose(FAMILIES[name], machine, **settings)
    assert [word for word in words if word not in str(refused.value)] == []
    assert len(str(refused.value).splitlines()) == 1


def test_any_even_tp_degree_may_be_set_on_inferentia2():
    assert choose(FAMILIES["Llama-3-8B"], Machine(24, "inf2"), tp_degree=16).tp_degree == 16


@pytest.mark.parametrize("gib, is_enough", [(16, False), (24, False), (25, True), (None, True)])
def test_too_little_host_memory_for_loading_or_compiling_is_a_warning(gib, is_enough):
    warning = plan.memory_warning(FAMILIES["Llama-3-8B"], Machine(2, host_bytes=gib and gib * GIB))
    assert (warning is None) == is_enough
    if warning:
        assert f"there are {gib:.1f} GiB of host memory: loading takes about 16.9, compiling about 8 more" in warning


def test_the_embedding_table_on_the_device_takes_memory_of_the_cores():
    plain, embedded = (Sizing(FAMILIES["Llama-3-8B"], 8, 4, 4096, neuron_config=o) for o in ((), ("on_device_embedding=true",)))
    assert embedded.weights_bytes - plain.weights_bytes == 128256 * 4096 * 2 // 8


def test_a_sharded_sequence_divides_the_positions_of_a_key_value_head_over_its_cores():
    plain, sharded = (
        Sizing(FAMILIES["Llama-3-70B"], 32, 8, 16384, neuron_config=o) for o in ((), ("shard_over_sequence=true",))
    )
    assert plain.kv_bytes == 2 * 80 * 16384 * 8 * 128 * 2
    assert sharded.kv_bytes == 2 * 80 * (16384 + 128) // 4 * 8 * 128 * 2


def test_a_sharded_sequence_decides_the_tp_degree():
    sizing = choose(FAMILIES["Llama-3-8B"], INSTANCES["inf2.48xlarge"], neuron_config=("shard_over_sequence=true",))
    assert sizing.tp_degree == 24  # of 1, 2, 4, 8, 12 and 24 the only one that is a multiple of 8 and more than 8
    for name in ("inf2.xlarge", "inf2.24xlarge"):
        with pytest.raises(ConfigError, match="needs more heads than its 8 key-value heads, and a tp_degree of two or more"):
            choose(FAMILIES["Llama-3-8B"], INSTANCES[name], neuron_config=("shard_over_sequence=true",))


@pytest.fixture
def folder(tmp_path):
    """Makes a model folder that holds a config.json and nothing else."""

    def make(name):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIGS[name]))
        return path

    return make


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `plan`: its exit code, its output and its errors."""

    def run(*argv, **environ):
        for name in ("MODEL_ID", "HF_MODEL_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        code = plan.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("model_id", ["someone/model:model.gguf", "someone/model:Q4_K_M"])
def test_a_gguf_file_is_refused_with_what_to_give_instead(run, model_id):
    why = "plan reads a config.json; give the checkpoint that the GGUF file was made from"
    assert run("--model-id", model_id) == (2, "", f"error: {why}\n")


@pytest.mark.parametrize("name", CONFIGS)
def test_plan_prints_every_instance(run, folder, name):
    code, output, errors = run("--model-id", folder(name), *(["--quantize", "int8"] if "235B" in name else []))
    assert (code, errors) == (0, "")
    assert all(instance in output for instance in INSTANCES)
    assert max(map(len, output.splitlines())) <= 100
    assert "Recommended: " in output


def test_plan_says_that_a_checkpoint_in_fp8_is_dequantized_and_what_takes_its_memory(run, folder):
    path = folder("Llama-3-8B")
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (path / "config.json").write_text(json.dumps(CONFIGS["Llama-3-8B"] | quantized))
    notice = f"{path} is quantized with fp8 and is served dequantized, with the memory of bfloat16"
    output = " ".join(run("--model-id", path)[1].split())
    assert output.startswith(f"{notice}; --quantize int8 (QUANTIZE) takes 1 byte a weight {path} (llama): ")
    assert " ".join(run("--model-id", path, "--quantize", "int8")[1].split()).startswith(f"{notice} {path} (llama): ")


@pytest.mark.parametrize(
    "name, instance",
    [
        ("Llama-3-8B", "trn1.2xlarge"),  # an inf2.xlarge has too little host memory to load it
        ("Llama-2-7B", "inf2.xlarge"),  # which has enough to load it, and too little to compile it
        ("Llama-2-70B", "inf2.48xlarge"),  # an inf2.24xlarge has room for a length of 1024
    ],
)
def test_plan_recommends_the_smallest_machine_for_the_whole_length(run, folder, name, instance):
    assert f"Recommended: {instance}, " in run("--model-id", folder(name))[1]


def test_plan_warns_where_a_model_that_can_be_loaded_cannot_be_compiled(run, folder):
    model = folder("Llama-2-7B")
    output = run("--model-id", model, "--instance", "inf2.xlarge")[1]
    assert "there are 16.0 GiB of host memory: loading takes about 13.0, compiling about 8 more" in " ".join(output.split())
    assert "of host memory: " not in run("--model-id", model, "--instance", "inf2.8xlarge")[1]


def test_plan_says_what_a_token_of_kv_cache_takes_on_a_cpu(run, folder):
    output = " ".join(run("--model-id", folder("Llama-3-8B"))[1].split())
    sizes = "256.0 KiB in float32, 128.0 KiB in bfloat16, 76.8 KiB in u8"  # 2 x 32 layers x 8 heads x 128 numbers
    assert f"on a CPU, a token's KV cache takes {sizes} (--kv-cache-dtype)" in output


def test_plan_says_where_adapters_are_served_and_reads_none(run, folder):
    options = ["--model-id", folder("Llama-3-8B"), "--instance", "inf2.xlarge"]
    code, output, errors = run(*options, "--lora-adapters", f"a={options[1]},someone/b@v1")
    words = "LoRA adapters by request are for CPUs and GPUs; on Neuron --merge-lora (MERGE_LORA) merges one into the weights"
    assert " ".join(output.split()).startswith(words) and (code, errors) == (0, "")
    assert output.endswith(run(*options)[1])


def test_plan_recommends_nothing_below_a_useful_length():
    def recommendation(**settings):
        machines = [INSTANCES[name] for name in ("inf2.xlarge", "inf2.24xlarge")]  # 70B fits with a length of 1024
        lines = list(plan.report("x", FAMILIES["Llama-2-70B"], machines, Config(model_id="x", **settings)))
        return next(line for line in lines if line.startswith("Recommended: "))

    assert recommendation() == "Recommended: none, as no machine has room for a context length of 2048."
    assert recommendation(max_total_tokens=512) == "Recommended: inf2.24xlarge, the smallest for context length 512."


@pytest.mark.parametrize("name", ["trn1n.32xlarge", "ml.trn1n.32xlarge"])
def test_plan_knows_the_machines_by_the_names_of_ec2_and_of_sagemaker(run, folder, name):
    assert "\ntrn1n.32xlarge\n" in run("--model-id", folder("TinyLlama"), "--instance", name)[1]


def test_plan_for_one_instance_prints_what_is_chosen_there(run, folder):
    argv = ("--instance", "inf2.48xlarge", "--quantize", "int8", "--max-batch-size", "8")
    code, output, errors = run("--model-id", folder("Llama-3-8B"), *argv)
    assert (code, errors) == (0, "")
    assert "inf2.24xlarge" not in output
    assert "tp_degree 24, batch size 8, context length 4096" in output


def test_plan_counts_two_bytes_for_each_weight_that_serve_dequantizes(run, folder):
    argv = ("--model-id", folder("Llama-3-8B"), "--instance", "inf2.xlarge")
    plain = run(*argv)
    quantization = {"quantization_config": {"quant_method": "gptq", "bits": 4}, "torch_dtype": "float16"}
    (argv[1] / "config.json").write_text(json.dumps(CONFIGS["Llama-3-8B"] | quantization))
    code, output, errors = run(*argv)
    assert (code, errors) == (plain[0], "") and output.endswith(plain[1])
    assert "8,030,261,248 parameters in bfloat16" in " ".join(plain[1].split())
    assert "parameters in float32" in " ".join(run(*argv, "--dtype", "float32")[1].split())


def test_plan_reads_the_settings_of_serve_from_the_environment(run, folder):
    model = folder("Llama-3-8B")
    _, output, _ = run("--instance", "trn1.2xlarge", MODEL_ID=str(model), MAX_TOTAL_TOKENS="3000", HF_BATCH_SIZE="3")
    assert "trn1.2xlarge\n  tp_degree 2, batch size 3, context length 3000" in output


def test_plan_for_a_model_that_does_not_fit_says_what_would(run, folder):
    code, output, _ = run("--model-id", folder("Llama-2-70B"), "--instance", "inf2.xlarge")
    assert code == 1 and "--tp-degree 12 would fit" in " ".join(output.split())


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--model-id", "/no/such/folder"], "no such folder"),
        (["--model-id", "{empty}"], "config.json"),
        (["--model-id", "{broken}"], "JSON"),
        (["--model-id", "{model}", "--instance", "p5.48xlarge"], "p5.48xlarge"),
        (["--model-id", "{model}", "--max-batch-size", "0"], "'0'"),
        (["--model-id", "{model}", "--dtype", "int4"], "int4"),
        (["--model-id", "{biased}"], "config.json: mlp_bias is True and this server supports False"),
        (["--model-id", "{ranker}"], "LlamaForSequenceClassification (architectures in config.json) generates no text"),
        (["--model-id", "{typed}"], "torch_dtype is 'torch.bfloat16'; write a type's name, such as 'bfloat16'"),
        (["--model-id", "{quantized}"], "this model is quantized with hqq, which is not supported; supported: awq, "),
        (["--model-id", "{listed}"], "config.json: rope_scaling is ['x'] and should be an object"),
        (["--model-id", "{model}", "--colour"], "unknown argument '--colour'"),
    ],
)
def test_plan_refuses_in_one_line_with_code_2(run, folder, tmp_path, argv, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    paths = {"empty": tmp_path / "empty", "broken": tmp_path / "broken", "model": folder("TinyLlama")}
    paths["biased"] = folder("Llama-3-8B")  # refused by `serve` in the same words
    (paths["biased"] / "config.json").write_text(json.dumps(CONFIGS["Llama-3-8B"] | {"mlp_bias": True}))
    paths["ranker"] = folder("Llama-2-13B")  # as this one
    ranker = {"architectures": ["LlamaForSequenceClassification"]}
    (paths["ranker"] / "config.json").write_text(json.dumps(CONFIGS["Llama-2-13B"] | ranker))
    paths["typed"] = folder("Llama-3.2-3B")
    (paths["typed"] / "config.json").write_text(json.dumps(CONFIGS["Llama-3.2-3B"] | {"torch_dtype": "torch.bfloat16"}))
    paths["quantized"] = folder("Llama-2-7B")
    quantization = {"quantization_config": {"quant_method": "hqq"}}
    (paths["quantized"] / "config.json").write_text(json.dumps(CONFIGS["Llama-2-7B"] | quantization))
    paths["listed"] = folder("Mistral-7B")
    (paths["listed"] / "config.json").write_text(json.dumps(CONFIGS["Mistral-7B"] | {"rope_scaling": ["x"]}))
    code, output, errors = run(*(word.format(**paths) for word in argv))
    assert (code, output) == (2, "")
    assert errors.startswith("error: ") and words in errors and len(errors.splitlines()) == 1


def test_the_verb_exits_with_its_code_and_needs_no_torch(folder):
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import runpy; "
    command = [sys.executable, "-c", blocked + "runpy.run_module('models.neuron.plan', run_name='__main__')"]
    runs = [
        subprocess.run([*command, *argv], cwd=HERE, capture_output=True, text=True, timeout=60)
        for argv in (["--model-id", str(folder("TinyLlama"))], ["--help"], ["--colour"])
    ]
    assert [done.returncode for done in runs] == [0, 0, 2]
    assert "Recommended: " in runs[0].stdout
    assert all(flag in runs[1].stdout for flag in ("--model-id", "--instance", "--max-total-tokens", "--quantize"))


def test_without_a_model_the_demonstration_model_is_planned_for(run):
    code, output, _ = run("--instance", "inf2.xlarge")
    assert code == 0 and output.startswith("neuron-textgen/demo (llama): ")


def test_the_model_to_try_is_planned_for_by_the_config_of_its_repository(run, folder, monkeypatch):
    hub = {TRIAL_REPOSITORY: folder("TinyLlama")}
    monkeypatch.setattr(plan, "fetch", lambda config, files: (hub[config.model_id], "its commit"))
    code, output, _ = run("--model-id", "smollm2", "--instance", "inf2.xlarge")
    assert code == 0 and output.startswith(f"{TRIAL_REPOSITORY} (llama): ")


# As published, with what transformers' classes have left out.
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "torch_dtype": "float16", "vocab_size": 32064},
    "torch_dtype": "float16",
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "image_size": 336,
        "patch_size": 14,
    },
}
SMOLVLM = {
    "model_type": "smolvlm",
    "text_config": llama(30, 576, 9, 3, 1536, 49280, 8192),
    "vision_config": {"model_type": "smolvlm_vision", "hidden_size": 768, "image_size": 512, "patch_size": 16},
}


@pytest.mark.parametrize(
    ("config", "text", "tower", "teraflops", "seconds"),
    [(LLAVA, 6_738_939_904, 0.32e9, 0.38, 0.64), (SMOLVLM, 162_000_000, 0.086e9, 0.21, 0.36)],
    ids=["LLaVA-1.5-7B", "SmolVLM-256M"],
)
def test_a_vision_tower_takes_memory_and_time_of_the_host(config, text, tower, teraflops, seconds):
    family = families.of(config)
    assert family.parameters == pytest.approx(text, rel=0.02)
    assert family.tower.parameters == pytest.approx(tower, rel=0.02)
    assert family.tower.tile_flops == pytest.approx(teraflops * 1e12, rel=0.03)
    assert plan.tile_s(family.tower, INSTANCES["inf2.8xlarge"]) == pytest.approx(seconds, rel=0.03)
    assert plan.tile_s(family.tower, INSTANCES["inf2.xlarge"]) == pytest.approx(8 * seconds, rel=0.03)
    of_text = families.of(config["text_config"] | families.text_config(config))
    assert of_text.tower is None
    assert family.host_bytes - of_text.host_bytes == 4 * family.tower.parameters


def test_plan_says_what_the_images_of_a_model_take(run, folder, monkeypatch):
    monkeypatch.setitem(CONFIGS, "LLaVA", LLAVA)
    code, output, errors = run("--model-id", folder("LLaVA"), "--instance", "inf2.8xlarge")
    assert (code, errors) == (0, "")
    output = " ".join(output.split())
    assert "reads images, with the vision tower on the host: about 322,961,408 parameters, 1.2 GiB of that memory" in output
    assert "an image takes about 0.6 s a tile on the host (estimate)" in output


@pytest.mark.parametrize("vision", [None, {"model_type": "other"}])
def test_a_tower_that_is_not_served_is_not_counted(vision):
    assert families.of(LLAVA | {"vision_config": vision}).tower is None
