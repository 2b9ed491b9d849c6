"""Replicas behind a load balancer: throughput and waiting times, simulated and measured; dollars per million tokens.

    .venv/bin/python bench/replicas.py              simulates replicas with the published step times of bench/published.json
    .venv/bin/python bench/replicas.py --measure    starts 1 and 2 servers on this machine, and a load on each

The simulated replica is a server on a Neuron device: it runs one prompt, or a step that gives every running request a token,
whichever is due, first come first served; a prompt and a step take their published times. Requests arrive at random times
(Poisson) and have completions of random lengths (geometric). The balancer sends each to the replica with the fewest requests,
or to any. Measured are the demonstration model and a simulated device, without a proxy and, where installed, behind `haproxy`.

Owns the simulation and the measurement; devices.py and launch.py start the servers, load.py is the load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import deque, namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import devices
from launch import HERE, Server, clean_environment, cpu_s, free_port, machine_busy_s
from load import LoadError, Target, closed_loop, percentile

_DATA = json.loads((HERE / "bench" / "published.json").read_text(encoding="utf-8"))
PRICES: dict[str, float] = _DATA["dollars_per_hour"]
# A published speed of another server: quoted, never scaled.
Figure = namedtuple("Figure", _DATA["figure_columns"])
PUBLISHED = [Figure(*row) for row in _DATA["figures"]]
MODEL, INSTANCE, LENGTH, PROMPT = ("Llama-3-8B", "inf2.48xlarge", 4096, 128)  # the figures that are simulated by default
TOKENS = 250  # mean length of a completion
WARM_UP_S = 60.0  # of simulated time


@dataclass(frozen=True)
class Times:
    """Seconds that a replica needs for one prompt, and for one step of all slots."""

    slots: int
    prompt_s: float
    step_s: float

    def requests_per_s(self, tokens: float) -> float:
        """The most that one replica can serve with completions of `tokens` on average; prefill gives the first token."""
        return 1 / (self.prompt_s + (tokens - 1) * self.step_s / self.slots)


@dataclass
class Replica:
    """Requests are pairs of arrival time and length. A running one is the number of the step that ends it."""

    times: Times
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)
    steps: int = 0
    prompt: tuple[float, int] | None = None  # what runs now; None: a step
    is_busy: bool = False
    was_prompt: bool = False

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running) + (self.prompt is not None)

    def begin(self) -> float | None:
        """Starts what is due and returns its seconds; None when there is nothing to do. Prompts alternate with steps."""
        has_room = self.waiting and len(self.running) < self.times.slots
        if has_room and not (self.was_prompt and self.running):
            self.prompt, self.was_prompt, self.is_busy = self.waiting.popleft(), True, True
            return self.times.prompt_s
        self.was_prompt, self.is_busy = False, bool(self.running)
        return self.times.step_s if self.running else None

    def end(self) -> tuple[int, tuple[float, int] | None]:
        """Ends what runs; returns the number of tokens that it gave, and the request whose first token is among them."""
        request, self.prompt = self.prompt, None
        if request:
            if request[1] > 1:
                heapq.heappush(self.running, self.steps + request[1] - 1)
            return 1, request
        self.steps += 1
        tokens = len(self.running)
        while self.running and self.running[0] == self.steps:
            heapq.heappop(self.running)
        return tokens, None


@dataclass
class Outcome:
    """Figures of the requests that got their first token after the warm-up."""

    tokens_per_s: float
    ttft_s: list[float]


def simulate(
    times: Times, replicas: int, requests_per_s: float, balance: str, seconds: float, tokens: float = TOKENS
) -> Outcome:
    """`replicas` behind a balancer ("least" requests or "random"), `requests_per_s` in all. The same for the same arguments."""
    chance = random.Random(1)
    servers = [Replica(times) for _ in range(replicas)]
    ends: list[tuple[float, int]] = []  # when each busy replica ends what it does
    arrival, given, ttft_s = chance.expovariate(requests_per_s), 0, []
    until = WARM_UP_S + seconds
    while True:
        now = min(arrival, ends[0][0] if ends else arrival)
        if now >= until:
            return Outcome(given / seconds, ttft_s)
        if ends and ends[0][0] == now:
            _, number = heapq.heappop(ends)
            made, first = servers[number].end()
            given += made * (now >= WARM_UP_S)
            if first and now >= WARM_UP_S:
                ttft_s.append(now - first[0])
        else:
            number = chance.randrange(replicas)
            if balance == "least":  # among equals any, as a balancer that goes round
                number = min(range(number, number + replicas), key=lambda n: servers[n % replicas].requests) % replicas
            length = 1 + int(chance.expovariate(1) * (tokens - 1))
            servers[number].waiting.append((now, length))
            arrival = now + chance.expovariate(requests_per_s)
            if servers[number].is_busy:
                continue
        if (takes := servers[number].begin()) is not None:
            heapq.heappush(ends, (now + takes, number))


def published(model: str, instance: str) -> tuple[Times, Figure]:
    """The times of a model on an instance. A prompt alone has the time of the figure with one slot. Raises LoadError."""
    rows = [row for row in PUBLISHED if (row.model, row.instance, row.prompt) == (model, instance, PROMPT) and row.token_ms]
    rows = [row for row in rows if row.length == LENGTH] or rows
    alone = min(rows, key=lambda row: row.batch_size, default=None)
    full = max(rows, key=lambda row: row.batch_size, default=None)
    if alone is None or alone.batch_size == full.batch_size:
        raise LoadError(f"bench/published.json has no figures of {model} on {instance} for one slot and for several")
    return Times(full.batch_size, alone.ttft_ms / 1e3, full.token_ms / 1e3), full


def report_simulation(model: str, instance: str, counts: Sequence[int], load: float) -> Iterator[str]:
    times, figure = published(model, instance)
    most = times.requests_per_s(TOKENS)
    name = f"{model} {figure.quantize}" if figure.quantize else model
    yield f"{name} on {instance}, tp_degree {figure.tp_degree}, {times.slots} slots: prompts of {PROMPT} tokens"
    yield f"{times.prompt_s * 1e3:g} ms, steps {times.step_s * 1e3:g} ms; completions of {TOKENS} tokens on average"
    yield f"one replica serves at most {most:.2f} requests/s, {most * TOKENS:.0f} tokens/s; load: {load:.0%} of that"
    yield ""
    yield "| replicas | requests/s | tokens/s | dollars an hour | ttft p50 / p99, ms: fewest requests | random |"
    yield "|---|---|---|---|---|---|"
    for count in counts:
        rate = count * most * load
        seconds = max(200.0, 4000.0 / count)  # few replicas take long to show a p99
        least, random_ = (simulate(times, count, rate, balance, seconds) for balance in ("least", "random"))
        waits = " | ".join(" / ".join(f"{percentile(o.ttft_s, p) * 1e3:,.0f}" for p in (0.5, 0.99)) for o in (least, random_))
        yield f"| {count} | {rate:.1f} | {least.tokens_per_s:,.0f} | {count * PRICES[instance]:,.0f} | {waits} |"


def report_costs() -> Iterator[str]:
    """The most tokens per second that is published for each model and instance, and its price."""
    yield "| model | instance | slots | prompt / context length | tokens/s | dollars per million tokens |"
    yield "|---|---|---|---|---|---|"
    kinds = {(row.model, row.quantize, row.instance) for row in PUBLISHED}
    for model, quantize, instance in sorted(kinds, key=str):
        rows = [row for row in PUBLISHED if (row.model, row.quantize, row.instance) == (model, quantize, instance)]
        best = max(rows, key=lambda row: row.tokens_per_s)
        name = f"{model} {quantize}" if quantize else model
        slots = f"{best.replicas} x {best.batch_size}" if best.replicas > 1 else best.batch_size
        dollars = PRICES[instance] / 3600 / best.tokens_per_s * 1e6
        lengths = f"{best.prompt or '?'} of {best.length or '?'}"
        yield f"| {name} | {instance} | {slots} | {lengths} | {best.tokens_per_s:,.1f} | {dollars:.2f} |"


@contextlib.contextmanager
def demonstration() -> Iterator[Server]:
    """The demonstration model on one thread, so that two servers share nothing on two processors."""
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        port = free_port()
        environment = clean_environment(Path(name), port, WEB_CONCURRENCY="1", THREADS="1")
        with Server([HERE / "entrypoint.sh", "serve"], port, Path(name) / "log", environment) as server:
            yield server.wait_ready()


@contextlib.contextmanager
def haproxy(servers: Sequence[Server]) -> Iterator[Server]:
    """One thread, to the server with the fewest connections."""
    lines = ["defaults", "mode http", "timeout connect 5s", "timeout client 300s", "timeout server 300s"]
    port = free_port()
    lines += ["listen replicas", f"bind 127.0.0.1:{port}", "balance leastconn"]
    lines += [f"server replica{n} 127.0.0.1:{server.port}" for n, server in enumerate(servers)]
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        settings = Path(name) / "haproxy.cfg"
        settings.write_text("global\nnbthread 1\n" + "\n".join(lines) + "\n")
        with Server(["haproxy", "-db", "-f", settings], port, Path(name) / "log", clean_environment(Path(name), port)) as proxy:
            yield proxy.wait_ready(log_text=None)


def load_of(urls: Sequence[str], slots: int, tokens: int, rounds: int) -> tuple[float, int]:
    """Seconds and tokens of `slots` clients on each URL, each of which asks `rounds` times."""

    async def all_of_them() -> list[list]:
        targets = [Target(urlsplit(url), model="any") for url in urls]
        question = "What is Deep Learning?"
        return await asyncio.gather(*(closed_loop(t, [t.request(question, tokens)] * slots * rounds, slots) for t in targets))

    began = time.perf_counter()
    answers = asyncio.run(all_of_them())
    return time.perf_counter() - began, sum(answer.tokens for answer in itertools.chain(*answers))


def measure(
    name: str, servers: Sequence[Server], proxy: Server | None, clients: int, args: argparse.Namespace
) -> Iterator[str]:
    """One row: `clients` on each server, or on the proxy for each server."""
    urls = [proxy.url if proxy else server.url for server in servers]
    load_of(urls, clients, args.tokens, args.rounds)  # warms up: meanwhile the first startup compiles loops
    groups = [list(itertools.chain(*(server.pids(script) for server in servers))) for script in ("worker.py", "web.py")]
    groups.append(proxy.pids("haproxy") if proxy else [])

    def clocks() -> list[float]:
        return [*(cpu_s(group) for group in groups), time.process_time(), machine_busy_s()]

    before = clocks()
    seconds, tokens = load_of(urls, clients, args.tokens, args.rounds)
    *spent, busy = [after - earlier for earlier, after in zip(before, clocks())]
    each = " / ".join(f"{cpu_s / tokens * 1e6:.0f}" for cpu_s in spent)
    others = max(0.0, busy - sum(spent)) / seconds
    return f"| {name} | {tokens / seconds:.0f} | {each} | {busy / seconds:.1f}, {others:.1f} |"


def report_measurement(args: argparse.Namespace) -> Iterator[str]:
    device = devices.LLAMA_2_7B
    yield "| server, replicas | tokens/s | CPU, µs a token: worker / web / proxy / client | processors busy, with others |"
    yield "|---|---|---|---|"
    kinds = [("demonstration model", demonstration, 4), (device.name, lambda: devices.serve(device), device.slots)]
    for what, start, clients in kinds:
        for count, is_behind in [(1, False), (2, False), (2, True)]:
            if is_behind and not shutil.which("haproxy"):
                continue
            with contextlib.ExitStack() as stack:
                servers = [stack.enter_context(start()) for _ in range(count)]
                proxy = stack.enter_context(haproxy(servers)) if is_behind else None
                name = f"{what}, {count}{' behind HAProxy' if is_behind else ''}"
                yield measure(name, servers, proxy, clients, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help=f"of models/neuron/plan.json ({MODEL})")
    parser.add_argument("--instance", default=INSTANCE, choices=PRICES, help=f"({INSTANCE})")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4, 10, 30, 100], help="how many to simulate")
    parser.add_argument("--load", type=float, default=0.8, help="requests per second, over the most that can be served (0.8)")
    parser.add_argument("--measure", action="store_true", help="start servers instead of simulating them")
    parser.add_argument("--tokens", type=int, default=128, help="of each measured completion (128)")
    parser.add_argument("--rounds", type=int, default=8, help="completions of each client (8)")
    args = parser.parse_args()
    try:
        if args.measure:
            lines = report_measurement(args)
        else:
            simulated = report_simulation(args.model, args.instance, args.replicas, args.load)
            lines = itertools.chain(simulated, [""], report_costs())
        for line in lines:
            print(line, flush=True)
    except (LoadError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
