"""The simulated device of bench/simulated with texts, compiled graphs and faults.

A slot's KV cache is the tokens in it, and logits are a function of the tokens up to a position: a call that damages a slot
shows in its text, as on a device. It does what neuron_contract.py asks of the library, and checks nothing.

The file that FAULT names makes the next decode step fail, and is removed: "hang" never returns, "step" is an error of the
device.
"""

import copy
import hashlib
import importlib.util
import os
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace

import torch

BENCH = Path(__file__).resolve().parents[4] / "bench"
spec = importlib.util.spec_from_file_location("simulated", BENCH / "simulated" / "transformers_neuronx" / "__init__.py")
simulated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated)
__version__ = simulated.__version__
NeuronConfig = simulated.NeuronConfig
ContinuousBatchingConfig = GenerationConfig = QuantizationConfig = simulated._Settings
FAULT = Path(os.environ.get("FAULT", os.devnull))
compiled: list[str] = []  # the programs that this process has compiled


def expected_logits(tokens: list[int], vocab: int) -> torch.Tensor:
    """The logits after `tokens`: float32 [vocab], a fixed function of all of them, as bfloat16 rounds them."""
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=7).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return (torch.randn(vocab, generator=random) * 3).bfloat16().float()


class LlamaForSampling(simulated.LlamaForSampling):
    def __init__(self, model_config, batch_size, neuron_config, n_positions, context_length_estimate, **shapes):
        timed = copy.copy(neuron_config)
        self._generation = timed.__dict__.pop("on_device_generation", None)
        super().__init__(model_config, batch_size, timed, **shapes)
        self._gives_both = hasattr(neuron_config, "log_softmax_scores")
        self.token_buckets = n_positions
        self.decoder_param_set = SimpleNamespace(init_speculative_decoder=self._add_chunks)
        self._programs = [f"step {size}" for size in n_positions] + [f"prompt {size}" for size in context_length_estimate]
        self._shape = [type(self).__name__, batch_size, *shapes.values()]
        self._held = torch.zeros(batch_size, max(n_positions), dtype=torch.int64)
        self._loaded = None

    def _add_chunks(self, buckets, n_active_tokens, batch_size, **_program):
        self._programs += [f"chunk of {n_active_tokens} for {batch_size} in {size}" for size in buckets]
        return simulated._decoder()

    @property
    def _takes_logits(self):
        return self._generation is None or (self._gives_both and not self.decoder_lm_head.program.returns_ids)

    def _files(self):
        return [hashlib.sha256(f"{self._shape} {name}".encode()).hexdigest()[:20] + ".neff" for name in self._programs]

    def cpu_compile(self):
        compiled.extend(self._programs)

    def to_neuron(self):
        if self._loaded is None:
            compiled.extend(self._programs)
        elif missing := [name for name in self._files() if not (self._loaded / name).exists()]:
            raise FileNotFoundError(f"{self._loaded / missing[0]} is not there")
        super().to_neuron()

    def save(self, directory):
        super().save(directory)
        for name in self._files():
            Path(directory, name).write_text(f"a program {name}")

    def load(self, directory):
        self._loaded = Path(directory)

    def update_generation_config(self, generation):
        self._generation = generation

    def __call__(self, ids, positions, slots):
        super().__call__(ids, positions, slots)  # takes its time
        if ids.shape[1] == 1:
            self._fail_on_purpose()
            unnamed = [slot for slot in range(len(self._held)) if slot not in slots]
            self._held[unnamed, 0] = 0  # as the library does
            self._held[slots, positions[:, 0]] = ids[:, 0]
        else:
            self._held[slots, : ids.shape[1]] = ids
        ends = (positions.max(1).values + 1).tolist()
        return self._output([(slot, end) for slot, end in zip(slots.tolist(), ends)])

    def speculative_forward(self, ids, positions, slots, speculation_length):
        super().speculative_forward(ids, positions, slots, speculation_length)
        self._held[slots[:, None], positions] = ids
        ends = (positions + 1).tolist()
        outputs = [self._output([(slot, end) for end in row]) for slot, row in zip(slots.tolist(), ends)]
        if self._takes_logits:
            output = torch.stack(outputs, 2)  # [tokens, vocab, slots]
            return output.transpose(0, 1) if self._gives_both else output
        return torch.cat(outputs, 1).t()

    def _output(self, places):
        """Logits [n, vocab] or ids [n, 1] after the tokens of each slot up to an end: (slot, end)."""
        rows = [expected_logits(self._held[slot, :end].tolist(), self.config.vocab_size) for slot, end in places]
        if self._takes_logits:
            return torch.stack(rows, 1).to(self._dtype).t()
        return torch.tensor([[self._sample(row, slot)] for row, (slot, _end) in zip(rows, places)], dtype=torch.int32)

    def _sample(self, logits, slot):
        values, ids = logits.topk(min(self._generation.top_k[slot], len(logits)))
        likely = (values / self._generation.temperature[slot]).softmax(-1)
        kept = likely * (likely.cumsum(-1) - likely < self._generation.top_p[slot])
        return ids[kept.multinomial(1)]

    def _fail_on_purpose(self):
        if FAULT.is_file():
            fault = FAULT.read_text()
            FAULT.unlink()
            if fault == "hang":
                threading.Event().wait()
            raise RuntimeError('nrt_execute status=1004 message="Execution error"')


class MistralForSampling(LlamaForSampling):
    pass


simulated.add_modules(__name__, LlamaForSampling)
