"""A checkpoint's config.json as transformers-neuronx reads it: the form of transformers 4, and only values
that it computes.

The library hard-codes some values, and reads others under the names of transformers 4 alone: a checkpoint
that differs would silently give wrong text. Imports neither torch nor the library.

Source: the library's code at 0.13.322, `*/config.py` and `*/hlo.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import ModelError

GATED = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "rope_scaling": ("default",),
    "quantization_config": ("none",),
}
# By model type: fields of config.json and the values that the library computes, whatever config.json says. A
# field that is missing or null has transformers' default, which is among them.
COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {**GATED, "mlp_bias": (False,), "rope_scaling": ("default", "llama3")},
    "mistral": GATED,  # the library's class for Mistral scales no positions; folders may be compiled with it
    "mixtral": GATED,
}


def legacy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` as transformers 4 writes it. transformers 5 renamed the rotary base and the dtype; the
    library does not read the new names and would silently use its defaults: wrong text.

    Raises ModelError for a value that is not an object and should be one.
    """
    # Without the section about compiled programs.
    legacy = {name: value for name, value in config.items() if name != "neuron"}
    for name in ("rope_parameters", "rope_scaling", "quantization_config"):
        if not isinstance(legacy.get(name), (dict, type(None))):
            raise ModelError(f"config.json: {name} is {legacy[name]!r:.100} and should be an object")
    rope = legacy.pop("rope_parameters", None)
    if rope is not None:
        if any(isinstance(value, dict) for value in rope.values()):
            raise ModelError(
                "a model whose layers differ in their rotary positions cannot be served on Neuron"
            )
        rope = dict(rope)
        legacy["rope_theta"] = rope.pop("rope_theta", legacy.get("rope_theta", 10000.0))
        is_scaled = rope.get("rope_type", "default") != "default"
        legacy["rope_scaling"] = rope | {"type": rope["rope_type"]} if is_scaled else None
    if "dtype" in legacy:
        legacy["torch_dtype"] = legacy.pop("dtype")
    return legacy


def check_values(legacy: Mapping[str, Any], model_type: str) -> None:
    """Raises ModelError for a value of config.json that the library would not compute, with the field and
    what it computes."""
    found = dict(legacy)
    scaling = legacy.get("rope_scaling") or {}
    found["rope_scaling"] = scaling.get("rope_type", scaling.get("type", "default"))
    quantization = legacy.get("quantization_config")
    if quantization:
        found["quantization_config"] = quantization.get("quant_method", "unknown")
    for name, computed in COMPUTED[model_type].items():
        if found.get(name) in (None, {}, *computed):
            continue
        values = " or ".join(map(str, computed))
        raise ModelError(
            f"config.json: {name} is {found[name]} and transformers-neuronx computes {values} "
            f"for {model_type} models, so its text would be wrong; serve this model on another device"
        )
