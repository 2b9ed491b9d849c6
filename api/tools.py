"""What a chat may call: its `tools` and `tool_choice`, checked. text/tool_formats.py has the formats of tool
calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from api.errors import invalid
from api.fields import CHAT_FIELDS, FieldNames
from text.grammar import GrammarError
from text.tool_formats import (
    AS_TEXT,
    FORMATS,
    AllowedCalls,
    Function,
    ModelTools,
    ParametersError,
    calls_grammar,
)

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MODES = ("none", "auto", "required")
NO_PLACE = (
    "is not supported by this model: its chat template has no place for tools "
    "(--tokenizer-config-path sets another one)"
)
UNKNOWN = (
    "is not supported: the tool call format of this model's chat template is unknown; "
    f"set --tool-parser (TOOL_PARSER) to {', '.join(form.name for form in FORMATS)}, "
    "or to none to get calls as text"
)
NO_PARSER = "cannot constrain calls with --tool-parser none (TOOL_PARSER)"


@dataclass(frozen=True)
class ToolPolicy(AllowedCalls):
    """What a chat may call; `paths` has the place of each function's parameters in the request, by name."""

    paths: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def grammar(self) -> str:
        """The grammar of an output without other constraints; "": any text. Raises ApiError."""
        if self.requires_call:
            return self._grammar("calls")
        return self._grammar("auto") if any(function.is_strict for function in self.functions) else ""

    def grammar_beside(self, name: str, grammar: str) -> str:
        """The grammar of calls, or else of an output that `grammar` allows (of the field `name`). Raises
        ApiError."""
        if self.requires_call:
            raise invalid("tool_choice", f"cannot require a call together with `{name}`")
        return self._grammar("calls | body", grammar)

    def _grammar(self, start: str, body: str = "") -> str:
        try:
            return calls_grammar(self, start, body)
        except ParametersError as error:
            raise invalid(self.paths[error.function], str(error)) from None
        except GrammarError as error:
            raise invalid("tools", str(error)) from None


def tool_policy(
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    parallel_tool_calls: bool | None,
    model: ModelTools,
    names: FieldNames = CHAT_FIELDS,
) -> ToolPolicy | None:
    """What a chat may call; None: nothing, or calls stay text. Raises ApiError."""
    functions: dict[str, Function] = {}
    paths: dict[str, str] = {}
    for n, tool in enumerate(tools or []):
        path, function = _function(names.tool(n), tool, names)
        name = function.name
        if name in functions:
            raise invalid(f"{path}.name", "is the name of two tools", given=name)
        functions[name] = function
        paths[name] = path + names.parameters
    mode, chosen = _choice(tool_choice, list(functions), names)
    if mode == "none":
        return None
    if model.in_prompt and model.format is AS_TEXT:
        raise invalid("tools", NO_PLACE)
    if model.format is None:
        raise invalid("tools", UNKNOWN)
    if model.format is AS_TEXT:
        if mode != "auto":
            raise invalid("tool_choice", NO_PARSER)
        if any(function.is_strict for function in functions.values()):
            raise invalid("tools", NO_PARSER)
        return None
    parallel = model.parallel and mode != "named" and parallel_tool_calls is not False
    return ToolPolicy(
        model,
        [functions[name] for name in chosen],
        mode,
        parallel,
        may_repeat=parallel_tool_calls is True,
        paths=paths,
    )


def _function(path: str, tool: dict[str, Any], names: FieldNames) -> tuple[str, Function]:
    """A tool of a request, checked, and the path of what describes it."""
    kind = tool.get("type", "function")
    if kind != "function":
        raise invalid(f"{path}.type", "must be function", given=str(kind)[:40])
    name, path, function = _named(tool, path, names)
    if not NAME.fullmatch(name):
        rule = "must have 1 to 128 letters, digits, dots, dashes or underscores"
        raise invalid(f"{path}.name", rule, given=name[:140])
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    is_object = isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    if not is_object or not isinstance(parameters.get("properties", {}), dict):
        raise invalid(path + names.parameters, "must be the JSON schema of an object")
    return path, Function(name, parameters, function.get("strict") is True)


def _named(tool: Any, path: str, names: FieldNames) -> tuple[str, str, dict[str, Any]]:
    """The name in `{"function": {"name": …}}`, the path of the function, and the function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    path += names.function
    if not isinstance(function, dict):
        raise invalid(path, "is missing, or is not an object")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{path}.name", "is missing, or is not a string")
    return function["name"], path, function


def _choice(
    choice: str | dict[str, Any] | None, known: list[str], field_names: FieldNames
) -> tuple[str, list[str]]:
    """The mode that a `tool_choice` asks for (none, auto, required or named), and the names that may be
    called."""
    if choice is None or isinstance(choice, str):
        path = "tool_choice"
        mode = "auto" if choice is None else choice
        names = known
        if mode not in MODES:
            names = [mode]
            mode = "named"
    elif choice.get("type") == "allowed_tools":
        path = "tool_choice" + field_names.allowed_tools
        allowed = choice.get("allowed_tools")
        is_complete = isinstance(allowed, dict) and isinstance(allowed.get("tools"), list)
        if not is_complete or allowed.get("mode") not in MODES[1:]:
            raise invalid(path, "needs `mode`, which is auto or required, and the list `tools`")
        mode = allowed["mode"]
        names = [
            _named(tool, f"{path}.tools[{n}]", field_names)[0] for n, tool in enumerate(allowed["tools"])
        ]
    else:
        kind = choice.get("type", "function")
        if kind != "function":
            raise invalid("tool_choice.type", "must be function or allowed_tools", given=str(kind)[:40])
        name, path, _ = _named(choice, "tool_choice", field_names)
        mode = "named"
        names = [name]
    if not known:
        if mode in ("required", "named"):
            raise invalid("tool_choice", "needs `tools`")
        return "none", []
    for name in names or ["no tool"]:
        if name not in known:
            words = ", or none, auto or required" if isinstance(choice, str) else ""
            raise invalid(path, f"must name one of `tools`{words}", given=name[:140])
    return mode, list(dict.fromkeys(names))
