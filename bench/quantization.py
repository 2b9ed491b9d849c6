"""What compressed weights cost on a CPU: logits and perplexity in float32, bfloat16, int8 and int4.

    .venv/bin/python bench/quantization.py [--model-id FOLDER --text FILE]

The demonstration model reads the prose that it was trained on; with --model-id that model reads the first 2,048 tokens of the
file in windows of 512. Prints for each kind the perplexity, the root mean square error of the logits in units of their standard
deviation, the share of positions where the best token is that of float32, and the median time of a decode step of one row.
int8 and int4 need nncf.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from config import Config  # noqa: E402
from manifest import Manifest  # noqa: E402
from models import openvino_model  # noqa: E402
from models.base import Chunk, ModelError  # noqa: E402
from run import ConfigError  # noqa: E402

TOKENS, WINDOW = 2048, 512
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


def step_ms(model) -> float:
    times = []
    for position in range(WINDOW // 4, WINDOW // 2):
        started_at = time.perf_counter()
        model.forward([Chunk(0, [0], position)])
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
    print(f"{len(ids)} tokens\n{'kind':10} {'perplexity':>10} {'rms error':>10} {'same best':>10} {'step, ms':>10}")
    manifest, exact = Manifest.read(given.model_id), None
    for dtype, quantize in KINDS:
        config = Config(model_id=str(given.model_id), dtype=dtype, quantize=quantize, max_total_tokens=WINDOW + 1)
        try:
            model = openvino_model.load(config.with_manifest(manifest), given.model_id, manifest, lambda phase: None)
        except (ConfigError, ModelError) as error:
            print(f"{quantize or dtype:10} {error}")
            continue
        logits = [logits_of(model, ids) for ids in texts]
        exact = exact or logits
        found, expected = np.concatenate(logits), np.concatenate(exact)
        error = np.sqrt(np.square(found - expected).mean()) / expected.std()
        same = (found.argmax(1) == expected.argmax(1)).mean()
        print(f"{quantize or dtype:10} {perplexity(logits, texts):10.4g} {error:10.2%} {same:10.1%} {step_ms(model):10.2f}")


if __name__ == "__main__":
    main()
