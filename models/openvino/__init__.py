"""The engine for CPUs, through OpenVINO, and the conversion of checkpoints."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

from config import MAX_COUNT
from models.base import Announce, Engine, StaticBatchModel
from models.checkpoint.source import fetch_checked_weights
from models.errors import ModelError
from models.machine import host_memory


class OpenVino(Engine):
    device = "cpu"
    name = "OpenVINO on CPUs"
    library = "OpenVINO"
    dtypes = ("float32", "bfloat16")
    quantizations = ("int8", "int4")
    trial_quantize = "int8"
    settings: ClassVar = {
        "kv_cache_dtype": ("float32", "bfloat16", "u8"),
        "prefix_slots": range(1, MAX_COUNT + 1),
    }
    elsewhere = "{model} is served by {engine.library}"
    memory_bytes = staticmethod(host_memory)

    @staticmethod
    def is_here(wanted: str) -> bool:
        if not importlib.util.find_spec("openvino"):
            needed = "--device cpu (DEVICE) needs the package openvino, which is not installed here"
            raise ModelError(f"{needed}; the image for CPUs has it")
        return True

    def fetch_weights(self) -> None:
        from models.openvino.model import check_convertible

        check_convertible(self.config, self.folder, self.manifest)
        fetch_checked_weights(self.config, self.folder, self)

    def load(self, announce: Announce) -> StaticBatchModel:
        """Raises NotConverted for what plain PyTorch may serve, too."""
        from models.openvino.model import load

        return load(self.config, self.folder, self.manifest, announce)
