"""The child process that decodes the images of clients with Pillow and cuts them into tiles
(preprocessor.py has the other end)."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable

from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from manifest import Manifest
from run import ConfigError, Json
from text.images.layouts import read_layout
from text.limited import Rejected

# A format is found by content, whatever the client calls it; Pillow has decoders for many more.
FILE_FORMATS = [
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    GifImagePlugin.GifImageFile.format,
]
MAX_PIXELS = 50_000_000
MAX_TOKENS = 2**16 - 1  # MAX_IMAGE_TOKENS of protocol.py (tested)
MAX_RATIO = 200  # of the longer side to the shorter
# Pillow refuses images of more than twice as many pixels, as soon as it has read the size.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2
# Bytes of a PNG's text, and of its color profile, uncompressed: programs keep their projects there.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = MAX_TEXT = 64_000_000


def preprocessor(model_dir: str, overrides: Json) -> Callable[[list], bytes]:
    """Returns the function of the child: [a file in base64, further overrides] -> bytes. Raises ConfigError
    for a folder that is no model.

    The bytes are a line of JSON and the pixels. The line is [text, tokens, shape, canvas, [width, height]]:
    `PreprocessedImage` explains the first four, and the last is the size of the upright image in pixels. The
    pixels are uint8 RGB [tiles, height, width, 3].

    The function raises Rejected for a file that `decode` rejects, for overrides that are not valid or make
    the image too large, and for an image of more than MAX_TOKENS tokens.
    """
    manifest = Manifest.read(model_dir)

    def preprocess(request: list) -> bytes:
        data, further = request
        image = decode(base64.b64decode(data))
        try:
            layout = read_layout(manifest, overrides, further)
            made = layout(image)
        except ConfigError as error:
            raise Rejected(f"cannot be preprocessed: {error}") from None
        except (ArithmeticError, ValueError):  # of numbers that Pillow cannot take
            raise Rejected("cannot be preprocessed: the options make it too large") from None
        tokens = made.text.count(layout.token)
        if tokens > MAX_TOKENS:
            raise Rejected(f"makes {tokens} tokens; at most {MAX_TOKENS} are supported")
        width, height = made.tiles[0].size
        about = [made.text, tokens, (len(made.tiles), height, width), made.canvas, image.size]
        return b"".join([json.dumps(about).encode(), b"\n", *(tile.tobytes() for tile in made.tiles)])

    return preprocess


def decode(data: bytes) -> Image.Image:
    """Returns an image as people see it: its first frame, upright, in RGB, in its own size. data: a PNG,
    JPEG, WebP or GIF file.

    Raises Rejected for any other or a damaged file, for more than MAX_PIXELS pixels, for a side of more than
    MAX_RATIO times the other, and for more than MAX_TEXT bytes of text or color profile. The message
    continues a sentence that begins with the image's name. Raises MemoryError if memory runs out.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FILE_FORMATS)  # reads the header
        if max(image.size) > MAX_RATIO * min(image.size):
            width, height = image.size
            raise Rejected(
                f"has {width} x {height} pixels; a side may be at most {MAX_RATIO} times the other"
            )
        image.load()
        _turn_upright(image)
        return _in_rgb(image)
    except (Rejected, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise Rejected(f"has more than {MAX_PIXELS:,} pixels") from None
    except Image.UnidentifiedImageError:
        raise Rejected("is not a PNG, JPEG, WebP or GIF image") from None
    except Exception as error:  # a damaged file makes decoders fail in every way
        if "MAX_TEXT" in str(error):
            raise Rejected(f"has more than {MAX_TEXT:,} bytes of text or color profile") from None
        raise Rejected("cannot be decoded: the file is damaged or truncated") from None


def _turn_upright(image: Image.Image) -> None:
    """Turns the image in place as its EXIF data say. Damaged EXIF data are ignored."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF data, which other programs ignore
        pass


def _in_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in RGB: transparent parts on white, 16 bits as 8 bits. May change `image.info`."""
    transparent = image.info.get("transparency")
    if image.mode.startswith("I"):
        # 16 bits of grey, of which `convert` alone would make white.
        image = image.convert("I").point(lambda grey: grey * (1 / 256)).convert("L")
        if transparent is not None:
            image.info["transparency"] = transparent >> 8
    elif isinstance(transparent, tuple) and max(transparent) > 255:
        # Pillow reads 16 bits of a color as 8, but not those of the transparent color.
        image.info["transparency"] = tuple(part >> 8 for part in transparent)
    if image.has_transparency_data:
        # On white, as viewers show it. `convert` alone would show the colors behind the transparency.
        image = image.convert("RGBA")
        background = Image.new("RGB", image.size, "white")
        background.paste(image, mask=image)
        return background
    return image if image.mode == "RGB" else image.convert("RGB")
