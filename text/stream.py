"""Text from token ids while they arrive, and the stop strings that end it.

A `TextStream` reads the tokens of one request and returns them as pieces of text, each as soon as no later
token and no stop string can change it. The text of single tokens is in tokenizer.py.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from text.escaping import Markers
from text.tokenizer import Tokenizer

PROMPT_TAIL = 64  # tokens: more than a character and the special tokens in the middle of it take
MIN_CONTEXT = 8  # tokens: a character can take 4, and another one have begun with 3
MAX_HELD = 16  # tokens: each can end one character and begin another
ALL_BYTES = 1_000_000  # more than any token has
REPLACEMENT = "\ufffd"  # stands for bytes that are no character, or not a whole one yet


def detokenizer_for(tokenizer: Tokenizer, prompt: Sequence[int]) -> ByteLevelDetokenizer | WindowDetokenizer:
    """Returns a detokenizer for the tokens after a prompt. Its `push` takes a token id and returns the text
    that has become certain, "" if none has. Its `finish` returns the rest.

    All these texts together are exactly what decoding prompt and tokens at once adds to the prompt's text.
    Text is held back while a later token could still change it: inside a character, or inside a run of
    single-byte tokens. Special and unknown ids add no text. A token takes constant time, whatever the length
    of the text.
    """
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, prompt)


class ByteLevelDetokenizer:
    """For tokenizers whose tokens are runs of bytes: an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt[-PROMPT_TAIL:]:  # a prompt may end inside a character
            self._decoder.decode(self._bytes_of(token_id))
        self._has_begun = False  # until then what is held is the prompt's

    @property
    def holds_text(self) -> bool:
        """Whether a token of the completion has text that `push` has not returned yet."""
        return self._has_begun and bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        added = self._bytes_of(token_id)
        self._has_begun |= bool(added)
        return self._decoder.decode(added)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True) if self._has_begun else ""


class WindowDetokenizer:
    """For all other tokenizers: a token adds the text of the last few tokens with it, less their text without
    it.

    The window reaches back to the last token that added text, so that the decoder sees no token as the first
    of a text (whose leading space would be stripped).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context = self._prompt_tail(prompt)
        self._new: list[int] = []
        self._context_text = tokenizer.decode(self._context)
        if self._context_text.endswith(REPLACEMENT):
            # Inside a character, which the completion may end: it is not out yet.
            shorter = [tokenizer.decode(self._context[: len(self._context) - n]) for n in range(4)]
            self._context_text = max((text.rstrip(REPLACEMENT) for text in shorter), key=len)

    def _prompt_tail(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of the prompt, far enough back that they have a text and no run of bytes is
        cut: at least MIN_CONTEXT tokens, all tokens if no shorter end will do."""
        start = len(prompt)
        while start > 0:
            start -= 1
            if start > 0 and (self._in_byte_run(prompt[start]) or self._in_byte_run(prompt[start - 1])):
                continue
            if len(prompt) - start >= MIN_CONTEXT and self._tokenizer.decode(prompt[start:]):
                break
        return list(prompt[start:])

    def _in_byte_run(self, token_id: int) -> bool:
        """Whether a token may stand within a run of bytes, as tokens without text may."""
        return self._is_silent(token_id) or self._tokenizer.is_byte_token(token_id)

    def _is_silent(self, token_id: int) -> bool:
        """Whether a token has no text: a special one, or an id that the vocabulary does not have."""
        return token_id in self._tokenizer.special_ids or self._tokenizer.id_to_token(token_id) is None

    @property
    def holds_text(self) -> bool:
        """Whether a token of the completion has text that `push` has not returned yet."""
        return bool(self._new)

    def push(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        self._new.append(token_id)
        return "" if self._in_byte_run(token_id) else self._release()

    def finish(self) -> str:
        return self._release(final=True) if self._new else ""

    def _release(self, final: bool = False) -> str:
        """Returns the text of the new tokens; "" while that text may end inside a character, unless it is
        `final` or MAX_HELD tokens are held back. Once they have a text, the new tokens become the context of
        the next ones."""
        text = self._tokenizer.decode(self._context + self._new)
        if text.endswith(REPLACEMENT) and len(self._new) < MAX_HELD and not final:
            return ""  # perhaps inside a character
        added = text[len(self._context_text) :]
        if added:
            self._context = self._new
            self._new = []
            self._context_text = self._tokenizer.decode(self._context)
        return added


def find_stop(text: str, stops: Sequence[str], scanned: int) -> int | None:
    """Returns where `text` is to end, in characters: right after the stop string that is complete first; None
    if no stop string is complete.

    The first `scanned` characters are known to hold no complete stop string.
    """
    found = ((text.find(stop, max(0, scanned - len(stop) + 1)), len(stop)) for stop in stops)
    return min((at + length for at, length in found if at >= 0), default=None)


@dataclass
class Piece:
    """One generated token as clients see it."""

    id: int
    text: str
    logprob: float | None
    special: bool
    top: list[tuple[int, float]]
    trimmed: int = 0  # how many bytes of its end a stop string took
    added: list = field(default_factory=list)  # to the parts of the output, by text/output/parser.py


class TextStream:
    """One request's tokens as pieces of text, with its stop strings.

    `push` returns the pieces whose text is certain, one for each token. While text is held back, the last
    piece is held back, too, so that the texts of the pieces that are not special add up to `text` whatever
    the last token is.

    The text ends after the stop string that is complete first. Without `keep_stop`, the text ends before that
    stop string, and text that is the beginning of a stop string is held back. If several stop strings are
    complete at once, the text then ends before the longest of them. Stop strings that are complete before
    token number `min_tokens` are ordinary text. A stop string counts if it ends in the text of that token or
    a later one.

    Example: the stop string is END, and `keep_stop` is false. Of the tokens "a", "E", "N" and "x", the text
    of the first is returned at once. "E" and "N" are returned with "x".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        keep_stop: bool = True,
        min_tokens: int = 0,
        parse: Callable[[Piece, str], tuple[str, int]] | None = None,
    ):
        """prompt: the token ids in front of the output; stops: the stop strings, of which "" does not count.
        parse: takes a token and the text that the token adds; None: all text is content.

        `parse` returns the content that has become certain, in which stop strings count, and how many
        characters behind that content may yet be content.
        """
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_for(tokenizer, prompt)
        self._stops = [stop for stop in stops if stop]
        self._markers = Markers(self._stops)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._parse = parse
        self._parts: list[str] = []
        self._length = 0  # characters: of all the text,
        self._certain = 0  # of that which stays, whatever comes,
        self._released = 0  # and of that which was returned
        self._recent = ""  # the end of the text, in which a stop string has begun
        self._pending: deque[Piece] = deque()
        self._carrier: Piece | None = None  # the newest piece that is not special; text goes to it
        self._opener: Piece | None = None  # the piece in which the character began that is not complete yet
        self.tokens = 0
        self.stop: str | None = None  # the stop string that is complete; the text ends with it, or before it
        self.cut = 0  # how many characters of content it took, those behind it included

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    @property
    def text(self) -> str:
        return "".join(self._parts)[: self._certain]

    def push(
        self,
        token_id: int,
        logprob: float | None,
        top: list[tuple[int, float]],
        last: bool = False,
        shows_special: bool = False,
    ) -> list[Piece]:
        """Takes the next token. Returns the pieces that have become certain, in the order of their tokens:
        none, those of earlier tokens, or this one too. After the `last` token, and once `stopped`, these are
        all that are left.

        Sets `stop` and `cut` if a stop string is complete. logprob: of this token, None if it is not known;
        top: the id and log-probability of each of the most likely tokens. Both go into the piece as they are.
        The text of a special token's piece is the token's name; shows_special: that is part of `text`, too.
        """
        self.tokens += 1
        is_special = token_id in self._tokenizer.special_ids
        special = is_special and not shows_special
        piece = Piece(token_id, "", logprob, special, top)
        text = self._detokenizer.push(token_id)  # none of a special token
        if is_special:
            text = self._tokenizer.id_to_token(token_id) or ""
            # What ends a part of the output ends its text, too. A budget of reasoning may cut a character.
            if self._parse and (rest := self._detokenizer.finish()):
                self._add(self._carrier, rest)
                self._opener = None
        self._pending.append(piece)
        self._add(piece, text)
        if not special:
            self._carrier = piece
            if not self._detokenizer.holds_text:
                self._opener = None
            elif text or self._opener is None:
                self._opener = piece
        if last and not self.stopped:
            return self.finish()
        return self._release(everything=self.stopped)

    def stop_before(self, token_id: int, logprob: float | None, top: list[tuple[int, float]]) -> list[Piece]:
        """Takes the last token, which ends the text and adds nothing to it. Returns the pieces that were held
        back, then a special piece without text for this token."""
        self.tokens += 1
        return [*self.finish(), Piece(token_id, "", logprob, True, top)]

    def finish(self) -> list[Piece]:
        """Ends the output after its last token. Returns the pieces that were held back, with the rest of the
        text; [] if none were. A character that is not complete becomes U+FFFD. Sets `stop` and `cut` if the
        rest completes a stop string."""
        if text := self._detokenizer.finish():
            assert self._carrier is not None, "only such a token brings text"
            self._add(self._carrier, text)
        if not self.stopped:
            self._certain = self._length  # nothing comes that could complete a stop string
        return self._release(everything=True)

    def _add(self, piece: Piece, text: str) -> None:
        """Adds text to a piece and to the output. Lets `parse` read the text, and then sets which text is
        certain; ends the output at a stop string that is complete."""
        piece.text += text
        content = "" if piece.special else text
        self._parts.append(content)
        self._length += len(content)
        self._apply_stops(*(self._parse(piece, text) if self._parse else (content, 0)))

    def _apply_stops(self, content: str, held: int) -> None:
        """Sets which text is certain. If a stop string is complete, sets `stop` and `cut`, and removes the
        text behind the end from the pieces.

        content: the new text in which stop strings count; held: how many characters behind `content` may yet
        be content.
        """
        if not self._stops:
            self._certain = self._length
            return
        recent = self._recent + content
        end = None
        if self.tokens >= self._min_tokens:
            end = find_stop(recent, self._stops, len(self._recent))
        if end is None:
            self._recent = self._markers.begun(recent)
            uncertain = held + (0 if self._keep_stop else len(self._recent))
            self._certain = max(self._certain, self._length - uncertain)
            return
        # The longest that ends here: without `keep_stop` nothing shows of any.
        self.stop = max((stop for stop in self._stops if recent.endswith(stop, 0, end)), key=len)
        if not self._keep_stop:
            end -= len(self.stop)
        self.cut = len(recent) - end
        self._trim(min(self.cut + held, self._length - self._released))

    def _trim(self, excess: int) -> None:
        """Removes `excess` characters from the end of the text and from the pending pieces, which hold all of
        them. Sets `trimmed` of each piece that lost text."""
        self._length -= excess
        self._certain = self._length
        # Whether the text of the next piece is gone, and with it a character that began before that piece.
        is_gone = False
        for piece in reversed(self._pending):
            if piece.special or not (excess or (is_gone and not piece.text)):
                continue
            kept = max(0, len(piece.text) - excess)
            excess -= len(piece.text) - kept
            piece.trimmed = len(piece.text[kept:].encode()) or ALL_BYTES
            piece.text = piece.text[:kept]
            is_gone = kept == 0

    def _release(self, everything: bool) -> list[Piece]:
        """Removes the first pending pieces, and returns them: those whose text is certain or, with
        `everything`, all of them."""
        released = []
        held = None
        if self._detokenizer.holds_text:
            # Where a stop string may begin with that character, all of its bytes are held back.
            held = self._carrier if self._keep_stop else self._opener
        while self._pending:
            piece = self._pending[0]
            end = self._released + (0 if piece.special else len(piece.text))
            # A piece without text may hold the first bytes of the character after it, which is not certain
            # yet.
            opens_uncertain = not piece.special and not piece.text and end == self._certain < self._length
            if not everything and (end > self._certain or opens_uncertain or piece is held):
                break
            self._released = end
            released.append(self._pending.popleft())
        return released


def prompt_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns one text for each token of a prompt, as a stream of them would show it.

    Special tokens show their names; the texts of the others add up to `tokenizer.decode(ids)`. A character of
    several tokens is the text of its last token; the others have "".
    """
    stream = TextStream(tokenizer, ())
    pieces = [piece for token_id in ids for piece in stream.push(token_id, 0.0, [])]
    return [piece.text for piece in pieces + stream.finish()]
