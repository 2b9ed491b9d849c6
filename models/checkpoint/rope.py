"""Rotary positions that transformers-neuronx does not compute itself: linear, yarn, longrope, and any base.

Source: transformers 4.57, modeling_rope_utils.py. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manifest import ORIGINAL_LENGTH
from run import Json

NEURONX_ROPE_TYPES = ("default", "llama3")  # computed by transformers-neuronx


@dataclass(frozen=True)
class Rope:
    """Position n turns pair i of a head by n * frequencies[i]; sine and cosine are multiplied by `factor`."""

    frequencies: tuple[float, ...]
    factor: float = 1.0


def scaled(rope: Json, size: int) -> Rope | None:
    """Returns the rotary positions of `rope`, one of the objects that `read_ropes` returns, for the first
    `size` values of a head. Returns None for the types "default" and "llama3", which transformers-neuronx
    computes, and for unknown types.

    The result of a longrope is for prompts within the original length: it has the short factors. Raises
    ValueError for a longrope whose `short_factor` has not one number for each pair of values.
    """
    make = SCALED.get(rope["rope_type"])
    return make(rope, size) if make else None


def plain(base: float, size: int) -> Rope:
    """Returns the unscaled frequencies of `size` values, one for each pair; the factor is 1."""
    return Rope(tuple(base ** (-n / size) for n in range(0, size, 2)))


def _linear(rope: Json, size: int) -> Rope:
    frequencies = plain(rope["rope_theta"], size).frequencies
    return Rope(tuple(each / rope["factor"] for each in frequencies))


def _dynamic(rope: Json, size: int) -> Rope:
    """Returns the plain frequencies: the scaled ones differ only beyond the model's own context length, which
    no slot has."""
    return plain(rope["rope_theta"], size)


def _yarn(rope: Json, size: int) -> Rope:
    """Returns frequencies of which those that turn often within the original length stay, slow ones are
    divided by the factor, and those between are mixed."""
    base = rope["rope_theta"]
    factor = rope["factor"]

    def pair_with(turns: float) -> float:
        return size * math.log(rope[ORIGINAL_LENGTH] / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = pair_with(rope.get("beta_fast") or 32)
    last = pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
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
    return Rope(tuple(mixed), rope.get("attention_factor") or _yarn_factor(rope))


def _yarn_factor(rope: Json) -> float:
    """Returns what sine and cosine are multiplied by if `rope` has no `attention_factor`."""

    def grown(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def _longrope(rope: Json, size: int) -> Rope:
    """Returns the plain frequencies divided by the short factors, one for each pair. Raises ValueError for
    another number of factors."""
    factor = rope.get("factor") or 1.0
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope[ORIGINAL_LENGTH]))
    shortened = zip(plain(rope["rope_theta"], size).frequencies, rope["short_factor"], strict=True)
    return Rope(tuple(each / short for each, short in shortened), attention)


SCALED = {"linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}  # computed here
