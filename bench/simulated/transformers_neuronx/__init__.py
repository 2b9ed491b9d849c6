"""A simulated device with a given duration of each call, behind the interface of transformers-neuronx that the server uses.

With `bench/simulated` on PYTHONPATH and `--device neuron` the unmodified server runs on it. A call sleeps until shortly before
its time is over, polls for the rest without the interpreter's lock, and returns precomputed logits:

    SIMULATED_STEP_MS      duration of a decode step (10)
    SIMULATED_PREFILL_MS   duration of a prompt (10)
    SIMULATED_TOKEN_MS     and of each of its tokens, also in chunks (0)
    SIMULATED_COPY_MB_S    megabytes of logits that are copied to the host in a second, after a decode step (0: at once)
    SIMULATED_VERIFY_MS    duration of a call that verifies the draft tokens of all slots (0: there is no such call)

Probabilities fall with a token's rank as a language model's do, and the end-of-text token never comes. A slot gets other
logits at each position, of a few that take turns; after prompts they are always the same. The threads of the Neuron Runtime
poll during a whole call and yield to other threads (Neuron documentation, "Best Practices: Neuron Runtime Performance"); on a
small machine that would take the clients' processor time, so only the last moment is polled: a thread that sleeps to the end
is woken too late. There is no KV cache, no weight, and no check of the calls: those are in tests/fakes. Where the device
samples it gives ids, and copies nothing that takes time: each slot's output then repeats 40 tokens, with another one in every
twentieth place, as code does that is written again with a name changed.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

__version__ = "0.0.0+simulated"
TURNS = 8  # steps after which a slot gets the same logits again
REPEATED, CHANGED = 40, 20  # tokens of an output that the device samples: how many repeat, and which one of them does not
POLLED_S = 0.0003
_libc = ctypes.CDLL(None)


class _Settings:
    def __init__(self, **settings):
        self.__dict__.update(settings)


class NeuronConfig(_Settings):
    pass


class ContinuousBatchingConfig(_Settings):
    pass


class GenerationConfig(_Settings):
    pass


def _decoder() -> SimpleNamespace:
    return SimpleNamespace(program=SimpleNamespace(returns_ids=False))


class LlamaForSampling:
    @classmethod
    def from_pretrained(cls, folder, **settings):
        return cls(json.loads((Path(folder) / "config.json").read_text()), **settings)

    def __init__(self, model_config: dict, batch_size: int, neuron_config: NeuronConfig, **_shapes):
        self.neuron_config = neuron_config
        self._samples = hasattr(neuron_config, "on_device_generation")
        self._is_hybrid = hasattr(neuron_config, "log_softmax_scores")
        # As where a graph returns both, the model says here which is copied.
        self.decoder_lm_head = _decoder()
        self.nbs_objs = [self.decoder_lm_head]
        self.config = SimpleNamespace(**model_config)
        self._slots = batch_size
        self._step_s = float(os.environ.get("SIMULATED_STEP_MS", 10)) / 1e3
        self._prefill_s = float(os.environ.get("SIMULATED_PREFILL_MS", 10)) / 1e3
        self._token_s = float(os.environ.get("SIMULATED_TOKEN_MS", 0)) / 1e3
        self._verify_s = float(os.environ.get("SIMULATED_VERIFY_MS", 0)) / 1e3
        self._copied_per_s = float(os.environ.get("SIMULATED_COPY_MB_S", 0)) * 1e6
        self.unroll, self.token_buckets, self.decoder_lm_head_for_speculation = None, [], {}
        self.decoder_param_set = SimpleNamespace(init_speculative_decoder=lambda **_program: _decoder())
        self._dtype = getattr(torch, neuron_config.cast_logits_dtype)

    def to_neuron(self) -> None:
        self._pool = _logits(self._slots, self.config.vocab_size, self.config.eos_token_id).to(self._dtype)
        self._by_slot = self._pool.t().contiguous()
        self._prompt_logits = self._pool[:, :1].clone()  # a prompt's graph has one row
        self._id = self._prompt_logits[: self.config.vocab_size].argmax(0)[None].int()  # after prompts, [1, 1]

    def save(self, directory) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)

    def load(self, directory) -> None:
        pass

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n, q], [n, q], [n] → [n, vocab], a view into a pool; in memory [vocab, n], as the library's logits are. Ids
        [n, 1] where the device samples."""
        over_at = time.perf_counter()
        turn = int(positions.max()) % TURNS
        if ids.shape[1] > 1:
            output = self._id if self._gives_ids else self._prompt_logits[: self.config.vocab_size].t()
            over_at += self._prefill_s + ids.shape[1] * self._token_s
        elif self._gives_ids:
            output = _own_ids(positions, slots, self.config.vocab_size)
            over_at += self._step_s
        elif self._verify_s:
            output = self._own_logits(positions, slots)[:, 0].t()
            over_at += self._step_s
        else:
            output = self._pool[turn : turn + self.config.vocab_size, : len(slots)].t()
            over_at += self._step_s
        if self._copied_per_s and not self._gives_ids:
            over_at += output.numel() * output.element_size() / self._copied_per_s
        _wait_until(over_at)
        return output

    def _cast_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    @property
    def _gives_ids(self) -> bool:
        return self._samples and (not self._is_hybrid or self.decoder_lm_head.program.returns_ids)

    def update_generation_config(self, config: GenerationConfig) -> None:
        pass

    def speculative_forward(self, ids, positions, slots, speculation_length: int) -> torch.Tensor:
        """int64 [n, q], [n, q], [n] → [q, vocab, n], or ids [n, q]: a prompt chunk, or the draft tokens of all slots."""
        if len(slots) > 1:
            return self._verified(positions, slots)
        over_at = time.perf_counter() + speculation_length * self._token_s
        output = self._prompt_logits[: self.config.vocab_size, None].expand(-1, speculation_length, -1)
        if self._gives_ids:
            output = self._id.expand(1, speculation_length)
        elif not self._samples:  # where a graph returns both, models/neuron/graph.py does it
            output = output.transpose(0, 1)
        _wait_until(over_at)
        return output

    def _verified(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        over_at = time.perf_counter() + self._verify_s
        if self._gives_ids:
            output = _own_ids(positions, slots, self.config.vocab_size)
        else:
            output = self._own_logits(positions, slots)
            output = output if self._samples else output.transpose(0, 1)
        _wait_until(over_at)
        return output

    def _own_logits(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[n, q] → [vocab, q, n]: of each slot those that follow its own position, as draft tokens need them. A copy."""
        turns, vocab = (positions % TURNS).t().tolist(), self.config.vocab_size
        rows = [self._by_slot[slot, turn : turn + vocab] for row in turns for slot, turn in zip(slots.tolist(), row)]
        return torch.stack(rows).t().view(vocab, len(turns), -1)


def _own_ids(positions: torch.Tensor, slots: torch.Tensor, vocab: int) -> torch.Tensor:
    """[n, q] → the ids [n, q] that follow: pseudo-random, the same after REPEATED positions but for some; never the first."""
    place = torch.where(positions % CHANGED == 0, positions, positions % REPEATED)
    return ((place * 2654435761 + slots[:, None] * 40503 >> 3) % (vocab - 1) + 1).int()


def _wait_until(over_at: float) -> None:
    time.sleep(max(0.0, over_at - POLLED_S - time.perf_counter()))
    while time.perf_counter() < over_at:
        _libc.sched_yield()


def _logits(slots: int, vocab: int, eos_token_id: int) -> torch.Tensor:
    """float32 [vocab + TURNS, slots]: each turn takes `vocab` rows, from one row further on."""
    random = torch.Generator().manual_seed(0)
    one = 18.0 - 1.5 * torch.log(torch.randperm(vocab + TURNS, generator=random).float() + 1)
    one += 0.5 * torch.randn(vocab + TURNS, generator=random)
    shifts = torch.randint(vocab, (slots,), generator=random).tolist()
    logits = torch.stack([one.roll(shift) for shift in shifts], dim=1)
    logits[eos_token_id : eos_token_id + TURNS] = -100.0
    return logits


def add_modules(package: str, model: type) -> None:
    """What models/neuron/graph.py and recurrent.py import of the library, to change it; `model` is its class for Llama."""
    contents = {
        "activations": {"sigmoid": None, "silu": None},
        "config": {"KVCacheQuantizationConfig": _Settings},
        "decoder": {
            "DecoderLmHeadForSamplingNoEmbedding": object,
            "DecoderParameterBuilder": object,
            "DecoderProgramFullyUnrolled": object,
            "interleave_qkv": None,
        },
        "hlo": {
            **dict.fromkeys(("add", "subtract", "multiply", "divide")),
            **dict.fromkeys(("quantize_kv_cache_direct_cast", "dequantize_kv_cache_direct_cast")),
        },
        "parallel": {"ParallelTensorManipulator": object},
        "utils": {},
        "layers": {},
        "layers.attention": {},
        "layers.rotary": {},
        "llama": {},
        "llama.hlo": {},
        "llama.model": {
            "LlamaConfig": None,
            "LlamaForSampling": model,
            "LlamaForSamplingNoEmbeddingHlo": object,
        },
    }
    for name, attributes in contents.items():
        module = sys.modules[f"{package}.{name}"] = ModuleType(f"{package}.{name}")
        vars(module).update(attributes)
        parent, _, own = module.__name__.rpartition(".")
        setattr(sys.modules[parent], own, module)


if __name__ == "transformers_neuronx":  # tests/fakes take what they need by another name
    add_modules(__name__, LlamaForSampling)
