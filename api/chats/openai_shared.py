"""What OpenAI's APIs share: fields of requests and their rules, usage, log-probabilities, streams of
chunks, models.

Source of the shapes: OpenAI's API reference (chat completions, completions, models).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from api.chats.formats import FormatFields
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence, ResponseWriter, rounded
from api.http.errors import OPENAI, ApiError, event
from api.http.fields import (
    CHAT_FIELDS,
    NO_PROMPT_LOGITS,
    FieldNames,
    Json,
    check_ids,
    check_sampling,
    check_stop,
    check_top_n,
    require,
    sampling_of,
)
from api.http.types import U32, AtLeastOne
from config import VERSION
from protocol import MAX_LOGIT_BIAS, ModelInfo
from text.stream import Piece

DONE = b"data: [DONE]\n\n"
FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(FormatFields, kw_only=True):
    """Fields that chat and completion requests share. `top_k`, `min_p`, `repetition_penalty`,
    `add_special_tokens`, `return_token_ids`, `prompt_logprobs` and `structured_outputs` are vLLM's, `regex`
    and `json_schema` are SGLang's."""

    model: str | None = None  # or a LoRA adapter; ignored where none are served
    max_tokens: U32 | None = None
    n: AtLeastOne | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None  # to the prompt; the template of a chat writes its own
    return_token_ids: bool | None = None
    prompt_logprobs: U32 | None = None


class PromptTokensDetails(Struct):
    """`cached_tokens` are from prefix caching, `image_tokens` of images, if the request has any."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """`accepted_prediction_tokens` are accepted draft tokens, from `prediction` or from the context."""

    accepted_prediction_tokens: int
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct):
    """`bytes` is null for a special token, which has no text."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class PromptLogprob(Struct):
    """The log-probability of a token of the prompt; `rank` counts from 1, null below the requested ones."""

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of a prompt: the token itself and the most likely ones in its place, by id. Null for the
# first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class OpenAIResponse(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Architecture(Struct):
    """OpenRouter's name for what a model reads and writes."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelCard(Struct):
    """An entry of `GET /v1/models`."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    architecture: Architecture
    root: str | UnsetType = UNSET  # of a LoRA adapter: its folder or its id on the hub
    parent: str | UnsetType = UNSET  # the model that it belongs to

    @classmethod
    def all_of(cls, info: ModelInfo) -> list[ModelCard]:
        """The cards of the model and of its LoRA adapters."""
        architecture = Architecture(info.input_modalities, ["text"])
        model = cls(info.model_name, "model", 0, info.model_name, info.max_total_tokens, architecture)
        adapters = (
            replace(model, id=name, root=source, parent=model.id) for name, source in info.adapters.items()
        )
        return [model, *adapters]


class ModelList(Struct):
    object: str
    data: list[ModelCard]


def check_openai(
    request: OpenAIRequest,
    limit: int | None,
    top_n: int | None,
    served: Served,
    field_names: FieldNames = CHAT_FIELDS,
    **host_only: Any,
) -> Json:
    """Checks the fields that chat and completion requests share. Returns fields of the PreparedRequest, by
    name. Raises ApiError for the first that is wrong, or that needs host sampling if the device samples.

    limit: the most tokens to generate; None: no limit of the request's own. top_n: how many of the most
    likely tokens each generated one comes with; None: no log-probabilities. host_only: whether the request
    uses each of these further fields, which need host sampling. Tokens are drawn at random unless the
    temperature is 0. Fields of sampling that the request leaves out get the model's defaults.
    """
    info = served.info
    adapter = served.adapter_of(request.model)
    most = served.config.max_client_batch_size
    n = 1 if request.n is None else request.n
    detail = f"must be > 0 and <= {most} (--max-client-batch-size raises it). Given: {n}"
    require(1 <= n <= most, "n", detail)
    check_sampling(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    check_stop(stop, served.config, field_names.stop)
    stop_token_ids = request.stop_token_ids or []
    check_ids(stop_token_ids, "stop_token_ids", info)
    detail = "is allowed only if `stream` is true"
    require(request.stream or request.stream_options is None, "stream_options", detail)
    if request.prompt_logprobs is not None:
        check_top_n(request.prompt_logprobs, "prompt_logprobs", served.config.max_top_n_tokens)
        require(not request.stream, "prompt_logprobs", "is not supported when streaming tokens")
        require(info.prompt_logprobs, "prompt_logprobs", NO_PROMPT_LOGITS)
    min_tokens = request.min_tokens or 0
    detail = f"must be <= the maximum of tokens to generate. Given: {min_tokens} and {limit}"
    require(limit is None or min_tokens <= limit, "min_tokens", detail)
    logit_bias = _logit_bias(request.logit_bias or {}, info)
    defaults = info.sampling_defaults
    temperature = defaults.get("temperature") if request.temperature is None else request.temperature
    logprobs = top_n is not None
    host_only |= {field_names.logprobs: logprobs, "min_tokens": min_tokens}
    sampling = sampling_of(request, temperature != 0, info, defaults, host_only, logit_bias)
    return {
        "sampling": sampling,
        "sequences": n,
        "max_new_tokens": limit,
        "min_new_tokens": min_tokens,
        "ignore_eos": bool(request.ignore_eos),
        "stop": stop if request.ignore_eos else [*stop, *info.stop_strings],
        "keep_stop": False,
        "stop_token_ids": frozenset(stop_token_ids),
        "add_special_tokens": request.add_special_tokens is not False,
        "shows_special_tokens": request.skip_special_tokens is False,
        "logprobs": logprobs,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "top_n_tokens": max(top_n or 0, request.prompt_logprobs or 0),
        "keep_eos": logprobs,
        "clamps_max_tokens": True,
        "adapter": adapter,
    }


def _logit_bias(given: dict[str, float], info: ModelInfo) -> list[tuple[int, float]]:
    """Returns the biases as pairs of a token id and a number. Raises ApiError for too many, for a key that is
    no id of the vocabulary, and for a bias outside of -100 to 100."""
    detail = f"takes up to {MAX_LOGIT_BIAS} tokens. Given: {len(given)}"
    require(len(given) <= MAX_LOGIT_BIAS, "logit_bias", detail)
    for token, bias in given.items():
        is_id = token.isascii() and token.isdigit() and len(token) <= 10
        require(is_id, "logit_bias", "maps token ids to numbers", given=token[:40])
        require(-100 <= bias <= 100, "logit_bias", f"must be >= -100 and <= 100. Given: {bias}")
    biases = {int(token): bias for token, bias in given.items()}
    check_ids(list(biases), "logit_bias", info)
    return list(biases.items())


class OpenAIResponseWriter(ResponseWriter):
    """What all responses of OpenAI's APIs share: error format, usage, log-probabilities."""

    error_format = OPENAI
    _top_n: int | None = None  # of the top log-probabilities, which the prompt may have more of; None: all

    def _usage(self, sequences: list[GeneratedSequence]) -> Usage:
        """Returns the counts of prompt and completion tokens. A prompt counts once, however many choices it
        has. sequences: one, or all of the request."""
        # The usage of one choice has its prompt, too.
        first = [sequence for sequence in sequences if sequence.number == 0] or sequences[:1]
        prompt_tokens = sum(len(sequence.prompt) for sequence in first)
        completion_tokens = sum(sequence.tokens for sequence in sequences)
        cached = sum(sequence.prompt_done.cached for sequence in first)
        of_images = sum(sequence.image_tokens for sequence in first)
        prompt_details = PromptTokensDetails(cached, of_images or UNSET)
        details = CompletionTokensDetails(
            accepted_prediction_tokens=sum(sequence.accepted_draft_tokens for sequence in sequences),
            reasoning_tokens=sum(sequence.reasoning_tokens for sequence in sequences),
        )
        total = prompt_tokens + completion_tokens
        return Usage(prompt_tokens, completion_tokens, total, prompt_details, details)

    def _token_logprob(self, piece: Piece) -> TokenLogprob:
        """Returns a generated token with its log-probability and those of the `_top_n` most likely tokens."""
        top = piece.top[: self._top_n]
        top_logprobs = [self._top_logprob(token_id, logprob) for token_id, logprob in top]
        exact = self._bytes(piece.id, piece.text, piece.trimmed)
        return TokenLogprob(piece.text, rounded(piece.logprob), exact, top_logprobs)

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        text = self.tokenizer.token_text(token_id)
        return TopLogprob(text, rounded(logprob), self._bytes(token_id, text))

    def _bytes(self, token_id: int, text: str, trimmed: int = 0) -> list[int] | None:
        """Returns the token's own bytes, without the last `trimmed` ones, which a stop string has removed. A
        token without bytes of its own has those of its text. None: a special token."""
        if token_id in self.tokenizer.special_ids:
            return None
        exact = self.tokenizer.piece_bytes(token_id)
        return list(text.encode() if exact is None else exact[: max(0, len(exact) - trimmed)])


class ChunkedResponseWriter(OpenAIResponseWriter):
    """What chat and completions share: ids, and streams whose events are of the type `chunk_type`."""

    kind = ""  # the response's `object`
    id_prefix = ""
    chunk_type: type[OpenAIResponse]

    def __init__(self, requests: list[PreparedRequest], served: Served, request: OpenAIRequest):
        super().__init__(requests, served, request.stream)
        options = request.stream_options or StreamOptions()
        self._usage_at_end = options.include_usage
        self._usage_always = options.include_usage and options.continuous_usage_stats
        self._returns_token_ids = request.return_token_ids
        self._prompt_top_n = request.prompt_logprobs  # None: no log-probabilities of the prompt
        self._created = int(time.time())
        self._begun: set[GeneratedSequence] = set()  # with events in the stream

    @functools.cached_property
    def _envelope(self) -> Json:
        """The fields that each chunk, or the whole response, begins with, by name."""
        return {
            "id": f"{self.id_prefix}-{self.request_id}",
            "object": self.kind,
            "created": self._created,
            "model": self.model_name,
            "system_fingerprint": f"{VERSION}-native",
        }

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        """Returns an event for each choice that `pieces` make; b"": none. Each has the fields of
        `_beside_choice`, and the usage of the sequence so far if the request has `include_usage` and
        `continuous_usage_stats`."""
        usage = self._usage([sequence]) if self._usage_always else None
        chunks = b""
        for choice in self._choices(sequence, pieces):
            chunks += self._chunk([choice], usage, **self._beside_choice(sequence))
            self._begun.add(sequence)
        return chunks

    def _beside_choice(self, sequence: GeneratedSequence) -> Json:
        """Further fields of the next chunk, by name."""
        return {}

    def _choices(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[Struct]:
        """Yields the choice of each event that `pieces` make."""
        raise NotImplementedError

    def _prompt_token_ids(self, sequence: GeneratedSequence) -> list[int] | UnsetType:
        """Returns the token ids of the prompt, for a whole response or the sequence's first event. UNSET: the
        request does not ask for them, or an earlier event has them."""
        return sequence.prompt if self._returns_token_ids and sequence not in self._begun else UNSET

    def _token_ids(self, pieces: list[Piece]) -> list[int] | UnsetType:
        return [piece.id for piece in pieces] if self._returns_token_ids else UNSET

    def _prompt_logprobs(self, sequence: GeneratedSequence) -> PromptLogprobs | UnsetType:
        """Returns the log-probabilities of the tokens of the prompt, each with the most likely ones in its
        place; None for a token without any, as the first one. UNSET: the request does not ask for them."""
        if self._prompt_top_n is None:
            return UNSET
        return [
            None if piece.logprob is None else self._ranked(piece) for piece in self._prompt_pieces(sequence)
        ]

    def _ranked(self, piece: Piece) -> dict[str, PromptLogprob]:
        """Returns a token of the prompt, and the most likely ones in its place, by id. The rank of the token
        is None if it is not among these."""
        top = piece.top[: self._prompt_top_n]
        ranks = {token_id: rank for rank, (token_id, _logprob) in enumerate(top, 1)}
        return {
            str(token_id): PromptLogprob(
                rounded(logprob), ranks.get(token_id), self.tokenizer.token_text(token_id)
            )
            for token_id, logprob in [(piece.id, piece.logprob), *top]
        }

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        """Returns an event with the usage of all sequences, if the request asks for that, and the event
        DONE."""
        usage = self._chunk([], self._usage(sequences)) if self._usage_at_end else b""
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        return super().failure(error) + DONE

    def _chunk(self, choices: list, usage: Usage | None, **beside: Any) -> bytes:
        return event(self.chunk_type(**self._envelope, choices=choices, usage=usage, **beside))
