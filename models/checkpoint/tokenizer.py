"""The folder with a model's `tokenizer.json`: the model's own, or one converted from a slow or sentencepiece
tokenizer.

API server processes read only `tokenizer.json`. A conversion needs transformers, so it runs in a child
process, once: the result is kept in the model cache. A child process of the text layer tries out each
tokenizer, so that a broken one fails at startup with one line.

    python -m models.checkpoint.tokenizer FOLDER TARGET     writes TARGET/tokenizer.json
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from config import Config
from manifest import read_json, reject_lfs_pointer
from models.cache import identify, installed
from models.checkpoint.source import build_cached
from models.child import ChildError, run_module
from models.errors import ModelError, reported_as, run_program
from run import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

TIMEOUT_S = 900
CONFIG = "tokenizer_config.json"
FAST = "tokenizer.json"
TEKKEN = "tekken.json"  # Mistral's own format
SAMPLES = 300  # texts with which a conversion is compared
TOKENS_PER_SAMPLE = 12  # in each
SLOW = ("tokenizer.model", "vocab.json", "spiece.model", TEKKEN)


class TokenizerFacts(NamedTuple):
    """A model's tokenizer, and what `text/tokenizer.py` finds out about it."""

    folder: Path
    eos_token_ids: list[int]  # as its files name them
    largest_id: int  # of the tokens of ordinary text


def find_tokenizer(folder: Path) -> str:
    """Returns the name of the tokenizer's file, without its folder: the first that the folder has of FAST and
    SLOW. Whether it is a tokenizer is not checked. Raises ConfigError where there is none, and for a git-lfs
    pointer in its place."""
    for name in (FAST, *SLOW):
        if (folder / name).exists():
            reject_lfs_pointer(folder / name)
            return name
    raise ConfigError(
        f"{folder} holds no tokenizer (tokenizer.json, or one to convert: tokenizer.model, vocab.json)"
    )


def tokenizer_folder(config: Config, folder: Path) -> Path:
    """Returns the folder with the tokenizer.json of the model in `folder`: `folder` itself, or an entry of
    the cache with the converted tokenizer. The first call converts it in a child process, and waits up to
    TIMEOUT_S; before that, without a limit, while another process converts.

    Raises ConfigError where the model has no tokenizer or a file cannot be read, ModelError where the
    tokenizer cannot be converted; a MachineError, which is a ModelError, if the time or the memory was not
    enough.
    """
    found = find_tokenizer(folder)
    if found == FAST:
        return folder
    identity = [identify(folder, ("*.json", "*.model", "*.txt")), installed("transformers")]
    doing = f"converting the tokenizer of {folder} ({found})"
    return build_cached(config, "tokenizer", identity, [folder.absolute()], doing, timeout_s=TIMEOUT_S)


def check_tokenizer(config: Config, folder: Path) -> TokenizerFacts:
    """Finds or converts the tokenizer of the model in `folder`, and has `text/tokenizer.py` try it out in a
    child process, also with the chat template and the image options of the settings. Waits up to TIMEOUT_S
    for the conversion and as long for the trial; without a limit while another process converts. Returns the
    folder of tokenizer.json, and what was found out.

    Raises ConfigError for a tokenizer that is missing or cannot be read, that fails, or that takes too long
    to try out; ModelError for one that cannot be converted in time.
    """
    tokenizer_dir = tokenizer_folder(config, folder)
    settings = [config.tokenizer_config_path or "", config.mm_processor_kwargs or "{}"]
    try:
        facts = run_module(
            ["text.tokenizer", str(folder), str(tokenizer_dir), *settings], timeout_s=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the tokenizer needs more than {TIMEOUT_S} s") from None
    except ChildError as error:
        raise ConfigError(str(error)) from None
    return TokenizerFacts(tokenizer_dir, **json.loads(facts))


def main(folder: Path, target: Path) -> None:
    """Writes the tokenizer of the model in `folder` as tokenizer.json into the folder `target`. Runs no code
    of the model.

    Raises ConfigError where there is no tokenizer, or a file cannot be read; ModelError where it cannot be
    converted or written: transformers cannot read it, its conversion gives other tokens than sentencepiece,
    or it needs transformers 5 and the installed version is older.
    """
    import transformers

    found = find_tokenizer(folder)
    is_old = Version(transformers.__version__).major < 5
    if is_old and (found == TEKKEN or _is_written_by_5(folder)):
        written = f"{folder / CONFIG} was written by transformers 5"
        if found == TEKKEN:
            written = f"{folder / TEKKEN} is in Mistral's own format"
        raise ModelError(
            f"{written}; without tokenizer.json the {transformers.__version__} of the Neuron SDK cannot read "
            "it; add the model's tokenizer.json"
        )
    with reported_as(f"{folder} cannot be read for its tokenizer"):
        if found == TEKKEN:
            from transformers.integrations.mistral import convert_tekken_tokenizer

            tokenizer = convert_tekken_tokenizer(str(folder / TEKKEN))
            tokenizer.add_bos_token = True  # transformers leaves it to mistral-common
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
        if found == "tokenizer.model":
            backend = _like_sentencepiece(backend, folder / found)
        backend.save(str(target / FAST))


def _like_sentencepiece(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """Returns a tokenizer that does what sentencepiece does with the file `path`, and what the
    tokenizer_config.json beside that file adds. If that file has no `add_bos_token`, a text begins with the
    bos token, if there is one, and ends with the eos token only if that file has `add_eos_token`.

    tokenizer: transformers' conversion. It stays if it agrees with sentencepiece on random texts, but for its
    `post_processor`, which may change in place; and it stays as it is if sentencepiece cannot read the file,
    such as one of tiktoken. Raises ModelError for a conversion that cannot be mended, ConfigError for a
    tokenizer_config.json that cannot be read.
    """
    import transformers
    from sentencepiece import SentencePieceProcessor
    from tokenizers import normalizers, processors

    try:
        own = SentencePieceProcessor(model_file=str(path))
    except RuntimeError:
        return tokenizer  # of a file of tiktoken's, as Llama 3 has
    given = read_json(path.parent / CONFIG)
    begins_once = given.get("legacy") is False  # not anew behind each special token
    wrong = _misread(tokenizer, own, begins_once)
    if wrong and own.encode("a", out_type=str)[0].startswith("▁"):
        tokenizer = transformers.LlamaTokenizerFast.from_pretrained(path.parent).backend_tokenizer
        if not begins_once:  # transformers' own would lose a space at the beginning
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            tokenizer.pre_tokenizer = None
        wrong = _misread(tokenizer, own, begins_once)
    if wrong:
        raise ModelError(f"it reads {wrong!r} in other tokens than sentencepiece; add the model's {FAST}")
    if "add_bos_token" not in given and own.bos_id() >= 0:
        bos = own.id_to_piece(own.bos_id())
        template = [bos, "$A"]
        special = [(bos, own.bos_id())]
        if given.get("add_eos_token") and own.eos_id() >= 0:
            eos = own.id_to_piece(own.eos_id())
            template.append(eos)
            special.append((eos, own.eos_id()))
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def _misread(tokenizer: Tokenizer, own: SentencePieceProcessor, begins_once: bool) -> str | None:
    """Returns the first of SAMPLES texts without special tokens to which the tokenizer gives other tokens
    than sentencepiece, `own`, does, or another text back; None: there is none. The texts are random, and the
    same in each run. begins_once: texts begin without spaces."""
    special = tokenizer.get_added_tokens_decoder()
    ordinary = [token for token in range(own.get_piece_size()) if token not in special]
    rng = Random(0)
    for number in range(SAMPLES):
        text = " " * (number % 3) + own.decode(rng.choices(ordinary, k=TOKENS_PER_SAMPLE))
        text = text.lstrip() if begins_once else text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != own.encode(text) or tokenizer.decode(ids, skip_special_tokens=False) != own.decode(ids):
            return text
    return None


def _is_written_by_5(folder: Path) -> bool:
    """Whether the tokenizer_config.json of a folder has what transformers 4 fails on, or would silently read
    otherwise. False without the file. Raises ConfigError if it cannot be read."""
    given = read_json(folder / CONFIG)
    return "backend" in given or isinstance(given.get("extra_special_tokens"), list)


if __name__ == "__main__":
    run_program(main, Path, Path)
