"""One thread for torch, and no part of `make test`: what is here needs the library and runs under its own pytest.ini."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA's own talk


def pytest_ignore_collect(config):
    return True if config.rootpath != Path(__file__).parent else None
