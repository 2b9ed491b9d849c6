"""Tiny checkpoints with random weights, saved into a folder the way `transformers` saves them, with what `transformers`
generates from them and a loop that runs a model of ours as the worker does; and tiny tokenizers.

The weights are drawn wide, so that attention is sharp and greedy text varies: a key that is read from the wrong position, or
not read at all, changes the tokens. They are the same in every run.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import made
import numpy as np
import tokenizers
import torch
import transformers
from engine_parts import request_of, scheduler_of
from safetensors.torch import save_file

from config import Config
from engine.request import Request
from manifest import Manifest
from models.cache import digest
from protocol import Generate

VOCABULARY = 97
POSITIONS = 24  # as many as a slot's window: the last position of a slot is the last that the model has
SLIDING = 8
ROPE_THETA = 40.0  # far from the usual 10000, at which a text of this length turns most of its angles very little

NO_SPECIAL_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = NO_SPECIAL_TOKENS | {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 64}
VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 16}
NARROW = NO_SPECIAL_TOKENS | {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": POSITIONS}


def write_adapter(folder, modules, **config):
    """A LoRA adapter in peft's names. modules: A and B by name."""
    folder.mkdir()
    tensors = {}
    for module, pair in modules.items():
        tensors |= {f"base_model.model.{module}.lora_{kind}.weight": tensor for kind, tensor in zip("AB", pair)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | config))


def llama(**changes) -> transformers.PretrainedConfig:
    """Two query heads to a key head."""
    return transformers.LlamaConfig(**GROUPED | {"rope_parameters": rope()} | changes)


def rope(**changes) -> dict:
    return {"rope_type": "default", "rope_theta": ROPE_THETA} | changes


def mistral(**changes) -> transformers.PretrainedConfig:
    return transformers.MistralConfig(**GROUPED | {"sliding_window": SLIDING} | changes)


def qwen2(**changes) -> transformers.PretrainedConfig:
    return transformers.Qwen2Config(**GROUPED | changes)


def qwen2_sliding(**changes) -> transformers.PretrainedConfig:
    """Full attention in the first of three layers, a sliding window in the others."""
    return qwen2(
        **{"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": SLIDING, "max_window_layers": 1} | changes
    )


def gemma2(**changes) -> transformers.PretrainedConfig:
    """Sliding windows in every other layer, and softcaps tight enough to matter."""
    return transformers.Gemma2Config(
        **GROUPED
        | {"num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": SLIDING}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
        | changes
    )


def phi3(**changes) -> transformers.PretrainedConfig:
    return transformers.Phi3Config(**GROUPED | {"sliding_window": SLIDING} | changes)


def phimoe(length: int = POSITIONS) -> transformers.PretrainedConfig:
    """Its sliding window, of all positions, does not reach its attention function. `length`: before the rope is scaled."""
    return transformers.PhimoeConfig(
        **GROUPED | {"max_position_embeddings": 2 * length},
        original_max_position_embeddings=length,
        num_local_experts=4,
        rope_parameters=rope(
            rope_type="longrope",
            short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
            long_factor=[9.0] * 6,
            short_mscale=1.2,
            long_mscale=1.3,
            original_max_position_embeddings=length,
        ),
        sliding_window=2 * length,
    )


def gpt2(**changes) -> transformers.PretrainedConfig:
    return transformers.GPT2Config(**NARROW | changes)


FAMILIES: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2-sliding": qwen2_sliding,
    "gpt2": gpt2,
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=64),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "gemma2": gemma2,
}

WITH_THEIR_OWN_ATTENTION: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "falcon": lambda: transformers.FalconConfig(**SMALL, alibi=False, multi_query=True),
    "gpt-j": lambda: transformers.GPTJConfig(**NARROW, rotary_dim=8, tie_word_embeddings=False),
    "mpt": lambda: transformers.MptConfig(**NO_SPECIAL_TOKENS, d_model=48, n_heads=4, n_layers=2, max_seq_len=POSITIONS),
}

OTHERS: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "phi3": phi3,
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "opt": lambda: transformers.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=48),
    "llama-linear": lambda: llama(rope_parameters=rope(rope_type="linear", factor=2.0)),
    "llama-3": lambda: llama(
        rope_parameters=rope(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=POSITIONS // 2,
        )
    ),
    "llama-yarn": lambda: llama(
        rope_parameters=rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=POSITIONS // 2)
    ),
    "llama-dynamic": lambda: llama(rope_parameters=rope(rope_type="dynamic", factor=2.0)),
    "phi3-longrope": lambda: phi3(
        max_position_embeddings=2 * POSITIONS,
        original_max_position_embeddings=POSITIONS,
        rope_parameters=rope(rope_type="longrope", short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5], long_factor=[9.0] * 6),
    ),
    "phimoe": phimoe,
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GROUPED,
        head_dim=12,
        sliding_window=SLIDING,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rope(),
    ),
    "llama-4": lambda: transformers.Llama4TextConfig(
        **GROUPED,
        head_dim=12,
        intermediate_size_mlp=64,
        attention_chunk_size=POSITIONS,
        num_local_experts=4,  # MKL rounds a product of fewer than four columns differently in each row; published ones have 16
        rope_parameters=rope(),
    ),
}

# Saved with a vision tower.
WITH_VISION: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**GROUPED, sliding_window=None),
        vision_config=VISION | {"model_type": "pixtral", "image_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        image_token_index=VOCABULARY - 1,
    ),
    "qwen2.5-vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config=GROUPED | {"rope_parameters": rope(mrope_section=[2, 2, 2])},
        vision_config=VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "fullatt_block_indexes": [0]},
    ),
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config=GROUPED | {"head_dim": 12, "rope_parameters": rope(mrope_section=[2, 2, 2], mrope_interleaved=True)},
        vision_config=VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    ),
}

ALL = FAMILIES | WITH_THEIR_OWN_ATTENTION | OTHERS | WITH_VISION


def save_checkpoint(folder: Path, config, model_class=None, dtype=torch.float32, spread=0.3) -> Path:
    """Saves a model of `config` with random weights; of `model_class` where it does not generate text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config) if model_class else auto_class(config).from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or name.endswith("sinks"):
                    parameter.normal_(0, spread)
    model.generation_config = transformers.GenerationConfig()
    model.to(dtype).save_pretrained(folder)
    return folder


def made_checkpoint(config, change: Callable[[Path], object] = lambda folder: None, **options) -> Path:
    """The same, made once (made.py); its parent is its own. `change` changes the files, and has a name for what it does."""
    name = digest([config.to_json_string(use_diff=False), str(sorted(options.items())), change.__name__])

    def make(folder: Path) -> None:
        save_checkpoint(folder, config, **options)
        change(folder)

    return made.once(f"{config.model_type}-{name}", make)


def auto_class(config):
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes) -> Path:
    """Rewrites the `config.json` of a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in remove:
        del config[name]
    path.write_text(json.dumps(config | changes, indent=1))
    return folder


LENGTHS = (1, 2, 5, 11, 16, POSITIONS - 1)  # around the sliding window of 8, and as long as a prompt can be
MARGIN = 1e-3  # a smaller lead of the best token could turn with the order of additions


@dataclass(frozen=True)
class Reference:
    """A prompt and all that `generate` continues it with, up to the last position."""

    prompt: list[int]
    tokens: list[int]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Request):
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


class Zoo:
    """One checkpoint per family, and what it must generate; each made once, when it is first needed."""

    def __init__(self):
        self.folder = cache(self._folder)
        self.references = cache(self._references)

    def _folder(self, family: str) -> Path:
        return made_checkpoint(ALL[family]())

    def _references(self, family: str) -> list[Reference]:
        folder = self.folder(family)
        name = f"references/{folder.parent.name}"
        found = made.value(name, lambda: [asdict(each) for each in references(folder)])
        return [Reference(**each) for each in found]


def reference_model(folder, **changes):
    """`transformers`' own model. Eager, because its faster attention leaves Gemma-2's softcaps out."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return auto_class(config).from_pretrained(folder, config=config, attn_implementation="eager").eval()


def references(folder, lengths=LENGTHS) -> list[Reference]:
    """For each prompt length one whose every generated token leads by a clear margin, of several the most varied."""
    model, generator, found = reference_model(folder), torch.Generator().manual_seed(1), []
    for length in lengths:
        clear: list[Reference] = []
        while not clear:
            prompts = torch.randint(0, VOCABULARY, (6, length), generator=generator)
            drawn = zip(prompts.tolist(), *generate(model, prompts))
            clear = [Reference(prompt, tokens) for prompt, tokens, margin in drawn if margin > MARGIN]
        found.append(max(clear, key=lambda reference: len(set(reference.tokens))))
    return found


def generate(model, ids: torch.Tensor) -> tuple[list[list[int]], list[float]]:
    """What `transformers` continues each prompt with, and the smallest lead of a token in each."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=POSITIONS - ids.shape[1],
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best, second = torch.stack(out.logits).topk(2).values.unbind(-1)
    return out.sequences[:, ids.shape[1] :].tolist(), (best - second).min(0).values.tolist()


def run(
    model,
    prompts: list[list[int]],
    seed=0,
    prefill_chunk=None,
    budget=None,
    all_logits=False,
    new_tokens=None,
    adapters: list[int] | None = None,
) -> list[Sequence]:
    """Runs all prompts for `new_tokens`, or to the end of the window, as the worker does, arriving at random times; some are
    cancelled on the way.

    Prompts are repeated, so many continue what a slot holds.
    A sequence's logits are those that its tokens were chosen from; with `all_logits` those after every prompt token as well.
    """
    chance, chunk = random.Random(seed), prefill_chunk or model.prefill_chunk
    scheduler = scheduler_of(
        slots=min(6, model.batch_size),
        prefix_slots=model.prefix_slots,
        supports_chunked_prefill=model.supports_chunked_prefill,
        prefill_chunk=chunk,
        chunk_granularity=model.chunk_granularity,
        max_batch_prefill_tokens=budget,
        prefix_granularity=model.prefix_granularity and min(model.prefix_granularity, chunk),
        supports_prefix_copy=model.supports_prefix_copy,
        whole_images=model.whole_images,
        states=model.states,
    )
    sequences = []
    for prompt, adapter in zip(prompts, adapters or [0] * len(prompts)):
        most = new_tokens or model.max_total_tokens - len(prompt)
        generate = Generate(0, prompt, most, prompt_logprobs=all_logits)
        sequences.append(request_of(generate, kind=Sequence, adapter=adapter))
    arriving = list(sequences)
    while arriving or scheduler.waiting or scheduler.busy:
        while arriving and chance.random() < 0.3:
            scheduler.add(arriving.pop(0))
        if len(scheduler.running) > 1 and chance.random() < 0.05:
            scheduler.remove(chance.choice(scheduler.running))
        step = scheduler.next(0.0)
        if step:
            for copy in step.copies:
                model.copy_prefix(copy.source, copy.slot, copy.cached)
            logits = model.forward(step.chunks)
            ends = np.cumsum([len(chunk.tokens) if chunk.all_logits else 1 for chunk in step.chunks])
            sampled: list[list[int]] = [[] for _ in ends]
            for i, (request, begin, end) in enumerate(zip(step.requests, [0, *ends], ends)):
                if all_logits or i in step.sample_indices:
                    request.logits += list(logits[begin:end])
            for i in step.sample_indices:
                sampled[i] = [int(logits[ends[i] - 1].argmax())]
                step.requests[i].tokens += sampled[i]
            scheduler.update(step, sampled)
    return sequences


def settings(folder: Path, max_total_tokens: int | None = POSITIONS, **changes) -> Config:
    """Those that serve a checkpoint on a CPU."""
    changes = {"threads": 1, "model_cache": str(folder.parent / "cache")} | changes
    config = Config(model_id=str(folder), device="cpu", max_total_tokens=max_total_tokens, **changes)
    return config.with_manifest(Manifest.read(folder))


TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "Hello world, hello there!",
    "naïve café, déjà vu",
    "numbers 12345 and 67890",
    "日本語のテキスト and emoji 🙂",
    "two  spaces\nand a new line ",
    "",
]


def save_byte_level_bpe(folder: Path) -> Path:
    """A slow tokenizer in GPT-2's two files, `vocab.json` and `merges.txt`, without a `tokenizer.json`."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS * 20, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | end))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def save_sentencepiece(folder: Path, **options) -> Path:
    """A slow tokenizer in Llama's one file, `tokenizer.model`, as sentencepiece trains it, and Llama's configuration of it."""
    import sentencepiece

    model = io.BytesIO()
    llama = {
        "vocab_size": 400,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in TEXTS * 20 if text),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **llama | options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | marks))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
