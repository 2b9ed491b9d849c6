"""The container of a GGUF file: its keys and its table of tensors, checked before anything uses the file.

The weights themselves are not read. A file may be cut, or made to harm: no number in it is believed before it
is compared with what is left of the file, so nothing larger than the file's own keys is ever allocated.

Source: ggml's description of the format, and what llama.cpp refuses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from models.child import shortened
from models.errors import ModelError, reported_as

VERSIONS = (2, 3)
# The first bytes of other files, and what they are.
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"ggjt")
OTHER_FILES = {
    b"vers": "is a Git LFS pointer, not the file: run `git lfs pull` in its repository, or download the file",
    b"<": "is a web page, not the file: download the file from the address with /resolve/ instead of /blob/",
    OLDER: "is of the format before GGUF; give a file that was made after August 2023",
    b"": "is no GGUF file",
}
MAX_METADATA = 256 << 20  # bytes of the keys and the table of tensors
MAX_KEY = (1 << 16) - 1  # bytes
MAX_NAME = 64  # bytes of the name of a tensor
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
# The least bytes that these take.
KEY_BYTES = 13
TENSOR_BYTES = 24
STRING_BYTES = 8
# The types of values.
STRING = 8
ARRAY = 9
NUMBERS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
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
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
TYPES = {int(number): GgmlType(name, int(count), int(size)) for number, name, count, size in _ROWS}


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

    def __getitem__(self, name: str) -> Any:
        """The value of a key of the architecture; None where the file has none."""
        return self.keys.get(f"{self.architecture}.{name}")

    def tokenizer(self, name: str) -> Any:
        return self.keys.get(f"tokenizer.ggml.{name}")

    def rejection(self, reason: str) -> ModelError:
        return ModelError(f"{self.path.name} {shortened(reason)}; serve the checkpoint that it was made of")


class _Head:
    """The beginning of a file, read once from front to back, and never beyond its end."""

    def __init__(self, name: str, file: BinaryIO):
        self.position = 0
        self.size = os.fstat(file.fileno()).st_size
        self._name = name
        self._file = file

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self._name} is damaged: {reason}; download it again")

    def check_version(self) -> None:
        magic = self._file.read(4)
        if not magic:
            raise ModelError(f"{self._name} is empty; download it again")
        if magic != b"GGUF":
            what = next(what for begin, what in OTHER_FILES.items() if magic.lstrip().startswith(begin))
            raise ModelError(f"{self._name} {what}")
        self.position = 4
        version = self.integer(4)
        if version & 0xFFFF == 0:
            raise ModelError(f"{self._name} is made for big-endian machines; give one for little-endian ones")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{self._name} is of version {version} of GGUF; {known} can be read")

    def require(self, count: int) -> None:
        """Raises ModelError unless so many bytes follow."""
        end = self.position + count
        if end > self.size:
            raise self.damaged(f"it ends within its header, after {self.size:,} bytes")
        if end > MAX_METADATA:
            raise ModelError(f"{self._name} has more than {MAX_METADATA:,} bytes of metadata")

    def take(self, count: int) -> bytes:
        self.require(count)
        self.position += count
        return self._file.read(count)

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        return self.take(self.integer(8)).decode(errors="surrogateescape")

    def name(self, longest: int, others: Container[str]) -> str:
        """The name of a key or of a tensor, which `others` do not have."""
        size = self.integer(8)
        if size > longest:
            raise self.damaged(f"a name in it has {size:,} bytes, and {longest:,} are possible")
        name = self.take(size).decode(errors="surrogateescape")
        if not name or not name.isprintable():
            raise self.damaged("a name in it is no text")
        if name in others:
            raise self.damaged(f"it holds {shortened(name)} twice")
        return name

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.integer(4), self.integer(8))
        return self.numbers(kind, 1)[0].item()

    def array(self, kind: int, count: int) -> list[str] | np.ndarray:
        if kind != STRING:
            return self.numbers(kind, count)
        self.require(count * STRING_BYTES)
        return [self.text() for _ in range(count)]

    def numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            raise self.damaged(f"a value in it is of the unknown type {kind}")
        dtype = NUMBERS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def alignment(self, keys: dict[str, Any]) -> int:
        alignment = keys.get("general.alignment", 32)
        if type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1:
            return alignment
        raise self.damaged(f"its alignment is no power of two up to {MAX_ALIGNMENT:,}")

    def tensor(self, name: str, offset: int) -> Tensor:
        """Of the table of tensors; `offset`, from the first of them, is where it has to be."""
        dimensions = self.integer(4)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"{name} has {dimensions} dimensions")
        shape = tuple(self.integer(8) for _ in range(dimensions))
        number = self.integer(4)
        if number not in TYPES:
            raise ModelError(
                f"{self._name} holds {name} in the type {number} of ggml, which is not known; "
                "give a file in another quantization"
            )
        kind = TYPES[number]
        count = math.prod(shape)
        if not 0 < count < 1 << 63 or shape[0] % kind.numbers:
            raise self.damaged(f"{name} is {kind.name} in the shape {list(shape)}")
        if self.integer(8) != offset:
            raise self.damaged(f"{name} does not follow the tensor before it")
        return Tensor(shape, number, offset, count // kind.numbers * kind.bytes)


def read_gguf(path: Path) -> GgufFile:
    """Raises ModelError for a file that is not whole, or that holds something else than a model."""
    file = read_part(path)
    kind = file.keys.get("general.type", "model")
    architecture = file.keys.get("general.architecture")
    if kind == "adapter":
        raise file.rejection("is a LoRA adapter; give its safetensors with --lora-adapters")
    if kind == "mmproj" or architecture == "clip":
        raise file.rejection("is the part of a model that reads images (mmproj), without the model")
    if kind == "imatrix" or "imatrix.datasets" in file.keys:
        raise file.rejection("is an importance matrix, not a model")
    if not isinstance(architecture, str):
        raise file.rejection("names no architecture")
    if not file.tensors:
        raise file.rejection("is a vocabulary alone, without weights")
    return file


def read_part(path: Path) -> GgufFile:
    """Of a file that is whole, whatever it holds. Raises ModelError."""
    with reported_as(f"{path.name} cannot be read"), path.open("rb") as opened:
        head = _Head(path.name, opened)
        head.check_version()
        tensor_count = head.integer(8)
        key_count = head.integer(8)
        head.require(tensor_count * TENSOR_BYTES + key_count * KEY_BYTES)
        keys: dict[str, Any] = {}
        for _ in range(key_count):
            name = head.name(MAX_KEY, keys)
            keys[name] = head.value(head.integer(4))
        keys_end = head.position
        alignment = head.alignment(keys)
        tensors: dict[str, Tensor] = {}
        end = 0  # of the last tensor, from the first one
        for _ in range(tensor_count):
            name = head.name(MAX_NAME, tensors)
            tensors[name] = head.tensor(name, padded(end, alignment))
            end = tensors[name].offset + tensors[name].size
    start = padded(head.position, alignment)
    if end and start + end > head.size:
        raise ModelError(
            f"{path.name} has {head.size:,} of {start + end:,} bytes: its download is not complete; "
            "download it again"
        )
    placed = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
    return GgufFile(path, keys, placed, keys_end)


def padded(size: int, alignment: int) -> int:
    return size + -size % alignment
