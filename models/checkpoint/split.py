"""A model in several GGUF files, as large ones are published, becomes one file.

The first file holds the keys, each a part of the tensors.

    python -m models.checkpoint.split FILE TARGET     writes the whole file into the folder TARGET

Source: the names and keys that llama.cpp's gguf-split writes.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np

from models.errors import run_program
from models.gguf.container import ALIGNMENT, TEMPLATE_FILE, padded, read_gguf, read_part

SPLIT = re.compile(r"(.+)-\d{5}-of-(?!00000)(\d{5})\.gguf")


def parts_of(file: Path) -> list[Path]:
    """Returns the paths of all files of the model that `file` is a part of, in their order, whether they
    exist or not. For `m-00002-of-00002.gguf` these are `m-00001-of-00002.gguf` and `m-00002-of-00002.gguf`.

    Only the name of `file` counts, also if it is the name of a link. A file with another name (SPLIT) is a
    whole model: the result has this file alone.
    """
    split = SPLIT.fullmatch(file.name)
    if not split:
        return [file]
    name, count = split.groups()
    return [file.with_name(f"{name}-{part:05}-of-{count}.gguf") for part in range(1, int(count) + 1)]


def join(file: Path, target: Path) -> None:
    """Writes the model that `file`, any of its parts, belongs to as one file into the folder `target`: for
    `m-00001-of-00002.gguf` the file m.gguf. Copies the chat template that is beside `file`, if there is one.

    Raises ModelError for a part that is missing or not whole, and for a tensor that is missing or there
    twice; OSError if the disk is too small, before any weights are copied. What was written stays after an
    error.
    """
    if (template := file.with_name(TEMPLATE_FILE)).exists():
        shutil.copyfile(template, target / TEMPLATE_FILE)
    parts = [read_part(part) for part in parts_of(file)]
    tensors = [(part, name, tensor) for part in parts for name, tensor in part.tensors.items()]
    first = parts[0]
    alignment = first.keys.get("general.alignment", ALIGNMENT)
    keys = np.fromfile(first.path, "u1", first.keys_end).tobytes()
    with open(target / SPLIT.sub(r"\1.gguf", file.name), "wb") as joined:
        joined.write(keys[:8] + struct.pack("<Q", len(tensors)) + keys[16:])
        end = 0
        for _part, name, (shape, kind, _offset, size) in tensors:
            encoded = name.encode()
            entry = f"<Q{len(encoded)}sI{len(shape)}QIQ"
            joined.write(struct.pack(entry, len(encoded), encoded, len(shape), *shape, kind, end))
            end = padded(end + size, alignment)
        os.posix_fallocate(joined.fileno(), 0, padded(joined.tell(), alignment) + end)
        joined.flush()
        whole = read_gguf(Path(joined.name))
        for part, name, tensor in tensors:
            joined.seek(whole.tensors[name].offset)
            np.memmap(part.path, mode="r", offset=tensor.offset, shape=tensor.size).tofile(joined)


if __name__ == "__main__":
    run_program(join, Path, Path)
