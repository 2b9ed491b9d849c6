"""`/v1/chat/completions`: the responses to chats. The requests are in conversation.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
from text.output.parser import Call, Content, OutputPart, Reasoning
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
    """`content` is null if there are calls only, but "" if the request required a call."""

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
    """The first delta of a call has its `id`, `type` and name; later ones have more of `arguments` or
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
    """Returns the writer of the response to a chat. Adds the chat's images to `served.images`, which loads
    them later. Waits for a child process that renders the prompt. Logs skipped parts. Neither the length of
    the prompt nor the grammar is checked yet. Raises ApiError for a wrong field, and for a chat that the
    template rejects."""
    request = fields.read(data, ChatRequest)
    return ChatResponseWriter(prepare_chat(request, served), served, request)


class ChatResponseWriter(ChunkedResponseWriter):
    """The choices are the sequences of one prepared request."""

    kind = "chat.completion"
    id_prefix = "chatcmpl"
    chunk_type = ChatChunk

    def __init__(self, prepared: PreparedRequest, served: Served, request: ChatRequest):
        super().__init__([prepared], served, request)
        self._calls = prepared.parser_config.calls
        tools = request.tools or []
        self._thoughts = REASONING_FIELDS[served.config.reasoning_fields]
        self._custom = {tool["custom"]["name"] for tool in tools if tool.get("type") == "custom"}
        self._wants_logprobs = request.logprobs
        self._top_n = request.top_logprobs or 0
        if self.streams:
            self.kind = "chat.completion.chunk"

    def whole(self, sequences: list[GeneratedSequence]) -> Struct:
        return ChatCompletion(
            **self._envelope,
            choices=[self._choice(sequence) for sequence in sequences],
            usage=self._usage(sequences),
            prompt_token_ids=self._prompt_token_ids(sequences[0]),
            prompt_logprobs=self._prompt_logprobs(sequences[0]),
        )

    def _choice(self, sequence: GeneratedSequence) -> ChatChoice:
        """Returns a finished sequence as a choice: its content, its reasoning in the fields that
        `--reasoning-fields` names, and its calls."""
        output = sequence.output
        message = ChatMessage("assistant", output.text_of(Content))
        reasoning = output.text_of(Reasoning)
        for name in self._thoughts if reasoning else ():
            setattr(message, name, reasoning)
        if output.calls:
            if not message.content and not self._calls.requires_call:
                message.content = None
            message.tool_calls = [self._tool_call(call) for call in output.calls]
        return ChatChoice(
            sequence.index,
            message,
            self._logprobs(sequence.pieces),
            self._finish_reason(sequence),
            self._token_ids(sequence.pieces),
        )

    def _beside_choice(self, sequence: GeneratedSequence) -> Json:
        return {"prompt_token_ids": self._prompt_token_ids(sequence)}

    def _tool_call(self, call: Call) -> ToolCall:
        if call.name in self._custom:
            return ToolCall(call.id, "custom", custom=CalledCustom(call.name, custom_input(call.text)))
        return ToolCall(call.id, "function", CalledFunction(call.name, call.text))

    def _choices(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[ChunkChoice]:
        """Yields the choice of each event that `pieces` make. The events are the role, once; what each piece
        adds to the parts of the output; and, if the sequence has finished, what the end of its text adds, and
        the finish reason. The first event of a piece has the token's log-probability and its id. A piece that
        adds nothing has an event only if log-probabilities or token ids are asked for."""
        choice = functools.partial(ChunkChoice, sequence.index)
        if sequence not in self._begun:
            yield choice(Delta(role="assistant", content=""))
        for piece in pieces:
            deltas = list(self._write(sequence, piece.added))
            if (self._wants_logprobs or self._returns_token_ids) and not deltas:
                deltas = [Delta(content="")]
            for n, delta in enumerate(deltas):
                pieces_of_delta = [] if n else [piece]
                logprobs = None if n else self._logprobs([piece])
                yield choice(delta, logprobs, token_ids=self._token_ids(pieces_of_delta))
        if sequence.finish_reason is not None:
            yield from map(choice, self._write(sequence, sequence.rest))
            yield from map(choice, self._end_part(sequence))
            # Loops that print `delta.content` expect a text in the last event, too.
            last = Delta() if sequence.output.has_calls else Delta(content="")
            yield choice(last, None, self._finish_reason(sequence))

    def _begin(self, part: OutputPart) -> Iterator[Delta]:
        if isinstance(part, Call) and part.name in self._custom:
            yield _call_delta(part.index, part.id, "custom", custom=CustomDelta(part.name))
        elif isinstance(part, Call):
            yield _call_delta(part.index, part.id, "function", FunctionDelta(part.name))

    def _continue(self, part: OutputPart, text: str) -> Iterator[Delta]:
        if isinstance(part, Content):
            yield Delta(content=text)
        elif isinstance(part, Reasoning):
            yield Delta(**dict.fromkeys(self._thoughts, text))
        elif text and part.name not in self._custom:
            yield _call_delta(part.index, function=FunctionDelta(arguments=text))

    def _end(self, part: OutputPart) -> Iterator[Delta]:
        if isinstance(part, Call) and part.name in self._custom:  # its arguments are JSON until here
            yield _call_delta(part.index, custom=CustomDelta(input=custom_input(part.text)))

    def _finish_reason(self, sequence: GeneratedSequence) -> str:
        """Returns why a sequence ended, in OpenAI's words: `tool_calls` if it ended with complete calls,
        unless `tool_choice` names the function; else `stop` or `length`."""
        reason = FINISH_REASONS[sequence.finish_reason]
        if reason == "stop" and sequence.output.has_calls and self._calls.mode != "named":
            return "tool_calls"
        return reason

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs([self._token_logprob(piece) for piece in pieces])


def _call_delta(*fields: Any, **named: Any) -> Delta:
    return Delta(tool_calls=[ToolCallDelta(*fields, **named)])
