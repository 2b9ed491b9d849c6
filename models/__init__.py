"""Models behind one interface (`base.py`): CPUs through OpenVINO, Neuron devices through
transformers-neuronx, plain torch.

Only the modules of this package import torch, transformers, openvino or transformers_neuronx. This file reads
what a model folder says, picks the engine that serves it on this machine, and decides every setting that was
left open."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from config import FP8, Config
from manifest import SAFETENSORS, Manifest, check_weight_files
from models.base import StaticBatchModel
from models.cache import NotConverted
from models.checkpoint.fetch import fetch_weights
from models.checkpoint.source import check_architecture, fetch_source
from models.errors import ModelError, reject_openvino_settings
from models.machine import cpu_multiplies_bfloat16, detect, host_memory
from models.neuron.driver import Versions
from run import run_dir

if TYPE_CHECKING:
    from models.neuron.build import BuildPlan

logger = logging.getLogger("model")

NEURON_SETTINGS = (
    "tp_degree",
    "prefill_buckets",
    "position_buckets",
    "prefill_chunk",
    "neuron_config",
    "compile_workers",
)
# How the classes of classifiers, reward models and encoders end.
NO_GENERATION = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "RewardModel",
)


@dataclass(frozen=True)
class Prepared:
    """A model that can be served here: its folder and all settings, before a weight is read."""

    config: Config  # with every open setting filled in
    device: str  # "cpu", "cuda" or "neuron"
    folder: Path  # of the model, with everything but its weights
    sha: str | None  # its commit on the hub; None: a local folder
    manifest: Manifest
    build: BuildPlan | None = None  # on Neuron: what to compile or to load
    neuron_versions: dict[str, str | None] = field(default_factory=dict)  # as in ModelInfo

    @property
    def logits_dtypes(self) -> list[str]:
        """What the engine's logits may be, for the sampling loops."""
        return ["float32", "bfloat16"] if self.build else ["float32"]

    def fetch_weights(self) -> None:
        """Downloads the weights of a model on the hub. Before that, raises ConfigError or ModelError for a
        model that cannot be served."""
        if self.build:
            self.build.checkpoint()
        else:
            if self.device == "cpu":
                from models.openvino.model import check_convertible

                check_convertible(self.config, self.folder, self.manifest)
            check_architecture(self.config, self.folder)
            fetch_weights(self.config, self.folder, SAFETENSORS)

    def load(self, announce: Callable[[str], None]) -> StaticBatchModel:
        """The model, ready to run. Calls `announce` with the name of a long phase, such as "compiling".
        Raises ConfigError or ModelError."""
        # Only one engine is imported: Neuron's needs another version of transformers than torch's.
        if self.build:
            from models.neuron.model import NeuronModel

            return NeuronModel(self.build, run_dir(), announce)
        check_weight_files(self.folder)
        if self.device == "cpu":
            return load_on_cpu(self.config, self.folder, self.manifest, announce)
        from models.pytorch.model import TorchModel

        return TorchModel(self.config, self.folder, self.device)


def load_on_cpu(
    config: Config, folder: Path, manifest: Manifest, announce: Callable[[str], None]
) -> StaticBatchModel:
    """The model in `folder`, in plain PyTorch where OpenVINO cannot serve it. Raises ConfigError or
    ModelError."""
    from models.openvino.model import load, with_dtype

    try:
        return load(config, folder, manifest, announce)
    except NotConverted as error:
        why = error
    reject_openvino_settings(config, "plain PyTorch")
    if config.quantize:
        raise ModelError(
            f"--quantize {config.quantize} (QUANTIZE): only plain PyTorch serves {config.model_name}, where "
            f"weights stay as they are: {why}; leave it out"
        )
    from models.pytorch.model import TorchModel

    if config.dtype == "auto" and not cpu_multiplies_bfloat16():
        config = dataclasses.replace(config, dtype="float32")  # PyTorch's bfloat16 is slower there
    logger.warning("%s runs in plain PyTorch, slower: %s", config.model_name, why)
    return TorchModel(with_dtype(config, manifest), folder, "cpu")


def prepare(config: Config) -> Prepared:
    """Fetches a model's folder without its weights, and decides how it is served on this machine.

    Raises ConfigError or ModelError, with the reason in one line, for what cannot be served.
    """
    device = choose_device(config.device)
    if device == "cpu" and not importlib.util.find_spec("openvino"):
        needed = "--device cpu (DEVICE) needs the package openvino, which is not installed here"
        raise ModelError(f"{needed}; the image for CPUs has it")
    if device == "neuron":
        versions = Versions.read()
        if versions.driver or detect():  # graphs may be compiled, or simulated, where there is no driver
            versions.check()
    for setting in ("lora_adapters", "lora_folder"):
        if device == "neuron" and getattr(config, setting):
            raise ModelError(
                f"--{setting.replace('_', '-')} ({setting.upper()}) is for CPUs and GPUs; "
                "on Neuron --merge-lora (MERGE_LORA) merges one adapter into the model"
            )
    if config.lora_folder and not (config.api_key or config.api_key_file):
        raise ModelError(
            "--lora-folder (LORA_FOLDER) needs an API key: whoever has it can load adapters; give --api-key "
            "(API_KEY) or --api-key-file (API_KEY_FILE)"
        )
    config, folder, sha = fetch_source(dataclasses.replace(config, device=device))
    manifest = Manifest.read(folder)
    if manifest.config_json.keys() & {"vision_config", "audio_config"} and not manifest.reads_images:
        why = manifest.why_no_images and f": {manifest.why_no_images}"
        logger.info("%s: only the text part of this model is served%s", config.model_name, why)
    if device != "cpu":
        reject_openvino_settings(config, "transformers-neuronx" if device == "neuron" else "plain PyTorch")
    _reject_by_config(manifest)
    if device == "neuron":
        from models.neuron.build import BuildPlan, compiler_version, library

        build = BuildPlan.decide(config, folder, manifest)
        neuron_versions = {
            **versions._asdict(),
            "compiler": compiler_version(),
            "transformers_neuronx": str(library().__version__),
        }
        listed = ", ".join(f"{name} {version or 'unknown'}" for name, version in neuron_versions.items())
        logger.info("Neuron versions: %s", listed)
        return Prepared(build.config, device, folder, sha, manifest, build, neuron_versions)
    _reject_neuron_settings(config, device)
    if manifest.is_compiled:
        raise ModelError(
            f"{config.model_name} is compiled for Neuron, and this server runs on {device}; "
            "give its checkpoint"
        )
    config = config.with_manifest(manifest, _memory_bytes(device))
    return Prepared(config, device, folder, sha, manifest)


def _memory_bytes(device: str) -> int | None:
    if device == "cpu":
        return host_memory()
    import torch

    return torch.cuda.mem_get_info()[1]


def _reject_neuron_settings(config: Config, device: str) -> None:
    given = [
        f"--{name.replace('_', '-')} ({name.upper()})" for name in NEURON_SETTINGS if getattr(config, name)
    ]
    if config.kv_cache_dtype == FP8:
        given.append(f"--kv-cache-dtype {FP8} (KV_CACHE_DTYPE)")
    if config.sampling in ("device", "hybrid"):
        given.append(f"--sampling {config.sampling} (SAMPLING)")
    if given:
        raise ModelError(f"{given[0]} is for Neuron, and this server runs on {device}; leave it out")


def _reject_by_config(manifest: Manifest) -> None:
    """Raises ModelError for a model that no engine supports, before its weights are downloaded."""
    kind = manifest.config_json.get("model_type")
    if manifest.config_json.get("is_encoder_decoder"):
        raise ModelError(f"{kind} models are encoder-decoder models; only decoder-only models are supported")
    for name in manifest.config_json.get("architectures") or ():
        # With tied embeddings such a model would load, and write nonsense.
        if str(name).endswith(NO_GENERATION):
            raise ModelError(f"{name} (architectures in config.json) generates no text; nothing to serve")


def choose_device(wanted: str) -> str:
    """cpu, cuda or neuron for a value of --device. Raises ModelError for a missing device."""
    if wanted == "cuda" and not _has_cuda():
        raise ModelError("--device cuda: torch finds no CUDA GPU on this machine; use --device cpu or auto")
    if wanted != "auto":
        return wanted
    if list(Path("/dev").glob("neuron[0-9]*")):
        return "neuron"
    if importlib.util.find_spec("transformers_neuronx"):
        # In the image for Neuron, do not fall back to the host's CPU.
        raise ModelError(
            "transformers-neuronx is installed but there is no Neuron device: pass it to the container with "
            "--device=/dev/neuron0, or serve with the image for CPUs"
        )
    return "cuda" if _has_cuda() else "cpu"


def _has_cuda() -> bool:
    # The device files first: importing torch takes seconds. dxg is the GPU's in WSL.
    if not any(path.name == "dxg" or path.name.startswith("nvidia") for path in Path("/dev").iterdir()):
        return False
    import torch

    return torch.cuda.is_available()
