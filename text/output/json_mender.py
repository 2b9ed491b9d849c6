"""JSON as models write it, with mistakes where no other reading is possible, or truncated."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from run import Json

GEMMA_QUOTE = '<|"|>'
MAX_SIGNS = 50_000  # of a text that is not JSON: a client may send it, and each may take 6 µs
CLOSING = {"{": "}", "[": "]"}
QUOTES = (GEMMA_QUOTE, '"', "'")
STRING = re.compile(
    rf"{re.escape(GEMMA_QUOTE)}(.*?){re.escape(GEMMA_QUOTE)}|\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'",
    re.DOTALL,
)
SPACES = re.compile(r"\s*")
BARE_WORD = re.compile(r"[^,{}\[\]\"'<]+")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
PARTIAL = re.compile(r"-?\d*(\.\d*)?([eE][+-]?\d*)?")  # a number that goes on
BARE_KEY = re.compile(r"[^:=,{}\[\]\"'<\n]+")
ESCAPE_OR_QUOTE = re.compile(r'\\(?:([bfnrt/\\"]|u[0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))|"', re.DOTALL)
KNOWN_ESCAPES = {"", *"bfnrtux/\\\"'"}  # "": a quote that is none
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class Unfinished(ValueError):
    """The text ends within a value."""


def whole_value(text: str, is_partial: bool = False) -> Any:
    """Returns the value that is all of a text: JSON, else what `read_value` reads. Raises ValueError for a
    text that is no value or more than one, and for one that is not JSON and has more than MAX_SIGNS commas,
    quotes and backslashes; RecursionError for one that is nested too deeply. In a text that is JSON, NaN and
    Infinity are numbers, and the last of two members of one name counts.

    is_partial: the text is truncated; members that are not complete are left out.
    """
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if sum(map(text.count, ',"\\')) > MAX_SIGNS:
        raise ValueError("too long to be mended")
    value, end = read_value(text, is_partial=is_partial)
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def complete_members(arguments: str) -> Json:
    """Returns the members of a call's arguments that are complete: `max_tokens` may have truncated the text.
    {} if there are none, or if the text is no object. Raises nothing."""
    with contextlib.suppress(ValueError, RecursionError):
        value = whole_value(arguments, is_partial=True)
        return value if isinstance(value, dict) else {}
    return {}


def read_value(text: str, at: int = 0, is_loose: bool = False, is_partial: bool = False) -> tuple[Any, int]:
    """Returns the value that begins at this place of a text, and the place where it ends. Text behind it is
    not looked at.

    The value is JSON, or Python's literals, with line breaks and unknown escapes in strings, keys without
    quotes, `=` for a colon, a comma too many, or brackets that are missing at the end. is_loose: texts need
    no quotes.

    is_partial: the text is truncated. A member whose value may go on at the end of the text is left out;
    outside of brackets such a value raises Unfinished, which is a ValueError.

    Raises ValueError for a text that is no such value, for two members of one name, and for a string without
    its closing quote; RecursionError for a value that is nested too deeply.
    """
    at = SPACES.match(text, at).end()
    bracket = text[at : at + 1]
    if bracket in CLOSING:
        return _read_members(text, at + 1, bracket, is_loose, is_partial)
    if text.startswith(QUOTES, at):
        return _read_string(text, at)
    found = BARE_WORD.match(text, at)
    word = found[0].strip() if found else ""
    end = at + len(word)
    if GEMMA_QUOTE.startswith(text[at : at + len(GEMMA_QUOTE)]):
        raise Unfinished
    is_last = is_partial and end == len(text)
    if is_last and (is_loose or PARTIAL.fullmatch(word) or any(each.startswith(word) for each in CONSTANTS)):
        raise Unfinished
    if word in CONSTANTS:
        return CONSTANTS[word], end
    if NUMBER.fullmatch(word):
        return json.loads(word), end
    if not word or not is_loose:
        raise ValueError(f"no value at {at}")
    return word, end


def _read_members(text: str, at: int, bracket: str, is_loose: bool, is_partial: bool) -> tuple[Any, int]:
    """Returns the object or list whose first member begins at this place, and where it ends. Raises
    ValueError and RecursionError as `read_value` does.

    bracket: the opening one, which is read already. Without a closing bracket, the value ends at the end of
    the text.
    """
    members: Json = {}  # of a list by their number
    at = SPACES.match(text, at).end()
    while text[at : at + 1] not in ("", CLOSING[bracket]):
        try:
            key, at = _read_key(text, at, is_loose) if bracket == "{" else (str(len(members)), at)
            value, at = read_value(text, at, is_loose, is_partial)
        except Unfinished:
            if not is_partial:
                raise
            at = len(text)
            break
        if key in members:
            raise ValueError(f"a second {key!r}")
        members[key] = value
        at = SPACES.match(text, at).end()
        if text[at : at + 1] == ",":
            at = SPACES.match(text, at + 1).end()
        elif text[at : at + 1] not in ("", CLOSING[bracket]):
            raise ValueError(f"no end of a member at {at}")
    return members if bracket == "{" else list(members.values()), min(at + 1, len(text))


def _read_key(text: str, at: int, is_loose: bool) -> tuple[str, int]:
    """Returns a key, and the place behind the `:` or `=` after the key. Raises ValueError without that sign;
    this is Unfinished if the text ends there, and the key is in quotes or `is_loose`."""
    is_quoted = text.startswith(QUOTES, at)
    if is_quoted:
        key, at = _read_string(text, at)
    else:
        found = BARE_KEY.match(text, at)
        if not found:
            raise ValueError(f"no key at {at}")
        key = found[0].strip()
        at = found.end()
    at = SPACES.match(text, at).end()
    if at == len(text) and (is_quoted or is_loose):
        raise Unfinished
    if text[at : at + 1] not in (":", "="):
        raise ValueError(f"no value of a key at {at}")
    return key, at + 1


def _read_string(text: str, at: int) -> tuple[str, int]:
    r"""Returns the string in quotes that begins at this place, and where it ends. Raises Unfinished without
    the closing quote, and ValueError if a backslash may be an escape or part of a path, as in
    "C:\new\Users"."""
    found = STRING.match(text, at)
    if not found:
        raise Unfinished
    written = found[found.lastindex]
    if found.lastindex == 1:  # in Gemma's quotes, which know no escapes
        return written, found.end()
    escapes = {escape[0][1:2] for escape in ESCAPE_OR_QUOTE.finditer(written)}
    if escapes - KNOWN_ESCAPES and escapes & set("bfnrtu"):
        raise ValueError(f"a backslash that may be one from {at}")  # C:\new\Users
    return json.loads(f'"{ESCAPE_OR_QUOTE.sub(_escape, written)}"', strict=False), found.end()


def _escape(found: re.Match) -> str:
    """Returns an escape or a quote, as found by ESCAPE_OR_QUOTE, as JSON writes it. A backslash in front of
    another character stays a backslash, except in front of a single quote."""
    if found[1]:
        return found[0]
    if found[2]:
        return f"\\u00{found[2]}"
    if found[3] == "'":
        return "'"
    return f"\\\\{found[3]}" if found[3] else '\\"'
