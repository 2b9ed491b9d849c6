"""The figures: what is measured, on which device, and what they should come to.

A `Plan` says how much is measured; `measure` goes through it and fills `Results`. Every figure is the median of the rounds of
one run, with the least and the most, and no figure is compared with one of another run.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import sampler
import timeline
from devices import FAST, LLAMA_2_7B, LLAMA_31_8B, Device, Server, cpu_s, machine_busy_s, serve, serve_bare
from load import (
    SAMPLED,
    LoadError,
    Target,
    Window,
    closed_loop,
    events,
    find,
    open_stream,
    percentile,
    prompt_of,
    saturate,
)

KINDS = {"greedy": None, "sampled": SAMPLED}
FLAT = 0.05
WINDOW_TOKENS = 320  # how many of a window's last positions are looked at


@dataclass(frozen=True)
class Figure:
    """Rounds of one measurement. `at_least` says which side of `reach` is good; without a reach it is told as it is."""

    name: str
    values: Sequence[float]
    unit: str
    reach: float | None = None
    at_least: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        if self.reach is None:
            return None
        return self.value >= self.reach if self.at_least else self.value <= self.reach

    def told(self) -> dict:
        value, least, most = (round(number, 6) for number in (self.value, min(self.values), max(self.values)))
        return {
            "name": self.name,
            "value": value,
            "min": least,
            "max": most,
            "unit": self.unit,
            "reach": self.reach,
            "met": self.met,
        }


@dataclass
class Results:
    """Figures, and what the plots are made of."""

    figures: list[Figure] = field(default_factory=list)
    throughput: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # line → (concurrency, tokens/s)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    itl_ms: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, timeline.Step] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[float], unit: str, reach: float | None = None, at_least: bool = False) -> None:
        self.figures.append(Figure(name, values, unit, reach, at_least))


@dataclass(frozen=True)
class Plan:
    """How much is measured. `devices`: each with the efficiency that it should reach; the first two are looked at closely."""

    devices: tuple[tuple[Device, float], ...]
    grown: Device  # with other numbers of slots and of web processes
    slots: tuple[int, ...] = (1, 4, 16, 64)
    web_processes: tuple[int, ...] = (1, 2, 4)
    windows: tuple[int, ...] = (512, 8192)
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rounds: int = 5
    seconds: float = 2.0  # of a round
    requests: int = 60  # of a round
    sampler: tuple[int, int, tuple[int, ...]] = (32, 128256, (1, 2))  # rows, vocabulary, threads


FULL = Plan(((LLAMA_31_8B, 0.97), (FAST, 0.90), (LLAMA_2_7B, 0.98)), FAST)
_SMALL = Device("a small device", 2, 5.0, 32000, 2, 2.0, 512)
SMOKE = Plan(((_SMALL, 0.9),), _SMALL, (1, 2), (1,), (512,), (1, 2), 1, 0.2, 3, (2, 2048, (1,)))


@dataclass
class Load:
    """Saturated rounds on one server, and what CPU time they cost."""

    windows: list[Window]
    marks: list[tuple[float, float, float, float]]  # CPU time so far: of the worker, the web processes, us, the machine

    def cores(self, which: int) -> list[float]:
        spans = [window.closed_at - window.opened_at for window in self.windows]
        return [(after[which] - before[which]) / span for before, after, span in zip(self.marks, self.marks[1:], spans)]

    @property
    def others(self) -> list[float]:
        """Processes that have nothing to do with this: what they took was not there for the server."""
        return [max(0.0, most - sum(ours)) for most, *ours in zip(*(self.cores(which) for which in (3, 0, 1, 2)))]

    def us_per_token(self, *which: int) -> list[float]:
        taken = [sum(after[each] - before[each] for each in which) for before, after in zip(self.marks, self.marks[1:])]
        return [seconds / window.tokens * 1e6 for seconds, window in zip(taken, self.windows)]


WORKER, WEB, US = 0, 1, 2


def load(server: Server, target: Target, requests: Sequence[bytes], plan: Plan, tick: Callable[[], None]) -> Load:
    worker, web = server.worker_pids, server.web_pids
    marks = []

    def mark() -> None:
        marks.append((cpu_s(worker), cpu_s(web), cpu_s([os.getpid()]), machine_busy_s()))

    windows = asyncio.run(saturate(target, requests, plan.rounds, plan.seconds, min(0.5, plan.seconds), mark))
    tick()
    return Load(windows, marks)


def streams_for(target: Target, device: Device, count: int, sampling: dict | None = None) -> list[bytes]:
    """Requests that do not end before they are cut off."""
    return [target.request(prompt_of(20, number), device.window - 100, sampling) for number in range(count)]


def efficiency(loaded: Load, device: Device) -> list[float]:
    return [window.tokens_per_s / device.tokens_per_s for window in loaded.windows]


def measure(plan: Plan, results: Results, tick: Callable[[], None]) -> None:
    """Everything that the plan names, into `results`. `tick` is called as often as `ticks` says."""
    first = plan.devices[0][0]
    loads: dict[Device, Load] = {}
    for device, reach in plan.devices:
        with serve(device) as server:
            target = find(server.url)
            for kind, sampling in KINDS.items():
                loaded = load(server, target, streams_for(target, device, device.slots, sampling), plan, tick)
                loads[device] = loads.get(device, loaded)
                _efficiency(results, loaded, device, kind, reach)
            if device is first:
                _jitter(results, loads[device], device)
                _latency(results, target, device, plan, tick)
                _concurrency(results, server, target, device, plan, tick)
                written = asyncio.run(_some_events(target))
    _web(results, loads[first], first, written, plan, tick)
    _growth(results, loads, plan, tick)
    for device, _reach in plan.devices[:2]:
        for kind, sampling in KINDS.items():
            _timeline(results, device, kind, sampling, plan, tick)
    rows, vocab, threads = plan.sampler
    for told in sampler.measure(rows, vocab, threads, plan.rounds, lambda _case: tick()):
        values = [told["min"], told["value"], told["max"]]
        results.add(told["name"], values, told["unit"], told["reach"])


def ticks(plan: Plan) -> int:
    """How many steps the progress bar has."""
    cases = 2 * len(sampler.CASES) * len(plan.sampler[2])
    known = {device for device, _reach in plan.devices}
    grown = len({replace(plan.grown, slots=slots) for slots in plan.slots} - known)
    grown += sum(count > 1 for count in plan.web_processes) + len(plan.windows)
    return 2 * len(plan.devices) + 1 + len(plan.concurrencies) + 1 + grown + 2 * len(plan.devices[:2]) + cases


def _efficiency(results: Results, loaded: Load, device: Device, kind: str, reach: float) -> None:
    what = f"{device.slots} slots of {device.step_ms:g} ms, vocabulary {device.vocab}, {kind}"
    results.add(f"serving efficiency: {what}", efficiency(loaded, device), "of the device", reach, at_least=True)
    results.add(f"throughput: {what}", [window.tokens_per_s for window in loaded.windows], "tokens/s")
    for which, name in enumerate(("worker", "web process", "load generator")):
        results.add(f"CPU of the {name}: {what}", loaded.cores(which), "cores")
    results.add(f"CPU of everybody else: {what}", loaded.others, "cores")


def _jitter(results: Results, loaded: Load, device: Device) -> None:
    gaps = [[gap * 1e3 for gap in window.gaps_s] for window in loaded.windows]
    ratios = [percentile(each, 0.99) / device.step_ms for each in gaps]
    results.add(f"added jitter: inter-token p99, {device.slots} slots full", ratios, "steps", 1.25)
    results.itl_ms[f"{device.slots} slots full, a step of {device.step_ms:g} ms"] = [gap for each in gaps for gap in each]


def _latency(results: Results, target: Target, device: Device, plan: Plan, tick: Callable[[], None]) -> None:
    """One request after the other on a server that has nothing else to do."""
    request = target.request(prompt_of(20), 1)
    rounds = [asyncio.run(closed_loop(target, [request] * plan.requests, 1)) for _ in range(plan.rounds)]
    added = [[answer.ttft_s * 1e3 - device.prefill_ms for answer in answers] for answers in rounds]
    for share, reach in ((0.5, 3.0), (0.99, 10.0)):
        name = f"added latency: time to first token less the prefill, a slot free, p{share * 100:.0f}"
        results.add(name, [percentile(each, share) for each in added], "ms", reach)
    results.ttft_ms[f"a slot free, a prefill of {device.prefill_ms:g} ms"] = [
        each + device.prefill_ms for values in added for each in values
    ]
    tick()


def _concurrency(
    results: Results, server: Server, target: Target, device: Device, plan: Plan, tick: Callable[[], None]
) -> None:
    measured, possible = [], []
    for count in plan.concurrencies:
        loaded = load(server, target, streams_for(target, device, count), plan, tick)
        rates = [window.tokens_per_s for window in loaded.windows]
        results.add(f"throughput: {count} of {device.slots} slots busy", rates, "tokens/s")
        measured.append((count, statistics.median(rates)))
        possible.append((count, count / device.step_ms * 1e3))
    results.throughput |= {"measured": measured, "if the device never waited": possible}


async def _some_events(target: Target) -> list[str]:
    """Events as the server writes them, with the empty line behind each."""
    stream = await open_stream(target, target.request(prompt_of(20), 50))
    await stream.done
    return [f"data: {event.decode()}\n\n" for _at, event in events(stream.reads)][:-1]


def _web(results: Results, ours: Load, device: Device, written: list[str], plan: Plan, tick: Callable[[], None]) -> None:
    with serve_bare(written, device.step_ms) as server:
        target = Target(urlsplit(server.url))
        bare = load(server, target, streams_for(target, device, device.slots), plan, tick)
    costs = {"the server": ours.us_per_token(WEB), "a bare generator": bare.us_per_token(WEB)}
    ratios = [mine / least for mine, least in zip(*costs.values())]
    results.add(f"web process: CPU per token over a bare generator's, {device.slots} streams", ratios, "times", 2.0)
    for name, values in costs.items():
        results.add(f"web process: CPU per 1,000 streamed tokens, {name}", values, "ms")


def _growth(results: Results, loads: dict[Device, Load], plan: Plan, tick: Callable[[], None]) -> None:
    base = plan.grown
    by_slots = {}
    for slots in plan.slots:
        device = replace(base, slots=slots)
        if device not in loads:
            with serve(device) as server:
                target = find(server.url)
                loads[device] = load(server, target, streams_for(target, device, slots), plan, tick)
        by_slots[f"{slots} slots"] = efficiency(loads[device], device)
    by_web = {}
    for count in plan.web_processes:
        if count == 1:
            by_web["1 web process"] = efficiency(loads[base], base)
            continue
        with serve(base, count) as server:
            target = find(server.url)
            loaded = load(server, target, streams_for(target, base, base.slots), plan, tick)
        by_web[f"{count} web processes"] = efficiency(loaded, base)
    for what, measured in (("slots", by_slots), ("web processes", by_web)):
        spreads = [1 - min(values) / max(values) for values in zip(*measured.values())]
        results.add(f"growth: efficiency, least below most, by {what}", spreads, "of the most", FLAT)
        for name, values in measured.items():
            results.add(f"growth: efficiency, {name} of {base.step_ms:g} ms", values, "of the device")
    costs = {window: _cost_at(replace(LLAMA_2_7B, window=window), plan, tick) for window in plan.windows}
    changes = [max(values) / min(values) - 1 for values in zip(*costs.values())]
    results.add("growth: cost per token, most over least, by window", changes, "of the least", FLAT)
    for window, values in costs.items():
        results.add(f"growth: CPU of the server per token, at the end of a window of {window}", values, "us")


def _cost_at(device: Device, plan: Plan, tick: Callable[[], None]) -> list[float]:
    """CPU time that a token takes at the end of the window, in microseconds."""
    long = prompt_of(device.window)
    parameters = {"do_sample": False, "truncate": device.window - WINDOW_TOKENS}
    with serve(device) as server:
        target = find(server.url)
        requests = [target.request(long, WINDOW_TOKENS, parameters)] * device.slots
        most_s = (WINDOW_TOKENS - 30) * device.step_ms / 1e3 / 1.3 - 0.5  # steps take longer than the device
        loaded = load(server, target, requests, replace(plan, seconds=min(plan.seconds, most_s / plan.rounds)), tick)
    return loaded.us_per_token(WORKER, WEB)


def _timeline(results: Results, device: Device, kind: str, sampling: dict | None, plan: Plan, tick: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        path = Path(name) / "timeline.json"
        with serve(device, timeline=path) as server:
            target = find(server.url)
            load(server, target, streams_for(target, device, device.slots, sampling), replace(plan, rounds=1), tick)
        steps = timeline.steps(path)
    what = f"{device.slots} slots of {device.step_ms:g} ms, vocabulary {device.vocab}, {kind}"
    for part in timeline.PARTS:
        results.add(f"between two steps: {part}: {what}", quartiles([step.seconds(part) * 1e6 for step in steps]), "us")
    gaps = [step.gap_s * 1e6 for step in steps]
    results.add(f"between two steps: all that the device waits: {what}", quartiles(gaps), "us")
    results.steps[what] = sorted(steps, key=lambda step: step.gap_s)[len(steps) // 2]


def quartiles(values: Sequence[float]) -> list[float]:
    """Of thousands of steps the least and the most say nothing."""
    return [percentile(values, share) for share in (0.25, 0.5, 0.75)]


def measure_url(target: Target, concurrencies: Sequence[int], tokens: int, rounds: int, results: Results, tick) -> None:
    """Throughput, time to first token and inter-token latency of any server, at each concurrency."""
    results.throughput["measured"] = line = []
    number = 0
    for concurrency in concurrencies:
        found: dict[str, list[float]] = {"tokens/s": [], "ttft p50": [], "ttft p99": [], "itl p50": [], "itl p99": []}
        all_ttft, all_gaps = [], []
        for _ in range(rounds):
            prompts = [prompt_of(90, number + offset) for offset in range(max(4, 2 * concurrency))]
            number += len(prompts)
            started_at = time.perf_counter()
            requests = [target.request(prompt, tokens) for prompt in prompts]
            answers = asyncio.run(closed_loop(target, requests, concurrency))
            wall_s = time.perf_counter() - started_at
            if failed := [answer.error for answer in answers if answer.error]:
                raise LoadError(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
            ttft = [answer.ttft_s * 1e3 for answer in answers]
            gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s] or [0.0]
            found["tokens/s"].append(sum(answer.tokens for answer in answers) / wall_s)
            for name, values in (("ttft", ttft), ("itl", gaps)):
                found[f"{name} p50"].append(percentile(values, 0.5))
                found[f"{name} p99"].append(percentile(values, 0.99))
            all_ttft += ttft
            all_gaps += gaps
            tick()
        line.append((concurrency, statistics.median(found["tokens/s"])))
        results.ttft_ms[f"{concurrency} at a time"], results.itl_ms[f"{concurrency} at a time"] = all_ttft, all_gaps
        for name, values in found.items():
            unit = "tokens/s" if name == "tokens/s" else "ms"
            results.add(f"{'throughput' if name == 'tokens/s' else name}: {concurrency} at a time", values, unit)
