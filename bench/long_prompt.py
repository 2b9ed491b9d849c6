"""What a long prompt costs running streams on a CPU, itself, and a short prompt that arrives meanwhile.

    .venv/bin/python bench/long_prompt.py [--prompt 4000] [--streams 4] [--rounds 3] [--budgets default 16 32 64 128 256]

The server is started on a checkpoint of SmolLM2-135M's shape with random weights (peers.py makes it), once for each value of
--max-batch-prefill-tokens. Each round: the long prompt alone; then the streams run, the long prompt arrives, and a while
later a prompt of 20 tokens, for which a slot is free. Reported, each as least, median and most of the rounds:

- the streams' median inter-token latency (ITL) before the long prompt arrived, and its 99th percentile meanwhile over that
- the long prompt's time to first token, alone, with the streams, and the second over the first
- the short prompt's time to first token, in tokens that a stream received until then (steps)
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from launch import HERE
from load import Answer, LoadError, Target, closed_loop, find, open_stream, percentile
from peers import Prompts, save_checkpoint, spread, start

BEFORE_S = 2.0  # the streams alone


async def one_round(target: Target, streams: int, prompts: dict[str, Prompts], prompt_tokens: int) -> dict[str, float]:
    """The figures. Raises LoadError when a request fails, or a stream ends before the long prompt's first token."""
    (alone,) = await closed_loop(target, [target.request(next(prompts["long"]), 1)], 1)
    requests = [target.request(next(prompts["stream"]), _stream_tokens(prompt_tokens)) for _ in range(streams)]
    running = [await open_stream(target, request) for request in requests]
    try:
        await asyncio.gather(*(stream.begun for stream in running))
        await asyncio.sleep(BEFORE_S)
        arriving = asyncio.create_task(closed_loop(target, [target.request(next(prompts["long"]), 1)], 1))
        await asyncio.sleep(alone.ttft_s / 2)
        (short,) = await closed_loop(target, [target.request(next(prompts["short"]), 1)], 1)
        (long,) = await arriving
        if any(stream.done.done() for stream in running):
            raise LoadError("a stream ended before the long prompt had been run")
    finally:
        for stream in running:
            stream.close()
    all_times = [Answer.of(stream).times for stream in running]
    gaps = [gap for times in all_times for gap in pairwise(times)]
    before = [later - earlier for earlier, later in gaps if long.started_at - BEFORE_S / 2 <= earlier < later < long.started_at]
    during = [later - earlier for earlier, later in gaps if long.started_at < later and earlier < long.times[0]]
    gap_s = statistics.median(before)
    return {
        "itl before, ms": gap_s * 1e3,
        "p99 itl over it": percentile(during, 0.99) / gap_s,
        "alone, s": alone.ttft_s,
        "with streams, s": long.ttft_s,
        "with over alone": long.ttft_s / alone.ttft_s,
        "short prompt, steps": max(sum(short.started_at < at <= short.times[0] for at in times) for times in all_times),
    }


def _stream_tokens(prompt_tokens: int) -> int:
    """Enough for a prompt in chunks of 8 tokens, and for the time before it."""
    return prompt_tokens // 8 + 600


def measure(budget: str, model: Path, scratch: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """The rounds of one server. `budget` is a value of --max-batch-prefill-tokens, or "default"."""
    window = args.prompt + _stream_tokens(args.prompt) + 128
    flags = f"--dtype {args.dtype} --max-batch-size {args.streams + 2} --max-total-tokens {window} --hostname 127.0.0.1"
    flags += "" if budget == "default" else f" --max-batch-prefill-tokens {budget}"
    entrypoint = f"PYTHON={sys.executable} {args.tree}/entrypoint.sh serve"
    prompts = {"long": Prompts(model, args.prompt), "stream": Prompts(model, 128), "short": Prompts(model, 20)}
    command = f"{entrypoint} --model-id {{model}} --port {{port}} {flags}"
    with start(command, model, scratch / "log", scratch / "cache") as server:
        target = find(server.wait_ready().url, model=str(model))
        return [asyncio.run(one_round(target, args.streams, prompts, args.prompt)) for _ in range(args.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", nargs="+", default=["default"], help="values of --max-batch-prefill-tokens, or default")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer.json")
    parser.add_argument("--tree", type=Path, default=HERE, help="the source tree whose entrypoint.sh is started")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        scratch = Path(name)
        model = save_checkpoint(args.model or scratch / "model")
        for budget in args.budgets:
            try:
                rounds = measure(budget, model, scratch, args)
            except RuntimeError as error:
                sys.exit(f"error: {error}")
            figures = {name: [each[name] for each in rounds] for name in rounds[0]}
            print(f"--max-batch-prefill-tokens {budget}: (min, median, max of {args.rounds} rounds)")
            print("\n".join(f"    {name:20} {spread(values, 8, 2)}" for name, values in figures.items()), flush=True)


if __name__ == "__main__":
    main()
