"""A model in one GGUF file becomes an ordinary checkpoint, with its tokenizer and chat template.

transformers reads and dequantizes the file; of the file's own quantization nothing is left.

    python -m models.gguf FILE DTYPE TARGET     writes the checkpoint into the folder TARGET
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from models.base import ModelError, reported_as


def write_checkpoint(file: Path, dtype: str, target: Path) -> None:
    """Raises ModelError where transformers cannot read the file."""
    transformers.utils.logging.set_verbosity_error()
    with reported_as(f"{file.name} cannot be read as a model"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, torch_dtype=getattr(torch, dtype)
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # It has been dequantized: save_pretrained of transformers 5 would refuse it, and a reader would believe
    # the config.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        write_checkpoint(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except ModelError as error:
        sys.exit(str(error))
