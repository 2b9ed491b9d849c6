"""A GGUF file with its matrices in Q8_0, made of another one, to compare with llama.cpp in eight bits.

    .venv/bin/python bench/q8_0.py FROM.gguf TO.gguf

Needs the package gguf.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

EIGHT_BITS = GGMLQuantizationType.Q8_0


def main(source: str, target: str) -> None:
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *rest = field.types
        writer.add_key_value(name, field.contents(), kind, rest[0] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, EIGHT_BITS), raw_dtype=EIGHT_BITS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
