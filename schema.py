"""The types of requests and responses of every API.

msgspec parses bodies into these types and the OpenAPI document is made from them. What a value may be beyond its type is
checked in validate.py. This layer knows neither Flask nor ZeroMQ.

Source of shapes and words: the HTTP API of Text Generation Inference 3.3 and OpenAI's API reference (chat completions,
completions, models); `null` means absent, everywhere, and what is not named here is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from config import VERSION, Config
from protocol import ModelInfo

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# What the document says of a field, and a check below says in TGI's words.
AtLeastOne = Annotated[U32, Meta(extra_json_schema={"minimum": 1})]
TopK = Annotated[I32, Meta(extra_json_schema={"minimum": 1})]
Positive = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})]
NotNegative = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Share = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
MinP = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Penalty = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
U64_MAX = 2**64 - 1  # msgspec's constraints end at 63 bits


class Parameters(Struct):
    """`parameters` of the native routes (TGI's GenerateParameters)."""

    best_of: U32 | None = None
    temperature: Positive | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: MinP | None = None
    typical_p: Share | None = None
    do_sample: bool | None = None
    max_new_tokens: AtLeastOne | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: U32 | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})] | None = None
    top_n_tokens: U32 | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class GenerateRequest(Struct):
    """Body of the native routes; `stream` counts on `POST /` and `/invocations` alone."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


class TokenOut(Struct):
    """A token of the answer; a device that samples tells no log-probability."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct):
    """A token of the prompt; the first has no log-probability, for nothing stands before it."""

    id: int
    text: str
    logprob: float | None


class StreamDetails(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """One event of a native stream; `generated_text` and `details` come with the last."""

    index: int
    token: TokenOut
    top_tokens: list[TokenOut] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class BestOfSequence(Struct):
    """One of the sequences that `best_of` did not choose."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[TokenOut]
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class Details(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[TokenOut]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class GenerateResponse(Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class SimpleToken(Struct):
    """A token of a text and where it stands in it, in bytes of UTF-8."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct):
    tokenize_response: list[SimpleToken]
    templated_text: str


class Part(Struct):
    type: str
    text: str | None = None


class Message(Struct, omit_defaults=True):
    """One message of a chat. `content` may be a list of text parts, which are put together."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(Struct, kw_only=True):
    """What chat and completion requests have in common. `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and `min_tokens`
    are not OpenAI's, but clients of such servers send them."""

    model: str | None = None  # ignored: there is one
    max_tokens: U32 | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: I32 | None = None
    min_p: MinP | None = None
    n: AtLeastOne | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Positive | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`. The fields after `top_logprobs` are known only to be refused by name."""

    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/completions`: one prompt or several, each a text or a list of token ids."""

    prompt: str | list[str | int | list[int]]
    best_of: U32 | None = None
    echo: bool | None = None
    logprobs: U32 | None = None
    suffix: str | None = None


class InvocationRequest(Struct):
    """Body of `POST /invocations`: a native, a chat or a completion request, told apart by the field that it must have."""

    inputs: Any = None
    messages: Any = None
    prompt: Any = None


class VertexRequest(Struct):
    """Body of `POST /vertex`; each instance is `inputs` with `parameters`, or a chat request."""

    instances: list[msgspec.Raw]  # each is parsed as what it turns out to be


class VertexResponse(Struct):
    predictions: list[str]


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenLogprob(Struct):
    """`bytes` is null for a special token, which stands for no text."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class ChatMessage(Struct):
    role: str
    content: str


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Struct):
    """A list for each column, an entry for each token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int

    @classmethod
    def of(cls, facts: ModelInfo) -> ModelCard:
        return cls(facts.model_name, "model", 0, facts.model_name, facts.max_total_tokens)


class ModelList(Struct):
    object: str
    data: list[ModelCard]


class ErrorBody(Struct, omit_defaults=True):
    """An error of the native routes; `phase` says what a server that is not ready does."""

    error: str
    error_type: str
    phase: str | None = None


class OpenAIErrorDetail(Struct, omit_defaults=True):
    message: str
    type: str
    param: str | None
    code: str | None
    phase: str | None = None


class OpenAIErrorBody(Struct):
    """An error of OpenAI's routes."""

    error: OpenAIErrorDetail


class Info(Struct):
    """Body of `GET /info`: TGI's keys in TGI's order, then ours."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    max_batch_size: int
    model_device_type: str
    model_dtype: str
    eos_token_ids: list[int]
    sampling: str
    quantize: str | None

    @classmethod
    def of(cls, config: Config, facts: ModelInfo) -> Info:
        return cls(
            model_id=facts.model_name,
            model_sha=facts.model_sha,
            model_pipeline_tag=None,
            max_concurrent_requests=config.max_concurrent_requests,
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_input_tokens=facts.max_input_tokens,
            max_total_tokens=facts.max_total_tokens,
            validation_workers=config.web_concurrency,
            max_client_batch_size=config.max_client_batch_size,
            router="neuron-textgen",
            version=VERSION,
            sha=None,
            docker_label=None,
            max_batch_size=facts.batch_size,
            model_device_type=facts.device,
            model_dtype=facts.dtype,
            eos_token_ids=facts.eos_token_ids,
            sampling=facts.sampling,
            quantize=facts.quantize,
        )


encode = msgspec.json.Encoder().encode
