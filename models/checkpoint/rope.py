"""Rotary positions that transformers-neuronx does not compute itself: linear, yarn, longrope, and any base.

Source: transformers 4.57, modeling_rope_utils.py. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manifest import ORIGINAL_LENGTH, rope_kind
from run import Json

NEURONX_ROPE_TYPES = ("default", "llama3")  # computed by transformers-neuronx


@dataclass(frozen=True)
class Rope:
    """Position n turns pair i of a head by n * frequencies[i]; sine and cosine are multiplied by `factor`."""

    frequencies: tuple[float, ...]
    factor: float = 1.0


def kind(config: Json) -> str:
    """The rope_type of a config.json, under the names of transformers 4."""
    return rope_kind(config.get("rope_scaling") or {})


def scaled(config: Json, size: int) -> Rope | None:
    """The rotary positions of a config.json for the first `size` values of a head; None for those that
    transformers-neuronx computes. A longrope has the factors for prompts within the original length."""
    make = SCALED.get(kind(config))
    return make(config, size) if make else None


def plain(base: float, size: int) -> Rope:
    return Rope(tuple(base ** (-n / size) for n in range(0, size, 2)))


def original_length(config: Json) -> int:
    """Positions before the scaling."""
    scaling = config.get("rope_scaling") or {}
    return config.get(ORIGINAL_LENGTH) or scaling.get(ORIGINAL_LENGTH) or config["max_position_embeddings"]


def _linear(config: Json, size: int) -> Rope:
    factor = config["rope_scaling"]["factor"]
    return Rope(tuple(each / factor for each in plain(config["rope_theta"], size).frequencies))


def _dynamic(config: Json, size: int) -> Rope:
    """Differs from the plain one only beyond the model's own context length, which no slot has."""
    return plain(config["rope_theta"], size)


def _yarn(config: Json, size: int) -> Rope:
    """Frequencies that turn often within the original length stay, slow ones are divided by the factor, and
    those between are mixed."""
    scaling = config["rope_scaling"]
    base = config["rope_theta"]
    factor = scaling["factor"]
    length = original_length(config)

    def pair_with(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = pair_with(scaling.get("beta_fast") or 32)
    last = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, size - 1)
    if first == last:
        last += 0.001
    mixed = []
    for pair, frequency in enumerate(plain(base, size).frequencies):
        share = min(max((pair - first) / (last - first), 0), 1)
        mixed.append(frequency * (1 - share) + frequency / factor * share)
    return Rope(tuple(mixed), scaling.get("attention_factor") or _yarn_factor(scaling))


def _yarn_factor(scaling: Json) -> float:
    def grown(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


def _longrope(config: Json, size: int) -> Rope:
    scaling = config["rope_scaling"]
    length = original_length(config)
    factor = config["max_position_embeddings"] / length
    if factor == 1:
        factor = scaling.get("factor") or 1.0
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    shortened = zip(plain(config["rope_theta"], size).frequencies, scaling["short_factor"], strict=True)
    return Rope(tuple(each / short for each, short in shortened), attention)


SCALED = {"linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}  # computed here
