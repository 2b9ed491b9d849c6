"""The container of a GGUF file: its keys and its table of tensors, checked before anything uses the file.

The weights themselves are not read. A file may be cut, or made to harm: every read is compared with what is
left of the file first, so nothing is ever allocated beside the file's own keys.

Source: ggml's description of the format, and what llama.cpp rejects.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from models.child import shortened
from models.errors import ModelError, reported_as

WEB_PAGE = "it is a web page: download the file from the address with /resolve/ instead of /blob/"
OLDER = "it is older than GGUF; give a file that was made after August 2023"
# What other files are, by their first bytes.
OTHER_FILES = {
    b"": "it is empty; download it again",
    b"vers": "it is a Git LFS pointer, not the file: run `git lfs pull` in its repository",
    b"<!DO": WEB_PAGE,
    b"<!do": WEB_PAGE,
    b"<htm": WEB_PAGE,
    b"ggjt": OLDER,
    b"tjgg": OLDER,
    b"lmgg": OLDER,
}
MAX_METADATA = 256 << 20  # bytes of the keys and the table of tensors
MAX_STRING = 64 << 20  # bytes, as the two below
MAX_KEY = (1 << 16) - 1
MAX_NAME = 64  # of a tensor
ALIGNMENT = 32  # bytes, where the file says nothing
ALIGNMENTS = [1 << power for power in range(21)]
TEMPLATE_FILE = "chat_template.jinja"  # beside a GGUF file, counts instead of the templates in it
# The types of values, and those of numbers in numpy.
STRING = 8
ARRAY = 9
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
PROJECTOR = "is the part of a model that reads images (mmproj), without the model"
# What holds no model, by its `general.type` or `general.architecture`.
NO_MODELS = {
    "adapter": "is a LoRA adapter; give it in safetensors with --lora-adapters, and as --model-id its model",
    "clip": PROJECTOR,
    "mmproj": PROJECTOR,
    "imatrix": "is an importance matrix, not a model",
}


class GgmlType(NamedTuple):
    """How the numbers of a tensor are stored."""

    name: str
    numbers: int  # in a block
    bytes: int  # of a block


# ggml's number of a type, its name, the numbers of a block, and its bytes.
_TABLE = """
     0  F32        1    4
     1  F16        1    2
     2  Q4_0      32   18
     3  Q4_1      32   20
     6  Q5_0      32   22
     7  Q5_1      32   24
     8  Q8_0      32   34
     9  Q8_1      32   40
    10  Q2_K     256   84
    11  Q3_K     256  110
    12  Q4_K     256  144
    13  Q5_K     256  176
    14  Q6_K     256  210
    15  Q8_K     256  292
    16  IQ2_XXS  256   66
    17  IQ2_XS   256   74
    18  IQ3_XXS  256   98
    19  IQ1_S    256   50
    20  IQ4_NL    32   18
    21  IQ3_S    256  110
    22  IQ2_S    256   82
    23  IQ4_XS   256  136
    24  I8         1    1
    25  I16        1    2
    26  I32        1    4
    27  I64        1    8
    28  F64        1    8
    29  IQ1_M    256   56
    30  BF16       1    2
    34  TQ1_0    256   54
    35  TQ2_0    256   66
    39  MXFP4     32   17
    40  NVFP4     64   36
    41  Q1_0     128   18
"""
TYPES = {
    int(number): GgmlType(name, int(numbers), int(size))
    for number, name, numbers, size in map(str.split, _TABLE.strip().splitlines())
}


class Tensor(NamedTuple):
    shape: tuple[int, ...]  # in the file's order: the first dimension is the innermost one
    type: int  # ggml's number of the type
    offset: int  # in the file, from its beginning
    size: int  # bytes


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says besides its weights."""

    path: Path
    # Numbers, booleans, strings, lists of strings, and numpy arrays of numbers. Bytes of a string that are no
    # UTF-8 are surrogates.
    keys: dict[str, Any]
    tensors: dict[str, Tensor]
    keys_end: int  # where the table of tensors begins

    @property
    def architecture(self) -> str:
        return self.keys["general.architecture"]

    @property
    def vocab_size(self) -> int:
        """How many tokens have embeddings. Raises KeyError for a file without these."""
        return self.tensors["token_embd.weight"].shape[1]

    @property
    def identity(self) -> list[Any]:
        """What tells the file from another one in its place: its size, the time of its last change in whole
        seconds, as image layers keep it, the SHA-256 of its keys, and its tensors."""
        status = self.path.stat()
        keys = hashlib.sha256(np.memmap(self.path, mode="r", shape=self.keys_end))
        return [status.st_size, int(status.st_mtime), keys.hexdigest(), self.tensors]

    def __getitem__(self, name: str) -> Any:
        """The value of a key of the architecture; None where the file has none."""
        return self.keys.get(f"{self.architecture}.{name}")

    def tokenizer(self, name: str) -> Any:
        return self.keys.get(f"tokenizer.ggml.{name}")

    def numbers(self, name: str) -> list[float] | None:
        """Returns the numbers of a small tensor, read from the file; None where the file has no such tensor.
        Raises ModelError for a tensor that is not in F32."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if TYPES[tensor.type].name != "F32":
            raise self.rejection(f"has {name} in {TYPES[tensor.type].name}, not in F32")
        return np.fromfile(self.path, "<f4", tensor.size // 4, offset=tensor.offset).tolist()

    def rejection(self, reason: str) -> ModelError:
        """Returns, for the caller to raise, the error for a file that cannot be served. reason: continues a
        sentence that begins with the file's name."""
        return ModelError(f"{self.path.name} {shortened(reason)}; serve the checkpoint that it was made of")


class _Head:
    """The beginning of a file, read once from front to back: each method reads what comes next. Raises
    ValueError for what is wrong with it."""

    def __init__(self, file: BinaryIO):
        self.position = 0
        self.size = os.fstat(file.fileno()).st_size
        self._file = file

    def take(self, count: int) -> bytes:
        self.position += count
        if self.position > self.size:
            raise ValueError(f"it ends within its header, after {self.size:,} bytes; download it again")
        if self.position > MAX_METADATA:
            raise ValueError(f"it has more than {MAX_METADATA:,} bytes of metadata")
        return self._file.read(count)

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, longest: int = MAX_STRING) -> str:
        size = self.integer(8)
        if size > longest:
            raise ValueError(f"it holds a text of {size:,} bytes, where {longest:,} are the most")
        return self.take(size).decode(errors="surrogateescape")

    def name(self, longest: int, others: Container[str]) -> str:
        """Reads the name of a key or of a tensor. longest: in bytes. Raises ValueError for a name that is
        among `others`, too long, empty or not printable."""
        name = self.text(longest)
        if not name or not name.isprintable() or name in others:
            raise ValueError(f"it has an empty, unprintable or repeated name: {name!r}")
        return name

    def value(self) -> Any:
        kind = self.integer(4)
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.integer(4), self.integer(8))
        return self.array(kind, 1).item()

    def array(self, kind: int, count: int) -> Any:
        """Reads `count` values of the type `kind`: numbers as an array of numpy, texts as a list. Raises
        ValueError for any other type."""
        if kind == STRING:
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"it holds a value of the type {kind}, which is not known")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor(self, name: str, offset: int) -> Tensor:
        """Reads the entry of the tensor `name` in the table of tensors. offset: where the tensor has to
        begin, in bytes from the begin of the first tensor; the offset of the result is the same. Raises
        ValueError for another offset, and for a type or shape that cannot be."""
        dimensions = self.integer(4)
        if not 1 <= dimensions <= 4:
            raise ValueError(f"its tensor {name} has {dimensions} dimensions")
        shape = tuple(self.integer(8) for _ in range(dimensions))
        number = self.integer(4)
        if number not in TYPES:
            raise ValueError(f"its tensor {name} has the type {number} of ggml, which is not known")
        kind = TYPES[number]
        count = math.prod(shape)
        if not 0 < count < 1 << 63 or shape[0] % kind.numbers:
            raise ValueError(f"its tensor {name} in {kind.name} has the shape {list(shape)}")
        if self.integer(8) != offset:
            raise ValueError(f"its tensor {name} does not follow the one before it")
        return Tensor(shape, number, offset, count // kind.numbers * kind.bytes)


def read_gguf(path: Path) -> GgufFile:
    """Returns what a GGUF file of a whole model says. Does not read its weights. Raises ModelError for a file
    that is missing or not whole, or that holds something else than a model, such as an adapter or one of
    several parts."""
    file = read_part(path)
    for key in ("general.type", "general.architecture"):
        if reason := NO_MODELS.get(str(file.keys.get(key))):
            raise file.rejection(reason)
    if not isinstance(file.keys.get("general.architecture"), str):
        raise file.rejection("names no architecture")
    if not file.tensors:
        raise file.rejection("is a vocabulary alone, without weights")
    count = file.keys.get("split.tensors.count", len(file.tensors))
    if len(file.tensors) != count:
        raise file.rejection(f"is a part of a model, with {len(file.tensors)} of {count} tensors")
    return file


def read_part(path: Path) -> GgufFile:
    """Returns what a GGUF file says, whatever it holds, such as a part of a model. Raises ModelError for a
    file that is missing, not whole, or no GGUF file."""
    with reported_as(f"{path.name} cannot be read", shortened), path.open("rb") as opened:
        return _read(path, _Head(opened))


def _read(path: Path, head: _Head) -> GgufFile:
    """Returns what the file at `path`, whose beginning is `head`, says. Offsets of tensors become those in
    the file. Raises ValueError for what is wrong with it, such as fewer bytes than its tensors take."""
    magic = head.take(min(4, head.size))
    if magic != b"GGUF":
        raise ValueError(OTHER_FILES.get(magic, "it is no GGUF file"))
    version = head.integer(4)
    if version not in (2, 3):
        raise ValueError(f"it is of version {version} of GGUF, neither 2 nor 3, or for big-endian machines")
    tensor_count = head.integer(8)
    keys: dict[str, Any] = {}
    for _ in range(head.integer(8)):
        name = head.name(MAX_KEY, keys)
        keys[name] = head.value()
    keys_end = head.position
    alignment = keys.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        raise ValueError(f"its alignment is not a power of two up to {ALIGNMENTS[-1]:,}")
    tensors: dict[str, Tensor] = {}
    end = 0  # of the last tensor, from the first one
    for _ in range(tensor_count):
        name = head.name(MAX_NAME, tensors)
        tensors[name] = head.tensor(name, padded(end, alignment))
        end = tensors[name].offset + tensors[name].size
    start = padded(head.position, alignment)
    if end and start + end > head.size:
        size = f"it has {head.size:,} of {start + end:,} bytes"
        raise ValueError(f"{size}: its download is not complete; download it again")
    placed = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
    return GgufFile(path, keys, placed, keys_end)


def padded(size: int, alignment: int) -> int:
    return size + -size % alignment
