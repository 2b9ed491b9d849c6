"""The delta rule of prompts in an OpenVINO graph, a tile of TILE tokens at a time, by matrix products: CPUs
compute these much faster than the paged operation, which runs token by token.

The chunkwise form of Gated DeltaNet (https://arxiv.org/abs/2412.06464).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from run import Json

TILE = 64


def delta_rule_of_tiles(layer: Json, operands: Sequence[ov.Node], states: ov.Node) -> tuple[ov.Node, ov.Node]:
    """Returns nodes for the result of the delta rule, [tiles * TILE, heads * value size], and for the states
    after the tiles, in the shape of `states`.

    layer: its `heads`, `key_size` and `value_size`. operands: query, key, value, gate (the logarithm of the
    decay) and beta, [tiles, TILE, width], zeros for padding; query and key are not normalized yet. states:
    before the tiles, [tiles, heads, value size, key size].
    """
    split = [0, 0, layer["heads"], -1]
    heads_first = [0, 2, 1, 3]
    query, key, value, gate, beta = (
        ops.transpose(ops.reshape(each, split, True), heads_first) for each in operands
    )
    query, key = (ops.normalize_l2(each, [3], 1e-6, "add") for each in (query, key))
    query = query * np.array(layer["key_size"] ** -0.5, np.float32)
    decay = ops.cum_sum(gate, 2)  # [tiles, heads, TILE, 1], in logarithms
    last = ops.gather(decay, [TILE - 1], 2)
    kept = ops.exp(decay)  # of the state before the tile
    past = np.tri(TILE, dtype=np.float32)
    # The differences to later tokens, which are not used, would overflow.
    differences = (decay - ops.transpose(decay, [0, 1, 3, 2])) * past
    decays = ops.exp(differences) * past
    missing = (value - ops.matmul(key, states, False, True) * kept) * beta
    overlap = ops.matmul(key, key, False, True) * decays * beta
    update = ops.matmul(_inverse(overlap), missing, False, False)
    within = ops.matmul(ops.matmul(query, key, False, True) * decays, update, False, False)
    result = ops.matmul(query, states, False, True) * kept + within
    added = ops.matmul(update, key * ops.exp(last - decay), True, False)
    flat = [-1, layer["heads"] * layer["value_size"]]
    return ops.reshape(ops.transpose(result, heads_first), flat, False), states * ops.exp(last) + added


def _inverse(lower: ov.Node) -> ov.Node:
    """Returns a node for the inverse of the matrices [..., TILE, TILE] that have ones on the diagonal and
    `lower` below it, by forward substitution: of the blocks along the diagonal, each time of twice the size.
    What `lower` has elsewhere is not read."""
    inverse = np.eye(TILE, dtype=np.float32)
    size = 1
    while size < TILE:
        block = np.arange(TILE) // size
        between = (block[:, None] == block + 1) & (block % 2 == 0)
        corners = ops.matmul(inverse, lower * between.astype(np.float32), False, False)
        inverse = inverse - ops.matmul(corners, inverse, False, False)
        size *= 2
    return inverse
