"""What compressed weights cost on a CPU: logits and perplexity in float32, bfloat16, int8 and int4.

    .venv/bin/python bench/quantization.py [--model-id FOLDER --text FILE]

The demonstration model reads the prose that it was trained on; with --model-id that model reads the first 2,048 tokens of the
file in windows of 512. Prints for each kind the perplexity, the root mean square error of the logits in units of their standard
deviation, the share of positions where the best token is that of float32, and the median times of decode steps
of 1, 4 and 16 rows. int8 and int4 need nncf.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import models  # noqa: E402
from config import Config  # noqa: E402
from manifest import Manifest  # noqa: E402
from models.base import Chunk  # noqa: E402
from models.errors import ModelError  # noqa: E402
from models.openvino import OpenVino  # noqa: E402
from run import ConfigError  # noqa: E402

TOKENS, WINDOW, SLOTS = 2048, 512, 16
KINDS = (("float32", None), ("bfloat16", None), ("float32", "int8"), ("float32", "int4"))


def logits_of(model, ids: list[int]) -> np.ndarray:
    chunks = range(0, len(ids), model.prefill_chunk)
    return np.concatenate([model.forward([Chunk(0, ids[at : at + model.prefill_chunk], at, True)]) for at in chunks])


def perplexity(logits: list[np.ndarray], texts: list[list[int]]) -> float:
    losses = []
    for of, ids in zip(logits, texts):
        of = of[:-1].astype(np.float64)
        largest = of.max(1)
        losses += list(np.log(np.exp(of - largest[:, None]).sum(1)) + largest - of[np.arange(len(of)), ids[1:]])
    return math.exp(statistics.mean(losses))


def step_ms(model, rows: int) -> float:
    times = []
    for position in range(WINDOW // 4, WINDOW // 2):
        started_at = time.perf_counter()
        model.forward([Chunk(slot, [0], position) for slot in range(rows)])
        times.append(time.perf_counter() - started_at)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", type=Path, default=HERE / "demo" / "model")
    parser.add_argument("--text", type=Path, default=HERE / "demo" / "corpus" / "prose.md")
    given = parser.parse_args()
    _heading, *paragraphs = given.text.read_text().split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    ids = Tokenizer.from_file(str(given.model_id / "tokenizer.json")).encode(text).ids[:TOKENS]
    texts = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
    print(f"{len(ids)} tokens\n{'kind':10} {'perplexity':>10} {'rms error':>10} {'same best':>10} {'steps, ms':>20}")
    manifest, exact = Manifest.read(given.model_id), None
    for dtype, quantize in KINDS:
        config = Config(model_id=str(given.model_id), dtype=dtype, quantize=quantize, max_total_tokens=WINDOW + 1)
        config = dataclasses.replace(config, max_batch_size=SLOTS)
        try:
            model = models.load(OpenVino(config.with_manifest(manifest), given.model_id, manifest), lambda phase: None)
        except (ConfigError, ModelError) as error:
            print(f"{quantize or dtype:10} {error}")
            continue
        logits = [logits_of(model, ids) for ids in texts]
        exact = exact or logits
        found, expected = np.concatenate(logits), np.concatenate(exact)
        error = np.sqrt(np.square(found - expected).mean()) / expected.std()
        steps = " / ".join(f"{step_ms(model, rows):.1f}" for rows in (1, 4, SLOTS))
        same = (found.argmax(1) == expected.argmax(1)).mean()
        print(f"{quantize or dtype:10} {perplexity(logits, texts):10.4g} {error:10.2%} {same:10.1%} {steps:>20}")


if __name__ == "__main__":
    main()
