"""Servers side by side over HTTP: the same checkpoint, the same prompts, turn by turn on one machine.

    .venv/bin/python bench/peers.py --server 'ours=./entrypoint.sh serve --model-id {model} --port {port} --dtype bfloat16' \\
        --server 'vllm=/path/to/vllm serve {model} --port {port} --dtype bfloat16' [--concurrency 1 4 16] [--rounds 3]

Each server is started once, is asked for a few answers, and is stopped (SIGSTOP) whenever it is not its turn, so that it
takes nothing from the others. A round is a turn of each: for each concurrency so many streams at a time over OpenAI's
/v1/completions, greedy, prompts of exactly 128 tokens, none of them twice, answers of exactly 64. Tokens per second are those
of the answers over the time from the first request to the last answer, prompts included. The checkpoint has SmolLM2-135M's
shape, random weights, a tokenizer trained here, and no end-of-text token; with --model another folder is served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from devices import free_port
from load import Answer, LoadError, Target, closed_loop, find, percentile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent.parent
READY_S = 300


@dataclass
class Peer:
    """A server that was started here."""

    name: str
    url: str
    process: subprocess.Popen
    target: Target | None = None

    def signal(self, number: int) -> None:
        """To the server's own process and all that it started: they are a session of their own."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == self.process.pid:
                    os.kill(int(folder.name), number)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=5):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise LoadError(f"{self.name} did not become ready; its log is {self.name}.log")
            time.sleep(0.2)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Holds the lock, where several measure on one machine."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save_checkpoint(folder: Path) -> Path:
    """SmolLM2-135M's shape with random weights, and a tokenizer with as many tokens, trained on Python's own library."""
    from decode_step import SMOLLM2_135M, save_random_model  # brings torch, which nothing else here needs

    if not (folder / "model.safetensors").is_file():
        save_random_model(folder)
        for name in ("config.json", "generation_config.json"):  # no token ends a text
            text = (folder / name).read_text()
            (folder / name).write_text(text.replace('"eos_token_id": 2', '"eos_token_id": null'))
    if not (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=SMOLLM2_135M["vocab_size"], initial_alphabet=alphabet, show_progress=False)
        tokenizer.train([str(file) for file in Path(sysconfig.get_path("stdlib")).glob("**/*.py")][:4000], trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    return folder


class Prompts:
    """Texts of exactly so many tokens, none twice: words that are one token each."""

    def __init__(self, folder: Path, tokens: int):
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocab = self._tokenizer.get_vocab()
        self._words = sorted(word[1:] for word in vocab if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha())
        self._tokens, self._random = tokens, random.Random(0)

    def __next__(self) -> str:
        text = "".join(f" {word}" for word in self._random.choices(self._words, k=self._tokens))
        assert len(self._tokenizer.encode(text).ids) == self._tokens
        return text


def start(name: str, command: str, model: Path, logs: Path) -> Peer:
    port = free_port()
    words = [word.format(model=model, port=port) for word in shlex.split(command)]
    settings = dict(word.split("=", 1) for word in words if "=" in word.split("/")[0] and not word.startswith("-"))
    with (logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            words[len(settings) :], env=os.environ | settings, stdout=log, stderr=log, start_new_session=True
        )
    return Peer(name, f"http://127.0.0.1:{port}", process)


def one_turn(peer: Peer, prompts: Prompts, concurrency: int, requests: int, tokens: int) -> tuple[float, list[Answer]]:
    """Tokens per second, and the answers."""
    asked = [peer.target.request(next(prompts), tokens) for _ in range(requests)]
    started_at = time.perf_counter()
    answers = asyncio.run(closed_loop(peer.target, asked, concurrency))
    took_s = time.perf_counter() - started_at
    for answer in answers:
        if answer.error or answer.tokens != tokens:
            raise LoadError(f"{peer.name}: {answer.error or f'{answer.tokens} tokens instead of {tokens}'}")
    return tokens * requests / took_s, answers


def told(values: list[float]) -> str:
    return f"{min(values):8.1f} {statistics.median(values):8.1f} {max(values):8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND; {model} and {port} are filled in")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer.json; made here without it")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 12, 32], help="of each concurrency, in a turn")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, default=Path.cwd(), help="where the servers' logs go, NAME.log")
    parser.add_argument("--lock", type=Path, help="a file to hold while a server starts and in a round (flock)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        with alone(args.lock):
            model = args.model or save_checkpoint(Path(scratch))
        prompts, peers = Prompts(model, args.prompt), []
        found: dict[tuple[str, int], list[tuple[float, list[Answer]]]] = {}
        try:
            for server in args.server:
                name, _, command = server.partition("=")
                with alone(args.lock):
                    began_at = time.monotonic()
                    peers.append(peer := start(name, command, model, args.logs))
                    peer.wait_ready()
                    print(f"{name}: ready after {time.monotonic() - began_at:.1f} s", file=sys.stderr, flush=True)
                    peer.target = find(peer.url, model=str(model))
                    for concurrency in args.concurrency:
                        one_turn(peer, prompts, concurrency, concurrency, args.tokens)
                    peer.signal(signal.SIGSTOP)
            for number in range(args.rounds):
                with alone(args.lock):
                    for peer in peers:
                        peer.signal(signal.SIGCONT)
                        time.sleep(0.5)
                        for concurrency, requests in zip(args.concurrency, args.requests):
                            one = one_turn(peer, prompts, concurrency, requests, args.tokens)
                            found.setdefault((peer.name, concurrency), []).append(one)
                            line = f"round {number + 1}: {peer.name} with {concurrency} at a time: {one[0]:.1f} tokens/s"
                            print(line, file=sys.stderr, flush=True)
                        peer.signal(signal.SIGSTOP)
        except LoadError as error:
            sys.exit(f"error: {error}")
        finally:
            for peer in peers:
                peer.end()
    print(f"{'server':16} {'at a time':>9}   tokens/s: least, median, most   {'ttft p50':>9} {'itl p50':>9} {'itl p99 ms':>10}")
    for (name, concurrency), rounds in found.items():
        ttft = [answer.ttft_s * 1e3 for _speed, answers in rounds for answer in answers]
        gaps = [gap * 1e3 for _speed, answers in rounds for answer in answers for gap in answer.gaps_s]
        speeds = told([speed for speed, _answers in rounds])
        latencies = f"{statistics.median(ttft):9.1f} {statistics.median(gaps):9.1f} {percentile(gaps, 0.99):10.1f}"
        print(f"{name:16} {concurrency:9}   {speeds}      {latencies}")
    first = args.server[0].partition("=")[0]
    for concurrency in args.concurrency if len(peers) > 1 else ():
        best = [max(found[peer.name, concurrency][n][0] for peer in peers[1:]) for n in range(args.rounds)]
        ratios = [found[first, concurrency][n][0] / best[n] for n in range(args.rounds)]
        of = f"{min(ratios):.2f} {statistics.median(ratios):.2f} {max(ratios):.2f}"
        print(f"{first} over the best of the others, {concurrency} at a time: {of}")


if __name__ == "__main__":
    main()
