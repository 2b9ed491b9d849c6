"""The folder of a GGUF file that an engine reads as it is: config.json and the tokenizer, without weights.

    python -m models.checkpoint.gguf_folder FILE TARGET     writes them into the folder TARGET

It imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from manifest import GGUF_FILE, ORIGINAL_LENGTH
from models.cache import digest
from models.errors import run_program
from models.gguf.container import GgufFile, read_gguf
from models.gguf.keys import LONG_DIVISORS, head_size
from models.gguf.tokenizer import write_tokenizer
from run import Json

# Where they are not the architectures.
MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "ministral3", "gpt-oss": "gpt_oss"}


def write_folder(path: Path, target: Path) -> None:
    """Writes the config.json and the tokenizer of the GGUF file `path` into `target`. Raises ModelError for a
    file that is broken or whose tokenizer is not known, OSError if `target` cannot be written."""
    file = read_gguf(path)
    (target / "config.json").write_text(json.dumps(_config_json(file)))
    write_tokenizer(file, target)


def _config_json(file: GgufFile) -> Json:
    """The config.json of a GGUF file: what the server reads of it, where the file is, and a digest, because a
    changed file is another model."""
    heads = file["attention.head_count"]
    config = {
        GGUF_FILE: str(file.path),
        "gguf_identity": digest(file.identity),
        "model_type": MODEL_TYPES.get(file.architecture, file.architecture),
        "torch_dtype": "bfloat16",
        "max_position_embeddings": file["context_length"],
        "vocab_size": file.vocab_size,
        "hidden_size": file["embedding_length"],
        "intermediate_size": file["feed_forward_length"],
        "num_hidden_layers": file["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": file["attention.head_count_kv"] or heads,
        "head_dim": head_size(file),
    }
    if LONG_DIVISORS in file.tensors:
        original = file["rope.scaling.original_context_length"]
        config["rope_parameters"] = {"rope_type": "longrope", ORIGINAL_LENGTH: original}
    return config


if __name__ == "__main__":
    run_program(write_folder, Path, Path)
