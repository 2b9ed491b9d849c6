"""Servers side by side over HTTP: the same checkpoint, the same kind of prompts, turn by turn on one machine.

    .venv/bin/python bench/peers.py --server 'ours=./entrypoint.sh serve --model-id {model} --port {port} --dtype bfloat16' \\
        --server 'vllm=/path/to/vllm serve {model} --port {port} --dtype bfloat16' [--concurrency 1 4 16] [--rounds 3]

Each server is started while the others are stopped (SIGSTOP), is warmed up, and is stopped whenever it is not its turn. A round
is a turn of each: for each concurrency that many streams at a time over OpenAI's /v1/completions, greedy, prompts of exactly
128 tokens, none of them twice, completions of exactly 64. Tokens per second are generated tokens over the time from the first
request to the last token, prompts included. The checkpoint has SmolLM2-135M's shape, random weights, a tokenizer trained here,
and no end-of-text token; --model names its folder, or another model's.

Owns the checkpoint, the prompts and the turns, which long_prompt.py and demo.py use as well. Does not know any server's API.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch import Server, free_port
from load import Answer, LoadError, Target, closed_loop, find, percentile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SMOLLM2_135M = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2_135M |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "eos_token_id": None}
SMOLLM2_135M |= {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}


class Peer(NamedTuple):
    name: str
    server: Server
    target: Target


def save_checkpoint(folder: Path) -> Path:
    """SmolLM2-135M's shape in bfloat16 with random weights, and a tokenizer of that size, trained on Python's library;
    a folder with a model stays as it is."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SMOLLM2_135M["vocab_size"], initial_alphabet=alphabet, show_progress=False)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))[:4000]
    tokenizer.train_from_iterator((file.read_text(errors="replace") for file in files), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2_135M))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class Prompts:
    """Texts of exactly `tokens` tokens, none twice: words that are one token each."""

    def __init__(self, folder: Path, tokens: int):
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocab = self._tokenizer.get_vocab()
        self._words = sorted(word[1:] for word in vocab if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha())
        self._tokens, self._random = tokens, random.Random(0)

    def __next__(self) -> str:
        text = "".join(f" {word}" for word in self._random.choices(self._words, k=self._tokens))
        assert len(self._tokenizer.encode(text).ids) == self._tokens
        return text


class Turns:
    """Servers that are measured in turns. `request` makes the bytes of one request for a server, for `tokens` tokens."""

    def __init__(self, request: Callable[[Target], bytes], tokens: int, concurrencies: Sequence[int], requests: Sequence[int]):
        self.peers: list[Peer] = []
        self.found: dict[tuple[str, int], list[tuple[float, list[Answer]]]] = {}
        self._request, self._tokens, self._counts = request, tokens, list(zip(concurrencies, requests))

    def add(self, peer: Peer) -> None:
        """A server that is ready: warms it up and stops it (SIGSTOP)."""
        self.peers.append(peer)
        for concurrency, _requests in self._counts:
            self._measure(peer, concurrency, concurrency)
        peer.server.signal(signal.SIGSTOP)

    def run(self, rounds: int) -> None:
        """Adds (tokens/s, answers) of each round to `found` by name and concurrency."""
        for number in range(rounds):
            for peer in self.peers:
                peer.server.signal(signal.SIGCONT)
                time.sleep(0.5)
                for concurrency, requests in self._counts:
                    one = self._measure(peer, concurrency, requests)
                    self.found.setdefault((peer.name, concurrency), []).append(one)
                    print(f"round {number + 1}: {peer.name}, {concurrency} at a time: {one[0]:.1f} tokens/s", file=sys.stderr)
                peer.server.signal(signal.SIGSTOP)

    def _measure(self, peer: Peer, concurrency: int, count: int) -> tuple[float, list[Answer]]:
        requests = [self._request(peer.target) for _ in range(count)]
        started_at = time.perf_counter()
        answers = asyncio.run(closed_loop(peer.target, requests, concurrency))
        took_s = time.perf_counter() - started_at
        if wrong := [answer.tokens for answer in answers if answer.tokens != self._tokens]:
            raise LoadError(f"{peer.name}: a completion has {wrong[0]} tokens instead of {self._tokens}")
        return self._tokens * count / took_s, answers

    def report(self) -> None:
        """Prints each server's figures, and the first one's over the best of the others, round by round."""
        print(f"{'server':16} {'at a time':>9} {'tokens/s: min, median, max':>28} {'ttft p50':>9} {'itl p50':>9} {'p99 ms':>9}")
        for (name, concurrency), rounds in self.found.items():
            ttft = [answer.ttft_s * 1e3 for _speed, answers in rounds for answer in answers]
            gaps = [gap * 1e3 for _speed, answers in rounds for answer in answers for gap in answer.gaps_s]
            speeds = spread([speed for speed, _answers in rounds], 8, 1)
            latencies = f"{statistics.median(ttft):9.1f} {statistics.median(gaps):9.1f} {percentile(gaps, 0.99):9.1f}"
            print(f"{name:16} {concurrency:9}   {speeds} {latencies}")
        first, *others = (peer.name for peer in self.peers)
        for concurrency, _requests in self._counts if others else ():
            rounds = zip(self.found[first, concurrency], *(self.found[name, concurrency] for name in others))
            ratios = [ours[0] / max(each[0] for each in theirs) for ours, *theirs in rounds]
            print(f"{first} over the best of the others, {concurrency} at a time: {spread(ratios, 0, 2)}")


def spread(values: Sequence[float], width: int, digits: int) -> str:
    """Least, median and most."""
    numbers = (min(values), statistics.median(values), max(values))
    return " ".join(f"{value:{width}.{digits}f}" for value in numbers)


def start(command: str, model: Path, log_path: Path, cache: Path) -> Server:
    """`command` is a shell's line without a shell: settings (NAME=VALUE), then words; {model} and {port} are filled in."""
    port = free_port()
    words = [word.format(model=model, port=port) for word in shlex.split(command)]
    settings = dict(word.split("=", 1) for word in words if "=" in word.split("/")[0] and not word.startswith("-"))
    return Server(words[len(settings) :], port, log_path, os.environ | {"MODEL_CACHE": str(cache)} | settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND; {model} and {port} are filled in")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer.json")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 12, 32], help="of each concurrency, in a turn")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, default=Path.cwd(), help="where the servers' logs go, NAME.log")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as scratch:
        model = save_checkpoint(args.model or Path(scratch))
        prompts = Prompts(model, args.prompt)
        turns = Turns(lambda target: target.request(next(prompts), args.tokens), args.tokens, args.concurrency, args.requests)
        servers = []
        try:
            for name, _, command in (each.partition("=") for each in args.server):
                servers.append(server := start(command, model, args.logs / f"{name}.log", Path(scratch) / "cache"))
                server.wait_ready(log_text=None)
                print(f"{name}: ready after {server.ready_s:.1f} s", file=sys.stderr)
                turns.add(Peer(name, server, find(server.url, model=str(model))))
            turns.run(args.rounds)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        finally:
            for server in servers:
                server.end()
    turns.report()


if __name__ == "__main__":
    main()
