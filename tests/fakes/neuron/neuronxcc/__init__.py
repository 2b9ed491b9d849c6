"""The compiler of the faked machine: a version, which FAKE_NEURON_COMPILER sets."""

import os

__version__ = os.environ.get("FAKE_NEURON_COMPILER", "2.20.9961.0+0acef03a")
