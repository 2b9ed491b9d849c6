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
        """Whether this engine can serve. With `wanted` "auto" that takes a /dev/neuron*. With "neuron" it is
        true, also without a device, for `compile` and for simulators; whether transformers-neuronx is
        installed is not checked then.

        Raises ModelError for "auto" without a device if transformers-neuronx is installed: this is the image
        for Neuron. With a driver or a device, raises ConfigError for versions of driver and runtime library
        that are known not to fit, and logs a warning for others that may not fit, or are unknown.
        """
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
        """Decides what to compile or to load. Fills in the settings of `config` that were left open, with the
        values of a compiled model or with what fits on this machine. Sets `versions`, and logs them. Reads no
        weights. Raises ConfigError or ModelError for a model that cannot be served."""
        from models.neuron.build import BuildPlan, log_versions

        self._build = BuildPlan.decide(self.config, self.folder, self.manifest)
        self.config = self._build.config
        self.versions = log_versions()

    def fetch_weights(self) -> None:
        """Downloads the weights of a model on the hub and, of a compiled one, its graphs, and waits for that.
        `prepare` has to come before. Raises ModelError for a download that fails or a model on the hub
        without weights, and for a compiled model without a checkpoint. A local checkpoint is not looked at:
        `load` fails if it has no weights."""
        self._build.checkpoint()

    def load(self, announce: Announce) -> StaticBatchModel:
        """Loads the model onto the device and checks it there. Without compiled graphs for it, calls
        `announce` with "compiling" and compiles them, which takes minutes. Waits while another server
        compiles the same graphs, and up to a minute for cores that another process holds. Raises ConfigError
        or ModelError for a model that cannot be served, DeviceLost if the check of a whole
        prompt fails."""
        from models.neuron.model import NeuronModel

        return NeuronModel(self._build, run_dir(), announce)
