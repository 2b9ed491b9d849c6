"""The worker with a watch on it: what its loop does from the end of one call to the device to the start of the next.

Runs `worker.py` as it is, with a timer around the calls that its loop consists of, and writes what it saw into the file that
TIMELINE names when it ends: spans of [name, start, end], in seconds. `steps` reads them. The timers themselves cost about a
microsecond a span.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

DEVICE, SOCKET = "device", "socket thread"
# In the order in which a turn of the loop goes through them, from the end of a call to the device on.
PARTS = ("model", "choose", "bookkeeping", "receive", "admit", "tell", "prepare")
MOST_SPANS = 200_000

Span = tuple[str, float, float]


@dataclass(frozen=True)
class Step:
    """One step: the device's call, and what the loop did after it, until the next."""

    device: Span
    parts: list[Span]
    socket: list[Span]  # what the other thread did until the next call's end
    next_at: float

    @property
    def gap_s(self) -> float:
        """How long the device waited."""
        return self.next_at - self.device[2]

    def seconds(self, name: str) -> float:
        return sum(end - start for part, start, end in self.parts if part == name)


def begin(span: Span) -> float:
    return span[1]


def steps(path: Path) -> list[Step]:
    """All steps between which nothing was prefilled, the first few apart."""
    spans: Sequence[Span] = json.loads(path.read_text())
    loop = sorted((span for span in spans if span[0] != SOCKET), key=lambda span: (span[1], -span[2]))
    socket = sorted((span for span in spans if span[0] == SOCKET), key=begin)
    calls = [index for index, span in enumerate(loop) if span[0] == DEVICE]
    found: list[Step] = []
    for first, second in pairwise(calls[10:]):
        device, between = loop[first], loop[first + 1 : second]
        decode = next(span for span in reversed(loop[:first]) if span[0] == "decode")
        _name, next_at, next_end = loop[second]
        if any(name == "prefill" for name, _start, _end in between):
            continue
        sent = socket[bisect(socket, device[2], key=begin) : bisect(socket, next_end, key=begin)]
        found.append(Step(device, list(_parts(device[2], decode[2], between, next_at)), sent, next_at))
    return found


def _parts(start: float, decoded_at: float, between: Sequence[Span], end: float) -> Iterator[Span]:
    """What the loop did from `start` to `end`, one after the other; `decode` returned at `decoded_at`."""
    at = start
    for name, began, ended in between:
        if name == "choose":
            yield "model", at, began
            yield "choose", began, ended
            yield "bookkeeping", ended, decoded_at
            at = decoded_at
        elif name in ("receive", "admit", "tell"):
            yield name, at, ended
            at = ended
    yield "prepare", at, end


def main() -> int:
    import transformers_neuronx

    import protocol
    import worker

    spans: list[Span] = []

    def timed(name, function):
        @functools.wraps(function)
        def call(*args, **named):
            started_at = perf_counter()
            try:
                return function(*args, **named)
            finally:
                if len(spans) < MOST_SPANS and threading.current_thread().name != "rehearsal":
                    spans.append((name, started_at, perf_counter()))

        return call

    call_device = transformers_neuronx.LlamaForSampling.__call__
    step, prefill = timed(DEVICE, call_device), timed("prefill", call_device)
    transformers_neuronx.LlamaForSampling.__call__ = lambda self, ids, *rest: (step if ids.shape[1] == 1 else prefill)(
        self, ids, *rest
    )
    worker.choose = timed("choose", worker.choose)
    for name in ("receive", "admit", "decode", "tell"):
        setattr(worker.Worker, name, timed(name, getattr(worker.Worker, name)))
    protocol.WorkerEnd._send_all = timed(SOCKET, protocol.WorkerEnd._send_all)
    try:
        return worker.main()
    finally:
        Path(os.environ["TIMELINE"]).write_text(json.dumps(spans))


if __name__ == "__main__":
    sys.exit(main())
