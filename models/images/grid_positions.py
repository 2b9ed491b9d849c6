"""Rotary positions of three numbers: time, row and column (M-RoPE). Those of texts are three equal ones.

Uses numpy alone, so that a worker without torch can use it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.images.encoder_cache import EncoderCache, split_at_images, split_ids


class GridPositions:
    """The positions of the tokens that slots hold, for an engine that runs chunks of them. The tokens of an
    image lie in a grid, whose rows and columns are its `canvas` in `images`."""

    def __init__(self, slots: int, length: int, images: EncoderCache):
        self._held = np.zeros((slots, 3, length), np.int64)
        self._images = images

    def extend(self, slot: int, tokens: Sequence[int], begin: int) -> np.ndarray:
        """Computes the positions (time, row, column) of the tokens of a slot from the `begin`-th on. Returns
        them as int64 [3, tokens], a view of what the slot holds from now on, which a later call for these
        positions changes. The tokens before `begin` need theirs first, by `extend` or `copy`. Raises KeyError
        for an image that is not in the cache.

        Example: after two tokens of text at 0 and 1, an image of 2 x 2 tokens has time 2, rows 2, 2, 3, 3 and
        columns 2, 3, 2, 3. The text after it goes on at 4.
        """
        ids = np.array(tokens, np.int64)
        held = self._held[slot]
        at = begin
        for part in split_at_images(ids):
            # An image takes as many positions as it has rows or columns; its last token has the largest.
            following = held[:, at - 1].max() + 1 if at else 0
            positions = held[:, at : at + len(part)]
            at += len(part)
            if part[0] >= 0:
                positions[:] = following + np.arange(len(part))
                continue
            (key, *_), numbers = split_ids(part)
            _rows, columns = self._images.canvas_of(key)
            if numbers[0]:  # the chunk begins within the image
                following = held[0, at - len(part) - 1]
            positions[:] = following
            positions[1:] += np.divmod(numbers, columns)
        return held[:, begin:at]

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._held[target, :, :tokens] = self._held[source, :, :tokens]
