"""Static-batch models behind one interface: a fixed number of slots, each with its own positions in one KV cache.

`fetch` finds or downloads a model's folder; `torch_model.py` and `neuron_model.py` turn it into a `StaticBatchModel`, or raise
`ModelError` with the reason in one line. This layer knows no requests, and of sampling only what a device does itself.

A new prompt is written into the rows of its slot and nothing else moves: no other slot's cache is rebuilt or copied.

    python3 model.py MODEL_FOLDER TARGET     converts a slow tokenizer, in a process of its own
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

import hub
from config import Config
from hub import first_line

logger = logging.getLogger("model")


class ModelError(Exception):
    """A model that cannot be served; the message is one line for the person who chose it."""


class DeviceLost(Exception):
    """The device failed in a way that nothing but a new process mends. Raised by `prefill` and `decode`."""


class Part(NamedTuple):
    """Of a prompt, that is run in a slot: prompt[begin:end], after all before it."""

    slot: int
    prompt: list[int]
    begin: int
    end: int


class StaticBatchModel(Protocol):
    batch_size: int  # slots
    max_total_tokens: int  # positions per slot
    max_input_tokens: int  # longest prompt
    vocab_size: int
    device: str
    dtype: str
    quantize: str | None  # "int8" where the weights are rounded to it
    gives_prompt_logits: bool  # whether `score` can be used
    prompt_part: int | None  # tokens of a prompt that `prefill_part` runs at a time; None: a prompt runs as a whole
    most_along: int  # tokens of a prompt that a step can take along; 0: none
    sampling: str  # "host", or "device": then prefill and decode return ids that it chose instead of logits, int64 [1] and [n]

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        """How the device chooses for `slot` from its next prefill on; only for one that samples. top_k 1 takes the likeliest,
        0 leaves it out. An id that it chose may be outside of the vocabulary."""

    def prefill(self, slot: int, prompt: list[int]) -> torch.Tensor:
        """Runs a prompt of 1 to max_input_tokens ids into `slot`. Returns the logits after it, float32 or bfloat16 [1, vocab]:
        a batch of one row."""

    def prefill_part(self, part: Part) -> torch.Tensor:
        """Runs one of the `parts_of` a prompt. Steps of other slots may come between two of them. Returns the logits after its
        last token, as `prefill` does. Only where `prompt_part` is not None."""

    def score(self, slot: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        """Does what `prefill` does, and yields the logits after each token of the prompt, in order: float32 [n, vocab] with
        at most SCORE_CHUNK tokens at a time. Nothing else may run on the model until it is exhausted."""

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """One step for all live slots: int64 [n] each, slots ascending. Returns float32 or bfloat16 [n, vocab], which later
        calls leave as it is. It may lie in memory in any order; sampling.py is quick with the two usual ones."""

    def decode_along(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step, and meanwhile a part of a prompt in another slot: what `decode` and `prefill_part` return. It may be any
        part of 2 to `most_along` tokens, which changes nothing. Only where `most_along` is not 0."""

    def understudy(self) -> StaticBatchModel | None:
        """One for rehearsals (rehearsal.py), without a device: over at once, with few slots, and no last position. Asked for
        where the host samples; None where the loop's own thread works all through a step, and forgets nothing."""


def parts_of(prompt: Sequence[int], most: int | None, begin: int = 0) -> Iterator[tuple[int, int]]:
    """Where the parts of at most so many tokens begin and end in which a prompt is run from `begin` on; None: it is one. No
    part has one token unless that is all: it would be computed as that of a step is, and its last bits would depend on the
    cut."""
    while begin < len(prompt):
        end = min(begin + (most or len(prompt)), len(prompt))
        if len(prompt) - end == 1 and end - begin > 2:
            end -= 1
        yield begin, end
        begin = end


FACTS = ("*.json", "*.model", "*.jinja", "*.txt")
WEIGHTS = (("*.safetensors",), ("pytorch_model*.bin",))  # the second, which is pickled, only where there is nothing else
# Below other folders, and under other names, are the same weights in other formats.
OTHER_FORMATS = ("*/*", "consolidated*")
ARTIFACT = ("compiled/*", "checkpoint/*")
DOWNLOADING_S = 30.0  # how often a long download says that it is still at it


def fetch(config: Config) -> tuple[Path, str | None]:
    """The model's folder with all but the weights, and its commit on the hub (None for a local one)."""
    if config.is_local:
        return Path(config.model_id).expanduser(), None
    patterns = [*FACTS, "*.py"] if config.trust_remote_code else FACTS
    folder = _download(config, config.model_id, config.revision, patterns, OTHER_FORMATS)
    return folder, folder.name


def fetch_weights(config: Config, folder: Path) -> Path:
    """The folder that `fetch` gave, with the weights in it: downloaded if they have to be."""
    return folder if config.is_local else _with_weights(config, config.model_id, folder)


def fetch_checkpoint(config: Config, model_id: str, revision: str | None) -> Path:
    """The folder of another model on the hub: what compiled programs were made from."""
    return _with_weights(config, model_id, _download(config, model_id, revision, FACTS, OTHER_FORMATS))


def fetch_artifact(config: Config, folder: Path) -> None:
    """Downloads what a compiled model on the hub has in its folders."""
    if not config.is_local:
        _download(config, config.model_id, folder.name, ARTIFACT, ())


def _with_weights(config: Config, model_id: str, folder: Path) -> Path:
    for patterns in WEIGHTS:
        _download(config, model_id, folder.name, patterns, OTHER_FORMATS)
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            return folder
    offline = ", not in the cache, and HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
    raise ModelError(f"{model_id} holds no weights: there is no *.safetensors and no pytorch_model*.bin{offline}")


def _download(config: Config, model_id: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    """The folder of a model on the hub with all files that match. Raises ModelError, in one line, where that cannot be."""
    from huggingface_hub import snapshot_download

    hub.hush()
    with (
        reported_as(f"{model_id} cannot be downloaded", lambda error: hub.complaint(error, revision)),
        still_at_it(f"downloading {model_id}", DOWNLOADING_S),
    ):
        folder = snapshot_download(
            model_id,
            revision=revision,
            token=hub.token(),
            cache_dir=config.huggingface_hub_cache,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored) or None,
        )
    return Path(folder)


@contextlib.contextmanager
def still_at_it(what: str, every_s: float) -> Iterator[None]:
    """Says in the log, every `every_s` seconds, that `what` goes on."""
    done, started_at = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(every_s):
            logger.info("Still %s after %.0f s", what, time.monotonic() - started_at)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def choose_device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu or auto")
    if wanted != "auto":
        return wanted
    if list(Path("/dev").glob("neuron[0-9]*")):
        return "neuron"
    if importlib.util.find_spec("transformers_neuronx"):  # nobody installs that to be served by a CPU without a word
        raise ModelError(
            "transformers-neuronx is here and no Neuron device: in a container pass it with --device=/dev/neuron0, "
            "on a machine see to its driver (aws-neuronx-dkms); --device cpu (DEVICE) serves without one"
        )
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def reported_as(failure: str, explain: Callable[[BaseException], str] | None = None) -> Iterator[None]:
    """What goes wrong in here becomes a ModelError of one line: `failure`, and what `explain` makes of the exception."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        logger.debug(failure, exc_info=True)
        why = explain(error) if explain else f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{failure}: {why}") from None


def convert_tokenizer(folder: Path, target: Path) -> None:
    """Writes `tokenizer.json` into `target` for a model that has only a slow or sentencepiece tokenizer."""
    import transformers

    with reported_as(f"{folder} cannot be read for its tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))


if __name__ == "__main__":  # a process of its own, so that what the conversion loads is gone when it is done
    try:
        convert_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        sys.exit(f"error: {error}")
