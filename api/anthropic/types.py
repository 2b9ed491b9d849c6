"""The bodies of Anthropic's Messages API: what requests and responses hold.

Source of the shapes: Anthropic's API reference (messages, models).
"""

from __future__ import annotations

from msgspec import Struct

from api.http.fields import Json
from api.http.types import U32, NotNegative, Share


class InputMessage(Struct):
    """One message. The blocks of `content` are of the types in BLOCKS; others are skipped."""

    role: str
    content: str | list[Json]


class AnthropicToolChoice(Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """`type` is enabled, disabled, or another one, which leaves reasoning to the model and to the effort.
    `display: omitted` returns reasoning in its `signature` only."""

    type: str
    budget_tokens: U32 | None = None
    display: str | None = None


class OutputConfig(Struct):
    """`format` is a JSON schema; `effort` goes to the chat template."""

    format: Json | None = None
    effort: str | None = None


class CountRequest(Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`. `tools` are functions, or of the types in CLIENT_TOOLS."""

    messages: list[InputMessage]
    model: str | None = None  # or a LoRA adapter; ignored where none are served
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None  # `output_config.format`, as LiteLLM sends it
    mcp_servers: list[Json] | None = None  # whose tools would run at Anthropic's
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of `POST /v1/messages`. `compaction` and a continued `thread` are not supported."""

    max_tokens: U32
    stop_sequences: list[str] | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: U32 | None = None
    stream: bool | None = None
    metadata: Json | None = None
    compaction: Json | None = None
    thread: Json | None = None


class TextBlock(Struct, tag="text"):
    text: str = ""


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: Json = {}


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessagesUsage(Struct):
    """`input_tokens` were prefilled, `cache_read_input_tokens` are from prefix caching."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_creation_input_tokens: int = 0


class MessagesResponse(Struct, kw_only=True):
    """The body of a whole response; in a stream, its state at the beginning."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(Struct):
    input_tokens: int


class AnthropicModelCard(Struct):
    id: str
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"
    type: str = "model"
    lifecycle: str = "active"


class AnthropicModelList(Struct):
    data: list[AnthropicModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
