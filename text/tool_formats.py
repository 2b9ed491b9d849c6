"""How models write tool calls: one row a format, and the grammars that enforce it.

`FORMATS` has all that tells one format from another: how a chat template shows it, the markers, what
`OutputParser` (output_parser.py) reads, and the grammar. Sources: the chat templates of Hermes, Qwen, Llama
3, Llama 4 and DeepSeek, and those that mistral-common and vLLM publish for Mistral and DeepSeek.
"""

from __future__ import annotations

import enum
import json
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from text.grammar import GrammarError, json_rule, lark_string, of_rules
from text.template import ChatTemplate
from text.tokenizer import Tokenizer

# The tags of calls in XML, as Qwen3-Coder writes them.
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
# `parameter` with any name and value, `raw`: a value up to its end.
XML_PARAMETERS = [
    r"parameter: /<parameter=[^>\n]+>/ raw ws",
    r"raw[lazy]: /(.|\n)*<\/parameter>/",
]
DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
# The rule of Python literals for each type of JSON Schema.
LITERALS = {
    "string": "STR",
    "integer": "INT",
    "number": "NUM",
    "boolean": "BOOL",
    "null": "NONE",
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
ANNOTATIONS = ("title", "description", "default", "examples")  # which constrain nothing
MOST_CALLS = (
    16  # side by side that are asked for: small models would repeat theirs up to the end of the context
)
MAX_DEPTH = 8  # of schemas that name each other
# `argument` with any name, `value`: any literal, and the literals of each type.
PYTHON_LITERALS = [
    'argument: KEY "=" value',
    "KEY: /[A-Za-z_][A-Za-z0-9_]*/",
    "value: STR | NUM | BOOL | NONE | list | dict",
    'list: "[" (value ("," " "? value)*)? "]"',
    'dict: "{" (STR ":" " "? value ("," " "? STR ":" " "? value)*)? "}"',
    r"""STR: /"([^"\\\x00-\x1f]|\\["\\nt])*"|'([^'\\\x00-\x1f]|\\['\\nt])*'/""",
    "INT: /-?(0|[1-9][0-9]{0,15})/",
    r"NUM: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/",
    'BOOL: "True" | "False"',
    'NONE: "None"',
]


class Syntax(enum.Enum):
    """How one call is written."""

    JSON = enum.auto()  # {"name": …, "arguments": {…}}
    PYTHON = enum.auto()  # name(key=value)
    NAMED = enum.auto()  # the name, a separator, and the arguments in JSON
    XML = enum.auto()  # tags for the function and each of its parameters


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls, for the parser and for the grammar.

    `before`, `between` and `after` are Lark for what stands around the calls of an output; `marked` is Lark
    for calls after the opening marker within a text. They may use the rules `open`, `close`, `next` (the
    markers), `call`, `listed` (all of them) and `ws`.
    """

    name: str
    detect: Callable[[str], bool]  # the source of a chat template
    open: str  # the marker in front of calls,
    close: str = ""  # and the one after them
    first: str = ""  # stands in front of the first of several calls,
    next: str = ""  # and in front of each other one
    implicit_start: str = ""  # what calls begin with where they may be the whole text, without a marker
    ends: tuple[str, ...] = ()  # what may follow calls
    syntax: Syntax = Syntax.JSON
    arguments_key: str = "arguments"  # of a call in JSON
    head: str = ""  # what is in front of the name of a NAMED call,
    separator: str = ""  # between it and the arguments,
    tail: str = ""  # and after them
    id_marker: str = ""  # an id may follow the name of a NAMED call, after this marker
    inner: tuple[str, ...] = ()  # further markers
    before: str = ""
    between: str = ""
    after: str = ""
    marked: str = ""

    @property
    def markers(self) -> list[str]:
        return [marker for marker in (self.open, self.close, *self.inner) if marker]


FORMATS = (
    ToolFormat(
        name="hermes",
        detect=lambda source: "<tool_call>" in source and "<function=" not in source,
        open="<tool_call>",
        close="</tool_call>",
        ends=("</tool_call>",),
        before=r'open "\n"',
        between=r'"\n" close "\n" open "\n"',
        after=r'"\n" close',
        marked="ws call ws close",
    ),
    ToolFormat(
        name="mistral",
        detect=lambda source: "[TOOL_CALLS]" in source and "[ARGS]" not in source,
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
        detect=lambda source: (
            "[func_name" not in source
            and ("<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters' in source))
        ),
        open="<|python_tag|>",
        implicit_start="{",
        ends=(";",),
        arguments_key="parameters",
        between='";" ws',
    ),
    ToolFormat(
        name="pythonic",
        detect=lambda source: "[func_name" in source or "<|python_start|>" in source,
        open="<|python_start|>",
        close="<|python_end|>",
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
        detect=lambda source: "<tool_call>" in source and "<function=" in source,
        open="<tool_call>",
        close="</tool_call>",
        ends=("</tool_call>",),
        syntax=Syntax.XML,
        before=r'open "\n"',
        between=r'"\n" close "\n" open "\n"',
        after=r'"\n" close',
        marked="ws call ws close",
    ),
    ToolFormat(
        name="mistral_v11",
        detect=lambda source: "[TOOL_CALLS]" in source and "[ARGS]" in source,
        open="[TOOL_CALLS]",
        syntax=Syntax.NAMED,
        separator="[ARGS]",
        id_marker="[CALL_ID]",  # v11 writes an id, v13 does not
        inner=("[ARGS]", "[CALL_ID]"),
        before="open",
        between="open",
        marked="call",
    ),
    ToolFormat(
        name="deepseek_v3",
        detect=lambda source: DEEPSEEK_CALLS in source and "```json" in source,
        open=DEEPSEEK_CALLS,
        close=DEEPSEEK_CALLS_END,
        first=DEEPSEEK_CALL,
        next=DEEPSEEK_CALL,
        ends=(DEEPSEEK_CALLS_END,),
        syntax=Syntax.NAMED,
        head=f"function{DEEPSEEK_SEPARATOR}",
        separator="\n```json\n",
        tail=f"\n```{DEEPSEEK_CALL_END}",
        inner=(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
        before="open next",
        between=r'"\n" next',
        after="close",
        marked="ws next listed ws close",
    ),
    ToolFormat(
        name="deepseek_v31",
        detect=lambda source: DEEPSEEK_CALLS in source and "```json" not in source,
        open=DEEPSEEK_CALLS,
        close=DEEPSEEK_CALLS_END,
        first=DEEPSEEK_CALL,
        next=DEEPSEEK_CALL,
        ends=(DEEPSEEK_CALLS_END,),
        syntax=Syntax.NAMED,
        separator=DEEPSEEK_SEPARATOR,
        tail=DEEPSEEK_CALL_END,
        inner=(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
        before="open next",
        between="next",
        after="close",
        marked="ws next listed ws close",
    ),
)
HERMES = FORMATS[0]  # which TOOLS_PROMPT (api/normalise.py) asks for
AS_TEXT = ToolFormat("none", detect=lambda _source: False, open="")  # calls are not read: they stay text


@dataclass(frozen=True)
class ModelTools:
    """The tool support of the served model's chat template, detected when it is loaded."""

    format: ToolFormat | None  # None: unknown
    token_id: Callable[[str], int | None] = lambda _text: None  # of a text that is one token
    parallel: bool = True  # calls in one message
    short_ids: bool = False  # of 9 letters and digits
    in_prompt: bool = False  # the template has no place for tools, so the system message describes them

    @classmethod
    def of(
        cls, template: ChatTemplate | None, takes_tools: bool, tokenizer: Tokenizer, parser: str | None
    ) -> ModelTools:
        """takes_tools: the template writes them; parser: --tool-parser, which overrides what is found."""
        if template is None or not takes_tools:
            form = AS_TEXT if parser == AS_TEXT.name else HERMES
            return cls(form, tokenizer.token_to_id, in_prompt=True)
        source = template.for_tools.source
        found = [form for form in FORMATS if form.detect(source)]
        if parser and not (found and found[0].name.startswith(f"{parser}_v")):  # vLLM's `mistral` is both
            found = [form for form in (*FORMATS, AS_TEXT) if form.name == parser]
        return cls(
            format=found[0] if found else None,
            token_id=tokenizer.token_to_id,
            parallel="single tool-call" not in source,  # Llama 3's rejects messages with several
            short_ids=template.for_tools.needs_short_ids,
        )


@dataclass(frozen=True)
class Function:
    """A tool that may be called. `parameters`: the JSON schema of an object."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class AllowedCalls:
    """The calls that an output may have: of `functions`, more than one if `parallel`."""

    model: ModelTools
    functions: Sequence[Function]
    mode: str  # auto, required or named
    parallel: bool

    @property
    def format(self) -> ToolFormat:
        assert self.model.format is not None, "calls in an unknown format are rejected"
        return self.model.format

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    def parameters_of(self, name: str) -> dict[str, Any]:
        return next(function.parameters for function in self.functions if function.name == name)

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
    rules = [
        f"start: {start}",
        f"calls: {form.before} listed {form.after}",
        f"listed: call ({form.between} call){{0,{MOST_CALLS - 1}}}" if calls.parallel else "listed: call",
        "call: " + " | ".join(f"call{n}" for n in range(len(calls.functions))),
        r"ws: /\n? ?/",
    ]
    for name, marker in (("open", form.open), ("close", form.close), ("next", form.next)):
        if marker:
            rules.append(f"{name}: {terminal(marker, token_id)}")
    if form.implicit_start:  # what a text begins with decides
        rules += ["auto: TEXT? | calls", rf"TEXT: /\s*[^\{form.implicit_start}\s](.|\n)*/"]
    else:
        repeat = "*" if calls.parallel else "?"
        rules.append(f"auto: (head {form.marked}){repeat} TEXT")
        rules += up_to(form.open, token_id)
    for n, function in enumerate(calls.functions):
        is_free = start == "auto" and not function.is_strict
        try:
            rules += _call(f"call{n}", form, function, is_free, token_id)
        except GrammarError as error:
            raise ParametersError(function.name, str(error)) from None
    if form.syntax is Syntax.PYTHON:
        rules += PYTHON_LITERALS
    if form.syntax is Syntax.XML:
        rules += XML_PARAMETERS
    return of_rules(rules, body, "body")


def _call(
    rule: str,
    form: ToolFormat,
    function: Function,
    is_free: bool,
    token_id: Callable[[str], int | None],
) -> list[str]:
    """The rules of a call; the arguments of one that `is_free` are any JSON object."""
    # Templates write calls in one line, so models do, too. A schema that cannot be enforced is rejected in
    # every syntax.
    schema = json_rule({"type": "object"} | ({} if is_free else function.parameters), " ?")
    takes_any = is_free or _takes_any(function.parameters)
    if form.syntax is Syntax.PYTHON:
        return _python_call(rule, function, takes_any)
    if form.syntax is Syntax.XML:
        return _xml_call(rule, function, takes_any)
    arguments = f"{rule}_arguments: {schema}"
    if form.syntax is Syntax.NAMED:
        head = terminals(form.head + function.name + form.separator, form.markers, token_id)
        return [f"{rule}: {head} {rule}_arguments {terminals(form.tail, form.markers, token_id)}", arguments]
    name = json.dumps(json.dumps(function.name))
    key = json.dumps(json.dumps(form.arguments_key))
    members = rf'"\"name\"" ws ":" ws {name} ws "," ws {key} ws ":" ws {rule}_arguments'
    return [rf'{rule}: "{{" ws {members} ws "}}"', arguments]


def _takes_any(parameters: dict[str, Any]) -> bool:
    """Whether the schema names no properties and allows all."""
    return not parameters.get("properties") and parameters.get("additionalProperties") is not False


def _xml_call(rule: str, function: Function, takes_any: bool) -> list[str]:
    """The rules of a call in tags: the properties in their order, those that are not required may be
    missing."""
    parameters = function.parameters
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    begin = f'"<function={function.name}>" ws'
    if takes_any:
        return [f'{rule}: {begin} parameter* "{FUNCTION_END}"']
    rules = []
    parts = []
    for k, (name, schema) in enumerate(properties.items()):
        if not re.fullmatch(r"[^>\n]+", name):
            raise GrammarError(f"must have names without `>`. Given: {name[:40]!r}")
        is_required = isinstance(required, list) and name in required
        parts.append(f"{rule}_{k}" if is_required else f"{rule}_{k}?")
        tag = lark_string(f"{PARAMETER}{name}>")
        rules.append(f"{rule}_{k}: {tag} {rule}_value_{k} ws")
        rules += _xml_value(f"{rule}_value_{k}", schema, parameters)
    return [f'{rule}: {begin} {" ".join(parts)} "{FUNCTION_END}"', *rules]


def _xml_value(rule: str, schema: Any, parameters: dict[str, Any]) -> list[str]:
    """A value and the tag after it: raw text if the schema allows text, otherwise JSON."""
    types = types_of(schema, parameters)
    values = _values(schema)
    end = f'ws "{PARAMETER_END}"'
    if types == {"string"} and values:
        return [f"{rule}: ws ({_choice(values)}) {end}"]
    if not types or "string" in types:
        return [f"{rule}: raw"]
    definitions: dict[str, Any] = {}
    if "$ref" in json.dumps(schema):
        definitions = {name: parameters[name] for name in DEFINITIONS if name in parameters}
    constrained = definitions | {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    return [f"{rule}: ws {rule}_json {end}", f"{rule}_json: {json_rule(constrained, ' ?')}"]


def types_of(schema: Any, parameters: dict[str, Any], depth: int = 0) -> set[str]:
    """JSON Schema's names of the types that a property may have; none: it does not say.

    parameters: the schema of all of them, which has the definitions that `schema` may name.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    if isinstance(given := schema.get("type"), (str, list)):
        return {given} if isinstance(given, str) else set(map(str, given))
    if values := _values(schema):
        return {TYPES[type(value)] for value in values}
    if isinstance(path := schema.get("$ref"), str):
        return types_of(_definition(path, parameters), parameters, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(name), list):
            found = [types_of(option, parameters, depth + 1) for option in options]
            return set().union(*found) if all(found) else set()
    return {"object"} if "properties" in schema else set()


def _definition(path: str, parameters: dict[str, Any]) -> Any:
    found: Any = parameters
    for name in path.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _python_call(rule: str, function: Function, takes_any: bool) -> list[str]:
    """The rules of `name(key=…, …)`: the properties in their order, those that are not required may be
    missing."""
    if takes_any:
        return [f'{rule}: "{function.name}(" (argument ("," " "? argument)*)? ")"']
    properties = function.parameters.get("properties", {})
    required = function.parameters.get("required", [])
    rules = [f'{rule}: "{function.name}(" {rule}_first_0 ")"']
    for k, (name, schema) in enumerate(properties.items()):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise GrammarError(f"must have names that are valid in Python. Given: {name[:40]!r}")
        is_required = isinstance(required, list) and name in required
        for place, comma in (("first", ""), ("next", ", ")):
            argument = f'"{comma}{name}=" ({_python_literal(schema)}) {rule}_next_{k + 1}'
            skipped = "" if is_required else f" | {rule}_{place}_{k + 1}"
            rules.append(f"{rule}_{place}_{k}: {argument}{skipped}")
    return [*rules, f'{rule}_first_{len(properties)}: ""', f'{rule}_next_{len(properties)}: ""']


def _python_literal(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "value"
    values = _values(schema)
    if not values:
        return LITERALS.get(str(schema.get("type")), "value")
    return _choice(
        json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value) for value in values
    )


def _values(schema: Any) -> list[Any]:
    """The only values that a schema allows, if it names them."""
    if not isinstance(schema, dict):
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _choice(texts: Iterable[str]) -> str:
    return " | ".join(map(lark_string, texts))


def terminal(text: str, token_id: Callable[[str], int | None]) -> str:
    """A text in Lark. One that is a token by itself is written as its number: llguidance takes a string for
    other tokens."""
    number = token_id(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def terminals(text: str, markers: Iterable[str], token_id: Callable[[str], int | None]) -> str:
    """A text with markers in it, in Lark."""
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return " ".join(terminal(part, token_id) for part in parts if part)


def up_to(
    marker: str, token_id: Callable[[str], int | None], head: str = "head", text: str = "TEXT"
) -> list[str]:
    """The rules `head`, any text that ends with the marker, and `text`, any text without it."""
    if token_id(marker) is not None:  # which no regular expression matches
        return [rf"{text}: /(.|\n)*/", f"{head}: {text} {terminal(marker, token_id)}"]
    plain = re.escape(marker).replace("/", r"\/")
    return [rf"{head}[lazy]: /(.|\n)*{plain}/", rf"{text}: /(.|\n)*/ & ~/(.|\n)*{plain}(.|\n)*/"]
