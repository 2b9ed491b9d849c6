"""What a checkpoint says about its quantized weights: the method, and whether they can be dequantized.

`Quantization.read` rejects an unsupported format by name, from config.json alone, before weights are
downloaded. `dequantize.py` does the arithmetic; this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import Config
from manifest import read_json
from models.errors import ModelError
from run import Json

CONFIG_KEYS = ("quantization_config", "compression_config")  # the latter in older files of compressed-tensors
MODELOPT = "hf_quant_config.json"  # older checkpoints of modelopt say it only here
# Per method, the settings that decide how weights are stored, and their supported values; unset always is.
SUPPORTED_METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
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
    """The quantization of a checkpoint that can be dequantized. settings: its object in config.json, and the
    `model_type` of the checkpoint."""

    method: str
    settings: Json

    def notice(self, config: Config, can_compress: bool = True) -> str:
        """Returns a log line: how the checkpoint is served and, if --quantize is not given, what would take
        less memory. can_compress: whether the engine takes --quantize."""
        served = f"is served dequantized, with the memory of {written_dtype(config)}"
        hint = ""
        if can_compress and not config.quantize:
            hint = "; --quantize int8 (QUANTIZE) takes 1 byte a weight"
        return f"{config.model_name} is quantized with {self.method} and {served}{hint}"

    @classmethod
    def read(cls, folder: Path) -> Quantization | None:
        """Returns the quantization of the checkpoint in `folder`; None: its weights are not quantized.
        config.json names the quantization, else its `text_config`, else hf_quant_config.json. No weights are
        read.

        Raises ModelError for a method that SUPPORTED_METHODS lacks, for a setting that has another value than
        those, and for a quantization that is no object; ConfigError for a file that cannot be read as JSON.
        """
        config = read_json(folder / "config.json")
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        objects = [part.get(key) for part in parts for key in CONFIG_KEYS]
        given = next(filter(None, [*objects, read_json(folder / MODELOPT).get("quantization")]), None)
        if given is None:
            return None
        if not isinstance(given, dict):
            raise ModelError(f"config.json: {CONFIG_KEYS[0]} is {given!r:.100} and should be an object")
        unnamed = "modelopt" if "quant_algo" in given else "an unnamed method"
        method = str(given.get("quant_method") or unnamed)
        if given.get("load_in_4bit") or given.get("load_in_8bit"):
            method = "bitsandbytes"
        # The latter has a `version`, too: of kernels.
        settings = {**given, "model_type": config.get("model_type"), "exllama_config": None}
        if method not in SUPPORTED_METHODS:
            raise _unsupported(
                " ".join([method, *map(str, values_of(settings, "quant_algo"))]), SUPPORTED_METHODS
            )
        for name, supported in SUPPORTED_METHODS[method].items():
            for value in values_of(settings, name):
                plain = value.lower() if isinstance(value, str) else value
                if plain not in (None, *supported):
                    raise _unsupported(f"{method}, {name} {value!s:.60}", supported)
        return cls(method, settings)


def values_of(settings: Json, *names: str) -> Iterator[Any]:
    """Yields all values that `settings`, or objects in it at any depth, have under one of `names`; nothing if
    there are none. compressed-tensors has one for each group of layers. Lists are not searched."""
    for name, value in settings.items():
        if name in names:
            yield value
        if isinstance(value, dict):
            yield from values_of(value, *names)


def _unsupported(kind: str, supported: Iterable[Any]) -> ModelError:
    return ModelError(
        f"this model is quantized with {kind}, which is not supported; supported: "
        f"{', '.join(map(str, supported)) or 'none'}; or use the unquantized form"
    )


def written_dtype(config: Config) -> str:
    """Returns the name of the dtype in which dequantized weights are written: bfloat16, unless `dtype` says
    another."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def dequantized_config(config: Json, dtype: str) -> Json:
    """Returns the config.json of the dequantized checkpoint, whose weights are in `dtype`, such as
    "bfloat16": a copy of `config` without its quantization, and with this `torch_dtype`. Its `text_config`
    changes likewise."""
    others = {name: value for name, value in config.items() if name not in (*CONFIG_KEYS, "dtype")}
    if isinstance(others.get("text_config"), dict):
        others["text_config"] = dequantized_config(others["text_config"], dtype)
    return others | {"torch_dtype": dtype}
