"""`--profile` writes the phases of the worker's steps into one JSON file, on every engine."""

import itertools
import json
import shutil

import pytest
from loop import Driven
from processes import Server, wait_until

from config import Config
from engine.profiling import Profiler
from run import HERE, ConfigError

SIMULATED = str(HERE / "bench" / "simulated")
PHASES = ["forward", "sample", "update slots", "publish"]


def written(folder):
    (path,) = folder.iterdir()
    return json.loads(path.read_text())


@pytest.mark.processes
def test_the_phases_of_the_steps_that_were_asked_for_are_written_once(tmp_path):
    steps = {"PROF_WAITSTEP": "2", "PROF_WARMUPSTEP": "1", "PROF_STEP": "4"}
    environment = {"PYTHONPATH": SIMULATED, "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    limits = ("--device", "neuron", "--max-total-tokens", "60", "--max-batch-size", "2")
    with Server("--profile", str(tmp_path / "new" / "folder"), *limits, **environment, **steps) as server:
        server.wait_ready()
        server.generate("What is Deep Learning?", max_new_tokens=20)
        wait_until(lambda: "Wrote the phases of 4 steps to" in server.log, "the file")
        assert server.stop() == 0
        log = server.log
    assert log.count("Wrote the phases") == 1
    events = written(tmp_path / "new" / "folder")
    assert [event["name"] for event in events] == PHASES * 4
    assert [event["args"]["step"] for event in events[::4]] == [3, 4, 5, 6]
    assert all(event["args"] | {"step": 0} == {"step": 0, "slots": [0], "rows": 1, "prompt_tokens": 0} for event in events)
    assert all(event["dur"] >= 0 for event in events) and all(event["dur"] > 0 for event in events[::4])
    loop = [event for event in events if event["name"] != "publish"]
    for before, after in itertools.pairwise(loop):  # in microseconds
        end = before["ts"] + before["dur"]
        assert after["ts"] > end - 1 if after["name"] == "forward" else after["ts"] == pytest.approx(end, abs=1)
    assert {(event["name"] == "publish", event["tid"]) for event in events} == {(False, 1), (True, 2)}


@pytest.mark.processes
def test_a_server_that_stops_before_all_steps_ran_writes_what_there_is(tmp_path):
    with Server(PROF_PATH=str(tmp_path), PROF_STEP="10000") as server:
        server.wait_ready()
        count = server.generate("Hello", max_new_tokens=6, details=True)[1]["details"]["generated_tokens"]
        assert server.stop() == 0
        assert f"Wrote the phases of {count} steps to" in server.log
    forwards = [event for event in written(tmp_path) if event["name"] == "forward"]
    assert [len(forward["args"]["slots"]) for forward in forwards] == [1] * count
    assert [forward["args"]["prompt_tokens"] > 0 for forward in forwards] == [True] + [False] * (count - 1)


@pytest.mark.parametrize(("settings", "is_on"), [({}, False), ({"prof_step": 3}, True), ({"prof_waitstep": 3}, False)])
def test_a_file_is_wanted_with_a_folder_or_a_number_of_steps(settings, is_on, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert (Profiler.of(Config(**settings)) is not None) == is_on
    assert len(list(tmp_path.iterdir())) == is_on
    assert Profiler.of(Config(profile=str(tmp_path), prof_step=0)) is None


def test_a_file_that_cannot_be_written_any_more_is_one_line_of_the_log_and_ends_nothing(tmp_path, caplog):
    profiler = Profiler(Config(profile=str(tmp_path / "folder")))
    shutil.rmtree(tmp_path / "folder")
    driven = Driven(profiler=profiler)
    driven.worker.drain()
    driven.worker.run()
    (line,) = caplog.messages
    assert line.startswith("--profile (PROFILE) cannot be written: [Errno 2]") and str(tmp_path) in line


def test_a_folder_that_cannot_be_written_ends_the_boot_with_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profile .*/file/x \(PROFILE\) cannot be written: "):
        Profiler.of(Config(profile=str(tmp_path / "file" / "x")))
