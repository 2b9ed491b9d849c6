"""The images of clients become pixels for the model's vision tower, and text that stands for them in prompts.

Clients can make decoding expensive, and decoders have had security holes: a child process with limits on time
and memory does it (limited.py, images/decoding.py). This process does not import Pillow.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import secrets
from pathlib import Path
from typing import NamedTuple

from manifest import Manifest, whole
from run import Json
from text.images.layouts import read_layout
from text.limited import SandboxedFunction

logger = logging.getLogger("web")

LARGEST_SHARE = 0.75  # of the longest prompt, for an image that can be scaled down
MOST_TOKENS = 4096  # of such an image, unless the settings say otherwise: attention grows with its square
CPU_S = 5.0  # for one image; 12 megapixels take half a second
MEMORY_BYTES = 768 * 2**20  # the largest image takes three copies of 200 MB
KEY_BITS = 46
# All API server processes give a file the same key, so this is made before they are forked. With it, no
# client can search for a file that has the key of another one.
SECRET = secrets.token_bytes(16)


class PreprocessedImage(NamedTuple):
    text: str  # what stands in a prompt in the place of the placeholder
    tokens: int  # how many image tokens are in it
    shape: tuple[int, int, int]  # tiles; height and width of each in pixels
    canvas: tuple[int, ...]  # of Tiles in images/layouts.py
    pixels: bytes  # uint8 RGB [tiles, height, width, 3]
    key: int  # KEY_BITS of a hash of the file and of how it is preprocessed


class ImagePreprocessor:
    """Turns images into what the served model reads; only for a model whose manifest says `reads_images`.
    Threads may share it: each call has a child process for itself."""

    def __init__(self, model_dir: str | Path, overrides: Json, max_tokens: int):
        """Reads the image layout of a model folder, and starts a child process, for which this does not wait.

        overrides: values of --mm-processor-kwargs, which count before the fields of the folder's files.
        max_tokens: of the longest prompt. Raises ConfigError for fields and overrides that do not fit the
        model's layout, and OSError if no process can be started.

        Where the layout can, an image is scaled down to a share of `max_tokens`, and to MOST_TOKENS unless
        the overrides have `size` or `max_pixels`. Logs that at debug level.
        """
        manifest = Manifest.read(model_dir)
        layout = read_layout(manifest, overrides)
        most = int(max_tokens * LARGEST_SHARE)
        if not overrides.keys() & {"size", "max_pixels"}:
            most = min(most, MOST_TOKENS)
        if bounds := layout.bounds(most):
            logger.debug("Images of more than %d tokens are scaled down: %s", most, bounds)
            overrides = overrides | bounds
        self.placeholder = layout.placeholder or layout.token  # what the chat template writes for an image
        self.token_id = manifest.image_token_id
        # Clients must not write these.
        self.reserved_ids = {self.token_id, whole(manifest.config_json.get("boi_token_index", self.token_id))}
        self.options = layout.options  # that a request may set
        self.one_tile = layout.one_tile  # options with which it becomes one small tile; {}: there are none
        self._overrides = overrides
        setup = [str(model_dir), overrides]
        self._preprocess = SandboxedFunction(
            "text.images.decoding:preprocessor", setup, cpu_s=CPU_S, memory_bytes=MEMORY_BYTES
        )
        self._preprocess.start()

    def __call__(self, data: bytes, options: Json | None = None) -> PreprocessedImage:
        """Decodes and preprocesses an image file in a child process, and waits for it. Logs an image that
        `max_pixels` scales down, at debug level.

        data: the bytes of the file. options: values, of the names in `self.options`, that count before the
        overrides; None: none.

        Raises Rejected for a file or options that cannot be used, and LimitExceeded for an image that exceeds
        CPU_S, MEMORY_BYTES or the time of a `SandboxedFunction`, or ends the child. Their texts continue a
        sentence that begins with the name of the image. Raises OSError if no child can be started.
        """
        options = options or {}
        answer = self._preprocess([base64.b64encode(data).decode(), options])
        about, _newline, pixels = answer.partition(b"\n")
        text, tokens, shape, canvas, size = json.loads(about)
        if "max_pixels" in self.options and shape[1] < size[1] and shape[2] < size[0]:
            logger.debug(
                "An image of %d x %d pixels is scaled down to %d x %d: %d tokens",
                *size,
                *shape[:0:-1],
                tokens,
            )
        key = hashlib.blake2b(data, key=SECRET, digest_size=8)
        key.update(json.dumps([self._overrides, options]).encode())
        return PreprocessedImage(
            text=text,
            tokens=tokens,
            shape=tuple(shape),
            canvas=tuple(canvas),
            pixels=pixels,
            key=int.from_bytes(key.digest(), "big") >> (64 - KEY_BITS),
        )
