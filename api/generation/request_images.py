"""The images of one HTTP request: their places in the prompt, their files, and what the model reads of them.

An API's reader adds each image and puts its mark into a message's text (text/template.py). The chat template
writes a placeholder for each mark. When the whole request is read and checked, server.py loads the images,
and `expand` replaces the placeholders by the images' tokens.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore

from api.generation.image_urls import MAX_IMAGE_BYTES, ImageUrlError, fetch_image, read_data_url
from api.http.engine_client import attempt, settled
from api.http.errors import invalid
from api.http.fields import Json, require
from protocol import Image
from text.images.preprocessor import ImagePreprocessor, PreprocessedImage
from text.limited import LimitExceeded, Rejected
from text.template import image_mark

MAX_IMAGES = 20  # of one request
MAX_PIXEL_BYTES = 256_000_000  # of one request: about 20 images of 17 tiles of 512 x 512
MAX_PREPROCESSING_S = 20.0  # of preprocessing, for one request
MAX_FETCHED = 2 * MAX_IMAGE_BYTES  # of one request, whose body says nothing about their size
# The requests of an API server process that may hold pixels, or fetched files, at a time.
WITH_PIXELS = BoundedSemaphore(2)
WITH_FETCHED = BoundedSemaphore(8)
CHECK_S = 0.1  # how often a client whose request waits for its turn is checked
DETAILS = ("low", "high", "auto", "original")
Later = Callable[[], Any]  # makes a response once the images are loaded


@dataclass
class RequestImage:
    """An image of a request. path: of the field that has the image; source: the file, or an http(s) URL until
    the image is fetched; options: fields of the preprocessor to override; read: None until the image is
    preprocessed."""

    path: str
    source: bytes | str
    options: Json
    read: PreprocessedImage | None = None


class RequestImages:
    """The images of a request, numbered from 0 in the order in which they are added. As a context manager,
    frees the images, and their place among the requests that may hold pixels, at the end of the block.

    preprocess: the preprocessor of the served model; None: the model reads text only. run: calls a function
    in a thread, waits, and returns its result. domains: the hosts that images may be fetched from.
    """

    def __init__(
        self,
        preprocess: ImagePreprocessor | None = None,
        run: Callable[[Callable[[], Any]], Any] | None = None,
        domains: Sequence[str] = (),
    ):
        self.preprocess = preprocess
        self._run = run
        self._domains = domains
        self._images: list[RequestImage] = []
        self._held = contextlib.ExitStack()  # what is released at the end of the block

    @property
    def are_read(self) -> bool:
        """Whether the model reads images."""
        return self.preprocess is not None

    @property
    def are_given(self) -> bool:
        """Whether the request has any."""
        return bool(self._images)

    def __enter__(self) -> RequestImages:
        return self

    def __exit__(self, *_error) -> None:
        self._images.clear()
        self._held.close()

    def set_options(self, options: Json, name: str, image_numbers: Sequence[int]) -> None:
        """Overrides fields of the model's preprocessor for the images with these numbers, except the fields
        that `detail` has set. Nothing happens if the model reads text only.

        name: the field of the request that has `options`. Raises ApiError for a field that the preprocessor
        does not support, also if there are no images.
        """
        if not self.are_read:
            return
        supported = self.preprocess.options
        detail = f"has a field that this model does not support; supported: {', '.join(supported) or 'none'}"
        for option in options:
            require(option in supported, name, detail, given=option[:40])
        for number in image_numbers:
            image = self._images[number]
            image.options = options | image.options

    def add(self, path: str, url: str, detail: Any = None) -> str:
        """Adds the image of a `data:`, http or https URL, and decodes nothing yet. Returns its mark, for the
        text of a message. The model must read images. Raises ApiError for a URL that neither begins with http
        nor is a `data:` URL of a file in base64, and for one image more than MAX_IMAGES.

        path: of the field that has the URL. detail: the request's; with `low` the image is read as one small
        tile, if the model's family has options for that. `load` checks and fetches http and https URLs.
        """
        number = len(self._images)
        require(number < MAX_IMAGES, path, f"is one image too many: a request may have {MAX_IMAGES}")
        url = url.strip()
        try:
            source = url if url[:4].lower() == "http" else read_data_url(url)
        except ImageUrlError as error:
            raise invalid(path, str(error)) from None
        options = self.preprocess.one_tile if detail == "low" else {}
        self._images.append(RequestImage(path, source, options))
        return image_mark(number)

    def expand(self, text: str, image_numbers: Sequence[int]) -> str:
        """Returns a prompt, or its beginning, with the text of an image's tokens instead of each placeholder.
        The images must be loaded.

        image_numbers: the numbers of all images of the prompt, in the order of the prompt; without any, the
        text stays as it is.
        """
        if not image_numbers:
            return text
        first, *others = text.split(self.preprocess.placeholder)
        placed = zip(image_numbers, others)
        return first + "".join(self._images[number].read.text + other for number, other in placed)

    def read(self, image_numbers: Sequence[int]) -> list[Image]:
        """Returns the images with these numbers, as the worker gets them. The images must be loaded."""
        images = (self._images[number].read for number in image_numbers)
        return [Image(image.key, image.tokens, image.shape, image.pixels, image.canvas) for image in images]

    def load(self, check_client: Callable[[], None]) -> None:
        """Fetches all images by URL at the same time, then preprocesses all images one by one, in a thread.
        Does nothing without images; to be called once.

        The request's greenlet waits for both, and before that for its turn: WITH_FETCHED and WITH_PIXELS
        limit how many requests hold files or pixels at a time. The place for pixels is held until the `with`
        block of this object ends. Raises ApiError for an image that cannot be fetched or decoded, for more
        bytes of files or pixels, or more seconds, than a request may have, and what `run` raises.
        check_client: called every CHECK_S until the images are fetched and have their place for pixels, then
        before each image is preprocessed; raises when the client has disconnected, which gives both up.
        """
        if not self._images:
            return
        _wait_for(self._fetch, check_client)
        spent_s = 0.0
        pixels = 0
        for image in self._images:
            check_client()
            detail = f"is too much: the images of a request may take {MAX_PREPROCESSING_S:g} s to preprocess"
            require(spent_s < MAX_PREPROCESSING_S, image.path, detail)
            spent_s += self._run(functools.partial(self._preprocess, image))
            pixels += len(image.read.pixels)
            detail = f"is too much: the images of a request may have {MAX_PIXEL_BYTES} bytes of pixels"
            require(pixels <= MAX_PIXEL_BYTES, image.path, f"{detail}. Given: {pixels}")

    def _fetch(self) -> None:
        """Fetches the images by URL, all at the same time, and each URL once. Waits for all, then for a place
        among the requests that may hold pixels. Replaces the URL in the `source` of each image by its file.
        Raises ApiError for the first image that cannot be fetched, and for more than MAX_FETCHED bytes
        together; those that are still fetched are then given up."""
        images_of = defaultdict(list)
        for image in self._images:
            if isinstance(image.source, str):
                images_of[image.source].append(image)
        with WITH_FETCHED if images_of else contextlib.nullcontext():
            jobs = {
                gevent.spawn(attempt, functools.partial(fetch_image, url, self._domains)): images
                for url, images in images_of.items()
            }
            fetched = 0
            try:
                for job in gevent.iwait(jobs):
                    path, url = jobs[job][0].path, jobs[job][0].source
                    file = job.value
                    if isinstance(file, ImageUrlError):
                        raise invalid(path, str(file), given=url[:200])
                    fetched += len(settled(file))
                    detail = f"is too much: the images that a request fetches may have {MAX_FETCHED} bytes"
                    require(fetched <= MAX_FETCHED, path, f"{detail}. Given: {fetched}")
                    for image in jobs[job]:
                        image.source = file
            finally:
                gevent.killall(jobs)
            self._held.enter_context(WITH_PIXELS)

    def _preprocess(self, image: RequestImage) -> float:
        """Sets `read` of an image, and drops its file. Returns how many seconds that took. Raises ApiError
        for a file that is not an image, or that exceeds a limit, and OSError if no process can be started.
        Runs in a thread."""
        begin = time.monotonic()
        try:
            image.read = self.preprocess(image.source, image.options)
        except (Rejected, LimitExceeded) as error:
            raise invalid(image.path, str(error)) from None
        image.source = b""
        return time.monotonic() - begin


NO_IMAGES = RequestImages()  # of a text by itself


def _wait_for(function: Callable[[], None], check_client: Callable[[], None]) -> None:
    """Calls `function` in a greenlet, and waits for it. Calls `check_client` every CHECK_S meanwhile. If that
    raises, ends the greenlet."""
    job = gevent.spawn(attempt, function)
    try:
        while not gevent.wait([job], CHECK_S):
            check_client()
        settled(job.value)
    finally:
        job.kill()
        del job  # which has the exception, whose traceback has this frame
