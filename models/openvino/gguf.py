"""Converts a GGUF file into an entry of the model cache, without torch and transformers.

OpenVINO's GGUF frontend makes a graph of a file over the file's own compressed weights. Its attention becomes
the placeholders of `graph.py`, and its rotary positions are replaced by those of the file's keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.frontend import FrontEndManager
from openvino.opset17 import grouped_matmul

from config import Config
from manifest import Manifest
from models.base import Chunk
from models.checkpoint.rope import Rope, plain, scaled
from models.gguf.container import GgufFile, read_gguf
from models.gguf.keys import DIVISORS, head_size, rotary_positions, scaling_size
from models.openvino.check_text import SHORT_CHECK_TOKENS, ids_of_text, reference
from models.openvino.gguf_files import OWN_DIVISORS, compressed_types, rotated_size
from models.openvino.graph import LINEAR_NAME, placeholder, read_graph, save_graph
from models.openvino.model import OpenVinoModel
from models.openvino.state_ops import parameter
from run import Json

logger = logging.getLogger("model")

# How many activations share a scale, unless --dtype is float32: as many as weights. Quantized activations
# halve the time of prompts, and of steps of many rows.
ACTIVATION_GROUP = 32
# The names of linear layers in a checkpoint, which adapters have. (Those of Phi-3 are joined in another way.)
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WEIGHT = "weight.weight_"  # then the name of a tensor: nodes of the frontend
INPUTS = {"inp_tokens": "input_ids", "inp_pos": "position_ids", "inp_out_ids": "keep"}
# The shares of a token's experts in gpt-oss: the frontend's softmax of them is over the wrong dimension.
EXPERT_SHARES = "moe_w_sm"
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the numbers
SLIDING_MASK = "self_kq_mask_swa"
OUTPUT = "result_output"


def write_graph(config: Config, manifest: Manifest, folder: Path, target: Path) -> Json:
    """Writes the graph of the GGUF file that the manifest names into `target`. Returns the facts of the
    entry. Among them are the logits of a short text, which this graph computes in float32 with exact
    activations: each startup compares its own with them. Nothing else is compared.

    config: with a dtype. folder: has the tokenizer. Raises ModelError for a broken file, CannotWrite if
    `target` cannot be written, RuntimeError if the graph differs from the file, and what OpenVINO raises.
    """
    file = read_gguf(manifest.gguf_file)
    compressed = compressed_types(file) or None
    facts: Json = {
        "model": config.model_name,
        "dtype": config.dtype,
        "quantize": None,
        "compressed": compressed,
        "activation_group": ACTIVATION_GROUP if compressed and config.dtype != "float32" else 0,
        "vocab_size": file.vocab_size,
        "max_total_tokens": manifest.length_limit,
        "has_experts": bool(file["expert_count"]),
        "arithmetic": None,
        "refused": None,
        "paired_size": head_size(file) if file.architecture in ("llama", "mistral3") else 0,
    }
    logger.info("Converting %s: weights in %s", file.path.name, compressed or config.dtype)
    graph = _graph_of(file)
    save_graph(graph, target / "model.xml")
    del graph
    ids = ids_of_text(folder, file.vocab_size) or list(range(file.vocab_size))
    ids = ids[: min(SHORT_CHECK_TOKENS, file["context_length"])]
    checked = facts | {"arithmetic": "float32", "activation_group": 0}
    of_check = Config(max_batch_size=1, max_total_tokens=len(ids))
    model = OpenVinoModel(read_graph(target / "model.xml", checked), checked, of_check)
    facts["reference"] = reference(ids, model.forward([Chunk(0, ids, 0, all_logits=True)]))
    return facts


def _graph_of(file: GgufFile) -> ov.Model:
    """Returns the file as a graph with placeholders, whose inputs are those of INPUTS, int64 [tokens], and
    whose output is the logits [rows, vocab]. The weights stay as they are in the file, but for minima and
    MXFP4 experts. Raises RuntimeError where OpenVINO cannot read all of it."""
    frontend = FrontEndManager().load_by_framework("gguf")  # `read_model` does not find it
    graph = frontend.convert(frontend.load(str(file.path)))
    nodes = graph.get_ordered_ops()
    named_nodes = {node.get_friendly_name(): node for node in nodes}
    used = {name.removeprefix(WEIGHT) for name in named_nodes if name.startswith(WEIGHT)}
    # The frontend cuts joined queries, keys and values.
    read = {name.replace("attn_qkv", f"attn_{part}") for name in file.tensors for part in "qkv"}
    if differing := used ^ (read - OWN_DIVISORS.get(file.architecture, set())):
        raise RuntimeError(f"its graph differs from the file in {min(differing)}")
    parameters = [parameter(name, [-1], ov.Type.i64) for name in INPUTS.values()]
    for theirs, own in zip(INPUTS, parameters):
        shaped = ops.reshape(ops.convert(own, "i32"), [1, 1, 1, -1], False)
        named_nodes[theirs].output(0).replace(shaped.output(0))
    attentions = [node for node in nodes if node.get_type_name() == "ScaledDotProductAttention"]
    slides = [file.architecture == "phi3" or _has_sliding_mask(node) for node in attentions]
    _replace_rotations(file, zip(attentions, slides), parameters[1])
    for index, node in enumerate(attentions):
        window = file["attention.sliding_window"] if slides[index] else None
        _replace_attention(file, node, index, window or 0, parameters[1])
    for node in nodes:
        _name_as_in_checkpoints(node)
        _take_minima_out(node)
        if node.get_friendly_name().endswith(EXPERT_SHARES):
            node.output(0).replace(ops.softmax(node.input_value(0), 2).output(0))
        elif node.get_type_name() == "GatherMatmul":
            _sort_by_expert(file, node)
    rows = ops.squeeze(named_nodes[OUTPUT].input_value(0), [0, 1])
    return ov.Model([ops.result(rows)], parameters)


def _replace_rotations(
    file: GgufFile, attentions: Iterable[tuple[ov.Node, bool]], positions: ov.Node
) -> None:
    """Makes queries and keys turn by cosines and sines that are computed here from the file's keys: the
    frontend leaves out some keys and tensors. Changes the graph in place. attentions: each with whether it
    has a sliding window; positions: the graph's input, [tokens]. Raises ModelError for a rotary scaling that
    cannot be read."""
    cosines = {slides: _cosines(_rope(file, slides), positions) for slides in (False, True)}
    found = {
        turn.get_friendly_name(): (turn, cosines[slides][turn.get_type_name()])
        for node, slides in attentions
        for operand in node.input_values()[:2]
        for turn in _turns_above(operand)
    }
    for turn, own in found.values():
        (reader,) = turn.output(0).get_target_inputs()  # which multiplies by the frontend's factor
        reader.get_node().output(0).replace(own.output(0))


def _cosines(rope: Rope, positions: ov.Node) -> dict[str, ov.Node]:
    """Returns nodes for the cosines and sines of `positions` [tokens], multiplied by the rope's factor, [1,
    tokens, 1, pairs], by the types of the frontend's nodes for them: Cos and Sin."""
    column = ops.reshape(ops.convert(positions, "f32"), [1, -1, 1, 1], False)
    angles = column * np.array(rope.frequencies, np.float32)
    factor = np.array(rope.factor, np.float32)
    return {"Cos": ops.cos(angles) * factor, "Sin": ops.sin(angles) * factor}


def _turns_above(operand: ov.Output) -> Iterator[ov.Node]:
    """Yields the frontend's cosines and sines that an operand of an attention is made with, some more than
    once; none for an operand that is not rotated. The search ends at matrix products."""
    node = operand.get_node()
    if node.get_type_name() in ("Cos", "Sin"):
        yield node
    elif node.get_type_name() != "MatMul":
        for above in node.input_values():
            yield from _turns_above(above)


def _rope(file: GgufFile, slides: bool) -> Rope:
    """Returns the rotary positions of the layers with, or without, a sliding window, divided by the file's
    DIVISORS, if there are any. Raises ModelError for a rotary scaling that cannot be read."""
    size = rotated_size(file)
    given = rotary_positions(file, slides)
    rope = scaled(given, size) or plain(given["rope_theta"], size)
    if divisors := file.numbers(DIVISORS):
        rope = Rope(tuple(np.divide(rope.frequencies, divisors)), rope.factor)
    return rope


def _has_sliding_mask(attention: ov.Node) -> bool:
    """Whether an attention of the frontend takes the mask of layers with a sliding window."""
    return _first_above(attention.input_value(3), "Parameter").get_friendly_name() == SLIDING_MASK


def _replace_attention(
    file: GgufFile, attention: ov.Node, index: int, window: int, positions: ov.Node
) -> None:
    """Replaces an attention of the frontend by a placeholder, in place. index: the number of the layer;
    window: in tokens, 0: none; positions: the graph's input, [tokens]. Where the file says so, queries grow
    with their positions. The caches get the keys and values before the frontend's rounding to float16."""
    size = head_size(file)
    heads = file["attention.head_count"]
    kv_heads = file["attention.head_count_kv"] or heads
    layer = {
        "kind": "attention",
        "index": index,
        "scaling": scaling_size(file) ** -0.5,
        "window": window,
        "kv_heads": kv_heads,
        "key_size": size,
        "value_size": size,
        "sinks": file.numbers(f"blk.{index}.attn_sinks.weight") or [],
        "weights": 0,
    }
    operands = [
        ops.reshape(_first_above(operand, "Convert").input_value(0), [-1, count * size], False)
        for operand, count in zip(attention.input_values(), (heads, kv_heads, kv_heads))
    ]
    if growth := file["attention.temperature_scale"]:
        # Queries grow by each original context length.
        lengths = np.arange(file["context_length"]) // file["rope.scaling.original_context_length"]
        factors = (1 + growth * np.log1p(lengths[:, None])).astype(np.float32)
        operands[0] *= ops.gather(factors, positions, 0)
    attended = placeholder(layer, operands, heads * size)
    shaped = ops.reshape(attended, [1, -1, heads, size], False)
    (reader,) = attention.output(0).get_target_inputs()  # a Transpose to [1, tokens, heads, size]
    reader.get_node().output(0).replace(shaped.output(0))


def _first_above(output: ov.Output, kind: str) -> ov.Node:
    """Returns the first node of the type `kind` from `output` upwards, always by the first input (of a
    ScatterUpdate by its updates), such as the Parameter of a mask, or the Convert that rounds what the cache
    holds to float16. The node of `output` counts, too. Raises RuntimeError where there is none."""
    node = output.get_node()
    while node.get_type_name() != kind:
        node = node.input_value(2 if node.get_type_name() == "ScatterUpdate" else 0).get_node()
    return node


def _name_as_in_checkpoints(node: ov.Node) -> None:
    """Renames the product of a linear layer of a file as those of converted models are named, for adapters.
    Other nodes, and layers that MODULES lacks, keep their names."""
    if node.get_type_name() == "MatMul":
        weights = node.input_value(1).get_node().get_friendly_name().removeprefix(f"{WEIGHT}blk.")
        layer, _, tensor = weights.removesuffix(".weight").partition(".")
        if tensor in MODULES:
            node.set_friendly_name(LINEAR_NAME.format(f"layers.{layer}.{MODULES[tensor]}"))


def _sort_by_expert(file: GgufFile, product: ov.Node) -> None:
    """Replaces the frontend's product of rows and the experts chosen for them, in place: it cannot be read
    back from an entry. A public operation multiplies rows sorted by expert; OpenVINO compiles both to the
    same.

    The inputs of `product`: rows [experts of a token or 1, tokens, inputs], weights [experts, outputs,
    inputs], and the chosen experts [tokens, experts of a token]. Its result: [experts of a token, tokens,
    outputs].
    """
    given, weights, chosen = product.input_values()[:3]
    experts, outputs, inputs = weights.get_shape()
    used = file["expert_used_count"]
    hits = ops.one_hot(ops.reshape(ops.transpose(chosen, [1, 0]), [-1], False), experts, 1, 0, 0)
    order = ops.gather(ops.non_zero(hits), 1, 0)
    ends = ops.cum_sum(ops.reduce_sum(hits, 1), 0)
    repeated = ops.broadcast(given, [used, 1, 1], broadcast_spec="BIDIRECTIONAL")
    rows = ops.gather(ops.reshape(repeated, [-1, inputs], False), order, 0)
    products = grouped_matmul(rows, _integers(weights), ops.convert(ends, "i32"))
    restored = ops.scatter_update(products, order, products, 0)
    product.output(0).replace(ops.reshape(restored, [used, -1, outputs], False).output(0))


def _integers(weights: ov.Output) -> ov.Output | ov.Node:
    """Returns the weights of experts, in the same shape. MXFP4 becomes integers, twice the numbers, with half
    the scales: OpenVINO keeps integers compressed, and expands MXFP4 to float32. Other types are returned as
    they are."""
    numbers = _first_above(weights, "Constant")
    if numbers.get_element_type() != ov.Type.f4e2m1:
        return weights
    shape = weights.get_shape()
    scales = _first_above(_first_above(weights, "Multiply").input_value(1), "Constant")
    codes = np.stack([numbers.data & 15, numbers.data >> 4], -1)
    integers = ops.convert(ops.constant(MXFP4[codes].reshape(*shape[:2], -1, 32)), "f32")
    halves = np.exp2(scales.data - np.float32(128)).reshape(*shape[:2], -1, 1)
    return ops.reshape(integers * halves, shape, False)


def _take_minima_out(product: ov.Node) -> None:
    """Changes, in place, a product by weights with minima, (numbers - zeros) * scales by groups: the weights
    become (numbers - middle) * scales, and a small product adds the rest: sums of each group's activations
    times (middle - zeros) * scales. Other nodes stay. OpenVINO quantizes the activations of weights without
    minima only, and computes equal sums once."""
    if not (parts := _parts_with_minima(product)):
        return
    numbers, zeros, scales = parts
    if numbers.get_element_type() == ov.Type.u4:
        middle = 8
        centered = ov.Tensor(ov.Type.i4, numbers.shape)
        centered.data[:] = np.reshape(numbers.data ^ 0x88, centered.data.shape)  # both numbers of a byte
    else:
        middle = 16
        centered = ov.Tensor(numbers.data - np.int8(middle))
    scaled = product.input_value(1).get_node().input_value(0).get_node()
    replaced = ops.convert(ov.op.Constant(centered), "f32")
    scaled.input(0).replace_source_output(replaced.output(0))
    outputs, groups, size = numbers.shape
    grouped = ops.reshape(product.input_value(0), [-1, groups, size], False)
    sums = ops.reduce_sum(grouped, 2)
    minima = ((middle - zeros.data.astype(np.float32)) * scales.data).reshape(outputs, groups)
    readers = product.output(0).get_target_inputs()
    rest = ops.matmul(sums, ops.convert(minima.astype(np.float16), "f32"), False, True)
    whole = product + rest
    for reader in readers:
        reader.replace_source_output(whole.output(0))


def _parts_with_minima(product: ov.Node) -> list[ov.Node] | None:
    """Returns the constants with the numbers, zeros and scales of a product's weights, [outputs, groups,
    group size or 1]; None for another node, for weights without zeros, and for those that another node reads,
    too."""
    if product.get_type_name() != "MatMul":
        return None
    weights = product.input_value(1)
    is_shared = len(weights.get_target_inputs()) > 1  # the embeddings are the head
    if weights.get_node().get_type_name() != "Reshape" or is_shared:
        return None
    scaled = weights.get_node().input_value(0).get_node()
    difference = scaled.input_value(0).get_node()
    if difference.get_type_name() != "Subtract":
        return None
    converted = (*difference.input_values(), scaled.input_value(1))
    return [_first_above(each, "Constant") for each in converted]
