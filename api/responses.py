"""`/v1/responses`, without stored state: a request becomes a chat, and the chat's text becomes output items.

`_chat_of` makes the chat, whose errors get the names that its fields have in a Responses request.
`ResponsesAnswer` writes the response, whole or as events.

Source of the shapes and of the order of events: OpenAI's API reference (responses, streaming events).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from api import fields
from api.answer import Answer, Sequence
from api.conversation import ChatRequest, Message, Part, chat_job, readable
from api.errors import ApiError, invalid, openai_error
from api.fields import Json
from api.job import Job, Served
from api.openai import OpenAIAnswer, TokenLogprob
from api.types import U32, AtLeastOne, NotNegative, Share, encode
from text import reader
from text.reader import Arguments, CallBegin, Content, Reading, Reasoning
from text.stream import Piece

NO_STATE = "is not supported: this server stores no responses"
NOT_SUPPORTED = {
    "store": NO_STATE,
    "previous_response_id": NO_STATE,
    "conversation": NO_STATE,
    "background": "is not supported",
    "prompt": "is not supported",
    "max_tool_calls": "is not supported",
}
# What each type of item needs. An item of the type reasoning is one of earlier output, which the model does
# not read again.
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
LOGPROBS = "message.output_text.logprobs"
# From the names of a chat's fields to those of this API, in a `param` or in backticks.
OWN_NAMES = {
    r"(^|`)messages\b": r"\1input",
    r"(^|`)(max_completion_tokens|max_tokens)\b": r"\1max_output_tokens",
    r"(^|`)logprobs\b": r"\1top_logprobs",
    r"(^|`)response_format(\.json_schema)?\b": r"\1text.format",
    r"(^|`)(tools\[\d+\]|tool_choice)\.(function|allowed_tools)\b": r"\1\2",
}


class TextConfig(Struct, omit_defaults=True):
    """`text` of a Responses request; `format` is `response_format` of a chat, without the level
    `json_schema`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ToolChoice(Struct, omit_defaults=True):
    """One function of `tools`, or with the type allowed_tools some of them and a `mode`."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesFields(Struct, kw_only=True):
    """What a Responses request may set and its response repeats; responses.py names those that are not
    supported."""

    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_logprobs: U32 | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: U32 | None = None


class InputPart(Part):
    """A part of an item's text: `input_text` or `output_text`."""


class InputItem(Struct):
    """A message (its type may be left out), `function_call`, `function_call_output`, or `reasoning`, which is
    ignored."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesRequest(ResponsesFields, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[InputItem]
    model: str | None = None  # ignored: one model is served
    stream: bool | None = None
    include: list[str] | None = None


class OutputText(Struct, tag="output_text"):
    text: str = ""
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text"):
    text: str = ""


class OutputItem(Struct, kw_only=True):
    id: str
    status: str = "in_progress"


class OutputMessage(OutputItem, tag="message"):
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(OutputItem, tag="reasoning"):
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText] = []


class FunctionCall(OutputItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str = ""


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesResponse(ResponsesFields, kw_only=True):
    """The body of a whole response; in a stream, the state of the response at its beginning and at its
    end."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    error: None = None  # a failed request has no response
    incomplete_details: dict[str, str] | None = None
    output: list[OutputMessage | OutputReasoning | FunctionCall] = []
    usage: ResponsesUsage | None = None


# What a response says of fields that the request leaves out.
DEFAULTS: dict[str, Any] = {
    "store": False,
    "background": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "text": TextConfig({"type": "text"}),
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "metadata": {},
    "truncation": "disabled",
    "top_logprobs": 0,
}
# How text is written: the type and the prefix of the ids of its item, and the type of its content.
TEXTS = {
    Content: (OutputMessage, "msg", OutputText),
    Reasoning: (OutputReasoning, "rs", ReasoningText),
}


def responses(data: Json, served: Served) -> Answer:
    request = fields.read(data, ResponsesRequest)
    chat = _chat_of(request)
    try:
        job = chat_job(chat, served)
    except ApiError as error:
        error.text = _own_names(error.text)
        error.param = error.param and _own_names(error.param)
        raise
    job = replace(
        job,
        prompt_name=_own_names(job.prompt_name),
        limit_name=_own_names(job.limit_name),
        grammar_name=_own_names(job.grammar_name),
    )
    return ResponsesAnswer(job, served, request, wants_logprobs=bool(chat.logprobs))


def _own_names(text: str) -> str:
    """The name of a chat's field, or a message about it, with the names that the fields have in a Responses
    request."""
    for pattern, own in OWN_NAMES.items():
        text = re.sub(pattern, own, text)
    return text


def _chat_of(request: ResponsesRequest) -> ChatRequest:
    """The chat that a request asks for. Raises ApiError for what this server does not do, and for incomplete
    items."""
    for name, why in NOT_SUPPORTED.items():
        if getattr(request, name):
            raise invalid(name, why)
    if request.truncation not in (None, "disabled"):
        raise invalid("truncation", "must be disabled", given=request.truncation[:40])
    tools = request.tools and [_function(f"tools[{i}]", tool) for i, tool in enumerate(request.tools)]
    return ChatRequest(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=bool(request.top_logprobs) or LOGPROBS in (request.include or []),
        top_logprobs=request.top_logprobs,
        response_format=_response_format(request.text and request.text.format),
        tools=tools,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        stream=request.stream,
    )


def _messages(request: ResponsesRequest) -> list[Message]:
    items = request.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    messages = []
    if request.instructions:
        messages.append(Message("system", request.instructions))
    for i, item in enumerate(items):
        _add_item(messages, f"input[{i}]", item)
    return messages


def _add_item(messages: list[Message], path: str, item: InputItem) -> None:
    kind = item.type or "message"
    if kind == "item_reference":
        what = "item_reference is not supported: no items are stored; set `store` to false"
        raise invalid(f"{path}.type", what)
    if kind not in NEEDED:
        raise invalid(f"{path}.type", f"must be one of {', '.join(NEEDED)}", given=kind[:40])
    for field in NEEDED[kind]:
        if getattr(item, field) is None:
            raise invalid(path, f"needs `{field}`")
    if kind == "message":
        role = "system" if item.role == "developer" else item.role  # chat templates know no developer
        messages.append(Message(role, _text(f"{path}.content", item.content)))
    elif kind == "function_call":
        if not messages or messages[-1].role != "assistant":
            messages.append(Message("assistant", tool_calls=[]))
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
    elif kind == "function_call_output":
        output = _text(f"{path}.output", item.output)
        messages.append(Message("tool", output, tool_call_id=item.call_id))


def _text(path: str, content: str | list[InputPart]) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in ("input_text", "output_text") or part.text is None:
            detail = "must be `input_text` or `output_text` with a `text`"
            raise invalid(f"{path}[{i}]", detail, given=part.type[:40])
    return "".join(part.text for part in content)


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in a chat's form, which has a JSON schema one level deeper."""
    if not given or given.get("type") != "json_schema":
        return given
    if given.get("schema") is None:
        raise invalid("text.format", "of the type json_schema needs `schema`")
    return {"type": "json_schema", "json_schema": given}


def _tool_choice(given: str | ToolChoice | None) -> str | dict[str, Any] | None:
    if not isinstance(given, ToolChoice):
        return given
    if given.type == "allowed_tools":
        tools = [_function(f"tool_choice.tools[{i}]", tool) for i, tool in enumerate(given.tools or [])]
        return {"type": given.type, given.type: {"mode": given.mode or "auto", "tools": tools}}
    return _function("tool_choice", {"type": given.type, "name": given.name})


def _function(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A function in a chat's form: what describes it is one level deeper."""
    if tool.get("type") != "function":
        detail = "must be function: this server has no tools of its own"
        raise invalid(f"{path}.type", detail, given=str(tool.get("type"))[:40])
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


class ResponsesAnswer(OpenAIAnswer):
    """The response is built item by item as the text grows, the same way for a stream and for a whole one."""

    def __init__(self, job: Job, served: Served, request: ResponsesRequest, wants_logprobs: bool):
        super().__init__([job], served, request.stream)
        self._reading = job.reading
        self._wants_logprobs = wants_logprobs
        self._reader = self._reading.reader()
        self._events = 0
        self._reasoning_tokens = 0
        self._logprobs_read: list[TokenLogprob] = []  # of text that has not been written yet
        given = {name: getattr(request, name) for name in ResponsesFields.__struct_fields__}
        self._response = ResponsesResponse(
            **{name: DEFAULTS.get(name) if value is None else value for name, value in given.items()},
            id="",  # known when the first event is
            object="response",
            created_at=int(time.time()),
            status="in_progress",
            model=self.info.model_name,
        )

    def whole(self, sequences: list[Sequence]) -> ResponsesResponse:
        (sequence,) = sequences
        probe = self._reading.reader()
        probe.push("".join(readable(piece, self._reading) for piece in sequence.pieces))
        probe.finish()
        if probe.failed:  # then all of it is content, as in a chat
            self._reader = Reading(None, self._reading.thinking).reader()
        for _ in self._read(sequence, sequence.pieces):
            pass
        return self._complete(sequences)

    def events(self, sequence: Sequence, pieces: list[Piece]) -> bytes:
        # One at a time: the next one changes what it holds.
        return b"".join(map(_encode, self._read(sequence, pieces)))

    def closing(self, sequences: list[Sequence]) -> bytes:
        response = self._complete(sequences)
        return _encode(self._event(f"response.{response.status}", response=response))

    def failure(self, error: ApiError) -> bytes:
        """OpenAI's clients look for `error`, the documented fields are beside it."""
        detail = msgspec.to_builtins(openai_error(error).error)
        return _encode(self._event("error", **detail | {"type": "error"}, error=detail))

    def _complete(self, sequences: list[Sequence]) -> ResponsesResponse:
        response = self._response
        usage = self._usage(sequences)
        is_cut = sequences[0].finish_reason == "length"
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = {"reason": "max_output_tokens"} if is_cut else None
        response.usage = ResponsesUsage(
            usage.prompt_tokens,
            {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
            usage.completion_tokens,
            {"reasoning_tokens": self._reasoning_tokens},
            usage.total_tokens,
        )
        return response

    def _read(self, sequence: Sequence, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """The events that `pieces` add; each has to be used before the next one is made."""
        if not self._events:
            self._response.id = f"resp_{self.request_id}"
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        for piece in pieces:
            if self._wants_logprobs and not piece.special:
                self._logprobs_read.append(self._token_logprob(piece))
            for part in self._reader.push(readable(piece, self._reading)):
                yield from self._take(part)
            self._reasoning_tokens += isinstance(self._newest, OutputReasoning)
        if sequence.finish_reason is not None:
            for part in self._reader.finish():
                yield from self._take(part)
            if self._newest is None:
                yield from self._take(Content(""))  # clients expect a message
            yield from self._end_item(is_cut=sequence.finish_reason == "length")

    def _bytes(self, token_id: int, text: str, cut: int = 0) -> list[int]:
        return super()._bytes(token_id, text, cut) or []  # the interface has no null here

    @property
    def _newest(self) -> OutputMessage | OutputReasoning | FunctionCall | None:
        return self._response.output[-1] if self._response.output else None

    def _take(self, part: reader.Part) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs_read
        self._logprobs_read = []
        if isinstance(part, CallBegin):
            yield from self._begin_item("fc", FunctionCall, call_id=part.id, name=part.name)
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
            content = self._newest.content[0]
            content.text += part.text
            if isinstance(content, OutputText):
                content.logprobs += logprobs
            if part.text:
                yield self._text_event("delta", logprobs, delta=part.text)

    def _begin_item(self, prefix: str, kind: type[OutputItem], **fields: Any) -> Iterator[dict[str, Any]]:
        if self._newest:
            yield from self._end_item()
        item = kind(id=f"{prefix}_{self.request_id}_{len(self._response.output)}", **fields)
        self._response.output.append(item)
        yield self._item_event("response.output_item.added", item=item)

    def _end_item(self, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        item = self._newest
        is_broken = isinstance(item, FunctionCall) and self._reader.failed
        item.status = "incomplete" if is_cut or is_broken else "completed"
        if isinstance(item, FunctionCall):
            done = {"name": item.name, "arguments": item.arguments}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            content = item.content[0]
            yield self._text_event("done", getattr(content, "logprobs", []), text=content.text)
            yield self._item_event("response.content_part.done", content_index=0, part=content)
        yield self._item_event("response.output_item.done", item=item)

    def _text_event(self, what: str, logprobs: list[TokenLogprob], **text: str) -> dict[str, Any]:
        if isinstance(self._newest, OutputMessage):
            return self._item_event(
                f"response.output_text.{what}", content_index=0, logprobs=logprobs, **text
            )
        return self._item_event(f"response.reasoning_text.{what}", content_index=0, **text)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the newest item."""
        name = {} if "item" in fields else {"item_id": self._newest.id}
        return self._event(kind, output_index=len(self._response.output) - 1, **name, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1} | fields


def _encode(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n"
