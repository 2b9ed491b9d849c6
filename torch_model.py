"""Decoder-only models of `transformers` on a CPU or a CUDA GPU, as static batches. `TorchModel` implements StaticBatchModel.

The library's own attention is replaced by one that reads the filled part of the slots' cache. On a CPU the linear layers are
packed, and models built like Llama run in a forward of our own (`decoder.py`); on a GPU decode steps are recorded
(`cuda_graphs.py`). At boot it is seen to that the logits stay those of transformers, whichever of these a model gets. Written
for transformers 5.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config import DEFAULT_BATCH_SIZE, Config, Manifest, read_json
from cuda_graphs import RecordedSteps, lengths_for, sizes_for
from decoder import (
    Decoder,
    Int8,
    Packed,
    Step,
    attend,
    can_pack,
    can_quantize,
    in_blocks,
    multiplies_bfloat16,
    pack,
    packing_pays,
    zeros,
)
from hub import first_line
from model import ModelError, Part, parts_of, reported_as

logger = logging.getLogger("model")

ATTENTION = "static_batch"
A_LAYER = 7  # linear layers, or about as many
CHECK_TOKENS = 12
CHECK_CHUNK = 5
PREFILL_CHUNK = 128  # tokens of a prompt between two steps of the others; always the same, as last bits may depend on it
SCORE_CHUNK = 128  # tokens; the logits of 2,048 tokens at once would be 1 GB for a vocabulary of 128k


class _SlotCache(Cache):
    """Keys and values of all slots, [slots, kv heads, window, head size] a layer, made at the first pass.

    Follows transformers' cache protocol: each attention module hands in the keys and values of the tokens of this pass and
    takes back those that they may look at.
    """

    def __init__(self, slots: int, window: int):
        super().__init__(layers=[])
        self.slots = slots
        self.window = window
        self.step: Step | None = None
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx not in self._keys:
            for store, states in ((self._keys, key_states), (self._values, value_states)):
                shape = (self.slots, states.shape[1], self.window, states.shape[3])
                store[layer_idx] = zeros(shape, states.dtype, states.device)
        stores = ((self._keys[layer_idx], key_states), (self._values[layer_idx], value_states))
        return tuple(self.step.write(store[None], states.transpose(1, 2)[:, :, None])[0] for store, states in stores)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given, so nobody has to ask how many there are


_step: Step | None = None  # the pass that runs now, or ran last; a process runs one at a time


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
    """`attend` as transformers' attention modules call it. Returns [rows, q, heads, head size]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    _step.windows[module.layer_idx] = sliding_window
    return attend(_step, query, key, value, scaling, sliding_window, softcap).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


class TorchModel:
    """A decoder-only model of `transformers` on a CPU or a CUDA GPU. Implements StaticBatchModel.

    The lowest free slot should be used first: a step runs on the rows up to the highest live one.
    """

    sampling = "host"

    def __init__(self, config: Config, folder: Path, manifest: Manifest, device: str):
        self.batch_size = config.max_batch_size or DEFAULT_BATCH_SIZE
        self.max_total_tokens = config.max_total_tokens
        self.max_input_tokens = config.max_input_tokens
        self.device = device
        self._model = _load_pretrained(config, folder, device)
        text_config = self._model.config.get_text_config()
        self.vocab_size = text_config.vocab_size
        self._dtype = self._model.dtype
        self.dtype = str(self._dtype).removeprefix("torch.")
        self._cache: _SlotCache | None = None
        self._decoder: Decoder | None = None  # runs in place of both
        self.quantize: str | None = None  # how the weights are rounded by now
        self._mask_is_given = False
        self.gives_prompt_logits = False
        self._recorded: RecordedSteps | None = None
        self._held = [0] * self.batch_size  # positions that the prompts of the slots have filled so far
        ids, expected = self._reference()
        self._adopt(ids, expected, text_config, manifest.model_type)
        if config.quantize:
            self._run_in_int8(ids, expected, manifest.model_type)
        elif device == "cpu" and not self._run_faster(ids, expected):
            logger.warning("%s: packed for this CPU, it gives other logits; it runs as it is, slower", manifest.model_type)
            self._model = _load_pretrained(config, folder, device)
            self._adopt(ids, expected, text_config, manifest.model_type)
        self._check_score(ids, expected, manifest.model_type)
        if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            self._choose_threads()
        if device == "cuda":
            self._record(config, expected)

    def prefill(self, slot: int, prompt: list[int]) -> torch.Tensor:
        assert 0 <= slot < self.batch_size and 1 <= len(prompt) <= self.max_input_tokens
        for begin, end in parts_of(prompt, self.prompt_part):
            logits = self.prefill_part(Part(slot, prompt, begin, end))
        return logits

    def prefill_part(self, part: Part) -> torch.Tensor:
        slot, prompt, begin, end = part
        assert 0 <= slot < self.batch_size and 0 <= begin < end <= len(prompt) <= self.max_input_tokens
        self._held[slot] = end
        return self._run_prompt(slot, prompt[begin:end], begin, logits_to_keep=1)

    @property
    def prompt_part(self) -> int | None:
        return PREFILL_CHUNK if self.gives_prompt_logits else None  # else this family's prompts cannot be run in parts

    def score(self, slot: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        assert self.gives_prompt_logits and 0 <= slot < self.batch_size and 1 <= len(prompt) <= self.max_input_tokens
        return self._score(slot, prompt, SCORE_CHUNK)

    def _score(self, slot: int, prompt: list[int], chunk: int) -> Iterator[torch.Tensor]:
        for begin, end in parts_of(prompt, chunk):
            yield self._run_prompt(slot, prompt[begin:end], begin, logits_to_keep=0)

    def _run_prompt(self, slot: int, ids: list[int], begin: int, logits_to_keep: int) -> torch.Tensor:
        """Runs the part of a prompt that begins at position `begin`. Returns float32 [logits_to_keep, vocab]; 0: all."""
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.device)
        filled = begin + len(ids)
        positions = torch.arange(begin, filled, device=self.device)[None]
        return self._forward(tokens, Step(slice(slot, slot + 1), positions, filled), logits_to_keep)[0].cpu()

    def understudy(self) -> None:
        return None

    @property
    def most_along(self) -> int:
        return max(0, self._decoder.few - self.batch_size) if self._decoder and self.gives_prompt_logits else 0

    @torch.inference_mode()
    def decode_along(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slot, prompt, begin, end = part
        assert 1 < end - begin <= self.most_along and slot not in slots
        length, rows = in_blocks(int(positions.max()) + 1, self.max_total_tokens), int(slots[-1]) + 1
        tokens, positions = self._with_free_rows(tokens, positions, slots, rows)
        self._held[slot] = end
        ids, along = torch.tensor([prompt[begin:end]]), Step(slice(slot, slot + 1), torch.arange(begin, end)[None], end)
        step = Step(slice(0, rows), positions[:, None], length)
        logits = self._decoder.both(tokens[:, None], step, ids, along).float()
        return logits[slots], logits[-1:]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        longest, rows = int(positions.max()) + 1, int(slots[-1]) + 1
        assert longest <= self.max_total_tokens and rows <= self.batch_size
        # Kernels for a single row add up in another order: a text alone would differ in its last bits from one in company.
        rows = min(max(rows, 2), self.batch_size)
        recorded = self._recorded.rows_for(rows) if self._recorded else None
        rows = recorded or rows
        tokens, positions = self._with_free_rows(tokens, positions, slots, rows)
        if recorded:
            logits = self._recorded(tokens, positions, longest).cpu()
        else:
            length = in_blocks(longest, self.max_total_tokens)
            logits = self._step(tokens[:, None].to(self.device), positions[:, None].to(self.device), length).cpu()
        return logits[slots] if len(slots) < rows else logits

    def _with_free_rows(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all the first rows: those that are free run too, on token 0 where a prompt that is run in parts goes on. Its next
        part overwrites that."""
        if len(slots) == rows:
            return tokens, positions
        of_rows = torch.tensor([[0] * rows, self._held[:rows]])
        of_rows[:, slots] = torch.stack((tokens, positions))
        return of_rows[0], of_rows[1]

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """The first rows' next logits: int64 [rows, 1] each, looking at so much of the window → float32 [rows, vocab]."""
        return self._forward(tokens, Step(slice(0, len(tokens)), positions, length), logits_to_keep=1)[:, 0]

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, step: Step, logits_to_keep: int) -> torch.Tensor:
        """tokens: int64 [rows, q] → float32 [rows, logits_to_keep, vocab], the logits after the last of them; 0: all."""
        if self._decoder:
            return self._decoder(tokens, step, logits_to_keep).float()
        global _step
        _step = self._cache.step = step
        out = self._model(
            input_ids=tokens,
            position_ids=step.positions,
            past_key_values=self._cache,
            attention_mask=step.additive_mask(None, self._dtype) if self._mask_is_given else None,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return out.logits[:, -logits_to_keep:].float()  # not every family knows logits_to_keep

    def _adopt(self, ids: list[int], expected: torch.Tensor, text_config, model_type: str) -> None:
        """Finds out how this family works on a static batch, or raises ModelError.

        Most families hand their queries to our attention. Those with an attention of their own get a mask instead, which
        serves them as long as it depends on nothing but the mask: no window, no bias by distance.
        """
        self._cache, self._decoder = _SlotCache(self.batch_size, self.max_total_tokens), None
        with reported_as(f"{model_type} models cannot be served on a static batch"):
            self._model.set_attn_implementation(ATTENTION)
            error = self._compare(ids, expected)
            windows = self._cache.step.windows
            if windows and error <= self._tolerance(expected):
                return self._check_windows(text_config, model_type, windows)
            has_window = any(getattr(text_config, name, None) for name in ("sliding_window", "window_size"))
            if not windows and not has_window:
                self._mask_is_given = True
                error = self._compare(ids, expected)
                if error <= self._tolerance(expected):
                    return
        raise ModelError(
            f"{model_type} models cannot be served on a static batch: their logits would differ from transformers' own by "
            f"{error:.2g} (of {expected.abs().max():.2g}), because they keep positions, masks or state in a way that slots "
            "cannot share"
        )

    def _run_faster(self, ids: list[int], expected: torch.Tensor) -> bool:
        """Packs the linear layers for this CPU, and takes the flat forward if the model is built like Llama. Returns whether
        the logits are still right; if they are not, the model has to be loaded again."""
        packs = can_pack(self._dtype)
        if packs and self.batch_size == 1:  # a row that never has company may be computed as a single row
            linears = [module.weight.detach() for module in self._model.modules() if type(module) is torch.nn.Linear]
            packs = packing_pays(linears[:A_LAYER] + linears[-1:])
        is_flat = self._run_flat(ids, expected)
        if packs and is_flat:
            self._decoder.lay_out(Packed)
        elif packs:
            pack(self._model)
        return self._compare(ids, expected) <= self._tolerance(expected)

    def _run_flat(self, ids: list[int], expected: torch.Tensor) -> bool:
        """Takes the flat forward in the place of transformers' if it gives the same logits. Returns whether it does."""
        if self._mask_is_given or not Decoder.suits(self._model):
            return False
        windows, far = self._cache.step.windows, self._run_far(ids)
        self._cache = None  # the decoder has its own, as large
        self._decoder = Decoder(self._model, self.batch_size, self.max_total_tokens, windows)
        error, far_error = self._compare(ids, expected), (self._run_far(ids) - far).abs().max().item()
        if error <= self._tolerance(expected) and far_error <= self._tolerance(far):
            self._model = None
            gc.collect()  # so that nobody else has the weights that packing a layer lets go of
            return True
        # Built like Llama to look at: Granite, Ministral 3.
        self._decoder, self._cache = None, _SlotCache(self.batch_size, self.max_total_tokens)
        return False

    def _run_in_int8(self, ids: list[int], expected: torch.Tensor, model_type: str) -> None:
        """Rounds the weights to int8. Raises ModelError where that cannot be done, or changes too much."""
        setting = "--quantize int8 (QUANTIZE)"
        if not can_quantize(self._dtype):
            raise ModelError(f"{setting}: torch has no int8 kernels for {self.dtype} on this CPU; none would work")
        if not self._run_flat(ids, expected):
            raise ModelError(f"{setting}: on a CPU it is for models built like Llama, not for {model_type}; none would work")
        self._decoder.lay_out(Int8)
        self.quantize = "int8"
        error, largest = self._compare(ids, expected), expected.abs().max().item()
        if error > self._tolerance(expected):
            raise ModelError(
                f"{setting}: the logits of this {model_type} model would differ by {error:.2g} (of {largest:.2g}); "
                "none would work"
            )
        logger.info("int8 changes the logits of a few random tokens by up to %.2g (of %.2g)", error, largest)

    def _record(self, config: Config, expected: torch.Tensor) -> None:
        """Records decode steps as CUDA graphs. A model whose steps cannot be recorded is served without."""
        sizes = sizes_for(self.batch_size, config.cuda_graphs)
        if not sizes:
            return
        began_at, lengths = time.perf_counter(), lengths_for(self.max_total_tokens)
        try:
            self._recorded = RecordedSteps(self._step, sizes, lengths, self.vocab_size, self.device, self._tolerance(expected))
        except Exception as error:
            logger.debug("recording failed", exc_info=True)
            why = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("This model's steps cannot be recorded as CUDA graphs (%s); it runs as it is, slower", why)
            return
        took_s = time.perf_counter() - began_at
        logger.info("Recorded %d CUDA graphs, of up to %d rows, in %.1f s", len(self._recorded), sizes[-1], took_s)

    def _choose_threads(self) -> None:
        """Takes the number of threads whose steps are shortest on this machine as it is now.

        More is not better for a small model, nor where other processes (our own web processes among them) need the cores:
        OpenMP's threads spin while they wait for each other, and a step can take ten times as long.
        """
        everything = torch.get_num_threads()
        taken = {}
        for threads in sorted({1, max(1, everything // 2), everything}):
            torch.set_num_threads(threads)
            taken[threads] = self._step_time()
        best = min(taken, key=taken.get)
        torch.set_num_threads(best)
        logger.info("%d of %d threads: a step of %d slots takes %.1f ms", best, everything, self.batch_size, taken[best] * 1e3)

    def _step_time(self) -> float:
        """The median of a few full steps, in seconds."""
        slots = torch.arange(self.batch_size)
        times: list[float] = []
        while len(times) < 6 and sum(times) < 1.0:
            started_at = time.perf_counter()
            self.decode(torch.zeros_like(slots), torch.zeros_like(slots), slots)
            times.append(time.perf_counter() - started_at)
        return statistics.median(times[1:] or times)

    def _tolerance(self, expected: torch.Tensor) -> float:
        relative = 0.25 if self.quantize else 1e-3 if self._dtype == torch.float32 else 0.05
        return relative * max(1.0, expected.abs().max().item())

    def _reference(self) -> tuple[list[int], torch.Tensor]:
        """A few token ids, and transformers' own logits after each of them: float32 [tokens, vocab]."""
        n = min(CHECK_TOKENS, self.max_input_tokens + 1)
        ids = torch.randint(0, self.vocab_size, (n,), generator=torch.Generator().manual_seed(0)).tolist()
        with torch.inference_mode(), reported_as(f"{self._model.config.model_type} models cannot be served on a static batch"):
            out = self._model(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
        return ids, out.logits[0].float().cpu()

    def _compare(self, ids: list[int], expected: torch.Tensor) -> float:
        """Runs `ids` through two slots at different positions. Returns the largest difference to the `expected` logits."""
        long, short, last = len(ids) - 1, max(1, len(ids) // 2), self.batch_size - 1
        found, wanted = [*self.prefill(last, ids[:short])], [expected[short - 1]]
        live = [(ids[short], short, last)]
        if last > 0:
            found += self.prefill(0, ids[:long])
            wanted += [expected[long - 1]]
            live.insert(0, (ids[long], long, 0))
        found += self.decode(*torch.tensor(live).T)
        wanted += [expected[position] for _token, position, _slot in live]
        error = (torch.stack(found) - torch.stack(wanted)).abs().max().item()
        return error if error == error else float("inf")

    def _run_far(self, ids: list[int]) -> torch.Tensor:
        """The logits of a prompt whose tokens are told that they stand at the window's end: float32 [tokens, vocab]. What a
        family does to texts beyond some length shows in them."""
        tokens = torch.tensor([ids], device=self.device)
        positions = torch.arange(self.max_total_tokens - len(ids), self.max_total_tokens, device=self.device)[None]
        return self._forward(tokens, Step(slice(0, 1), positions, len(ids)), logits_to_keep=0)[0].cpu()

    def _check_score(self, ids: list[int], expected: torch.Tensor, model_type: str) -> None:
        """A family that can only run a prompt as a whole is served, too, but gives no log-probabilities of prompts."""
        prompt = ids[:-1]
        try:
            found = torch.cat(list(self._score(self.batch_size - 1, prompt, CHECK_CHUNK)))
            error = (found - expected[: len(prompt)]).abs().max().item()
        except Exception:
            logger.debug("scoring failed", exc_info=True)
            error = float("nan")
        self.gives_prompt_logits = error <= self._tolerance(expected)
        if not self.gives_prompt_logits:
            logger.warning("%s models cannot run a prompt in parts: no log-probabilities of prompts", model_type)

    def _check_windows(self, text_config, model_type: str, windows: dict[int, int | None]) -> None:
        """A sliding window that a family does not tell to its attention function would silently not slide."""
        size = getattr(text_config, "sliding_window", None)
        if not getattr(text_config, "use_sliding_window", True):
            size = None
        kinds = getattr(text_config, "layer_types", None)
        for layer, seen in windows.items():
            slides = kinds[layer] == "sliding_attention" if kinds else bool(size)
            expected = size if slides else None
            if expected and seen != expected and self.max_total_tokens > expected:
                raise ModelError(
                    f"this {model_type} model slides its attention over {expected} positions in a way that cannot be served "
                    f"yet; give --max-total-tokens {expected} or less"
                )


def _load_pretrained(config: Config, folder: Path, device: str) -> torch.nn.Module:
    told = read_json(folder / "config.json", required=True)
    if told["model_type"] not in transformers.CONFIG_MAPPING and "auto_map" in told and not config.trust_remote_code:
        raise ModelError(
            f"{told['model_type']} models come with Python code of their own; --trust-remote-code (TRUST_REMOTE_CODE) runs it"
        )
    with reported_as(f"{folder} cannot be read as a model"):
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    _refuse_what_cannot_work(config, hf_config)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no weights (*.safetensors)")
    dtype = config.dtype
    if dtype == "auto" and device == "cpu":  # what the CPU does not multiply itself is slower there than float32
        is_bfloat16 = str(hf_config.get_text_config().dtype).endswith("bfloat16")
        is_demo = config.is_demo  # which says the same on every machine
        dtype = "bfloat16" if is_bfloat16 and multiplies_bfloat16() and not is_demo else "float32"
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with reported_as(f"{folder} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    absent = sorted(report["missing_keys"])
    if absent:  # transformers would fill them with random numbers
        raise ModelError(f"{folder} lacks {len(absent)} of its weights, {absent[0]} among them")
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelError(f"{folder} holds {name} in the shape {list(found)}, where its config.json asks for {list(expected)}")
    return model.to(device).eval()


def _refuse_what_cannot_work(config: Config, hf_config) -> None:
    kind, text_config = hf_config.model_type, hf_config.get_text_config()
    known = type(hf_config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(
        hf_config, "auto_map", {}
    )
    if hf_config.is_encoder_decoder or not known:
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
