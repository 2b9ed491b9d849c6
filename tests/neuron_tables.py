"""python tests/neuron_tables.py: the table of docs/neuron-families.md, which published models run on Neuron, and where.

A row is a model of published/configs.py; `plan` gives its machine: the smallest of Inferentia2 with room for slots of 2,048
tokens."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from published.configs import CONFIGS

from config import FP8, Config
from models import plan
from run import ConfigError

HEAD = """| model | family | parameters | smallest Inferentia2 instance | tp_degree | slots of tokens | int8, FP8 KV cache |
|---|---|---|---|---|---|---|"""
SMALLER = {"quantize": "int8", "kv_cache_dtype": FP8}


def smallest(name, **settings):
    """(instance, sizing) for a published model; None where it fits on no instance."""
    shape = plan.Shape.from_config(CONFIGS[name])
    for instance, machine in plan.INSTANCES.items():
        with contextlib.suppress(ConfigError):
            sizing = plan.choose(shape, machine, Config(model_id=name, **settings))
            is_enough = shape.memory_warning(machine) is None and sizing.length >= plan.USEFUL_LENGTH
            if machine.family == "inf2" and is_enough:
                return instance, sizing
    return None


def slots(sizing):
    return f"{sizing.batch_size} of {sizing.length:,}"


def row(name):
    found = smallest(name)
    instance, smaller = smallest(name, **SMALLER)
    size = f"{smaller.shape.parameters / 1e9:.1f} billion"
    columns = [name, smaller.shape.family.model_type, size, "none", "", ""]
    if found:
        columns[3:] = [found[0], str(found[1].tp_degree), slots(found[1])]
    return f"| {' | '.join(columns)} | {instance} with {smaller.tp_degree}: {slots(smaller)} |"


def table():
    return "\n".join([HEAD, *map(row, CONFIGS)])


if __name__ == "__main__":
    print(table())
