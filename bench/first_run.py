"""A first run on a device: what a simulator cannot show, in one JSON report without names, addresses or keys.

    python3 bench/first_run.py [--model-id Qwen/Qwen2.5-7B-Instruct] [--image IMAGE] [--out report.json]

Starts the server of the image, for each model, on the device once for each value of --sampling, each with its own compiled
graphs, and on the CPU as a reference. Measures how long compiling and startup take, whether chunked prefill works, the steps of
1 stream and of a stream in every slot (from the server's own /metrics), the outputs of ten prompts against those of the CPU,
and the token ids of 64 steps in all slots against those that the host sampled and against the CPU's.
docs/first-run.md says what to do with the report. `--server COMMAND --device cpu` rehearses it on any machine, with the server
of a checkout.

Owns the report. Needs only Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from launch import Server, free_port
from load import Target, closed_loop, prompt_of

IMAGE = "ghcr.io/neuron-textgen/neuron-textgen"
# By device. The image for Neuron devices does not support CPUs.
IN_IMAGE = {
    "neuron": "docker run --rm --device=/dev/neuron0 -e HF_TOKEN -p {port}:80 -v {data}:/data {image}",
    "cpu": "docker run --rm -e HF_TOKEN -p {port}:80 -v {data}:/data {cpu_image}",
}
PACKAGES = "neuronx-cc|torch|torch-neuronx|transformers|transformers-neuronx|aws-neuronx-.*|libneuronxla|numpy"
LIST_PACKAGES = """
from importlib.metadata import distributions
for each in distributions():
    print(each.metadata["Name"] + "==" + each.version)
"""
# Reported by users in 2026 as failing on Inferentia2 elsewhere: compilation, and garbage from on-device sampling with tp 2.
MODELS = ["Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"]
START_LIMIT_S = 3 * 3600.0
TOKENS = 64
CLOSE = 0.1  # lead in log-probability within which rounding may change the token
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,",
    "Die Hauptstadt von Deutschland heißt",
    "List three colors:\n1.",
    "Q: What is 17 + 25?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


def machine() -> dict:
    """What the system says of the hardware, the driver and itself."""

    def line(path: str) -> str | None:
        found = Path(path)
        return found.read_text().strip() if found.is_file() else None

    return {
        "instance": line("/sys/devices/virtual/dmi/id/product_name"),
        "driver": line("/sys/module/neuron/version"),
        "devices": len(list(Path("/dev").glob("neuron[0-9]*"))),
        "processors": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
    }


def packages(given: argparse.Namespace) -> dict[str, str]:
    """Versions in the image, or in this Python's environment."""
    command = [given.python, "-c", LIST_PACKAGES]
    if not given.server:
        command = ["docker", "run", "--rm", "--entrypoint", "python3", given.image, *command[1:]]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    return dict(re.findall(rf"^({PACKAGES})==(\S+)$", listed, re.MULTILINE))


def checked_versions(given: argparse.Namespace) -> dict | None:
    """The versions of driver and runtime library, read and compared by the image. None: they do not fit."""
    command = [given.python, "-m", "models.neuron.driver"]
    if not given.server:
        command = ["docker", "run", "--rm", "-e", "PYTHONPATH=/app", "--entrypoint", "python3", given.image, *command[1:]]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    print(ended.stderr, end="", file=sys.stderr)
    if ended.returncode == 2:
        return None
    return json.loads(ended.stdout) if ended.returncode == 0 else {}


def started(given: argparse.Namespace, model: str, folder: Path, device: str, *flags: str) -> Server:
    port = free_port()
    filled = (given.server or IN_IMAGE[device]).format(port=port, **vars(given))
    command = [*shlex.split(filled), "--model-id", model, "--device", device, *flags]
    command += ["--max-total-tokens", str(given.max_total_tokens)]
    environment = {**os.environ, "PORT": str(port)}
    return Server(command, port, folder / "log", environment).wait_ready(limit_s=START_LIMIT_S)


def post(server: Server, path: str, body: dict) -> dict:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def texts(server: Server) -> list[list[tuple[int, float]]]:
    """For each prompt the most likely tokens, each with its lead over the second in log-probability."""
    found = []
    for prompt in PROMPTS:
        parameters = {"max_new_tokens": 24, "details": True, "top_n_tokens": 2}
        details = post(server, "/generate", {"inputs": prompt, "parameters": parameters})["details"]
        leads = [top[0]["logprob"] - top[1]["logprob"] for top in details["top_tokens"]]
        found.append([(token["id"], lead) for token, lead in zip(details["tokens"], leads)])
    return found


def compared(ours: list[list[tuple[int, float]]], cpu: list[list[tuple[int, float]]]) -> dict[str, int]:
    """How many outputs are equal, and how many of the others diverge where the CPU's best tokens were close."""
    counts = {"equal": 0, "part at a close choice": 0, "part at a clear choice": 0}
    for here, there in zip(ours, cpu):
        parts = next((n for n, (a, b) in enumerate(zip(here, there)) if a[0] != b[0]), None)
        if parts is None:
            counts["equal"] += 1
        else:
            counts[f"part at a {'close' if there[parts][1] < CLOSE else 'clear'} choice"] += 1
    return counts


def token_ids(server: Server) -> list[list[int]]:
    """For each prompt the greedy token ids of TOKENS steps. All prompts are sent at a time: every slot generates."""
    body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        responses = list(pool.map(lambda prompt: post(server, "/v1/completions", {"prompt": prompt, **body}), PROMPTS))
    return [response["choices"][0]["token_ids"] for response in responses]


def compared_ids(ours: list[list[int]], others: list[list[int]]) -> dict:
    """How many prompts have equal ids, and at which step those of the others differ first."""
    differ = [[a == b for a, b in zip(here, there)].index(False) for here, there in zip(ours, others) if here != there]
    return {"equal": len(ours) - len(differ), "differ_first_at_step": sorted(differ)}


def step_sums(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        lines = response.read().decode()
    pattern = r'^tgi_batch_forward_duration_(sum|count)\{method="(\w+)"\} (\S+)$'
    return {f"{method} {what}": float(value) for what, method, value in re.findall(pattern, lines, re.MULTILINE)}


def steps(server: Server, streams: int) -> dict[str, float]:
    """Milliseconds of a decode step and of a call with prompt tokens, and tokens per second at the clients."""
    target = Target(urlsplit(server.url), model="model")
    requests = [target.request(prompt_of(90, 1000 * streams + n), TOKENS) for n in range(2 * streams)]
    before = step_sums(server)
    answers = asyncio.run(closed_loop(target, requests, streams))
    after = step_sums(server)
    found: dict[str, float] = {"streams": streams}
    for method, name in (("decode", "step_ms"), ("prefill", "prompt_call_ms")):
        spent, count = (after[f"{method} {what}"] - before[f"{method} {what}"] for what in ("sum", "count"))
        found[name] = round(spent / max(count, 1) * 1e3, 2)
    seconds = max(answer.times[-1] for answer in answers) - min(answer.started_at for answer in answers)
    found["tokens_per_s"] = round(sum(answer.tokens for answer in answers) / seconds, 1)
    return found


def without_paths(text: str) -> str:
    return re.sub(r"(/[\w.@+-]+){2,}", "PATH", text)[:300]


class Outputs(NamedTuple):
    """What a server generates for PROMPTS."""

    texts: list[list[tuple[int, float]]]
    ids: list[list[int]]


def measured(given: argparse.Namespace, model: str, folder: Path, *flags: str) -> tuple[dict, Outputs]:
    """One value of --sampling: two startups, the second with what the first has compiled."""
    with started(given, model, folder, given.device, *flags) as server:
        first_s, log = server.ready_s, server.log
    with started(given, model, folder, given.device, *flags) as server:
        with urllib.request.urlopen(server.url + "/info", timeout=60) as response:
            info = json.load(response)
        slots = info["max_batch_size"]
        refused = re.search(r"Chunked prefill is off.*?: (.*)", log)
        found = {
            "flags": list(flags),
            "first_start_s": round(first_s, 1),
            "compiled_s": [int(seconds) for seconds in re.findall(r"Compiled in (\d+) s", log)],
            "later_start_s": round(server.ready_s, 1),
            "chunks_refused": without_paths(refused[1]) if refused else None,
            "slots": slots,
            "dtype": info["model_dtype"],
            "steps": [steps(server, streams) for streams in sorted({1, slots})],
        }
        has_logprobs = "device" not in flags
        return found, Outputs(texts(server) if has_logprobs else [], token_ids(server))


def failure(error: Exception) -> str:
    return without_paths(str(error).strip().splitlines()[-1])


def report_of(given: argparse.Namespace, runtime: str | None) -> dict:
    """`runtime`: the version of the image's runtime library."""
    report = {"machine": {**machine(), "runtime": runtime}, "packages": packages(given)}
    with tempfile.TemporaryDirectory(prefix="first-run-") as name:
        report["models"] = [report_of_model(given, model, Path(name)) for model in given.model_id]
    return report


def report_of_model(given: argparse.Namespace, model: str, folder: Path) -> dict:
    """The failure of one value of --sampling is part of the report."""
    report: dict = {"model": "a local folder" if Path(model).exists() else model}
    report["runs"] = runs = []
    outputs = {}  # by the place in `runs`
    ways = [[]]
    if given.device == "neuron":
        ways = [["--sampling", way, "--tp-degree", str(given.tp_degree)] for way in ("host", "hybrid", "device")]
    for flags in ways:
        try:
            found, outputs[len(runs)] = measured(given, model, folder, *flags)
        except (RuntimeError, OSError) as error:
            found = {"flags": flags, "failed": failure(error)}
        runs.append(found)
        print(json.dumps(found), flush=True)
    if 0 in outputs:
        for place, said in outputs.items():
            if place > 0:
                runs[place]["ids_as_host"] = compared_ids(said.ids, outputs[0].ids)
    if given.without_cpu:
        return report
    try:
        with started(given, model, folder, "cpu") as server:
            expected = Outputs(texts(server), token_ids(server))
    except (RuntimeError, OSError) as error:
        report["cpu_failed"] = failure(error)
        return report
    for place, said in outputs.items():
        if said.texts:
            runs[place]["texts"] = compared(said.texts, expected.texts)
        runs[place]["ids_as_cpu"] = compared_ids(said.ids, expected.ids)
    return report


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", nargs="+", default=MODELS, help=f"by default {' and '.join(MODELS)}")
    parser.add_argument("--tp-degree", type=int, default=2, help="on a Neuron device")
    parser.add_argument("--image", default=IMAGE)
    parser.add_argument("--cpu-image", default=f"{IMAGE}:cpu", help="for the outputs of a CPU")
    parser.add_argument("--data", type=Path, default=Path("data").absolute(), help="the folder that is mounted on /data")
    parser.add_argument("--server", help="a command instead of docker's, which listens on {port} or PORT")
    parser.add_argument("--device", choices=("neuron", "cpu"), default="neuron")
    parser.add_argument("--max-total-tokens", type=int, default=2048)
    parser.add_argument("--without-cpu", action="store_true", help="compares no outputs")
    parser.add_argument("--out", type=Path, default=Path("first-run.json"))
    parser.set_defaults(python=sys.executable)
    given = parser.parse_args(argv)
    versions = checked_versions(given) if given.device == "neuron" else {}
    if versions is None:  # the line that says so is printed
        return 2
    report = report_of(given, versions.get("runtime"))
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"The report is {given.out}; docs/first-run.md says where to send it")
    return 1 if any("failed" in run for model in report["models"] for run in model["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
