"""Decoder-only models of `transformers` in plain PyTorch, on a CPU or a CUDA GPU, as static batches.

Owns the loading of checkpoints (`load_pretrained` refuses what no engine can serve; `convert.py` uses it too), transformers'
own logits (`reference_logits`), and `TorchModel`: the library's forward with an attention function over a slot cache. Serves
what OpenVINO cannot convert. Knows no requests and no sampling. Written for transformers 5.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config import DEFAULT_BATCH_SIZE, Config, Manifest, read_json
from models.base import Chunk, DeviceLost, ModelError, first_line, reported_as

logger = logging.getLogger("model")

ATTENTION = "static_batch"
PREFILL_CHUNK = 128  # tokens; fixed boundaries, because the last bits of a token's logits may depend on its chunk
CHECK_TOKENS = 12
CHECK_CHUNK = 5
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}  # of the largest logit, compared with transformers' own


def load_pretrained(config: Config, folder: Path, device: str, dtype: str | None = None) -> torch.nn.Module:
    """The model of a folder in evaluation mode on `device`, with transformers' eager attention.

    dtype: "float32", "bfloat16" or "float16"; None: as the configuration says. Raises ModelError, in one line, for what no
    engine can serve: unknown families, quantized checkpoints, missing weights.
    """
    written = read_json(folder / "config.json", required=True)
    if written["model_type"] not in transformers.CONFIG_MAPPING and "auto_map" in written and not config.trust_remote_code:
        raise ModelError(
            f"{written['model_type']} models come with Python code of their own; --trust-remote-code (TRUST_REMOTE_CODE) "
            "runs it"
        )
    with reported_as(f"{folder} cannot be read as a model"):
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    _refuse_unsupported(config, hf_config)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no weights (*.safetensors)")
    if dtype is None and device == "cpu":
        from models.cpu import choose_dtype  # here, because a GPU's environment needs no openvino

        dtype = choose_dtype(config, folder)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with reported_as(f"{folder} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype or config.dtype,
            attn_implementation="eager",
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would fill them with random numbers
        raise ModelError(f"{folder} lacks {len(missing)} of its weights, {missing[0]} among them")
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelError(f"{folder} holds {name} in the shape {list(found)}, where its config.json asks for {list(expected)}")
    return model.to(device).eval()


def reference_logits(model: torch.nn.Module, ids: Sequence[int]) -> np.ndarray:
    """The logits after each token from transformers' own forward, without a cache: float32 [tokens, vocab].

    `model` as `load_pretrained` returns it.
    """
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    return out.logits[0].float().cpu().numpy()


def _refuse_unsupported(config: Config, hf_config) -> None:
    kind, text_config = hf_config.model_type, hf_config.get_text_config()
    is_causal = type(hf_config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if hf_config.is_encoder_decoder or not (is_causal or "AutoModelForCausalLM" in getattr(hf_config, "auto_map", {})):
        raise ModelError(f"{kind} models do not continue text token by token (no causal language model); nothing to serve")
    if getattr(hf_config, "quantization_config", None):
        raise ModelError(f"this {kind} checkpoint is quantized, which cannot be served yet; use its unquantized form")
    for layer_type in getattr(text_config, "layer_types", None) or []:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{kind} models with {layer_type} layers cannot be served on a static batch yet")
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in [rope] + [p for p in rope.values() if isinstance(p, dict)]:
        trained = parameters.get("original_max_position_embeddings") or getattr(text_config, "max_position_embeddings", 0)
        if parameters.get("rope_type") in ("dynamic", "longrope") and config.max_total_tokens > trained:
            # These change every row's angles with the longest row of the batch, so one request would change another.
            raise ModelError(
                f"this {kind} model stretches its positions ({parameters['rope_type']}) beyond {trained} tokens, which slots "
                f"cannot share; give --max-total-tokens {trained} or less"
            )


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype and device of `like`. On a CPU they take memory where something is written, unlike torch.zeros."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(math.prod(shape) * like.itemsize, np.uint8)).view(like.dtype).view(shape)


class _Pass:
    """One forward pass: the next tokens of one slot (`rows` is None), or a decode step of several.

    A decode step always has the same number of rows, row i for slot i, because the last bits of a matrix product depend on the
    number of its rows. Rows without a chunk compute nothing of use and write nothing.
    """

    def __init__(self, chunks: Sequence[Chunk], rows: int | None, device: str):
        begins = torch.tensor([chunk.begin for chunk in chunks])
        slots = torch.tensor([chunk.slot for chunk in chunks])
        if rows is None:
            assert len(chunks) == 1
            self.tokens = torch.tensor([chunks[0].tokens])
            self.positions = begins + torch.arange(len(chunks[0].tokens))[None]
        else:
            self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64)
            self.tokens[slots, 0] = torch.tensor([chunk.tokens[0] for chunk in chunks])
            self.positions[slots, 0] = begins
        self.is_step = rows is not None
        self.filled = {chunk.slot: chunk.begin + len(chunk.tokens) for chunk in chunks}  # of each slot, this pass included
        self.slots, self.tokens, self.positions = (t.to(device) for t in (slots, self.tokens, self.positions))
        self._begins = begins.to(device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def write(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Puts the keys or values of this pass, [rows, kv heads, q, size], into the slots' store, [slots, kv heads, window,
        size]. Returns what may be attended to: the filled part of the one slot, or the whole store."""
        if self.is_step:
            store[self.slots, :, self._begins] = states[self.slots, :, 0]
            return store
        ((slot, filled),) = self.filled.items()
        store[slot, :, filled - states.shape[2] : filled] = states[0]
        return store[slot : slot + 1, :, :filled]

    def mask(self, keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Added to the scores: 0 for the positions that a token attends to, the lowest number elsewhere; [rows, 1, q, keys]."""
        if window not in self._masks:
            position = self.positions[:, None, :, None]
            key = torch.arange(keys, device=position.device)
            allowed = (key <= position) & (key > position - (window or keys))
            zero = torch.zeros((), dtype=dtype, device=position.device)
            self._masks[window] = zero.where(allowed, torch.finfo(dtype).min)
        return self._masks[window]


class _SlotCache(Cache):
    """Keys and values of all slots, [slots, kv heads, window, head size] a layer, made at the first pass.

    Follows transformers' cache protocol: each attention module passes in the keys and values of its tokens and gets those that
    may be attended to.
    """

    def __init__(self, slots: int, window: int):
        super().__init__(layers=[])
        self._slots, self._window = slots, window
        self._stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.step: _Pass | None = None
        self.windows: dict[int, int | None] = {}  # the sliding window that each layer asks for

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        states = (key_states, value_states)
        if layer_idx not in self._stores:
            self._stores[layer_idx] = tuple(_zeros((self._slots, s.shape[1], self._window, s.shape[3]), s) for s in states)
        return tuple(self.step.write(store, new) for store, new in zip(self._stores[layer_idx], states))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always given


_cache: _SlotCache | None = None  # of the pass that runs now: transformers passes no arguments on to an attention function


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' modules call it. query: [rows, heads, q, head size]; key and value: what the cache returned.
    Returns [rows, q, heads, head size].

    In a decode step each row attends to the filled part of its own slot in a call of its own. A batched call would pad all
    rows to the longest, which changes the last bits of the others.
    """
    step, scaling = _cache.step, query.shape[-1] ** -0.5 if scaling is None else scaling
    _cache.windows[module.layer_idx] = sliding_window
    if not step.is_step:
        mask = step.mask(key.shape[2], sliding_window, query.dtype)
        return _scaled_dot_product(query, key, value, mask, scaling, softcap).transpose(1, 2), None
    rows, heads, _one, _size = query.shape
    out = query.new_zeros(rows, 1, heads, value.shape[-1])
    for slot, filled in step.filled.items():
        begin = max(0, filled - sliding_window) if sliding_window else 0
        # The query heads that share a key head stand in as its tokens: keys are neither repeated nor masked.
        grouped = query[slot].reshape(1, key.shape[1], -1, query.shape[-1])
        seen = slice(begin, filled)
        attended = _scaled_dot_product(grouped, key[slot, None, :, seen], value[slot, None, :, seen], None, scaling, softcap)
        out[slot, 0] = attended.view(heads, -1)
    return out, None


def _scaled_dot_product(query, key, value, mask, scaling: float, softcap: float | None) -> torch.Tensor:
    """query: [1, heads, q, head size]; key, value: [1, kv heads, keys, head size]. Returns [1, heads, q, head size]."""
    if softcap is None:
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=shared)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap)) * softcap
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


class TorchModel:
    """A decoder-only model of `transformers` on a CPU or a CUDA GPU. Implements StaticBatchModel.

    Raises ModelError for what cannot be served; at boot the logits are compared with transformers' own.
    """

    engine, sampling, quantize, mixes, prompt_budget = "torch", "host", None, False, None

    def __init__(self, config: Config, folder: Path, manifest: Manifest, device: str):
        kind = manifest.model_type
        if config.quantize:
            setting = f"--quantize {config.quantize} (QUANTIZE)"
            raise ModelError(
                f"{setting}: {kind} models run in PyTorch on {device}, where weights stay as they are; leave it out"
            )
        self.batch_size = config.max_batch_size or DEFAULT_BATCH_SIZE
        self.max_total_tokens = config.max_total_tokens
        self.max_input_tokens = config.max_input_tokens
        self.device = device
        if device == "cpu" and (config.threads or "OMP_NUM_THREADS" not in os.environ):  # which torch reads itself
            from models.cpu import usable_threads

            torch.set_num_threads(config.threads or usable_threads())
        self._model = load_pretrained(config, folder, device)
        text_config = self._model.config.get_text_config()
        self.vocab_size = text_config.vocab_size
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self._rows: int | None = self.batch_size  # of a decode step; None: each row runs by itself
        self._mask_is_given = False
        ids = torch.randint(0, self.vocab_size, (CHECK_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        ids = ids[: self.max_input_tokens + 1]
        with reported_as(f"{kind} models cannot be served on a static batch"):
            expected = reference_logits(self._model, ids)
            self._tolerance = TOLERANCE[self.dtype] * max(1.0, float(np.abs(expected).max()))
            self._adopt(ids, expected, text_config, kind)
            self._choose_rows(ids, kind)
        self.gives_prompt_logits = self._runs_prompts_in_parts(ids, expected, kind)
        self.prefill_chunk = PREFILL_CHUNK if self.gives_prompt_logits else None

    def forward(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """One prompt chunk, or a decode step: one token of each slot with a live sequence. Returns float32 [rows, vocab]."""
        try:
            if self._rows and len(chunks[0].tokens) == 1:
                return self._run(chunks, self._rows)
            return np.concatenate([self._run([chunk], None) for chunk in chunks])
        except torch.AcceleratorError as error:  # every later call would fail as well
            raise DeviceLost(f"{type(error).__name__}: {first_line(error)}") from error

    @torch.inference_mode()
    def _run(self, chunks: Sequence[Chunk], rows: int | None) -> np.ndarray:
        global _cache
        step = _Pass(chunks, rows, self.device)
        assert all(0 <= slot < self.batch_size and n <= self.max_total_tokens for slot, n in step.filled.items())
        _cache, self._cache.step = self._cache, step
        keys = self.max_total_tokens if step.is_step else step.filled[chunks[0].slot]
        out = self._model(
            input_ids=step.tokens,
            position_ids=step.positions,
            past_key_values=self._cache,
            attention_mask=step.mask(keys, None, self._model.dtype) if self._mask_is_given else None,
            use_cache=True,
            logits_to_keep=0 if chunks[0].keep_all else 1,
        )
        logits = out.logits[step.slots, -1] if step.is_step else out.logits[0]
        if not chunks[0].keep_all:
            logits = logits[-len(chunks) :]  # not every family knows logits_to_keep
        return logits.float().cpu().numpy()

    def _adopt(self, ids: list[int], expected: np.ndarray, text_config, kind: str) -> None:
        """Finds out how this family runs on a static batch, or raises ModelError.

        Most families use the registered attention function. Those with attention code of their own get a mask over the whole
        window instead, which is right for them as long as their scores depend on the mask alone: no sliding window, no bias
        by distance.
        """
        self._cache = _SlotCache(self.batch_size, self.max_total_tokens)
        self._model.set_attn_implementation(ATTENTION)
        error = self._compare(ids, expected)
        windows = self._cache.windows
        if windows and error <= self._tolerance:
            return self._check_windows(text_config, kind, windows)
        has_window = any(getattr(text_config, name, None) for name in ("sliding_window", "window_size"))
        if not windows and not has_window:
            self._mask_is_given = True
            error = self._compare(ids, expected)
            if error <= self._tolerance:
                return
        raise ModelError(
            f"{kind} models cannot be served on a static batch: their logits would differ from transformers' own by "
            f"{error:.2g} (of {np.abs(expected).max():.2g}), because they keep positions, masks or state in a way that slots "
            "cannot share"
        )

    def _compare(self, ids: list[int], expected: np.ndarray) -> float:
        """Runs `ids` through two slots at different positions. Returns the largest difference to the `expected` logits."""
        ends = {self.batch_size - 1: max(1, len(ids) // 2), 0: len(ids) - 1}  # of the prompt in the slot
        found = [self.forward([Chunk(slot, ids[:end], 0)]) for slot, end in ends.items()]
        found.append(self.forward([Chunk(slot, [ids[end]], end) for slot, end in ends.items()]))
        wanted = [expected[end - 1] for end in ends.values()] + [expected[end] for end in ends.values()]
        error = float(np.abs(np.concatenate(found) - wanted).max())
        return error if error == error else math.inf

    def _choose_rows(self, ids: list[int], kind: str) -> None:
        """The fewest rows of a decode step in which a slot's logits are the same to the last bit in every slot and company.

        A matrix library may use another kernel for the last rows of an odd number. In a mixture of experts the number of
        tokens of an expert varies: there each row is a pass of its own, which reads few weights twice.
        """
        for rows in range(self.batch_size, self.batch_size + 8):
            self._rows, self._cache = rows, _SlotCache(rows, self.max_total_tokens)
            if all(self._rows_are_equal(token, position) for position, token in enumerate(ids[:2])):
                return
        self._rows, self._cache = None, _SlotCache(self.batch_size, self.max_total_tokens)
        logger.warning("%s: the last bits of a batch's rows depend on each other, so each row runs by itself, slower", kind)

    def _rows_are_equal(self, token: int, position: int) -> bool:
        """Runs the same token in all slots together, then alone in the first and the last slot."""
        chunks = [Chunk(slot, [token], position) for slot in range(self.batch_size)]
        together = self.forward(chunks)
        alone = (self.forward([chunk]) for chunk in (chunks[0], chunks[-1]))
        return bool((together == together[0]).all()) and all((logits == together[0]).all() for logits in alone)

    def _runs_prompts_in_parts(self, ids: list[int], expected: np.ndarray, kind: str) -> bool:
        """A family that can run a prompt only as a whole is served without log-probabilities of prompts."""
        parts = [Chunk(0, ids[i : i + CHECK_CHUNK], i, keep_all=True) for i in range(0, len(ids), CHECK_CHUNK)]
        try:
            error = np.abs(np.concatenate([self.forward([part]) for part in parts]) - expected).max()
        except Exception:
            logger.debug("running a prompt in parts failed", exc_info=True)
            error = math.inf
        if not error <= self._tolerance:
            logger.warning("%s models cannot run a prompt in parts: no log-probabilities of prompts", kind)
        return bool(error <= self._tolerance)

    def _check_windows(self, text_config, kind: str, windows: dict[int, int | None]) -> None:
        """Refuses a sliding window that a family does not pass to its attention function: it would silently not slide."""
        size = getattr(text_config, "sliding_window", None)
        if not getattr(text_config, "use_sliding_window", True):
            size = None
        kinds = getattr(text_config, "layer_types", None)
        for layer, seen in windows.items():
            slides = kinds[layer] == "sliding_attention" if kinds else bool(size)
            expected = size if slides else None
            if expected and seen != expected and self.max_total_tokens > expected:
                raise ModelError(
                    f"this {kind} model slides its attention over {expected} positions in a way that cannot be served yet; "
                    f"give --max-total-tokens {expected} or less"
                )
