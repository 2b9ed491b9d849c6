"""Token masks for constrained decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from text.grammar import Matcher


class Masks(NamedTuple):
    """Which tokens may follow in the rows of a step."""

    mask: np.ndarray  # uint32 [rows, ceil(vocab / 32)] as in sampling.py: sample
    errors: dict[int, Exception]  # of rows without a mask
    seconds: float | None


def masks_of(matchers: Sequence[Matcher | None], vocab_size: int) -> Masks:
    """The masks of a step's rows; a row without a matcher allows all tokens."""
    started_at = time.monotonic()
    errors = {}
    mask = np.full((len(matchers), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for row, matcher in enumerate(matchers):
        try:
            if matcher:
                matcher.fill(mask[row].ctypes.data, mask[row].nbytes)
        except Exception as error:  # one row must not stop the others
            errors[row] = error
            mask[row] = 0xFFFFFFFF
    return Masks(mask, errors, time.monotonic() - started_at)
