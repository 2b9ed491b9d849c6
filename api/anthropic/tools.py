"""The tools of a request of Anthropic's Messages API, as the functions of a chat, and its choice of them."""

from __future__ import annotations

from api.anthropic.types import AnthropicToolChoice, CountRequest
from api.chats import client_tools
from api.chats.content import needed
from api.chats.tools import definitions
from api.http.errors import invalid
from api.http.fields import Json

HOSTED_SEARCH = "tool_search_tool_"  # what the types of Anthropic's searches begin with
# The tools that Anthropic defines and the client runs, by type, without the date that follows it: each is a
# function.
CLIENT_TOOLS = {
    "bash": client_tools.bash,
    "text_editor": client_tools.text_editor,
    "memory": client_tools.memory,
}


class MessagesTools:
    """The tools of a request in a chat's form. Those that Anthropic runs are left out.

    `listed` are for the template's list. Blocks of the conversation may add others: they may be called, too,
    but their definitions stand at the place of the block, so that a tool search leaves the prefix as it is.
    Until then a tool may be deferred (`defer_loading`), unless Anthropic would search them.
    """

    def __init__(self, request: CountRequest):
        self.listed: list[Json] = []
        self.left_out: set[str] = {"mcp_servers"} if request.mcp_servers else set()  # types
        self._hosted: set[str] = set()  # the names of those that are left out
        self._known: dict[str, tuple[str, Json]] = {}  # the path and the form of each tool, by its name
        self._listed_paths: list[str] = []
        self._found: dict[str, tuple[str, Json]] = {}
        self._removed: set[str] = set()
        tools = request.tools or []
        defers = not any(str(tool.get("type")).startswith(HOSTED_SEARCH) for tool in tools)
        for i, tool in enumerate(tools):
            path = f"tools[{i}]"
            client_tools.reject_computer_use(path, tool)
            form = self._know(path, tool)
            if form and not (defers and tool.get("defer_loading")):
                self.listed.append(form)
                self._listed_paths.append(path)

    @property
    def found(self) -> list[Json]:
        """The tools that blocks have added."""
        return [form for _path, form in self._found.values()]

    @property
    def paths(self) -> list[str]:
        """The paths of the tools that are listed, then of those that are found."""
        return [*self._listed_paths, *(path for path, _form in self._found.values())]

    def add(self, name: str) -> str:
        """The definition of a tool that may be called from here on; the name alone if there is no such
        tool."""
        if name not in self._known:
            return name
        path, form = self._known[name]
        self._removed.discard(name)
        if form not in self.listed:
            self._found[name] = (path, form)
        return definitions([form])

    def define(self, path: str, tool: Json) -> str:
        """As `add`, for a tool that is defined here."""
        form = self._know(path, tool)
        return self.add(form["function"]["name"]) if form else ""

    def remove(self, name: str) -> None:
        """From here on the tool may not be called."""
        self._removed.add(name)

    def choice(self, given: AnthropicToolChoice) -> str | Json:
        """`tool_choice` in a chat's form. Raises ApiError."""
        offered = [*(form["function"]["name"] for form in self.listed), *self._found]
        names = [name for name in offered if name not in self._removed]
        mode = {"auto": "auto", "any": "required", "none": "none"}.get(given.type)
        if mode and (mode == "none" or len(names) == len(offered)):
            return mode
        if mode == "auto" and not names:
            return "none"
        if mode:
            named = [{"function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        if given.type != "tool" or given.name is None:
            detail = "must be auto, any, none, or tool with a `name`"
            raise invalid("tool_choice", detail, given=given.type[:40])
        detail = ""
        if given.name in self._hosted:
            detail = "names a tool that this server does not run"
        elif given.name in self._known and given.name not in names:
            detail = "names a tool that is deferred (`defer_loading`) or removed: no `tool_reference` adds it"
        if detail:
            raise invalid("tool_choice.name", detail, given=given.name[:40])
        return {"type": "function", "function": {"name": given.name}}

    def _know(self, path: str, tool: Json) -> Json | None:
        """A tool in a chat's form; None if Anthropic runs it. Raises ApiError."""
        kind = tool.get("type") or "custom"
        family, _, date = str(kind).rpartition("_")
        if kind == "custom":
            function = _chat_function(path, tool)
        elif date.isdigit() and family in CLIENT_TOOLS:
            definition = CLIENT_TOOLS[family](date, tool)
            function = {"name": needed(path, tool, "name", str), **definition._asdict()}
            if tool.get("strict") is True:
                function["strict"] = True
        else:
            self.left_out.add(str(kind)[:40])
            self._hosted.add(str(tool.get("name")))
            return None
        form = {"type": "function", "function": function}
        self._known[function["name"]] = (path, form)
        return form


def _chat_function(path: str, tool: Json) -> Json:
    """Raises ApiError."""
    function = {
        "name": needed(path, tool, "name", str),
        "parameters": needed(path, tool, "input_schema", dict),
    }
    if tool.get("description") is not None:
        function["description"] = needed(path, tool, "description", str)
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return function
