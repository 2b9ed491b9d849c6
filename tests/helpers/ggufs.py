"""Writes GGUF files as llama.cpp's converter does, of tiny checkpoints of transformers."""

import gguf
import numpy as np
from transformers import AutoModelForCausalLM

TOKENS = 97
# Where a block of a type has its scales, in float16.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}


def write_keys(path, keys, rows):
    """A file of metadata alone, and embeddings of so many tokens."""
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    _add(writer, {key: value for key, value in keys.items() if key != "general.architecture"})
    writer.add_tensor("token_embd.weight", np.zeros((rows, 1), np.float32))
    _write(writer)
    return path


def _add(writer, keys):
    for key, value in keys.items():
        if value is not None:
            getattr(writer, ADD[type(value)])(key, value)


def _write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path, checkpoint, architecture="llama", keys=(), extra=(), left_out=None, kinds=()):
    """`keys` are metadata beside the usual ones, `extra` tensors beside the model's, `left_out` the end of a tensor's name.
    kinds: the types of tensors by their number of dimensions, where they are not F32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(path, architecture)
    _add(writer, {**metadata(model.config, architecture), **tokenizer(model.config.vocab_size), **dict(keys)})
    for name, array in {**tensors(model, architecture), **dict(extra)}.items():
        if left_out and name.endswith(left_out):
            continue
        array = np.ascontiguousarray(array, np.float32)
        kind = gguf.GGMLQuantizationType[dict(kinds).get(array.ndim, "F32")]
        if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(name, quantized(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    _write(writer)
    return path


def quantized(array, kind):
    """In the types that the package cannot write: random codes, with small scales. No group of weights has the scale 0, where
    the frontend of OpenVINO loses the minimum; llama.cpp writes such groups for equal weights alone."""
    if kind.name not in SCALES:
        return gguf.quants.quantize(array, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (*array.shape[:-1], array.shape[-1] // numbers, size), np.uint8)
    blocks |= 0x11
    for place in SCALES[kind.name]:
        scales = np.random.default_rng(place).uniform(1e-4, 1e-3, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def metadata(config, architecture):
    values = {
        "context_length": getattr(config, "max_position_embeddings", None),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": getattr(config, "num_attention_heads", 0),
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "norm_eps", getattr(config, "norm_epsilon", None)),
        "rope.freq_base": getattr(config, "rope_parameters", {}).get("rope_theta"),
        "vocab_size": config.vocab_size,
    }
    return {f"{architecture}.{name}": value for name, value in values.items()}


def tokenizer(size):
    """A token for each character from "!" on, and one of two."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(33 + i) for i in range(size - 1)] + ["!?"],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["! ?"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def tensors(model, architecture):
    config = model.config
    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    written = {}
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            written |= experts(array, name, architecture)
            continue
        has_offset = architecture.startswith(("gemma", "nemotron", "qwen35")) and "linear_attn" not in name
        if has_offset and name.endswith("norm.weight"):
            array = array + 1
        if name.endswith("A_log"):
            array = -np.exp(array)
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            array = array.squeeze(1)
        if "linear_attn." in name:
            array = tiled(array, name, config)
            name = name.replace("dt_bias", "dt_proj.bias")
        if architecture in ("llama", "mistral3") and ("q_proj" in name or "k_proj" in name):
            # Its rotation pairs neighbours.
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        has_suffix = theirs.endswith((".weight", ".bias", "ssm_a", "ssm_d"))
        written[theirs if has_suffix else f"{theirs}.weight"] = array
    return written


def experts(array, name, architecture):
    """All experts' weights, or biases: [experts, outputs, inputs]. gpt-oss has another order, and gates beside each other."""
    place = f"blk.{name.split('.')[2]}."
    end = "bias" if name.endswith("bias") else "weight"
    if architecture == "gpt-oss" and end == "weight":
        array = array.swapaxes(1, 2)
    if ".down_proj" in name:
        return {f"{place}ffn_down_exps.{end}": array}
    gate, up = (array[:, ::2], array[:, 1::2]) if architecture == "gpt-oss" else np.split(array, 2, axis=1)
    return {f"{place}ffn_gate_exps.{end}": gate, f"{place}ffn_up_exps.{end}": up}


def tiled(array, name, config):
    """Value heads of a linear attention in llama.cpp's order: head n belongs to key head n mod the number of key heads."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    values = config.linear_num_value_heads
    order = np.arange(values).reshape(keys, -1).T.flatten()
    rows = (order[:, None] * size + np.arange(size)).flatten()
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return array[order]
    if name.endswith("in_proj_z.weight"):
        return array[rows]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        first = 2 * keys * config.linear_key_head_dim  # query and key stay as they are
        return np.concatenate([array[:first], array[first:][rows]])
    if name.endswith("out_proj.weight"):
        return array[:, rows]
    return array
