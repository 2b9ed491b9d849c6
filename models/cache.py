"""The cache of converted models and tokenizers (`--model-cache`), and the child process that converts them.

An entry is a folder named by a key: a hash of everything its contents depend on. It is written to a temporary
folder and renamed, so a visible entry is complete. The OpenVINO engine and `checkpoint/source.py` look for an
entry before they convert. This file reads only the `entry.json` of an entry, and does not import torch.

    FOLDER/model-<key>/        entry.json, and model.xml and model.bin of OpenVINO where the model converts;
                               vision.xml and vision.bin where it reads images
    FOLDER/tokenizer-<key>/    entry.json, tokenizer.json
    FOLDER/lock                held while something is converted: one conversion at a time
    FOLDER/*.lock              held while a process uses the entry of that name, which then stays
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config import Config
from manifest import Manifest, check_regular
from models.child import ChildError, run_module
from models.errors import ModelError, is_out_of_memory
from run import HERE, ConfigError, Json, check_private

logger = logging.getLogger("model")

SHIPPED = HERE / "demo" / "converted"  # the cache that is filled when the image is built
ENTRY = "entry.json"
TEMPORARY = ".neuron-textgen-"  # beginning of the names of unfinished folders and their locks
# A larger file is identified by its size and modification time: hashing weights would take seconds.
HASHED_BYTES = 64_000_000
# Exit codes of the child process, its reason in the last line of its output. ENOMEM: it had no memory.
CANNOT_SERVE = 2
CANNOT_WRITE = 3
CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGILL)  # which the next conversion would meet again
# Compresses weights; needed only by a conversion.
NNCF = "nncf==3.4.0"
# Raise a version with any change of what a conversion writes, or of how it is read: entries of other versions
# are then ignored. CONVERTER_VERSION is that of models, READER_VERSIONS are those of tokenizers and of the
# checkpoints that gguf.py, split.py, lora.py and dequantize.py write.
CONVERTER_VERSION = 8
# These are for models that read images, whose entries hold a vision tower as well, and compressed weights.
VISION_VERSION = 6
COMPRESSION_VERSION = 5
READER_VERSIONS = {"gguf": 5, "gguf_folder": 2, "split": 1, "lora": 4, "dequantize": 3, "tokenizer": 7}
UNTIL_EXIT = contextlib.ExitStack()  # locks and temporary folders that this process keeps until its end
atexit.register(UNTIL_EXIT.close)


class NotConverted(Exception):
    """OpenVINO cannot serve a model; the message says why, as a part of a log line."""


class CannotWrite(OSError):
    """The folder that a conversion fills cannot be written, such as on a full disk."""


def ends_conversion(error: Exception) -> bool:
    """Whether an error says nothing about how a model converts: no entry is written for it."""
    return isinstance(error, (ModelError, ConfigError, OSError)) or is_out_of_memory(error)


class ModelCache:
    """The cache of converted models (--model-cache), a folder of entries. Those that were not used for
    longest are removed beyond `model_cache_size` GB. Raises ConfigError if another user owns the folder or
    may write to it."""

    def __init__(self, config: Config):
        self.folder = Path(config.model_cache)
        self._size_gb = config.model_cache_size
        self._damaged: set[Path] = set()  # entries that cannot be removed
        check_private(self.folder, f"--model-cache {config.model_cache} (MODEL_CACHE)")

    def find(self, key: str | None) -> Path | None:
        """Returns the folder of the entry `key`, in SHIPPED or in the cache; None: there is no such entry, or
        `key` is None. Marks an entry of the cache as used now. One of SHIPPED is never evicted, and stays as
        it is. Raises ConfigError for an entry with files that are not regular."""
        for folder in (SHIPPED, self.folder) if key else ():
            entry = folder / key
            # False, unlike `Path.is_file`, in a folder that cannot be looked at.
            if os.path.isfile(entry / ENTRY) and entry not in self._damaged:
                check_regular(entry)
                if folder != SHIPPED:
                    mark_used(entry / ENTRY)
                return entry
        return None

    def remove(self, entry: Path) -> None:
        """Removes a damaged entry. If its folder cannot be written, as that of SHIPPED in a container, the
        entry stays, and `find` no longer returns it."""
        shutil.rmtree(entry, ignore_errors=True)
        if entry.exists():
            self._damaged.add(entry)

    def hold(self, key: str, convert: Callable[[Path], None], until: contextlib.ExitStack) -> Path:
        """Does what `find_or_add` does, and keeps `evict`, of any process, from removing the entry until the
        stack `until` is closed. Returns its folder. In a cache that cannot be written, nothing keeps the
        entry."""
        folder = self.find_or_add(key, convert, until)
        lock = (self.folder / key).with_suffix(".lock")
        with contextlib.suppress(OSError):  # a read-only cache
            until.enter_context(locked(lock, "removing an entry of", is_shared=True))
        return folder

    def find_or_add(
        self,
        key: str | None,
        convert: Callable[[Path], None],
        until: contextlib.ExitStack = UNTIL_EXIT,
    ) -> Path:
        """Returns the folder of the entry `key`, as `find` does. If there is no such entry, `convert`
        fills the folder: one of several processes converts, and the others wait for it, however long it
        takes. After a conversion old entries are removed until the cache fits into its limit.

        If the cache cannot be written, or `key` is None, a warning says so, and `convert` fills a temporary
        folder, which is removed when the stack `until` is closed. Raises whatever `find` and `convert` raise.
        An OSError of `convert` says that it cannot write into the folder: `convert` is called again, with the
        temporary folder.
        """
        reason: object = "its code comes from another repository, which may change at any time"
        try:
            if key:
                return self.find(key) or self._convert_once(key, convert)
        except OSError as error:
            reason = error
        logger.warning(
            "The converted files cannot be kept, so the next startup converts them again: %s", reason
        )
        # The folder of a run is removed even if this process is killed.
        scratch = Path(tempfile.mkdtemp(dir=os.environ.get("NEURON_TEXTGEN_RUN_DIR")))
        until.callback(shutil.rmtree, scratch, ignore_errors=True)
        convert(scratch)
        return scratch

    def _convert_once(self, key: str, convert: Callable[[Path], None]) -> Path:
        """Returns the folder of the entry `key`. Unless another process has added the entry meanwhile,
        `convert` fills the folder, and `evict` then makes room. Only one process converts at a time, and the
        others wait; but of LoRA adapters several may be converted at a time, each by one process. Raises
        OSError if the cache cannot be written, and whatever `convert` raises."""
        # Adapters are small, and those of requests may be read at the same time.
        lock = f"{key}.making" if key.startswith("lora-") else "lock"
        with locked(self.folder / lock, "converting a model into"):
            if entry := self.find(key):
                return entry
            with renamed_when_complete(self.folder / key) as new:
                convert(new)
            evict(self.folder.glob(f"*-*/{ENTRY}"), self._size_gb, "--model-cache-size (MODEL_CACHE_SIZE)")
            return self.folder / key


@contextlib.contextmanager
def locked(path: Path, doing: str | None, is_shared: bool = False) -> Iterator[None]:
    """Holds the lock file `path` of a cache, or of an entry, which `evict` then leaves alone. Makes its
    folder. Waits, without a limit, while other processes hold the lock; several may hold it at once if all
    have `is_shared`. One that holds it alone removes the file at its end.

    doing: what any process that holds this lock does in its folder, for the log line of those that wait, such
    as "converting a model into"; None: do not wait. Raises BlockingIOError, an OSError, if another process
    holds the lock and `doing` is None; another OSError if the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    is_held = False
    while not is_held:
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if doing is None:
                    raise
                logger.info("Another process is %s %s: waiting for it", doing, path.parent)
                fcntl.flock(lock, kind)
            # Not of a file that the process before has removed: the next one makes another.
            is_held = os.fstat(lock.fileno()).st_nlink > 0
            if is_held:
                try:
                    yield
                finally:
                    if not is_shared:
                        path.unlink(missing_ok=True)


def mark_used(record: Path) -> None:
    """Makes now the time of the last use of an entry: that of `record`, a file in the entry. Does nothing in
    a read-only cache."""
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(record)


def evict(records: Iterable[Path], size_gb: float, setting: str) -> None:
    """Removes the least recently used entries of a cache until the others fit into `size_gb`, and logs each.
    The entry that was used last, which was just made, always stays, and so does an entry whose lock is held.

    records: a file of each entry; its folder is the entry, and its time that of the last use. setting: the
    name of the limit, for the log.
    """
    entries = []  # time of the last use, folder, bytes
    for record in records:
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            size = sum(file.stat().st_size for file in record.parent.rglob("*"))
            entries.append((record.stat().st_mtime, record.parent, size))
    total = 0
    for place, (_used, folder, size) in enumerate(sorted(entries, reverse=True)):
        total += size
        if place > 0 and total > size_gb * 1e9:
            _remove_if_free(folder, f": the cache exceeds {setting}")


@contextlib.contextmanager
def renamed_when_complete(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which replaces `target` when the body ends: half a model
    would be taken for a whole one. If the body raises, the temporary folder is removed and `target` stays as
    it was. Removes the temporary folders of killed processes first. Raises OSError if the folder cannot be
    made or renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in {path.with_suffix(".new") for path in target.parent.glob(f"{TEMPORARY}*")}:
        _remove_if_free(folder, ", which an interrupted process left")
    new = target.with_name(f"{TEMPORARY}{secrets.token_hex(8)}.new")
    with locked(new.with_suffix(".lock"), "clearing"):  # it says that this process lives
        new.mkdir(0o755)
        try:
            yield new
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _remove_if_free(folder: Path, why: str) -> None:
    """Removes `folder` and logs it, unless a process holds its lock file, or another user owns that file.
    Does not wait. why: the end of the log line."""
    with (
        contextlib.suppress(BlockingIOError, PermissionError),
        locked(folder.with_suffix(".lock"), doing=None),
    ):
        logger.info("Removing %s%s", folder, why)
        shutil.rmtree(folder, ignore_errors=True)


def cache_key(config: Config, folder: Path, manifest: Manifest) -> str | None:
    """Returns the key of a checkpoint's entry; None if `trust_remote_code` lets its code come from another
    repository, which may change at any time. Reads the files of a local model to hash them. config: with a
    dtype, as `with_dtype` returns it. Raises ConfigError for a file that cannot be read.

    The key depends on the checkpoint, the settings that a conversion reads, and the versions of the packages
    and of the converter. The CPU is not part of it: an entry holds a portable graph, which OpenVINO compiles
    at every startup.
    """
    code = manifest.config_json.get("auto_map") if config.trust_remote_code else None
    if "--" in json.dumps(code):  # "owner/name--module.Class"
        return None
    checkpoint = [folder.name, config.model_id]  # a commit of a hub model
    if config.is_local:
        checkpoint = identify(folder, ("config.json", "*.safetensors*", "*.py"))
    versions = [installed(package) for package in ("openvino", "transformers", "torch")]
    compressed = [config.quantize, NNCF, COMPRESSION_VERSION] if config.quantize else None
    depends_on = [checkpoint, config.dtype, compressed, code is not None, versions, CONVERTER_VERSION]
    if manifest.reads_images:
        depends_on += [dict(manifest.processor_config), VISION_VERSION]
    return f"model-{digest(depends_on)}"


def run_converter(arguments: list[str], config: Config) -> None:
    """Runs models/convert.py with these arguments in a child process, and waits for its end: its imports and
    memory are then released. The child logs to the stderr of this process. config: goes to its standard
    input.

    Raises ConfigError for a model that no engine can serve or that needs more memory, CannotWrite if the
    child cannot write its files, NotConverted if the child crashes (CRASHES), RuntimeError for any other
    failure.
    """
    try:
        run_module(
            ["models.convert", *arguments],
            stdin=config.to_json(),
            logs_to_stderr=True,
            OMP_WAIT_POLICY="PASSIVE",  # PyTorch's threads would use cores while they wait for each other
        )
    except ChildError as error:
        if error.code == CANNOT_SERVE:
            raise ConfigError(str(error)) from None
        if error.code == CANNOT_WRITE:
            raise CannotWrite(str(error)) from None
        if error.code in (errno.ENOMEM, -signal.SIGKILL):
            how = "ran out of memory" if error.code == errno.ENOMEM else "was killed (SIGKILL)"
            raise ConfigError(
                f"the conversion of {config.model_name} {how}: it needs 1 GB and 1.2 to 2 times the "
                "checkpoint's size; add memory, or convert it on a larger machine (python -m models.convert "
                "--ahead) into the same --model-cache (MODEL_CACHE)"
            ) from None
        if -error.code in CRASHES:
            crash = signal.Signals(-error.code).name
            raise NotConverted(f"the conversion crashed ({crash})") from None
        raise RuntimeError(f"the conversion failed: {error}") from None


def write_entry(folder: Path, facts: Json) -> None:
    """Writes the facts of an entry; a folder without them is no entry."""
    (folder / ENTRY).write_text(json.dumps(facts))


def write_rejection(folder: Path, why: str) -> None:
    """Makes an entry that of a model that does not convert, for the reason `why`: removes its graph, and
    writes the reason under "refused". The key of the entry has the versions of OpenVINO and of the converter,
    so other versions try again."""
    for path in folder.glob("model.*"):
        path.unlink()
    write_entry(folder, {"refused": why})


def read_entry(folder: Path) -> Json:
    """Returns the facts of an entry, as `write_entry` wrote them: {"refused": why} for a model that does not
    convert."""
    return json.loads((folder / ENTRY).read_text())


def identify(folder: Path, patterns: tuple[str, ...]) -> list[tuple]:
    """Returns what tells the matching files of a folder from others: name, size and SHA-256 of each, sorted
    by path. Instead of the SHA-256 a file of more than HASHED_BYTES has the time of its last change, in whole
    seconds, as image layers keep it. patterns: of names, as for `glob`. Raises ConfigError for a file that
    cannot be read."""
    found = []
    try:
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
            status = path.stat()
            size, contents = status.st_size, int(status.st_mtime)
            if size <= HASHED_BYTES:
                contents = hashlib.sha256(path.read_bytes()).hexdigest()
            found.append((path.name, size, contents))
    except OSError as error:  # a link to a file that is gone, a folder, no right to read
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    return found


def installed(package: str) -> str | None:
    """Returns the version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def digest(value: Any) -> str:
    """Returns 32 hex digits over a value that JSON can hold. The order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
