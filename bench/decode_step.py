"""What a decode step of TorchModel takes on this CPU, beside plain transformers and beside the best loop PyTorch allows.

    .venv/bin/python bench/decode_step.py [--model-id FOLDER] [--dtype bfloat16,float32] [--batch 1,4,16] [--rounds 5]

Without a folder the model has SmolLM2-135M's shape and random weights. `transformers` is its own forward with a StaticCache;
`loop` is written by hand for nothing but this shape of model, with plain weights or with packed ones, whichever is faster.
The forms take turns, 8 steps each, at contexts of 160 to 191 tokens, on the same number of threads (torch's own, or
OMP_NUM_THREADS). Prints the median of the rounds, and the least and the most, in milliseconds; ratios are made in each round.
`figures` returns the same as a list of records.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

from config import Config, Manifest  # noqa: E402
from torch_model import TorchModel  # noqa: E402

DTYPES, BATCHES, ROUNDS = ("bfloat16", "float32"), (1, 4, 16), 5
CONTEXT, STEPS, TURN, WINDOW, PROMPT = 160, 32, 8, 256, 128
REACH = 1.1  # of the loop's time
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


class Loop:
    """A Llama forward for decoding alone, all rows at one position: nothing is checked, nothing is general."""

    def __init__(self, model, batch_size: int, is_packed: bool):
        config, dtype = model.config, model.dtype
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.epsilon = config.rms_norm_eps
        if is_packed:
            linear, layout = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._reorder_linear_weight
            self.linear = lambda x, weight: linear(x, weight, None, "none", [], "")
        else:
            self.linear, layout = F.linear, lambda weight, rows: weight
        self.embedding = model.model.embed_tokens.weight.detach()
        self.head = layout(model.lm_head.weight.detach(), 16)
        self.norm = model.model.norm.weight.detach()
        store = (2, batch_size, self.kv_heads, WINDOW, self.size)
        self.layers = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach()
            gate_up = torch.cat([m.gate_proj.weight, m.up_proj.weight]).detach()
            out, down = a.o_proj.weight.detach(), m.down_proj.weight.detach()
            norms = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
            weights = [layout(weight, 16) for weight in (qkv, out, gate_up, down)]
            self.layers.append((*norms, *weights, torch.zeros(store, dtype=dtype)))
        cos, sin = model.model.rotary_emb(self.embedding, torch.arange(WINDOW)[None])
        sin = torch.cat((-sin[..., : self.size // 2], sin[..., self.size // 2 :]), -1)
        turned = self.heads + self.kv_heads  # of the heads; the values, behind them, stay as they are
        self.cos = torch.ones(WINDOW, turned + self.kv_heads, self.size, dtype=dtype)
        self.sin = torch.zeros_like(self.cos)
        self.cos[:, :turned], self.sin[:, :turned] = cos[0, :, None], sin[0, :, None]

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """tokens: int64 [batch], all at `position`. Returns the logits, [batch, vocab]."""
        batch, linear, shape = len(tokens), self.linear, self.embedding.shape[1:]
        x, cos, sin = F.embedding(tokens, self.embedding), self.cos[position], self.sin[position]
        for norm_1, norm_2, qkv_weight, out, gate_up, down, store in self.layers:
            qkv = linear(F.rms_norm(x, shape, norm_1, self.epsilon), qkv_weight).view(batch, -1, self.size)
            qkv = torch.addcmul(qkv * cos, torch.roll(qkv, self.size // 2, -1), sin)
            store[:, :, :, position] = qkv[:, self.heads :].view(batch, 2, self.kv_heads, -1).transpose(0, 1)
            key, value = store[:, :, :, : position + 1].unbind()
            attended = F.scaled_dot_product_attention(
                qkv[:, : self.heads].view(batch, self.kv_heads, -1, self.size), key, value
            )
            x = x + linear(attended.view(batch, -1), out)
            gate, up = linear(F.rms_norm(x, shape, norm_2, self.epsilon), gate_up).chunk(2, -1)
            x = x + linear(F.silu(gate).mul_(up), down)
        return linear(F.rms_norm(x, shape, self.norm, self.epsilon), self.head)


class StaticCacheStep:
    """transformers' own forward, its cache filled up to CONTEXT again whenever a step is at that position."""

    def __init__(self, model, batch_size: int):
        self.model, self.prompt = model, torch.ones(batch_size, CONTEXT, dtype=torch.int64)
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=WINDOW)

    @torch.inference_mode()
    def fill(self) -> None:
        self.cache.reset()
        self.model(input_ids=self.prompt, past_key_values=self.cache, logits_to_keep=1)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        at = torch.full((len(tokens), 1), position)
        return self.model(input_ids=tokens[:, None], position_ids=at, past_key_values=self.cache).logits[:, 0]


def torch_model(folder: Path, dtype: str, batch_size: int) -> TorchModel:
    threads = torch.get_num_threads()
    manifest = Manifest.read(folder)
    config = Config(model_id=str(folder), device="cpu", dtype=dtype, max_batch_size=batch_size, max_total_tokens=WINDOW)
    model = TorchModel(config.with_manifest(manifest), folder, manifest, "cpu")
    torch.set_num_threads(threads)  # the same for all, whatever it chose
    return model


def decode(model: TorchModel, tokens: torch.Tensor, position: int) -> torch.Tensor:
    return model.decode(tokens, torch.full((len(tokens),), position), torch.arange(len(tokens)))


def save_random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2_135M)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def milliseconds(step, *arguments) -> float:
    started_at = time.perf_counter()
    step(*arguments)
    return (time.perf_counter() - started_at) * 1e3


def one_round(steps: dict, tokens: torch.Tensor) -> dict[str, float]:
    """The median of every form's steps, which take turns."""
    took = {name: [] for name in steps}
    for begin in range(CONTEXT, CONTEXT + STEPS, TURN):
        for name, step in steps.items():
            took[name] += [milliseconds(step, tokens, position) for position in range(begin, begin + TURN)]
    return {name: statistics.median(times) for name, times in took.items()}


def figures(folder: Path, dtypes=DTYPES, batches=BATCHES, rounds: int = ROUNDS) -> list[dict]:
    """The records {"name", "value", "min", "max", "unit", "reach", "met"}: medians of the rounds; None without a reach."""
    found = []

    def record(name: str, values: list[float], unit: str, reach: float | None = None) -> None:
        value = statistics.median(values)
        least, most = round(min(values), 3), round(max(values), 3)
        met = None if reach is None else value <= reach
        row = {"name": name, "value": round(value, 3), "min": least, "max": most, "unit": unit, "reach": reach, "met": met}
        found.append(row)
        print(row, file=sys.stderr, flush=True)

    for dtype in dtypes:
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for batch_size in batches:
            served, static = torch_model(folder, dtype, batch_size), StaticCacheStep(plain, batch_size)
            steps = {
                "TorchModel": functools.partial(decode, served),
                "transformers": static.step,
                "plain loop": Loop(plain, batch_size, is_packed=False).step,
                "packed loop": Loop(plain, batch_size, is_packed=True).step,
            }
            tokens, took = torch.arange(batch_size), []
            for number in range(rounds + 1):
                static.fill()
                took.append(one_round(steps, tokens))
                print(f"{dtype}, batch {batch_size}, round {number} of {rounds}: {took[-1]}", file=sys.stderr, flush=True)
            took = took[1:]  # the first warms up
            loop = min(("plain loop", "packed loop"), key=lambda name: statistics.median(t[name] for t in took))
            of = f"{dtype}, batch {batch_size}"
            for name in steps:
                record(f"decode step of {name}, {of}", [t[name] for t in took], "ms")
            record(f"TorchModel / {loop}, {of}", [t["TorchModel"] / t[loop] for t in took], "x", REACH)
            record(f"TorchModel / transformers, {of}", [t["TorchModel"] / t["transformers"] for t in took], "x")
            prompt = torch.arange(PROMPT).tolist()
            speeds = [PROMPT / milliseconds(served.prefill, 0, prompt) * 1e3 for _ in range(rounds + 1)][1:]
            record(f"prefill of {PROMPT} tokens, {of}", speeds, "tokens/s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", type=Path)
    parser.add_argument("--dtype", type=lambda value: value.split(","), default=DTYPES)
    parser.add_argument("--batch", type=lambda value: [int(n) for n in value.split(",")], default=BATCHES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(f"{torch.get_num_threads()} threads, {os.cpu_count()} cores", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model_id or save_random_model(Path(scratch))
        for row in figures(folder, arguments.dtype, arguments.batch, arguments.rounds):
            reach = "" if row["reach"] is None else f"  reach {row['reach']}: {'met' if row['met'] else 'NOT met'}"
            print(f"{row['name']:48} {row['value']:8.4g} {row['unit']:8} ({row['min']:.4g} to {row['max']:.4g}){reach}")


if __name__ == "__main__":
    main()
