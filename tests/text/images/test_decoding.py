"""Files of clients become images as people see them, or are refused in a sentence."""

from __future__ import annotations

import random
import time
import zlib

import pytest
from hypothesis import settings
from image_files import png, saved, turned
from PIL import Image

from text.images.decoding import decode
from text.limited import Rejected

TIMES = 15 * settings.default.max_examples  # each takes a tenth of a millisecond
RED, WHITE, BLUE, BLACK = (200, 30, 30), (255, 255, 255), (0, 0, 255), (0, 0, 0)
PROJECT = b'{"node": "KSampler"}' * 200_000  # 4 MB, as programs keep them in the images that they make


red = Image.new("RGB", (40, 20), RED)
two_frames = {"save_all": True, "append_images": [Image.new("RGB", (40, 20), BLUE)]}
palette = Image.new("P", (40, 20), 1)
palette.putpalette([0, 0, 0, *RED])
sideways = Image.new("RGB", (40, 20), RED)
sideways.paste(BLUE, (0, 0, 20, 20))  # on the left, and above when it is turned
SHOWN = {  # the file, and the color in the middle of the image
    "PNG": (saved(red, "PNG"), RED),
    "JPEG": (saved(red, "JPEG", quality=95), RED),
    "progressive JPEG": (saved(red, "JPEG", quality=95, progressive=True), RED),
    "WebP": (saved(red, "WEBP", lossless=True), RED),
    "GIF of two frames": (saved(red, "GIF", **two_frames), RED),
    "WebP of two frames": (saved(red, "WEBP", lossless=True, **two_frames), RED),
    "PNG of two frames": (saved(red, "PNG", **two_frames), RED),
    "JPEG of two images": (saved(red, "MPO", quality=95, **two_frames), RED),
    "transparent PNG": (saved(Image.new("RGBA", (40, 20), (*RED, 0)), "PNG"), WHITE),
    "half transparent PNG": (saved(Image.new("RGBA", (40, 20), (*RED, 51)), "PNG"), (244, 210, 210)),
    "transparent WebP": (saved(Image.new("RGBA", (40, 20), (*RED, 0)), "WEBP", lossless=True, exact=True), WHITE),
    "transparent GIF": (saved(palette, "GIF", transparency=1), WHITE),
    "palette": (saved(palette, "PNG"), RED),
    "transparent color of a palette": (saved(palette, "PNG", transparency=1), WHITE),
    "transparent color": (saved(red, "PNG", transparency=RED), WHITE),
    "grey": (saved(Image.new("L", (40, 20), 128), "PNG"), (128, 128, 128)),
    "grey with alpha": (saved(Image.new("LA", (40, 20), (0, 0)), "PNG"), WHITE),
    "black and white": (saved(Image.new("1", (40, 20), 1), "PNG"), WHITE),
    "16 bits of grey": (saved(Image.new("I;16", (40, 20), 0x8000), "PNG"), (128, 128, 128)),
    "16 bits of white": (saved(Image.new("I;16", (40, 20), 0xFFFF), "PNG"), WHITE),
    "16 bits beside a transparent grey": (
        saved(Image.new("I;16", (40, 20), 0x8000), "PNG", transparency=0x3200),
        (128, 128, 128),
    ),
    "16 bits of a transparent grey": (saved(Image.new("I;16", (40, 20), 0x3200), "PNG", transparency=0x3200), WHITE),
    "beside a transparent color of 16 bits": (png(40, 20, before=[(b"tRNS", b"\x32\0\0\0\0\0")]), BLACK),
    "CMYK": (saved(Image.new("RGB", (40, 20), WHITE).convert("CMYK"), "JPEG"), WHITE),
    "grey JPEG": (saved(Image.new("L", (40, 20), 77), "JPEG"), (77, 77, 77)),
    "a GIF with a JPEG behind it": (saved(red, "GIF") + saved(Image.new("RGB", (9, 9)), "JPEG"), RED),
    "a PNG with a ZIP file behind it": (saved(red, "PNG") + b"PK\3\4" + bytes(99), RED),
    "a JPEG with a page behind it": (saved(red, "JPEG", quality=95) + b"<script>alert(1)</script>", RED),
    "megabytes of EXIF": (png(40, 20, before=[(b"eXIf", turned(value=1) + PROJECT)]), BLACK),
    **{
        f"megabytes of {kind} {place} the pixels": (png(40, 20, **{place: [(kind.encode(), body)]}), BLACK)
        for place in ("before", "behind")
        for kind, body in (
            ("tEXt", b"workflow\0" + PROJECT),
            ("zTXt", b"workflow\0\0" + zlib.compress(PROJECT)),
            ("iTXt", b"workflow\0\1\0\0\0" + zlib.compress(PROJECT)),
            ("iCCP", b"press\0\0" + zlib.compress(PROJECT)),
        )
    },
    "damaged EXIF": (saved(red, "PNG", exif=b"Exif\0\0MM\0\0" + turned()[10:]), RED),
}


@pytest.mark.parametrize(("data", "color"), SHOWN.values(), ids=SHOWN)
def test_an_image_is_decoded_as_people_see_it(data, color):
    image = decode(data)
    assert (image.mode, image.size) == ("RGB", (40, 20))
    assert all(abs(a - b) <= 2 for a, b in zip(image.getpixel((20, 10)), color)), image.getpixel((20, 10))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_upright(kind):
    image = decode(saved(sideways, kind, exif=turned()))
    assert image.size == (20, 40)
    assert image.getpixel((10, 3))[2] > 200 > image.getpixel((10, 37))[2]


TEXT_BOMB = zlib.compress(bytes(100_000_000), 9)
SMALL_BOMB = zlib.compress(bytes(9_000_000), 9)
NOISE = Image.effect_noise((400, 400), 90).convert("RGB")
NOT_AN_IMAGE = "is not a PNG, JPEG, WebP or GIF image"
DAMAGED = "cannot be decoded: the file is damaged or truncated"
TOO_MUCH_TEXT = "has more than 64,000,000 bytes of text or color profile"
REFUSED = {
    **{
        kind: (saved(red, kind), NOT_AN_IMAGE)
        for kind in ("BMP", "TIFF", "ICO", "PDF", "EPS", "PPM", "TGA", "AVIF", "JPEG2000")
    },
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", NOT_AN_IMAGE),
    "nothing": (b"", NOT_AN_IMAGE),
    "text": (b"hello", NOT_AN_IMAGE),
    "a PDF in front of a JPEG": (b"%PDF-1.4\n" + saved(red, "JPEG"), NOT_AN_IMAGE),
    "half a JPEG": (saved(NOISE, "JPEG")[:9000], DAMAGED),
    "half a PNG": (saved(NOISE, "PNG")[:9000], DAMAGED),
    "half a WebP": (saved(NOISE, "WEBP")[:9000], DAMAGED),
    "half a GIF": (saved(NOISE, "GIF")[:9000], DAMAGED),
    "too many pixels": (png(100_000, 100_000), "has more than 50,000,000 pixels"),
    "a little too many pixels": (png(8000, 6251), "has more than 50,000,000 pixels"),
    "too thin": (png(2010, 10), "has 2010 x 10 pixels; a side may be at most 200 times the other"),
    "a compressed comment": (png(4, 4, before=[(b"zTXt", b"Comment\0\0" + TEXT_BOMB)]), TOO_MUCH_TEXT),
    "a compressed comment behind the pixels": (png(4, 4, behind=[(b"zTXt", b"Comment\0\0" + TEXT_BOMB)]), TOO_MUCH_TEXT),
    "a compressed color profile": (png(4, 4, before=[(b"iCCP", b"a\0\0" + TEXT_BOMB)]), TOO_MUCH_TEXT),
    "many compressed comments": (png(4, 4, before=[(b"zTXt", b"Comment\0\0" + SMALL_BOMB)] * 9), TOO_MUCH_TEXT),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused_in_a_sentence_at_once(data, reason):
    started_at = time.process_time()
    with pytest.raises(Rejected) as refused:
        decode(data)
    assert str(refused.value) == reason
    assert time.process_time() - started_at < 0.6


def test_whatever_is_wrong_with_a_file_it_is_refused_and_no_decoder_fails():
    draw = random.Random(0)
    small = NOISE.crop((0, 0, 60, 40))
    files = [saved(small, kind, exif=turned()) for kind in ("PNG", "JPEG", "WEBP")] + [saved(small, "GIF")]
    refused = 0
    for _ in range(TIMES):
        data = bytearray(draw.choice(files))
        for _ in range(draw.randrange(1, 20)):
            data[draw.randrange(min(len(data), draw.choice((40, 400, 10_000))))] = draw.randrange(256)
        try:
            assert decode(bytes(data)).mode == "RGB"
        except Rejected:
            refused += 1
    assert TIMES / 6 < refused < TIMES
