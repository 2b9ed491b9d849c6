"""The throughput of a report as a bar chart: a group of bars for each number of streams, a bar for each server.

    make plot        docs/throughput.svg, made of bench/report.json, which `make peers` writes

Reads the figures named `throughput: SERVER: NUMBER at a time`. Needs matplotlib, which the environment of `make docs` has.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from matplotlib import pyplot

NAME = re.compile(r"throughput: (?:(?P<server>.*): )?(?P<streams>\d+) at a time")
COLOURS = {"this server": "Blues_r", "vLLM": "Greens_r", "openvino-genai": "Oranges_r", "llama.cpp": "Purples_r"}


def read(report: dict) -> dict[str, dict[int, float]]:
    """Tokens per second, the median, by server and number of streams."""
    speeds: dict[str, dict[int, float]] = {}
    for figure in report["figures"]:
        if found := NAME.fullmatch(figure["name"]):
            of_server = speeds.setdefault(found["server"] or "this server", {})
            of_server[int(found["streams"])] = figure["value"]
    return speeds


def colours(servers: list[str]) -> list[tuple[float, ...]]:
    """One hue for all rows of a server, darker first."""
    chosen = []
    for server in servers:
        name = server.partition(",")[0]
        before = sum(earlier.partition(",")[0] == name for earlier in servers[: servers.index(server)])
        chosen.append(pyplot.get_cmap(COLOURS.get(name, "Greys_r"))(0.2 + 0.2 * before))
    return chosen


def plot(report: dict, target: Path) -> None:
    speeds = read(report)
    streams = sorted({number for of_server in speeds.values() for number in of_server})
    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text
    pyplot.rcParams["svg.hashsalt"] = "0"  # the same report gives the same file
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(speeds)
    for number, (server, colour) in enumerate(zip(speeds, colours([*speeds]))):
        places = [group + (number - (len(speeds) - 1) / 2) * width for group in range(len(streams))]
        bars = axes.bar(places, [speeds[server].get(count, 0) for count in streams], width, label=server, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(streams)), [f"{count} stream{'s' if count > 1 else ''}" for count in streams])
    axes.set_ylabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


def main(source: str, target: str) -> None:
    file = Path(source)
    report = json.loads(file.read_text()) if file.is_file() else {"figures": []}
    if not read(report):
        sys.exit(f"error: {source} has no throughput of servers; make peers writes it")
    plot(report, Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
