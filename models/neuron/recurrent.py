"""The graph of a gated delta net, the linear attention of Qwen3.5.

A layer has two buffers instead of keys and values: the last inputs of its convolution [slots, kernel - 1,
channels], and its recurrent state [slots, value heads * key_dim, value_dim] in float32. `graph.py` binds them
and builds the rest of a layer. Tensors are those of one core.

Source: transformers 5.20, models/qwen3_5; Yang et al., Gated Delta Networks (2024).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from transformers_neuronx import hlo
from transformers_neuronx.activations import sigmoid, silu
from transformers_neuronx.layers import attention

from models.neuron.base_family import DeltaNet


class Array:
    """A tensor of a graph, with the arithmetic of torch: a dimension of size 1 is broadcast. Operands have
    the same number of dimensions."""

    def __init__(self, node: Any):
        self.node = node
        self.sizes = tuple(node.sizes)

    def apply(self, function: Callable, *arguments: Any) -> Array:
        return Array(function(self.node, *arguments))

    def expand(self, *sizes: int) -> Array:
        return self if sizes == self.sizes else self.apply(hlo.broadcast, sizes, range(len(sizes)))

    def _with(self, function: Callable, other: Array) -> Array:
        sizes = tuple(map(max, self.sizes, other.sizes))
        return self.expand(*sizes).apply(function, other.expand(*sizes).node)

    __add__ = partialmethod(_with, hlo.add)
    __sub__ = partialmethod(_with, hlo.subtract)
    __mul__ = partialmethod(_with, hlo.multiply)
    __truediv__ = partialmethod(_with, hlo.divide)

    def float(self) -> Array:
        return self.apply(hlo.cast, self.node.scribe.f32)

    def view(self, *sizes: int) -> Array:
        return self.apply(hlo.reshape, tuple(torch.empty(self.sizes, device="meta").view(sizes).shape))

    def slice(self, dim: int, start: int, size: int) -> Array:
        whole = size == self.sizes[dim]
        return self if whole else self.apply(hlo.slice_along, dim, start + size, start)

    def split(self, *sizes: int) -> list[Array]:
        """By the last dimension."""
        ends = itertools.accumulate(sizes)
        return [self.slice(len(self.sizes) - 1, end - size, size) for end, size in zip(ends, sizes)]

    def product(self, other: Array, left: int = 2, right: int = 1) -> Array:
        """Of each matrix [many, n, n] with that of the other. left, right: the dimensions that are
        contracted."""
        contracted = {"lhs_contracting_dimensions": [left], "rhs_contracting_dimensions": [right]}
        batch = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]}
        return self.apply(hlo.dot_general, other.node, contracted | batch)

    def exp(self) -> Array:
        """Of values up to 0."""
        return self.apply(hlo.minimum, 0.0).apply(hlo.exp)


class Rows:
    """The rows of a call, each with tokens of one slot. Tokens after the first `keep` of a row change no
    state; a row that begins at position 0 begins with zeros.

    A call for one slot reads one row of the buffers and writes two: that of the slot, and one that is kept.
    Other calls have the rows of all slots, which come first in the buffers.
    """

    def __init__(self, positions: Any, slot: Any, last_token_id: Any, read: Any, kept: Any):
        """s32: positions [rows, tokens], slot and last_token_id (that counts) [rows], read and kept [1]."""
        self.count, self.tokens = positions.sizes
        self._zero = slot.scribe.s32.Constant(constant_value=0)
        self._read, *self._written = self._zero, self._zero
        if self.count == 1:
            self._read, *self._written = (hlo.reshape(row, []) for row in (read, slot, kept))
        self._keep = Array(last_token_id).apply(hlo.add, 1).view(-1, 1, 1)
        self._is_live = self._keep.apply(hlo.greater, 0)
        self._is_start = Array(positions).slice(1, 0, 1).view(-1, 1, 1).apply(hlo.equal, 0)
        is_kept = self._numbers(1, self.tokens, 1)._with(hlo.less, self._keep)
        self.is_kept = is_kept.apply(hlo.cast, slot.scribe.f32).view(-1, 1)  # [rows * tokens, 1]

    def _numbers(self, dim: int, *sizes: int) -> Array:
        return Array(hlo.iota(self._keep.node.dtype, (1, *sizes), dim))

    def _held(self, buffer: Any) -> Any:
        return hlo.dynamic_slice_along(buffer, 0, self._read, self.count)

    def read(self, buffer: Any) -> Array:
        """The states that the rows begin with."""
        held = self._held(buffer)
        # Chosen, not multiplied: zero times NaN is NaN.
        return self._is_start.expand(*held.sizes).apply(hlo.masked_select, 0, held)

    def write(self, buffer: Any, new: Array) -> Any:
        """The buffer with the states after the rows."""
        new = self._is_live.expand(*new.sizes).apply(hlo.masked_select, new.node, self._held(buffer))
        for row in self._written:
            buffer = hlo.dynamic_update_slice(buffer, new.node, [row, self._zero, self._zero])
        return buffer

    def last(self, inputs: Array, count: int) -> Array:
        """The `count` inputs before the first token that does not count, of [rows, count + tokens,
        channels]."""
        wanted = self._numbers(1, count, 1) + self._keep
        is_chosen = self._numbers(2, 1, count + self.tokens)._with(hlo.equal, wanted)
        return is_chosen.apply(hlo.cast, inputs.node.dtype).product(inputs)


def delta_net(
    net: DeltaNet,
    rows: Rows,
    hidden: Any,
    conv: Any,
    state: Any,
    weights: dict[str, Any],
    builder: Any,
) -> tuple[Any, Any, Any]:
    """hidden [rows, tokens, size] → the same of its output, and both buffers after the tokens that count.
    builder: the Hlo of `graph.py`."""
    f32 = hidden.scribe.f32
    projection = (weights["attn_q_weight"], None, weights["attn_q_scales"], builder.neuron_config)
    projected = Array(hidden).view(rows.count * rows.tokens, -1).apply(hlo.dot10_add1, *projection)
    by_head = projected.view(rows.count * rows.tokens, -1, net.width)
    heads = by_head.sizes[1] * net.group
    mixed, *others = by_head.split(net.channels, net.values, net.group, net.group)
    gate, beta, decay = (each.apply(hlo.cast, f32) for each in others)

    def by_value_head(tensor: Array) -> Array:
        """[rows * value heads, tokens, size]"""
        tensor = tensor.view(rows.count, rows.tokens, heads, -1).apply(hlo.permute, [0, 2, 1, 3])
        return tensor.view(rows.count * heads, rows.tokens, -1)

    def normed(tensor: Array) -> Array:
        """Keys or queries of length 1, each for a group of values."""
        # The norm makes the mean of the squares 1, which should be their sum.
        weight = hlo.full(net.key_dim**-0.5, f32, (net.key_dim,))
        tensor = tensor.apply(hlo.rms_norm, weight, 1e-6 / net.key_dim).view(-1, 1, net.key_dim)
        return by_value_head(tensor.expand(tensor.sizes[0], net.group, net.key_dim))

    inputs = Array(hlo.concatenate([rows.read(conv).node, mixed.view(rows.count, rows.tokens, -1).node], 1))
    factors = Array(weights["conv"]).view(1, net.kernel, -1)
    terms = (
        inputs.slice(1, place, rows.tokens).apply(hlo.cast, f32) * factors.slice(1, place, 1)
        for place in range(net.kernel)
    )
    mixed = functools.reduce(Array.__add__, terms).apply(silu).view(*mixed.sizes)
    query, key, value = mixed.split(net.key_dim, net.key_dim, net.values)
    decay = decay.view(-1, heads) + Array(weights["dt_bias"]).view(1, heads)
    # Softplus; the limit keeps it finite.
    decay = decay.apply(hlo.minimum, 80.0).apply(hlo.exp).apply(hlo.add, 1.0)
    decay = Array(f32[decay.sizes].Log(decay.node)) * Array(weights["decay_rate"]).view(1, heads)
    begin = rows.read(state)
    output, after = delta_rule(
        normed(query),
        normed(key),
        *map(by_value_head, (value, beta.apply(sigmoid), decay, rows.is_kept.expand(*decay.sizes))),
        begin.view(-1, net.key_dim, net.value_dim),
    )
    # Queries should have the length key_dim**-0.5, which only matters to this eps.
    output = output.apply(hlo.rms_norm, weights["gated_norm"], builder.config.rms_norm_eps * net.key_dim)
    output = (output * by_value_head(gate).apply(silu)).view(rows.count, heads, rows.tokens, -1)
    output = output.apply(hlo.permute, [2, 0, 1, 3]).apply(hlo.cast, hidden.dtype).node
    matrix = (weights["attn_out_weight"], weights["attn_out_scales"], None)
    return (
        attention.output(output, *matrix, builder.config.tp_degree, builder.neuron_config),
        rows.write(conv, rows.last(inputs, net.kernel - 1)),
        rows.write(state, after.view(*begin.sizes)),
    )


def delta_rule(
    query: Array, key: Array, value: Array, beta: Array, decay: Array, is_kept: Array, state: Array
) -> tuple[Array, Array]:
    """query, key and value [many, tokens, size]; beta, decay (a logarithm, at most 0) and is_kept [many,
    tokens, 1]; state [many, key_dim, value_dim]; all float32 → output [many, tokens, value_dim], and the
    state after the tokens that are kept. The output is that of all tokens.

    Token by token it is state *= e^decay; state += key (beta (value - key state)); output = query state. Here
    all tokens are solved for together. Every exponent is at most 0.
    """
    many, tokens, _one = decay.sizes
    triangle = _constant(decay, torch.ones(1, tokens, tokens).tril())
    until = triangle.expand(many, tokens, tokens).product(decay)  # the decay up to each token
    total = (decay * is_kept).apply(hlo.reduce_sum, 1, True)
    between = (until - until.view(many, 1, tokens)).exp()
    grown = until.exp()
    new = (value - key.product(state) * grown) * beta
    if tokens > 1:
        new = inverse(key.product(key, right=2) * between * beta).product(new)
    output = query.product(state) * grown
    output += (query.product(key, right=2) * between * triangle).product(new)
    written = key * ((total - until).exp() * is_kept)
    return output, state * total.exp() + written.product(new, left=1)


def inverse(system: Array) -> Array:
    """The inverse of 1 + the part of `system` [many, size, size] below the diagonal.

    Inverses of blocks on the diagonal are joined two by two: [[a, 0], [c, b]] has the inverse [[a', 0],
    [-b'ca', b']]. It is as exact as substitution. The power series of the inverse is not: it overflows where
    keys are alike, as those of a repeated token are.
    """
    size = system.sizes[1]
    solved = _constant(system, torch.eye(size)[None]).expand(*system.sizes)
    number = torch.arange(size)  # of the block of each token
    while number.any():
        is_low = (number[:, None] == number + 1) & (number % 2 == 0)
        low = system * _constant(system, is_low[None].float())
        solved = solved - solved.product(low).product(solved)
        number = number // 2
    return solved


def _constant(like: Array, values: torch.Tensor) -> Array:
    return Array(hlo.literal(like.node.dtype, values))
