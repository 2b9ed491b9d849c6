"""The tools that `make bench`, `make soak` and `make attack` run, once each and briefly. No test depends on speed."""

import contextlib
import getpass
import importlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import MODEL_CACHE

from config import parse
from run import HERE

pytestmark = pytest.mark.processes


def output_of(*command):
    """What a tool prints; it ends with exit code 0."""
    environment = os.environ | {"MODEL_CACHE": str(MODEL_CACHE)}
    done = subprocess.run([sys.executable, *command], cwd=HERE, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tool(monkeypatch):
    """Imports a tool, to run it here with fewer servers or less of everything."""
    monkeypatch.syspath_prepend(HERE / "bench")
    monkeypatch.delitem(sys.modules, "bench", raising=False)  # the folder, as other tests import it, is no tool
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MODEL_CACHE", str(MODEL_CACHE))
    return importlib.import_module


def test_bench_measures_the_server_on_simulated_devices_and_writes_a_page_that_needs_nothing_else(tool, tmp_path, monkeypatch):
    """A server for each device; what `--sampling` names is started by the first run below."""
    figures, devices = tool("figures"), tool("devices")
    servers = {}
    with contextlib.ExitStack() as stack:

        @contextlib.contextmanager
        def serve(device, *flags):
            parse([*flags, "--device", "neuron"], {})
            if device not in servers:
                speculate = ["--speculate", str(figures.DRAFT_TOKENS)] if device.verify_ms else ["--sampling", "host"]
                servers[device] = stack.enter_context(devices.serve(device, *speculate))
            yield servers[device]

        monkeypatch.setattr(figures, "serve", serve)
        monkeypatch.setattr(sys, "argv", ["bench.py", "--smoke", "--out", str(tmp_path / "report")])
        assert tool("bench").main() == 0
    assert len(servers) == 2
    report = json.loads((tmp_path / "report.json").read_text())
    page = (tmp_path / "report.html").read_text()
    figures = {figure["name"]: figure for figure in report["figures"]}
    efficiencies = [figure for name, figure in figures.items() if name.startswith("serving efficiency")]
    assert len(efficiencies) == 2
    assert all(0 < figure["max"] < 1.001 for figure in efficiencies), "more tokens than the device makes: measured wrongly"
    for figure in figures.values():
        assert figure["min"] <= figure["value"] <= figure["max"]
        assert (figure["met"] is None) == (figure["target"] is None)
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", page)
    assert page.count("<tr") == 1 + len(figures)


def test_servers_are_measured_side_by_side_into_a_report(tmp_path):
    serve = "./entrypoint.sh serve --model-id {model} --hostname 127.0.0.1 --port {port}"
    ours = f"PYTHON={shlex.quote(sys.executable)} MODEL_CACHE={shlex.quote(str(MODEL_CACHE))} {serve}"
    servers = ["--server", f"ours, one={ours}", "--server", f"another, one={ours} --max-batch-size 2"]
    sizes = ["--rounds", "1", "--concurrency", "2", "--requests", "2", "--prompt", "8", "--tokens", "5"]
    paths = ["--model", "demo/model", "--logs", str(tmp_path), "--out", str(tmp_path / "report")]
    printed = output_of("bench/peers.py", *servers, *sizes, *paths)
    assert "ours, one over the best of the others, 2 at a time" in printed
    figures = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert [figure["name"] for figure in figures] == [
        "throughput: ours, one: 2 at a time",
        "throughput: another, one: 2 at a time",
    ]
    assert all(figure["value"] > 0 for figure in figures)


def test_a_short_soak_passes_and_has_seen_everything(tool, tmp_path, monkeypatch):
    path, soak = tmp_path / "report.json", tool("soak")
    servers = []

    class Server(soak.Server):
        def __init__(self, folder):
            super().__init__(folder)
            servers.append(self)

    class Traffic(soak.Traffic):
        """Goes on, on a slow machine too, until it has seen everything."""

        @property
        def until(self):
            ledger = self.ledger
            has_seen = servers[0].kills and ledger.cancelled and ledger.right_texts > 20 and {400, 429} <= set(ledger.refused)
            return self.ends_at if has_seen else math.inf

        @until.setter
        def until(self, ends_at):
            self.ends_at = ends_at

    monkeypatch.setattr(soak, "Server", Server)
    monkeypatch.setattr(soak, "Traffic", Traffic)
    monkeypatch.setattr(soak, "PROMPTS", soak.PROMPTS[:1])
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "0.06", "--seed", "1", "--json", str(path)])
    assert soak.main() == 0
    report = json.loads(path.read_text())
    assert report["problems"] == report["wrong"] == []
    assert report["kills"] >= 1 and report["texts_compared"] > 20 and report["cancelled"] > 0
    assert {"429", "400"} <= set(report["refused"])


def test_a_first_run_is_rehearsed_on_a_cpu_and_its_report_names_nobody(tool, tmp_path, monkeypatch):
    first_run = tool("first_run")
    monkeypatch.setattr(first_run, "TOKENS", 16)
    server = "./entrypoint.sh serve --hostname 127.0.0.1 --port {port} --max-batch-size 2 --threads 1"
    words = ["--device", "cpu", "--max-total-tokens", "512", "--server", server, "--out", str(tmp_path / "report.json")]
    assert first_run.main(["--model-id", str(HERE / "demo" / "model"), *words]) == 0
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text)
    (model,) = report["models"]
    (run,) = model["runs"]
    assert run["ids_as_cpu"] == {"equal": 10, "differ_first_at_step": []}
    assert run["texts"] == {"equal": 10, "part at a close choice": 0, "part at a clear choice": 0}
    assert [each["streams"] for each in run["steps"]] == [1, 2]
    assert all(each["step_ms"] > 0 and each["prompt_call_ms"] > 0 and each["tokens_per_s"] > 0 for each in run["steps"])
    assert model["model"] == "a local folder" and report["packages"]["transformers"]
    for secret in (str(HERE), str(Path.home()), socket.gethostname(), getpass.getuser(), "127.0.0.1"):
        assert secret not in text


def test_a_first_run_on_a_device_tries_each_place_to_sample(tool, tmp_path, monkeypatch):
    """The second start of the same flags finds the server of the first; the rehearsal on a CPU starts each."""
    first_run, devices = tool("first_run"), tool("devices")
    devices.write_model(tmp_path / "model", devices.Device(2, 5.0, 32000, 2))
    monkeypatch.setattr(first_run, "TOKENS", 16)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "bench" / "simulated"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "programs"))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    server = "./entrypoint.sh serve --hostname 127.0.0.1 --port {port} --max-batch-size 2 --threads 1"
    words = ["--max-total-tokens", "512", "--without-cpu", "--server", server, "--out", str(tmp_path / "report.json")]
    start, kept = first_run.started, {}
    with contextlib.ExitStack() as stack:

        @contextlib.contextmanager
        def started(given, model, folder, device, *flags):
            if flags not in kept:
                yield kept.setdefault(flags, stack.enter_context(start(given, model, folder, device, *flags)))
            else:
                with kept[flags] as server:
                    yield server

        monkeypatch.setattr(first_run, "started", started)
        assert first_run.main(["--model-id", str(tmp_path / "model"), *words]) == 0
    (model,) = json.loads((tmp_path / "report.json").read_text())["models"]
    runs = model["runs"]
    assert [run["flags"][1] for run in runs] == ["host", "hybrid", "device"]
    same = [run.get("ids_as_host") for run in runs]  # this device's logits depend on the slot, so they need not be equal
    assert same[0] is None and all(each["equal"] + len(each["differ_first_at_step"]) == 10 for each in same[1:])
    assert all(run["compiled_s"] and run["chunks_refused"] is None for run in runs)
    assert all(each["step_ms"] >= 10 for run in runs for each in run["steps"]), "less than the simulated step"


def test_a_first_run_starts_no_server_where_the_image_says_that_driver_and_runtime_library_do_not_fit(tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho $@ >>{tmp_path}/calls\necho error: they do not fit >&2\nexit 2\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = [sys.executable, "bench/first_run.py", "--model-id", "someone/model", "--out", str(tmp_path / "report.json")]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "error: they do not fit\n")
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("-m models.neuron.driver")
    assert not (tmp_path / "report.json").exists()


def test_a_first_run_that_cannot_start_says_so_in_its_report_without_paths(tmp_path):
    words = ["--device", "cpu", "--server", "sh -c 'echo error: /home/ada/model is damaged; exit 2'"]
    words += ["--model-id", "someone/model", "--out", str(tmp_path / "report.json")]
    command = [sys.executable, "bench/first_run.py", *words]
    assert subprocess.run(command, cwd=HERE, capture_output=True, timeout=120).returncode == 1
    report = json.loads((tmp_path / "report.json").read_text())
    (model,) = report["models"]
    assert model["runs"][0]["failed"] == model["cpu_failed"] == "error: PATH is damaged"


def test_ids_of_a_first_run_are_compared_step_by_step(tool):
    compared_ids = tool("first_run").compared_ids
    same = [[1, 2, 3], [4, 5, 6]]
    assert compared_ids(same, same) == {"equal": 2, "differ_first_at_step": []}
    assert compared_ids([*same, [7, 8, 9]], [[1, 2, 4], [4, 5, 6], [7, 0, 9]]) == {"equal": 1, "differ_first_at_step": [1, 2]}


def test_an_attack_leaves_a_server_as_it_was():
    assert output_of("bench/attack.py", "framing", "lines").endswith("Nothing went wrong.\n")
