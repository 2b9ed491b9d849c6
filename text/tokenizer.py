"""Text to token ids and back: the model's tokenizer, text that streams as its tokens arrive, and stop strings.

Rests on the bare `tokenizers.Tokenizer`, which many threads may share because nothing here changes it after loading. This
layer knows no HTTP, no sockets, no torch.

    python3 text.py MODEL_FOLDER TOKENIZER_FOLDER [TOKENIZER_CONFIG]
        checks a model's tokenizer and chat template at boot, in a process of its own, and prints the EOS ids that they name
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import itertools
import json
import math
import re
import string
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from manifest import read_json
from run import ConfigError
from text.escaping import Escaping, utf8_bytes
from text.template import ChatTemplate

# End-of-turn tokens that some chat checkpoints leave out of their list of EOS ids, so that their answers never end.
END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|im_end|>", "<end_of_turn>")
ALL_BYTES = 1_000_000  # more than any token has
TOKEN_TEXTS = 16_384  # how many are kept for log-probabilities
PROBE = string.printable * 200  # text that tells at boot what a tokenizer costs
MAX_TOKENS = 50  # a character; published tokenizers make at most 4
MAX_GROWTH = 100  # characters that a normalizer or decoder makes of one, in all its steps
T = TypeVar("T")
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    Raises ConfigError when `tokenizer_dir` holds none that can be read. `eos_token_ids` are left out of the text, as are
    the tokens that the tokenizer calls special. With `escapes`, `escape` keeps what clients write from becoming special tokens.
    """

    def __init__(self, tokenizer_dir: str | Path, eos_token_ids: Iterable[int] = (), escapes: bool = False):
        path = Path(tokenizer_dir) / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
        self._tokenizer.no_truncation()  # some checkpoints were saved with these on
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = False
        # Both return None for what the vocabulary does not have.
        self.id_to_token, self.token_to_id = self._tokenizer.id_to_token, self._tokenizer.token_to_id
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special) | frozenset(
            eos_token_ids
        )
        self._escaping = Escaping(self._tokenizer, self.special_ids) if escapes else None
        decoder = json.loads(self._tokenizer.to_str()).get("decoder")
        steps = (decoder.get("decoders") or [decoder]) if decoder else []
        kinds = [step["type"] for step in steps]
        self.is_byte_level = kinds == [
            "ByteLevel"
        ]  # every token is a run of bytes and nothing else changes the text
        self.has_byte_fallback = "ByteFallback" in kinds  # tokens like <0xE2> stand for single bytes
        self.longest_token = max(
            map(len, self._tokenizer.get_vocab()), default=1
        )  # characters, or bytes where they are more
        # A token to stand before another one, so that the other does not lose the space that begins a text.
        candidates = (
            *self.encode("a", add_special_tokens=False)[-1:],
            *range(self._tokenizer.get_vocab_size()),
        )
        self._anchor = next(([i] for i in candidates if self.decode([i]).isalnum()), [])
        self._anchor_text = self.decode(self._anchor)
        # The top tokens of each position are many texts, and mostly the same ones.
        self.token_text = functools.lru_cache(TOKEN_TEXTS)(self._token_text)
        self.token_bytes = functools.cache(self._token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for a text that the tokenizer cannot process."""
        # A batch, because only that lets other threads run meanwhile: a text of a megabyte takes a second.
        prepared, tokenizer = self._prepared(text)
        with _no_panic():
            (encoding,) = tokenizer.encode_batch_fast([prepared], add_special_tokens=add_special_tokens)
        return self._escaping.ids(encoding) if self._escaping else encoding.ids

    def spans(
        self, text: str, add_special_tokens: bool = True, most: float = math.inf
    ) -> list[tuple[int, int, int]]:
        """Each token's id, and where in the UTF-8 bytes of `text` it begins and ends; 0, 0 if the tokenizer put it there.

        Raises TooManyTokens when there are more than `most`, ValueError for a text that the tokenizer cannot process.
        """
        prepared, tokenizer = self._prepared(text)
        with _no_panic():
            (encoding,) = tokenizer.encode_batch([prepared], add_special_tokens=add_special_tokens)
        if (count := len(encoding)) > most:
            del encoding  # takes 250 bytes a token, and the traceback of the error would keep it
            raise TooManyTokens(count)
        ids, widths = encoding.ids, map(utf8_bytes, text)
        if self._escaping:
            ids, widths = self._escaping.ids(encoding), self._escaping.widths(text)
        at = [0, *itertools.accumulate(widths)]
        return [(i, at[start], at[stop]) for i, (start, stop) in zip(ids, encoding.offsets)]

    def _prepared(self, text: str) -> tuple[str, tokenizers.Tokenizer]:
        """What is encoded for a text, and by which tokenizer."""
        return (
            (self._escaping.prepare(text), self._escaping.tokenizer)
            if self._escaping
            else (text, self._tokenizer)
        )

    def escape(self, value: T) -> T:
        """A text of a client, or JSON of several, for `encode` to read as text only; `unescape` is for what clients read."""
        return self._escaping.escape(value) if self._escaping else value

    def unescape(self, text: str) -> str:
        return self._escaping.unescape(text) if self._escaping else text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a whole, without special tokens."""
        return self._tokenizer.decode([i for i in ids if i not in self.special_ids], skip_special_tokens=True)

    def _token_text(self, token_id: int) -> str:
        """The text of one token by itself, as it reads in the middle of a text; special tokens show their name."""
        if token_id in self.special_ids:
            return self.id_to_token(token_id) or ""
        return self.decode([*self._anchor, token_id])[len(self._anchor_text) :]

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer; none for special and unknown ids."""
        token = "" if token_id in self.special_ids else self.id_to_token(token_id) or ""
        if ALPHABET.keys() >= set(token):
            return bytes(ALPHABET[character] for character in token)
        return token.encode()  # an added token, written in plain text

    def piece_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to any text; None for special tokens, and where the text around it has a say."""
        if token_id in self.special_ids:
            return None
        if self.is_byte_level:
            return self.token_bytes(token_id)
        if self.is_byte_token(token_id):
            return bytes.fromhex((self.id_to_token(token_id) or "")[3:5])
        return None

    def prompt_texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token of a prompt, as a stream of them would show it: all but the names of special tokens add up to
        `decode(ids)`."""
        stream, last = TextStream(self, ()), len(ids) - 1
        return [
            piece.text
            for n, token_id in enumerate(ids)
            for piece in stream.push(token_id, 0.0, [], last=n == last)
        ]

    def is_byte_token(self, token_id: int) -> bool:
        return self.has_byte_fallback and BYTE_TOKEN.fullmatch(self.id_to_token(token_id) or "") is not None


def _byte_level_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level BPE (Radford et al. 2019): printable ones for themselves, the
    others, in their order, from 256 on."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return dict(zip(characters, sorted(range(256), key=lambda byte: chr(byte) not in characters)))


ALPHABET = _byte_level_alphabet()


class _ByteLevel:
    """Every token is a run of bytes: an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt[-PROMPT_TAIL:]:  # a prompt may end inside a character
            self._decoder.decode(self._bytes_of(token_id))
        self._has_begun = False  # until then what is held is the prompt's

    @property
    def holds_text(self) -> bool:
        return self._has_begun and bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        added = self._bytes_of(token_id)
        self._has_begun = self._has_begun or bool(added)
        return self._decoder.decode(added)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True) if self._has_begun else ""


PROMPT_TAIL = 64  # tokens: more than a character and the special tokens in the middle of it take
MIN_CONTEXT = 8  # tokens: a character can take 4, and another one have begun with 3
MAX_HELD = 16  # tokens: each can end one character and begin another


class _Windowed:
    """Any other decoder: what a token adds is the text of the last few tokens with it, less their text without it.

    The window reaches back to the last token that added text, so that the decoder sees no token as the first of a text
    (whose leading space would be stripped).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context, self._new = self._prompt_tail(prompt), []
        self._context_text = tokenizer.decode(self._context)
        if self._context_text.endswith(
            "\ufffd"
        ):  # inside a character, which the answer may complete: it is not out yet
            shorter = (tokenizer.decode(self._context[: len(self._context) - n]) for n in range(4))
            self._context_text = max((text.rstrip("\ufffd") for text in shorter), key=len)

    def _prompt_tail(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, far enough back that they have a text and no run of bytes is cut."""
        start = len(prompt)
        while start > 0:
            start -= 1
            whole_run = start == 0 or not (
                self._in_byte_run(prompt[start]) or self._in_byte_run(prompt[start - 1])
            )
            if whole_run and len(prompt) - start >= MIN_CONTEXT and self._tokenizer.decode(prompt[start:]):
                break
        return list(prompt[start:])

    def _in_byte_run(self, token_id: int) -> bool:
        if token_id in self._tokenizer.special_ids:
            return self._tokenizer.has_byte_fallback
        return self._tokenizer.is_byte_token(token_id)

    @property
    def holds_text(self) -> bool:
        return bool(self._new)

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._new.append(token_id)
        if self._in_byte_run(token_id):
            return ""
        return self._release()

    def finish(self) -> str:
        return self._release(final=True) if self._new else ""

    def _release(self, final: bool = False) -> str:
        text = self._tokenizer.decode(self._context + self._new)
        if text.endswith("\ufffd") and len(self._new) < MAX_HELD and not final:  # perhaps inside a character
            return ""
        added = text[len(self._context_text) :]
        if added:
            self._context, self._new = self._new, []
            self._context_text = self._tokenizer.decode(self._context)
        return added


def detokenizer_for(tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> _ByteLevel | _Windowed:
    """Text from token ids as they arrive: `push` returns the text that has become certain, `finish` the rest.

    All of it together is exactly what decoding prompt and tokens at once adds to the prompt's text. Text is held back while
    a later token could still change it: inside a character, or inside a run of single-byte tokens. Constant time a token.
    """
    return _ByteLevel(tokenizer, prompt) if tokenizer.is_byte_level else _Windowed(tokenizer, prompt)


def find_stop(text: str, stops: Sequence[str], scanned: int) -> int | None:
    """Where `text` is to end: just behind the stop string that is complete first; None if there is none.

    The first `scanned` characters are known to hold no complete stop string.
    """
    places = ((text.find(stop, max(0, scanned - len(stop) + 1)), len(stop)) for stop in stops)
    return min((at + length for at, length in places if at >= 0), default=None)


def stop_begun(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that more text could make a stop string of; empty if there is none."""
    longest = max(map(len, stops), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(len(stop) > len(text) - at and stop.startswith(text[at:]) for stop in stops):
            return text[at:]
    return ""


@dataclass
class Piece:
    """One generated token as clients see it."""

    id: int
    text: str
    logprob: float | None
    special: bool
    top: list[tuple[int, float]] = field(default_factory=list)
    cut: int = 0  # how many bytes of its end a stop string took


class TextStream:
    """One request's tokens as pieces of text, with its stop strings.

    `push` returns the pieces whose text is certain, one for each token. While text is held back its last piece is held back
    too, so that the texts of the pieces that are not special add up to `text` whatever the last token is.

    The text ends behind the stop string that is complete first, or, without `keep_stop`, before it: then the end of a text
    that may yet become a stop string is held back until it is certain which. If several are complete at once, the text ends
    before the longest of them. Stop strings that are complete before the token number `min_tokens` are ordinary text; one
    that ends with that token's text or later counts, wherever it began.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        keep_stop: bool = True,
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_for(tokenizer, prompt)
        self._stops = [stop for stop in stops if stop]
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._length = 0  # characters: of all the text,
        self._certain = 0  # of that which stays, whatever comes,
        self._released = 0  # and of that which was returned
        self._recent = ""  # the end of the text, in which a stop string has begun
        self._pending: deque[Piece] = deque()
        self._carrier: Piece | None = None  # the newest piece that is not special; text goes to it
        self._opener: Piece | None = None  # the piece in which the character began that is not complete yet
        self.tokens = 0
        self.stopped = False  # a stop string is complete; the text ends with it, or before it

    @property
    def text(self) -> str:
        return "".join(self._parts)[: self._certain]

    def push(
        self, token_id: int, logprob: float | None, top: list[tuple[int, float]], last: bool = False
    ) -> list[Piece]:
        """Takes the next token. After the `last` one, and once `stopped`, everything has been returned."""
        self.tokens += 1
        special = token_id in self._tokenizer.special_ids
        name = (self._tokenizer.id_to_token(token_id) or "") if special else ""
        piece = Piece(token_id, name, logprob, special, top)
        text = self._detokenizer.push(token_id)
        self._pending.append(piece)
        if not special:
            self._carrier = piece
            self._add(text)
            if not self._detokenizer.holds_text:
                self._opener = None
            elif text or self._opener is None:
                self._opener = piece
        if last and not self.stopped:
            return self.finish()
        return self._release(everything=self.stopped)

    def finish(self) -> list[Piece]:
        """What was held back, when no token comes any more."""
        self._add(self._detokenizer.finish())
        if not self.stopped:
            self._certain = self._length  # nothing comes that could complete a stop string
        return self._release(everything=True)

    def _add(self, text: str) -> None:
        """Gives text to the newest piece that can carry it, and looks whether a stop string ends in it."""
        if not text:
            return
        assert self._carrier is not None, "only such a token brings text"
        self._carrier.text += text
        self._parts.append(text)
        self._length += len(text)
        if not self._stops:
            self._certain = self._length
            return
        recent = self._recent + text
        end = find_stop(recent, self._stops, len(self._recent)) if self.tokens >= self._min_tokens else None
        if end is None:
            self._recent = stop_begun(recent, self._stops)
            self._certain = self._length - (0 if self._keep_stop else len(self._recent))
            return
        self.stopped = True
        if not self._keep_stop:  # the longest that ends here, so that nothing shows of any
            end -= max(len(stop) for stop in self._stops if recent.endswith(stop, 0, end))
        self._cut(len(recent) - end)

    def _cut(self, excess: int) -> None:
        """Takes that many characters off the end of the text, which no piece that was returned has a part in."""
        self._length = self._certain = self._length - excess
        is_gone = (
            False  # the whole text of the piece behind, and with it a character that began before that piece
        )
        for piece in reversed(self._pending):
            if piece.special or not (excess or (is_gone and not piece.text)):
                continue
            kept = max(0, len(piece.text) - excess)
            excess -= len(piece.text) - kept
            piece.cut = len(piece.text[kept:].encode()) or ALL_BYTES
            piece.text, is_gone = piece.text[:kept], kept == 0

    def _release(self, everything: bool) -> list[Piece]:
        released: list[Piece] = []
        # Where a stop string may begin with that character, all of its bytes are held back.
        held = (self._carrier if self._keep_stop else self._opener) if self._detokenizer.holds_text else None
        while self._pending:
            piece = self._pending[0]
            end = self._released + (0 if piece.special else len(piece.text))
            # A piece without text may hold the first bytes of the character behind it, which is not certain yet.
            opens_uncertain = not piece.special and not piece.text and end == self._certain < self._length
            if not everything and (end > self._certain or opens_uncertain or piece is held):
                break
            self._released = end
            released.append(self._pending.popleft())
        return released


@contextlib.contextmanager
def _no_panic() -> Iterator[None]:
    """A panic of the tokenizers library, which is no Exception, becomes a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the tokenizer cannot process this text") from None


class TooManyTokens(Exception):
    """A text is longer than was asked for; `args` holds the number of its tokens."""


def check(folder: Path, tokenizer_dir: Path, tokenizer_config_path: str | None = None) -> dict[str, Any]:
    """Makes sure that the tokenizer of a model works and that the files of its chat template can be read. Returns the EOS ids
    that they name, and the largest id of ordinary text (models/tokenizer.py: TokenizerFacts)."""
    ChatTemplate.load(folder, tokenizer_config_path)
    tokenizer, path = Tokenizer(tokenizer_dir), tokenizer_dir / "tokenizer.json"
    if not tokenizer.encode("a"):
        raise ConfigError(f"{path} turns text into nothing, so it does not fit any model")
    try:
        ids = tokenizer.encode(PROBE)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
    if len(ids) > MAX_TOKENS * len(PROBE):
        rule = f"at most {MAX_TOKENS} can be served"
        raise ConfigError(f"{path} makes {len(ids) / len(PROBE):.0f} tokens of a character, and {rule}")
    steps = json.loads(path.read_text())
    for kind in ("normalizer", "decoder"):
        if (growth := _growth(steps.get(kind))) > MAX_GROWTH:
            rule = f"at most {MAX_GROWTH} can be served"
            raise ConfigError(f"the {kind} of {path} may write {growth:.3g} characters for one, and {rule}")
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    named = {name: tokenizer.token_to_id(name) for name in (eos, *END_OF_TURN) if isinstance(name, str)}
    eos_ids = [
        i for name, i in named.items() if i is not None and (i in tokenizer.special_ids or name == eos)
    ]
    return {"eos_token_ids": eos_ids, "largest_id": max(ids)}


def _growth(steps: Any) -> float:
    """How many characters the steps of a normalizer or decoder may make of one, by the texts that they write."""
    if isinstance(steps, list):
        return math.prod(map(_growth, steps))
    if not isinstance(steps, dict):
        return 1.0
    return _growth(list(steps.values())) * max(1, len(steps.get("content") or steps.get("prepend") or ""))


if __name__ == "__main__":
    try:
        print(json.dumps(check(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))
    except ConfigError as error:
        sys.exit(str(error))
