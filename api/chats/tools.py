"""What a chat may call: its `tools` and `tool_choice`, checked, and custom tools as functions.
text/output/tool_formats.py has the formats of tool calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from api.chats.formats import ANY_TEXT, Constraint, naming
from api.http.errors import invalid
from api.http.fields import FieldNames, Json, require
from text.grammar import left_out
from text.json_schema import without_nulls
from text.output.call_syntaxes import AllowedCalls, Function, ModelTools, calls_grammar, not_written
from text.output.tool_formats import AS_TEXT, TOOL_FORMATS

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TOOL_TYPES = ("function", "custom")
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
# Characters that truncation can leave of an escaped one, such as \ud83d\ude4.
MAX_PARTIAL_ESCAPE = 12
OTHER_SCHEMAS = ("inputSchema", "input_schema")  # MCP's and Anthropic's names for `parameters`
NOT_RUN = "names a tool that this server does not run"
ADDED_TOOLS = "You may also call these functions:\n"
MODES = ("none", "auto", "required")
NO_PLACE = (
    "is not supported by this model: its chat template has no place for tools "
    "(--tokenizer-config-path sets another one)"
)
UNKNOWN = (
    "is not supported: the tool call format of this model's chat template is unknown; "
    f"set --tool-parser (TOOL_PARSER) to {', '.join(form.name for form in TOOL_FORMATS)}, "
    "or to none to get calls as text"
)
NO_PARSER = "cannot constrain calls with --tool-parser none (TOOL_PARSER)"


class OfferedTools:
    """The tools of a request: the path of each in the request, and its form in a chat. Tools that the API's
    provider runs are left out; `left_out` has their types.

    `listed` are for the template's list. `found` are the tools that the conversation adds: they may be
    called, too, but their definitions stand at their place in the conversation, so that a tool search leaves
    the prefix as it is. A tool with `defer_loading` is in neither until the conversation adds the tool; if
    the provider would search for it, it is listed.
    """

    def __init__(self, listed: Iterable[Json] = ()):
        """listed: tools in a chat's form, from the field `tools`."""
        self.left_out: set[str] = set()  # types
        self.listed = [(f"tools[{n}]", without_nulls(form)) for n, form in enumerate(listed)]
        self.found: dict[str, tuple[str, Json]] = {}  # by name
        self._rejected: dict[str, str] = {}  # why tools of these names may not be called

    def only(self, mode: str, names: Iterable[Any]) -> Json:
        """Returns the `tool_choice` of a chat that may call the tools of these names, without rejected tools.
        mode: auto or required. Whether there are such tools is not checked."""
        tools = [{"function": {"name": name}} for name in names if str(name) not in self._rejected]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def one(self, name: str | None) -> Json:
        """Returns the `tool_choice` of a chat that has to call this tool. Raises ApiError for a tool that is
        deferred, removed, or run by the API's provider; whether there is such a tool is not checked."""
        if name in self._rejected:
            raise invalid("tool_choice.name", self._rejected[name], given=name[:40])
        return {"type": "function", "function": {"name": name}}


@dataclass(frozen=True)
class ToolPolicy(AllowedCalls):
    """What a chat may call. answer: what the output may be instead of calls; without a grammar: any text."""

    answer: Constraint = ANY_TEXT

    @property
    def constraint(self) -> Constraint:
        """Returns the constraint of an output that is calls, or else what `answer` allows. If `answer` has no
        grammar, any text is allowed beside calls, unless a call is required. Raises ApiError for parameters
        of a function that no grammar can enforce, for a grammar that is too large, and if a call is required
        and `answer` has a grammar.

        The constraint has no grammar, but a name, if no function's calls are enforced. Its `not_enforced` are
        those of `answer`, then keywords that no grammar enforces (`left_out`), which are an error in a strict
        function, and what the format of calls cannot write (`not_written`).
        """
        name, body, places = self.answer
        start = "calls" if self.requires_call else "auto"
        if body:
            require(not self.requires_call, "tool_choice", f"cannot require a call together with `{name}`")
            start = "calls | body"
        else:
            name = "tool_choice" if self.requires_call else "tools"
        grammar = self._grammar(start, body) if self._enforced else ""
        for function in self._enforced:
            places += (*left_out(function.parameters), *not_written(self.format, function))
        return Constraint(name, grammar, places)

    @property
    def alone(self) -> Iterator[tuple[Function, str]]:
        """Yields each function whose calls a grammar enforces, and the grammar of its calls alone. Raises
        ApiError for parameters that no grammar can enforce, and for a grammar that is too large."""
        for function in self._enforced:
            yield function, replace(self, functions=[function])._grammar("calls")

    @property
    def _enforced(self) -> list[Function]:
        """The functions whose calls a grammar enforces. These are all if a call is required or `answer` has a
        grammar, else the strict ones."""
        is_all = self.requires_call or self.answer.grammar
        return [function for function in self.functions if is_all or function.is_strict]

    def _grammar(self, start: str, body: str = "") -> str:
        """Returns the grammar of an output that begins with the rule `start`. body: the grammar of the rule
        `body`; "": none. Raises ApiError for parameters that no grammar can enforce, and for a grammar that
        is too large."""
        with naming("tools"):
            return calls_grammar(self, start, body)


def tool_policy(
    tools: list[tuple[str, Json]],
    tool_choice: str | Json | None,
    parallel_tool_calls: bool | None,
    model: ModelTools,
    field_names: FieldNames,
) -> ToolPolicy | None:
    """Returns what a chat may call; None: nothing, or calls stay text (`--tool-parser none`). Raises ApiError
    for a malformed tool, two tools of one name, a `tool_choice` that names no tool, a model whose template or
    format does not support tools (unless `tool_choice` is none), and, if calls stay text, for a strict tool
    and any `tool_choice` but auto and none. The result's `answer` is any text.

    tools: the path of each in the request, and its form in a chat. parallel_tool_calls: False: one call at
    most; None: several; True: several, also equal ones. One call at most is also the rule if `tool_choice`
    names one function, and for a model that writes one call only.
    """
    functions = {}
    for place, tool in tools:
        path, function = _checked_function(place, tool, field_names)
        name = function.name
        require(name not in functions, f"{path}.name", "is the name of two tools", given=name)
        functions[name] = function
    mode, chosen = _choice(tool_choice, functions, field_names)
    if mode == "none":
        return None
    require(not model.in_prompt or model.format is not AS_TEXT, "tools", NO_PLACE)
    require(model.format is not None, "tools", UNKNOWN)
    if model.format is AS_TEXT:
        require(mode == "auto", "tool_choice", NO_PARSER)
        require(not any(function.is_strict for function in functions.values()), "tools", NO_PARSER)
        return None
    parallel = model.parallel and mode != "named" and parallel_tool_calls is not False
    may_repeat = parallel_tool_calls is True
    return ToolPolicy(model, [functions[name] for name in chosen], mode, parallel, may_repeat)


def as_function(tool: Json) -> Json:
    """Returns a tool as a chat template reads it: a custom tool becomes a function with one text, `input`.
    Any other tool is returned itself.

    A regular expression for that text is enforced as a schema with `strict` is; a grammar in Lark is only
    described.
    """
    if tool.get("type") != "custom":
        return tool
    custom = tool["custom"]
    function = {key: custom[key] for key in ("name", "description") if custom.get(key) is not None}
    function["parameters"] = CUSTOM_INPUT
    grammar = _grammar_of(custom) or {}
    definition = grammar.get("definition")
    if definition:
        words = f"The input has to match this grammar ({grammar.get('syntax')}):\n{definition}"
        function["description"] = "\n".join(filter(None, [custom.get("description"), words]))
    if definition and grammar.get("syntax") == "regex":
        text = {"type": "string", "pattern": f"^(?:{definition})$"}
        function |= {"parameters": CUSTOM_INPUT | {"properties": {"input": text}}, "strict": True}
    return {"type": "function", "function": function}


def _grammar_of(custom: Json) -> Json | None:
    """Returns the grammar in the `format` of a custom tool; an object without `definition`: it has none;
    None: the format is malformed."""
    form = {} if custom.get("format") is None else custom["format"]
    if not isinstance(form, dict):
        return None
    grammar = form.get("grammar", form)  # chats have it one level deeper
    default = None if form.get("type") == "grammar" else ""
    is_read = isinstance(grammar, dict) and isinstance(grammar.get("definition", default), str)
    return grammar if is_read else None


def definitions(tools: list[Json]) -> str:
    """The text that defines tools to the model, a line of JSON each."""
    functions = [as_function(tool)["function"] for tool in tools]
    return "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)


def custom_input(arguments: str) -> str:
    """Returns the input of a custom tool in the arguments of its function, which `max_tokens` may have
    truncated. "": the arguments end before the input begins, or are no such JSON."""
    ends = [arguments, *(arguments[: len(arguments) - n] + '"}' for n in range(MAX_PARTIAL_ESCAPE))]
    for complete in ends:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            text = str(json.loads(complete)["input"])
            text.encode()  # raises for half of a surrogate pair
            return text
    return ""  # truncated before the input began


def _checked_function(path: str, tool: Json, field_names: FieldNames) -> tuple[str, Function]:
    """Checks a tool. Returns the path of its fields, for errors, and the tool as a Function. Raises ApiError
    for a wrong type, name, description or custom format, and for parameters that are not the schema of an
    object or are in a field of OTHER_SCHEMAS. The schema is checked no further.

    tool: always nested, as in chat completions: {"type": "function", "function": {…}}. path: that of the tool
    in the request; the result ends in `.function` or `.custom` only if the API nests tools. A tool without
    parameters takes no arguments. A custom tool takes one text, `input`.
    """
    name, path, described = _named(tool, path, field_names)
    rule = "must have 1 to 128 letters, digits, dots, dashes or underscores"
    require(FUNCTION_NAME.fullmatch(name), f"{path}.name", rule, given=name[:140])
    is_text = isinstance(described.get("description", ""), str | None)
    require(is_text, f"{path}.description", "must be a string")
    place = path + field_names.parameters
    if tool.get("type") == "custom":
        place = f"{path}.format"
        rule = "must be an object; of the type grammar it needs `syntax` and `definition`"
        require(_grammar_of(described) is not None, place, rule)
    function = as_function(tool)["function"]
    parameters = function.get("parameters")
    if parameters is None:
        for other in OTHER_SCHEMAS:
            require(described.get(other) is None, f"{path}.{other}", "is an unknown field; use `parameters`")
        parameters = {"properties": {}, "additionalProperties": False}
    is_object = isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    is_object = is_object and isinstance(parameters.get("properties", {}), dict)
    require(is_object, place, "must be the JSON schema of an object")
    return path, Function(name, parameters, function.get("strict") is True, place)


def _named(tool: Any, path: str, field_names: FieldNames) -> tuple[str, str, Json]:
    """Returns the name of a tool, its path in the request, and the object of its fields. A tool without a
    type is a function. Raises ApiError for a type other than function and custom, and for an object or a name
    that is missing.

    The object is `function` in `{"type": "function", "function": {"name": …}}`, and `custom` in a custom
    tool. The path ends in that key only if the API nests tools: `tools[0].function`, else `tools[0]`.
    """
    if not isinstance(tool, dict):
        tool = {}
    kind = tool.get("type", "function")
    require(kind in TOOL_TYPES, f"{path}.type", "must be function or custom", given=str(kind)[:40])
    described = tool.get(kind)
    if field_names.nests_tools:
        path += f".{kind}"
    require(isinstance(described, dict), path, "is missing, or is not an object")
    require(isinstance(described.get("name"), str), f"{path}.name", "is missing, or is not a string")
    return described["name"], path, described


def _choice(
    choice: str | Json | None, known: Collection[str], field_names: FieldNames
) -> tuple[str, list[str]]:
    """Returns the mode that a `tool_choice` asks for, and the names of the functions that may be called, each
    once. Raises ApiError for a malformed choice, a name that is not known, and a required call without tools.

    The mode is none, auto, required or named. None is auto; a text that is no mode is the name of a function,
    and the mode is named. known: the names of all functions; if there are none, the mode is none.
    """
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
        is_complete = is_complete and allowed.get("mode") in MODES[1:]
        require(is_complete, path, "needs `mode`, which is auto or required, and the list `tools`")
        mode = allowed["mode"]
        names = [
            _named(tool, f"{path}.tools[{n}]", field_names)[0] for n, tool in enumerate(allowed["tools"])
        ]
    else:
        name, path, _ = _named(choice, "tool_choice", field_names)
        mode = "named"
        names = [name]
    if not known:
        require(mode not in ("required", "named"), "tool_choice", "needs `tools`")
        return "none", []
    for name in names or ["no tool"]:
        words = ", or none, auto or required" if isinstance(choice, str) else ""
        require(name in known, path, f"must name one of `tools`{words}", given=name[:140])
    return mode, list(dict.fromkeys(names))
