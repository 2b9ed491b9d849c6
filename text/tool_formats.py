"""How models write calls of tools: one row a format, and the grammars that make a model write its format.

`FORMATS` has everything that tells one format from another: how a chat template shows it, the markers, what
`Reader` (reader.py) looks for, and the grammar. Sources: the chat templates of Hermes and Qwen, Llama 3,
Llama 4 and Mistral v3.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from text.grammar import GrammarError, json_rule, of_rules
from text.template import ChatTemplate
from text.tokenizer import Tokenizer

THINK = "<think>"
THINK_END = "</think>"
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
PYTHON_LITERALS = [
    "value: STR | NUM | BOOL | NONE | list | dict",
    'list: "[" (value ("," " "? value)*)? "]"',
    'dict: "{" (STR ":" " "? value ("," " "? STR ":" " "? value)*)? "}"',
    r"""STR: /"([^"\\\x00-\x1f]|\\["\\nt])*"|'([^'\\\x00-\x1f]|\\['\\nt])*'/""",
    "INT: /-?(0|[1-9][0-9]{0,15})/",
    r"NUM: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/",
    'BOOL: "True" | "False"',
    'NONE: "None"',
]


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls, for the reader and for the grammar.

    `before`, `between` and `after` are Lark for what stands around the calls of an answer; `marked` is Lark
    for calls behind the opening marker within a text. They may use the rules `open`, `close` (the markers),
    `call`, `listed` (all of them) and `ws`.
    """

    name: str
    is_shown_by: Callable[[str], bool]  # the source of a chat template
    open: str  # the marker in front of calls,
    close: str = ""  # and the one behind them
    bare: str = ""  # what calls begin with where they may be the whole text, without a marker
    ends: tuple[str, ...] = ()  # what may follow calls
    is_list: bool = False  # calls stand in brackets, between commas
    is_python: bool = False  # `name(key=value)`; otherwise a JSON object
    arguments_key: str = "arguments"
    before: str = ""
    between: str = ""
    after: str = ""
    marked: str = ""

    @property
    def markers(self) -> list[str]:
        return [marker for marker in (self.open, self.close) if marker]


FORMATS = (
    ToolFormat(
        name="hermes",
        is_shown_by=lambda source: "<tool_call>" in source and "<function=" not in source,
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
        is_shown_by=lambda source: "[TOOL_CALLS]" in source and "[ARGS]" not in source,
        open="[TOOL_CALLS]",
        ends=("]",),
        is_list=True,
        before='open " "? "["',
        between='"," ws',
        after='"]"',
        marked='" "? "[" listed "]"',
    ),
    ToolFormat(
        name="llama3_json",
        is_shown_by=lambda source: (
            "[func_name" not in source
            and ("<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters' in source))
        ),
        open="<|python_tag|>",
        bare="{",
        ends=(";",),
        arguments_key="parameters",
        between='";" ws',
    ),
    ToolFormat(
        name="pythonic",
        is_shown_by=lambda source: "[func_name" in source or "<|python_start|>" in source,
        open="<|python_start|>",
        close="<|python_end|>",
        bare="[",
        ends=("]", "<|python_end|>"),
        is_list=True,
        is_python=True,
        before='"["',
        between='"," ws',
        after='"]"',
    ),
)
AS_TEXT = ToolFormat("none", is_shown_by=lambda _source: False, open="")  # calls are not read: they stay text


@dataclass(frozen=True)
class ModelTools:
    """What the served model's chat template says about tools. Found once, when the template is loaded."""

    format: ToolFormat | None  # None: unknown
    token_id: Callable[[str], int | None] = lambda _text: None  # of a text that is one token
    several: bool = True  # calls in one message
    short_ids: bool = False  # of 9 letters and digits

    @classmethod
    def of(cls, template: ChatTemplate | None, tokenizer: Tokenizer, parser: str | None) -> ModelTools | None:
        """None: the template has no place for tools. `parser`: --tool-parser, which overrides what is
        found."""
        source = template.for_tools.source if template else ""
        if not re.search(r"\btools\b", source):
            return None
        found = [form for form in FORMATS if form.is_shown_by(source)]
        if parser:
            found = [form for form in (*FORMATS, AS_TEXT) if form.name == parser]
        return cls(
            format=found[0] if found else None,
            token_id=tokenizer.token_to_id,
            several="single tool-call" not in source,  # Llama 3's refuses messages with several
            short_ids=template.for_tools.needs_short_ids,
        )


@dataclass(frozen=True)
class Function:
    """A tool that may be called. `parameters`: the JSON schema of an object."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class Calls:
    """The calls that an answer may have: of `functions`, more than one if `several`."""

    model: ModelTools
    functions: Sequence[Function]
    mode: str  # auto, required or named
    several: bool

    @property
    def format(self) -> ToolFormat:
        assert self.model.format is not None, "calls in an unknown format are refused"
        return self.model.format

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    @property
    def is_named(self) -> bool:
        return self.mode == "named"

    @property
    def is_forced(self) -> bool:
        return self.mode != "auto"


class ParametersError(GrammarError):
    """The parameters of the function of this name cannot be enforced; the message is for the client."""

    def __init__(self, function: str, message: str):
        super().__init__(message)
        self.function = function


def calls_grammar(calls: Calls, start: str, body: str = "") -> str:
    """The grammar `start`, made of the rules `calls`, `auto` (text with calls or without) and `body`, another
    grammar.

    Raises GrammarError, which is a ParametersError where one function is the reason.
    """
    form = calls.format
    token_id = calls.model.token_id
    rules = [
        f"start: {start}",
        f"calls: {form.before} listed {form.after}",
        f"listed: call ({form.between} call)*" if calls.several else "listed: call",
        "call: " + " | ".join(f"call{n}" for n in range(len(calls.functions))),
        r"ws: /\n? ?/",
        *(f"{name}: {_terminal(marker, token_id)}" for name, marker in zip(("open", "close"), form.markers)),
    ]
    if form.bare:  # what a text begins with decides
        rules += ["auto: TEXT? | calls", rf"TEXT: /\s*[^\{form.bare}\s](.|\n)*/"]
    else:
        repeat = "*" if calls.several else "?"
        rules.append(f"auto: (head {form.marked}){repeat} TEXT")
        rules += _up_to(form.open, token_id)
    for n, function in enumerate(calls.functions):
        is_free = start == "auto" and not function.is_strict
        try:
            rules += _call(f"call{n}", form, function, is_free)
        except GrammarError as error:
            raise ParametersError(function.name, str(error)) from None
    if form.is_python:
        rules += PYTHON_LITERALS
    return of_rules(rules, body, "body")


def _call(rule: str, form: ToolFormat, function: Function, is_free: bool) -> list[str]:
    """The rules of a call; the arguments of one that `is_free` are any JSON object."""
    # Templates write calls in one line, so models do, too.
    schema = json_rule({"type": "object"} | ({} if is_free else function.parameters), " ?")
    if form.is_python:
        return _python_call(rule, function)
    name, key = (json.dumps(json.dumps(text)) for text in (function.name, form.arguments_key))
    members = rf'"\"name\"" ws ":" ws {name} ws "," ws {key} ws ":" ws {rule}_arguments'
    return [rf'{rule}: "{{" ws {members} ws "}}"', f"{rule}_arguments: {schema}"]


def _python_call(rule: str, function: Function) -> list[str]:
    """The rules of `name(key=…, …)`: the properties in their order, those that are not required may be
    missing."""
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
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not values:
        return LITERALS.get(str(schema.get("type")), "value")
    texts = (
        json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value) for value in values
    )
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def after_thinking(grammar: str, thinking: str, token_id: Callable[[str], int | None]) -> str:
    """The grammar of thoughts and of what follows them; `thinking` as in `Reading` (reader.py). Raises
    GrammarError."""
    if not thinking:
        return grammar
    thought = r"thoughts /\s{0,2}/"
    if thinking == "before":
        thought = f"({_terminal(THINK, token_id)} {thought})?"
    rules = [f"start: {thought} answer", *_up_to(THINK_END, token_id, "thoughts", "THOUGHT")]
    return of_rules(rules, grammar, "answer")


def _terminal(text: str, token_id: Callable[[str], int | None]) -> str:
    """A text in Lark. One that is a token by itself is written as its number: llguidance takes a string for
    other tokens."""
    number = token_id(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def _up_to(
    marker: str, token_id: Callable[[str], int | None], head: str = "head", text: str = "TEXT"
) -> list[str]:
    """The rules `head`, any text that ends with the marker, and `text`, any text without it."""
    if token_id(marker) is not None:  # which no regular expression matches
        return [rf"{text}: /(.|\n)*/", f"{head}: {text} {_terminal(marker, token_id)}"]
    plain = re.escape(marker).replace("/", r"\/")
    return [rf"{head}[lazy]: /(.|\n)*{plain}/", rf"{text}: /(.|\n)*/ & ~/(.|\n)*{plain}(.|\n)*/"]
