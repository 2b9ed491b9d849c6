"""`/v1/completions`: prompts as texts or token ids, `echo`, `best_of`, log-probabilities in the older
form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from api.chats import formats
from api.chats.openai_shared import (
    FINISH_REASONS,
    ChunkedResponseWriter,
    OpenAIRequest,
    OpenAIResponse,
    PromptLogprobs,
    Usage,
    check_openai,
)
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence, ResponseWriter, rounded
from api.http import errors, fields
from api.http.fields import Json, require
from api.http.types import U32
from text.infill import layout_of
from text.stream import Piece


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/completions`: one prompt or several, each a text or a list of token ids."""

    prompt: str | list[str | int | list[int]]
    best_of: U32 | None = None
    echo: bool | None = None
    logprobs: U32 | None = None
    suffix: str | None = None  # what follows the completion

    @property
    def ranks_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are asked for."""
        return bool(self.echo) and self.logprobs is not None


class CompletionLogprobs(Struct):
    """Lists with an entry for each token; `text_offset` is in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(OpenAIResponse):
    choices: list[CompletionChoice]
    usage: Usage | None = None


def completion(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of the response to a completion request. Raises ApiError for a wrong field, and for
    fields that cannot be combined. Texts are not tokenized here, the length of prompts is not checked, and
    the grammar not compiled."""
    request = fields.read(data, CompletionRequest)
    return CompletionResponseWriter(_prepare(request, served), served, request)


def _prepare(request: CompletionRequest, served: Served) -> list[PreparedRequest]:
    """Checks a completion request. Returns a prepared request for each of its prompts, in order. Raises
    ApiError for too many prompts, for a field that is wrong, and for fields that cannot be combined."""
    prompts = _prompts(request.prompt)
    fields.check_batch(len(prompts), "prompts", "prompt", served.config)
    if request.suffix:
        require(not request.echo, "echo", "cannot be combined with `suffix`")
    n = request.n or 1
    best_of = request.best_of or n
    if best_of != n:
        require(not request.stream, "best_of", "> `n` is not supported when streaming tokens")
        require(best_of > n, "best_of", f"must be >= `n`. Given: {best_of} and {n}")
        fields.check_best_of(best_of, served.config)
    detail = "must be strictly positive, unless `echo` asks for the prompt alone"
    require(request.max_tokens != 0 or request.echo, "max_tokens", detail)
    fields.check_top_n(request.logprobs, "logprobs", served.config.max_top_n_tokens)
    gives_prompt = served.info.prompt_logprobs or not request.ranks_prompt
    require(gives_prompt, "logprobs", f"with `echo` {fields.NO_PROMPT_LOGITS}")
    constraint = formats.of_openai(request)
    checked = [_check_prompt(request, prompt, best_of, served) for prompt in prompts]
    constraint.check(served.info, request.ignore_eos)
    return [PreparedRequest(**each, **constraint._asdict()) for each in checked]


def _check_prompt(request: CompletionRequest, prompt: str | list[int], best_of: int, served: Served) -> Json:
    """Checks one prompt. Returns the fields of its PreparedRequest, by name, except for those of the
    Constraint. A text is escaped; with a `suffix`, the prompt is both texts in the model's layout, whose
    tokens stop the output. Raises ApiError for an empty prompt without a `suffix`, ids that the model does
    not know, a `suffix` that the model does not support or that follows ids, and for what `check_openai`
    rejects. best_of: how many sequences are generated, of which `n` are returned."""
    require(prompt or request.suffix, "prompt", "cannot be empty")
    if isinstance(prompt, list):
        fields.check_ids(prompt, "prompt", served.info)
    else:
        prompt = served.text.tokenizer.escape(prompt)
    ranks = best_of > (request.n or 1)
    checked = check_openai(request, request.max_tokens, request.logprobs, served, best_of=ranks)
    checked |= {
        "prompt": prompt,
        "prompt_name": "prompt",
        "limit_name": "max_tokens",
        "sequences": best_of,
        "logprobs": checked["logprobs"] or ranks,
        "prompt_logprobs": checked["prompt_logprobs"] or request.ranks_prompt,
    }
    if request.suffix:
        tokenizer = served.text.tokenizer
        layout = layout_of(tokenizer)
        detail = "is not supported by this model: its tokenizer has no tokens for filling in the middle"
        require(layout, "suffix", detail)
        require(isinstance(prompt, str), "prompt", "must be text if there is a `suffix`")
        checked["prompt"] = layout.prompt(prompt, tokenizer.escape(request.suffix))
        # Some models go on with a next file or a next gap.
        checked["stop_token_ids"] = checked["stop_token_ids"].union(layout.token_ids(tokenizer))
    return checked


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """Returns the prompts of a field in one of OpenAI's four forms: a text, texts, token ids, or lists of
    token ids. Each prompt may be empty. Raises ApiError for an empty list and for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        what = "Empty array detected. Do not use an empty array for the prompt."
        raise errors.wrong_type(f"{what} - at `$.prompt`")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        what = "Expected strings, token ids or arrays of token ids, not a mixture"
        raise errors.wrong_type(f"{what} - at `$.prompt`")
    return [prompt] if kinds == {int} else prompt


class CompletionResponseWriter(ChunkedResponseWriter):
    """The choices of the first prompt come first; of `best_of` sequences the best `n` are returned."""

    kind = "text_completion"
    id_prefix = "cmpl"
    chunk_type = Completion

    def __init__(self, requests: list[PreparedRequest], served: Served, request: CompletionRequest):
        super().__init__(requests, served, request)
        self._n = request.n or 1
        self._echoes = request.echo
        self._top_n = request.logprobs
        # Characters of each sequence that are out, for the offsets of log-probabilities.
        self._sent: Counter[GeneratedSequence] = Counter()

    def whole(self, sequences: list[GeneratedSequence]) -> Struct:
        """Returns the choices of all prompts, numbered from 0. Of each prompt these are its `n` sequences or,
        of `best_of`, the `n` whose tokens are the most likely ones on average, the best first. `usage` counts
        all sequences, also those that are left out."""
        choices = []
        for candidates in self._by_request(sequences):
            if len(candidates) > self._n:
                candidates = sorted(candidates, key=lambda sequence: -sequence.mean_logprob)[: self._n]
            for sequence in candidates:
                pieces = [*self._echoed_pieces(sequence), *sequence.pieces]
                choices.append(
                    CompletionChoice(
                        index=len(choices),
                        text=self._echoed(sequence) + sequence.stream.text,
                        logprobs=self._logprobs(sequence, pieces),
                        finish_reason=FINISH_REASONS[sequence.finish_reason],
                        token_ids=self._token_ids(sequence.pieces),
                        prompt_token_ids=self._prompt_token_ids(sequence),
                        prompt_logprobs=self._prompt_logprobs(sequence),
                    )
                )
        return Completion(**self._envelope, choices=choices, usage=self._usage(sequences))

    def _choices(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[CompletionChoice]:
        """Yields the choice of each event that `pieces` make. The events are the echoed prompt, once; each
        piece; and, if the sequence has finished, the finish reason. A piece without text has an event only if
        log-probabilities or token ids are asked for. The sequence's first choice has the ids of the prompt,
        if token ids are asked for."""

        def choice(text: str, logprobs: CompletionLogprobs | None = None, **more: Any) -> CompletionChoice:
            prompt_ids = self._prompt_token_ids(sequence)
            return CompletionChoice(sequence.index, text, logprobs, prompt_token_ids=prompt_ids, **more)

        if self._echoes and sequence not in self._begun:
            echoed = self._logprobs(sequence, self._echoed_pieces(sequence))
            yield choice(self._echoed(sequence), echoed)
        for piece in pieces:
            text = "" if piece.special else piece.text
            if text or self._top_n is not None or self._returns_token_ids:
                logprobs = self._logprobs(sequence, [piece])
                yield choice(text, logprobs, token_ids=self._token_ids([piece]))
        if sequence.finish_reason is not None:
            yield choice("", finish_reason=FINISH_REASONS[sequence.finish_reason])

    def _echoed(self, sequence: GeneratedSequence) -> str:
        """Returns the text of the prompt, with which the choice begins if the request has `echo`; else "",
        nothing."""
        if not self._echoes:
            return ""
        prompt = sequence.prepared.prompt
        return self.tokenizer.unescape(prompt) if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _echoed_pieces(self, sequence: GeneratedSequence) -> list[Piece]:
        """Returns the tokens of the prompt as pieces; [] unless the request has both `echo` and `logprobs`. A
        special token is `special` unless its text is in the echoed text, where the pieces before it end. If
        the tokenizer changes the text (NFC), these places may be too low."""
        if not self._echoes or self._top_n is None:
            return []
        pieces = self._prompt_pieces(sequence)
        echoed = self._echoed(sequence)
        at = 0
        for piece in pieces:
            piece.special = piece.special and not echoed.startswith(piece.text, at)
            at += 0 if piece.special else len(piece.text)
        return pieces

    def _logprobs(self, sequence: GeneratedSequence, pieces: list[Piece]) -> CompletionLogprobs | None:
        """Returns the log-probabilities of these pieces; None unless the request has `logprobs`. Their
        offsets go on where the last call for this sequence ended, so each piece must be given once, in the
        order of the text."""
        if self._top_n is None:
            return None
        lengths = (0 if piece.special else len(piece.text) for piece in pieces)
        ends = list(accumulate(lengths, initial=self._sent[sequence]))
        self._sent[sequence] = ends[-1]
        return CompletionLogprobs(
            tokens=[piece.text for piece in pieces],
            token_logprobs=[rounded(piece.logprob) for piece in pieces],
            top_logprobs=[self._top(piece) for piece in pieces] if self._top_n else None,
            text_offset=ends[:-1],
        )

    def _top(self, piece: Piece) -> dict[str, float] | None:
        """Returns the log-probabilities of the most likely tokens and of the token itself, by text. Of equal
        texts the more likely token counts. None if the token has no log-probability."""
        if piece.logprob is None:
            return None
        top_logprobs = {}
        for token, logprob in [*piece.top[: self._top_n], (piece.id, piece.logprob)]:
            top_logprobs.setdefault(self._name(token), rounded(logprob))
        return top_logprobs

    def _name(self, token: int) -> str:
        """Returns a token's text. A part of a character has its bytes instead, as OpenAI writes them, such as
        `bytes:\\xf0`."""
        text = self.tokenizer.token_text(token)
        exact = self.tokenizer.piece_bytes(token) if "\ufffd" in text else None
        return text if exact is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in exact)
