"""Model folders with the layout of published ones, small and with random weights, and what transformers generates from them.

`small` reduces sizes, layers, experts, windows and the vocabulary of a published config.json; what they are in kind stays:
whether query heads share key heads, a head_dim of its own, rope scaling, the order of layers, experts and their groups.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import vision_models
from templates import FOLDER as TOKENIZERS
from tokenizers import Tokenizer

from config import DEMO_MODEL
from manifest import ORIGINAL_LENGTH
from published.families import Family

# The largest values of fields; multi-head attention has four heads of 16.
LARGEST = {
    "hidden_size n_embd n_embed d_model embed_dim out_hidden_size": 64,
    "num_attention_heads n_head n_heads num_heads attention_heads": 4,
    "intermediate_size intermediate_size_mlp ffn_hidden_size ffn_dim n_inner": 160,
    # OpenVINO's fused kernel for AMX crashes at 32.
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size": 64,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 8,
    "num_experts_per_tok experts_per_token moe_topk moe_top_k moe_k topk_group": 2,
    "n_group": 4,
    "n_groups": 2,
    "mamba_d_ssm": 128,
    "first_k_dense_replace moe_layer_start_index num_dense_layers": 1,
    "sliding_window window_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim v_head_dim kv_channels hidden_size_per_layer_input mamba_d_head": 16,
    "qk_rope_head_dim laurel_rank mamba_n_heads": 8,
    "mm_tokens_per_image": 4,
    "num_position_embeddings": 16,
    "depth": 2,
}
LARGEST = {name: largest for names, largest in LARGEST.items() for name in names.split()}
HEADS = ["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"]
KV_HEADS = ["num_key_value_heads", "num_kv_heads", "kv_n_heads"]
LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"]
# Of a tokenizer that other models lend: its ids of BOS, EOS and padding, and rows of the vocabulary without a token.
END = 0
SPARE_ROWS = 16

TOKENIZER_OF = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3_1",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3_2",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral_nemo",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2_5",
    "Qwen/Qwen3-8B": "qwen3",
    "google/gemma-3-1b-it": "gemma3",
    "unsloth/DeepSeek-V3-bf16": "deepseek_v3",
}


def tokenizer_folder(model: str) -> Path:
    """That of the model's own tokenizer, if `make test` could install it, else the demonstration model's."""
    own = TOKENIZERS / f"tokenizer-{TOKENIZER_OF.get(model)}" / "models"
    return own if own.is_dir() else Path(DEMO_MODEL)


def small(config: dict[str, Any], vocabulary: int | None) -> dict[str, Any]:
    """A published config.json with small sizes; `vocabulary`: of a lent tokenizer, None where the model has its own."""
    layers = _few_layers(config)
    if "text_config" in config:
        reduced = {name: min(value, LARGEST[name]) if name in LARGEST else value for name, value in config.items()}
        reduced |= {"text_config": _small(config["text_config"], layers), "vision_config": _small(config["vision_config"], 2)}
    else:
        reduced = _small(config, layers)
        if "vision_config" in config:
            reduced["vision_config"] = _small(config["vision_config"], 2)
    return reduced if vocabulary is None else with_ids(reduced, vocabulary)


def known(config: dict[str, Any]) -> transformers.PretrainedConfig:
    """transformers' own. It no longer knows the first name of longropes, and MiniCPM3's class asks for their factor."""
    rope = config.get("rope_scaling") or {}
    if "long_factor" in rope:
        original = config.get(ORIGINAL_LENGTH) or rope[ORIGINAL_LENGTH]
        known_rope = rope | {"type": "longrope", "factor": config["max_position_embeddings"] / original}
        config = config | {"rope_scaling": known_rope}
    return transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))


def _few_layers(config: dict[str, Any]) -> int:
    """Four, or as many as show each kind of layer, twice where some share keys with others."""
    text = known(config).get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    seen = max(map(kinds.index, set(kinds)), default=0) + 1
    return max(4, 2 * seen if getattr(text, "num_kv_shared_layers", 0) else seen)


@dataclass(frozen=True)
class Shape:
    """What other sizes of a config.json are measured by, as published and here."""

    layers: tuple[int | None, int]
    heads: int | None
    head_dim: tuple[int | None, int]

    @classmethod
    def of(cls, config: dict[str, Any], layers: int) -> Shape:
        heads = _first(config, HEADS)
        plain = _first(config, ("hidden_size", "n_embd", "d_model")) // heads if heads else None
        own = config.get("head_dim") or plain
        head_dim = 16 if own == plain else 32 if own > plain else 8
        return cls((_first(config, LAYERS), layers), heads, (own, head_dim))

    def scaled(self, size: float) -> float:
        """A size in proportion to the size of a head."""
        before, here = self.head_dim
        return size * here / before if before else size


def _first(config: dict[str, Any], names: Sequence[str]) -> int | None:
    return next((config[name] for name in names if name in config), None)


def _small(config: dict[str, Any], layers: int) -> dict[str, Any]:
    shape = Shape.of(config, layers)
    reduced = {name: _small_value(name, value, shape, config) for name, value in config.items()}
    # Of a name for each layer, or a letter.
    return {
        name: value[:layers] if isinstance(value, (list, str)) and len(value) == shape.layers[0] else value
        for name, value in reduced.items()
    }


def _small_value(name: str, value: Any, shape: Shape, config: dict[str, Any]) -> Any:
    if not value or isinstance(value, bool):
        return value
    if name == "sliding_window" and value >= config.get("max_position_embeddings", math.inf):
        return value  # it never slides
    if name in LARGEST:
        return [min(each, LARGEST[name]) for each in value] if isinstance(value, list) else min(value, LARGEST[name])
    if name in LAYERS:
        return shape.layers[1]
    if name in KV_HEADS:
        return 4 if value == shape.heads else min(value, 2)
    if name == "head_dim":
        return shape.head_dim[1]
    if name in ("rotary_dim", "query_pre_attn_scalar"):
        return int(shape.scaled(value))
    if name == "attention_multiplier":
        return value * value / shape.scaled(value)
    if name in ("rope_scaling", "rope_parameters"):
        of_rope = "qk_rope_head_dim"
        return _small_rope(value, LARGEST[of_rope] / config[of_rope] if of_rope in config else shape.scaled(1))
    if name in ("attn_config", "ffn_config"):  # DBRX's and MPT's
        return {inner: _small_value(inner, each, shape, value) for inner, each in value.items()}
    if name in ("num_kv_shared_layers", "max_window_layers"):
        before, here = shape.layers
        return math.ceil(min(value / before, 1) * here)
    if name == "word_embed_proj_dim":
        return LARGEST["hidden_size"] * value // config["hidden_size"]
    if name == "image_size":
        return 4 * config["patch_size"]
    if name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        return [1]
    return value


def _small_rope(rope: dict[str, Any], factor: float) -> dict[str, Any]:
    reduced = dict(rope)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            count = int(len(rope[name]) * factor)
            reduced[name] = [rope[name][n * len(rope[name]) // count] for n in range(count)]
    if "mrope_section" in rope:
        first, *others = rope["mrope_section"]
        rest = [int(each * factor) for each in others]
        reduced["mrope_section"] = [int((first + sum(others)) * factor) - sum(rest), *rest]
    return reduced


def with_ids(config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The same with the ids of a lent tokenizer: EOS is its own, further ids have no token."""
    changed = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END) | config
    if "model_type" in config and "text_config" not in config:
        changed["vocab_size"] = vocabulary + SPARE_ROWS
    spare = iter(range(vocabulary, vocabulary + SPARE_ROWS))
    for name, value in config.items():
        if name == "text_config":
            changed[name] = with_ids(value, vocabulary)
        elif name == "vocab_size_per_layer_input":
            changed[name] = vocabulary + SPARE_ROWS
        elif name == "eos_token_id" and isinstance(value, list):
            changed[name] = [END, *(next(spare) for _ in value[1:])]
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            changed[name] = END
        elif name.endswith(("_token_id", "_token_index")):
            changed[name] = next(spare)
    return changed


def architecture(config: dict[str, Any]) -> str | None:
    """The class that config.json names; None for a family that transformers does not have."""
    names = transformers.models.auto.modeling_auto
    if config["model_type"] in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config["model_type"]]
    return names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])


def write(folder: Path, family: Family) -> Path:
    """The files of a model as it is published, smaller, with random weights."""
    model, config, generation_config = family.model, family.config, family.generation_config
    tokenizer = _write_tokenizer(folder, model)
    if family.images:
        _write_vision(folder, family, tokenizer)
    lent = tokenizer.get_vocab_size() if tokenizer_folder(model) == Path(DEMO_MODEL) else None
    config = {"architectures": [architecture(config)]} | small(config, lent)
    if family.images:
        config["image_token_id"] = tokenizer.token_to_id(family.vision.placeholder)
    _write(folder / "config.json", config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(family.seed)
        network = getattr(transformers, config["architectures"][0])(known(config)).float()
        _randomize(network)
    # An EOS of the library's default would be written beside the model, and warnings about sampling.
    network.generation_config = transformers.GenerationConfig()
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    network.to(getattr(torch, dtype)).save_pretrained(folder)  # under the names of version 4
    _write(folder / "config.json", config)
    (folder / "generation_config.json").unlink()
    if generation_config:
        _write(folder / "generation_config.json", generation_config if lent is None else with_ids(generation_config, lent))
    return folder


def write_unreadable(folder: Path, family: Family) -> Path:
    """config.json as published and a file of weights that cannot be read: for what is refused before that."""
    _write_tokenizer(folder, family.model)
    _write(folder / "config.json", {"architectures": [architecture(family.config)]} | family.config)
    (folder / "model.safetensors").write_text("no weights")
    return folder


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2))


def _write_tokenizer(folder: Path, model: str) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    source = tokenizer_folder(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write_vision(folder: Path, family: Family, tokenizer: Tokenizer) -> None:
    """What a model that reads images has beside its tower. Adds its tokens to those of a lent tokenizer."""
    tokenizer.add_special_tokens(family.vision.special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(family.vision.template)
    _write(folder / "preprocessor_config.json", family.vision.preprocessor | vision_models.ALWAYS)


def _randomize(network: torch.nn.Module) -> None:
    """Weights that spread the logits; norms, biases and routers off the values at which leaving them out changes nothing."""
    text = network.config.get_text_config()
    embedded = max(1.0, getattr(text, "embedding_multiplier", 1.0), 4.0 * ("gemma" in text.model_type))
    with torch.no_grad():
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            if not is_parameter and "bias" not in name:
                continue
            noise = torch.randn(tensor.shape)
            if tensor.dim() < 2:
                tensor.add_(noise, alpha=0.2)
            elif "emb" in name or "wte" in name or "wpe" in name or "lm_head" in name:
                tensor.copy_(noise * 0.15 / embedded)
            else:
                tensor.copy_(noise * 1.2 / math.sqrt(tensor.shape[-1]))
