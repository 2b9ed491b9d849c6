"""LoRA adapters that are loaded and unloaded while requests run.

An adapter is read in a thread, and joins the others between two steps. One that is unloaded is not known to
new requests from then on; its weights are freed when the last request with it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec.structs import replace

from engine.link import Link
from engine.request import Request
from models.adapters import Adapters, Updates
from models.base import ModelError
from protocol import AdapterChange, AdapterChanged, ModelInfo
from run import ConfigError

logger = logging.getLogger("worker")


class AdapterChanges:
    """Changes the adapters of a model. `read` returns the updates of an adapter by its name and source;
    `info` names those that are served."""

    def __init__(self, adapters: Adapters, read: Callable[[str, str], Updates], link: Link, info: ModelInfo):
        self._adapters = adapters
        self._read = read
        self._link = link
        self._info = info
        self._thread = ThreadPoolExecutor(1, "worker-adapters")
        self._loading: list[tuple[bytes, AdapterChange, Future[Updates]]] = []
        self._unloading: list[tuple[bytes, AdapterChange, int]] = []  # with the number

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being downloaded or read, in threads that a normal exit would wait for."""
        return bool(self._loading)

    def begin(self, peer: bytes, change: AdapterChange) -> None:
        """Begins a change that an API server process asks for."""
        loading = [other.name for _peer, other, _job in self._loading]
        if not change.source and change.name in self._adapters.numbers:
            number = self._adapters.numbers.pop(change.name)
            self._unloading.append((peer, change, number))
            self._announce({name: at for name, at in self._info.adapters.items() if name != change.name})
            self._link.interrupt()
        elif not change.source:
            self._end(peer, change, f"the LoRA adapter {change.name} is not loaded")
        elif change.name in (self._info.model_name, *self._adapters.numbers, *loading):
            self._end(peer, change, f"{change.name} is served already: unload it, or give another name")
        else:
            job = self._thread.submit(self._read, change.name, change.source)
            self._loading.append((peer, change, job))
            job.add_done_callback(lambda _job: self._link.interrupt())

    def apply(self, requests: Iterable[Request]) -> None:
        """Between two steps: adds what has been read, and frees what no request has any more."""
        if not (self._loading or self._unloading):
            return
        for each in [each for each in self._loading if each[2].done()]:
            self._loading.remove(each)
            self._add(*each)
        running = {request.adapter for request in requests}
        for each in [each for each in self._unloading if each[2] not in running]:
            self._unloading.remove(each)
            peer, change, number = each
            self._adapters.remove(number)
            self._end(peer, change)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _add(self, peer: bytes, change: AdapterChange, job: Future[Updates]) -> None:
        try:
            self._adapters.add(change.name, job.result())
        except (ModelError, ConfigError) as error:
            self._end(peer, change, str(error))
        except Exception as error:
            logger.exception("the LoRA adapter %s cannot be loaded", change.name)
            self._end(peer, change, f"it cannot be loaded: {error}")
        else:
            self._announce({**self._info.adapters, change.name: change.source})
            self._end(peer, change)

    def _announce(self, adapters: dict[str, str]) -> None:
        self._info = replace(self._info, adapters=adapters)
        self._link.announce(self._info)

    def _end(self, peer: bytes, change: AdapterChange, error: str = "") -> None:
        if not error:
            logger.info("%s the LoRA adapter %s", "Loaded" if change.source else "Unloaded", change.name)
        self._link.send(peer, AdapterChanged(change.id, error))
