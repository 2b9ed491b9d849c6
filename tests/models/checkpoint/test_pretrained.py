"""Hybrid models in all layouts in which people publish them: names of a wrapper or of its text part, with weights that are not
served or without, and quantized in some layers; the embeddings are tied where the file has no head."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from quantized import quantize
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, made_checkpoint, settings

from models.checkpoint.dequantize import convert_quantized
from models.checkpoint.pretrained import load_pretrained, reference_logits
from models.errors import ModelError

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
TEXT = SIZES | HEADS | LINEAR | {"num_hidden_layers": 4, "head_dim": 32}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
WRAPPER = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION | {"num_position_embeddings": 16})
MTP = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}
IDS = list(range(20))


@pytest.fixture(scope="module")
def wrapper():
    return made_checkpoint(WRAPPER, model_class=transformers.Qwen3_5ForConditionalGeneration)


@pytest.fixture(scope="module")
def tensors(wrapper):
    return load_file(wrapper / "model.safetensors")


@pytest.fixture(scope="module")
def configs(wrapper):
    """config.json of the wrapper and of its text part."""
    whole = json.loads((wrapper / "config.json").read_text())
    return {"wrapper": whole, "text": whole["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}}


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("variable", "setting", "threads"), [(None, None, 3), ("5", None, 1), ("5", 2, 2), (None, 2, 2)])
def test_torch_runs_on_as_many_threads_as_the_process_may_use_also_in_a_conversion(
    wrapper, monkeypatch, variable, setting, threads
):
    """Torch has read OMP_NUM_THREADS when it was imported."""
    monkeypatch.setattr("models.checkpoint.pretrained.usable_threads", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        load_pretrained(settings(wrapper, 32, dtype="float32", threads=setting), wrapper, "cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def logits(folder):
    model = load_pretrained(settings(folder, 32, dtype="float32"), folder, "cpu")
    return reference_logits(model, IDS)


def text_names(tensors):
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def expected(wrapper, tensors):
    """Of transformers' class for the text, from the plain names."""
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**TEXT))
    loaded = model.load_state_dict(text_names(without_vision(tensors)), strict=False)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    return reference_logits(model.eval(), IDS)


def without_vision(tensors):
    return {name: tensor for name, tensor in tensors.items() if "visual" not in name}


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ("wrapper", lambda tensors: tensors | MTP),
        ("wrapper", lambda tensors: without_vision(tensors)),
        ("wrapper", lambda tensors: text_names(without_vision(tensors))),
        ("text", lambda tensors: without_vision(tensors) | MTP),  # as text-only fine-tunes are saved
        ("text", lambda tensors: text_names(without_vision(tensors)) | MTP),
        ("text", lambda tensors: tensors | MTP),
    ],
    ids=["whole", "no vision", "wrapper, text names", "text, wrapper names", "text", "text, all weights"],
)
def test_all_layouts_of_a_model_have_the_same_logits(tmp_path, tensors, configs, expected, config, change):
    np.testing.assert_allclose(logits(write(tmp_path, change(tensors), configs[config])), expected, atol=1e-5)


def test_files_without_an_index_hold_a_wrapper_whose_text_is_served(tmp_path, tensors, configs, expected):
    folder = write(tmp_path, without_vision(tensors), configs["wrapper"])
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    np.testing.assert_allclose(logits(folder), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["model.layers.0.linear_attn.norm2.weight", "model.layers.4.mlp.up_proj.weight"])
def test_a_weight_that_would_be_dropped_is_refused_by_name(tmp_path, tensors, configs, name):
    folder = write(tmp_path, text_names(without_vision(tensors)) | {name: torch.ones(3)}, configs["text"])
    with pytest.raises(ModelError, match=f"holds 1 weights that are not read, {name} among them"):
        logits(folder)


def test_a_missing_weight_is_refused_by_name(tmp_path, tensors, configs):
    some = {name: tensor for name, tensor in tensors.items() if not name.endswith("1.linear_attn.A_log")}
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, model\.layers\.1\.linear_attn\.A_log among them"):
        logits(write(tmp_path, some, configs["wrapper"]))


TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(("top", "text"), [(TIED, UNTIED), (UNTIED, TIED), (TIED, {}), ({}, UNTIED), (UNTIED, UNTIED)])
@pytest.mark.parametrize("has_head", [True, False])
def test_the_file_decides_whether_embeddings_are_tied(tmp_path, tensors, configs, expected, has_head, top, text):
    """Where the two parts of config.json disagree, or say it of a file that has a head."""
    whole = {name: value for name, value in configs["wrapper"].items() if name != "tie_word_embeddings"}
    nested = {name: value for name, value in whole["text_config"].items() if name != "tie_word_embeddings"}
    given = {name: tensor for name, tensor in tensors.items() if has_head or name != "lm_head.weight"}
    folder = write(tmp_path, given, whole | top | {"text_config": nested | text})
    if has_head:
        np.testing.assert_allclose(logits(folder), expected, atol=1e-5)
    elif top == text:
        with pytest.raises(ModelError, match=r"lacks 1 of its weights, lm_head\.weight among them"):
            logits(folder)
    else:
        embeddings = given["model.language_model.embed_tokens.weight"].clone()
        same = write(tmp_path / "same", tensors | {"lm_head.weight": embeddings}, configs["wrapper"])
        np.testing.assert_array_equal(logits(folder), logits(same))


def test_a_null_does_not_say_that_embeddings_are_not_tied(tmp_path):
    """transformers reads it of Gemma 3 alone, and looks for a head that the file does not have."""
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    made = transformers.Gemma3Config(text_config=SIZES | HEADS | {"num_hidden_layers": 2}, vision_config=vision)
    folder = made_checkpoint(made, model_class=transformers.Gemma3ForConditionalGeneration)
    config = json.loads((folder / "config.json").read_text())
    given = config | {"tie_word_embeddings": None, "text_config": config["text_config"] | UNTIED}
    tensors = load_file(folder / "model.safetensors")
    assert not any("lm_head" in name for name in tensors)
    np.testing.assert_array_equal(logits(write(tmp_path, tensors, given)), logits(folder))


@pytest.mark.parametrize("names", ["wrapper", "text"])
@pytest.mark.parametrize("layout", ["fp8 in blocks", "ct fp8 of channels", "ct 4 bits"])
def test_weights_are_dequantized_where_they_have_a_scale_whatever_the_lists_say(tmp_path, tensors, configs, names, layout):
    """Attention and MLPs have scales here, linear attention has none; the lists name modules of wrappers, and none of ours."""
    given = without_vision(tensors)
    plain = write(tmp_path / "plain", text_names(given) if names == "text" else given, configs[names])
    quantized = quantize(plain, tmp_path / "quantized", layout)
    method = json.loads((quantized / "config.json").read_text())["quantization_config"]
    lists = {"modules_to_not_convert": ["model.language_model.layers.0.mlp"], "ignore": ["model.visual.blocks.0"]}
    edit_config(quantized, quantization_config=method | lists)
    target = tmp_path / "target"
    target.mkdir()
    convert_quantized(quantized, "float32", target)
    np.testing.assert_allclose(logits(target), logits(tmp_path / "reference"), atol=1e-5)


def test_a_config_with_infinity_is_read_and_nemotrons_time_steps_have_no_least_value(tmp_path):
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "hybrid_override_pattern": "M*"}
    config = transformers.NemotronHConfig(**SIZES | HEADS | sizes, head_dim=16)
    folder = made_checkpoint(config)
    written = json.loads((folder / "config.json").read_text()) | {"time_step_limit": [0.0, math.inf]}
    folder = write(tmp_path, load_file(folder / "model.safetensors"), written)
    assert "Infinity" in (folder / "config.json").read_text()
    model = load_pretrained(settings(folder, 32, dtype="float32"), folder, "cpu")
    limits = {module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")}
    assert limits == {(0.0, math.inf)}
    assert model.config.layer_types == ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"block_ff_dim": 96, "intermediate_size": 12, "block_multiple_of": 16}, 64),
        ({"intermediate_size": 96, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5}, 96),
        ({"intermediate_size": 96, "block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_the_width_of_lfm2_is_that_of_its_file_by_either_name(sizes, expected):
    config = (
        SIZES | HEADS | {"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [1], "tie_embedding": True} | sizes
    )
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config.from_dict(config))
    assert model.model.layers[0].feed_forward.w1.out_features == expected
    assert model.config.tie_word_embeddings
