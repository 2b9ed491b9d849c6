"""The interface between the worker and a model: a fixed number of slots, each with its own positions in one
KV cache.

`models.prepare` picks the implementation; each one raises `ModelError` with the reason in one line for what
it cannot serve. A model has slots, tokens and positions; it is independent of requests, and samples only
where the device does."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from config import FP8, Config
from models.encoder_cache import EncoderCache

if TYPE_CHECKING:
    from models.adapters import Adapters
    from models.openvino_model import VisionEncoder
    from models.vision import VisionTower

logger = logging.getLogger("model")

PROGRESS_S = 10.0
# OpenVINO's messages begin with lines of its source code, and end with the reason.
OPENVINO_SOURCE_LINES = ("Exception from ", "Check '")
OUT_OF_MEMORY = re.compile("bad_alloc|out of memory|allocate .*memory", re.IGNORECASE)


class ModelError(Exception):
    """A model that cannot be served; the message is one line, for the user."""


class MachineError(ModelError):
    """The machine is at fault: its memory, its time."""


class DeviceLost(Exception):
    """An unrecoverable device error, raised by `forward`; restart the process."""


class Chunk(NamedTuple):
    """The next tokens of one slot: a prompt, a part of one, or the last generated token (a decode step's
    row), followed by draft tokens where `verify` is set."""

    slot: int
    tokens: Sequence[int]
    begin: int  # position of tokens[0]; 0 starts a new sequence in the slot
    all_logits: bool = False  # return the logits after every token, for log-probabilities of prompts
    verify: bool = False  # the same, as decode steps would give them
    adapter: int = 0  # the number of a LoRA adapter (adapters.py); 0: none

    @property
    def rows(self) -> int:
        """How many rows of logits it has."""
        return len(self.tokens) if self.all_logits or self.verify else 1


class SampledIds(NamedTuple):
    """What `forward` returns instead of logits where the device samples."""

    ids: np.ndarray  # int64 [len(chunks)]; an id may be outside of the vocabulary


# Logits are float32 [rows, vocab], or uint16 [rows, vocab]: the bit patterns of bfloat16, which numpy has no
# type for. They may be a transposed view (transformers-neuronx leaves [vocab, rows] in memory); `sampling.py`
# reads both orders.
Logits = np.ndarray


class StaticBatchModel:
    """What the worker runs. One call at a time, from one thread. Attributes without a value are set by each
    engine."""

    engine: str  # "openvino", "torch" or "neuron"
    device: str  # "cpu", "cuda" or "neuron"
    dtype: str  # "float32", "bfloat16" or "float16"
    quantize: str | None = None  # "int8" or "int4" where the weights are compressed
    kv_cache_dtype: str  # as `dtype`, "u8" or "fp8_e4m3fn"
    kv_bytes_per_token: int | None = None  # of the KV cache; None: unknown
    batch_size: int  # slots that run at a time
    prefix_slots: int  # all slots; those beyond `batch_size` only hold prompts for prefix caching
    max_total_tokens: int  # positions of a slot
    max_input_tokens: int  # longest prompt
    vocab_size: int
    supports_prompt_logits: bool  # whether `Chunk.all_logits` is supported
    # "host"; "device": `forward` returns SampledIds, and `set_sampling` comes before each prompt; "hybrid":
    # either, as `return_token_ids` says.
    sampling: str = "host"
    # One call may hold any mix of chunks; else either rows of one token each, or a single prompt chunk.
    supports_chunked_prefill: bool = False
    prefill_chunk: int | None = None  # longest prompt chunk in tokens; None: a prompt runs whole
    # With chunked prefill the lengths of all chunks of a prompt but its last are multiples of this.
    chunk_granularity: int = 1
    # A prompt may continue what its slot holds at multiples of this position; None: nowhere.
    prefix_granularity: int | None
    supports_prefix_copy: bool = False  # whether `copy_prefix` is supported
    # Whether a chunk must have all tokens of an image or none (`cuts_image`): they attend to each other.
    whole_images: bool = False
    # Tokens of all rows of a call with `verify`, and of one row; 0: not supported. More draft tokens would
    # cost more than they save.
    max_draft_rows: int = 0
    verify_length: int = 0
    # For a model that reads images: the embeddings that image tokens (negative ids) in chunks stand for.
    encoder_cache: EncoderCache | None = None
    _vision: VisionTower | VisionEncoder  # set where there is an `encoder_cache`
    adapters: Adapters | None = None  # that chunks may choose; None: none can be served

    def forward(self, chunks: Sequence[Chunk]) -> Logits | SampledIds:
        """Runs the chunks, at most one a slot, and extends the KV cache of their slots; no other slot
        changes.

        Where `prefix_granularity` is set, a slot holds what ran in it until other tokens run at these
        positions: a prompt may begin after the prefix that it shares with the slot's last one. (On Neuron up
        to rounding, see NeuronModel.) Returns one row of logits a chunk, after its last token, in the order
        of `chunks`; a chunk with `all_logits` or `verify` has one row a token. The result stays as it is when
        `forward` is called again. Rows are bitwise reproducible: they depend neither on the other chunks nor
        on how a prompt was split into chunks where the scheduler follows `supports_chunked_prefill` and
        `prefill_chunk`. Every slot with a live sequence must be in each call of one-token rows, or of chunks
        with `verify`, where `supports_chunked_prefill` is false. Raises DeviceLost when the process must be
        restarted; any other exception leaves the model usable."""
        raise NotImplementedError

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copies what slot `source` holds of its first `tokens` positions to slot `target`."""
        raise NotImplementedError

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        """How the device samples for `slot` from its next prompt on. Not where `sampling` is "host". top_k 1
        is greedy, 0 is off."""
        raise NotImplementedError

    def return_token_ids(self, ids: bool) -> None:
        """Whether the next `forward` returns SampledIds or logits. Only where `sampling` is "hybrid"."""
        raise NotImplementedError

    def encode_image(
        self, pixels: np.ndarray, canvas: tuple[int, ...], is_cancelled: Callable[[], bool]
    ) -> np.ndarray | None:
        """The embeddings of an image, float32 [tokens, width], of its tiles, uint8 RGB [tiles, height, width,
        3], and how they lie in it (protocol.py: Image). Runs one tile at a time; returns None once
        `is_cancelled` says so between two of them. Called from one thread, also while `forward` runs. Only
        where there is an `encoder_cache`."""
        return self._vision.encode(pixels, canvas, is_cancelled)


def check_length_limit(model: str, limit: int | None, length: int) -> None:
    """Raises ModelError for slots longer than `limit`, the `length_limit` of a model's manifest."""
    if limit and length > limit:
        raise ModelError(
            f"{model} changes its positions or its attention beyond {limit} tokens; give --max-total-tokens "
            f"{limit} or less"
        )


def warn_text_only(model: str, fault: str) -> None:
    """For a model that reads images and whose vision tower is not served."""
    logger.warning("%s: only the text part of this model is served, without images: %s", model, fault)


def reject_openvino_settings(config: Config, engine: str) -> None:
    """Raises ModelError where a setting of OpenVINO's KV cache is given, and another engine serves."""
    for name in ("kv_cache_dtype", "prefix_slots"):
        value = getattr(config, name)
        if value not in (None, "auto", FP8):
            raise ModelError(
                f"--{name.replace('_', '-')} {value} ({name.upper()}) is for OpenVINO on CPUs, and "
                f"{config.model_name} is served by {engine}; leave it out"
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated: torch and OpenVINO raise a RuntimeError for it, too."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


def first_line(error: BaseException) -> str:
    """The first line that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith(OPENVINO_SOURCE_LINES):
        return lines[-1]
    if lines[0].endswith(":"):  # the reason is in the next one
        return " ".join(lines[:2])
    return lines[0]


def named(error: BaseException) -> str:
    """The type and the first line of an error."""
    return ": ".join(dict.fromkeys((type(error).__name__, first_line(error))))


@contextlib.contextmanager
def reported_as(failure: str, explain: Callable[[BaseException], str] = named) -> Iterator[None]:
    """Turns any exception into a ModelError of one line: `failure`, then what `explain` makes of the
    exception."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        logger.debug(failure, exc_info=True)
        raise ModelError(f"{failure}: {explain(error)}") from None


@contextlib.contextmanager
def progress_logged(what: str, measure: Callable[[], str] = str) -> Iterator[None]:
    """Logs every PROGRESS_S seconds that `what` is still running, and what `measure` says of it, which runs
    in a thread."""
    done = threading.Event()
    started_at = time.monotonic()

    def log_progress() -> None:
        while not done.wait(PROGRESS_S):
            progress = measure()
            if not done.is_set():
                logger.info("Still %s after %.0f s%s", what, time.monotonic() - started_at, progress)

    threading.Thread(target=log_progress, name="progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()
