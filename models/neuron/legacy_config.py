"""A checkpoint's config.json under the names of transformers 4, which families read.

Imports neither torch nor transformers-neuronx."""

from __future__ import annotations

from manifest import read_ropes
from models.errors import ModelError
from run import Json


def legacy_config(config: Json) -> Json:
    """Returns a copy of a config.json of transformers 4 or 5 with the names of transformers 4; objects in it
    are shared with `config`. `dtype` becomes `torch_dtype`; `rope_parameters` becomes `rope_theta`,
    `rope_scaling` and others; `num_local_experts` is also `num_experts`, unless the file has that. Fields
    that `config` lacks stay out: each family has defaults of its own.

    Raises ModelError for rotary positions that are no object, or that differ between layers otherwise than
    Gemma 3's.
    """
    legacy = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(legacy.get(name), (dict, type(None))):
            raise ModelError(f"config.json: {name} is {legacy[name]!r:.100} and should be an object")
    rope = legacy.pop("rope_parameters", None)
    if rope is not None:
        legacy |= _legacy_rope(rope)
    if legacy.get("num_experts") is None and "num_local_experts" in legacy:  # how 5 names Qwen3-MoE's
        legacy["num_experts"] = legacy["num_local_experts"]
    if "dtype" in legacy:
        legacy["torch_dtype"] = legacy.pop("dtype")
    return legacy


def _legacy_rope(rope: Json) -> Json:
    """Returns the fields of transformers 4 for `rope_parameters` of 5: `rope_scaling`, None where positions
    are not scaled; where `rope` has them, `rope_theta`, `partial_rotary_factor` and, for layers with a
    sliding window, `rope_local_base_freq`.

    rope: one object for all layers, or one with the objects "full_attention" and "sliding_attention". Raises
    ModelError for other kinds of layers, and for scaled positions of layers with a sliding window.
    """
    near = rope.get("sliding_attention") or {}  # Gemma 3: layers with a sliding window have their own
    rope = dict(rope.get("full_attention") or rope)
    if (kind := _kind(near)) != "default":
        raise ModelError(
            f"config.json: rope_type {kind!r} of layers with a sliding window is not supported on Neuron"
        )
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("a model whose layers differ in their rotary positions is not supported on Neuron")
    names = ("rope_theta", "partial_rotary_factor")
    fields = {name: rope.pop(name) for name in names if name in rope}
    if "rope_theta" in near:
        fields["rope_local_base_freq"] = near["rope_theta"]
    kind = _kind(rope)
    fields["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    return fields


def _kind(rope: Json) -> str:
    (named,) = read_ropes({"rope_parameters": rope})
    return named["rope_type"]
