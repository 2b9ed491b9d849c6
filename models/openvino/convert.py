"""Converts a checkpoint into an entry of the model cache: an OpenVINO graph, checked against transformers'
own logits.

`models/convert.py` runs it in a child process, so that the worker never imports torch or transformers.
`write_graph` loads the checkpoint (`pretrained.load_pretrained`), traces it with a placeholder in the place
of each attention layer, saves the graph, and compares what `model.py` computes from the saved files with what
transformers computes in float32 (`accuracy.py`): where the graph runs in float32, too, and on a text where
bfloat16 or compressed weights round it. For a model that cannot be converted the entry holds the reason, and
the next startup uses plain PyTorch directly.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import shutil
import time
import timeit
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops

from config import DTYPES, Config
from manifest import Manifest
from models.accuracy import find_fault, kl_divergence
from models.base import Chunk
from models.cache import CannotWrite, NotConverted, ends_conversion
from models.checkpoint.architecture import read_architecture
from models.checkpoint.pretrained import (
    InFloat32,
    VisionCheck,
    has_experts,
    has_states,
    load_pretrained,
    reference_logits,
)
from models.errors import ModelError, named
from models.images.towers import is_vision, make_tower
from models.openvino.check_text import SHORT_CHECK_TOKENS, ids_of_text, reference
from models.openvino.delta_tiles import TILE
from models.openvino.graph import MERGED, has_delta_rule, read_graph, save_graph
from models.openvino.model import OpenVinoModel, VisionEncoder
from models.openvino.trace import trace
from run import Json

logger = logging.getLogger("model")

CHECK_TOKENS = OpenVinoModel.prefill_chunk + 16
# Errors of recurrent states add up: the text is that long for models with states, and ends with decode steps.
LONG_TEXT_TOKENS = 2064
LONG_TEXT_STEPS = 64
SHORT_CHECK_BEGINS = (0, 1, 3, 34, 67, 68, 70), (0, 35, 36, 37, 54, 55)  # of the chunks of two slots
CHECK_WINDOW = 40  # longer sliding windows are shortened to this for the check, so that they slide in it
# How many int4 weights, and how many activations, share a scale. The first that passes its check is used:
# large groups are faster, small ones more accurate.
GROUP_SIZES = (128, 64, 32)
# The share of the linear layers that gets int4, with the smallest groups; the others get int8. Models of a
# few hundred million parameters do not tolerate int4 everywhere.
INT4_SHARES = (0.8, 0.5)
# The linear layers around a delta rule that get int8 beside int4, as patterns for nncf: for the gates and
# the output, or for all.
GATES = r".*\.linear_attn\.(in_proj_(a|b|ba)|[ab]_proj)/.*"
INT8_LAYERS = ([GATES, r".*\.linear_attn\.(out_proj|o_proj)/.*"], [r".*\.linear_attn\..*"])
# What the quantized activations may add to the divergence, in nats per token on average.
MAX_ACTIVATION_KL = 0.02
# Linear layers of one input become one where they have at most so many outputs together: dividing the result
# costs prompts more than large layers gain.
MERGED_OUTPUTS = 4096
# Tiles are used where a prompt of TILE tokens takes so much less time with them; their chunks and snapshots
# end at whole tiles only.
MAX_TILES_TIME = 0.9
MIN_TILES_GAIN = 0.002  # seconds
SPARE_BYTES = 50_000_000  # of the disk, for the graph without its weights
COMPRESSED_BYTES = 1.2  # of a weight in int8, with its share of a scale


def write_graph(config: Config, manifest: Manifest, folder: Path, target: Path) -> Json:
    """Writes the graph of the checkpoint in `folder` into the folder `target`, as model.xml and model.bin,
    and that of its vision tower. Returns the facts of the entry, which the caller writes. Logs each step.
    config: with a dtype, as `with_dtype` returns it.

    Raises ModelError or ConfigError for what no engine can serve, CannotWrite, NotConverted for logits that
    differ from those of transformers, and what OpenVINO raises for a model that it cannot convert. A vision
    tower that cannot be converted is no error: the facts have the reason. What was written stays after an
    error.
    """
    stored = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    numbers = itertools.count(1)
    steps = 4 + bool(config.quantize) + manifest.reads_images

    def begin(step: str) -> None:
        logger.info("Converting %s, step %d of %d: %s", config.model_name, next(numbers), steps, step)

    _check_room(config, read_architecture(config, folder).parameters, target)
    begin(f"loading {stored / 1e9:.1f} GB of weights")
    model = load_pretrained(config, folder, "cpu")
    facts: Json = {
        "model": config.model_name,
        "dtype": config.dtype,
        "quantize": config.quantize,
        "vocab_size": model.config.get_text_config().vocab_size,
        "max_total_tokens": manifest.length_limit,
        "has_experts": has_experts(model),
        "arithmetic": None,  # None: what the CPU has for the dtype
        "refused": None,
    }
    begin("computing logits to compare with")
    with InFloat32(getattr(torch, config.dtype)):
        positions = manifest.length_limit or manifest.max_positions or config.max_total_tokens
        check = Check(model, positions, folder)
    facts["reference"] = check.stored
    if manifest.reads_images:
        begin("converting the vision tower")
        facts |= _convert_vision(model, manifest, target, config)
    for buffer in model.buffers():  # what is computed with beside weights
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    begin("tracing")
    graph = trace(model, image_width=facts.get("image_width"))
    path = target / "model.xml"
    if not config.quantize:
        save_graph(graph, path)
    begin("comparing logits")
    facts["tiles"] = check.is_faster_in_tiles(graph, facts)
    check.reject_faults(graph, facts)
    if config.quantize:
        begin(f"compressing to {config.quantize}, and comparing again")
        _compress(config, check, graph, path, facts)
    elif config.dtype == "bfloat16" and (fault := check.fault_on_text(graph, facts)):
        slower = "%s does not tolerate arithmetic in bfloat16, and is computed in float32: %s"
        logger.warning(slower, config.model_name, fault)
        facts["arithmetic"] = "float32"
    return facts


def _check_room(config: Config, parameters: int, target: Path) -> None:
    """Raises CannotWrite where the disk of `target` has no room for so many converted weights."""
    size = COMPRESSED_BYTES if config.quantize else DTYPES[config.dtype].bytes
    needed = SPARE_BYTES + size * parameters
    if shutil.disk_usage(target).free < needed:
        raise CannotWrite(f"{target} has no room for {needed / 1e9:.1f} GB")


def _convert_vision(model: torch.nn.Module, manifest: Manifest, target: Path, config: Config) -> Json:
    """Writes the vision tower of a model, in float32, into the folder `target`, as vision.xml and vision.bin;
    with --quantize in int8 if the tower tolerates that.

    Returns facts of the entry: the width of an embedding, the embedding after each row of a canvas, how many
    activations of the tower share a scale, and whether an image has to run whole. If the tower cannot be
    converted, no file is left, and the only fact is the reason (`vision_fault`). Raises only what ends the
    conversion of the whole model: ModelError, ConfigError, OSError, and errors of memory.
    """
    path = target / "vision.xml"
    dtype = getattr(torch, config.dtype)
    try:
        # The numbers of a bfloat16 model are stored as such, and computed with in float32. (OpenVINO's own
        # compression to float16 rounds everything, also the angles of rotary positions.)
        tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if is_vision(name)}
        tower = make_tower(manifest, tensors, torch.float32)
        with InFloat32(dtype):
            check = VisionCheck(model, tower)
        with torch.no_grad():
            graph = ov.convert_model(tower, example_input=torch.from_numpy(check.tiles[:1]))
        side = tower.tile_side or -1
        graph.reshape([1, side, side, 3])
        save_graph(graph, path)
        fault = _vision_fault(path, check, "float32")
    except Exception as error:
        if ends_conversion(error):
            raise
        logger.debug("the vision tower is not converted", exc_info=True)
        fault = named(error.__cause__ or error)
    if fault is None:
        return {
            "newline": tower.newline,
            "vision_activation_group": _compress_vision(graph, path, check, config),
            "image_width": check.embeddings.shape[1],
            "whole_images": manifest.vision_family.whole_images,
        }
    for each in target.glob("vision.*"):
        each.unlink()
    return {"vision_fault": fault}


def _compress_vision(graph: ov.Model, path: Path, check: VisionCheck, config: Config) -> int:
    """With --quantize, saves a vision tower in `path` with the weights of its linear layers in int8, unless
    its embeddings change too much, which is logged; the file then has the tower as it was. Returns how many
    activations share a scale; 0: the tower stays as it is. Raises what ends a conversion, such as
    CannotWrite."""
    if not config.quantize:
        return 0
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    try:
        save_graph(nncf.compress_weights(graph.clone(), mode=nncf.CompressWeightsMode.INT8_ASYM), path)
        for group in GROUP_SIZES:
            fault = _vision_fault(path, check, config.dtype, group)
            if fault is None:
                return group
    except Exception as error:
        if ends_conversion(error):
            raise
        fault = named(error)
    logger.info("The vision tower is not compressed: in int8 %s", fault)
    save_graph(graph, path)
    return 0


def _vision_fault(path: Path, check: VisionCheck, dtype: str, group: int = 0) -> str | None:
    """Compiles and runs a saved tower in `dtype`. Returns how its embeddings exceed the allowed difference
    from those of transformers, as a part of a log line; None: they do not. group: how many activations share
    a scale; 0: the weights are not compressed."""
    settings = {"INFERENCE_PRECISION_HINT": DTYPES[dtype].short, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
    return check.find_fault(VisionEncoder(path, check.newline, settings), "int8" if group else dtype)


class Check:
    """Token ids and the logits of transformers for them in float32, computed before `trace` changes the
    model.

    model: as `load_pretrained` returns it, while `InFloat32` is active; positions: how many positions the
    model has; folder: that of the model, with its tokenizer. The ids are those of a text, or random ones
    where the folder has no tokenizer of the model. `stored` goes into the entry, for the comparison at every
    startup. Making a Check runs the model a few times, and raises ModelError for logits that are NaN or
    infinite.
    """

    def __init__(self, model: torch.nn.Module, positions: int, folder: Path):
        text_config = model.config.get_text_config()
        vocab_size = text_config.vocab_size
        # Random ids make small differences larger than texts do.
        random = np.random.default_rng(0).integers(0, vocab_size, LONG_TEXT_TOKENS)
        text = (ids_of_text(folder, vocab_size) or random.tolist())[:positions]
        self.ids = text[:CHECK_TOKENS]
        self.short = self.ids[:SHORT_CHECK_TOKENS]
        self.shift = positions - len(self.short)  # the model's last positions
        self.logits = reference_logits(model, self.ids)
        self.stored = reference(self.short, self.logits)
        self.text = self.ids
        self.text_logits = self.logits
        self.steps = 0
        if has_states(model):
            self.text = text[:LONG_TEXT_TOKENS]
            self.steps = min(LONG_TEXT_STEPS, len(self.text) - 1)
            self.text_logits = reference_logits(model, self.text, last=self.steps)
        window = getattr(text_config, "sliding_window", None)
        # A window of all positions never slides, and families may not pass it to their attention function.
        self.window = min(window, CHECK_WINDOW) if window and window < positions else None
        if self.window:
            text_config.sliding_window = self.window
            self.logits = reference_logits(model, self.ids)
        self.at_end = reference_logits(model, self.short, begin=self.shift)
        if self.window:
            text_config.sliding_window = window

    def is_faster_in_tiles(self, graph: ov.Model, facts: Json) -> bool:
        """Measures whether prompts take less processor time in tiles, and enough less to be worth it
        (MAX_TILES_TIME, MIN_TILES_GAIN): runs a prompt of up to TILE tokens five times in each way. Returns
        false for a model without a delta rule, without measuring."""
        if not has_delta_rule(graph):
            return False

        def seconds(tiles: bool) -> float:
            model = self._model(graph, facts | {"tiles": tiles})
            chunk = Chunk(0, self.short[:TILE], 0)
            return min(timeit.repeat(lambda: model.forward([chunk]), timer=time.process_time, number=1))

        in_rows = seconds(tiles=False)
        return seconds(tiles=True) <= min(MAX_TILES_TIME * in_rows, in_rows - MIN_TILES_GAIN)

    def reject_faults(self, graph: ov.Model, facts: Json) -> None:
        """Runs a graph in float32: short chunks of two slots, a long chunk behind them, a chunk at the last
        positions, and the text of a model with recurrent states. Raises NotConverted where the logits of one
        of these differ from those of transformers by more than is allowed. graph: with placeholders; it stays
        as it is."""
        checked = {"arithmetic": "float32", "streamed": True, "longest_window": self.window}
        model = self._model(graph, facts | checked)
        at_end = model.forward([Chunk(0, self.short, 0, all_logits=True)], self.shift)
        end = len(self.short)
        short = ([*(n for n in begins if n < end), end] for begins in SHORT_CHECK_BEGINS)
        borders = [dict(enumerate(short))]
        if end < len(self.ids):
            borders.append({0: [end, len(self.ids)]})
        ways = [(at_end, self.at_end)]
        for borders_of in borders:
            found, positions = model.forward_in_chunks(self.ids, borders_of)
            ways.append((found, self.logits[positions]))
        if self.steps:
            ways.append(self._run_text(model))
        for found, expected in ways:
            if fault := find_fault(found, expected, "float32", facts["has_experts"]):
                raise NotConverted(fault)

    def _run_text(self, model: OpenVinoModel) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logits that `model` computes, and those of transformers, both [tokens, vocab]: after
        each token of the text; of a model with recurrent states only after its last tokens, which run as
        decode steps."""
        end = len(self.text) - self.steps
        borders = [*range(0, end, model.prefill_chunk), *range(end, len(self.text) + 1)]
        logits, _positions = model.forward_in_chunks(self.text, {0: borders}, all_logits=not self.steps)
        return logits[-len(self.text_logits) :], self.text_logits

    def fault_on_text(self, graph: ov.Model, facts: Json) -> str | None:
        """Runs a graph as it will be served, over a text. Returns how its logits exceed the allowed
        difference from those of transformers, as a part of a log line; None: they do not."""
        model = self._model(graph, facts)
        return find_fault(*self._run_text(model), model.precision, facts["has_experts"])

    def choose_activation_group(self, path: Path, facts: Json, most: int) -> str | None:
        """Sets `facts["activation_group"]`: how many activations share a scale. It is the largest of
        GROUP_SIZES up to `most` with which quantized activations add little (MAX_ACTIVATION_KL) to the
        divergence; without such a group, the smallest. Compiles the graph in `path`, and runs it over the
        text, for each group that it tries.

        Returns how the logits of the text then differ from those of transformers by more than `quantize` may,
        as a part of a log line; None: they do not. most: at least the smallest of GROUP_SIZES.
        """

        @functools.cache
        def logits_with(group: int) -> np.ndarray:
            return self._run_text(self._model(path, facts | {"activation_group": group}))[0]

        def is_near(expected: np.ndarray) -> bool:
            return kl_divergence(found, expected).mean() <= MAX_ACTIVATION_KL

        groups = [group for group in GROUP_SIZES if group <= most]
        for group in groups:
            found = logits_with(group)
            # Logits that are so near to those of transformers need no comparison with exact activations.
            if group == groups[-1] or is_near(self.text_logits) or is_near(logits_with(0)):
                break
        facts["activation_group"] = group
        return find_fault(found, self.text_logits, facts["quantize"], facts["has_experts"])

    def _model(self, source: Path | ov.Model, facts: Json) -> OpenVinoModel:
        """Returns a model of a graph with placeholders, or of the file of one, with the slots and positions
        that the comparisons need. facts: as they would be in the entry."""
        config = Config(max_batch_size=3, max_total_tokens=max(len(self.ids), len(self.text)))
        return OpenVinoModel(read_graph(source, facts), facts, config)


def _compress(config: Config, check: Check, uncompressed: ov.Model, path: Path, facts: Json) -> None:
    """Saves a graph in `path` with the weights of its linear layers and embeddings compressed: the first way
    of `_ways_to_compress` that `check` passes. Sets `activation_group` in `facts`. `uncompressed` stays as it
    is; the log says which share of the layers has int4, if not all.

    Raises ModelError where the model loses too much accuracy in all of them, CannotWrite, and what nncf
    raises.
    """
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)  # nncf.set_log_level would change our handlers as well
    for way in _ways_to_compress(config.quantize, nncf, uncompressed):
        # A copy, because compression cannot be undone. Its weights are pages of the checkpoint, which the
        # kernel drops when memory is short.
        graph = uncompressed.clone()
        _merge_linear_layers(graph)
        graph = nncf.compress_weights(graph, **way)
        if "ignored_scope" in way:  # nncf leaves these layers as they are
            graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_ASYM)
        save_graph(graph, path)
        # More activations than weights to a scale are slower, and their rounding depends on other rows.
        compressed = [node for node in graph.get_ops() if node.get_output_element_type(0) == ov.Type.u4]
        groups = {node.get_output_shape(0)[-1] for node in compressed} - {1}
        del graph, compressed
        fault = check.choose_activation_group(path, facts, min(groups, default=GROUP_SIZES[0]))
        if fault is None:
            if "ratio" in way:
                logger.info("int4 in %.0f %% of the layers, int8 in the others", 100 * way["ratio"])
            return
    other = ", or use int8" if config.quantize == "int4" else ""
    raise ModelError(
        f"--quantize {config.quantize} (QUANTIZE): {config.model_name} loses too much accuracy: {fault}; "
        f"leave it out{other}"
    )


def _merge_linear_layers(graph: ov.Model) -> None:
    """Makes one matrix product of those that multiply the same input and have at most MERGED_OUTPUTS outputs
    together, such as query, key and value: each takes 10 to 20 us beside the time for its weights. Changes
    the graph in place. Gates of a delta rule (GATES) are merged with gates only, and any layer only with
    those whose weights have the same type."""
    for output in [output for node in graph.get_ordered_ops() for output in node.outputs()]:
        readers = [reader.get_node() for reader in output.get_target_inputs() if reader.get_index() == 0]
        layers_of = defaultdict(list)
        for node in sorted(readers, key=ov.Node.get_friendly_name):
            if weights := _weights_of(node):
                is_gate = bool(re.fullmatch(GATES, node.get_friendly_name()))
                layers_of[is_gate, weights.get_element_type().get_type_name()].append((node, weights))
        for layers in layers_of.values():
            outputs = sum(len(weights.data) for _node, weights in layers)
            if len(layers) > 1 and outputs <= MERGED_OUTPUTS:
                _merge(layers)
    graph.validate_nodes_and_infer_types()


def _merge(layers: Sequence[tuple[ov.Node, ov.Node]]) -> None:
    """Replaces matrix products in a graph by one, whose result is divided. layers: these products, which have
    the same input, each with its weights. The new node has the names of all, for `_linear_layers` of
    graph.py."""
    first, first_weights = layers[0]
    rows = [weights.data for _node, weights in layers]
    joined = ov.Tensor(first_weights.get_element_type(), [sum(map(len, rows)), rows[0].shape[1]])
    np.concatenate(rows, out=joined.data)
    weights = ops.convert(ops.constant(joined), first.get_element_type())
    product = ops.matmul(first.input_value(0), weights, False, True)
    product.set_friendly_name(first.get_friendly_name())
    parts = ops.variadic_split(product, -1, list(map(len, rows)))
    parts.set_friendly_name(MERGED + " ".join(node.get_friendly_name() for node, _weights in layers))
    for (node, _weights), part in zip(layers, parts.outputs()):
        node.output(0).replace(part)


def _weights_of(product: ov.Node) -> ov.Node | None:
    """Returns the constant [outputs, inputs] of a linear layer; None for another node."""
    if product.get_type_name() != "MatMul":
        return None
    weights = product.input_value(1).get_node()
    if weights.get_type_name() == "Convert":
        weights = weights.input_value(0).get_node()
    is_linear = weights.get_type_name() == "Constant" and len(weights.get_output_shape(0)) == 2
    return weights if is_linear and product.get_attributes()["transpose_b"] else None


def _ways_to_compress(quantize: str, nncf: Any, graph: ov.Model) -> list[dict[str, Any]]:
    """Returns arguments of nncf's `compress_weights` for a graph, the fastest and least accurate way first:
    for int8 one way, for int4 larger groups before smaller ones, then, with the smallest groups, fewer layers
    in int4. Layers in `ignored_scope` get int8."""
    if quantize == "int8":
        return [{"mode": nncf.CompressWeightsMode.INT8_ASYM}]
    # A layer whose width the group does not divide gets the largest that does, or int8 where 32 does not.
    adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    mode = nncf.CompressWeightsMode.INT4_ASYM
    ways = [{"mode": mode, "group_size": group, "advanced_parameters": adjust} for group in GROUP_SIZES]
    if has_delta_rule(graph):
        sensitive, all_of_them = (nncf.IgnoredScope(patterns=patterns) for patterns in INT8_LAYERS)
        ways = [way | {"ignored_scope": sensitive} for way in ways]
        ways.append(ways[-1] | {"ignored_scope": all_of_them})
    return ways + [ways[-1] | {"ratio": share} for share in INT4_SHARES]
