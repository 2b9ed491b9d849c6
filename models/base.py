"""The interface between the worker and a model: a fixed number of slots, each with its own positions in one
KV cache; and what an engine says of itself.

`models.prepare` picks the `Engine`; each one raises `ModelError` with the reason in one line for what it
cannot serve, and loads a `StaticBatchModel`. A model has slots, tokens and positions; it is independent of
requests, and samples only where the device does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from config import Config
from manifest import Manifest
from models.adapters import Adapters
from models.errors import ModelError
from models.gguf.container import GgufFile
from models.images.embeddings import ImageEncoder
from models.images.encoder_cache import EncoderCache
from models.states import States


class Chunk(NamedTuple):
    """The next tokens of one slot: a prompt, a part of a prompt, or a decode step's row, which is the last
    generated token, followed by draft tokens if `verify` is set."""

    slot: int
    tokens: Sequence[int]
    begin: int  # position of tokens[0]; 0 starts a new sequence in the slot
    all_logits: bool = False  # return the logits after every token, for log-probabilities of prompts
    verify: bool = False  # the same, as decode steps would give them
    adapter: int = 0  # the number of a LoRA adapter (adapters.py); 0: none
    keep: str = ""  # a snapshot of the state after it: "", "border" (of a message) or "interval"

    @property
    def rows(self) -> int:
        """How many rows of logits `forward` returns for this chunk."""
        return len(self.tokens) if self.all_logits or self.verify else 1


class SampledIds(NamedTuple):
    """What `forward` returns instead of logits where the device samples."""

    ids: np.ndarray  # int64 [rows], as many as of logits; an id may be outside of the vocabulary


# Logits are float32 [rows, vocab], or uint16 [rows, vocab]: the bit patterns of bfloat16, which numpy has no
# type for. They may be a transposed view (transformers-neuronx leaves [vocab, rows] in memory); `sampling.py`
# reads both orders.
Logits = np.ndarray
LOGITS_DTYPES = ("float32", "bfloat16")
# Takes the name of a long phase of loading a model, such as "compiling".
Announce = Callable[[str], None]


class StaticBatchModel:
    """A loaded model, which the worker runs. Calls come one at a time from one thread; `vision` is called
    from a thread of its own, also while `forward` runs. Attributes without a value are set by each engine."""

    engine: str  # "openvino", "torch" or "neuron"
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
    # For a model that reads images: the embeddings that image tokens (negative ids) in chunks stand for, and
    # what makes these embeddings.
    encoder_cache: EncoderCache | None = None
    vision: ImageEncoder | None = None
    states: States | None = None  # of a model whose layers have recurrent states
    state_bytes: int = 0  # of all layers, in one of their blocks
    adapters: Adapters | None = None  # that chunks may choose; None: none can be served

    def forward(self, chunks: Sequence[Chunk]) -> Logits | SampledIds:
        """Runs the chunks, at most one for each slot, and extends the KV cache of their slots; no other slot
        changes.

        Returns rows of logits in the order of `chunks`: for a chunk with `all_logits` or `verify` a row after
        each of its tokens, for any other chunk one row, after its last token. If the device samples,
        SampledIds has an id in the place of each row. The result stays as it is when `forward` is called
        again.

        Where `prefix_granularity` is set, a slot holds the tokens that ran in it until others run at their
        positions: a prompt may begin after the prefix that it shares with the slot's last prompt. (On Neuron
        the logits are then the same up to rounding, see NeuronModel.) Rows are bitwise reproducible: a row
        depends neither on the other chunks nor on how a prompt was split into chunks, if the scheduler
        follows `supports_chunked_prefill` and `prefill_chunk`. Where `supports_chunked_prefill` is false,
        each call of one-token rows, or of chunks with `verify`, must have every slot with a live sequence.

        Raises DeviceLost if the process must be restarted; any other exception leaves the model usable.
        """
        raise NotImplementedError

    def forward_in_chunks(
        self, ids: Sequence[int], borders_of: Mapping[int, Sequence[int]], all_logits: bool = True
    ) -> tuple[np.ndarray, list[int]]:
        """Runs the prompt `ids` in several slots, for the checks of engines; overwrites what these slots
        held. `borders_of` has the borders of each slot's chunks; call n of `forward` runs the n-th chunk of
        every slot that has one. Returns the rows of logits of all calls, one after the other, and the
        position of each row's token: with `all_logits` of every token, else of the last token of each chunk.

        With {0: [0, 5, 6], 1: [0, 2]} the first call runs the tokens 0 to 4 in slot 0 and 0 and 1 in slot 1,
        the second call runs token 5 in slot 0: the positions are 0, 1, 2, 3, 4, 0, 1, 5.
        """
        found = []
        positions: list[int] = []
        for parts in itertools.zip_longest(*map(itertools.pairwise, borders_of.values())):
            running = [(slot, *part) for slot, part in zip(borders_of, parts) if part]
            chunks = [Chunk(slot, ids[begin:end], begin, all_logits) for slot, begin, end in running]
            found.append(self.forward(chunks))
            for _slot, begin, end in running:
                positions += range(begin if all_logits else end - 1, end)
        return np.concatenate(found), positions

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copies what slot `source` holds of its first `tokens` positions to slot `target`. Only where
        `supports_prefix_copy` is set."""
        raise NotImplementedError

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        """Sets how the device samples for `slot` from its next prompt on. Not to be called where `sampling`
        is "host". top_k: 1 samples greedily, 0 sets no limit. Raises DeviceLost."""
        raise NotImplementedError

    def return_token_ids(self, ids: bool) -> None:
        """Makes `forward` return SampledIds, or logits if `ids` is false, from its next call on. Only where
        `sampling` is "hybrid"."""
        raise NotImplementedError


@dataclass
class Engine:
    """An engine, and a model that it can serve on this machine. Class attributes without a value are set by
    each engine.

    Each engine is in the `__init__.py` of its folder. That file imports large packages in functions alone:
    the machine of another engine may lack these packages.
    """

    config: Config
    folder: Path  # of the model, with everything but its weights
    manifest: Manifest
    sha: str | None = None  # the model's commit on the hub; None: a local folder

    device: ClassVar[str]  # its value of --device
    name: ClassVar[str]  # in messages: what serves a model
    logits_dtypes = ("float32",)  # that logits may have, for the sampling loops
    dtypes = ("float32", "bfloat16", "float16")  # that it computes in
    quantizations = ()  # values of --quantize; none: weights stay as they are
    reads_gguf = False  # whether it computes with the weights of GGUF files
    takes_adapters = True  # whether requests can choose LoRA adapters
    uses_transformers = True  # whether the classes of transformers 5 load a checkpoint
    # Settings that no other engine has, and the values that are its own, which messages name; (): all values.
    settings: ClassVar = {}
    versions: ClassVar = {}  # ModelInfo.neuron_versions

    @staticmethod
    def is_here(wanted: str) -> bool:
        """Whether this machine has the engine's device. wanted: the value of --device, `device` or "auto".

        Raises ConfigError or ModelError if `wanted` names the device and it cannot be used; with "auto", if
        no other engine should serve instead, as on a CPU without openvino.
        """
        raise NotImplementedError

    @classmethod
    def why_not_gguf(cls, config: Config, file: GgufFile) -> str | None:
        """Returns why the engine does not compute with the weights of a GGUF file, as a part of a log line;
        None: it does."""
        return f"{cls.name} serves checkpoints"

    @staticmethod
    def memory_bytes() -> int | None:
        """Returns the bytes of memory of the device, all of them, used or not; None: unknown."""

    def prepare(self) -> None:
        """Fills in the settings of `config` that were left open and that `load` does not decide. Loads
        nothing. Raises ConfigError or ModelError for a model that cannot be served, or settings that do not
        fit it."""
        if self.manifest.is_compiled:
            raise ModelError(
                f"{self.config.model_name} is compiled for Neuron, and this server runs on {self.device}; "
                "give its checkpoint"
            )
        self.config = self.config.with_manifest(self.manifest, self.memory_bytes())

    def fetch_weights(self) -> None:
        """Downloads weights that are on the hub, if they are not in the cache, and waits for that. Raises
        ModelError for a download that fails. An engine may raise ConfigError or ModelError for a model that
        cannot be served before the download, also for a local folder without weights; otherwise `models.load`
        does."""
        raise NotImplementedError

    def load(self, announce: Announce) -> StaticBatchModel:
        """Returns the model, ready to run, which may take minutes. announce: gets the name of each long
        phase. Raises ConfigError or ModelError for a model that cannot be served. The engine of OpenVINO also
        raises NotConverted, for a model that plain PyTorch may serve."""
        raise NotImplementedError
