"""Files of images, also of hostile ones, and the files by which a model folder says how it reads images."""

import functools
import io
import json
import struct
import zlib

import numpy as np
from PIL import Image
from vision_models import FAMILIES

from manifest import Manifest


def save_preprocessor(name, folder, nested=False, image_token_id=7, **changes):
    """The files of a family that say how images are read, in the form of transformers 5 if they are `nested`."""
    family = FAMILIES[name]()
    preprocessor, processor = family.preprocessor | changes, family.processor
    config = family.config | {"text_config": {"model_type": "llama"}, "image_token_id": image_token_id}
    if name == "gemma3":
        config["boi_token_index"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    if nested:
        processor = processor | {"image_processor": preprocessor}
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return Manifest.read(folder)


@functools.cache
def noise(width, height, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 255, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), 2)


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width, height, *, alpha=False, before=(), behind=()):
    """A PNG of zeros in RGB, with further chunks before and behind its pixels; without pixels if these are too many."""
    row = bytes(1 + (4 if alpha else 3) * width)
    compressor = zlib.compressobj(1)
    rows = height if width * height <= 50_000_000 else 0
    pixels = b"".join(compressor.compress(row) for _ in range(rows)) + compressor.flush()
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6 if alpha else 2, 0, 0, 0))
    chunks = [header, *before, (b"IDAT", pixels), *behind, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def turned(tag=0x0112, value=6):
    exif = Image.Exif()
    exif[tag] = value  # 6: to be turned by 90 degrees
    return exif.tobytes()
