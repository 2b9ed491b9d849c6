"""python tests/neuron_tables.py: the table of docs/neuron.md that says which published models run on Neuron, and where.

A row is a model of published/configs.py; `plan` gives its machine: the smallest of Inferentia2 with room for slots of 2,048
tokens."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from published.configs import CONFIGS

from config import Config
from models import plan
from run import ConfigError

HEAD = """| model | family | parameters | smallest Inferentia2 instance | tp_degree | slots of tokens |
|---|---|---|---|---|---|"""


def smallest(name):
    """(instance, sizing) for a published model."""
    shape = plan.Shape.from_config(CONFIGS[name])
    for instance, machine in plan.INSTANCES.items():
        with contextlib.suppress(ConfigError):
            sizing = plan.choose(shape, machine, Config(model_id=name))
            is_enough = shape.memory_warning(machine) is None and sizing.length >= plan.USEFUL_LENGTH
            if machine.family == "inf2" and is_enough:
                return instance, sizing
    raise AssertionError(f"{name} fits nowhere")


def row(name):
    instance, sizing = smallest(name)
    size = f"{sizing.shape.parameters / 1e9:.1f} billion"
    slots = f"{sizing.batch_size} of {sizing.length:,}"
    return f"| {name} | {sizing.shape.model_type} | {size} | {instance} | {sizing.tp_degree} | {slots} |"


def table():
    return "\n".join([HEAD, *map(row, CONFIGS)])


if __name__ == "__main__":
    print(table())
