"""What the choice of tokens costs: the time that it takes for a batch, over that of one pass over its logits.

    .venv/bin/python bench/sampler.py [--rows 32] [--vocab 128256] [--threads 1 2] [--rounds 5]

The pass is `torch.amax(dim=-1)` of the same logits with as many threads. The two take turns, and a round is the shortest of
each, because other processes make either longer. Logits come in two kinds: "model", whose probabilities fall with their rank
as a language model's do (a power of -1.5), and "flat", normally distributed with a deviation of 2.5, of which top-p takes
thousands of tokens. Cases "with log-probabilities" are `sampling.choose` and `sampling.describe`; the others are what a device
waits for, `sampling.choose`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from protocol import Sampling
from sampling import Plan, Sampler, choose, describe

TURNS = 9  # a round
WARM = {"temperature": 0.8}
# name: (the most passes that it should take, sampling parameters without the seed or None for greedy, top tokens or None)
CASES = {
    "greedy": (1.5, None, None),
    "top-k 50, top-p 0.95": (4.0, WARM | {"top_k": 50, "top_p": 0.95}, None),
    "top-p 0.95": (4.0, WARM | {"top_p": 0.95}, None),
    "temperature alone": (4.0, WARM, None),
    "temperature of 1 alone": (4.0, {}, None),
    "repetition penalty, top-k 50, top-p 0.95": (6.0, WARM | {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}, None),
    "greedy, with log-probabilities and 5 top tokens": (6.0, None, 5),
    "top-k 50, top-p 0.95, with log-probabilities and 5 top tokens": (6.0, WARM | {"top_k": 50, "top_p": 0.95}, 5),
    "top-p 0.95, with log-probabilities and 5 top tokens": (6.0, WARM | {"top_p": 0.95}, 5),
    "temperature alone, with log-probabilities and 5 top tokens": (6.0, WARM, 5),
}


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab], with what all rows have for a token side by side in memory, as transformers-neuronx gives them."""
    random = torch.Generator().manual_seed(0)
    if kind == "flat":
        return (torch.randn(vocab, rows, generator=random) * 2.5).t()
    ranks = torch.stack([torch.randperm(vocab, generator=random) for _ in range(rows)], dim=1) + 1
    return (18.0 - 1.5 * torch.log(ranks.float()) + 0.5 * torch.randn(vocab, rows, generator=random)).t()


def samplers_of(rows: int, parameters: dict | None, top: int | None = None) -> list[Sampler]:
    prompt = list(range(1000))
    sampling = [Sampling() if parameters is None else Sampling(seed=row, **parameters) for row in range(rows)]
    return [Sampler(each, prompt, top or 0) for each in sampling]


def timed_ms(what) -> float:
    started_at = time.perf_counter()
    what()
    return (time.perf_counter() - started_at) * 1e3


def tell(name: str) -> None:
    print(name, file=sys.stderr)


def measure(
    rows: int = 32,
    vocab: int = 128256,
    threads: tuple[int, ...] = (1, 2),
    rounds: int = 5,
    begin: Callable[[str], None] = tell,
) -> list[dict]:
    """Ratios as figures: name, value (the median), min, max, unit, reach (at most that), met; and times, with no reach.

    `begin` is called with the name of each case before it is measured.
    """
    figures = []
    threads_before = torch.get_num_threads()
    for count in threads:
        torch.set_num_threads(count)
        for kind in ("model", "flat"):
            logits = logits_of(kind, rows, vocab)
            for case, (reach, parameters, top) in CASES.items():
                name = f"{case}, {kind} logits, {count} thread{'s' * (count > 1)}"
                begin(name)
                figures += _case(name, reach, logits, samplers_of(rows, parameters, top), top, rounds)
    torch.set_num_threads(threads_before)
    return figures


def _case(name: str, reach: float, logits: torch.Tensor, samplers: list[Sampler], top: int | None, rounds: int) -> list[dict]:
    plan = Plan(samplers)

    def sample():
        tokens, looked_at = choose(logits, plan)
        assert all(isinstance(token, int) for token in tokens)
        if top is not None:
            assert all(isinstance(told, tuple) for told in describe(looked_at, tokens, [top] * len(tokens)))

    def read_once():
        torch.amax(logits, dim=-1)

    sample(), read_once()
    times, ratios = [], []
    for _ in range(rounds):
        passes, choices = zip(*((timed_ms(read_once), timed_ms(sample)) for _ in range(TURNS)))
        times.append(min(choices))
        ratios.append(min(choices) / min(passes))
    ratio = statistics.median(ratios)
    return [
        _figure(f"sampler: {name}", ratios, "passes") | {"reach": reach, "met": ratio <= reach},
        _figure(f"sampler: {name}", times, "ms"),
    ]


def _figure(name: str, values: list[float], unit: str) -> dict:
    median = statistics.median(values)
    return {"name": name, "value": median, "min": min(values), "max": max(values), "unit": unit, "reach": None, "met": None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{'':78} {'least':>8} {'median':>8} {'most':>8}")
    for figure in measure(args.rows, args.vocab, tuple(args.threads), args.rounds):
        reach = "" if figure["reach"] is None else f" of {figure['reach']:g}{'' if figure['met'] else ', not met'}"
        values = " ".join(f"{figure[key]:8.2f}" for key in ("min", "value", "max"))
        print(f"{figure['name']:78} {values} {figure['unit']}{reach}")


if __name__ == "__main__":
    main()
