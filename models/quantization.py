"""What a checkpoint says about its quantized weights: the method, and whether they can be dequantized.

`Quantization.read` rejects an unsupported format by name, from config.json alone, before weights are
downloaded. `dequantize.py` does the arithmetic; this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import Config
from manifest import read_json
from models.base import ModelError

KEYS = ("quantization_config", "compression_config")  # the latter in older files of compressed-tensors
MODELOPT = "hf_quant_config.json"  # older checkpoints of modelopt say it only here
# Per method, the settings that decide how weights are stored, and their supported values; unset always is.
SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "awq": {"version": ("gemm",), "format": ("gemm",), "bits": (4,)},
    "bitsandbytes": {},
    "compressed-tensors": {
        "format": (
            "float-quantized",
            "int-quantized",
            "naive-quantized",
            "pack-quantized",
            "mixed-precision",
            "dense",
        ),
        "num_bits": (4, 8),
        "transform_config": ({}, {"config_groups": {}}),
    },
    "fp8": {"weight_scale_semantics": ()},  # GPTQModel divides by the scales
    "gptq": {
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "is_marlin_format": (False,),
        "bits": (2, 4, 8),
        "pack_dtype": ("int32",),
    },
    "mxfp4": {"model_type": ("gpt_oss",)},
}


@dataclass(frozen=True)
class Quantization:
    """The quantization of a checkpoint that can be dequantized."""

    method: str
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Quantization | None:
        """None where weights are not quantized. Raises ModelError for an unsupported format, ConfigError for
        an unreadable config.json."""
        config = read_json(folder / "config.json")
        sections = (config, config.get("text_config"))
        objects = [section for section in sections if isinstance(section, dict)]
        given = next((part[key] for part in objects for key in KEYS if part.get(key)), None)
        if given is None and (folder / MODELOPT).exists():
            given = {"quant_method": "modelopt"} | read_json(folder / MODELOPT).get("quantization", {})
        if given is None:
            return None
        if not isinstance(given, dict):
            raise ModelError(f"config.json: {KEYS[0]} is {given!r:.100} and should be an object")
        unnamed = "an unnamed method"
        if given.get("load_in_4bit") or given.get("load_in_8bit"):
            unnamed = "bitsandbytes"
        method = given.get("quant_method") or unnamed
        quantization = cls(str(method), given | {"model_type": config.get("model_type")})
        quantization._check()
        return quantization

    def values(self, name: str) -> Iterator[Any]:
        """Every value of a setting: compressed-tensors has one for each group of layers."""
        yield from _values(self.settings, name)

    def _check(self) -> None:
        if self.method not in SUPPORTED:
            kinds = [self.method, *self.values("quant_algo")]
            raise _refusal(" ".join(map(str, kinds)), SUPPORTED)
        for name, supported in SUPPORTED[self.method].items():
            for value in self.values(name):
                plain = value.lower() if isinstance(value, str) else value
                if plain not in (None, *supported):
                    raise _refusal(f"{self.method}, {name} {value!s:.60}", supported)


def _values(settings: Mapping[str, Any], name: str) -> Iterator[Any]:
    for key, value in settings.items():
        if key == name:
            yield value
        if isinstance(value, dict):
            yield from _values(value, name)


def _refusal(kind: str, supported: Iterable[Any]) -> ModelError:
    return ModelError(
        f"this model is quantized with {kind}, which is not supported; supported: "
        f"{', '.join(map(str, supported)) or 'none'}; or use the unquantized form"
    )


def written_dtype(config: Config) -> str:
    """The dtype of a checkpoint that is written here."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def dequantized_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of the dequantized checkpoint, whose weights are in `dtype`."""
    return _without_quantization(config) | {"torch_dtype": dtype}


def _without_quantization(section: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a config.json that name no dtype have that of the whole."""
    plain = {name: value for name, value in section.items() if name not in (*KEYS, "dtype", "torch_dtype")}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = _without_quantization(plain["text_config"])
    return plain
