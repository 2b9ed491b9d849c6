"""`/v1/responses`: a request becomes a chat, and the chat's text becomes output items.

`responses` makes the chat, whose errors get the names that its fields have in a Responses request.
`ResponsesWriter` writes the response, whole or as events.

Source of the shapes and of the order of events: OpenAI's API reference (responses, streaming events).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from api import client_tools, fields
from api.client_tools import Definition
from api.content import ContentReader, needed, omitted
from api.conversation import ChatRequest, Message, arguments_of, prepare_chat
from api.errors import OPENAI, ApiError, invalid, named_event
from api.fields import FieldNames, Json
from api.normalise import SYSTEM_ROLES
from api.openai import OpenAIResponseWriter, TokenLogprob, Usage
from api.prepared_request import PreparedRequest, Served, ids_of
from api.reasoning import seal, unseal
from api.response_store import OwnedResponses, StoredResponse, item_id, new_key, response_id
from api.response_writer import GeneratedSequence, ResponseWriter
from api.tools import ADDED_TOOLS, custom_input, definitions
from api.types import U32, AtLeastOne, SamplingOptions, encode
from text import output_parser
from text.output_parser import Arguments, CallBegin, Content, Reasoning
from text.stream import Piece

REJECTED_FIELDS = {
    "conversation": "is not supported; use `previous_response_id`",
    "background": "is not supported",
    "prompt": "is not supported",
}
SUMMARIZE = (
    "Summarize this conversation for an assistant that continues it without having seen it: what the user "
    "asked for, what was done and found out, decisions, open questions, and the names, numbers and code that "
    "are still needed. Write the summary only."
)
MAX_SUMMARY_TOKENS = 1_000
SUMMARY = "Summary of the conversation so far:\n{}"
ADDING_ITEMS = ("additional_tools", "tool_search_output")
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"


class TextConfig(Struct, omit_defaults=True):
    """`text` of a Responses request; `format` is `response_format` of a chat, without the level
    `json_schema`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, omit_defaults=True):
    """`effort` goes to the chat template. A `summary` of any kind is the whole reasoning; `generate_summary`
    is its older name. `context` and `mode` change nothing."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesToolChoice(Struct, omit_defaults=True):
    """One function of `tools`, or with the type allowed_tools some of them and a `mode`."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesFields(SamplingOptions, kw_only=True):
    """What a request may set and its response repeats, except for the fields in NOT_REPEATED;
    REJECTED_FIELDS has those that are not supported."""

    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    top_logprobs: U32 | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: U32 | None = None  # of tools that OpenAI runs


class ResponsesRequest(ResponsesFields, kw_only=True):
    """Body of `POST /v1/responses`. The items of `input` are of the types in ITEMS; others are skipped."""

    input: str | list[dict[str, Any]]
    model: str | None = None  # ignored: one model is served
    stream: bool | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokens(Struct):
    """The response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class CompactRequest(Struct, kw_only=True):
    """Body of `POST /v1/responses/compact`."""

    model: str  # ignored: one model is served
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


class Compaction(Struct, tag="compaction"):
    """A summary, in an opaque form."""

    id: str
    encrypted_content: str


class OutputText(Struct, tag="output_text"):
    text: str = ""
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text"):
    text: str = ""


class SummaryText(Struct, tag="summary_text"):
    text: str = ""


class OutputItem(Struct, kw_only=True):
    id: str
    status: str = "in_progress"


class OutputMessage(OutputItem, tag="message"):
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(OutputItem, tag="reasoning"):
    """`encrypted_content` and `summary` are there if the request asks for them."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(OutputItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomToolCall(OutputItem, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


class BuiltInCall(OutputItem):
    """The call of a tool that OpenAI defines and the client runs. BUILT_IN says which field has its
    arguments."""

    call_id: str


class ShellCall(BuiltInCall, tag="shell_call"):
    action: Json = {}


class LocalShellCall(BuiltInCall, tag="local_shell_call"):
    action: Json = {}


class ApplyPatchCall(BuiltInCall, tag="apply_patch_call"):
    operation: Json = {}


class ToolSearchCall(BuiltInCall, tag="tool_search_call"):
    arguments: Json = {}
    execution: str = "client"


class ComputerCall(BuiltInCall, tag="computer_call"):
    """`action` is for the tool `computer_use_preview`, `actions` for `computer`."""

    action: Json | UnsetType = UNSET
    actions: list[Json] | UnsetType = UNSET
    pending_safety_checks: list[Json] = []


AnyOutputItem = (
    OutputMessage
    | OutputReasoning
    | FunctionCall
    | CustomToolCall
    | ShellCall
    | LocalShellCall
    | ApplyPatchCall
    | ToolSearchCall
    | ComputerCall
)


class BuiltIn(NamedTuple):
    """A tool that OpenAI defines and the client runs: a function for the model, whose call is an item.

    field: of the item. It has the arguments, with the `defaults` of those that the model left out; or it is
    the one argument of its name.
    """

    definition: Callable[[Json], Definition]
    item: type[BuiltInCall]
    prefix: str  # of the item's ids
    field: str
    defaults: Json
    is_argument: bool = False

    def written(self, arguments: Json) -> Any:
        """The arguments of a call as the field of its item."""
        if self.is_argument:
            return arguments.get(self.field, [])
        return self.defaults | arguments

    def read(self, value: Any) -> Json:
        """The arguments in the field of an item, as the model wrote them: without the defaults, in the order
        of the schema, which SDKs change."""
        if self.is_argument:
            return {self.field: value}
        written = {name: given for name, given in value.items() if given != self.defaults.get(name)}
        order = [*self.definition({}).parameters["properties"], *written]
        return {name: written[name] for name in order if name in written}


# By type, which is also the name of the function.
BUILT_IN = {
    "shell": BuiltIn(
        client_tools.shell,
        ShellCall,
        "sh",
        "action",
        {"commands": [], "timeout_ms": None, "max_output_length": None},
    ),
    "local_shell": BuiltIn(
        client_tools.local_shell,
        LocalShellCall,
        "lsh",
        "action",
        {"type": "exec", "command": [], "env": {}},
    ),
    "apply_patch": BuiltIn(
        client_tools.apply_patch, ApplyPatchCall, "apc", "operation", {"path": "", "diff": ""}
    ),
    "tool_search": BuiltIn(client_tools.tool_search, ToolSearchCall, "tsc", "arguments", {}),
    "computer": BuiltIn(client_tools.computer_actions, ComputerCall, "cu", "actions", {}, True),
    "computer_use_preview": BuiltIn(client_tools.computer_use_preview, ComputerCall, "cu", "action", {}),
}


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ResponsesUsage:
        return cls(
            usage.prompt_tokens,
            {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
            usage.completion_tokens,
            {"reasoning_tokens": reasoning_tokens},
            usage.total_tokens,
        )


class ResponsesResponse(ResponsesFields, kw_only=True):
    """The body of a whole response; in a stream, the state of the response at its beginning and at its
    end."""

    id: str
    object: str
    created_at: int
    completed_at: int | None = None
    status: str
    model: str
    error: None = None  # a failed request has no response
    incomplete_details: dict[str, str] | None = None
    output: list[AnyOutputItem] = msgspec.field(default_factory=list)
    usage: ResponsesUsage | None = None


class CompactedConversation(Struct, kw_only=True):
    """The response of `POST /v1/responses/compact`."""

    id: str
    object: str = "response.compaction"
    created_at: int
    output: list[Compaction]
    usage: ResponsesUsage


# The response's values of fields that the request leaves out.
DEFAULTS: dict[str, Any] = {
    "store": False,
    "background": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "service_tier": "default",
    "text": TextConfig(),
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "metadata": {},
    "truncation": "disabled",
    "top_logprobs": 0,
}
# vLLM's sampling fields and others that OpenAI's response does not have.
NOT_REPEATED = set(SamplingOptions.__struct_fields__) - DEFAULTS.keys()
FUNCTION_KEYS = {"description": None, "parameters": None, "strict": False}
SCHEMA_KEYS = {"description": None, "strict": False}
# How text is written: the type and the prefix of the ids of its item, and the type of its content.
TEXTS = {
    Content: (OutputMessage, "msg", OutputText),
    Reasoning: (OutputReasoning, "rs", ReasoningText),
}


class ClientTool(NamedTuple):
    """A tool that the client runs; a built-in one has its type as its name."""

    name: str
    namespace: str | None = None
    kind: str = "function"


def responses(data: Json, served: Served) -> ResponseWriter:
    request = fields.read(data, ResponsesRequest)
    conversation = Conversation.of(request, served.responses)
    tools = ResponsesTools(request, conversation)
    prepared = _prepare(request, conversation, tools, served)
    request.store = request.store is not False and served.responses.is_on
    own_input = encode(conversation.own) if request.store else b""
    return ResponsesWriter(prepared, served, request, tools, own_input)


def input_tokens(data: Json, served: Served) -> InputTokens:
    request = fields.read(data, ResponsesRequest)
    conversation = Conversation.of(request, served.responses)
    prepared = _prepare(request, conversation, ResponsesTools(request, conversation), served)
    return InputTokens(len(ids_of(prepared, served)))


def compact(data: Json, served: Served) -> ResponseWriter:
    """The model summarizes the conversation."""
    given = fields.read(data, CompactRequest)
    request = ResponsesRequest(
        input=given.input,
        instructions=given.instructions,
        previous_response_id=given.previous_response_id,
        reasoning=ReasoningConfig("none"),
        max_output_tokens=MAX_SUMMARY_TOKENS,
        temperature=0,
    )
    conversation = Conversation.of(request, served.responses)
    conversation.own.append({"role": "user", "content": SUMMARIZE})
    prepared = _prepare(request, conversation, ResponsesTools(request, conversation), served)
    return CompactionWriter([prepared], served)


def _prepare(
    request: ResponsesRequest, conversation: Conversation, tools: ResponsesTools, served: Served
) -> PreparedRequest:
    for name, why in REJECTED_FIELDS.items():
        if getattr(request, name):
            raise invalid(name, why)
    if request.truncation not in (None, "disabled", "auto"):
        raise invalid("truncation", "must be auto or disabled", given=request.truncation[:40])
    paths, messages = _messages(request, conversation, tools)
    chat = ChatRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=bool(request.top_logprobs) or LOGPROBS in (request.include or []),
        top_logprobs=request.top_logprobs,
        response_format=_response_format(request.text and request.text.format),
        tools=tools.listed or None,
        tool_choice=tools.choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        stream=request.stream,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
        **{name: getattr(request, name) for name in SamplingOptions.__struct_fields__},
    )
    names = FieldNames(
        messages=paths,
        tools=tools.paths,
        prompt="input",
        limit="max_output_tokens",
        logprobs="top_logprobs",
        format="text.format",
        schema="",
        nests_tools=False,
        allowed_tools="",
    )
    return prepare_chat(chat, served, names, tools.found)


class Conversation(NamedTuple):
    """before: the items of the responses that the request continues; own: those of its `input`, with the
    stored items that it refers to."""

    before: list[Json]
    own: list[Json]

    @classmethod
    def of(cls, request: ResponsesRequest, stored: OwnedResponses) -> Conversation:
        """Raises ApiError for items that are not stored."""
        previous = request.previous_response_id
        before = stored.conversation(previous) if previous else []
        if isinstance(request.input, str):
            return cls(before, [{"role": "user", "content": request.input}])
        own: list[Json] = []
        for i, item in enumerate(request.input):
            path = f"input[{i}]"
            if _kind(path, item) == "item_reference":
                item = stored.item(f"{path}.id", needed(path, item, "id", str))
            own.append(item)
        return cls(before, own)

    @property
    def items(self) -> Iterator[tuple[str, Json]]:
        """Each item with its path in the request."""
        for i, item in enumerate(self.before):
            yield f"previous_response_id[{i}]", item
        for i, item in enumerate(self.own):
            yield f"input[{i}]", item


class ResponsesTools:
    """The tools of a request in a chat's form. Those that OpenAI runs are left out.

    `listed` are for the template's list: `tools`, and `additional_tools` in front of the conversation.
    `found` are those that later items add: they may be called, too, but their definitions stand at the place
    of the item, so that a tool search leaves the prefix as it is. Others are deferred (`defer_loading`) until
    an item adds them, unless OpenAI would search them.
    """

    def __init__(self, request: ResponsesRequest, conversation: Conversation):
        self.listed: list[Json] = []
        self.found: list[Json] = []
        self.paths: list[str] = []  # of these in the request
        self.left_out: set[str] = set()  # types
        self._named: dict[str, ClientTool] = {}  # by the name that the model calls
        given = {"": {"tools": request.tools, "type": "additional_tools"}}
        given |= {path: item for path, item in conversation.items if item.get("type") in ADDING_ITEMS}
        leading = itertools.takewhile(lambda each: _is_leading(each[1]), conversation.items)
        self._leading = {"", *(path for path, _item in leading)}
        offered = [tool for path, item in given.items() for tool in _flat(path, item.get("tools"))]
        self._name(offered)
        searches = [tool for _path, _namespace, tool in offered if tool.get("type") == "tool_search"]
        self._defers = not searches or any(map(_is_client_search, searches))
        known: set[str] = set()
        for path, item in given.items():
            for where, tool in self._added(path, item):
                name = tool[tool["type"]].get("name", "")
                if name in known and path:  # added again
                    continue
                known.add(name)
                self.paths.append(where)
                (self.listed if path in self._leading else self.found).append(tool)
        self._deferred = self._named.keys() - known

    def of(self, name: str) -> ClientTool:
        """The tool that the model calls by this name."""
        return self._named.get(name) or ClientTool(name)

    def name_of(self, name: str, namespace: str | None) -> str:
        """The name by which the model calls a tool."""
        for own, tool in self._named.items():
            if (tool.name, tool.namespace) == (name, namespace):
                return own
        return name

    def added(self, path: str, item: Json) -> str:
        """The definitions of the tools that an item adds to those that are listed."""
        if path in self._leading:
            return ""
        return definitions([tool for _path, tool in self._added(path, item)])

    def choice(self, given: str | ResponsesToolChoice | None) -> str | dict[str, Any] | None:
        """`tool_choice` in a chat's form."""
        if not isinstance(given, ResponsesToolChoice):
            return given
        if given.type in self.left_out:
            detail = "names a tool that this server does not run"
            raise invalid("tool_choice.type", detail, given=given.type[:40])
        if given.type == "allowed_tools":
            known = [tool for tool in given.tools or [] if str(tool.get("type")) not in self.left_out]
            names = [tool.get("name") or tool.get("type") for tool in known]
            named = [{"function": {"name": name}} for name in names if str(name) not in self._deferred]
            return {"type": given.type, given.type: {"mode": given.mode or "auto", "tools": named}}
        if given.type not in ("function", "custom", *BUILT_IN):
            detail = f"must be function, custom, {', '.join(BUILT_IN)} or allowed_tools"
            raise invalid("tool_choice.type", detail, given=given.type[:40])
        name = given.type if given.type in BUILT_IN else given.name
        if name in self._deferred:
            detail = "names a tool that is deferred (`defer_loading`); a `tool_search_output` has to add it"
            raise invalid("tool_choice.name", detail, given=name[:40])
        return {"type": "function", "function": {"name": name}}

    def _name(self, offered: list[tuple[str, Json | None, Json]]) -> None:
        """Gives each tool its name for the model: with its namespace where two have the same."""
        known = dict.fromkeys(_client_tool(namespace, tool) for _path, namespace, tool in offered)
        names = Counter(tool.name for tool in known)
        for tool in known:
            is_own = tool.namespace is None or names[tool.name] == 1
            self._named[tool.name if is_own else f"{tool.namespace}__{tool.name}"] = tool

    def _added(self, path: str, item: Json) -> Iterator[tuple[str, Json]]:
        """Each of an item's tools in a chat's form, with its path. The description of a namespace stands in
        front of that of its first tool."""
        defers = self._defers and item["type"] != "tool_search_output"
        described: set[str | None] = {None}
        for where, namespace, tool in _flat(path, item.get("tools")):
            client_tool = _client_tool(namespace, tool)
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


def _flat(path: str, tools: Any) -> Iterator[tuple[str, Json | None, Json]]:
    """Each of an object's `tools` with its path and its namespace."""
    path = f"{path}.tools".lstrip(".")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        if tool.get("type") != "namespace":
            yield f"{path}[{i}]", None, tool
            continue
        for where, _namespace, inner in _flat(f"{path}[{i}]", tool.get("tools")):
            yield where, tool, inner


def _client_tool(namespace: Json | None, tool: Json) -> ClientTool:
    kind = str(tool.get("type"))
    name = kind if kind in BUILT_IN else str(tool.get("name"))
    return ClientTool(name, str(namespace.get("name")) if namespace else None, kind)


def _is_leading(item: Json) -> bool:
    """Whether an item may stand in front of the conversation."""
    return item.get("type") == "additional_tools" or item.get("role") in SYSTEM_ROLES


def _is_client_search(tool: Json) -> bool:
    return tool.get("type") == "tool_search" and tool.get("execution") == "client"


def _is_hosted(tool: Json) -> bool:
    """Whether OpenAI runs the tool: in a container of its own, or always."""
    kind = tool.get("type")
    if kind == "shell":
        environment = tool.get("environment")
        return isinstance(environment, dict) and environment.get("type") != "local"
    if kind == "tool_search":
        return not _is_client_search(tool)
    return kind not in ("function", "custom", *BUILT_IN)


def _chat_form(path: str, tool: Json) -> Json:
    """A tool in a chat's form, which has its fields one level deeper. Raises ApiError."""
    kind = tool["type"]
    for key in ("name", "description"):
        if not isinstance(tool.get(key, ""), str | None):
            raise invalid(f"{path}.{key}", "must be a string")
    if kind in BUILT_IN:
        return {"type": "function", "function": {"name": kind, **BUILT_IN[kind].definition(tool)._asdict()}}
    keys = ("name", "description", "format" if kind == "custom" else "parameters", "strict")
    return {"type": kind, kind: {key: tool[key] for key in keys if tool.get(key) is not None}}


def _messages(
    request: ResponsesRequest, conversation: Conversation, tools: ResponsesTools
) -> tuple[list[str], list[Message]]:
    """The messages of the chat and the path of each in the request."""
    reader = ItemReader(tools)
    paths: list[str] = []
    messages: list[Message] = []
    if request.instructions:
        paths.append("instructions")
        messages.append(Message("system", request.instructions))
    for path, item in conversation.items:
        kind = _kind(path, item)
        message = reader.part(path, kind, item)
        if isinstance(message, str):  # text of a tool that OpenAI ran, or a part without its message
            role = "user" if kind.startswith("input_") else "assistant"
            message = Message(role, message) if message else None
        if message is None:
            continue
        if _continues(messages, message):
            messages[-1] = _joined(messages[-1], message)
        else:
            paths.append(path)
            messages.append(message)
    reader.log_skipped()
    if request.input and not messages:
        raise invalid("input", "needs an item that the model can read, such as a message")
    return paths, messages


def _kind(path: str, item: Json) -> str:
    """The type of an item; messages and references may have none."""
    if item.get("type") is not None:
        return needed(path, item, "type", str)
    return "item_reference" if "id" in item and not item.keys() & {"role", "content"} else "message"


def _continues(messages: list[Message], message: Message) -> bool:
    """Whether reasoning, text and calls of one answer become one message."""
    if not messages or messages[-1].role != "assistant" or message.role != "assistant":
        return False
    last = messages[-1]
    return bool(message.tool_calls) or (last.content is None and not last.tool_calls)


def _joined(one: Message, other: Message) -> Message:
    thoughts = [each.reasoning_content for each in (one, other) if each.reasoning_content]
    return Message(
        "assistant",
        content=other.content if one.content is None else one.content,
        tool_calls=[*(one.tool_calls or []), *(other.tool_calls or [])] or None,
        reasoning_content="\n".join(thoughts) or None,
    )


class ItemReader(ContentReader[Message]):
    """Reads the items of a request and their parts: messages, and texts."""

    def __init__(self, tools: ResponsesTools):
        super().__init__(ITEMS)
        self.tools = tools


def _message(reader: ItemReader, path: str, item: Json) -> Message:
    role = needed(path, item, "role", str)
    return Message(role, reader.text(f"{path}.content", needed(path, item, "content"), ""))


def _reasoning(reader: ItemReader, path: str, item: Json) -> Message | None:
    name = "content" if item.get("content") else "summary"
    thoughts = reader.text(f"{path}.{name}", item.get(name) or "", "")
    thoughts = thoughts or unseal(item.get("encrypted_content"))
    return Message("assistant", reasoning_content=thoughts) if thoughts else None


def _compaction(_reader: ItemReader, _path: str, item: Json) -> Message | None:
    summary = unseal(item.get("encrypted_content"))
    return Message("user", SUMMARY.format(summary)) if summary else None


def _function_call(reader: ItemReader, path: str, item: Json) -> Message:
    return _call(reader, path, item, arguments_of(f"{path}.arguments", item.get("arguments")))


def _custom_call(reader: ItemReader, path: str, item: Json) -> Message:
    return _call(reader, path, item, {"input": needed(path, item, "input", str)})


def _built_in_call(kind: str) -> Callable[[ItemReader, str, Json], Message]:
    """Reads the call of a tool that OpenAI defines and the client runs."""
    row = BUILT_IN[kind]

    def read(reader: ItemReader, path: str, item: Json) -> Message:
        value = needed(path, item, row.field, list if row.is_argument else dict)
        return _call(reader, path, item | {"name": kind}, row.read(value))

    return read


def _tool_search_call(reader: ItemReader, path: str, item: Json) -> Message | None:
    if item.get("call_id") is None:
        return None  # OpenAI ran it
    return _built_in_call("tool_search")(reader, path, item)


def _computer_call(reader: ItemReader, path: str, item: Json) -> Message:
    kind = "computer_use_preview" if item.get("actions") is None else "computer"
    return _built_in_call(kind)(reader, path, {"action": {}} | item)


def _call(reader: ItemReader, path: str, item: Json, arguments: Json) -> Message:
    name = reader.tools.name_of(needed(path, item, "name", str), item.get("namespace"))
    function = {"name": name, "arguments": arguments}
    call = {"id": needed(path, item, "call_id", str), "type": "function", "function": function}
    return Message("assistant", tool_calls=[call])


def _output(reader: ItemReader, path: str, item: Json) -> Message:
    return _result(path, item, reader.text(f"{path}.output", needed(path, item, "output"), ""))


def _result(path: str, item: Json, text: str) -> Message:
    return Message("tool", text, tool_call_id=needed(path, item, "call_id", str))


def _local_shell_output(reader: ItemReader, path: str, item: Json) -> Message:
    return _output(reader, path, {"call_id": item.get("id")} | item)


def _shell_output(reader: ItemReader, path: str, item: Json) -> Message:
    texts: list[str] = []
    for i, chunk in enumerate(needed(path, item, "output", list)):
        where = f"{path}.output[{i}]"
        texts.append(reader.fields(where, chunk, "stdout? stderr?"))
        outcome = needed(where, chunk, "outcome", dict)
        if outcome.get("type") == "timeout":
            texts.append("timed out")
        elif outcome.get("exit_code"):
            texts.append(f"exit code {outcome['exit_code']}")
    return _result(path, item, "\n".join(filter(None, texts)))


def _patch_output(reader: ItemReader, path: str, item: Json) -> Message:
    return _result(path, item, reader.fields(path, item, "status? output?"))


def _found_tools(reader: ItemReader, path: str, item: Json) -> Message | None:
    """The definitions of the tools that a search found."""
    if item.get("call_id") is None:
        return _additional_tools(reader, path, item)  # OpenAI ran it
    return _result(path, item, reader.tools.added(path, item))


def _additional_tools(reader: ItemReader, path: str, item: Json) -> Message | None:
    added = reader.tools.added(path, item)
    return Message("system", ADDED_TOOLS + added) if added else None


def _file_search(reader: ItemReader, path: str, item: Json) -> str:
    results = needed(path, item, "results", list) if item.get("results") is not None else []
    found = enumerate(results)
    return "\n".join(reader.fields(f"{path}.results[{i}]", one, "filename? text?") for i, one in found)


# The readable types of items, and of what is in them.
ITEMS = {
    "message": _message,
    "reasoning": _reasoning,
    "compaction": _compaction,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "local_shell_call": _built_in_call("local_shell"),
    "local_shell_call_output": _local_shell_output,
    "shell_call": _built_in_call("shell"),
    "shell_call_output": _shell_output,
    "apply_patch_call": _built_in_call("apply_patch"),
    "apply_patch_call_output": _patch_output,
    "computer_call": _computer_call,
    "computer_call_output": _output,
    "tool_search_call": _tool_search_call,
    "tool_search_output": _found_tools,
    "additional_tools": _additional_tools,
    **dict.fromkeys(["input_text", "output_text", "text", "summary_text", "reasoning_text"], "text"),
    "refusal": "refusal",
    **dict.fromkeys(["input_image", "computer_screenshot", "image"], omitted("image")),
    "input_file": omitted("file"),
    "input_audio": omitted("audio"),
    # The results of tools that OpenAI ran.
    "file_search_call": _file_search,
    "code_interpreter_call": "code? outputs?",
    "logs": "logs?",
    "mcp_call": "output?",
    "program": "code?",
    "program_output": "result?",
}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in a chat's form, which has a JSON schema one level deeper."""
    if not given or given.get("type") != "json_schema":
        return given
    if given.get("schema") is None:
        raise invalid("text.format", "of the type json_schema needs `schema`")
    return {"type": "json_schema", "json_schema": given}


def _repeated(request: ResponsesRequest, defaults: dict[str, Any]) -> dict[str, Any]:
    """The request's fields as its response has them: with defaults, and all keys that OpenAI's has."""
    repeated: dict[str, Any] = {}
    for name in ResponsesFields.__struct_fields__:
        value = getattr(request, name)
        if name in NOT_REPEATED:
            value = UNSET
        elif value is None:
            value = defaults.get(name)
        repeated[name] = value
    repeated["tools"] = [
        FUNCTION_KEYS | tool if tool.get("type") == "function" else tool for tool in repeated["tools"]
    ]
    text = repeated["text"]
    form = text.format or {"type": "text"}
    if form.get("type") == "json_schema":
        form = SCHEMA_KEYS | form
    repeated["text"] = TextConfig(form, text.verbosity)
    return repeated


class ResponsesWriter(OpenAIResponseWriter):
    """The response is built item by item as the text grows, streamed or not."""

    def __init__(
        self,
        prepared: PreparedRequest,
        served: Served,
        request: ResponsesRequest,
        tools: ResponsesTools,
        own_input: bytes = b"",
    ):
        """own_input: the items of the request as JSON, if the response is to be stored."""
        super().__init__([prepared], served, request.stream)
        self.left_out = tools.left_out
        self._tools = tools
        self._own_input = own_input
        self._stored = served.responses
        self._key = new_key()
        self._parser_config = prepared.parser_config
        self._wants_logprobs = prepared.logprobs
        self._parser = self._parser_config.parser()
        reasoning = request.reasoning or ReasoningConfig()
        self._wants_summary = bool(reasoning.summary or reasoning.generate_summary)
        self._wants_sealed = SEALED_REASONING in (request.include or [])
        self._events = 0
        self._arguments = ""  # of the newest call of a custom tool
        self._logprobs_read: list[TokenLogprob] = []  # of text that has not been written yet
        self._response = ResponsesResponse(
            **_repeated(request, DEFAULTS | served.info.sampling_defaults),
            id=response_id(self._key),
            object="response",
            created_at=int(time.time()),
            status="in_progress",
            model=self.info.model_name,
        )

    def whole(self, sequences: list[GeneratedSequence]) -> ResponsesResponse:
        (sequence,) = sequences
        self._parser = self._parser_config.of_output(sequence.pieces, sequence.is_truncated).parser()
        for _ in self._read(sequence, sequence.pieces):
            pass
        return self._complete(sequences)

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        # One at a time: the next one changes what it holds.
        return b"".join(map(_encode, self._read(sequence, pieces)))

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        response = self._complete(sequences)
        return _encode(self._event(f"response.{response.status}", response=response))

    def failure(self, error: ApiError) -> bytes:
        """OpenAI's clients look for `error`; the documented fields are there, too."""
        detail = msgspec.to_builtins(error.shaped(OPENAI).body(error).error)
        return _encode(self._event("error", **detail | {"type": "error"}, error=detail))

    def _complete(self, sequences: list[GeneratedSequence]) -> ResponsesResponse:
        response = self._response
        usage = self._usage(sequences)
        is_truncated = sequences[0].is_truncated
        response.completed_at = int(time.time())
        response.status = "incomplete" if is_truncated else "completed"
        response.incomplete_details = {"reason": "max_output_tokens"} if is_truncated else None
        response.usage = ResponsesUsage.of(usage, self._parser.reasoning_tokens)
        if response.store:  # before the client knows its end
            response.store = self._save()
        return response

    def _save(self) -> bool:
        """Whether the response is stored from now on."""
        response = self._response
        output = encode([_without_logprobs(item) for item in response.output])
        previous_id = response.previous_response_id
        return self._stored.save(
            StoredResponse(response.id, previous_id, self._own_input, output, encode(response))
        )

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """The events that `pieces` add; each has to be used before the next one is made."""
        if not self._events:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        for piece in pieces:
            if self._wants_logprobs and not piece.special:
                self._logprobs_read.append(self._token_logprob(piece))
            for part in self._parser.read(piece):
                yield from self._take(part)
        if sequence.finish_reason is not None:
            for part in self._parser.finish(sequence.is_truncated):
                yield from self._take(part)
            if self._newest is None:
                yield from self._take(Content(""))  # clients expect a message
            yield from self._end_item(is_truncated=sequence.is_truncated or self._parser.is_truncated)

    def _bytes(self, token_id: int, text: str, cut: int = 0) -> list[int]:
        return super()._bytes(token_id, text, cut) or []  # the interface has no null here

    @property
    def _newest(self) -> AnyOutputItem | None:
        return self._response.output[-1] if self._response.output else None

    def _take(self, part: output_parser.OutputPart) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs_read
        self._logprobs_read = []
        if isinstance(part, CallBegin):
            yield from self._begin_call(part)
        elif isinstance(part, Arguments) and isinstance(self._newest, (CustomToolCall, BuiltInCall)):
            self._arguments += part.text  # in another form than the item has them
        elif isinstance(part, Arguments):
            self._newest.arguments += part.text
            yield self._item_event("response.function_call_arguments.delta", delta=part.text)
        else:
            kind, prefix, content_kind = TEXTS[type(part)]
            if not isinstance(self._newest, kind):
                yield from self._begin_item(prefix, kind)
                self._newest.content.append(content_kind())
                yield self._item_event(
                    "response.content_part.added", content_index=0, part=self._newest.content[0]
                )
                if self._summarizes:
                    self._newest.summary.append(SummaryText())
                    yield self._summary_event("part.added", part=self._newest.summary[0])
            content = self._newest.content[0]
            content.text += part.text
            if isinstance(content, OutputText):
                content.logprobs += logprobs
            if part.text:
                yield self._text_event("delta", logprobs, delta=part.text)
            if part.text and self._summarizes:
                self._newest.summary[0].text += part.text
                yield self._summary_event("text.delta", delta=part.text)

    def _begin_call(self, part: CallBegin) -> Iterator[dict[str, Any]]:
        tool = self._tools.of(part.name)
        named = {"call_id": part.id, "name": tool.name, "namespace": tool.namespace or UNSET}
        if tool.kind in BUILT_IN:
            row = BUILT_IN[tool.kind]
            yield from self._begin_item(row.prefix, row.item, call_id=part.id)
            self._built_in = row
        elif tool.kind == "custom":
            yield from self._begin_item("ctc", CustomToolCall, **named)
        else:
            yield from self._begin_item("fc", FunctionCall, **named)

    def _begin_item(self, prefix: str, kind: type[OutputItem], **fields: Any) -> Iterator[dict[str, Any]]:
        if self._newest:
            yield from self._end_item()
        item = kind(id=item_id(prefix, self._key, len(self._response.output)), **fields)
        self._response.output.append(item)
        if not isinstance(item, BuiltInCall):  # clients expect its arguments from the beginning
            yield self._item_event("response.output_item.added", item=item)

    def _end_item(self, is_truncated: bool = False) -> Iterator[dict[str, Any]]:
        item = self._newest
        is_broken = isinstance(item, (FunctionCall, CustomToolCall, BuiltInCall)) and self._parser.failed
        if isinstance(item, BuiltInCall):
            yield from self._write_built_in(item)
        elif isinstance(item, CustomToolCall):
            item.input = custom_input(self._arguments)
            yield self._item_event("response.custom_tool_call_input.delta", delta=item.input)
            yield self._item_event("response.custom_tool_call_input.done", input=item.input)
        elif isinstance(item, FunctionCall):
            done = {"name": item.name, "arguments": item.arguments}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            content = item.content[0]
            yield self._text_event("done", getattr(content, "logprobs", []), text=content.text)
            yield self._item_event("response.content_part.done", content_index=0, part=content)
        if self._summarizes:
            yield self._summary_event("text.done", text=item.summary[0].text)
            yield self._summary_event("part.done", part=item.summary[0])
        if isinstance(item, OutputReasoning) and self._wants_sealed:
            item.encrypted_content = seal(item.content[0].text)
        self._arguments = ""
        item.status = "completed"
        if is_truncated or is_broken:
            # The status of a patch has no other value for it.
            item.status = "in_progress" if isinstance(item, ApplyPatchCall) else "incomplete"
        yield self._item_event("response.output_item.done", item=item)

    def _write_built_in(self, item: BuiltInCall) -> Iterator[dict[str, Any]]:
        """The beginning of an item whose arguments are complete."""
        arguments = output_parser.complete_members(self._arguments)
        setattr(item, self._built_in.field, self._built_in.written(arguments))
        yield self._item_event("response.output_item.added", item=item)
        commands = item.action["commands"] if isinstance(item, ShellCall) else []
        for n, command in enumerate(commands if isinstance(commands, list) else ()):
            kind = "response.shell_call_command"
            yield self._item_event(f"{kind}.added", command_index=n, command="")
            yield self._item_event(f"{kind}.delta", command_index=n, delta=command)
            yield self._item_event(f"{kind}.done", command_index=n, command=command)

    def _text_event(self, what: str, logprobs: list[TokenLogprob], **text: str) -> dict[str, Any]:
        if isinstance(self._newest, OutputMessage):
            return self._item_event(
                f"response.output_text.{what}", content_index=0, logprobs=logprobs, **text
            )
        return self._item_event(f"response.reasoning_text.{what}", content_index=0, **text)

    @property
    def _summarizes(self) -> bool:
        """Whether the newest item is reasoning with a summary."""
        return self._wants_summary and isinstance(self._newest, OutputReasoning)

    def _summary_event(self, what: str, **fields: Any) -> dict[str, Any]:
        return self._item_event(f"response.reasoning_summary_{what}", summary_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the newest item."""
        name = {} if "item" in fields else {"item_id": self._newest.id}
        return self._event(kind, output_index=len(self._response.output) - 1, **name, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1} | fields


def _without_logprobs(item: OutputItem) -> OutputItem:
    """An output item for later requests: log-probabilities are large, and nothing that a model reads."""
    if not isinstance(item, OutputMessage):
        return item
    return replace(item, content=[replace(part, logprobs=[]) for part in item.content])


class CompactionWriter(OpenAIResponseWriter):
    """The output is a summary of the conversation, which a later request has in place of its items."""

    def whole(self, sequences: list[GeneratedSequence]) -> CompactedConversation:
        (sequence,) = sequences
        read = sequence.prepared.parser_config.whole(sequence.pieces, sequence.is_truncated)
        key = new_key()
        return CompactedConversation(
            id=response_id(key),
            created_at=int(time.time()),
            output=[Compaction(item_id("cmp", key, 0), seal(read.content))],
            usage=ResponsesUsage.of(self._usage(sequences), read.reasoning_tokens),
        )


def _encode(event: dict[str, Any]) -> bytes:
    return named_event(event["type"], event)
