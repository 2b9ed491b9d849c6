"""A LoRA adapter is merged into the weights of its base model: W + B A · scale, once.

Reads the two files that peft saves, adapter_config.json and adapter_model.safetensors, and the base model's
files one at a time. What is more than plain LoRA is refused by name.

    python -m models.lora BASE ADAPTER TARGET     writes the merged checkpoint into the folder TARGET

Source: LoRA (arXiv:2106.09685), rank-stabilized scaling (arXiv:2312.03732), peft's names.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from manifest import read_json
from models.base import ModelError, reported_as
from models.fetch import TEMPLATES
from run import ConfigError

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
# Fields of adapter_config.json and the values with which a weight gets W + B A and nothing else changes.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
}


class Adapter:
    """The change of each weight that an adapter trains."""

    def __init__(self, folder: Path):
        self._config = read_json(folder / "adapter_config.json", required=True)
        for name, values in PLAIN.items():
            given = self._config.get(name, values[0])
            if given not in values:
                raise ModelError(f"{folder}: `{name}` is {given!r}, which cannot be merged")
        with reported_as(f"{folder / 'adapter_model.safetensors'} cannot be read"):
            self._tensors = load_file(folder / "adapter_model.safetensors")
        others = [name for name in self._tensors if not name.endswith((A, B))]
        if others:
            raise ModelError(f"{folder} holds {others[0]}, which is no LoRA of a linear layer")
        self.modules = {
            name.removeprefix(PREFIX).removesuffix(A): name for name in self._tensors if name.endswith(A)
        }

    def merged(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight of a module, [out, in], with the adapter's change, in its own dtype."""
        down = self._tensors[self.modules[module]].float()
        up = self._tensors[self.modules[module].removesuffix(A) + B].float()
        change = up @ down * self._scale(module)
        if change.shape != weight.shape:
            raise ModelError(
                f"the adapter changes {module} in the shape {list(change.shape)}, not {list(weight.shape)}"
            )
        return (weight.float() + change).to(weight.dtype).contiguous()

    def _scale(self, module: str) -> float:
        rank = _of_module(self._config.get("rank_pattern"), module, self._config["r"])
        alpha = _of_module(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _of_module(pattern: Mapping[str, Any] | None, module: str, default: float) -> float:
    """peft's patterns: the end of a module's name as a regular expression, and its value."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def merge(base: Path, adapter_folder: Path, target: Path) -> None:
    """Raises ModelError for an adapter that does not fit the base model, or cannot be merged."""
    adapter = Adapter(adapter_folder)
    missing = set(adapter.modules)
    if (base / TEMPLATES).is_dir():
        shutil.copytree(base / TEMPLATES, target / TEMPLATES)
    for file in sorted(base.iterdir()):
        if file.suffix != ".safetensors":
            if file.is_file() and file.suffix != ".bin":
                shutil.copyfile(file, target / file.name)
            continue
        weights = {}
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no dictionary
                module = name.removesuffix(".weight")
                weights[name] = stored.get_tensor(name)
                if module in adapter.modules:
                    weights[name] = adapter.merged(module, weights[name])
                    missing.discard(module)
            save_file(weights, target / file.name, stored.metadata())
    if missing:
        raise ModelError(
            f"{base} has no weight {min(missing)}, which the adapter changes: is it its base model?"
        )


if __name__ == "__main__":
    try:
        merge(*map(Path, sys.argv[1:]))
    except (ModelError, ConfigError) as error:
        sys.exit(str(error))
