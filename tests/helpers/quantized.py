"""Quantized checkpoints in the published layouts, made of integers and scales, with the weights that these stand for."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # the latter Mixtral's
BLOCK = 32  # rows and columns of a block of fp8, which need not divide those of a weight
GROUP = 16  # columns that share a scale
GEMM = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ: the columns of eight in a word, from its lowest bits on


def spread(values, rows, columns, shape):
    """values[row // rows, column // columns]"""
    return values[np.arange(shape[0]) // rows][:, np.arange(shape[1]) // columns]


def pack(codes, bits, order=None):
    """Unsigned numbers of the last dimension in int32 words, the first one in the lowest bits; zeros fill the last word."""
    count = 32 // bits
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[1] % count)]).astype(np.uint32)
    words = sum(codes[:, column::count] << np.uint32(bits * i) for i, column in enumerate(order or range(count)))
    return torch.from_numpy(words.view(np.int32))


def rounded(values, dtype):
    """Numbers as a checkpoint stores them, and as float32."""
    stored = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(dtype)
    return stored, stored.float().numpy()


def fp8_block(weight):
    ends = [range(0, size, BLOCK) for size in weight.shape]
    largest = [[np.abs(weight[i : i + BLOCK, j : j + BLOCK]).max() for j in ends[1]] for i in ends[0]]
    scales = np.array(largest, np.float32) / 448
    each = spread(scales, BLOCK, BLOCK, weight.shape)
    stored, values = rounded(weight / each, torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": torch.from_numpy(scales)}, values * each


def fp8_tensor(weight, ending="weight_scale_inv"):
    scale, each = rounded(np.abs(weight).max() / 448, torch.bfloat16)
    stored, values = rounded(weight / each, torch.float8_e4m3fn)
    parts = {"weight": stored, ending: scale, "activation_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.5)}
    return parts, values * each


def ct_fp8(weight, strategy):
    if strategy == "block":
        parts, values = fp8_block(weight)
        return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, values
    largest = np.abs(weight).max(1, keepdims=True) if strategy == "channel" else np.abs(weight).max().reshape(1)
    scales, each = rounded(largest / 448, torch.bfloat16)
    stored, values = rounded(weight / each, torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales}, values * each


def groups_of(columns, size, shuffled):
    order = np.random.default_rng(1).permutation(columns) if shuffled else np.arange(columns)
    groups = np.empty(columns, np.int32)
    groups[order] = np.arange(columns) // size
    return groups


def integers(weight, groups, bits, symmetric, dtype=torch.bfloat16):
    """Unsigned codes [out, in], zeros and scales [out, groups], these as they are stored, and what they stand for."""
    largest = 2**bits - 1
    members = [weight[:, groups == group] for group in range(groups.max() + 1)]
    if symmetric:
        scales = [np.abs(member).max(1) / (largest // 2) for member in members]
    else:
        scales = [(member.max(1).clip(0) - member.min(1).clip(None, 0)) / largest for member in members]
    stored, scales = rounded(np.stack(scales, 1), dtype)
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if not symmetric:
        lowest = np.stack([member.min(1).clip(None, 0) for member in members], 1)
        zeros = (-lowest / scales).round().clip(0, largest).astype(int)
    codes = (weight / scales[:, groups]).round().astype(int) + zeros[:, groups]
    codes = codes.clip(0, largest)
    return codes, zeros, stored, (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]


def ct_packed(weight, bits=4, symmetric=True, size=GROUP, shuffled=False, packs_zeros=True):
    groups = groups_of(weight.shape[1], size or weight.shape[1], shuffled)
    codes, zeros, scales, values = integers(weight, groups, bits, symmetric)
    parts = {"weight_packed": pack(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric and packs_zeros:
        parts["weight_zero_point"] = pack(zeros.T, bits).T
    elif not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zeros - 2 ** (bits - 1)).to(torch.int8)
    if shuffled:
        parts["weight_g_idx"] = torch.from_numpy(groups)
    return parts, values


def ct_int8(weight, symmetric=True):
    codes, zeros, scales, values = integers(weight, groups_of(weight.shape[1], weight.shape[1], False), 8, symmetric)
    parts = {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
    return parts, values


def awq(weight):
    codes, zeros, scales, values = integers(weight, groups_of(weight.shape[1], GROUP, False), 4, False, torch.float16)
    return {"qweight": pack(codes.T, 4, GEMM), "qzeros": pack(zeros.T, 4, GEMM), "scales": scales.T}, values


def gptq(weight, bits=4, symmetric=True, shuffled=False, version=1):
    groups = groups_of(weight.shape[1], GROUP, shuffled)
    codes, zeros, scales, values = integers(weight, groups, bits, symmetric, torch.float16)
    parts = {"qweight": pack(codes, bits).T, "qzeros": pack(zeros.T - (version == 1), bits), "scales": scales.T}
    # AutoGPTQ writes a bias of zeros where a model has none.
    return parts | {"g_idx": torch.from_numpy(groups), "bias": torch.zeros(len(weight), dtype=torch.float16)}, values


def bnb_4bit(weight, kind="nf4", double=True, storage=torch.uint8):
    blocks = weight.reshape(-1, 64)
    table = np.linspace(-1, 1, 16, dtype=np.float32) ** 3  # each checkpoint holds its own
    largest = np.abs(blocks).max(1)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {"weight.absmax": torch.from_numpy(largest)}
    if double:
        offset, nested_table = float(largest.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        nested = np.array([np.abs(part - offset).max() for part in np.split(largest, range(256, len(largest), 256))])
        nested = nested.astype(np.float32)
        each = nested[np.arange(len(largest)) // 256]
        codes = np.abs((largest - offset)[:, None] / each[:, None] - nested_table).argmin(1)
        largest = nested_table[codes] * each + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts = {
            "weight.absmax": torch.from_numpy(codes).to(torch.uint8),
            "weight.nested_absmax": torch.from_numpy(nested),
            "weight.nested_quant_map": torch.from_numpy(nested_table),
        }
    codes = np.abs(blocks[..., None] / largest[:, None, None] - table).argmin(-1)
    values = (table[codes] * largest[:, None]).reshape(weight.shape)
    codes = codes.reshape(-1, 2).astype(np.uint8)
    stored = torch.from_numpy(codes[:, 0] << 4 | codes[:, 1]).view(storage)[:, None]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    quant_map = torch.from_numpy(table)
    return parts | {"weight": stored, "weight.quant_map": quant_map, f"weight.quant_state.bitsandbytes__{kind}": text}, values


def bnb_8bit(weight):
    largest = np.abs(weight).max(1)
    codes = (weight / largest[:, None] * 127).round()
    parts = {"weight": torch.from_numpy(codes).to(torch.int8), "SCB": torch.from_numpy(largest)}
    parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return parts, codes * largest[:, None] * np.float32(1 / 127)


def compressed(fmt, **weights):
    group = {"weights": {"block_structure": None, "num_bits": 4, **weights}, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM", "zero_point": True}
FLOAT, PACKED = "float-quantized", "pack-quantized"
# By name: the quantization of config.json, and what quantizes a weight.
LAYOUTS = {
    "fp8 in blocks": (FP8 | {"weight_block_size": [BLOCK, BLOCK]}, fp8_block),
    "fp8": (FP8 | {"activation_scheme": "static", "weight_block_size": None}, fp8_tensor),
    "fp8 as vLLM writes it": (FP8 | {"activation_scheme": "static"}, lambda w: fp8_tensor(w, "weight_scale")),
    "ct fp8 of channels": (compressed(FLOAT, num_bits=8, strategy="channel"), lambda w: ct_fp8(w, "channel")),
    "ct fp8": (compressed(FLOAT, num_bits=8, strategy="tensor"), lambda w: ct_fp8(w, "tensor")),
    "ct fp8 in blocks": (
        compressed(FLOAT, num_bits=8, strategy="block", block_structure=[BLOCK, BLOCK]),
        lambda w: ct_fp8(w, "block"),
    ),
    "ct int8": (compressed("int-quantized", num_bits=8, strategy="channel"), ct_int8),
    "ct int8 with zeros": (compressed("int-quantized", num_bits=8), lambda w: ct_int8(w, symmetric=False)),
    "ct 4 bits": (compressed(PACKED), ct_packed),
    "ct 4 bits with zeros": (compressed(PACKED, symmetric=False), lambda w: ct_packed(w, symmetric=False)),
    "ct 4 bits with zeros that are not packed": (
        compressed(PACKED, symmetric=False),
        lambda w: ct_packed(w, symmetric=False, packs_zeros=False),
    ),
    "ct 4 bits with g_idx": (compressed(PACKED, actorder="group"), lambda w: ct_packed(w, symmetric=False, shuffled=True)),
    "ct 8 bits": (compressed(PACKED, num_bits=8), lambda w: ct_packed(w, bits=8, size=None)),
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq with zeros": (GPTQ | {"checkpoint_format": "gptq"}, lambda w: gptq(w, symmetric=False)),
    "gptq with g_idx": (GPTQ | {"desc_act": True}, lambda w: gptq(w, shuffled=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, symmetric=False, shuffled=True, version=2)),
    "gptq 8 bits": (GPTQ | {"bits": 8}, lambda w: gptq(w, bits=8)),
    "gptq 2 bits": (GPTQ | {"bits": 2}, lambda w: gptq(w, bits=2, symmetric=False)),
    "bitsandbytes nf4": (BNB, bnb_4bit),
    "bitsandbytes fp4": (BNB, lambda w: bnb_4bit(w, "fp4", double=False)),
    "bitsandbytes nf4 stored as bfloat16": (BNB, lambda w: bnb_4bit(w, storage=torch.bfloat16)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_8bit),
}


def mxfp4(shape):
    """Random experts [experts, in, out] as gpt-oss stores them: a byte of two codes, and an exponent for each 32 inputs."""
    experts, columns, rows = shape
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (experts, rows, columns), np.uint8)
    exponents = random.integers(122, 126, (experts, rows, columns // 32), np.uint8)
    # One bit of sign, two of exponent, one of mantissa.
    mantissas = (codes & 1) / 2
    values = np.where(codes & 6, 2.0 ** ((codes >> 1 & 3) - 1.0) * (1 + mantissas), mantissas) * (1 - 2.0 * (codes >> 3))
    values = values * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, axis=2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(experts, rows, columns // 32, 16)
    parts = {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(exponents)}
    return parts, values.transpose(0, 2, 1).astype(np.float32)


def quantize(plain, folder, layout, key="quantization_config", **changes):
    """Writes the checkpoint in `plain` quantized into `folder`, and what that stands for into the folder `reference` beside."""
    quantization, of_weight = LAYOUTS[layout]
    stored, reference = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.split(".")[-2] in LINEAR:
            parts, values = of_weight(tensor.float().numpy())
            stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
            reference[name] = torch.from_numpy(values)
        else:
            stored[name] = reference[name] = tensor
    return write(plain, folder, stored, reference, **{key: quantization} | changes)


def quantize_experts(plain, folder):
    """The same for a gpt-oss whose experts are in MXFP4."""
    stored, reference = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = reference[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            parts, values = mxfp4(tensor.shape)
            del stored[name]
            stored |= {name + ending: part for ending, part in parts.items()}
            reference[name] = torch.from_numpy(values)
    return write(plain, folder, stored, reference, quantization_config={"quant_method": "mxfp4"})


def write(plain, folder, stored, reference, **changes):
    for target in (folder, folder.with_name("reference")):
        target.mkdir(parents=True)
        for path in plain.iterdir():
            if path.suffix != ".safetensors":
                (target / path.name).write_bytes(path.read_bytes())
    save_file({name: each.contiguous() for name, each in reference.items()}, target / "model.safetensors", {"format": "pt"})
    index = {}
    for number in (1, 2):  # the tensors of a weight may lie in different files
        file = f"model-{number:05}-of-00002.safetensors"
        shard = {name: stored[name].contiguous() for name in sorted(stored)[number - 1 :: 2]}
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    edit_config(folder, **changes)
    return folder
