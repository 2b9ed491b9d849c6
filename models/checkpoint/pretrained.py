"""A checkpoint as transformers loads it: the reference that engines are compared with, and what conversions
begin with."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from config import Config
from manifest import SHARDS, VISION_FAMILIES, Manifest, check_weights
from models.checkpoint.architecture import read_architecture, with_version_of_code
from models.errors import ModelError, reported_as
from models.images.embeddings import Canvas, ImageEncoder
from models.images.towers import VisionTower, tower_class
from models.machine import usable_threads

WIDENED_ROWS = 512  # of a weight at a time: the processor's caches hold so many
# Functions of PyTorch that read a few rows of a tensor, or none of its numbers.
READS_FEW = {"__get__", "__getitem__", "embedding", "size", "dim"}
# What recurrences multiply by at each token, and their norms, by names of parameters: float32 in any dtype.
FLOAT32_PARAMETERS = {"A_log", "dt_bias", r"\.D$", r"(linear_attn|mamba|mixer)\.o?_?norm\."}
# Largest difference of an image embedding, as a share of the largest number.
VISION_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03, "int8": 0.1}


def load_pretrained(config: Config, folder: Path, device: str) -> torch.nn.Module:
    """Returns the model of a folder in evaluation mode on `device`, with transformers' eager attention and
    the weights in `config.dtype`, but for those of FLOAT32_PARAMETERS. A model that reads images has its
    vision tower. With `trust_remote_code` runs the model's code. Changes settings for this process: the
    logging of transformers, attributes of the model's class, and on a CPU the number of torch's threads,
    unless OMP_NUM_THREADS is set and `config.threads` is not. config: with a dtype.

    Raises ModelError or ConfigError, in one line, for what no engine can serve: what `read_architecture`
    rejects, weights that are missing or of another shape, and in a model with recurrent states also weights
    that are left over, which other models may have. A model that lacks only its head uses its embeddings as
    the head, unless its config says that they differ.
    """
    architecture = read_architecture(config, folder)
    check_weights(architecture.parameters, folder)
    transformers.utils.logging.disable_progress_bar()
    # OMP_NUM_THREADS is read by torch itself, which knows no limit of a cgroup.
    if device == "cpu" and (config.threads or "OMP_NUM_THREADS" not in os.environ):
        torch.set_num_threads(config.threads or usable_threads())
    in_float32 = architecture.model_class._keep_in_fp32_modules_strict or ()
    architecture.model_class._keep_in_fp32_modules_strict = FLOAT32_PARAMETERS.union(in_float32)
    weights = {}
    with reported_as(with_version_of_code(f"{folder} cannot be loaded", config, folder)):
        if not any(folder.glob("model.safetensors*")):  # shards without the index that transformers needs
            for path in folder.glob(SHARDS):
                weights |= load_file(path)
        model, report = architecture.model_class.from_pretrained(
            None if weights else folder,
            config=architecture.config,
            state_dict=weights or None,
            key_mapping=architecture.key_mapping,
            dtype=config.dtype,
            attn_implementation="eager",
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing == ["lm_head.weight"] and _may_be_tied(folder):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        missing = []
    if missing:  # transformers would fill them with random numbers
        raise ModelError(f"{folder} lacks {len(missing)} of its weights, {missing[0]} among them")
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{folder} holds {name} in the shape {list(found)}, where its config.json says {list(expected)}"
        )
    unread = sorted(report["unexpected_keys"])  # without those that the class ignores, such as of MTP layers
    if unread and has_states(model):
        raise ModelError(f"{folder} holds {len(unread)} weights that are not read, {unread[0]} among them")
    if family := VISION_FAMILIES.get(model.config.model_type):
        tower_class(family).adapt(model)
    _limit_time_steps(model)
    return model.to(device).eval()


def _may_be_tied(folder: Path) -> bool:
    """Whether a checkpoint without lm_head may use its embeddings as the head: unless config.json and its
    text part both say that it does not (`tie_word_embeddings` is false). A null says nothing."""
    manifest = Manifest.read(folder)
    parts = (manifest.config_json, manifest.text_config)
    return any(part.get("tie_word_embeddings") is not False for part in parts)


def _limit_time_steps(model: torch.nn.Module) -> None:
    """Gives the mixers of a Nemotron-H in place the `time_step_limit` of its config: transformers 5.20 takes
    the limits of another field, so that they clamp at 0.001. Other models stay as they are."""
    if model.config.model_type == "nemotron_h":
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(model.config.time_step_limit)


def embed(
    model: torch.nn.Module, ids: torch.Tensor, embeddings: torch.Tensor, places: torch.Tensor
) -> dict[str, Any]:
    """Returns what the model's forward takes in the place of `input_ids`, its arguments by name: the
    embeddings of `ids`, with those of images at the places of image tokens, and with DeepStack also what is
    added after the first layers. ids: int64 [rows, q], where an image token has any id of the vocabulary.

    embeddings: those of images, [image tokens, width]; with DeepStack [image tokens, (1 + layers) * width].
    places: int64 [image tokens], where each of these is in the flattened `ids`.
    """
    embedded = model.get_input_embeddings()(ids.flatten())
    shape = (*ids.shape, embedded.shape[1])
    first, *others = embeddings.to(embedded.dtype).split(embedded.shape[1], 1)
    arguments: dict[str, Any] = {"inputs_embeds": embedded.index_copy(0, places, first).view(shape)}
    if others:
        nothing = torch.zeros_like(embedded)
        arguments["deepstack"] = [nothing.index_copy(0, places, each).view(shape) for each in others]
    return arguments


def has_grid_positions(model: torch.nn.Module) -> bool:
    """Whether the position of a token is three numbers (grid_positions.py)."""
    return "mrope_section" in (getattr(model.config.get_text_config(), "rope_parameters", None) or {})


def positions(model: torch.nn.Module, numbers: torch.Tensor | None) -> dict[str, Any]:
    """Returns the argument of a model's forward for positions, by its name; {}: the model takes none, as
    Mamba. numbers: int64 [rows, q], or [3, rows, q] if `has_grid_positions`; None: the model counts from 0
    on."""
    is_taken = "position_ids" in inspect.signature(type(model).forward).parameters
    return {"position_ids": numbers} if is_taken else {}


def reference_logits(model: torch.nn.Module, ids: Sequence[int], begin: int = 0, last: int = 0) -> np.ndarray:
    """Returns the logits after each token, or only after the last `last` tokens unless that is 0, from
    transformers' own forward, without a cache: float32 [tokens, vocab].

    model: as `load_pretrained` returns it; begin: the position of the first token. Raises ModelError for
    logits that are NaN or infinite, with which no engine can serve.
    """
    numbers = torch.arange(begin, begin + len(ids), device=model.device)[None] if begin else None
    with torch.inference_mode():
        tokens = torch.tensor([list(ids)], device=model.device)
        kept = {"logits_to_keep": last} if last else {}
        out = model(input_ids=tokens, use_cache=False, **kept, **positions(model, numbers))
        logits = out.logits[0].float().cpu().numpy()
    if not np.isfinite(logits).all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelError(
            f"{model.name_or_path} produced NaN or infinite logits in {dtype}: its weights are damaged, or "
            "need another --dtype (DTYPE)"
        )
    return logits


class InFloat32(TorchFunctionMode):
    """A context manager. While it is active, a model of `dtype` computes what it would after `model.float()`,
    without float32 copies of all its weights: each function of PyTorch gets the tensors that it reads
    converted, a linear layer a few rows at a time; tensors that a function creates are float32. The weights
    stay as they are."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear:
            return self._linear(*args, **kwargs)
        if function.__name__ not in READS_FEW:
            args = self._widen(args)
            kwargs = {name: self._widen(value) for name, value in kwargs.items()}
        return self._widen(function(*args, **kwargs))

    def _linear(self, given, weight, bias=None):
        given = self._widen(given)
        parts = [given @ self._widen(rows).T for rows in weight.split(WIDENED_ROWS)]
        return torch.cat(parts, -1) + self._widen(0 if bias is None else bias)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == self._dtype:
            return value.float()
        if value is self._dtype:
            return torch.float32
        if type(value) in (list, tuple):
            return type(value)(map(self._widen, value))
        return value


class VisionCheck:
    """Random tiles of an image, and the embeddings that transformers computes for it.

    tiles: uint8 [tiles, height, width, 3]. canvas: how they lie in the image, a Canvas, or () where the image
    is one tile. newline: [width], the embedding after each row of a canvas; None: there is none. embeddings:
    float32 [image tokens, width], with DeepStack [image tokens, (1 + layers) * width].
    """

    def __init__(self, model: torch.nn.Module, tower: VisionTower):
        """Runs the vision tower of `model`, as `load_pretrained` returns it, on the same tiles each time.
        tower: says the sizes and the values of pixels that the model takes."""
        sizes = {}
        count = 1
        self.canvas: tuple[int, ...] = ()
        height = tower.tile_side or 4 * tower.token_side
        width = tower.tile_side or 6 * tower.token_side
        self.newline = tower.newline
        if self.newline is not None:  # an image that fills a canvas
            image = model.config.image_grid_pinpoints[0]
            rows, columns = (side // height for side in image)
            count = 1 + rows * columns
            patches = height // tower.token_side
            size = (rows * patches, columns * patches)
            self.canvas = Canvas(*size, 0, 0, *size)
            sizes["image_sizes"] = image
        elif has_grid_positions(model):
            sizes["image_grid_thw"] = (1, 8, 12)
        elif not tower.tile_side:
            sizes["image_sizes"] = (height, width)
        self.tiles = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)
        values = tower.normalize(torch.from_numpy(self.tiles).to(model.device)).to(model.dtype)
        with torch.inference_mode():
            given = {name: torch.tensor([size], device=model.device) for name, size in sizes.items()}
            found = model.get_image_features(pixel_values=tower.for_transformers(values), **given)
        embeddings = torch.cat([each.flatten(0, -2) for each in found.pooler_output])
        for features in getattr(found, "deepstack_features", None) or ():
            embeddings = torch.cat([embeddings, *features], -1)
        self.embeddings = embeddings.float().cpu().numpy()

    def find_fault(self, encoder: ImageEncoder, dtype: str) -> str | None:
        """Encodes the tiles with `encoder`. Returns how its embeddings differ from those of transformers by
        more than VISION_TOLERANCE of `dtype`, or in their number, as a part of a log line; None: they do
        not."""
        found = encoder.encode(self.tiles, self.canvas, lambda: False)
        if found.shape != self.embeddings.shape:
            return (
                f"it makes {len(found)} tokens of an image, where transformers makes {len(self.embeddings)}"
            )
        error = np.abs(found - self.embeddings).max() / np.abs(self.embeddings).max()
        if error <= VISION_TOLERANCE[dtype]:
            return None
        return f"its image embeddings differ from those of transformers by {error:.2g} times the largest"


def has_states(model: torch.nn.Module) -> bool:
    """Whether layers of the model have recurrent states: all of these begin with a short convolution."""
    return any(map(is_causal_convolution, model.modules()))


def is_causal_convolution(module: torch.nn.Module) -> bool:
    """Whether the module is the short convolution of a layer with a recurrent state: one with a kernel of its
    own for each channel."""
    return isinstance(module, torch.nn.Conv1d) and module.groups == module.in_channels > 1


def has_experts(model: torch.nn.Module) -> bool:
    """Whether the model is a mixture of experts, by the names of its modules, which all families share."""
    names = (f"{name} {type(module).__name__}" for name, module in model.named_modules())
    return any("experts" in name.lower() for name in names)
