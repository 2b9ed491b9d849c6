"""The server on a simulated device: which devices there are, and the model folder and settings that serve on one.

A `Device` is a published combination of model and hardware. `serve` makes a model folder for it (a tokenizer of that size, the
model's own numbers, no weights) and starts `entrypoint.sh` with bench/simulated on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launch import HERE, Server, clean_environment, free_port

# Sizes of the two models, from their config.json.
SHAPES = {
    32000: {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32},
    128256: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}


@dataclass(frozen=True)
class Device:
    """Slots, duration of a step, vocabulary, and the settings of the server."""

    slots: int
    step_ms: float
    vocab: int
    tp_degree: int
    prefill_ms: float = 10.0
    window: int = 4096
    token_ms: float = 0.0  # of a prompt, in addition to prefill_ms
    copy_mb_s: float = 0.0  # of logits to the host, after each step; 0: takes no time
    verify_ms: float = 0.0  # of a call that verifies the draft tokens of all slots; 0: none

    @property
    def name(self) -> str:
        return f"{self.slots} slots of {self.step_ms:g} ms, vocabulary {self.vocab}"

    @property
    def tokens_per_s(self) -> float:
        """Throughput of a device that never waits."""
        return self.slots / self.step_ms * 1e3


WEIGHTS_BYTES = 20 * 10**9
LLAMA_2_7B = Device(8, 12.1, 32000, 24)
LLAMA_31_8B = Device(32, 26.7, 128256, 8)
FAST = Device(64, 10.0, 32000, 24)
# optimum-neuron measured one replica of Llama 3.1 8B on an inf2.48xlarge (March 2026): 24.5 ms a token where the device
# samples, 48.2 ms where the host does. If all of that is the copy of 32 rows in bfloat16, 8.2 MB take 23.7 ms; as some of it is
# the time in which that host samples, a copy may be faster.
# Llama 3 8B in int8 on an inf2.48xlarge, 8 slots: a step as AWS published it, and interpolated between its figures a call of 8
# tokens of each slot.
SPECULATING = Device(8, 10.45, 128256, 24, verify_ms=13.5)
COPYING = replace(LLAMA_31_8B, copy_mb_s=346.0)


@contextlib.contextmanager
def serve(device: Device, *more_flags: str) -> Iterator[Server]:
    """The server on that device, ready, with one API server process, until the block is left."""
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        folder, port = Path(name), free_port()
        flags = ["--model-id", str(write_model(folder / "model", device)), "--device", "neuron", "--dtype", "bfloat16"]
        flags += ["--tp-degree", str(device.tp_degree), "--max-batch-size", str(device.slots)]
        flags += ["--max-total-tokens", str(device.window), *more_flags]
        environment = clean_environment(
            folder,
            port,
            PYTHONPATH=str(HERE / "bench" / "simulated"),
            NEURON_COMPILE_CACHE_URL=str(folder / "programs"),
            SIMULATED_STEP_MS=str(device.step_ms),
            SIMULATED_PREFILL_MS=str(device.prefill_ms),
            SIMULATED_TOKEN_MS=str(device.token_ms),
            SIMULATED_COPY_MB_S=str(device.copy_mb_s),
            SIMULATED_VERIFY_MS=str(device.verify_ms),
            GRACEFUL_TERMINATION_TIMEOUT="1",
            WEB_CONCURRENCY="1",
        )
        with Server([HERE / "entrypoint.sh", "serve", *flags], port, folder / "log", environment) as server:
            yield server.wait_ready()


def write_model(folder: Path, device: Device) -> Path:
    """A folder that looks like the model: the demonstration model's tokenizer, made as large, and empty weights."""
    folder.mkdir()
    demo = HERE / "demo" / "model"
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġw{number}": number for number in range(len(vocab), device.vocab)}
    config = {"model_type": "llama", "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4}
    config |= {"torch_dtype": "bfloat16", "max_position_embeddings": 8192, "tie_word_embeddings": False}
    config |= {"vocab_size": device.vocab, "bos_token_id": 0, "eos_token_id": 0} | SHAPES[device.vocab]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_bytes((demo / "tokenizer_config.json").read_bytes())
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", WEIGHTS_BYTES)  # takes no room
    return folder
