"""The tools of a request of Anthropic's Messages API, as the functions of a chat, and its choice of them."""

from __future__ import annotations

from api.anthropic.types import AnthropicToolChoice, CountRequest
from api.chats import client_tools
from api.chats.content import needed
from api.chats.tools import NOT_RUN, OfferedTools, definitions
from api.http.fields import Json, require
from text.json_schema import without_nulls

MODE_OF_CHOICE = {"auto": "auto", "any": "required", "none": "none"}  # of a chat, by the type of a choice
DEFERRED = "names a tool that is deferred (`defer_loading`) or removed: no `tool_reference` adds it"
OPENAI_TOOL = "is OpenAI's: a tool of this API has a `name`, an `input_schema`, and the type custom or none"
HOSTED_SEARCH = "tool_search_tool_"  # what the types of Anthropic's searches begin with
# The definitions of the tools that Anthropic defines and the client runs, from the date of their version and
# the tool of the request. The keys are their types, without the date that follows.
CLIENT_TOOLS = {
    "bash": lambda _date, _tool: client_tools.BASH,
    "text_editor": client_tools.text_editor,
    "memory": lambda _date, _tool: client_tools.MEMORY,
}


class MessagesTools(OfferedTools):
    """The tools of a request, and those that blocks of its conversation define.

    The constructor raises ApiError for a malformed tool, and for one with which the model would use a
    computer or a browser. A tool with `defer_loading` may be called only after `add`; if the request has a
    search of Anthropic's, it may be called at once.
    """

    def __init__(self, request: CountRequest):
        super().__init__()
        if request.mcp_servers:
            self.left_out.add("mcp_servers")
        self._known: dict[str, tuple[str, Json]] = {}  # the path and the form of each tool, by its name
        self._listed: dict[str, Json] = {}  # the forms of those that are listed, by name
        tools = request.tools or []
        defers = not any(str(tool.get("type")).startswith(HOSTED_SEARCH) for tool in tools)
        for i, tool in enumerate(tools):
            path = f"tools[{i}]"
            client_tools.reject_computer_use(path, tool)
            require(tool.get("type") != "function", f"{path}.type", OPENAI_TOOL)
            name = self._register(path, tool)
            if name and defers and tool.get("defer_loading"):
                self._rejected[name] = DEFERRED
            elif name:
                self.listed.append(self._known[name])
                self._listed[name] = self._known[name][1]

    def add(self, name: str) -> str:
        """Allows calls of a tool from here on; one that is not listed becomes one of `found`. Returns the
        tool's definition, or the name alone if there is no such tool."""
        if name not in self._known:
            return name
        path, form = self._known[name]
        self._rejected.pop(name, None)
        if form != self._listed.get(name):
            self.found[name] = (path, form)
        return definitions([form])

    def define(self, path: str, tool: Json) -> str:
        """Allows calls of a tool that is defined at `path`, and returns its definition; "" if Anthropic runs
        the tool. Raises ApiError for a malformed tool."""
        name = self._register(path, tool)
        return self.add(name) if name else ""

    def remove(self, name: str) -> None:
        """Forbids calls of a tool from here on, until `add` allows them again. Its definition stays in the
        prompt."""
        self._rejected.setdefault(name, DEFERRED)

    def choice(self, given: AnthropicToolChoice) -> str | Json:
        """Returns the `tool_choice` in a chat's form, without tools that may not be called after the blocks
        that have been read. Raises ApiError for an unknown type, and for the name of a tool that may not be
        called. Whether there is a tool of the name is not checked."""
        if given.type in MODE_OF_CHOICE:
            mode = MODE_OF_CHOICE[given.type]
            names = [name for name in self._known if name not in self._rejected]
            if mode == "auto" and not names:
                return "none"
            return mode if mode == "none" else self.only(mode, names)
        detail = "must be auto, any, none, or tool with a `name`"
        is_named = given.type == "tool" and given.name is not None
        require(is_named, "tool_choice", detail, given=given.type[:40])
        return self.one(given.name)

    def _register(self, path: str, tool: Json) -> str | None:
        """Returns the name of a tool, which `add` can find from here on, in place of another tool of this
        name. None: Anthropic runs it; its type is then in `left_out`, and its name may not be chosen. Raises
        ApiError for a tool without a name, and for one of the type custom without an `input_schema`."""
        kind = tool.get("type") or "custom"
        family, _, date = str(kind).rpartition("_")
        if kind == "custom":
            function = {
                "parameters": needed(path, tool, "input_schema", dict),
                "description": tool.get("description"),
            }
        elif date.isdigit() and family in CLIENT_TOOLS:
            function = CLIENT_TOOLS[family](date, tool)
        else:
            self.left_out.add(str(kind)[:40])
            self._rejected[str(tool.get("name"))] = NOT_RUN
            return None
        name = needed(path, tool, "name", str)
        function = {"name": name} | function | {"strict": tool.get("strict")}
        self._known[name] = (path, without_nulls({"type": "function", "function": function}))
        return name
