"""Static-batch models on Inferentia2 and Trainium, through transformers-neuronx 0.13. Implements StaticBatchModel.

All shapes are fixed when the model is compiled: slots, prompt buckets, position buckets. What the library asks for and does
not check (a live slot that a step does not name, a prompt of one token, positions, dtypes) is seen to here, so that no caller
can break it. Knows no requests; of sampling only what the device does itself. The library is imported when a model is made,
never before.

Source of the library's rules: its public code at 0.13.322, and AWS' developer guide for continuous batching.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from config import DEFAULT_BATCH_SIZE, DEVICE_TOP_K, Config, Manifest, read_json
from model import DeviceLost, ModelError, reported_as

logger = logging.getLogger("model")

PROGRESS_S = 30.0  # how often a long compilation says that it is still at it


@dataclass(frozen=True)
class Family:
    """How the library serves one kind of model. Without `batches` it runs one request at a time, and without `has_prefill`
    even a prompt goes token by token; with `samples` the device can choose the tokens."""

    name: str
    batches: bool = False
    has_prefill: bool = True
    samples: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of NeuronConfig


FAMILIES = {
    "llama": Family("LlamaForSampling", batches=True, samples=True, options={"attention_layout": "BSH", "fuse_qkv": True}),
    "mistral": Family("MistralForSampling", batches=True, samples=True, options={"fuse_qkv": True}),
    "mixtral": Family("MixtralForSampling", batches=True),
    "gpt2": Family("GPT2ForSamplingWithContextBroadcasting"),
    "opt": Family("OPTForSampling"),
    "bloom": Family("BloomForSampling"),
    "gpt_neox": Family("GPTNeoXForSampling", has_prefill=False),
}
AMP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

# What the runtime and the compiler say, and what it means to a person. The first that occurs counts.
MEANINGS = (
    ("not available", "the cores are held by another process (neuron-ls shows which); stop it, or set NEURON_RT_VISIBLE_CORES"),
    ("Allocation Failure", "the device has too little memory for this model; lower --max-batch-size or --max-total-tokens"),
    ("status=4", "the device has too little memory for this model; lower --max-batch-size or --max-total-tokens"),
    ("status=2", "this tp_degree does not work on this machine; give another with --tp-degree (HF_NUM_CORES)"),
    ("Driver version", "there is no Neuron driver on this machine (aws-neuronx-dkms on the host)"),
    ("could not be initialized", "no Neuron device can be used here; in a container pass it with --device=/dev/neuron0"),
    ("No neuron device", "no Neuron device can be used here; in a container pass it with --device=/dev/neuron0"),
    (
        "terminated abruptly",
        "the compiler ran out of the machine's memory; give --compile-workers 1, or a larger machine",
    ),
)


def explain(error: BaseException) -> str:
    """The library's words, and what they mean where that is known; one line."""
    lines = str(error).strip().splitlines()
    told = ": ".join([type(error).__name__, *(line.strip() for line in lines[:1])])
    return next((f"{meaning} ({told})" for words, meaning in MEANINGS if words.lower() in str(error).lower()), told)


class NeuronModel:
    """A model on NeuronCores. One call at a time, from the thread that made it."""

    device = "neuron"
    gives_prompt_logits = False

    def __init__(self, config: Config, folder: Path, manifest: Manifest, work_dir: Path):
        """`work_dir` is a folder of this run, in which the checkpoint is laid out as the library can read it.

        Raises ModelError for what cannot be served, with the reason.
        """
        told = read_json(folder / "config.json", required=True)
        family = _family(manifest.model_type)
        self.batch_size = _slots(config, manifest.model_type, family)
        self.max_input_tokens, self.max_total_tokens = config.max_input_tokens, config.max_total_tokens
        self.vocab_size = told["vocab_size"]
        legacy = legacy_config(told)
        self.dtype = config.dtype if config.dtype != "auto" else legacy.get("torch_dtype") or "bfloat16"
        _check(legacy, manifest.model_type, self.max_total_tokens)
        tp_degree = _tp_degree(config)
        self.sampling = _sampling(config, manifest.model_type, family)
        self._batches = family.batches
        self._filled: list[int | None] = [None] * self.batch_size  # positions that each slot holds; None: it is free
        library = _library()
        self._lines = DeviceSampling(library, self.batch_size, self.vocab_size) if self.sampling == "device" else None
        view = lay_out(folder, legacy, work_dir / "checkpoint")
        with reported_as(f"{manifest.model_type} cannot be built for Neuron", explain):
            self._model = getattr(library, family.name).from_pretrained(
                str(view),
                batch_size=self.batch_size,
                **self._lengths(config, family),
                tp_degree=tp_degree,
                amp=AMP[self.dtype],
                neuron_config=_neuron_config(library, config, family, self.batch_size, AMP[self.dtype], self._lines),
            )
            if family.batches:
                _check_rope(self._model, legacy)
        with reported_as("the model cannot be brought onto the device", explain), _progress():
            self._model.to_neuron()

    def _lengths(self, config: Config, family: Family) -> dict[str, Any]:
        """What programs are compiled for. The families that do not batch take single numbers."""
        positions = buckets(config.position_buckets, self.max_total_tokens, "--position-buckets")
        prompts = buckets(config.prefill_buckets, self.max_input_tokens, "--prefill-buckets")
        if family.batches:
            return {"n_positions": positions, "context_length_estimate": prompts}
        return {"n_positions": positions[-1]} | ({"context_length_estimate": prompts[-1]} if family.has_prefill else {})

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        assert self._lines is not None and 0 <= slot < self.batch_size
        if self._lines.change(slot, top_k, top_p, temperature):
            try:
                self._model.update_generation_config(self._lines.config())
            except Exception as error:
                raise DeviceLost(explain(error)) from error

    def prefill(self, slot: int, prompt: list[int]) -> torch.Tensor:
        assert 0 <= slot < self.batch_size and 1 <= len(prompt) <= self.max_input_tokens
        # A prompt of one token would be taken for a decode step, which damages every other slot.
        ids, positions = (prompt, range(len(prompt))) if len(prompt) > 1 or not self._batches else ([*prompt, 0], (0, 0))
        output = self._run(torch.tensor([ids]), torch.tensor([list(positions)]), torch.tensor([slot]))
        self._filled[slot] = len(prompt)
        return output[0]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        named = slots.tolist()
        assert named == sorted(set(named)) and named, "slots are named once, ascending"
        for slot, position in zip(named, positions.tolist()):
            assert position == self._filled[slot] < self.max_total_tokens, f"slot {slot} holds {self._filled[slot]} positions"
        # The library writes over the first position of each slot that is not named: it is lost from here on.
        self._filled = [filled if slot in named else None for slot, filled in enumerate(self._filled)]
        output = self._run(tokens[:, None], positions[:, None], slots)
        for slot in named:
            self._filled[slot] += 1
        return output

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n, q], [n, q], [n] → float32 [n, vocab], or int64 [n] where the device samples. After an error of the runtime
        nothing works until a restart."""
        try:
            with torch.inference_mode():
                if not self._batches:  # all rows share a position, which a prompt does not name
                    positions, slots = None if ids.shape[1] > 1 else positions[0], torch.zeros(1, dtype=torch.int64)
                output = self._model(ids, positions, slots)
        except Exception as error:
            raise DeviceLost(explain(error)) from error
        if self._lines is not None:
            return output[:, 0].long()  # they come as int32, and the next step's must have the dtype of its positions
        return output[:, : self.vocab_size].float()


class DeviceSampling:
    """What the device samples with: top_k, top_p and temperature of each slot.

    It is done in the model's own dtype, among the DEVICE_TOP_K likeliest at most. A filtered token gets a logit of -30000
    there, whatever the temperature made of the others: that limits how low it may be, and float16 how high.
    """

    GREEDY = (1, 1.0, 1.0)
    LOWEST, HIGHEST = 0.01, 10000.0  # temperatures: what is beyond is the likeliest token, and chance

    def __init__(self, library, slots: int, vocab_size: int):
        self._library = library
        self._most = min(DEVICE_TOP_K, vocab_size)
        self._lines = [self.GREEDY] * slots

    def change(self, slot: int, top_k: int, top_p: float, temperature: float) -> bool:
        """Notes what a slot samples with. Returns whether that is new: to tell the device costs time."""
        line = (min(top_k or self._most, self._most), top_p, min(temperature, self.HIGHEST))
        if top_k == 1 or temperature < self.LOWEST:
            line = self.GREEDY
        is_new = line != self._lines[slot]
        self._lines[slot] = line
        return is_new

    def config(self):
        """Made anew each time, because the library writes into the one that it is given."""
        top_k, top_p, temperature = map(list, zip(*self._lines))
        return self._library.GenerationConfig(
            do_sample=True,
            dynamic=True,
            per_batch_line=True,
            global_top_k=self._most,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
        )


def buckets(given: Sequence[int] | None, limit: int, flag: str) -> list[int]:
    """The lengths that programs are compiled for: `given`, or powers of two from 128; always up to `limit`.

    A longer prompt or text runs in the smallest that holds it. Raises ModelError for buckets beyond the limit.
    """
    if given is None:
        given = [128 << n for n in range(limit.bit_length()) if 128 << n < limit]
    if given and max(given) > limit:
        raise ModelError(f"{flag} {max(given)}: more than the {limit} tokens that there can be; leave it out")
    return sorted({*given, limit})


def legacy_config(told: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` as transformers 4 wrote it. transformers 5 moved the rotary base and the dtype to other names, which the
    library does not read: it would go on with its defaults, without a word, and talk nonsense."""
    legacy = dict(told)
    rope = legacy.pop("rope_parameters", None)
    if rope is not None:
        if any(isinstance(value, dict) for value in rope.values()):
            raise ModelError("a model with other rotary positions in some of its layers cannot be served on Neuron")
        rope = dict(rope)
        legacy["rope_theta"] = rope.pop("rope_theta", legacy.get("rope_theta", 10000.0))
        scaled = rope.get("rope_type", "default") != "default"
        legacy["rope_scaling"] = rope | {"type": rope["rope_type"]} if scaled else None
    if "dtype" in legacy:
        legacy["torch_dtype"] = legacy.pop("dtype")
    return legacy


def lay_out(folder: Path, legacy: dict[str, Any], target: Path) -> Path:
    """A folder with the files of `folder` and `legacy` for its config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.resolve().iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    (target / "config.json").write_text(json.dumps(legacy, indent=1))
    return target


def _family(model_type: str) -> Family:
    if model_type == "gptj":
        raise ModelError("transformers-neuronx computes gptj models wrongly after their first token, so they are not served")
    if model_type not in FAMILIES:
        raise ModelError(f"transformers-neuronx has no {model_type} models; it has {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _slots(config: Config, model_type: str, family: Family) -> int:
    wanted = config.max_batch_size
    if wanted is not None and wanted > 1 and not family.batches:
        raise ModelError(
            f"--max-batch-size {wanted} (MAX_BATCH_SIZE): {model_type} models run one request at a time on Neuron; give 1"
        )
    return wanted or (DEFAULT_BATCH_SIZE if family.batches else 1)


def _sampling(config: Config, model_type: str, family: Family) -> str:
    if config.sampling == "device" and not family.samples:
        raise ModelError(
            f"--sampling device (SAMPLING): transformers-neuronx cannot do that for {model_type} models; give SAMPLING=host"
        )
    return config.sampling or "host"


def _check(legacy: dict[str, Any], model_type: str, max_total_tokens: int) -> None:
    """What the library would compute wrongly, or refuse in words for its authors."""
    heads, hidden = legacy.get("num_attention_heads"), legacy.get("hidden_size")
    if legacy.get("head_dim") and heads and hidden and legacy["head_dim"] != hidden // heads:
        raise ModelError(
            f"this {model_type} model has heads of {legacy['head_dim']}; only {hidden // heads} can be served on Neuron"
        )
    if legacy.get("attention_bias") and FAMILIES[model_type].batches:
        raise ModelError(f"this {model_type} model has biases in its attention, which transformers-neuronx leaves out")
    scaling = legacy.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"this {model_type} model stretches its positions ({kind}), which cannot be served on Neuron")
    window = legacy.get("sliding_window") if model_type == "mistral" else None
    if window and max_total_tokens > window:
        raise ModelError(
            f"--max-total-tokens {max_total_tokens} (MAX_TOTAL_TOKENS): this model slides its attention over {window} "
            f"positions, which slots on Neuron cannot; give at most {window}"
        )


def _check_rope(model, legacy: dict[str, Any]) -> None:
    found, expected = getattr(model.config, "rope_theta", None), legacy.get("rope_theta")
    if expected is not None and found != expected:
        raise ModelError(f"the library reads rope_theta {found} where config.json says {expected}; it needs transformers 4")


def _tp_degree(config: Config) -> int:
    """Cores that the model is spread over. The runtime takes no more of them, unless somebody said which it may take."""
    visible = _visible_cores(os.environ.get("NEURON_RT_VISIBLE_CORES", ""))
    chips = len(list(Path("/dev").glob("neuron[0-9]*")))
    tp_degree = config.tp_degree or visible or 2 * chips or 1
    if visible and tp_degree > visible:
        raise ModelError(
            f"--tp-degree {tp_degree} (HF_NUM_CORES) needs more cores than the {visible} of NEURON_RT_VISIBLE_CORES "
            f"{os.environ['NEURON_RT_VISIBLE_CORES']}; give at most {visible}"
        )
    if not visible:
        os.environ.setdefault("NEURON_RT_NUM_CORES", str(tp_degree))
    return tp_degree


def _visible_cores(text: str) -> int:
    """How many cores NEURON_RT_VISIBLE_CORES names: `3`, `0-3`, `0,1,4-7`; 0 when it is not set."""
    count = 0
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise ModelError(f"NEURON_RT_VISIBLE_CORES {text!r} is no list of cores such as 0-3")
        count += int(last or first) - int(first) + 1
    return count


def _library():
    try:
        import transformers_neuronx
    except ImportError as error:
        raise ModelError(
            f"--device neuron needs transformers-neuronx, which the Neuron SDK brings up to 2.25.0 ({error}); use the image"
        ) from None
    return transformers_neuronx


def _neuron_config(library, config: Config, family: Family, slots: int, amp: str, lines: DeviceSampling | None):
    options = dict(family.options)
    if lines is not None:
        options["on_device_generation"] = lines.config()
    if family.batches:
        options["continuous_batching"] = library.ContinuousBatchingConfig(batch_size_for_shared_caches=slots)
    if config.quantize == "int8":
        options["quant"] = library.QuantizationConfig(quant_dtype="s8", dequant_dtype=amp)
    if config.compile_workers:
        options["compilation_worker_count"] = config.compile_workers
    return library.NeuronConfig(**options)


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Compiling may take an hour; the log says so now and then."""
    done, started_at = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            logger.info("Still compiling or loading programs after %.0f s", time.monotonic() - started_at)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
