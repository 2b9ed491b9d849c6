"""The graphs of recurrent layers: gated delta nets, Mamba 2, short convolutions.

A layer has two buffers instead of keys and values: the last inputs of its convolution [slots, kernel - 1,
channels], and its recurrent state [slots, value heads * key_dim, value_dim] in float32. `graph.py` binds them
and builds the rest of a layer. Tensors are those of one core.

Source: transformers 5.20, models/qwen3_5, granitemoehybrid and lfm2; Yang et al., Gated Delta Networks
(2024); Dao and Gu, Transformers are SSMs (2024).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from transformers_neuronx import hlo
from transformers_neuronx.activations import sigmoid, silu
from transformers_neuronx.layers import attention

from models.neuron.base_family import DeltaNet, Mamba2, Recurrence, ShortConvolution


class Array:
    """A tensor of a graph, with the arithmetic of torch: a dimension of size 1 is broadcast. Operands have
    the same number of dimensions."""

    def __init__(self, node: Any):
        self.node = node
        self.sizes = tuple(node.sizes)

    def apply(self, function: Callable, *arguments: Any) -> Array:
        """Returns `function` of the node and these arguments, as an Array."""
        return Array(function(self.node, *arguments))

    def expand(self, *sizes: int) -> Array:
        """Returns the tensor broadcast to `sizes`, as many dimensions as it has."""
        return self if sizes == self.sizes else self.apply(hlo.broadcast, sizes, range(len(sizes)))

    def _with(self, function: Callable, other: Array) -> Array:
        """Returns `function` of both tensors, each broadcast to the larger sizes."""
        sizes = tuple(map(max, self.sizes, other.sizes))
        return self.expand(*sizes).apply(function, other.expand(*sizes).node)

    __add__ = partialmethod(_with, hlo.add)
    __sub__ = partialmethod(_with, hlo.subtract)
    __mul__ = partialmethod(_with, hlo.multiply)
    __truediv__ = partialmethod(_with, hlo.divide)

    def float(self) -> Array:
        return self.apply(hlo.cast, self.node.scribe.f32)

    def view(self, *sizes: int) -> Array:
        """Returns the tensor in another shape; one of the sizes may be -1."""
        return self.apply(hlo.reshape, tuple(torch.empty(self.sizes, device="meta").view(sizes).shape))

    def slice(self, dim: int, start: int, size: int) -> Array:
        """Returns `size` values of a dimension, from `start` on."""
        whole = size == self.sizes[dim]
        return self if whole else self.apply(hlo.slice_along, dim, start + size, start)

    def split(self, *sizes: int) -> list[Array]:
        """Returns parts of the last dimension of these sizes, one after the other."""
        ends = itertools.accumulate(sizes)
        return [self.slice(len(self.sizes) - 1, end - size, size) for end, size in zip(ends, sizes)]

    def product(self, other: Array, left: int = 2, right: int = 1) -> Array:
        """Returns the product of each matrix of [many, n, m] with that of `other` at its place. left, right:
        the dimensions of the two that are contracted."""
        contracted = {"lhs_contracting_dimensions": [left], "rhs_contracting_dimensions": [right]}
        batch = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]}
        return self.apply(hlo.dot_general, other.node, contracted | batch)

    def exp(self) -> Array:
        """Returns the exponential of values up to 0; larger values count as 0."""
        return self.apply(hlo.minimum, 0.0).apply(hlo.exp)


class Rows:
    """The rows of a call, each with tokens of one slot. Tokens after the first `last_token_id` + 1 of a row
    change no state; a row that begins at position 0 begins with states of zeros.

    A call for one slot reads one block of the buffers and writes two: that of the slot, and one that is kept.
    Any other call has a row for each slot, and reads and writes the blocks of the slots, which come first in
    the buffers.
    """

    def __init__(self, net: Recurrence, positions: Any, slot: Any, last_token_id: Any, read: Any, kept: Any):
        """net: of the layers, as the cores have it. All others are s32: positions [rows, tokens]; slot and
        last_token_id, the last token that counts, [rows]; read and kept, places in the buffers, [1]."""
        self.net = net
        self.count, self.tokens = positions.sizes
        self._zero = slot.scribe.s32.Constant(constant_value=0)
        self._read, *self._written = self._zero, self._zero
        if self.count == 1:
            self._read, *self._written = (hlo.reshape(row, []) for row in (read, slot, kept))
        self._keep = Array(last_token_id).apply(hlo.add, 1).view(-1, 1, 1)
        self._is_live = self._keep.apply(hlo.greater, 0)
        self._is_start = Array(positions).slice(1, 0, 1).view(-1, 1, 1).apply(hlo.equal, 0)
        is_kept = self._numbers(1, self.tokens, 1)._with(hlo.less, self._keep)
        self.is_kept = is_kept.float().view(-1, 1, 1)  # [rows * tokens, 1, 1]

    def _numbers(self, dim: int, *sizes: int) -> Array:
        return Array(hlo.iota(self._keep.node.dtype, (1, *sizes), dim))

    def _held(self, buffer: Any) -> Any:
        return hlo.dynamic_slice_along(buffer, 0, self._read, self.count)

    def read(self, buffer: Any) -> Array:
        """Returns the states that the rows begin with: those in `buffer`, or zeros for a row at position
        0."""
        held = self._held(buffer)
        # Chosen, not multiplied: zero times NaN is NaN.
        return self._is_start.expand(*held.sizes).apply(hlo.masked_select, 0, held)

    def write(self, buffer: Any, new: Array) -> Any:
        """Returns the buffer with the states after the rows, `new`, in the blocks that the call writes. A row
        without tokens that count writes the states that it has read."""
        new = self._is_live.expand(*new.sizes).apply(hlo.masked_select, new.node, self._held(buffer))
        for row in self._written:
            buffer = hlo.dynamic_update_slice(buffer, new.node, [row, self._zero, self._zero])
        return buffer

    def last(self, inputs: Array, count: int) -> Array:
        """Returns the last `count` inputs up to the last token that counts, [rows, count, channels]. inputs:
        [rows, count + tokens, channels], with those before the call first."""
        wanted = self._numbers(1, count, 1) + self._keep
        is_chosen = self._numbers(2, 1, count + self.tokens)._with(hlo.equal, wanted)
        return is_chosen.apply(hlo.cast, inputs.node.dtype).product(inputs)

    def by_value_head(self, tensor: Array) -> Array:
        """[rows * tokens, key heads, size] → [rows * value heads, tokens, size]."""
        heads = tensor.sizes[1] * self.net.group
        tensor = tensor.view(self.count, self.tokens, heads, -1).apply(hlo.permute, [0, 2, 1, 3])
        return tensor.view(self.count * heads, self.tokens, -1)


def recurrent_layer(
    rows: Rows, hidden: Any, conv: Any, state: Any, weights: dict[str, Any], builder: Any
) -> tuple[Any, Any, Any]:
    """Returns the output of a recurrent layer for hidden [rows, tokens, size], in the same shape, and both
    buffers, conv and state, after the tokens that count. weights: by the names of LAYER_WEIGHTS and
    `Recurrence.tensors`. builder: the Hlo of `graph.py`."""
    net = rows.net
    projection = (weights["attn_q_weight"], None, weights["attn_q_scales"], builder.neuron_config)
    projected = Array(hidden).view(rows.count * rows.tokens, -1).apply(hlo.dot10_add1, *projection)
    by_head = projected.view(rows.count * rows.tokens, -1, net.width)
    mixed, gate, columns = by_head.split(net.channels, net.values, net.columns * net.group)
    if isinstance(net, ShortConvolution):
        mixed *= columns
    inputs = Array(hlo.concatenate([rows.read(conv).node, mixed.view(rows.count, rows.tokens, -1).node], 1))
    factors = Array(weights["conv"]).view(1, net.kernel, -1)
    terms = (
        inputs.slice(1, place, rows.tokens).float() * factors.slice(1, place, 1)
        for place in range(net.kernel)
    )
    mixed = functools.reduce(Array.__add__, terms).view(*mixed.sizes)
    begin = rows.read(state)
    if isinstance(net, ShortConvolution):
        output, after = rows.by_value_head(mixed * gate.float()), begin
    else:
        output, after = linear_attention(
            rows, mixed, gate.float(), columns.float(), begin, weights, builder.config.rms_norm_eps
        )
    output = output.view(rows.count, -1, rows.tokens, net.value_dim).apply(hlo.permute, [2, 0, 1, 3])
    if isinstance(net, Mamba2):
        own = builder.family.recurrence  # without heads of zeros
        output = norm_of_all_cores(output, weights["gated_norm"], own.key_heads * own.values, builder.config)
    matrix = (weights["attn_out_weight"], weights["attn_out_scales"], None)
    output = output.apply(hlo.cast, hidden.dtype).node
    return (
        attention.output(output, *matrix, builder.config.tp_degree, builder.neuron_config),
        rows.write(conv, rows.last(inputs, net.kernel - 1)),
        rows.write(state, after.view(*begin.sizes)),
    )


def norm_of_all_cores(tensor: Array, weight: Any, count: int, config: Any) -> Array:
    """Returns tensor [tokens, slots, heads, size] in float32 after an RMS norm over all heads: divided by the
    root mean square of a token's `count` values on all cores, times weight [heads * size]."""
    rows = tensor.view(-1, math.prod(tensor.sizes[2:])).float()
    squares = (rows * rows).apply(hlo.reduce_sum, 1, True)
    mean = squares.apply(hlo.all_reduce_sum, config.tp_degree).apply(hlo.divide, float(count))
    rows = rows * mean.apply(hlo.add, config.rms_norm_eps).apply(hlo.rsqrt) * Array(weight).view(1, -1)
    return rows.view(*tensor.sizes)


def linear_attention(
    rows: Rows,
    mixed: Array,
    gate: Array,
    columns: Array,
    begin: Array,
    weights: dict[str, Any],
    eps: float,
) -> tuple[Array, Array]:
    """Computes what is between the convolution and the output matrix: all of a gated delta net, and Mamba 2
    without its last norm. Returns the output [rows * value heads, tokens, value_dim], and the state after the
    tokens that count.

    mixed, gate, columns: parts of the projection [rows * tokens, key heads, size], mixed after the
    convolution; begin: the state before the call; weights: by the names of `Recurrence.tensors`; eps: of the
    norm.
    """
    net = rows.net
    has_delta = isinstance(net, DeltaNet)
    by_value_head = rows.by_value_head

    def parameter(name: str) -> Array:
        return Array(weights[name]).view(1, gate.sizes[1], -1)

    def of_groups(tensor: Array) -> Array:
        """Keys or queries, which the value heads of a key head share."""
        if has_delta:
            # The norm makes the mean of the squares 1, which should be their sum.
            weight = hlo.full(net.key_dim**-0.5, tensor.node.dtype, (net.key_dim,))
            tensor = tensor.apply(hlo.rms_norm, weight, 1e-6 / net.key_dim)
        return by_value_head(Array(hlo.concatenate([tensor.node] * net.group, 2)))

    if not has_delta:
        mixed += parameter("conv_bias")
    query, key, value = mixed.apply(silu).split(net.key_dim, net.key_dim, net.values)
    *betas, step = columns.split(*[net.group] * net.columns)
    # Softplus; the limit keeps it finite.
    step = (step + parameter("dt_bias")).apply(hlo.minimum, 80.0).apply(hlo.exp).apply(hlo.add, 1.0)
    step = step.apply(lambda node: node.dtype[node.sizes].Log(node))
    scales = [beta.apply(sigmoid) for beta in betas] or [step]
    value = by_value_head(value)
    output, after = scan(
        of_groups(query),
        of_groups(key),
        value,
        *map(by_value_head, (*scales, step * parameter("decay_rate"), rows.is_kept.expand(*step.sizes))),
        begin.view(-1, net.key_dim, net.value_dim),
        has_delta,
    )
    if has_delta:
        # Queries should have the length key_dim**-0.5, which only matters to this eps.
        output = output.apply(hlo.rms_norm, weights["gated_norm"], eps * net.key_dim)
    else:
        output += value * by_value_head(parameter("skip").expand(*step.sizes))
    return output * by_value_head(gate).apply(silu), after


def scan(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    decay: Array,
    is_kept: Array,
    state: Array,
    has_delta: bool,
) -> tuple[Array, Array]:
    """Returns the output [many, tokens, value_dim] of all tokens, and the state after the tokens that are
    kept.

    query, key and value: [many, tokens, size]; scale, decay (a logarithm, at most 0) and is_kept: [many,
    tokens, 1]; state: [many, key_dim, value_dim]; all float32.

    Token by token it is state *= e^decay; state += key (scale value); output = query state; in the delta rule
    state += key (scale (value - key state)). Here all tokens are solved for together. Every exponent is at
    most 0.
    """
    many, tokens, _one = decay.sizes
    triangle = _filled_array(decay, torch.ones(1, tokens, tokens).tril())
    until = triangle.expand(many, tokens, tokens).product(decay)  # the decay up to each token
    total = (decay * is_kept).apply(hlo.reduce_sum, 1, True)
    between = (until - until.view(many, 1, tokens)).exp()
    grown = until.exp()
    if has_delta:
        value -= key.product(state) * grown
    new = value * scale
    if has_delta and tokens > 1:
        new = inverse(key.product(key, right=2) * between * scale).product(new)
    output = query.product(state) * grown
    output += (query.product(key, right=2) * between * triangle).product(new)
    written = key * ((total - until).exp() * is_kept)
    return output, state * total.exp() + written.product(new, left=1)


def inverse(system: Array) -> Array:
    """Returns the inverse of 1 + the part of `system` [many, size, size] below the diagonal.

    Inverses of blocks on the diagonal are joined two by two: [[a, 0], [c, b]] has the inverse [[a', 0],
    [-b'ca', b']]. It is as exact as substitution. The power series of the inverse is not: it overflows where
    keys are alike, as those of a repeated token are.
    """
    size = system.sizes[1]
    solved = _filled_array(system, torch.eye(size)[None]).expand(*system.sizes)
    number = torch.arange(size)  # of the block of each token
    while number.any():
        is_low = (number[:, None] == number + 1) & (number % 2 == 0)
        low = system * _filled_array(system, is_low[None].float())
        solved = solved - solved.product(low).product(solved)
        number = number // 2
    return solved


def _filled_array(like: Array, values: torch.Tensor) -> Array:
    return Array(hlo.literal(like.node.dtype, values))
