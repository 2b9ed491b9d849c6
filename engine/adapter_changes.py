"""LoRA adapters that are loaded and unloaded while requests run.

Loading: a thread reads the adapter. Another thread copies the weights of all adapters and adds the new ones.
The model gets the copy between two steps.

Unloading: new requests no longer find the adapter. When the last request with it has ended, a thread copies
the weights without it, and the model gets the copy. A replaced adapter is unloaded in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from msgspec.structs import replace

from config import Config
from engine.link import Link
from engine.request import Request
from models.adapters import Adapters, Updates
from models.child import shortened
from models.errors import MachineError, ModelError, named
from protocol import AdapterChange, AdapterChanged
from run import ConfigError

logger = logging.getLogger("worker")

READERS = 4  # adapters that are read at the same time, for which there is memory


class Pending(NamedTuple):
    """A change that has begun. `reading`: the adapter that a thread reads. `number`: without `reading`, the
    adapter that is to be removed once no request uses it."""

    peer: bytes
    change: AdapterChange
    reading: Future[Updates] | None = None
    number: int = 0

    def is_due(self, requests: Collection[Request]) -> bool:
        """Whether the reading of the adapter has ended, also if it failed, or no request uses the one to be
        removed."""
        return self.reading.done() if self.reading else all(each.adapter != self.number for each in requests)


class AdapterChanges:
    """Changes the adapters of a model, one change after the other. Only the loop's thread calls the methods.

    `read` returns the updates of an adapter by its name and source, in a thread; it may raise ModelError or
    ConfigError. `link` has announced the adapters that are served at first.
    """

    def __init__(
        self,
        adapters: Adapters,
        read: Callable[[str, str], Updates],
        link: Link,
        config: Config,
    ):
        self._adapters = adapters
        self._read = read
        self._link = link
        self._most = config.max_cpu_loras
        self._most_bytes = config.max_lora_memory * 1e9
        self._readers = ThreadPoolExecutor(READERS, "worker-adapters")  # a slow one keeps no other waiting
        self._copier = ThreadPoolExecutor(1, "worker-adapter-copies")
        self._copier.submit(int)  # starts the thread: later there may be no memory for one
        self._pending: list[Pending] = []
        self._copying: tuple[Pending, Future[Adapters]] | None = None

    def begin(self, peer: bytes, change: AdapterChange) -> None:
        """Begins a change that an API server process asks for. To load: a thread begins to read the adapter.
        To unload: requests no longer find the adapter from now on. The weights do not change before `apply`,
        which answers the change.

        The change is answered at once, with the error, if the adapter is being loaded, if it is loaded and
        `in_place` is false, if the one to unload is not loaded, if there would be more than --max-cpu-loras,
        or if no thread can be started.
        """
        numbers = self._adapters.numbers
        loading = {each.change.name for each in self._pending if each.reading}
        error = ""
        if change.name in loading:
            error = f"{change.name} is being loaded"
        elif not change.source and change.name not in numbers:
            error = f"the LoRA adapter {change.name} is not loaded"
        elif change.source and change.name in numbers and not change.in_place:
            remedy = "unload it, or load the other with `load_inplace` true"
            error = f"{change.name} is served already: {remedy}"
        elif change.source and len({change.name, *numbers, *loading}) > self._most:
            what = "as many adapters are served or being loaded"
            error = f"--max-cpu-loras (MAX_CPU_LORAS) is {self._most}, and {what}"
        if error:
            self._end(peer, change, error)
        elif change.source:
            try:
                reading = self._submit(self._readers, self._read, change.name, change.source)
            except RuntimeError as error:  # there is no memory for a thread
                self._end(peer, change, str(error), is_of_machine=True)
            else:
                self._pending.append(Pending(peer, change, reading))
        else:
            self._pending.append(Pending(peer, change, number=numbers.pop(change.name)))
            served = self._link.info.adapters
            self._announce({name: at for name, at in served.items() if name != change.name})
            self._link.interrupt()

    def apply(self, requests: Collection[Request]) -> None:
        """Gives the model the copy that is ready, answers its change (one that replaces an adapter only once
        the old one is removed), and begins a copy for the first change that is due. Never waits: threads read
        and copy.

        The loop calls this method between two steps, with all requests that have not ended.
        """
        if self._copying and self._copying[1].done():
            self._finish_copy(*self._copying)
            self._copying = None
        due = [] if self._copying else [each for each in self._pending if each.is_due(requests)]
        if due:
            self._copying = due[0], self._submit(self._copier, self._changed, due[0])

    def close(self) -> None:
        """Cancels what has not begun. Does not wait for the threads, and answers no change."""
        for threads in (self._readers, self._copier):
            threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, threads: Executor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Runs a function in a thread, and wakes the loop at its end. Raises RuntimeError if no thread can be
        started."""
        job = threads.submit(function, *arguments)
        job.add_done_callback(lambda _job: self._link.interrupt())
        return job

    def _changed(self, pending: Pending) -> Adapters:
        """Returns a copy of the adapters with the change. Runs in a thread. Raises what the reading raised,
        and ModelError for an adapter that does not fit the model, or for which --max-lora-memory leaves no
        room."""
        changed = self._adapters.copied()
        if pending.reading:
            changed.add(pending.change.name, pending.reading.result(), self._most_bytes)
        else:
            changed.remove(pending.number)
        return changed

    def _finish_copy(self, pending: Pending, copying: Future[Adapters]) -> None:
        """Ends a copy: gives the model the copied adapters, announces a loaded adapter, and answers the
        change. If copying failed, the model keeps its adapters, and the answer has the error; an unexpected
        one is logged. Requests still do not find an adapter that could not be removed. `copying` is done
        already.

        If the change replaces an adapter, requests find the new one at once, and the answer waits: the
        removal of the old one becomes pending.
        """
        self._pending.remove(pending)
        peer, change, *_ = pending
        try:
            changed = copying.result()
        except Exception as error:
            is_known = isinstance(error, (ModelError, ConfigError))
            if not is_known:
                logger.exception("the LoRA adapter %s cannot be changed", change.name)
            reason = shortened(str(error) if is_known else named(error))
            self._end(peer, change, reason, not is_known or isinstance(error, MachineError))
            return
        self._adapters.exchange(changed)
        replaced = None
        if pending.reading:
            replaced = self._adapters.numbers.get(change.name)
            self._adapters.numbers[change.name] = changed.numbers[change.name]
            self._announce({**self._link.info.adapters, change.name: change.source})
        if replaced:
            self._pending.append(Pending(peer, change, number=replaced))
            self._link.interrupt()
        else:
            self._end(peer, change)

    def _announce(self, adapters: dict[str, str]) -> None:
        """Sends the API server processes the names of the adapters that requests find from now on."""
        self._link.announce(replace(self._link.info, adapters=adapters))

    def _end(self, peer: bytes, change: AdapterChange, error: str = "", is_of_machine: bool = False) -> None:
        """Answers a change, and logs it if it has succeeded. error: why the change failed; "": it has
        succeeded. is_of_machine: the same change may succeed later."""
        if not error:
            logger.info("%s the LoRA adapter %s", "Loaded" if change.source else "Unloaded", change.name)
        self._link.send(peer, AdapterChanged(change.id, error, is_of_machine))
