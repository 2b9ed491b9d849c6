"""Text to token ids and back: the tokenizer, text that streams as its tokens arrive, and stop strings.

Rests on the bare `tokenizers.Tokenizer`, which many threads may share because nothing here changes it after loading. This
layer knows no HTTP, no sockets, no torch.

    python3 text.py MODEL_FOLDER TARGET     prepares a model's tokenizer at boot, in a process of its own: checks it, has a
                                            slow one converted into TARGET, and prints what the worker must know of it
"""

from __future__ import annotations

import codecs
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from config import HERE, ConfigError, read_json

# End-of-turn tokens that some chat checkpoints leave out of their list of EOS ids, so that their answers never end.
END_OF_TURN = ("<|eot_id|>", "<|eot|>", "<|im_end|>", "<end_of_turn>")


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    Raises ConfigError when `tokenizer_dir` holds none that can be read. `eos_token_ids` are left out of the text, as are
    the tokens that the tokenizer calls special.
    """

    def __init__(self, tokenizer_dir: str | Path, eos_token_ids: Iterable[int] = ()):
        path = Path(tokenizer_dir) / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
        self._tokenizer.no_truncation()  # some checkpoints were saved with these on
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = False
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special) | frozenset(eos_token_ids)
        decoder = json.loads(self._tokenizer.to_str()).get("decoder")
        steps = (decoder.get("decoders") or [decoder]) if decoder else []
        self._decoder_types = [step["type"] for step in steps]
        self._bytes: dict[int, bytes] = {}
        self._anchor = self._find_anchor()

    @property
    def is_byte_level(self) -> bool:
        """Every token is a run of bytes and nothing else changes the text."""
        return self._decoder_types == ["ByteLevel"]

    @property
    def has_byte_fallback(self) -> bool:
        """Tokens like <0xE2> stand for single bytes."""
        return "ByteFallback" in self._decoder_types

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a whole, without special tokens."""
        return self._tokenizer.decode([i for i in ids if i not in self.special_ids], skip_special_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, as it reads in the middle of a text; special tokens show their name."""
        if token_id in self.special_ids:
            return self.id_to_token(token_id) or ""
        return self.decode([*self._anchor, token_id])[len(self.decode(self._anchor)) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer; none for special and unknown ids."""
        if token_id not in self._bytes:
            token = None if token_id in self.special_ids else self.id_to_token(token_id)
            self._bytes[token_id] = _byte_level_bytes(token or "")
        return self._bytes[token_id]

    def is_byte_token(self, token_id: int) -> bool:
        token = self.id_to_token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def _find_anchor(self) -> list[int]:
        """A token to stand before another one, so that the other does not lose the space that begins a text."""
        ids = self._tokenizer.encode("a", add_special_tokens=False).ids
        for token_id in (*ids[-1:], *range(self._tokenizer.get_vocab_size())):
            if self.decode([token_id]).isalnum():
                return [token_id]
        return []


def _byte_level_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level BPE (Radford et al. 2019): printable ones for themselves, the
    others shifted to 256 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # an added token, written in plain text
        return token.encode()


class Detokenizer:
    """Text from token ids as they arrive: `push` returns the text that has become certain, `finish` the rest.

    All of it together is exactly what decoding prompt and tokens at once adds to the prompt's text. Text is held back while
    a later token could still change it: inside a character, or inside a run of single-byte tokens. Constant time a token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._impl = _ByteLevel(tokenizer, prompt) if tokenizer.is_byte_level else _Windowed(tokenizer, prompt)

    @property
    def holds_text(self) -> bool:
        return self._impl.holds_text

    def push(self, token_id: int) -> str:
        return self._impl.push(token_id)

    def finish(self) -> str:
        return self._impl.finish()


class _ByteLevel:
    """Every token is a run of bytes: an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token_id in reversed(prompt):  # a prompt may end inside a character, which is 4 bytes at the most
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)
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


MIN_CONTEXT = 8  # tokens: a character can take 4, and another one have begun with 3
MAX_HELD = 16  # tokens: each can end one character and begin another


class _Windowed:
    """Any other decoder: what a token adds is the text of the last few tokens with it, less their text without it.

    The window reaches back to the token that last brought text, so that the decoder sees no token as the first of a text
    (whose leading space would be stripped).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context, self._new = self._prompt_tail(prompt), []
        self._context_text = tokenizer.decode(self._context)
        if self._context_text.endswith("\ufffd"):  # inside a character, which the answer may complete: it is not told yet
            shorter = (tokenizer.decode(self._context[: len(self._context) - n]) for n in range(4))
            self._context_text = max((text.rstrip("\ufffd") for text in shorter), key=len)

    def _prompt_tail(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, far enough back that they have a text and no run of bytes is cut."""
        start = len(prompt)
        while start > 0:
            start -= 1
            whole_run = start == 0 or not (self._in_byte_run(prompt[start]) or self._in_byte_run(prompt[start - 1]))
            if whole_run and len(prompt) - start >= MIN_CONTEXT and self._tokenizer.decode(prompt[start:]):
                break
        return list(prompt[start:])

    def _in_byte_run(self, token_id: int) -> bool:
        return self._tokenizer.has_byte_fallback and (
            token_id in self._tokenizer.special_ids or self._tokenizer.is_byte_token(token_id)
        )

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


def find_stop(text: str, stops: Sequence[str], scanned: int) -> int | None:
    """Where `text` is to end: just behind the stop string that is complete first; None if there is none.

    The first `scanned` characters are known to hold no complete stop string.
    """
    ends = []
    for stop in stops:
        at = text.find(stop, max(0, scanned - len(stop) + 1))
        if at >= 0:
            ends.append(at + len(stop))
    return min(ends, default=None)


@dataclass
class Piece:
    """One generated token as clients see it."""

    id: int
    text: str
    logprob: float
    special: bool
    top: list[tuple[int, float]] = field(default_factory=list)


class TextStream:
    """One request's tokens as pieces of text, with its stop strings.

    `push` returns the pieces whose text is certain. While text is held back its last piece is held back too, so that the
    texts of the pieces that are not special add up to `text` whatever the last token is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = [stop for stop in stops if stop]
        self._parts: list[str] = []
        self._recent = ""  # the end of the text, in which a stop string may have begun
        self._overlap = max((len(stop) for stop in self._stops), default=1) - 1
        self._pending: list[Piece] = []
        self.tokens = 0
        self.stopped = False  # a stop string is complete; the text ends with it

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, token_id: int, logprob: float, top: list[tuple[int, float]], last: bool = False) -> list[Piece]:
        """Takes the next token. After the `last` one, and once `stopped`, everything has been returned."""
        self.tokens += 1
        special = token_id in self._tokenizer.special_ids
        text = self._detokenizer.push(token_id)
        self._pending.append(
            Piece(token_id, (self._tokenizer.id_to_token(token_id) or "") if special else "", logprob, special, top)
        )
        if not special:
            self._add(text)
        if last and not self.stopped:
            self._add(self._detokenizer.finish())
        if last or self.stopped:
            return self._release(len(self._pending))
        held = [n for n, piece in enumerate(self._pending) if not piece.special] if self._detokenizer.holds_text else []
        return self._release(held[-1] if held else len(self._pending))

    def _add(self, text: str) -> None:
        """Gives certain text to the newest piece that can carry it, up to the end of a stop string."""
        if not text:
            return
        if self._stops:
            recent = self._recent + text
            end = find_stop(recent, self._stops, len(self._recent))
            if end is not None:
                text = text[: end - len(self._recent)]
                self.stopped = True
            self._recent = recent[-self._overlap :] if self._overlap else ""
        carrier = next((piece for piece in reversed(self._pending) if not piece.special), self._pending[-1])
        carrier.text += text
        self._parts.append(text)

    def _release(self, count: int) -> list[Piece]:
        released, self._pending = self._pending[:count], self._pending[count:]
        return released


def prepare(folder: Path, target: Path) -> dict[str, Any]:
    """Makes sure that the model's tokenizer works. Returns where it is and the EOS ids that the tokenizer knows of."""
    tokenizer_dir = folder
    if not (folder / "tokenizer.json").exists():
        slow = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).exists()]
        if not slow:
            raise ConfigError(f"{folder} holds no tokenizer (tokenizer.json, or one to convert: tokenizer.model, vocab.json)")
        command = [sys.executable, str(HERE / "model.py"), str(folder), str(target)]
        converted = subprocess.run(command, capture_output=True, text=True)
        if converted.returncode:
            reason = (converted.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ConfigError(f"the tokenizer of {folder} ({slow[0]}) cannot be converted: {reason.removeprefix('error: ')}")
        tokenizer_dir = target
    tokenizer = Tokenizer(tokenizer_dir)
    if not tokenizer.encode("a"):
        raise ConfigError(f"{tokenizer_dir / 'tokenizer.json'} turns text into nothing, so it does not fit any model")
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    ids = {name: tokenizer.token_to_id(name) for name in (eos, *END_OF_TURN) if isinstance(name, str)}
    eos_token_ids = [i for name, i in ids.items() if i is not None and (i in tokenizer.special_ids or name == eos)]
    return {"tokenizer_dir": str(tokenizer_dir), "eos_token_ids": eos_token_ids}


if __name__ == "__main__":
    try:
        print(json.dumps(prepare(Path(sys.argv[1]), Path(sys.argv[2]))))
    except ConfigError as error:
        sys.exit(str(error))
