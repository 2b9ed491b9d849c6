"""Runs the benchmarks and writes a report: bench/report.html to read, bench/report.json to process.

    .venv/bin/python bench/bench.py                 the server on simulated devices (about two minutes)
    .venv/bin/python bench/bench.py --url URL       any running server that has TGI's or OpenAI's API

`make bench` and `make bench URL=...` are the same; bench/README.md says how each figure is measured. Owns the command line
and the report; figures.py measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from html import escape
from importlib import metadata
from pathlib import Path

import figures
from figures import Figure
from load import find

STYLE = """:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; } td, th { text-align: right; padding: .1rem .6rem; border-bottom: 1px solid #8886; }
td:first-child, th:first-child { text-align: left; } .missed { font-weight: bold; }"""


def describe_machine() -> dict[str, str | int | float]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "processor": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    } | {name: metadata.version(name) for name in ("numpy", "gunicorn", "flask", "pyzmq")}


def row(figure: Figure) -> list[str]:
    target = ""
    if figure.target is not None:
        target = f"{'at least' if figure.at_least else 'at most'} {figure.target:g}{'' if figure.met else ': not met'}"
    numbers = [f"{value:,.3f}" for value in (min(figure.values), figure.value, max(figure.values))]
    return [figure.name, *numbers, figure.unit, target]


def write(out: Path, subject: str, found: Sequence[Figure]) -> list[Path]:
    """Writes both files and returns their paths."""
    machine = describe_machine()
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_suffix(".json"), out.with_suffix(".html")]
    paths[0].write_text(json.dumps({"machine": machine, "figures": [figure.as_dict() for figure in found]}, indent=1))
    rows = "".join(
        f"<tr{' class=missed' if figure.met is False else ''}><td>" + "<td>".join(map(escape, row(figure))) for figure in found
    )
    facts = escape("; ".join(f"{name} {value}" for name, value in machine.items()))
    paths[1].write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(subject)}</title><style>{STYLE}</style>"
        f"<h1>{escape(subject)}</h1><p>{facts}</p><table><tr><th>figure<th>least<th>median<th>most<th>unit<th>target{rows}"
        "</table></html>\n"
    )
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; its key is read from API_KEY")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="with --url: streams at a time")
    parser.add_argument("--tokens", type=int, default=64, help="with --url: tokens of a completion")
    parser.add_argument("--rounds", type=int, default=5, help="with --url: how often each is measured")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "report", help="without the endings")
    args = parser.parse_args()
    subject, found = "neuron-textgen on simulated devices", []
    try:
        if args.url:
            target = find(args.url, os.environ.get("API_KEY"))
            subject, measured = (args.url, figures.measure_url(target, args.concurrency, args.tokens, args.rounds))
        else:
            measured = figures.measure(figures.SMOKE if args.smoke else figures.FULL)
        print(f"{'':80} {'least':>10} {'median':>10} {'most':>10}")
        for figure in measured:
            found.append(figure)
            name, least, median, most, unit, goal = row(figure)
            print(f"{name:80} {least:>10} {median:>10} {most:>10} {unit}{', ' if goal else ''}{goal}", flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(str, write(args.out, subject, found))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
