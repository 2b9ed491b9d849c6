"""`/v1/responses`: a request becomes a chat, and the chat's text becomes output items.

`responses` makes the chat, whose errors get the names that its fields have in a Responses request.
`ResponsesWriter` writes the response, whole or as events.

Source of the shapes and of the order of events: OpenAI's API reference (responses, streaming events).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from api import fields
from api.content import ContentReader, needed, omitted
from api.conversation import ChatRequest, Message, arguments_of, prepare_chat
from api.errors import OPENAI, ApiError, invalid, named_event
from api.fields import FieldNames, Json
from api.openai import OpenAIResponseWriter, TokenLogprob, Usage
from api.prepared_request import PreparedRequest, Served, ids_of
from api.reasoning import seal, unseal
from api.response_store import OwnedResponses, StoredResponse, item_id, new_key, response_id
from api.response_writer import GeneratedSequence, ResponseWriter
from api.types import U32, AtLeastOne, SamplingOptions, encode
from text import output_parser
from text.output_parser import Arguments, CallBegin, Content, Reasoning
from text.stream import Piece

REJECTED_FIELDS = {
    "conversation": "is not supported; use `previous_response_id`",
    "background": "is not supported",
    "prompt": "is not supported",
}
# Characters that truncation can leave of an escaped one, such as \ud83d\ude4.
MAX_PARTIAL_ESCAPE = 12
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SUMMARIZE = (
    "Summarize this conversation for an assistant that continues it without having seen it: what the user "
    "asked for, what was done and found out, decisions, open questions, and the names, numbers and code that "
    "are still needed. Write the summary only."
)
MAX_SUMMARY_TOKENS = 1_000
SUMMARY = "Summary of the conversation so far:\n{}"
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
    output: list[OutputMessage | OutputReasoning | FunctionCall | CustomToolCall] = msgspec.field(
        default_factory=list
    )
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
    """A function or a custom tool of the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


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
        tools=tools.functions or None,
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
        function="",
        allowed_tools="",
    )
    return prepare_chat(chat, served, names)


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
        for item in self.before:
            yield "previous_response_id", item
        for i, item in enumerate(self.own):
            yield f"input[{i}]", item


class ResponsesTools:
    """The tools of a request in a chat's form. Those that OpenAI runs are left out."""

    def __init__(self, request: ResponsesRequest, conversation: Conversation):
        self.functions: list[dict[str, Any]] = []
        self.paths: list[str] = []  # of each function in the request
        self._of_names: dict[str, ClientTool] = {}
        self.left_out: set[str] = set()  # types
        flat = _offered(request, conversation)
        names = Counter(str(tool.get("name")) for _path, _namespace, tool in flat)
        for path, namespace, tool in flat:
            kind = tool.get("type")
            if kind not in ("function", "custom"):
                self.left_out.add(str(kind)[:40])
                continue
            for key in ("name", "description"):
                if not isinstance(tool.get(key, ""), str | None):
                    raise invalid(f"{path}.{key}", "must be a string")
            keys = ("name", "description", "parameters", "strict")
            function = {key: tool[key] for key in keys if tool.get(key) is not None}
            name = tool.get("name")
            if namespace and names[name] > 1:
                function["name"] = f"{namespace}__{name}"
            if kind == "custom":
                function |= _custom(tool)
            self.functions.append({"type": "function", "function": function})
            self.paths.append(path)
            self._of_names[function.get("name", "")] = ClientTool(name, namespace, kind == "custom")

    def of(self, name: str) -> ClientTool:
        """The tool that the model calls by this name."""
        return self._of_names.get(name) or ClientTool(name)

    def name_of(self, name: str, namespace: str | None) -> str:
        """The name by which the model calls a tool."""
        for own, tool in self._of_names.items():
            if (tool.name, tool.namespace) == (name, namespace):
                return own
        return name

    def choice(self, given: str | ResponsesToolChoice | None) -> str | dict[str, Any] | None:
        """`tool_choice` in a chat's form."""
        if not isinstance(given, ResponsesToolChoice):
            return given
        if given.type in self.left_out:
            detail = "names a tool that this server does not run"
            raise invalid("tool_choice.type", detail, given=given.type[:40])
        if given.type == "allowed_tools":
            known = [tool for tool in given.tools or [] if tool.get("type") not in self.left_out]
            named = [{"function": {"name": tool.get("name")}} for tool in known]
            return {"type": given.type, given.type: {"mode": given.mode or "auto", "tools": named}}
        if given.type not in ("function", "custom"):
            detail = "must be function, custom or allowed_tools"
            raise invalid("tool_choice.type", detail, given=given.type[:40])
        return {"type": "function", "function": {"name": given.name}}


def _offered(request: ResponsesRequest, conversation: Conversation) -> list[tuple[str, str | None, Json]]:
    """Each tool of the request with its path and its namespace, then those that its items add."""
    offered = list(_flat("", request.tools))
    known = {(namespace, str(tool.get("name"))) for _path, namespace, tool in offered}
    for item_path, item in conversation.items:
        if item.get("type") not in ("additional_tools", "tool_search_output"):
            continue
        for path, namespace, tool in _flat(item_path, item.get("tools")):
            key = (namespace, str(tool.get("name")))
            if key not in known:
                known.add(key)
                offered.append((path, namespace, tool))
    return offered


def _flat(path: str, tools: Any) -> Iterator[tuple[str, str | None, Json]]:
    """Each of an object's `tools` with its path and its namespace."""
    path = f"{path}.tools".lstrip(".")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        if tool.get("type") != "namespace":
            yield f"{path}[{i}]", None, tool
            continue
        for where, _namespace, inner in _flat(f"{path}[{i}]", tool.get("tools")):
            yield where, str(tool.get("name")), inner


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    """A custom tool as a function of one text; its grammar is in the description, not enforced."""
    described = {"parameters": CUSTOM_INPUT}
    grammar = tool.get("format")
    if isinstance(grammar, dict) and grammar.get("definition"):
        words = f"The input has to match this grammar ({grammar.get('syntax')}):\n{grammar['definition']}"
        described["description"] = "\n".join(filter(None, [tool.get("description"), words]))
    return described


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


def _built_in_call(name: str, field: str) -> Callable[[ItemReader, str, Json], Message | None]:
    """Reads the call of a tool that OpenAI defines and the client runs."""

    def read(reader: ItemReader, path: str, item: Json) -> Message | None:
        if name == "tool_search" and item.get("call_id") is None:
            return None  # OpenAI ran it
        return _call(reader, path, item | {"name": name}, needed(path, item, field, dict))

    return read


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
    """The definitions of the tools that a search of the client found."""
    if item.get("call_id") is None:
        return None  # OpenAI ran it
    lines: list[str] = []
    for _path, namespace, tool in _flat(path, item.get("tools")):
        definition = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
        definition["name"] = reader.tools.name_of(tool.get("name"), namespace)
        lines.append(json.dumps(definition, ensure_ascii=False))
    return _result(path, item, "\n".join(lines))


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
    "local_shell_call": _built_in_call("local_shell", "action"),
    "local_shell_call_output": _local_shell_output,
    "shell_call": _built_in_call("shell", "action"),
    "shell_call_output": _shell_output,
    "apply_patch_call": _built_in_call("apply_patch", "operation"),
    "apply_patch_call_output": _patch_output,
    "tool_search_call": _built_in_call("tool_search", "arguments"),
    "tool_search_output": _found_tools,
    "additional_tools": "",  # which ResponsesTools reads
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
    def _newest(self) -> OutputMessage | OutputReasoning | FunctionCall | CustomToolCall | None:
        return self._response.output[-1] if self._response.output else None

    def _take(self, part: output_parser.OutputPart) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs_read
        self._logprobs_read = []
        if isinstance(part, CallBegin):
            yield from self._begin_call(part)
        elif isinstance(part, Arguments) and isinstance(self._newest, CustomToolCall):
            self._arguments += part.text  # JSON, whose one string is the input
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
        if tool.is_custom:
            self._arguments = ""
            yield from self._begin_item("ctc", CustomToolCall, **named)
        else:
            yield from self._begin_item("fc", FunctionCall, **named)

    def _begin_item(self, prefix: str, kind: type[OutputItem], **fields: Any) -> Iterator[dict[str, Any]]:
        if self._newest:
            yield from self._end_item()
        item = kind(id=item_id(prefix, self._key, len(self._response.output)), **fields)
        self._response.output.append(item)
        yield self._item_event("response.output_item.added", item=item)

    def _end_item(self, is_truncated: bool = False) -> Iterator[dict[str, Any]]:
        item = self._newest
        is_broken = isinstance(item, (FunctionCall, CustomToolCall)) and self._parser.failed
        item.status = "incomplete" if is_truncated or is_broken else "completed"
        if isinstance(item, CustomToolCall):
            item.input = _input_of(self._arguments)
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
        yield self._item_event("response.output_item.done", item=item)

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


def _input_of(arguments: str) -> str:
    """The input of a custom tool in the arguments of its function, which `max_output_tokens` may have
    truncated."""
    ends = [arguments, *(arguments[: len(arguments) - n] + '"}' for n in range(MAX_PARTIAL_ESCAPE))]
    for complete in ends:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(complete)["input"])
            text.encode()  # raises for half of a surrogate pair
            return text
    return ""  # truncated before the input began
