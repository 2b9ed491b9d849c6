"""The folder with a model's `tokenizer.json`: the model's own, or one converted from a slow or sentencepiece tokenizer.

The web side reads `tokenizer.json` and nothing else. A conversion needs transformers, so it runs in a child process, once: the
result is kept in the model cache. Each tokenizer is tried out in a child process of the text layer, too, within limits of time
and memory. Knows nothing of chat templates.

    python -m models.tokenizer FOLDER TARGET     writes TARGET/tokenizer.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from config import Config
from manifest import read_json
from models.base import ModelError, reported_as
from models.cache import ModelCache, tokenizer_key, write_entry
from models.fetch import TOKENS
from run import HERE, ConfigError

CONVERSION_S, CHECK_S = 900, 120  # the check of one with 262,000 tokens takes 6 s
CHECK_BYTES = 4_000_000_000  # of address space; that of 262,000 tokens takes a tenth
SLOW = ("tokenizer.model", "vocab.json", "spiece.model")


class TokenizerFacts(NamedTuple):
    """A model's tokenizer, and what `text.py` finds out about it."""

    folder: Path
    eos_token_ids: list[int]  # that it names
    largest_id: int  # of the tokens of ordinary text


def tokenizer_folder(config: Config, folder: Path, scratch: Path) -> Path:
    """The converted tokenizer goes into `scratch` where the cache cannot be written. Raises ConfigError."""
    if (folder / "tokenizer.json").exists():
        return folder
    slow = next((name for name in SLOW if (folder / name).exists()), None)
    if slow is None:
        raise ConfigError(
            f"{folder} holds no tokenizer (tokenizer.json, or one to convert: tokenizer.model, vocab.json)"
        )

    def convert(target: Path) -> None:
        command = [sys.executable, "-m", "models.tokenizer", str(folder.absolute()), str(target)]
        _output(command, f"the tokenizer of {folder} ({slow}) cannot be converted: ", CONVERSION_S)
        write_entry(target, {"from": folder.name})

    return ModelCache(config).find_or_add(tokenizer_key(folder), convert, scratch)


def check_tokenizer(config: Config, folder: Path, scratch: Path) -> TokenizerFacts:
    """Finds or converts the tokenizer of a model, and has `text.py` try it out. Raises ConfigError, for one that takes too much
    time or memory too."""
    tokenizer_dir = tokenizer_folder(config, folder, scratch)
    given = [config.tokenizer_config_path] if config.tokenizer_config_path else []
    command = [sys.executable, "-m", "text.tokenizer", str(folder), str(tokenizer_dir), *given]
    return TokenizerFacts(tokenizer_dir, **json.loads(_output(command, "", CHECK_S, CHECK_BYTES)))


def _output(command: list[str], failure: str, seconds: int, memory: int | None = None) -> str:
    """What a child process prints, which has no access to the hub. Raises ConfigError: `failure`, and its last line or the
    limit that it exceeds."""
    # One heap and one thread: each takes a part of the address space, however little of it is used.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name not in TOKENS}
    limited = ["sh", "-c", 'ulimit -v "$0" 2>/dev/null; exec "$@"', str(memory // 1024)] if memory else []
    try:
        done = subprocess.run(
            [*limited, *command], capture_output=True, text=True, cwd=HERE, env=environment, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{failure}the tokenizer needs more than {seconds} s, so it cannot be served"
        ) from None
    if not done.returncode:
        return done.stdout
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if memory and (done.returncode < 0 or "MemoryError" in reason):
        reason = f"the tokenizer needs more than {memory / 1e9:g} GB of memory, so it cannot be served"
    raise ConfigError(f"{failure}{reason}")


def main(folder: Path, target: Path) -> None:
    import transformers

    with reported_as(f"{folder} cannot be read for its tokenizer"), tempfile.TemporaryDirectory() as view:
        for path in folder.iterdir():
            (Path(view) / path.name).symlink_to(path.absolute())
        written = read_json(folder / "tokenizer_config.json")
        if named := {name for name in written if name.endswith("_file") or name in ("vocab", "merges")}:
            # Files by paths of their own, which may be anywhere: transformers would make tokens of their lines.
            (Path(view) / "tokenizer_config.json").unlink()
            kept = {name: value for name, value in written.items() if name not in named}
            (Path(view) / "tokenizer_config.json").write_text(json.dumps(kept))
        tokenizer = transformers.AutoTokenizer.from_pretrained(view, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        sys.exit(str(error))
