"""Tokens/s of openvino-genai's continuous batching, in process, to compare with this server.

    pip install openvino-genai==2026.4.1 optimum-intel==2.2.0 nncf==3.4.0
    optimum-cli export openvino --task text-generation-with-past --model FOLDER --weight-format int8 EXPORTED
    python bench/genai.py EXPORTED STREAMS

As `make bench URL=...` asks a server: greedy, 64 tokens for a prompt of 102 words, each prompt another text. The first of four
rounds does not count. It speaks no HTTP and streams nothing. Belongs into an environment of its own.
"""

import sys
import time

import openvino_genai

TEXT = "river stone green seven quickly under the old bridge many people walked each morning with bread and news"
TOKENS = 64


def prompt(number: int) -> str:
    words = TEXT.split()
    return " ".join(words[(n * number + number) % len(words)] for n in range(102))


def main(folder: str, streams: int) -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = 16
    scheduler.cache_size = 1  # gigabyte
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
    asked = openvino_genai.GenerationConfig()
    asked.max_new_tokens = TOKENS
    asked.ignore_eos = True
    asked.do_sample = False
    asked.apply_chat_template = False
    speeds = []
    for turn in range(4):
        prompts = [prompt(1 + turn * streams + n) for n in range(streams)]
        started_at = time.perf_counter()
        pipeline.generate(prompts, [asked] * streams)
        speeds.append(streams * TOKENS / (time.perf_counter() - started_at))
    print(f"{streams} streams: {', '.join(f'{speed:.1f}' for speed in speeds[1:])} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
