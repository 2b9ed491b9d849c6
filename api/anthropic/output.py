"""A response of Anthropic's Messages API: content blocks that grow with the text, whole or as events.

Source of the order of events: Anthropic's API reference (streaming, errors).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from text.output.parser import Call, Content, OutputPart, Reasoning
from text.stream import Piece

# The type of a text's deltas, and the field of these that has it.
DELTAS = {
    Content: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    Call: ("input_json_delta", "partial_json"),
}
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
        self._omits_thinking = request.thinking is not None and request.thinking.display == "omitted"
        self._has_begun = False
        self._content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []

    def whole(self, sequences: list[GeneratedSequence]) -> MessagesResponse:
        (sequence,) = sequences
        for _event in self._read(sequence, sequence.pieces):
            pass
        return self._response(sequence, content=self._content, **self._end_of(sequence))

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        (sequence,) = sequences
        last = {"type": "message_delta", "delta": self._end_of(sequence), "usage": self._usage(sequence)}
        return named_event(last) + named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\n" + super().failure(error)

    def _response(self, sequence: GeneratedSequence, **more: Any) -> MessagesResponse:
        return MessagesResponse(
            id=f"msg_{self.request_id}", model=self.model_name, usage=self._usage(sequence), **more
        )

    def _end_of(self, sequence: GeneratedSequence) -> Json:
        return {"stop_reason": self._stop_reason(sequence), "stop_sequence": self._stop_sequence(sequence)}

    def _usage(self, sequence: GeneratedSequence) -> MessagesUsage:
        cached = sequence.prompt_done.cached
        details = OutputTokensDetails(sequence.reasoning_tokens)
        return MessagesUsage(len(sequence.prompt) - cached, sequence.tokens, cached, details)

    def _stop_sequence(self, sequence: GeneratedSequence) -> str | None:
        """The stop sequence of the request that ended the text; None: another end."""
        stop = sequence.stream.stop
        return stop if stop in self._stop_sequences else None

    def _stop_reason(self, sequence: GeneratedSequence) -> str:
        """Returns why the output ended, in Anthropic's words. The first that holds: `stop_sequence` (one of
        the request's), `tool_use` (complete calls, without truncation), `end_turn`,
        `model_context_window_exceeded` (the context had less room than `max_tokens`), `max_tokens` (also at
        the deadline)."""
        reason = STOP_REASONS[sequence.finish_reason]
        if reason == "stop_sequence" and not self._stop_sequence(sequence):
            reason = "end_turn"  # a stop string of the model's own
        if reason == "end_turn" and sequence.output.has_calls:
            return "tool_use"
        asked = sequence.prepared.max_new_tokens
        if sequence.is_truncated and asked and sequence.tokens >= sequence.max_new_tokens < asked:
            return "model_context_window_exceeded"
        return reason

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[Json]:
        """Yields the events that `pieces` make; before the first ones, those with which the response
        begins."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._response(sequence)}
            yield {"type": "ping"}
        yield from super()._read(sequence, pieces)

    def _begin(self, part: OutputPart) -> Iterator[Json]:
        if isinstance(part, Call):
            block = ToolUseBlock(part.id, part.name)
        else:
            block = TextBlock() if isinstance(part, Content) else ThinkingBlock()
        self._content.append(block)
        yield self._block_event("start", content_block=block)

    def _continue(self, part: OutputPart, text: str) -> Iterator[Json]:
        kind, name = DELTAS[type(part)]
        if text and not (isinstance(part, Reasoning) and self._omits_thinking):
            yield self._block_event("delta", delta={"type": kind, name: text})

    def _end(self, part: OutputPart) -> Iterator[Json]:
        """Completes the newest block with the part's whole text, and yields the event that ends the block.
        Earlier events have had this text, except reasoning that the request omits. Arguments of a call become
        an object: of truncated ones the members that are complete, {} for a text that is no object. For
        reasoning the event of its `signature` comes before the end. The reasoning is in `thinking` or, if
        omitted, in an opaque form in `signature`. part: the one that the newest block was begun for."""
        block = self._content[-1]
        if isinstance(block, TextBlock):
            block.text = part.text
        elif isinstance(block, ToolUseBlock):
            block.input = complete_members(part.text)
        else:
            shown, sealed = ("", part.text) if self._omits_thinking else (part.text, "")
            block.thinking = shown
            block.signature = seal(sealed)
            yield self._block_event("delta", delta={"type": "signature_delta", "signature": block.signature})
        yield self._block_event("stop")

    def _block_event(self, what: str, **fields: Any) -> Json:
        """An event of the newest block."""
        return {"type": f"content_block_{what}", "index": len(self._content) - 1} | fields
