"""What is checked before anything is loaded: a model folder's files, the numbers of its config.json, the machine's limits.

A model may come from a stranger: nothing of its folder is opened before `check_files` has seen it. Owns `ConfigError`, and the
lines that explain a full disk or too low a limit of this process. Knows no settings and no packages.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_ENTRIES = 100_000  # of a model folder; checking that many takes less than a second
# Of the files that are read whole, by name or else by suffix. The largest tokenizers that are published have 35 MB.
MAX_MB = {"config.json": 10, "generation_config.json": 10, "tokenizer_config.json": 10, "special_tokens_map.json": 10}
MAX_MB |= {"chat_template.json": 10, ".jinja": 1, ".json": 100, ".model": 100, ".txt": 100}
KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

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

SOCKET = "worker.sock"  # in the folder of a run
MAX_SOCKET_NAME = 107  # bytes; of the kernel
MIN_FILES = 256  # open files of a process that serves a few connections
MIN_ADDRESS_SPACE = 2_000_000_000  # bytes; the demonstration model takes 1.4 GB
OTHER_FOLDERS = "name another folder with TMPDIR, --model-cache (MODEL_CACHE) or NUMBA_CACHE_DIR"
REMEDIES = {
    errno.ENOSPC: f"free space, or {OTHER_FOLDERS}",
    errno.EDQUOT: f"free space, or {OTHER_FOLDERS}",
    errno.EROFS: OTHER_FOLDERS,
    errno.ENAMETOOLONG: OTHER_FOLDERS,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "use a machine or container with more memory, or raise its limit (ulimit -v)",
}


class ConfigError(Exception):
    """A setting, a model folder or a machine that cannot be used; the message is one line for the user."""


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
            raise ConfigError(f"{root} holds {MAX_ENTRIES} files or more; give a folder with nothing but the model")
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
        raise ConfigError(f"{path} has {size:.1f} MB and may have at most {limit} MB; a model's own is far smaller")


def check_numbers(config: Mapping[str, Any], source: Path) -> None:
    """Raises ConfigError for a number of a config.json that no model can have. `source`: the file, for the message."""
    if not isinstance(config.get("text_config", {}), (dict, type(None))):
        raise ConfigError(f"{source}: text_config should be a JSON object, not {type(config['text_config']).__name__}")
    for section in (config, *config.values()):  # such as text_config
        for name, value in section.items() if isinstance(section, dict) else ():
            low, high = BOUNDS.get(name, (None, None))
            for number in value if isinstance(value, list) else [value]:
                if low is not None and number is not None and not (type(number) is int and low <= number <= high):
                    raise ConfigError(f"{source}: {name} is {number!r:.50} and should be a whole number from {low} to {high}")


def check_weights(parameters: int, folder: Path) -> None:
    """Raises ConfigError for a model of more parameters than the weight files in `folder` hold: memory for all would be taken
    before the first is missed."""
    files = {path for pattern in WEIGHTS for path in folder.glob(pattern)}
    stored = sum(path.stat().st_size for path in files)
    if parameters > stored + COMPUTED:  # a parameter takes at least a byte
        describes = f"config.json describes {parameters / 1e9:,.1f} billion parameters"
        raise ConfigError(f"{folder}: {describes}, more than its weight files of {stored / 1e9:,.3f} GB can hold")


def check_limits(run_dir: Path) -> None:
    """Raises ConfigError where the limits of this process are too low for any model. `run_dir`: where its socket is to be."""
    excess = len(os.fsencode(run_dir / SOCKET)) - MAX_SOCKET_NAME
    if excess > 0:
        folder = run_dir.parent
        raise ConfigError(f"{folder}: the name is {excess} bytes too long for a folder with a socket; name another with TMPDIR")
    for kind, least, what in (
        (resource.RLIMIT_NOFILE, MIN_FILES, "open files (ulimit -n)"),
        (resource.RLIMIT_AS, MIN_ADDRESS_SPACE, "bytes of address space (ulimit -v)"),
    ):
        limit, _hard = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and limit < least:
            raise ConfigError(f"this process may have {limit} {what}, and the server needs at least {least}; raise the limit")


def explained(error: OSError | MemoryError, where: str | None = None) -> str | None:
    """One line: which resource of the machine is used up, and what to do. None: no such error. `where`: the file, where the
    error does not name it."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number not in REMEDIES:
        return None
    file = where or getattr(error, "filename", None)
    return f"{f'{file}: ' if file else ''}{os.strerror(number)}; {REMEDIES[number]}"
