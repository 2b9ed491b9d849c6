"""Calls of tools that are read as a whole: of formats whose values may have any text, and those almost right.

`OutputParser` (output/parser.py) reads other calls while they grow. What it does not read comes here: a call
is the name of an offered tool, and its arguments, where no other reading is possible. docs/api/tools.md has
the mistakes that are read.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from run import Json
from text.escaping import any_of
from text.output.json_mender import CONSTANTS, read_value, whole_value
from text.output.tool_formats import GEMMA_QUOTE, TYPES, WHOLE, AllowedCalls, Syntax, types_of

# What may stand between calls. A comment has all of its line, or there would be too many ways to match.
BESIDE = (r"\s", "[,;]", r"```\w*", r"(?://|#)[^\n]*(?:\n|\Z)", r"/\*.*?\*/")
NAME = "[A-Za-z0-9_.-]+"
NAME_KEYS = ("name", "function", "tool", "tool_name")  # of a call in JSON
ARGUMENTS_KEYS = ("arguments", "parameters", "args", "params", "input")
OTHER_KEYS = {*NAME_KEYS, "type", "id", "index"}  # of a call without arguments
# Words that formats have beside the name of a function.
FILLERS = ("assistant", "call", "commentary", "constrain", "function", "functions", "json", "message", "to")
# What the text of calls may begin with, but for the names of tools.
FIRST_WORDS = {
    *NAME_KEYS,
    *ARGUMENTS_KEYS,
    *OTHER_KEYS,
    *FILLERS,
    "invoke",
    "python",
    "tool_call_begin",
    "channel",
    "start",
}
MAX_HEAD = 1_000  # characters of a call before its arguments, or of a parameter's name
ERRORS = (ValueError, LookupError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError)
Call = tuple[Any, Any]  # name and arguments, neither of them checked


def mended_calls(
    text: str, calls: AllowedCalls, rest: str | None = "", is_final: bool = True, is_exact: bool = False
) -> list[tuple[str, str]] | None:
    """The names and the arguments, in JSON, of the calls that are all of the text but for markers and
    comments; None: it has something else.

    rest: what follows the text; None: it is truncated, and the last call has the arguments that are complete.
    is_final: `rest` is all that follows; if it is not, a value that may go on there is none. is_exact: calls
    of other formats are none.
    """
    mender = _CallMender(text, calls, rest, is_final)
    own = {Syntax.XML: mender.in_tags, Syntax.PYTHON: mender.in_python}.get(
        calls.format.syntax, mender.after_names
    )
    for read in [own] if is_exact else [own, mender.in_json, mender.in_python, mender.after_names]:
        with contextlib.suppress(*ERRORS):
            return [mender.checked(*call) for call in read(mender.skipped(0))]
    return None


def may_be_calls(text: str, names: Sequence[str]) -> bool:
    """Whether `mended_calls` may find calls of these functions when there is more of the text."""
    head = text[:MAX_HEAD]
    first = re.match(f"\\W*({NAME})?", head)[1] or ""
    if not any(word.startswith(first.removeprefix("functions.")) for word in (*names, *FIRST_WORDS)):
        return False
    return len(text) < MAX_HEAD or any(
        re.search(f"{re.escape(name)}.*[({{<]", head, re.DOTALL) for name in names
    )


class _CallMender:
    """Its readers yield the calls from a place of the text on, and raise one of ERRORS for another text."""

    def __init__(self, text: str, calls: AllowedCalls, rest: str | None, is_final: bool):
        form = calls.format
        inner = () if form.tags else form.inner
        comments = (r"\s",) if form.syntax in WHOLE else BESIDE  # in others a value may have them
        markers = {form.open, *form.also_open, form.close, *inner} - {"", GEMMA_QUOTE}
        self._beside = re.compile(f"(?:{'|'.join([any_of(markers), *comments])})+", re.DOTALL)
        self._text = text
        self._rest = rest
        self._is_final = is_final
        self._calls = calls

    def skipped(self, at: int) -> int:
        """The place after what may stand beside calls."""
        found = self._beside.match(self._text, at)
        return found.end() if found else at

    def checked(self, name: Any, arguments: Any) -> tuple[str, str]:
        name = str(name).removeprefix("functions.")
        if name not in self._calls.names or not isinstance(arguments, dict):
            raise ValueError("not the call of an offered tool")
        return name, as_json(arguments)

    def in_json(self, at: int) -> Iterator[Call]:
        """Objects with a name and arguments, or lists of them."""
        while at < len(self._text):
            value, at = read_value(self._text, at)
            yield from _calls_in(value)
            at = self.skipped(at)

    def in_python(self, at: int) -> Iterator[Call]:
        """Calls with keyword arguments, or lists of them."""
        for statement in ast.parse(self._text[at:].strip()).body:
            value = statement.value
            for call in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
                arguments = {
                    keyword.arg: ast.literal_eval(_JsonWords().visit(keyword.value))
                    for keyword in call.keywords
                }
                if call.args or None in arguments or len(arguments) < len(call.keywords):
                    raise ValueError("arguments without a name, or with one name")
                yield ast.unparse(call.func), arguments

    def after_names(self, at: int) -> Iterator[Call]:
        """Objects of arguments, each after a name."""
        is_loose = self._calls.format.syntax is Syntax.GEMMA
        while at < len(self._text):
            begin = self._text.index("{", at)
            words = re.findall(NAME, self._beside.sub(" ", self._text[at:begin]))
            offered = [word for word in words if word.removeprefix("functions.") in self._calls.names]
            if any(word not in (*FILLERS, *offered) and not word.isdigit() for word in words):
                raise ValueError("other words")
            (name,) = [word for word in offered if word not in FILLERS] or offered[-1:]
            value, at = read_value(self._text, begin, is_loose, is_partial=self._rest is None)
            yield name, value
            if is_loose and not self._is_final and self._text[at - 1] != "}":
                raise ValueError("the call may go on")
            at = len(self._text) if self._rest is None else self.skipped(at)
        if is_loose:
            self._check_rest(re.escape(self._calls.format.open), GEMMA_QUOTE, self._calls.format.close)

    def _check_rest(self, another: str, *parts: str) -> None:
        """Raises ValueError if the text ends within a value: parts of calls follow outside of another call.
        The last part is the end of one. What follows is not looked at until it is all there: how it is split
        makes no difference."""
        form = self._calls.format
        may_follow = form.open if not form.tags else "\n"  # calls in tags have a line break between them
        is_apart = not self._rest or self._rest[0].isspace() or self._rest.startswith(may_follow)
        if not (is_apart or self._is_final):
            raise ValueError("what follows may be part of a value")
        is_open = False
        rest = self._rest if self._is_final else ""
        for found in re.finditer(f"(?P<another>{another})|{any_of(parts)}", rest or ""):
            if not (is_open or found["another"]):
                raise ValueError("the text may end within a value")
            is_open = found[0] != parts[-1]

    def in_tags(self, at: int) -> Iterator[Call]:
        """Names, and each parameter in tags. A text in which something else is between tags is none."""
        form = self._calls.format
        tags = form.tags
        begins = _tag(form.first) or rf"(?:\A|{re.escape(form.open)})\s*"
        call = rf"{begins}(?P<name>{any_of(self._calls.names)}){_tag(tags.name_end)}(?![^\s<])"
        value = rf"\s*{tags.value}" if tags.value else ""
        key = rf"{_tag(tags.key)}\s*(?P<key>[^<>\n\"']+?)\s*{_tag(tags.key_end)}{value}"
        text = self._text[at:]
        if self._rest is None:  # up to the last value that is complete
            closed, end, _value = text.rpartition(tags.value_end)
            text = closed + end or re.match(call, text)[0]
        found = [*re.finditer(f"{call}|{key}|{any_of([tags.value_end, tags.end])}", text)]
        ends = [*(tag.start() for tag in found[1:]), len(text)]
        pieces = [(tag, text[tag.end() : end]) for tag, end in zip(found, ends, strict=True)]
        n = 0
        if not text.startswith(found[0][0]):
            raise ValueError("another text is in front")
        while n < len(pieces):
            tag, behind = pieces[n]
            schema = self._calls.parameters_of(tag["name"] if self._is_blank(behind) else "")
            arguments: Json = {}
            n += 1
            while n < len(pieces) and (name := pieces[n][0]["key"]) and name not in arguments:
                n, arguments[name] = self._value(pieces, n, schema, arguments)
            if n < len(pieces) and pieces[n][0][0] == tags.end and self._is_blank(pieces[n][1]):
                n += 1
            elif not self._is_final and tags.end != form.close:
                raise ValueError("the call may go on")
            yield tag["name"], arguments
        self._check_rest(
            rf"{re.escape(form.open)}\s*{call.replace('?P<name>', '')}", tags.value_end, tags.end
        )

    def _is_blank(self, text: str) -> bool:
        return not text or bool(self._beside.fullmatch(text))

    def _value(
        self, pieces: list[tuple[re.Match, str]], n: int, schema: Json, earlier: Json
    ) -> tuple[int, Any]:
        """Which piece follows the value that begins in piece `n`, and the value. Without a tag of its own it
        ends in front of a parameter of the function that is not among the `earlier` ones, of another call, or
        of the end."""
        tags = self._calls.format.tags
        properties = schema.get("properties", {})
        key, written = pieces[n]
        types = types_of(properties.get(key["key"]), schema)
        misfit = None
        for at in range(n + 1, len(pieces)):
            tag, behind = pieces[at]
            is_blank = self._is_blank(behind)
            if tag[0] == tags.value_end and is_blank:
                value = _typed(written, types, tags.line_breaks)
                if _fits(value, types) and (at == n + 1 or self._is_final):
                    return at + 1, value
                misfit = misfit or (at + 1, value)
            follows = pieces[at + 1][0] if at + 1 < len(pieces) else None
            is_last = follows["name"] if follows else tags.end != self._calls.format.close
            ends = is_last and tag[0] == tags.end
            begins = tag["name"] and (not follows or follows["key"] or follows[0] == tags.end)
            is_new = tag["key"] in properties if properties else tag["key"]
            if (is_blank and (ends or begins)) or (is_new and tag["key"] not in (key["key"], *earlier)):
                break
            written += tag[0] + behind
        else:
            at = len(pieces)
        value = _typed(written.rstrip("\n"), types, tags.line_breaks)
        is_certain = misfit or (tags.value_end not in written and _fits(value, types))
        if not (is_certain and self._is_final):
            raise ValueError("the value may go on, or have the part of another")
        return misfit or (at, value)


def _typed(text: str, types: set[str], line_breaks: bool) -> Any:
    """The value of a parameter of these types (none: of any). Text of none of them stays a string, for the
    client's function to reject. line_breaks: one on each side belongs to the tags."""
    if line_breaks:
        text = text.removeprefix("\n").removesuffix("\n")
    written = text.strip()
    may_be_text = not types or "string" in types
    with contextlib.suppress(*ERRORS):
        if written in CONSTANTS:
            value = CONSTANTS[written]
        else:
            value = msgspec.json.decode(written) if may_be_text else whole_value(written)
        as_json(value)
        if types != {"string"} and (_fits(value, types) or not may_be_text):
            return value
    return text


def _fits(value: Any, types: set[str]) -> bool:
    kind = TYPES[type(value)]
    return not types or kind in types or (kind == "integer" and "number" in types)


def _tag(text: str) -> str:
    """A regular expression for a tag, or a part of one: with blanks around `=`, with or without quotes."""
    return re.escape(text).replace("=", r"\s*=\s*").replace('"', "[\"']?").replace(r"\ ", r"\s+")


def as_json(value: Any) -> str:
    """Raises ValueError for numbers that JSON does not have, and for lone surrogates, which are no text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()


def _calls_in(value: Any) -> Iterator[Call]:
    """The calls in a value of JSON."""
    if isinstance(value, list):
        for each in value:
            yield from _calls_in(each)
        return
    if isinstance(value.get("function"), dict):
        value = value["function"]
    given = [value[key] for key in ARGUMENTS_KEYS if key in value]
    if len(given) > 1 or (not given and not value.keys() <= OTHER_KEYS):
        raise ValueError("not certain which are the arguments")
    arguments = given[0] if given else None
    if isinstance(arguments, str) and arguments.strip():
        arguments = whole_value(arguments)
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    yield name, {} if arguments is None or arguments == "" else arguments


class _JsonWords(ast.NodeTransformer):
    """Python's constants for JSON's, which models write, too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node
