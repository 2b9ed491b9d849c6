"""Decoder-only models of `transformers` in plain PyTorch, on a CPU or a CUDA GPU, as static batches.

`TorchModel` runs transformers' forward with an attention function over a slot cache. It serves what OpenVINO
cannot convert. Written for transformers 5."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config import Config
from manifest import Manifest
from models.accuracy import find_fault
from models.adapters import Adapters, common_name, configured
from models.base import Chunk, StaticBatchModel
from models.checkpoint.architecture import with_version_of_code
from models.checkpoint.pretrained import (
    VisionCheck,
    embed,
    has_experts,
    has_grid_positions,
    has_states,
    load_pretrained,
    reference_logits,
)
from models.errors import DeviceLost, ModelError, first_line, named, reported_as, warn_text_only
from models.images.encoder_cache import EncoderCache, split_ids
from models.images.grid_positions import GridPositions
from models.images.towers import make_tower
from models.states import ZERO, States

logger = logging.getLogger("model")

STATIC_BATCH = "static_batch"  # the name of an attention function of transformers
# Sizes of the comparison with transformers at startup.
SAMPLE_TOKENS = 12
SAMPLE_CHUNK = 5
SAMPLE_STEPS = 4


class _SlotCache(Cache):
    """Keys and values of all slots, [rows, kv heads, slot length, head size] a layer, and the masks of the
    current forward pass.

    A pass runs the next tokens of one slot, or a decode step. A decode step always has the same number of
    rows, row i for slot i, because the last bits of a matrix product depend on the number of its rows. Rows
    without a chunk write nothing.
    """

    def __init__(self, rows: int, slot_length: int, layers: list):
        """`layers`: those of transformers that hold recurrent states."""
        super().__init__(layers=layers)
        self.rows = rows
        self.slot_length = slot_length
        self.sliding_windows: dict[int, int | None] = {}  # by layer
        self._stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, made at the first pass

    def start(self, chunks: Sequence[Chunk], is_step: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Begins a pass: sets what `update`, `mask` and `_attend` read, and forgets the masks of the last
        pass. Returns its token ids and positions, int64 [rows, q]: in a decode step a row for each slot, else
        one row. Rows are padded with zeros to the longest chunk.

        chunks: of different slots; without `is_step` only one.
        """
        self.is_step = is_step
        self._masks: dict[int | None, torch.Tensor] = {}  # by sliding window
        self._images: torch.Tensor | None = None  # which image each token is of, [q]; 0: of none
        # The end of each slot after this pass.
        self.ends = {chunk.slot: chunk.begin + len(chunk.tokens) for chunk in chunks}
        assert max(self.ends) < self.rows and max(self.ends.values()) <= self.slot_length
        self.places = [chunk.slot for chunk in chunks] if is_step else [0]  # the row of each chunk
        # The slot and the position of each token, and where it is in this pass.
        tokens = [
            (token, chunk.slot, chunk.begin + n, row, n)
            for row, chunk in zip(self.places, chunks)
            for n, token in enumerate(chunk.tokens)
        ]
        token_ids, self._slots, self._at, self._rows, self._columns = torch.tensor(tokens, device=device).T
        # Rows shorter than those with draft tokens are padded with zeros; their output is not read.
        shape = (self.rows if is_step else 1, max(len(chunk.tokens) for chunk in chunks))
        ids, self._positions = token_ids.new_zeros(2, *shape)
        ids[self._rows, self._columns] = token_ids
        self._positions[self._rows, self._columns] = self._at
        return ids, self._positions

    def join_images(self, ids: torch.Tensor) -> None:
        """Lets the tokens of each image in this pass, ids [1, q], attend to each other. Negative ids are
        image tokens. All images are whole. Call it after `start` and before the first `mask`."""
        is_image = ids[0] < 0
        _keys, numbers = split_ids(ids[0])
        self._images = (is_image & (numbers == 0)).cumsum(0) * is_image

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Part of transformers' cache protocol: stores the keys and values of this pass, [rows, kv heads, q,
        size]. The first call for a layer allocates its store, of all slots. Returns the keys and values that
        may be attended to: those of all slots, whole, in a decode step, else the filled part of the one slot.
        These are views of the store."""
        states = (key_states, value_states)
        if layer_idx not in self._stores:
            self._stores[layer_idx] = tuple(
                _zeros((self.rows, s.shape[1], self.slot_length, s.shape[3]), s) for s in states
            )
        stores = self._stores[layer_idx]
        for store, new in zip(stores, states):
            store[self._slots, :, self._at] = new[self._rows, :, self._columns]
        if self.is_step:
            return stores
        ((slot, end),) = self.ends.items()
        return tuple(store[slot : slot + 1, :, :end] for store in stores)

    def copy(self, source: int, target: int, tokens: int) -> None:
        for stores in self._stores.values():
            for store in stores:
                store[target, :, :tokens] = store[source, :, :tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always given

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Returns what is added to the scores: 0 for the positions that a token attends to, the lowest number
        of `dtype` elsewhere; [rows, 1, q, keys]. keys: the positions of a slot in a decode step, else those
        up to the end of the chunk. A mask is made once a pass, and shared: it must not be changed.
        sliding_window: in tokens; None: there is none."""
        if sliding_window not in self._masks:
            position = self._positions[:, None, :, None]
            key = torch.arange(
                self.slot_length if self.is_step else max(self.ends.values()), device=position.device
            )
            allowed = (key <= position) & (key > position - (sliding_window or self.slot_length))
            if self._images is not None:
                same = (self._images[:, None] == self._images) & (self._images > 0)
                allowed[0, 0, :, -len(same) :] |= same
            self._masks[sliding_window] = torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)
        return self._masks[sliding_window]


def _continue_scan(state, scan, hidden_states, dt, A, B, C, z, delta_bias, **options):
    """Continues Mamba 1's `scan` of transformers, which begins with zeros, from `state`, [rows, channels,
    state size]. Returns the outputs, [rows, channels, tokens], and the last state: those of `scan` and what
    is left of `state` after each token.

    hidden_states, dt, z: [rows, channels, tokens]; A: [channels, state size]; B, C: [rows, state size,
    tokens].
    """
    found, last = scan(hidden_states, dt, A, B, C, z=z, delta_bias=delta_bias, **options)
    dt = F.softplus((dt + delta_bias[:, None].to(dt.dtype)).float())
    left = state[:, :, None] * torch.exp(A[:, None] * dt.cumsum(-1)[..., None])
    more = torch.einsum("rcts,rst->rct", left, C.float()) * F.silu(z.float())
    return found + more.to(found.dtype), last + left[:, :, -1]


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of this shape, in the dtype and on the device of `like`. On a CPU they take memory only where
    something is written."""
    zeros = torch.from_numpy(np.zeros(math.prod(shape) * like.itemsize, np.uint8))
    return zeros.to(like.device).view(like.dtype).view(shape)


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
    """Replaces transformers' attention function; its modules call it. query: [rows, heads, q, head size]; key
    and value: what the cache returned; s_aux: sinks [heads]. `attention_mask` is not used: attention is
    causal, within `sliding_window` tokens. Returns [rows, q, heads, head size] and None, in the place of
    weights. Rows without a chunk are zeros. Notes the window of the layer in the cache.

    Each row attends to the filled part of its own slot in a call of its own; of several tokens each attends
    up to itself. A batched call would pad all rows to the longest, which changes the last bits of the others.
    """
    cache = module.slot_cache
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    cache.sliding_windows[module.layer_idx] = sliding_window
    rows, heads, length, size = query.shape
    out = query.new_zeros(rows, length, heads, value.shape[-1])
    for row, end in zip(cache.places, cache.ends.values()):
        if length > 1:
            own = query[row, None]
            seen = slice(end)
            mask = cache.mask(sliding_window, query.dtype)[row, None, ..., seen]
        else:
            # Query heads that share a key head are passed as tokens of one head: keys are neither repeated
            # nor masked.
            own = query[row].reshape(1, key.shape[1], -1, size)
            seen = slice(max(0, end - (sliding_window or end)), end)
            mask = None
        kept = (key[row, None, :, seen], value[row, None, :, seen])
        attended = _scaled_dot_product(own, *kept, mask, scaling, softcap, s_aux)
        # CUDA kernels return it in another memory order.
        out[row] = attended.reshape(heads, length, -1).transpose(0, 1)
    return out, None


def _scaled_dot_product(
    query, key, value, mask, scaling: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Returns attention over all keys that `mask` leaves, [1, heads, q, head size]. query: [1, heads, q, head
    size]; key, value: [1, kv heads, keys, head size]; mask: added to the scores, None: none. softcap: scores
    become softcap * tanh(score / softcap). sinks: the score of one more key without a value, a number for
    each head, or for each head and token, in their order."""
    repeats = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=repeats > 1)
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, query.shape[1], -1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


ALL_ATTENTION_FUNCTIONS.register(STATIC_BATCH, _attend)


class TorchModel(StaticBatchModel):
    """A decoder-only model of `transformers` on a CPU or a CUDA GPU.

    The constructor loads the weights and compares the logits with transformers' own, which takes seconds to
    minutes. It raises ModelError for what cannot be served.
    """

    engine = "torch"
    supports_prompt_logits = True
    prefill_chunk = 128  # fixed boundaries: the last bits of a token's logits may depend on its chunk
    prefix_granularity = prefill_chunk
    supports_prefix_copy = True
    _grid_positions: GridPositions | None = None
    _batches_rows = True
    _mask_is_given = False
    _adapters_version = 0  # of those in `_updates`
    _cache_argument = "past_key_values"  # of transformers' forward

    def __init__(self, config: Config, folder: Path, device: str):
        """config: as `with_manifest` returns it; folder: the checkpoint; device: "cpu" or "cuda"."""
        self.device = device
        self.batch_size = self.prefix_slots = config.max_batch_size
        self.max_total_tokens = config.max_total_tokens
        self.max_input_tokens = config.max_input_tokens
        # Off unless configured: a row of several tokens is rounded differently from a row of one.
        self.verify_length = config.speculate + 1 if config.speculate else 0
        self.max_draft_rows = self.verify_length * self.batch_size
        self._model = load_pretrained(config, folder, device)
        self._kind = self._model.config.model_type
        self.vocab_size = self._model.config.get_text_config().vocab_size
        self.dtype = self.kv_cache_dtype = str(self._model.dtype).removeprefix("torch.")
        self._load_vision(Manifest.read(folder))
        random = torch.Generator().manual_seed(0)
        count = min(SAMPLE_TOKENS, self.max_input_tokens + 1)
        ids = torch.randint(0, self.vocab_size, (count,), generator=random).tolist()
        self._refusal = f"{self._kind} models are not supported on a static batch"
        self._layers: list = []  # of transformers, which hold the recurrent states of a pass
        with reported_as(with_version_of_code(self._refusal, config, folder)):
            if has_states(self._model):
                self._add_states(config)
            self._select_attention(ids)
            self._choose_batch_invariant_rows(ids)
        if config.lora_adapters or config.lora_folder:
            self._add_adapters(config, ids)

    def forward(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """Runs prompt chunks, one pass for each, or a decode step: of each slot with a live sequence one
        token, or the newest one and draft tokens. A decode step is one pass where rows are batch-invariant,
        else one a row. Extends the KV cache and the recurrent states of the slots. `chunks` are of different
        slots and of one kind.

        Returns float32 [rows, vocab] in the order of `chunks`, `Chunk.rows` of them for each. Raises
        DeviceLost if the GPU fails, KeyError for an image that is not in `encoder_cache`, and ValueError for
        a recurrent state at another position.
        """
        is_step = len(chunks[0].tokens) == 1 or any(chunk.verify for chunk in chunks)
        try:
            if self._batches_rows and is_step:
                return self._run(chunks, is_step=True)
            return np.concatenate([self._run([chunk], is_step=False) for chunk in chunks])
        except torch.AcceleratorError as error:  # every later call would fail as well
            raise DeviceLost(f"{type(error).__name__}: {first_line(error)}") from error

    @torch.inference_mode()
    def _add_states(self, config: Config) -> None:
        """Runs a token to find the recurrent states of the model. Makes their tables, [blocks, ...] for each
        state, and sets `states` and `state_bytes`. Turns the verification of draft tokens off, and logs it if
        `speculate` is set."""
        out = self._model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=True)
        (self._cache_argument,) = out.keys() & {"past_key_values", "cache_params"}
        # After this token they always have a state: that of a new sequence is zeros.
        self._layers = out[self._cache_argument].layers
        mixers = [layer for layer in self._layers if hasattr(layer, "conv_states")]
        self._recurrent = [m.recurrent_states for m in mixers if m.recurrent_states[0] is not None]
        for states in self._recurrent:
            states[0] = states[0].float()  # rounding errors would add up
        held = self._recurrent + [m.conv_states for m in mixers if m.conv_states[0] is not None]
        self.state_bytes = sum(states[0].nbytes for states in held)
        self.states = States(self.batch_size, int(config.max_snapshot_memory * 1e9) // self.state_bytes)
        self._tables = [
            (states, _zeros((self.states.count, *states[0].shape[1:]), states[0])) for states in held
        ]
        self.verify_length = self.max_draft_rows = 0
        if config.speculate:
            logger.info("--speculate has no effect here: a recurrent state does not go back")

    def _load_vision(self, manifest: Manifest) -> None:
        """Sets `vision`, `encoder_cache` and `whole_images` if the model reads images and its tower computes
        what that of transformers does. If the tower does not, or fails, a warning says so, `encoder_cache`
        stays None (`vision` may be set), and only text is served. Raises nothing for that."""
        if not manifest.reads_images:
            return
        try:
            # The tensors are shared with the model.
            self.vision = make_tower(manifest, self._model.state_dict()).to(self.device)
            check = VisionCheck(self._model, self.vision)
            fault = check.find_fault(self.vision, self.dtype)
        except Exception as error:
            logger.debug("no vision tower", exc_info=True)
            fault = named(error)
        if fault:
            warn_text_only(self._kind, fault)
        else:
            self.encoder_cache = EncoderCache(check.embeddings.shape[1])
            self.whole_images = manifest.vision_family.whole_images

    def _add_adapters(self, config: Config, ids: list[int]) -> None:
        """Loads the LoRA adapters of the settings, sets `adapters`, and hooks those layers that adapters may
        change. Runs two of `ids` in slot 0 to find the layers. Raises ModelError for an adapter that does not
        fit."""
        given, modules = configured(config)
        sizes = {}
        for name, layer in self._layers_of_every_token(ids).items():
            if modules is None or name in modules:
                sizes[name] = (layer.in_features, layer.out_features)
                layer.register_forward_hook(functools.partial(self._add_update, name))
        self.adapters = Adapters(sizes, given)

    def _layers_of_every_token(self, ids: list[int]) -> dict[str, torch.nn.Linear]:
        """Returns the linear layers that have an input [rows, q, inputs] of every token, by `common_name`:
        not experts, and not the head where the family computes the last logits alone. Runs the first two of
        `ids`, at least two, in slot 0 to find them."""
        modules = self._model.named_modules()
        names = {layer: common_name(name) for name, layer in modules if isinstance(layer, torch.nn.Linear)}
        found = {}

        def see(layer: torch.nn.Module, inputs: tuple, _output: torch.Tensor) -> None:
            if inputs[0].shape[:-1] == (1, 2):
                found[names[layer]] = layer

        hooks = [layer.register_forward_hook(see) for layer in names]
        self.forward([Chunk(0, ids[:2], 0)])
        for hook in hooks:
            hook.remove()
        return found

    def _select_adapters(self, numbers: Sequence[int]) -> None:
        """Prepares `_running`, the adapters of the next pass. Copies all adapters to the device first, if one
        was added or removed since the last pass. numbers: the number of each row's adapter; 0: none."""
        if self._adapters_version != self.adapters.version:
            self._updates = {}  # frees their memory
            self._updates = {
                name: [torch.from_numpy(array).to(self.device) for array in pair]
                for name, pair in self.adapters.weights.items()
                if pair[1].any()  # some adapter changes it
            }
            self._adapters_version = self.adapters.version
        of_row = torch.tensor(numbers, device=self.device)[:, None, None]
        self._running = [
            (slice(*self.adapters.columns_of([number])), (of_row == number).float())
            for number in sorted(set(numbers) - {0})
        ]

    def _add_update(self, name: str, _layer: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        """Is the hook of a linear layer, [rows, q, inputs] -> [rows, q, outputs]: returns `output` with the
        updates of the running adapters. A product for each adapter: with all columns in one, a library may
        sum them in another order, which changes the last bits."""
        if not self._running or name not in self._updates:
            return output
        down, up = self._updates[name]
        for columns, mask in self._running:
            narrow = inputs[0].to(down.dtype) @ down[columns].T * mask
            output = output + (narrow @ up[columns]).to(output.dtype)
        return output

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        self._cache.copy(source, target, tokens)
        if self._grid_positions:
            self._grid_positions.copy(source, target, tokens)

    @torch.inference_mode()
    def _run(self, chunks: Sequence[Chunk], is_step: bool) -> np.ndarray:
        """Runs one pass of transformers: a decode step, or one chunk. Extends the KV cache, positions and
        recurrent states of the slots. Returns float32 [rows, vocab] in the order of `chunks`, as many rows as
        each chunk has by `Chunk.rows`. Raises KeyError for an image that is not in `encoder_cache`,
        ValueError for a recurrent state at another position."""
        cache = self._cache
        if self.adapters:
            adapter_of = {chunk.slot: chunk.adapter for chunk in chunks}
            rows = range(cache.rows) if is_step else adapter_of
            self._select_adapters([adapter_of.get(row, 0) for row in rows])
        ids, positions = cache.start(chunks, is_step, self.device)
        tokens = {"input_ids": ids}
        if any(min(chunk.tokens) < 0 for chunk in chunks):  # of images
            if self.whole_images:
                cache.join_images(ids)
            arrays = self.encoder_cache.resolve(ids.flatten().cpu().numpy())
            text, embeddings, places = (torch.from_numpy(array).to(self.device) for array in arrays)
            tokens = embed(self._model, text.view(ids.shape), embeddings, places)
        if self._grid_positions:
            positions = positions.repeat(3, 1, 1)
            for row, chunk in zip(cache.places, chunks):
                found = self._grid_positions.extend(chunk.slot, chunk.tokens, chunk.begin)
                positions[:, row, : len(chunk.tokens)] = torch.from_numpy(found).to(self.device)
        with self._states_of(chunks, len(ids)) if self.states else nullcontext():
            out = self._model(
                **tokens,
                position_ids=positions,
                **{self._cache_argument: cache},
                attention_mask=cache.mask(None, self._model.dtype) if self._mask_is_given else None,
                use_cache=True,
                logits_to_keep=max(chunk.rows for chunk in chunks),
            )
        if is_step:
            logits = torch.cat([out.logits[chunk.slot, : chunk.rows] for chunk in chunks])
        else:
            logits = out.logits[0, -chunks[0].rows :]  # not every family supports logits_to_keep
        return logits.float().cpu().numpy()

    @contextmanager
    def _states_of(self, chunks: Sequence[Chunk], rows: int) -> Iterator[None]:
        """While the body runs, gives the layers copies of the states that a pass of `rows` rows begins with;
        keeps the states after it, and makes the snapshots that `chunks` ask for. Rows without a chunk get
        zeros. If the body raises, the slots of `chunks` have no state any more. Raises ValueError before the
        body for a state at another position."""
        runs = [self.states.begin(chunk.slot, chunk.begin, len(chunk.tokens)) for chunk in chunks]
        read = [ZERO] * rows
        for place, run in zip(self._cache.places, runs):
            read[place] = run.read
        for held, table in self._tables:
            held[0] = table[read]
        with self._continued_scans():
            yield
        written = [run.writes[0] for run in runs]
        for held, table in self._tables:
            table[written] = held[0][self._cache.places]
        self.states.end(runs, {chunk.slot: chunk.keep for chunk in chunks})

    @contextmanager
    def _continued_scans(self) -> Iterator[None]:
        """While the body runs, the scans of Mamba 1, which transformers begins with zeros, go on from the
        states: the function is replaced in the module of the model's class. Does nothing for models without
        it."""
        modeling = vars(sys.modules[type(self._model).__module__])
        name = "mamba_selective_scan"
        scan = modeling.get(name)
        if scan is None:
            yield
            return
        states = (held[0] for held in self._recurrent)  # in the order of the layers
        modeling[name] = lambda *given, **options: _continue_scan(next(states), scan, *given, **options)
        try:
            yield
        finally:
            modeling[name] = scan

    def _make_cache(self, rows: int) -> None:
        """Gives the model an empty cache with so many rows, and `_grid_positions` if it has such positions.
        What slots held in an earlier cache is lost, but for recurrent states."""
        self._cache = _SlotCache(rows, self.max_total_tokens, self._layers)
        if self.encoder_cache and has_grid_positions(self._model):
            self._grid_positions = GridPositions(rows, self.max_total_tokens, self.encoder_cache)
        for module in self._model.modules():
            module.slot_cache = self._cache  # for `_attend`: transformers does not pass the cache on to it

    def _select_attention(self, ids: list[int]) -> None:
        """Finds out how this family runs on a static batch. Makes the cache, and sets the model's attention
        function and `_mask_is_given`. Raises ModelError if its logits differ from those of transformers by
        more than is allowed, or for a sliding window that is not supported; errors of transformers as they
        are, if the family does not run.

        Most families use the registered attention function. Families with attention code of their own get a
        mask over all positions instead, which is correct if their scores depend only on the mask: no sliding
        window, no bias by distance. ids: a sample text, whose logits are compared in chunks and step by step.
        """
        text_config = self._model.config.get_text_config()
        expected = reference_logits(self._model, ids)
        self._model.set_attn_implementation(STATIC_BATCH)
        self._make_cache(self.batch_size)
        self.forward([Chunk(0, ids[:1], 0)])  # fills `sliding_windows`
        self._mask_is_given = not self._cache.sliding_windows and self.states is None
        windows = [getattr(text_config, name, None) for name in ("sliding_window", "window_size")]
        if self._mask_is_given and any(windows):
            raise ModelError(f"{self._refusal}: their own attention code has a sliding window")
        half = max(1, len(ids) // 2)
        ends = {0: max(half, len(ids) - SAMPLE_STEPS), self.batch_size - 1: half}  # of each slot's prompt
        prompts = {slot: [*range(0, end, SAMPLE_CHUNK), end] for slot, end in ends.items()}
        steps = {slot: range(end, end + len(ids) - ends[0] + 1) for slot, end in ends.items()}
        for borders_of in (prompts, steps):
            found, positions = self.forward_in_chunks(ids, borders_of)
            if fault := find_fault(found, expected[positions], self.dtype, has_experts(self._model)):
                raise ModelError(f"{self._refusal}: {fault}")
        self._check_sliding_windows(text_config)

    def _choose_batch_invariant_rows(self, ids: list[int]) -> None:
        """Makes the cache with the fewest rows of a decode step that are batch-invariant: a token's logits
        are bitwise equal in every slot, alone or not. If slots and up to 7 rows more are not, sets
        `_batches_rows` to False: each row runs alone, and a warning says so. Runs the first two of `ids`.

        A matrix library may use another kernel for the last rows of an odd number. In a mixture of experts
        the number of tokens of an expert varies: there each row is a pass of its own, which reads few weights
        twice.
        """
        for rows in range(self.batch_size, self.batch_size + 8):
            self._make_cache(rows)
            if self._rows_are_equal(ids[:2]):
                return
        self._batches_rows = False
        self._make_cache(self.batch_size)
        logger.warning(
            "%s: a row's rounding depends on the other rows of a batch, so each row runs alone, slower",
            self._kind,
        )

    def _rows_are_equal(self, ids: list[int]) -> bool:
        """Whether the same tokens give bitwise equal logits alone in the first slot, in all slots together,
        and alone in the last slot. Overwrites the first positions of all slots."""
        alone = [self.forward([Chunk(0, [token], position)]) for position, token in enumerate(ids)]
        return all(
            (self.forward([Chunk(slot, [token], position) for slot in slots]) == alone[position]).all()
            for slots in (range(self.batch_size), [self.batch_size - 1])
            for position, token in enumerate(ids)
        )

    def _check_sliding_windows(self, text_config) -> None:
        """Raises ModelError for a sliding window that a family does not pass to its attention function, which
        would ignore the window. Slots that are no longer than the window are no error."""
        size = getattr(text_config, "sliding_window", None)
        if not size or not getattr(text_config, "use_sliding_window", True) or self.max_total_tokens <= size:
            return
        kinds = getattr(text_config, "layer_types", None)
        for layer, seen in self._cache.sliding_windows.items():
            slides = not kinds or kinds[layer] == "sliding_attention"
            if slides and seen != size:
                raise ModelError(
                    f"the sliding attention of this {self._kind} model is not supported; "
                    f"give --max-total-tokens {size} or less"
                )
