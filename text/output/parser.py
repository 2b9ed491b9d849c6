"""Parses a model's output while it grows, into content, reasoning and tool calls.

An `OutputParser` reads one sequence. It holds back what may be the beginning of a marker, and a call until it
is complete: what turns out to be no call is content, streamed or not. Calls that a grammar enforces are sent
while they grow, if their arguments are JSON. The formats of tool calls are in tool_formats.py.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec

from text.escaping import Markers, any_of
from text.output.call_mender import MAX_HEAD, may_be_calls
from text.output.call_syntaxes import AllowedCalls, mended_calls
from text.output.reasoning_formats import Thinking
from text.stream import Piece

MORE_STARTS = tuple("{[,;/#`")  # of what may follow a call in front of the closing marker
IMPLICIT_STARTS = ("{", "[")  # a model may take one for the other
MAX_TRYING_S = 1.0  # of processor time, for texts of one output that may be calls
MAX_COMMAS = 20  # commas after which the complete arguments of a Python call may end


@dataclass(eq=False)
class OutputPart:
    """A part of an output, which grows."""

    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Content(OutputPart):
    pass


class Reasoning(OutputPart):
    pass


@dataclass(eq=False, kw_only=True)
class Call(OutputPart):
    """The call number `index` of the output; its text is its arguments in JSON."""

    index: int
    id: str
    name: str
    is_complete: bool = False


Added = tuple[OutputPart, str]  # a part and the text that it gets; the first one begins it


class ParsedOutput:
    """The parts of an output, in its order."""

    def __init__(self):
        self.parts: list[OutputPart] = []

    def text_of(self, kind: type[OutputPart]) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, kind))

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        calls = self.calls
        return bool(calls) and calls[-1].is_complete


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
        given = filter(None, (self.calls, self.thinking))
        return frozenset(marker for each in given for marker in each.format.markers)


# Generators that read from the parser's buffer, and yield when they need more text.
Resumable = Generator[None, None, None]
ResumableText = Generator[None, None, str]  # returns what it read


markers_of = functools.lru_cache(8)(Markers)


class OutputParser:
    """Reads one sequence. How its text is split over calls of `push` makes no difference to its parts.

    Use: `read` for each token, or `push` for each text, then `finish` once. `output` has all parts so far.
    Once `is_done`, the rest of the text is dropped.
    """

    def __init__(self, parser_config: ParserConfig):
        self._markers = parser_config.markers
        self._calls = parser_config.calls
        self._streams_calls = parser_config.enforces_calls
        self._thinking = parser_config.thinking
        self.is_thinking = self._thinking is not None and self._thinking.is_open
        self._buffer = ""  # text that is not read yet
        self._undecided = ""  # text that is read and in no part yet
        self._header = ""  # of a message, which is not complete
        self._marker = ""  # in front of the calls that are read
        self._unclosed = ""  # the closing marker that reasoning lacks, because a call began within it
        self.output = ParsedOutput()
        self._added: list[Added] = []  # to it
        self._ended = False
        self._is_final = False  # it has, and `max_tokens` has not cut the text
        self._newest: Call | None = None  # the newest one
        self._is_held = False  # that call: it is not in the output
        self._keeps_truncated = False  # a truncated call is a call, not content
        self._trying_s = 0.0  # of processor time, for texts that may be calls
        self.is_done = False  # nothing that follows is read
        self._steps = self._read()

    def read(self, piece: Piece, text: str) -> tuple[str, int]:
        """Reads a token, `piece`, and the text that it adds. Appends what the token adds to the parts to
        `piece.added`. Ends the reasoning at the token of the closing marker.

        Returns the content that has become certain, and how many characters are held back behind that
        content: calls and beginnings of markers, which may turn out to be content. The text of a special
        token does not count, unless it is one of the markers.
        """
        if piece.special and text not in self._markers:
            text = ""
        if self.is_thinking and piece.id == self._thinking.close_id:
            self.is_thinking = False
            text = text.removesuffix(self._thinking.format.close)
        elif self._thinking and self._thinking.format.headers:
            text = self._without_header(text)
        added = self.push(text)
        piece.added += added
        content = "".join(text for part, text in added if isinstance(part, Content))
        return content, len(self._undecided) + len(self._buffer)

    def _without_header(self, text: str) -> str:
        """Returns what is to be read of a token's text, for models whose messages have headers.

        Within a header this is "", and the header is collected in `_header`. At the end of a header of
        reasoning or of calls, this is the whole header; other headers are dropped, and so is the closing
        marker of reasoning.
        """
        begins, end = self._thinking.format.headers
        if self._header or text in begins:
            self._header += text
            return self._take_header() if text == end else ""
        return "" if text == self._thinking.format.close else text

    def _take_header(self) -> str:
        """Clears the collected header. Returns it if it begins reasoning or a call, else ""."""
        header = self._header
        self._header = ""
        return header if header == self._thinking.format.open or " to=" in header else ""

    def push(self, text: str) -> list[Added]:
        """Reads more text. Returns what has been added to the parts, in order; [] if nothing has, or once
        `is_done`. A new part begins with its first text."""
        if not self.is_done:
            self._buffer += text
            next(self._steps, None)
        added, self._added = self._added, []
        return added

    def finish(self, is_truncated: bool = False) -> list[Added]:
        """Ends the output, and must be called once. Returns what is added to the parts: content, reasoning or
        calls that were held back. is_truncated: the output ended at `max_tokens`.

        An incomplete call whose name has been read stays a call if the output is truncated or must call,
        without the rest of its arguments, and its `is_complete` stays False. If only its beginning has been
        read, it becomes content, or, where a call is required, is dropped; if one function only may be
        called, a call of it with the text "" is added instead. In an output that is neither truncated nor
        must call, a call that lacks closing brackets alone is completed, and any other incomplete call
        becomes content.
        """
        self._ended = True
        self._is_final = not is_truncated
        self._keeps_truncated = is_truncated or (self._calls is not None and self._calls.requires_call)
        return self.push(self._take_header() if self._header else "")

    def _read(self) -> Resumable:
        """Reads the whole output: reasoning, then calls with content between them, then content. Text that no
        reader takes for a call is content. Ends with the output."""
        if self._thinking:
            yield from self._think()
        goes_on = self._calls is not None
        while goes_on:
            goes_on = False
            try:
                yield from self._read_calls()
                if self.output.has_calls and not self._buffer:
                    self._undecided = ""  # spaces after the last call
            except _NotACall as error:
                if isinstance(error, _Truncated) and self._keeps_truncated:
                    self._end_truncated()
                else:
                    self._is_held = False  # what was held back is content
                    reads_whole = self._calls.format.is_whole or not self._streams_calls
                    goes_on = reads_whole and (yield from self._read_whole())
        while True:
            self._move_to_undecided(len(self._buffer))
            self._send(Content)
            if self._ended:
                return
            yield

    def _think(self) -> Resumable:
        """Reads reasoning, if there is any, up to its closing marker or to the beginning of a call, which
        stays in the buffer. Sets `is_thinking` while it reads. Drops the markers, the spaces before the
        opening one and those after the closing one. A call that begins within the reasoning turns the
        streaming of calls off."""
        thinking = self._thinking
        if thinking.format.begins_open:
            yield from self._skip(thinking.format.open)
        elif not thinking.is_open:
            if not (yield from self._skip(thinking.format.open)):
                return
            self.is_thinking = True
        self._undecided = ""
        closes = "" if thinking.close_id is not None else thinking.format.close
        form = self._calls.format if self._calls else None
        ends = (closes, *((form.open, *form.also_open) if form else ()))
        found = yield from self._until(Reasoning, markers_of(tuple(filter(None, ends))))
        if found == closes:
            yield from self._skip_spaces()
        else:
            self._unclosed = thinking.format.close
            self._streams_calls = False  # in reasoning any text is allowed
            self._buffer = found + self._buffer
        self.is_thinking = False
        self._undecided = ""

    def _end_truncated(self) -> None:
        """Sends the call within which the text ended, if it is held back, and drops the rest of the text. The
        call stays incomplete.

        Without any call, the text stays content in the mode auto. In other modes the text is dropped, and if
        only one function is offered, a call of it without arguments is sent: its text is "".
        """
        is_begun = self._is_held or self.output.calls
        if not (is_begun or self._calls.requires_call):
            return
        if not is_begun and len(self._calls.names) == 1:
            self._begin(self._calls.names[0])
        self._release()
        self._undecided = ""
        self._buffer = ""

    def _read_whole(self) -> Generator[None, None, bool]:
        """Reads what is held back as calls whose values may have any text, or with mistakes. Waits for more
        text while that may still make a call.

        Returns True after it has sent complete calls, or dropped what may stand beside earlier calls; further
        calls may follow. Returns False if the text is content, which stays held back, or after it has sent a
        truncated call. After MAX_TRYING_S, all text is content.

        An example, with the end of a call in a value: `<tool_call>f … </tool_call> … </tool_call>`. The text
        in front of the first closing marker is tried first, and is no call because its value has no end. The
        text in front of the second one is a call.
        """
        form = self._calls.format
        tried = 0  # of the ends
        head = ""  # what has been looked at
        while True:
            text = self._undecided + self._buffer
            if len(head) < MAX_HEAD:
                head = text.lstrip().removeprefix(self._marker)[:MAX_HEAD]
                if not may_be_calls(head, self._calls.names):
                    break
            ends = self._ends_of_calls(text)
            for end in ends[0 if self._is_final else tried :]:
                if self._trying_s > MAX_TRYING_S:
                    return False
                started_at = time.thread_time()
                rest = text[end:].removeprefix(form.close)
                calls = mended_calls(text[:end], self._calls, rest, self._is_final, self._streams_calls)
                self._trying_s += time.thread_time() - started_at
                if calls or (calls == [] and self.output.has_calls):
                    self._buffer = rest
                    yield from self._send_calls(calls)
                    if self._unclosed:
                        yield from self._skip(self._unclosed)
                    self._undecided = ""
                    return True
            tried = len(ends)
            if self._ended:
                break
            yield
        if self._keeps_truncated and form.is_whole:
            calls = mended_calls(text, self._calls, None, is_exact=True) or []
            yield from self._send_calls(calls[:-1])
            for name, arguments in calls[-1:]:
                self._begin(name, arguments.removesuffix("}"))
            self._end_truncated()
        return False

    def _ends_of_calls(self, text: str) -> list[int]:
        """Returns the places in the text where calls may end: in front of each closing marker. If the output
        has ended and is not truncated, also the end of the text, and behind each tag that ends a call,
        because other text may follow. While the output may go on, a closing marker that may be part of a
        value is left out."""
        form = self._calls.format
        ends = [found.start() for found in re.finditer(re.escape(form.close), text)] if form.close else []
        goes_on = form.is_whole and not self._ended
        if goes_on and ends and form.open.startswith(text.rpartition(form.close)[2]):
            ends.pop()  # what follows shows whether the marker is part of a value
        if self._is_final:
            ends.append(len(text))
            if form.call_end:
                ends += [found.end() for found in re.finditer(re.escape(form.call_end), text)]
        return ends

    def _send_calls(self, calls: list[tuple[str, str]]) -> Resumable:
        """Sends complete calls: the name and the arguments, in JSON, of each. A repeated call, or the first
        one if only one is allowed, ends the output. Raises _NotACall for a function that is not offered."""
        for name, arguments in calls:
            self._begin(name, arguments)
            yield from self._end_call()

    def _read_calls(self) -> Resumable:
        """Reads calls, and sends the text before and between them as content. Yields where more text is
        needed. A call begins after a marker or, if the format allows that, at the beginning of the text.

        Returns at the end of the text or, in a format with implicit starts, after the last call; the text
        that is left stays in the buffer. Raises _NotACall if these rules cannot read what is there, such as a
        format whose calls are read as a whole. What was sent before stays sent, the rest is held back, and
        the caller tries `_read_whole`. Raises _Truncated, a kind of _NotACall, if the output ends within a
        call.
        """
        form = self._calls.format
        yield from self._skip_spaces()
        follows = self._begins_implicitly()
        marked = not follows
        # A grammar that enforces calls has the opening marker.
        marks = () if self._streams_calls else form.bare
        bare = {mark.format(name) for mark in marks for name in self._calls.names}
        markers = markers_of((form.open, *form.also_open, *sorted(bare)))
        while follows or (marker := (yield from self._until(Content, markers, self._calls.requires_call))):
            self._marker = "" if follows else marker
            if self._marker in bare:
                self._buffer = self._marker + self._buffer
                self._undecided = self._marker = ""
            if first := form.first or form.next:
                yield from self._skip(first)
            yield from self._call()
            while form.next and (yield from self._skip(form.next)):
                yield from self._call()
            ends = []
            for end in filter(None, (*form.ends, form.close, self._unclosed)):
                ends.append((yield from self._skip(end)))
            if marked and form.close and form.close not in ends and self._buffer.startswith(MORE_STARTS):
                raise _NotACall  # perhaps there is a further call, or a comment
            self._undecided = ""
            yield from self._skip_spaces()
            follows = self._begins_implicitly() and not form.next
            if form.implicit_start and not follows:
                return

    def _begins_implicitly(self) -> bool:
        """Whether a call without a marker may begin here."""
        starts = IMPLICIT_STARTS if self._calls.format.implicit_start else ()
        return self._buffer.startswith(starts)

    def _call(self) -> Resumable:
        """Reads a call, and sends its arguments while they grow if they are JSON. Raises _NotACall for a
        format whose calls are read as a whole, for text that is no call of an offered function, and for
        arguments that are not an object; _Truncated if the output ends within the call."""
        form = self._calls.format
        if form.is_whole:
            raise _NotACall
        head, name = yield from self._head(form.head(any_of(self._calls.names)), form.braces)
        if form.writes_json:
            self._begin(name)
            arguments = yield from self._bracketed(sends=True)
            _check_object(arguments)
            if form.braces:
                _check_object(head + arguments + (yield from self._bracketed(form.braces)))
            if form.tail:
                yield from self._skip(form.tail.lstrip())
        else:
            yield from self._literals(name)
        yield from self._end_call()

    def _end_call(self) -> Resumable:
        """Completes the newest call, and sends it if it was held back. The rest of the output is dropped, and
        `is_done` set, if only one call is allowed; nothing is read after that.

        A call that repeats an earlier call is dropped, and so is the rest of the output, unless calls may
        repeat: small models go on and on.
        """
        if self._newest.text in self._earlier():
            self._is_held = False
            self.is_done = True
        else:
            self._release()
            self._newest.is_complete = True
            self.is_done = not self._calls.parallel
        self._undecided = ""
        if self.is_done:  # the rest is dropped
            self._buffer = ""
            yield

    def _head(self, pattern: str, braces: int) -> Generator[None, None, tuple[str, str]]:
        """Reads the head of a call, which is in front of the arguments and has `braces` braces. Returns the
        head, and the name of the function.

        pattern: a regular expression, whose first group is the name. Raises _NotACall for text that cannot
        become such a head, and _Truncated if the output ends first.
        """
        while not (found := re.match(pattern, self._buffer)):
            if self._buffer.count("{") > braces or not may_be_calls(self._buffer, self._calls.names):
                raise _NotACall
            yield from self._more()
        return self._move_to_undecided(found.end()), found[1]

    def _literals(self, name: str) -> Resumable:
        """Reads arguments that are not JSON, up to the closing bracket, and begins the call with them as
        JSON. Raises _NotACall for other arguments. If the output ends first, raises _Truncated; if truncated
        calls are kept, the call has begun with the arguments that are complete."""
        begins = len(self._undecided)
        try:
            arguments = yield from self._bracketed(1)
        except _Truncated:
            if self._keeps_truncated:
                self._begin(name, self._truncated(name, self._undecided[begins:]))
            raise
        self._begin(name, self._as_json(name, arguments))

    def _as_json(self, name: str, arguments: str) -> str:
        """Returns the keyword arguments of a Python call, up to the closing bracket, as a JSON object. Raises
        _NotACall for other text."""
        calls = mended_calls(f"{name}({arguments}", self._calls, is_exact=True)
        if not calls:
            raise _NotACall
        return calls[0][1]

    def _truncated(self, name: str, text: str) -> str:
        """Returns the complete ones of the keyword arguments of a Python call, as a JSON object that does not
        end. "{": none is complete, or more than MAX_COMMAS commas are behind the last complete one."""
        commas = [at for at, character in enumerate(text) if character == ","]
        for at in reversed(commas[-MAX_COMMAS:]):
            with contextlib.suppress(_NotACall):
                return self._as_json(name, text[:at] + ")").removesuffix("}") + ", "
        return "{"

    def _begin(self, name: str, arguments: str = "") -> None:
        """Begins a call with a new id, which is held back unless calls are sent while they grow
        (`_send_arguments`). The call is `_newest` from now on. Raises _NotACall for a function that is not
        offered."""
        if name not in self._calls.names:
            raise _NotACall
        call_id = secrets.token_hex(5)[:9] if self._calls.model.short_ids else f"call_{secrets.token_hex(12)}"
        self._newest = Call(index=len(self.output.calls), id=call_id, name=name)
        self._is_held = True
        self._send_arguments(arguments)

    def _bracketed(self, depth: int = 0, sends: bool = False) -> ResumableText:
        """Reads arguments, and returns them with their closing bracket. Brackets in quotes do not count.
        Raises _Truncated if the output ends first.

        depth: how many brackets are open already; sends: whether the arguments are sent while they grow.
        """
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
                elif character in "\"'":
                    quote = character
                else:
                    depth += (character in "{[(") - (character in "}])")
                    if depth <= 0 and character in "}])":
                        length = at + 1
                        break
            chunk = self._move_to_undecided(length)
            text += chunk
            if sends and chunk:
                self._send_arguments(chunk)
            if depth <= 0 and not quote and text:
                return text
            yield from self._more()

    def _until(
        self, kind: type[OutputPart], markers: Markers, may_be_truncated: bool = False
    ) -> ResumableText:
        """Sends the text before the first of the markers as a part of this kind, and reads the marker. Text
        that may be the beginning of a marker is held back until more text shows what it is.

        Returns the marker, or "" if the text ends without one. The text ends with the output. Reasoning also
        ends at the token of its closing marker, which `read` takes. A marker may end with another marker, but
        not have another one elsewhere.

        may_be_truncated: an output that ends with the beginning of a marker raises _Truncated.
        """
        while True:
            before, found = markers.split(self._buffer)
            held = "" if found else markers.begun(before)
            is_end = self._ended or (kind is Reasoning and not self.is_thinking)
            if is_end and held and may_be_truncated:
                raise _Truncated
            if is_end:
                held = ""
            if len(before) > len(held):
                self._move_to_undecided(len(before) - len(held))
                self._send(kind)
            if found:
                self._move_to_undecided(len(found))
            if found or is_end:
                return found
            yield

    def _skip(self, marker: str) -> ResumableText:
        """Reads spaces and the marker after them, and returns the marker; "" if there is none, also if the
        output ends within the marker. The spaces are read in either case. Sends nothing: what is read stays
        undecided."""
        yield from self._skip_spaces()
        while not self._buffer.startswith(marker):
            is_begun = marker.startswith(self._buffer)
            if is_begun and self._ended and self._keeps_truncated:
                self._move_to_undecided(len(self._buffer))
            if self._ended or not is_begun:
                return ""
            yield
        return self._move_to_undecided(len(marker))

    def _skip_spaces(self) -> Resumable:
        """Reads spaces up to the next other character, or to the end of the output. Sends nothing."""
        while not self._ended and not self._buffer.lstrip():
            self._move_to_undecided(len(self._buffer))
            yield
        self._move_to_undecided(len(self._buffer) - len(self._buffer.lstrip()))

    def _more(self) -> Resumable:
        """Yields once, for the caller to add more text. Raises _Truncated if the output has ended."""
        if self._ended:
            raise _Truncated
        yield

    def _send_arguments(self, text: str) -> None:
        """Adds arguments to the newest call. If calls are sent while they grow, the newest call is released
        once no earlier call of its function begins with the same arguments. The arguments of a held call are
        sent with its release."""
        call = self._newest
        if not self._is_held:
            self._undecided = ""
            self._append_to_part(call, text)
            return
        call.texts.append(text)
        if self._streams_calls and not any(earlier.startswith(call.text) for earlier in self._earlier()):
            self._release()

    def _earlier(self) -> list[str]:
        """The arguments that the newest call may not have: those of earlier calls of its function."""
        calls = [] if self._calls.may_repeat else self.output.calls
        return [call.text for call in calls if call.name == self._newest.name and call is not self._newest]

    def _release(self) -> None:
        """Sends the newest call with its arguments so far, if it was held back."""
        if self._is_held:
            self._is_held = False
            self._undecided = ""
            text = self._newest.text
            self._newest.texts.clear()
            self._append_to_part(self._newest, text)

    def _move_to_undecided(self, length: int) -> str:
        """Moves the first `length` characters from the buffer to the undecided text, and returns them."""
        taken = self._buffer[:length]
        self._buffer = self._buffer[length:]
        self._undecided += taken
        return taken

    def _send(self, kind: type[OutputPart]) -> None:
        """Sends the undecided text, as more of the newest part or as a new part."""
        if self._undecided:
            newest = self.output.parts[-1] if self.output.parts else None
            self._append_to_part(newest if isinstance(newest, kind) else kind(), self._undecided)
        self._undecided = ""

    def _append_to_part(self, part: OutputPart, text: str) -> None:
        """Adds text to a part of the output, and the part to the output if it is new. `push` returns the
        two."""
        if not part.texts:
            self.output.parts.append(part)
        part.texts.append(text)
        self._added.append((part, text))


class _NotACall(Exception):
    pass


class _Truncated(_NotACall):
    """The text ends, and what there is of it could be the beginning of a call."""


def _check_object(text: str) -> None:
    """Raises _NotACall for a text that is no JSON object."""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, RecursionError):
        raise _NotACall from None
