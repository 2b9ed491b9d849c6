"""The server on a simulated device: what it is asked to serve, and how it is started, watched and stopped.

A `Device` is a published combination of model and hardware: slots, time of a step, vocabulary. `serve` makes a model folder
for it (a tokenizer of that size, the model's own numbers, no weights) and runs `entrypoint.sh` with bench/simulated on
PYTHONPATH, in a temporary folder of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
BOOT_S = 120
WAITING = 4  # times as many requests as slots are taken; what is more is refused

# Of the two models, as their config.json has it.
SHAPES = {
    32000: {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32},
    128256: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}


@dataclass(frozen=True)
class Device:
    """What is simulated. Times are in milliseconds."""

    name: str
    slots: int
    step_ms: float
    vocab: int
    tp_degree: int
    prefill_ms: float = 10.0
    window: int = 4096

    @property
    def tokens_per_s(self) -> float:
        """What it would make if it never waited."""
        return self.slots / self.step_ms * 1e3


LLAMA_2_7B = Device("Llama-2-7B, tp 24", 8, 12.1, 32000, 24)
LLAMA_31_8B = Device("Llama-3.1-8B, tp 8", 32, 26.7, 128256, 8)
FAST = Device("a fast device", 64, 10.0, 32000, 24)


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen, port: int, run_dir: Path):
        self.process, self.port, self.run_dir = process, port, run_dir

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker_pids(self) -> list[int]:
        return self._pids(b"/worker.py", b"/timeline.py")

    @property
    def web_pids(self) -> list[int]:
        """With gunicorn's own process."""
        return self._pids(b"/web.py", b"bare:app")

    @property
    def log(self) -> str:
        """The end of it."""
        return "\n".join((self.run_dir / "log").read_text().splitlines()[-30:])

    def _pids(self, *names: bytes) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if any(name in command_line(pid) for name in names)]

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + BOOT_S
        while not list(self.run_dir.glob("neuron-textgen.*/ready")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start; its log:\n{self.log}")
            time.sleep(0.05)
        assert _answers(self.port), "it is ready, so it is healthy"
        return self


@contextlib.contextmanager
def serve(device: Device, web_processes: int = 1, timeline: Path | None = None) -> Iterator[Server]:
    """The server on that device, ready. It is ended, with all that it started, when the block is left; then `timeline`, if
    it is given, is a file with what the worker did when."""
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        folder = Path(name)
        model = write_model(folder / "model", device)
        port = free_port()
        environment = environment_for(device, folder) | {"PORT": str(port), "WEB_CONCURRENCY": str(web_processes)}
        if timeline:
            environment |= {"PYTHON": str(write_watching_python(folder / "python")), "TIMELINE": str(timeline)}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [HERE / "entrypoint.sh", "serve", *flags_for(device, model)],
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            yield Server(process, port, folder).wait_ready()
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def serve_bare(events: list[str], step_ms: float) -> Iterator[Server]:
    """gunicorn as the server runs it, with bare.py in the place of everything that is ours."""
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        file, port = Path(name) / "events.json", free_port()
        file.write_text(json.dumps(events))
        command = [sys.executable, "-m", "gunicorn", "--worker-class", "gthread", "--threads", "136", "--log-level", "error"]
        command += ["--no-control-socket"]
        command += ["--chdir", str(HERE / "bench"), "--bind", f"127.0.0.1:{port}", "bare:app"]
        environment = os.environ | {"BARE_EVENTS": str(file), "BARE_STEP_MS": str(step_ms)}
        process = subprocess.Popen(command, env=environment)
        try:
            deadline = time.monotonic() + BOOT_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("gunicorn did not start")
                time.sleep(0.05)
            yield Server(process, port, Path(name))
        finally:
            process.terminate()
            process.wait()


def _answers(port: int) -> bool:
    """Whether the first byte of an answer comes: gunicorn listens before it has a process that answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def flags_for(device: Device, model: Path) -> list[str]:
    flags = ["--model-id", str(model), "--device", "neuron", "--dtype", "bfloat16", "--tp-degree", str(device.tp_degree)]
    flags += ["--max-batch-size", str(device.slots), "--max-total-tokens", str(device.window)]
    return [*flags, "--max-concurrent-requests", str(WAITING * device.slots)]


def environment_for(device: Device, folder: Path) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return inherited | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(HERE / "bench" / "simulated"),
        "TMPDIR": str(folder),
        "NEURON_COMPILE_CACHE_URL": str(folder / "programs"),
        "SIMULATED_STEP_MS": str(device.step_ms),
        "SIMULATED_PREFILL_MS": str(device.prefill_ms),
        "GRACEFUL_TERMINATION_TIMEOUT": "1",
        "HOSTNAME": "127.0.0.1",
    }


def write_model(folder: Path, device: Device) -> Path:
    """A folder that looks like the model: the demonstration model's tokenizer, made as large, and no weights."""
    folder.mkdir()
    demo = HERE / "demo" / "model"
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġw{number}": number for number in range(len(vocab), device.vocab)}
    told = {"model_type": "llama", "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4}
    told |= {"torch_dtype": "bfloat16", "max_position_embeddings": 8192, "tie_word_embeddings": False}
    told |= {"vocab_size": device.vocab, "bos_token_id": 0, "eos_token_id": 0} | SHAPES[device.vocab]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "tokenizer_config.json").write_bytes((demo / "tokenizer_config.json").read_bytes())
    (folder / "model.safetensors").touch()
    return folder


def write_watching_python(path: Path) -> Path:
    """An interpreter that runs timeline.py in the place of worker.py."""
    timeline = HERE / "bench" / "timeline.py"
    path.write_text(
        f'#!/bin/sh\ncase $1 in */worker.py) exec "{sys.executable}" "{timeline}" ;; esac\nexec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def cpu_s(pids: list[int]) -> float:
    """CPU time that processes have taken so far, to the nanosecond, which /proc/PID/stat does not have."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def machine_busy_s() -> float:
    """CPU time that all processes of the machine have taken."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
