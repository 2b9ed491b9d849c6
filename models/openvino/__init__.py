"""The engine for CPUs, through OpenVINO: `model.py` runs a model that `convert.py` has converted.

A model is converted once, in a child process, and kept in the cache (`cache.py`). What does not convert is
served by plain PyTorch. This file imports neither openvino nor torch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import ClassVar

from config import MAX_COUNT, Config
from manifest import Manifest
from models.base import Announce, Engine, StaticBatchModel
from models.cache import NNCF, ModelCache, NotConverted, cache_key, run_converter, write_rejection
from models.checkpoint.source import fetch_checked_weights
from models.errors import ModelError, named, progress_logged
from models.gguf.container import GgufFile
from models.machine import host_memory
from models.openvino.gguf_files import compressed_types, why_not
from run import ConfigError

logger = logging.getLogger("model")

# openvino then uses its own stub: no usage data leaves the machine.
sys.modules.setdefault("openvino_telemetry", None)
# Weights in Q4_K keep their minima; else openvino rounds these to multiples of the scale.
os.environ["OV_GGUF_Q4_K_ZP_F16"] = "1"

KNOWN_ERRORS = (ConfigError, ModelError, NotConverted)


class OpenVino(Engine):
    device = "cpu"
    name = "OpenVINO on CPUs"
    dtypes = ("float32", "bfloat16")
    quantizations = ("int8", "int4")
    reads_gguf = True
    settings: ClassVar = {
        "kv_cache_dtype": ("float32", "bfloat16", "u8"),
        "prefix_slots": range(1, MAX_COUNT + 1),
    }
    memory_bytes = staticmethod(host_memory)

    @staticmethod
    def is_here(wanted: str) -> bool:
        """Returns true: every machine has a CPU. Raises ModelError where the package openvino is not
        installed."""
        if not importlib.util.find_spec("openvino"):
            raise ModelError(
                "--device cpu (DEVICE) needs the package openvino, which is not installed here; the image "
                "for CPUs has it"
            )
        return True

    @classmethod
    def why_not_gguf(cls, config: Config, file: GgufFile) -> str | None:
        """Returns why the file is dequantized instead, as a part of a log line: because of a setting, or of
        what OpenVINO does not compute right; None: its own weights are used."""
        if config.merge_lora:
            return "--merge-lora (MERGE_LORA) changes its weights"
        if config.dtype not in ("auto", *cls.dtypes):
            return f"OpenVINO does not compute in {config.dtype}"
        if config.quantize and not compressed_types(file):
            return f"--quantize {config.quantize} (QUANTIZE) compresses its weights"
        return why_not(file)

    def fetch_weights(self) -> None:
        """Downloads the weights of a checkpoint on the hub, also if it is converted already; does nothing for
        a GGUF file. Before that, raises ModelError for a model that would have to be compressed without nncf,
        ConfigError for one that transformers cannot serve; then what `fetch_checked_weights` raises."""
        if self.manifest.gguf_file:
            return
        config = with_dtype(self.config, self.manifest)
        if not ModelCache(config).find(cache_key(config, self.folder, self.manifest)):
            check_quantizer(config)
        fetch_checked_weights(self.config, self.folder, self)

    def load(self, announce: Announce) -> StaticBatchModel:
        """Returns the model, whose weights have been fetched, ready to run. If the cache has no entry, or a
        damaged one, which is removed, a child process converts the model: `announce` gets "converting", this
        process waits, and the log says so. While another server converts it, this process waits, too.

        Raises NotConverted for what plain PyTorch may serve, ModelError or ConfigError for what no engine
        can. A model that does not convert, or fails after its conversion, gets an entry with the reason:
        later startups do not try again. Other failures, such as of files or memory, are not kept.
        """
        from models.openvino.model import load_entry

        config = with_dtype(self.config.with_prefix_slots(self.manifest, host_memory()), self.manifest)
        if config.dtype not in self.dtypes:
            raise NotConverted("OpenVINO computes in float32 or bfloat16 on a CPU, not in float16")
        cache = ModelCache(config)
        key = cache_key(config, self.folder, self.manifest)

        def convert(target: Path) -> None:
            check_quantizer(config)
            announce("converting")
            logger.info("Converting %s for OpenVINO, once", config.model_name)
            with progress_logged(f"converting {config.model_name}"):
                try:
                    run_converter([str(self.folder), str(target)], config)
                except NotConverted as crash:
                    write_rejection(target, str(crash))

        try:
            if entry := cache.find(key):
                try:
                    return load_entry(config, entry)
                except KNOWN_ERRORS:
                    raise
                except Exception as error:
                    logger.warning(
                        "The converted model in %s is damaged (%s): converting again", entry, named(error)
                    )
                    cache.remove(entry)
            entry = cache.find_or_add(key, convert)
            try:
                return load_entry(config, entry)
            except (*KNOWN_ERRORS, OSError):
                raise
            except Exception as error:
                with contextlib.suppress(OSError):  # a read-only cache
                    write_rejection(entry, named(error))
                raise
        except KNOWN_ERRORS:
            raise
        except Exception as error:  # where it is one of the conversion, the next startup tries again
            raise NotConverted(named(error)) from error


def check_quantizer(config: Config) -> None:
    """Raises ModelError where --quantize is given and nncf, which it needs for a conversion, is not
    installed."""
    if config.quantize and not importlib.util.find_spec("nncf"):
        raise ModelError(
            f"--quantize {config.quantize} (QUANTIZE) needs nncf for the first startup: {sys.executable} "
            f'-m pip install "{NNCF}"'
        )


def with_dtype(config: Config, manifest: Manifest) -> Config:
    """Returns the settings with a dtype for "auto": bfloat16 if the checkpoint is stored in it, else float32;
    float32 also for the demonstration model, whose text is the same on every machine. The dtype of the text
    part of config.json counts before that of the whole. Other settings are returned as they are."""
    if config.dtype != "auto":
        return config
    stored = manifest.text_config.get("dtype") or manifest.text_config.get("torch_dtype")
    stored = stored or manifest.config_json.get("dtype") or manifest.config_json.get("torch_dtype")
    is_bfloat16 = stored == "bfloat16" and not config.is_demo
    return dataclasses.replace(config, dtype="bfloat16" if is_bfloat16 else "float32")
