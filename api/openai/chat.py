"""`/v1/chat/completions`: the responses to chats. The requests are in conversation.py."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from api.chats.conversation import ChatRequest, prepare_chat
from api.chats.openai_shared import (
    FINISH_REASONS,
    ChunkedResponseWriter,
    OpenAIResponse,
    PromptLogprobs,
    TokenLogprob,
    Usage,
)
from api.chats.tools import custom_input
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence, ResponseWriter
from api.http import fields
from api.http.fields import Json
from config import REASONING_FIELDS
from text.output.parser import Arguments, Call, Content, OutputParser, OutputPart, Reasoning
from text.stream import Piece


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CalledFunction(Struct):
    """`arguments` is JSON in a string."""

    name: str
    arguments: str


class CalledCustom(Struct):
    """A custom tool, called with one text."""

    name: str
    input: str


class ToolCall(Struct):
    id: str
    type: str
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ChatMessage(Struct):
    """`content` is null where there are calls only."""

    role: str
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(OpenAIResponse):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(Struct):
    name: str | UnsetType = UNSET
    input: str = ""


class ToolCallDelta(Struct, omit_defaults=True):
    """The beginning of a call has its `id`, `type` and name; the others have more of its `arguments` or its
    `input`."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(OpenAIResponse):
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


def chat(data: Json, served: Served) -> ResponseWriter:
    request = fields.read(data, ChatRequest)
    return ChatResponseWriter(prepare_chat(request, served), served, request)


class ChatResponseWriter(ChunkedResponseWriter):
    """The choices are the sequences of one prepared request."""

    kind = "chat.completion"
    id_prefix = "chatcmpl"
    chunk_type = ChatChunk

    def __init__(self, prepared: PreparedRequest, served: Served, request: ChatRequest):
        super().__init__([prepared], served, request)
        self._parser_config = prepared.parser_config
        tools = request.tools or []
        self._thoughts = REASONING_FIELDS[served.config.reasoning_fields]
        self._custom = {tool["custom"]["name"] for tool in tools if tool.get("type") == "custom"}
        self._readers: dict[GeneratedSequence, DeltaReader] = {}  # of those with events in the stream
        self._wants_logprobs = request.logprobs
        self._top_n = request.top_logprobs or 0
        if self.streams:
            self.kind = "chat.completion.chunk"

    def whole(self, sequences: list[GeneratedSequence]) -> Struct:
        choices = [self._choice(index, sequence) for index, sequence in enumerate(sequences)]
        return ChatCompletion(
            **self._envelope,
            choices=choices,
            usage=self._usage(sequences),
            prompt_token_ids=self._prompt_token_ids(sequences[0]),
            prompt_logprobs=self._prompt_logprobs(sequences[0]),
        )

    def _choice(self, index: int, sequence: GeneratedSequence) -> ChatChoice:
        read = self._parser_config.whole(sequence.pieces, sequence.is_truncated)
        sequence.reasoning_tokens = read.reasoning_tokens
        message = ChatMessage("assistant", read.content)
        for name in self._thoughts if read.reasoning else ():
            setattr(message, name, read.reasoning)
        if read.calls:
            if not read.content and not self._parser_config.calls.requires_call:
                message.content = None
            message.tool_calls = [self._tool_call(call) for call in read.calls]
        reason = self._finish_reason(sequence, bool(read.calls) and not read.is_truncated)
        logprobs = self._logprobs(sequence.pieces)
        return ChatChoice(index, message, logprobs, reason, self._token_ids(sequence.pieces))

    def _beside_choice(self, sequence: GeneratedSequence) -> Json:
        if sequence in self._readers:
            return {}
        return {"prompt_token_ids": self._prompt_token_ids(sequence)}

    def _tool_call(self, call: Call) -> ToolCall:
        if call.name in self._custom:
            return ToolCall(call.id, "custom", custom=CalledCustom(call.name, custom_input(call.arguments)))
        return ToolCall(call.id, "function", CalledFunction(call.name, call.arguments))

    def _choices(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[ChunkChoice]:
        choice = functools.partial(ChunkChoice, sequence.index)
        if sequence not in self._readers:
            self._readers[sequence] = DeltaReader(self._parser_config.parser(), self._custom, self._thoughts)
            yield choice(Delta(role="assistant", content=""))
        reader = self._readers[sequence]
        for piece in pieces:
            deltas = reader.read(piece)
            sequence.reasoning_tokens = reader.parser.reasoning_tokens
            if (self._wants_logprobs or self._returns_token_ids) and not deltas:
                deltas = [Delta(content="")]
            for n, delta in enumerate(deltas):
                pieces_of_delta = [] if n else [piece]
                logprobs = None if n else self._logprobs([piece])
                yield choice(delta, logprobs, token_ids=self._token_ids(pieces_of_delta))
        if sequence.finish_reason is not None:
            yield from map(choice, reader.finish(sequence.is_truncated))
            # Loops that print `delta.content` expect a text in the last event, too.
            has_calls = reader.parser.has_calls
            last = Delta() if has_calls else Delta(content="")
            yield choice(last, None, self._finish_reason(sequence, has_calls))

    def _finish_reason(self, sequence: GeneratedSequence, has_calls: bool) -> str:
        reason = FINISH_REASONS[sequence.finish_reason]
        if reason == "stop" and has_calls and not self._parser_config.calls.is_named:
            return "tool_calls"
        return reason

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs([self._token_logprob(piece) for piece in pieces])


class DeltaReader:
    """Reads the text of one sequence as deltas. The input of a custom tool is one delta, at the end of its
    call: its arguments are JSON until then."""

    def __init__(self, parser: OutputParser, custom: Collection[str], thoughts: Collection[str]):
        self.parser = parser
        self._thoughts = thoughts  # names of the fields with reasoning
        self._custom = custom  # names
        self._call: int | None = None  # the index of the call of a custom tool that is being read
        self._arguments = ""

    def read(self, piece: Piece) -> list[Delta]:
        return [*self._deltas(self.parser.read(piece))]

    def finish(self, is_truncated: bool) -> list[Delta]:
        return [*self._deltas(self.parser.finish(is_truncated)), *self._end_call()]

    def _deltas(self, parts: list[OutputPart]) -> Iterator[Delta]:
        for part in parts:
            if isinstance(part, Arguments) and self._call is not None:
                self._arguments += part.text
                continue
            yield from self._end_call()
            if isinstance(part, Content):
                yield Delta(content=part.text)
            elif isinstance(part, Reasoning):
                yield Delta(**dict.fromkeys(self._thoughts, part.text))
            elif isinstance(part, Arguments):
                yield _call_delta(part.index, function=FunctionDelta(arguments=part.text))
            elif part.name in self._custom:
                self._call = part.index
                yield _call_delta(part.index, part.id, "custom", custom=CustomDelta(part.name))
            else:
                yield _call_delta(part.index, part.id, "function", FunctionDelta(part.name))

    def _end_call(self) -> Iterator[Delta]:
        if self._call is not None:
            yield _call_delta(self._call, custom=CustomDelta(input=custom_input(self._arguments)))
            self._call = None
            self._arguments = ""


def _call_delta(*fields: Any, **named: Any) -> Delta:
    return Delta(tool_calls=[ToolCallDelta(*fields, **named)])
