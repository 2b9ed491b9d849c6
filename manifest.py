"""What a model folder says: its config.json and generation_config.json, and the files that may be opened.

A model may come from a stranger: nothing of its folder is opened before `check_files` has seen it. Knows no settings and no
packages.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run import ConfigError

MAX_ENTRIES = 100_000  # of a model folder; checking that many takes less than a second
# Of the files that are read whole, by name or else by suffix. The largest tokenizers that are published have 35 MB.
MAX_MB = {
    "config.json": 10,
    "generation_config.json": 10,
    "tokenizer_config.json": 10,
    "special_tokens_map.json": 10,
}
MAX_MB |= {"chat_template.json": 10, ".jinja": 1, ".json": 100, ".model": 100, ".txt": 100}
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

MAX_TOKEN_ID = 10**7 - 1
# The names of numbers in config.json, and the lowest and highest that a model can have. Lists have a number for each layer.
NUMBERS = {
    "vocab_size": (1, MAX_TOKEN_ID + 1),
    "hidden_size n_embd n_embed d_model": (1, 10**6),
    "num_hidden_layers n_layer n_layers num_layers": (1, 1000),
    "num_attention_heads n_head n_heads num_key_value_heads head_dim": (1, 10**5),
    "intermediate_size ffn_dim n_inner moe_intermediate_size": (0, 10**7),
    "num_experts num_local_experts n_routed_experts num_experts_per_tok": (0, 10**5),
    "num_labels": (0, 10**5),  # of a classifier; transformers names each of them
    "max_position_embeddings n_positions max_seq_len seq_length sliding_window": (-1, 10**9),  # -1: any
}
BOUNDS = {name: bounds for names, bounds in NUMBERS.items() for name in names.split()}

WEIGHTS = ("*.safetensors", "*.bin", "*.bin/*")
COMPUTED = 100_000_000  # parameters that need no file, such as tables of positions


@dataclass(frozen=True)
class Manifest:
    """What the `config.json` and `generation_config.json` of a checkpoint say."""

    model_type: str
    max_positions: int | None  # context length of the training, in tokens
    eos_token_ids: tuple[int, ...]
    is_compiled: bool = False  # for Neuron

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Reads a model folder. Raises ConfigError with the reason when it holds no model."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--model-id {folder}: there is no such folder")
        if not os.path.lexists(
            folder / "config.json"
        ):  # before the walk through a folder that holds something else
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        check_files(folder)
        config = read_json(folder / "config.json", required=True)
        if not isinstance(config.get("model_type"), str):
            raise ConfigError(f"{folder / 'config.json'} has no `model_type`, so the model cannot be loaded")
        check_numbers(config, folder / "config.json")
        eos: list[int] = []
        for source in (config, read_json(folder / "generation_config.json")):
            ids = source.get("eos_token_id")
            eos += [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]
        if impossible := [i for i in eos if not -1 <= i <= MAX_TOKEN_ID]:
            raise ConfigError(
                f"{folder}: eos_token_id is {impossible[0]!r:.50} and should be from 0 to {MAX_TOKEN_ID}"
            )
        text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        windows = (
            text_config.get(k)
            for k in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        )
        return cls(
            model_type=config["model_type"],
            max_positions=next((w for w in windows if isinstance(w, int) and w > 0), None),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            is_compiled="neuron" in config,
        )


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """A JSON object from a model folder, or `{}` without the file. Raises ConfigError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path.parent} is not a model folder: it has no {path.name}") from None
        return {}
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: bytes, JSON, and integers of 4,300 digits
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold a JSON object, not {type(data).__name__}")
    return data


def check_files(folder: Path) -> None:
    """Makes sure that everything in a model folder may be opened: regular files of limited size, none of them outside.

    Links may lead anywhere in the folder, as Kubernetes' do, and in a folder of the hub's cache to its model's other files.
    Raises ConfigError with the name of the first file that may not be opened.
    """
    root = Path(os.path.realpath(folder))
    cache = root.parent.parent  # models--OWNER--NAME/snapshots/COMMIT
    is_snapshot = root.parent.name == "snapshots" and cache.name.startswith("models--")
    try:
        for path in _files(root, cache if is_snapshot else root) if root.is_dir() else ():
            _check_size(path)
    except OSError as error:
        raise ConfigError(f"{error.filename} of the model cannot be read: {error.strerror}") from None


def _files(root: Path, inside: Path) -> Iterator[Path]:
    """All regular files below `root`, whose real paths are `inside`; opens none of them."""
    folders, seen, count = [root], {root}, 0
    while folders:
        with os.scandir(folders.pop()) as entries:
            paths = [Path(entry.path) for entry in itertools.islice(entries, MAX_ENTRIES)]
        count += len(paths)
        if count >= MAX_ENTRIES:
            raise ConfigError(
                f"{root} holds {MAX_ENTRIES} files or more; give a folder with nothing but the model"
            )
        for path in paths:
            real = Path(os.path.realpath(path)) if path.is_symlink() else path
            remedy = "copy the file into the folder, or remove the link"
            if inside not in real.parents and real != inside:
                raise ConfigError(f"{path} is a link to {real}, outside of the model's folder; {remedy}")
            try:
                mode = os.stat(real, follow_symlinks=False).st_mode
            except FileNotFoundError:
                raise ConfigError(f"{path} is a link to {real}, which does not exist; {remedy}") from None
            if stat.S_ISDIR(mode) and real not in seen:
                seen.add(real)
                folders.append(real)
            elif stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISDIR(mode):
                what = KINDS.get(stat.S_IFMT(mode), "a link to itself")
                raise ConfigError(f"{path} is {what}; a model consists of regular files, so remove it")


def _check_size(path: Path) -> None:
    limit = MAX_MB.get(path.name, MAX_MB.get(path.suffix, math.inf))
    size = path.stat().st_size / 1e6
    if size > limit:
        raise ConfigError(
            f"{path} has {size:.1f} MB and may have at most {limit} MB; a model's own is far smaller"
        )


def check_numbers(config: Mapping[str, Any], source: Path) -> None:
    """Raises ConfigError for a number of a config.json that no model can have. `source`: the file, for the message."""
    if not isinstance(config.get("text_config", {}), (dict, type(None))):
        raise ConfigError(
            f"{source}: text_config should be a JSON object, not {type(config['text_config']).__name__}"
        )
    for section in (config, *config.values()):  # such as text_config
        for name, value in section.items() if isinstance(section, dict) else ():
            low, high = BOUNDS.get(name, (None, None))
            for number in value if isinstance(value, list) else [value]:
                if (
                    low is not None
                    and number is not None
                    and not (type(number) is int and low <= number <= high)
                ):
                    raise ConfigError(
                        f"{source}: {name} is {number!r:.50} and should be a whole number from {low} to {high}"
                    )


def check_weights(parameters: int, folder: Path) -> None:
    """Raises ConfigError for a model of more parameters than the weight files in `folder` hold: memory for all would be taken
    before the first is missed."""
    files = {path for pattern in WEIGHTS for path in folder.glob(pattern)}
    stored = sum(path.stat().st_size for path in files)
    if parameters > stored + COMPUTED:  # a parameter takes at least a byte
        describes = f"config.json describes {parameters / 1e9:,.1f} billion parameters"
        raise ConfigError(
            f"{folder}: {describes}, more than its weight files of {stored / 1e9:,.3f} GB can hold"
        )
