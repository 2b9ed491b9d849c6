"""python tests/sizing_table.py: the examples of docs/memory.md; with --write it puts them there.

The context lengths are those that a server on a CPU chooses for 4 slots."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from published.configs import CONFIGS

from config import Config
from manifest import CONTEXT_LENGTHS, Manifest
from models.machine import GIB
from models.plan import Shape
from run import HERE

DOCUMENT = HERE / "docs" / "memory.md"
HEAD = """| model | parameters | weights: bfloat16 / int8 | conversion | KV cache, 1,000 tokens | context on 16 / 64 / 256 GiB |
|---|---|---|---|---|---|"""
MODELS = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen3-4B-Instruct-2507",
    "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "Qwen/Qwen3-32B",
)
CONVERSION_GB = 1
CONVERSION = 2, 1.2  # times the checkpoint, as docs/memory.md says: in bfloat16, int8


def row(name):
    shape = Shape.from_config(CONFIGS[name])
    longest = next(CONFIGS[name][key] for key in CONTEXT_LENGTHS if key in CONFIGS[name])
    manifest = Manifest(shape.family.model_type, longest, (), config_json=CONFIGS[name])
    billions = shape.parameters / 1e9
    whole, compressed = (CONVERSION_GB + 2 * billions * times for times in CONVERSION)
    lengths = [f"{Config(model_id=name).with_manifest(manifest, memory * GIB).max_total_tokens:,}" for memory in (16, 64, 256)]
    cells = [
        name,
        f"{billions:.1f} billion",
        f"{2 * billions:.1f} / {billions:.1f} GB",
        f"{whole:.0f} / {compressed:.0f} GB",
        f"{manifest.kv_bytes / 2 * 1000 / 1e6:.0f} MB",
        " / ".join(lengths),
    ]
    return f"| {' | '.join(cells)} |"


def table():
    return "\n".join([HEAD, *map(row, MODELS)])


def write():
    before, _, after = DOCUMENT.read_text().partition(HEAD)
    rest = after.lstrip("\n").split("\n\n", 1)
    DOCUMENT.write_text(f"{before}{table()}\n\n{rest[1]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(table())
