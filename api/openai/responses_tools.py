"""The tools of `/v1/responses` in a chat's form: functions, custom tools, and those that the client runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from api.chats import client_tools
from api.chats.content import SYSTEM_ROLES
from api.chats.tools import NOT_RUN, OTHER_SCHEMAS, OfferedTools, definitions
from api.http.fields import Json, require
from api.openai.responses_types import (
    ApplyPatchCall,
    BuiltInCall,
    CompactRequest,
    LocalShellCall,
    ResponsesRequest,
    ResponsesToolChoice,
    ShellCall,
    ToolSearchCall,
)
from text.json_schema import without_nulls

DEFERRED = "names a tool that is deferred (`defer_loading`); a `tool_search_output` has to add it"
ADDING_ITEMS = ("additional_tools", "tool_search_output")


class BuiltIn(NamedTuple):
    """A tool that OpenAI defines and the client runs. The model sees a function; a call of that function is
    an `item`.

    field: the field of the item that has the arguments of the call. defaults: the values of arguments that
    the model left out.
    """

    definition: Json
    item: type[BuiltInCall]
    prefix: str  # of the item's ids
    field: str
    defaults: Json

    def read(self, value: Json) -> Json:
        """Returns the arguments of a call as the model wrote them. Arguments with their default value, and
        null ones without a default, are left out, and the order is that of the schema: SDKs add defaults and
        change the order. Unknown arguments come last.

        value: of the item's field. Example: {"timeout_ms": null, "commands": ["ls"]} of a shell becomes
        {"commands": ["ls"]}.
        """
        written = {name: given for name, given in value.items() if given != self.defaults.get(name)}
        order = [*self.definition["parameters"]["properties"], *written]
        return {name: written[name] for name in order if name in written}


# The tools by type, which is also the name of the function.
BUILT_IN = {
    "shell": BuiltIn(
        client_tools.SHELL,
        ShellCall,
        "sh",
        "action",
        {"commands": [], "timeout_ms": None, "max_output_length": None},
    ),
    "local_shell": BuiltIn(
        client_tools.LOCAL_SHELL,
        LocalShellCall,
        "lsh",
        "action",
        {"type": "exec", "command": [], "env": {}},
    ),
    "apply_patch": BuiltIn(
        client_tools.APPLY_PATCH, ApplyPatchCall, "apc", "operation", {"path": "", "diff": ""}
    ),
    "tool_search": BuiltIn(client_tools.TOOL_SEARCH, ToolSearchCall, "tsc", "arguments", {}),
}


class ClientTool(NamedTuple):
    """A tool that the client runs; a built-in one has its type as its name."""

    name: str
    namespace: str | None = None
    kind: str = "function"


class ResponsesTools(OfferedTools):
    """The tools of a request, and those of the items that add some (ADDING_ITEMS).

    `listed` are those in `tools`, and those of items `additional_tools` that only such items and system
    messages precede. `found` are those of all other items. A tool that is added again counts once.
    """

    def __init__(self, request: ResponsesRequest | CompactRequest, items: Sequence[tuple[str, Json]]):
        """Raises ApiError for a tool that is malformed, and for one of the request with which the model would
        use a computer or a browser. Schemas are not checked. items: of the conversation, each with its path
        in the request."""
        super().__init__()
        self.added: dict[str, str] = {}  # the definitions that an item adds, by its path
        self._named: dict[str, ClientTool] = {}  # by the name that the model calls
        self._names: dict[tuple[str, str | None], str] = {}  # that name, by name and namespace of the tool
        # What adds tools, by its path: the request itself, and items.
        given = {"": {"tools": request.tools, "type": "additional_tools"}}
        given |= {path: item for path, item in items if item.get("type") in ADDING_ITEMS}
        leading = {"", *(path for path, _item in itertools.takewhile(_is_leading, items))}
        offered = [tool for path, item in given.items() for tool in _flat(path, item)]
        self._name(offered)
        searches = [tool for _path, _namespace, tool in offered if tool.get("type") == "tool_search"]
        # Without a search of the client, OpenAI would find deferred tools. Here they are offered at once.
        defers = not searches or any(map(_is_client_search, searches))
        known = set()
        for path, item in given.items():
            tools = list(self._chat_forms(path, item, defers and item["type"] != "tool_search_output"))
            if path not in leading:
                self.added[path] = definitions([form for _path, form in tools])
            for where, form in tools:
                name = form[form["type"]].get("name", "")
                if name in known and path:  # added again
                    continue
                known.add(name)
                if path in leading:
                    self.listed.append((where, form))
                else:
                    self.found[name] = (where, form)
        self._rejected = dict.fromkeys(self._named.keys() - known, DEFERRED)

    def of(self, name: str) -> ClientTool:
        """Returns the tool that the model calls by this name; a function of this name if there is no such
        tool."""
        return self._named.get(name) or ClientTool(name)

    def name_of(self, name: str, namespace: str | None) -> str:
        """Returns the name by which the model calls the tool `name` of a namespace. This is `name` itself if
        there is no such tool. namespace: None: none."""
        return self._names.get((name, namespace), name)

    def choice(self, given: str | ResponsesToolChoice | None) -> str | Json | None:
        """Returns the `tool_choice` in a chat's form; a string, or None, stays as it is. Raises ApiError for
        an unknown type, and for a tool that OpenAI runs or that is deferred; from `allowed_tools` such tools
        are left out. Whether there is a tool of the name is not checked."""
        if not isinstance(given, ResponsesToolChoice):
            return given
        require(given.type not in self.left_out, "tool_choice.type", NOT_RUN, given=given.type[:40])
        if given.type == "allowed_tools":
            known = [tool for tool in given.tools or [] if str(tool.get("type")) not in self.left_out]
            return self.only(given.mode or "auto", (tool.get("name") or tool.get("type") for tool in known))
        detail = f"must be function, custom, {', '.join(BUILT_IN)} or allowed_tools"
        is_known = given.type in ("function", "custom", *BUILT_IN)
        require(is_known, "tool_choice.type", detail, given=given.type[:40])
        return self.one(given.type if given.type in BUILT_IN else given.name)

    def _name(self, offered: list[tuple[str, Json | None, Json]]) -> None:
        """Gives each tool its name for the model. If two different tools have one name, their namespaces are
        in front of it: read of the namespace files becomes files__read. A tool without a namespace keeps its
        name. offered: the path, the namespace and the fields of each tool."""
        known = dict.fromkeys(_client_tool(namespace, tool) for _path, namespace, tool in offered)
        names = Counter(tool.name for tool in known)
        for tool in known:
            is_own = tool.namespace is None or names[tool.name] == 1
            name = tool.name if is_own else f"{tool.namespace}__{tool.name}"
            self._named[name] = tool
            self._names[tool.name, tool.namespace] = name

    def _chat_forms(self, path: str, item: Json, defers: bool) -> Iterator[tuple[str, Json]]:
        """Yields the path and the form in a chat of each of an item's tools. Raises ApiError for a tool that
        is malformed, and for computer use among the tools of the request.

        Tools that OpenAI runs are left out, and noted in `left_out`; so are those with `defer_loading` if
        `defers` is true, without a note. The description of a namespace stands in front of the description of
        its first tool. path: that of the item; "": the request itself.
        """
        described: set[str | None] = {None}
        for where, namespace, tool in _flat(path, item):
            require(isinstance(tool.get("type"), str), f"{where}.type", "is missing, or is not a string")
            client_tool = _client_tool(namespace, tool)
            if not path:
                client_tools.reject_computer_use(where, tool)
            if _is_hosted(tool):
                self.left_out.add(client_tool.kind[:40])
                continue
            if defers and tool.get("defer_loading"):
                continue
            form = _chat_form(where, tool)
            function = form[form["type"]]
            if "name" in function:
                function["name"] = self.name_of(client_tool.name, client_tool.namespace)
            if client_tool.namespace not in described:
                described.add(client_tool.namespace)
                if about := namespace.get("description"):
                    texts = [f"Namespace {client_tool.namespace}: {about}", function.get("description")]
                    function["description"] = "\n".join(filter(None, texts))
            yield where, form


def _flat(path: str, item: Json, namespace: Json | None = None) -> Iterator[tuple[str, Json | None, Json]]:
    """Yields the path, the namespace (None: none) and the fields of each tool in `tools` of an item. The
    tools in a namespace are yielded in its place. Raises ApiError for `tools` that are no list of objects;
    null is none."""
    tools = [] if item.get("tools") is None else item["tools"]
    require(isinstance(tools, list), f"{path}.tools".lstrip("."), "must be a list of tools")
    for i, tool in enumerate(tools):
        where = f"{path}.tools[{i}]".lstrip(".")
        require(isinstance(tool, dict), where, "must be an object")
        if tool.get("type") == "namespace":
            yield from _flat(where, tool, tool)
        else:
            yield where, namespace, tool


def _client_tool(namespace: Json | None, tool: Json) -> ClientTool:
    kind = str(tool.get("type"))
    name = kind if kind in BUILT_IN else str(tool.get("name"))
    return ClientTool(name, str(namespace.get("name")) if namespace else None, kind)


def _is_leading(placed: tuple[str, Json]) -> bool:
    """Whether an item may stand in front of the conversation: tools that it adds are then listed. placed: its
    path and the item."""
    _path, item = placed
    kind = item.get("type") or "message"
    return kind == "additional_tools" or (kind == "message" and item.get("role") in SYSTEM_ROLES)


def _is_client_search(tool: Json) -> bool:
    return tool.get("type") == "tool_search" and tool.get("execution") == "client"


def _is_hosted(tool: Json) -> bool:
    """Whether OpenAI runs the tool. Such tools are a shell whose `environment` has a type other than local, a
    search whose `execution` is not client, and all types but function, custom and those in BUILT_IN."""
    kind = tool.get("type")
    if kind == "shell":
        environment = tool.get("environment")
        return isinstance(environment, dict) and environment.get("type") != "local"
    if kind == "tool_search":
        return not _is_client_search(tool)
    return kind not in ("function", "custom", *BUILT_IN)


def _chat_form(path: str, tool: Json) -> Json:
    """Returns a tool in a chat's form. Raises ApiError for a name or a description that is no string.
    Example: {"type": "custom", "name": "f"} becomes {"type": "custom", "custom": {"name": "f"}}. A tool in
    BUILT_IN becomes a function, with the description and the parameters of `tool`, if it has any, in place of
    this server's. Fields that a chat does not have are left out."""
    kind = tool["type"]
    for key in ("name", "description"):
        require(isinstance(tool.get(key, ""), str | None), f"{path}.{key}", "must be a string")
    if kind in BUILT_IN:
        own = {key: tool[key] for key in ("description", "parameters") if tool.get(key)}
        return {"type": "function", "function": {"name": kind} | BUILT_IN[kind].definition | own}
    own = ["format"] if kind == "custom" else ["parameters", *OTHER_SCHEMAS]
    keys = ("name", "description", *own, "strict")
    return without_nulls({"type": kind, kind: {key: tool.get(key) for key in keys}})
