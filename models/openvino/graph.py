"""The graph of a converted model: its placeholders become paged operations, and LoRA adapters are added.

`trace.py` writes the placeholders, `state_ops.py` has the operations of recurrent layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from models.adapters import common_name
from models.cache import CannotWrite
from models.errors import first_line
from models.openvino.state_ops import RecurrentLayers, parameter
from run import Json

PLACEHOLDER = "placeholder "  # then a JSON object: what the layer is
# The names of linear layers in a graph of a model; those of the head, which is outside of the layers, have no
# dot. Layers that were merged into one product are the outputs of a node with this prefix and their names.
LINEAR_NAME = "__module.model.{}/aten::linear/MatMul"
LINEAR = re.compile(r"__module\.model\.(.+\..+)/(?:aten|ov_ext)::linear/MatMul")
MERGED = "linear layers "
STREAMED_BYTES = 1_000_000  # of the constants that are matrices
IMAGE_INPUTS = ("image_embeddings", "image_places")  # of graphs of models that read images
BATCH_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


def read_graph(source: Path | ov.Model, facts: Json) -> ov.Model:
    """Returns a graph with paged operations in the place of placeholders: that of a file, model.xml, or a
    copy of one in memory, which stays as it is. Its new inputs are BATCH_INPUTS, key_cache.N and
    value_cache.N of each attention layer, and those of recurrent layers.

    facts: of the entry. With `whole_images` the graph has another input, `token_type_ids`, which says which
    tokens attend to each other. With `tiles` prompts run the delta rule in tiles, and the states after these
    are further outputs of the graph. `longest_window` shortens sliding windows, for the check of a
    conversion. Raises what OpenVINO raises for a file that is damaged.
    """
    graph = source.clone() if isinstance(source, ov.Model) else ov.Core().read_model(source)
    parameters = [parameter(name, [] if name == "max_context_len" else [-1]) for name in BATCH_INPUTS]
    batch = [each.output(0) for each in parameters]
    types = _constant([])
    recurrent = RecurrentLayers(facts.get("tiles", False))
    if facts.get("whole_images"):
        parameters.append(parameter("token_type_ids", [-1]))
        types = parameters[-1].output(0)
    for node, layer in placeholders(graph):
        operands = node.input_values()
        first = len(operands) - layer["weights"]
        operands[first:] = (each.get_node().input_value(1) for each in operands[first:])  # of the Add
        (cut,) = node.output(0).get_target_inputs()  # the Slice that stands for the layer's result
        if layer["kind"] == "attention":
            window = min(layer["window"], facts.get("longest_window") or layer["window"])
            caches = [
                parameter(f"{kind}_cache.{layer['index']}", [-1] * 4, ov.Type.dynamic)
                for kind in ("key", "value")
            ]
            parameters += caches
            # Query, key, value: [tokens, heads * head size].
            operands += [cache.output(0) for cache in caches]
            result = _paged_attention(layer, window, operands, batch, types)
        else:
            result = recurrent.make(layer, operands)
        cut.get_node().output(0).replace(result.output(0))
    graph.add_parameters([*parameters, *recurrent.inputs.values()])
    graph.add_results([ops.result(states) for states in recurrent.outputs])
    graph.validate_nodes_and_infer_types()
    return graph


def placeholder(layer: Json, operands: list[ov.Node | ov.Output], width: int) -> ov.Output:
    """Returns what stands for a layer in a saved graph, [tokens, width]: a Concat of the operands, whose name
    says what the layer is, and a Slice of it. A saved graph with paged operations could not be read back.

    layer: a JSON object; `read_graph` reads its `kind`, `index` and `weights`, how many of the last operands
    are weights, and what the kind needs. operands: [tokens, any width].
    """
    joined = ops.concat(operands, 1)
    joined.set_friendly_name(PLACEHOLDER + json.dumps(layer))
    return ops.slice(joined, [0], [width], [1], [1]).output(0)


def placeholders(graph: ov.Model) -> Iterator[tuple[ov.Node, Json]]:
    """Yields the nodes that stand for layers of a saved graph, each with the object that its name holds, in
    the order in which they run."""
    for node in graph.get_ordered_ops():
        if node.get_friendly_name().startswith(PLACEHOLDER):
            yield node, json.loads(node.get_friendly_name()[len(PLACEHOLDER) :])


def has_delta_rule(graph: ov.Model) -> bool:
    """Whether a layer of a graph with placeholders is a gated delta net."""
    return any(layer["kind"] == "delta" for _node, layer in placeholders(graph))


def _paged_attention(
    layer: Json, window: int, operands: list[ov.Output], batch: list[ov.Output], types: ov.Output
) -> PagedAttention:
    """Returns the attention of a layer, [tokens, heads * value size]; it also writes keys and values into the
    caches when it runs. operands: query, key, value and both caches; batch: the inputs BATCH_INPUTS; types: 1
    for each token of an image, whose tokens attend to each other; empty: all attention is causal. window: in
    tokens, instead of that of `layer`; 0: none."""
    *places, max_context_len = batch
    none = _constant([])
    no_floats = _constant([], np.float32)
    zero = _constant(0)
    attention = PagedAttention(
        [
            *operands,
            *places,
            _constant(layer["scaling"], np.float32),
            _constant(window),  # 0: no window
            no_floats,  # ALiBi slopes
            max_context_len,
            none,  # score aggregation window
            *(none, none, no_floats),  # rotation of cached blocks
            *(no_floats, zero, zero),  # sparse attention: threshold, block size, stride
            _constant(np.reshape(layer["sinks"], (1, -1, 1, 1)), np.float32),
            *(zero, none, none, none),  # adaptive eviction
            types,
            *(_constant([], np.uint8), none),
        ]
    )
    facts = attention.get_rt_info()
    facts["k_head_size"] = layer["key_size"]
    facts["v_head_size"] = layer["value_size"]
    facts["num_k_heads"] = layer["kv_heads"]
    facts["num_v_heads"] = layer["kv_heads"]
    return attention


def save_graph(graph: ov.Model, path: Path) -> None:
    """Writes a graph to `path`, such as model.xml, and its weights beside it, to model.bin, without rounding
    them. Raises CannotWrite, such as for a full disk."""
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise CannotWrite(f"{path.parent} cannot be written: {first_line(error)}") from None


def add_adapters(
    graph: ov.Model, modules: Collection[str] | None, kind: ov.Type, paired_size: int
) -> dict[str, tuple[int, int]]:
    """Adds the updates of LoRA adapters (adapters.py) to the linear layers of a graph, in place, as inputs of
    the graph. Returns how many inputs and outputs each of these layers has, by the `common_name` of its
    module. A module that the graph has not is left out without an error.

    The inputs are `adapters`, the mask, float32 [tokens, columns], and those of `adapter_inputs`, [1,
    columns, size]. modules: the layers that get updates; None: all of them. kind: the type of the inputs but
    the mask. paired_size: the size of a head if queries and keys are in the order of GGUF files, where a
    rotation turns neighbours; else 0.
    """
    mask = parameter("adapters", [-1, -1], ov.Type.f32)  # [tokens, columns]
    parameters = [mask]
    layers = {}
    for module, (product, output) in _linear_layers(graph).items():
        if modules is not None and module not in modules:
            continue
        given, weights = product.input_values()
        # The input's own shape is not known behind a recurrent layer.
        sizes = weights.get_shape()[1], output.get_partial_shape()[-1].get_length()
        down, up = (parameter(name, [1, -1, size], kind) for name, size in zip(adapter_inputs(module), sizes))
        readers = output.get_target_inputs()
        is_transposed = product.get_attributes()["transpose_a"]  # as behind the convolutions of LFM2
        narrow = ops.matmul(given, ops.convert(down, "f32"), is_transposed, True)
        update = ops.matmul(narrow * mask, ops.convert(up, "f32"), False, False)
        if paired_size and module.endswith(("q_proj", "k_proj")):
            order = np.arange(sizes[1]).reshape(-1, 2, paired_size // 2).swapaxes(1, 2)
            update = ops.gather(update, order.flatten(), -1)
        changed = ops.add(output, update)
        for reader in readers:
            reader.replace_source_output(changed.output(0))
        parameters += (down, up)
        layers[module] = sizes
    graph.add_parameters(parameters)
    graph.validate_nodes_and_infer_types()
    return layers


def adapter_inputs(module: str) -> tuple[str, str]:
    """Returns the names of the graph's inputs for the updates of a linear layer: down and up."""
    return f"adapters_down.{module}", f"adapters_up.{module}"


def _linear_layers(graph: ov.Model) -> dict[str, tuple[ov.Node, ov.Output]]:
    """Returns the matrix product and the output of each linear layer of all tokens, by the `common_name` of
    its module: not those of experts, and not the head. Layers that were merged share their product, and have
    an output each."""
    found = {}
    for node in graph.get_ordered_ops():
        names = [node.get_friendly_name()]
        product = node
        if names[0].startswith(MERGED):
            names = names[0].removeprefix(MERGED).split()
            product = node.input_value(0).get_node()
        for name, output in zip(names, node.outputs()):
            layer = LINEAR.fullmatch(name)
            if layer and output.get_partial_shape().rank.get_length() > 2:
                found[common_name(layer[1])] = (product, output)
    return found


def attend_in_bfloat16(graph: ov.Model) -> None:
    """Changes, in place, a graph of `read_graph` that is computed in float32: attention and its KV cache are
    in bfloat16."""
    for node in graph.get_ordered_ops():
        if not isinstance(node, PagedAttention):
            continue
        for operand in node.inputs()[:3]:  # query, key, value
            narrowed = ops.convert(operand.get_source_output(), "bf16")
            operand.replace_source_output(narrowed.output(0))
        readers = node.output(0).get_target_inputs()
        widened = ops.convert(node.output(0), "f32")
        for reader in readers:
            reader.replace_source_output(widened.output(0))
    graph.validate_nodes_and_infer_types()


def weights_as_inputs(graph: ov.Model) -> dict[str, ov.Tensor]:
    """Makes inputs of the graph's constants of STREAMED_BYTES and more, in place. Returns their values by the
    names of the inputs, which share the constants' memory. OpenVINO packs constants, which takes the memory
    of all weights again; inputs are converted one after the other when the graph runs."""
    values = {}
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_byte_size() >= STREAMED_BYTES:
            name = f"weights.{len(values)}"
            values[name] = node.get_tensor_view()
            # OpenVINO allocates memory for an input whose whole shape is known. The width of outputs is.
            shape = [*node.get_output_shape(0)[:-1], -1]
            given = parameter(name, shape, node.get_element_type())
            node.output(0).replace(given.output(0))
            graph.add_parameters([given])
    graph.validate_nodes_and_infer_types()
    return values


def _constant(value: Any, kind: type = np.int32):
    return ops.constant(value, kind).output(0)
