"""What the turns of a chat cost on a CPU: the time to first token of each, with prefix caching and without.

    .venv/bin/python bench/turns.py [--turns 8] [--user 200] [--answer 100] [--rounds 3]

The server is started on a checkpoint of SmolLM2-135M's shape with random weights (peers.py makes it), once with
--prefix-reuse true and once with false. A turn's prompt is the whole conversation so far and `--user` new tokens; its
completion has `--answer` tokens. Reported, as medians of the rounds: each turn's time to first token and how many of its prompt
tokens were cached, then the last turn's time over the second's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from launch import HERE
from peers import Prompts, save_checkpoint, start


def one_turn(url: str, model: str, prompt: str, tokens: int) -> tuple[float, str, dict]:
    """The time to first token in seconds, the completion and the usage."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    written = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", written, {"Content-Type": "application/json"})
    started_at, first_at, text, usage = time.perf_counter(), None, "", {}
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            first_at = first_at or time.perf_counter()
            event = json.loads(line[6:])
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    return first_at - started_at, text, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"turns": 8, "user": 200, "answer": 100, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    window = args.turns * (args.user + args.answer) + 1000  # a completion may be more tokens as a part of a prompt
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        scratch = Path(name)
        model = save_checkpoint(scratch / "model")
        for reuse in ("true", "false"):
            flags = f"--max-total-tokens {max(window, 4096)} --prefix-reuse {reuse} --hostname 127.0.0.1"
            command = f"PYTHON={sys.executable} {HERE}/entrypoint.sh serve --model-id {{model}} --port {{port}} {flags}"
            prompts = Prompts(model, args.user)
            rounds: list[list[tuple[float, int]]] = []
            with start(command, model, scratch / "log", scratch / "cache") as server:
                url = server.wait_ready().url
                for _ in range(args.rounds):
                    history, turns = "", []
                    for _ in range(args.turns):
                        history += next(prompts)
                        ttft_s, text, usage = one_turn(url, str(model), history, args.answer)
                        history += text
                        turns.append((ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
                    rounds.append(turns)
            print(f"--prefix-reuse {reuse}: turn, time to first token in ms, prompt tokens, of which cached")
            medians = [[statistics.median(column) for column in zip(*turn)] for turn in zip(*rounds)]
            for number, (ttft_s, prompt, cached) in enumerate(medians, 1):
                print(f"    {number}  {ttft_s * 1e3:8.0f} {prompt:8.0f} {cached:8.0f}")
            print(f"    last over second: {medians[-1][0] / medians[1][0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
