"""The engine for Inferentia2 and Trainium, through transformers-neuronx."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

from config import FP8
from models.base import LOGITS_DTYPES, Announce, Engine, StaticBatchModel
from models.errors import ModelError
from models.machine import detect
from run import run_dir


class Neuron(Engine):
    device = "neuron"
    name = "Neuron"
    logits_dtypes = LOGITS_DTYPES
    quantizations = ("int8",)
    takes_adapters = False
    uses_transformers = False
    settings: ClassVar = {
        "tp_degree": (),
        "prefill_buckets": (),
        "position_buckets": (),
        "prefill_chunk": (),
        "neuron_config": (),
        "compile_workers": (),
        "kv_cache_dtype": (FP8,),
        "sampling": ("device", "hybrid"),
    }

    @staticmethod
    def is_here(wanted: str) -> bool:
        from models.neuron.driver import Versions

        if wanted == "auto" and not list(Path("/dev").glob("neuron[0-9]*")):
            if importlib.util.find_spec("transformers_neuronx"):
                # In the image for Neuron, do not fall back to the host's CPU.
                raise ModelError(
                    "transformers-neuronx is installed but there is no Neuron device: pass it to the "
                    "container with --device=/dev/neuron0, or serve with the image for CPUs"
                )
            return False
        versions = Versions.read()
        if versions.driver or detect():  # graphs may be compiled, or simulated, where there is no driver
            versions.check()
        return True

    def prepare(self) -> None:
        """As `Engine.prepare`; decides what to compile or to load, too."""
        from models.neuron.build import BuildPlan, log_versions

        self._build = BuildPlan.decide(self.config, self.folder, self.manifest)
        self.config = self._build.config
        self.versions = log_versions()

    def fetch_weights(self) -> None:
        self._build.checkpoint()

    def load(self, announce: Announce) -> StaticBatchModel:
        from models.neuron.model import NeuronModel

        return NeuronModel(self._build, run_dir(), announce)
