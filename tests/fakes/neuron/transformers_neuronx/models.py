"""The model classes: what they check, which programs they have, and what forward() does to the KV cache.

The cache is simulated as the tokens that were written into it, and logits are a function of the tokens that a row really holds,
so damage shows in the answers. Nothing is computed from the weights; a checkpoint is only looked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch

from transformers_neuronx import bucket, fake
from transformers_neuronx.config import GenerationConfig, NeuronConfig
from transformers_neuronx.constants import Layout
from transformers_neuronx.version import __version__

CHECKPOINTS = (
    ("model.safetensors", Path.is_file),
    ("model.safetensors.index.json", Path.is_file),
    ("pytorch_model.bin", Path.is_dir),  # as save_pretrained_split() makes it
    ("pytorch_model.bin", Path.is_file),
    ("pytorch_model.bin.index.json", Path.is_file),
)
BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# The names that all families have, and those of GPT-2 and its like.
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "n_positions",
}
DEFAULTS = {
    "model_type": "",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
SAMPLING = ("top_k", "top_p", "temperature", "top_p_min_tokens")


def read_config(source) -> SimpleNamespace:
    """The config of a folder or the attributes of a config object, with the names that all families have."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source, "config.json")
        if not path.is_file():
            raise OSError(f"{path} does not exist, and the fake downloads nothing")
        told = json.loads(path.read_text())
    else:
        told = dict(source.to_dict() if hasattr(source, "to_dict") else vars(source))
    for name, alias in ALIASES.items():
        if alias in told:
            told.setdefault(name, told[alias])
    config = SimpleNamespace(**DEFAULTS | told)
    if config.model_type == "mistral":
        config.sliding_window = told.get("sliding_window", 4096)
    heads = 8 if config.model_type in ("mistral", "mixtral") else config.num_attention_heads
    config.num_key_value_heads = told.get("num_key_value_heads") or heads
    config.intermediate_size = told.get("intermediate_size") or 4 * config.hidden_size
    return config


class Row:
    """The KV cache of one slot: the token that was written at each position. Past `length` it is garbage."""

    def __init__(self, positions: int):
        self.tokens = [0] * positions
        self.length = 0
        self.pads = 0  # static batching: left padding, which nothing looks at
        self.damaged_by: str | None = None

    def fill(self, tokens: list[int], length: int, pads: int = 0) -> None:
        self.tokens[: len(tokens)] = tokens
        self.length = length
        self.pads = pads
        self.damaged_by = None

    def write(self, position: int, token: int) -> None:
        if position == 0 and token == self.tokens[0] and not self.damaged_by:
            self.length = max(self.length, 1)  # the same keys and values as before
            return
        if position == 0:
            self.damaged_by = None  # a text that begins here looks at nothing older
        self.tokens[position] = token
        self.length = position + 1

    def seen_from(self, position: int) -> list[int]:
        return self.tokens[self.pads : position + 1]


class NeuronModel:
    """What all classes share.

    fake_live: slots that a test has declared live; a decode call that leaves one out is a violation at once. Without it the
    violation comes when the slot that was left out is used again.
    fake_slow_tokens: prompt tokens that went one by one, because no context program was large enough.
    """

    can_batch_continuously = True
    serializable = True

    @classmethod
    def from_pretrained(cls, pretrained_model_path, *model_args, **kwargs):
        _check_sizes(**kwargs)
        config = read_config(pretrained_model_path)
        model = cls(config, *model_args, **kwargs)
        model._check_checkpoint(Path(pretrained_model_path))
        return model

    def _setup(self, config, amp, tp_degree, batch_size, n_positions, estimate, neuron_config, unrolls, swallowed=None):
        self.config = config = read_config(config)
        self.neuron_config = neuron_config or NeuronConfig()
        self.tp_degree = tp_degree
        self.amp = amp
        if amp not in BYTES:
            raise NotImplementedError(f"amp={amp!r}")
        self.token_buckets = bucket.token_sizes(n_positions)
        self.context_buckets = bucket.context_sizes(estimate, self.token_buckets)
        self.batch_sizes = bucket.batch_sizes(batch_size)
        self._batching = self.neuron_config.continuous_batching
        self.context_batch_sizes = [1] if self._batching else self.batch_sizes
        layers = config.num_hidden_layers
        self.context_unroll, self.unroll = (unroll or layers for unroll in unrolls)
        for unroll in (self.context_unroll, self.unroll):
            if layers % unroll:
                raise ValueError(f"unroll={unroll} does not divide num_layers={layers}")
        if self.neuron_config.cache_layout == Layout.BSH:
            raise NotImplementedError("the fake does not simulate the BSH cache layout")
        config.n_positions, config.batch_size, config.amp, config.tp_degree = (n_positions, batch_size, amp, tp_degree)
        self._generation: GenerationConfig | None = self.neuron_config.on_device_generation
        self._sampling = None
        if self._generation:
            self._generation.vocab_size = config.vocab_size
        self._compiled_from: Path | None = None
        self._presharded: Path | None = None
        self._programs = self._name_programs()  # before the device's own parameters take the place of the given ones
        self._compiled = False
        self._on_device = False
        self.fake_live: set[int] = set()
        self.fake_slow_tokens = 0
        self._check_silent(swallowed or {})

    def _check_silent(self, swallowed: dict) -> None:
        """What the library takes without a word."""
        config = self.config
        if swallowed:
            fake.violate(f"{type(self).__name__} takes no {sorted(swallowed)} and swallows them")
        version = os.environ.get("FAKE_NEURON_TRANSFORMERS", "4.48.3")
        if int(version.split(".")[0]) >= 5:
            fake.violate(f"transformers {version} moves rope_theta to where the library does not look")
        rope = getattr(config, "rope_parameters", None) or {}
        theta = getattr(config, "rope_theta", 10000)
        stretched = rope.get("rope_type", "default") != "default" and not getattr(config, "rope_scaling", None)
        if stretched or rope.get("rope_theta", theta) != theta:
            fake.violate("config.json has rope_parameters, of transformers 5, which the library does not read")
        head_dim = getattr(config, "head_dim", None)
        if head_dim and head_dim != config.hidden_size // config.num_attention_heads:
            fake.violate(f"head_dim {head_dim} is not hidden_size / num_attention_heads, which is what the library takes")
        if getattr(config, "attention_bias", False):
            fake.violate("attention_bias: the library leaves the bias of query, key and value out")

    def _check_checkpoint(self, folder: Path) -> None:
        if getattr(self.config, "is_presharded_checkpoint", False):
            self._presharded = folder
        elif not any(is_there(folder / name) for name, is_there in CHECKPOINTS):
            raise FileNotFoundError(f"Can not find model.safetensors or pytorch_model.bin in {folder}")

    def _name_programs(self, speculation: tuple = ()) -> dict[str, str]:
        """The file name of each program, which any change of what is compiled changes, and its tag."""
        neuron_config = self.neuron_config.to_json()
        for of_the_host in ("compilation_worker_count", "cast_logits_dtype"):
            neuron_config.pop(of_the_host)
        generation = neuron_config["on_device_generation"]
        if generation and generation["dynamic"]:
            for name in SAMPLING:
                generation.pop(name)
        config = {name: value for name, value in vars(self.config).items() if not name.startswith("_")}
        config.pop("is_presharded_checkpoint", None)
        same = [type(self).__name__, config, self.token_buckets, self.tp_degree, self.amp, neuron_config]
        same += [__version__, os.environ.get("FAKE_NEURON_SDK", "2.25.0")]
        programs = [*speculation]
        programs += [("decode", self.unroll, size, batch) for size in self.token_buckets for batch in self.batch_sizes]
        contexts = [(size, batch) for size in self.context_buckets for batch in self.context_batch_sizes]
        programs += [("context", self.context_unroll, *context) for context in contexts]
        # what runs on a part of the layers leaves the logits to a program of their own
        programs += [("logits", *rest) for rest in programs if rest[1] < self.config.num_hidden_layers]
        names = {}
        for program in programs:
            text = json.dumps([same, program], sort_keys=True, default=str)
            kind = "speculation" if "speculation" in program else "context" if "context" in program else "token"
            names[hashlib.sha256(text.encode()).hexdigest()[:20] + ".neff"] = f"{kind}-seqlen{program[-2]}-batch{program[-1]}"
        return names

    def _bytes_per_core(self) -> int:
        config, width = self.config, BYTES[self.amp]
        head_dim = config.hidden_size // config.num_attention_heads
        weight_bytes = 1 if self.neuron_config.quant else width
        gated = config.model_type in ("llama", "mistral", "mixtral", "code_llama")
        attention = 2 * config.hidden_size * head_dim * (config.num_attention_heads + config.num_key_value_heads)
        mlp = (3 if gated else 2) * config.hidden_size * config.intermediate_size * getattr(config, "num_local_experts", 1)
        weights = config.num_hidden_layers * (attention + mlp) * weight_bytes
        weights += config.vocab_size * config.hidden_size * width * (2 if self.neuron_config.on_device_embedding else 1)
        heads = cached_heads(config.num_attention_heads, config.num_key_value_heads, self.tp_degree)
        positions = max(self.token_buckets) * sum(self.batch_sizes)
        cache = 2 * config.num_hidden_layers * positions * heads * head_dim * width
        return (weights + cache) // self.tp_degree

    def _check_build(self) -> None:
        if self._batching and not self.can_batch_continuously:
            raise AssertionError(f"{type(self).__name__} doesn't support continuous batching")

    def _compile(self) -> None:
        self._check_build()
        fake.compile_programs(self._programs, self.neuron_config.compilation_worker_count)
        self._compiled = True

    def to_neuron(self) -> None:
        runtime = fake.runtime()
        if self._presharded:
            self._check_presharded()
        runtime.allocate(self._bytes_per_core(), self.tp_degree)
        intact = True
        if self._compiled_from:
            self._check_build()
            intact = self._read_programs()
            self._compiled = True
        else:
            self._compile()
        runtime.load_programs(self.tp_degree, intact)
        if self._generation and self._generation.dynamic:
            self._sampling = {name: getattr(self._generation, name) for name in SAMPLING}
            for name in SAMPLING:
                setattr(self._generation, name, object())  # the library leaves parts of its graph there
        self.reset_rows()
        self._on_device = True

    def cpu_compile(self) -> None:
        self._compile()

    def is_compiled(self) -> bool:
        return self._compiled

    def save(self, directory, sharded_weights: bool = False) -> None:
        folder = Path(directory)
        if folder.is_file():
            raise FileExistsError(f"{folder} is a file; programs are saved into a folder")
        folder.mkdir(parents=True, exist_ok=True)
        if not self._compiled:
            raise AttributeError("there is no program to save before to_neuron()")
        for name in self._programs:
            (folder / name).write_text(f"fake program {name}\n")
        if sharded_weights:
            if not self.neuron_config.on_device_embedding:
                raise AssertionError("on_device_embedding must be True to save presharded weights")
            for name in self._presharded_names():
                (folder / name).touch()
            config = vars(self.config) | {"is_presharded_checkpoint": True}
            (folder / "config.json").write_text(json.dumps(config))

    def _presharded_names(self) -> list[str]:
        layers = [f"decoder_layer_{layer}.safetensors" for layer in range(self.config.num_hidden_layers)]
        return [*layers, "DecoderLMHead.safetensors"]

    def _check_presharded(self) -> None:
        if not self.neuron_config.on_device_embedding:
            raise AssertionError("on_device_embedding must be True to load presharded weights")
        for name in self._presharded_names():
            if not (self._presharded / name).is_file():
                raise FileNotFoundError(f"No such file or directory: {self._presharded / name}")

    def load(self, directory) -> None:
        if self._on_device:
            fake.violate("load() after to_neuron() does nothing")
        self._compiled_from = Path(directory)

    def _read_programs(self) -> bool:
        """Whether all are whole; raises FileNotFoundError when one is missing."""
        if not self._compiled_from.is_dir():
            raise FileNotFoundError(f"Did not find directory: {self._compiled_from}.")
        for name in self._programs:
            if not (self._compiled_from / name).is_file():
                raise FileNotFoundError(f"Could not find a matching NEFF in {self._compiled_from} for this model: {name}")
        return all((self._compiled_from / name).read_text() == f"fake program {name}\n" for name in self._programs)

    def reset(self) -> None:
        self.reset_rows()

    def reset_rows(self) -> None:
        positions = max(self.token_buckets)
        self._rows = {batch: [Row(positions) for _ in range(batch)] for batch in self.batch_sizes}

    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        mine, new = self._generation, generation_config
        if mine and new.per_batch_line != mine.per_batch_line:
            raise AssertionError("per_batch_line must be what the model was compiled with")
        lists = [isinstance(getattr(new, name), list) for name in SAMPLING]
        if any(lists) and not new.per_batch_line:
            raise AssertionError("lists of sampling parameters need per_batch_line=True")
        if new.per_batch_line:
            for name in SAMPLING:
                value = getattr(new, name)
                setattr(new, name, value if isinstance(value, list) else [value] * self.batch_sizes[0])
                if len(getattr(new, name)) != self.batch_sizes[0]:
                    raise AssertionError(f"{name} must have {self.batch_sizes[0]} entries, one for each slot")
        if self._sampling is None:
            raise AttributeError("sampling parameters can be changed on a model with a dynamic GenerationConfig only")
        for name in SAMPLING:
            torch.tensor(getattr(new, name), dtype=torch.float32)  # the object of the constructor holds no numbers any more
        self._sampling = {name: getattr(new, name) for name in SAMPLING}

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, input_ids, cache_ids=None, start_ids=None):
        runtime = fake.runtime()
        if not self._on_device:
            raise ValueError("forward() before to_neuron(): there are no weights")
        with runtime:
            return self._forward(runtime, input_ids, cache_ids, start_ids)

    def _forward(self, runtime, input_ids, cache_ids, start_ids):
        _, length = input_ids.shape  # a ValueError when it has another number of dimensions
        if self._batching:
            if start_ids is None:
                fake.violate("start_ids=None with continuous batching: every prompt goes into slot 0")
                start_ids = torch.arange(input_ids.shape[0])
            if length == 1:
                return self._decode_slots(runtime, input_ids, cache_ids, start_ids)
            return self._prefill_slots(runtime, input_ids, cache_ids, start_ids)
        if self.neuron_config.lhs_aligned:
            return self._right_padded(runtime, input_ids, cache_ids, start_ids)
        return self._left_padded(runtime, input_ids, cache_ids, start_ids)

    def _check_tokens(self, input_ids) -> None:
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"token ids are int32 or int64, not {input_ids.dtype}")
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.config.vocab_size:
            if not self.neuron_config.on_device_embedding:
                raise IndexError("index out of range in self")
            fake.violate("a token id is outside of the vocabulary, which the device does not check")

    def _prefill_slots(self, runtime, input_ids, cache_ids, start_ids):
        n, length = input_ids.shape
        first = cache_ids.flatten()[0].item()
        if first > 0:
            raise AssertionError(f"invalid batch size for speculative forward ({n} not in [])")
        size = bucket.find(self.context_buckets, length)
        if cache_ids.shape[0] != n:
            raise AssertionError(f"invalid n_active_seqs ({n} vs {cache_ids.shape[0]})")
        if not length <= size:  # a TypeError when there are no context programs at all
            raise AssertionError(f"invalid input prompt length ({length} <= {size})")
        if cache_ids.shape[1] < length:
            raise RuntimeError(f"{cache_ids.shape[1]} positions for {length} tokens")
        self._check_tokens(input_ids)
        if start_ids.ndim != 1:
            raise AssertionError(f"start_ids has the shape {tuple(start_ids.shape)} instead of ({n},)")
        if len(start_ids) < n or (n == 1 and len(start_ids) > 1):
            raise KeyError((size, len(start_ids)))
        slots = start_ids.tolist()
        if len(slots) != n:
            fake.violate(f"{len(slots)} slots for {n} prompts")
        if len(set(slots)) < len(slots):
            fake.violate(f"a slot is named twice in {slots}")
        if not all(0 <= slot < self._slots for slot in slots):
            fake.violate(f"slots {slots} are not all below {self._slots}: memory of another slot, or of nobody, is written")
            slots = [min(max(slot, 0), self._slots - 1) for slot in slots]
        logits = []
        for tokens, places, slot in zip(input_ids.tolist(), cache_ids[:, :length].tolist(), slots):
            self._check_places(places)
            last = max(places)
            runtime.prefill()
            self._row(slot).fill(tokens + [0] * (size - length), last + 1)
            logits.append(self._logits(slot, last))
        return self._answer(runtime, torch.stack(logits), slots[:n])

    def _decode_slots(self, runtime, input_ids, cache_ids, start_ids):
        n, slots = input_ids.shape[0], start_ids.flatten()
        all_tokens = torch.zeros(self._slots, 1, dtype=input_ids.dtype)
        all_places = torch.zeros(self._slots, 1, dtype=input_ids.dtype)
        index = slots.unsqueeze(-1).to(torch.int64)
        # scatter_ is what complains of a wrong slot, dtype or shape; cache_ids of one dimension have no second one to look at
        all_tokens.scatter_(0, index, input_ids)
        all_places.scatter_(0, index, cache_ids)
        self._check_tokens(input_ids)
        highest = max(all_places.flatten().tolist())
        next(size for size in self.token_buckets if size > highest)  # a StopIteration when there is none
        named = slots.tolist()
        if not named:
            fake.violate("a decode call without a row: position 0 of every slot is overwritten")
        if not n == len(cache_ids) == len(named):
            fake.violate(f"{n} tokens, {len(cache_ids)} positions and {len(named)} slots")
        if len(set(named)) < len(named):
            fake.violate(f"a slot is named twice in {named}")
        for slot, row in enumerate(self._rows[self._slots]):
            position, token = all_places[slot].item(), all_tokens[slot].item()
            if slot in named:
                self._check_position(row, position, token, f"slot {slot}")
            elif slot in self.fake_live:
                fake.violate(f"slot {slot} is live and left out of a decode call of {named}: its position 0 is overwritten")
        is_nan = runtime.step()
        for slot, row in enumerate(self._rows[self._slots]):
            if slot in named:
                row.write(all_places[slot].item(), all_tokens[slot].item())
            else:
                row.tokens[0] = 0
                row.damaged_by = row.damaged_by or f"a decode call of {named}"
        logits = [self._logits(slot, all_places[slot].item()) for slot in named]
        logits = torch.stack(logits) if named else torch.zeros(0, self.config.vocab_size)
        return self._answer(runtime, logits.fill_(float("nan")) if is_nan else logits, named)

    @property
    def _slots(self) -> int:
        return self._batching.batch_size_for_shared_caches

    def _row(self, slot: int) -> Row:
        return self._rows[self._slots][slot]

    def _logits(self, slot: int, position: int) -> torch.Tensor:
        return fake.expected_logits(self._row(slot).seen_from(position), self.config.vocab_size)

    def _check_position(self, row: Row, position: int, token: int, name: str) -> None:
        if position == 0:
            return
        if row.damaged_by:
            fake.violate(f"{name} is used again, but {row.damaged_by} left it out and so overwrote its position 0")
        if getattr(self, "decoder_lm_head_for_speculation", None) and 0 <= position <= row.length:
            return  # what was there may be a filler
        if position < 0 or position not in (row.length, row.length - 1):
            fake.violate(f"{name} holds {row.length} tokens, so its next one is not at position {position}")
        if position == row.length - 1 and row.tokens[position] != token:
            fake.violate(f"{name} holds token {row.tokens[position]} at position {position}, and {token} would replace it")

    def _left_padded(self, runtime, input_ids, cache_ids, start_ids):
        batch, length = input_ids.shape
        if cache_ids is not None and cache_ids.shape != (length,):
            error = AssertionError if cache_ids.numel() == 1 or (length > 1 and cache_ids.ndim == 1) else RuntimeError
            raise error(f"cache_ids of a static batch have the shape ({length},), not {tuple(cache_ids.shape)}")
        if length > 1 and cache_ids is not None and cache_ids[0] > 0:
            error = StopIteration if length in self.context_buckets else ValueError
            raise error(f"a prompt begins at position 0, not {cache_ids[0]}")
        self._check_batch(batch, length, start_ids)
        self._check_tokens(input_ids)
        pads = [0] * batch if start_ids is None else start_ids.tolist()
        rows, positions = self._rows[batch], range(length) if cache_ids is None else cache_ids.tolist()
        if length == 1:
            return self._decode_together(runtime, input_ids[:, 0].tolist(), positions[0], pads, cache_ids is None)
        if list(positions) != list(range(length)):
            fake.violate(f"cache_ids of a prompt are 0, 1, ..., not {list(positions)}")
        if not all(0 <= pad < length for pad in pads):
            fake.violate(f"start_ids {pads} leave nothing of prompts of {length} tokens")
        in_one_go = min(length, bucket.find(self.context_buckets, length) or 0)
        window = getattr(self.config, "sliding_window", None)
        if isinstance(self, MistralForSampling) and window and in_one_go > window:
            fake.violate(f"a prompt of {length} tokens is longer than the window {window}: the library then takes one more")
        self.fake_slow_tokens += length - in_one_go
        for position in range(in_one_go, length):
            next(size for size in self.token_buckets if size > position)
            self._check_serial(position)
            runtime.step()
        if in_one_go:
            runtime.prefill()
        for row, tokens, pad in zip(rows, input_ids.tolist(), pads):
            row.fill(tokens, length, pad)
        return self._answer_together(runtime, rows, length - 1)

    def _check_batch(self, batch: int, length: int, start_ids) -> None:
        given = batch if start_ids is None else len(start_ids)
        if given not in self._rows:
            raise KeyError((bucket.find(self.context_buckets, length), given))
        if given != batch or (start_ids is not None and start_ids.ndim != 1):
            raise AssertionError(f"start_ids has the shape {tuple(start_ids.shape)} instead of ({batch},)")

    def _decode_together(self, runtime, tokens, position, pads, is_guessed):
        rows = self._rows[len(tokens)]
        if is_guessed and any(row.length for row in rows):
            fake.violate("cache_ids=None with one column means position 0")
        next(size for size in self.token_buckets if size > position)
        self._check_serial(position)
        for number, (row, token, pad) in enumerate(zip(rows, tokens, pads)):
            self._check_position(row, position, token, f"row {number}")
            if position and row.pads != pad:
                fake.violate(f"row {number} has {row.pads} tokens of padding and start_ids says {pad}")
        is_nan = runtime.step()
        for row, token, pad in zip(rows, tokens, pads):
            row.pads = pad
            row.write(position, token)
        return self._answer_together(runtime, rows, position, is_nan)

    def _check_serial(self, position: int) -> None:
        """For classes whose single steps are wrong."""

    def _answer_together(self, runtime, rows, position, is_nan=False):
        logits = torch.stack([fake.expected_logits(row.seen_from(position), self.config.vocab_size) for row in rows])
        return self._answer(runtime, logits.fill_(float("nan")) if is_nan else logits, range(len(rows)))

    def _right_padded(self, runtime, input_ids, cache_ids, start_ids):
        batch, length = input_ids.shape
        if cache_ids is None and length == 1:
            fake.violate("cache_ids=None with one column means position 0")
            cache_ids = torch.zeros(batch, 1, dtype=torch.int64)
        if cache_ids.ndim != 2:  # an AttributeError for None
            raise (IndexError if length > 1 else ValueError)("cache_ids have two dimensions with padding on the right")
        if length > 1 and cache_ids.flatten()[0] > 0:
            raise ValueError(f"a prompt begins at position 0, not {cache_ids[0, 0]}")
        if cache_ids.shape != input_ids.shape:
            error = AssertionError if length > 1 else KeyError
            raise error(f"cache_ids has the shape {tuple(cache_ids.shape)} instead of {tuple(input_ids.shape)}")
        highest = int(cache_ids.max())
        next(size for size in (self.context_buckets if length > 1 else self.token_buckets) if size > highest)
        self._check_batch(batch, length, start_ids)
        self._check_tokens(input_ids)
        if start_ids is not None and start_ids.tolist() != list(range(batch)):
            fake.violate("start_ids other than 0, 1, ... mix the rows up")
        if length > 1:
            runtime.prefill()
        else:
            runtime.step()
        logits = []
        for number, (tokens, places) in enumerate(zip(input_ids.tolist(), cache_ids.tolist())):
            row, last = self._rows[batch][number], max(places)
            if length == 1:
                self._check_position(row, last, tokens[0], f"row {number}")
                row.write(last, tokens[0])
            else:
                self._check_places(places)
                row.fill(tokens, last + 1)
            logits.append(fake.expected_logits(row.seen_from(last), self.config.vocab_size))
        return self._answer(runtime, torch.stack(logits), range(batch))

    def _check_places(self, places: list[int]) -> None:
        last = max(places)
        if places != [*range(last + 1), *[0] * (len(places) - last - 1)]:
            fake.violate(f"cache_ids of a prompt are 0, 1, ... and then zeros, not {places}")

    def _answer(self, runtime, logits, lines):
        """logits: float32 [n, vocab]; lines: the slot of each row. Returns them, or the ids that the device drew from them:
        int32 [n, 1]."""
        if not self._generation:
            return logits.to(getattr(torch, self.neuron_config.cast_logits_dtype))
        given = self._sampling or {name: getattr(self._generation, name) for name in SAMPLING}
        tokens = []
        for row, line in zip(logits, lines):
            if row.isnan().any():  # nothing is greater than such a number, so the library counts none
                tokens.append(0)
                continue
            if not (self._generation.do_sample or self._generation.dynamic):
                tokens.append(int(row.argmax()))
                continue
            own = {name: value[line] if isinstance(value, list) else value for name, value in given.items()}
            if not (own["top_k"] >= 1 and 0 < own["top_p"] <= 1 and own["temperature"] > 0):
                fake.violate(f"the device cannot draw with {own}")
            tokens.append(draw(row, runtime.generator, self._generation.global_top_k, **own))
        return torch.tensor(tokens, dtype=torch.int32).reshape(-1, 1)


def draw(logits, generator, global_top_k, top_k, top_p, temperature, top_p_min_tokens) -> int:
    scores, ids = logits.sort(descending=True, stable=True)
    kept = max(1, min(int(top_k), int(global_top_k or len(ids)), len(ids)))
    probabilities = torch.softmax(scores[:kept] / temperature, -1)
    before = probabilities.cumsum(-1) - probabilities
    allowed = (before < top_p) | (torch.arange(kept) < top_p_min_tokens)
    return int(ids[torch.multinomial(probabilities * allowed, 1, generator=generator)])


def cached_heads(heads: int, kv_heads: int, tp_degree: int) -> int:
    """Key heads that all cores together keep, with those that are there more than once or only to make the number even."""
    if kv_heads % tp_degree == 0:
        return kv_heads
    return tp_degree if tp_degree % kv_heads == 0 else -(-heads // tp_degree) * tp_degree


def _check_sizes(**kwargs) -> None:
    positions, estimate = kwargs.get("n_positions", 2048), kwargs.get("context_length_estimate")
    most, longest = (max(sizes) if isinstance(sizes, list) else sizes for sizes in (positions, estimate))
    if isinstance(most, int) and isinstance(longest, int) and longest > most:
        raise AssertionError(f"context_length_estimate {longest} is above n_positions {most}")
    neuron_config = kwargs.get("neuron_config")
    batching = neuron_config and neuron_config.continuous_batching
    if batching and batching.batch_size_for_shared_caches != kwargs.get("batch_size"):
        raise AssertionError(
            f"invalid batch_size_for_shared_caches ({batching.batch_size_for_shared_caches}), "
            f"{kwargs.get('batch_size')} is expected"
        )
    if neuron_config and neuron_config.cache_layout == Layout.BSH and not batching:
        raise AssertionError("the BSH cache layout needs continuous batching")


def _override(config, given: dict):
    """GPT-2 and its like take the attributes of their config as arguments, and nothing else."""
    config = read_config(config)
    for name, value in given.items():
        if not hasattr(config, name):
            raise KeyError(f'Found invalid key "{name}".')
        if value is not None:
            setattr(config, name, value)
    return config


class LlamaForSampling(NeuronModel):
    def __init__(
        self,
        config,
        *,
        n_positions=2048,
        batch_size=1,
        amp="f32",
        tp_degree=2,
        context_length_estimate=None,
        context_unroll=None,
        unroll=None,
        neuron_config=None,
        prefixed_length=0,
        **kwargs,
    ):
        scaling = getattr(read_config(config), "rope_scaling", None) or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if scaling and kind not in ("default", "llama3"):
            raise ValueError(f"rope_scaling is default or llama3, not {kind}")
        if prefixed_length:
            raise NotImplementedError("the fake does not simulate prefixed_length")
        estimate, unrolls = context_length_estimate, (context_unroll, unroll)
        self._setup(config, amp, tp_degree, batch_size, n_positions, estimate, neuron_config, unrolls, kwargs)
        self.decoder_lm_head_for_speculation = {}
        self.decoder_param_set = SimpleNamespace(init_speculative_decoder=self._init_speculative_decoder)

    def enable_speculative_decoder(self, speculation_length, batch_sizes):
        for batch_size in [batch_sizes] if isinstance(batch_sizes, int) else batch_sizes:
            self.decoder_lm_head_for_speculation[speculation_length, batch_size] = self._init_speculative_decoder(
                self.unroll, self.token_buckets, self, speculation_length, batch_size
            )

    def _init_speculative_decoder(self, unroll, buckets, model_obj, n_active_tokens, batch_size):
        if self._compiled or batch_size != 1 or not self._batching:
            raise NotImplementedError("the fake speculates for one slot at a time, with continuous batching")
        if min(buckets) < n_active_tokens:
            raise NotImplementedError(f"Updating 2D cache_ids is not implemented for n_active_tokens={n_active_tokens}")
        programs = tuple(("speculation", unroll, n_active_tokens, size, batch_size) for size in buckets)
        self._programs |= self._name_programs(programs)
        return SimpleNamespace(n_positions_list=buckets)

    def speculative_forward(self, input_ids, cache_ids=None, start_ids=None, speculation_length=None):
        """Returns logits [length, vocab, 1], or sampled ids [1, length]."""
        runtime = fake.runtime()
        with runtime:
            n, length = input_ids.shape
            positions = cache_ids.flatten().tolist()
            if (length, n) not in self.decoder_lm_head_for_speculation or length != speculation_length:
                raise AssertionError(f"invalid batch size for speculative forward ({n} sequences of {length})")
            self._check_tokens(input_ids)
            (slot,), begin, lengths = (start_ids.tolist(), positions[0], self.decoder_lm_head_for_speculation[length, n])
            if positions != list(range(begin, begin + length)) or begin < 1:
                fake.violate(f"positions {positions} do not ascend by one from above 0")
            if next(size for size in lengths.n_positions_list if size > positions[-1]) <= length:
                fake.violate(f"a bucket of {length} positions begins at position 0, not {begin}")
            row = self._row(slot)
            if row.damaged_by or begin > row.length:
                fake.violate(f"slot {slot} holds {row.length} tokens, not {begin}, or was damaged by {row.damaged_by}")
            runtime.prefill()
            for position, token in zip(positions, input_ids[0].tolist()):
                row.write(position, token)
            answer = self._answer(runtime, torch.stack([self._logits(slot, p) for p in positions]), [slot] * length)
            return answer.T if self._generation else answer[:, :, None]

    def forward(self, input_ids, cache_ids=None, start_ids=None, last_token_id=None, input_embeddings=None, **kwargs):
        if last_token_id is not None or input_embeddings is not None or kwargs:
            raise NotImplementedError("the fake's forward() takes input_ids, cache_ids and start_ids")
        return super().forward(input_ids, cache_ids, start_ids)


class MistralForSampling(NeuronModel):
    def __init__(
        self,
        config,
        *,
        n_positions=2048,
        batch_size=1,
        amp="f32",
        tp_degree=2,
        context_length_estimate=None,
        context_unroll=None,
        unroll=None,
        neuron_config=None,
        **kwargs,
    ):
        estimate, unrolls = context_length_estimate, (context_unroll, unroll)
        self._setup(config, amp, tp_degree, batch_size, n_positions, estimate, neuron_config, unrolls, kwargs)

    def _check_build(self) -> None:
        super()._check_build()
        window = getattr(self.config, "sliding_window", None)
        if self._batching and window and max(self.token_buckets) > window:
            raise AssertionError(f"n_positions above the sliding window ({window}) with continuous batching")


class MixtralForSampling(MistralForSampling):
    def _check_build(self) -> None:
        NeuronModel._check_build(self)
        experts = getattr(self.config, "num_local_experts", 8)
        if experts % self.tp_degree and self.tp_degree % experts:
            raise ValueError("tp_degree needs to be 8, 16 or 32")
        if self.neuron_config.attention_layout == Layout.BSH:
            raise AssertionError("the BSH layout is not supported for experts")


class BloomForSampling(NeuronModel):
    can_batch_continuously = False

    def __init__(
        self,
        config,
        *,
        n_positions=2048,
        batch_size=1,
        amp="f32",
        tp_degree=2,
        context_length_estimate=None,
        context_unroll=None,
        unroll=None,
        neuron_config=None,
        **kwargs,
    ):
        config = _override(config, kwargs)
        estimate, unrolls = context_length_estimate, (context_unroll, unroll)
        self._setup(config, amp, tp_degree, batch_size, n_positions, estimate, neuron_config, unrolls)


class OPTForSampling(NeuronModel):
    can_batch_continuously = False

    def __init__(
        self,
        config,
        batch_size=1,
        amp=None,
        tp_degree=2,
        n_positions=2048,
        unroll=None,
        context_length_estimate=None,
        context_unroll=1,
        neuron_config=None,
        **kwargs,
    ):
        config = _override(config, kwargs)
        longest = max(n_positions) if isinstance(n_positions, list) else n_positions
        if longest > config.max_position_embeddings:
            raise ValueError(f"n_positions {longest} is above max_position_embeddings {config.max_position_embeddings}")
        amp = amp or {"float16": "f16", "bfloat16": "bf16"}.get(str(config.torch_dtype), "f32")
        estimate, unrolls = context_length_estimate, (context_unroll, unroll)
        self._setup(config, amp, tp_degree, batch_size, n_positions, estimate, neuron_config, unrolls)


class GPT2ForSamplingWithContextBroadcasting(NeuronModel):
    can_batch_continuously = False

    def __init__(
        self,
        config,
        batch_size=1,
        prompt_batch_size=1,
        amp="f32",
        tp_degree=2,
        unroll=None,
        context_length_estimate=None,
        context_unroll=1,
        neuron_config=None,
        reorder_cache=False,
        **kwargs,
    ):
        config = _override(config, kwargs)
        if context_length_estimate == 0:
            raise AssertionError("context_length_estimate cannot be 0")
        self.prompt_batch_size, self._reorders = prompt_batch_size, reorder_cache
        estimate = config.n_positions if context_length_estimate is None else context_length_estimate
        unrolls = (context_unroll, unroll)
        self._setup(config, amp, tp_degree, batch_size, config.n_positions, estimate, neuron_config, unrolls)

        if max(self.token_buckets) > self.config.max_position_embeddings:
            fake.violate(f"there are only {self.config.max_position_embeddings} positions, and n_positions is above it")

    def _check_build(self) -> None:
        super()._check_build()
        if [self.prompt_batch_size] != self.batch_sizes or self._reorders:
            raise NotImplementedError("the fake simulates prompt_batch_size == batch_size without reorder_cache only")

    def reset(self, context_length_estimate) -> None:
        super().reset()


class _Serial(NeuronModel):
    """Prompts go token by token."""

    can_batch_continuously = False

    def __init__(
        self, config, batch_size=1, amp="f32", tp_degree=2, unroll=None, init_n_active_tokens=None, neuron_config=None, **kwargs
    ):
        config = read_config(config)
        config.n_positions = longest = config.max_position_embeddings
        positions = _override(config, kwargs).n_positions
        if positions > longest:
            raise ValueError(f"n_positions {positions} is above max_position_embeddings {longest}")
        if init_n_active_tokens is not None:
            raise NotImplementedError(f"init_n_active_tokens={init_n_active_tokens}")
        self._setup(config, amp, tp_degree, batch_size, positions, 0, neuron_config, (None, unroll))

    def forward(self, input_ids, cache_ids, start_ids=None):
        return super().forward(input_ids, cache_ids, start_ids)


class GPT2ForSampling(_Serial):
    pass


class _NotSaved(_Serial):
    """They have no save() and no load()."""

    def __getattribute__(self, name):
        if name in ("save", "load", "cpu_compile", "is_compiled", "update_generation_config"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return super().__getattribute__(name)

    def forward(self, input_ids, cache_offset, start_ids=None):
        return super().forward(input_ids, cache_offset, start_ids)

    def _check_build(self) -> None:
        super()._check_build()
        if self.config.num_attention_heads % self.tp_degree:
            raise AssertionError(f"{self.config.num_attention_heads} heads cannot be shared by {self.tp_degree} cores")


class GPTJForSampling(_NotSaved):
    def _check_serial(self, position: int) -> None:
        if position:
            fake.violate("GPT-J: all that is behind the first token looks at position 0 only")


class GPTNeoXForSampling(_NotSaved):
    pass
