"""A model in one GGUF file becomes an ordinary checkpoint, with its tokenizer and chat template.

transformers reads and dequantizes the file; the file's own quantization is dropped. It reads only a part of
the metadata, so the configuration and the tokenizer are completed here from the file. What would still be
read wrong is rejected by name: an architecture, a key, weights that are missing or left over.

    python -m models.checkpoint.gguf FILE DTYPE TARGET     writes the checkpoint into the folder TARGET

Source: the keys that llama.cpp's converter writes, and what llama.cpp assumes where it writes none.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manifest import ORIGINAL_LENGTH
from models.checkpoint.rope import plain
from models.errors import reported_as, run_program
from models.gguf.container import GgufFile, read_gguf
from models.gguf.keys import (
    DIVISORS,
    KEYS,
    LAYERS_OF_27B,
    head_size,
    keys_of_model,
    rotary_positions,
    scaling_size,
)
from models.gguf.tokenizer import write_tokenizer
from run import Json

# The keys that are read, for every architecture; any other could change what the model computes.
GGUF_KEYS = KEYS | {
    "attention.layer_norm_epsilon",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "tensor_data_layout",
    "use_parallel_residual",
}
ARRAYS = {"attention.head_count_kv", "rope.dimension_sections"}  # may have a number for each layer or part
WINDOW = "attention.sliding_window"
CAPS = "attn_logit_softcapping final_logit_softcapping"
EXPERTS = "expert_count expert_used_count expert_feed_forward_length"
SHARED_EXPERT = "expert_shared_feed_forward_length"
STATE_SPACE = "ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank"
DELTA_NET = "full_attention_interval nextn_predict_layers rope.dimension_sections ssm.group_count"
# The architectures, and keys that only these have.
ARCHITECTURES = {
    "llama": "",
    "qwen2": "",
    "qwen2moe": f"{EXPERTS} {SHARED_EXPERT}",
    "qwen3": "",
    "qwen3moe": EXPERTS,
    "qwen35": f"{STATE_SPACE} {DELTA_NET}",
    "qwen35moe": f"{STATE_SPACE} {DELTA_NET} {EXPERTS} {SHARED_EXPERT}",
    "lfm2": "shortconv.l_cache",
    "mamba": STATE_SPACE,
    "gemma2": f"{WINDOW} {CAPS}",
    "gemma3": f"{WINDOW} {CAPS} rope.freq_base_swa",
    "phi3": WINDOW,
    "falcon": "",
    "stablelm": "",
    "starcoder2": "",
    "nemotron": "",
    "gpt2": "",
}
# Fields of the configuration that transformers does not read from the file.
FIELDS = {
    "head_dim": "attention.key_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "n_inner": "feed_forward_length",
    "ffn_hidden_size": "feed_forward_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
CONFIG_OF_BIASES = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL_LENGTH: 8192}


def convert_gguf(path: Path, dtype: str, target: Path) -> None:
    """Writes the checkpoint of the GGUF file `path` into the folder `target`: config.json, weights in
    `dtype`, such as "bfloat16", tokenizer, chat templates and generation_config.json. Holds all weights in
    memory.

    Raises ModelError if the file cannot be read, or not all of it: an architecture, a key, a tokenizer or a
    rope that is not known, weights that are missing, left over or of another shape; and if the tokenizer
    cannot be written. Raises OSError or SafetensorError if another file cannot be written. What was written
    stays after an error.
    """
    transformers.utils.logging.set_verbosity_error()
    with reported_as(f"{path.name} cannot be read as a model"):
        file = read_gguf(path)
        _reject_unknown(file)
        write_tokenizer(file, target)
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        config = _complete(transformers.AutoConfig.from_pretrained(**where), file)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
    _check_weights(model, sorted(loading["missing_keys"]), file)
    # It has been dequantized: otherwise save_pretrained of transformers 5 fails, and config.json is wrong.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.generation_config = transformers.GenerationConfig.from_pretrained(target)
    model.save_pretrained(target)


def _reject_unknown(file: GgufFile) -> None:
    """Raises ModelError for an architecture that ARCHITECTURES lacks, for a key of the architecture that is
    not read, and for a Falcon with several key and value heads. A key that is not read may be 0, false or an
    empty text; one with an array may not."""
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise file.rejection(f"is of the architecture {file.architecture}; {known} can be read")
    readable = GGUF_KEYS.union(ARCHITECTURES[file.architecture].split())
    for name, value in keys_of_model(file).items():
        is_read = name in readable & ARRAYS if np.ndim(value) else name in readable or not value
        if not is_read:
            raise file.rejection(f"has `{file.architecture}.{name}` {value}, which cannot be read")
    if file.architecture == "falcon" and file["attention.head_count_kv"] != 1:
        raise file.rejection("is a Falcon with several key and value heads, which cannot be read")


def _complete(config: Any, file: GgufFile) -> Any:
    """Changes `config`, which transformers read from the file, to what else the file says, and returns it.
    Raises ModelError for rotary positions that cannot be read."""
    for name, key in FIELDS.items():
        if hasattr(config, name) and file[key] is not None:
            setattr(config, name, file[key] or None)  # Phi-4 has 0 for no window
    for name, tensor in CONFIG_OF_BIASES.items():
        if hasattr(config, name):
            setattr(config, name, tensor in file.tensors)
    config.pad_token_id = file.tokenizer("padding_token_id")  # the default is that of one model of the family
    if file.architecture == "starcoder2":
        config.sliding_window = 4096  # in all of them; there is no key for it
    if file.architecture in LAYERS_OF_27B:
        config.query_pre_attn_scalar = scaling_size(file)
    if file.architecture == "gemma3":
        near = rotary_positions(file, slides=True)
        config.rope_parameters = {"full_attention": rotary_positions(file), "sliding_attention": near}
    elif file.architecture not in ("gpt2", "mamba"):
        config.rope_parameters = _rope(config, file)
    return config


def _rope(config: Any, file: GgufFile) -> Json:
    """Returns the `rope_parameters` of the config: those of the file's keys, and what only `config` has, such
    as the sections of an mrope. If the file has DIVISORS, they are Llama 3.1's, which the result describes;
    `config.rope_parameters` is then set, too.

    Raises ModelError for other divisors, and for a type of scaling that is not known.
    """
    rope = rotary_positions(file)
    for name, value in config.rope_parameters.items():
        if name.startswith("mrope_"):
            rope[name] = value
        elif name == "partial_rotary_factor":
            # Nemotron's file counts them for another head size; all published models rotate half of a head.
            is_nemotron = file.architecture == "nemotron"
            rope[name] = 0.5 if is_nemotron else file["rope.dimension_count"] / head_size(file)
    if divisors := file.numbers(DIVISORS):
        rope |= LLAMA3 | {"factor": max(divisors)}
        config.rope_parameters = rope
        divided, _factor = ROPE_INIT_FUNCTIONS["llama3"](config)
        expected = plain(rope["rope_theta"], 2 * len(divisors)).frequencies / divided.numpy()
        if not np.allclose(expected, divisors, rtol=1e-3):
            raise file.rejection(f"has a {DIVISORS} that is not Llama 3.1's")
    return rope


def _check_weights(model: Any, missing: list[str], file: GgufFile) -> None:
    """Raises ModelError unless every weight of the model is in the file, in its shape, and the file has no
    other. Weights for the prediction of further tokens, behind the last layer, may be left over, and divisors
    of rotary positions, too. Reshapes weights of `model` in place that lack dimensions of size 1, as files
    store them.

    missing: the names of the weights that transformers did not find.
    """
    if missing:
        raise file.rejection(f"lacks {len(missing)} of the model's weights, such as {missing[0]}")
    with torch.device("meta"):
        expected = transformers.AutoModelForCausalLM.from_config(model.config)
    for (name, weight), (_name, wanted) in zip(model.named_parameters(), expected.named_parameters()):
        if weight.squeeze().shape != wanted.squeeze().shape:
            found = f"in the shape {list(weight.shape)}, not {list(wanted.shape)}"
            raise file.rejection(f"holds {name} {found}")
        weight.data = weight.data.reshape(wanted.shape)
    # Behind the last layer are those that predict further tokens.
    unread = ("rope_f", f"blk.{model.config.num_hidden_layers}.")
    stored = sum(math.prod(t.shape) for name, t in file.tensors.items() if not name.startswith(unread))
    read = sum(weight.numel() for weight in model.parameters())
    if stored != read:
        raise file.rejection(f"holds {stored:,} parameters, of which {read:,} can be read")


if __name__ == "__main__":
    run_program(convert_gguf, Path, str, Path)
