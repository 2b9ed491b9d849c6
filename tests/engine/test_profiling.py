"""`--profile` writes traces that Perfetto opens: the worker's phases on every engine, and the engine's own profile."""

import itertools
import json
import os
from pathlib import Path

import pytest
from processes import Server, wait_until

from config import Config
from engine.profiling import Profiler
from engine.scheduler import Step
from engine.step import StepOutput
from models.base import Chunk
from run import HERE, ConfigError

SIMULATED = str(HERE / "bench" / "simulated")
PHASES = ["receive and schedule", "forward", "sample", "update slots", "publish"]


def traces(folder, kind):
    return [json.loads(path.read_text()) for path in folder.glob(f"*-{kind}.json")]


def slices(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.processes
def test_the_phases_of_the_steps_that_were_asked_for_are_written_once_and_neuron_writes_its_own_profile(tmp_path):
    """The runtime's own profile is switched on before the model is loaded."""
    steps = {"PROF_WAITSTEP": "2", "PROF_WARMUPSTEP": "1", "PROF_STEP": "4"}
    environment = {"PYTHONPATH": SIMULATED, "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    limits = ("--device", "neuron", "--max-total-tokens", "60", "--max-batch-size", "2")
    with Server("--profile", str(tmp_path / "new" / "folder"), *limits, **environment, **steps) as server:
        server.wait_ready()
        server.generate("What is Deep Learning?", max_new_tokens=20)
        wait_until(lambda: "Wrote the trace of 4 steps to" in server.log, "the trace")
        assert server.stop() == 0
        log = server.log
    assert log.count("Wrote the trace") == 1
    assert log.index("The Neuron runtime records its own profile into") < log.index("Loading weights")
    (trace,) = traces(tmp_path / "new" / "folder", "worker")
    events = slices(trace)
    assert [event["name"] for event in events] == PHASES * 4
    assert [event["args"]["step"] for event in events[::5]] == [3, 4, 5, 6]
    assert all(event["args"] | {"step": 0} == {"step": 0, "slots": [0], "rows": 1, "prompt_tokens": 0} for event in events)
    assert all(event["dur"] >= 0 for event in events) and all(event["dur"] > 0 for event in events[1::5])
    loop = [event for event in events if event["name"] != "publish"]
    for before, after in itertools.pairwise(loop):  # one phase begins where the one before ended; in microseconds
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1)
    threads = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert threads == {"worker loop", "output thread"}


@pytest.mark.processes
def test_a_server_that_stops_before_all_steps_ran_writes_what_there_is_with_torchs_profile_beside_it(tmp_path):
    with Server("--dtype", "float16", PROF_PATH=str(tmp_path), PROF_STEP="10000") as server:  # float16: plain PyTorch
        server.wait_ready()
        count = server.generate("Hello", max_new_tokens=6, details=True)[1]["details"]["generated_tokens"]
        assert server.stop() == 0
    (trace,), (torch_trace,) = traces(tmp_path, "worker"), traces(tmp_path, "torch")
    forwards = [event for event in slices(trace) if event["name"] == "forward"]
    assert [len(forward["args"]["slots"]) for forward in forwards] == [1] * count
    assert [forward["args"]["prompt_tokens"] > 0 for forward in forwards] == [True] + [False] * (count - 1)
    assert "aten::linear" in {event["name"] for event in slices(torch_trace)}


def test_the_neuron_runtime_is_given_the_folder_unless_its_variables_are_set(tmp_path, monkeypatch):
    for name in ("NEURON_RT_INSPECT_ENABLE", "NEURON_RT_INSPECT_OUTPUT_DIR"):
        monkeypatch.setenv(name, "")  # so that a value that is set here is undone
        monkeypatch.delenv(name)
    config = Config(profile=str(tmp_path))
    Profiler.of(config, "neuron")
    assert os.environ["NEURON_RT_INSPECT_ENABLE"] == "1"
    assert Path(os.environ["NEURON_RT_INSPECT_OUTPUT_DIR"]).parent == tmp_path
    monkeypatch.setenv("NEURON_RT_INSPECT_OUTPUT_DIR", "/elsewhere")
    Profiler.of(config, "neuron")
    assert os.environ["NEURON_RT_INSPECT_OUTPUT_DIR"] == "/elsewhere"


@pytest.mark.parametrize(("settings", "is_on"), [({}, False), ({"prof_step": 3}, True), ({"prof_waitstep": 3}, False)])
def test_a_trace_is_wanted_with_a_folder_or_a_number_of_steps(settings, is_on, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # which is found once in a process
    assert (Profiler.of(Config(**settings), "cpu") is not None) == is_on
    assert (tmp_path / "profile").is_dir() == is_on
    assert ("PROF_WAITSTEP and PROF_WARMUPSTEP have no effect" in caplog.text) == ("prof_waitstep" in settings)
    assert Profiler.of(Config(profile=str(tmp_path), prof_step=0), "cpu") is None


def test_the_default_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Profiler.of(Config(prof_step=3), "cpu")
    assert (tmp_path / "profile").stat().st_mode & 0o777 == 0o700
    (tmp_path / "profile").chmod(0o777)  # as another user may have made it
    with pytest.raises(ConfigError, match=r"/profile \(--profile, PROFILE\) can be written to by other users"):
        Profiler.of(Config(prof_step=3), "cpu")


def test_a_folder_that_cannot_be_written_ends_the_boot_with_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profile .*/file/x \(PROFILE\) cannot be written: "):
        Profiler.of(Config(profile=str(tmp_path / "file" / "x")), "cpu")


def test_a_trace_that_cannot_be_written_disturbs_no_request(tmp_path, caplog):
    folder = tmp_path / "profile"
    profiler = Profiler.of(Config(profile=str(folder), prof_step=1), "cpu")
    folder.rmdir()
    output = StepOutput.begin(Step([Chunk(0, [1], 0)], [], [], 0, [], 0))
    profiler.record(output, 1.0, 2.0)
    assert "the trace cannot be written" in caplog.text
