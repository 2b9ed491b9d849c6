"""Calls of tools that are read as a whole: of formats whose values may have any text, and those almost right.

`OutputParser` (output/parser.py) reads other calls while they grow. What it does not read comes here: a call
is the name of an offered tool, and its arguments, where no other reading is possible. docs/api/tools.md has
the mistakes that are read.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from text.escaping import any_of
from text.output.json_mender import CONSTANTS, GEMMA_QUOTE, read_value, whole_value

# What may stand between calls. A comment has all of its line, or there would be too many ways to match.
BESIDE = (r"\s", "[,;]", r"```\w*", r"(?://|#)[^\n]*(?:\n|\Z)", r"/\*.*?\*/")
NAME_PATTERN = "[A-Za-z0-9_.-]+"
NAME_KEYS = ("name", "function", "tool", "tool_name")  # of a call in JSON
ARGUMENTS_KEYS = ("arguments", "parameters", "args", "params", "input")
OTHER_KEYS = {*NAME_KEYS, "type", "id", "index"}  # of a call without arguments
# Words that formats have beside the name of a function.
FILLERS = ("assistant", "call", "commentary", "constrain", "function", "functions", "json", "message", "to")
# What the text of calls may begin with, but for the names of tools.
FIRST_WORDS = {
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
UncheckedCall = tuple[Any, Any]  # name and arguments, neither of them checked


def may_be_calls(text: str, names: Sequence[str]) -> bool:
    """Whether `mended_calls` may find calls of the functions `names` when there is more of the text. Looks at
    the first word, and from MAX_HEAD characters on for a name with a bracket after it."""
    head = text[:MAX_HEAD]
    first = re.match(f"\\W*({NAME_PATTERN})?", head)[1] or ""
    firsts = (first, first.removeprefix("functions."))
    if not any(word.startswith(firsts) for word in (*names, *FIRST_WORDS)):
        return False
    return len(text) < MAX_HEAD or bool(re.search(f"{any_of(names)}.*[({{<]", head, re.DOTALL))


@dataclass
class CallText:
    """A text to read as calls, without what may stand in front of the first call.

    The readers `in_json`, `in_python`, `in_almost_python` and `after_names` yield the calls. They raise one
    of ERRORS for a text that is something else, perhaps after some calls.

    tools: the offered ones, by name; markers: texts that may stand beside calls; has_comments: comments may
    stand beside calls, too; rest, is_final: see `mended_calls`.
    """

    text: str
    tools: dict[str, Any]
    markers: Iterable[str]
    has_comments: bool
    rest: str | None
    is_final: bool

    def __post_init__(self):
        self.text = self.text[self.skipped(0) :]

    @functools.cached_property
    def _beside(self) -> re.Pattern:
        beside = BESIDE if self.has_comments else (r"\s",)
        skipped = [any_of({*self.markers} - {"", GEMMA_QUOTE}), *beside]
        return re.compile(f"(?:{'|'.join(skipped)})+", re.DOTALL)

    def skipped(self, at: int) -> int:
        """Returns the place after what may stand beside calls; `at` itself if nothing of that kind begins
        there."""
        found = self._beside.match(self.text, at)
        return found.end() if found else at

    def checked(self, name: Any, arguments: Any) -> tuple[str, str]:
        """Returns the name of the called tool, and the arguments in JSON. Does not compare the arguments with
        the schema. Raises ValueError if no such tool is offered, or if the arguments are no object, and what
        `as_json` raises if JSON cannot write them."""
        name = self._name(name)
        if name not in self.tools or not isinstance(arguments, dict):
            raise ValueError("not the call of an offered tool")
        return name, as_json(arguments)

    def _name(self, name: Any) -> str:
        """Returns a name without `functions.`, unless a tool of the whole name is offered."""
        return name if name in self.tools else str(name).removeprefix("functions.")

    def in_json(self) -> Iterator[UncheckedCall]:
        """Yields the calls of a text of JSON: objects with a name and arguments, or lists of them. Only
        markers, and what else may stand beside calls, may be between them."""
        at = 0
        while at < len(self.text):
            value, at = read_value(self.text, at)
            yield from _calls_in(value)
            at = self.skipped(at)

    def in_python(self) -> Iterator[UncheckedCall]:
        """Yields the calls of a text of Python: calls with keyword arguments, or lists of them. Raises
        SyntaxError for a text that Python cannot parse, and ValueError for arguments that are not literals,
        have no name, or have one name twice."""
        for statement in ast.parse(self.text.strip()).body:
            value = statement.value
            for call in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
                arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
                if call.args or None in arguments or len(arguments) < len(call.keywords):
                    raise ValueError("arguments without a name, or with one name")
                yield ast.unparse(call.func), arguments

    def in_almost_python(self) -> Iterator[UncheckedCall]:
        """Yields calls as templates write them in Python, without escapes. Strings may have quotes and line
        breaks; names of arguments may have dashes, or be Python's keywords. Raises ValueError for text in
        front of the first call and for two arguments of one name."""
        listed = re.fullmatch(r"\[?(.*)\)\s*\]?", self.text.strip(), re.DOTALL)[1]
        before, *calls = re.split(rf"(?:\A|\)\s*,)\s*({any_of(self.tools)})\(", listed)
        for name, written in zip(calls[::2], calls[1::2]):
            no_key, *pairs = re.split(r"(?:\A|,)\s*([\w-]+)\s*=", written)
            arguments = {key: _value_of(value) for key, value in zip(pairs[::2], pairs[1::2])}
            if before or no_key.strip() or 2 * len(arguments) < len(pairs):
                raise ValueError("other text, or two arguments of one name")
            yield name, arguments

    def after_names(self, is_loose: bool = False) -> Iterator[UncheckedCall]:
        """Yields calls, each an offered name and then an object of arguments. Only markers, numbers and the
        words of FILLERS may stand beside a name, else ValueError is raised.

        is_loose: strings in the arguments need no quotes. Then, if more text may come, an object without its
        closing brace raises ValueError. If the text is truncated, its last object has only the members that
        are complete.
        """
        at = 0
        while at < len(self.text):
            begin = self.text.index("{", at, at + MAX_HEAD)
            words = re.findall(NAME_PATTERN, self._beside.sub(" ", self.text[at:begin]))
            offered = [word for word in words if self._name(word) in self.tools]
            if any(word not in (*FILLERS, *offered) and not word.isdigit() for word in words):
                raise ValueError("other words")
            (name,) = [word for word in offered if word not in FILLERS] or offered[-1:]
            value, at = read_value(self.text, begin, is_loose, is_partial=self.rest is None)
            yield name, value
            if is_loose and not self.is_final and self.text[at - 1] != "}":
                raise ValueError("the call may go on")
            at = len(self.text) if self.rest is None else self.skipped(at)

    def check_rest(self, may_follow: str, another: str, *parts: str) -> None:
        """Raises ValueError if `rest`, which follows the text, may belong to a value that begins in the text.

        Before the end of the output, `rest` has to begin with a space or with `may_follow`. At the end of the
        output, each of `parts` in `rest` has to belong to a further call. The parts are examined only when
        all of `rest` is there, so it makes no difference how the output is split.

        may_follow: what a call may have right behind it; another: a regular expression for the beginning of a
        further call; parts: texts within calls, of which the last one ends a call.

        Example: the output has ended, and `rest` is ` and more</parameter>`. That closing tag belongs to no
        further call, so it may be the end of a value that begins in the text.
        """
        is_apart = not self.rest or self.rest[0].isspace() or self.rest.startswith(may_follow)
        if not (is_apart or self.is_final):
            raise ValueError("what follows may be part of a value")
        is_open = False
        rest = self.rest if self.is_final else ""
        for found in re.finditer(f"(?P<another>{another})|{any_of(parts)}", rest or ""):
            if not (is_open or found["another"]):
                raise ValueError("the text may end within a value")
            is_open = found[0] != parts[-1]

    def is_blank(self, text: str) -> bool:
        """Whether the text has only what may stand beside calls."""
        return not text or bool(self._beside.fullmatch(text))


def as_json(value: Any) -> str:
    """Returns a value as JSON, with its characters as they are. Raises ValueError for numbers that JSON does
    not have, and for lone surrogates, which are no text; TypeError for a type that JSON does not have;
    RecursionError for a value that is nested too deeply."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()


def _calls_in(value: Any) -> Iterator[UncheckedCall]:
    """Yields the calls in a value of JSON: an object, also within `function`, or lists of objects. A call
    without arguments has {}, one without a name has None. Arguments in a text are read by `whole_value`.

    Raises AttributeError for a value of another type, and ValueError if the arguments could be one of several
    fields, or are a text that is no value.
    """
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


def _value_of(argument: str) -> Any:
    """Returns the value of an argument in almost Python: a literal or, if it is in quotes, the string between
    them, with or without escapes. Raises ValueError or SyntaxError for anything else."""
    argument = argument.strip()
    quoted = re.fullmatch("(['\"])(.*)\\1", argument, re.DOTALL)
    if not quoted:
        return _literal(ast.parse(argument, mode="eval").body)
    try:
        return whole_value(argument)
    except ValueError:
        return quoted[2]


def _literal(expression: ast.expr) -> Any:
    return ast.literal_eval(_JsonWords().visit(expression))


class _JsonWords(ast.NodeTransformer):
    """Python's constants for JSON's, which models write, too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node
