"""The report: a JSON file for programs, and one HTML page that needs nothing else, with plots in SVG. Measures nothing."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from pathlib import Path

from figures import Figure, Results
from timeline import Step

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 30, 44
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #6a737d; --rule: #d5dae0; --page: #fff;
  --c0: #2563c9; --c1: #c2410c; --c2: #15803d; --c3: #7e3fb5; --c4: #0f7f8c; --c5: #a8325e; --c6: #8a6d00; --c7: #59636e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #97a3af; --rule: #39424d; --page: #14181d;
  --c0: #6ea8fe; --c1: #fb923c; --c2: #4ade80; --c3: #c79bf2; --c4: #4fd1de; --c5: #f28bb1; --c6: #e0bd3f; --c7: #a3aebb; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: .15rem .5rem; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; }
.met { color: var(--c2); } .missed { color: var(--c1); font-weight: 600; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: var(--ink); }
.soft { color: var(--soft); }
svg .tick { fill: var(--soft); } svg .rule { stroke: var(--rule); } figure { margin: 1.5rem 0; }
"""


def write(out: Path, subject: str, results: Results) -> list[Path]:
    """Writes both files, beside each other, and returns their paths."""
    machine = describe_machine()
    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out.with_suffix(".json"), out.with_suffix(".html")]
    written[0].write_text(json.dumps({"machine": machine, "figures": [each.told() for each in results.figures]}, indent=1))
    written[1].write_text(page(subject, machine, results))
    return written


def describe_machine() -> dict[str, str | int | float]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    versions = {name: metadata.version(name) for name in ("torch", "gunicorn", "flask", "pyzmq")}
    return {
        "processor": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    } | versions


def table(results: Results) -> str:
    """The figures that have something to reach, for a terminal."""
    lines = [f"{'':92} {'least':>9} {'median':>9} {'most':>9}"]
    for each in results.figures:
        if each.reach is None and any(other.reach is not None for other in results.figures):
            continue
        values = " ".join(f"{value:9.3f}" for value in (min(each.values), each.value, max(each.values)))
        lines.append(f"{each.name:92} {values} {each.unit}{_reach(each)}")
    return "\n".join(lines)


def _reach(figure: Figure) -> str:
    if figure.reach is None:
        return ""
    return f", {'at least' if figure.at_least else 'at most'} {figure.reach:g}{'' if figure.met else ': not met'}"


def page(subject: str, machine: dict, results: Results) -> str:
    told = "; ".join(f"{name} {value}" for name, value in machine.items())
    parts = [f"<h1>{escape(subject)}</h1><p class=soft>{escape(told)}</p>"]
    reaching = [each for each in results.figures if each.reach is not None]
    others = [each for each in results.figures if each.reach is None]
    if reaching:
        parts.append(f"<h2>What should be reached</h2>{_rows(reaching)}")
    if results.throughput:
        parts.append(_figure("Throughput against concurrency", lines_plot(results.throughput, "streams at a time", "tokens/s")))
    for title, values in (("Time to first token", results.ttft_ms), ("Inter-token latency", results.itl_ms)):
        if values:
            parts.append(_figure(title, shares_plot(values, "ms")))
    for what, step in results.steps.items():
        parts.append(_figure(f"One step, the one in the middle: {what}", step_plot(step)))
    parts.append(f"<h2>{'What else was measured' if reaching else 'Figures'}</h2>{_rows(others)}")
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(subject)}</title>"
    return f"<!doctype html><html lang=en>{head}<style>{STYLE}</style>{''.join(parts)}</html>\n"


def _figure(title: str, drawing: str) -> str:
    return f"<figure><figcaption><h2>{escape(title)}</h2></figcaption>{drawing}</figure>"


def _rows(figures: Iterable[Figure]) -> str:
    rows = []
    for each in figures:
        numbers = "".join(f"<td>{value:,.3f}</td>" for value in (min(each.values), each.value, max(each.values)))
        verdict = "" if each.met is None else f" class={'met' if each.met else 'missed'}"
        rows.append(
            f"<tr><td>{escape(each.name)}</td>{numbers}<td>{escape(each.unit)}</td><td{verdict}>{_reach(each)[2:]}</td></tr>"
        )
    head = "<tr><th>what</th><th>least</th><th>median</th><th>most</th><th>unit</th><th>should be</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def lines_plot(lines: dict[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Each line by its points (x, y), from zero on; the points are marked, and their values can be pointed at."""
    most_x, most_y = (max(point[axis] for points in lines.values() for point in points) for axis in (0, 1))
    drawn = [_axes(0.0, most_x, most_y, across, up)]
    for number, (name, points) in enumerate(lines.items()):
        places = [(_x(x, 0.0, most_x), _y(y, most_y)) for x, y in points]
        drawn.append(_line(places, number))
        for (x, y), place in zip(points, places):
            hint = _tag("title", f"{name}: {y:.1f} {up} at {x:g}")
            drawn.append(_tag("circle", hint, cx=place[0], cy=place[1], r=3, fill=_colour(number)))
    return _svg(drawn, lines)


def shares_plot(values: dict[str, Sequence[float]], unit: str) -> str:
    """What share of the values is at most so large, up to the 99.5th percentile."""
    ordered = {name: sorted(each) for name, each in values.items()}
    least = 0.9 * min(each[0] for each in ordered.values())
    most = max(_at(each, 0.995) for each in ordered.values())
    drawn = [_axes(least, most, 100.0, unit, "% of them, at most so large")]
    for number, each in enumerate(ordered.values()):
        places = [(_at(each, percent / 100), percent) for percent in range(101)]
        drawn.append(_line([(_x(min(x, most), least, most), _y(y, 100.0)) for x, y in places], number))
    return _svg(
        drawn, [f"{name}: p50 {_at(each, 0.5):.1f}, p99 {_at(each, 0.99):.1f} {unit}" for name, each in ordered.items()]
    )


def step_plot(step: Step) -> str:
    """What the loop, and the thread of its socket, did from the end of a call to the device on, and when the next began."""
    began = step.device[2]
    parts = {name: step.seconds(name) * 1e6 for name in dict.fromkeys(name for name, _start, _end in step.parts)}
    end = began + 1.1 * (max([step.next_at, *(span[2] for span in step.socket)]) - began)
    width = (end - began) * 1e6
    rows = {"device": [("the next call", step.next_at, end)], "loop": step.parts, "socket": step.socket}
    call_ms = (began - step.device[1]) * 1e3
    drawn = [_axes(0.0, width, 0.0, f"us after the end of the device's call of {call_ms:.2f} ms", "")]
    drawn.append(_tag("text", f"the device waits {step.gap_s * 1e6:.0f} us for its next call", x=LEFT, y=30))
    for row, (label, spans) in enumerate(rows.items()):
        top = 44 + 70 * row
        drawn.append(_tag("text", label, x=LEFT - 8, y=top + 28, text_anchor="end"))
        for name, start, stop in spans:
            left, right = (_x((at - began) * 1e6, 0.0, width) for at in (start, stop))
            colour = _colour(list(parts).index(name) if name in parts else len(parts))
            hint = _tag("title", f"{name}: {(stop - start) * 1e6:.0f} us")
            drawn.append(_tag("rect", hint, x=left, y=top, width=max(0.5, right - left), height=48, fill=colour))
    return _svg(drawn, [*(f"{name}: {taken:.0f} us" for name, taken in parts.items()), "device, socket"])


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _tag(name: str, content: str = "", **attributes: str | float) -> str:
    """`content` is text, or a title, or other tags."""
    written = "".join(
        f' {key.replace("_", "-")}="{value:.1f}"' if isinstance(value, float) else f' {key.replace("_", "-")}="{value}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content if content.startswith('<') else escape(content)}</{name}>"


def _svg(drawn: Iterable[str], named: Iterable[str]) -> str:
    """With a legend of what has the colours 0, 1, …"""
    legend = []
    for number, name in enumerate(named):
        y = HEIGHT + 14 + 20 * number
        legend.append(_tag("rect", x=LEFT, y=y - 10, width=12, height=12, fill=_colour(number)))
        legend.append(_tag("text", name, x=LEFT + 20, y=y))
    box = f"0 0 {WIDTH} {HEIGHT + 10 * len(legend)}"
    return _tag("svg", "".join([*drawn, *legend]), viewBox=box, role="img")


def _colour(number: int) -> str:
    return f"var(--c{number % 8})"


def _x(value: float, least: float, most: float) -> float:
    return LEFT + (value - least) / ((most - least) or 1.0) * (WIDTH - LEFT - RIGHT)


def _y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - value / most * (HEIGHT - BOTTOM - TOP)


def _axes(least_x: float, most_x: float, most_y: float, across: str, up: str) -> str:
    """Without a `most_y` there is no axis that goes up."""
    drawn = [_tag("text", across, x=WIDTH - RIGHT, y=HEIGHT - 8, text_anchor="end"), _tag("text", up, x=4, y=16)]
    for fifth in range(6):
        x, y = least_x + (most_x - least_x) * fifth / 5, most_y * fifth / 5
        below = {"y": HEIGHT - BOTTOM + 16, "text_anchor": "middle", "class": "tick"}
        drawn.append(_tag("text", _number(x), x=_x(x, least_x, most_x), **below))
        if most_y:
            height = _y(y, most_y)
            drawn.append(_tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=height, y2=height, **{"class": "rule"}))
            drawn.append(_tag("text", _number(y), x=LEFT - 8, y=height + 4, text_anchor="end", **{"class": "tick"}))
    return "".join(drawn)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 or value == int(value) else f"{value:.3g}"


def _line(places: Sequence[tuple[float, float]], number: int) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return _tag("polyline", points=points, fill="none", stroke=_colour(number), stroke_width=2)
