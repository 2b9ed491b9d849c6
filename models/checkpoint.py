"""A checkpoint's config.json as transformers-neuronx reads it: the form of transformers 4, and only values that it computes.

The library hard-codes some values, and reads others under the names of transformers 4 alone: a checkpoint that differs would
silently give wrong text. Imports neither torch nor the library.

Source: the library's code at 0.13.322, `*/config.py` and `*/hlo.py`; `layer_norm` and `batch_norm` in `hlo.py` for the epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import ModelError

_SILU = ("silu", "swish")
_GELU = (
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "gelu",
)  # the exact one differs by less than bfloat16 rounds
_GATED = {"hidden_act": _SILU, "attention_bias": (False,), "rope_scaling": ("default",)}
# By model type: fields of config.json and the values that the library computes, whatever config.json says. A field that is
# missing or null has transformers' default, which is among them.
COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {**_GATED, "mlp_bias": (False,), "rope_scaling": ("default", "llama3")},
    "mistral": _GATED,  # the library's class for Mistral scales no positions; folders may be compiled with it
    "mixtral": _GATED,
    "gpt2": {
        "activation_function": _GELU,
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "opt": {
        "activation_function": ("relu", "gelu_new", "silu"),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "word_embed_proj_dim": ("hidden_size",),
    },
    "bloom": {"layer_norm_epsilon": (1e-5,), "apply_residual_connection_post_layernorm": (False,)},
    "gpt_neox": {
        "hidden_act": _GELU,
        "layer_norm_eps": (1e-5,),
        "use_parallel_residual": (True,),
        "attention_bias": (True,),
        "rope_scaling": ("default",),
    },
}


def legacy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` as transformers 4 writes it. transformers 5 renamed the rotary base, GPT-NeoX's share of rotary
    dimensions and the dtype; the library does not read the new names and would silently use its defaults: wrong text.
    Raises ModelError for a value that is not an object and should be one."""
    legacy = {
        name: value for name, value in config.items() if name != "neuron"
    }  # the section about compiled programs
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
        theta = legacy["rope_theta"] = rope.pop("rope_theta", legacy.get("rope_theta", 10000.0))
        if legacy.get("model_type") == "gpt_neox":
            share = rope.pop("partial_rotary_factor", legacy.get("rotary_pct", 0.25))
            legacy |= {"rotary_emb_base": theta, "rotary_pct": share}
        is_scaled = rope.get("rope_type", "default") != "default"
        legacy["rope_scaling"] = rope | {"type": rope["rope_type"]} if is_scaled else None
    if "dtype" in legacy:
        legacy["torch_dtype"] = legacy.pop("dtype")
    return legacy


def check_values(legacy: Mapping[str, Any], model_type: str) -> None:
    """Raises ModelError for a value of config.json that the library would not compute, with the field and what it computes."""
    found = dict(legacy)
    scaling, quantization = (legacy.get(name) or {} for name in ("rope_scaling", "quantization_config"))
    found["rope_scaling"] = scaling.get("rope_type", scaling.get("type", "default"))
    found["quantization_config"] = quantization.get("quant_method", "unknown") if quantization else None
    if found.get("word_embed_proj_dim") == found.get("hidden_size"):
        found["word_embed_proj_dim"] = "hidden_size"
    for name, computed in (COMPUTED[model_type] | {"quantization_config": ("none",)}).items():
        if found.get(name) not in (None, *computed):
            values = " or ".join(map(str, computed))
            raise ModelError(
                f"config.json: {name} is {found[name]} and transformers-neuronx computes {values} for {model_type} models, so "
                "its text would be wrong; serve this model on another device"
            )
