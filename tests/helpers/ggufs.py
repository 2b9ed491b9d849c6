"""Writes GGUF files as llama.cpp's converter does, of tiny checkpoints of transformers."""

import gguf
import numpy as np
from transformers import AutoModelForCausalLM

TOKENS = 97
ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}


def write_gguf(path, checkpoint, architecture="llama", keys=(), extra=(), left_out=None, quantized=False):
    """`keys` are metadata beside the usual ones, `extra` tensors beside the model's, `left_out` the end of a tensor's name.
    quantized: matrices are in Q8_0."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(model.config, architecture), **tokenizer(model.config.vocab_size), **dict(keys)}.items():
        if value is not None:
            getattr(writer, ADD[type(value)])(key, value)
    for name, array in {**tensors(model, architecture), **dict(extra)}.items():
        if left_out and name.endswith(left_out):
            continue
        array = np.ascontiguousarray(array, np.float32)
        if quantized and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = np.split(array, 2, axis=1)
            written |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
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
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Its rotation pairs neighbours.
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        has_suffix = theirs.endswith((".weight", ".bias", "ssm_a", "ssm_d"))
        written[theirs if has_suffix else f"{theirs}.weight"] = array
    return written


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
