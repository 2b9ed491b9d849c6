"""Servers side by side over HTTP: the same checkpoint, the same kind of prompts, turn by turn on one machine.

    make peers          this server, and those of `PEERS` that are on the PATH, on a model of 1 B parameters, then on SmolLM2

    .venv/bin/python bench/peers.py --server 'ours=./entrypoint.sh serve --model-id {model} --port {port} --dtype bfloat16' \\
        --server 'vllm=/path/to/vllm serve {model} --port {port} --dtype bfloat16' [--concurrency 1 4 16] [--rounds 3]

Each server is started while the others are stopped (SIGSTOP), is warmed up, and is stopped whenever it is not its turn. A round
is a turn of each: for each concurrency that many streams at a time over OpenAI's /v1/completions, greedy, prompts of exactly
128 tokens, none of them twice, completions of exactly 64. Tokens per second are generated tokens over the time from the first
request to the last token, prompts included. Without --model and --gguf the checkpoint has random weights in the shape that
--shape names, a tokenizer trained here, and no end-of-text token.

Owns how each server is started, the checkpoint, the prompts and the turns, which long_prompt.py and demo.py use as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from figures import Figure
from launch import HERE, Server, free_port
from load import Answer, LoadError, Target, closed_loop, find, percentile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import write

SMOLLM2_135M = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2_135M |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "eos_token_id": None}
SMOLLM2_135M |= {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
LLAMA_1B = SMOLLM2_135M | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA_1B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
QWEN35_800M = {"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
QWEN35_800M |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16}
QWEN35_800M |= {"tie_word_embeddings": True, "eos_token_id": None}
QWEN35_800M |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
QWEN35_4B = QWEN35_800M | {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
QWEN35_4B |= {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32}
SHAPES = {  # a class of transformers, and its configuration
    "135m": ("Llama", SMOLLM2_135M),
    "1b": ("Llama", LLAMA_1B),
    "qwen3.5-0.8b": ("Qwen3_5", QWEN35_800M),
    "qwen3.5-4b": ("Qwen3_5", QWEN35_4B),
}

OURS = (
    "PYTHON={python} {here}/entrypoint.sh serve --model-id {model} --hostname 127.0.0.1 --port {port}"
    " --max-batch-size 16 --max-total-tokens 1024"
)
VLLM = (
    "VLLM_CPU_KVCACHE_SPACE=2 vllm serve {model} --host 127.0.0.1 --port {port}"
    " --max-model-len 1024 --max-num-seqs 16 --no-enable-prefix-caching"
)
GENAI = "{genai_python} {here}/bench/genai.py {model} {port}"
LLAMA_CPP = "llama-server --host 127.0.0.1 --port {port} --parallel 16 --ctx-size 16384 --model"
PEERS = {  # servers with the same words after the comma are compared
    "this server, bfloat16": f"{OURS} --dtype bfloat16 --speculate 0",
    "this server, int8": f"{OURS} --quantize int8 --speculate 0",
    "this server, int4": f"{OURS} --quantize int4 --speculate 0",
    "this server, bfloat16, speculating": f"{OURS} --dtype bfloat16",
    "this server, int8, speculating": f"{OURS} --quantize int8",
    "this server, int4, speculating": f"{OURS} --quantize int4",
    "vLLM, bfloat16": f"{VLLM} --dtype bfloat16",
    "openvino-genai, int8": f"{GENAI} int8",
    "openvino-genai, int4": f"{GENAI} int4",
    "llama.cpp, int8": f"{LLAMA_CPP} {{q8_0}}",
    "llama.cpp, int4": f"{LLAMA_CPP} {{q4_0}}",
}
PROGRAMS = {"vLLM": ["vllm"], "openvino-genai": ["optimum-cli"], "llama.cpp": ["llama-server", "llama-quantize"]}


class Peer(NamedTuple):
    name: str
    server: Server
    target: Target


def save_checkpoint(folder: Path, shape: str = "135m") -> Path:
    """A shape in bfloat16 with random weights, and a tokenizer of that size, trained on Python's library; a folder with a
    model stays as it is."""
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
    state = json.loads(tokenizer.to_str())
    family, facts = SHAPES[shape]
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<unused{n}>": n for n in range(len(vocabulary), facts["vocab_size"])}  # each token is a text
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig" if family == "Qwen3_5" else f"{family}Config")(**facts)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def read_gguf(file: Path, folder: Path) -> Path:
    """The model of a GGUF file as a checkpoint in bfloat16."""
    command = [sys.executable, "-m", "models.checkpoint.gguf", file.resolve(), "bfloat16", folder]
    subprocess.run(command, cwd=HERE, env=os.environ | {"TQDM_DISABLE": "1"}, check=True)
    return folder


def write_ggufs(model: Path, folder: Path) -> dict[str, Path]:
    """The checkpoint of a shape as GGUF files with its matrices in Q8_0 and in Q4_0."""
    import gguf
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    is_hybrid = config.model_type == "qwen3_5_text"
    kind_of_model = gguf.MODEL_ARCH.QWEN35 if is_hybrid else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(folder / "bfloat16.gguf", gguf.MODEL_ARCH_NAMES[kind_of_model])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if is_hybrid:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    state = json.loads((model / "tokenizer.json").read_text())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]])
    names = gguf.get_tensor_name_map(kind_of_model, config.num_hidden_layers)
    weights = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # llama.cpp rotates neighbouring numbers of a head, transformers its halves.
        if not is_hybrid and name.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads if "q_proj" in name else kv_heads
            weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if name.endswith("A_log"):
            weight = -weight.exp()
        elif name.endswith("norm.weight") and is_hybrid and "linear_attn" not in name:
            weight = weight + 1
        is_convolution = "conv1d" in name
        data = (weight.squeeze(1) if is_convolution else weight).contiguous().numpy()
        is_vector = data.ndim == 1 or is_convolution
        kind = gguf.GGMLQuantizationType.F32 if is_vector else gguf.GGMLQuantizationType.BF16
        tensor = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        writer.add_tensor(tensor, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = {}
    for name in ("q8_0", "q4_0"):
        files[name] = folder / f"{name}.gguf"
        command = ["llama-quantize", folder / "bfloat16.gguf", files[name], name.upper()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return files


def installed(names: Sequence[str]) -> dict[str, str]:
    """Those of `names` in `PEERS` that can be started here; prints which cannot."""
    missing = set()
    for name, programs in PROGRAMS.items():
        for program in programs:
            if not shutil.which(program):
                print(f"{name} is not measured: no {program} on the PATH", file=sys.stderr)
                missing.add(name)
    return {name: PEERS[name] for name in names if name.partition(",")[0] not in missing}


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

    def figures(self) -> list[Figure]:
        return [
            Figure(f"throughput: {name}: {concurrency} at a time", [speed for speed, _answers in rounds], "tokens/s")
            for (name, concurrency), rounds in self.found.items()
        ]

    def report(self) -> None:
        """Prints each server's figures, and for each kind (`server, kind`) the first server's over the best of the others,
        round by round."""
        print(f"{'server':24} {'at a time':>9} {'tokens/s: min, median, max':>28} {'ttft p50':>9} {'itl p50':>9} {'p99 ms':>9}")
        for (name, concurrency), rounds in self.found.items():
            ttft = [answer.ttft_s * 1e3 for _speed, answers in rounds for answer in answers]
            gaps = [gap * 1e3 for _speed, answers in rounds for answer in answers for gap in answer.gaps_s]
            speeds = spread([speed for speed, _answers in rounds], 8, 1)
            latencies = f"{statistics.median(ttft):9.1f} {statistics.median(gaps):9.1f} {percentile(gaps, 0.99):9.1f}"
            print(f"{name:24} {concurrency:9}   {speeds} {latencies}")
        names_of_kinds: dict[str, list[str]] = {}
        for peer in self.peers:
            names_of_kinds.setdefault(peer.name.partition(", ")[2], []).append(peer.name)
        for first, *others in names_of_kinds.values():
            for concurrency, _requests in self._counts if others else ():
                rounds = zip(self.found[first, concurrency], *(self.found[name, concurrency] for name in others))
                ratios = [ours[0] / max(each[0] for each in theirs) for ours, *theirs in rounds]
                print(f"{first} over the best of the others, {concurrency} at a time: {spread(ratios, 0, 2)}")


def spread(values: Sequence[float], width: int, digits: int) -> str:
    """Least, median and most."""
    numbers = (min(values), statistics.median(values), max(values))
    return " ".join(f"{value:{width}.{digits}f}" for value in numbers)


def start(command: str, model: Path, log_path: Path, cache: Path, **values: Path | str) -> Server:
    """`command` is a shell's line without a shell: settings (NAME=VALUE), then words; {model}, {port} and `values` are
    filled in."""
    port = free_port()
    words = [word.format(model=model, port=port, **values) for word in shlex.split(command)]
    settings = dict(word.split("=", 1) for word in words if "=" in word.split("/")[0] and not word.startswith("-"))
    return Server(words[len(settings) :], port, log_path, os.environ | {"MODEL_CACHE": str(cache)} | settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", help="NAME=COMMAND; {model} and {port} are filled in")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a model folder with a tokenizer.json")
    model.add_argument("--gguf", type=Path, help="a model in a GGUF file")
    model.add_argument("--shape", choices=SHAPES, default="1b", help="of random weights")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, metavar="NAME", help="of a server known here")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 12, 32], help="of each concurrency, in a turn")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "report", help="of the report, without the endings")
    parser.add_argument("--logs", type=Path, default=Path.cwd(), help="where the servers' logs go, NAME.log")
    args = parser.parse_args()
    commands = dict(each.split("=", 1) for each in args.server) if args.server else installed(args.only)
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as scratch:
        scratch = Path(scratch)
        if args.gguf:
            model = read_gguf(args.gguf, scratch / "model")
        else:
            model = save_checkpoint(args.model or scratch / "model", args.shape)
        values = {"here": HERE, "python": sys.executable}
        values["genai_python"] = Path(shutil.which("optimum-cli") or sys.executable).with_name("python")
        if any("llama-server" in command for command in commands.values()):
            values |= write_ggufs(model, scratch)
        prompts = Prompts(model, args.prompt)
        turns = Turns(lambda target: target.request(next(prompts), args.tokens), args.tokens, args.concurrency, args.requests)
        servers = []
        try:
            for name, command in commands.items():
                server = start(command, model, log_path=args.logs / f"{name}.log", cache=scratch / "cache", **values)
                servers.append(server)
                server.wait_ready(log_text=None)
                print(f"{name}: ready after {server.ready_s:.1f} s", file=sys.stderr)
                turns.add(Peer(name, server, find(server.url, model=str(model))))
            turns.run(args.rounds)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        finally:
            for server in servers:
                server.end()
    for name, command in commands.items():
        print(f"{name}: {command}")
    turns.report()
    print("\n".join(map(str, write(args.out, "Servers side by side on a CPU", turns.figures()))))


if __name__ == "__main__":
    main()
