"""Token masks for constrained decoding, computed in a thread while the device runs the step that needs
them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from text.grammar import Matcher


class Masks(NamedTuple):
    """Which tokens may follow in the rows of a step."""

    mask: np.ndarray  # uint32 [rows, ceil(vocab / 32)] as in sampling.py: sample
    errors: dict[int, Exception]  # of rows without a mask
    seconds: float | None


class MaskThread:
    """Computes the masks of one step at a time."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "worker-masks")

    def start(self, matchers: Sequence[Matcher | None]) -> Future[Masks] | None:
        """Begins to compute the masks of a step's rows; a row without a matcher allows all tokens. None if
        no row has one."""
        return self._thread.submit(self._masks, matchers) if any(matchers) else None

    def _masks(self, matchers: Sequence[Matcher | None]) -> Masks:
        started_at = time.monotonic()
        errors = {}
        mask = np.full((len(matchers), -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for row, matcher in enumerate(matchers):
            try:
                if matcher:
                    matcher.fill(mask[row].ctypes.data, mask[row].nbytes)
            except Exception as error:  # one row must not stop the others
                errors[row] = error
                mask[row] = 0xFFFFFFFF
        return Masks(mask, errors, time.monotonic() - started_at)
