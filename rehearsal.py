"""Rehearsals: they keep the worker's loop in the caches of its processor while the device is at a step.

Between two steps the device waits for the loop, whose code and data are in no cache by then: a step takes milliseconds, in
which others use the processor and its memory, and from there the same lines take two to three times as long. So a moment
before a step or a prompt should end, a thread on the loop's processor goes through a turn of the loop with an understudy: a
whole worker, whose model, requests and web processes are made up (`Offstage`). It has the interpreter's lock while it does, so
it must be over in time, and begins the earlier the longer it takes. One that would not be over in time is left out.

This layer knows the worker's turn and nothing of what is in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import Any

import torch

from protocol import Generate, GenerateAll, Sampling, Status, WorkerEnd

logger = logging.getLogger("rehearsal")

LEAST_S = 0.005  # that a step takes, for the caches to forget
LEAD_S = 0.0004  # how long before the end of a step it is over, when it takes
SLACK = 2.0  # times as long as it mostly does
WEIGHT = 0.1  # of the newest in the running mean
# Of made-up requests, which want log-probabilities, too: they go through most lines.
KINDS = Sampling(), Sampling(seed=0, temperature=0.9, top_k=20, top_p=0.9)


class Offstage(WorkerEnd):
    """The end of an understudy. What it sends is made, and goes nowhere."""

    def __init__(self):
        super(WorkerEnd, self).__init__("offstage")  # without a socket, and its thread never starts
        self.status = Status(phase="ready", progress_at=0.0)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()

    def give_way(self) -> None:
        pass

    def arrive(self, message: GenerateAll) -> None:
        self._inbox.put((b"", message))

    def drop(self) -> None:
        for item in self._drain_outbox():
            if callable(item):
                deque(item(), maxlen=0)


class Rehearsal:
    """A thread that has an understudy, a worker on `Offstage`, take a turn shortly before each step ends."""

    def __init__(self, understudy: Any):
        self._understudy = understudy
        kinds = KINDS[-understudy.model.batch_size :]
        made_up = [Generate(n, [0], sys.maxsize, kind, ignore_eos=True, logprobs=True) for n, kind in enumerate(kinds)]
        understudy.end.arrive(GenerateAll(made_up))
        self.turns = 0
        self._took_s = 0.0
        self._cpu = -1
        self._cues: queue.SimpleQueue[tuple[float, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rehearsal", daemon=True)
        self._thread.start()

    def expect(self, at: float, cpu: int) -> None:
        """A step has begun that will end at that time, CLOCK_MONOTONIC in seconds. cpu: the loop's processor; -1: not known."""
        if at - time.monotonic() > LEAST_S:
            self._cues.put((at, cpu))

    def end(self) -> None:
        self._cues.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._turn()  # the first one takes longer
                while cue := self._cues.get():
                    at, cpu = cue
                    early_s = at - LEAD_S - SLACK * self._took_s - time.monotonic()
                    if early_s < 0:
                        continue
                    time.sleep(early_s)
                    self._go_to(cpu)
                    # It was woken late, or the step was over early and there is another one by now.
                    if time.monotonic() + self._took_s > at or not self._cues.empty():
                        continue
                    took_s = self._turn()
                    self._took_s = self._took_s + WEIGHT * (took_s - self._took_s) if self._took_s else took_s
        except Exception:  # the show goes on
            logger.exception("there are no more rehearsals: steps will follow each other a little later")

    def _turn(self) -> float:
        """Returns how long it took, in seconds."""
        began_at = time.monotonic()
        self._understudy.turn()
        self._understudy.end.drop()
        self.turns += 1
        return time.monotonic() - began_at

    def _go_to(self, cpu: int) -> None:
        if 0 <= cpu != self._cpu:
            self._cpu = cpu
            with contextlib.suppress(OSError):  # where that is forbidden, the caches may be those of another processor
                os.sched_setaffinity(0, {cpu})
