"""The cache of converted models and tokenizers (`--model-cache`), and the child process that converts them.

An entry is a folder named by a key: a hash of everything its contents depend on. It is written beside its final place and
renamed, so an entry that can be seen is complete. `cpu.py` and `tokenizer.py` ask here for an entry before they convert.
This file knows nothing of what is in an entry but its `entry.json`, and imports neither numpy nor torch.

    FOLDER/model-<key>/        entry.json, and model.xml and model.bin of OpenVINO where the model converts
    FOLDER/tokenizer-<key>/    entry.json, tokenizer.json
    FOLDER/lock                held while something is converted: one conversion at a time
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config import HERE, VERSION, Config, ConfigError, read_json

logger = logging.getLogger("model")

ENTRY = "entry.json"
HASHED_BYTES = 64_000_000  # a larger file is identified by its size and modification time: hashing weights would take seconds
CANNOT_SERVE, CANNOT_WRITE = 2, 3  # exit codes of the child process, its reason in the last line of its output


class ModelCache:
    """A folder of entries, at most `size_gb` GB of them. Raises ConfigError where others may write into the folder."""

    def __init__(self, folder: Path, size_gb: float):
        self.folder, self._size_bytes = folder.expanduser().absolute(), size_gb * 1e9
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            status = self.folder.stat()
            where = f"--model-cache {folder} (MODEL_CACHE)"
            if status.st_uid != os.geteuid():
                raise ConfigError(
                    f"{where} belongs to user {status.st_uid}, not to user {os.geteuid()}; give a folder of its own"
                )
            if status.st_mode & 0o022:
                raise ConfigError(f"{where} can be written to by other users; chmod 700 it, or give another folder")

    @classmethod
    def of(cls, config: Config) -> ModelCache:
        return cls(Path(config.model_cache), config.model_cache_size)

    def find(self, key: str) -> Path | None:
        """The entry's folder, marked as used now."""
        entry = self.folder / key
        if not (entry / ENTRY).is_file():
            return None
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(entry / ENTRY)
        return entry

    def remove(self, key: str) -> None:
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def find_or_add(self, key: str, convert: Callable[[Path], None]) -> Path:
        """The entry's folder; where there is none, `convert` fills a new one. Of several processes one converts, and the
        others wait for it. Raises OSError where the cache cannot be written, and whatever `convert` raises."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            entry = self.find(key)
            if entry:
                return entry
            for abandoned in self.folder.glob(".new-*"):  # of a conversion that was killed: nobody else holds the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            new = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
            try:
                convert(new)
                shutil.rmtree(self.folder / key, ignore_errors=True)  # an incomplete entry, which `find` does not see
                new.rename(self.folder / key)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            self._evict(keep=key)
            return self.folder / key

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("Another process is converting a model into %s: waiting for it", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _evict(self, keep: str) -> None:
        """Removes the least recently used entries until the rest fit. The entry just made always stays."""
        used = []
        for path in self.folder.glob(f"*-*/{ENTRY}"):
            size = sum(file.stat().st_size for file in path.parent.iterdir())
            used.append((path.parent.name != keep, -path.stat().st_mtime, size, path.parent))
        total = 0
        for _is_older, _age, size, entry in sorted(used):
            total += size
            if total > self._size_bytes and entry.name != keep:
                logger.info(
                    "Removing %s from the model cache: it holds more than --model-cache-size (MODEL_CACHE_SIZE)", entry.name
                )
                shutil.rmtree(entry, ignore_errors=True)


def model_key(config: Config, folder: Path, dtype: str) -> str:
    """Names the entry of a checkpoint. The instruction sets of the CPU are not part of it: an entry holds a portable graph,
    which OpenVINO compiles at every start."""
    runs_code = config.trust_remote_code and "auto_map" in read_json(folder / "config.json")
    return "model-" + _digest(
        [folder.name, config.model_id] if not config.is_local else _identify(folder, ("config.json", "*.safetensors*", "*.py")),
        [dtype, config.quantize, runs_code, *map(_version, ("openvino", "transformers", "torch", "nncf"))],
        _identify(HERE / "models", ("cpu.py", "convert.py")),  # stands for our version: what they write differs with it
    )


def tokenizer_key(folder: Path) -> str:
    """Names the entry of the tokenizer that was converted from the model's in `folder`."""
    return "tokenizer-" + _digest(_identify(folder, ("*.json", "*.model", "*.txt")), [VERSION, _version("transformers")])


def run_converter(arguments: list[str], config: Config | None = None) -> None:
    """Runs `models.convert` in a child process, so that what it imports and loads is gone when it is done.

    Raises ConfigError for what cannot be served at all, OSError where the child cannot write, RuntimeError where it dies.
    """
    command, text = [sys.executable, "-m", "models.convert", *arguments], config.to_json() if config else ""
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, cwd=HERE)
    reason = (done.stdout.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode == CANNOT_SERVE:
        raise ConfigError(reason)
    if done.returncode == CANNOT_WRITE:
        raise OSError(reason)
    if done.returncode:
        raise RuntimeError(f"the conversion ended with code {done.returncode}")


def write_entry(folder: Path, facts: dict[str, Any]) -> None:
    (folder / ENTRY).write_text(json.dumps(facts))


def read_entry(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ENTRY).read_text())


def _identify(folder: Path, patterns: tuple[str, ...]) -> list[tuple]:
    """Names, sizes and contents of the files that match; of large ones the time of the last change instead of the contents."""
    found = []
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        status = path.stat()
        small = status.st_size <= HASHED_BYTES
        contents = hashlib.sha256(path.read_bytes()).hexdigest() if small else status.st_mtime_ns
        found.append((path.name, status.st_size, contents))
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
