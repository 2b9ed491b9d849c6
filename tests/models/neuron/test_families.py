"""How each family's config.json is read; `neuron_sim/test_families.py` shows what transformers-neuronx computes."""

import math

import pytest
from published.configs import CONFIGS, PARAMETERS

from manifest import read_ropes
from models.checkpoint import rope
from models.errors import ModelError
from models.neuron import families
from models.neuron.base_family import BEYOND_LLAMA, LayerKind
from models.neuron.families import FAMILIES
from run import ConfigError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
NEEDED = {"granitemoehybrid": {"shared_intermediate_size": 192}}  # as large as two of the experts
FIELDS = [(name, field) for name, family in FAMILIES.items() for field in family.supported_values]
OTHER = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 1,
    list: lambda value: [*value, 1],
    str: lambda value: "something else",
    type(None): lambda value: 8.0,
}


def value_of(field, value):
    """As config.json has it."""
    return {"rope_type": value} if field == "rope_scaling" else value


def of(model_type="llama", **changes):
    return families.of(LLAMA | NEEDED.get(model_type, {}) | {"model_type": model_type} | changes)


def layers_of(family):
    """What its layers compute."""
    return [getattr(family, name) for name in ("ropes", "kinds", *BEYOND_LLAMA)]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_value_that_is_not_computed_is_refused_by_its_name(name, field):
    supported_values = FAMILIES[name].supported_values[field]
    other = OTHER[type(supported_values[0])](supported_values[0])
    with pytest.raises(ModelError) as refused:
        of(name, **{field: value_of(field, other)})
    message = str(refused.value)
    assert message.startswith(f"config.json: {field} is {other} and this server supports {supported_values[0]}")
    assert f" for {name} models on Neuron, so the output would be wrong" in message and len(message.splitlines()) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_that_says_nothing_of_them_is_accepted(name):
    family = of(name)
    # But null is no rope_scaling, and gpt-oss' default is one.
    nothing = dict.fromkeys(set(family.supported_values) - set(family.defaults))
    assert layers_of(of(name, **nothing)) == layers_of(family)


def test_the_librarys_own_class_serves_what_it_computes_and_ours_the_rest():
    assert of().name == of("mistral", sliding_window=None).name == "LlamaForSampling"
    assert of("mixtral").name == "mixtral, revision 2"
    assert of("phi3").name == "phi3, revision 2" and of("granite").name == "granite, revision 2"
    assert of(attention_bias=True).name == of(head_dim=32).name == "llama, revision 2"
    assert of("mistral").name == "mistral, revision 2"  # transformers' default is a window


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("qwen2", {"sliding_window": 8}, []),
        ("qwen2", {"sliding_window": None, "max_window_layers": None}, []),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
        ("gemma2", {"sliding_window": 8}, [8, None, 8, None]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, None, 8]),
        ("gpt_oss", {}, [128, None, 128, None]),
    ],
)
def test_windows_are_those_of_the_layers(model_type, fields, windows):
    assert [kind.window for kind in of(model_type, **fields).kinds] == windows


def test_the_positions_of_gpt_oss_are_scaled_unless_config_json_says_otherwise():
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    assert of("gpt_oss").ropes == of("gpt_oss", rope_scaling=scaling).ropes != ()
    assert of("gpt_oss", rope_scaling=None).ropes == ()
    assert of("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 1e4}).ropes == ()


def test_layers_without_positions_are_told_apart():
    assert of("smollm3").kinds == (LayerKind(),) * 3 + (LayerKind(rope=None),)
    assert of("smollm3", no_rope_layers=[0, 1, 1, 1]).kinds[0] == LayerKind(rope=None)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("name", ["gemma3_text", "olmo3"])
def test_a_llama3_rope_is_refused_where_layers_with_a_window_have_positions_of_their_own(name):
    positions = {"rope_theta": 5e5, **LLAMA3}
    new = {"full_attention": positions, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    for fields in ({"rope_scaling": LLAMA3}, {"rope_parameters": positions}, {"rope_parameters": new}):
        with pytest.raises(ModelError, match="rope_scaling is llama3 and this server supports default or linear or dynamic"):
            of(name, **fields)


LONG = {"short_factor": [1 + n / 10 for n in range(8)], "long_factor": [4.0] * 8}


@pytest.mark.models
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5},
        {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG},
        {"rope_type": "longrope", "factor": 4.0, **LONG},
    ],
    ids=str,
)
def test_scaled_positions_are_those_of_transformers(scaling):
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"original_max_position_embeddings": 256, **scaling, "rope_theta": 5e5},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    (given,) = read_ropes({"rope_theta": 5e5, "max_position_embeddings": 256, "rope_scaling": scaling})
    found = rope.scaled(given, 16)
    torch.testing.assert_close(torch.tensor(found.frequencies), expected)
    assert math.isclose(found.factor, factor, rel_tol=1e-6)


def test_a_longrope_ends_at_its_original_length():
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    family = of("phi3", rope_scaling=scaling, original_max_position_embeddings=16)
    assert family.length == 16 and family.rope["rope_type"] == "longrope"


def test_config_files_of_transformers_5_name_positions_by_the_kind_of_layer():
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert layers_of(of("gemma3_text", rope_parameters=new)) == layers_of(of("gemma3_text", **old))
    new["sliding_attention"] = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(ModelError, match="rope_type 'yarn' of layers with a sliding window is not supported"):
        of("gemma3_text", rope_parameters=new)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_positions_of_transformers_5_may_have_the_older_name_of_their_type(kind):
    positions = {"factor": 4.0, "rope_theta": 1e4}
    named = of(rope_parameters={"rope_type": kind, **positions})
    assert of(rope_parameters={"type": kind, **positions}).ropes == named.ropes != ()
    with pytest.raises(ModelError, match=f"rope_type '{kind}' of layers with a sliding window is not supported"):
        of("gemma3_text", rope_parameters={"full_attention": positions, "sliding_attention": {"type": kind, **positions}})


@pytest.mark.parametrize(("name", "base"), [("llama", 1e4), ("mixtral", 1e6), ("smollm3", 2e6), ("gemma3_text", 1e6)])
def test_a_base_that_config_files_of_transformers_5_leave_out_is_the_default_of_the_family(name, base):
    family = of(name, rope_parameters={"rope_type": "default"})
    assert (family.config["rope_theta"], family.config.get("rope_local_base_freq", 1e4)) == (base, 1e4)


def test_windows_of_olmo_3_have_the_base_that_config_files_of_transformers_5_name():
    far = {"rope_type": "default", "rope_theta": 5e5}
    positions = {"full_attention": far, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert of("olmo3", rope_parameters=positions).ropes == (rope.plain(5e5, 16), rope.plain(1e4, 16))
    assert of("olmo3", rope_theta=5e5).ropes == (rope.plain(5e5, 16), rope.plain(5e5, 16))


def test_experts_of_qwen3_moe_are_counted_as_either_transformers_names_them():
    expected = of("qwen3_moe", num_experts=16).experts
    assert of("qwen3_moe", num_local_experts=16).experts == expected
    assert of("qwen3_moe", num_local_experts=16, num_experts=None).experts == expected


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 256),  # two thirds of 96, in steps of 256
        ({"block_ff_dim": 300, "block_multiple_of": 16}, 208),  # LFM2's name, which decides
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 16}, 96),
        ({"block_ffn_dim_multiplier": None}, 64),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_the_width_of_lfm2_is_made_as_transformers_makes_it(fields, width):
    assert of("lfm2", **fields).intermediate == width


def test_a_width_of_lfm2_that_cannot_be_rounded_is_named():
    with pytest.raises(ConfigError, match="block_multiple_of is 0 and should be a positive whole number"):
        of("lfm2", block_multiple_of=0)


def test_granite_4_has_positions_by_their_type_and_an_mlp_as_large_as_some_of_its_experts():
    assert {kind.rope for kind in of("granitemoehybrid", layer_types=["attention"] * 4).kinds} == {None}
    assert {kind.rope for kind in of("granitemoehybrid", position_embedding_type="rope").kinds[1:]} == {0}
    experts = of("granitemoehybrid", num_local_experts=6).experts
    assert (experts.count, experts.shared, experts.columns) == (8, 2, 96)
    assert of("granitemoehybrid", num_local_experts=0, shared_intermediate_size=100).intermediate == 100
    with pytest.raises(ModelError, match="shared_intermediate_size is 200 and this server supports 192 for granitemoehybrid"):
        of("granitemoehybrid", shared_intermediate_size=200)


def test_lfm2_is_tied_by_either_name_and_its_attentions_are_named_or_numbered():
    family = of("lfm2", tie_embedding=False, full_attn_idxs=[1, 3], norm_eps=1e-3)
    assert not family.is_tied and family.as_llama()["rms_norm_eps"] == 1e-3
    assert family.recurrent_layers == {0, 2} == of("lfm2", layer_types=["conv", "full_attention"] * 2).recurrent_layers
    assert of("lfm2").is_tied and not of("lfm2").recurrent_layers


def test_phi_4_mini_of_transformers_5_turns_three_quarters_of_a_head():
    positions = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    assert of("phi3", rope_parameters=positions).as_llama()["rotary_percentage"] == 0.75


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_published_models_are_counted_exactly(name):
    assert families.of(CONFIGS[name]).parameters == PARAMETERS[name]


@pytest.mark.models
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_model_that_transformers_makes(name):
    import torch
    import transformers

    if name in ("code_llama", "internlm2"):
        pytest.skip("not a model type of transformers")
    config = transformers.AutoConfig.for_model(**LLAMA | NEEDED.get(name, {}) | {"model_type": name, "pad_token_id": None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert families.of(config.to_dict()).parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("kind", ["llava", "llava_next", "llava_onevision", "smolvlm", "idefics3", "mistral3", "internvl"])
def test_a_vision_language_model_is_its_text_part(kind):
    text = LLAMA | {"model_type": "qwen3", "head_dim": 16, "torch_dtype": "float32"}
    family = families.of({"model_type": kind, "text_config": text, "dtype": "bfloat16", "vision_config": {}})
    alone = families.of(text)
    assert (family.is_nested, alone.is_nested) == (True, False)
    assert (family.name, layers_of(family)) == (alone.name, layers_of(alone))  # the compiled graphs of one serve the other
    assert family.dtype == "bfloat16"


def test_sizes_that_a_text_config_leaves_out_are_those_of_transformers_classes():
    config = {"model_type": "llava_next", "torch_dtype": "float16", "vision_config": {}}
    text = {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32064}
    family = families.of(config | {"text_config": text})
    assert (family.layers, family.hidden, family.heads, family.kv_heads) == (32, 4096, 32, 8)
    assert families.of(config | {"text_config": {"model_type": "qwen2"}}).intermediate == 22016
    with pytest.raises(ConfigError, match="num_hidden_layers is None"):
        families.of({"model_type": "llama"})


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next"])
def test_a_shared_expert_has_the_size_of_one_or_several_others(name):
    experts = of(name, num_experts=16, moe_intermediate_size=24, shared_expert_intermediate_size=24).experts
    assert (experts.count, experts.shared, experts.columns) == (17, 1, 24)
    assert of(name, num_experts=16, moe_intermediate_size=24, shared_expert_intermediate_size=48).experts.shared == 2
    with pytest.raises(ModelError, match="shared_expert_intermediate_size is 60 and this server supports 48"):
        of(name, moe_intermediate_size=24, shared_expert_intermediate_size=60)


OTHER_POSITIONS = ["gemma3", "glm_ocr", "lighton_ocr", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@pytest.mark.parametrize("kind", OTHER_POSITIONS)
def test_a_vision_language_model_of_other_positions_is_refused(kind):
    with pytest.raises(ConfigError, match=f"model_type '{kind}' is not supported on Neuron"):
        families.of({"model_type": kind, "text_config": LLAMA, "vision_config": {}})
