"""Models behind one interface (`base.py`): CPUs through OpenVINO, Neuron devices through
transformers-neuronx, plain torch.

Only the modules of this package import torch, transformers, openvino or transformers_neuronx. This file reads
what a model folder says, picks the engine that serves it on this machine, and decides every setting that was
left open."""

from __future__ import annotations

import dataclasses
import logging

from config import Config
from manifest import Manifest, check_weight_files
from models.base import Announce, Engine, StaticBatchModel
from models.cache import NotConverted
from models.checkpoint.source import dequantize_gguf, fetch_source
from models.errors import ModelError, reject_by_config
from models.machine import cpu_multiplies_bfloat16
from models.neuron import Neuron
from models.openvino import OpenVino, with_dtype
from models.pytorch import PyTorch

logger = logging.getLogger("model")

ENGINES = (OpenVino, PyTorch, Neuron)  # auto takes the last one whose device is here


def prepare(config: Config) -> Engine:
    """Chooses the engine for a model, and decides the settings that were left open: they are the `config` of
    the result. The engine may leave some to `load`, such as a `dtype` of "auto".

    Fetches what that takes, which may last minutes: the model's folder without its weights; with them if they
    have to be converted, as those of a GGUF file or a quantized checkpoint (`fetch_source`). Does not load
    the model. Raises ConfigError or ModelError, with the reason in one line, for a device that is missing, a
    model that cannot be found or served, and a setting that does not fit the engine or the model; what
    `fetch_source` raises.
    """
    engine = choose_engine(config.device)
    for setting in ("lora_adapters", "lora_folder"):
        if getattr(config, setting) and not engine.takes_adapters:
            raise ModelError(
                f"--{setting.replace('_', '-')} ({setting.upper()}) is for CPUs and GPUs; "
                f"on {engine.name} --merge-lora (MERGE_LORA) merges one adapter into the model"
            )
    if config.lora_folder and not config.needs_key:
        raise ModelError(
            "--lora-folder (LORA_FOLDER) needs an API key: whoever has it can load adapters; give --api-key "
            "(API_KEY) or --api-key-file (API_KEY_FILE)"
        )
    config, folder, sha = fetch_source(config, engine)
    manifest = Manifest.read(folder)
    if manifest.config_json.keys() & {"vision_config", "audio_config"} and not manifest.reads_images:
        why = manifest.why_no_images and f": {manifest.why_no_images}"
        logger.info("%s: only the text part of this model is served%s", config.model_name, why)
    reject_by_config(manifest.config_json)
    _reject_settings_of_others(config, engine)
    if config.quantize and not engine.quantizations:
        raise ModelError(
            f"--quantize {config.quantize} (QUANTIZE): {config.model_name} runs in {engine.name}, "
            "where weights stay as they are; leave it out"
        )
    prepared = engine(config, folder, manifest, sha)
    prepared.prepare()
    return prepared


def choose_engine(wanted: str) -> type[Engine]:
    """Returns the engine for a value of --device; for "auto" the last of ENGINES whose device this machine
    has. Raises ConfigError or ModelError if the device is not here or cannot be used."""
    return next(
        engine for engine in reversed(ENGINES) if wanted in (engine.device, "auto") and engine.is_here(wanted)
    )


def load(engine: Engine, announce: Announce) -> StaticBatchModel:
    """Returns the model of a prepared engine, whose weights have been fetched, ready to run. May convert or
    compile it first, which lasts minutes; `announce` gets the name of each long phase.

    If OpenVINO cannot serve it (NotConverted), plain PyTorch does, and a warning says why; a `dtype` of
    "auto" is then float32 on a CPU that does not multiply bfloat16. A GGUF file that OpenVINO cannot compute
    with is dequantized into a checkpoint, and that is loaded. Raises ConfigError or ModelError for what no
    engine can serve, and for a setting that plain PyTorch does not have.
    """
    if engine.uses_transformers and not engine.manifest.gguf_file:
        check_weight_files(engine.folder)
    try:
        return engine.load(announce)
    except NotConverted as error:
        why = error
    config = engine.config
    if file := engine.manifest.gguf_file:
        folder = dequantize_gguf(config, file, f"OpenVINO cannot compute with it: {why}")
        return load(dataclasses.replace(engine, folder=folder, manifest=Manifest.read(folder)), announce)
    _reject_settings_of_others(config, PyTorch)
    if config.quantize:
        raise ModelError(
            f"--quantize {config.quantize} (QUANTIZE): only plain PyTorch serves {config.model_name}, where "
            f"weights stay as they are: {why}; leave it out"
        )
    if config.dtype == "auto" and not cpu_multiplies_bfloat16():
        config = dataclasses.replace(config, dtype="float32")  # PyTorch's bfloat16 is slower there
    logger.warning("%s runs in plain PyTorch, slower: %s", config.model_name, why)
    from models.pytorch.model import TorchModel

    return TorchModel(with_dtype(config, engine.manifest), engine.folder, engine.device)


def _reject_settings_of_others(config: Config, engine: type[Engine]) -> None:
    """Raises ModelError for a setting, or a value of one, that only another engine has. The message names
    that engine and the one that serves the model, and says to leave the setting out."""
    for other in ENGINES:
        if issubclass(engine, other):
            continue
        for setting, values in other.settings.items():
            value = getattr(config, setting)
            if value and (not values or value in values):
                flag = f"--{setting.replace('_', '-')}" + (f" {value}" if values else "")
                raise ModelError(
                    f"{flag} ({setting.upper()}) is for {other.name}, and {config.model_name} is served by "
                    f"{engine.name}; leave it out"
                )
