"""Measures, and writes a report: bench/report.html for people, bench/report.json for programs.

    .venv/bin/python bench/run.py                 the server, on simulated devices (under ten minutes)
    .venv/bin/python bench/run.py --url URL       any server that speaks TGI's or OpenAI's API, as it is

`make bench` and `make bench URL=...` are the same. bench/README.md says how each figure is got.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import figures
import pages
from load import LoadError, find


class Progress:
    """A bar on stderr, for people who wait."""

    WIDTH = 40

    def __init__(self, total: int):
        self._done, self._total, self._started_at = -1, total, time.monotonic()
        self.tick()

    def tick(self) -> None:
        self._done += 1
        filled = self.WIDTH * self._done // self._total
        taken = time.strftime("%M:%S", time.gmtime(time.monotonic() - self._started_at))
        end = "\n" if self._done == self._total else ""
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(f"\r[{bar}] {self._done} of {self._total}, {taken}", end=end, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; without it ours, on simulated devices. API_KEY is its key")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="with --url: streams at a time")
    parser.add_argument("--tokens", type=int, default=64, help="with --url: tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5, help="with --url: how often each is measured")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, in seconds: does it work?")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "report", help="without the endings")
    args = parser.parse_args()
    results = figures.Results()
    subject = "neuron-textgen on simulated devices"
    try:
        if args.url:
            target = find(args.url, os.environ.get("API_KEY"))
            subject = target.name
            progress = Progress(args.rounds * len(args.concurrency))
            figures.measure_url(target, args.concurrency, args.tokens, args.rounds, results, progress.tick)
        else:
            plan = figures.SMOKE if args.smoke else figures.FULL
            progress = Progress(figures.ticks(plan))
            figures.measure(plan, results, progress.tick)
    except (LoadError, RuntimeError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    written = pages.write(args.out, subject, results)
    print(pages.table(results))
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
