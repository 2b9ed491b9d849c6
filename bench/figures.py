"""The figures: what is measured, on which device, and what they should come to.

A `Plan` says how much is measured; `measure` goes through it and fills `Results`. Every figure is the median of the rounds of
one run, with the least and the most, and no figure is compared with one of another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import sampler
import timeline
from devices import FAST, LLAMA_2_7B, LLAMA_31_8B, Device, Server, cpu_s, machine_busy_s, serve, serve_bare
from load import (
    SAMPLED,
    LoadError,
    Target,
    Window,
    besiege,
    closed_loop,
    events,
    find,
    open_stream,
    percentile,
    prompt_of,
    saturate,
)

KINDS = {"greedy": None, "sampled": SAMPLED}
# As OpenAI's clients ask, who have no top_k. Told as it is: sums over whole vocabularies are more work.
MORE_KINDS = {"top-p alone": {name: value for name, value in SAMPLED.items() if name != "top_k"}}
FLAT = 0.05
Key = TypeVar("Key")
WINDOW_TOKENS = 330  # how many of a window's last positions are looked at
OF_WINDOWS = 3  # times as many rounds


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
    clients: tuple[int, ...] = (1, 2, 4, 8)  # times the slots; more than devices.WAITING times are refused
    answer_tokens: int = 50  # of each of theirs
    rounds: int = 5
    seconds: float = 2.0  # of a round
    requests: int = 60  # of a round
    sampler: tuple[int, int, tuple[int, ...]] = (32, 128256, (1, 2))  # rows, vocabulary, threads


FULL = Plan(((LLAMA_31_8B, 0.97), (FAST, 0.90), (LLAMA_2_7B, 0.98)), FAST)
_SMALL = Device("a small device", 2, 5.0, 32000, 2, 2.0)
SMOKE = Plan(((_SMALL, 0.9),), _SMALL, (2,), (1,), (512,), (1, 2), (1, 8), 20, 1, 1.0, 3, (2, 2048, (1,)))


@dataclass(frozen=True)
class Round:
    """Saturated streams for a while, and the CPU time that went by meanwhile, in seconds."""

    window: Window
    worker_s: float
    web_s: float
    load_s: float
    machine_s: float

    @property
    def cores(self) -> dict[str, float]:
        """How many were busy, by whom. What everybody else took was not there for the server."""
        seconds = {"the worker": self.worker_s, "the web process": self.web_s, "the load generator": self.load_s}
        seconds["everybody else"] = max(0.0, self.machine_s - sum(seconds.values()))
        return {name: taken / (self.window.closed_at - self.window.opened_at) for name, taken in seconds.items()}


@dataclass(frozen=True)
class Subject:
    """A server, and streams that keep it busy."""

    server: Server
    target: Target
    requests: list[bytes]

    def rounds(self, plan: Plan, count: int) -> list[Round]:
        worker, web = self.server.worker_pids, self.server.web_pids
        marks = []

        def mark() -> None:
            marks.append((cpu_s(worker), cpu_s(web), cpu_s([os.getpid()]), machine_busy_s()))

        settle_s = min(0.5, plan.seconds)
        try:
            windows = asyncio.run(saturate(self.target, self.requests, count, plan.seconds, settle_s, mark))
        except FileNotFoundError:  # in /proc
            raise LoadError(f"a process of the server died under the load; the end of its log:\n{self.server.log}") from None
        spent = ([now - then for now, then in zip(after, before)] for before, after in pairwise(marks))
        return [Round(window, *seconds) for window, seconds in zip(windows, spent)]


def in_turns(subjects: dict[Key, Subject], plan: Plan, tick: Callable[[], None]) -> dict[Key, list[Round]]:
    """A round of each, again and again: what changes on the machine meanwhile changes all alike."""
    found: dict[Key, list[Round]] = {key: [] for key in subjects}
    plan = replace(plan, seconds=0.6 * plan.seconds)
    for _ in range(plan.rounds):
        for key, subject in subjects.items():
            found[key] += subject.rounds(plan, 1)
        tick()
    return found


def streams_for(target: Target, device: Device, count: int, sampling: dict | None = None) -> list[bytes]:
    """Requests that do not end before they are cut off."""
    return [target.request(prompt_of(20, number), device.window - 100, sampling) for number in range(count)]


def efficiency(rounds: Sequence[Round], device: Device) -> list[float]:
    return [each.window.tokens_per_s / device.tokens_per_s for each in rounds]


def measure(plan: Plan, results: Results, tick: Callable[[], None]) -> None:
    """Everything that the plan names, into `results`. `tick` is called as often as `ticks` says."""
    first = plan.devices[0][0]
    for device, reach in plan.devices:
        with serve(device) as server:
            target = find(server.url)
            for kind, sampling in (KINDS | MORE_KINDS).items():
                rounds = Subject(server, target, streams_for(target, device, device.slots, sampling)).rounds(plan, plan.rounds)
                _efficiency(results, rounds, device, kind, reach if kind in KINDS else None)
                if device is first and sampling is None:
                    _jitter(results, rounds, device)
                tick()
            if device is first:
                _latency(results, target, device, plan, tick)
                _concurrency(results, server, target, device, plan, tick)
                _web(results, server, target, device, plan, tick)
                _past_saturation(results, target, device, plan, tick)  # last: it leaves the server busy for a moment
    _growth(results, plan, tick)
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
    cases += len(KINDS | MORE_KINDS) * len(plan.devices)
    return 1 + len(plan.concurrencies) + (4 + OF_WINDOWS) * plan.rounds + 2 * len(plan.devices[:2]) + cases


def _efficiency(results: Results, rounds: Sequence[Round], device: Device, kind: str, reach: float | None) -> None:
    results.add(f"serving efficiency: {named(device, kind)}", efficiency(rounds, device), "of the device", reach, at_least=True)
    results.add(f"throughput: {named(device, kind)}", [each.window.tokens_per_s for each in rounds], "tokens/s")
    for name in rounds[0].cores:
        results.add(f"CPU of {name}: {named(device, kind)}", [each.cores[name] for each in rounds], "cores")


def named(device: Device, kind: str) -> str:
    return f"{device.slots} slots of {device.step_ms:g} ms, vocabulary {device.vocab}, {kind}"


def _jitter(results: Results, rounds: Sequence[Round], device: Device) -> None:
    gaps = [[gap * 1e3 for gap in each.window.gaps_s] for each in rounds]
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
        rounds = Subject(server, target, streams_for(target, device, count)).rounds(
            replace(plan, seconds=0.5 * plan.seconds), 3
        )
        rates = [each.window.tokens_per_s for each in rounds]
        results.add(f"throughput: {count} of {device.slots} slots busy", rates, "tokens/s")
        measured.append((count, statistics.median(rates)))
        possible.append((count, count / device.step_ms * 1e3))
        tick()
    results.throughput |= {"measured": measured, "if the device never waited": possible}


def _past_saturation(results: Results, target: Target, device: Device, plan: Plan, tick: Callable[[], None]) -> None:
    """Clients with short requests, up to more than the server takes, in turns."""
    rates: dict[int, list[float]] = {times: [] for times in plan.clients}
    settle_s = plan.answer_tokens * device.step_ms / 1e3  # until the first of them have had their answers
    for number in range(plan.rounds):
        for times, found in rates.items():
            count = times * device.slots
            requests = [target.request(prompt_of(20, number * count + n), plan.answer_tokens) for n in range(count)]
            window = asyncio.run(besiege(target, requests, count, settle_s, plan.seconds))
            found.append(window.tokens / (window.closed_at - window.opened_at))
        tick()
    peaks = [max(values) for values in zip(*rates.values())]
    beyond = [min(values) for values in zip(*(found for times, found in rates.items() if times > 1))]
    name = f"throughput past saturation: the least over the peak, up to {max(rates)} clients a slot"
    results.add(name, [least / peak for least, peak in zip(beyond, peaks)], "of the peak", 0.9, at_least=True)
    for times, found in rates.items():
        results.add(f"throughput: {times * device.slots} clients on {device.slots} slots, short answers", found, "tokens/s")


def _web(results: Results, server: Server, target: Target, device: Device, plan: Plan, tick: Callable[[], None]) -> None:
    requests = streams_for(target, device, device.slots)
    with serve_bare(asyncio.run(_some_events(target)), device.step_ms) as bare:
        subjects = {"the server": Subject(server, target, requests)}
        subjects["a bare generator"] = Subject(bare, Target(urlsplit(bare.url)), requests)
        found = in_turns(subjects, plan, tick)
    costs = {name: [each.web_s / each.window.tokens * 1e6 for each in rounds] for name, rounds in found.items()}
    ratios = [ours / least for ours, least in zip(*costs.values())]
    results.add(f"web process: CPU per token over a bare generator's, {device.slots} streams", ratios, "times", 2.0)
    for name, values in costs.items():
        results.add(f"web process: CPU per 1,000 streamed tokens, {name}", values, "ms")


async def _some_events(target: Target) -> list[str]:
    """Events as the server writes them, with the empty line behind each."""
    stream = await open_stream(target, target.request(prompt_of(20), 50))
    await stream.done
    return [f"data: {event.decode()}\n\n" for _at, event in events(stream.reads)][:-1]


def _growth(results: Results, plan: Plan, tick: Callable[[], None]) -> None:
    base = plan.grown
    by_slots = {f"{slots} slot{'s' * (slots > 1)}": (replace(base, slots=slots), 1) for slots in plan.slots}
    by_web = {f"{count} web process{'es' * (count > 1)}": (base, count) for count in plan.web_processes}
    for what, grown in (("slots", by_slots), ("web processes", by_web)):
        with contextlib.ExitStack() as stack:
            subjects = {}
            for name, (device, count) in grown.items():
                server = stack.enter_context(serve(device, count))
                target = find(server.url)
                subjects[name] = Subject(server, target, streams_for(target, device, device.slots))
            found = in_turns(subjects, plan, tick)
        measured = {name: efficiency(rounds, grown[name][0]) for name, rounds in found.items()}
        spreads = [1 - min(values) / max(values) for values in zip(*measured.values())]
        results.add(f"growth: efficiency, how far the least is below the most, by {what}", spreads, "of the most", FLAT)
        for name, values in measured.items():
            results.add(f"growth: efficiency, {name}, a step of {base.step_ms:g} ms", values, "of the device")
    _growth_of_windows(results, plan, tick)


def _growth_of_windows(results: Results, plan: Plan, tick: Callable[[], None]) -> None:
    """CPU time that a token takes at the end of a window. It changes from moment to moment more than any other figure."""
    plan = replace(plan, rounds=OF_WINDOWS * plan.rounds)
    with contextlib.ExitStack() as stack:
        subjects = {}
        for window in plan.windows:
            device = replace(LLAMA_2_7B, window=window)
            server = stack.enter_context(serve(device))
            target = find(server.url)
            parameters = {"do_sample": False, "truncate": window - WINDOW_TOKENS}
            request = target.request(prompt_of(window), WINDOW_TOKENS, parameters)
            subjects[window] = Subject(server, target, [request] * device.slots)
        found = in_turns(subjects, plan, tick)
    costs = {
        window: [(each.worker_s + each.web_s) / each.window.tokens * 1e6 for each in rounds] for window, rounds in found.items()
    }
    changes = [late / early - 1 for early, late in zip(costs[min(costs)], costs[max(costs)])]
    results.add("growth: CPU per token, how much more with the longest window than with the shortest", changes, "of that", FLAT)
    for window, values in costs.items():
        results.add(f"growth: CPU of the server per token, at the end of a window of {window}", values, "us")


def _timeline(results: Results, device: Device, kind: str, sampling: dict | None, plan: Plan, tick: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        path = Path(name) / "timeline.json"
        with serve(device, timeline=path) as server:
            target = find(server.url)
            Subject(server, target, streams_for(target, device, device.slots, sampling)).rounds(plan, 1)
        steps = timeline.steps(path)
    what = named(device, kind)
    for part in timeline.PARTS:
        results.add(f"between two steps: {part}: {what}", quartiles([step.seconds(part) * 1e6 for step in steps]), "us")
    gaps = [step.gap_s * 1e6 for step in steps]
    results.add(f"between two steps: all that the device waits: {what}", quartiles(gaps), "us")
    results.steps[what] = sorted(steps, key=lambda step: step.gap_s)[len(steps) // 2]
    tick()


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
