"""How models write calls of tools: a class a syntax, with its grammar and how it is read; and the grammars of
outputs with calls.

A format is an object of one of these classes; tool_formats.py has them all. `OutputParser` (parser.py) finds
the `head` of a call, and reads arguments in JSON while they grow, other ones up to the closing bracket. A
call of a syntax that `is_whole` is read when it is complete, by its `calls_in`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from run import Json
from text.escaping import any_of
from text.grammar import GrammarError, json_rule, lark_string, of_rules
from text.json_schema import (
    CONSTRAINTS,
    TYPE_NAMES,
    allowed_values,
    named_types,
    referred,
    required_names,
    within,
)
from text.output.call_mender import ERRORS, CallText, UncheckedCall, as_json
from text.output.json_mender import CONSTANTS, GEMMA_QUOTE, whole_value

DEFINITIONS = ("$defs", "definitions")
ALL_TYPES = {*TYPE_NAMES.values()}
# Side by side that are asked for: small models would repeat theirs up to the end of the context.
MOST_CALLS = 16
MAX_MISFITS = 5  # closing tags in front of which a value of another type than the schema's may end
# `argument` with any name, `value`: any literal, and the literals of each type.
ANY_LITERALS = [
    "value: string | number | boolean | null | array | object",
    "integer: /-?(0|[1-9][0-9]{0,15})/",
    r"number: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/",
]
PYTHON_LITERALS = [
    *ANY_LITERALS,
    'argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" value',
    'array: "[" (value ("," " "? value)*)? "]"',
    'object: "{" (string ":" " "? value ("," " "? string ":" " "? value)*)? "}"',
    r"""string: /"([^"\\\x00-\x1f]|\\["\\nt])*"|'([^'\\\x00-\x1f]|\\['\\nt])*'/""",
    'boolean: "True" | "False"',
    'null: "None"',
]
GEMMA_LITERALS = [  # but for strings
    *ANY_LITERALS,
    'argument: /[A-Za-z_][A-Za-z0-9_-]*/ ":" value',
    'array: "[" (value ("," value)*)? "]"',
    'object: "{" (argument ("," argument)*)? "}"',
    'boolean: "true" | "false"',
    'null: "null"',
]

# The name of a parameter in a tag. It neither begins nor ends with a space: if a space could match in two
# places, long runs of spaces would take for ever.
TAG_KEY = r"[^\s<>\"'](?:[^<>\n\"']*[^\s<>\"'])?"

TokenId = Callable[[str], int | None]  # of a text that is one token
ToLark = Callable[[str], str]  # writes a text with markers in Lark


@dataclass(frozen=True)
class Function:
    """A tool that may be called. `parameters`: the JSON schema of an object; path: its place in the request,
    for errors."""

    name: str
    parameters: Json
    is_strict: bool = False
    path: str = ""

    @property
    def takes_any(self) -> bool:
        """Whether the schema names no properties and allows all."""
        allows_all = self.parameters.get("additionalProperties") is not False
        return allows_all and not self.parameters.get("properties")

    @property
    def properties(self) -> Json:
        return self.parameters.get("properties", {})

    @property
    def required(self) -> set[str]:
        return required_names(self.parameters)

    def types_of(self, name: str) -> set[str]:
        """Returns the types of the property called `name`, as the function of this name does."""
        return types_of(self.properties.get(name), self.parameters)


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A way to write calls, for the parser and for the grammar: here as JSON objects, with a name and
    arguments. Subclasses have other syntaxes.

    `prefix`, `between` and `suffix` are Lark for what stands around calls, behind the opening marker.
    `before` is Lark for what an output of calls alone has in front of `prefix`. `auto` is Lark for an output
    with calls or without; "": `calls_grammar` makes it. These fields may use markers in quotes, and the rules
    `open`, `close`, `next` (the markers), `calls` (all calls, with what stands around them), `ws` and `TEXT`.
    """

    name: str
    other_names: tuple[str, ...] = ()  # vLLM's parsers that mean it
    open: str  # the marker in front of calls,
    also_open: tuple[str, ...] = ()  # other texts that may stand there
    bare: tuple[str, ...] = ()  # what else a call begins with, with the name of a function for {}
    close: str = ""  # the marker after them
    described_by: tuple[str, ...] = ()  # words of templates that take tools and write no calls, or tokens
    next: str = ""  # stands in front of each call after the first one; it may be there, too,
    first: str = ""  # or this
    implicit_start: str = ""  # what calls begin with where they may be the whole text, without a marker
    ends: tuple[str, ...] = ()  # what may follow calls, in front of `close`
    inner: tuple[str, ...] = ()  # further markers
    before: str = "open"
    prefix: str = ""
    between: str = ""
    suffix: str = ""
    auto: str = ""

    arguments_key: str = "arguments"  # of a call in JSON

    is_whole = False  # values may have any text: a call is read when it is complete
    writes_json = True  # the arguments
    key_pattern = r"(?s:.*)"  # of the names of parameters
    language = "JSON"  # for errors
    braces = 1  # in front of the arguments
    tail = ""  # what may follow the arguments
    call_end = ""  # of a call in tags

    @property
    def markers(self) -> list[str]:
        """The texts that may be tokens by themselves."""
        around = (self.open, self.close)
        apart = [text for text in around if text and not any(part in text for part in self.inner)]
        return [*self.inner, *apart]

    @property
    def parts(self) -> list[str]:
        """The texts that every call has, without brackets: patterns have brackets for other reasons, too."""
        return [self.open, (self.first or self.next).strip("[")]

    def head(self, names: str) -> str:
        """Returns a regular expression for what is in front of the arguments of a call of one of these
        functions. Its first group is the name. names: a regular expression for the names of the functions."""
        keys = r'"(?:arguments|parameters)"'
        return rf'\s*{{\s*"name"\s*:\s*"({names})"\s*,\s*{keys}\s*:\s*(?={{)'

    def call_rules(self, rule: str, function: Function, arguments: str, _lark: ToLark) -> list[str]:
        """Returns the rules of a call of the function, in Lark; the first one is called `rule`. Raises
        GrammarError for a function that this syntax cannot write.

        arguments: the right side of a rule for arguments in JSON, which other syntaxes do not use.
        """
        name = json.dumps(json.dumps(function.name))
        key = json.dumps(json.dumps(self.arguments_key))
        members = rf'"\"name\"" ws ":" ws {name} ws "," ws {key} ws ":" ws {rule}_arguments'
        return [rf'{rule}: "{{" ws {members} ws "}}"', f"{rule}_arguments: {arguments}"]

    def shared_rules(self, _lark: ToLark, _token_id: TokenId) -> list[str]:
        """Returns further rules in Lark, which the rules of all calls use."""
        return []

    def calls_in(self, text: CallText) -> Iterator[UncheckedCall]:
        """Yields the calls of a whole text. Raises one of ERRORS for another text."""
        return self.after_names(text)

    def after_names(self, text: CallText) -> Iterator[UncheckedCall]:
        """Yields calls, each an offered name and then an object of arguments. Raises one of ERRORS for
        another text."""
        return text.after_names()


@dataclass(frozen=True, kw_only=True)
class NamedFormat(ToolFormat):
    """The name, a separator, and the arguments in JSON. The id that a model may write is not used."""

    braces = 0

    name_begin: str = ""  # what is in front of the name,
    number: str = ""  # right after it: Lark,
    separator: str  # between it and the arguments,
    separators: str  # or may be there: a regular expression,
    tail: str = ""  # and after them

    @property
    def parts(self) -> list[str]:
        return [*super().parts, self.name_begin, self.separator.strip()]

    def head(self, names: str) -> str:
        return rf"\s*{re.escape(self.name_begin)}({names})(?:{self.separators})\s*(?={{)"

    def call_rules(self, rule: str, function: Function, arguments: str, lark: ToLark) -> list[str]:
        head = f"{lark(self.name_begin + function.name)} {self.number} {lark(self.separator)}"
        return [f"{rule}: {head} {rule}_arguments {lark(self.tail)}", f"{rule}_arguments: {arguments}"]


class PairsFormat(ToolFormat):
    """Calls of which the arguments are pairs of a key and a literal.

    A subclass has `begin` of a call (with {} for the name), `equals`, `comma`, `end`, `written` for a value,
    and `literals`: the rules `argument` and `value`, and a rule for each type.
    """

    writes_json = False
    braces = 0

    def call_rules(self, rule: str, function: Function, _arguments: str, lark: ToLark) -> list[str]:
        """Returns the rules of a call: the properties in their order; those that are not required may be
        missing. A value is one of the listed ones, else of the type that its schema names, else any literal;
        the rest of its schema is not enforced. A function that `takes_any` has any arguments."""
        begin = lark_string(self.begin.format(function.name))
        if function.takes_any:
            return [f'{rule}: {begin} (argument ("," " "? argument)*)? "{self.end}"']
        properties = function.properties
        rules = [f'{rule}: {begin} {rule}_first_0 "{self.end}"']
        for k, (name, schema) in enumerate(properties.items()):
            values = " | ".join(lark(self.written(value)) for value in allowed_values(schema) or ())
            literal = values or _named_type(schema) or "value"
            for place, comma in (("first", ""), ("next", self.comma)):
                key = lark_string(comma + name + self.equals)
                argument = f"{key} ({literal}) {rule}_next_{k + 1}"
                skipped = "" if name in function.required else f" | {rule}_{place}_{k + 1}"
                rules.append(f"{rule}_{place}_{k}: {argument}{skipped}")
        return [*rules, f'{rule}_first_{len(properties)}: ""', f'{rule}_next_{len(properties)}: ""']

    def shared_rules(self, _lark: ToLark, _token_id: TokenId) -> list[str]:
        return self.literals

    def enforced(self, function: Function, name: str) -> set[str]:
        """Returns the keywords of the property called `name` that `call_rules` enforces."""
        schema = function.properties[name]
        if allowed_values(schema):
            return {"type", "enum", "const"}
        return {"type"} if _named_type(schema) else set()


class PythonFormat(PairsFormat):
    """name(key=value)"""

    language = "Python"
    key_pattern = r"[^\W\d][\w-]*"
    begin = "{}("
    equals = "="
    comma = ", "
    end = ")"
    literals = PYTHON_LITERALS

    @staticmethod
    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

    def head(self, names: str) -> str:
        return rf"\s*({names})\("

    def calls_in(self, text: CallText) -> Iterable[UncheckedCall]:
        """Returns the calls of a whole text: read by Python's parser, else as templates write them without
        escapes. Reading the latter raises one of ERRORS for another text."""
        with contextlib.suppress(*ERRORS):
            return [*text.in_python()]
        return text.in_almost_python()


class GemmaFormat(PairsFormat):
    """call:name{key:value}, an object as in JSON but for its quotes."""

    language = "Gemma's calls"
    key_pattern = r"[^\s:=,{}\[\]<\"']+"
    begin = "call:{}{{"
    equals = ":"
    comma = ","
    end = "}"
    literals = GEMMA_LITERALS
    is_whole = True

    @staticmethod
    def written(value: Any) -> str:
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value)

    def shared_rules(self, lark: ToLark, token_id: TokenId) -> list[str]:
        quoted = up_to(GEMMA_QUOTE, token_id, "quoted", "QUOTED")
        return [*self.literals, f"string: {lark(GEMMA_QUOTE)} quoted", *quoted]

    def after_names(self, text: CallText) -> Iterator[UncheckedCall]:
        yield from text.after_names(is_loose=True)
        text.check_rest(self.open, re.escape(self.open), GEMMA_QUOTE, self.close)


class Tag(NamedTuple):
    """A tag of a call, and the text behind it. The tag begins a call of the function `name`, or a value of
    the parameter `key`; with neither it ends one of these."""

    text: str
    name: str | None
    key: str | None
    behind: str


@dataclass(frozen=True, kw_only=True)
class TaggedFormat(ToolFormat):
    """The name, and each parameter in tags."""

    name_end: str = ""  # after the name of the function
    key: str  # in front of the name of a parameter,
    key_end: str  # and after it
    value: str = ""  # in front of a value,
    value_end: str  # and after it
    call_end: str
    line_breaks: bool = False  # one belongs to each of the tags around a value

    is_whole = True
    writes_json = False
    key_pattern = TAG_KEY
    language = "tags, without quotes, `<` and `>`"

    @property
    def parts(self) -> list[str]:
        return [*super().parts, self.key]

    def call_rules(self, rule: str, function: Function, _arguments: str, lark: ToLark) -> list[str]:
        """Returns the rules of a call: the properties in their order; those that are not required may be
        missing. A function that `takes_any` has any parameters. Raises GrammarError for the schema of a value
        in JSON that cannot be enforced."""
        begin = f"{lark(function.name + self.name_end)} ws"
        if function.takes_any:
            return [f"{rule}: {begin} parameter* {lark(self.call_end)}"]
        rules = []
        parts = []
        for k, name in enumerate(function.properties):
            parts.append(f"{rule}_{k}" if name in function.required else f"{rule}_{k}?")
            rules.append(f"{rule}_{k}: {self._key(lark_string(name), lark)} {rule}_value_{k} ws")
            rules += self._value_rules(f"{rule}_value_{k}", function, name, lark)
        return [f"{rule}: {begin} {' '.join(parts)} {lark(self.call_end)}", *rules]

    def shared_rules(self, lark: ToLark, token_id: TokenId) -> list[str]:
        """Returns the rules `parameter`, with any name and value, and `raw`, any text and the tag after
        it."""
        key = self._key(f"/{TAG_KEY}/", lark)
        return [f"parameter: {key} raw ws", *up_to(self.value_end, token_id, "raw", "RAW")]

    def _key(self, name: str, lark: ToLark) -> str:
        """Returns in Lark what stands in front of a value; name: the parameter's name, or a pattern of names,
        in Lark."""
        value = f"ws {lark(self.value)}" if self.value else ""
        return f"{lark(self.key)} {name} {lark(self.key_end)} {value}"

    def _value_rules(self, rule: str, function: Function, name: str, lark: ToLark) -> list[str]:
        """Returns the rules of a value and the tag after it; the first one is called `rule`. The value is one
        of the listed texts, if the schema lists values and allows texts only; else any text, if it allows
        texts; else JSON.

        name: of the property. Raises GrammarError for a schema of JSON that cannot be enforced.
        """
        schema = function.properties[name]
        types = function.types_of(name)
        values = [value for value in allowed_values(schema) or () if isinstance(value, str)]
        end = lark(self.value_end)
        if types == {"string"} and values:
            space = r"/\n?/" if self.line_breaks else ""
            return [f"{rule}: {space} ({' | '.join(map(lark_string, values))}) {space} {end}"]
        if not types or "string" in types:
            return [f"{rule}: raw"]
        definitions: Json = {}
        if "$ref" in json.dumps(schema):
            parameters = function.parameters
            definitions = {name: parameters[name] for name in DEFINITIONS if name in parameters}
        return [f"{rule}: ws {rule}_json ws {end}", f"{rule}_json: {json_rule(definitions | schema, ' ?')}"]

    def enforced(self, function: Function, name: str) -> set[str]:
        """Returns the keywords of the property called `name` that `call_rules` enforces: all of them for a
        value in JSON."""
        types = function.types_of(name)
        if types and "string" not in types:
            return CONSTRAINTS  # written as JSON
        return {"type", "enum", "const"} if types == {"string"} else {"type"}

    def calls_in(self, text: CallText) -> Iterator[UncheckedCall]:
        """Yields the calls, tag by tag: a name, and an object of values with the types that the function's
        schema names. Raises one of ERRORS for a text with anything else between the tags. If the text is
        truncated, a value that is not complete is left out."""
        begins = _tag(self.next) or rf"(?:\A|{re.escape(self.open)})\s*"
        name = rf"(?P<name>{any_of(text.tools)}){_tag(self.name_end)}(?![^\s<])"
        call = begins + name
        another = rf"{re.escape(self.open)}\s*{_tag(self.next)}{name}"
        value = rf"\s*{self.value}" if self.value else ""
        # Where the tag ends with `=`, its pattern has the spaces behind it.
        key = rf"{_tag(self.key)}(?:(?<=>)\s*)?(?P<key>{TAG_KEY})\s*{_tag(self.key_end)}{value}"
        calls = text.text
        if text.rest is None:  # up to the last value that is complete
            closed, end, _value = calls.rpartition(self.value_end)
            calls = closed + end or re.match(call, calls)[0]
        before, *parts = re.split(f"({call}|{key}|{any_of([self.value_end, self.call_end])})", calls)
        tags = [Tag(*parts[at : at + 4]) for at in range(0, len(parts), 4)]
        if before or not tags:
            raise ValueError("another text is in front")
        n = 0
        while n < len(tags):
            tag = tags[n]
            function = text.tools[tag.name if text.is_blank(tag.behind) else ""]
            arguments: Json = {}
            n += 1
            while n < len(tags) and (parameter := tags[n].key) and parameter not in arguments:
                n, arguments[parameter] = self._value(text, tags, n, function, arguments)
            if n < len(tags) and tags[n].text == self.call_end and text.is_blank(tags[n].behind):
                n += 1
            elif not text.is_final and self.call_end != self.close:
                raise ValueError("the call may go on")
            yield tag.name, arguments
        text.check_rest("\n", another, self.value_end, self.call_end)  # a line break is between calls

    def _value(
        self, text: CallText, tags: list[Tag], n: int, function: Function, earlier: Json
    ) -> tuple[int, Any]:
        """Returns the index of the tag after the value that begins behind tag `n`, and the value. Raises
        ValueError for a value that is not certain.

        A value ends at its closing tag, if only spaces and markers are behind that tag and the value has the
        type that the schema names. Without such a tag the value ends in front of a new parameter of the
        function, of another call, or of the end of the call. If a closing tag with spaces behind it is before
        that place, the first such tag ends the value, whatever its type. Any other tag is text of the value.

        Before the end of the output, only a value of the right type that ends at the first tag is certain.

        Example: in `<parameter=a>x</parameter>y</parameter>` the first closing tag has text behind it. So the
        value is `x</parameter>y`.

        earlier: the arguments before this one, whose names begin no new parameter.
        """
        properties = function.properties
        key = tags[n].key
        written = tags[n].behind
        types = function.types_of(key)
        misfits: list[tuple[int, Any]] = []
        for at in range(n + 1, len(tags)):
            tag = tags[at]
            is_blank = text.is_blank(tag.behind)
            if tag.text == self.value_end and is_blank and len(misfits) < MAX_MISFITS:
                value = _typed_value(written, types, self.line_breaks)
                if _is_of_type(value, types) and (at == n + 1 or text.is_final):
                    return at + 1, value
                misfits.append((at + 1, value))
            follows = tags[at + 1] if at + 1 < len(tags) else None
            is_new = tag.key in properties if properties else tag.key
            if is_new and tag.key not in (key, *earlier):
                break
            if is_blank and self._leaves_call(tag, follows):
                break
            written += tag.text + tag.behind
        else:
            at = len(tags)
        value = _typed_value(written.rstrip("\n"), types, self.line_breaks)
        is_certain = misfits or (self.value_end not in written and _is_of_type(value, types))
        if not (is_certain and text.is_final):
            raise ValueError("the value may go on, or have the part of another")
        return misfits[0] if misfits else (at, value)

    def _leaves_call(self, tag: Tag, follows: Tag | None) -> bool:
        """Whether `tag` ends the call, or begins another call. `follows` is the next tag, None: there is
        none.

        After the end of a call, `follows` has to begin the next call; None fits if this end is not the
        closing marker, too. After the name of a function, `follows` has to be a parameter or the end of the
        call, or None.
        """
        if tag.name:
            return not follows or bool(follows.key) or follows.text == self.call_end
        is_last = follows.name if follows else self.call_end != self.close
        return tag.text == self.call_end and bool(is_last)


@dataclass(frozen=True)
class ModelTools:
    """The tool support of the served model's chat template, detected when it is loaded."""

    format: ToolFormat | None  # None: unknown
    token_id: TokenId = lambda _text: None
    parallel: bool = True  # calls in one message
    short_ids: bool = False  # of 9 letters and digits
    in_prompt: bool = False  # the template has no place for tools, so the system message describes them


@dataclass(frozen=True)
class AllowedCalls:
    """The calls that an output may have: of `functions`, more than one if `parallel`."""

    model: ModelTools
    functions: Sequence[Function]
    mode: str  # auto, required or named
    parallel: bool
    may_repeat: bool = False  # a call that equals an earlier one of the output

    @property
    def format(self) -> ToolFormat:
        assert self.model.format is not None, "calls in an unknown format are rejected"
        return self.model.format

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    @property
    def requires_call(self) -> bool:
        return self.mode != "auto"


class ParametersError(GrammarError):
    """The parameters of a function, at the `path` of the request, cannot be enforced."""

    def __init__(self, function: Function, error: GrammarError):
        super().__init__(f"of {function.name} {error}")
        self.path = function.path


def calls_grammar(calls: AllowedCalls, start: str, body: str) -> str:
    """Returns the grammar of outputs with calls. Raises GrammarError for one that is too large; this is a
    ParametersError where the schema or a name of one function cannot be enforced. At most MOST_CALLS calls
    are side by side; only one if they are not `parallel`.

    start: the right side of the first rule, of the rules `calls`, `auto` (text with calls or without) and
    `body`; body: another grammar, "": none. Calls that are not required, as `start` is `auto`, may have any
    arguments, unless their function `is_strict`; then their schemas are not looked at.
    """
    form = calls.format
    token_id = calls.model.token_id
    lark = functools.partial(terminals, markers=form.markers, token_id=token_id)
    outer = [
        f"start: {start}",
        f"calls: {form.before} {form.prefix} listed {form.suffix}",
        f"listed: call ({form.between} call){{0,{MOST_CALLS - 1}}}" if calls.parallel else "listed: call",
    ]
    if form.auto:
        outer.append(f"auto: {form.auto}")
    elif form.implicit_start:  # what a text begins with decides
        outer.append("auto: TEXT? | calls")
    else:
        several = "*" if calls.parallel else "?"
        outer.append(f"auto: (head {form.prefix} listed {form.suffix}){several} TEXT")
    rules = [
        re.sub(r'"(?:[^"\\]|\\.)+"', lambda quoted: f"({lark(json.loads(quoted[0]))})", rule)
        for rule in outer
    ]
    rules.append("call: " + " | ".join(f"call{n}" for n in range(len(calls.functions))))
    rules.append(r"ws: /\n? ?/")
    for name, marker in (("open", form.open), ("close", form.close), ("next", form.next)):
        if marker:
            rules.append(f"{name}: {lark(marker)}")
    if form.implicit_start:
        rules.append(rf"TEXT: /\s*[^\{form.implicit_start}\s](.|\n)*/")
    else:
        rules += up_to(form.open, token_id)
    for n, function in enumerate(calls.functions):
        if start == "auto" and not function.is_strict:
            function = Function(function.name, {"type": "object"})
        try:
            # Templates write calls in one line, so models do, too. A schema that cannot be enforced is
            # rejected in every syntax.
            arguments = json_rule({"type": "object"} | function.parameters, " ?", function.is_strict)
            _check_keys(form, function)
            rules += form.call_rules(f"call{n}", function, arguments, lark)
        except GrammarError as error:
            raise ParametersError(function, error) from None
    rules += form.shared_rules(lark, token_id)
    return of_rules(rules, body, "body")


def _check_keys(form: ToolFormat, function: Function) -> None:
    """Raises GrammarError for a parameter with a name that the format cannot write."""
    for name in function.properties:
        if not re.fullmatch(form.key_pattern, name):
            raise GrammarError(f"must have names that are valid in {form.language}. Given: {name[:40]!r}")


def not_written(form: ToolFormat, function: Function) -> Iterator[str]:
    """Yields JSON pointers to the keywords of the function's schema that the grammar of a call leaves out.

    A keyword is left out because the format does not write arguments as JSON; for a format that does, nothing
    is yielded. Keywords that `json_rule` leaves out are not among them. Only the schema of the arguments and
    those of its properties are looked at, not the schemas within these.
    """
    if form.writes_json:
        return
    parameters = function.parameters
    enforced = {"type", "properties"}
    if function.required <= function.properties.keys():
        enforced.add("required")
    if function.properties or not isinstance(parameters.get("additionalProperties"), dict):
        enforced.add("additionalProperties")
    yield from _constraints(parameters, enforced, "")
    for name, schema in function.properties.items():
        enforced = form.enforced(function, name)
        yield from _constraints(schema, enforced, within("/properties", name))


def _constraints(schema: Any, enforced: set[str], place: str) -> Iterator[str]:
    """Yields JSON pointers to the keywords of a schema that say which values are valid and are not
    `enforced`. place: the pointer to the schema. Schemas within it are not looked at."""
    for name in schema if isinstance(schema, dict) else ():
        if name in CONSTRAINTS - enforced:
            yield f"{place}/{name}"


def mended_calls(
    text: str, calls: AllowedCalls, rest: str | None = "", is_final: bool = True, is_exact: bool = False
) -> list[tuple[str, str]] | None:
    """Returns the name and the arguments, in JSON, of each call of a text; None if the text has something
    else. Raises nothing. The arguments are not compared with the schemas.

    Markers and comments may stand beside calls; a text of these alone is []. Calls are read in the format of
    `calls` or, unless `is_exact`, as JSON, as Python, or as a name with arguments in JSON. The first of these
    that fits counts.

    rest: what follows the text; None: the text is truncated, and the last call has only the arguments that
    are complete. is_final: nothing follows `rest`; if more may follow, a value that may go on is something
    else.
    """
    form = calls.format
    tools = {function.name: function for function in calls.functions}
    inner = () if form.call_end else form.inner
    markers = (form.open, *form.also_open, form.close, *inner)
    whole = CallText(text, tools, markers, not form.is_whole, rest, is_final)
    others = () if is_exact else (CallText.in_json, CallText.in_python, form.after_names)
    for read in (form.calls_in, *others):
        with contextlib.suppress(*ERRORS):
            return [whole.checked(*call) for call in read(whole)]
    return None


def types_of(schema: Any, parameters: Json) -> set[str]:
    """Returns JSON Schema's names of the types that a property may have; the empty set: the schema does not
    say, allows no type, or is nested too deeply. `integer` comes with `number`.

    A type counts if every keyword of the schema allows it. parameters: the schema of all properties, which
    has the definitions that `schema` may name. Example: {"anyOf": [{"type": "number"}, {"type": "null"}]} has
    number, integer and null.
    """
    try:
        types = _allowed_types(schema, parameters, {})
    except RecursionError:  # of hundreds of definitions, each of which names the next
        return set()
    return set() if types == ALL_TYPES else types


def _allowed_types(schema: Any, parameters: Json, resolved: dict[str, set[str]]) -> set[str]:
    """Returns what `types_of` does, but ALL_TYPES itself if the schema does not say. Adds to `resolved`: the
    result for each reference that was looked at, by its path; for one that is being looked at, the empty
    set."""
    if not isinstance(schema, dict):
        return ALL_TYPES
    types = named_types(schema) or ALL_TYPES
    if "number" in types:
        types = types | {"integer"}
    choices = [schema.get("anyOf"), schema.get("oneOf")]
    if isinstance(schema.get("allOf"), list):
        choices += [[each] for each in schema["allOf"]]
    for options in choices:
        if isinstance(options, list) and options:
            types = types & set().union(*(_allowed_types(each, parameters, resolved) for each in options))
    path = schema.get("$ref")
    if isinstance(path, str) and path != "#":
        if path not in resolved:
            resolved[path] = set()
            referred_schema = referred(path, parameters).schema
            resolved[path] = _allowed_types(referred_schema, parameters, resolved)
        types = types & resolved[path]
    return {"object"} if types == ALL_TYPES and "properties" in schema else types


def _named_type(schema: Any) -> str:
    """Returns the type that a schema names; "" if it names none, several, or an unknown one."""
    kind = schema.get("type") if isinstance(schema, dict) else ""
    return kind if kind in TYPE_NAMES.values() else ""


def _typed_value(text: str, types: set[str], line_breaks: bool) -> Any:
    """Returns the value of a parameter of these types (none: of any), written as this text. Raises nothing.

    JSON of one of the types counts before a string: of the types integer and string, `5` is a number. If a
    string is not allowed, JSON of another type is returned, too. Any other text stays a string, for the
    client's function to reject. line_breaks: one on each side belongs to the tags.
    """
    if line_breaks:
        text = text.removeprefix("\n").removesuffix("\n")
    if types == {"string"}:
        return text
    written = text.strip()
    may_be_text = not types or "string" in types
    with contextlib.suppress(*ERRORS):
        if written in CONSTANTS:
            value = CONSTANTS[written]
        else:
            value = json.loads(written) if may_be_text else whole_value(written)
        as_json(value)
        if _is_of_type(value, types) or not may_be_text:
            return value
    return text


def _is_of_type(value: Any, types: set[str]) -> bool:
    kind = TYPE_NAMES[type(value)]
    return not types or kind in types or (kind == "integer" and "number" in types)


def _tag(text: str) -> str:
    """A regular expression for a tag, or a part of one: with blanks around `=`, with or without quotes."""
    return re.escape(text).replace("=", r"\s*=\s*").replace('"', r"(?:[\"']\s*)?").replace(r"\ ", r"\s+")


def terminal(text: str, token_id: TokenId) -> str:
    """Returns a text in Lark: the id of the token if all of the text is one token by itself, else a string.
    llguidance reads a string as other tokens."""
    number = token_id(text)
    return lark_string(text) if number is None else f"<[{number}]>"


def terminals(text: str, markers: Iterable[str], token_id: TokenId) -> str:
    """Returns a text in Lark, in which each of the `markers` is a terminal by itself; "" for ""."""
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return " ".join(terminal(part, token_id) for part in parts if part)


def up_to(marker: str, token_id: TokenId, head: str = "head", text: str = "TEXT") -> list[str]:
    """Returns two rules in Lark: the one called `head` is any text up to and with the first marker, the one
    called `text` is any text without the marker."""
    if token_id(marker) is not None:  # which no regular expression matches
        return [rf"{text}: /(.|\n)*/", f"{head}: {text} {terminal(marker, token_id)}"]
    plain = re.escape(marker).replace("/", r"\/")
    return [rf"{head}[lazy]: /(.|\n)*{plain}/", rf"{text}: /(.|\n)*/ & ~/(.|\n)*{plain}(.|\n)*/"]
