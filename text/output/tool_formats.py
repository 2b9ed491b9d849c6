"""How models write tool calls: one row a format, and the grammars that enforce it.

`FORMATS` has all that tells one format from another: the markers, what `OutputParser` (output/parser.py)
reads, and the grammar. Which of them a chat template writes is found by tool_detection.py. Sources: the
models' chat templates, those that mistral-common and vLLM publish for Mistral and DeepSeek, and OpenAI's
description of harmony.
"""

from __future__ import annotations

import enum
import functools
import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from run import Json
from text.grammar import GrammarError, json_rule, lark_string, of_rules
from text.json_schema import pointer

DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
HARMONY_START = '"<|start|>assistant"?'
HARMONY_CALL = "to=functions."
HARMONY_HEADS = (
    "<|channel|>commentary ",
    "<|start|>assistant<|channel|>commentary ",
    "<|start|>assistant ",
    "<|start|>assistant<|channel|>analysis ",
    "<|channel|>analysis ",
    "",
)
GEMMA_QUOTE = '<|"|>'
# The rule of literals for each type of JSON Schema.
LITERALS = {
    "string": "str",
    "integer": "int",
    "number": "num",
    "boolean": "bool",
    "null": "none",
    "array": "list",
    "object": "dict",
}
TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
DEFINITIONS = ("$defs", "definitions")
# JSON Schema's keywords that say what is valid, but for those of definitions.
CONSTRAINTS = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
ANNOTATIONS = ("title", "description", "default", "examples")  # which constrain nothing
MOST_CALLS = (
    16  # side by side that are asked for: small models would repeat theirs up to the end of the context
)
MAX_DEPTH = 8  # of schemas that name each other
# `argument` with any name, `value`: any literal, and the literals of each type.
ANY_LITERALS = [
    "value: str | num | bool | none | list | dict",
    "int: /-?(0|[1-9][0-9]{0,15})/",
    r"num: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/",
]
PYTHON_LITERALS = [
    *ANY_LITERALS,
    'argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" value',
    'list: "[" (value ("," " "? value)*)? "]"',
    'dict: "{" (str ":" " "? value ("," " "? str ":" " "? value)*)? "}"',
    r"""str: /"([^"\\\x00-\x1f]|\\["\\nt])*"|'([^'\\\x00-\x1f]|\\['\\nt])*'/""",
    'bool: "True" | "False"',
    'none: "None"',
]
GEMMA_LITERALS = [  # but for strings
    *ANY_LITERALS,
    'argument: /[A-Za-z_][A-Za-z0-9_-]*/ ":" value',
    'list: "[" (value ("," value)*)? "]"',
    'dict: "{" (argument ("," argument)*)? "}"',
    'bool: "true" | "false"',
    'none: "null"',
]


TokenId = Callable[[str], int | None]  # of a text that is one token
ToLark = Callable[[str], str]  # writes a text with markers in Lark


class Syntax(enum.Enum):
    """How one call is written."""

    JSON = enum.auto()  # {"name": …, "arguments": {…}}
    PYTHON = enum.auto()  # name(key=value)
    GEMMA = enum.auto()  # call:name{key:value}, an object as in JSON but for its quotes
    NAMED = enum.auto()  # the name, a separator, and the arguments in JSON
    XML = enum.auto()  # the name, and each parameter in tags


WHOLE = (Syntax.GEMMA, Syntax.XML)  # whose values may have any text: a call is read when it is complete


@dataclass(frozen=True)
class Tags:
    """What stands around the names and the values of a call in XML."""

    key: str  # in front of the name of a parameter,
    key_end: str  # and after it
    value_end: str  # after a value
    end: str  # of the call
    value: str = ""  # in front of a value
    name_end: str = ""  # after the name of the function
    line_breaks: bool = False  # one belongs to each of the tags around a value

    @property
    def key_pattern(self) -> str:
        """A regular expression for the name of a parameter."""
        return rf"[^{self.key_end[0]}\n]+"


@dataclass(frozen=True)
class Pairs:
    """A call of which the arguments are pairs of a key and a literal."""

    language: str
    begin: str  # with the name in it
    equals: str
    comma: str
    end: str
    is_key: Callable[[str], bool]
    written: Callable[[Any], str]  # a value as a literal


def _python_literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _gemma_literal(value: Any) -> str:
    return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value)


PYTHON = Pairs(
    language="Python",
    begin="{}(",
    equals="=",
    comma=", ",
    end=")",
    is_key=lambda name: name.isidentifier() and not keyword.iskeyword(name),
    written=_python_literal,
)
GEMMA = Pairs(
    language="Gemma's calls",
    begin="call:{}{{",
    equals=":",
    comma=",",
    end="}",
    is_key=lambda name: bool(re.fullmatch(r"[^\s:,{}\[\]<]+", name)),
    written=_gemma_literal,
)


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls, for the parser and for the grammar.

    `before`, `between` and `after` are Lark for what stands around the calls of an output; `marked` is Lark
    for calls after the opening marker within a text; `auto` is Lark for a text with calls or without, where
    it is not just that. They may use markers in quotes, and the rules `open`, `close`, `next` (the markers),
    `call`, `listed` (all of them), `calls`, `ws` and `TEXT`.
    """

    name: str
    open: str  # the marker in front of calls,
    also_open: tuple[str, ...] = ()  # other texts that may stand there
    bare: tuple[str, ...] = ()  # what else a call begins with, with the name of a function for {}
    close: str = ""  # the marker after them
    described_by: tuple[str, ...] = ()  # words of templates that take tools and write no calls
    first: str = ""  # may stand in front of the first of several calls,
    next: str = ""  # stands in front of each other one
    implicit_start: str = ""  # what calls begin with where they may be the whole text, without a marker
    ends: tuple[str, ...] = ()  # what may follow calls
    syntax: Syntax = Syntax.JSON
    arguments_key: str = "arguments"  # of a call in JSON
    head: str = ""  # what is in front of the name of a NAMED call,
    number: str = ""  # right after it: Lark,
    separator: str = ""  # between it and the arguments,
    separators: str = ""  # or may be there: a regular expression,
    tail: str = ""  # and after them
    tags: Tags | None = None  # of a call in XML
    inner: tuple[str, ...] = ()  # further markers
    before: str = ""
    between: str = ""
    after: str = ""
    marked: str = ""
    auto: str = ""

    @property
    def markers(self) -> list[str]:
        """What may be a token by itself."""
        around = [text for text in (self.open, self.close) if text]
        return [*self.inner, *(text for text in around if not any(inner in text for inner in self.inner))]


FORMATS = (
    ToolFormat(
        name="hermes",
        open="<tool_call>",
        close="</tool_call>",
        described_by=("within <tool_call></tool_call> XML tags",),
        ends=("</tool_call>",),
        before=r'open "\n"',
        between=r'"\n" close ws open "\n"',
        after=r'"\n" close',
        marked="ws call ws close",
    ),
    ToolFormat(
        name="mistral",
        open="[TOOL_CALLS]",
        first="[",
        next=",",
        ends=("]",),
        before='open " "? "["',
        between='"," ws',
        after='"]"',
        marked='" "? "[" listed "]"',
    ),
    ToolFormat(
        name="llama3_json",
        open="<|python_tag|>",
        implicit_start="{",
        ends=(";",),
        arguments_key="parameters",
        between='";" ws',
    ),
    ToolFormat(
        name="pythonic",
        open="<|python_start|>",
        close="<|python_end|>",
        described_by=("[func_name1(", "<|python_start|>"),
        first="[",
        next=",",
        implicit_start="[",
        ends=("]", "<|python_end|>"),
        syntax=Syntax.PYTHON,
        before='"["',
        between='"," ws',
        after='"]"',
    ),
    ToolFormat(
        name="qwen3_coder",
        open="<tool_call>",
        bare=("<function={}>",),
        close="</tool_call>",
        first="<function=",
        next="<function=",
        ends=("</tool_call>",),
        syntax=Syntax.XML,
        tags=Tags("<parameter=", ">", "</parameter>", "</function>", name_end=">", line_breaks=True),
        before=r'open "\n" next',
        between=r'"\n" close ws open "\n" next',
        after=r'"\n" close',
        marked="ws next call ws close",
    ),
    ToolFormat(
        name="mistral_v11",
        open="[TOOL_CALLS]",
        syntax=Syntax.NAMED,
        separator="[ARGS]",
        separators=r"(\[CALL_ID\][A-Za-z0-9]*)?\[ARGS\]",  # v11 writes an id, v13 does not
        inner=("[ARGS]", "[CALL_ID]"),
        before="open",
        between="open",
        marked="call",
    ),
    ToolFormat(
        name="deepseek_v3",
        open=DEEPSEEK_CALLS,
        bare=(f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{{}}",),
        close=DEEPSEEK_CALLS_END,
        first=DEEPSEEK_CALL,
        next=DEEPSEEK_CALL,
        ends=(DEEPSEEK_CALLS_END,),
        syntax=Syntax.NAMED,
        head=f"function{DEEPSEEK_SEPARATOR}",
        separator="\n```json\n",
        separators=r"\s*```json",
        tail=f"\n```{DEEPSEEK_CALL_END}",
        inner=(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
        before="open next",
        between=r'"\n" next',
        after="close",
        marked="ws next listed ws close",
    ),
    ToolFormat(
        name="deepseek_v31",
        open=DEEPSEEK_CALLS,
        bare=(f"{DEEPSEEK_CALL}{{}}",),
        close=DEEPSEEK_CALLS_END,
        first=DEEPSEEK_CALL,
        next=DEEPSEEK_CALL,
        ends=(DEEPSEEK_CALLS_END,),
        syntax=Syntax.NAMED,
        separator=DEEPSEEK_SEPARATOR,
        separators=DEEPSEEK_SEPARATOR,
        tail=DEEPSEEK_CALL_END,
        inner=(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
        before="open next",
        between="next",
        after="close",
        marked="ws next listed ws close",
    ),
    ToolFormat(
        name="glm45",
        open="<tool_call>",
        bare=("{}\n<arg_key>", "{}<arg_key>"),
        close="</tool_call>",
        syntax=Syntax.XML,
        tags=Tags("<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", value="<arg_value>"),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        before="open",
        between="ws open",
        marked="call",
    ),
    ToolFormat(
        name="kimi_k2",
        open="<|tool_calls_section_begin|>",
        bare=("<|tool_call_begin|>{}", "<|tool_call_begin|>functions.{}"),
        close="<|tool_calls_section_end|>",
        first="<|tool_call_begin|>",
        next="<|tool_call_begin|>",
        ends=("<|tool_calls_section_end|>",),
        syntax=Syntax.NAMED,
        head="functions.",
        number="/:[0-9]{1,4}/",
        separator="<|tool_call_argument_begin|>",
        separators=r"(:[0-9]*)?\s*<\|tool_call_argument_begin\|>",
        tail="<|tool_call_end|>",
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        before="open next",
        between="next",
        after="close",
        marked="ws next listed ws close",
    ),
    ToolFormat(
        name="minimax_m2",
        open="<minimax:tool_call>",
        bare=('<invoke name="{}">',),
        close="</minimax:tool_call>",
        first='<invoke name="',
        next='<invoke name="',
        ends=("</minimax:tool_call>",),
        syntax=Syntax.XML,
        tags=Tags('<parameter name="', '">', "</parameter>", "</invoke>", name_end='">'),
        before=r'open "\n" next',
        between=r'"\n" next',
        after=r'"\n" close',
        marked="ws next listed ws close",
    ),
    ToolFormat(
        name="lfm2",
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        described_by=("List of tools: ",),
        first="[",
        next=",",
        ends=("]", "<|tool_call_end|>"),
        syntax=Syntax.PYTHON,
        before='open "["',
        between='"," ws',
        after='"]" close',
        marked='ws "[" listed "]" close',
    ),
    ToolFormat(
        name="phi4_mini_json",
        open="<|tool_call|>",
        also_open=("functools",),
        close="<|/tool_call|>",
        described_by=("functools[", "<|tool_call|> followed by"),  # the second is Granite 3's
        first="[",
        next=",",
        ends=("]", "<|/tool_call|>"),
        before='open "["',
        between='"," ws',
        after='"]"',
        marked='ws "[" listed "]"',
    ),
    ToolFormat(
        name="openai",  # harmony, of gpt-oss
        open=HARMONY_HEADS[0] + HARMONY_CALL,
        also_open=tuple(head + HARMONY_CALL for head in HARMONY_HEADS[1:]),
        bare=tuple(f"{head}to={{}}" for head in HARMONY_HEADS),
        ends=("<|call|>",),
        syntax=Syntax.NAMED,
        separator=" <|constrain|>json<|message|>",
        # A header that does not name the function is left out by `OutputParser`.
        separators=r"(<\|channel\|>\w+)?\s*(<\|constrain\|>)?\w*\s*(<\|message\|>)?",
        inner=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
        before=f"{HARMONY_START} open",
        between=f'"<|call|>" {HARMONY_START} open',
        auto=f'({HARMONY_START} "<|channel|>commentary<|message|>" TEXT "<|end|>")* '
        f'(calls | ({HARMONY_START} "<|channel|>final<|message|>")? TEXT)',
    ),
    ToolFormat(
        name="gemma4",
        open="<|tool_call>",
        bare=("call:{}{{",),
        close="<tool_call|>",
        ends=("<tool_call|>",),
        syntax=Syntax.GEMMA,
        inner=(GEMMA_QUOTE,),
        before="open",
        between="close open",
        after="close",
        marked="call close",
    ),
)
HERMES = FORMATS[0]  # which TOOLS_PROMPT (api/chats/template_adapter.py) asks for
AS_TEXT = ToolFormat("none", open="")  # calls are not read: they stay text


@dataclass(frozen=True)
class ModelTools:
    """The tool support of the served model's chat template, detected when it is loaded."""

    format: ToolFormat | None  # None: unknown
    token_id: TokenId = lambda _text: None
    parallel: bool = True  # calls in one message
    short_ids: bool = False  # of 9 letters and digits
    in_prompt: bool = False  # the template has no place for tools, so the system message describes them


@dataclass(frozen=True)
class Function:
    """A tool that may be called. `parameters`: the JSON schema of an object."""

    name: str
    parameters: Json
    is_strict: bool = False


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

    def parameters_of(self, name: str) -> Json:
        return {function.name: function.parameters for function in self.functions}[name]

    @property
    def is_named(self) -> bool:
        return self.mode == "named"

    @property
    def requires_call(self) -> bool:
        return self.mode != "auto"


class ParametersError(GrammarError):
    """The parameters of the function of this name cannot be enforced; the message is for the client."""

    def __init__(self, function: str, message: str):
        super().__init__(message)
        self.function = function


def calls_grammar(calls: AllowedCalls, start: str, body: str = "") -> str:
    """The grammar `start`, made of the rules `calls`, `auto` (text with calls or without) and `body`, another
    grammar.

    Raises GrammarError, which is a ParametersError where one function is the reason.
    """
    form = calls.format
    token_id = calls.model.token_id
    lark = functools.partial(terminals, markers=form.markers, token_id=token_id)
    outer = [
        f"start: {start}",
        f"calls: {form.before} listed {form.after}",
        f"listed: call ({form.between} call){{0,{MOST_CALLS - 1}}}" if calls.parallel else "listed: call",
    ]
    if form.auto:
        outer.append(f"auto: {form.auto}")
    elif form.implicit_start:  # what a text begins with decides
        outer.append("auto: TEXT? | calls")
    else:
        outer.append(f"auto: (head {form.marked}){'*' if calls.parallel else '?'} TEXT")
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
        is_free = start == "auto" and not function.is_strict
        try:
            rules += _call(f"call{n}", form, function, is_free, lark)
        except GrammarError as error:
            raise ParametersError(function.name, f"of {function.name} {error}") from None
    if form.syntax is Syntax.PYTHON:
        rules += PYTHON_LITERALS
    if form.syntax is Syntax.GEMMA:
        rules += [*GEMMA_LITERALS, f"str: {lark(GEMMA_QUOTE)} string"]
        rules += up_to(GEMMA_QUOTE, token_id, "string", "STRING")
    if form.tags:
        rules += _any_parameter(form.tags, lark, token_id)
    return of_rules(rules, body, "body")


def _call(rule: str, form: ToolFormat, function: Function, is_free: bool, lark: ToLark) -> list[str]:
    """The rules of a call; the arguments of one that `is_free` are any JSON object."""
    # Templates write calls in one line, so models do, too. A schema that cannot be enforced is rejected in
    # every syntax.
    allowed = {"type": "object"} | ({} if is_free else function.parameters)
    schema = json_rule(allowed, " ?", function.is_strict)
    takes_any = is_free or _takes_any(function.parameters)
    if form.syntax is Syntax.PYTHON:
        return _pairs_call(rule, PYTHON, function, takes_any, lark)
    if form.syntax is Syntax.GEMMA:
        return _pairs_call(rule, GEMMA, function, takes_any, lark)
    if form.tags:
        return _xml_call(rule, form.tags, function, takes_any, lark)
    arguments = f"{rule}_arguments: {schema}"
    if form.syntax is Syntax.NAMED:
        head = f"{lark(form.head + function.name)} {form.number} {lark(form.separator)}"
        return [f"{rule}: {head} {rule}_arguments {lark(form.tail)}", arguments]
    name = json.dumps(json.dumps(function.name))
    key = json.dumps(json.dumps(form.arguments_key))
    members = rf'"\"name\"" ws ":" ws {name} ws "," ws {key} ws ":" ws {rule}_arguments'
    return [rf'{rule}: "{{" ws {members} ws "}}"', arguments]


def _takes_any(parameters: Json) -> bool:
    """Whether the schema names no properties and allows all."""
    return not parameters.get("properties") and parameters.get("additionalProperties") is not False


def not_written(form: ToolFormat, function: Function) -> Iterator[str]:
    """What the grammar of a call leaves out of the function's schema because the format does not write
    arguments as JSON: JSON pointers."""
    if not form.tags and form.syntax not in (Syntax.PYTHON, Syntax.GEMMA):
        return
    parameters = function.parameters
    properties = parameters.get("properties", {})
    enforced = {"type", "properties"}
    required = parameters.get("required")
    if not isinstance(required, list) or all(name in [*properties] for name in required):
        enforced.add("required")
    if properties or not isinstance(parameters.get("additionalProperties"), dict):
        enforced.add("additionalProperties")
    yield from _constraints(parameters, enforced, "")
    for name, schema in properties.items():
        enforced = _written_keywords(form, schema, parameters)
        yield from _constraints(schema, enforced, pointer((((), "properties"), name)))


def _written_keywords(form: ToolFormat, schema: Any, parameters: Json) -> set[str]:
    """The keywords of a property that the grammar of a call enforces."""
    if not form.tags:
        if _values(schema):
            return {"type", "enum", "const"}
        is_literal = isinstance(schema, dict) and str(schema.get("type")) in LITERALS
        return {"type"} if is_literal else set()
    types = types_of(schema, parameters)
    if types and "string" not in types:
        return CONSTRAINTS  # written as JSON
    return {"type", "enum", "const"} if types == {"string"} else {"type"}


def _constraints(schema: Any, enforced: set[str], place: str) -> Iterator[str]:
    for name in schema if isinstance(schema, dict) else ():
        if name in CONSTRAINTS - enforced:
            yield f"{place}/{name}"


def _xml_call(rule: str, tags: Tags, function: Function, takes_any: bool, lark: ToLark) -> list[str]:
    """The rules of a call in tags: the properties in their order, those that are not required may be
    missing."""
    parameters = function.parameters
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    begin = f"{lark(function.name + tags.name_end)} ws"
    if takes_any:
        return [f"{rule}: {begin} parameter* {lark(tags.end)}"]
    rules = []
    parts = []
    for k, (name, schema) in enumerate(properties.items()):
        if not re.fullmatch(tags.key_pattern, name):
            raise GrammarError(f"must have names without `{tags.key_end[0]}`. Given: {name[:40]!r}")
        is_required = isinstance(required, list) and name in required
        parts.append(f"{rule}_{k}" if is_required else f"{rule}_{k}?")
        rules.append(f"{rule}_{k}: {_key(tags, lark_string(name), lark)} {rule}_value_{k} ws")
        rules += _xml_value(f"{rule}_value_{k}", schema, parameters, tags, lark)
    return [f"{rule}: {begin} {' '.join(parts)} {lark(tags.end)}", *rules]


def _any_parameter(tags: Tags, lark: ToLark, token_id: TokenId) -> list[str]:
    """The rules `parameter`, with any name and value, and `raw`, any text and the tag after it."""
    key = _key(tags, f"/{tags.key_pattern}/", lark)
    return [f"parameter: {key} raw ws", *up_to(tags.value_end, token_id, "raw", "RAW")]


def _key(tags: Tags, name: str, lark: ToLark) -> str:
    """What stands in front of a value; name: Lark."""
    value = f"ws {lark(tags.value)}" if tags.value else ""
    return f"{lark(tags.key)} {name} {lark(tags.key_end)} {value}"


def _xml_value(rule: str, schema: Any, parameters: Json, tags: Tags, lark: ToLark) -> list[str]:
    """A value and the tag after it: raw text if the schema allows text, otherwise JSON."""
    types = types_of(schema, parameters)
    values = _values(schema)
    end = lark(tags.value_end)
    if types == {"string"} and values:
        space = r"/\n?/" if tags.line_breaks else ""
        return [f"{rule}: {space} ({' | '.join(map(lark_string, values))}) {space} {end}"]
    if not types or "string" in types:
        return [f"{rule}: raw"]
    definitions: Json = {}
    if "$ref" in json.dumps(schema):
        definitions = {name: parameters[name] for name in DEFINITIONS if name in parameters}
    constrained = definitions | {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    return [f"{rule}: ws {rule}_json ws {end}", f"{rule}_json: {json_rule(constrained, ' ?')}"]


def types_of(
    schema: Any, parameters: Json, depth: int = 0, known: dict[str, set[str]] | None = None
) -> set[str]:
    """JSON Schema's names of the types that a property may have; none: it does not say.

    parameters: the schema of all of them, which has the definitions that `schema` may name.
    known: the types of definitions: each is looked at once, however often it is named.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    known = {} if known is None else known
    if isinstance(given := schema.get("type"), (str, list)):
        return {given} if isinstance(given, str) else set(map(str, given))
    if values := _values(schema):
        return {TYPES[type(value)] for value in values}
    if isinstance(path := schema.get("$ref"), str):
        if path not in known:
            known[path] = set()
            known[path] = types_of(_definition(path, parameters), parameters, depth + 1, known)
        return known[path]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(name), list):
            found = [types_of(option, parameters, depth + 1, known) for option in options]
            return set().union(*found) if all(found) else set()
    return {"object"} if "properties" in schema else set()


def _definition(path: str, parameters: Json) -> Any:
    found: Any = parameters
    for name in path.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _pairs_call(rule: str, pairs: Pairs, function: Function, takes_any: bool, lark: ToLark) -> list[str]:
    """The rules of `name(key=…, …)` and the like: the properties in their order, those that are not required
    may be missing."""
    begin = lark_string(pairs.begin.format(function.name))
    if takes_any:
        return [f'{rule}: {begin} (argument ("," " "? argument)*)? "{pairs.end}"']
    properties = function.parameters.get("properties", {})
    required = function.parameters.get("required", [])
    rules = [f'{rule}: {begin} {rule}_first_0 "{pairs.end}"']
    for k, (name, schema) in enumerate(properties.items()):
        if not pairs.is_key(name):
            raise GrammarError(f"must have names that are valid in {pairs.language}. Given: {name[:40]!r}")
        is_required = isinstance(required, list) and name in required
        for place, comma in (("first", ""), ("next", pairs.comma)):
            key = lark_string(comma + name + pairs.equals)
            argument = f"{key} ({_literal(schema, pairs, lark)}) {rule}_next_{k + 1}"
            skipped = "" if is_required else f" | {rule}_{place}_{k + 1}"
            rules.append(f"{rule}_{place}_{k}: {argument}{skipped}")
    return [*rules, f'{rule}_first_{len(properties)}: ""', f'{rule}_next_{len(properties)}: ""']


def _literal(schema: Any, pairs: Pairs, lark: ToLark) -> str:
    if not isinstance(schema, dict):
        return "value"
    values = _values(schema)
    if not values:
        return LITERALS.get(str(schema.get("type")), "value")
    return " | ".join(lark(pairs.written(value)) for value in values)


def _values(schema: Any) -> list[Any]:
    """The only values that a schema allows, if it names them."""
    if not isinstance(schema, dict):
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def terminal(text: str, token_id: TokenId) -> str:
    """A text in Lark. One that is a token by itself is written as its number: llguidance takes a string for
    other tokens."""
    number = token_id(text)
    return lark_string(text) if number is None else f"<[{number}]>"


def terminals(text: str, markers: Iterable[str], token_id: TokenId) -> str:
    """A text with markers in it, in Lark."""
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return " ".join(terminal(part, token_id) for part in parts if part)


def up_to(marker: str, token_id: TokenId, head: str = "head", text: str = "TEXT") -> list[str]:
    """The rules `head`, any text that ends with the marker, and `text`, any text without it."""
    if token_id(marker) is not None:  # which no regular expression matches
        return [rf"{text}: /(.|\n)*/", f"{head}: {text} {terminal(marker, token_id)}"]
    plain = re.escape(marker).replace("/", r"\/")
    return [rf"{head}[lazy]: /(.|\n)*{plain}/", rf"{text}: /(.|\n)*/ & ~/(.|\n)*{plain}(.|\n)*/"]
