"""Fixtures for several files. Torch gets one thread everywhere: spinning threads would take cores from the servers."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
# Compiled sampling loops are shared with the servers (processes.py) and with later runs. The servers take no cache that a
# group may write to, as any folder is made on many a machine.
MODEL_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "models"
MODEL_CACHE.mkdir(parents=True, exist_ok=True)
MODEL_CACHE.chmod(0o700)
os.environ["NUMBA_CACHE_DIR"] = str(MODEL_CACHE / "numba")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background ignores Ctrl-C, and so would its servers
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does one below nohup with SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# RANDOM_EXAMPLES is how many random examples each property is tried with, also where a test draws them itself. Without it
# they are a few, and the same ones in each run. An example takes as long as it takes: the first one may wait for a compiler.
EXAMPLES = int(os.environ.get("RANDOM_EXAMPLES", 20))
settings.register_profile(
    "ours",
    deadline=None,
    max_examples=EXAMPLES,
    derandomize="RANDOM_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ours")

collect_ignore = ["clients", "ray_serve", "suites"]  # have targets of their own: `make test-clients` and so on


def pytest_collection_modifyitems(items):
    """Files that take long come first, in random order: `make test` runs a file in one process, and none shall be the last."""

    def place(item):
        marks = {mark.name for mark in item.iter_markers()}
        if "timeout" in marks:
            return 0
        return 1 if marks & {"models", "processes"} else 2

    places = {}
    for item in items:
        places[item.path] = min(place(item), places.get(item.path, 2))
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """What nobody removes is below pytest's own folder: pytest-xdist ends its processes without `atexit`."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))


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


@pytest.fixture(scope="session")
def zoo():
    from tiny_models import Zoo

    return Zoo()


@pytest.fixture(scope="session")
def converter():
    """`models.openvino.convert`. Its import takes seconds, which an import at a module's top costs each of pytest's workers."""
    import models.openvino.convert

    trace = models.openvino.convert.trace

    def trace_and_restore(*args, **options):
        try:
            return trace(*args, **options)
        finally:  # a 16-bit model's trace leaves a torch.bmm that computes nothing
            models.openvino.trace.patch_model._unpatch_torch_functions()

    models.openvino.trace.trace = models.openvino.convert.trace = trace_and_restore
    return models.openvino.convert


@pytest.fixture
def conversions(converter, monkeypatch):
    """The models that a test converts. In this process: the child process is tested once. Prompts run in rows, in no time:
    whether tiles were faster would be up to the machine and its load."""
    import models.convert
    from models.openvino import model as openvino_model

    converted = []

    def convert(arguments, config):
        converted.append(config.model_id)
        models.convert.convert(config, *map(Path, arguments))

    monkeypatch.setattr("models.openvino.run_converter", convert)
    monkeypatch.setattr(converter.timeit, "repeat", lambda *_, **__: [0.0])
    monkeypatch.setattr(openvino_model, "usable_threads", lambda: 1)
    return converted
