"""Traces of the worker (`--profile`): its phases step by step as Chrome trace JSON, which Perfetto opens, on
every engine.

The times are those of `StepOutput`. After `PROF_WAITSTEP` and `PROF_WARMUPSTEP` steps, `PROF_STEP` steps are
recorded and written, or fewer if the process ends before. The engine's own profile is switched on here too:
torch's by the model, the Neuron runtime's through its environment.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from config import Config
from engine.step import StepOutput
from models.base import StaticBatchModel
from run import ConfigError, check_private

logger = logging.getLogger("worker")

DEFAULT_STEPS = 100
LOOP, OUTPUT = 1, 2  # thread ids in the trace
THREADS = {LOOP: "worker loop", OUTPUT: "output thread"}


class Profiler:
    """Records some steps of one worker."""

    def __init__(self, config: Config, device: str):
        """Before the model is made: the Neuron runtime reads its environment once, and records the whole run.

        Raises ConfigError if the folder cannot be written, or the default folder is another user's.
        """
        self._skipped = config.prof_waitstep, config.prof_warmupstep
        self._steps = DEFAULT_STEPS if config.prof_step is None else config.prof_step
        folder = Path(config.profile or f"{tempfile.gettempdir()}/profile")
        self._prefix = str(folder / time.strftime("%Y%m%d-%H%M%S"))
        try:
            folder.mkdir(0o777 if config.profile else 0o700, parents=True, exist_ok=True)
            if not config.profile:  # in a folder of all users
                check_private(folder, f"{folder} (--profile, PROFILE)")
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(f"--profile {folder} (PROFILE) cannot be written: {error}") from None
        self._seen = 0  # steps
        self._events: list[dict] = []
        self._done_at: float | None = None  # of the step before
        atexit.register(self._write)
        if device == "neuron":
            os.environ.setdefault("NEURON_RT_INSPECT_ENABLE", "1")
            where = os.environ.setdefault("NEURON_RT_INSPECT_OUTPUT_DIR", f"{self._prefix}-neuron")
            logger.info("The Neuron runtime records its own profile into %s", where)

    @classmethod
    def of(cls, config: Config, device: str) -> Profiler | None:
        """None if no trace is wanted."""
        is_wanted = config.profile if config.prof_step is None else config.prof_step
        if not is_wanted and config.prof_step is None and (config.prof_waitstep or config.prof_warmupstep):
            logger.warning(
                "PROF_WAITSTEP and PROF_WARMUPSTEP have no effect without --profile (PROFILE) or PROF_STEP"
            )
        return cls(config, device) if is_wanted else None

    def start(self, model: StaticBatchModel) -> None:
        """Begins with the model's next call."""
        if model.engine == "torch":
            model.start_profile(f"{self._prefix}-torch.json", *self._skipped, self._steps)

    def record(self, output: StepOutput, publish_begin: float, publish_end: float) -> None:
        """Takes the times of a step. Called on the output thread."""
        first = sum(self._skipped)
        if first <= self._seen < first + self._steps:
            self._add(output, publish_begin, publish_end)
        self._seen += 1
        self._done_at = output.done_at
        if self._seen == first + self._steps:
            self._write()

    def _add(self, output: StepOutput, publish_begin: float, publish_end: float) -> None:
        step = output.step
        arguments = {
            "step": self._seen,
            "slots": [chunk.slot for chunk in step.chunks],
            "rows": step.num_decodes,  # of running requests
            "prompt_tokens": step.prompt_tokens,
        }
        received_at = self._done_at or output.started_at
        for name, begin, end, thread in (
            ("receive and schedule", received_at, output.started_at, LOOP),
            ("forward", output.started_at, output.ran_at, LOOP),
            ("sample", output.ran_at, output.sampled_at, LOOP),
            ("update slots", output.sampled_at, output.done_at, LOOP),
            ("publish", publish_begin, publish_end, OUTPUT),
        ):
            event = {
                "name": name,
                "ph": "X",
                "ts": begin * 1e6,
                "dur": (end - begin) * 1e6,
                "pid": os.getpid(),
                "tid": thread,
                "args": arguments,
            }
            self._events.append(event)

    def _write(self) -> None:
        events, self._events = self._events, []
        if not events:
            return
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}}
            for thread, name in THREADS.items()
        ]
        path = f"{self._prefix}-worker.json"
        try:
            Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
            logger.info(
                "Wrote the trace of %d steps to %s", len({event["args"]["step"] for event in events}), path
            )
        except OSError as error:
            logger.error("the trace cannot be written: %s", error)
