"""Models behind one interface (`base.py`): CPUs through OpenVINO, Neuron devices through transformers-neuronx, plain torch.

Only the modules of this package import torch, transformers, openvino or transformers_neuronx. This file picks the one that
serves a model on this machine, before any of them is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from config import Config
from manifest import Manifest
from models.base import ModelError, StaticBatchModel
from models.fetch import SAFETENSORS, fetch_weights
from run import run_dir


def choose_device(wanted: str) -> str:
    """cpu, cuda or neuron for a value of --device. Raises ModelError for a device that is not there."""
    if wanted == "cuda" and not _has_cuda():
        raise ModelError("--device cuda: torch finds no CUDA GPU on this machine; use --device cpu or auto")
    if wanted != "auto":
        return wanted
    if list(Path("/dev").glob("neuron[0-9]*")):
        return "neuron"
    if importlib.util.find_spec(
        "transformers_neuronx"
    ):  # an image for Neuron: a CPU would be too slow to be meant
        missing = "transformers-neuronx is installed but there is no Neuron device"
        raise ModelError(
            f"{missing}: pass it to the container with --device=/dev/neuron0, or serve with --device cpu (DEVICE)"
        )
    return "cuda" if _has_cuda() else "cpu"


def _has_cuda() -> bool:
    if not any(
        path.name == "dxg" or path.name.startswith("nvidia") for path in Path("/dev").iterdir()
    ):  # dxg: WSL
        return False  # without importing torch, which takes seconds
    import torch

    return torch.cuda.is_available()


def prepare(
    config: Config, folder: Path, manifest: Manifest
) -> tuple[Config, str, Callable[[], Path], Callable]:
    """Returns the configuration with all open settings filled in, the device, a function that downloads the weights, and one
    that loads the model and calls its argument with the name of a long phase. All of them, and `prepare`, raise ConfigError or
    ModelError, with the reason, for what cannot be served."""
    device = choose_device(config.device)
    if device == "neuron":
        from models.neuron import (  # needs its own version of transformers: only one can be imported
            Build,
            NeuronModel,
        )

        build = Build.decide(config, folder, manifest)
        return (
            build.config,
            device,
            build.checkpoint,
            lambda announce: NeuronModel(build, run_dir(), announce),
        )
    for_neuron = [
        "tp_degree",
        "prefill_buckets",
        "position_buckets",
        "prefill_chunk",
        "neuron_config",
        "compile_workers",
    ]
    given = [f"--{name.replace('_', '-')} ({name.upper()})" for name in for_neuron if getattr(config, name)]
    given += ["--sampling device (SAMPLING)"] * (config.sampling == "device")
    if given:
        raise ModelError(f"{given[0]} is for Neuron, and this server runs on {device}; leave it out")
    if manifest.is_compiled:
        raise ModelError(
            f"{config.model_name} is compiled for Neuron, and this server runs on {device}; give its checkpoint"
        )
    config = config.with_manifest(manifest)

    def load(announce: Callable[[str], None]) -> StaticBatchModel:
        if device == "cpu":
            from models.openvino_model import load

            return load(config, folder, announce)
        from models.torch_model import TorchModel

        return TorchModel(config, folder, device)

    return config, device, lambda: fetch_weights(config, folder, SAFETENSORS), load
