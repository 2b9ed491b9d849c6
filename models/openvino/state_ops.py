"""Recurrent layers in an OpenVINO graph: the CPU plugin's paged operations, and the tables of states that
they read and write.

Each operation runs any number of sequences, token by token. Of a sequence it reads one block of its table,
and writes the state after every so many tokens, and after the last one, to other blocks (models/states.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from models.openvino.delta_tiles import TILE, delta_rule_of_tiles
from models.states import Run
from run import Json

TABLE = "state_table."  # the beginning of the names of inputs: float32 [blocks, ...]
NEXT = "next "  # of outputs, before the name of a table: the states after tiles, which Python writes into it
SEQUENCES = ("begins", "blocks", "blocks_begins", "past_lens", "interval")
NO_INTERVAL = 1 << 30  # an interval that no sequence reaches
L2_NORM = {"use_qk_l2norm": True, "q_l2_norm_eps": 1e-6, "k_l2_norm_eps": 1e-6}
(CPU_PLUGIN,) = Path(ov.__file__).with_name("libs").glob("*cpu_plugin*")  # its name has the kind of the CPU


class RecurrentLayers:
    """Makes the recurrent layers of a graph. `inputs`, by name, and `outputs` are what the layers add to the
    graph: the caller adds them. Layers share the inputs about tokens and blocks; each has a table of states.
    With `tiles` prompts run the delta rule in tiles (delta_tiles.py), whose states are in `outputs`."""

    def __init__(self, tiles: bool):
        self.inputs: dict[str, ov.Node] = {}
        self.outputs: list[ov.Node] = []
        self._tiles = tiles

    def make(self, layer: Json, operands: Sequence[ov.Output]) -> ov.Node:
        """Returns a node for the result, [tokens, width], of the operation that a placeholder stands for, and
        adds to `inputs` and `outputs` what it needs. layer: what the placeholder's name holds; its `kind` is
        "conv", "delta", "scan" or "scan_by_channel". operands: those of the placeholder, weights last. The
        graph itself is not changed."""
        kinds = {
            "conv": self._convolution,
            "delta": self._tiled_delta_rule if self._tiles else self._delta_rule,
            "scan": self._scan,
            "scan_by_channel": self._scan_by_channel,
        }
        return kinds[layer["kind"]](layer, *operands)

    def _convolution(self, layer, tokens, weight, bias=None):
        """Returns the causal convolution of `tokens` [tokens, channels], by `weight` of channels * kernel
        numbers, without an activation: [tokens, channels]."""
        channels, kernel = layer["channels"], layer["kernel"]
        table = self._table(layer, channels, kernel)
        weight = _reshaped(weight, channels, 1, kernel)
        bias = ops.constant(np.array([], np.float32)) if bias is None else _reshaped(bias, channels)
        return _paged("PagedCausalConv1D", [tokens, table, weight, bias, *self._sequences()])

    def _delta_rule(self, layer, query, key, value, gate, beta, which="state"):
        """Returns the delta rule of the tokens, one by one: [tokens, heads * value size]. query, key:
        [tokens, heads * key size], which the operation normalizes; value: [tokens, heads * value size]; gate,
        beta: [tokens, heads]. which: the beginning of the names of the inputs that say which sequences there
        are."""
        heads, key_size, value_size = layer["heads"], layer["key_size"], layer["value_size"]
        inputs = [
            _reshaped(query, -1, heads, key_size),
            _reshaped(key, -1, heads, key_size),
            _reshaped(value, -1, heads, value_size),
            self._table(layer, heads, value_size, key_size),
            *(gate, beta, *self._sequences(which)),
        ]
        return _reshaped(_paged("PagedGatedDeltaNet", inputs, **L2_NORM), -1, heads * value_size)

    def _tiled_delta_rule(self, layer, *operands):
        """Returns the delta rule, [tokens, width] in the order of the tokens: prompts run in tiles, and all
        other tokens, the rows, through the paged operation.

        Adds inputs: which tokens are rows and which are tiles, the blocks of the tiles, the order of the
        result. Adds an output: the states after the tiles; the operation writes those after rows itself.
        operands: as `_delta_rule` takes them.
        """
        row_tokens = self._input("row_tokens")
        tile_tokens = self._input("tile_tokens", TILE)
        rows = [ops.gather(each, row_tokens, 0) for each in operands]
        tiles = [ops.gather(each, tile_tokens, 0) for each in operands]
        from_rows = self._delta_rule(layer, *rows, which="row")
        table = f"{TABLE}{layer['index']}"
        states = ops.gather(self.inputs[table], self._input("tile_blocks"), 0)
        from_tiles, next_states = delta_rule_of_tiles(layer, tiles, states)
        next_states.output(0).get_tensor().set_names({NEXT + table})
        self.outputs.append(next_states)
        joined = ops.concat([from_rows, from_tiles], 0)
        return ops.gather(joined, self._input("token_places"), 0)

    def _scan(self, layer, hidden_states, dt, b, c, a):
        """Returns the state-space scan of Mamba 2, [tokens, heads * size], without the direct part (D).
        hidden_states: [tokens, heads * size]; dt: [tokens, heads]; b, c: [tokens, groups * state size]; a: of
        `heads` numbers."""
        heads, size, groups, state_size = (layer[name] for name in ("heads", "size", "groups", "state_size"))
        inputs = [
            _reshaped(a, heads),
            dt,
            _reshaped(b, -1, groups, state_size),
            _reshaped(hidden_states, -1, heads, size),
            _reshaped(c, -1, groups, state_size),
            self._table(layer, heads, size, state_size),
            *self._sequences(),
        ]
        return _reshaped(_paged("PagedSelectiveSSM", inputs), -1, heads * size)

    def _scan_by_channel(self, layer, hidden_states, dt, b, c, a):
        """Returns the scan of Mamba 1, whose decay differs by channel and by number of the state: [tokens,
        channels]. hidden_states, dt: [tokens, channels]; b, c: [tokens, state size]; a: [1, state size *
        channels].

        For each number of the state the operation has a group of heads: one head of size 1 for each channel.
        The output of a channel is the sum over its heads.
        """
        channels, state_size = layer["channels"], layer["state_size"]
        hidden_states, dt = (ops.tile(each, [1, state_size]) for each in (hidden_states, dt))
        sizes = {"heads": channels * state_size, "size": 1, "groups": state_size, "state_size": 1}
        mixed = self._scan(layer | sizes, hidden_states, dt, b, c, a)
        mixed = _reshaped(mixed, -1, state_size, channels)
        return ops.reduce_sum(mixed, [1], False)

    def _table(self, layer: Json, *shape: int) -> ov.Node:
        return self._input(f"{TABLE}{layer['index']}", *shape, kind=ov.Type.f32)

    def _sequences(self, which: str = "state") -> list[ov.Node]:
        return [self._input(f"{which}_{name}") for name in SEQUENCES]

    def _input(self, name: str, *shape: int, kind: ov.Type = ov.Type.i32) -> ov.Node:
        if name not in self.inputs:
            self.inputs[name] = parameter(name, [-1, *shape], kind)
        return self.inputs[name]


def _reshaped(given: ov.Node | ov.Output, *shape: int) -> ov.Node:
    return ops.reshape(given, shape, False)


def _paged(kind: str, inputs: list[ov.Node | ov.Output], **attributes: Any) -> ov.Node:
    """Returns the result of an operation that Python has no class for: the CPU plugin has it. kind: the name
    of the operation."""
    factory = NodeFactory()
    factory.add_extension(CPU_PLUGIN)
    return factory.create(kind, inputs, attributes)


def state_inputs(runs: Sequence[Run], is_padded: bool) -> dict[str, np.ndarray]:
    """Returns the values of the inputs of recurrent layers in a call, int32, by name; those for tiles also
    for a graph without tiles. runs: in the order of their tokens in the call. is_padded: the last run is one
    token that belongs to no request.

    Those whose names begin with "row_" or "tile_", and `token_places`, are for tiles. `row_tokens`: which
    tokens are rows, [rows], without the token of padding. `tile_tokens`: which tokens each tile has, [tiles,
    TILE]; where a tile has fewer, a number out of range. `tile_blocks`: the block that each tile reads.
    `token_places`: where each token is among the rows followed by the tiles' tokens; for padding 0.
    """
    lengths = np.array([run.tokens for run in runs])
    ends = np.cumsum(lengths)
    in_tile = np.array([run.is_prompt for run in runs])
    in_rows = ~in_tile
    in_rows[len(runs) - is_padded :] = False
    row_tokens = np.flatnonzero(np.repeat(in_rows, lengths))
    tiles = (ends - lengths)[in_tile, None] + np.arange(TILE)
    tiles = np.where(tiles < ends[in_tile, None], tiles, ends[-1])
    places = np.argsort(np.append(row_tokens, tiles), kind="stable")
    inputs = {
        **_sequences("state", runs),
        **_sequences("row", [run for run, is_row in zip(runs, in_rows) if is_row]),
        "row_tokens": row_tokens,
        "tile_tokens": tiles,
        "tile_blocks": [run.read for run in runs if run.is_prompt],
        "token_places": [*places[: ends[-1] - is_padded], *[0] * is_padded],
    }
    return {name: np.array(value, np.int32) for name, value in inputs.items()}


def _sequences(which: str, runs: Sequence[Run]) -> dict[str, Sequence[int]]:
    """Returns the values of the inputs SEQUENCES for these runs, by name; `which` begins the names. A run
    with several blocks to write, of draft tokens, writes one after each token, any other run after its
    last."""
    blocks = [[run.read, *run.writes] for run in runs]
    values = (
        np.cumsum([0, *(run.tokens for run in runs)]),
        list(itertools.chain(*blocks)),
        np.cumsum([0, *map(len, blocks)]),
        [run.position for run in runs],
        [1 if len(run.writes) > 1 else NO_INTERVAL for run in runs],
    )
    return dict(zip((f"{which}_{name}" for name in SEQUENCES), values))


def parameter(name: str, shape: list[int], kind: ov.Type = ov.Type.i32) -> ov.Node:
    """Returns a new input of a graph; the caller adds it to the graph. In `shape` -1 is any size."""
    made = ops.parameter(shape, kind, name=name)
    made.output(0).get_tensor().set_names({name})
    return made
