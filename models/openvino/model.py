"""Decoder-only models on a CPU, through OpenVINO.

A converted model is an OpenVINO graph whose attention layers are placeholders. Here the graph is read, the
placeholders become PagedAttention, and the graph is compiled; a few logits are compared with those of
`transformers` at every startup.

Each slot owns a fixed range of the KV cache's blocks, so there is no block allocator, and one call runs any
mix of chunks. This file imports neither torch nor transformers.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from config import DTYPES, Config
from models.accuracy import find_fault
from models.adapters import Adapters, configured
from models.base import Chunk, StaticBatchModel
from models.cache import NotConverted, read_entry
from models.errors import ModelError, check_length_limit, is_out_of_memory, warn_text_only
from models.images.embeddings import ImageEncoder
from models.images.encoder_cache import EncoderCache, split_at_images
from models.images.grid_positions import GridPositions
from models.machine import release_files, usable_threads, zeros
from models.openvino.delta_tiles import TILE
from models.openvino.graph import (
    IMAGE_INPUTS,
    adapter_inputs,
    add_adapters,
    attend_in_bfloat16,
    read_graph,
    weights_as_inputs,
)
from models.openvino.state_ops import NEXT, TABLE, state_inputs
from models.states import Run, States
from run import Json

logger = logging.getLogger("model")

BLOCK = 32  # tokens of a KV cache block; PagedAttention on a CPU has no other size
FLOAT32_TOKENS = 64  # per call: from 65 or 81 rows on, oneDNN's AVX2 kernels sum in another order
# Rows of a call with draft tokens: 16 rows take about twice the time of one.
VERIFY_TOKENS = 16
# The rows that a smaller call is padded to: a single row is rounded differently, and where bfloat16 has no
# AMX, four rows can be faster than fewer.
MIN_ROWS, PADDED_ROWS = 2, 4
PADDING_GAIN = 0.9  # of the time of the smaller call
WORTH_COMPRESSING = 100_000_000  # bytes of weights


class Segment(NamedTuple):
    """Consecutive tokens of a slot in one call of the graph."""

    slot: int
    tokens: Sequence[int]
    begin: int
    rows: int  # how many of the last tokens' logits are returned
    adapter: int = 0  # its number; 0: none
    keep: str = ""  # as in Chunk


class OpenVinoModel(StaticBatchModel):
    """A converted model and its KV cache. `graph` comes from `read_graph`; `facts` is its `entry.json`. Its
    slots are those of the settings and one more, for padding."""

    engine = "openvino"
    supports_chunked_prefill = True
    prefill_chunk = 256
    supports_prompt_logits = True
    prefix_granularity = 1
    supports_prefix_copy = True
    _grid_positions: GridPositions | None = None
    _min_rows = MIN_ROWS
    _columns: tuple[int, ...] = ()  # of the adapters that the graph has; () before it has any
    max_draft_rows = verify_length = VERIFY_TOKENS

    def __init__(self, graph: ov.Model, facts: Json, config: Config):
        """Compiles the graph and makes the KV cache, the states and the adapters. config: as `with_manifest`
        returns it. Changes `graph`. Raises ModelError for a KV cache type that does not go with the model,
        and for adapters that do not fit; what OpenVINO raises, also if memory is short."""
        self.batch_size = config.max_batch_size
        self.prefix_slots = max(config.max_batch_size, config.prefix_slots or 0)
        self.max_total_tokens = config.max_total_tokens
        self.max_input_tokens = config.max_input_tokens
        self.vocab_size = facts["vocab_size"]
        self.dtype = facts["dtype"]
        self.quantize = facts["quantize"] or facts.get("compressed")
        core = ov.Core()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": config.threads or usable_threads(),
            "ENABLE_CPU_PINNING": False,  # other processes share the cores
        }
        self.threads = _threads_taken(core, settings)
        self._settings = settings
        precisions = self._choose_precisions(core, graph, facts, config.kv_cache_dtype)
        if config.lora_adapters or config.lora_folder:
            self._add_adapters(graph, config, facts.get("paired_size", 0))
        weights = weights_as_inputs(graph) if facts.get("streamed") else {}
        compiled = core.compile_model(graph, "CPU", settings | precisions)
        self._request = compiled.create_infer_request()
        for name, tensor in weights.items():
            self._request.set_tensor(name, tensor)
        self._inputs = {port.get_any_name(): port for port in compiled.inputs}
        self._next_states = compiled.outputs[1:]  # of graphs with tiles (delta_tiles.py)
        if self._next_states:
            self.chunk_granularity = self.prefix_granularity = TILE
            self._max_call_tokens = TILE
        blocks = math.ceil(self.max_total_tokens / BLOCK)
        if tables := {name: _sizes(port) for name, port in self._inputs.items() if name.startswith(TABLE)}:
            self._add_states(tables, config)
        # The blocks of each slot, and of the padding row.
        rows = self.prefix_slots + 1
        if images := self._inputs.get(IMAGE_INPUTS[0]):
            self.encoder_cache = EncoderCache(*_sizes(images))
            self.whole_images = facts.get("whole_images", False)
            if len(self._inputs["position_ids"].get_partial_shape()) > 1:
                self._grid_positions = GridPositions(rows, self.max_total_tokens, self.encoder_cache)
        self._blocks = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
        self._kv_cache = [  # openvino holds no reference to the arrays
            self._add_cache(port) for name, port in self._inputs.items() if "_cache." in name
        ]
        self.kv_bytes_per_token = sum(cache.nbytes for cache in self._kv_cache) // (self._blocks.size * BLOCK)

    def _choose_precisions(self, core: ov.Core, graph: ov.Model, facts: Json, kv_cache_dtype: str) -> Json:
        """Returns OpenVINO's settings for the arithmetic and the KV cache. Sets the attributes that follow
        from them: `computed_in`, `kv_cache_dtype`, `precision`, the granularities, and how many tokens a call
        may have. Changes the graph in place if its KV cache is in bfloat16 and its arithmetic is not.

        Arithmetic in bfloat16 is ruled out by facts["arithmetic"] "float32", by recurrent states, by
        compressed weights, and on one thread. Raises ModelError for a KV cache type that goes with neither.
        """
        has_bfloat16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        has_states = any(port.get_any_name().startswith(TABLE) for port in graph.inputs)
        # On one thread OpenVINO's AMX kernel for MLPs divides by zero, half the threads: SIGFPE. Rounding
        # errors of states add up with each token.
        tolerated = "float32"
        if (
            has_bfloat16
            and self.dtype == "bfloat16"
            and facts["arithmetic"] != "float32"
            and self.threads > 1
            and not has_states
        ):
            tolerated = "bfloat16"
        # Compressed weights are multiplied by quantized activations, in float32: faster than bfloat16, and
        # batch-invariant, which bfloat16 over compressed weights is not on AMX.
        self.computed_in = "float32" if self.quantize else tolerated
        is_bfloat16 = self.computed_in == "bfloat16"
        self.kv_cache_dtype = tolerated if kv_cache_dtype == "auto" else kv_cache_dtype
        accepted = list(dict.fromkeys((tolerated, self.computed_in, "u8")))
        if self.kv_cache_dtype not in accepted:
            raise ModelError(
                f"--kv-cache-dtype {kv_cache_dtype} (KV_CACHE_DTYPE): OpenVINO computes {facts['model']} in "
                f"{self.computed_in} here, which takes a KV cache in {' or '.join(accepted)}; give auto or u8"
            )
        if self.kv_cache_dtype == "bfloat16" and not is_bfloat16:
            attend_in_bfloat16(graph)
        if self.kv_cache_dtype == "u8":  # the scale of a block changes as the block fills
            self.chunk_granularity = self.prefix_granularity = BLOCK
        # How many activations share a scale where weights are compressed; 0: they are exact.
        activation_group = facts.get("activation_group", 0)
        self.precision = facts["quantize"] or ("int8" if activation_group else self.kv_cache_dtype)
        is_any_length_exact = is_bfloat16 or (activation_group > 0 and has_bfloat16)
        self._max_call_tokens = math.inf if is_any_length_exact else FLOAT32_TOKENS
        self._vision_precision = DTYPES[tolerated].short
        return {  # the types default to less precise ones on some CPUs
            "INFERENCE_PRECISION_HINT": DTYPES[self.computed_in].short,
            "KV_CACHE_PRECISION": DTYPES[self.kv_cache_dtype].short,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": activation_group,
        }

    def _add_cache(self, port: ov.ConstOutput) -> np.ndarray:
        """Makes an array for the keys or the values of a layer, gives it to the graph, and returns it: zeros,
        uint8 [blocks, KV heads, BLOCK, head size in bytes]."""
        kind = port.get_element_type()
        shape = [self._blocks.size, *_sizes(port)]
        cache = zeros((*shape[:-1], shape[-1] * kind.size))
        self._request.set_tensor(port.get_any_name(), ov.Tensor(cache, shape, kind))
        return cache

    def _add_states(self, shapes: dict[str, list[int]], config: Config) -> None:
        """Makes the tables of recurrent states, zeros, and gives them to the graph; a block is one row of
        each table. Sets `states` and `state_bytes`. shapes: of a row, by table. Limits `prefix_slots` to
        `batch_size` and one slot for each snapshot that `max_snapshot_memory` allows."""
        self.state_bytes = 4 * sum(map(math.prod, shapes.values()))
        snapshots = int(config.max_snapshot_memory * 1e9) // self.state_bytes
        self.prefix_slots = min(self.prefix_slots, self.batch_size + snapshots)
        self.states = States(self.prefix_slots + 1, snapshots, self.max_draft_rows)
        self._tables = {
            name: np.zeros((self.states.count, *shape), np.float32) for name, shape in shapes.items()
        }
        for name, table in self._tables.items():
            self._request.set_tensor(name, ov.Tensor(table, shared_memory=True))

    def _add_adapters(self, graph: ov.Model, config: Config, paired_size: int) -> None:
        """Adds the inputs of LoRA adapters to the graph, in place, and sets `adapters`, which has those of
        the settings. Raises ModelError for adapters that do not fit the graph."""
        given, modules = configured(config)
        dtype = "bfloat16" if self.quantize else self.computed_in
        self._adapter_type = ov.Type.bf16 if dtype == "bfloat16" else ov.Type.f32
        layers = add_adapters(graph, modules, self._adapter_type, paired_size)
        self.adapters = Adapters(layers, given, dtype)

    def _select_adapters(self, numbers: Iterable[int]) -> None:
        """Gives the graph the weights from the first to the last of these adapters, as views. That takes 10
        ms for 30 layers, so nothing is done if the graph has these weights, and nothing for a model without
        adapters. numbers: may repeat; 0: none."""
        if self.adapters is None:
            return
        begin, end = self.adapters.columns_of(numbers)
        columns = (begin, end, self.adapters.version)
        if self._columns == columns:
            return
        for module, pair in self.adapters.weights.items():
            for name, array in zip(adapter_inputs(module), pair):
                shape = [1, end - begin, array.shape[1]]
                self._request.set_tensor(name, ov.Tensor(array[begin:end], shape, self._adapter_type))
        self._columns = columns

    def forward(self, chunks: Sequence[Chunk], shift: int = 0) -> np.ndarray:
        """Runs the chunks, in as many calls of the graph as their lengths and adapters need, and extends the
        KV cache and the states of their slots. Returns new logits, float32 [rows, vocab], in the order of
        `chunks`. A slot whose last chunk had draft tokens, and that has no chunk now, loses its recurrent
        state.

        shift: is added to the positions that the model gets, for the check of a conversion. Raises ValueError
        for a chunk that does not begin where the recurrent state of its slot is, and what OpenVINO raises.
        """
        if self.states:
            self.states.accept({chunk.slot: chunk.begin for chunk in chunks})
        groups = self.adapters.groups([chunk.adapter for chunk in chunks]) if self.adapters else ()
        if len(groups) <= 1:
            return self._forward(chunks, shift)
        logits_of = {}
        for group in groups:
            logits = self._forward([chunks[place] for place in group], shift)
            ends = np.cumsum([chunks[place].rows for place in group])
            logits_of |= zip(group, np.split(logits, ends[:-1]))
        return np.concatenate([logits_of[place] for place in sorted(logits_of)])

    def _forward(self, chunks: Sequence[Chunk], shift: int) -> np.ndarray:
        """Does what `forward` does, for chunks whose adapters can run in one call."""
        self._select_adapters(chunk.adapter for chunk in chunks)
        calls = split(chunks, self._max_call_tokens, self.chunk_granularity, self.whole_images)
        logits = [self._infer(call, shift) for call in calls]
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copies whole blocks of the KV cache: what follows `tokens` in the last one is overwritten before it
        is read. Copies grid positions, too, if the model has them, but no recurrent states: the caller makes
        the slot resume from a snapshot (`states`)."""
        blocks = math.ceil(tokens / BLOCK)
        for cache in self._kv_cache:
            cache[self._blocks[target, :blocks]] = cache[self._blocks[source, :blocks]]
        if self._grid_positions:
            self._grid_positions.copy(source, target, tokens)

    def load_vision(self, path: Path, facts: Json) -> None:
        """Reads and compiles the vision tower in the file `path`, and sets `vision`. facts: of its entry."""
        precision = {
            "INFERENCE_PRECISION_HINT": self._vision_precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": facts["vision_activation_group"],
        }
        self.vision = VisionEncoder(path, facts["newline"], self._settings | precision)

    def choose_padding(self) -> None:
        """Measures, by a few calls, whether small calls are faster with PADDED_ROWS rows, and pads them from
        then on if so, with a log line. Only a model that computes in bfloat16 is measured; any other runs one
        call. To be called before requests run."""
        self._time_call(MIN_ROWS)  # the first small call packs weights for such
        if self.computed_in != "bfloat16" or self.max_total_tokens < PADDED_ROWS:
            return
        small, padded = (min(self._time_call(rows) for _ in range(3)) for rows in (MIN_ROWS, PADDED_ROWS))
        if padded < PADDING_GAIN * small:
            self._min_rows = PADDED_ROWS
            logger.info(
                "Steps are padded to %d rows: %.1f ms, not %.1f",
                PADDED_ROWS,
                1000 * padded,
                1000 * small,
            )

    def _time_call(self, rows: int) -> float:
        """Returns the seconds that a call of so many rows takes. Runs in the slot for padding."""
        begun_at = time.perf_counter()
        self._forward([Chunk(self.prefix_slots, (0,) * rows, 0, all_logits=True)], 0)
        return time.perf_counter() - begun_at

    def _infer(self, segments: list[Segment], shift: int) -> np.ndarray:
        """Runs the segments in one call of the graph, padded to the fewest rows that a call has, and extends
        the KV cache and the states of their slots. Returns the logits that they ask for, in their order, as a
        new array. The weights of their adapters are selected already. shift: is added to positions."""
        missing = self._min_rows - sum(len(segment.tokens) for segment in segments)
        if missing > 0:
            segments = [*segments, Segment(self.prefix_slots, (0,) * missing, 0, 0)]
        begins = [segment.begin for segment in segments]
        ends = [segment.begin + len(segment.tokens) for segment in segments]
        assert min(begins) >= 0 and max(ends) <= self.max_total_tokens
        edges = list(itertools.accumulate((len(segment.tokens) for segment in segments), initial=0))
        blocks = [
            self._blocks[segment.slot, : math.ceil(end / BLOCK)] for segment, end in zip(segments, ends)
        ]
        positions = [
            self._grid_positions.extend(segment.slot, segment.tokens, segment.begin)
            if self._grid_positions
            else np.arange(segment.begin, end)
            for segment, end in zip(segments, ends)
        ]
        ids = np.array([token for segment in segments for token in segment.tokens], np.int64)
        images = {"token_type_ids": (ids < 0).astype(np.int32)}
        if self.encoder_cache:
            ids, *found = self.encoder_cache.resolve(ids)
            images |= zip(IMAGE_INPUTS, found)
        keep = [row for segment, end in zip(segments, edges[1:]) for row in range(end - segment.rows, end)]
        kept = len(keep)
        keep += [0] * (self._min_rows - kept)  # the head's matrix product, too, has so many rows
        inputs = {
            "input_ids": ids,
            **images,
            "position_ids": np.concatenate(positions, -1) + shift,
            "keep": np.array(keep, np.int64),
            "past_lens": np.array(begins, np.int32),
            "subsequence_begins": np.array(edges, np.int32),
            "block_indices": np.concatenate(blocks),
            "block_indices_begins": np.cumsum([0, *map(len, blocks)], dtype=np.int32),
            "max_context_len": np.array(max(ends), np.int32),
        }
        if self.adapters:
            numbers = [segment.adapter for segment in segments for _ in segment.tokens]
            inputs["adapters"] = self.adapters.mask(numbers, self._columns[:2])
        runs = self._state_runs(segments) if self.states else []
        if runs:
            inputs |= state_inputs(runs, is_padded=missing > 0)
        for name, array in inputs.items():
            if name in self._inputs:
                self._request.set_tensor(name, ov.Tensor(array))
        self._request.infer()  # without the interpreter's lock
        if tiled := [run.writes[0] for run in runs if run.is_prompt]:
            for port in self._next_states:
                table = self._tables[port.get_any_name().removeprefix(NEXT)]
                table[tiled] = self._request.get_tensor(port).data
        if runs:
            self.states.end(runs, {segment.slot: segment.keep for segment in segments})
        return self._request.get_output_tensor(0).data[:kept].copy()

    def _state_runs(self, segments: Sequence[Segment]) -> list[Run]:
        """Returns the segments of each slot as one run, and plans their blocks in `states`. Draft tokens have
        a segment each; the segments of a slot follow each other. Raises ValueError for a slot without a state
        at the position."""
        runs = []
        for slot, of_slot in itertools.groupby(segments, key=lambda segment: segment.slot):
            first, *others = of_slot
            tokens = len(first.tokens) + len(others)
            runs.append(self.states.begin(slot, first.begin, tokens, are_drafts=bool(others)))
        return runs


def _sizes(port: ov.ConstOutput) -> list[int]:
    """The shape of an input without its first dimension."""
    return [size.get_length() for size in list(port.get_partial_shape())[1:]]


class VisionEncoder(ImageEncoder):
    """A converted vision tower. `path`: its graph, which is compiled with `settings` of OpenVINO; `newline`:
    [width], the embedding after each row of a canvas; None: there is none."""

    def __init__(self, path: Path, newline: list[float] | None, settings: Json):
        self._request = ov.Core().compile_model(path, "CPU", settings).create_infer_request()
        self.newline = newline

    def encode_tile(self, tile: np.ndarray) -> np.ndarray:
        # To its end: after InferRequest.cancel() OpenVINO 2026.4 computes tiles of another size with stale
        # shapes, also in new requests of the compiled graph.
        self._request.infer([ov.Tensor(np.ascontiguousarray(tile))])  # without the interpreter's lock
        return self._request.get_output_tensor(0).data.copy()


def _threads_taken(core: ov.Core, settings: Json) -> int:
    """Returns how many threads a graph compiled with `settings` runs on: no more than there are cores. Only a
    compiled graph says so, so a tiny one is compiled."""
    number = ops.parameter([1], np.float32)
    smallest = core.compile_model(ov.Model([ops.relu(number)], [number]), "CPU", settings)
    return smallest.get_property("INFERENCE_NUM_THREADS")


def split(
    chunks: Sequence[Chunk], max_tokens: float, granularity: int, whole_images: bool
) -> Iterator[list[Segment]]:
    """Divides chunks among calls of at most `max_tokens` tokens; yields the segments of each call.

    A chunk that does not fit becomes segments of several calls. Each of these but the last ends at a multiple
    of `granularity`. A segment of one token would be rounded as a decode step is, so the segment before it
    leaves two tokens: with `max_tokens` 64 a prompt of 65 tokens becomes 63 and 2. (Where `granularity` is
    `max_tokens`, all prompts of 65 tokens end with a segment of one.) With `whole_images` and a limit each
    image is a call by itself, whatever its length. Draft tokens (`verify`) are never divided: all are added
    to the current call as segments of one token, even beyond `max_tokens`.
    """
    shortest = 1 if granularity == max_tokens else 2
    call = []
    room = max_tokens
    for slot, tokens, begin, all_logits, verify, adapter, keep in chunks:
        if verify:  # a row each: the tokens before it in the call are in the cache when it is computed
            call += [Segment(slot, (token,), begin + n, 1, adapter) for n, token in enumerate(tokens)]
            room -= len(tokens)
            continue
        end = begin + len(tokens)
        has_images = whole_images and max_tokens < math.inf and min(tokens) < 0
        for part in split_at_images(np.array(tokens)) if has_images else [tokens]:
            if has_images and part[0] < 0:
                if call:
                    yield call
                call = []
                room = len(part)  # nothing else fits
            while len(part) > 0:
                take = len(part)
                if take > room:
                    take = min(room, take - shortest)
                    take -= (begin + take) % granularity
                if take < min(len(part), shortest):
                    yield call
                    call = []
                    room = max_tokens
                    continue
                wanted = take if all_logits else int(begin + take == end)
                kept = keep if begin + take == end else ""
                call.append(Segment(slot, part[:take], begin, wanted, adapter, kept))
                part = part[take:]
                begin += take
                room -= take
    if call:
        yield call


def load_entry(config: Config, entry: Path) -> OpenVinoModel:
    """Returns the model of an entry of the cache, ready to run: compiled, compared with transformers' logits,
    with its vision tower if it has one. Logs how it is served, what would take less memory, and if images
    cannot be read. Takes the time of the compilation and of several calls.

    Raises NotConverted for a model that OpenVINO cannot serve, ModelError for unsupported settings and too
    little memory, another exception for a damaged entry, such as ValueError for logits that differ.
    """
    facts = read_entry(entry)
    if facts["refused"]:
        raise NotConverted(facts["refused"])
    check_length_limit(config.model_name, facts["max_total_tokens"], config.max_total_tokens)
    try:
        model = OpenVinoModel(read_graph(entry / "model.xml", facts), facts, config)
        _compare(model, facts)
        model.choose_padding()
        release_files(entry)  # OpenVINO has packed the weights that it multiplies with
        if model.kv_cache_dtype == "u8" and not config.speculate:
            # Rejected draft tokens would have changed the scales of a block.
            model.max_draft_rows = model.verify_length = 0
        if model.encoder_cache:
            model.load_vision(entry / "vision.xml", facts)
        elif fault := facts.get("vision_fault"):
            warn_text_only(config.model_name, fault)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"{config.max_batch_size} slots of {config.max_total_tokens} tokens need more memory than there "
            f"is ({error}); lower --max-batch-size (MAX_BATCH_SIZE) or --max-total-tokens (MAX_TOTAL_TOKENS)"
        ) from None
    logger.info(
        "OpenVINO: weights in %s, computed in %s, threads: %d; KV cache in %s, %d bytes per token; "
        "prefix caching in %d slots",
        model.quantize or model.dtype,
        model.computed_in,
        model.threads,
        model.kv_cache_dtype,
        model.kv_bytes_per_token,
        model.prefix_slots,
    )
    if model.quantize and model.kv_cache_dtype == "float32":
        logger.info("--kv-cache-dtype u8 takes 30 % of that memory")
    if not model.quantize and (entry / "model.bin").stat().st_size > WORTH_COMPRESSING:
        logger.info("--quantize int8 halves memory use, and large models are faster with it")
    return model


def _compare(model: OpenVinoModel, facts: Json) -> None:
    """Runs a prompt and decode steps of the entry's text, in the last slot that runs requests, whose KV cache
    keeps them. Raises ValueError if the logits of either differ from those of transformers by more than is
    allowed."""
    reference = facts["reference"]
    ids = reference["ids"][: model.max_total_tokens]
    expected = np.array(reference["logits"], np.float32)[: len(ids)]
    begin = max(1, len(ids) - VERIFY_TOKENS)  # of the decode steps, which run in one call
    slot = model.batch_size - 1
    prompt = model.forward([Chunk(slot, ids[:begin], 0, all_logits=True)])
    steps = model.forward([Chunk(slot, ids[begin:], begin, verify=True)])
    for found, wanted in ((prompt, expected[:begin]), (steps, expected[begin:])):
        columns = found[:, reference["columns"]]
        if fault := find_fault(columns, wanted, model.precision, facts["has_experts"]):
            if model.precision == "int8" and facts.get("compressed"):
                fault += "; with --dtype float32 (DTYPE) its activations are not quantized"
            raise ValueError(fault)
