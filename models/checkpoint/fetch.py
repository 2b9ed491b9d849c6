"""Finding and downloading a model: the folder of a checkpoint, its weights, and the hub's errors as one line
each.

`fetch` gives the worker a folder with everything but the weights, `fetch_weights` adds those; `plan` needs
only config.json. Works with huggingface_hub 0.36 and 2.x, needs no torch, and looks into no other file but
the headers of LoRA adapters. Whatever asks the hub changes settings of huggingface_hub in this process for
good (`_hub_errors`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from config import Config
from manifest import WEIGHTS, check_regular
from models.adapters import check_shapes
from models.checkpoint.split import parts_of
from models.errors import ModelError, first_line, named, progress_logged, reported_as

METADATA = ["*.json", "*.model", "*.jinja", "*.txt"]
TEMPLATES = "additional_chat_templates"  # a folder: further chat templates, such as one for tools
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NO_WEIGHTS = (
    f"holds no {ADAPTER_WEIGHTS}; an adapter_model.bin is not read, because it may run code: load it "
    "with peft, and serve what save_pretrained writes"
)
MAX_HEADER = 25_000_000  # bytes; that of a mixture of experts may have 5 million
OTHER_FORMAT = "consolidated"  # begins the names of Mistral's own files, which hold the same weights
OTHER_FORMATS = ["*/*", f"{OTHER_FORMAT}*"]  # as subfolders do
GGUF = re.compile(r".*\.gguf")
# In the names of GGUF files that are published beside a model: its part that reads images, an importance
# matrix, a draft model, a LoRA adapter, a vocabulary alone.
NO_MODEL = re.compile(
    r"(?i)mmproj|projector|(^|/)imatrix|imatrix\w*\.gguf$"
    r"|(^|[-._/])(clip|draft|eagle3?|lora|adapter|vocab)[-._]"
)
CANDIDATES = 4  # files that an error names
STATUSES = {
    401: "the hub rejects the token: give a valid one in HF_TOKEN, or none for a public model",
    403: "the hub denies access: give a token with read access in HF_TOKEN",
    429: "the hub's rate limit is reached: wait, or give a token in HF_TOKEN, which has a higher limit",
}


def fetch(config: Config, files: Sequence[str] = METADATA) -> tuple[Path, str | None]:
    """Returns the model's folder, and its commit on the hub; None for a local model. A local model stays
    where it is; whether the folder exists or holds a model is not checked. Of a model on the hub the folder,
    in the hub's cache, gets what matches `files`, its further chat templates and, with `trust_remote_code`,
    its Python code, but no weights.

    Of a model in GGUF, `owner/name:file.gguf` or a path, it returns the file, with its weights, instead of a
    folder: from the hub the first file of a model in several, after a download of all. Waits for downloads,
    and logs their progress. Raises ModelError for a download that fails or a file that is not there,
    ConfigError for a local path with a device, a FIFO or a socket.
    """
    if config.is_local:
        folder = Path(config.model_id).expanduser()
        check_regular(folder)
        return folder, None
    repository, _, file = config.model_id.partition(":")
    if file:
        parts = parts_of(Path(file))
        folder = _download(config, repository, config.revision, list(map(str, parts)))
        for part in parts:
            if not (folder / part).is_file():
                raise ModelError(f"{repository} holds no file {part}{gguf_hint(config, repository)}")
        return folder / parts[0], folder.name
    patterns = [*files, "*.py"] if config.trust_remote_code else files
    folder = _download(config, repository, config.revision, patterns)
    _download(config, repository, folder.name, [f"{TEMPLATES}/*.jinja"])
    return folder, folder.name


def list_files(config: Config, repository: str, pattern: re.Pattern[str]) -> list[str]:
    """Returns the paths of a repository's GGUF files that hold models, sorted: those whose names without
    folders match `pattern`, of a model in several files the first. Asks the hub or, if that fails, looks into
    the cache; an empty list: the hub has none. Raises ModelError if the hub fails and the cache has none
    either."""
    from huggingface_hub import HfApi

    try:
        with _hub_errors(repository, config.revision):
            # `list_repo_files` would try for 23 s where the hub is down.
            info = HfApi().model_info(repository, revision=config.revision)
        return matching([file.rfilename for file in info.siblings or ()], pattern)
    except ModelError:
        folder = _download(config, repository, config.revision, [])  # its copy in the cache
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        if found := matching(names, pattern):
            return found
        raise


def matching(names: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    """Returns the GGUF files of models among `names`, sorted: those whose names without folders match the
    pattern; of a model in several files only the first, also if `names` lacks it. Files that NO_MODEL names
    count only if there are no other GGUF files, of any name."""
    models = [name for name in names if GGUF.fullmatch(name) and not NO_MODEL.search(name)]
    found = {str(parts_of(Path(name))[0]) for name in models or names if pattern.fullmatch(Path(name).name)}
    return sorted(found)


def fetch_weights(config: Config, folder: Path, formats: Sequence[str] = WEIGHTS) -> Path:
    """Returns `folder`, which `fetch` returned, now with the weights: downloaded if necessary, in the first
    of `formats` that the model has. Does nothing for a local model or one in GGUF. Waits for the download,
    and logs its progress. Raises ModelError for a download that fails, and for a model without weights."""
    if config.is_local or config.is_gguf:
        return folder
    return _with_weights(config, config.model_id, folder, formats)


def fetch_checkpoint(config: Config, model_id: str, revision: str | None) -> Path:
    """Downloads another model of the hub than that of the settings, if necessary: the checkpoint that graphs
    were compiled from. Returns its folder, with its weights. Raises ModelError for a download that fails, and
    for a model without weights."""
    return _with_weights(config, model_id, _download(config, model_id, revision, METADATA), WEIGHTS)


def fetch_adapter(config: Config, source: str) -> Path:
    """Returns the folder of a LoRA adapter, with its two files if it comes from the hub and has them: the
    contents are not checked. source: an absolute path, or a repository on the hub, `owner/name` or
    `owner/name@revision`. Waits for the download. Raises ModelError if the download fails, ConfigError for a
    local path with a device, a FIFO or a socket."""
    if source.startswith("/"):
        check_regular(Path(source))
        return Path(source)
    repository, _, revision = source.partition("@")
    return _download(config, repository, revision or None, ["adapter_config.json", ADAPTER_WEIGHTS])


def adapter_shapes(config: Config, source: str) -> dict[str, list[int]]:
    """Returns the shapes of the tensors of a LoRA adapter by name, as peft saves it: A [rank, inputs], B
    [outputs, rank]. Only the header of the file is read, and downloaded if the file is not in the cache.

    source: an absolute path, or a repository on the hub, `owner/name` or `owner/name@revision`. Raises
    ModelError for an adapter that is not there, whose header is too long or broken, or whose tensors are no
    updates; ConfigError for a local path with a device, a FIFO or a socket.
    """
    if source.startswith("/"):
        return shapes_in(Path(source))
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, given = source.partition("@")
    revision = given or None
    with _hub_errors(repository, revision):
        cached = try_to_load_from_cache(repository, ADAPTER_WEIGHTS, config.huggingface_hub_cache, revision)
        if isinstance(cached, str):
            return shapes_in(Path(cached).parent)
        hub = HfApi()
        try:
            header = hub.parse_safetensors_file_metadata(repository, ADAPTER_WEIGHTS, revision=revision)
        except EntryNotFoundError:
            raise ModelError(f"{repository} {NO_WEIGHTS}") from None
    return check_shapes({name: tensor.shape for name, tensor in header.tensors.items()})


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """Returns the shapes of the tensors of the adapter in `folder`, by name. Reads the header of its
    safetensors file only. Raises ModelError for a file that is missing, has a header of more than MAX_HEADER
    bytes or cannot be read, and for tensors that are no updates; ConfigError for a device, a FIFO or a socket
    in the folder."""
    file = folder / ADAPTER_WEIGHTS
    check_regular(folder)
    with reported_as(f"{file.name} cannot be read"):
        if not file.exists():
            raise ModelError(f"the adapter {NO_WEIGHTS}")
        with file.open("rb") as opened:  # a long header would take long to read, and keep others waiting
            header_bytes = int.from_bytes(opened.read(8), "little")
        if header_bytes > MAX_HEADER:
            raise ModelError(
                f"{file.name} has a header of {header_bytes} bytes; at most {MAX_HEADER} are read"
            )
        with safe_open(file, "numpy") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return check_shapes(shapes)


def copy_metadata(folder: Path, target: Path) -> None:
    """Copies all files of a checkpoint's folder but weights (.safetensors, .bin), and its folder of chat
    templates, into the folder `target`, which has no such folder yet. Other folders are left out. Raises
    OSError."""
    if (folder / TEMPLATES).is_dir():
        shutil.copytree(folder / TEMPLATES, target / TEMPLATES)
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin"):
            shutil.copyfile(path, target / path.name)


def fetch_artifact(config: Config, folder: Path, subfolders: Sequence[str]) -> None:
    """Downloads these subfolders of a compiled model on the hub into its folder in the cache, which `fetch`
    returned; does nothing for a local model. A subfolder that the hub lacks is left out without an error.
    Raises ModelError if the download fails."""
    if not config.is_local:
        _download(config, config.model_id, folder.name, [f"{name}/*" for name in subfolders])


def _with_weights(config: Config, model_id: str, folder: Path, formats: Sequence[str]) -> Path:
    """Downloads the weights of a model in the first of these formats, patterns of names, that there is, and
    returns `folder`. folder: that of the model in the hub's cache, whose name is the commit. Raises
    ModelError where there is no such format, with the reason, and for a download that fails."""
    for pattern in formats:
        _download(config, model_id, folder.name, [pattern])
        if any(folder.glob(pattern)):
            return folder
    offline = ", not in the cache, and HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
    reason = f"there is no {' and no '.join(formats)}{offline or gguf_hint(config, model_id)}"
    raise ModelError(f"{model_id} holds no weights: {reason}")


def gguf_hint(config: Config, repository: str, pattern: re.Pattern[str] = GGUF) -> str:
    """Returns how to name a GGUF file of a model on the hub whose name matches, as the end of a sentence,
    with a few others; "" if there is none, or the hub does not answer. Example: "; for a GGUF file name it:
    --model-id owner/name:m-Q4_K_M.gguf; there are also m-Q8_0.gguf, 3 more"."""
    try:
        models = list_files(config, repository, pattern)
    except ModelError:
        return ""
    if not models:
        return ""
    hint = f"; for a GGUF file name it: --model-id {repository}:{models[0]}"
    others = models[1:CANDIDATES]
    if len(models) > CANDIDATES:
        others.append(f"{len(models) - CANDIDATES} more")
    return f"{hint}; there are also {', '.join(others)}" if others else hint


def _download(config: Config, model_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Returns the folder in the hub's cache of a model, with all files that match one of `patterns`; files
    that match none may be there, too. Files in folders and Mistral's own weights are left out, unless every
    pattern names a folder. revision: a branch, tag or commit; None: the default branch.

    Waits for the download, and logs its progress, unless a terminal shows huggingface_hub's bar. Without the
    network the folder is the copy in the cache, if there is one. Raises ModelError where the download fails.
    """
    from huggingface_hub import snapshot_download

    unwanted = None if all("/" in pattern for pattern in patterns) else OTHER_FORMATS
    wanted = {"allow_patterns": patterns, "ignore_patterns": unwanted}
    cache = config.huggingface_hub_cache
    measure = functools.partial(_measure, model_id, revision, cache, wanted)
    is_logged = not sys.stderr.isatty()  # where huggingface_hub draws a bar
    progress = progress_logged(f"downloading {model_id}", measure, is_logged)
    with _hub_errors(model_id, revision), progress:
        folder = snapshot_download(model_id, revision=revision, cache_dir=cache, **wanted)
    return Path(folder)


def _measure(model_id: str, revision: str | None, cache: str | None, wanted: dict[str, Any]) -> str:
    """Returns how much of a download is there, such as ": 120 of 480 MB (25 %)"; "" where the hub does not
    answer. Asks the hub how large the files are, and looks into the cache. Raises nothing.

    wanted: which files, as the arguments `allow_patterns` and `ignore_patterns` of `snapshot_download`.
    cache: the folder of the hub's cache; None: huggingface_hub's own.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import filter_repo_objects

    try:
        tree = HfApi().list_repo_tree(model_id, recursive=True, revision=revision)
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
        names = list(filter_repo_objects(sizes, **wanted))
        total = sum(sizes[name] for name in names)
        cached = [name for name in names if try_to_load_from_cache(model_id, name, cache, revision)]
        folder = Path(cache or constants.HF_HUB_CACHE, "models--" + model_id.replace("/", "--"))
        partial = sum(file.stat().st_size for file in folder.glob("blobs/*.incomplete"))
    except Exception:  # the download itself says what is wrong
        return ""
    done = min(partial + sum(sizes[name] for name in cached), total)
    return f": {done / 1e6:,.0f} of {total / 1e6:,.0f} MB ({100 * done // max(total, 1)} %)"


@contextlib.contextmanager
def _hub_errors(model_id: str, revision: str | None) -> Iterator[None]:
    """Turns what huggingface_hub raises in the body into a ModelError of one line, with the reason and what
    would help.

    Changes this process for good: huggingface_hub reads the token under TGI's older name HF_API_TOKEN, too,
    logs only errors, through the handlers of this server, and draws progress bars on a terminal only.
    """
    from huggingface_hub.utils import disable_progress_bars

    if token := os.environ.get("HUGGING_FACE_HUB_TOKEN") or os.environ.get("HF_API_TOKEN"):
        os.environ["HUGGING_FACE_HUB_TOKEN"] = token
    if not sys.stderr.isatty():
        disable_progress_bars()
    library = logging.getLogger("huggingface_hub")
    library.handlers.clear()  # its own handler would print everything a second time
    library.setLevel(logging.ERROR)
    with reported_as(f"{model_id} cannot be downloaded", lambda error: _explain(error, revision)):
        yield


# What the hub's errors mean, by their names in huggingface_hub.errors.
HUB_ERRORS = {
    "OfflineModeIsEnabled": "{not_cached}, and HF_HUB_OFFLINE is set; unset it, or give a local folder",
    "HFValidationError": "--model-id (MODEL_ID) and adapters have to be folders or hub ids: {cause}",
    "GatedRepoError": "it is gated: request access on its page, and give a token of that account in HF_TOKEN",
    "RepositoryNotFoundError": "the hub has no such model: check the spelling of --model-id (MODEL_ID) or of "
    "the adapter; if it is private, give a token with read access in HF_TOKEN",
    "RevisionNotFoundError": "it has no branch, tag or commit {revision!r}: check --revision (REVISION), or "
    "what follows the @ of the adapter",
}


def _explain(error: BaseException, revision: str | None) -> str:
    """Returns why a download failed and what would help, as one line, for anything that huggingface_hub 0.36
    or 2.x raises; for an unknown error its type and first line. revision: that of the settings, for the
    text."""
    from huggingface_hub import errors

    cause = error
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        cause = error.__cause__  # why the hub was not reached, and the cache was read
    status = getattr(getattr(cause, "response", None), "status_code", None)
    not_cached = "it is not in the cache"
    if hasattr(error, "snapshot_path"):
        not_cached = "its copy in the cache is incomplete"
    for kind, reason in HUB_ERRORS.items():
        if isinstance(cause, getattr(errors, kind)):
            return reason.format(not_cached=not_cached, cause=first_line(cause), revision=revision)
    if status:
        return STATUSES.get(status) or f"the hub answers with status {status}: try again later"
    if isinstance(cause, OSError) and cause.filename:
        return (
            f"{cause.filename} cannot be used by user {os.geteuid()} ({cause.strerror}); give that user "
            "the folder (chown), or another one with --huggingface-hub-cache (HF_HUB_CACHE) or HF_HOME"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{not_cached}, and the hub cannot be reached ({named(cause)}); "
            "check the network, or give a local folder"
        )
    return named(cause)
