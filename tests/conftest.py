"""Fixtures for tests through HTTP. Torch gets one thread everywhere: spinning threads would take cores from the servers."""

import os
import signal

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background ignores Ctrl-C, and so would its servers
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example takes as long as it takes: the first one may wait for a compiler.
settings.register_profile("without deadlines", settings(), deadline=None)
settings.load_profile("without deadlines")

collect_ignore = ["clients"]  # each client has an environment of its own: `make test-clients`


@pytest.fixture
def serve(tmp_path):
    """Makes a server with settings of its own; see served.py."""
    from served import Served

    made = []

    def make(**settings):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Served(folder, **settings))
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def booting(serve):
    return serve()


@pytest.fixture
def served(booting):
    booting.get_ready()
    yield booting
    booting.model.may_decode.set()
    booting.assert_idle()
