"""What clients read: generated tokens become the bodies and events of TGI's, OpenAI's and Vertex' APIs.

A `Sequence` is one answer to one prompt while it grows. An `Answer` is the response to one HTTP request: the jobs that have to
run for it, and how their sequences are written, whole or event by event. This layer knows neither Flask nor sockets, and
no rule of any field: it is handed jobs that are checked.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice, zip_longest
from typing import Any

from msgspec import UNSET, Struct

from api import types as schema
from api.errors import ApiError
from api.fields import Job
from api.types import ChatRequest, CompletionRequest, Parameters
from config import VERSION
from protocol import ModelInfo, Prompt, Token
from text.reader import CallBegin, Content, Part, Reader, Reasoning
from text.stream import Piece, TextStream, prompt_texts
from text.tokenizer import Tokenizer

OPENAI_FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class Sequence:
    """One answer to the prompt of `job`. Times are CLOCK_MONOTONIC, in seconds."""

    def __init__(
        self, tokenizer: Tokenizer, job: Job, prompt: list[int], max_new_tokens: int, number: int, index: int
    ):
        self.job = job
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.number = number  # among the sequences of its job
        self.index = index  # among all of its request
        self.sampling = job.sampling_of(number)
        self.stream = TextStream(tokenizer, prompt, job.stop, job.keep_stop, job.min_new_tokens)
        self.pieces: list[Piece] = []  # filled for an answer that is not streamed
        self.ran: Prompt | None = None
        self.finish_reason: str | None = None
        self.first_token_at: float | None = None
        self.finished_at = 0.0
        self._logprobs = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return self.stream.tokens

    @property
    def mean_logprob(self) -> float:
        return self._logprobs / self.tokens if self.tokens else -math.inf

    @property
    def queue_s(self) -> float:
        return self.ran.queued_s if self.ran else 0.0

    def take(self, token: Token) -> list[Piece]:
        """The pieces whose text has become certain with `token`."""
        self.first_token_at = self.first_token_at or time.monotonic()
        if self.job.max_new_tokens == 0:  # only the prompt was asked about
            self._finish("length")
            return []
        self._logprobs += token.logprob or 0.0  # None where the device samples, and nothing is ranked there
        pieces = self.stream.push(token.token, token.logprob, token.top, token.finish_reason is not None)
        if self.stream.stopped:
            self._finish("stop_sequence")
        elif token.finish_reason is not None:
            self._finish(token.finish_reason)
        return pieces

    def cut(self) -> list[Piece]:
        """Ends it here, because there is no more time; what was held back comes out."""
        pieces = self.stream.finish()
        self._finish("stop_sequence" if self.stream.stopped else "length")
        return pieces

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.finished_at = time.monotonic()


class Answer:
    """The response to one HTTP request. Each API has a subclass; this is what they share."""

    def __init__(self, jobs: list[Job], info: ModelInfo, tokenizer: Tokenizer, streams: bool):
        self.jobs = jobs
        self.info = info
        self.tokenizer = tokenizer
        self.streams = streams
        self.request_id = ""  # of the HTTP request; set before anything is written

    def whole(self, sequences: list[Sequence]) -> Struct | list:
        """The body, when all is generated. `sequences`: those of the first job, then those of the second, and so on."""
        raise NotImplementedError

    def events(self, sequence: Sequence, pieces: list[Piece]) -> bytes:
        """What `pieces` add to a stream; the last of them when `sequence` has finished. May be nothing."""
        raise NotImplementedError

    def closing(self, sequences: list[Sequence]) -> bytes:
        """What ends a stream in which nothing went wrong."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream in which something did."""
        return event(error.json)

    def _by_job(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        rest = iter(sequences)
        return [list(islice(rest, job.sequences)) for job in self.jobs]

    def _prompt_pieces(self, sequence: Sequence) -> list[Piece]:
        """The tokens of the prompt. The first has no log-probability, nor has any of a prompt that never ran."""
        logprobs, tops = (sequence.ran.logprobs, sequence.ran.top) if sequence.ran else ([], [])
        columns = (
            sequence.prompt,
            prompt_texts(self.tokenizer, sequence.prompt),
            [None, *logprobs],
            [[], *tops],
        )
        special_ids = self.tokenizer.special_ids
        return [
            Piece(i, text, logprob, i in special_ids, top or [])
            for i, text, logprob, top in zip_longest(*columns)
        ]


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def best_of(sequences: Iterable[Sequence]) -> Sequence:
    return max(sequences, key=lambda sequence: sequence.mean_logprob)


class NativeAnswer(Answer):
    """TGI's own shapes. `in_list`: `POST /` puts the answer into a list."""

    def __init__(self, *args, parameters: Parameters, in_list: bool = False):
        super().__init__(*args)
        self._in_list = in_list
        self._prefix = self.jobs[0].prompt if parameters.return_full_text else ""
        self._wants_details = bool(parameters.details or parameters.decoder_input_details)
        self._index = 0

    def whole(self, sequences: list[Sequence]) -> Struct | list:
        best = best_of(sequences)
        response = schema.GenerateResponse(self._prefix + best.stream.text)
        if self._wants_details:
            response.details = schema.Details(**self._details(best))
            if len(sequences) > 1:
                response.details.best_of_sequences = [
                    schema.BestOfSequence(
                        generated_text=self._prefix + other.stream.text, **self._details(other)
                    )
                    for other in sequences
                    if other is not best
                ]
        return [response] if self._in_list else response

    def events(self, sequence: Sequence, pieces: list[Piece]) -> bytes:
        events = []
        for piece in pieces:
            self._index += 1
            response = schema.StreamResponse(self._index, _token(piece))
            if piece.top:
                response.top_tokens = self._top_tokens(piece)
            if piece is pieces[-1] and sequence.finish_reason is not None:
                response.generated_text = self._prefix + sequence.stream.text
                if self._wants_details:
                    response.details = schema.StreamDetails(
                        **self._finish(sequence), input_length=len(sequence.prompt)
                    )
            events.append(event(schema.encode(response)))
        return b"".join(events)

    def _finish(self, sequence: Sequence) -> dict[str, Any]:
        seed = sequence.sampling.seed if self.info.sampling == "host" else None  # a device draws without it
        return {"finish_reason": sequence.finish_reason, "generated_tokens": sequence.tokens, "seed": seed}

    def _details(self, sequence: Sequence) -> dict[str, Any]:
        prompt = self._prompt_pieces(sequence) if sequence.job.prompt_logprobs else []
        return self._finish(sequence) | {
            "prefill": [
                schema.PrefillToken(piece.id, piece.text, rounded(piece.logprob)) for piece in prompt
            ],
            "tokens": [_token(piece) for piece in sequence.pieces],
            "top_tokens": [self._top_tokens(p) for p in sequence.pieces]
            if sequence.job.top_n_tokens
            else UNSET,
        }

    def _top_tokens(self, piece: Piece) -> list[schema.TokenOut]:
        return [
            schema.TokenOut(
                i, self.tokenizer.token_text(i), rounded(logprob), i in self.tokenizer.special_ids
            )
            for i, logprob in piece.top
        ]


def _token(piece: Piece) -> schema.TokenOut:
    return schema.TokenOut(piece.id, piece.text, rounded(piece.logprob), piece.special)


class PredictionsAnswer(Answer):
    """The best text of each job behind its prefix. `form` makes the body of these texts: Vertex' type, or `list` for `/infer`,
    the shape of the Ray Serve blueprint for Inferentia."""

    def __init__(
        self, *args, prefixes: list[str], form: Callable[[list[str]], Struct | list] = schema.VertexResponse
    ):
        super().__init__(*args)
        self._prefixes = prefixes
        self._form = form

    def whole(self, sequences: list[Sequence]) -> Struct | list:
        texts = (best_of(candidates).stream.text for candidates in self._by_job(sequences))
        return self._form([prefix + text for prefix, text in zip(self._prefixes, texts)])


class OpenAIAnswer(Answer):
    """What chat and completions share: ids, usage and streams, whose events are of the type `chunk_type`."""

    kind = ""  # the response's `object`
    id_prefix = ""
    chunk_type: type[schema.ChatChunk] | type[schema.Completion]

    def __init__(self, *args, options: schema.StreamOptions | None):
        super().__init__(*args)
        options = options or schema.StreamOptions()
        self._usage_at_end = bool(options.include_usage)
        self._usage_always = bool(options.continuous_usage_stats) and self._usage_at_end
        self._created = int(time.time())

    @functools.cached_property
    def _envelope(self) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.request_id}",
            "object": self.kind,
            "created": self._created,
            "model": self.info.model_name,
            "system_fingerprint": f"{VERSION}-native",
        }

    def events(self, sequence: Sequence, pieces: list[Piece]) -> bytes:
        usage = self._usage([sequence]) if self._usage_always else None
        return b"".join(self._chunk([choice], usage) for choice in self._choices(sequence, pieces))

    def _choices(self, sequence: Sequence, pieces: list[Piece]) -> Iterator[Struct]:
        """The choices of the events of `pieces`."""
        raise NotImplementedError

    def closing(self, sequences: list[Sequence]) -> bytes:
        usage = self._chunk([], self._usage(sequences)) if self._usage_at_end else b""
        return usage + event(b"[DONE]")

    def failure(self, error: ApiError) -> bytes:
        return event(error.openai_json) + event(b"[DONE]")

    def _chunk(self, choices: list, usage: schema.Usage | None) -> bytes:
        return event(schema.encode(self.chunk_type(**self._envelope, choices=choices, usage=usage)))

    def _usage(self, sequences: list[Sequence]) -> schema.Usage:
        """Tokens fed and produced. A prompt counts once, however many choices were made from it."""
        first = [sequence for sequence in sequences if sequence.number == 0]
        prompt_tokens = sum(len(sequence.prompt) for sequence in first)
        completion_tokens = sum(sequence.tokens for sequence in sequences)
        cached = schema.PromptTokensDetails(sum(sequence.ran.cached for sequence in first if sequence.ran))
        return schema.Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached)


class ChatAnswer(OpenAIAnswer):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    id_prefix = "chatcmpl"
    chunk_type = schema.ChatChunk

    def __init__(self, *args, request: ChatRequest):
        super().__init__(*args, options=request.stream_options)
        self._reading = self.jobs[0].reading
        self._readers: dict[Sequence, Reader] = {}  # of those with events in the stream
        self._wants_logprobs = bool(request.logprobs)
        if self.streams:
            self.kind = "chat.completion.chunk"

    def text_of(self, piece: Piece) -> str:
        """What a piece adds to the text that a reader reads."""
        return "" if piece.special and piece.text not in self._reading.markers else piece.text

    def whole(self, sequences: list[Sequence]) -> Struct:
        choices = []
        for index, sequence in enumerate(sequences):
            read = self._reading.whole("".join(map(self.text_of, sequence.pieces)))
            message = schema.ChatMessage("assistant", read.content)
            if read.reasoning:
                message.reasoning = message.reasoning_content = read.reasoning
            if read.calls:
                message.content = read.content or ("" if self._reading.calls.is_forced else None)
                message.tool_calls = [
                    schema.ToolCall(call.id, "function", schema.CalledFunction(call.name, call.arguments))
                    for call in read.calls
                ]
            reason = self._finish_reason(sequence, bool(read.calls))
            choices.append(schema.ChatChoice(index, message, self._logprobs(sequence.pieces), reason))
        return schema.ChatCompletion(**self._envelope, choices=choices, usage=self._usage(sequences))

    def _choices(self, sequence: Sequence, pieces: list[Piece]) -> Iterator[schema.ChunkChoice]:
        choice = functools.partial(schema.ChunkChoice, sequence.index)
        if sequence not in self._readers:
            self._readers[sequence] = self._reading.reader()
            yield choice(schema.Delta(role="assistant", content=""))
        reader = self._readers[sequence]
        for piece in pieces:
            deltas = [_delta(part) for part in reader.push(self.text_of(piece))]
            if self._wants_logprobs and not deltas:
                deltas = [schema.Delta(content="")]
            for n, delta in enumerate(deltas):
                yield choice(delta, None if n else self._logprobs([piece]))
        if sequence.finish_reason is not None:
            yield from (choice(_delta(part)) for part in reader.finish())
            last = (
                schema.Delta() if reader.has_calls else schema.Delta(content="")
            )  # which loops print, and not None
            yield choice(last, None, self._finish_reason(sequence, reader.has_calls))

    def _finish_reason(self, sequence: Sequence, has_calls: bool) -> str:
        reason = OPENAI_FINISH_REASONS[sequence.finish_reason]
        return "tool_calls" if reason == "stop" and has_calls and not self._reading.calls.is_named else reason

    def _logprobs(self, pieces: list[Piece]) -> schema.ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return schema.ChatLogprobs([self._token_logprob(piece) for piece in pieces])

    def _token_logprob(self, piece: Piece) -> schema.TokenLogprob:
        top_logprobs = [self._top_logprob(*top) for top in piece.top]
        exact = self._bytes(piece.id, piece.text, piece.cut)
        return schema.TokenLogprob(piece.text, rounded(piece.logprob), exact, top_logprobs)

    def _top_logprob(self, token_id: int, logprob: float) -> schema.TopLogprob:
        text = self.tokenizer.token_text(token_id)
        return schema.TopLogprob(text, rounded(logprob), self._bytes(token_id, text))

    def _bytes(self, token_id: int, text: str, cut: int = 0) -> list[int] | None:
        """The token's own bytes without those that a stop string took, or where it has none the bytes of its text."""
        if token_id in self.tokenizer.special_ids:
            return None
        exact = self.tokenizer.piece_bytes(token_id)
        return list(text.encode() if exact is None else exact[: max(0, len(exact) - cut)])


def _delta(part: Part) -> schema.Delta:
    if isinstance(part, Content):
        return schema.Delta(content=part.text)
    if isinstance(part, Reasoning):
        return schema.Delta(reasoning=part.text, reasoning_content=part.text)
    if isinstance(part, CallBegin):
        begin = schema.FunctionDelta(part.name, "")
        return schema.Delta(tool_calls=[schema.ToolCallDelta(part.index, begin, part.id, "function")])
    return schema.Delta(
        tool_calls=[schema.ToolCallDelta(part.index, schema.FunctionDelta(arguments=part.text))]
    )


class CompletionAnswer(OpenAIAnswer):
    """`/v1/completions`. The choices of the first prompt come first; of `best_of` sequences the best `n` are returned."""

    kind = "text_completion"
    id_prefix = "cmpl"
    chunk_type = schema.Completion

    def __init__(self, *args, request: CompletionRequest):
        super().__init__(*args, options=request.stream_options)
        self._n = request.n or 1
        self._echoes = bool(request.echo)
        self._top_n = request.logprobs
        self._sent: dict[
            Sequence, int
        ] = {}  # characters of each stream that are out, for the offsets of log-probabilities

    def whole(self, sequences: list[Sequence]) -> Struct:
        choices: list[schema.CompletionChoice] = []
        for candidates in self._by_job(sequences):
            if len(candidates) > self._n:
                candidates = sorted(candidates, key=lambda sequence: -sequence.mean_logprob)[: self._n]
            for sequence in candidates:
                logprobs = self._logprobs(sequence, [*self._echoed_pieces(sequence), *sequence.pieces])
                reason = OPENAI_FINISH_REASONS[sequence.finish_reason]
                text = self._echoed(sequence) + sequence.stream.text
                choices.append(schema.CompletionChoice(len(choices), text, logprobs, reason))
        return schema.Completion(**self._envelope, choices=choices, usage=self._usage(sequences))

    def _choices(self, sequence: Sequence, pieces: list[Piece]) -> Iterator[schema.CompletionChoice]:
        choice = functools.partial(schema.CompletionChoice, sequence.index)
        if self._echoes and sequence not in self._sent:
            self._sent[sequence] = 0
            yield choice(self._echoed(sequence), self._logprobs(sequence, self._echoed_pieces(sequence)))
        for piece in pieces:
            text = "" if piece.special else piece.text
            if text or self._top_n is not None:
                yield choice(text, self._logprobs(sequence, [piece]))
        if sequence.finish_reason is not None:
            yield choice("", None, OPENAI_FINISH_REASONS[sequence.finish_reason])

    def _echoed(self, sequence: Sequence) -> str:
        if not self._echoes:
            return ""
        prompt = sequence.job.prompt
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _echoed_pieces(self, sequence: Sequence) -> list[Piece]:
        """The prompt's tokens where they are listed; `special` are those that the echo does not show."""
        if self._top_n is None or not self._echoes:
            return []
        pieces, echoed, at = self._prompt_pieces(sequence), self._echoed(sequence), 0
        for piece in pieces:
            piece.special = piece.special and not echoed.startswith(piece.text, at)
            at += 0 if piece.special else len(piece.text)
        return pieces

    def _logprobs(self, sequence: Sequence, pieces: list[Piece]) -> schema.CompletionLogprobs | None:
        if self._top_n is None:
            return None
        lengths = (0 if piece.special else len(piece.text) for piece in pieces)
        ends = list(accumulate(lengths, initial=self._sent.get(sequence, 0)))
        self._sent[sequence] = ends[-1]
        return schema.CompletionLogprobs(
            tokens=[piece.text for piece in pieces],
            token_logprobs=[rounded(piece.logprob) for piece in pieces],
            top_logprobs=[self._top(piece) for piece in pieces] if self._top_n else None,
            text_offset=ends[:-1],
        )

    def _top(self, piece: Piece) -> dict[str, float] | None:
        """OpenAI's form: the most likely tokens and the token itself, by text; of equal texts the more likely token counts."""
        if piece.logprob is None:
            return None
        top_logprobs: dict[str, float] = {}
        for token, logprob in [*piece.top, (piece.id, piece.logprob)]:
            top_logprobs.setdefault(self._name(token), rounded(logprob))
        return top_logprobs

    def _name(self, token: int) -> str:
        """A token's text; where it is but a part of a character, its bytes as OpenAI writes them."""
        text = self.tokenizer.token_text(token)
        exact = self.tokenizer.piece_bytes(token) if "\ufffd" in text else None
        return text if exact is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in exact)


def rounded(logprob: float | None) -> float | None:
    """With seven decimals: about the precision of a float32, where a float64 prints seventeen digits."""
    return None if logprob is None else round(logprob, 7) + 0.0  # of -0.0: 0.0
