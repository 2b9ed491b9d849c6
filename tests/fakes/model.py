"""A static-batch model whose logits follow from each slot's own tokens alone, and which is strict about how it is called.

It may choose the tokens itself, as a device does that samples. Any mix-up of slots, positions or tokens changes the text, and
any call that a device would punish raises.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import torch

from model import Part

VOCABULARY = 50
EOS = 0
SCORE_CHUNK = 3


def next_logits(tokens: list[int], vocabulary: int = VOCABULARY) -> torch.Tensor:
    """The logits after `tokens`: float32 [vocab], a fixed function of all of them."""
    seed = int.from_bytes(hashlib.blake2b(bytes(str(tokens), "ascii"), digest_size=7).digest(), "big")
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def greedy(prompt: list[int], max_new_tokens: int, vocabulary: int = VOCABULARY) -> list[int]:
    """What a request for `prompt` must generate."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(int(next_logits(tokens, vocabulary).argmax()))
    return tokens[len(prompt) :]


class FakeModel:
    """Implements StaticBatchModel."""

    device = "fake"
    dtype = "float32"

    def __init__(self, batch_size: int = 3, max_total_tokens: int = 40, vocab_size: int = VOCABULARY, sampling: str = "host"):
        self.prompt_part: int | None = None
        self.most_along = 0
        self.along: list[int] = []  # how many tokens of prompts went along with each step that took some
        self.sampling = sampling
        self.lines: dict[int, tuple[int, float, float]] = {}  # slot → top_k, top_p, temperature
        self.ready_slots: set[int] = set()  # told how to sample, and not prefilled yet
        self.gives_prompt_logits = sampling == "host"
        self.quantize = None
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.max_total_tokens = max_total_tokens
        self.max_input_tokens = max_total_tokens - 1
        self.cache: list[list[int]] = [[] for _ in range(batch_size)]
        self.decoded_slots: list[list[int]] = []
        self.fail_next_prefill = False
        self.fail_next_decode = False
        self.nan_slots: set[int] = set()
        self.may_decode = threading.Event()  # cleared: the device hangs in its next step
        self.may_decode.set()

    def prefill(self, slot: int, prompt: list[int]) -> torch.Tensor:
        assert 1 <= len(prompt) <= self.max_input_tokens
        if self.fail_next_prefill:
            self.fail_next_prefill = False
            raise RuntimeError("prefill failed on purpose")
        self.cache[slot] = list(prompt)
        if self.sampling == "device":
            assert slot in self.ready_slots, "a prompt's first token is sampled, too"
            self.ready_slots.remove(slot)
        return self._answer(next_logits(prompt, self.vocab_size)[None], [slot])

    def prefill_part(self, part: Part) -> torch.Tensor:
        assert part.end - part.begin <= self.prompt_part
        return self._prefill_part(*part)

    def _prefill_part(self, slot: int, prompt: list[int], begin: int, end: int) -> torch.Tensor:
        assert begin == (len(self.cache[slot]) if begin else 0) < end <= len(prompt), "parts follow each other"
        if end == len(prompt):
            return self.prefill(slot, prompt)
        self.cache[slot] = prompt[:end]
        return next_logits(prompt[:end], self.vocab_size)[None]

    def decode_along(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert 1 < part.end - part.begin <= self.most_along and part.slot not in slots.tolist()
        self.along.append(part.end - part.begin)
        return self.decode(tokens, positions, slots), self._prefill_part(*part)

    def understudy(self) -> FakeModel:
        return FakeModel(2, 10**6, self.vocab_size)

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        assert self.sampling == "device" and 0 <= slot < self.batch_size
        self.lines[slot] = (top_k, top_p, temperature)
        self.ready_slots.add(slot)

    def _answer(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        if self.sampling == "host":
            return logits
        return torch.tensor([self._draw(row, slot) for row, slot in zip(logits, slots)])

    def _draw(self, row: torch.Tensor, slot: int) -> int:
        """Of the `top_k` likeliest, by chance; from numbers that are none comes an id that is none."""
        top_k, _top_p, temperature = self.lines[slot]
        if row.isnan().any():
            return self.vocab_size
        likeliest = row.topk(min(top_k or self.vocab_size, self.vocab_size))
        return int(likeliest.indices[torch.multinomial(torch.softmax(likeliest.values / temperature, -1), 1)])

    def score(self, slot: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        assert self.gives_prompt_logits
        self.prefill(slot, prompt)
        rows = [next_logits(prompt[: n + 1], self.vocab_size) for n in range(len(prompt))]
        for begin in range(0, len(prompt), SCORE_CHUNK):
            yield torch.stack(rows[begin : begin + SCORE_CHUNK])

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == positions.dtype == slots.dtype == torch.int64
        names = slots.tolist()
        assert names == sorted(set(names)), "slots are named once, ascending"
        self.decoded_slots.append(names)
        assert self.may_decode.wait(60)
        if self.fail_next_decode:
            self.fail_next_decode = False
            raise RuntimeError("decode failed on purpose")
        rows = []
        for token, position, slot in zip(tokens.tolist(), positions.tolist(), names):
            assert position == len(self.cache[slot]) < self.max_total_tokens, "a token goes right behind the last one"
            self.cache[slot].append(token)
            logits = next_logits(self.cache[slot], self.vocab_size)
            rows.append(torch.full_like(logits, float("nan")) if slot in self.nan_slots else logits)
        return self._answer(torch.stack(rows), names)
