"""The phases of the worker's steps (`--profile`, `PROF_*`) in one JSON file, which Perfetto opens.

The times are those of `StepOutput`. After `PROF_WAITSTEP` and `PROF_WARMUPSTEP` steps, `PROF_STEP` steps are
written, or fewer if the process ends before.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from pathlib import Path

from config import Config
from engine.step import StepOutput
from run import ConfigError

logger = logging.getLogger("worker")

DEFAULT_STEPS = 100
LOOP_THREAD, OUTPUT_THREAD = 1, 2  # ids of the worker's threads in the file


class Profiler:
    """Records some steps of one worker."""

    def __init__(self, config: Config):
        """Makes the folder and the file, empty at first; it is written after the last step to record, or by
        `close`. Raises ConfigError if the file cannot be made."""
        self._first = config.prof_waitstep + config.prof_warmupstep
        self._end = self._first + (DEFAULT_STEPS if config.prof_step is None else config.prof_step)
        self._seen = 0  # steps
        self._events: list[dict] = []
        folder = Path(config.profile or tempfile.gettempdir())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, self._path = tempfile.mkstemp(".json", time.strftime("%Y%m%d-%H%M%S-"), folder)
            os.close(handle)
        except OSError as error:
            raise ConfigError(f"--profile {folder} (PROFILE) cannot be written: {error}") from None

    @classmethod
    def of(cls, config: Config) -> Profiler | None:
        """Returns the profiler that the settings ask for, whose file is made now; None: they ask for none.
        Raises ConfigError if the file cannot be made."""
        is_wanted = config.profile if config.prof_step is None else config.prof_step
        return cls(config) if is_wanted else None

    def record(self, output: StepOutput, publish_begin: float, publish_end: float) -> None:
        """Takes the times of a step, if it is one of the steps to record; after the last of these, writes the
        file. Called on the output thread.

        publish_begin, publish_end: CLOCK_MONOTONIC, in seconds.
        """
        if self._first <= self._seen < self._end:
            arguments = {
                "step": self._seen,
                "slots": [chunk.slot for chunk in output.step.chunks],
                "rows": output.step.num_decodes,  # of running requests
                "prompt_tokens": output.step.prompt_tokens,
            }
            for name, begin, end, thread in (
                ("forward", output.started_at, output.ran_at, LOOP_THREAD),
                ("sample", output.ran_at, output.sampled_at, LOOP_THREAD),
                ("update slots", output.sampled_at, output.done_at, LOOP_THREAD),
                ("publish", publish_begin, publish_end, OUTPUT_THREAD),
            ):
                event = {"name": name, "ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6}
                self._events.append(event | {"pid": 1, "tid": thread, "args": arguments})
        self._seen += 1
        if self._seen == self._end:
            self._write()

    def close(self) -> None:
        """Writes the steps that were recorded, unless all steps to record have been written."""
        if self._seen < self._end:
            self._write()

    def _write(self) -> None:
        """Writes the file, once, and logs its path, or why it cannot be written."""
        try:
            Path(self._path).write_text(json.dumps(self._events))
        except OSError as error:
            logger.error("--profile (PROFILE) cannot be written: %s", error)
        else:
            logger.info("Wrote the phases of %d steps to %s", max(0, self._seen - self._first), self._path)
