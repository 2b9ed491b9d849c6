"""A model's tokenizer: text to token ids, and what single tokens stand for. Text that grows token by token is
in stream.py.

Rests on the bare `tokenizers.Tokenizer`, which many threads may share because nothing here changes it after
loading.

    python -m text.tokenizer MODEL_FOLDER TOKENIZER_FOLDER [TOKENIZER_CONFIG [MM_PROCESSOR_KWARGS]]

runs at startup, in a process of its own, and prints what the worker needs of a tokenizer that it does not
load: the EOS ids that the model's files name, and the largest id of ordinary text. A file that cannot be read
ends it with one line.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import string
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from manifest import Manifest, read_json
from run import ConfigError, Json
from text.escaping import Escaping, utf8_bytes
from text.images.layouts import read_layout
from text.template import ChatTemplate, special_tokens_in

# End-of-turn tokens that some chat checkpoints leave out of their list of EOS ids, so that their outputs
# never end.
END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|im_end|>", "<end_of_turn>")
TOKEN_TEXTS = 16_384  # how many are kept for log-probabilities
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# The classes of transformers 4 that begin texts with BOS as tokenizer_config.json says. DeepSeek's
# tokenizer.json alone would add none.
ADD_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
# How texts are split into words. Some of Mistral's models, such as Small 3.1, have Llama 3's expression in
# tokenizer.json, and were trained with the one in tekken.json.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The 256 characters that stand for bytes in byte-level BPE (Radford et al. 2019). Printable ones stand for
# themselves; the others, in their order, are numbered from 256 on.
CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
ALPHABET = dict(zip(CHARACTERS, sorted(range(256), key=lambda byte: chr(byte) not in CHARACTERS)))


class TooManyTokens(Exception):
    """A text is longer than was asked for; `args` holds the number of its tokens."""


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    Raises ConfigError when `tokenizer_dir` holds no tokenizer that can be read. The text of a decoded output
    has neither `eos_token_ids` nor the tokens that the tokenizer calls special. With `escapes`, `escape`
    keeps clients' texts from becoming a special token or one of `reserved`; without, only from becoming one
    of `reserved`. Either loads a second tokenizer.
    """

    def __init__(
        self,
        tokenizer_dir: str | Path,
        eos_token_ids: Iterable[int] = (),
        escapes: bool = False,
        reserved: Collection[int] = (),
    ):
        self._tokenizer = _read_tokenizer(Path(tokenizer_dir) / "tokenizer.json")
        # Both return None for what the vocabulary does not have.
        self.id_to_token = self._tokenizer.id_to_token
        self.token_to_id = self._tokenizer.token_to_id
        added = self._tokenizer.get_added_tokens_decoder()
        special = (token_id for token_id, token in added.items() if token.special)
        self.special_ids = frozenset([*special, *eos_token_ids])
        self._escaping = None
        if escapes or reserved:
            special_ids = self.special_ids.union(reserved)
            escaped_ids = special_ids if escapes else frozenset(reserved)
            self._escaping = Escaping(self._tokenizer, special_ids, escaped_ids)
        decoder = _described(self._tokenizer.decoder)
        kinds = [step.get("type") for step in decoder.get("decoders") or [decoder]]  # such as ByteLevel
        # A token is a run of bytes, and nothing else changes the text.
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in kinds  # tokens like <0xE2> stand for single bytes
        # Characters, or bytes where they are more.
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._anchor = self._find_anchor()
        self._anchor_text = self.decode(self._anchor)
        # The top tokens of each position are many texts, and mostly the same ones.
        self.token_text = functools.lru_cache(TOKEN_TEXTS)(self._token_text)
        self.token_bytes = functools.cache(self._token_bytes)

    def _find_anchor(self) -> list[int]:
        """Returns a token to stand before another one, so that the other does not lose the space that begins
        a text. The list has one id; it is empty if no token of the vocabulary is letters or digits."""
        likely = self.encode("a", add_special_tokens=False)[-1:]
        for token_id in itertools.chain(likely, range(self._tokenizer.get_vocab_size())):
            if self.decode([token_id]).isalnum():
                return [token_id]
        return []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. What `escape` returned is read as text only.

        add_special_tokens: adds what the tokenizer adds to a text, such as BOS. Other threads run meanwhile.
        Raises ValueError for a text that the tokenizer cannot process, and for escaped text that it can only
        read as a special token.
        """
        encoding = self._encoded(text, add_special_tokens, has_offsets=False)
        return self._escaping.ids(encoding) if self._escaping else encoding.ids

    def spans(
        self, text: str, add_special_tokens: bool = True, most: float = math.inf
    ) -> list[tuple[int, int, int]]:
        """Returns each token's id, and where in the UTF-8 bytes of `text` the token begins and ends: 0, 0 if
        the tokenizer added that token. With escaped text, the bytes are those of the text that `unescape`
        returns.

        Raises TooManyTokens when there are more than `most` tokens, and ValueError as `encode` does: for a
        text that the tokenizer cannot process, or can only read as a special token.
        """
        encoding = self._encoded(text, add_special_tokens, has_offsets=True)
        count = len(encoding)
        if count > most:
            del encoding  # takes 250 bytes a token, and the traceback of the error would keep it
            raise TooManyTokens(count)
        ids = encoding.ids
        widths = map(utf8_bytes, text)
        if self._escaping:
            ids = self._escaping.ids(encoding)
            widths = self._escaping.widths(text)
        at = list(itertools.accumulate(widths, initial=0))
        return [(i, at[start], at[stop]) for i, (start, stop) in zip(ids, encoding.offsets)]

    def _encoded(self, text: str, add_special_tokens: bool, has_offsets: bool) -> tokenizers.Encoding:
        """Encodes a text, with the offsets of its tokens if `has_offsets`: without these, encoding is faster.
        The ids are those of the escaping tokenizer if there is one, not yet the model's. Raises ValueError
        for a text that the tokenizer cannot process."""
        tokenizer = self._tokenizer
        if self._escaping:
            tokenizer = self._escaping.tokenizer
            text = self._escaping.to_encodable(text)
        # A batch, because only that lets other threads run meanwhile: a text of a megabyte takes a second.
        encode = tokenizer.encode_batch if has_offsets else tokenizer.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # a panic of the library is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError("the tokenizer cannot process this text") from None
        return encoding

    def escape(self, value: Any) -> Any:
        """Returns a text of a client, or JSON of several, so that `encode` reads it as text only. `unescape`
        turns a text back into what the client sent. Without an option to escape, the value is returned as it
        is. Raises RecursionError for JSON that is nested too deeply."""
        return self._escaping.escape(value) if self._escaping else value

    def unescape(self, text: str) -> str:
        return self._escaping.unescape(text) if self._escaping else text

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` as a whole, without special tokens and EOS tokens."""
        return self._tokenizer.decode([i for i in ids if i not in self.special_ids], skip_special_tokens=True)

    def _token_text(self, token_id: int) -> str:
        """The text of one token by itself, as it reads in the middle of a text; special tokens show their
        name."""
        if token_id in self.special_ids:
            return self.id_to_token(token_id) or ""
        return self.decode([*self._anchor, token_id])[len(self._anchor_text) :]

    def _token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token of a byte-level tokenizer; b"" for special and unknown ids."""
        if token_id in self.special_ids:
            return b""
        token = self.id_to_token(token_id) or ""
        if ALPHABET.keys() >= set(token):
            return bytes(ALPHABET[character] for character in token)
        return token.encode()  # an added token, written in plain text

    def piece_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes that a token adds to any text. None: the token is special, or it is no single
        byte and the tokenizer is not byte-level, so that the tokens around it count, too."""
        if token_id in self.special_ids:
            return None
        if self.is_byte_level:
            return self.token_bytes(token_id)
        if self.is_byte_token(token_id):
            return bytes.fromhex(self.id_to_token(token_id)[3:5])
        return None

    def is_byte_token(self, token_id: int) -> bool:
        """Whether a token stands for a single byte, as <0xE2> does."""
        return self.has_byte_fallback and BYTE_TOKEN.fullmatch(self.id_to_token(token_id) or "") is not None


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json, and makes it encode as the model was trained: without truncation and padding,
    with the words of Mistral's models, and with the BOS token that tokenizer_config.json beside it asks for.
    Raises ConfigError for a file that is missing or cannot be read."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()  # some checkpoints were saved with these on
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = False
    _split_as_trained(tokenizer)
    _begin_with_bos(tokenizer, read_json(path.with_name("tokenizer_config.json")))
    return tokenizer


def _split_as_trained(tokenizer: tokenizers.Tokenizer) -> None:
    """Changes a tokenizer of Mistral, which has the token [INST], in place: texts are split into the words
    that the model was trained with, if its file has Llama 3's. Other tokenizers stay as they are."""
    if tokenizer.token_to_id("[INST]") is None:
        return
    steps = _described(tokenizer.pre_tokenizer).get("pretokenizers", [])
    if {"Regex": LLAMA3_WORDS} in [step.get("pattern") for step in steps]:
        words = pre_tokenizers.Split(tokenizers.Regex(TEKKEN_WORDS), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])


def _begin_with_bos(tokenizer: tokenizers.Tokenizer, config: Json) -> None:
    """Replaces a tokenizer's post-processor by one that adds BOS to texts, and nothing else, if
    tokenizer_config.json asks for BOS and the tokenizer does not add it already. Only the classes of ADD_BOS
    are changed."""
    bos = special_tokens_in(config).get("bos_token")
    class_adds_bos = str(config.get("tokenizer_class")).removesuffix("Fast") in ADD_BOS
    if not (class_adds_bos and config.get("add_bos_token") is True and bos):
        return
    token_id = tokenizer.token_to_id(bos)
    if token_id is not None and token_id not in tokenizer.encode("").ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, token_id)]
        )


def _described(part: pre_tokenizers.PreTokenizer | decoders.Decoder | None) -> Json:
    """Returns what tokenizer.json says of this part; {} for None. To write all of the file takes half a
    second."""
    return json.loads(part.__getstate__()) if part else {}


def read_facts(
    folder: Path,
    tokenizer_dir: Path,
    tokenizer_config_path: str | None = None,
    mm_processor_kwargs: str | None = None,
) -> Json:
    """Returns what the worker needs of a tokenizer: `eos_token_ids`, which the model's files name, and
    `largest_id`.

    The EOS ids are those of `eos_token` and of the special tokens in END_OF_TURN, each once; the list may be
    empty. `largest_id` is the largest id of the printable ASCII characters. folder: of the model.
    mm_processor_kwargs: an object in JSON.

    Raises ConfigError for a tokenizer that cannot be read or encodes nothing, for files of a chat template
    that cannot be read, for a `tokenizer_config_path` that does not exist and, with `mm_processor_kwargs`,
    for an image processor that does not fit the model.
    """
    ChatTemplate.load(folder, tokenizer_config_path)
    tokenizer = Tokenizer(tokenizer_dir)
    path = tokenizer_dir / "tokenizer.json"
    if mm_processor_kwargs:
        _check_images(folder, tokenizer, json.loads(mm_processor_kwargs))
    try:
        ids = tokenizer.encode(string.printable)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
    if not ids:
        raise ConfigError(f"{path} turns text into nothing, so it does not fit any model")
    eos = special_tokens_in(read_json(folder / "tokenizer_config.json")).get("eos_token")
    eos_ids = []
    for name in dict.fromkeys(filter(None, (eos, *END_OF_TURN))):
        token_id = tokenizer.token_to_id(name)
        if token_id is not None and (name == eos or token_id in tokenizer.special_ids):
            eos_ids.append(token_id)
    return {"eos_token_ids": eos_ids, "largest_id": max(ids)}


def _check_images(folder: Path, tokenizer: Tokenizer, overrides: Json) -> None:
    """Raises ConfigError if config.json and tokenizer.json have other image tokens, if the image processor's
    fields or `overrides` are not valid, or if there are `overrides` and the model reads no images."""
    manifest = Manifest.read(folder)
    if manifest.reads_images:
        token = read_layout(manifest, overrides).token
        token_id = tokenizer.token_to_id(token)
        if token_id is None or token_id != manifest.image_token_id:
            tokens = f"{manifest.image_token_id} in config.json and {token_id} in tokenizer.json"
            raise ConfigError(f"{folder}: the image token {token} is {tokens}")
    elif overrides:
        raise ConfigError(
            "--mm-processor-kwargs (MM_PROCESSOR_KWARGS): this model reads no images; leave it out"
        )


if __name__ == "__main__":
    try:
        print(json.dumps(read_facts(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))
    except ConfigError as error:
        sys.exit(str(error))
