"""The routes of Anthropic's Messages API, `/v1/messages` and `/v1/messages/count_tokens`: a request becomes a
chat (api/chats/conversation.py), without and with limits and sampling."""

from __future__ import annotations

from msgspec.structs import replace

from api.anthropic.blocks import BlockReader
from api.anthropic.output import MessagesResponseWriter
from api.anthropic.tools import MessagesTools
from api.anthropic.types import AnthropicToolChoice, CountRequest, MessagesRequest, TokenCount
from api.chats.conversation import ChatRequest, Message, prepare_chat
from api.chats.reasoning import ON
from api.generation.prepared_request import Served, ids_of
from api.generation.request_images import RequestImages
from api.generation.response_writer import ResponseWriter
from api.http import fields
from api.http.errors import invalid
from api.http.fields import FieldNames, Json, require
from protocol import SAMPLING_PARAMETERS


def messages(data: Json, served: Served) -> ResponseWriter:
    request = fields.read(data, MessagesRequest)
    require(not request.compaction, "compaction", "is not supported")
    continues = bool(request.thread) and request.thread.get("type") != "create"
    require(not continues, "thread", "cannot be continued: no messages are stored here; send all of them")
    tools = MessagesTools(request)
    chat, names = _chat_of(request, tools, served.images)
    chat.max_completion_tokens = request.max_tokens or None
    chat.stop = request.stop_sequences
    for name in SAMPLING_PARAMETERS.keys() & MessagesRequest.__struct_fields__:
        setattr(chat, name, getattr(request, name))
    prepared = prepare_chat(chat, served, names, tools.found)
    if request.max_tokens == 0:  # for prefix caching alone
        prepared = replace(prepared, max_new_tokens=0)
    return MessagesResponseWriter(prepared, served, request, tools)


def count_tokens(data: Json, served: Served) -> TokenCount:
    request = fields.read(data | {"max_tokens": 1}, MessagesRequest)
    tools = MessagesTools(request)
    chat, names = _chat_of(request, tools, served.images)
    return TokenCount(len(ids_of(prepare_chat(chat, served, names, tools.found), served)))


def _chat_of(
    request: CountRequest, tools: MessagesTools, images: RequestImages
) -> tuple[ChatRequest, FieldNames]:
    """The chat of a request, without limits and sampling. Raises ApiError."""
    reader = BlockReader(tools, images)
    paths = []
    messages: list[Message] = []
    if request.system:
        paths.append("system")
        messages.append(Message("system", reader.text("system", request.system)))
    for n, given in enumerate(request.messages):
        for message in reader.messages(f"messages[{n}]", given.role, given.content):
            paths.append(f"messages[{n}]")
            messages.append(message)
    reader.log_skipped()
    choice = request.tool_choice or AnthropicToolChoice("auto")
    format_name, response_format = _response_format(request)
    is_single = choice.disable_parallel_tool_use
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools.listed or None,
        tool_choice=tools.choice(choice),
        parallel_tool_calls=None if is_single is None else not is_single,
        response_format=response_format,
        reasoning_effort=_effort(request),
        thinking_token_budget=request.thinking.budget_tokens if request.thinking else None,
        chat_template_kwargs=_template_options(request),
    )
    names = FieldNames(
        messages=paths,
        tools=tools.paths,
        limit="max_tokens",
        stop="stop_sequences",
        budget="thinking.budget_tokens",
        format=format_name,
        schema="",
        nests_tools=False,
        parameters=".input_schema",
    )
    return chat, names


def _response_format(request: CountRequest) -> tuple[str, Json | None]:
    """The name of the field that has the format, and the format in a chat's form."""
    given = request.output_config.format if request.output_config else None
    name = "output_config.format" if given else "output_format"
    given = given or request.output_format
    if not given:
        return name, None
    if given.get("type") != "json_schema" or given.get("schema") is None:
        raise invalid(name, "must have the type json_schema and a `schema`")
    return name, {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _effort(request: CountRequest) -> str | None:
    if request.thinking and request.thinking.type == "disabled":
        return "none"
    return request.output_config.effort if request.output_config else None


def _template_options(request: CountRequest) -> Json:
    options = request.chat_template_kwargs or {}
    is_enabled = request.thinking is not None and request.thinking.type == "enabled"
    return ON | options if is_enabled else options
