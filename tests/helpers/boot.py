"""A start of the worker in this process, on a CPU: it loads the model of a folder, without a socket or another process."""

import os
from unittest import mock

from loop import Wire
from processes import MODEL_CACHE

from config import parse
from engine.admission import Admission
from engine.metrics import Metrics
from worker import Startup


def boot(run_dir, *flags):
    """What the worker of a server with these flags tells the web processes. Raises what ends its start."""
    # Another test of this process may have imported the simulated transformers-neuronx.
    config = parse(flags, {"MODEL_CACHE": str(MODEL_CACHE), "DEVICE": "cpu"})
    wire = Wire()
    with mock.patch.dict(os.environ, NEURON_TEXTGEN_RUN_DIR=str(run_dir)):
        worker = Startup(config, wire, Admission(1), Metrics()).run()
    worker.drain()
    worker.run()  # which ends at once, and ends the worker's threads
    return wire.info
