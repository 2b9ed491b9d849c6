"""Converts a checkpoint into an entry of the model cache: an OpenVINO graph, checked against transformers'
own logits.

Runs in a child process, so that the worker never imports torch or transformers. `convert` loads the
checkpoint (`torch_model.load_pretrained`), traces it with a placeholder in the place of each attention layer,
saves the graph, and compares what `openvino_model.py` computes from the saved files with the logits of
transformers. For a model that cannot be converted the entry holds the reason, and the next start goes
straight to plain PyTorch.

    python -m models.convert FOLDER TARGET < CONFIG.json     a model; CONFIG as `Config.to_json` writes it
    python -m models.convert --demo                          the demonstration model, into demo/converted
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import logs
from config import Config
from manifest import Manifest
from models.base import TOLERANCE, Chunk, ModelError, first_line
from models.cache import CANNOT_SERVE, CANNOT_WRITE, model_key, renamed_when_complete, write_entry
from models.machine import usable_threads

# Before openvino, which it keeps from loading its telemetry.
from models.openvino_model import PLACEHOLDER, SHIPPED, OpenVinoModel, read_graph, reason, with_dtype
from models.torch_model import length_limit, load_pretrained, reference_logits
from run import die_with_parent

import openvino as ov  # isort: skip
from openvino import opset13 as ops  # isort: skip
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension, patch_model  # isort: skip
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # isort: skip

logger = logging.getLogger("model")

PLACEHOLDERS = "openvino_placeholder"  # the name of an attention function of transformers
CHUNK = OpenVinoModel.prefill_chunk
CHECK_TOKENS = CHUNK + 16
SHORT_CHECK_TOKENS = 80  # crosses the edges of two blocks
SHORT_CHECK_BEGINS = (0, 1, 3, 34, 67, 68, 70), (0, 35, 36, 37, 54, 55)  # of the chunks of two slots
CHECK_WINDOW = 40  # longer sliding windows are shortened to this for the check, so that they slide in it
REFERENCE_COLUMNS = 4  # of the logits, stored for the comparison at every start
GROUP_SIZE = 64  # int4 weights that share a scale
SPARE_BYTES = 50_000_000  # of the disk, for the graph without its weights
NNCF = "nncf==3.4.0"


class UnsupportedModel(Exception):
    """A model that OpenVINO cannot serve; the message is a part of a log line."""


class Placeholder(torch.nn.Module):
    """Stands for one layer's attention while the model is traced; returns any [tokens, width]. `facts`: what
    its name holds for `read_graph`. width: heads * value size."""

    def __init__(self, facts: tuple, width: int):
        super().__init__()
        self.name = PLACEHOLDER + "|".join(map(repr, facts))
        self.width = width

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query[:, :1].expand(-1, self.width) * 1.0

    def in_graph(self, context) -> list[ov.Output]:
        """Concat and Slice, which any saved graph can hold; one with PagedAttention cannot be read back."""
        joined = ops.concat([context.get_input(i) for i in range(3)], 1)
        joined.set_friendly_name(self.name)
        return [ops.slice(joined, *(ops.constant([n]) for n in (0, self.width, 1, 1))).output(0)]


def _attend(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    **_,
):
    """The attention function of transformers: query [1, heads, tokens, head size] -> [1, tokens, heads, value
    size]."""
    if softcap is not None or s_aux is not None:
        raise UnsupportedModel("its attention caps scores or has sinks")
    _, heads, _, size = query.shape
    _, kv_heads, _, value_size = value.shape
    if not hasattr(module, "placeholder"):
        scaling = float(size**-0.5 if scaling is None else scaling)
        facts = (module.layer_idx, scaling, int(sliding_window or 0), kv_heads, size, value_size)
        module.placeholder = Placeholder(facts, heads * value_size)
    flat = (states.transpose(1, 2).flatten(2)[0] for states in (query, key, value))
    return module.placeholder(*flat).reshape(1, -1, heads, value_size), None


ALL_ATTENTION_FUNCTIONS.register(PLACEHOLDERS, _attend)


class _Flat(torch.nn.Module):
    """input_ids, position_ids: int64 [tokens] of all chunks; keep: int64 [rows], which tokens' logits are
    returned."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, keep):
        return self.model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=keep
        ).logits[0]


def convert(config: Config, folder: Path, target: Path) -> None:
    """Fills `target`. Raises ModelError for what no engine can serve, OSError where `target` cannot be
    written."""
    manifest = Manifest.read(folder)
    config = with_dtype(config, manifest)
    dtype = config.dtype
    if config.quantize and not importlib.util.find_spec("nncf"):
        raise ModelError(
            f'--quantize {config.quantize} (QUANTIZE) needs nncf for the first start: pip install "{NNCF}"'
        )
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # float32 takes twice the bytes of a 16-bit checkpoint.
    needed = SPARE_BYTES + stored * (2 if dtype == "float32" else 1)
    if shutil.disk_usage(target).free < needed:
        raise OSError(f"{target} has no room for {needed / 1e9:.1f} GB")
    model = load_pretrained(config, folder, "cpu")
    text_config = model.config.get_text_config()
    facts: dict[str, Any] = {
        "model": config.model_name,
        "dtype": dtype,
        "quantize": config.quantize,
        "vocab_size": text_config.vocab_size,
        "max_total_tokens": length_limit(text_config),
        "refused": None,
    }
    tolerance = TOLERANCE[config.quantize or dtype]
    try:
        positions = facts["max_total_tokens"] or manifest.max_positions or config.max_total_tokens
        check = Check(model.float(), positions)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        facts["reference"] = {**check.stored, "tolerance": tolerance * check.scale}
        graph = trace(model)
        _save(graph, target)
        if config.quantize:
            check(target, facts, TOLERANCE[dtype])  # before compression adds its own error
            _save(quantize(graph, config.quantize), target)
        del model, graph
        gc.collect()
        check(target, facts, tolerance)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:
        logger.debug("not converted", exc_info=True)
        for path in target.glob("model.*"):
            path.unlink()
        facts["refused"] = str(error) if type(error) is UnsupportedModel else reason(error)
    write_entry(target, facts)


def trace(model: torch.nn.Module) -> ov.Model:
    """A graph with placeholders. Changes the torch model, which cannot be used afterwards."""
    model.requires_grad_(False).set_attn_implementation(PLACEHOLDERS)
    # The other implementations do not convert, or break where an expert has no token.
    model.set_experts_implementation("batched_mm")
    ids = torch.arange(5)
    with torch.no_grad():
        model(input_ids=ids[None], position_ids=ids[None], use_cache=False)  # makes the placeholders
        placeholders = [module.placeholder for module in model.modules() if hasattr(module, "placeholder")]
        if len(placeholders) != model.config.get_text_config().num_hidden_layers:
            raise UnsupportedModel("its layers do not use the attention interface of transformers")
        # 16-bit constants in a float32 graph; else the angles are computed in 16 bits, too.
        if model.dtype != torch.float32:
            getattr(patch_model, "__make_16bit_traceable")(model)
        example = (ids, ids, ids[2:4])
        modules = {
            placeholder: ModuleExtension(placeholder, placeholder.name) for placeholder in placeholders
        }
        traced = TorchScriptPythonDecoder(
            _Flat(model),
            example_input=example,
            module_extensions=modules,
            trace_kwargs={"check_trace": False},
        )
        in_graph = [
            ConversionExtension(placeholder.name, placeholder.in_graph) for placeholder in placeholders
        ]
        graph = ov.convert_model(traced, example_input=example, extension=in_graph)
    for name, port in zip(("input_ids", "position_ids", "keep"), graph.inputs):
        port.get_node().set_element_type(ov.Type.i64)
        port.get_node().set_partial_shape(ov.PartialShape([-1]))
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    return graph


class Check:
    """Token ids and the logits of transformers for them in float32, computed before `trace` changes the
    model.

    `positions`: how many the model has. `stored` goes into the entry, for the comparison at every start.
    """

    def __init__(self, model: torch.nn.Module, positions: int):
        text_config = model.config.get_text_config()
        random = np.random.default_rng(0)
        self.ids = random.integers(0, text_config.vocab_size, min(CHECK_TOKENS, positions)).tolist()
        self.short = self.ids[:SHORT_CHECK_TOKENS]
        self.shift = positions - len(self.short)  # the model's last positions
        logits = reference_logits(model, self.short)
        columns = np.linspace(0, text_config.vocab_size - 1, REFERENCE_COLUMNS, dtype=int)
        self.stored = {"ids": self.short, "columns": columns.tolist(), "logits": logits[:, columns].tolist()}
        window = getattr(text_config, "sliding_window", None)
        if window:
            text_config.sliding_window = min(window, CHECK_WINDOW)
        self.logits = reference_logits(model, self.ids)
        self.scale = max(1.0, float(np.abs(self.logits).max()))
        self.at_end = reference_logits(model, self.short, begin=self.shift)
        if window:
            text_config.sliding_window = window

    def __call__(self, target: Path, facts: dict[str, Any], tolerance: float) -> None:
        """Runs the saved graph: long and short chunks, one and two slots a call, at the first and at the last
        positions. Raises UnsupportedModel where a logit differs by more than `tolerance` times the
        largest."""
        graph = read_graph(target / "model.xml", CHECK_WINDOW)
        model = OpenVinoModel(graph, facts, slots=3, max_total_tokens=len(self.ids), threads=usable_threads())
        found = [model.forward([Chunk(0, self.short, 0, keep_all=True)], self.shift)]
        wanted = [self.at_end, self.logits]
        for begin in range(0, len(self.ids), CHUNK):
            found.append(model.forward([Chunk(0, self.ids[begin : begin + CHUNK], begin, keep_all=True)]))
        n = len(self.short)
        begins_of = [[begin for begin in begins if begin < n] for begins in SHORT_CHECK_BEGINS]
        ranges = [itertools.pairwise([*begins, n]) for begins in begins_of]
        for step in itertools.zip_longest(*ranges):
            running = [(slot, part) for slot, part in enumerate(step) if part]
            chunks = [Chunk(slot, self.short[begin:end], begin) for slot, (begin, end) in running]
            found.append(model.forward(chunks))
            wanted.append(self.logits[[end - 1 for _slot, (_begin, end) in running]])
        error = float(np.abs(np.concatenate(found) - np.concatenate(wanted)).max())
        if not error <= tolerance * self.scale:  # not: NaN
            raise UnsupportedModel(
                f"its logits differ from those of transformers by {error:.2g} (of {self.scale:.2g})"
            )


def quantize(graph: ov.Model, kind: str) -> ov.Model:
    """Compresses the weights of the linear layers and embeddings: int8 a channel, or int4 a group, both
    asymmetric."""
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)  # nncf.set_log_level would change our handlers as well
    if kind == "int8":
        return nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_ASYM)
    return nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=GROUP_SIZE)


def _save(graph: ov.Model, target: Path) -> None:
    try:
        ov.save_model(graph, target / "model.xml", compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(f"{target} cannot be written: {first_line(error)}") from None


def main(arguments: list[str]) -> int:
    die_with_parent()
    warnings.simplefilter("ignore")  # of the libraries, about how they call each other
    try:
        if arguments == ["--demo"]:
            config = Config()
            folder = Path(config.model_id)
            manifest = Manifest.read(folder)
            config = with_dtype(config.with_manifest(manifest), manifest)
            with renamed_when_complete(SHIPPED / model_key(config, folder, manifest)) as target:
                convert(config, folder, target)
        else:
            config = Config.from_json(sys.stdin.read())
            logs.set_up(config.log_level, config.json_output)
            convert(config, Path(arguments[0]), Path(arguments[1]))
    except (ModelError, OSError) as error:
        print(error)
        return CANNOT_SERVE if isinstance(error, ModelError) else CANNOT_WRITE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
