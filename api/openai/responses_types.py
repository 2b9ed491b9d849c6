"""The types of `/v1/responses`: its request, its response, and the items of its output.

Source: OpenAI's API reference (responses).
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from api.chats.openai_shared import TokenLogprob, Usage
from api.http.fields import Json
from api.http.types import U32, AtLeastOne, SamplingOptions


class TextConfig(Struct, omit_defaults=True):
    """`text` of a Responses request; `format` is `response_format` of a chat, without the level
    `json_schema`."""

    format: Json | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, omit_defaults=True):
    """`effort` goes to the chat template. A `summary` of any kind is the whole reasoning; `generate_summary`
    is the older name of `summary`. `context` and `mode` change nothing."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesToolChoice(Struct, omit_defaults=True):
    """One function of `tools`, or with the type allowed_tools some of them and a `mode`."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[Json] | None = None


class ResponsesFields(SamplingOptions, kw_only=True):
    """What a request may set and its response repeats, except for the fields in NOT_REPEATED;
    REJECTED_FIELDS has those that are not supported."""

    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    top_logprobs: U32 | None = None
    text: TextConfig | None = None
    tools: list[Json] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | Json | None = None
    prompt: Json | None = None
    max_tool_calls: U32 | None = None  # of tools that OpenAI runs


class ResponsesRequest(ResponsesFields, kw_only=True):
    """Body of `POST /v1/responses`. The items of `input` are of the types in ITEMS; others are skipped."""

    input: str | list[Json] | None = None
    model: str | None = None  # or a LoRA adapter; ignored where none are served
    stream: bool | None = None
    include: list[str] | None = None
    chat_template_kwargs: Json | None = None


class InputTokens(Struct):
    """The response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class CompactRequest(Struct, kw_only=True):
    """Body of `POST /v1/responses/compact`."""

    model: str  # or a LoRA adapter; ignored where none are served
    input: str | list[Json] | None = None
    instructions: str | None = None
    tools: list[Json] | None = None
    reasoning: Json | None = None  # Codex sends it; a summary has none
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


class Compaction(Struct, tag="compaction"):
    """A summary, in an opaque form."""

    id: str
    encrypted_content: str


class OutputText(Struct, tag="output_text"):
    text: str = ""
    annotations: list[Json] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text"):
    text: str = ""


class SummaryText(Struct, tag="summary_text"):
    text: str = ""


class OutputItem(Struct, kw_only=True):
    id: str
    status: str = "in_progress"


class OutputMessage(OutputItem, tag="message"):
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(OutputItem, tag="reasoning"):
    """`encrypted_content` and `summary` are there if the request asks for them."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(OutputItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomToolCall(OutputItem, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


class BuiltInCall(OutputItem):
    """The call of a tool that OpenAI defines and the client runs. BUILT_IN says which field has its
    arguments."""

    call_id: str


class ShellCall(BuiltInCall, tag="shell_call"):
    action: Json = {}


class LocalShellCall(BuiltInCall, tag="local_shell_call"):
    action: Json = {}


class ApplyPatchCall(BuiltInCall, tag="apply_patch_call"):
    operation: Json = {}


class ToolSearchCall(BuiltInCall, tag="tool_search_call"):
    arguments: Json = {}
    execution: str = "client"


AnyOutputItem = (
    OutputMessage
    | OutputReasoning
    | FunctionCall
    | CustomToolCall
    | ShellCall
    | LocalShellCall
    | ApplyPatchCall
    | ToolSearchCall
    | Compaction
)


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponsesUsage:
        return cls(
            usage.prompt_tokens,
            {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
            usage.completion_tokens,
            {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            usage.total_tokens,
        )


class ResponsesResponse(ResponsesFields, kw_only=True):
    """The body of a whole response; in a stream, the state of the response at its beginning and at its
    end."""

    id: str
    object: str
    created_at: int
    completed_at: int | None = None
    status: str
    model: str
    error: Json | None = None  # of a stream that failed
    incomplete_details: dict[str, str] | None = None
    output: list[AnyOutputItem] = msgspec.field(default_factory=list)
    usage: ResponsesUsage | None = None


class CompactedConversation(Struct, kw_only=True):
    """The response of `POST /v1/responses/compact`."""

    id: str
    object: str = "response.compaction"
    created_at: int
    output: list[Compaction]
    usage: ResponsesUsage
