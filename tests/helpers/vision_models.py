"""Tiny checkpoints of models that read images, with all the files that a published one has: tile sizes, patch sizes, special
tokens, preprocessor settings and chat templates as published, two narrow layers, random weights. And pictures for them.

`python tests/helpers/vision_models.py FOLDER [FAMILY ...]` writes them. Only `make` imports transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 10_000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "projection_dim": 32}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu", "rope_theta": 10000.0}
FULL_MISTRAL = {"model_type": "mistral", "sliding_window": None}

CLIP_COLORS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SIGLIP_COLORS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGENET_COLORS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
ALWAYS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True}
NEXT_GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION_GRID = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
GRANITE_TILES = [(1, n) for n in range(1, 11)] + [(n, 1) for n in range(2, 11)]
GRANITE_TILES += [(2, 2), (2, 3), (2, 4), (2, 5), (3, 2), (3, 3), (4, 2), (5, 2)]
GRANITE_GRID = [[384 * rows, 384 * columns] for rows, columns in GRANITE_TILES]

IMAGE_TOKENS = ["<image>", "<video>"]
IDEFICS_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
IDEFICS_TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
PIXTRAL_TOKENS = ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
INTERNVL_TOKENS = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"]
GLM_TOKENS = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
PADDLE_TOKENS = ["<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"]
GEMMA_TOKENS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|im_start|>", "<|im_end|>"]
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}

# In the published forms, in which each family writes its images, texts and turns. The first of these leaves out contents
# that are plain strings; so do all that select parts by their type.
LLAVA = """{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
LLAVA_NEXT = """{% for message in messages %}{% if message['role'] == 'system' %}\
{{ '<<SYS>>\\n' + message['content'][0]['text'] + '\\n<</SYS>>\\n\\n' }}{% elif message['role'] == 'user' %}{{ '[INST] ' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{{ ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s> ' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
ONEVISION = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + part['text'] }}{% endfor %}\
{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
IDEFICS = """<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
PLAIN = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['content'] is string %}\
{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'PLACEHOLDER\\n' }}\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '[IMG]' }}\
{% else %}{{ raise_exception('Unrecognized content type!') }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

GLM = """[gMASK]<sop>{% for message in messages %}{{ '\\n<|' + message['role'] + '|>\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<|begin_of_image|><|image|><|end_of_image|>' }}\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '\\n<|assistant|>\\n' }}{% endif %}"""
PADDLE = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' }}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}\
{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}{% endif %}{% endfor %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% elif message['role'] == 'assistant' %}\
{{ 'Assistant:\\n' }}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"""


class Family(NamedTuple):
    """`config` lacks the ids of tokens and the text part; `text` is what the text part adds to TEXT."""

    placeholder: str  # the token that stands for an image
    config: dict[str, Any]
    text: dict[str, Any]
    preprocessor: dict[str, Any]
    processor: dict[str, Any]
    template: str
    special_tokens: list[str]
    tokenizer_config: Mapping[str, Any] = MappingProxyType({})  # what it adds


def llava() -> Family:
    """LLaVA 1.5: one tile."""
    size = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return Family(
        "<image>",
        {"model_type": "llava", "vision_config": TOWER | CLIP},
        {"model_type": "llama"},
        {"image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "resample": 3} | size | CLIP_COLORS,
        {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1, "image_token": "<image>"},
        LLAVA,
        IMAGE_TOKENS,
    )


def llava_next() -> Family:
    """LLaVA 1.6: tiles of a canvas, chosen by the image's form."""
    base = llava()
    return base._replace(
        config={"model_type": "llava_next", "vision_config": TOWER | CLIP, "image_grid_pinpoints": NEXT_GRID},
        text=FULL_MISTRAL,
        preprocessor=base.preprocessor | {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": NEXT_GRID},
        processor=base.processor | {"processor_class": "LlavaNextProcessor"},
        template=LLAVA_NEXT,
    )


def granite_vision() -> Family:
    """Granite Vision 3: LLaVA-NeXT with SigLIP, four layers of it joined, and Granite's text model."""
    tower = TOWER | SIGLIP | {"num_hidden_layers": 4}
    size = {"size": {"height": 384, "width": 384}, "crop_size": {"height": 384, "width": 384}}
    return Family(
        "<image>",
        {"model_type": "llava_next", "vision_config": tower, "image_grid_pinpoints": GRANITE_GRID}
        | {"vision_feature_layer": [-4, -3, -2, -1], "vision_feature_select_strategy": "full"},
        {"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.0833},
        {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": GRANITE_GRID, "resample": 3}
        | {"do_center_crop": True}
        | size
        | SIGLIP_COLORS,
        {"processor_class": "LlavaNextProcessor", "patch_size": 14, "vision_feature_select_strategy": "full"}
        | {"image_token": "<image>"},
        PLAIN.replace("PLACEHOLDER", "<image>"),
        IMAGE_TOKENS,
    )


def llava_onevision() -> Family:
    """As LLaVA-NeXT, scaled down where the canvas has more than nine tiles' worth of patches."""
    return Family(
        "<image>",
        {"model_type": "llava_onevision", "vision_config": TOWER | SIGLIP, "image_grid_pinpoints": ONEVISION_GRID}
        | {"vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1},
        {"model_type": "qwen2"},
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 384, "width": 384}, "resample": 3}
        | {"image_grid_pinpoints": ONEVISION_GRID}
        | SIGLIP_COLORS,
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 729, "image_token": "<image>"}
        | {"video_token": "<video>", "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        ONEVISION,
        IMAGE_TOKENS,
    )


def smolvlm() -> Family:
    """SmolVLM2: SigLIP of 512 pixels, 16 patches joined into a token."""
    return _idefics("smolvlm", "SmolVLM", side=512, patch=16, scale=4, longest=2048)


def idefics3() -> Family:
    """SigLIP of 364 pixels, 4 patches joined into a token."""
    return _idefics("idefics3", "Idefics3", side=364, patch=14, scale=2, longest=1456)


def _idefics(kind: str, name: str, side: int, patch: int, scale: int, longest: int) -> Family:
    tower = TOWER | {"model_type": f"{kind}_vision", "image_size": side, "patch_size": patch}
    return Family(
        "<image>",
        {"model_type": kind, "scale_factor": scale, "pad_token_id": 2, "vision_config": tower},
        {"model_type": "llama"},
        {"image_processor_type": f"{name}ImageProcessor", "size": {"longest_edge": longest}, "resample": 1}
        | {"max_image_size": {"longest_edge": side}, "do_image_splitting": True, "do_pad": True}
        | SIGLIP_COLORS,
        {"processor_class": f"{name}Processor", "image_seq_len": (side // patch // scale) ** 2},
        IDEFICS,
        IDEFICS_TOKENS,
    )


def pixtral() -> Family:
    """Pixtral in transformers' form: a Llava config, and a tower that reads an image of any size as one tile."""
    return Family(
        "[IMG]",
        {"model_type": "llava", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        | {"vision_config": TOWER | PIXTRAL | {"image_size": 1024, "patch_size": 16}},
        FULL_MISTRAL,
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}, "resample": 3}
        | {"patch_size": {"height": 16, "width": 16}}
        | CLIP_COLORS,
        {"processor_class": "PixtralProcessor", "patch_size": 16, "image_token": "[IMG]"}
        | {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        INSTRUCT,
        PIXTRAL_TOKENS,
    )


def mistral3() -> Family:
    """Mistral Small 3: Pixtral's tower, 4 patches joined into a token."""
    base = pixtral()
    return base._replace(
        config={"model_type": "mistral3", "vision_config": TOWER | PIXTRAL | {"image_size": 1540, "patch_size": 14}}
        | {"vision_feature_layer": -1, "spatial_merge_size": 2},
        preprocessor=base.preprocessor | {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        processor=base.processor | {"patch_size": 14, "spatial_merge_size": 2},
    )


def lighton_ocr() -> Family:
    """Pixtral's tower, 4 patches joined into a token, without ends of lines, and Qwen3's text model."""
    return mistral3()._replace(
        placeholder="<|image_pad|>",
        config={"model_type": "lighton_ocr", "vision_config": TOWER | PIXTRAL | {"image_size": 1540, "patch_size": 14}}
        | {"spatial_merge_size": 2},
        text={"model_type": "qwen3"},
        processor={"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
        template=PLAIN.replace("PLACEHOLDER\\n", "<|image_pad|>"),
        special_tokens=QWEN_TOKENS,
    )


def internvl() -> Family:
    """InternVL3 in transformers' form: 1 to 12 tiles of 448 pixels, and a small copy of the image."""
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>"}
    tokens |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    return Family(
        "<IMG_CONTEXT>",
        {"model_type": "internvl", "downsample_ratio": 0.5, "image_seq_length": 256}
        | {"vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]}},
        {"model_type": "qwen2"},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}, "resample": 3}
        | {"crop_to_patches": True, "min_patches": 1, "max_patches": 12}
        | IMAGENET_COLORS,
        {"processor_class": "InternVLProcessor", "image_seq_length": 256},
        PLAIN.replace("PLACEHOLDER", "<IMG_CONTEXT>"),
        INTERNVL_TOKENS,
        tokens | {"extra_special_tokens": tokens},
    )


def _qwen(kind: str, vision: dict[str, Any], text: dict[str, Any], preprocessor: dict[str, Any]) -> Family:
    return Family(
        "<|image_pad|>",
        {"model_type": kind, "vision_config": vision},
        {"model_type": f"{kind}_text"} | text,
        {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "resample": 3} | CLIP_COLORS | preprocessor,
        {"processor_class": f"{kind.title().replace('_Vl', 'VL').replace('2_5', '2_5_')}Processor"},
        PLAIN.replace("PLACEHOLDER\\n", "<|vision_start|><|image_pad|><|vision_end|>"),
        QWEN_TOKENS,
    )


def qwen2_vl() -> Family:
    """A tile in the form of the image; positions of three numbers."""
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14}
    bounds = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
    return _qwen("qwen2_vl", vision, {"rope_parameters": MROPE}, bounds)


def qwen2_5_vl() -> Family:
    """As Qwen2-VL; most layers of the tower attend within windows of 4 x 4 tokens."""
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48, "patch_size": 14}
    vision |= {"fullatt_block_indexes": [1], "window_size": 112}
    bounds = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
    return _qwen("qwen2_5_vl", vision, {"rope_parameters": MROPE}, bounds)


def qwen3_vl() -> Family:
    """As Qwen2-VL, with a table of positions; layers of the tower are added to those of the language model."""
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48, "patch_size": 16}
    vision |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [0, 1]}
    bounds = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
    bounds |= {"size": {"shortest_edge": 65536, "longest_edge": 16777216}} | SIGLIP_COLORS
    return _qwen("qwen3_vl", vision, {"rope_parameters": MROPE | {"mrope_interleaved": True}}, bounds)


def qwen3_5() -> Family:
    """Qwen3-VL's tower, whose layers stay its own, before linear attention in the first of two layers."""
    base = qwen3_vl()
    vision = base.config["vision_config"] | {"deepstack_visual_indexes": []}
    text = {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.25},
    }
    return base._replace(
        config={"model_type": "qwen3_5", "vision_config": vision}, text=text, processor={"processor_class": "Qwen3VLProcessor"}
    )


def qwen3_5_moe() -> Family:
    base = qwen3_5()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    return base._replace(
        config=base.config | {"model_type": "qwen3_5_moe"}, text=base.text | experts | {"model_type": "qwen3_5_moe_text"}
    )


def glm_ocr() -> Family:
    """As Qwen2-VL, with norms of heads and a convolution for the patches of a token, whose bounds count two frames."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48, "patch_size": 14}
    return Family(
        "<|image|>",
        {"model_type": "glm_ocr", "vision_config": vision},
        {"model_type": "glm_ocr_text", "rope_parameters": MROPE | {"mrope_section": [1, 2, 3], "partial_rotary_factor": 1.0}},
        {"image_processor_type": "Glm46VImageProcessor", "size": {"shortest_edge": 12544, "longest_edge": 9633792}}
        | {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "resample": 3}
        | CLIP_COLORS,
        {"processor_class": "Glm46VProcessor"},
        GLM,
        GLM_TOKENS,
    )


def paddleocr_vl() -> Family:
    """SigLIP for images of any size, whose positions are scaled and rotary as well; ERNIE 4.5 with three positions."""
    return Family(
        "<|IMAGE_PLACEHOLDER|>",
        {"model_type": "paddleocr_vl", "tie_word_embeddings": False}
        | {"vision_config": TOWER | {"model_type": "paddleocr_vl", "image_size": 384, "patch_size": 14}},
        {"model_type": "paddleocr_vl_text", "rope_parameters": MROPE | {"mrope_section": [1, 2, 3]}}
        | {"tie_word_embeddings": False},
        {"image_processor_type": "PaddleOCRVLImageProcessor", "min_pixels": 147384, "max_pixels": 2822400}
        | {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 1, "resample": 3}
        | SIGLIP_COLORS,
        {"processor_class": "PaddleOCRVLProcessor"},
        PADDLE,
        PADDLE_TOKENS,
    )


def gemma3() -> Family:
    """SigLIP of 896 pixels, whose patches are pooled; the tokens of an image attend to each other, in sliding windows, too."""
    tokens = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    return Family(
        "<image_soft_token>",
        {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": TOWER | SIGLIP | {"image_size": 896}},
        {"model_type": "gemma3_text", "sliding_window": 320, "query_pre_attn_scalar": 12}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2} | SIGLIP_COLORS,
        {"processor_class": "Gemma3Processor", "image_seq_length": 256},
        PLAIN.replace("PLACEHOLDER\\n", "<start_of_image>"),
        GEMMA_TOKENS,
        tokens | {"extra_special_tokens": tokens},
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    family.__name__: family
    for family in (
        *(llava, llava_next, granite_vision, llava_onevision, smolvlm, idefics3),
        *(pixtral, mistral3, lighton_ocr, internvl),
        *(qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_5, qwen3_5_moe, glm_ocr, paddleocr_vl, gemma3),
    )
}


def make(name: str, folder: Path, shrink: int = 1) -> Path:
    """Writes the checkpoint of a family into `folder`, the same in every run. `shrink` divides the sides of tiles in its
    config.json, for tests of towers that need no preprocessor."""
    import torch
    import transformers

    family = FAMILIES[name]()
    _shrink(family.config, family.text, shrink)
    tokenizer = _tokenizer(family.special_tokens)
    image_id = tokenizer.convert_tokens_to_ids(family.placeholder)
    ids = {"image_token_id": image_id, "image_token_index": image_id}
    for name, token in {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}.items():
        if token in family.special_tokens:
            ids[name] = tokenizer.convert_tokens_to_ids(token)
    if "<video>" in family.special_tokens:
        ids["video_token_index"] = tokenizer.convert_tokens_to_ids("<video>")
    kind = family.config["model_type"]
    known = transformers.CONFIG_MAPPING[kind]().to_dict()
    # Older and newer files name the image token differently; each family has one name.
    config = transformers.AutoConfig.for_model(
        **family.config,
        **{name: value for name, value in ids.items() if name in known},
        text_config=TEXT | {"vocab_size": len(tokenizer)} | family.text,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                _draw(parameter_name, parameter)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text()) | dict(family.tokenizer_config)
    for file, content in {
        "tokenizer_config.json": tokenizer_config,
        "preprocessor_config.json": family.preprocessor | ALWAYS,
        "processor_config.json": family.processor,
        "chat_template.json": {"chat_template": family.template},
    }.items():
        (folder / file).write_text(json.dumps(content, indent=1))
    return folder


def _shrink(config: dict[str, Any], text: dict[str, Any], by: int) -> None:
    if config["vision_config"].get("model_type", "pixtral") == "pixtral":  # tiles of any size
        return
    side = config["vision_config"]["image_size"]
    config["vision_config"]["image_size"] = [n // by for n in side] if isinstance(side, list) else side // by
    if "mm_tokens_per_image" in config:  # 16 patches make one
        config["mm_tokens_per_image"] //= by**2
        text["sliding_window"] //= by**2  # an image is shorter, as in published models
    if "image_grid_pinpoints" in config:
        config["image_grid_pinpoints"] = [[n // by for n in size] for size in config["image_grid_pinpoints"]]


def _draw(name: str, parameter) -> None:
    """Spreads that keep numbers as large in each layer, so that the image reaches the logits."""
    if name.endswith("bias"):
        parameter.normal_(0, 0.05)
    elif "embed_tokens" in name or "newline" in name:
        parameter.normal_(0, 0.5)
    elif parameter.dim() > 1:
        inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
        parameter.normal_(0, 1.2 / inputs**0.5)


def _tokenizer(special_tokens: list[str]):
    """A token a byte, a few words, and several line breaks in one token, as many published tokenizers have them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["User: What is in this image? Describe it. Assistant:"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("\n\n\n", normalized=False)])
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


PICTURES = {"square": (512, 512), "wide": (1536, 1024), "tall": (333, 777), "small": (64, 48)}  # width, height


def picture(name: str):
    """A Pillow image of waves and noise, the same in every run."""
    from PIL import Image

    width, height = PICTURES[name]
    seed = list(PICTURES).index(name)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    colors = [127 + 120 * np.sin(x / (9 + seed) + y / 31), x * 255 / width, 127 + 100 * np.cos(y / 13)]
    noise = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    return Image.fromarray((np.stack(colors, -1) + noise).clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    for family_name in sys.argv[2:] or FAMILIES:
        print(make(family_name, Path(sys.argv[1]) / family_name))
