"""The figures of `make bench`: what is measured on which device, and the targets.

`measure` yields `Figure`s of the server on simulated devices, `measure_url` of any server. Every figure is the median of the
rounds of one run, with the least and the most. bench.py shows them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from devices import COPYING, FAST, LLAMA_2_7B, LLAMA_31_8B, SPECULATING, Device, serve
from launch import Server, cpu_s, machine_busy_s
from load import SAMPLED, Target, Window, closed_loop, find, percentile, prompt_of, saturate

PETS = {
    "type": "array",
    "minItems": 5000,  # more than fit
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer"},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "toys": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "toys"],
    },
}
JSON = {"grammar": {"type": "json", "value": PETS}}
DRAFT_TOKENS = 7  # draft tokens of a slot in a call
PLAIN = {name: value for name, value in SAMPLED.items() if name != "seed"}  # sampling that a device supports
PET_TOOL = {
    "type": "function",
    "function": {"name": "add_pets", "parameters": {"type": "object", "properties": {"pets": PETS}}},
}
KINDS = {"greedy": None, "sampled": SAMPLED, "sampled, JSON": SAMPLED | JSON}


@dataclass(frozen=True)
class Figure:
    """Rounds of one measurement. `at_least` says which side of `target` is good; without a target it is information."""

    name: str
    values: Sequence[float]
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def as_dict(self) -> dict:
        numbers = {"value": self.value, "min": min(self.values), "max": max(self.values)}
        rounded = {name: round(number, 6) for name, number in numbers.items()}
        return {"name": self.name, **rounded, "unit": self.unit, "target": self.target, "met": self.met}


@dataclass(frozen=True)
class Plan:
    """What is measured: each device with its targets for the first KINDS; for JSON 0.95 of the target for sampled."""

    devices: tuple[tuple[Device | float, ...], ...]
    copying: Device | None = None  # logits take time to copy: compares on-device, host and hybrid sampling
    speculating: Device | None = None  # verifies draft tokens
    rounds: int = 5
    seconds: float = 2.0  # of a round
    requests: int = 60  # of a round, for the serving overhead


FULL = Plan(((LLAMA_2_7B, 0.96, 0.95), (LLAMA_31_8B, 0.92, 0.89, 0.845), (FAST, 0.90, 0.82)), COPYING, SPECULATING)
SMALL = Device(2, 5.0, 32000, 2, 2.0)
SMALL_COPYING = replace(SMALL, copy_mb_s=20.0, verify_ms=6.5)
SMOKE = Plan(((SMALL, 0.9, 0.9),), SMALL_COPYING, SMALL_COPYING, rounds=1, seconds=2.0, requests=3)


def measure(plan: Plan) -> Iterator[Figure]:
    """Every figure that the plan names."""
    for number, (device, *targets) in enumerate(plan.devices):
        with serve(device, "--sampling", "host") as server:
            target = find(server.url)
            if number == 0:
                yield from _added_latency(target, device, plan)
            clocks, prompts = _clocks(server), [prompt_of(20, slot) for slot in range(device.slots)]
            for (kind, sampling), goal in zip(KINDS.items(), targets):
                requests = [target.request(prompt, device.window - 100, sampling) for prompt in prompts]
                windows = asyncio.run(saturate(target, requests, plan.rounds, plan.seconds, clocks))
                yield from _of_windows(windows, device, kind, goal)
            if number == 0:
                yield from _chats(target, device, plan, clocks)
    if plan.copying:
        yield from _where_sampled(plan.copying, plan)
    if plan.speculating:
        yield from _speculated(plan.speculating, plan)


def _chats(target: Target, device: Device, plan: Plan, clocks: Callable[[], list[float]]) -> Iterator[Figure]:
    """CPU time of a chat's tokens in the API server process: with tools, each token's text is searched for calls."""
    for kind, tools in (("chat", []), ("chat with tools", [PET_TOOL])):
        requests = [target.chat(prompt_of(20, slot), device.window - 400, tools) for slot in range(device.slots)]
        windows = asyncio.run(saturate(target, requests, plan.rounds, plan.seconds, clocks))
        yield _cpu_of(windows, 1, f"API server processes: {device.name}, {kind}")


def _cpu_of(windows: Sequence[Window], number: int, name: str) -> Figure:
    """CPU time of the processes that `_clocks` counts at `number`."""
    costs = [window.spent[number] / (window.tokens_per_s * window.seconds) * 1e6 for window in windows]
    return Figure(f"CPU of the {name}", costs, "us a token")


def _rates(device: Device, plan: Plan, flags: Sequence[str], *kinds: list[dict | None]) -> list[list[float]]:
    """Tokens per second with a stream in every slot: the rounds of each kind of parameters, which the streams take in turns."""
    with serve(device, *flags) as server:
        target = find(server.url)
        found = []
        for kind in kinds:
            parameters = (kind * device.slots)[: device.slots]
            prompts = [prompt_of(20, slot) for slot in range(device.slots)]
            requests = [target.request(each, device.window - 100, more) for each, more in zip(prompts, parameters)]
            windows = asyncio.run(saturate(target, requests, plan.rounds, plan.seconds, _clocks(server)))
            found.append([window.tokens_per_s for window in windows])
        return found


def _speculated(device: Device, plan: Plan) -> Iterator[Figure]:
    """Tokens per second with speculative decoding over those without: for output that repeats, and that does not."""
    plan = replace(plan, rounds=min(plan.rounds, 3), seconds=min(plan.seconds, 2.0))  # any longer, and the streams would end
    random = PLAIN | {"min_p": 0.001, "temperature": 1.5}  # which only the host samples
    without = _rates(device, plan, ("--speculate", "0"), [None], [random])
    speculated = _rates(device, plan, ("--speculate", str(DRAFT_TOKENS)), [None], [random])
    for what, goal, base, values in zip(("repeats", "does not repeat"), (1.5, 0.97), without, speculated):
        of_base = [value / statistics.median(base) for value in values]
        name = f"draft tokens over none, output that {what}: {device.name}"
        yield Figure(name, of_base, "ratio", goal, True)


def _where_sampled(device: Device, plan: Plan) -> Iterator[Figure]:
    """Tokens per second with a stream in every slot, sampled on the device, on the host, and in hybrid steps."""

    def rates(sampling: str, *kinds: list[dict | None]) -> list[list[float]]:
        return _rates(device, plan, ("--sampling", sampling), *kinds)

    one_guided = [PLAIN | JSON, *([PLAIN] * (device.slots - 1))]
    (on_device,) = rates("device", [PLAIN])
    on_host, guided_on_host = rates("host", [PLAIN], one_guided)
    greedy, sampled, guided = rates("hybrid", [None], [PLAIN], one_guided)
    name = f"{device.name}, logits copied at {device.copy_mb_s:g} MB/s"
    for where, values in (("device", on_device), ("host", on_host)):
        yield Figure(f"sampling on the {where}: {name}", values, "tokens/s")
    for what, values in (("greedy", greedy), ("sampled", sampled)):
        of_device = [value / statistics.median(on_device) for value in values]
        yield Figure(f"hybrid, {what}, over the device: {name}", of_device, "ratio", 0.97, True)
    of_host = [value / statistics.median(guided_on_host) for value in guided]
    yield Figure(f"hybrid, JSON in one row, over the host: {name}", of_host, "ratio", 0.99, True)


def _clocks(server: Server) -> Callable[[], list[float]]:
    """CPU seconds of the worker, of the API server processes, of this process, and of the machine."""
    processes = [server.pids("worker.py"), server.pids("web.py"), [os.getpid()]]
    return lambda: [*(cpu_s(pids) for pids in processes), machine_busy_s()]


def _of_windows(windows: Sequence[Window], device: Device, kind: str, target: float) -> Iterator[Figure]:
    name = f"{device.name}, {kind}"
    rates = [window.tokens_per_s for window in windows]
    jitter = [percentile(window.gaps_s, 0.99) * 1e3 / device.step_ms for window in windows]
    yield Figure(f"serving efficiency: {name}", [rate / device.tokens_per_s for rate in rates], "of the device", target, True)
    yield Figure(f"inter-token latency p99: {name}", jitter, "steps")
    for number, process in enumerate(("worker", "API server processes")):
        yield _cpu_of(windows, number, f"{process}: {name}")
    others = [max(0.0, window.spent[3] - sum(window.spent[:3])) / window.seconds for window in windows]
    yield Figure(f"CPU of everything else on the machine: {name}", others, "cores")


def _added_latency(target: Target, device: Device, plan: Plan) -> Iterator[Figure]:
    """One request after the other on a server that has nothing else to do."""
    request = target.request(prompt_of(20), 1)
    rounds = [asyncio.run(closed_loop(target, [request] * plan.requests, 1)) for _ in range(plan.rounds)]
    added = [[answer.ttft_s * 1e3 - device.prefill_ms for answer in answers] for answers in rounds]
    name = "serving overhead: time to first token less the prefill, a slot free"
    for share in (0.5, 0.99):
        yield Figure(f"{name}, p{share * 100:.0f}", [percentile(each, share) for each in added], "ms")


def measure_url(target: Target, concurrencies: Sequence[int], tokens: int, rounds: int) -> Iterator[Figure]:
    """Throughput, time to first token and inter-token latency of any server, at each concurrency."""
    number = 0
    for concurrency in concurrencies:
        found: dict[str, list[float]] = {"throughput": [], "ttft p50": [], "ttft p99": [], "itl p50": [], "itl p99": []}
        for _ in range(rounds):
            prompts = [prompt_of(90, number + offset) for offset in range(max(4, 2 * concurrency))]
            number += len(prompts)
            requests = [target.request(prompt, tokens) for prompt in prompts]
            started_at = time.perf_counter()
            answers = asyncio.run(closed_loop(target, requests, concurrency))
            found["throughput"].append(sum(answer.tokens for answer in answers) / (time.perf_counter() - started_at))
            gaps = [gap for answer in answers for gap in answer.gaps_s] or [0.0]
            for name, values in (("ttft", [answer.ttft_s for answer in answers]), ("itl", gaps)):
                for share in (0.5, 0.99):
                    found[f"{name} p{share * 100:.0f}"].append(percentile(values, share) * 1e3)
        for name, values in found.items():
            unit = "tokens/s" if name == "throughput" else "ms"
            yield Figure(f"{name}: {concurrency} at a time", values, unit)
