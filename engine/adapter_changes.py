"""LoRA adapters that are loaded and unloaded while requests run.

An adapter is read in a thread, and joins the others between two steps. One that is unloaded is not known to
new requests from then on; its weights are freed when the last request with it has ended. So are those of one
that another replaces under its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec.structs import replace

from engine.link import Link
from engine.request import Request
from models.adapters import Adapters, Updates
from models.base import ModelError, named
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
        self._loading: list[tuple[bytes, AdapterChange, Future[Updates]]] = []  # read in this order
        self._unloading: list[tuple[bytes, AdapterChange, int]] = []  # with the number that goes

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being downloaded or read, in threads that a normal exit would wait for."""
        return bool(self._loading)

    def begin(self, peer: bytes, change: AdapterChange) -> None:
        """Begins a change that an API server process asks for."""
        numbers = self._adapters.numbers
        if any(change.name == other.name for _peer, other, _job in self._loading):
            self._end(peer, change, f"{change.name} is being loaded")
        elif change.source and change.name in numbers and not change.in_place:
            remedy = "unload it, or load the other with `load_inplace` true"
            self._end(peer, change, f"{change.name} is served already: {remedy}")
        elif change.source:
            job = self._thread.submit(self._read, change.name, change.source)
            self._loading.append((peer, change, job))
            job.add_done_callback(lambda _job: self._link.interrupt())
        elif change.name in numbers:
            self._unloading.append((peer, change, numbers.pop(change.name)))
            self._announce({name: at for name, at in self._info.adapters.items() if name != change.name})
            self._link.interrupt()
        else:
            self._end(peer, change, f"the LoRA adapter {change.name} is not loaded")

    def apply(self, requests: Collection[Request]) -> None:
        """Between two steps: adds what has been read, and frees what no request has any more."""
        while self._loading and self._loading[0][2].done():
            self._add(*self._loading.pop(0))
        for each in list(self._unloading):
            peer, change, number = each
            if all(request.adapter != number for request in requests):
                self._unloading.remove(each)
                self._adapters.remove(number)
                self._end(peer, change)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _add(self, peer: bytes, change: AdapterChange, job: Future[Updates]) -> None:
        replaced = self._adapters.numbers.get(change.name)
        try:
            self._adapters.add(change.name, job.result())
        except (ModelError, ConfigError) as error:
            self._end(peer, change, str(error))
        except Exception as error:
            logger.exception("the LoRA adapter %s cannot be loaded", change.name)
            self._end(peer, change, f"it cannot be loaded: {named(error)}")
        else:
            self._announce({**self._info.adapters, change.name: change.source})
            if replaced:
                self._unloading.append((peer, change, replaced))
            else:
                self._end(peer, change)

    def _announce(self, adapters: dict[str, str]) -> None:
        self._info = replace(self._info, adapters=adapters)
        self._link.announce(self._info)

    def _end(self, peer: bytes, change: AdapterChange, error: str = "") -> None:
        if not error:
            logger.info("%s the LoRA adapter %s", "Loaded" if change.source else "Unloaded", change.name)
        self._link.send(peer, AdapterChanged(change.id, error))
