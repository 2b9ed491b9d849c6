"""Tiny checkpoints with random weights, saved into a folder as `transformers` saves them; a vocabulary of 97 and few layers.

The weights are drawn wide, so that attention is sharp and greedy text varies: a key that is read from the wrong position, or
not read at all, changes the tokens. They are the same in every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

VOCABULARY = 97
POSITIONS = 32
SLIDING = 8

COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = COMMON | {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 64}
NARROW = COMMON | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}


def rope(theta: float, **more) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED, **rope(40.0)),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=SLIDING),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen2-sliding": lambda: transformers.Qwen2Config(
        **GROUPED | {"num_hidden_layers": 3}, use_sliding_window=True, sliding_window=SLIDING, max_window_layers=1
    ),
    "gpt2": lambda: transformers.GPT2Config(**NARROW),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=64),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED | {"num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=SLIDING,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
}

# Families whose attention is their own, and what is served besides.
OTHER_FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "falcon": lambda: transformers.FalconConfig(**SMALL, alibi=False, new_decoder_architecture=False, multi_query=True),
    "gpt-j": lambda: transformers.GPTJConfig(**NARROW, rotary_dim=8, tie_word_embeddings=False),
    "mpt": lambda: transformers.MptConfig(
        **COMMON, d_model=48, n_heads=4, n_layers=2, max_seq_len=POSITIONS, expansion_ratio=2
    ),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, sliding_window=SLIDING),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "opt": lambda: transformers.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=48, do_layer_norm_before=True),
}


def save_checkpoint(folder: Path, config: transformers.PretrainedConfig, model_class=transformers.AutoModelForCausalLM) -> Path:
    """Saves a model of `config` with random weights, the same in every run, into `folder`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make = getattr(model_class, "from_config", model_class)
        model = make(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder)
    return Path(folder)
