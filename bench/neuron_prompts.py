"""What long prompts cost running streams on a simulated device, with chunked prefill (--prefill-chunk) and whole.

    .venv/bin/python bench/neuron_prompts.py [--chunks 128 0] [--seconds 20] [--rounds 3]

The device has 32 slots of 26.7 ms; a prompt of 3,000 tokens takes 0.7 s, and a chunk its share of that. 31 streams run, and
every 2 s a prompt of 3,000 tokens arrives, for one token. Reported, as least, median and most of the rounds: the 99th
percentile and the maximum of the streams' inter-token latency, their tokens per second, and the prompts' time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
from itertools import pairwise

from devices import LLAMA_31_8B, serve
from load import SAMPLED, Answer, Target, ask, find, open_stream, percentile, prompt_of
from peers import spread

PROMPT, EVERY_S, STREAMS = 3000, 2.0, 31
DEVICE = dataclasses.replace(LLAMA_31_8B, prefill_ms=0.0, token_ms=700 / PROMPT)


async def one_round(target: Target, seconds: float) -> dict[str, float]:
    sampling = SAMPLED | {"truncate": PROMPT}
    streams = [await open_stream(target, target.request(prompt_of(20, number), 3900)) for number in range(STREAMS)]
    await asyncio.gather(*(stream.begun for stream in streams))
    asked, started_at, loop = [], asyncio.get_running_loop().time(), asyncio.get_running_loop()
    for number in range(int(seconds / EVERY_S)):
        await asyncio.sleep(max(0.0, started_at + number * EVERY_S - loop.time()))
        text = " ".join(str(random.random()) for _ in range(PROMPT // 4))  # truncated to PROMPT tokens
        asked.append(asyncio.create_task(ask(target, target.request(text, 1, sampling))))
    prompts = await asyncio.gather(*asked)
    assert not [prompt.error for prompt in prompts if prompt.error], prompts[0].error
    assert not any(stream.done.done() for stream in streams), "a stream ended"
    begin, end = prompts[0].started_at, max(prompt.times[0] for prompt in prompts)
    for stream in streams:
        stream.close()
    times = [[at for at in Answer.of(stream).times if begin <= at <= end] for stream in streams]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    return {
        "itl p99, ms": percentile(gaps, 0.99) * 1e3,
        "itl max, ms": max(gaps) * 1e3,
        "tokens/s": sum(map(len, times)) / (end - begin),
        "ttft, s": statistics.median(prompt.ttft_s for prompt in prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 0], help="values of --prefill-chunk")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for chunk in args.chunks:
        with serve(DEVICE, "--prefill-chunk", str(chunk)) as server:
            target = find(server.url)
            rounds = [asyncio.run(one_round(target, args.seconds)) for _ in range(args.rounds)]
        step_ms = DEVICE.step_ms + (chunk or PROMPT) * DEVICE.token_ms
        print(f"--prefill-chunk {chunk}: a step and a {'chunk' if chunk else 'prompt'} take {step_ms:.0f} ms")
        for name in rounds[0]:
            print(f"    {name:16} {spread([each[name] for each in rounds], 8, 2)}", flush=True)
    print(json.dumps({"device": DEVICE.name, "prompt": PROMPT, "every_s": EVERY_S, "streams": STREAMS}))


if __name__ == "__main__":
    main()
