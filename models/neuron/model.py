"""Static-batch models on Inferentia2 and Trainium: `NeuronModel` runs what `neuron/build.py` compiled or
loaded.

transformers-neuronx does not check several of its own rules (every live slot in every step, prompts of one
token, positions, dtypes); `NeuronModel.forward` keeps them (source: its public code at 0.13.322)."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config import DEVICE_TOP_K
from models.base import Announce, Chunk, Logits, SampledIds, StaticBatchModel
from models.errors import DeviceLost, ModelError, named, warn_text_only
from models.images.encoder_cache import EncoderCache, split_ids
from models.images.towers import make_tower, read_tensors
from models.neuron.build import (
    CHUNKS,
    DRAFTS,
    GREEDY,
    HYBRID,
    BuildPlan,
    Part,
    explain,
    generation_config,
    is_device_error,
    load_model,
)
from models.states import States

logger = logging.getLogger("model")

# Limits of the temperature on the device: below is greedy, above makes no difference.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 10000.0
# Largest difference between the logits of a prompt run in chunks and run whole, as a share of their range.
CHUNK_TOLERANCE = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.05}


class NeuronModel(StaticBatchModel):
    """A model on NeuronCores. One call at a time, from the thread that made it.

    Where `prefill_chunk` is set, a chunk at position 0 runs in the graph for whole prompts, and later chunks
    in a graph for one slot and `prefill_chunk` tokens. The two graphs round differently, so a prompt that
    continues a cached prefix has the same logits up to rounding. transformers-neuronx has the second graph
    for speculation: its graph of "window contexts" computes a chunk for every slot, with 32 slots 30 times
    the operations. Decode steps of other slots then leave a prompt between its chunks, and the tokens in free
    slots, as they are.
    """

    engine = "neuron"

    def __init__(self, build: BuildPlan, work_dir: Path, announce: Announce = lambda phase: None):
        """Loads or compiles the model, then checks it on the device with short prompts; compiling takes
        minutes. A part that does not compile, load or pass its check is left out, with a warning: sampling on
        the device, chunked prefill unless layers are recurrent, draft tokens, images.

        work_dir: a folder of this run. `announce` is called with "compiling" before anything is compiled.
        Raises ModelError or ConfigError with the reason for what cannot be served, DeviceLost if a whole
        prompt fails.
        """
        self._model, build = load_model(build, work_dir, announce)
        config = build.config
        compiled_config = build.compiled_config
        self.batch_size = self.prefix_slots = config.max_batch_size
        self.max_input_tokens = config.max_input_tokens
        self.max_total_tokens = config.max_total_tokens
        self.vocab_size = build.family.vocab
        self.dtype = compiled_config.dtype
        self.kv_cache_dtype = compiled_config.kv_cache_dtype or self.dtype
        self.quantize = compiled_config.quantize
        self._has_experts = build.family.experts is not None
        self.sampling = compiled_config.sampling
        self._position_buckets = compiled_config.position_buckets
        self._rows = compiled_config.batch_size  # of graphs for all slots, which may be more than are used
        self._slot_sampling = [GREEDY] * self._rows
        self._returns_ids = self.sampling == "device"
        self._held: dict[int, list[int]] = collections.defaultdict(list)  # slot → the tokens in its KV cache
        self._drafts: dict[int, Sequence[int]] = {}  # slot → draft tokens after them, not yet accepted
        if build.family.recurrent_layers:
            self.states = States(self._rows, compiled_config.snapshots, in_place=True)
            self.state_bytes = build.family.state_bytes(compiled_config.tp_degree, self.dtype)
        if self.sampling == "hybrid" and not self._passes_check(HYBRID, self._hybrid_fault):
            self.return_token_ids(False)
            self.sampling = "host"
        is_longer = self.max_input_tokens > compiled_config.prefill_chunk > 0
        if config.prefill_chunk != 0 and (is_longer or self.states):
            self.prefill_chunk = compiled_config.prefill_chunk
        self._check_prompt(config.model_name)
        if self.prefill_chunk and not self._passes_check(CHUNKS, self._chunk_fault):
            if self.states:
                raise ModelError(f"{CHUNKS.name} is needed for the recurrent states of {config.model_name}")
            self.prefill_chunk = None
        self._verify_row = compiled_config.verify_row
        self.verify_length = compiled_config.verify_length
        if self.verify_length and not self._passes_check(DRAFTS, self._verify_fault):
            self.verify_length = 0
        self.max_draft_rows = self.verify_length * self.batch_size
        self._held.clear()
        self.prefix_granularity = 1 if self.states else self.prefill_chunk
        self.supports_prompt_logits = self.prefill_chunk is not None and self.sampling != "device"
        if build.manifest.reads_images:
            self._load_vision(build)

    def _load_vision(self, build: BuildPlan) -> None:
        """Makes the model read images: sets `vision` and `encoder_cache`, and puts a HostEmbedding in the
        place of the model's lookup of embeddings. The vision tower runs on the host, as that lookup does. If
        the tower is not supported on Neuron or cannot be loaded, a warning says why, and images are not
        read."""
        manifest = build.manifest
        if not manifest.vision_family.on_neuron:
            warn_text_only(build.config.model_name, "its images are not supported on Neuron")
            return
        try:
            tensors = read_tensors(build.checkpoint())
            self.vision = make_tower(manifest, tensors).float()
        except Exception as error:
            logger.debug("no vision tower", exc_info=True)
            warn_text_only(build.config.model_name, named(error))
            return
        self.encoder_cache = EncoderCache(build.family.hidden)
        text = self._model.chkpt_model.model
        text.embed_tokens = HostEmbedding(text.embed_tokens, self.encoder_cache, build.family.embedding_scale)

    def _passes_check(self, part: Part, find_fault: Callable[[], str | None]) -> bool:
        """Whether a part of the model passes its check at startup; if not, a warning says why. find_fault:
        runs the check, and returns what is wrong; None: nothing. A call that fails in it is a fault, too; but
        if the device itself fails, raises ModelError, which names the setting that leaves the part out."""
        try:
            fault = find_fault()
        except DeviceLost as error:
            if is_device_error(error):
                raise ModelError(
                    f"{part.name} fails on the device ({error}); give {part.setting} {part.off}"
                ) from None
            fault = str(error)
        if fault:
            logger.warning("%s is off (%s): %s", part.name, part.setting, fault)
        return not fault

    def _hybrid_fault(self) -> str | None:
        """Compares the id that the device chooses with the logits after the same prompt. Returns what is
        wrong with the id; None: nothing. The model returns logits from then on. Raises DeviceLost if a call
        fails."""
        self.return_token_ids(True)
        (token,) = self._try([1])
        self.return_token_ids(False)
        (logits,) = self._try([1])
        if not 0 <= token < self.vocab_size or logits[token] < logits.max():  # not of NaN: see _check_prompt
            return f"the device chose token {token}, not the most likely one, {logits.argmax()}"
        return None

    @property
    def _check_length(self) -> int:
        """Tokens of the prompts that run at startup: more than one chunk, if prompts may be as long."""
        return min((self.prefill_chunk or 0) * 3 // 2 + 2, self.max_input_tokens)

    def _check_prompt(self, model_name: str) -> None:
        """Runs a prompt whole, or, with recurrent states, its first chunk, before the graph of chunks is
        compared with whole prompts: an error here is not one of that graph. Raises ModelError where a logit
        after the prompt is NaN or infinite (not checked where the device returns ids alone), DeviceLost where
        the call fails."""
        prompt = ([7, 11] * self._check_length)[: self._check_length]
        if self.states:
            prompt = prompt[: self.prefill_chunk]
        output = self._try(prompt)
        if self.sampling != "device" and not np.isfinite(output).all():
            raise ModelError(
                f"{model_name} computes logits that are NaN or infinite in {self.dtype}, so it cannot "
                "generate text: its weights are damaged, or need another --dtype (DTYPE)"
            )

    def _chunk_fault(self) -> str | None:
        """Runs a prompt in chunks and whole (with recurrent states, in chunks and in halves), each time with
        a decode step after it. Returns how the results differ, for the log; None: by no more than rounding,
        or all prompts are too short to be cut. Raises DeviceLost if a call fails.

        The prompt runs in the highest slot, with a decode step of slot 0. The tokens repeat, so that the next
        one is predictable. The chunks come first, so that they cannot use the KV cache of the whole prompt.
        """
        prompt = [(37 * (n % 50) + 5) % self.vocab_size for n in range(self._check_length)]
        if len(prompt) < 3:
            return None
        chunked = self._run_at_start(prompt, [0, min(self.prefill_chunk, len(prompt) - 2)])
        others = [0, len(prompt) // 2] if self.states else [0]
        difference = self._difference(chunked, self._run_at_start(prompt, others))
        return difference and f"chunked and whole prefill give {difference}"

    def _verify_fault(self) -> str | None:
        """Verifies a draft token in the highest slot, after a prompt of one token. Returns how the results
        differ from those of two decode steps, for the log; None: by no more than rounding, or slots are too
        short for draft tokens. Raises DeviceLost if a call fails."""
        tokens = [5, 42]
        if self.max_total_tokens <= len(tokens):
            return None
        self._try([7])
        steps = [self._try([token], begin) for begin, token in enumerate(tokens, 1)]
        self._try([7])
        verified = self._try(tokens, 1, verify=True)
        difference = self._difference(verified, np.concatenate(steps))
        return difference and f"verification and decode steps give {difference}"

    def _difference(self, found: np.ndarray, expected: np.ndarray) -> str | None:
        """Returns how the results of two ways to run the same tokens differ, as a part of a log line; None:
        by no more than rounding (CHUNK_TOLERANCE). In a mixture of experts rounding swaps experts that nearly
        tie, so the result of one token may differ.

        found, expected: float32 [tokens, vocab], or ids [tokens], which have to be equal.
        """
        faults = []
        for row, wanted in zip(found, expected):
            if self._returns_ids:
                if row != wanted:
                    faults.append(f"tokens {row} and {wanted}")
                continue
            share = np.abs(row - wanted).max() / np.ptp(wanted)
            if not share <= CHUNK_TOLERANCE[self.dtype]:  # not: NaN
                faults.append(f"logits that differ by {share:.1%} of their range")
        may_differ = 1 if self._has_experts else 0
        return faults[0] if len(faults) > may_differ else None

    def _run_at_start(self, prompt: list[int], begins: list[int]) -> np.ndarray:
        """Returns the logits, float32 [2, vocab], or ids [2], after a prompt in the highest slot whose chunks
        begin at `begins`, and after one more token. After each chunk slot 0 runs a prompt and a decode step,
        if there is more than one slot. Raises DeviceLost."""
        for begin, end in zip(begins, [*begins[1:], len(prompt)]):
            output = self._try(prompt[begin:end], begin)
            if self.batch_size > 1:
                self.forward([Chunk(0, prompt[:2], 0)])
                self.forward([Chunk(0, prompt[:1], 2)])
        return np.concatenate([output, self._try(prompt[:1], len(prompt))])

    def _try(self, tokens: list[int], begin: int = 0, verify: bool = False) -> np.ndarray:
        """Runs tokens in the highest slot from position `begin` on. Returns logits, float32 [rows, vocab], or
        the sampled ids [rows]: a row for each token with `verify`, else one. Raises DeviceLost."""
        output = self.forward([Chunk(self.batch_size - 1, tokens, begin, verify=verify)])
        if isinstance(output, SampledIds):
            return output.ids
        return (output.astype(np.uint32) << 16).view(np.float32) if output.dtype == np.uint16 else output

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        """Sets how the device samples for `slot` from its next call on; does nothing if that has not changed.
        top_k: 1 samples greedily, as a temperature below MIN_TEMPERATURE does; 0 and large values mean
        DEVICE_TOP_K tokens. Raises DeviceLost if the update fails.

        The device samples in the model's own dtype, among DEVICE_TOP_K tokens at most. It gives a filtered
        token a logit of -30000 after the temperature, which bounds the temperature from below; float16 bounds
        it from above.
        """
        assert self.sampling != "host" and 0 <= slot < self.batch_size
        most = min(DEVICE_TOP_K, self.vocab_size)
        parameters = (min(top_k or most, most), top_p, min(temperature, MAX_TEMPERATURE))
        if top_k == 1 or temperature < MIN_TEMPERATURE:
            parameters = GREEDY
        if parameters == self._slot_sampling[slot]:  # an update of the device takes time
            return
        self._slot_sampling[slot] = parameters
        try:
            self._model.update_generation_config(generation_config(self._slot_sampling, self.vocab_size))
        except Exception as error:
            raise DeviceLost(explain(error)) from error

    def return_token_ids(self, ids: bool) -> None:
        """Makes `forward` return SampledIds, or logits if `ids` is false, from its next call on. Only where
        `sampling` is "hybrid"."""
        assert self.sampling == "hybrid"
        self._returns_ids = ids
        self._model.return_token_ids(ids)

    def forward(self, chunks: Sequence[Chunk]) -> Logits | SampledIds:
        """Runs the chunks, and returns what StaticBatchModel.forward does: logits, float32 or bfloat16 as
        uint16 [rows, vocab], or SampledIds. A call has one prompt or prompt chunk; or, in ascending order of
        the slots, one token of every live slot, with draft tokens behind it in chunks that `verify`.

        The position at which a chunk begins says how many draft tokens of the slot's last call were accepted.
        Logits may be a transposed view. Raises DeviceLost if the call fails, also for an image that is not in
        `encoder_cache`; ValueError for a recurrent state beyond the position. Chunks that break these rules
        fail an assertion.
        """
        lags = {}  # of each slot with a state: its last tokens that the state lacks, accepted drafts
        for chunk in chunks:
            self._commit_accepted(chunk)
            if self.states:
                lags[chunk.slot] = self._plan_state(chunk)
        first = chunks[0]
        goes_back = first.begin < max(1, len(self._held[first.slot]))
        if any(chunk.verify or lags.get(chunk.slot) for chunk in chunks):
            output = self._verify(chunks, lags)
        elif len(first.tokens) > 1 or (len(chunks) == 1 and goes_back):
            (chunk,) = chunks
            output = self._run_prompt(chunk)
        else:
            output = self._run_step(chunks)
        if self._returns_ids:
            return SampledIds(output[:, 0].long().numpy())
        if output.dtype == torch.bfloat16:
            logits = output.view(torch.int16).numpy().view(np.uint16)
        else:
            logits = output.numpy()
        return logits[:, : self.vocab_size]

    def _commit_accepted(self, chunk: Chunk) -> None:
        """Adds to the tokens that the slot of `chunk` holds the draft tokens that ran last in it, up to the
        position where the chunk begins, and drops the other drafts."""
        held = self._held[chunk.slot]
        held += self._drafts.pop(chunk.slot, ())[: max(0, chunk.begin - len(held))]

    def _plan_state(self, chunk: Chunk) -> int:
        """Records in `states` that the state of a slot goes past the tokens of a chunk that are certain, all
        but draft tokens, and the snapshot that the chunk asks for. Sets `_state_rows`, which only a call of
        this slot alone reads. This comes before the call that runs the tokens, which ends the process if it
        fails. Returns how many tokens before the chunk the state lacks."""
        slot, tokens, begin, _all_logits, verify, _adapter, keep = chunk
        lag = max(0, begin - self.states.position(slot))
        run = self.states.begin(slot, begin - lag, lag + (1 if verify else len(tokens)))
        (own,) = run.writes
        kept = self.states.end([run], {slot: keep}).get(slot, own)
        self._state_rows = ([(run.read or own) - 1], [kept - 1])  # block ZERO has no row
        return lag

    def _verify(self, chunks: Sequence[Chunk], lags: Mapping[int, int]) -> torch.Tensor:
        """Runs up to `verify_length` tokens of every live slot. Returns logits [tokens of all chunks, vocab],
        or ids [tokens of all chunks, 1]. The slot then holds the first token of its chunk; the others are
        draft tokens until the next call accepts them. The graph's row of a slot begins with the tokens that
        the state of the slot lacks; lags: how many, by slot."""
        begins = self._row_begins(chunks, self._verify_row)
        keep = [0] * self._rows
        for slot, tokens, begin, *_ in chunks:
            assert begin == len(self._held[slot]) > 0 and len(tokens) <= self.verify_length
            self._held[slot] += tokens
            lag = lags.get(slot, 0)
            begins[slot] = begin - lag
            keep[slot] = lag + 1
        starts, output = self._run_several(self._verify_row, begins, keep)
        columns = []  # of [tokens, slots]
        for slot, tokens, begin, *_ in chunks:
            place = begin - starts[slot]
            columns += [(place + n) * self._rows + slot for n in range(len(tokens))]
            self._drafts[slot] = tokens[1:]
            del self._held[slot][begin + 1 :]
        return output.transpose(0, 1).reshape(output.shape[1], -1)[:, columns].T

    def _row_begins(self, chunks: Sequence[Chunk], length: int) -> dict[int, int]:
        """Returns the position at which each slot, also a free one, begins in a call with `length` tokens of
        every slot. A slot of `chunks` begins where its chunk begins; other slots are idle.

        An idle slot runs fillers after its tokens, if the graph of this call has positions for both.
        Otherwise the slot runs its first tokens again, which gives the same keys and values up to rounding,
        and allows a short graph. The slot then begins at position 0, or, in a call with several tokens, at 1,
        as slot 0 would run a prompt at 0. A free slot begins there, too. Where layers have states, only a run
        from position 0 gives the same values: in a call with several tokens an idle slot then always runs
        fillers.
        """
        last = max(chunk.begin for chunk in chunks)
        bucket = next(size for size in self._position_buckets if size > last)
        begins = dict.fromkeys(range(self._rows), int(length > 1))
        for slot, held in self._held.items():
            if held and (len(held) + length <= bucket or (length > 1 and self.states)):
                begins[slot] = len(held)
        return begins | {chunk.slot: chunk.begin for chunk in chunks}

    def _rows_at(self, begins: dict[int, int], length: int) -> tuple[list, list, list]:
        """Returns ids and positions, `length` of each for each slot, and the slots, in the order of `begins`.
        The ids are the tokens that a slot holds from its position in `begins` on, then fillers."""
        ids = []
        for slot, begin in begins.items():
            held = self._held[slot][begin : begin + length]
            ids.append(held + [0] * (length - len(held)))
        positions = [range(begin, begin + length) for begin in begins.values()]
        return ids, positions, list(begins)

    def _run_several(
        self, length: int, begins: dict[int, int], keep: Sequence[int]
    ) -> tuple[dict[int, int], torch.Tensor]:
        """Runs `length` tokens of each slot of `begins`, from its position on. Returns where the row of each
        slot began, by slot, and logits [tokens, vocab, slots], or ids [tokens, 1, slots]. Raises DeviceLost.

        The graph has a fixed number of tokens. Fillers after the tokens that a slot holds write positions
        that are written again before anything attends to them. Near the end of a slot its row begins earlier
        than its position. keep: of each row, the number of its first tokens that change the slot's recurrent
        state.
        """
        starts = {slot: min(begin, self._position_buckets[-1] - length) for slot, begin in begins.items()}
        program = functools.partial(self._model.speculative_forward, speculation_length=length)
        output = self._call(program, *self._rows_at(starts, length), keep)
        return starts, output.T[:, None] if self._returns_ids else output

    def _run_step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Runs a decode step: one token of each slot of `chunks`, which holds that token then. Returns logits
        [len(chunks), vocab], or ids [len(chunks), 1]. transformers-neuronx allocates the logits of each call,
        as [vocab, rows]; the result is a view of them where possible."""
        slots = [chunk.slot for chunk in chunks]
        ends = [chunk.begin for chunk in chunks]
        lengths = [len(self._held[slot]) for slot in slots]
        assert sorted(set(slots)) == slots, f"slots {slots} are not ascending"
        assert ends == lengths, f"slots {slots} hold {lengths} positions, not {ends}"
        assert max(ends) < self.max_total_tokens, f"slots {slots} have no position {max(ends)}"
        assert all(len(chunk.tokens) == 1 for chunk in chunks), "a decode step has one token a slot"
        begins = self._row_begins(chunks, 1)
        for chunk in chunks:
            self._held[chunk.slot] += chunk.tokens
        keep = [int(slot in slots) for slot in begins]
        output = self._call(self._model, *self._rows_at(begins, 1), keep)
        if list(range(len(slots))) == slots:
            return output[: len(slots)]
        return output[slots]

    def _run_prompt(self, chunk: Chunk) -> torch.Tensor:
        """Runs a prompt or a prompt chunk. The slot then holds its tokens after the first `begin` that it
        held, and keeps the embeddings of its images. Returns logits [1, vocab] after the last token, with
        `all_logits` [len(tokens), vocab] after each; or ids [1, 1]."""
        slot, tokens, begin, all_logits, *_ = chunk
        held = self._held[slot]
        length = self.prefill_chunk or 0
        end = begin + len(tokens)
        assert 0 <= slot < self.batch_size and len(tokens) >= 1 and end <= self.max_input_tokens
        assert begin == 0 or len(tokens) <= length, (
            f"{len(tokens)} tokens at position {begin}, in chunks of {length}"
        )
        assert begin <= len(held), f"slot {slot} holds {len(held)} positions, not {begin}"
        held = self._held[slot] = [*held[:begin], *tokens]
        self._pin_images(slot, held)
        if begin:
            return self._extend_prefill(slot, begin if all_logits else end - 1, begin)
        ids = held[:1] if all_logits else held
        count = len(ids)
        positions = range(count)
        if count == 1:  # would run as a decode step, which damages every other slot
            ids = [*ids, 0]
            positions = [0, 0]
        output = self._call(self._model, [ids], [positions], [slot], [count])
        if count == len(held):
            return output
        return torch.cat([output, self._extend_prefill(slot, 1, 1)])

    def _pin_images(self, slot: int, held: list[int]) -> None:
        """Keeps the embeddings of the images that a slot holds, also when the request of these has ended:
        their tokens may run again, as fillers. Frees those of images that the slot held before."""
        if self.encoder_cache:
            tokens = np.array(held, np.int64)
            keys, _numbers = split_ids(tokens[tokens < 0])
            self.encoder_cache.pin(slot, set(keys.tolist()))

    def _extend_prefill(self, slot: int, first: int, begin: int) -> torch.Tensor:
        """Runs the tokens that a slot holds from position `begin` > 0 on, at most a chunk. Returns logits
        [tokens, vocab] after those from position `first` on, or ids [tokens, 1]: a copy, which is
        contiguous."""
        keep = [len(self._held[slot]) - begin]
        starts, output = self._run_several(self.prefill_chunk, {slot: begin}, keep)
        start = starts[slot]
        # A copy: a view would keep the logits of all tokens.
        return output[first - start : len(self._held[slot]) - start, :, 0].contiguous()

    def _call(self, program: Callable, ids: Any, positions: Any, slots: Any, keep: Any) -> torch.Tensor:
        """Calls `program` with ids and positions, [n, q] each, and slots, [n]; returns what
        transformers-neuronx returns. keep: of each row, the number of its first tokens that change the slot's
        recurrent state; 0: none does. Raises DeviceLost for any error, also the KeyError of HostEmbedding:
        after one of the runtime the process must be restarted."""
        if self.states:
            self._model.states = ([count - 1 for count in keep], *self._state_rows)
        # Through numpy, which is much faster than torch.tensor.
        arrays = [torch.from_numpy(np.array(rows)) for rows in (ids, positions, slots)]
        try:
            return program(*arrays)
        except Exception as error:
            raise DeviceLost(explain(error)) from error


class HostEmbedding(torch.nn.Module):
    """The table of embeddings of transformers-neuronx, and those of images from the encoder cache. `scale`:
    what the family multiplies embeddings by, which the table has already."""

    def __init__(self, table: torch.nn.Module, cache: EncoderCache, scale: float):
        super().__init__()
        self._table = table
        self._cache = cache
        self._scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [n, q, hidden] of ids, int64 [n, q], on the host and in the dtype of the
        table; negative ids are those of image tokens. Raises KeyError for an image that is not in the
        cache."""
        tokens, embeddings, places = self._cache.resolve(ids.flatten().numpy())
        embedded = self._table(torch.from_numpy(tokens))
        embedded[torch.from_numpy(places)] = torch.from_numpy(embeddings).to(embedded) * self._scale
        return embedded.unflatten(0, ids.shape)
