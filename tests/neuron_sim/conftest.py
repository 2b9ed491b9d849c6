"""One thread for torch, and not part of `make test`: these tests need the library and run with their own pytest.ini."""

import os
from pathlib import Path

import numpy

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # no log lines of XLA
numpy.product = numpy.prod  # the library is for numpy 1, and jax needs 2
os.environ["NEURON_SIM_CORES"] = "32"  # as many as the largest machine has


def pytest_ignore_collect(config):
    return True if config.rootpath != Path(__file__).parent else None
