"""A quantized checkpoint becomes the ordinary one that its integers and scales stand for, or is rejected by name."""

import json

import numpy as np
import pytest
import torch
import transformers
from quantized import LAYOUTS, bnb_4bit, ct_packed, gptq, quantize, quantize_experts, write
from safetensors.torch import load_file, save_file
from tiny_models import GROUPED, POSITIONS, edit_config, llama, references, run, save_checkpoint

import models
from config import CHECKPOINT_QUANTIZE, Config
from manifest import read_json
from models.cache import READER_VERSIONS
from models.checkpoint import dequantize, source
from models.checkpoint.dequantize import TENSOR_FORMATS, convert_quantized
from models.child import run_module
from models.errors import ModelError
from models.openvino import OpenVino
from models.pytorch import PyTorch
from run import ConfigError

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("no_children"), pytest.mark.filterwarnings("ignore")]

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
    convert_quantized(folder, dtype, target)
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


@pytest.mark.parametrize("shard_bytes", [50_000, 1], ids=["some", "each"])
def test_large_weights_go_into_several_files(plain, tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(dequantize, "SHARD_BYTES", shard_bytes)
    folder = quantize(plain["llama"], tmp_path / "quantized", "fp8")
    dequantized(folder, tmp_path / "found")
    sizes = [len(load_file(path)) for path in (tmp_path / "found").glob("*.safetensors")]
    assert len(sizes) > 2 and min(sizes) > 0 and sum(sizes) == len(load_file(tmp_path / "reference" / "model.safetensors"))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "found").state_dict()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "reference").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """The folder of a checkpoint whose experts are in mxfp4, and the weights that these stand for."""
    root = tmp_path_factory.mktemp("gpt-oss")
    config = transformers.GptOssConfig(**GROUPED | SIZES | {"intermediate_size": 32}, num_local_experts=4)
    plain = save_checkpoint(root / "plain", config, dtype=torch.bfloat16)
    folder = quantize_experts(plain, root / "quantized")
    return folder, load_file(root / "reference" / "model.safetensors")


def test_the_experts_of_gpt_oss_are_those_that_codes_and_exponents_stand_for(gpt_oss, tmp_path):
    folder, reference = gpt_oss
    found = dequantized(folder, tmp_path / "found", "bfloat16")
    assert set(found) == set(reference)
    assert all(torch.equal(tensor.float(), reference[name].float()) for name, tensor in found.items())
    wanted = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=wanted)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "found")
    ids = torch.arange(12)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("groups", [{"size": None}, {"size": 15}, {"size": 16, "shuffled": True}], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_rows_and_columns_that_fill_no_word(bits, groups):
    weight = np.random.default_rng(0).normal(size=(13, 45)).astype(np.float32)
    parts, values = ct_packed(weight, bits, symmetric=False, **groups)
    found = TENSOR_FORMATS["compressed-tensors"][0](parts, LAYOUTS["ct 4 bits"][0])
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_0_and_of_the_largest_lie_beside_others(bits, version):
    """The first version subtracts one from whole words: below a zero point of 0 it borrows from the next column's."""
    random = np.random.default_rng(0)
    weight = random.uniform(-1, 1, (64, 32)).astype(np.float32)
    columns = random.permutation(64)
    weight[columns[:24]] = np.abs(weight[columns[:24]])  # their zero point is 0
    weight[columns[24:40]] = -np.abs(weight[columns[24:40]])  # the largest
    parts, values = gptq(weight, bits, symmetric=False, version=version)
    settings = {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    np.testing.assert_array_equal(TENSOR_FORMATS["gptq"][0](parts, settings), values)
    assert np.abs(values[columns[:40]] - weight[columns[:40]]).max() < 1 / (2**bits - 1)


def test_a_block_of_bitsandbytes_that_is_not_full():
    parts, values = bnb_4bit(np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32), double=False)
    parts["weight"] = parts["weight"][:39]
    state = {"blocksize": 64, "shape": [6, 13]}
    parts["weight.quant_state"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    found = TENSOR_FORMATS["bitsandbytes"][0](parts, {})
    np.testing.assert_array_equal(found, values.flatten()[:78].reshape(6, 13))


def test_a_g_idx_that_is_not_set_means_groups_in_order():
    weight = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    parts, values = ct_packed(weight)
    parts["weight_g_idx"] = torch.full((32,), -1, dtype=torch.int32)
    found = TENSOR_FORMATS["compressed-tensors"][0](parts, LAYOUTS["ct 4 bits"][0])
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
            f"{Q_PROJ}weight cannot be dequantized: TypeError: it is stored in torch.float8_e4m3fn and has no scales",
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


# The whole path, from what is named to tokens.


@pytest.fixture
def config(tmp_path):
    where = {"device": "cpu", "model_cache": str(tmp_path / "cache"), "max_total_tokens": POSITIONS, "threads": 1}
    return lambda model_id, **more: Config(model_id=str(model_id), **{"dtype": "float32"} | where | more)


@pytest.mark.usefixtures("conversions")
@pytest.mark.parametrize(
    ("layout", "family"),
    [("fp8 in blocks", "qwen3-moe"), ("gptq with g_idx", "qwen3"), ("awq", "llama"), ("ct 4 bits with zeros", "llama")],
)
def test_the_tokens_are_those_of_transformers_with_the_dequantized_weights(plain, tmp_path, config, layout, family):
    folder = quantize(plain[family], tmp_path / "quantized", layout)
    model = models.load(models.prepare(config(folder)), lambda phase: None)
    assert model.engine == "openvino"
    for reference in references(tmp_path / "reference", lengths=(2, 11)):
        (sequence,) = run(model, [reference.prompt])
        assert sequence.tokens == reference.tokens


@pytest.mark.usefixtures("conversions")
def test_the_tokens_of_gpt_oss_are_those_of_transformers(gpt_oss, config):
    folder, _reference = gpt_oss
    edit_config(folder.with_name("reference"), dtype="float32")
    model = models.load(models.prepare(config(folder)), lambda phase: None)
    assert model.engine == "openvino"
    for reference in references(folder.with_name("reference"), lengths=(2, 11)):
        assert run(model, [reference.prompt])[0].tokens == reference.tokens


@pytest.mark.usefixtures("conversions")
def test_compressed_to_int8_again_it_is_what_its_dequantized_form_is_compressed_to(plain, tmp_path, config):
    folder = quantize(plain["llama"], tmp_path / "quantized", "awq")
    model = models.load(models.prepare(config(folder, quantize="int8")), lambda phase: None)
    assert model.quantize == "int8"
    expected = models.load(models.prepare(config(tmp_path / "reference", quantize="int8")), lambda phase: None)
    prompts = [[5, 6, 7], [80, 2]]
    assert [each.tokens for each in run(model, prompts)] == [each.tokens for each in run(expected, prompts)]


def test_a_model_on_the_hub_is_fetched_dequantized_once_and_keeps_its_name(hub, plain, tmp_path, config, monkeypatch, caplog):
    folder = quantize(plain["llama"], tmp_path / "quantized", "ct fp8", key="compression_config")
    hub.push("someone/model", folder)
    caplog.set_level("INFO", "model")
    prepared = models.prepare(config("someone/model", dtype="auto"))
    assert "model-00001-of-00002.safetensors" in hub.fetched
    assert prepared.config.model_name == "someone/model" and prepared.manifest.config_json["torch_dtype"] == "bfloat16"
    prepared.fetch_weights()  # there is nothing to fetch
    found = {name for path in prepared.folder.glob("*.safetensors") for name in load_file(path)}
    assert found == set(load_file(tmp_path / "reference" / "model.safetensors"))
    said = "someone/model is quantized with compressed-tensors and is served dequantized, with the memory of bfloat16"
    assert f"{said}; --quantize int8 (QUANTIZE) takes 1 byte a weight" in caplog.messages
    monkeypatch.setattr(source, "run_module", None)
    caplog.clear()
    assert models.prepare(config("someone/model", dtype="auto", quantize="int8")).folder == prepared.folder
    assert said in caplog.messages


def test_a_quantized_model_that_no_engine_serves_is_rejected_before_its_weights_are_fetched(hub, config):
    facts = {"model_type": "zamba2", "quantization_config": LAYOUTS["fp8"][0]}
    hub.push("someone/model", {"config.json": json.dumps(facts).encode(), "model.safetensors": b"weights"})
    with pytest.raises(ConfigError, match="zamba2"):
        models.prepare(config("someone/model"))
    assert hub.fetched == ["config.json"]


def test_other_weights_another_dtype_and_another_version_of_this_reader_are_dequantized_again(
    plain, tmp_path, config, monkeypatch, caplog
):
    caplog.set_level("INFO", "model")
    monkeypatch.setattr(source, "run_module", lambda arguments, **environ: None)
    folder = quantize(plain["llama"], tmp_path / "quantized", "awq")

    def entry(engine=OpenVino, **settings):
        return source.fetch_source(config(folder, **settings), engine)[1]

    entries = [entry(), entry(dtype="bfloat16")]
    assert entry() == entries[0] and entry(dtype="auto") == entries[1]
    monkeypatch.setitem(READER_VERSIONS, "dequantize", READER_VERSIONS["dequantize"] + 1)
    entries.append(entry())
    change(folder, lambda name, tensor: (name, tensor * 2 if name.endswith("scales") else tensor))
    assert len({*entries, entry()}) == 4
    caplog.clear()
    entry(PyTorch)  # where weights are not compressed
    assert f"{folder} is quantized with awq and is served dequantized, with the memory of float32" in caplog.messages


def test_an_adapter_is_merged_into_the_dequantized_weights(plain, tmp_path, config):
    folder = quantize(plain["llama"], tmp_path / "quantized", "awq")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(64, 4)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    prepared = models.prepare(config(folder, merge_lora=f"mine={adapter}"))
    (path,) = prepared.folder.glob("*.safetensors")
    expected = load_file(tmp_path / "reference" / "model.safetensors")[f"{Q_PROJ}weight"] + 4
    np.testing.assert_allclose(load_file(path)[f"{Q_PROJ}weight"], expected, rtol=1e-6)


def test_weights_that_cannot_be_dequantized_are_one_line(plain, tmp_path, config):
    folder = quantize(plain["llama"], tmp_path / "quantized", "awq")
    change(folder, lambda name, tensor: (None if name.endswith("scales") else name, tensor))
    with pytest.raises(ModelError) as refused:
        models.prepare(config(folder))
    failure = f"dequantizing {folder} into float32 failed: {FIRST} cannot be dequantized: KeyError: 'scales'"
    assert str(refused.value) == failure


def test_a_method_of_tgi_in_quantize_is_for_a_quantized_checkpoint_and_changes_nothing_there(plain, tmp_path, config, caplog):
    caplog.set_level("INFO", "model")
    folder = quantize(plain["llama"], tmp_path / "quantized", "awq")
    assert models.prepare(config(folder, quantize=CHECKPOINT_QUANTIZE)).config == models.prepare(config(folder)).config
    assert caplog.text.count("names a method and has no effect: a quantized checkpoint needs none") == 1
    with pytest.raises(ConfigError, match=r"which need none here, and \S+ is not quantized; give int8, or int4 on a CPU$"):
        models.prepare(config(plain["llama"], quantize=CHECKPOINT_QUANTIZE))


@pytest.mark.usefixtures("conversions")
def test_a_child_process_dequantizes_what_a_server_then_serves(plain, tmp_path, config, monkeypatch):
    """A server of such children is in test_source.py."""
    monkeypatch.setattr(source, "run_module", run_module)
    folder = quantize(plain["qwen3"], tmp_path / "quantized", "bitsandbytes nf4")
    prepared = models.prepare(config(folder))
    assert prepared.config.model_name == str(folder)
    expected = references(tmp_path / "reference", lengths=(3,))[0]
    (sequence,) = run(models.load(prepared, lambda phase: None), [expected.prompt])
    assert sequence.tokens == expected.tokens
