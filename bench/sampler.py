"""What sampling costs: the time of one batch over that of one pass over its logits (`numpy.amax`), both on
one thread.

    .venv/bin/python bench/sampler.py [--rows 32] [--vocab 128256] [--rounds 15]

Logits have the layouts of the models: float32 row-major (CPU), bfloat16 column-major (Neuron). "model":
probabilities fall with their rank to the power of -1.5, as a language model's do; "flat": normal with a
deviation of 2.5.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from engine.sampling.sampling import SamplerState, SamplingBatch, compile_loops, logprobs, sample
from protocol import SamplingParams

WARM = {"temperature": 0.8}
CASES = {
    "greedy": None,
    "top-k 50, top-p 0.95": WARM | {"top_k": 50, "top_p": 0.95},
    "top-k 64": WARM | {"top_k": 64},
    "top-p 0.95": WARM | {"top_p": 0.95},
    "min-p 0.05": WARM | {"min_p": 0.05},
    "temperature alone": WARM,
    "repetition penalty, top-k 50": WARM | {"top_k": 50, "repetition_penalty": 1.1},
}


def logits_of(kind: str, rows: int, vocab: int) -> np.ndarray:
    random = np.random.default_rng(0)
    if kind == "flat":
        return (random.standard_normal((rows, vocab)) * 2.5).astype(np.float32)
    ranks = random.permuted(np.tile(np.arange(1.0, vocab + 1), (rows, 1)), axis=1)
    return (18.0 - 1.5 * np.log(ranks) + 0.5 * random.standard_normal((rows, vocab))).astype(np.float32)


def median_ms(function, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        started_at = time.perf_counter()
        function()
        times.append((time.perf_counter() - started_at) * 1e3)
    return statistics.median(times[1:])


def measure(rows: int, vocab: int, rounds: int) -> None:
    compile_loops(["float32", "bfloat16"])
    for kind in ("model", "flat"):
        row_major = logits_of(kind, rows, vocab)
        narrow = np.ascontiguousarray((row_major.view(np.uint32) >> 16).astype(np.uint16).T).T
        for layout, logits in (("float32 row-major", row_major), ("bfloat16 column-major", narrow)):
            one_pass = median_ms(logits.ravel(order="K").max, rounds)
            print(f"{kind}, {layout}, {rows} x {vocab}: one pass {one_pass:.2f} ms")
            for name, parameters in CASES.items():
                own = [
                    SamplingParams() if parameters is None else SamplingParams(seed=row, **parameters) for row in range(rows)
                ]
                batch = SamplingBatch([SamplerState(each, list(range(1000))) for each in own])
                taken = median_ms(lambda logits=logits, batch=batch: sample(logits, batch), rounds)
                print(f"  {name:40} {taken:8.2f} ms {taken / one_pass:6.2f} passes")
            taken = median_ms(lambda logits=logits: logprobs(logits, [0] * rows, [5] * rows), rounds)
            print(f"  {'log-probabilities with 5 top tokens':40} {taken:8.2f} ms {taken / one_pass:6.2f} passes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=15)
    measure(**vars(parser.parse_args()))
