"""The types of requests and responses of every API.

msgspec parses request bodies into these types, and openapi.py describes them. A limit within a type's range is checked in
validate.py. This layer knows neither Flask nor ZeroMQ.

Source of the shapes: the HTTP API of Text Generation Inference 3.3 and OpenAI's API reference (chat completions, completions,
models). In requests `null` means absent.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from config import VERSION, Config
from protocol import ModelInfo

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# `extra_json_schema` is for the OpenAPI document: validate.py checks these limits, with TGI's error messages.
AtLeastOne = Annotated[U32, Meta(extra_json_schema={"minimum": 1})]
Positive = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})]
NotNegative = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Share = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
MinP = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Penalty = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
U64_MAX = 2**64 - 1  # msgspec's constraints end at 63 bits
JsonSchema = dict[str, Any] | str  # a string holds the schema as JSON


class SamplingFields(Struct, kw_only=True):
    """Fields that native, chat and completion requests share."""

    temperature: NotNegative | None = None
    top_k: I32 | None = None
    top_p: Share | None = None
    min_p: MinP | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None


class Parameters(SamplingFields, kw_only=True):
    """`parameters` of the native routes (TGI's GenerateParameters). formats.py reads `grammar`."""

    best_of: U32 | None = None
    temperature: Positive | None = None
    top_k: Annotated[I32, Meta(extra_json_schema={"minimum": 1})] | None = None
    typical_p: Share | None = None
    do_sample: bool | None = None
    max_new_tokens: AtLeastOne | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: U32 | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})] | None = None
    top_n_tokens: U32 | None = None
    grammar: dict[str, Any] | None = None


class GenerateRequest(Struct):
    """Body of the native routes. `stream` is ignored except on `POST /` and `/invocations`."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


class PrefillToken(Struct):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TokenOut(PrefillToken):
    """A generated token; without log-probability where the device samples."""

    special: bool


class Finish(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None


class StreamDetails(Finish):
    input_length: int


class StreamResponse(Struct):
    """One event of a native stream; the last one has `generated_text` and, if asked for, `details`."""

    index: int
    token: TokenOut
    top_tokens: list[TokenOut] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class SequenceDetails(Finish):
    prefill: list[PrefillToken]
    tokens: list[TokenOut]
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class BestOfSequence(SequenceDetails, kw_only=True):
    """A sequence of `best_of` other than the best."""

    generated_text: str


class Details(SequenceDetails):
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET


class GenerateResponse(Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class SimpleToken(Struct):
    """A token of a text, and the range of its bytes in the text's UTF-8."""

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
    """One message of a chat. The text parts of `content` are joined."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: one of the first four fields. `grammar` and `structural_tag` are not supported."""

    json: JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    grammar: str | None = None
    structural_tag: Any = None


class OpenAIRequest(SamplingFields, kw_only=True):
    """Fields that chat and completion requests share. `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `min_tokens`,
    `structured_outputs` and `guided_*` are vLLM's, `regex` and `json_schema` are SGLang's."""

    model: str | None = None  # ignored: one model is served
    max_tokens: U32 | None = None
    n: AtLeastOne | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    json_schema: JsonSchema | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/completions`: one prompt or several, each a text or a list of token ids."""

    prompt: str | list[str | int | list[int]]
    best_of: U32 | None = None
    echo: bool | None = None
    logprobs: U32 | None = None
    suffix: str | None = None


class VertexRequest(Struct):
    """Body of `POST /vertex`; each instance is `inputs` with `parameters`, or a chat request."""

    instances: list[msgspec.Raw]  # parsed one by one, each as its own type


class VertexResponse(Struct):
    predictions: list[str]


class PromptTokensDetails(Struct):
    """`cached_tokens` did not run, because a slot still held them."""

    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    """`bytes` is null for a special token, which has no text."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CalledFunction(Struct):
    """`arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: str
    function: CalledFunction


class ChatMessage(Struct):
    """`content` is null where there are calls only."""

    role: str
    content: str | None
    reasoning: str | UnsetType = UNSET  # vLLM's name
    reasoning_content: str | UnsetType = UNSET  # SGLang's
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class OpenAIResponse(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(OpenAIResponse):
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct, omit_defaults=True):
    """The beginning of a call has all fields; the others have more of its `arguments`."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


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


class ChatChunk(OpenAIResponse):
    choices: list[ChunkChoice]
    usage: Usage | None = None


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


class Completion(OpenAIResponse):
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TextConfig(Struct, omit_defaults=True):
    """`text` of a Responses request; `format` is `response_format` of a chat, without the level `json_schema`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ToolChoice(Struct, omit_defaults=True):
    """One function of `tools`, or with the type allowed_tools some of them and a `mode`."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesFields(Struct, kw_only=True):
    """What a Responses request may set and its response repeats; responses.py names those that are not supported."""

    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_logprobs: U32 | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: U32 | None = None


class InputPart(Part):
    """A part of an item's text: `input_text` or `output_text`."""


class InputItem(Struct):
    """A message (its type may be left out), `function_call`, `function_call_output`, or `reasoning`, which is ignored."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesRequest(ResponsesFields, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[InputItem]
    model: str | None = None  # ignored: one model is served
    stream: bool | None = None
    include: list[str] | None = None


class OutputText(Struct, tag="output_text"):
    text: str = ""
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text"):
    text: str = ""


class OutputItem(Struct, kw_only=True):
    id: str
    status: str = "in_progress"


class OutputMessage(OutputItem, tag="message"):
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(OutputItem, tag="reasoning"):
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText] = []


class FunctionCall(OutputItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str = ""


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesResponse(ResponsesFields, kw_only=True):
    """The body of a whole response; in a stream, the state of the response at its beginning and at its end."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    error: None = None  # a failed request has no response
    incomplete_details: dict[str, str] | None = None
    output: list[OutputMessage | OutputReasoning | FunctionCall] = []
    usage: ResponsesUsage | None = None


class ModelCard(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int

    @classmethod
    def of(cls, info: ModelInfo) -> ModelCard:
        return cls(info.model_name, "model", 0, info.model_name, info.max_total_tokens)


class ModelList(Struct):
    object: str
    data: list[ModelCard]


class ErrorBody(Struct, omit_defaults=True):
    """An error of the native routes; `phase` is the state of a server that is not ready."""

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
    """Body of `GET /info`: TGI's keys in TGI's order, then those of this server."""

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
    def of(cls, config: Config, info: ModelInfo) -> Info:
        values = dataclasses.asdict(config) | msgspec.structs.asdict(info)
        values |= dict.fromkeys(("model_pipeline_tag", "sha", "docker_label"))
        values |= {
            "model_id": info.model_name,
            "model_device_type": info.device,
            "model_dtype": info.dtype,
            "max_batch_size": info.batch_size,
            "validation_workers": config.web_concurrency,
            "router": "neuron-textgen",
            "version": VERSION,
        }
        return cls(**{name: values[name] for name in cls.__struct_fields__})


encode = msgspec.json.Encoder().encode
