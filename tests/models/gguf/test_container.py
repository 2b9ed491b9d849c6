"""A GGUF file's keys and tensors are those that were written, or one line says what is wrong with the file."""

import os
import struct
import time
import tracemalloc

import gguf as package
import numpy as np
import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    IN_Q8_0,
    LLAMA,
    STRING,
    U8,
    U16,
    U32,
    WEIGHT,
    array,
    gguf,
    key,
    tensor,
    text,
)

from models.errors import ModelError
from models.gguf.container import MAX_METADATA, TYPES, Tensor, read_gguf, read_part

NAME = "model.gguf"
MOST_BYTES = 64_000_000
GOOD = gguf(
    LLAMA,
    key("llama.block_count", U32, 2),
    key("tokenizer.ggml.tokens", STRING, ["a", "b"]),
    key("tokenizer.ggml.scores", F32, [0.5, -1.0]),
    tensors=[WEIGHT, tensor("blk.0.attn_q.weight", (32, 2), IN_Q8_0, 256)],
    data=bytes(256 + 68),
)


@pytest.fixture
def file(tmp_path):
    """Writes a file with these contents."""

    def write(contents):
        (tmp_path / NAME).write_bytes(contents)
        return tmp_path / NAME

    return write


def refusal(path):
    with pytest.raises(ModelError) as refused:
        read_gguf(path)
    message = str(refused.value)
    assert message.startswith(NAME) and message.isprintable()
    assert len(message) < len(NAME) + 300
    return message.removeprefix(NAME).strip()


def test_what_the_library_of_llama_cpp_writes_is_read(tmp_path):
    writer = package.GGUFWriter(tmp_path / NAME, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_int16("i16", -300)
    writer.add_int64("i64", -(2**40))
    writer.add_uint64("u64", 2**63)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_block_count(3)
    writer.add_token_list([b"a", "\u2581b", b"\xff"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    ones = np.ones((4, 64), np.float32)
    writer.add_tensor("a", np.arange(5, dtype=np.float32))
    writer.add_tensor("b", package.quants.quantize(ones, package.GGMLQuantizationType.Q4_0), raw_dtype=2)
    writer.add_tensor("c", ones.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = read_gguf(tmp_path / NAME)
    assert read.architecture == "llama"
    assert [read.keys[each] for each in ("u8", "i8", "i16", "i64", "u64", "f32")] == [200, -3, -300, -(2**40), 2**63, 0.5]
    assert [read.keys[each] for each in ("f64", "yes", "no")] == [0.1, True, False]
    assert all(type(read.keys[each]) is bool for each in ("yes", "no"))
    assert read["block_count"] == 3 and read["head_count"] is None
    assert read.tokenizer("tokens") == ["a", "\u2581b", "\udcff"] and read.tokenizer("merges") is None
    assert [read.keys[each].tolist() for each in ("numbers", "floats", "flags")] == [[1, -2, 3], [0.5, 1.5], [True, False]]
    theirs = package.GGUFReader(tmp_path / NAME)
    assert list(read.tensors) == [each.name for each in theirs.tensors]
    for each in theirs.tensors:
        expected = Tensor(tuple(map(int, each.shape)), int(each.tensor_type), int(each.data_offset), int(each.n_bytes))
        assert read.tensors[each.name] == expected
    assert read.numbers("a") == [0, 1, 2, 3, 4] and read.numbers("rope_freqs.weight") is None
    with pytest.raises(ModelError, match=r"^model\.gguf has c in F16, not in F32; serve the checkpoint that it was made of$"):
        read.numbers("c")


def test_the_types_of_tensors_are_those_of_ggml():
    theirs = package.constants.GGML_QUANT_SIZES
    assert {kind.value: (kind.name, *size) for kind, size in theirs.items()} == TYPES


def test_a_large_vocabulary_is_read_at_once(file):
    tokens = array("tokenizer.ggml.tokens", STRING, 262_144, b"".join(text(f"token{i}") for i in range(262_144)))
    path = file(gguf(LLAMA, tokens))
    started_at = time.process_time()
    assert read_gguf(path).tokenizer("tokens")[-1] == "token262143"
    assert time.process_time() - started_at < 2  # 0.2 alone on a machine; the library of llama.cpp takes 11 to 40


def test_the_alignment_is_that_of_the_file(file):
    wide = [WEIGHT, tensor("v", (3,), offset=1024)]
    path = file(gguf(LLAMA, key("general.alignment", U32, 1024), tensors=wide, data=bytes(1036), alignment=1024))
    assert [each.offset for each in read_gguf(path).tensors.values()] == [1024, 2048]


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "it is empty; download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a Git LFS pointer, not the file: run `git"),
        (b"<!doctype html><html></html>", "it is a web page: download the file from the address with /resolve/"),
        (b"<!DOCTYPE html><html></html>", "it is a web page: "),
        (b"<html><head></head></html>", "it is a web page: "),
        (b"tjgg" + bytes(64), "it is older than GGUF; give a file that was made after August 2023"),
        (b"lmgg" + bytes(64), "it is older than GGUF; "),
        (b"PK\3\4" + bytes(64), "it is no GGUF file"),
        (b"GG", "it is no GGUF file"),
        (b"GGUF", "it ends within its header, after 4 bytes; download it again"),
        (gguf(LLAMA, version=1), "it is of version 1 of GGUF, neither 2 nor 3"),
        (gguf(LLAMA, version=3 << 24), "it is of version 50331648 of GGUF, neither 2 nor 3, or for big-endian machines"),
        (gguf(LLAMA)[:-1], "it has 383 of 384 bytes: its download is not complete; download it again"),
        (gguf(LLAMA, key("", U8, 1)), "it has an empty, unprintable or repeated name: ''"),
        (gguf(LLAMA, key(b"\xff", U8, 1)), "it has an empty, unprintable or repeated name: '\\udcff'"),
        (gguf(LLAMA, key("a\nb", U8, 1)), "it has an empty, unprintable or repeated name: 'a\\nb'"),
        (gguf(LLAMA, key("k" * 65_536, U8, 1)), "it holds a text of 65,536 bytes, where 65,535 are the most"),
        (gguf(LLAMA, key("k", U8, 1), key("k", U8, 1)), "it has an empty, unprintable or repeated name: 'k'"),
        (gguf(LLAMA, key("k", 13, b"")), "it holds a value of the type 13, which is not known"),
        (gguf(LLAMA, array("k", 13, 1)), "it holds a value of the type 13, which is not known"),
        (gguf(LLAMA, array("k", ARRAY, 1, struct.pack("<IQ", U8, 0))), "it holds a value of the type 9, which is not known"),
        (gguf(LLAMA, array("k", U8, 1 << 40)), "it ends within its header"),
        (gguf(LLAMA, array("k", F64, 1 << 63)), "it ends within its header"),
        (gguf(LLAMA, array("k", STRING, 1 << 63, text("a")), tensors=[], data=b""), "it ends within its header"),
        (gguf(LLAMA, key("k", STRING, b"a").replace(text("a"), struct.pack("<Q", 1 << 26))), "it ends within its header"),
        (gguf(LLAMA, key("k", STRING, b"a").replace(text("a"), struct.pack("<Q", 1 << 63))), "it holds a text of 9,223,372"),
        (gguf(LLAMA, key("general.alignment", U32, 0)), "its alignment is not a power of two up to 1,048,576"),
        (gguf(LLAMA, key("general.alignment", U32, 48)), "its alignment is not a power of two"),
        (gguf(LLAMA, key("general.alignment", U32, 1 << 21)), "its alignment is not a power of two"),
        (gguf(LLAMA, key("general.alignment", F32, 32.0)), "its alignment is not a power of two"),
        (gguf(LLAMA, key("general.alignment", BOOL, True)), "its alignment is not a power of two"),
        (gguf(LLAMA, key("general.alignment", U32, [32])), "its alignment is not a power of two"),
        (gguf(LLAMA, tensors=[tensor("w", ())]), "its tensor w has 0 dimensions"),
        (gguf(LLAMA, tensors=[tensor("w", (1,) * 5)]), "its tensor w has 5 dimensions"),
        (gguf(LLAMA, tensors=[tensor("w", (32, 0))]), "its tensor w in F32 has the shape [32, 0]"),
        (gguf(LLAMA, tensors=[tensor("w", (1 << 32, 1 << 31))]), "its tensor w in F32 has the shape"),
        (gguf(LLAMA, tensors=[tensor("w", (1 << 63, 2, 1 << 63))]), "its tensor w in F32 has the shape"),
        (gguf(LLAMA, tensors=[tensor("w", (48,), IN_Q8_0)]), "its tensor w in Q8_0 has the shape [48]"),
        (gguf(LLAMA, tensors=[tensor("w", (1 << 40,))]), "it has 384 of 4,398,046,511,232 bytes: its download is not"),
        (gguf(LLAMA, tensors=[tensor("w", (32,), 4)]), "its tensor w has the type 4 of ggml, which is not known"),
        (gguf(LLAMA, tensors=[tensor("w" * 65, (32,))]), "it holds a text of 65 bytes, where 64 are the most"),
        (gguf(LLAMA, tensors=[tensor("", (32,))]), "it has an empty, unprintable or repeated name: ''"),
        (gguf(LLAMA, tensors=[WEIGHT, tensor("w", (2,), offset=256)]), "it has an empty, unprintable or repeated name: 'w'"),
        (gguf(LLAMA, tensors=[WEIGHT, tensor("v", (2,), offset=128)]), "its tensor v does not follow the one before it"),
        (gguf(LLAMA, tensors=[WEIGHT, tensor("v", (2,), offset=288)]), "its tensor v does not follow the one before it"),
        (gguf(LLAMA, tensors=[tensor("w", (2,), offset=32)]), "its tensor w does not follow the one before it"),
        (gguf(LLAMA, tensors=[tensor("v", (3,)), tensor("w", (2,), offset=12)]), "its tensor w does not follow"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_whole_is_refused_with_what_is_wrong(file, contents, reason):
    assert refusal(file(contents)).startswith(f"cannot be read: {reason}")


# These made the library of llama.cpp take memory until there was none.
HEAD = "474755460300000000000000000000000100000000000000"  # no tensor, one key
COUNTS_BEYOND_THE_END = {
    "48_key0_u8": HEAD + "0000000000000000" "09000000" "00000000" "0000000000000040",
    "49_f64_2_40": HEAD + "0100000000000000" "6b" "09000000" "0c000000" "0000000000010000",
    "49_u8_2_62": HEAD + "0100000000000000" "6b" "09000000" "00000000" "0000000000000040",
    "arr_arr_u8_2_62": HEAD + "0100000000000000" "6b" "09000000" "09000000" "0100000000000000" "00000000" "0000000000000040",
}  # fmt: skip


@pytest.mark.parametrize("contents", COUNTS_BEYOND_THE_END.values(), ids=COUNTS_BEYOND_THE_END)
def test_a_count_beyond_the_end_of_the_file_is_refused_at_once(file, contents):
    path = file(bytes.fromhex(contents))
    tracemalloc.start()
    assert refusal(path).startswith("cannot be read: it ")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_more_metadata_than_any_model_has_is_refused(file):
    """The file is sparse: its arrays are zeros."""
    path = file(b"")
    with path.open("wb") as opened:
        opened.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 6) + LLAMA)
        for i in range(5):
            opened.write(array(f"k{i}", U8, MAX_METADATA // 4))
            opened.seek(MAX_METADATA // 4, os.SEEK_CUR)
        opened.truncate(MAX_METADATA * 2)
    assert refusal(path) == "cannot be read: it has more than 268,435,456 bytes of metadata"


@pytest.mark.parametrize("kind", [LLAMA, b""], ids=["with", "without"])
@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ([key("general.type", STRING, "adapter")], [WEIGHT], "is a LoRA adapter; give it in safetensors with --lora-adapters"),
        ([key("general.type", STRING, "mmproj")], [WEIGHT], "is the part of a model that reads images (mmproj), without"),
        ([key("general.type", STRING, "imatrix")], [WEIGHT], "is an importance matrix, not a model; serve the checkpoint"),
    ],
)
def test_what_is_no_model_is_refused_by_its_name(file, keys, tensors, reason, kind):
    assert refusal(file(gguf(*filter(None, [kind]), *keys, tensors=tensors))).startswith(reason)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (gguf(key("general.architecture", STRING, "clip")), "is the part of a model that reads images"),
        (gguf(LLAMA, tensors=[], data=b""), "is a vocabulary alone, without weights"),
        (gguf(), "names no architecture"),
        (gguf(key("general.architecture", U8, 1)), "names no architecture"),
        (gguf(key("general.architecture", STRING, ["llama"])), "names no architecture"),
        (gguf(LLAMA, key("split.count", U16, 2), key("split.tensors.count", U32, 2)),
         "is a part of a model, with 1 of 2 tensors"),
    ],
)  # fmt: skip
def test_a_file_without_a_whole_model_is_refused_by_what_it_lacks(file, contents, reason):
    path = file(contents)
    assert refusal(path).startswith(reason)
    read_part(path)


def test_a_rejection_repeats_little_of_what_the_file_says(file):
    read = read_gguf(file(gguf(LLAMA, key("llama.x", STRING, "line\n" * 1000))))
    message = str(read.rejection(f"has `llama.x` {read['x']}"))
    assert message.startswith(f"{NAME} has `llama.x` line\\nline") and len(message) < 260


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / NAME).mkdir()
    assert refusal(tmp_path / NAME).startswith("cannot be read: [Errno 21] Is a directory")


def test_another_file_in_the_place_of_one_has_another_identity(file):
    path = file(GOOD)
    first = read_gguf(path).identity
    assert read_gguf(path).identity == first
    times = path.stat().st_mtime_ns
    changed = GOOD.replace(key("llama.block_count", U32, 2), key("llama.block_count", U32, 3))
    os.utime(file(changed), ns=(times, times))
    assert read_gguf(path).identity != first
    os.utime(file(GOOD), ns=(times, times))
    assert read_gguf(path).identity == first
    os.utime(path, ns=(times + 10**9, times + 10**9))
    assert read_gguf(path).identity != first


def is_read(path):
    try:
        read = read_gguf(path)
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return False
    assert all(tensor.offset + tensor.size <= path.stat().st_size for tensor in read.tensors.values())
    return True


def test_a_file_with_any_byte_cut_off_or_flipped_is_read_or_refused_in_a_line(file):
    """At once, and with little memory."""
    head = len(GOOD) - 256 - 68
    started_at = time.process_time()
    tracemalloc.start()
    assert is_read(file(GOOD))
    for end in [*range(head), len(GOOD) - 1]:
        assert not is_read(file(GOOD[:end]))
    for place in range(head):
        for flipped in (GOOD[place] ^ 0xFF, GOOD[place] ^ 1, GOOD[place] ^ 0x80, 0):
            is_read(file(GOOD[:place] + bytes([flipped]) + GOOD[place + 1 :]))
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    tracemalloc.stop()
    assert time.process_time() - started_at < 30
