"""From the text of an answer to its parts, while the text grows: content, reasoning and calls of tools.

A `Reader` reads one sequence. It holds back only what may be the beginning of a marker or of a call. What the
formats of calls look like is in tool_formats.py.
"""

from __future__ import annotations

import ast
import functools
import json
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from text.stream import stop_begun
from text.tool_formats import THINK, THINK_END, Calls

MAX_HEAD = 1_000  # characters of a call before its arguments


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
class Reading:
    """How the answers of a request are read.

    `thinking`: "" (none), "before" (`<think>` may begin the answer) or "inside" (the prompt ends with it).
    """

    calls: Calls | None = None
    thinking: str = ""

    def reader(self) -> Reader:
        return Reader(self)

    @functools.cached_property
    def markers(self) -> frozenset[str]:
        """Texts that a reader must get even where they are special tokens."""
        thinks = (THINK, THINK_END) if self.thinking else ()
        calls = self.calls.format.markers if self.calls else ()
        return frozenset((*calls, *thinks))

    def whole(self, text: str) -> Whole:
        """The parts of a complete text. When one of its calls cannot be read, all of it is content, but for
        the reasoning."""
        reader = self.reader()
        parts = [*reader.push(text), *reader.finish()]
        if reader.failed:
            return Reading(None, self.thinking).whole(text)

        def text_of(kind: type[Part], index: int | None = None) -> str:
            return "".join(
                part.text
                for part in parts
                if isinstance(part, kind) and getattr(part, "index", None) == index
            )

        calls = [
            Call(part.id, part.name, text_of(Arguments, part.index))
            for part in parts
            if isinstance(part, CallBegin)
        ]
        return Whole(text_of(Content), text_of(Reasoning), calls)


class Reader:
    """Reads one sequence. How its text is split over calls of `push` makes no difference to its parts."""

    def __init__(self, reading: Reading):
        self._calls = reading.calls
        self._thinking = reading.thinking
        self._buffer = ""  # text that is not read yet
        self._unsent = ""  # text that is read and in no part yet
        self._parts: list[Part] = []
        self._ended = False
        self._begun = 0  # calls
        self._complete = 0  # calls
        self.failed = False  # where a call should be is something else, which is content
        self._steps = self._read()

    @property
    def has_calls(self) -> bool:
        """Whether there are calls in the text, all of them complete."""
        return 0 < self._begun == self._complete

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        next(self._steps, None)
        parts = self._parts
        self._parts = []
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
            try:
                yield from self._read_calls()
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
        if self._thinking == "before" and not (yield from self._skip(THINK)):
            return
        self._unsent = ""
        yield from self._until(THINK_END, Reasoning)
        yield from self._blanks()
        self._unsent = ""

    def _read_calls(self) -> Generator[None, None, None]:
        """Calls behind a marker or, where the format allows that, at the beginning of the text; other text is
        content."""
        form = self._calls.format
        yield from self._blanks()
        follows = self._begins_bare()
        marked = not follows
        while follows or (yield from self._until(form.open)):
            if form.is_list and not (yield from self._skip("[")):
                raise _NotACall
            yield from self._call(marked)
            while form.is_list and (yield from self._skip(",")):
                yield from self._call(marked)
            for end in form.ends:
                yield from self._skip(end)
            self._unsent = ""
            yield from self._blanks()
            follows = self._begins_bare() and not form.is_list
            if form.bare and not follows:
                return

    def _begins_bare(self) -> bool:
        """Whether a call without a marker may begin here."""
        bare = self._calls.format.bare
        return bool(bare) and self._buffer.startswith(bare)

    def _call(self, marked: bool) -> Generator[None, None, None]:
        yield from self._python_call() if self._calls.format.is_python else self._json_call(marked)
        self._complete += 1
        while not self._calls.several:  # the rest is dropped
            self._buffer = ""
            if self._ended:
                break
            yield
        self._unsent = ""

    def _json_call(self, marked: bool) -> Generator[None, None, None]:
        """A call as a JSON object. Its arguments are sent while they grow, unless their name comes before
        that of the tool."""
        heads = {
            f'{{{kind}"name":"{name}","{key}":{{': name
            for kind in ("", '"type":"function",')  # some Llama models write the type first
            for name in self._calls.names
            for key in ("arguments", "parameters")
        }
        yield from self._blanks()
        while True:
            head = self._buffer[: self._buffer.find("{", 1) + 1 or None]
            compact = "".join(head.split())
            if (
                compact in heads
                or len(head) > MAX_HEAD
                or not any(known.startswith(compact) for known in heads)
            ):
                break
            yield from self._more()
        if compact in heads:
            head = self._take(len(head) - 1)
            self._begin(heads[compact])
            arguments = yield from self._brackets(sends=True)
            _decoded(head + arguments + (yield from self._brackets(depth=1)))
        elif marked and self._buffer.startswith("{"):
            self._begin(*_decoded((yield from self._brackets())))
        else:
            raise _NotACall

    def _python_call(self) -> Generator[None, None, None]:
        found = yield from self._skip(*(f"{name}(" for name in self._calls.names))
        if not found:
            raise _NotACall
        arguments = yield from self._brackets(depth=1, quotes="\"'")
        self._begin(found[:-1], _as_json(arguments))

    def _begin(self, name: str, arguments: str = "") -> None:
        if name not in self._calls.names:
            raise _NotACall
        call_id = secrets.token_hex(5)[:9] if self._calls.model.short_ids else f"call_{secrets.token_hex(12)}"
        self._parts.append(CallBegin(self._begun, call_id, name))
        if arguments:
            self._parts.append(Arguments(self._begun, arguments))
        self._begun += 1
        self._unsent = ""

    def _brackets(self, depth: int = 0, sends: bool = False, quotes: str = '"') -> Generator[None, None, str]:
        """Reads up to the bracket that closes all; `depth` are open before."""
        text = ""
        quote = ""  # the one that is open
        is_escaped = False
        while True:
            length = len(self._buffer)
            for at, character in enumerate(self._buffer):
                if quote:
                    if character == quote and not is_escaped:
                        quote = ""
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

    def _until(
        self, marker: str, kind: type[Content] | type[Reasoning] = Content
    ) -> Generator[None, None, bool]:
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

    def _skip(self, *markers: str) -> Generator[None, None, str]:
        """Reads blanks and the marker behind them, which it returns; "" if none is there."""
        yield from self._blanks()
        while True:
            for marker in filter(self._buffer.startswith, markers):
                return self._take(len(marker))
            if self._ended or not any(marker.startswith(self._buffer) for marker in markers):
                return ""
            yield

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
        taken = self._buffer[:length]
        self._buffer = self._buffer[length:]
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


def _decoded(text: str) -> tuple[str, str]:
    """The name and the arguments in a call that is a JSON object."""
    try:
        msgspec.json.decode(text)  # all of it, where a Raw may be anything
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        arguments = fields["arguments" if "arguments" in fields else "parameters"]
        msgspec.json.decode(arguments, type=dict)
        return msgspec.json.decode(fields["name"], type=str), bytes(arguments).decode()
    except (msgspec.DecodeError, KeyError, RecursionError):
        raise _NotACall from None


def _as_json(text: str) -> str:
    """The keyword arguments of a Python call, up to the closing bracket, as a JSON object."""
    try:
        call = ast.parse(f"f({text}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or call.args
            or any(keyword.arg is None for keyword in call.keywords)
        ):
            raise _NotACall
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return (
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode().decode()
        )  # lone surrogates are no text
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise _NotACall from None
