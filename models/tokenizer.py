"""The folder with a model's `tokenizer.json`: the model's own, or one converted from a slow or sentencepiece tokenizer.

The web side reads `tokenizer.json` and nothing else. A conversion needs transformers, so it runs in a child process, once: the
result is kept in the model cache. Knows nothing of chat templates.

    python -m models.tokenizer FOLDER TARGET     writes TARGET/tokenizer.json
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from config import HERE, Config, ConfigError
from models.base import ModelError, reported_as
from models.cache import ModelCache, tokenizer_key, write_entry

SLOW = ("tokenizer.model", "vocab.json", "spiece.model")


def tokenizer_folder(config: Config, folder: Path, scratch: Path) -> Path:
    """The converted tokenizer goes into `scratch` where the cache cannot be written. Raises ConfigError."""
    if (folder / "tokenizer.json").exists():
        return folder
    slow = next((name for name in SLOW if (folder / name).exists()), None)
    if slow is None:
        raise ConfigError(f"{folder} holds no tokenizer (tokenizer.json, or one to convert: tokenizer.model, vocab.json)")

    def convert(target: Path) -> None:
        command = [sys.executable, "-m", "models.tokenizer", str(folder.absolute()), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ConfigError(f"the tokenizer of {folder} ({slow}) cannot be converted: {reason}")
        write_entry(target, {"from": folder.name})

    return ModelCache(config).find_or_add(tokenizer_key(folder), convert, scratch)


def main(folder: Path, target: Path) -> None:
    import transformers

    with reported_as(f"{folder} cannot be read for its tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        sys.exit(str(error))
