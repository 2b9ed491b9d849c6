"""python tests/families_table.py: the table of docs/models.md, which families are served where; with --write it puts it there.

A row is a type of config.json and what is true of it. CPU: the engine that the suite of families (published/families.py) must
find; CUDA: whether plain PyTorch serves it; Neuron: whether models/families.py reads its config.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from published.families import CODE, FAMILIES, OPENVINO, TORCH

from models import families
from models.base import ModelError
from run import HERE, ConfigError

DOCUMENT = HERE / "docs" / "models.md"
HEAD = "| `model_type` | models | CPU | CUDA | Neuron |\n|---|---|---|---|---|"
NAMES = {OPENVINO: "OpenVINO", TORCH: "PyTorch"}
REASONS = {
    CODE: "Python code of its own; `--trust-remote-code` runs it",
    "encoder-decoder": "an encoder-decoder",
}


def on_cpu(family):
    if family.refused:
        return f"no: {REASONS.get(family.refused, family.refused)}"
    engine = NAMES[family.engine]
    if family.default_engine == family.engine:
        return engine
    return f"{engine}, in bfloat16 {NAMES[family.default_engine]}"


def on_neuron(family):
    try:
        families.of(family.config)
    except (ConfigError, ModelError):
        return "no"
    return "yes"


def table():
    models = {}  # by all other columns
    for family in FAMILIES:
        on_cuda = "PyTorch" if family.on_torch and not family.refused else "no"
        models.setdefault((family.config["model_type"], on_cpu(family), on_cuda, on_neuron(family)), []).append(family.name)
    rows = (f"| `{kind}` | {', '.join(names)} | {' | '.join(where)} |" for (kind, *where), names in models.items())
    return "\n".join([HEAD, *rows])


def write():
    before, _, after = DOCUMENT.read_text().partition(HEAD)
    rest = after.lstrip("\n").split("\n\n", 1)
    DOCUMENT.write_text(f"{before}{table()}\n" + (f"\n{rest[1]}" if len(rest) > 1 else ""))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(table())
