"""The table of docs/metrics.md, made of what the server's own /metrics shows.

python tests/metrics_table.py --write     puts it there
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

from engine.metrics import Metrics  # noqa: E402

DOCUMENT = HERE / "docs" / "metrics.md"
HEAD = "| name | type | labels | what it shows |\n|---|---|---|---|\n"
COMMON = {"le", "quantile", "model_name", "engine"}  # of all histograms and summaries; of all with vLLM's names


def text() -> str:
    """What /metrics shows once a model is loaded."""
    metrics = Metrics("model")
    metrics.set_limits(1, 1, 2)
    metrics.set_cache(100, "float32", None)
    metrics.series("startup_phase_seconds", "loading").set(1)
    metrics.series("adapter_requests", "french").inc()
    return metrics.render().decode()


def table() -> str:
    rows = []
    for block in text().split("# HELP ")[1:]:
        name, about = block.splitlines()[0].split(" ", 1)
        kind = re.search(r"^# TYPE \S+ (\w+)$", block, re.MULTILINE)[1]
        labels = dict.fromkeys(re.findall(r'[{,](\w+)="', block))
        shown = ", ".join(f"`{label}`" for label in labels if label not in COMMON)
        rows.append(f"| `{name}` | {kind} | {shown} | {about} |")
    return HEAD + "\n".join(rows)


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        print(table())
        return
    document = DOCUMENT.read_text()
    head = document.index(HEAD)
    end = document.index("\n\n", head)
    DOCUMENT.write_text(document[:head] + table() + document[end:])


if __name__ == "__main__":
    main()
