"""The slots of a static batch: which are free, and which prompt tokens each one holds in its KV cache.

Prefix caching: a slot keeps its contents when its request ends, so a request whose prompt begins with the
same tokens (the next turn of a chat, a common system prompt) runs only the rest, if both have the same LoRA
adapter. Slots beyond those that run at a time only hold prompts. Only tokens that ran as prompt chunks, with
the boundaries of any prompt's chunks, count as cached: outputs must be bitwise the same in any slot.
Generated tokens do not count, because a decode step rounds differently than a prompt chunk. A model with
recurrent states continues only where a snapshot is (models/states.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from models.base import StaticBatchModel
from models.images.encoder_cache import cuts_image


class SlotAssignment(NamedTuple):
    """The slot of a request, how many of its prompt tokens are cached, and the slot that has these tokens.

    If `source` is another slot than `slot`, the tokens must be copied first.
    """

    slot: int
    cached: int
    source: int


class Slots:
    """Owns the free slots and their contents. Independent of requests: it sees only prompts."""

    def __init__(self, model: StaticBatchModel, prefix_granularity: int | None):
        """`prefix_granularity`: that of the model; None: without prefix caching."""
        self.free = list(range(model.prefix_slots))  # the least recently used first
        self._model = model
        self._prefix_granularity = prefix_granularity
        self._held: list[list[int]] = [[] for _ in self.free]
        self._adapters = [0 for _ in self.free]  # with which each slot's contents were computed

    def allocate(self, prompt: Sequence[int], reuse: bool, adapter: int) -> SlotAssignment:
        """Takes the free slot with the longest common prefix, else the least recently used one. Copies
        nothing: the caller does, if `source` is another slot. The slot counts as holding the cached tokens
        alone from now on, and its recurrent state continues there. Raises ValueError without a free slot.

        Only contents that were computed with the same `adapter` count, and none without `reuse`. At least two
        tokens are left to run: a chunk of one token would be rounded as a decode step is.

        A slot counts as having no prefix if less than half of its contents would be used, and either prefixes
        can be copied or a free slot is empty: the rest belongs to another conversation. If prefixes can be
        copied, the taken slot gets the longest prefix that any slot has, also one in use.

        Example: a slot has 100 tokens, and the prompt begins with 40 of them. The least recently used slot is
        taken, and gets these 40 tokens if prefixes can be copied.
        """
        common = [0] * len(self._held)
        if self._prefix_granularity and reuse:
            head = prompt[:-2]
            for slot, computed_with in enumerate(self._adapters):
                if computed_with == adapter:
                    common[slot] = self._reusable(slot, prompt, common_prefix(head, self._held[slot]))
        spares = self._model.supports_prefix_copy or not all(self._held[slot] for slot in self.free)

        def reused(slot: int) -> int:
            return 0 if spares and 2 * common[slot] < len(self._held[slot]) else common[slot]

        slot = max(self.free, key=reused)
        source = slot
        if self._model.supports_prefix_copy:
            source = max(range(len(common)), key=lambda other: (common[other], other == slot))
        self.free.remove(slot)
        self._held[slot] = list(prompt[: common[source]])
        if self._model.states:
            self._model.states.resume(source, slot, common[source])
        self._adapters[slot] = adapter
        return SlotAssignment(slot, common[source], source)

    def _reusable(self, slot: int, prompt: Sequence[int], common: int) -> int:
        """Returns how many of the first `common` tokens of a prompt, which `slot` holds, can be reused: up to
        a snapshot if the model has states, else up to a multiple of the granularity that cuts no image."""
        if self._model.states:  # no snapshot cuts an image
            return self._model.states.reusable(slot, common)
        common -= common % self._prefix_granularity
        while self._model.whole_images and common and cuts_image(prompt, common):
            common -= self._prefix_granularity
        return common

    def mark_cached(self, slot: int, tokens: Sequence[int], begin: int) -> None:
        """Counts the tokens of a prompt chunk that has run as cached, if other prompts would have the same
        chunk; else does nothing.

        The chunk has to begin where the cached tokens of the slot end, and to have more than one token and a
        multiple of the granularity.
        """
        held = self._held[slot]
        step = self._prefix_granularity
        if step and begin == len(held) and len(tokens) > 1 and len(tokens) % step == 0:
            held += tokens

    def release(self, slot: int) -> None:
        self.free.append(slot)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of first elements that are equal. a, b: of the same type, such as two lists. Halves are
    compared, because Python compares slices much faster than elements."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
