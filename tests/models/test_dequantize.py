"""A quantized checkpoint becomes the ordinary one that its integers and scales stand for, or is rejected by name."""

import numpy as np
import pytest
import torch
import transformers
from quantized import LAYOUTS, ct_packed, mxfp4, quantize, write
from safetensors.torch import load_file, save_file
from tiny_models import GROUPED, edit_config, llama, save_checkpoint

from manifest import read_json
from models import dequantize
from models.base import ModelError
from models.dequantize import FORMATS, write_checkpoint
from models.quantization import Quantization

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 16}  # blocks of 32 do not divide 80
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "llama": llama(**SIZES),
    "qwen3": transformers.Qwen3Config(**GROUPED | SIZES),
    "qwen3-moe": transformers.Qwen3MoeConfig(**GROUPED | SIZES | EXPERTS),
}


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Ordinary checkpoints, by family."""
    root = tmp_path_factory.mktemp("plain")
    return {name: save_checkpoint(root / name, config) for name, config in FAMILIES.items()}


def dequantized(folder, target, dtype="float32"):
    target.mkdir()
    write_checkpoint(folder, dtype, target)
    return {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rejection(folder, target):
    with pytest.raises(ModelError) as refused:
        dequantized(folder, target)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_are_those_that_integers_and_scales_stand_for(plain, tmp_path, layout, family):
    quantize(plain[family], tmp_path / "quantized", layout)
    expected = load_file(tmp_path / "reference" / "model.safetensors")
    found = dequantized(tmp_path / "quantized", tmp_path / "found")
    assert set(expected) <= set(found) and not [name for name in found if not name.endswith((".weight", ".bias"))]
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        np.testing.assert_array_equal(found[name], tensor, name)
    _model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "found", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]


def test_what_has_16_bits_becomes_bfloat16_and_nothing_speaks_of_a_quantization_afterwards(tmp_path):
    plain = save_checkpoint(tmp_path / "plain", FAMILIES["llama"], dtype=torch.float16)
    weights = load_file(plain / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    folder = quantize(plain, tmp_path / "quantized", "gptq")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in Mistral's format")
    found = dequantized(folder, tmp_path / "found", "bfloat16")
    for name, tensor in load_file(tmp_path / "reference" / "model.safetensors").items():
        dtype = torch.float32 if name == "model.norm.weight" else torch.bfloat16
        assert torch.equal(found[name], tensor.to(dtype)) and found[name].dtype == dtype, name
    expected = read_json(tmp_path / "reference" / "config.json") | {"torch_dtype": "bfloat16"}
    del expected["dtype"]
    assert read_json(tmp_path / "found" / "config.json") == expected
    for path in ("generation_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "found" / path).read_bytes() == (folder / path).read_bytes()
    files = {path.name for path in (tmp_path / "found").glob("*.safetensors*")}
    assert files == {"model-00000.safetensors", "model.safetensors.index.json"}


def test_large_weights_go_into_several_files(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(dequantize, "SHARD_BYTES", 50_000)
    folder = quantize(plain["llama"], tmp_path / "quantized", "fp8")
    dequantized(folder, tmp_path / "found")
    assert len(list((tmp_path / "found").glob("*.safetensors"))) > 2
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "found").state_dict()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "reference").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_experts_of_gpt_oss_are_those_that_codes_and_exponents_stand_for(tmp_path):
    config = transformers.GptOssConfig(**GROUPED | SIZES | {"intermediate_size": 32}, num_local_experts=4)
    plain = save_checkpoint(tmp_path / "plain", config, dtype=torch.bfloat16)
    stored = reference = load_file(plain / "model.safetensors")
    for name in [name for name in reference if name.endswith(("gate_up_proj", "down_proj"))]:
        parts, values = mxfp4(reference[name].shape)
        stored = {other: tensor for other, tensor in stored.items() if other != name}
        stored |= {name + ending: tensor for ending, tensor in parts.items()}
        reference = reference | {name: torch.from_numpy(values)}
    write(plain, tmp_path / "quantized", stored, reference, quantization_config={"quant_method": "mxfp4"})
    found = dequantized(tmp_path / "quantized", tmp_path / "found", "bfloat16")
    assert set(found) == set(reference)
    assert all(torch.equal(tensor.float(), reference[name].float()) for name, tensor in found.items())
    wanted = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", quantization_config=wanted)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "found")
    ids = torch.arange(12)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_rows_and_columns_that_fill_no_word(bits):
    weight = np.random.default_rng(0).normal(size=(13, 45)).astype(np.float32)
    parts, values = ct_packed(weight, bits, symmetric=False, size=None)
    settings = LAYOUTS["ct 4 bits"][0]
    found = FORMATS["compressed-tensors"][0](parts, Quantization("compressed-tensors", settings))
    np.testing.assert_array_equal(found, values)


def test_a_g_idx_that_is_not_set_means_groups_in_order():
    weight = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    parts, values = ct_packed(weight)
    parts["weight_g_idx"] = torch.full((32,), -1, dtype=torch.int32)
    found = FORMATS["compressed-tensors"][0](parts, Quantization("compressed-tensors", LAYOUTS["ct 4 bits"][0]))
    np.testing.assert_array_equal(found, values)


def test_an_unquantized_model_whose_config_names_a_method_is_copied(plain, tmp_path):
    """bitsandbytes quantizes such a checkpoint when it loads it."""
    write(plain["llama"], tmp_path / "quantized", weights := load_file(plain["llama"] / "model.safetensors"), weights)
    edit_config(tmp_path / "quantized", quantization_config={"load_in_4bit": True})
    found = dequantized(tmp_path / "quantized", tmp_path / "found")
    assert set(found) == set(weights) and all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def change(folder, function):
    """Changes the tensors of a checkpoint."""
    for path in folder.glob("*.safetensors"):
        save_file({name: tensor for name, tensor in map(function, *zip(*load_file(path).items())) if name}, path)


FIRST = "model.layers.0.mlp.down_proj.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("layout", "function", "said"),
    [
        (
            "fp8",
            lambda name, tensor: (None if name == f"{Q_PROJ}weight_scale_inv" else name, tensor),
            f"{Q_PROJ}weight is stored in float8_e4m3fn and has no scales",
        ),
        (
            "awq",
            lambda name, tensor: (None if name == f"{Q_PROJ}qweight" else name, tensor),
            f"{Q_PROJ}weight cannot be dequantized: KeyError: 'qweight'",
        ),
        (
            "ct fp8",
            lambda name, tensor: (name, tensor.bfloat16()),
            f"{FIRST} cannot be dequantized: TypeError: it has scales and is stored in torch.bfloat16",
        ),
    ],
)
def test_weights_that_would_be_read_wrong_are_rejected_by_name(plain, tmp_path, layout, function, said):
    folder = quantize(plain["llama"], tmp_path / "quantized", layout)
    change(folder, function)
    assert rejection(folder, tmp_path / "found") == said


def test_a_folder_without_weights_and_a_damaged_file_are_named(plain, tmp_path):
    folder = quantize(plain["llama"], tmp_path / "quantized", "fp8")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"no weights")
    assert rejection(folder, tmp_path / "found").startswith(f"{folder} cannot be read: SafetensorError: ")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert rejection(folder, tmp_path / "again") == f"{folder} holds no weights (*.safetensors)"


@pytest.mark.parametrize("layout", ["fp8", "ct 4 bits", "gptq 8 bits", "bitsandbytes nf4"])
def test_the_disk_must_have_room_for_two_bytes_a_weight(plain, tmp_path, monkeypatch, layout):
    folder = quantize(plain["llama"], tmp_path / "quantized", layout)
    weights = load_file(tmp_path / "reference" / "model.safetensors")
    needed = 2 * sum(tensor.numel() for tensor in weights.values())
    free = []
    monkeypatch.setattr(dequantize.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free[-1]}))
    free.append(needed + 3000)  # of biases
    dequantized(folder, tmp_path / "enough", "bfloat16")
    free.append(needed - 1)
    with pytest.raises(
        ModelError, match=r"its weights take 0\.0 GB, and .* has 0\.0 GB free; make room, or .* \(MODEL_CACHE\)"
    ):
        dequantized(folder, tmp_path / "little", "bfloat16")
    assert not list((tmp_path / "little").iterdir())
