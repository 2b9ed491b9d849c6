"""Routes that load and unload LoRA adapters at run time: vLLM's, and SageMaker's `/adapters`.

They need `--lora-folder`, and load from below that folder, or from the hub.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import gevent
from flask import Response
from msgspec import Struct

from api.http import errors
from api.http.engine_client import ADAPTER_TIMEOUT_S, SPREAD_S, EngineBusy
from api.http.errors import ApiError
from api.http.fields import require
from api.server import Server

MAX_ADAPTER_NAME = 200
# Without "..": huggingface_hub reads a file of its cache at the path that the revision is, whatever its size.
HUB_ID = re.compile(r"(?!.*\.\.)\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?", re.ASCII)


class LoadAdapter(Struct):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(Struct):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


class SageMakerAdapter(Struct):
    """Body of `POST /adapters`."""

    name: str
    src: str


def load_adapter(server: Server) -> Response:
    """Loads a LoRA adapter, as vLLM's route does, and returns the response. Waits up to ADAPTER_TIMEOUT_S for
    the worker. Raises the errors of `Server.read`, and ApiError: 403 without `--lora-folder`, 422 for a wrong
    name or source, 400 or 503 if the adapter cannot be loaded, 503 after that time."""
    request = server.read(LoadAdapter)
    source = _source_of(request.lora_path, "lora_path", server)
    return _load(server, request.lora_name, "lora_name", source, request.load_inplace)


def unload_adapter(server: Server) -> Response:
    """Unloads a LoRA adapter, as vLLM's route does, and returns the response. Waits up to ADAPTER_TIMEOUT_S
    until no request uses the adapter. Raises the errors of `Server.read` and of `unregister`."""
    return unregister(server, server.read(UnloadAdapter).lora_name)


def register(server: Server) -> Response:
    """As SageMaker's route, loads a LoRA adapter and returns the response. A loaded adapter of the same name
    is an error. Waits, and raises errors, as `load_adapter` does."""
    request = server.read(SageMakerAdapter)
    return _load(server, request.name, "name", _source_of(request.src, "src", server))


def _source_of(path: str, field: str, server: Server) -> str:
    """Returns the folder below `--lora-folder` that `path` names, else `path` itself if it is a hub id.
    Raises ApiError: 403 without `--lora-folder`, 422 for any other path. Whether the hub has the id is not
    asked. field: the name of the path's field in the request."""
    _check_allowed(server)
    root = Path(server.config.lora_folder).resolve()
    with contextlib.suppress(OSError, ValueError):  # of what no file can be named
        folder = (root / path.removeprefix("file://")).resolve()
        if folder.is_relative_to(root) and folder != root and folder.is_dir():
            return str(folder)
    detail = "must be a folder below that of --lora-folder, or an id on the hub, owner/name[@revision]"
    require(HUB_ID.fullmatch(path), field, detail, given=path[:80])
    return path


def _load(server: Server, name: str, field: str, source: str, in_place: bool = False) -> Response:
    """Loads the LoRA adapter `name` from `source`, and returns the response. Waits as `_change` does. Raises
    ApiError for a name that is empty, too long, not printable or the model's own, and if the adapter cannot
    be loaded.

    field: the field of the request that has `name`. in_place: a loaded adapter of this name is replaced; else
    it is an error.
    """
    fits = 0 < len(name) <= MAX_ADAPTER_NAME and name.isprintable() and name == name.strip()
    require(
        fits, field, f"must be a name of at most {MAX_ADAPTER_NAME} printable characters", given=name[:80]
    )
    is_free = name not in server.config.names_of_model
    require(is_free, field, "must not be a name that requests have for the model itself", given=name)
    return _change(server, f"LoRA adapter '{name}' added successfully.", name, source, in_place)


def unregister(server: Server, name: str) -> Response:
    """Unloads the LoRA adapter `name`, and returns the response. Waits up to ADAPTER_TIMEOUT_S until no
    request uses the adapter; new requests do not find it meanwhile. Raises ApiError: 403 without
    `--lora-folder`, 404 if the adapter is not loaded, 503 if it is still in use after that time: it is then
    unloaded later. Raises the other errors of `_change`, too."""
    _check_allowed(server)
    if name not in server.served.info.adapters:
        raise errors.unknown_model(f"The LoRA adapter {name[:80]!r} is not loaded")
    return _change(server, f"LoRA adapter '{name}' removed successfully.", name)


def _check_allowed(server: Server) -> None:
    if not server.config.lora_folder:
        what = "LoRA adapters cannot be changed at run time here: --lora-folder (LORA_FOLDER) allows it"
        raise ApiError(403, "forbidden", what)


def _change(server: Server, success: str, *change: Any) -> Response:
    """Changes an adapter, and returns a response with the text `success`. Waits up to ADAPTER_TIMEOUT_S for
    the worker, then SPREAD_S, until the other API server processes know of the change.

    Raises ApiError: 503 if the worker does not answer in that time (the change goes on) or the fault is the
    machine's, 400 if the adapter is at fault. Raises EngineError if the worker is not ready. change: the
    arguments of `EngineClient.change_adapter`.
    """
    try:
        changed = server.engine.change_adapter(*change)
    except EngineBusy:
        what = f"The LoRA adapter is still not changed after {ADAPTER_TIMEOUT_S:g} s, and will be if it can"
        raise ApiError(503, "unavailable", what) from None
    if changed.error:
        kind = (503, "unavailable") if changed.is_of_machine else (400, "validation")
        raise ApiError(*kind, f"The LoRA adapter cannot be changed: {changed.error}")
    gevent.sleep(SPREAD_S)  # the other API server processes know of the change by then
    return Response(f"Success: {success}", mimetype="text/plain")
