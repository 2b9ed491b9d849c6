"""What `/v1/responses` writes: a chat's text becomes output items, whole or as events.

Source of the order of events: OpenAI's API reference (streaming events).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from api.chats.openai_shared import OpenAIResponseWriter, TokenLogprob
from api.chats.reasoning import seal
from api.chats.tools import custom_input
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence
from api.http.errors import OPENAI, ApiError, named_event
from api.http.fields import Json
from api.http.response_store import StoredResponse, item_id, new_key, response_id
from api.http.types import SamplingOptions, encode_json
from api.openai.responses_tools import BUILT_IN, ResponsesTools
from api.openai.responses_types import (
    AnyOutputItem,
    ApplyPatchCall,
    BuiltInCall,
    CompactedConversation,
    Compaction,
    CustomToolCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningConfig,
    ReasoningText,
    ResponsesFields,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
    ShellCall,
    SummaryText,
    TextConfig,
)
from text.output.json_mender import complete_members
from text.output.parser import Added, Call, Content, OutputPart, Reasoning
from text.stream import Piece

SEALED_REASONING = "reasoning.encrypted_content"

# The response's values of fields that the request leaves out.
DEFAULTS: Json = {
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


def _repeated(request: ResponsesRequest, defaults: Json) -> Json:
    """Returns the request's fields as its response has them, by name. defaults: the values of fields that the
    request leaves out. Functions and JSON schemas get all keys that OpenAI's response has, and `text` gets a
    format. Fields of NOT_REPEATED are UNSET. The request stays as it is."""
    given = {name: getattr(request, name) for name in ResponsesFields.__struct_fields__}
    repeated = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    repeated |= dict.fromkeys(NOT_REPEATED, UNSET)
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
    """The response is built item by item as the text grows, streamed or not. At its end it is stored if the
    request asks for that."""

    def __init__(
        self,
        prepared: PreparedRequest,
        served: Served,
        request: ResponsesRequest,
        tools: ResponsesTools,
        own_input: bytes = b"",
    ):
        """tools: of the conversation. own_input: the items of the request as JSON, if the response is to be
        stored."""
        super().__init__([prepared], served, request.stream)
        self.left_out = tools.left_out
        self._tools = tools
        self._own_input = own_input
        self._stored = served.responses
        self._key = new_key()
        self._wants_logprobs = prepared.logprobs
        reasoning = request.reasoning or ReasoningConfig()
        self._wants_summary = bool(reasoning.summary or reasoning.generate_summary)
        self._wants_sealed = SEALED_REASONING in (request.include or [])
        self._events = 0
        self._is_truncated = False  # the newest item, and so the response
        self._logprobs_read: list[TokenLogprob] = []  # of text that has not been written yet
        self._response = ResponsesResponse(
            **_repeated(request, DEFAULTS | served.info.sampling_defaults),
            id=response_id(self._key),
            object="response",
            created_at=int(time.time()),
            status="in_progress",
            model=self.model_name,
        )

    def whole(self, sequences: list[GeneratedSequence]) -> ResponsesResponse:
        (sequence,) = sequences
        for _ in self._read(sequence, sequence.pieces):
            pass
        return self._complete(sequences)

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        response = self._complete(sequences)
        return named_event(self._event(f"response.{response.status}", response=response))

    def failure(self, error: ApiError) -> bytes:
        """Returns two events: `error`, and `response.failed`, for which agents wait. The first has OpenAI's
        documented fields, and the object `error`, for which OpenAI's clients look. Sets the status and the
        error of the response, which is not stored; its items stay as they are."""
        detail = msgspec.to_builtins(error.body(OPENAI).error)
        told = self._event("error", **detail | {"type": "error"}, error=detail)
        self._response.status = "failed"
        self._response.error = {"code": "server_error", "message": detail["message"]}
        return named_event(told) + named_event(self._event("response.failed", response=self._response))

    def _complete(self, sequences: list[GeneratedSequence]) -> ResponsesResponse:
        """Completes the response, and returns it. If its `store` is true, the response is stored, which may
        wait for another process; `store` is then whether that succeeded. A failure is only logged."""
        response = self._response
        response.completed_at = int(time.time())
        response.status = "completed"
        if self._is_truncated:
            response.status = "incomplete"
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.usage = ResponsesUsage.of(self._usage(sequences))
        if response.store:  # before the client knows its end
            stored = StoredResponse(
                id=response.id,
                previous_id=response.previous_response_id,
                input=self._own_input,
                output=encode_json([_without_logprobs(item) for item in response.output]),
                response=encode_json(response),
            )
            response.store = self._stored.save(stored)
        return response

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[Json]:
        """Yields the events that `pieces` make; before the first ones, those with which the response begins.
        At the end of a sequence without any part, these are the events of an empty message."""
        if not self._events:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        for piece in pieces:
            if self._wants_logprobs and not piece.special:
                self._logprobs_read.append(self._token_logprob(piece))
            yield from self._write(sequence, piece.added)
        if sequence.finish_reason is not None:
            yield from self._write(sequence, sequence.rest)
            if self._newest is None:
                yield from self._write(sequence, [(Content(), "")])  # clients expect a message
            self._is_truncated = sequence.is_truncated
            yield from self._end_part(sequence)

    def _bytes(self, token_id: int, text: str, trimmed: int = 0) -> list[int]:
        return super()._bytes(token_id, text, trimmed) or []  # the interface has no null here

    @property
    def _newest(self) -> AnyOutputItem | None:
        return self._response.output[-1] if self._response.output else None

    def _begin(self, part: OutputPart) -> Iterator[Json]:
        """Adds the item that a part becomes to the response. Yields the events with which the item begins;
        those of a built-in tool's call come at its end."""
        item = self._item_of(part)
        self._response.output.append(item)
        if isinstance(item, BuiltInCall):  # clients expect its arguments from the beginning
            return
        yield self._item_event("response.output_item.added", item=item)
        if isinstance(part, Call):
            return
        item.content.append(OutputText() if isinstance(part, Content) else ReasoningText())
        yield self._item_event("response.content_part.added", content_index=0, part=item.content[0])
        if self._summarizes:
            item.summary.append(SummaryText())
            yield self._summary_event("part.added", part=item.summary[0])

    def _item_of(self, part: OutputPart) -> OutputItem:
        """Returns the item that a part becomes, as it begins: its id, and the name of a call. Does not add it
        to the response."""
        new_id = functools.partial(item_id, key=self._key, number=len(self._response.output))
        if isinstance(part, Content):
            return OutputMessage(id=new_id("msg"))
        if isinstance(part, Reasoning):
            return OutputReasoning(id=new_id("rs"))
        tool = self._tools.of(part.name)
        if row := BUILT_IN.get(tool.kind):
            return row.item(id=new_id(row.prefix), call_id=part.id)
        kind, prefix = (CustomToolCall, "ctc") if tool.kind == "custom" else (FunctionCall, "fc")
        return kind(id=new_id(prefix), call_id=part.id, name=tool.name, namespace=tool.namespace or UNSET)

    def _continue(self, part: OutputPart, text: str) -> Iterator[Json]:
        """Adds text to the newest item; to a message, also the log-probabilities of the tokens that make up
        the text. Those of other tokens read since the last text, such as markers, are dropped. Yields an
        event for text of a message, of reasoning, of its summary, or of a function's arguments. The arguments
        of other calls are written at the end of the call."""
        logprobs = _making_up(text, self._logprobs_read)
        self._logprobs_read = []
        item = self._newest
        if isinstance(item, OutputMessage):
            item.content[0].logprobs += logprobs
        if not text:
            return
        if isinstance(item, FunctionCall):
            item.arguments += text
            yield self._item_event("response.function_call_arguments.delta", delta=text)
        elif not isinstance(part, Call):  # a call of another kind has its arguments in another form
            item.content[0].text += text
            yield self._text_event("delta", logprobs, delta=text)
            if self._summarizes:
                item.summary[0].text += text
                yield self._summary_event("text.delta", delta=text)

    def _end(self, part: OutputPart) -> Iterator[Json]:
        """Completes the newest item with its arguments, its opaque reasoning and its status. Yields its last
        events. The status is `completed`, or `incomplete` (of a patch: `in_progress`) if the output was
        truncated within the item or the call has no end."""
        item = self._newest
        if isinstance(item, BuiltInCall):
            yield from self._write_built_in(item, part)
        elif isinstance(item, CustomToolCall):
            item.input = custom_input(part.text)
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
            item.encrypted_content = seal(part.text)
        item.status = "completed"
        if self._is_truncated or (isinstance(part, Call) and not part.is_complete):
            # The status of a patch has no other value for it.
            item.status = "in_progress" if isinstance(item, ApplyPatchCall) else "incomplete"
        yield self._item_event("response.output_item.done", item=item)

    def _write_built_in(self, item: BuiltInCall, call: Call) -> Iterator[Json]:
        """Sets the arguments of an item: those that are complete, and the defaults of the others. Yields the
        event with which the item begins and, for a shell, three events for each command."""
        row = BUILT_IN[self._tools.of(call.name).kind]
        setattr(item, row.field, row.defaults | complete_members(call.text))
        yield self._item_event("response.output_item.added", item=item)
        commands = item.action["commands"] if isinstance(item, ShellCall) else []
        for n, command in enumerate(commands if isinstance(commands, list) else ()):
            kind = "response.shell_call_command"
            yield self._item_event(f"{kind}.added", command_index=n, command="")
            yield self._item_event(f"{kind}.delta", command_index=n, delta=command)
            yield self._item_event(f"{kind}.done", command_index=n, command=command)

    def _text_event(self, what: str, logprobs: list[TokenLogprob], **text: str) -> Json:
        if isinstance(self._newest, OutputMessage):
            return self._item_event(
                f"response.output_text.{what}", content_index=0, logprobs=logprobs, **text
            )
        return self._item_event(f"response.reasoning_text.{what}", content_index=0, **text)

    @property
    def _summarizes(self) -> bool:
        """Whether the newest item is reasoning with a summary."""
        return self._wants_summary and isinstance(self._newest, OutputReasoning)

    def _summary_event(self, what: str, **fields: Any) -> Json:
        return self._item_event(f"response.reasoning_summary_{what}", summary_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """An event of the newest item."""
        name = {} if "item" in fields else {"item_id": self._newest.id}
        return self._event(kind, output_index=len(self._response.output) - 1, **name, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1} | fields


def _making_up(text: str, tokens: list[TokenLogprob]) -> list[TokenLogprob]:
    """Returns the last tokens, as many as make up this text, with those in front of them that have no text:
    they may begin its first character."""
    begin = len(tokens)
    missing = len(text)
    while begin and (missing > 0 or not tokens[begin - 1].token):
        begin -= 1
        missing -= len(tokens[begin].token)
    return tokens[begin:]


def _without_logprobs(item: OutputItem) -> OutputItem:
    """Returns an output item as later requests need it: log-probabilities are large, and no model reads them.
    Other fields stay."""
    if not isinstance(item, OutputMessage):
        return item
    return replace(item, content=[replace(part, logprobs=[]) for part in item.content])


def _compaction_item(key: str, summary: str) -> Compaction:
    """Returns the item with a summary, in an opaque form. Raises ApiError (424) for a blank summary, with
    which the whole conversation would be lost. key: that of the response, which the item's id has."""
    if not summary.strip():
        raise ApiError(424, "generation", "The model wrote no summary of the conversation")
    return Compaction(item_id("cmp", key, 0), seal(summary))


class TriggeredCompactionWriter(ResponsesWriter):
    """A response to a `compaction_trigger`: its one item is the summary of the conversation."""

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        """Returns the events of the item and of the end. Raises ApiError (424) for a blank summary."""
        response = self._complete(sequences)
        item = self._newest
        events = [
            self._item_event("response.output_item.added", item=item),
            self._item_event("response.output_item.done", item=item),
            self._event("response.completed", response=response),
        ]
        return b"".join(map(named_event, events))

    def _complete(self, sequences: list[GeneratedSequence]) -> ResponsesResponse:
        """Adds the item with the summary to the response, and returns the response, which is not stored. A
        truncated summary counts as complete. Raises ApiError (424) for a blank summary."""
        item = _compaction_item(self._key, sequences[0].output.text_of(Content))
        self._is_truncated = False  # `max_output_tokens` was not the client's
        response = super()._complete(sequences)
        response.output.append(item)
        return response

    def _write(self, _sequence: GeneratedSequence, _added: list[Added]) -> Iterator[Json]:
        """Yields nothing: what the model writes is shown only as the summary."""
        yield from ()


class CompactionWriter(OpenAIResponseWriter):
    """The output is a summary of the conversation, which a later request has in place of its items."""

    def whole(self, sequences: list[GeneratedSequence]) -> CompactedConversation:
        """Returns the response with the summary, which may be truncated. Raises ApiError (424) for a blank
        summary."""
        (sequence,) = sequences
        key = new_key()
        return CompactedConversation(
            id=response_id(key),
            created_at=int(time.time()),
            output=[_compaction_item(key, sequence.output.text_of(Content))],
            usage=ResponsesUsage.of(self._usage(sequences)),
        )
