"""GGUF files written by hand, so that any of their bytes can be wrong."""

import struct

from models.gguf.container import padded, read_gguf

U8, U16, I32, U32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 2, 5, 4, 6, 7, 8, 9, 10, 12  # types of values
FORMATS = {U8: "B", U16: "H", I32: "i", U32: "I", F32: "f", BOOL: "?", U64: "Q", F64: "d"}
IN_F32, IN_Q8_0 = 0, 8  # types of tensors


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def key(name, kind, value):
    """`value`: bytes are taken as they are; a list is an array of this type."""
    if isinstance(value, list):
        items = b"".join(text(item) if kind == STRING else struct.pack(f"<{FORMATS[kind]}", item) for item in value)
        return array(name, kind, len(value), items)
    if kind == STRING:
        value = text(value)
    elif not isinstance(value, bytes):
        value = struct.pack(f"<{FORMATS[kind]}", value)
    return text(name) + struct.pack("<I", kind) + value


def array(name, kind, count, items=b""):
    return text(name) + struct.pack("<IIQ", ARRAY, kind, count) + items


def tensor(name, shape, kind=IN_F32, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LLAMA = key("general.architecture", STRING, "llama")
WEIGHT = tensor("w", (32, 2))


def gguf(*keys, tensors=(WEIGHT,), data=bytes(256), version=3, magic=b"GGUF", alignment=32):
    """A file of these keys, each in bytes, after the one of the architecture."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % alignment) + data


def split(path, folder, name, counts):
    """The files that a file is split into: the number of tensors in each. Returns them."""
    whole = read_gguf(path)
    contents = path.read_bytes()
    (key_count,) = struct.unpack_from("<Q", contents, 16)
    names = list(whole.tensors)
    parts = []
    for number, count in enumerate(counts):
        own, names = names[:count], names[count:]
        marks = key("split.no", U16, number) + key("split.count", U16, len(counts))
        marks += key("split.tensors.count", I32, len(whole.tensors))
        keys, marked = (contents[24 : whole.keys_end], key_count + 3) if number == 0 else (b"", 3)
        table, data = b"", b""
        for each in own:
            shape, kind, offset, size = whole.tensors[each]
            table += tensor(each, shape, kind, len(data))
            data += contents[offset : offset + size] + bytes(-size % 32)
        head = b"GGUF" + struct.pack("<IQQ", 3, count, marked) + keys + marks + table
        parts.append(folder / f"{name}-{number + 1:05}-of-{len(counts):05}.gguf")
        parts[-1].write_bytes(head.ljust(padded(len(head), 32), b"\0") + data)
    return parts
