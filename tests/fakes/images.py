"""Images without a picture: a file becomes as many tokens as it has bytes, in brackets."""

import hashlib
import json

from fakes.model import image
from fakes.tokenizer import VOCABULARY

from text.images.preprocessor import PreprocessedImage
from text.limited import LimitExceeded, Rejected

IMAGE = "<image>"
IMAGE_ID = VOCABULARY  # the token after those of the plainest tokenizer


def key_of(data, options=None):
    return int.from_bytes(hashlib.blake2b(data + json.dumps(options or {}).encode(), digest_size=5).digest(), "big")


class FakePreprocessor:
    """`files` holds those that were preprocessed. A file that begins with "bad" is refused, one with "slow" exceeds a limit."""

    placeholder = IMAGE
    token_id = IMAGE_ID
    reserved_ids = frozenset([IMAGE_ID])
    options = ("max_pixels",)

    def __init__(self):
        self.one_tile = {"max_pixels": 1}
        self.files = []

    def __call__(self, data, options=None):
        self.files.append(data)
        if data.startswith(b"bad"):
            raise Rejected("is not an image that this server reads")
        if data.startswith(b"slow"):
            raise LimitExceeded("takes longer than 5 s of processor time")
        made = image(key_of(data, options), (options or {}).get("max_pixels", len(data)))
        return PreprocessedImage(f"[{IMAGE * made.tokens}]", made.tokens, made.shape, made.canvas, made.pixels, made.key)
