"""The images of requests: a thread encodes each one once, into the model's encoder cache.

    add ─► `_images` has its pixels ─ start ─► `_encodings` ─ `_encode`, in the thread ─► the encoder cache

`retain` names the images that requests want. It frees the pixels of all other images, and of encoded ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from engine.admission import Admission
from engine.metrics import Metrics
from models.base import StaticBatchModel
from protocol import Image

logger = logging.getLogger("worker")


class ImageThread:
    """Encodes the images of requests round-robin: a request with one image does not wait for all images of
    another request. `model` has an encoder cache. Only the loop's thread calls the methods, which do not
    wait."""

    def __init__(self, model: StaticBatchModel, admission: Admission, metrics: Metrics):
        self._model = model
        self._cache = model.encoder_cache
        self._admission = admission
        self._metrics = metrics
        self._images: dict[int, Image] = {}  # that are not encoded yet, by key
        self._encodings: dict[int, Future[str]] = {}  # of images that requests want, by key
        # What is left to do: keys and futures of each request. The first request is next.
        self._by_request: deque[deque[tuple[int, Future[str]]]] = deque()
        self._thread = ThreadPoolExecutor(1, "worker-images")

    def add(self, images: Iterable[Image]) -> None:
        """Takes the images of a message, whose pixels have been admitted, and counts them in the metrics.
        Encodes nothing: `start` does. The pixels of an image that waits already are freed at once. The next
        `retain` frees the pixels of each image that it does not name."""
        for image in images:
            self._metrics.series("images").inc()
            if image.key in self._cache:
                self._metrics.series("encoder_cache_hits").inc()
            if image.key in self._images:
                self._admission.release_pixels(len(image.pixels))
            else:
                self._images[image.key] = image

    def fit(self, tokens: Mapping[int, int]) -> bool:
        """Whether the embeddings of these images, key → tokens, fit into the encoder cache together."""
        return self._cache.bytes_of(sum(tokens.values())) <= self._cache.limit_bytes

    def retain(self, keys: set[int]) -> None:
        """Takes the keys of all images that requests want, and cancels the encoding of all others.

        The embeddings of wanted images stay in the cache. The pixels of a wanted image stay until the image
        is encoded. Freed pixels make room for the images of other requests (Admission).
        """
        self._cache.pin("requests", keys)
        for key in self._encodings.keys() - keys:
            del self._encodings[key]
        for key in [key for key in self._images if key not in keys or key in self._cache]:
            self._admission.release_pixels(len(self._images.pop(key).pixels))

    def start(self, keys: Iterable[int]) -> list[Future[str]]:
        """Hands the thread the images of one request that are neither encoded nor waiting for it. The caller
        has added them. Returns a future for each image, in the order of `keys`. Its result says why the image
        cannot be encoded, for the client; "": it is encoded, or no request wants it any more.

        Requests share the future of an image, unless the image has failed by then: it is then tried again.
        """
        new: dict[int, Future[str]] = {}
        for key in keys:
            known = self._encodings.get(key)
            if known is None or (known.done() and known.result()):
                self._encodings[key] = new[key] = Future()
                if key in self._cache:
                    new.pop(key).set_result("")
        if new:
            self._by_request.append(deque(new.items()))
        for _ in new:
            self._thread.submit(self._encode_next)
        return [self._encodings[key] for key in keys]

    def close(self) -> None:
        """Cancels what waits for the thread, which ends after the tile that it encodes. Does not wait for it.
        The futures of images that wait never end."""
        self._encodings.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode_next(self) -> None:
        """Encodes one image, of the request whose turn it is, and ends its future. Runs in the thread. The
        request's next image comes after those of the other requests."""
        images = self._by_request.popleft()
        key, encoding = images.popleft()
        encoding.set_result(self._encode(key))
        if images:
            self._by_request.append(images)

    def _encode(self, key: int) -> str:
        """Encodes an image into the cache, if a request still wants the image. Returns why the image cannot
        be encoded, after a line in the log; "" if it is encoded or not wanted."""
        image = self._images.get(key)
        if image is None or key in self._cache:
            return ""
        started_at = time.monotonic()
        try:
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(*image.shape, 3)
            embeddings = self._model.vision.encode(pixels, image.canvas, lambda: key not in self._encodings)
            if embeddings is None:
                return ""
            if len(embeddings) != image.tokens:
                raise ValueError(f"{image.tokens} image tokens have {len(embeddings)} embeddings")
            self._cache.add(key, embeddings, image.canvas)
        except Exception:
            logger.exception("an image of %s tiles cannot be encoded", image.shape[0])
            return "the image cannot be encoded"
        self._metrics.series("image_encode_duration").observe(time.monotonic() - started_at)
        return ""
