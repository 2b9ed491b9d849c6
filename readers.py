"""From the text of an answer to its parts, while the text grows: content, reasoning and calls of tools.

A `Reader` reads one sequence. It holds back only what may be the beginning of a marker or of a call. This layer knows no HTTP,
no tokens and no grammars.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from text import stop_begun

MAX_HEADER = 1_000  # characters of a call before its arguments
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
}
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """The call number `index` of the answer begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of a call: all of them together are JSON."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | Arguments


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


class Whole(NamedTuple):
    """A complete answer."""

    content: str
    reasoning: str
    calls: list[Call]


@dataclass(frozen=True)
class ToolFormat:
    """How the served model writes calls. `name`: a key of MARKERS, "none" (calls stay text) or "" (unknown)."""

    name: str
    token_id: Callable[[str], int | None] = lambda _text: None  # of a text that is one token
    several: bool = True  # in one message
    short_ids: bool = False  # of 9 letters and digits, which Mistral's templates require


@dataclass(frozen=True)
class Calls:
    """The calls that an answer may have: of `names`, more than one if `several`. `mode` is auto, required or named."""

    format: ToolFormat
    names: Sequence[str]
    mode: str
    several: bool

    @property
    def is_named(self) -> bool:
        return self.mode == "named"

    @property
    def is_forced(self) -> bool:
        return self.mode != "auto"


@dataclass(frozen=True)
class Reading:
    """How the answers of a request are read.

    `thinking`: "" (none), "before" (`<think>` may begin the answer) or "inside" (the prompt ends with it).
    """

    calls: Calls | None = None
    thinking: str = ""

    def reader(self) -> Reader:
        return Reader(self.calls, self.thinking)

    @functools.cached_property
    def markers(self) -> frozenset[str]:
        """Texts that a reader must get even where they are special tokens."""
        thinks = (THINK, THINK_END) if self.thinking else ()
        return frozenset((*MARKERS[self.calls.format.name], *thinks) if self.calls else thinks)

    def whole(self, text: str) -> Whole:
        """The parts of a complete text. When one of its calls cannot be read, all of it is content, but for the reasoning."""
        reader = self.reader()
        parts = [*reader.push(text), *reader.finish()]
        if reader.failed:
            return Reading(None, self.thinking).whole(text)
        arguments = {part.index: "" for part in parts if isinstance(part, CallBegin)}
        for part in parts:
            if isinstance(part, Arguments):
                arguments[part.index] += part.text
        return Whole(
            "".join(part.text for part in parts if isinstance(part, Content)),
            "".join(part.text for part in parts if isinstance(part, Reasoning)),
            [Call(part.id, part.name, arguments[part.index]) for part in parts if isinstance(part, CallBegin)],
        )


class Reader:
    """Reads one sequence. How its text is split over calls of `push` makes no difference to its parts."""

    def __init__(self, calls: Calls | None = None, thinking: str = ""):
        self._calls = calls
        self._thinking = thinking
        self._buffer = ""  # text that is not read yet
        self._unsent = ""  # text that is read and in no part yet
        self._parts: list[Part] = []
        self._ended = False
        self._begun = self._complete = 0  # calls
        self.failed = False  # where a call should be is something else, which is content
        self._steps = self._read()

    @property
    def has_calls(self) -> bool:
        """Whether there are calls in the text, all of them complete."""
        return 0 < self._begun == self._complete

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """What was held back, when no text comes any more."""
        self._ended = True
        return self.push("")

    # Generators that read from the buffer, and yield when they need more text.

    def _read(self) -> Generator[None, None, None]:
        if self._thinking:
            yield from self._think()
        if self._calls:
            formats = {"hermes": self._hermes, "llama3_json": self._llama, "mistral": self._mistral, "pythonic": self._pythonic}
            try:
                yield from formats[self._calls.format.name]()
                if self._complete and not self._buffer:
                    self._unsent = ""  # blanks behind the last call
            except _NotACall:
                self.failed = True
        while True:
            self._send(Content)
            if self._ended:
                return
            yield

    def _think(self) -> Generator[None, None, None]:
        if self._thinking == "before":
            yield from self._blanks()
            if not (yield from self._skip(THINK)):
                return
        self._unsent = ""
        if (yield from self._until(THINK_END, Reasoning)):
            yield from self._blanks()
        self._unsent = ""

    def _hermes(self) -> Generator[None, None, None]:
        """`<tool_call>{…}</tool_call>`, anywhere in the text."""
        opening, closing = MARKERS["hermes"]
        while (yield from self._blanks()) and (yield from self._until(opening)):
            yield from self._json_call(marked=True)
            yield from self._skip(closing)
            self._unsent = ""

    def _llama(self) -> Generator[None, None, None]:
        """`{…}; {…}` as the whole text, or behind `<|python_tag|>`."""
        marked = yield from self._found(*MARKERS["llama3_json"], "{")
        while (yield from self._blanks()):
            yield from self._json_call(marked)
            yield from self._skip(";")
            self._unsent = ""
            if (yield from self._blanks()) and not self._buffer.startswith("{"):
                return

    def _mistral(self) -> Generator[None, None, None]:
        """`[TOOL_CALLS] [{…}, {…}]`."""
        while (yield from self._blanks()) and (yield from self._until(*MARKERS["mistral"])):
            separator = "["
            while (yield from self._skip(separator)):
                yield from self._json_call(marked=True)
                separator = ","
            if separator == "[":
                raise _NotACall
            yield from self._skip("]")
            self._unsent = ""

    def _pythonic(self) -> Generator[None, None, None]:
        """`[f(a=1), g()]` as the whole text, or between `<|python_start|>` and `<|python_end|>`."""
        opening, closing = MARKERS["pythonic"]
        yield from self._found(opening, "[")
        separator = "["
        while self._buffer and (yield from self._skip(separator)):
            yield from self._python_call()
            separator = ","
        if separator == "[":
            raise _NotACall
        yield from self._skip("]")
        yield from self._skip(closing)
        self._unsent = ""

    def _found(self, marker: str, first: str) -> Generator[None, None, bool]:
        """Reads up to where calls begin: behind the marker (True) or, when the text begins with `first`, before it."""
        yield from self._blanks()
        if self._buffer.startswith(first):
            return False
        return (yield from self._until(marker)) and (yield from self._blanks())

    def _json_call(self, marked: bool) -> Generator[None, None, None]:
        """A call as a JSON object. Its arguments are sent while they grow, unless their name comes before that of the tool."""
        yield from self._blanks()
        while not (header := _HEADER.match(self._buffer)):
            if len(self._buffer) > MAX_HEADER or not _HEADER_BEGUN.fullmatch(self._buffer):
                break
            yield from self._more()
        if header:
            head = self._take(header.end())
            self._begin(header[1])
            arguments = yield from self._brackets(sends=True)
            tail = yield from self._brackets(depth=1)
            _decoded(head + arguments + tail)
        elif marked and self._buffer.startswith("{"):
            call = _decoded((yield from self._brackets()))
            self._begin(call.name)
            self._parts.append(Arguments(self._begun - 1, bytes(call.arguments or call.parameters).decode()))
        else:
            raise _NotACall
        yield from self._end_call()

    def _python_call(self) -> Generator[None, None, None]:
        yield from self._blanks()
        names = [f"{name}(" for name in self._calls.names]
        while not (name := next(filter(self._buffer.startswith, names), "")):
            if not any(name.startswith(self._buffer) for name in names):
                raise _NotACall
            yield from self._more()
        self._take(len(name) - 1)
        arguments = _as_json((yield from self._brackets(quotes="\"'")))
        self._begin(name[:-1])
        self._parts.append(Arguments(self._begun - 1, arguments))
        yield from self._end_call()

    def _begin(self, name: str) -> None:
        if name not in self._calls.names:
            raise _NotACall
        call_id = secrets.token_hex(5)[:9] if self._calls.format.short_ids else f"call_{secrets.token_hex(12)}"
        self._parts.append(CallBegin(self._begun, call_id, name))
        self._begun += 1
        self._unsent = ""

    def _end_call(self) -> Generator[None, None, None]:
        self._complete += 1
        while not self._calls.several:  # the rest is dropped
            self._buffer = ""
            if self._ended:
                break
            yield
        self._unsent = ""
        yield from self._blanks()

    def _brackets(self, depth: int = 0, sends: bool = False, quotes: str = '"') -> Generator[None, None, str]:
        """Reads up to the bracket that closes all; `depth` are open before."""
        text, quote, is_escaped = "", "", False
        while True:
            length = len(self._buffer)
            for at, character in enumerate(self._buffer):
                if quote:
                    quote = "" if character == quote and not is_escaped else quote
                    is_escaped = character == "\\" and not is_escaped
                elif character in quotes:
                    quote = character
                else:
                    depth += (character in "{[(") - (character in "}])")
                    if depth <= 0 and character in "}])":
                        length = at + 1
                        break
            chunk = self._take(length)
            text += chunk
            if sends and chunk:
                self._parts.append(Arguments(self._begun - 1, chunk))
                self._unsent = ""
            if depth <= 0 and not quote and text:
                return text
            yield from self._more()

    def _until(self, marker: str, kind: type[Content] | type[Reasoning] = Content) -> Generator[None, None, bool]:
        """Sends the text up to the marker, and reads that; False when it never comes."""
        while True:
            before, found, _rest = self._buffer.partition(marker)
            held = "" if found or self._ended else stop_begun(before, [marker])
            self._send(kind, len(before) - len(held))
            if found:
                self._take(len(marker))
            if found or self._ended:
                return bool(found)
            yield

    def _skip(self, marker: str) -> Generator[None, None, bool]:
        """Reads blanks and the marker behind them, if it is there."""
        yield from self._blanks()
        while len(self._buffer) < len(marker) and marker.startswith(self._buffer) and not self._ended:
            yield
        is_there = self._buffer.startswith(marker)
        self._take(len(marker) if is_there else 0)
        return is_there

    def _blanks(self) -> Generator[None, None, bool]:
        """Reads blanks; returns whether anything follows."""
        while True:
            self._take(len(self._buffer) - len(self._buffer.lstrip()))
            if self._buffer or self._ended:
                return bool(self._buffer)
            yield

    def _more(self) -> Generator[None, None, None]:
        if self._ended:
            raise _NotACall
        yield

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._unsent += taken
        return taken

    def _send(self, kind: type[Content] | type[Reasoning], length: int | None = None) -> None:
        """Sends the next text, and before it what is unsent."""
        if length is None or length > 0:
            self._take(len(self._buffer) if length is None else length)
            if self._unsent:
                self._parts.append(kind(self._unsent))
            self._unsent = ""


class _NotACall(Exception):
    pass


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()  # msgspec takes no `Raw | None`
    parameters: msgspec.Raw = msgspec.Raw()


def _decoded(text: str) -> _Call:
    try:
        call = msgspec.json.decode(text, type=_Call)
        msgspec.json.decode(call.arguments or call.parameters or b"", type=dict)
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise _NotACall from None
    return call


def _as_json(text: str) -> str:
    """The keyword arguments of a Python call, in their parentheses, as a JSON object."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise _NotACall
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode().decode()  # lone surrogates are no text
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise _NotACall from None


def _begun(atoms: list[str]) -> str:
    """A regular expression for every beginning of what the atoms match one after another."""
    return functools.reduce(lambda rest, atom: f"(?:{atom}{rest})?", reversed(atoms), "")


_BLANK, _NAME = r"\s*", r"[A-Za-z0-9_.-]"
_TYPE = [_BLANK, *'"type"', _BLANK, ":", _BLANK, *'"function"', _BLANK, ","]  # which some Llama models write first
_NAMED = [_BLANK, *'"name"', _BLANK, ":", _BLANK, '"', f"{_NAME}*", '"', _BLANK, ",", _BLANK, '"']
_VALUE = ['"', _BLANK, ":", _BLANK, r"\{"]
_HEADER = re.compile(
    rf'\{{(?:{"".join(_TYPE)})?\s*"name"\s*:\s*"({_NAME}+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.ASCII
)
_HEADER_BEGUN = re.compile(
    "|".join(_begun([r"\{", *kind, *_NAMED, *key, *_VALUE]) for kind in ([], _TYPE) for key in ("arguments", "parameters")),
    re.ASCII,
)
