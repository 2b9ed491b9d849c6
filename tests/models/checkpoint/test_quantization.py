"""A quantization that cannot be dequantized is rejected by its name, before a weight is downloaded."""

import json
import re

import pytest

import models
from config import Config
from models.checkpoint.quantization import SUPPORTED_METHODS, Quantization, dequantized_config
from models.errors import ModelError

METHODS = ", ".join(SUPPORTED_METHODS)
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def groups(**weights):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


def files(quantization, key="quantization_config", **config):
    config = {"model_type": "llama", key: quantization} | config
    return {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}


REJECTED = [
    *(
        ({"quant_method": method}, method, METHODS)
        for method in (
            "aqlm",
            "auto-round",
            "eetq",
            "fbgemm_fp8",
            "hqq",
            "marlin",
            "quark",
            "torchao",
            "vptq",
            "what comes next",
        )
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4", METHODS),
    ({"bits": 4}, "an unnamed method", METHODS),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, version gemv", "gemm"),
    ({"quant_method": "awq", "bits": 4, "version": "Marlin"}, "awq, version Marlin", "gemm"),
    ({"quant_method": "awq", "bits": 4, "format": "llm-awq"}, "awq, format llm-awq", "gemm"),
    ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "awq, bits 8", "4"),
    ({"quant_method": "gptq", "bits": 3}, "gptq, bits 3", "2, 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq, checkpoint_format marlin", "gptq, gptq_v2"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq, is_marlin_format True", "False"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 3}}}, "gptq, bits 3", "2, 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "gptq, pack_dtype int16", "int32"),
    ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "fp8, weight_scale_semantics inverse", "none"),
    ({"quant_method": "mxfp4"}, "mxfp4, model_type llama", "gpt_oss"),
    *(
        (CT | {"format": kind}, f"compressed-tensors, format {kind}", "float-quantized, int-quantized, .*")
        for kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "marlin-24", "sparse-24-bitmask")
    ),
    (
        CT | {"format": "mixed-precision", "config_groups": {"group_1": {"format": "nvfp4-pack-quantized"}}},
        "compressed-tensors, format nvfp4-pack-quantized",
        "float-quantized, .*",
    ),
    (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors, format sparse-24-bitmask", "float.*"),
    (CT | groups(num_bits=3), "compressed-tensors, num_bits 3", "4, 8"),
    (
        CT | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        "compressed-tensors, transform_config {'config_groups': .*",
        ".*",
    ),
]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(("quantization", "kind", "supported"), REJECTED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_named_before_a_weight_is_downloaded(hub, quantization, kind, supported, key):
    hub.push("someone/model", files(quantization, key))
    with pytest.raises(ModelError) as refused:
        models.prepare(Config(model_id="someone/model", device="cpu"))
    kind = kind if "{" in kind else re.escape(kind)
    line = f"this model is quantized with {kind}, which is not supported; supported: {supported}; or use the unquantized form"
    assert re.fullmatch(line, str(refused.value)), refused.value
    assert hub.fetched == ["config.json"]


def test_a_quantization_of_the_text_part_counts(hub):
    hub.push("someone/model", files(None, text_config={"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ModelError, match="is quantized with hqq, which"):
        models.prepare(Config(model_id="someone/model", device="cpu"))


def test_modelopt_is_known_by_its_own_file(tmp_path):
    """Without its scales, its float8 weights would be taken for those of an ordinary checkpoint."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Quantization.read(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match="quantized with modelopt FP8, which"):
        Quantization.read(tmp_path)


@pytest.mark.parametrize("given", ["gptq", ["gptq"], 4])
def test_what_is_no_object_is_named(tmp_path, given):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": given}))
    with pytest.raises(ModelError, match=re.escape(f"config.json: quantization_config is {given!r} and should be an object")):
        Quantization.read(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        (CT | {"sparsity_config": {"format": "dense"}, "transform_config": {}, "kv_cache_scheme": None}, "compressed-tensors"),
        (CT | groups(num_bits=8) | {"transform_config": {"config_groups": {}}}, "compressed-tensors"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": False, "checkpoint_format": None}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMM", "exllama_config": {"version": 2}}, "awq"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
    ],
    ids=str,
)
def test_published_settings_without_effect_on_the_layout_are_supported(tmp_path, quantization, method):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert Quantization.read(tmp_path).method == method


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": None}, {"quantization_config": {}, "text_config": None}], ids=str
)
def test_an_ordinary_checkpoint_has_no_quantization(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Quantization.read(tmp_path) is None


def test_the_parts_of_a_dequantized_model_have_one_dtype():
    given = {"model_type": "mistral3", "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    given["text_config"] = {"torch_dtype": "float16", "hidden_size": 4, "compression_config": {"quant_method": "fp8"}}
    expected = {"model_type": "mistral3", "torch_dtype": "float32", "text_config": {"hidden_size": 4, "torch_dtype": "float32"}}
    assert dequantized_config(given, "float32") == expected
