"""Image embeddings, by the key of their image.

In prompts the tokens of an image are negative numbers that name the key and a number within the image
(protocol.py: Image). So an engine finds the embedding of each token here, whatever part of a prompt it runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

ENCODER_CACHE_BYTES = 256 << 20
Ids = TypeVar("Ids")
TOKEN_BITS = 16  # of an id, for the number of the token within its image; the other ones are the key


class Entry(NamedTuple):
    embeddings: np.ndarray  # float32 [tokens, width]
    canvas: tuple[int, ...]  # of the image (protocol.py)


class EncoderCache:
    """Keeps the embeddings of images by key. Embeddings beyond `limit_bytes` are evicted, first those that
    were added or pinned longest ago; those of keys that an owner has pinned never are, even beyond the limit.
    Thread-safe."""

    def __init__(self, width: int, limit_bytes: int = ENCODER_CACHE_BYTES):
        """`width`: of an embedding, in numbers."""
        self.width = width
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # what was added or pinned longest ago first
        self._pins: dict[Hashable, set[int]] = {}  # keys, by owner
        self._lock = threading.Lock()

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def bytes_of(self, tokens: int) -> int:
        """The memory that the embeddings of so many tokens take."""
        return tokens * self.width * np.dtype(np.float32).itemsize

    def add(self, key: int, embeddings: np.ndarray, canvas: tuple[int, ...] = ()) -> None:
        """Adds the embeddings of an image, float32 [tokens, width], and how its tiles lie in it; changes
        nothing if the cache has the key. May evict others, and these embeddings themselves if their key is
        not pinned. The array is kept, not copied."""
        assert embeddings.shape[1:] == (self.width,) and embeddings.dtype == np.float32
        with self._lock:
            if key not in self._entries:
                self._entries[key] = Entry(embeddings, canvas)
                self.nbytes += embeddings.nbytes
                self._evict()

    def pin(self, owner: Hashable, keys: set[int]) -> None:
        """Keeps the embeddings of these keys, also those that are yet to be added, until the same owner pins
        others. Its earlier pins end, and what they kept may be evicted at once; an empty set ends them all.
        The set is kept, not copied."""
        with self._lock:
            for key in (keys - self._pins.get(owner, set())) & self._entries.keys():
                self._entries.move_to_end(key)
            self._pins[owner] = keys
            self._evict()

    def resolve(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads prompt ids, int64 [n], as a model needs them. Returns the ids with 0 for image tokens; the
        embeddings of the image tokens in their order, float32 [image tokens, width], as a copy; the places of
        the image tokens in `ids`, int64 [image tokens]. Without image tokens the returned ids are `ids`
        itself. `ids` and the order of eviction do not change. Raises KeyError for an image that is not in the
        cache."""
        places = np.flatnonzero(ids < 0)
        embeddings = np.empty((len(places), self.width), np.float32)
        if not len(places):
            return ids, embeddings, places
        keys, numbers = split_ids(ids[places])
        with self._lock:
            for key in np.unique(keys).tolist():
                rows = keys == key
                embeddings[rows] = self._entries[key].embeddings[numbers[rows]]
        return np.maximum(ids, 0), embeddings, places

    def canvas_of(self, key: int) -> tuple[int, ...]:
        """How the tiles of an image lie in it, as `add` got it. Raises KeyError for an image that is not in
        the cache."""
        return self._entries[key].canvas

    def _evict(self) -> None:
        pinned = set().union(*self._pins.values())
        for key in list(self._entries):
            if self.nbytes <= self.limit_bytes:
                return
            if key not in pinned:
                self.nbytes -= self._entries.pop(key).embeddings.nbytes


def split_at_images(ids: np.ndarray) -> list[np.ndarray]:
    """Divides a part of a prompt, int64 [n], into its texts and images, in their order. Two images in a row
    are two parts, two texts never are. The parts are views of `ids`."""
    is_image = ids < 0
    is_edge = np.diff(is_image) | (np.diff(ids) != -1) & is_image[1:]
    return np.split(ids, np.flatnonzero(is_edge) + 1)


def cuts_image(prompt: Sequence[int], n: int) -> bool:
    """Whether a cut between `prompt[n - 1]` and `prompt[n]`, 0 < n < len(prompt), is within an image, or
    leaves a single token of text between the cut and an image: the model would round that token as a decode
    step."""
    before, after = prompt[n - 1], prompt[n]
    if before < 0 and after < 0:
        return after == before - 1
    return before >= 0 > prompt[max(0, n - 2)] or after >= 0 > prompt[min(n + 1, len(prompt) - 1)]


def split_ids(ids: Ids) -> tuple[Ids, Ids]:
    """The keys, and the numbers within their images, of image token ids (negative, int64): arrays of numpy or
    tensors of torch, as `ids` are."""
    flat = -1 - ids
    return flat >> TOKEN_BITS, flat & ((1 << TOKEN_BITS) - 1)
