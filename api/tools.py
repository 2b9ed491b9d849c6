"""Calls of tools: what a chat may call, how the served model writes calls, and the grammars that make it write them.

How calls are written is found in the model's chat template; `--tool-parser` overrides it. Sources of the formats: the chat
templates of Hermes and Qwen, Llama 3, Llama 4 and Mistral v3. readers.py reads them. This layer knows no HTTP and no sockets.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api.errors import invalid
from api.types import ChatRequest
from text.grammar import GrammarError, check_work, json_rule, of_lark
from text.reader import BARE, MARKERS, THINK, THINK_END, Calls, ToolFormat
from text.template import ChatTemplate
from text.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MODES = ("none", "auto", "required")
NO_PLACE = "is not supported by this model: its chat template has no place for tools (--tokenizer-config-path sets another one)"
UNKNOWN = (
    "is not supported: this model's chat template does not say in which known format it writes calls; set --tool-parser "
    "(TOOL_PARSER) to hermes, llama3_json, mistral or pythonic, or to none to get calls as text"
)
NO_PARSER = "cannot constrain calls with --tool-parser none (TOOL_PARSER)"
# Python literals of each type of JSON Schema.
LITERALS = {"string": "STR", "integer": "INT", "number": "NUM", "boolean": "BOOL", "null": "NONE"}
LITERALS |= {"array": "list", "object": "dict"}
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


def tool_format(template: ChatTemplate | None, tokenizer: Tokenizer, parser: str | None) -> ToolFormat | None:
    """How a model with this chat template writes calls; None: it has no place for tools. `parser` is --tool-parser."""
    source = template.for_tools.source if template else ""
    if not re.search(r"\btools\b", source):
        return None
    several = "single tool-call" not in source  # Llama 3's refuses messages with several
    return ToolFormat(
        parser or _format_name(source), tokenizer.token_to_id, several, "[TOOL_CALLS]" in source
    )


def _format_name(source: str) -> str:
    if "[TOOL_CALLS]" in source:
        return "" if "[ARGS]" in source else "mistral"
    if "<tool_call>" in source:
        return "" if "<function=" in source else "hermes"
    if "[func_name" in source:
        return "pythonic"
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters' in source):
        return "llama3_json"
    return "pythonic" if "<|python_start|>" in source else ""


@dataclass(frozen=True)
class Function:
    """A tool of a request; `path` is its place there."""

    path: str
    name: str
    parameters: dict[str, Any]
    is_strict: bool


@dataclass(frozen=True)
class ToolUse(Calls):
    """What a chat may call."""

    functions: list[Function]

    @property
    def grammar(self) -> str:
        """Of a text without other constraints; "": any text. Raises ApiError."""
        if self.is_forced:
            return self._grammar("calls")
        return self._grammar("auto") if any(function.is_strict for function in self.functions) else ""

    def grammar_beside(self, name: str, grammar: str) -> str:
        """Of calls, or else of a text that `grammar` allows, which the field `name` asks for. Raises ApiError."""
        if self.is_forced:
            raise invalid("tool_choice", f"cannot force a call together with `{name}`")
        return self._grammar("calls | @body", grammar)

    def _grammar(self, start: str, body: str = "") -> str:
        """`start` is made of the rules `calls`, `auto` (text with calls or without) and `body` (another grammar)."""
        name, token_id = self.format.name, self.format.token_id
        opening, closing, *_ = (*(_terminal(marker, token_id) for marker in MARKERS[name]), "")
        before, between, after = {
            "hermes": (f'{opening} "\\n"', f'"\\n" {closing} "\\n" {opening} "\\n"', f'"\\n" {closing}'),
            "llama3_json": ("", '";" ws', ""),
            "mistral": (f'{opening} " "? "["', '"," ws', '"]"'),
            "pythonic": ('"["', '"," ws', '"]"'),
        }[name]
        calls = f"call ({between} call)*" if self.several else "call"
        rules = [f"start: {start}", f"calls: {before} {calls} {after}", r"ws: /\n? ?/"]
        if name in BARE:  # what a text begins with decides
            rules += ["auto: TEXT? | calls", rf"TEXT: /\s*[^\{BARE[name]}\s](.|\n)*/"]
        else:
            marked = f"ws call ws {closing}" if closing else f'" "? "[" {calls} "]"'
            rules += [
                f"auto: (head {marked}){'*' if self.several else '?'} TEXT",
                *_up_to(MARKERS[name][0], token_id),
            ]
        rules.append("call: " + " | ".join(f"call{n}" for n in range(len(self.functions))))
        schemas = [
            {"type": "object"} | ({} if start == "auto" and not function.is_strict else function.parameters)
            for function in self.functions
        ]
        for n, function in enumerate(self.functions):
            # Templates write calls in one line, so models do, too.
            try:
                schema = json_rule(schemas[n], " ?")
            except GrammarError as error:
                raise invalid(f"{function.path}.parameters", str(error)) from None
            key = "parameters" if name == "llama3_json" else "arguments"
            rules += (
                _python_call(n, function) if name == "pythonic" else _json_call(n, function.name, key, schema)
            )
        try:
            check_work(schemas)
        except GrammarError as error:
            raise invalid("tools", str(error)) from None
        return _joined(rules + PYTHON_LITERALS * (name == "pythonic"), body)


def tool_use(request: ChatRequest, format: ToolFormat | None) -> ToolUse | None:
    """What a chat may call; None: nothing, or calls stay text. Raises ApiError."""
    functions = [_function(f"tools[{n}]", tool) for n, tool in enumerate(request.tools or [])]
    known: dict[str, Function] = {}
    for function in functions:
        if known.setdefault(function.name, function) is not function:
            raise invalid(f"{function.path}.name", f"is the name of two tools. Given: {function.name!r}")
    mode, names = _choice(request.tool_choice, list(known))
    if mode == "none":
        return None
    if format is None or not format.name:
        raise invalid("tools", NO_PLACE if format is None else UNKNOWN)
    if format.name == "none":
        if mode != "auto" or any(function.is_strict for function in functions):
            raise invalid("tools" if mode == "auto" else "tool_choice", NO_PARSER)
        return None
    several = format.several and mode != "named" and request.parallel_tool_calls is not False
    return ToolUse(format, names, mode, several, [known[name] for name in names])


def after_thinking(grammar: str, thinking: str, token_id: Callable[[str], int | None]) -> str:
    """The grammar of thoughts and of what follows them; `thinking` as in `readers.Reading`. Raises ApiError."""
    thought = r"head /\s{0,2}/"
    start = f"{thought} @body" if thinking == "inside" else f"({_terminal(THINK, token_id)} {thought})? @body"
    return _joined([f"start: {start}", *_up_to(THINK_END, token_id)], grammar) if thinking else grammar


def _function(path: str, tool: dict[str, Any]) -> Function:
    """A tool of a request, checked."""
    if tool.get("type", "function") != "function":
        raise invalid(f"{path}.type", f"must be function. Given: {str(tool['type'])[:40]!r}")
    name, path, function = _named(tool, path)
    if not NAME.fullmatch(name):
        raise invalid(
            f"{path}.name",
            f"must have 1 to 128 letters, digits, dots, dashes or underscores. Given: {name[:140]!r}",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    is_object = isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    if not is_object or not isinstance(parameters.get("properties", {}), dict):
        raise invalid(f"{path}.parameters", "must be the JSON schema of an object")
    return Function(path, name, parameters, function.get("strict") is True)


def _named(tool: Any, path: str) -> tuple[str, str, dict[str, Any]]:
    """The name in `{"function": {"name": …}}`, the path of the function, and the function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    path = f"{path}.function"
    if not isinstance(function, dict):
        raise invalid(path, "is missing, or is not an object")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{path}.name", "is missing, or is not a string")
    return function["name"], path, function


def _choice(choice: str | dict[str, Any] | None, known: list[str]) -> tuple[str, list[str]]:
    """The mode that a `tool_choice` asks for (none, auto, required or named), and the names that may be called."""
    if choice is None or isinstance(choice, str):
        mode, names, path = "auto" if choice is None else choice, known, "tool_choice"
        if mode not in MODES:
            mode, names = "named", [mode]
    elif choice.get("type") == "allowed_tools":
        path = "tool_choice.allowed_tools"
        allowed = choice.get("allowed_tools")
        if (
            not isinstance(allowed, dict)
            or allowed.get("mode") not in MODES[1:]
            or not isinstance(allowed.get("tools"), list)
        ):
            raise invalid(path, "needs `mode`, which is auto or required, and the list `tools`")
        mode, names = (
            allowed["mode"],
            [_named(tool, f"{path}.tools[{n}]")[0] for n, tool in enumerate(allowed["tools"])],
        )
    else:
        if choice.get("type", "function") != "function":
            raise invalid(
                "tool_choice.type", f"must be function or allowed_tools. Given: {str(choice['type'])[:40]!r}"
            )
        name, path, _ = _named(choice, "tool_choice")
        mode, names = "named", [name]
    if not known:
        if mode in ("required", "named"):
            raise invalid("tool_choice", "needs `tools`")
        return "none", []
    for name in names or ["no tool"]:
        if name not in known:
            words = ", or none, auto or required" if path == "tool_choice" else ""
            raise invalid(path, f"must name one of `tools`{words}. Given: {name[:140]!r}")
    return mode, list(dict.fromkeys(names))


def _json_call(n: int, name: str, key: str, schema: str) -> list[str]:
    """The rules of a call as `{"name": …, "arguments": …}`."""
    name, key = json.dumps(json.dumps(name)), json.dumps(json.dumps(key))
    members = f'"\\"name\\"" ws ":" ws {name} ws "," ws {key} ws ":" ws args{n}'
    return [f'call{n}: "{{" ws {members} ws "}}"', f"args{n}: %json {schema}"]


def _python_call(n: int, function: Function) -> list[str]:
    """The rules of a call as `name(key=…, …)`: the properties in their order, those that are not required may be missing."""
    properties, required = function.parameters.get("properties", {}), function.parameters.get("required", [])
    rules = [f'call{n}: "{function.name}(" first{n}_0 ")"']
    for k, (name, schema) in enumerate(properties.items()):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise invalid(
                f"{function.path}.parameters",
                f"must have names that are valid in Python. Given: {name[:40]!r}",
            )
        for rule, comma in (("first", ""), ("next", ", ")):
            skip = "" if isinstance(required, list) and name in required else f"| {rule}{n}_{k + 1}"
            rules.append(
                f'{rule}{n}_{k}: "{comma}{name}=" ({_python_literal(schema)}) next{n}_{k + 1} {skip}'
            )
    return [*rules, f'first{n}_{len(properties)}: ""', f'next{n}_{len(properties)}: ""']


def _python_literal(schema: Any) -> str:
    schema = schema if isinstance(schema, dict) else {}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        texts = (
            json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
            for value in values
        )
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LITERALS.get(str(schema.get("type")), "value")


def _terminal(text: str, token_id: Callable[[str], int | None]) -> str:
    """A text in Lark. One that is a token by itself is written as its number: llguidance takes a string for other tokens."""
    number = token_id(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def _up_to(marker: str, token_id: Callable[[str], int | None]) -> list[str]:
    """The rules `head`, any text that ends with the marker, and TEXT, any text without it."""
    if token_id(marker) is not None:  # which no regular expression matches
        return [r"TEXT: /(.|\n)*/", f"head: TEXT {_terminal(marker, token_id)}"]
    plain = re.escape(marker).replace("/", r"\/")
    return [rf"head[lazy]: /(.|\n)*{plain}/", rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{plain}(.|\n)*/"]


def _joined(rules: list[str], body: str) -> str:
    """The grammar of Lark rules, which may use another grammar as `@body`. Raises ApiError."""
    try:
        lark = of_lark("\n".join(rules))
    except GrammarError as error:
        raise invalid("tools", str(error)) from None
    if not body:
        return lark
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**inner, "name": "body"}]})
