"""Recurrent layers in an OpenVINO graph: the CPU plugin's paged operations, and the tables of states that
they read and write.

Each operation runs any number of sequences, token by token. Of a sequence it reads one block of its table,
and writes the state after every so many tokens, and after the last one, to other blocks (models/states.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from models.states import Run
from run import Json

TABLE = "state_table."  # the beginning of the names of inputs: float32 [blocks, ...]
STATE_INPUTS = (
    "state_begins",
    "state_blocks",
    "state_blocks_begins",
    "state_past_lens",
    "state_interval",
)
NEVER = 1 << 30  # an interval that no sequence reaches
L2_NORM = {"q_l2_norm_eps": "1e-06", "k_l2_norm_eps": "1e-06"}
PRECISIONS = {"f32": "FP32", "i32": "I32"}


def recurrent_layer(
    layer: Json, operands: Sequence[ov.Output], places: Sequence[ov.Output]
) -> tuple[ov.Node, ov.Output]:
    """The table of a placeholder's states, and its result. `operands` are the placeholder's, `places` has the
    inputs STATE_INPUTS."""
    make = {"conv": _convolution, "delta": _delta_rule, "scan": _scan, "scan_by_channel": _scan_by_channel}
    return make[layer["kind"]](layer, operands, places)


def _convolution(layer, operands, places):
    channels, kernel = layer["channels"], layer["kernel"]
    tokens, weight, *bias = operands
    table = _table(layer, channels, kernel)
    weight = _reshaped(weight, channels, 1, kernel)
    bias = _reshaped(bias[0], channels) if bias else ops.constant(np.array([], np.float32)).output(0)
    return table, _paged("PagedCausalConv1D", [tokens, table.output(0), weight, bias, *places])


def _delta_rule(layer, operands, places):
    query, key, value, gate, beta = operands
    heads, key_size = layer["value_heads"], layer["key_size"]
    table = _table(layer, heads, layer["value_size"], key_size)
    inputs = [
        _reshaped(query, -1, layer["heads"], key_size),
        _reshaped(key, -1, layer["heads"], key_size),
        _reshaped(value, -1, heads, layer["value_size"]),
        *(table.output(0), gate, beta, *places),
    ]
    norm = L2_NORM | {"use_qk_l2norm": "true" if layer["norm"] else "false"}
    mixed = _paged("PagedGatedDeltaNet", inputs, norm)
    return table, _reshaped(mixed, -1, heads * layer["value_size"])


def _scan(layer, operands, places):
    hidden_states, dt, b, c, a = operands
    heads, size, groups, state_size = (layer[name] for name in ("heads", "size", "groups", "state_size"))
    table = _table(layer, heads, size, state_size)
    inputs = [
        _reshaped(a, heads),
        dt,
        _reshaped(b, -1, groups, state_size),
        _reshaped(hidden_states, -1, heads, size),
        _reshaped(c, -1, groups, state_size),
        *(table.output(0), *places),
    ]
    return table, _reshaped(_paged("PagedSelectiveSSM", inputs), -1, heads * size)


def _scan_by_channel(layer, operands, places):
    """Mamba 1, whose decay differs by channel and by number of the state: each pair of them is a head of one
    number, the heads of a number of the state are a group."""
    hidden_states, dt, b, c, a = operands
    channels, state_size = layer["channels"], layer["state_size"]
    pairs = channels * state_size
    table = _table(layer, pairs, 1, 1)
    repeats = ops.constant([1, state_size])
    inputs = [
        _reshaped(a, pairs),
        ops.tile(dt, repeats).output(0),
        _reshaped(b, -1, state_size, 1),
        _reshaped(ops.tile(hidden_states, repeats).output(0), -1, pairs, 1),
        _reshaped(c, -1, state_size, 1),
        *(table.output(0), *places),
    ]
    mixed = _reshaped(_paged("PagedSelectiveSSM", inputs), -1, state_size, channels)
    return table, ops.reduce_sum(mixed, ops.constant([1]), False).output(0)


def _table(layer: Json, *shape: int) -> ov.Node:
    parameter = ops.parameter(ov.PartialShape([-1, *shape]), ov.Type.f32)
    parameter.output(0).get_tensor().set_names({f"{TABLE}{layer['index']}"})
    return parameter


def _reshaped(output: ov.Output, *shape: int) -> ov.Output:
    return ops.reshape(output, ops.constant(list(shape)), False).output(0)


def _paged(kind: str, inputs: Sequence[ov.Output], attributes: Mapping[str, str] | None = None) -> ov.Output:
    """An operation that Python has no class for: read from a graph of one node, which the IR reader knows
    once the CPU plugin is loaded, and connected to its inputs."""
    last = len(inputs)
    layers = []
    ports = []
    edges = []
    for i, given in enumerate(inputs):
        element_type = given.get_element_type().get_type_name()
        sizes = [-1 if size.is_dynamic else size.get_length() for size in given.get_partial_shape()]
        shape = ",".join("?" if size < 0 else str(size) for size in sizes)
        dims = "".join(f"<dim>{size}</dim>" for size in sizes)
        precision = PRECISIONS[element_type]
        layers.append(
            f'<layer id="{i}" name="{i}" type="Parameter" version="opset1">'
            f'<data shape="{shape}" element_type="{element_type}"/>'
            f'<output><port id="0" precision="{precision}">{dims}</port></output></layer>'
        )
        ports.append(f'<port id="{i}" precision="{precision}">{dims}</port>')
        edges.append(f'<edge from-layer="{i}" from-port="0" to-layer="{last}" to-port="{i}"/>')
    data = "".join(f' {name}="{value}"' for name, value in (attributes or {}).items())
    ir = (
        f'<net name="{kind}" version="11"><layers>{"".join(layers)}'
        f'<layer id="{last}" name="op" type="{kind}" version="extension"><data{data}/>'
        f'<input>{"".join(ports)}</input><output><port id="{last}" precision="FP32"/></output></layer>'
        f'<layer id="{last + 1}" name="result" type="Result" version="opset1">'
        f'<input><port id="0" precision="FP32"/></input></layer></layers><edges>{"".join(edges)}'
        f'<edge from-layer="{last}" from-port="{last}" to-layer="{last + 1}" to-port="0"/></edges></net>'
    )
    core = ov.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin
    (node,) = (node for node in core.read_model(ir.encode()).get_ops() if node.get_type_name() == kind)
    for port, given in zip(node.inputs(), inputs):
        port.replace_source_output(given)
    return node.output(0)


def state_inputs(runs: Sequence[Run]) -> dict[str, np.ndarray]:
    """The inputs STATE_INPUTS of a call."""
    begins = np.cumsum([0, *(run.tokens for run in runs)])
    blocks = [[run.read, *run.writes] for run in runs]
    intervals = [1 if len(run.writes) > 1 else NEVER for run in runs]
    values = (
        begins,
        np.concatenate(blocks),
        np.cumsum([0, *map(len, blocks)]),
        [run.position for run in runs],
        intervals,
    )
    return {name: np.array(value, np.int32) for name, value in zip(STATE_INPUTS, values)}
