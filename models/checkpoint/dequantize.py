"""A quantized checkpoint becomes an ordinary one: each weight is dequantized in float32 and written.

Activations and the KV cache are not quantized here, whatever the checkpoint says of them. Reads one weight at
a time, whose tensors may be in different files, and writes files of a few GB.

    python -m models.checkpoint.dequantize FOLDER DTYPE TARGET   writes the checkpoint into the folder TARGET

Source: the tensors that AutoAWQ, AutoGPTQ, GPTQModel, bitsandbytes, compressed-tensors and transformers save;
OCP Microscaling Formats (MX) 1.0 for mxfp4.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from manifest import read_json
from models.checkpoint.fetch import OTHER_FORMAT, copy_metadata
from models.checkpoint.quantization import Quantization, dequantized_config, values_of
from models.errors import ModelError, reported_as, run_program
from run import Json

SHARD_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"
# Tensors of quantized activations and KV caches, and one that says what bitsandbytes always does.
UNUSED = re.compile(r".+\.((input|output|activation|[qkv])_scale|(in|out)put_zero_point|weight_format)")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the columns of eight are in a word
FP8_BLOCK = (128, 128)  # transformers' default
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # a fourth bit is the sign
FP4_BIAS = 127  # of the exponent that a block of mxfp4 shares

Parts = Mapping[str, Tensor]  # the stored tensors of one weight


def awq(parts: Parts, settings: Json) -> Tensor:
    """Returns the weight float32 [out, in] of `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8]
    and `scales` [groups, out]. Does not read `settings`."""
    weight, zeros = (_unpack(parts[name], 4, AWQ_ORDER).T for name in ("qweight", "qzeros"))
    return _scaled_weight(weight, parts["scales"].T, zeros)


def gptq(parts: Parts, settings: Json) -> Tensor:
    """Returns the weight float32 [out, in] of `qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups,
    out * bits / 32], `scales` [groups, out] and, if there is one, `g_idx` int32 [in]: the group of each row.
    The bits follow from the shapes. Of `settings` only the format counts: version 2 stores zeros as they
    are."""
    scales = parts["scales"].T
    bits = 32 * parts["qzeros"].shape[1] // len(scales)  # may differ between layers
    zeros = parts["qzeros"]
    if "gptq_v2" not in (settings.get("checkpoint_format"), settings.get("format")):
        # The first version stores one less: of whole words, where a zero point of 0 borrows from the next.
        zeros = zeros + 0xFFFFFFFF // ((1 << bits) - 1)
    zeros = _unpack(zeros, bits).T
    return _scaled_weight(_unpack(parts["qweight"].T, bits), scales, zeros, groups=parts.get("g_idx"))


def bitsandbytes(parts: Parts, settings: Json) -> Tensor:
    """Returns the weight float32 [out, in] of `weight` int8 [out, in] and `SCB` [out], the largest of each
    row. Without `SCB` the weight is flat, with two values in a byte, and its blocks have a largest value
    each, `weight.absmax`, which may be quantized as well; `weight.quant_state` is a JSON text with its shape.
    Does not read `settings`."""
    weight = parts["weight"]
    if "SCB" in parts:
        return weight.float() * parts["SCB"].float()[:, None] * (1 / 127)
    state = json.loads(bytes(parts["weight.quant_state"].tolist()))
    largest = parts["weight.absmax"]
    if "nested_offset" in state:
        nested = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = parts["weight.nested_quant_map"][largest.int()] * nested + state["nested_offset"]
    codes = weight.flatten().view(torch.uint8)  # may be stored in another dtype
    values = parts["weight.quant_map"].float()[torch.stack([codes >> 4, codes & 15], -1).flatten().int()]
    scales = largest.float().repeat_interleave(state["blocksize"])
    return (values * scales[: len(values)]).view(state["shape"])


def compressed_tensors(parts: Parts, settings: Json) -> Tensor:
    """Returns the weight float32 [out, in] of `weight` float8 or int8 [out, in], or `weight_packed` int32
    [out, in * bits / 32] with `weight_shape`. `weight_scale` and `weight_zero_point`, if there is one, have
    one number, or one for each row, group of columns or block, whose size `settings` has. `weight_g_idx`
    int32 [in] is the group of each column, where the groups are not in order.

    Raises TypeError for a `weight` of more than 8 bits.
    """
    zeros = parts.get("weight_zero_point")
    if "weight_packed" in parts:
        rows, columns = parts["weight_shape"].tolist()
        bits = 32 * parts["weight_packed"].shape[1] // columns
        weight = _unpack(parts["weight_packed"], bits)[:, :columns] - (1 << bits - 1)
        if zeros is not None and zeros.dtype == torch.int32:  # older files do not pack them
            zeros = _unpack(zeros.T, bits).T[:rows] - (1 << bits - 1)
    else:
        weight = parts["weight"]
        if weight.dtype.itemsize > 1:
            raise TypeError(f"it has scales and is stored in {weight.dtype}")
    groups = parts.get("weight_g_idx")
    if groups is not None and (groups < 0).any():  # not set: the groups are in order
        groups = None
    blocks = next(filter(None, values_of(settings, "block_structure")), None)
    return _scaled_weight(weight, parts["weight_scale"], zeros, groups, blocks)


def fp8(parts: Parts, settings: Json) -> Tensor:
    """Returns the weight float32 [out, in] of `weight` float8 [out, in] and `weight_scale`: one number, or
    one for each block of `weight_block_size` in `settings` (else FP8_BLOCK)."""
    blocks = settings.get("weight_block_size") or FP8_BLOCK
    return _scaled_weight(parts["weight"], parts["weight_scale"], blocks=blocks)


def mxfp4(parts: Parts, settings: Json) -> Tensor:
    """Returns the weight float32 [experts, in, out] of `blocks` uint8 [experts, out, in / 32, 16] and
    `scales` uint8 [experts, out, in / 32]. Does not read `settings`."""
    codes = torch.stack([parts["blocks"] & 15, parts["blocks"] >> 4], -1).flatten(-2).int()
    exponents = parts["scales"][..., None].int() - FP4_BIAS
    return torch.ldexp(torch.cat([FP4, -FP4])[codes], exponents).flatten(-2).transpose(-1, -2)


# How the stored tensors of a weight are named: the name of the weight, and the part.
TENSOR_FORMATS: dict[str, tuple[Callable[[Parts, Json], Tensor], str]] = {
    "awq": (awq, r"(.+)\.(qweight|qzeros|scales)"),
    "bitsandbytes": (
        bitsandbytes,
        r"(.+?)\.(SCB|weight(?:\.(?:nested_)?(?:absmax|quant_map)|\.quant_state)?)(?:\.bitsandbytes__\w+)?",
    ),
    "compressed-tensors": (
        compressed_tensors,
        r"(.+)\.(weight(?:_packed|_scale|_shape|_zero_point|_g_idx)?)",
    ),
    "fp8": (fp8, r"(.+)\.(weight(?:_scale)?)(?:_inv)?"),
    "gptq": (gptq, r"(.+)\.(qweight|qzeros|scales|g_idx)"),
    "mxfp4": (mxfp4, r"(.+)_(blocks|scales)"),
}


def _unpack(packed: Tensor, bits: int, order: Any = ...) -> Tensor:
    """Returns the unsigned numbers of `bits` bits in the words of the last dimension, int32 [..., words * 32
    / bits]: of each word the lowest bits first. order: which number of a word comes at each place; left out:
    as they are in the word. `packed`: int32 [..., words]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[order]
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _scaled_weight(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    blocks: Sequence[int] | None = None,
) -> Tensor:
    """Returns (weight - zeros) * scales in float32 [out, in].

    weight: [out, in]. scales, zeros: one number, or one for each row, group of columns, or block of `blocks`
    rows and columns, which without `blocks` have equal sizes. Without `zeros` these are 0. groups: int32
    [in], the group of each column; None: the columns of a group are next to each other.
    """

    def spread(values: Tensor) -> Tensor:
        """Returns `values` in float32, in a shape that broadcasts to that of `weight`."""
        values = values.float()
        if values.dim() < 2:
            values = values.reshape(-1, 1)
        if groups is not None:
            return values[:, groups]
        for dim, size in enumerate(weight.shape):
            count = values.shape[dim]
            if count not in (1, size):
                length = blocks[dim] if blocks else -(-size // count)
                values = values.repeat_interleave(length, dim).narrow(dim, 0, size)
        return values

    weight = weight.float()
    if zeros is not None:
        weight = weight - spread(zeros)
    return weight * spread(scales)


class QuantizedCheckpoint:
    """The weights of a quantized checkpoint, without what UNUSED names, in `dtype` once they are dequantized.
    Opens all its safetensors files but Mistral's own, and keeps them open; reads a weight when `shards` comes
    to it. Raises ModelError for a folder without weights, SafetensorError for a file that is not whole."""

    def __init__(self, folder: Path, quantization: Quantization, dtype: torch.dtype):
        self._quantization = quantization
        self._dtype = dtype
        self._files = {}  # by the names of the stored tensors
        for path in folder.glob("*.safetensors"):
            if not path.name.startswith(OTHER_FORMAT):
                file = safe_open(path, "pt")
                self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise ModelError(f"{folder} holds no weights (*.safetensors)")
        self._dequantize, pattern = TENSOR_FORMATS[quantization.method]
        self._weights: dict[str, dict[str, str]] = defaultdict(dict)  # the names of the parts of each weight
        for name in sorted(self._files):
            if match := re.fullmatch(pattern, name):
                weight = match[1] if quantization.method == "mxfp4" else f"{match[1]}.weight"
                self._weights[weight][match[2]] = name
            elif not UNUSED.fullmatch(name):
                self._weights[name] = {"weight": name}

    @property
    def nbytes(self) -> int:
        """Returns about how many bytes all weights take in `dtype`, from the headers of the files: a few
        weights stay in float32."""
        bits = min([*values_of(self._quantization.settings, "bits", "num_bits")], default=4)
        packed = {"I32": 32 // bits, "U8": 2}  # values in one that is stored

        def count(name: str) -> int:
            stored = self._files[name].get_slice(name)
            return math.prod(stored.get_shape()) * packed.get(stored.get_dtype(), 1)

        largest = (max(map(count, parts.values())) for parts in self._weights.values())
        return self._dtype.itemsize * sum(largest)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """Yields the weights of one file after another, at least one in each, as a dictionary by name. A file
        ends with the weight that takes it beyond SHARD_BYTES. Nothing is yielded without weights. Raises
        ModelError for a weight that cannot be dequantized, by its name."""
        shard: dict[str, Tensor] = {}
        for name, parts in self._weights.items():
            with reported_as(f"{name} cannot be dequantized"):
                shard[name] = self._weight(name, parts)
            if sum(weight.nbytes for weight in shard.values()) > SHARD_BYTES:
                yield shard
                shard = {}
        if shard:
            yield shard

    def _weight(self, name: str, parts: Mapping[str, str]) -> Tensor:
        """Returns the weight `name`: a quantized one in `dtype`, any other in `dtype` if it is stored in 16
        bits, else as it is stored. parts: the names of its stored tensors, by part. Raises TypeError for
        numbers of 8 bits without scales, KeyError for a part that is missing."""
        tensors = {part: self._files[stored].get_tensor(stored) for part, stored in parts.items()}
        if [*parts.values()] != [name]:
            weight = self._dequantize(tensors, self._quantization.settings)
            return weight.to(self._dtype).contiguous()
        (weight,) = tensors.values()
        if weight.dtype.itemsize == 1 and weight.dtype != torch.bool:
            raise TypeError(f"it is stored in {weight.dtype} and has no scales")
        return weight.to(self._dtype) if weight.dtype in (torch.float16, torch.bfloat16) else weight


def convert_quantized(folder: Path, dtype: str, target: Path) -> None:
    """Writes the checkpoint in `folder` into the folder `target` with its weights dequantized to `dtype`,
    such as "bfloat16": files of about SHARD_BYTES and their index, config.json without the quantization, and
    all other files but weights.

    Raises ModelError if the weights cannot be read or dequantized, and, before anything is written, if the
    disk has no room for them. Raises OSError or SafetensorError if `target` cannot be written. What was
    written stays after an error.
    """
    with reported_as(f"{folder} cannot be read"):
        checkpoint = QuantizedCheckpoint(folder, Quantization.read(folder), getattr(torch, dtype))
    free = shutil.disk_usage(target).free
    if free < checkpoint.nbytes:
        raise ModelError(
            f"its weights take {checkpoint.nbytes / 1e9:.1f} GB, and {target.parent} has {free / 1e9:.1f} GB "
            "free; make room, or give another folder with --model-cache (MODEL_CACHE)"
        )
    copy_metadata(folder, target)
    config = dequantized_config(read_json(folder / "config.json"), dtype)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    index = {}
    for number, shard in enumerate(checkpoint.shards()):
        file = f"model-{number:05}.safetensors"
        save_file(shard, target / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    run_program(convert_quantized, Path, str, Path)
