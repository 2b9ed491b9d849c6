"""A model in several GGUF files becomes the file that it was split from."""

import errno
import os

import numpy as np
import pytest
from gguf_bytes import IN_Q8_0, LLAMA, STRING, U32, gguf, key, split, tensor

from models.checkpoint.split import join, parts_of
from models.errors import ModelError
from models.gguf.container import read_gguf

NAME = "tiny-Q8_0"
SHAPES = {"a": ((3,), 0, 12), "b": ((32, 5), IN_Q8_0, 170), "c": ((8, 4), 0, 128), "d": ((1,), 0, 4)}


@pytest.fixture
def whole(tmp_path):
    """A file of four tensors of random bytes."""
    table, data = [], b""
    for name, (shape, kind, size) in SHAPES.items():
        table.append(tensor(name, shape, kind, len(data)))
        data += np.random.default_rng(size).bytes(size) + bytes(-size % 32)
    keys = [LLAMA, key("llama.block_count", U32, 1), key("tokenizer.ggml.tokens", STRING, ["a", b"\xff"])]
    path = tmp_path / "whole.gguf"
    path.write_bytes(gguf(*keys, tensors=table, data=data))
    return path


@pytest.fixture
def parts(whole, tmp_path):
    return lambda *counts: split(whole, tmp_path, NAME, counts)


def joined(part, folder):
    target = folder / "joined"
    target.mkdir()
    join(part, target)
    return target / f"{NAME}.gguf"


def contents(path):
    data = path.read_bytes()
    read = read_gguf(path)
    tensors = {name: (each.shape, each.type, data[each.offset :][: each.size]) for name, each in read.tensors.items()}
    keys = {name: value for name, value in read.keys.items() if not name.startswith("split.")}
    return keys, tensors


@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 2), (0, 4), (4,)])
@pytest.mark.parametrize("named", [0, -1], ids=["first", "last"])
def test_the_whole_file_holds_what_the_parts_hold(parts, whole, tmp_path, counts, named):
    assert contents(joined(parts(*counts)[named], tmp_path)) == contents(whole)


def test_the_names_of_the_parts_are_those_of_the_links_that_were_given(parts, whole, tmp_path):
    """As in the hub's cache, where the files that links lead to are named by their hashes."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for number, part in enumerate(parts(2, 2)):
        part.rename(tmp_path / f"blob{number}")
        (folder / part.name).symlink_to(tmp_path / f"blob{number}")
    assert contents(joined(folder / part.name, tmp_path)) == contents(whole)


@pytest.mark.parametrize(
    "name", ["a.gguf", "a-1-of-2.gguf", "a-00001-of-00000.gguf", "a-00001-of-00002.safetensors", "sha256-00001-of-00002"]
)
def test_a_file_of_another_name_is_a_model_of_its_own(tmp_path, name):
    assert parts_of(tmp_path / name) == [tmp_path / name]


def test_a_part_that_is_missing_is_named(parts, tmp_path):
    first, second, _third = parts(1, 1, 2)
    second.unlink()
    with pytest.raises(ModelError, match=r"^tiny-Q8_0-00002-of-00003\.gguf cannot be read: \[Errno 2\] No such file"):
        join(first, tmp_path)


def test_a_part_of_another_model_is_refused(parts, tmp_path):
    first, second = parts(1, 3)
    second.write_bytes(gguf(tensors=[tensor("a", (32, 2))]))
    with pytest.raises(ModelError, match=r"has an empty, unprintable or repeated name: 'a'"):
        join(first, tmp_path)
    second.write_bytes(gguf(tensors=[tensor("e", (32, 2))]))
    with pytest.raises(ModelError, match=r"^tiny-Q8_0\.gguf is a part of a model, with 2 of 4 tensors; serve"):
        join(first, tmp_path)


def test_the_space_that_is_needed_is_taken_before_anything_is_copied(parts, tmp_path, monkeypatch):
    def fill(_file, start, size):
        assert (start, size % 32) == (0, 0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill)
    monkeypatch.setattr(np, "memmap", None)
    with pytest.raises(OSError, match="No space left on device"):
        join(parts(2, 2)[0], tmp_path)
