"""Parses a model's output while it grows, into content, reasoning and tool calls.

An `OutputParser` reads one sequence. It holds back what may be the beginning of a marker, and a call until it
is complete: what turns out to be no call is content, streamed or not. Calls that a grammar enforces are sent
while they grow. The formats of tool calls are in tool_formats.py.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import secrets
import string
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from run import Json
from text.json_mender import JsonMender
from text.reasoning import Thinking
from text.stream import Piece, stop_begun
from text.tool_formats import (
    GEMMA_QUOTE,
    TYPES,
    AllowedCalls,
    Syntax,
    Tags,
    types_of,
)

JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
MAX_HEAD = 1_000  # characters of a call before its arguments, or of a parameter's name
NAME = string.ascii_letters + string.digits + "_.-"  # what names of functions are made of
MAX_NESTING = 100  # of truncated arguments, which a client may send back
MAX_COMMAS = 20  # commas after which the complete arguments of a Python call may end
WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates in Python write JSON's
JSON_MARKS = {":": ": ", ",": ", "}
PYTHON_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """The call number `index` of the output begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of a call: all of them together are JSON."""

    index: int
    text: str


OutputPart = Content | Reasoning | CallBegin | Arguments


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


class ParsedOutput(NamedTuple):
    """A complete output."""

    content: str
    reasoning: str
    calls: list[Call]
    is_truncated: bool = False  # in the last call
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class ParserConfig:
    """How the outputs of a request are parsed."""

    calls: AllowedCalls | None = None
    thinking: Thinking | None = None
    enforces_calls: bool = False  # by a grammar

    def parser(self) -> OutputParser:
        return OutputParser(self)

    @functools.cached_property
    def markers(self) -> frozenset[str]:
        """Texts that a parser must get even if they are special tokens."""
        thinks = self.thinking.format.markers if self.thinking else ()
        calls = self.calls.format.markers if self.calls else ()
        return frozenset((*calls, *thinks))

    def whole(self, pieces: Sequence[Piece], is_truncated: bool = False) -> ParsedOutput:
        """The parts of a complete output. is_truncated: it ended at `max_tokens`."""
        parser = self.parser()
        parts = [part for piece in pieces for part in parser.read(piece)]
        parts += parser.finish(is_truncated)

        def text_of(kind: type[OutputPart], index: int | None = None) -> str:
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
        return ParsedOutput(
            text_of(Content), text_of(Reasoning), calls, parser.is_truncated, parser.reasoning_tokens
        )


# Generators that read from the parser's buffer, and yield when they need more text.
Resumable = Generator[None, None, None]
ResumableText = Generator[None, None, str]  # returns what it read


class OutputParser:
    """Reads one sequence. How its text is split over calls of `push` makes no difference to its parts."""

    def __init__(self, parser_config: ParserConfig):
        self._markers = parser_config.markers
        self._calls = parser_config.calls
        self._streams_calls = parser_config.enforces_calls
        self._thinking = parser_config.thinking
        self._is_thinking = self._thinking is not None and self._thinking.is_open
        self._buffer = ""  # text that is not read yet
        self._undecided = ""  # text that is read and in no part yet
        self._header = ""  # of a message, which is not complete
        self._unclosed = ""  # the marker that reasoning lacks, in which a call begins
        self._parts: list[OutputPart] = []
        self._ended = False
        self._begun = 0  # calls
        self.complete = 0  # calls
        self._keeps_truncated = False  # a truncated call is a call, not content
        self._earlier: list[tuple[str, str]] = []  # calls that may not be repeated
        self._called = ""  # the function of the newest call,
        self._arguments = ""  # and its arguments so far
        self._held: CallBegin | None = None  # the newest call, while it is held back
        self.is_done = False  # nothing that follows is read
        self.reasoning_tokens = 0
        self._steps = self._read()

    @property
    def has_calls(self) -> bool:
        """Whether there are calls in the text, all of them complete."""
        return 0 < self._begun == self.complete

    @property
    def is_truncated(self) -> bool:
        """Whether the last call has only some of its arguments."""
        return self.complete < self._begun

    def read(self, piece: Piece) -> list[OutputPart]:
        """The parts that a token adds. Of special tokens only the markers have a text."""
        text = "" if piece.special and piece.text not in self._markers else piece.text
        was_thinking = self._is_thinking
        if was_thinking and piece.id == self._thinking.close_id:
            self._is_thinking = False
            text = text.removesuffix(self._thinking.format.close)
        elif self._thinking and self._thinking.format.headers:
            text = self._without_header(text)
        parts = self.push(text)
        self.reasoning_tokens += was_thinking or self._is_thinking
        return parts

    def _without_header(self, text: str) -> str:
        """Holds back the header of a message until it is complete; only those of reasoning and of calls are
        read."""
        begins, end = self._thinking.format.headers
        if self._header or text in begins:
            self._header += text
            return self._take_header() if text == end else ""
        return "" if text == self._thinking.format.close else text

    def _take_header(self) -> str:
        header = self._header
        self._header = ""
        return header if header == self._thinking.format.open or " to=" in header else ""

    def push(self, text: str) -> list[OutputPart]:
        self._buffer += text
        next(self._steps, None)
        parts = self._parts
        self._parts = []
        return parts

    def finish(self, is_truncated: bool = False) -> list[OutputPart]:
        """The text that was held back, at the end of the output.

        is_truncated: it ended at `max_tokens`. A call that this truncates stays a call, without the rest of
        its arguments; so does a forced call, whatever the reason.
        """
        self._ended = True
        self._keeps_truncated = is_truncated or (self._calls is not None and self._calls.requires_call)
        return self.push(self._take_header() if self._header else "")

    def _read(self) -> Resumable:
        if self._thinking:
            yield from self._think()
        if self._calls:
            try:
                yield from self._read_calls()
                if self.complete and not self._buffer:
                    self._undecided = ""  # spaces after the last call
            except _Truncated:
                self._end_truncated()
            except _NotACall:
                self._take_back()
        while True:
            self._send(Content)
            if self._ended:
                return
            yield

    def _think(self) -> Resumable:
        thinking = self._thinking
        if not thinking.is_open:
            if not (yield from self._skip(thinking.format.open)):
                return
            self._is_thinking = True
        self._undecided = ""
        closes = "" if thinking.close_id is not None else thinking.format.close
        found = yield from self._until(Reasoning, self._ends_of_reasoning(closes))
        if found == closes:
            yield from self._skip_spaces()
        else:
            self._unclosed = thinking.format.close
            self._streams_calls = False  # in reasoning any text is allowed
            self._buffer = found + self._buffer
        self._is_thinking = False
        self._undecided = ""

    def _ends_of_reasoning(self, close: str) -> list[str]:
        """What ends reasoning: `close` ("": the token that `read` knows) or, if calls are allowed, their
        marker."""
        form = self._calls.format if self._calls else None
        markers = [form.open, *form.also_open] if form else []
        return [close, *markers] if close else markers

    def _end_truncated(self) -> None:
        """The text ended within a call."""
        requires_call = self._calls.requires_call
        if not self._keeps_truncated or not (self._begun or requires_call):
            self._take_back()
            return
        if not self._begun and len(self._calls.names) == 1:
            self._begin(self._calls.names[0])
        self._release()
        self._undecided = ""
        self._buffer = ""

    def _take_back(self) -> None:
        """What was held back of a call is content."""
        if self._held:
            self._held = None
            self._begun -= 1

    def _read_calls(self) -> Resumable:
        """Calls after a marker or, if the format allows that, at the beginning of the text; other text is
        content."""
        form = self._calls.format
        yield from self._skip_spaces()
        follows = self._begins_implicitly()
        marked = not follows
        markers = [form.open, *form.also_open]
        while follows or (yield from self._until(Content, markers, self._calls.requires_call)):
            if form.first:
                yield from self._skip(form.first)
            yield from self._call(marked)
            while form.next and (yield from self._skip(form.next)):
                yield from self._call(marked)
            for end in filter(None, (*form.ends, self._unclosed)):
                yield from self._skip(end)
            self._undecided = ""
            yield from self._skip_spaces()
            follows = self._begins_implicitly() and not form.next
            if form.implicit_start and not follows:
                return

    def _begins_implicitly(self) -> bool:
        """Whether a call without a marker may begin here."""
        implicit_start = self._calls.format.implicit_start
        return bool(implicit_start) and self._buffer.startswith(implicit_start)

    def _call(self, marked: bool) -> Resumable:
        syntax = self._calls.format.syntax
        if syntax is Syntax.JSON:
            yield from self._json_call(marked)
        elif syntax is Syntax.PYTHON:
            yield from self._python_call()
        elif syntax is Syntax.GEMMA:
            yield from self._gemma_call()
        elif syntax is Syntax.NAMED:
            yield from self._named_call()
        else:
            yield from self._xml_call(self._calls.format.tags)
        self._end_call()
        while self.is_done:  # the rest is dropped
            self._buffer = ""
            if self._ended:
                break
            yield
        self._undecided = ""

    def _end_call(self) -> None:
        """The newest call is complete. One that repeats an earlier call is dropped: small models go on and
        on."""
        call = (self._called, self._arguments)
        if call in self._earlier:
            self._held = None
            self._begun -= 1
            self.is_done = True
            return
        self._release()
        if not self._calls.may_repeat:
            self._earlier.append(call)
        self.complete += 1
        self.is_done = not self._calls.parallel

    def _json_call(self, marked: bool) -> Resumable:
        """A call as a JSON object. Its arguments are sent while they grow, unless their name comes before
        that of the tool."""
        heads = {
            f'{{{kind}"name":"{name}","{key}":{begin}{{': name
            for kind in ("", '"type":"function",')  # some Llama models write the type first
            for name in self._calls.names
            for key in ("arguments", "parameters")
            for begin in ("", '"')  # and some the arguments as a string
        }
        yield from self._skip_spaces()
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
        if compact in heads and compact.endswith('"{'):
            self._take(len(head) - 2)
            arguments = yield from self._json_string()
            _check_object(arguments)
            yield from self._json_object("{")
            self._begin(heads[compact], arguments)
        elif compact in heads:
            head = self._take(len(head) - 1)
            self._begin(heads[compact])
            arguments = yield from self._json_object(sends=True)
            _decoded(head + arguments + (yield from self._json_object("{")))
        elif marked and self._buffer.startswith("{"):
            self._begin(*_decoded((yield from self._json_object())))
        else:
            raise _NotACall

    def _python_call(self) -> Resumable:
        found = yield from self._expect(*(f"{name}(" for name in self._calls.names))
        begins = len(self._undecided)
        try:
            arguments = yield from self._python_arguments()
        except _Truncated:
            if self._keeps_truncated:
                self._begin(found[:-1], _truncated_json(self._undecided[begins:]))
            raise
        self._begin(found[:-1], _as_json(arguments))

    def _named_call(self) -> Resumable:
        """A name, a separator and the arguments as JSON. The id that a model may write is not used."""
        form = self._calls.format
        if form.head:
            yield from self._expect(form.head)
        name = yield from self._function_name()
        while "{" not in self._buffer:
            if len(self._buffer) > MAX_HEAD:
                raise _NotACall
            yield from self._more()
        separator = self._take(self._buffer.index("{"))
        if not re.fullmatch(form.separators, separator.rstrip()):
            raise _NotACall
        self._begin(name)
        _check_object((yield from self._json_object(sends=True)))
        if form.tail:
            yield from self._skip(form.tail.lstrip())

    def _xml_call(self, tags: Tags) -> Resumable:
        """A name, and each parameter in tags, whose value is raw text."""
        name = yield from self._function_name()
        if tags.name_end:
            yield from self._expect(tags.name_end)
        self._begin(name)
        schema = self._calls.parameters_of(name)
        properties = schema.get("properties", {})
        before = "{"
        while (yield from self._expect(tags.key, tags.end)) == tags.key:
            key = yield from self._key(tags.key_end)
            if tags.value:
                yield from self._expect(tags.value)
            self._send_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._value(types_of(properties.get(key), schema), tags.value_end, tags.line_breaks)
        self._send_arguments("{}" if before == "{" else "}")

    def _gemma_call(self) -> Resumable:
        """A name, and an object as in JSON, but for its keys, which have no quotes, and those of strings."""
        yield from self._expect("call:")
        name = yield from self._function_name()
        yield from self._expect("{")
        self._begin(name, "{")
        depth = 1
        read = "{"  # as JSON, without the text of strings
        word = ""  # a key, or a value that is no string
        while depth:
            if (yield from self._skip(GEMMA_QUOTE)):
                yield from self._value({"string"}, GEMMA_QUOTE)
                read += '""'
                continue
            while not self._buffer:
                yield from self._more()
            written = ""
            length = 0
            for character in self._buffer:
                if not depth or (length and character == GEMMA_QUOTE[0]):
                    break
                length += 1
                if character in "{}[]:,":
                    value = json.dumps(word) if character == ":" else _value_as_json(word, set())
                    written += (value if word else "") + JSON_MARKS.get(character, character)
                    word = ""
                    depth += (character in "{[") - (character in "}]")
                elif not character.isspace():
                    word += character
            self._take(length)
            if written:
                self._send_arguments(written)
                read += written
        _check_object(read)

    def _function_name(self) -> ResumableText:
        """Reads the name of a function, up to the first character that cannot be part of one."""
        yield from self._skip_spaces()
        while True:
            name = self._buffer[: len(self._buffer) - len(self._buffer.lstrip(NAME))]
            is_complete = len(name) < len(self._buffer)
            if is_complete and name in self._calls.names:
                return self._take(len(name))
            if is_complete or not any(known.startswith(name) for known in self._calls.names):
                raise _NotACall
            yield from self._more()

    def _key(self, end: str) -> ResumableText:
        """Reads the name of a parameter, and the end of its tag."""
        while True:
            name, found, _rest = self._buffer.partition(end)
            if len(name) > MAX_HEAD or "\n" in name:
                raise _NotACall
            if found:
                self._take(len(name + end))
                return name
            yield from self._more()

    def _value(self, types: set[str], end: str, line_breaks: bool = False) -> Resumable:
        """Reads the value of a parameter and the tag after it, and sends it as JSON: while it grows, where it
        can only be text. line_breaks: one belongs to each of the tags."""
        is_text = types == {"string"}
        value = ""
        begun = False
        while not self._buffer:
            yield from self._more()
        if line_breaks and self._buffer.startswith("\n"):
            self._take(1)
        while True:
            text, found, _rest = self._buffer.partition(end)
            if not found:
                text = text.removesuffix(stop_begun(text, ["\n" + end, end] if line_breaks else [end]))
            elif line_breaks:
                text = text.removesuffix("\n")
            value += self._take(len(text))
            if is_text and not begun:
                self._send_arguments('"')
                begun = True
            if is_text and text:
                self._send_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if found:
                break
            yield from self._more()
        yield from self._expect(end)
        self._send_arguments('"' if is_text else _value_as_json(value, types))

    def _begin(self, name: str, arguments: str = "") -> None:
        if name not in self._calls.names:
            raise _NotACall
        call_id = secrets.token_hex(5)[:9] if self._calls.model.short_ids else f"call_{secrets.token_hex(12)}"
        self._held = CallBegin(self._begun, call_id, name)
        self._called = name
        self._arguments = ""
        self._begun += 1
        self._send_arguments(arguments)

    def _json_object(self, opened: str = "", sends: bool = False) -> ResumableText:
        """Reads a JSON object, or the rest of one whose brackets `opened` are open, and mends it. It ends at
        the latest where something other than JSON begins; the rest of one, at the end of the output."""
        mender = JsonMender(opened)
        text = ""
        while not mender.is_complete:
            mended, length = mender.push(self._buffer)
            self._take(length)
            ends_here = bool(opened) and self._ended and not self._keeps_truncated and not self._buffer
            if not mender.is_complete and (mender.is_stopped or ends_here):
                if not mender.may_close or not (text or mended or opened):
                    raise _NotACall
                mended += mender.close()
            text += mended
            if sends and mended:
                self._send_arguments(mended)
            if not mender.is_complete:
                yield from self._more()
        return text

    def _json_string(self) -> ResumableText:
        """Reads a JSON string, and returns its text."""
        while True:
            found = JSON_STRING.match(self._buffer)
            if found:
                self._take(found.end())
                return _text_of(found.group())
            yield from self._more()

    def _python_arguments(self) -> ResumableText:
        """Reads up to the bracket that closes the call."""
        text = ""
        depth = 1
        quote = ""  # the one that is open
        is_escaped = False
        while True:
            length = len(self._buffer)
            for at, character in enumerate(self._buffer):
                if quote:
                    if character == quote and not is_escaped:
                        quote = ""
                    is_escaped = character == "\\" and not is_escaped
                elif character in "\"'":
                    quote = character
                else:
                    depth += (character in "{[(") - (character in "}])")
                    if depth <= 0 and character in "}])":
                        length = at + 1
                        break
            chunk = self._take(length)
            text += chunk
            if depth <= 0 and not quote and text:
                return text
            yield from self._more()

    def _until(
        self, kind: type[Content] | type[Reasoning], markers: Sequence[str], may_be_truncated: bool = False
    ) -> ResumableText:
        """Sends the text up to one of the markers, and reads that; "" when none comes. A marker may end with
        another, and not have it elsewhere. Reasoning also ends at the token that `read` knows.

        may_be_truncated: a beginning of a marker at the end of the text is not part of the text.
        """
        while True:
            parts = [self._buffer.partition(marker) for marker in markers]
            before, found, _rest = min(parts, key=lambda part: len(part[0]), default=(self._buffer, "", ""))
            held = "" if found else stop_begun(before, markers)
            is_end = self._ended or (kind is Reasoning and not self._is_thinking)
            if is_end and held and may_be_truncated:
                raise _Truncated
            if is_end:
                held = ""
            self._send(kind, len(before) - len(held))
            if found:
                self._take(len(found))
            if found or is_end:
                return found
            yield

    def _skip(self, *markers: str) -> ResumableText:
        """Reads spaces and the marker after them, which it returns; "" if there is none."""
        yield from self._skip_spaces()
        while True:
            for marker in filter(self._buffer.startswith, markers):
                return self._take(len(marker))
            is_begun = any(marker.startswith(self._buffer) for marker in markers)
            if is_begun and self._ended and self._keeps_truncated:
                self._take(len(self._buffer))
            if self._ended or not is_begun:
                return ""
            yield

    def _expect(self, *markers: str) -> ResumableText:
        """Reads one of the markers, where nothing else can be."""
        found = yield from self._skip(*markers)
        if not found:
            is_begun = any(marker.startswith(self._buffer) for marker in markers)
            raise _Truncated if is_begun else _NotACall
        return found

    def _skip_spaces(self) -> Resumable:
        while not self._ended and not self._buffer.lstrip():
            self._take(len(self._buffer))
            yield
        self._take(len(self._buffer) - len(self._buffer.lstrip()))

    def _more(self) -> Resumable:
        if self._ended:
            raise _Truncated
        yield

    def _send_arguments(self, text: str) -> None:
        self._arguments += text
        if self._held is None:
            self._undecided = ""
            if text:
                self._parts.append(Arguments(self._begun - 1, text))
        elif self._streams_calls and not self._may_repeat():
            self._release()

    def _may_repeat(self) -> bool:
        """Whether the newest call begins like an earlier one."""
        return any(
            name == self._called and arguments.startswith(self._arguments)
            for name, arguments in self._earlier
        )

    def _release(self) -> None:
        """Sends a call that was held back."""
        if self._held:
            self._parts.append(self._held)
            self._held = None
            self._undecided = ""
            if self._arguments:
                self._parts.append(Arguments(self._begun - 1, self._arguments))

    def _take(self, length: int) -> str:
        taken = self._buffer[:length]
        self._buffer = self._buffer[length:]
        self._undecided += taken
        return taken

    def _send(self, kind: type[Content] | type[Reasoning], length: int | None = None) -> None:
        """Sends the next text, and before it what is unsent."""
        if length is None or length > 0:
            self._take(len(self._buffer) if length is None else length)
            if self._undecided:
                self._parts.append(kind(self._undecided))
            self._undecided = ""


class _NotACall(Exception):
    pass


class _Truncated(_NotACall):
    """The text ends, and what there is of it could be the beginning of a call."""


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


def _text_of(written: str) -> str:
    """The text of a JSON string."""
    try:
        return msgspec.json.decode(written, type=str)
    except msgspec.DecodeError:
        raise _NotACall from None


class _JsonWords(ast.NodeTransformer):
    """Python's constants for JSON's, which models write, too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(PYTHON_WORDS[node.id]) if node.id in PYTHON_WORDS else node


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
        values = {
            keyword.arg: ast.literal_eval(_JsonWords().visit(keyword.value)) for keyword in call.keywords
        }
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return written.encode().decode()  # lone surrogates are no text
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise _NotACall from None


def _truncated_json(text: str) -> str:
    """The complete ones of the keyword arguments of a Python call, as a JSON object that does not end."""
    commas = [at for at, character in enumerate(text) if character == ","]
    for at in reversed(commas[-MAX_COMMAS:]):
        with contextlib.suppress(_NotACall):
            return _as_json(text[:at] + ")").removesuffix("}") + ", "
    return "{"


def complete_members(arguments: str) -> Json:
    """The arguments of a call as far as they can be read: `max_tokens` may have truncated them. What is
    nested more deeply than MAX_NESTING is not read."""
    closing = ""  # the brackets that are open, from the inside
    in_string = False
    is_escaped = False
    # Where values or keys end, and the brackets that are open there. The last may be after a key, the one
    # before it at a comma.
    ends: deque[tuple[int, str]] = deque(maxlen=3)
    for at, character in enumerate(arguments):
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
            if not in_string:
                ends.append((at + 1, closing))
        elif character == '"':
            in_string = True
        elif character in "{[":
            if len(closing) == MAX_NESTING:
                break
            closing = {"{": "}", "[": "]"}[character] + closing
        elif character in "}]":
            closing = closing[1:]
            ends.append((at + 1, closing))
        elif character == ",":
            ends.append((at, closing))
    for end, brackets in reversed(ends):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(arguments[:end] + brackets)
    return {}


def _check_object(text: str) -> None:
    """Raises _NotACall for a text that is no JSON object."""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, RecursionError):
        raise _NotACall from None


def _value_as_json(text: str, types: set[str]) -> str:
    """The value of a parameter of these types (none: of any), in JSON. Text of none of these types stays a
    string, for the client's function to reject."""
    written = WORDS.get(text.strip(), text.strip())
    if types and "string" not in types and "'" in written:
        written = _python_as_json(written)
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = TYPES[type(value)]
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        return json.dumps(text, ensure_ascii=False)
    return written


def _python_as_json(text: str) -> str:
    """An object or a list as some templates write it, and so models: in Python. Other text stays as it is."""
    with contextlib.suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        written = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        return written.encode().decode()  # lone surrogates are no text
    return text
