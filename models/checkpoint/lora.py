"""A LoRA adapter is read as peft saves it: merged into the weights of its base model, or as low-rank updates.

Reads the two files that peft saves, adapter_config.json and adapter_model.safetensors, and the base model's
files one at a time. An adapter that needs more than the base model's own weights, or another way to merge it,
is rejected by the name of its setting.

    python -m models.checkpoint.lora BASE ADAPTER TARGET   writes the merged checkpoint into the folder TARGET
    python -m models.checkpoint.lora ADAPTER TARGET        writes its updates, which `adapters.py` reads

Source: LoRA (arXiv:2106.09685), rank-stabilized scaling (arXiv:2312.03732), DoRA (arXiv:2402.09353), peft's
names.
"""

from __future__ import annotations

import math
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from manifest import read_json
from models.adapters import DOWN_SUFFIX, PREFIX, UP_SUFFIX, UPDATES, A, B, common_name
from models.checkpoint.fetch import ADAPTER_WEIGHTS, copy_metadata, shapes_in
from models.errors import ModelError, run_program

BIAS = ".lora_B.bias"
MAGNITUDE = ".lora_magnitude_vector"
# The tensor of the base model that each of them changes.
CHANGES = {A: ".weight", B: ".weight", MAGNITUDE: ".weight", BIAS: ".bias"}
# Settings of adapter_config.json that decide how to merge, and their supported values; unset always is.
SUPPORTED_LORA_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),  # others also change the base model
    "fan_in_fan_out": (),
    "use_qalora": (),
    "use_bdlora": (),
    "kasa_config": (),
    "arrow_config": (),
    "trainable_token_indices": (),
    "target_parameters": (),
    "layer_replication": (),
    "alora_invocation_tokens": (),
}
INSTEAD = "merge the trained model with peft (merge_and_unload) and serve what peft saves"
LARGEST = 1e6  # of the numbers of an adapter that requests choose
MATCHING_S = 2  # of processor time
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "lm_head.weight")


class Adapter:
    """What the adapter in `folder` trained. `names` are the tensors of the base model that it changes, as the
    adapter spells them, by their `common_name`.

    To be made in the main thread of a child process: it uses SIGPROF and its timer. Holds all tensors in
    memory. Raises ModelError for an adapter that cannot be merged, by the name of its setting or tensor, for
    an `alpha_pattern` that `_find_alphas` rejects, and for a file that is missing or not whole; ConfigError
    for an adapter_config.json that is missing or no JSON.
    """

    def __init__(self, folder: Path):
        self._config = read_json(folder / "adapter_config.json", required="LoRA adapter")
        for name, values in SUPPORTED_LORA_SETTINGS.items():
            given = self._config.get(name)
            if given and given not in values:
                raise ModelError(f"`{name}` is {given!r}, which cannot be merged; {INSTEAD}")
        shapes_in(folder)  # checks them
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        # By their names in the base model: an adapted module has its own weight and bias as its `base_layer`.
        self._tensors = {
            name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor for name, tensor in tensors.items()
        }
        for name, tensor in self._tensors.items():
            if not tensor.is_floating_point():
                raise ModelError(f"{name} has numbers of the type {tensor.dtype}, which LoRA has not")
        self._alphas = self._find_alphas()
        self.names = {common_name(name): name for name in map(_changed_by, self._tensors)}
        others = [name for name in self.names.values() if ".lora_" in name]
        if others:
            raise ModelError(f"the adapter holds {min(others)}, which cannot be merged; {INSTEAD}")
        for name in self._tensors:
            module = name.removesuffix(BIAS).removesuffix(MAGNITUDE)
            if module != name and module not in self._alphas:
                raise ModelError(f"the adapter holds {name}, but no {module}{A}")

    def merged(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """Returns what the adapter makes of `base`, a tensor of the base model: a new tensor in the dtype of
        `base`. A trained tensor replaces `base`, then low-rank updates are added. name: that of the tensor,
        as a value of `names`.

        Raises ModelError if the adapter changes the tensor in another shape, and for a DoRA without its
        magnitude.
        """
        parts = [self._tensors.get(name, base)]  # of `modules_to_save`, or a trained bias
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in self._alphas:
            down = self._tensors[module + A].float()
            up = self._tensors[module + B].float()
            parts.append(up @ down * self._scale(module))
        if kind == "bias" and module + BIAS in self._tensors:
            parts.append(self._tensors[module + BIAS].float() * self._scale(module))
        for part in parts:
            if part.shape != base.shape:
                shapes = f"{list(part.shape)}, not {list(base.shape)}"
                raise ModelError(f"the adapter changes {name} in the shape {shapes}")
        merged = sum(part.float() for part in parts)
        if len(parts) > 1 and self._config.get("use_dora"):
            magnitude = self._tensors.get(name.removesuffix(".weight") + MAGNITUDE)
            if magnitude is None or magnitude.shape != base.shape[:1]:
                raise ModelError(f"`use_dora` needs the magnitude of {name}, {list(base.shape[:1])}")
            merged *= (magnitude.float() / merged.norm(dim=1))[:, None]
        return merged.to(base.dtype).contiguous()

    def updates(self) -> dict[str, torch.Tensor]:
        """Returns the low-rank update of each module in float32, by the module's name in the adapter and
        DOWN_SUFFIX or UP_SUFFIX: `down` [rank, inputs] and `up` [rank, outputs]. `up` is multiplied by the
        scale of the module.

        Raises ModelError for an adapter that changes anything else, such as biases, embeddings or a DoRA's
        magnitudes, for one without updates, and for numbers that are NaN or LARGEST and more.
        """
        others = {name for name in self._tensors if not name.endswith((A, B))}
        others |= {name for name in self.names if name.endswith(EMBEDDINGS)}
        if others:
            raise ModelError(
                f"the adapter holds {min(others)}, and requests can choose plain LoRA of linear layers only; "
                "merge it with --merge-lora (MERGE_LORA)"
            )
        updates = {}
        for module in sorted(self._alphas):
            updates[module + DOWN_SUFFIX] = self._tensors[module + A].float()
            updates[module + UP_SUFFIX] = (self._tensors[module + B].float() * self._scale(module)).T
        if not updates:
            raise ModelError("the adapter holds no LoRA weights")
        for name, tensor in updates.items():
            # A product that is NaN or infinite would reach every request of a step: 0 times it is NaN.
            if not (tensor.abs() < LARGEST).all():
                raise ModelError(
                    f"the adapter holds numbers of {name} that are NaN or {LARGEST:.0e} and more"
                )
        return {name: tensor.contiguous() for name, tensor in updates.items()}

    def _scale(self, module: str) -> float:
        """Returns what the product of `B` and `A` of a module is multiplied by: its alpha, divided by the
        rank, or by the root of the rank with `use_rslora`. The rank is that of the tensors."""
        # Not from `rank_pattern`: peft sorts it when it saves, which may change the first match.
        rank = len(self._tensors[module + A])
        alpha = self._alphas[module]
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _find_alphas(self) -> dict[str, float]:
        """Returns the alpha of each module: the value of the first key of `alpha_pattern` that matches the
        name of the module, or what follows one of its dots, as a whole; else `lora_alpha`. Keys are regular
        expressions, as peft reads them: `layers.0.q_proj` is matched by `q_proj` and `.*q_proj`, not by
        `proj`.

        Replaces the handler and the timer of SIGPROF; after an error the timer may still run. Raises
        ModelError for other values than numbers, for keys that are no regular expressions, and for those that
        take longer than MATCHING_S.
        """
        default = self._config.get("lora_alpha", 8)
        patterns = self._config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise ModelError(f"`alpha_pattern` is {patterns!r}, and not an object")
        for value in (default, *patterns.values()):
            if type(value) not in (int, float) or not abs(value) < LARGEST:
                raise ModelError(f"`lora_alpha` or `alpha_pattern` has {value!r} in the place of a number")
        alphas = {name.removesuffix(A): default for name in self._tensors if name.endswith(A)}
        signal.signal(signal.SIGPROF, _reject_patterns)
        signal.setitimer(signal.ITIMER_PROF, MATCHING_S)
        for key, value in reversed(patterns.items()):
            try:
                matches = re.compile(rf"(.*\.)?({key})").fullmatch
            except re.error as error:
                raise ModelError(f"`alpha_pattern` has {key!r}: no regular expression ({error})") from None
            alphas |= {module: value for module in alphas if matches(module)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        return alphas


def _reject_patterns(*_signal) -> None:
    """Handles SIGPROF: raises ModelError where the main thread is at that time."""
    raise ModelError(f"the regular expressions of `alpha_pattern` take longer than {MATCHING_S} s to match")


def _changed_by(name: str) -> str:
    """Returns the name of the base model's tensor that the tensor `name` of an adapter changes: a tensor that
    is not one of CHANGES replaces the one of the same name."""
    for ending, kind in CHANGES.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + kind
    return name


def merge(base: Path, adapter_folder: Path, target: Path) -> None:
    """Writes the checkpoint `base`, with the adapter merged into its weights, into the folder `target`: all
    its files but .bin. Holds the weights of one file at a time in memory.

    Raises ModelError for an adapter that cannot be merged, or that does not fit the base model: another
    shape, a tensor that the base model lacks, one of two tied embeddings. Some of these are known at the end
    only; what was written stays. Raises ConfigError for a JSON file that cannot be read, OSError or
    SafetensorError if `target` cannot be written or weights of `base` are not whole.
    """
    adapter = Adapter(adapter_folder)
    names = set()
    copy_metadata(base, target)
    for file in sorted(base.glob("*.safetensors")):
        weights = {}
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dictionary
                weights[name] = stored.get_tensor(name)
                if changed := adapter.names.get(common_name(name)):
                    weights[name] = adapter.merged(changed, weights[name])
            save_file(weights, target / file.name, stored.metadata())
        names |= set(map(common_name, weights))
    # peft changes one of two tied embeddings, and leaves the other one as it was.
    tied = read_json(base / "config.json").get("tie_word_embeddings") or "lm_head.weight" not in names
    embeddings = [name for name in adapter.names if name.endswith(EMBEDDINGS)]
    if tied and embeddings:
        raise ModelError(
            f"the adapter changes {min(embeddings)}, which {base} ties to its other embeddings; {INSTEAD}"
        )
    missing = [changed for name, changed in adapter.names.items() if name not in names]
    if missing:
        raise ModelError(
            f"{base} has no tensor {min(missing)}, which the adapter changes: is it its base model?"
        )


def extract(adapter_folder: Path, target: Path) -> None:
    """Writes the low-rank updates of an adapter into the file UPDATES of the folder `target`, for
    adapters.py. Raises ModelError for an adapter that requests cannot choose, what `Adapter` raises, and
    SafetensorError if the file cannot be written."""
    save_file(Adapter(adapter_folder).updates(), target / UPDATES)


if __name__ == "__main__":
    run_program(merge if len(sys.argv) == 4 else extract, Path, Path, Path)
