"""Tiny random models of every family, made with the transformers that runs this: 4 in these tests, 5 in a process of its own.

python family_models.py FOLDER     saves them all, each with its logits
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 320
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide, so that greedy text varies
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"type": "longrope", "short_factor": [1.0 + 0.1 * n for n in range(6)], "long_factor": [4.0] * 6}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
QWEN3_MOE = {"head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e4, "sliding_window": None}
GPT_OSS = {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_scaling": YARN | {"truncate": False}}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 48, **SLIDING}

MODELS = {
    "llama, biases": ("LlamaConfig", {"attention_bias": True}),
    "llama, head_dim": ("LlamaConfig", {"head_dim": 32}),
    "llama, linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic": ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "mistral, head_dim": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "mistral, window": ("MistralConfig", {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", {"rope_theta": 1e6}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2Config", {"rope_scaling": YARN}),
    "qwen2, windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3, yarn and biases": ("Qwen3Config", {"head_dim": 32, "rope_scaling": YARN, "attention_bias": True}),
    "phi3": ("Phi3Config", {"rope_theta": 250000.0, "sliding_window": 16}),
    "phi4 mini": (
        "Phi3Config",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 256,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "rope_scaling": LONG,
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.09,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    ),
    "granite 4, attention alone": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 112,
            "mamba_n_heads": 8,
            "attention_multiplier": 0.09,
            "position_embedding_type": "rope",
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "rope_theta": 5e6}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"rope_scaling": YARN, **SLIDING}),
    "internlm2": ("LlamaConfig", {}),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN3_MOE),
    "qwen3_moe, not normalized": (
        "Qwen3MoeConfig",
        QWEN3_MOE | {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False},
    ),
    "qwen3_moe, 128 experts": (
        "Qwen3MoeConfig",
        QWEN3_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 24},
    ),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 4}),
    "gpt_oss": ("GptOssConfig", GPT_OSS | SLIDING),
    "mixtral": ("MixtralConfig", MIXTRAL),
    "mixtral, window": ("MixtralConfig", MIXTRAL | {"sliding_window": 16}),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
# What a class of transformers-neuronx runs as it is.
PLAIN = {
    "llama": ("LlamaConfig", {"rope_theta": 500000.0, "eos_token_id": [1, 5, 6]}),
    "llama, llama3": ("LlamaConfig", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"rope_theta": 1e6, "sliding_window": None}),
}


class Reference:
    """A model of transformers and the folder that it is saved in."""

    def __init__(self, config, folder):
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.model.save_pretrained(folder)
        self.folder = folder

    def logits(self, tokens):
        """float32 [vocab], for what follows the tokens."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]

    def greedy(self, prompt, count):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(self.logits(tokens).argmax().item())
        return tokens[len(prompt) :]


class Made(Reference):
    """A random model whose norms and biases are not those of a new one."""

    @classmethod
    def named(cls, name, folder, **changes):
        config_class, values = (MODELS | PLAIN)[name]
        config = getattr(transformers, config_class)(**SMALL | values | changes)
        return cls(config, folder, name == "internlm2")

    def __init__(self, config, folder, is_internlm2=False):
        config._attn_implementation = "eager"  # its faster attention leaves Gemma-2's caps out
        super().__init__(config, folder)
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                if key.endswith(("bias", "sinks")):
                    parameter.normal_(0, 4 if "gate_up_proj" in key else 0.3)  # gpt-oss' reach the limit
                if "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        self.model.save_pretrained(folder)
        if is_internlm2:
            as_internlm2(Path(folder))


def as_internlm2(folder):
    """A Llama under the names of InternLM2, whose code is not in transformers."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, head_dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    old, new = load_file(folder / "model.safetensors"), {}
    for key, tensor in old.items():
        if ".q_proj." in key:
            others = [old[key.replace("q_proj", name)] for name in ("k_proj", "v_proj")]
            parts = [part.view(kv_heads, -1, head_dim, part.shape[1]) for part in (tensor, *others)]
            assert parts[0].shape[1] == heads // kv_heads
            fused = torch.cat(parts, 1).reshape(-1, tensor.shape[1])
            new[key.replace("self_attn.q_proj", "attention.wqkv")] = fused.contiguous()
        elif ".k_proj." not in key and ".v_proj." not in key:
            for ours, theirs in names.items():
                key = key.replace(ours, theirs)
            new[key] = tensor.contiguous()
    save_file(new, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "internlm2"}))


PROMPTS = [[(31 * slot + 7 * n) % 300 + 3 for n in range(length)] for slot, length in enumerate((5, 11, 37))]


def logits_of(reference):
    """What transformers makes of the same."""
    return torch.stack([reference.logits(text).float() for prompt in PROMPTS for text in (prompt, [*prompt, 9])])


if __name__ == "__main__":
    for name in MODELS | PLAIN:
        folder = Path(sys.argv[1], name)
        torch.save(logits_of(Made.named(name, folder)), folder / "logits.pt")
