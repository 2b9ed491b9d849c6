"""What the keys of a GGUF file say of its model, for OpenVINO, which computes with the file, and for the
checkpoint that it is dequantized into."""

from __future__ import annotations

from typing import Any

from manifest import ORIGINAL_LENGTH
from models.gguf.container import GgufFile
from run import Json

# Keys of every architecture that may have any number.
KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
OF_IMAGES = ("mm.", "vision.")  # keys about another file
# Tensors by which the frequencies of rotary positions are divided.
DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS = "rope_factors_short.weight"
LONG_DIVISORS = "rope_factors_long.weight"  # for positions beyond the original length
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # their attention is not scaled by the size of a head


def keys_of_model(file: GgufFile) -> dict[str, Any]:
    """Returns the keys of the file's architecture, by their names without its prefix and without those about
    images. Each of these could change what the model computes."""
    prefix = f"{file.architecture}."
    return {
        key.removeprefix(prefix): value
        for key, value in file.keys.items()
        if key.startswith(prefix) and not key.removeprefix(prefix).startswith(OF_IMAGES)
    }


def head_size(file: GgufFile) -> int:
    return file["attention.key_length"] or file["embedding_length"] // file["attention.head_count"]


def scaling_size(file: GgufFile) -> int:
    """Returns the number by whose square root the attention's scores are divided."""
    if file["block_count"] == LAYERS_OF_27B.get(file.architecture):
        return file["embedding_length"] // file["attention.head_count"]
    return head_size(file)


def rotary_positions(file: GgufFile, slides: bool = False) -> Json:
    """Returns the rotary positions of the layers with a sliding window (`slides`), or of the others, with the
    names of a config.json's `rope_parameters`: `rope_type`, `rope_theta` and what the type needs. Only in
    Gemma 3 these two differ.

    Where the file has the tensor DIVISORS, the caller has to divide the frequencies by it as well. Raises
    ModelError for a scaling other than none, linear, yarn and longrope, and for divisors that are not in F32.
    """
    if slides and file.architecture == "gemma3":
        return {"rope_type": "default", "rope_theta": file["rope.freq_base_swa"] or 10000.0}
    rope = {"rope_type": "default", "rope_theta": file["rope.freq_base"] or 10000.0}
    kind = file["rope.scaling.type"] or "linear"
    factor = file["rope.scaling.factor"] or file["rope.scale_linear"]
    short = file.numbers(SHORT_DIVISORS)
    if short:
        kind = "longrope"
    elif kind == "none" or not factor:
        return rope
    elif kind not in ("linear", "yarn"):
        raise file.rejection(f"has rope scaling of the type {kind}, which cannot be read")
    attention_factor = file["rope.scaling.yarn_attn_factor"] or file["rope.scaling.attn_factor"] or 1.0
    cancelling = file["rope.scaling.yarn_log_multiplier"]  # yarn's own factor
    rope |= {
        "rope_type": kind,
        "factor": factor,
        ORIGINAL_LENGTH: file["rope.scaling.original_context_length"],
        "beta_fast": file["rope.scaling.yarn_beta_fast"],
        "beta_slow": file["rope.scaling.yarn_beta_slow"],
        "truncate": False if file.architecture == "gpt-oss" else None,
        "mscale": cancelling and 1.0,
        "mscale_all_dim": cancelling,
        "short_factor": short,
        "long_factor": file.numbers(LONG_DIVISORS),
        # Yarn's own factor is multiplied by it.
        "attention_factor": attention_factor if short or attention_factor != 1 else None,
    }
    return {name: value for name, value in rope.items() if value is not None}
