"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

A request becomes a chat (conversation.py), and the chat's text becomes content blocks, whole or as events.

Source of the shapes and of the order of events: Anthropic's API reference (messages, streaming, errors).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from msgspec import Struct

from api import fields
from api.conversation import IMAGE_OMITTED, ChatRequest, Message, prepare_chat, text_of, visible_text
from api.errors import ANTHROPIC, ApiError, invalid, named_event
from api.fields import FieldNames, Json
from api.prepared_request import PreparedRequest, Served, ids_of
from api.response_writer import GeneratedSequence, ResponseWriter
from api.types import U32, AtLeastOne, NotNegative, Share
from text import output_parser
from text.output_parser import Arguments, CallBegin, Content, Reasoning
from text.stream import Piece

STOP_REASONS = {"length": "max_tokens", "eos_token": "end_turn", "stop_sequence": "stop_sequence"}
# Blocks of tools that Anthropic runs, or that only Anthropic can read.
ANTHROPIC_ONLY_BLOCKS = {
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
}


class AnthropicPart(Struct):
    """A part of the system text or of a tool result; the model reads text only."""

    type: str
    text: str | None = None
    source: dict[str, Any] | None = None  # of an image or a document


class Block(AnthropicPart):
    """A part of a message. Which fields it has depends on its type."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[AnthropicPart] | None = None
    is_error: bool | None = None


class InputMessage(Struct):
    role: str
    content: str | list[Block]


class Tool(Struct):
    """A client's function; tools of other types are Anthropic's own."""

    name: str = ""  # which every function needs
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Struct):
    """`format` is a JSON schema; `effort` is for models that have one."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountRequest(Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: list[InputMessage]
    model: str | None = None  # ignored: one model is served
    system: str | list[AnthropicPart] | None = None
    tools: list[Tool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[dict[str, Any]] | None = None  # whose tools would run at Anthropic's
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: AtLeastOne
    stop_sequences: list[str] | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: U32 | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class TextBlock(Struct, tag="text"):
    text: str = ""


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


class MessagesUsage(Struct):
    """`input_tokens` were prefilled, `cache_read_input_tokens` are from prefix caching."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesResponse(Struct, kw_only=True):
    """The body of a whole response; in a stream, its state at the beginning."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(Struct):
    input_tokens: int


class AnthropicModelCard(Struct):
    id: str
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"
    type: str = "model"


class AnthropicModelList(Struct):
    data: list[AnthropicModelCard]
    first_id: str
    last_id: str
    has_more: bool = False


def messages(data: Json, served: Served) -> ResponseWriter:
    request = fields.read(data, MessagesRequest)
    tools = MessagesTools(request)
    chat, names = _chat_of(request, tools)
    chat.max_completion_tokens = request.max_tokens
    chat.stop = request.stop_sequences
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    return MessagesResponseWriter(prepare_chat(chat, served, names), served, request, tools.left_out)


def count_tokens(data: Json, served: Served) -> TokenCount:
    request = fields.read(data, CountRequest)
    chat, names = _chat_of(request, MessagesTools(request))
    return TokenCount(len(ids_of(prepare_chat(chat, served, names), served)))


def _chat_of(request: CountRequest, tools: MessagesTools) -> tuple[ChatRequest, FieldNames]:
    """The chat of a request, without limits and sampling. Raises ApiError."""
    paths: list[str] = []
    messages: list[Message] = []
    for path, message in _messages(request):
        paths.append(path)
        messages.append(message)
    choice = request.tool_choice or AnthropicToolChoice("auto")
    chat = ChatRequest(
        messages=messages,
        tools=tools.functions or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
        response_format=_response_format(request.output_config),
        chat_template_kwargs=_template_options(request),
    )
    names = FieldNames(
        messages=paths,
        tools=tools.paths,
        limit="max_tokens",
        stop="stop_sequences",
        format="output_config.format",
        schema="",
        function="",
        parameters=".input_schema",
    )
    return chat, names


class MessagesTools:
    """The client's functions in a chat's form. Tools that run on Anthropic's side are left out."""

    def __init__(self, request: CountRequest):
        self.functions: list[dict[str, Any]] = []
        self.paths: list[str] = []  # of each function in the request
        self.left_out: set[str] = {"mcp_servers"} if request.mcp_servers else set()
        chosen = request.tool_choice.name if request.tool_choice else None
        for i, tool in enumerate(request.tools or []):
            if tool.type in (None, "custom"):
                self.functions.append(_function(f"tools[{i}]", tool))
                self.paths.append(f"tools[{i}]")
            elif tool.name == chosen:
                detail = "names a tool that this server does not run"
                raise invalid("tool_choice.name", detail, given=chosen[:40])
            else:
                self.left_out.add(tool.type[:40])


def _messages(request: CountRequest) -> Iterator[tuple[str, Message]]:
    """The messages of the chat, each with its path in the request."""
    if request.system:
        yield "system", Message("system", _text("system", request.system))
    for n, message in enumerate(request.messages):
        path = f"messages[{n}]"
        if isinstance(message.content, str):
            yield path, Message(message.role, message.content)
        elif message.role == "assistant":
            yield path, _assistant(f"{path}.content", message.content)
        else:
            for part in _parts(f"{path}.content", message.role, message.content):
                yield path, part


def _parts(path: str, role: str, blocks: list[Block]) -> Iterator[Message]:
    """The texts and tool results of one message, in their order."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if block.type in ANTHROPIC_ONLY_BLOCKS:
            continue
        if block.type != "tool_result":
            texts.append(_block_text(f"{path}[{i}]", block))
            continue
        if texts:
            yield Message(role, "\n".join(texts))
            texts = []
        text = _text(f"{path}[{i}].content", block.content or "")
        if block.is_error:
            text = f"Error: {text}"
        yield Message("tool", text, tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield Message(role, "\n".join(texts))


def _assistant(path: str, blocks: list[Block]) -> Message:
    message = Message("assistant", "")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            message.reasoning_content = (message.reasoning_content or "") + (block.thinking or "")
        elif block.type == "tool_use":
            if block.name is None:
                raise invalid(f"{path}[{i}]", "needs `name`")
            function = {"name": block.name, "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type not in ANTHROPIC_ONLY_BLOCKS:
            texts.append(_block_text(f"{path}[{i}]", block))
    message.content = "".join(texts)
    message.tool_calls = calls or None
    return message


def _text(path: str, content: str | list[AnthropicPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(f"{path}[{i}]", block) for i, block in enumerate(content))


def _block_text(path: str, block: AnthropicPart) -> str:
    if block.type in ("image", "document"):
        source = block.source or {}
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return source["data"]
        return IMAGE_OMITTED.format(kind=block.type)
    if block.type != "text":
        raise invalid(f"{path}.type", "is not supported", given=block.type[:40])
    if block.text is None:
        raise invalid(path, "needs `text`")
    return block.text


def _function(path: str, tool: Tool) -> dict[str, Any]:
    if tool.input_schema is None:
        raise invalid(path, "needs `input_schema`")
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice) -> str | dict[str, Any]:
    if choice.type in ("auto", "none"):
        return choice.type
    if choice.type == "any":
        return "required"
    if choice.type != "tool" or choice.name is None:
        raise invalid("tool_choice", "must be auto, any, none, or tool with a `name`", given=choice.type[:40])
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    given = config.format if config else None
    if not given:
        return None
    if given.get("type") != "json_schema" or given.get("schema") is None:
        raise invalid("output_config.format", "must have the type json_schema and a `schema`")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _template_options(request: CountRequest) -> dict[str, Any]:
    """`thinking` as a variable for the chat template."""
    options = dict(request.chat_template_kwargs or {})
    kind = (request.thinking or {}).get("type")
    if kind in ("enabled", "disabled"):
        options.setdefault("enable_thinking", kind == "enabled")
    return options


class MessagesResponseWriter(ResponseWriter):
    """The content is built block by block as the text grows, streamed or not."""

    error_format = ANTHROPIC

    def __init__(
        self,
        prepared: PreparedRequest,
        served: Served,
        request: MessagesRequest,
        left_out: Collection[str] = (),
    ):
        super().__init__([prepared], served, request.stream)
        self._stop_sequences = request.stop_sequences or []
        self.left_out = left_out
        self._parser_config = prepared.parser_config
        self._parser = self._parser_config.parser()
        self._has_begun = False
        self._content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        self._arguments = ""  # of the newest call

    def whole(self, sequences: list[GeneratedSequence]) -> MessagesResponse:
        (sequence,) = sequences
        text = text_of(sequence.pieces, self._parser_config)
        self._parser = self._parser_config.of_text(text, sequence.is_truncated).parser()
        for _event in self._read(sequence, sequence.pieces):
            pass
        response = self._response(sequence)
        response.content = self._content
        response.stop_reason = self._stop_reason(sequence)
        response.stop_sequence = self._stop_sequence(sequence)
        return response

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        return b"".join(_event(event) for event in self._read(sequence, pieces))

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        (sequence,) = sequences
        delta = {"stop_reason": self._stop_reason(sequence), "stop_sequence": self._stop_sequence(sequence)}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(sequence)}
        return _event(last) + _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\n" + super().failure(error)

    def _response(self, sequence: GeneratedSequence) -> MessagesResponse:
        return MessagesResponse(
            id=f"msg_{self.request_id}",
            model=self.info.model_name,
            usage=self._usage(sequence),
        )

    def _usage(self, sequence: GeneratedSequence) -> MessagesUsage:
        cached = sequence.ran.cached if sequence.ran else 0
        return MessagesUsage(len(sequence.prompt) - cached, sequence.tokens, cached)

    def _stop_sequence(self, sequence: GeneratedSequence) -> str | None:
        """The stop sequence of the request that ended the text."""
        stop = sequence.stream.stop
        return stop if stop in self._stop_sequences else None

    def _stop_reason(self, sequence: GeneratedSequence) -> str:
        reason = STOP_REASONS[sequence.finish_reason]
        if reason == "stop_sequence" and not self._stop_sequence(sequence):
            reason = "end_turn"  # a stop string of the model's own
        if reason == "end_turn" and self._parser.has_calls:
            return "tool_use"
        return reason

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """The events that `pieces` add; each has to be used before the next one is made."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._response(sequence)}
            yield {"type": "ping"}
        for piece in pieces:
            for part in self._parser.push(visible_text(piece, self._parser_config)):
                yield from self._take(part)
        if sequence.finish_reason is not None:
            for part in self._parser.finish(sequence.is_truncated):
                yield from self._take(part)
            yield from self._end_block()

    def _take(self, part: output_parser.OutputPart) -> Iterator[dict[str, Any]]:
        newest = self._content[-1] if self._content else None
        if isinstance(part, CallBegin):
            yield from self._begin_block(ToolUseBlock(part.id, part.name))
        elif isinstance(part, Arguments):
            self._arguments += part.text
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Reasoning):
            if not isinstance(newest, ThinkingBlock):
                yield from self._begin_block(ThinkingBlock())
            self._content[-1].thinking += part.text
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        elif isinstance(part, Content) and part.text:
            if not isinstance(newest, TextBlock):
                yield from self._begin_block(TextBlock())
            self._content[-1].text += part.text
            yield self._delta({"type": "text_delta", "text": part.text})

    def _begin_block(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[dict[str, Any]]:
        yield from self._end_block()
        self._content.append(block)
        index = len(self._content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _end_block(self) -> Iterator[dict[str, Any]]:
        if not self._content:
            return
        newest = self._content[-1]
        if isinstance(newest, ToolUseBlock):
            newest.input = output_parser.complete_members(self._arguments)
            self._arguments = ""
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _event(event: dict[str, Any]) -> bytes:
    return named_event(event["type"], event)
