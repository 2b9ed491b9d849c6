"""LoRA adapters that requests choose: their low-rank updates, as every engine adds them to linear layers.

All adapters lie one after the other along one dimension, the columns. For each token a linear layer computes

    output + ((input · downᵀ) * mask) · up

where `mask` is 1 in the columns of the token's adapter and 0 elsewhere. An engine computes the columns from
the first to the last adapter that runs. The logits of a token do not depend on other adapters: zeros change
no sum, and an adapter has a multiple of COLUMNS, and a product at most MAX_COLUMNS, because matrix libraries
may sum others in another order.

`lora.py` writes the files that are read here. This file imports neither torch nor openvino.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from config import Config
from models.errors import ModelError

UPDATES = "updates.safetensors"
DOWN_SUFFIX, UP_SUFFIX = ".down", ".up"  # endings of the names of its tensors
A, B = ".lora_A.weight", ".lora_B.weight"  # and of those that peft saves: [rank, inputs] and [outputs, rank]
PREFIX = "base_model.model."  # of the names that peft saves
COLUMNS = 16
MEMORY_LIMIT = "--max-lora-memory (MAX_LORA_MEMORY) says how much they may take"
MAX_COLUMNS = 512

# Parts of names that differ between a checkpoint, its adapters and the classes of transformers' versions:
# `model.layers`, `language_model.model.layers`, `model.language_model.layers` and `backbone.layers` are one.
WRAPPERS = re.compile(r"\b((text_|language_)?model|backbone|(?<=tower\.)vision_model)\.")

# Matrices by the `common_name` of a module: down [rank, inputs] and up [rank, outputs], which is scaled; in
# float32.
Updates = Mapping[str, tuple[np.ndarray, np.ndarray]]


def common_name(name: str) -> str:
    """A name that all spellings of a module or tensor share: `model.layers.0` and
    `language_model.model.layers.0` become `layers.0`."""
    return WRAPPERS.sub("", name)


def read_updates(folder: Path) -> Updates:
    """Reads the updates that `lora.py` has written into a folder, by the `common_name` of each module."""
    tensors = load_file(folder / UPDATES)
    modules = [name.removesuffix(DOWN_SUFFIX) for name in tensors if name.endswith(DOWN_SUFFIX)]
    return {
        common_name(module): (tensors[module + DOWN_SUFFIX], tensors[module + UP_SUFFIX])
        for module in modules
    }


def configured(config: Config) -> tuple[dict[str, Updates], set[str] | None]:
    """Reads the updates of each adapter of the settings. Returns them by the adapter's name, and the modules
    that adapters may change; None: all modules, because adapters may be loaded later. `config` as
    `models.prepare` returns it."""
    given = {name: read_updates(Path(folder)) for name, folder in config.adapters.items()}
    return given, None if config.lora_folder else set().union(*given.values())


def check_shapes(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns `shapes` itself: those of the tensors of an adapter by their names, as peft saves it. Raises
    ModelError if two names differ only in spelling (`common_name`), or if the tensors `A` and `B` of a module
    make no low-rank update.

    An update has A [rank, inputs] and B [outputs, rank], with the same rank and without a size of 0.
    """
    names = [common_name(name.removeprefix(PREFIX)) for name in shapes]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ModelError(f"{twice[0]} is there in two spellings of its name")
    for name, shape in shapes.items():
        if name.endswith((A, B)):
            module = name.removesuffix(A).removesuffix(B)
            down, up = (shapes.get(module + ending, []) for ending in (A, B))
            if not (len(shape) == 2 and all(shape) and down[:1] == up[1:]):
                raise ModelError(f"{module} has{A} of the shape {down} and{B} of {up}, which is no update")
    return shapes


class Adapters:
    """The adapters of a model.

    numbers: of each adapter by its name, for `Chunk.adapter`; none is used twice, and 0 is no adapter.
    weights: `down` and `up` of all adapters by module, [columns, inputs] and [columns, outputs], in float32
    or as the bit patterns of bfloat16; `version` grows with each change of the weights.

    A step may be reading the adapters. So `add` and `remove` are called on a copy (`copied`), and `exchange`
    takes over the weights of the copy between two steps.
    """

    def __init__(
        self, layers: Mapping[str, tuple[int, int]], given: Mapping[str, Updates], dtype: str = "float32"
    ):
        """layers: how many inputs and outputs each linear layer that may have updates has, by the
        `common_name` of its module; given: the updates of the first adapters by name; dtype: of the weights,
        "float32" or "bfloat16". Raises ModelError for updates that do not fit the layers."""
        self.numbers: dict[str, int] = {}
        self.version = 0
        self._new_numbers = itertools.count(1)
        self._of_column = np.zeros(0, np.int64)  # the number of the adapter that each column is of, ascending
        self._convert = _to_bfloat16 if dtype == "bfloat16" else np.asarray
        self.weights = {
            module: tuple(self._convert(np.zeros((0, size), np.float32)) for size in sizes)
            for module, sizes in layers.items()
        }
        for name, updates in given.items():
            self.add(name, updates)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in self.weights.values() for array in pair)

    def copied(self) -> Adapters:
        """Returns a copy, for `add` and `remove`: they leave this one as it is, whose arrays the copy
        shares."""
        copied = copy.copy(self)
        copied.numbers = dict(self.numbers)
        return copied

    def exchange(self, changed: Adapters) -> None:
        """Takes over the weights, columns and `version` of a changed copy, but not its `numbers`: the caller
        changes these. Call it between two steps."""
        vars(self).update(vars(changed) | {"numbers": self.numbers})

    def add(self, name: str, updates: Updates, most_bytes: float = math.inf) -> None:
        """Adds an adapter, with a new number in `numbers`, which must not have its name yet. Copies the
        weights of all adapters into new arrays. Raises ModelError for updates that do not fit the model, or
        if all adapters together would take more than `most_bytes`; then nothing changes. updates: of at least
        one module."""
        for module, pair in updates.items():
            if module not in self.weights:
                raise ModelError(
                    f"the LoRA adapter {name} changes {module}, which is no linear layer of this model that "
                    "runs for every token; merge it with --merge-lora (MERGE_LORA), or leave it out"
                )
            given, expected = ([array.shape[1] for array in each] for each in (pair, self.weights[module]))
            if given != expected:
                raise ModelError(
                    f"the LoRA adapter {name} changes {module} from {given[0]} to {given[1]} numbers, and it "
                    f"has {expected[0]} and {expected[1]}: is this its base model?"
                )
        rank = max(len(down) for down, _up in updates.values())
        columns = -(-rank // COLUMNS) * COLUMNS
        row_bytes = sum(array.itemsize * array.shape[1] for pair in self.weights.values() for array in pair)
        if (total := self.nbytes + columns * row_bytes) > most_bytes:
            raise ModelError(f"all LoRA adapters would take {total / 1e9:.2f} GB; {MEMORY_LIMIT}")
        begin = len(self._of_column)
        weights = {}
        for module, present in self.weights.items():
            weights[module] = tuple(np.pad(array, [(0, columns), (0, 0)]) for array in present)
            for array, update in zip(weights[module], updates.get(module, ())):
                array[begin : begin + len(update)] = self._convert(update)
        self.weights = weights
        self.numbers[name] = number = next(self._new_numbers)
        self._of_column = np.append(self._of_column, [number] * columns)
        self.version += 1

    def remove(self, number: int) -> None:
        """Removes the weights of the adapter with this number, which no request uses; copies those of the
        others. Does not change `numbers`, from which the caller has taken the number."""
        begin, end = self.columns_of([number])
        self.weights = {
            module: tuple(np.delete(array, slice(begin, end), 0) for array in pair)
            for module, pair in self.weights.items()
        }
        self._of_column = np.delete(self._of_column, slice(begin, end))
        self.version += 1

    def groups(self, numbers: Sequence[int]) -> list[list[int]]:
        """Divides rows among calls. Returns for each call a list of places in `numbers`; there is at least
        one list. numbers: the adapter of each row, 0 for none. All rows of an adapter are in the same call.
        The places are in the order of the adapters' numbers.

        From the first to the last adapter of a call there are at most MAX_COLUMNS columns, unless the call
        has one adapter only. Rows without an adapter are in the first call.
        """
        groups: list[list[int]] = [[]]
        first = None
        for place in sorted(range(len(numbers)), key=numbers.__getitem__):
            if numbers[place]:
                begin, end = self.columns_of([numbers[place]])
                first = begin if first is None else first
                if end - first > MAX_COLUMNS and begin > first:
                    groups.append([])
                    first = begin
            groups[-1].append(place)
        return groups

    def columns_of(self, numbers: Iterable[int]) -> tuple[int, int]:
        """Returns the columns from the first to the last of these adapters, as begin and end; those of
        adapters between them are included. 0 does not count; without any other number both are 0."""
        running = [number for number in numbers if number] or [0]
        begin, end = np.searchsorted(self._of_column, [min(running), max(running) + 1]).tolist()
        return begin, end

    def mask(self, numbers: Sequence[int], columns: tuple[int, int]) -> np.ndarray:
        """Returns 1 in the columns of the adapter of each token, else 0: float32 [tokens, columns]. columns:
        begin and end, as `columns_of` returns them."""
        return np.equal.outer(numbers, self._of_column[slice(*columns)]).astype(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the bit patterns of the nearest bfloat16 of each value, as uint16. values: float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
