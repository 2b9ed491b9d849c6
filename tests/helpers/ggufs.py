"""Writes GGUF files as llama.cpp's converter does, of tiny checkpoints of transformers."""

import gguf
import numpy as np
from transformers import AutoModelForCausalLM

TOKENS = 97
ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}


def write_gguf(path, checkpoint, architecture="llama", keys=(), extra=(), left_out=None):
    """`keys` are metadata beside the usual ones, `extra` tensors beside the model's, `left_out` the end of a tensor's name."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(model.config, architecture), **tokenizer(model.config.vocab_size), **dict(keys)}.items():
        if value is not None:
            getattr(writer, ADD[type(value)])(key, value)
    for name, array in {**tensors(model, architecture), **dict(extra)}.items():
        if not left_out or not name.endswith(left_out):
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(config, architecture):
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "norm_eps", getattr(config, "norm_epsilon", None)),
        "rope.freq_base": config.rope_parameters.get("rope_theta"),
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
        if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            array = array + 1
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Its rotation pairs neighbours.
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        written[theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"] = array
    return written
