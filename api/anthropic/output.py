"""A response of Anthropic's Messages API: content blocks that grow with the text, whole or as events.

Source of the order of events: Anthropic's API reference (streaming, errors).
"""

from __future__ import annotations

from collections.abc import Iterator

from api.anthropic.tools import MessagesTools
from api.anthropic.types import (
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    OutputTokensDetails,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from api.chats.reasoning import seal
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence, ResponseWriter
from api.http.errors import ANTHROPIC, ApiError, named_event
from api.http.fields import Json
from text.output.json_mender import complete_members
from text.output.parser import Arguments, CallBegin, Content, OutputPart, Reasoning
from text.stream import Piece

STOP_REASONS = {"length": "max_tokens", "eos_token": "end_turn", "stop_sequence": "stop_sequence"}


class MessagesResponseWriter(ResponseWriter):
    """The content is built block by block as the text grows, streamed or not."""

    error_format = ANTHROPIC

    def __init__(
        self,
        prepared: PreparedRequest,
        served: Served,
        request: MessagesRequest,
        tools: MessagesTools,
    ):
        super().__init__([prepared], served, request.stream)
        self._stop_sequences = request.stop_sequences or []
        self.left_out = tools.left_out
        self._parser = prepared.parser_config.parser()
        self._omits_thinking = request.thinking is not None and request.thinking.display == "omitted"
        self._has_begun = False
        self._content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        self._arguments = ""  # of the newest call
        self._thoughts = ""  # that the signature carries

    def whole(self, sequences: list[GeneratedSequence]) -> MessagesResponse:
        (sequence,) = sequences
        for _event in self._read(sequence, sequence.pieces):
            pass
        response = self._response(sequence)
        response.content = self._content
        response.stop_reason = self._stop_reason(sequence)
        response.stop_sequence = self._stop_sequence(sequence)
        return response

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        return b"".join(map(named_event, self._read(sequence, pieces)))

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        (sequence,) = sequences
        delta = {"stop_reason": self._stop_reason(sequence), "stop_sequence": self._stop_sequence(sequence)}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(sequence)}
        return named_event(last) + named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\n" + super().failure(error)

    def _response(self, sequence: GeneratedSequence) -> MessagesResponse:
        return MessagesResponse(
            id=f"msg_{self.request_id}",
            model=self.model_name,
            usage=self._usage(sequence),
        )

    def _usage(self, sequence: GeneratedSequence) -> MessagesUsage:
        cached = sequence.prompt_done.cached
        details = OutputTokensDetails(self._parser.reasoning_tokens)
        return MessagesUsage(len(sequence.prompt) - cached, sequence.tokens, cached, details)

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
        asked = sequence.prepared.max_new_tokens
        if sequence.is_truncated and asked and sequence.tokens >= sequence.max_new_tokens < asked:
            return "model_context_window_exceeded"
        return reason

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[Json]:
        """The events that `pieces` add; each has to be used before the next one is made."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._response(sequence)}
            yield {"type": "ping"}
        for piece in pieces:
            for part in self._parser.read(piece):
                yield from self._take(part)
        if sequence.finish_reason is not None:
            for part in self._parser.finish(sequence.is_truncated):
                yield from self._take(part)
            yield from self._end_block()

    def _take(self, part: OutputPart) -> Iterator[Json]:
        newest = self._content[-1] if self._content else None
        if isinstance(part, CallBegin):
            yield from self._begin_block(ToolUseBlock(part.id, part.name))
        elif isinstance(part, Arguments):
            self._arguments += part.text
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Reasoning):
            if not isinstance(newest, ThinkingBlock):
                yield from self._begin_block(ThinkingBlock())
            if self._omits_thinking:
                self._thoughts += part.text
            else:
                self._content[-1].thinking += part.text
                yield self._delta({"type": "thinking_delta", "thinking": part.text})
        elif isinstance(part, Content) and part.text:
            if not isinstance(newest, TextBlock):
                yield from self._begin_block(TextBlock())
            self._content[-1].text += part.text
            yield self._delta({"type": "text_delta", "text": part.text})

    def _begin_block(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[Json]:
        yield from self._end_block()
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _end_block(self) -> Iterator[Json]:
        if not self._content:
            return
        newest = self._content[-1]
        if isinstance(newest, ToolUseBlock):
            newest.input = complete_members(self._arguments)
            self._arguments = ""
        if isinstance(newest, ThinkingBlock):
            newest.signature = seal(self._thoughts)
            yield self._delta({"type": "signature_delta", "signature": newest.signature})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}
