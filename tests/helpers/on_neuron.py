"""What the tests of Neuron share: a machine without a device, a tiny Llama, and batches as the worker runs them.

transformers-neuronx is the simulated device of fakes/neuron; `make test-neuron` runs the real one (neuron_sim).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fakes.tokenizer import VOCABULARY, byte_tokenizer

from config import Config
from manifest import Manifest
from models.base import Chunk, SampledIds
from models.errors import ModelError
from run import HERE, ConfigError

DEVICE = [str(HERE / "tests" / "fakes" / "neuron"), str(HERE / "bench" / "simulated")]
sys.path[:0] = DEVICE
device = importlib.import_module("transformers_neuronx")
neuronxcc = importlib.import_module("neuronxcc")
del sys.path[: len(DEVICE)]

from models.neuron import build as neuron_build  # noqa: E402
from models.neuron import compile as subcommand  # noqa: E402
from models.neuron.build import BuildPlan  # noqa: E402
from models.neuron.model import NeuronModel  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4},
}
WINDOW = 24
CHUNK = 4
GREEDY = (1, 1.0, 1.0)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with two cores, empty caches, and a device that computes at once."""
    for name in [name for name in os.environ if name.startswith("NEURON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMULATED_STEP_MS", "0")
    monkeypatch.setenv("SIMULATED_PREFILL_MS", "0")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    monkeypatch.setattr(neuron_build, "CORES_WAIT_S", -1.0)
    monkeypatch.setattr("logs.set_up", lambda level, as_json: None)  # the logs of this process are pytest's
    device.compiled.clear()


@pytest.fixture
def built(monkeypatch):
    """The NeuronConfig of every model of the library that is built."""
    configs = []
    make = device.LlamaForSampling.__init__

    def listen(model, model_config, batch_size, neuron_config, **shapes):
        configs.append(neuron_config)
        make(model, model_config, batch_size, neuron_config, **shapes)

    monkeypatch.setattr(device.LlamaForSampling, "__init__", listen)
    return configs


def checkpoint(folder, config=LLAMA):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def load(tmp_path, config=LLAMA, **settings):
    settings = {"max_total_tokens": WINDOW, "max_input_tokens": WINDOW - 1} | settings
    return serve(checkpoint(tmp_path / "model", config), **settings)


def load_chunks(tmp_path, **given):
    return load(tmp_path, **{"max_batch_size": 4, "prefill_chunk": CHUNK, "position_buckets": (2, CHUNK, 8)} | given)


def decide(folder, **settings):
    return BuildPlan.decide(Config(model_id=str(folder), device="neuron", **settings), folder, Manifest.read(folder))


def serve(folder, announce=lambda phase: None, **settings):
    return NeuronModel(decide(folder, **settings), Path(tempfile.mkdtemp(dir=folder.parent)), announce)


def refusal(tmp_path, config=LLAMA, **settings):
    with pytest.raises((ModelError, ConfigError)) as refused:
        load(tmp_path, config, **settings)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message


def compiled(tmp_path, *flags, config=LLAMA):
    """What `compile` makes of a checkpoint, in this process, which then forgets what it compiled."""
    folder = checkpoint(tmp_path / "model", config)
    byte_tokenizer(folder)
    output = tmp_path / "compiled"
    words = ["--model-id", str(folder), "--output", str(output), "--tp-degree", "2", "--max-total-tokens", str(WINDOW), *flags]
    assert subcommand.main(words) == 0
    device.compiled.clear()
    return output


def fail(monkeypatch, name, error, when=lambda *arguments, **options: True):
    """Makes a call of the library fail."""
    real = getattr(device.LlamaForSampling, name)

    def failing(*arguments, **options):
        if when(*arguments, **options):
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(device.LlamaForSampling, name, failing)


def as_float32(logits):
    return (logits.astype(np.uint32) << 16).view(np.float32) if logits.dtype == np.uint16 else logits


def alone(prompt, length):
    """What a prompt must become in an otherwise empty batch."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(device.expected_logits(tokens, VOCABULARY).argmax()))
    return tokens


def first_token(model, slot, prompt):
    return int(model.forward([Chunk(slot, prompt, 0)]).ids[0])


def run_chunks(model, slot, prompt, begin=0):
    """What the prompt's last chunk returns."""
    while begin + CHUNK < len(prompt):
        model.forward([Chunk(slot, prompt[begin : begin + CHUNK], begin)])
        begin += CHUNK
    return model.forward([Chunk(slot, prompt[begin:], begin)])


class Batch:
    """Sequences in slots, each continued greedily, or with what the device samples, as the worker does it."""

    def __init__(self, model):
        self.model = model
        self.texts = {}  # slot → all tokens so far

    def join(self, slot, prompt, sampling=GREEDY):
        if self.model.sampling == "device":
            self.model.set_sampling(slot, *sampling)
        self.texts[slot] = [*prompt, *self._next_tokens([Chunk(slot, prompt, 0)])]

    def step(self):
        slots = sorted(self.texts)
        chunks = [Chunk(slot, self.texts[slot][-1:], len(self.texts[slot]) - 1) for slot in slots]
        for slot, token in zip(slots, self._next_tokens(chunks)):
            self.texts[slot].append(token)

    def _next_tokens(self, chunks):
        output = self.model.forward(chunks)
        if isinstance(output, SampledIds):
            return output.ids.tolist()
        assert output.shape == (len(chunks), VOCABULARY)
        return as_float32(output).argmax(-1).tolist()

    def leave(self, slot):
        return self.texts.pop(slot)


def assert_text_alone(batch, slot, prompt):
    text = batch.leave(slot)
    assert text == alone(prompt, len(text))


def assert_serves_whole(model, caplog, warnings=1):
    assert model.prefill_chunk is None and model.prefix_granularity is None and not model.supports_prompt_logits
    assert caplog.text.count("Chunked prefill is off") == warnings
    batch = Batch(model)
    batch.join(0, [5] * 10)
    batch.step()
    batch.join(1, [6] * 3)
    batch.step()
    assert_text_alone(batch, 0, [5] * 10)
