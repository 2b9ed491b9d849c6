"""Responses while they grow: a `GeneratedSequence` is one completion of one prompt, a `ResponseWriter` the
response to one HTTP request.

Each API has a subclass of `ResponseWriter`, which writes the sequences of its requests, whole or
event by event.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

from msgspec import Struct

from api.generation.prepared_request import PreparedRequest, Served, TokenizedPrompt
from api.http.errors import TGI, ApiError, ErrorFormat, event, named_event
from protocol import PromptDone, Token
from text.output.parser import Added, Content, OutputPart
from text.stream import Piece, TextStream, prompt_texts
from text.tokenizer import Tokenizer

NOT_PREFILLED = PromptDone(id=0, queued_s=0.0)  # of a prompt that has not been run


class GeneratedSequence:
    """One completion of a prompt: reads the worker's tokens, and parses their text. Each Piece has in `added`
    what the piece adds to the parts of `output`; `rest` is what the end of the text adds. Times are
    CLOCK_MONOTONIC, in seconds.

    number: the place among the sequences of the prompt; index: among all sequences of the HTTP request. Both
    count from 0.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: TokenizedPrompt, number: int, index: int):
        prepared = prompt.prepared
        self.prepared = prepared
        self.prompt = prompt.ids
        self.image_tokens = prompt.image_tokens
        self.max_new_tokens = prompt.max_new_tokens
        self.number = number  # among the sequences of its request
        self.index = index  # among all of its request
        self.sampling = prepared.sampling_of(number)
        self._parser = prepared.parser_config.parser()
        self.stream = TextStream(
            tokenizer,
            prompt.ids,
            prepared.stop,
            prepared.keep_stop,
            prepared.min_new_tokens,
            self._parser.read,
        )
        self.output = self._parser.output
        self.rest: list[Added] = []
        self.written: OutputPart | None = None  # the part that the response is at
        self.pieces: list[Piece] = []  # all of them, for a response that is not streamed
        self.prompt_done = NOT_PREFILLED
        self.finish_reason: str | None = None
        self.first_token_at: float | None = None
        self.finished_at = 0.0
        self.accepted_draft_tokens = 0  # that took no step of their own
        self.reasoning_tokens = 0
        self._logprobs = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return self.stream.tokens

    @property
    def is_truncated(self) -> bool:
        """Whether the sequence ended at `max_tokens`, at the end of the context, or at the deadline."""
        return self.finish_reason == "length"

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the generated tokens; minus infinity if there are none."""
        return self._logprobs / self.tokens if self.tokens else -math.inf

    def take(self, token: Token) -> list[Piece]:
        """Reads the next token. Returns the pieces whose text has become certain, which may be none.

        The token ends the sequence (sets `finish_reason` and `finished_at`) if the engine says so, if the
        token is a stop token or completes a stop string, or if the parser is then done (unless `ignore_eos`).
        Any finish reason but the engine's is "stop_sequence". A stop string counts before the other reasons.
        If `max_new_tokens` is 0, the first token ends the sequence unread ("length"). The request in the
        worker is left to the caller.
        """
        self.first_token_at = self.first_token_at or time.monotonic()
        if self.prepared.max_new_tokens == 0:  # only the prompt is scored
            return self._give([], "length")
        self.accepted_draft_tokens += token.from_draft
        self._logprobs += token.logprob or 0.0  # None with on-device sampling, which ranks nothing
        reason = token.finish_reason
        was_thinking = self._parser.is_thinking
        if self._stops_at(token):
            reason = "stop_sequence"
            pieces = self.stream.stop_before(token.token, token.logprob, token.top)
        else:
            shows_special = self.prepared.shows_special_tokens and reason != "eos_token"
            is_last = reason is not None
            pieces = self.stream.push(token.token, token.logprob, token.top, is_last, shows_special)
        self.reasoning_tokens += was_thinking or self._parser.is_thinking
        is_done = self._parser.is_done and not self.prepared.ignore_eos
        if is_done and reason is None and not self.stream.stopped:
            pieces += self.stream.finish()
            reason = "stop_sequence"
        return self._give(pieces, reason)

    def _stops_at(self, token: Token) -> bool:
        """Whether a token is one of the request's own stop tokens, and not too early for `min_new_tokens`. A
        token with which the engine ends the sequence (`eos_token`) is none."""
        if token.token not in self.prepared.stop_token_ids or token.finish_reason == "eos_token":
            return False
        return self.tokens + 1 >= self.prepared.min_new_tokens

    def truncate(self) -> list[Piece]:
        """Ends the sequence at the deadline, with the finish reason "length", or "stop_sequence" if the text
        that was held back completes a stop string. Returns the pieces that were held back. The request in the
        worker is left to the caller."""
        return self._give(self.stream.finish(), "length")

    def _give(self, pieces: list[Piece], reason: str | None) -> list[Piece]:
        """Returns `pieces`. If the sequence ends with them, sets `finish_reason` and `finished_at`. The end
        of the text is parsed, and what it adds to the output becomes `rest`, unless a stop string ended the
        text. What a stop string has removed from the text is removed from what the pieces add to the output.

        reason: why the sequence ends; None: it goes on. If a stop string has ended the text, the reason is
        "stop_sequence" in any case.
        """
        if self.stream.stopped:
            reason = "stop_sequence"
            self._cut(pieces)
        elif reason is not None:
            self.rest = self._parser.finish(reason == "length")
        if reason is not None:
            self.finish_reason = reason
            self.finished_at = time.monotonic()
        return pieces

    def _cut(self, pieces: list[Piece]) -> None:
        """Removes from the output the content that the stop string has removed from the text. Reasoning and
        calls behind that content are removed too. `added` of the pieces changes in the same way. Parts of the
        output that lose all their text are removed."""
        length = self.stream.cut
        for piece in reversed(pieces):
            while length and piece.added:
                part, text = piece.added.pop()
                part.texts.pop()
                if isinstance(part, Content):
                    kept = text[: max(0, len(text) - length)]
                    length -= len(text) - len(kept)
                    if kept:
                        piece.added.append((part, kept))
                        part.texts.append(kept)
                if not part.texts:
                    self.output.parts.pop()


class ResponseWriter:
    """Writes the response to one HTTP request; sends nothing. Each API has a subclass, with `whole` for a
    response that is not streamed, and `events` and `stream_end` for a stream.

    requests: the prompts of the HTTP request, each with its settings. streams: whether the response is a
    stream; None: it is not.
    """

    error_format: ErrorFormat = TGI
    content_type = "text/event-stream; charset=utf-8"  # of a stream; some clients read Latin-1 without it
    keep_alive = b":\n\n"  # sent while a stream is silent for long; an SSE comment
    left_out: Collection[str] = ()  # the request's tool types that this server does not run
    # Methods for chats: what the response gets when a part of the output begins, has more text, and ends.
    _begin: Callable[[OutputPart], Iterable[Any]]
    _continue: Callable[[OutputPart, str], Iterable[Any]]
    _end: Callable[[OutputPart], Iterable[Any]]

    def __init__(self, requests: list[PreparedRequest], served: Served, streams: bool | None = False):
        self.requests = requests
        self.info = served.info
        self.model_name = requests[0].adapter or served.info.model_name
        self.tokenizer = served.text.tokenizer
        self.streams = bool(streams)
        self.request_id = ""  # of the HTTP request; set before anything is written

    @property
    def lists_prompts(self) -> bool:
        """Whether the response has the tokens of its prompts, which take long to write."""
        return any(prepared.prompt_logprobs for prepared in self.requests)

    def whole(self, sequences: list[GeneratedSequence]) -> Struct | list:
        """Returns the body of a response that is not streamed, to be encoded as JSON. Called once, when all
        sequences have finished. sequences: those of the first PreparedRequest, then those of the second, and
        so on. A subclass may raise ApiError."""
        raise NotImplementedError

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        """Returns the bytes that `pieces` add to a stream; b"": none. If `sequence` has finished, they are
        its last pieces.

        By default these are the events that `_read` yields, each under its name. Each event is written before
        `_read` makes the next event, because that changes objects that the earlier event holds.
        """
        return b"".join(map(named_event, self._read(sequence, pieces)))

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        """Returns the bytes after the events of all sequences, at the end of a stream without an error; b"":
        none."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Returns the last bytes of a stream that ends with an error. Sets the error's `request_id`, and its
        `status` to that of the API. A subclass whose stream has no form for errors raises
        ConnectionResetError."""
        error.request_id = self.request_id
        return event(error.body(self.error_format))

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[Any]:
        """Yields what the response gets for `pieces` and, if `sequence` has finished, for its end."""
        for piece in pieces:
            yield from self._write(sequence, piece.added)
        if sequence.finish_reason is not None:
            yield from self._write(sequence, sequence.rest)
            yield from self._end_part(sequence)

    def _write(self, sequence: GeneratedSequence, added: list[Added]) -> Iterator[Any]:
        """Yields what the response gets for text that is added to the parts of a sequence. These are the
        results of `_begin`, `_continue` and `_end`. A part ends when another part gets text. The last part
        stays open: `sequence.written` is that part."""
        for part, text in added:
            if part is not sequence.written:
                yield from self._end_part(sequence)
                sequence.written = part
                yield from self._begin(part)
            yield from self._continue(part, text)

    def _end_part(self, sequence: GeneratedSequence) -> Iterator[Any]:
        """Yields what the response gets at the end of the sequence's open part, which is closed then; nothing
        if none is open."""
        part = sequence.written
        sequence.written = None
        if part:
            yield from self._end(part)

    def _by_request(self, sequences: list[GeneratedSequence]) -> list[list[GeneratedSequence]]:
        """Returns the sequences of each PreparedRequest, in the order of the requests. sequences: all of
        them, in that order."""
        rest = iter(sequences)
        return [list(islice(rest, prepared.sequences)) for prepared in self.requests]

    def _prompt_pieces(self, sequence: GeneratedSequence) -> list[Piece]:
        """Returns the tokens of the prompt as pieces; special tokens have their names as text. If the request
        asks for log-probabilities of the prompt, each token but the first has its own and those of the most
        likely tokens in its place. If the prompt never ran, no token has any."""
        ids = sequence.prompt
        texts = prompt_texts(self.tokenizer, ids)
        scores = chain([(None, [])], sequence.prompt_done.scores, repeat((None, [])))
        special_ids = self.tokenizer.special_ids
        return [
            Piece(i, text, logprob, i in special_ids, top)
            for i, text, (logprob, top) in zip(ids, texts, scores)
        ]


def best_of(sequences: Iterable[GeneratedSequence]) -> GeneratedSequence:
    """Returns the sequence whose tokens are the most likely ones, on average; of equals, the first."""
    return max(sequences, key=lambda sequence: sequence.mean_logprob)


def rounded(logprob: float | None) -> float | None:
    """A log-probability with seven decimals, about the precision of a float32; a float64 prints seventeen."""
    return None if logprob is None else round(logprob, 7) + 0.0  # of -0.0: 0.0
