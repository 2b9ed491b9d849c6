"""A quantized checkpoint becomes an ordinary one: each weight is dequantized in float32 and written.

Activations and the KV cache are not quantized here, whatever the checkpoint says of them. Reads one weight at
a time, whose tensors may be in different files, and writes files of a few GB.

    python -m models.dequantize FOLDER DTYPE TARGET     writes the checkpoint into the folder TARGET

Source: the tensors that AutoAWQ, AutoGPTQ, GPTQModel, bitsandbytes, compressed-tensors and transformers save;
OCP Microscaling Formats (MX) 1.0 for mxfp4.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from manifest import read_json
from models.base import ModelError, reported_as
from models.fetch import OTHER_FORMAT, copy_metadata
from models.quantization import Quantization, dequantized_config
from run import ConfigError

SHARD_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"
# Tensors of quantized activations and KV caches, and one that says what bitsandbytes always does.
UNUSED = re.compile(r".+\.((input|output|activation|[qkv])_scale|(in|out)put_zero_point|weight_format)")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the columns of eight are in a word
FP8_BLOCK = (128, 128)  # transformers' default
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP4_BIAS = 127  # of the exponent that a block of mxfp4 shares

Parts = Mapping[str, Tensor]  # the stored tensors of one weight


def awq(parts: Parts, quantization: Quantization) -> Tensor:
    """`qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]."""

    def unpack(packed: Tensor) -> Tensor:
        return _unpack(packed, 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2).T

    return _scaled(unpack(parts["qweight"]), parts["scales"].T, unpack(parts["qzeros"]))


def gptq(parts: Parts, quantization: Quantization) -> Tensor:
    """`qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32], `scales` [groups,
    out], `g_idx` int32 [in]: the group of each row."""
    scales = parts["scales"].T
    bits = 32 * parts["qzeros"].shape[1] // len(scales)  # may differ between layers
    zeros = _unpack(parts["qzeros"], bits).T
    if "gptq_v2" not in (*quantization.values("checkpoint_format"), *quantization.values("format")):
        zeros += 1  # the first version stores one less
    return _scaled(_unpack(parts["qweight"].T, bits), scales, zeros, groups=parts.get("g_idx"))


def bitsandbytes(parts: Parts, quantization: Quantization) -> Tensor:
    """`weight` int8 [out, in] and `SCB` [out], the largest of each row; or two values in a byte, in blocks of
    a flat weight, whose largest values may be quantized as well."""
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
    size = math.prod(state["shape"])
    scales = largest.float().repeat_interleave(state["blocksize"])
    return (values[:size] * scales[:size]).view(state["shape"])


def compressed_tensors(parts: Parts, quantization: Quantization) -> Tensor:
    """`weight` float8 or int8 [out, in], or `weight_packed` int32 [out, in * bits / 32]; `weight_scale` and
    `weight_zero_point`: one, or one for each row, group of columns or block; `weight_g_idx` int32 [in]: the
    group of each column."""
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
    blocks = next(filter(None, quantization.values("block_structure")), None)
    return _scaled(weight, parts["weight_scale"], zeros, groups, blocks)


def fp8(parts: Parts, quantization: Quantization) -> Tensor:
    """`weight` float8 [out, in], `weight_scale`: one, or one for each block."""
    blocks = quantization.settings.get("weight_block_size") or FP8_BLOCK
    return _scaled(parts["weight"], parts["weight_scale"], blocks=blocks)


def mxfp4(parts: Parts, quantization: Quantization) -> Tensor:
    """`blocks` uint8 [experts, out, in / 32, 16], `scales` uint8 [experts, out, in / 32]; the weight is
    [experts, in, out]."""
    codes = torch.stack([parts["blocks"] & 15, parts["blocks"] >> 4], -1).flatten(-2).int()
    exponents = parts["scales"].int() - FP4_BIAS
    return torch.ldexp(FP4[codes], exponents[..., None]).flatten(-2).transpose(-1, -2)


# How the stored tensors of a weight are named: the name of the weight, and the part.
FORMATS: dict[str, tuple[Callable[[Parts, Quantization], Tensor], str]] = {
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


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The unsigned numbers in the words of the last dimension, the lowest bits first: int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _scaled(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    blocks: Sequence[int] | None = None,
) -> Tensor:
    """(weight - zeros) * scales in float32 [out, in].

    There is one scale, or one for each row, group of columns or block of `blocks` rows and columns; `groups`
    int32 [in] is the group of each column where they are not in order.
    """

    def spread(values: Tensor) -> Tensor:
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


class Stored:
    """The tensors of a checkpoint, in all of its files."""

    def __init__(self, folder: Path):
        files = [path for path in folder.glob("*.safetensors") if not path.name.startswith(OTHER_FORMAT)]
        opened = [safe_open(path, "pt") for path in sorted(files)]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no dictionary
        if not self._files:
            raise ModelError(f"{folder} holds no weights (*.safetensors)")

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def weights(self, method: str) -> dict[str, dict[str, str]]:
        """Of each weight of the model its parts and their names; of an unquantized one its own name."""
        pattern = FORMATS[method][1]
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self._files):
            if UNUSED.fullmatch(name):
                continue
            if match := re.fullmatch(pattern, name):
                weight = match[1] if method == "mxfp4" else f"{match[1]}.weight"
                found[weight][match[2]] = name
            else:
                found[name]["weight"] = name
        return found

    def count(self, name: str, bits: int) -> int:
        """How many values a tensor holds."""
        stored = self._files[name].get_slice(name)
        packed = {"I32": 32 // bits, "U8": 2}
        return math.prod(stored.get_shape()) * packed.get(stored.get_dtype(), 1)


def write_checkpoint(folder: Path, dtype: str, target: Path) -> None:
    """Raises ModelError where the weights cannot be dequantized, or where the disk has no room for them."""
    quantization = Quantization.read(folder)
    with reported_as(f"{folder} cannot be read"):
        stored = Stored(folder)
    weights = stored.weights(quantization.method)
    bits = min([*quantization.values("bits"), *quantization.values("num_bits")], default=4)
    count = sum(max(stored.count(part, bits) for part in parts.values()) for parts in weights.values())
    _check_disk(count * getattr(torch, dtype).itemsize, target)
    copy_metadata(folder, target)
    config = dequantized_config(read_json(folder / "config.json"), dtype)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    index = {}
    tensors = _dequantized(stored, weights, quantization, getattr(torch, dtype))
    for number, shard in enumerate(_shards(tensors)):
        file = f"model-{number:05}.safetensors"
        save_file(shard, target / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _check_disk(needed: int, target: Path) -> None:
    free = shutil.disk_usage(target).free
    if free < needed:
        raise ModelError(
            f"its weights take {needed / 1e9:.1f} GB, and {target.parent} has {free / 1e9:.1f} GB free; make "
            "room, or give another folder with --model-cache (MODEL_CACHE)"
        )


def _dequantized(
    stored: Stored, weights: Mapping[str, Mapping[str, str]], quantization: Quantization, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    dequantize = FORMATS[quantization.method][0]
    for name, parts in weights.items():
        tensors = {part: stored[its_name] for part, its_name in parts.items()}
        if [*parts.values()] == [name]:
            yield name, _plain(name, tensors["weight"], dtype)
            continue
        with reported_as(f"{name} cannot be dequantized"):
            weight = dequantize(tensors, quantization).to(dtype).contiguous()
        yield name, weight


def _plain(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
        raise ModelError(f"{name} is stored in {str(tensor.dtype).removeprefix('torch.')} and has no scales")
    is_16_bit = tensor.is_floating_point() and tensor.dtype.itemsize == 2
    return tensor.to(dtype) if is_16_bit else tensor


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file each."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard


if __name__ == "__main__":
    try:
        write_checkpoint(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except (ModelError, ConfigError) as error:
        sys.exit(str(error))
