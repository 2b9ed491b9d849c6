"""A static-batch model whose logits follow from each slot's own tokens alone, and which is strict about how it is called.

It may sample itself, as a device does. Any mix-up of slots, positions or tokens changes the text, and a call that a device
would punish fails.
"""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Sequence

import numpy as np

from models.adapters import Adapters
from models.base import Chunk, SampledIds, StaticBatchModel
from models.images.encoder_cache import EncoderCache, split_ids
from models.states import States
from protocol import Image

VOCABULARY = 50
EOS = 0
POISON = (-1,)  # in the place of a state: whatever reads it generates another text
ADAPTER = {"layer": (np.ones((1, 1), np.float32), np.ones((1, 1), np.float32))}


@functools.lru_cache(maxsize=10000)
def _logits(tokens: tuple[int, ...], vocabulary: int) -> np.ndarray:
    seed = zlib.crc32(np.array(tokens, np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(vocabulary, np.float32) * 3


def next_logits(tokens: Sequence[int], vocabulary: int = VOCABULARY, adapter: int = 0) -> np.ndarray:
    """The logits after `tokens`: float32 [vocab], a fixed function of all of them, and of the number of a LoRA adapter."""
    return _logits((-adapter, *tokens) if adapter else tuple(tokens), vocabulary)


def next_logprobs(tokens: Sequence[int], vocabulary: int = VOCABULARY) -> np.ndarray:
    """The log-probabilities after `tokens`: float64 [vocab]."""
    logits = next_logits(tokens, vocabulary).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def greedy(prompt: list[int], max_new_tokens: int, vocabulary: int = VOCABULARY, adapter: int = 0) -> list[int]:
    """What a greedy request for `prompt` must generate."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(int(next_logits(tokens, vocabulary, adapter).argmax()))
    return tokens[len(prompt) :]


class FakeModel(StaticBatchModel):
    """`calls` holds the chunks of every call so far."""

    engine = device = "fake"
    dtype = kv_cache_dtype = "float32"

    def __init__(
        self,
        batch_size: int = 3,
        max_total_tokens: int = 40,
        vocab_size: int = VOCABULARY,
        sampling: str = "host",
        supports_chunked_prefill: bool = False,
        prefill_chunk: int | None = None,
        prefix_granularity: int | None = None,
        supports_prefix_copy: bool = False,
        verify_length: int = 0,
        prefix_slots: int = 0,
        adapters: Sequence[str] = (),
        snapshots: int | None = None,
    ):
        self.batch_size, self.vocab_size, self.sampling = batch_size, vocab_size, sampling
        self.prefix_slots = prefix_slots or batch_size
        self.supports_chunked_prefill, self.prefill_chunk = supports_chunked_prefill, prefill_chunk
        self.prefix_granularity, self.supports_prefix_copy = prefix_granularity, supports_prefix_copy
        self.verify_length, self.max_draft_rows = verify_length, verify_length * batch_size
        self.max_total_tokens, self.max_input_tokens = max_total_tokens, max_total_tokens - 1
        self.supports_prompt_logits = sampling != "device"
        self.returns_ids = sampling == "device"
        self.device_sampling: dict[int, tuple[int, float, float]] = {}  # slot → top_k, top_p, temperature
        self.ready_slots: set[int] = set()  # `set_sampling` was called and no prompt has followed yet
        self.cache: list[list[int]] = [[] for _ in range(self.prefix_slots)]
        self.adapters = Adapters({"layer": (1, 1)}, dict.fromkeys(adapters, ADAPTER)) if adapters else None
        self.computed_with = [0] * self.prefix_slots  # the adapter of what each slot holds
        if snapshots is not None:  # a recurrent state, which is all tokens so far
            self.states = States(self.prefix_slots, snapshots, self.max_draft_rows)
            self.blocks = [(), *[POISON] * (self.states.count - 1)]
        self.calls: list[list[Chunk]] = []
        self.failures: list[Exception] = []  # raised by the next calls
        self.nan_slots: set[int] = set()
        self.may_run = threading.Event()  # cleared: the device hangs in its next call
        self.may_run.set()

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        assert self.sampling != "host" and 0 <= slot < self.batch_size
        self.device_sampling[slot] = (top_k, top_p, temperature)
        self.ready_slots.add(slot)

    def return_token_ids(self, ids: bool) -> None:
        assert self.sampling == "hybrid"
        self.returns_ids = ids

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        assert self.supports_prefix_copy and tokens <= len(self.cache[source])
        self.cache[target] = self.cache[source][:tokens]
        self.computed_with[target] = self.computed_with[source]

    def forward(self, chunks: Sequence[Chunk]) -> np.ndarray | SampledIds:
        slots = [chunk.slot for chunk in chunks]
        assert chunks and len(set(slots)) == len(slots), "a slot is named once"
        is_mix = len(chunks) > 1 and any((len(chunk.tokens) > 1 and not chunk.verify) or chunk.begin == 0 for chunk in chunks)
        assert self.supports_chunked_prefill or not is_mix, "this model runs either rows of one token or one prompt chunk"
        self.calls.append(list(chunks))
        assert self.may_run.wait(60)
        if self.failures:
            raise self.failures.pop(0)
        if self.states:
            self.states.accept({chunk.slot: chunk.begin for chunk in chunks})
            for block in self.states.unused:
                self.blocks[block] = POISON
        rows = []
        for chunk in chunks:
            slot, tokens = chunk.slot, list(chunk.tokens)
            longest = self.verify_length if chunk.verify else self.prefill_chunk
            assert longest is None or len(tokens) <= longest
            assert tokens and chunk.begin <= len(self.cache[slot]), "chunks follow each other, or what the slot holds"
            assert chunk.begin + len(tokens) <= self.max_total_tokens
            if self.sampling != "host" and chunk.begin == 0:
                self.ready_slots.remove(slot)
            assert chunk.begin == 0 or chunk.adapter == self.computed_with[slot], "a prefix belongs to an adapter"
            assert not chunk.adapter or self.adapters.columns_of([chunk.adapter]), "its weights are there"
            self.computed_with[slot] = chunk.adapter
            before = self.cache[slot][: chunk.begin]
            if self.states:
                run = self.states.begin(slot, chunk.begin, len(tokens), chunk.verify)
                before = list(self.blocks[run.read])
                for n, block in enumerate(run.writes, 1):
                    self.blocks[block] = (*before, *tokens[: n if chunk.verify else len(tokens)])
                self.states.end([run], {slot: chunk.keep})
            self.cache[slot] = before + tokens
            ends = range(len(self.cache[slot]) + 1 - chunk.rows, len(self.cache[slot]) + 1)
            for end in ends:
                logits = next_logits(self.cache[slot][:end], self.vocab_size, chunk.adapter)
                rows.append(np.full_like(logits, np.nan) if slot in self.nan_slots else logits)
        if not self.returns_ids:
            return np.stack(rows)
        slots = [chunk.slot for chunk in chunks for _ in range(chunk.rows)]
        return SampledIds(np.array([self._draw(row, slot) for row, slot in zip(rows, slots)]))

    def _draw(self, row: np.ndarray, slot: int) -> int:
        """One of the `top_k` most likely tokens; an id that does not exist for logits that are NaN."""
        if np.isnan(row).any():
            return self.vocab_size
        top_k, _top_p, temperature = self.device_sampling[slot]
        best = np.argsort(-row)[: top_k or self.vocab_size]
        weights = np.exp((row[best] - row.max()) / temperature)
        return int(np.random.default_rng().choice(best, p=weights / weights.sum()))


EMBEDDING = 2  # numbers


def image(key: int, tokens: int = 3, tiles: int = 2) -> Image:
    """An image that `ImageModel` reads."""
    return Image(key, tokens, (tiles, 1, 1), bytes([key % 251] * 3 * tiles), (tokens,))


class ImageModel(FakeModel):
    """Reads images, too. A chunk fails where an image token has no embedding, or one of another image or place."""

    def __init__(self, cached_tokens: int = 1000, **options):
        super().__init__(**options)
        self.encoder_cache = EncoderCache(EMBEDDING, 4 * EMBEDDING * cached_tokens)
        self.vision = self
        self.encoded: list[int] = []  # what the pixels of each tile were, in order
        self.damaged: set[int] = set()  # such pixels cannot be encoded
        self.may_encode = threading.Event()  # cleared: the encoder stops before its next tile
        self.may_encode.set()
        self.began = threading.Semaphore(0)  # a tile

    def encode(self, pixels, canvas, is_cancelled):
        for tile in pixels:
            self.began.release()
            deadline = time.monotonic() + 60  # the thread of a failed test ends, too
            while not self.may_encode.wait(0.002) and not is_cancelled():
                assert time.monotonic() < deadline
            if is_cancelled():
                return None
            if tile[0, 0, 0] in self.damaged:
                raise RuntimeError("on purpose")
            self.encoded.append(int(tile[0, 0, 0]))
        numbers = np.arange(canvas[0], dtype=np.float32)
        return np.stack([np.full_like(numbers, pixels[0, 0, 0, 0]), numbers], axis=1)

    def forward(self, chunks: Sequence[Chunk]) -> np.ndarray | SampledIds:
        for chunk in chunks:
            tokens = np.array(chunk.tokens, np.int64)
            _ids, embeddings, places = self.encoder_cache.resolve(tokens)
            keys, numbers = split_ids(tokens[places])
            assert (embeddings == np.stack([keys % 251, numbers], axis=1)).all()
        return super().forward(chunks)
