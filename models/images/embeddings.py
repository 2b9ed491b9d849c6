"""How the tiles of an image become its embeddings, also in the layouts of LLaVA-NeXT, Granite Vision and
LLaVA-OneVision.

Uses numpy alone, so that a worker without torch can use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Canvas(NamedTuple):
    """What all tiles but the first show together, as `AnyResolution` of text/images/layouts.py makes it. All
    numbers are in patches."""

    rows: int
    columns: int
    top: int  # rows of padding above the image, and as many below it
    left: int
    kept_rows: int  # of the image without its padding, which is scaled down to as many if it has more
    kept_columns: int


class ImageEncoder:
    """The part of a model that makes embeddings of images: the vision tower, and how its outputs lie in an
    image."""

    newline: list[float] | None  # [width]: the embedding after each row of a canvas

    def encode(
        self, pixels: np.ndarray, canvas: tuple[int, ...], is_cancelled: Callable[[], bool]
    ) -> np.ndarray | None:
        """Returns the embeddings of an image, float32 [tokens, width]; None if `is_cancelled` returns true
        before one of its tiles. Keeps them nowhere.

        pixels: the tiles, uint8 RGB [tiles, height, width, 3], which run one at a time; canvas: how the tiles
        lie in the image, the numbers of a `Canvas`, which are only read if `newline` is set.
        """
        features = []
        for tile in pixels:
            if is_cancelled():
                return None
            features.append(self.encode_tile(tile[None]))
        return arrange(np.stack(features), canvas, self.newline)

    def encode_tile(self, tile: np.ndarray) -> np.ndarray:
        """Returns the embeddings of a tile: uint8 [1, height, width, 3] -> float32 [patches, width], an array
        that stays as it is when the next tile runs."""
        raise NotImplementedError


def arrange(features: np.ndarray, canvas: tuple[int, ...], newline: Sequence[float] | None) -> np.ndarray:
    """Joins the embeddings of the tiles of an image, [tiles, patches, width], into those of the image,
    [tokens, width].

    Without `newline` these are the tiles, one after another, a view of `features` where possible, and
    `canvas` is not read. Else they are the
    first tile, which shows the whole image, then the rows of the canvas that the other tiles make: without
    its padding, scaled down to `kept_rows` and `kept_columns`, and with `newline` [width] after each row.
    canvas: the six numbers of a `Canvas`.
    """
    width = features.shape[-1]
    if newline is None:
        return features.reshape(-1, width)
    rows, columns, top, left, kept_rows, kept_columns = Canvas(*canvas)
    side = math.isqrt(features.shape[1])
    grid = features[1:].reshape(rows // side, columns // side, side, side, width)
    grid = grid.transpose(0, 2, 1, 3, 4).reshape(rows, columns, width)
    grid = grid[top : rows - top, left : columns - left]
    if grid.shape[:2] != (kept_rows, kept_columns):
        grid = _scale(_scale(grid, kept_rows).swapaxes(0, 1), kept_columns).swapaxes(0, 1)
    ends = np.broadcast_to(np.float32(newline), (len(grid), 1, width))
    lines = np.concatenate([grid, ends], 1)
    return np.concatenate([features[0], lines.reshape(-1, width)])


def _scale(grid: np.ndarray, size: int) -> np.ndarray:
    """The grid, [rows, columns, width], with `size` rows, by linear interpolation between the centers of
    patches, as torch's `interpolate` does it."""
    last = len(grid) - 1
    at = ((np.arange(size) + 0.5) * (len(grid) / size) - 0.5).clip(0, last)
    low = at.astype(int)
    share = np.float32(at - low)[:, None, None]
    return grid[low] * (1 - share) + grid[np.minimum(low + 1, last)] * share
