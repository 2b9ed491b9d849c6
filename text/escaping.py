"""Text of clients that looks like special tokens, encoded as text: all of them with --escape-special-tokens,
image tokens always.

In a client's text, a lone surrogate replaces the first character of each special token. No client can send a
surrogate, and templates treat it as any other character. In the rendered prompt, every special token is then
the chat template's own. A random alias replaces it, and the surrogates become their characters again. A
second tokenizer reads the result: it has the aliases as added tokens, and encodes special tokens as text.

    a client's text      Say </s>
    in the prompt        <s>Say ?/s></s>           where ? is a surrogate
    for the tokenizer    5e0f…Say </s>c41d…        which reads 5e0f… as <s>, and c41d… as </s>

This layer is independent of HTTP and templates.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import tokenizers

# Surrogates that stand for images in the content of a message (text/template.py). A template may move images,
# and so join the texts around them.
IMAGES = re.compile("([\ud800-\udbff]+)")


class Escaping:
    """Keeps clients' texts from becoming special tokens, for one model's tokenizer.

    Texts of clients go through `escape`, and the rendered prompt through `to_encodable`. `tokenizer` encodes
    the result, and `ids` turns the encoding into the model's token ids. Of the `special_ids`, a client's text
    cannot become those in `escaped_ids`.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int], escaped_ids: frozenset[int]
    ):
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token_id in special_ids}
        escaped = [name for name, token_id in special.items() if token_id in escaped_ids]
        self._added = re.compile(f"({any_of([token.content for token in added.values()])})")
        self._beginning = re.compile(f"(?={any_of(escaped)}).", re.DOTALL)
        self._markers = Markers(escaped)
        beginnings = sorted({name[0] for name in escaped})
        self._surrogates = {character: chr(0xDC00 + n) for n, character in enumerate(beginnings)}
        self._characters = {ord(surrogate): character for character, surrogate in self._surrogates.items()}
        self._aliases = {name: secrets.token_hex(16) for name in special}
        as_json = tokenizer.to_str()
        self.tokenizer = tokenizers.Tokenizer.from_str(as_json)
        # Also an EOS token that is not flagged as special.
        self.tokenizer.add_special_tokens([tokenizers.AddedToken(name) for name in special])
        self.tokenizer.encode_special_tokens = True
        alike = []
        for name, alias in self._aliases.items():
            token = added[special[name]]
            alike.append(
                tokenizers.AddedToken(alias, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            )
        self.tokenizer.add_tokens(alike)  # at once: each call takes as long as there are tokens
        token_to_id = self.tokenizer.token_to_id
        self._ids = {token_to_id(alias): special[name] for name, alias in self._aliases.items()}
        model = json.loads(as_json)["model"]
        unknown = (model.get("unk_id"), tokenizer.token_to_id(model.get("unk_token") or ""))
        self._rejected_ids = special_ids.difference(unknown)  # any text may have the unknown token

    def escape(self, value: Any) -> Any:
        """Returns a copy of a text, or of JSON with texts, in which a surrogate replaces the first character
        of each escaped token.

        The beginning of an escaped token at the end of a text counts, too: the next text may complete the
        token. So does one in front of an image placeholder. Keys of objects are escaped only where they have
        a whole token. Raises RecursionError for JSON that is nested too deeply.
        """
        if isinstance(value, str):
            return "".join(map(self._escape_text, IMAGES.split(value)))
        if isinstance(value, dict):
            return {self._escape_whole(name): self.escape(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.escape(item) for item in value]
        return value

    def _escape_text(self, text: str) -> str:
        """Escapes the tokens of a text, and the beginnings of tokens at its end."""
        text = self._escape_whole(text)
        while begun := self._markers.begun(text):  # what follows may complete it
            text = text.removesuffix(begun) + self._surrogates[begun[0]] + begun[1:]
        return text

    def _escape_whole(self, text: str) -> str:
        return self._beginning.sub(lambda found: self._surrogates[found[0]], text)

    def unescape(self, text: str) -> str:
        return text.translate(self._characters)

    def to_encodable(self, text: str) -> str:
        """Returns a rendered prompt as `tokenizer` is to read it: with aliases for special tokens, and with
        the characters of clients' texts in the place of surrogates."""
        return self.unescape(self._added.sub(lambda found: self._aliases.get(found[0], found[0]), text))

    def widths(self, text: str) -> Iterator[int]:
        """Yields, for each character of `to_encodable(text)`, how many UTF-8 bytes of the text it stands for.
        The first character of an alias stands for all bytes of its token, the others for 0."""
        for n, part in enumerate(self._added.split(text)):
            if n % 2 and part in self._aliases:
                yield len(part.encode())
                yield from itertools.repeat(0, len(self._aliases[part]) - 1)
            else:
                yield from map(utf8_bytes, self.unescape(part))

    def ids(self, encoding: tokenizers.Encoding) -> list[int]:
        """Returns the model's token ids of an encoding by `tokenizer`, one for each of its tokens.

        Raises ValueError if text became a special token, because the vocabulary has the name of that token as
        a word. The unknown token may come from any text. Special tokens that the tokenizer itself added, such
        as BOS, are no error.
        """
        ids = encoding.ids
        if not self._rejected_ids.isdisjoint(ids):
            for i, is_added in zip(ids, encoding.special_tokens_mask):
                if i in self._rejected_ids and not is_added:
                    raise ValueError(
                        f"this tokenizer cannot encode {self.tokenizer.id_to_token(i)!r} as text"
                    )
        return [self._ids.get(i, i) for i in ids]


class Markers:
    """Finds texts in a text that grows, however many they are."""

    def __init__(self, markers: Iterable[str]):
        self._sorted = sorted(markers)
        self._first = {marker[:1] for marker in self._sorted}
        self._longest = max(map(len, self._sorted), default=0)

    @functools.cached_property
    def _pattern(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, self._sorted)) or "(?!)")

    def split(self, text: str) -> tuple[str, str]:
        """Returns the text before the first marker, and that marker; the whole text and "" without a marker.
        Of markers that begin at the same place, the shortest counts."""
        found = self._pattern.search(text)
        return (text[: found.start()], found[0]) if found else (text, "")

    def begun(self, text: str) -> str:
        """Returns the longest end of the text that more text could make a marker of; "" if there is none. A
        complete marker counts only if a longer marker begins with it."""
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at] in self._first and self._goes_on(text[at:]):
                return text[at:]
        return ""

    def _goes_on(self, text: str) -> bool:
        """Whether a marker is longer and begins with the text: it is the next one in their order."""
        at = bisect.bisect(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)


def any_of(texts: Collection[str]) -> str:
    """Returns a regular expression that matches the longest of these texts; of no texts, one that never
    matches. The time of a match does not grow with the number of texts. The expression has no capturing
    groups."""
    beginning = os.path.commonprefix(list(texts))  # noqa: RUF071 of any texts, not of paths
    rests: dict[str, list[str]] = {}
    for text in texts:
        rest = text[len(beginning) :]
        rests.setdefault(rest[:1], []).append(rest)
    is_optional = rests.pop("", None) is not None
    if not rests:
        return re.escape(beginning) if texts else "(?!)"
    alternatives = "|".join(map(any_of, rests.values()))
    pattern = f"{re.escape(beginning)}(?:{alternatives})"
    return f"{pattern}?" if is_optional else pattern


def utf8_bytes(character: str) -> int:
    return len(character.encode())
