"""What transformers makes of a checkpoint's config.json: the classes that load it, its number of parameters,
and why no engine can serve it.

Reads no weights. So it runs before a download, in a child process (`models.convert --check`), and again
when the model is loaded (`pretrained.load_pretrained`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from config import Config
from manifest import Manifest, read_ropes
from models.errors import ModelError, check_length_limit, reported_as

# Types of layers with a recurrent state; "hybrid" has attention, too, "moe" and "mlp" have none.
RECURRENT = ("linear_attention", "conv", "mamba", "hybrid", "moe", "mlp")
# The families that have them as they are served, by the `model_type` of their text part.
RECURRENT_FAMILIES = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
# The other supported types of layers, by their names in config classes; "global" is GPT-Neo's.
LAYERS = ("full_attention", "sliding_attention", "global")
ALIBI = "ALiBi (attention biased by distance)"
# What other families have, and the `model_type` of each; also of some that come with code, which does not
# help.
UNSUPPORTED_FAMILIES = {
    ALIBI: "bloom",
    "attention code of its own": "xglm",
    "attention shared by layers": "zamba zamba2",
    "diffusion of many tokens at a time": "diffusion_gemma",
    "indexed attention": "qwen4_exp",
    "layers without a KV cache": "openai-gpt",
    "lightning attention": "minimax minimax_m1 minimax_text_01",
    "linear attention that decays by channel": "glm5_next kimi_k3 kimi_linear",
    "recurrent layers": "recurrent_gemma rwkv rwkv5 rwkv6 rwkv7 xlstm",
}
# Families whose text part is loaded without the rest: Gemma 3n's vision tower needs the package timm.
TEXT_ALONE = ("gemma3n",)
TEXT_KEY_MAPPING = {r"^model\.language_model\.": "model."}


class CheckpointArchitecture(NamedTuple):
    """A model that can be served, as far as its config.json tells."""

    config: transformers.PretrainedConfig  # as `model_class` takes it: that of the text alone for some
    model_class: type
    parameters: int  # with the numbers in buffers
    key_mapping: dict[str, str] | None  # of names in the checkpoint to those of the class, where they differ


def read_architecture(config: Config, folder: Path) -> CheckpointArchitecture:
    """Returns what transformers makes of the config.json in `folder`. Neither reads weights nor takes memory
    for them. With `trust_remote_code` it runs the Python code of the model. Turns the warnings of
    transformers off in this process.

    Raises ModelError for what no engine serves: other models than causal language models, unknown families
    and layers, code that is not trusted or does not run, a config that transformers rejects, a
    `max_total_tokens` beyond the model's limit. Raises ConfigError for a config.json that cannot be read.
    """
    manifest = Manifest.read(folder)
    kind = manifest.model_type
    for why, families in UNSUPPORTED_FAMILIES.items():
        if kind.removesuffix("_text") in families.split():
            raise _rejection(kind, why)
    has_code = "auto_map" in manifest.config_json
    if kind not in transformers.CONFIG_MAPPING and has_code and not config.trust_remote_code:
        raise ModelError(
            f"{kind} models come with Python code; --trust-remote-code (TRUST_REMOTE_CODE) runs it"
        )
    transformers.utils.logging.set_verbosity_error()
    with reported_as(with_version_of_code(f"{folder} cannot be read as a model", config, folder)):
        hf_config = _read_config(config, folder, manifest)
        if kind in TEXT_ALONE:
            hf_config = hf_config.get_text_config()
        # Families such as Qwen3.5 have a class for their text alone, too.
        auto_class = AutoModelForImageTextToText if manifest.reads_images else _auto_class(hf_config)
        _reject_layers(manifest, hf_config.get_text_config())
        if config.max_total_tokens:
            check_length_limit(config.model_name, manifest.length_limit, config.max_total_tokens)
        with torch.device("meta"):  # takes no memory
            # Otherwise transformers loads the attention that config.json names, which may be code on the hub.
            model = auto_class.from_config(
                hf_config, attn_implementation="eager", trust_remote_code=config.trust_remote_code
            )
    parameters = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    key_mapping = TEXT_KEY_MAPPING if kind in TEXT_ALONE else None
    return CheckpointArchitecture(model.config, type(model), parameters, key_mapping)


def _read_config(config: Config, folder: Path, manifest: Manifest) -> transformers.PretrainedConfig:
    """Returns transformers' config of a model. Published files with a longrope may lack the name and the
    factor that transformers needs; the result has both. With `trust_remote_code` the class of the config may
    come from the model's own code. Raises what transformers raises for a config that it rejects."""
    given = manifest.config_json
    kind = manifest.model_type
    scaling = given.get("rope_scaling")
    runs_code = config.trust_remote_code and "auto_map" in given
    is_built_in = kind in transformers.CONFIG_MAPPING and not runs_code
    rope = read_ropes(given)[0]
    if is_built_in and scaling and rope["rope_type"] == "longrope":
        longrope = {"factor": rope.get("factor", 1.0), **scaling, "rope_type": "longrope"}
        return transformers.CONFIG_MAPPING[kind].from_dict({**given, "rope_scaling": longrope})
    return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


def with_version_of_code(failure: str, config: Config, folder: Path) -> str:
    """Returns the text of a `failure`. If the model in `folder` comes with Python code that
    `trust_remote_code` lets run, and that code was written for another version of transformers than 5, the
    text also says for which one, and whether transformers has the family built in. Else it is `failure` as it
    is.

    Without `transformers_version` in config.json the code counts as written for 4.
    """
    written = Manifest.read(folder).config_json
    version = written.get("transformers_version")
    if not (config.trust_remote_code and written.get("auto_map")) or str(version).startswith("5."):
        return failure
    here = transformers.__version__
    why = f"its Python code is for transformers {version or 4}, and this server has {here}"
    if written.get("model_type") in transformers.CONFIG_MAPPING:
        why += " (which has this family built in: leave --trust-remote-code out)"
    return f"{failure}: {why}"


def _auto_class(hf_config) -> type:
    """Returns the class of transformers that loads a model with this config: AutoModelForCausalLM where the
    family has a class for text alone or, if transformers reads no images with it, code with such a class;
    else AutoModelForImageTextToText, with the vision tower. Raises ModelError for an encoder-decoder model,
    and for one that continues no text."""
    if not hf_config.is_encoder_decoder:
        reads_images = type(hf_config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        has_code = "AutoModelForCausalLM" in getattr(hf_config, "auto_map", {})
        # PaddleOCR-VL comes with code, too, and is loaded as transformers has it.
        if (has_code and not reads_images) or type(hf_config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM
        if reads_images:
            return AutoModelForImageTextToText
    raise ModelError(
        f"{hf_config.model_type} models do not continue text token by token (no causal language model); "
        "nothing to serve"
    )


def _reject_layers(manifest: Manifest, text_config) -> None:
    """Raises ModelError for a model with layers, or with attention, that no engine computes: types of layers
    that are not in LAYERS, or in RECURRENT for families that have those, ALiBi, and attention in both
    directions. Attention in chunks is computed where config.json says their size. text_config: transformers'
    config of the text part. The error names the first reason only."""
    served = LAYERS
    if text_config.model_type in RECURRENT_FAMILIES:
        served += RECURRENT
    if manifest.text_config.get("attention_chunk_size"):  # which `length_limit` keeps to one chunk
        served += ("chunked_attention",)
    layers = getattr(text_config, "layer_types", None) or getattr(text_config, "attention_layers", [])
    unknown = [f"{layer} layers" for layer in layers if layer not in served]
    if getattr(text_config, "alibi", False):  # Falcon's
        unknown.append(ALIBI)
    is_encoder = type(text_config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not text_config.is_decoder
    # True: EmbeddingGemma's and PaliGemma's; "vision": among the tokens of an image.
    if is_encoder or getattr(text_config, "use_bidirectional_attention", None) is True:
        unknown.append("attention in both directions")
    if unknown:
        raise _rejection(manifest.model_type, unknown[0])


def _rejection(kind: str, why: str) -> ModelError:
    """Returns the error for a model of the family `kind` that has `why`, such as "recurrent layers"."""
    return ModelError(f"{kind} models with {why} are not supported on a static batch")
