"""What a long prompt does to those who are being answered on a CPU: the times between two of their tokens, meanwhile.

    .venv/bin/python bench/long_prompt.py [--prompt 4000] [--streams 3] [--dtype bfloat16] [--rounds 5]

The server is started on a checkpoint of SmolLM2-135M's shape with random weights (peers.py makes it). So many streams run;
then a prompt of so many tokens comes, and asks for one token. Of the streams' times between two tokens while it is being run:
the 99th percentile over their median, and both over the median of the second before it came.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from load import Answer, LoadError, ask, find, open_stream, percentile
from peers import HERE, Peer, Prompts, save_checkpoint, start


async def one_round(peer: Peer, short: Prompts, long: Prompts, streams: int) -> tuple[list[float], list[float], float]:
    """The streams' gaps in the second before the prompt came, those while it was being run, and how long that took: seconds."""
    requests = [peer.target.request(next(short), 900) for _ in range(streams)]
    running = await asyncio.gather(*(open_stream(peer.target, request) for request in requests))
    try:
        await asyncio.gather(*(stream.begun for stream in running))
        await asyncio.sleep(2.0)
        answer = await ask(peer.target, peer.target.request(next(long), 1))
        if answer.error:
            raise LoadError(answer.error)
        if any(stream.done.done() for stream in running):
            raise LoadError("a stream ended before the prompt had been run")
    finally:
        for stream in running:
            stream.close()
    begun_at, over_at = answer.started_at, answer.times[0]
    gaps = [gap for stream in running for gap in pairwise(Answer.of(stream).times)]
    before = [later - earlier for earlier, later in gaps if begun_at - 1.0 <= earlier and later < begun_at]
    during = [later - earlier for earlier, later in gaps if begun_at < later and earlier < over_at]
    return before, during, over_at - begun_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4000, help="its tokens")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer.json; made here without it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or save_checkpoint(Path(scratch))
        command = (
            f"PYTHON={sys.executable} {HERE}/entrypoint.sh serve --model-id {{model}} --port {{port}} --dtype {args.dtype} "
        )
        command += f"--hostname 127.0.0.1 --max-batch-size {args.streams + 1} --max-total-tokens {args.prompt + 1100}"
        peer = start("server", command, model, Path(scratch))
        try:
            peer.wait_ready()
            peer.target = find(peer.url, model=str(model))
            short, long = Prompts(model, 128), Prompts(model, args.prompt)
            found = [asyncio.run(one_round(peer, short, long, args.streams)) for _ in range(args.rounds)]
        except LoadError as error:
            sys.exit(f"error: {error}\n{(Path(scratch) / 'server.log').read_text()[-2000:]}")
        finally:
            peer.end()
    before, during = ([statistics.median(one[kind]) for one in found] for kind in (0, 1))
    p99 = [percentile(one[1], 0.99) for one in found]
    for name, values, unit in (
        ("time to its first token", [one[2] * 1e3 for one in found], "ms"),
        ("median gap before", [value * 1e3 for value in before], "ms"),
        ("median gap meanwhile", [value * 1e3 for value in during], "ms"),
        ("p99 gap meanwhile", [value * 1e3 for value in p99], "ms"),
        ("p99 over median meanwhile", [high / middle for high, middle in zip(p99, during)], "x"),
        ("p99 meanwhile over median before", [high / middle for high, middle in zip(p99, before)], "x"),
    ):
        told = f"{statistics.median(values):8.2f} {unit:3} ({min(values):.2f} to {max(values):.2f})"
        print(f"{name:34} {told}")


if __name__ == "__main__":
    main()
