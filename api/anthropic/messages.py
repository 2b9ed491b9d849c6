"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

A request becomes a chat (conversation.py), and the chat's text becomes content blocks, whole or as events.

Source of the shapes and of the order of events: Anthropic's API reference (messages, streaming, errors).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from api.chats import client_tools
from api.chats.client_tools import Definition
from api.chats.content import PARTS, ContentReader, joined, needed
from api.chats.conversation import ChatRequest, Message, prepare_chat
from api.chats.reasoning import ON, seal, unseal
from api.chats.tools import ADDED_TOOLS, definitions
from api.generation.prepared_request import PreparedRequest, Served, ids_of
from api.generation.request_images import RequestImages
from api.generation.response_writer import GeneratedSequence, ResponseWriter
from api.http import fields
from api.http.errors import ANTHROPIC, ApiError, invalid, named_event
from api.http.fields import FieldNames, Json, require
from api.http.types import U32, NotNegative, Share
from text.output import parser as output_parser
from text.output.json_mender import complete_members
from text.output.parser import Arguments, CallBegin, Content, Reasoning
from text.stream import Piece

HOSTED_SEARCH = "tool_search_tool_"  # what the types of Anthropic's searches begin with
STOP_REASONS = {"length": "max_tokens", "eos_token": "end_turn", "stop_sequence": "stop_sequence"}


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


def messages(data: Json, served: Served) -> ResponseWriter:
    request = fields.read(data, MessagesRequest)
    require(not request.compaction, "compaction", "is not supported")
    continues = bool(request.thread) and request.thread.get("type") != "create"
    require(not continues, "thread", "cannot be continued: no messages are stored here; send all of them")
    tools = MessagesTools(request)
    chat, names = _chat_of(request, tools, served.images)
    chat.max_completion_tokens = request.max_tokens or None
    chat.stop = request.stop_sequences
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
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


# The tools that Anthropic defines and the client runs, by type, without the date that follows it: each is a
# function.
CLIENT_TOOLS: dict[str, Callable[[str, Json], Definition]] = {
    "bash": client_tools.bash,
    "text_editor": client_tools.text_editor,
    "memory": client_tools.memory,
}


class MessagesTools:
    """The tools of a request in a chat's form. Those that Anthropic runs are left out.

    `listed` are for the template's list. Blocks of the conversation may add others: they may be called, too,
    but their definitions stand at the place of the block, so that a tool search leaves the prefix as it is.
    Until then a tool may be deferred (`defer_loading`), unless Anthropic would search them.
    """

    def __init__(self, request: CountRequest):
        self.listed: list[Json] = []
        self.left_out: set[str] = {"mcp_servers"} if request.mcp_servers else set()  # types
        self._hosted: set[str] = set()  # the names of those that are left out
        self._known: dict[str, tuple[str, Json]] = {}  # the path and the form of each tool, by its name
        self._listed_paths: list[str] = []
        self._found: dict[str, tuple[str, Json]] = {}
        self._removed: set[str] = set()
        tools = request.tools or []
        defers = not any(str(tool.get("type")).startswith(HOSTED_SEARCH) for tool in tools)
        for i, tool in enumerate(tools):
            path = f"tools[{i}]"
            client_tools.reject_computer_use(path, tool)
            form = self._know(path, tool)
            if form and not (defers and tool.get("defer_loading")):
                self.listed.append(form)
                self._listed_paths.append(path)

    @property
    def found(self) -> list[Json]:
        """The tools that blocks have added."""
        return [form for _path, form in self._found.values()]

    @property
    def paths(self) -> list[str]:
        """The paths of the tools that are listed, then of those that are found."""
        return [*self._listed_paths, *(path for path, _form in self._found.values())]

    def add(self, name: str) -> str:
        """The definition of a tool that may be called from here on; the name alone if there is no such
        tool."""
        if name not in self._known:
            return name
        path, form = self._known[name]
        self._removed.discard(name)
        if form not in self.listed:
            self._found[name] = (path, form)
        return definitions([form])

    def define(self, path: str, tool: Json) -> str:
        """As `add`, for a tool that is defined here."""
        form = self._know(path, tool)
        return self.add(form["function"]["name"]) if form else ""

    def remove(self, name: str) -> None:
        """From here on the tool may not be called."""
        self._removed.add(name)

    def choice(self, given: AnthropicToolChoice) -> str | Json:
        """`tool_choice` in a chat's form. Raises ApiError."""
        offered = [*(form["function"]["name"] for form in self.listed), *self._found]
        names = [name for name in offered if name not in self._removed]
        mode = {"auto": "auto", "any": "required", "none": "none"}.get(given.type)
        if mode and (mode == "none" or len(names) == len(offered)):
            return mode
        if mode == "auto" and not names:
            return "none"
        if mode:
            named = [{"function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        if given.type != "tool" or given.name is None:
            detail = "must be auto, any, none, or tool with a `name`"
            raise invalid("tool_choice", detail, given=given.type[:40])
        detail = ""
        if given.name in self._hosted:
            detail = "names a tool that this server does not run"
        elif given.name in self._known and given.name not in names:
            detail = "names a tool that is deferred (`defer_loading`) or removed: no `tool_reference` adds it"
        if detail:
            raise invalid("tool_choice.name", detail, given=given.name[:40])
        return {"type": "function", "function": {"name": given.name}}

    def _know(self, path: str, tool: Json) -> Json | None:
        """A tool in a chat's form; None if Anthropic runs it. Raises ApiError."""
        kind = tool.get("type") or "custom"
        family, _, date = str(kind).rpartition("_")
        if kind == "custom":
            function = _function(path, tool)
        elif date.isdigit() and family in CLIENT_TOOLS:
            definition = CLIENT_TOOLS[family](date, tool)
            function = {"name": needed(path, tool, "name", str), **definition._asdict()}
            if tool.get("strict") is True:
                function["strict"] = True
        else:
            self.left_out.add(str(kind)[:40])
            self._hosted.add(str(tool.get("name")))
            return None
        form = {"type": "function", "function": function}
        self._known[function["name"]] = (path, form)
        return form


class BlockReader(ContentReader[Message]):
    """Reads the blocks of a request: texts, and messages with thoughts, a call or its result."""

    def __init__(self, tools: MessagesTools, images: RequestImages):
        super().__init__(BLOCKS, images)
        self.tools = tools

    def messages(self, path: str, role: str, content: str | list[Json]) -> Iterator[Message]:
        """What one message of the request becomes: blocks that belong to another role stand apart."""
        begun = Message(role)
        is_alone = True
        for kind, part in self.parts(f"{path}.content", content):
            if isinstance(part, str):
                begun.content = _appended(begun, kind, part)
            elif part.role == role:
                begun.reasoning_content = (begun.reasoning_content or "") + (part.reasoning_content or "")
                begun.tool_calls = [*(begun.tool_calls or []), *(part.tool_calls or [])]
            else:
                if begun != Message(role):
                    yield begun
                yield part
                begun = Message(role)
                is_alone = False
        if is_alone or begun != Message(role):
            begun.content = begun.content or ""
            yield begun


def _appended(message: Message, kind: str, text: str) -> str:
    """An assistant's text may come in several blocks, without a line break between them."""
    is_text = kind in ("", "text")
    if message.role == "assistant":
        return (message.content or "") + (text if is_text else f"\n{text}\n")
    return joined(message.content or "", text, "\n")


def _thoughts(reader: BlockReader, path: str, block: Json) -> Message:
    thoughts = reader.fields(path, block, "thinking?") or unseal(block.get("signature"))
    return Message("assistant", reasoning_content=thoughts)


def _call(_reader: BlockReader, path: str, block: Json) -> Message:
    given = needed(path, block, "input", dict) if block.get("input") is not None else {}
    function = {"name": needed(path, block, "name", str), "arguments": given}
    if block.get("toolset_name") is not None:  # a member of a toolset, in a conversation with another server
        arguments = {"action": function["name"]} | given
        function = {"name": needed(path, block, "toolset_name", str), "arguments": arguments}
    call = {"id": needed(path, block, "id", str), "type": "function", "function": function}
    return Message("assistant", tool_calls=[call])


def _result(reader: BlockReader, path: str, block: Json) -> Message:
    text = reader.fields(path, block, "content?")
    if block.get("is_error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=needed(path, block, "tool_use_id", str))


def _document(reader: BlockReader, path: str, block: Json) -> str:
    source = needed(path, block, "source", dict)
    readable = {"text": "data", "content": "content"}.get(needed(f"{path}.source", source, "type", str))
    if readable is None:
        return reader.omission("document")
    head = reader.fields(path, block, "title? context?")
    return "\n".join(filter(None, [head, reader.fields(f"{path}.source", source, readable)]))


def _tool_reference(reader: BlockReader, path: str, block: Json) -> str:
    name = "name" if "name" in block else "tool_name"  # in a tool_addition, in a result
    return reader.tools.add(needed(path, block, name, str))


def _tool_definition(reader: BlockReader, path: str, block: Json) -> str:
    return reader.tools.define(f"{path}.definition", needed(path, block, "definition", dict))


def _tool_addition(reader: BlockReader, path: str, block: Json) -> str:
    added = reader.fields(path, block, "tool")
    return ADDED_TOOLS + added if added else ""


def _tool_removal(reader: BlockReader, path: str, block: Json) -> str:
    reference = needed(path, block, "tool", dict)
    if reference.get("type") != "tool_reference":
        return ""  # to tools that Anthropic runs
    name = needed(f"{path}.tool", reference, "name", str)
    reader.tools.remove(name)
    return f"You may no longer call the function {name}."


def _browser_state(_reader: BlockReader, _path: str, block: Json) -> str:
    return f"Browser tabs: {json.dumps(block.get('tabs'), ensure_ascii=False)}"


# The readable types of blocks, and of what is in them.
BLOCKS = PARTS | {
    "thinking": _thoughts,
    "tool_use": _call,
    "tool_result": _result,
    "document": _document,
    "search_result": "title? source? content",
    "compaction": "content?",
    "tool_reference": _tool_reference,
    "tool_addition": _tool_addition,
    "tool_definition": _tool_definition,
    "tool_removal": _tool_removal,
    "browser_state": _browser_state,
    # The results of tools that Anthropic ran.
    "web_search_tool_result": "content?",
    "web_search_result": "title? url?",
    "web_fetch_tool_result": "content?",
    "web_fetch_result": "url? content?",
    "code_execution_tool_result": "content?",
    "code_execution_result": "stdout? stderr?",
    "bash_code_execution_tool_result": "content?",
    "bash_code_execution_result": "stdout? stderr?",
    "text_editor_code_execution_tool_result": "content?",
    "text_editor_code_execution_view_result": "content?",
    "text_editor_code_execution_str_replace_result": "lines?",
    "tool_search_tool_result": "content?",
    "tool_search_tool_search_result": "tool_references?",
    "advisor_tool_result": "content?",
    "advisor_result": "text?",
    "mcp_tool_result": "content?",
}


def _function(path: str, tool: Json) -> Json:
    """Raises ApiError."""
    function = {
        "name": needed(path, tool, "name", str),
        "parameters": needed(path, tool, "input_schema", dict),
    }
    if tool.get("description") is not None:
        function["description"] = needed(path, tool, "description", str)
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return function


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
        self._parser = prepared.parser_config.parser()
        self._omits_thinking = request.thinking is not None and request.thinking.display == "omitted"
        self._has_begun = False
        self._content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        self._arguments = ""  # of the newest call
        self._thoughts = ""  # that the signature carries

    def whole(self, sequences: list[GeneratedSequence]) -> MessagesResponse:
        (sequence,) = sequences
        for _event in self._read(sequence, sequence.pieces):
            pass
        response = self._response(sequence)
        response.content = self._content
        response.stop_reason = self._stop_reason(sequence)
        response.stop_sequence = self._stop_sequence(sequence)
        return response

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        return b"".join(map(named_event, self._read(sequence, pieces)))

    def stream_end(self, sequences: list[GeneratedSequence]) -> bytes:
        (sequence,) = sequences
        delta = {"stop_reason": self._stop_reason(sequence), "stop_sequence": self._stop_sequence(sequence)}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(sequence)}
        return named_event(last) + named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\n" + super().failure(error)

    def _response(self, sequence: GeneratedSequence) -> MessagesResponse:
        return MessagesResponse(
            id=f"msg_{self.request_id}",
            model=self.model_name,
            usage=self._usage(sequence),
        )

    def _usage(self, sequence: GeneratedSequence) -> MessagesUsage:
        cached = sequence.prompt_done.cached
        details = OutputTokensDetails(self._parser.reasoning_tokens)
        return MessagesUsage(len(sequence.prompt) - cached, sequence.tokens, cached, details)

    def _stop_sequence(self, sequence: GeneratedSequence) -> str | None:
        """The stop sequence of the request that ended the text."""
        stop = sequence.stream.stop
        return stop if stop in self._stop_sequences else None

    def _stop_reason(self, sequence: GeneratedSequence) -> str:
        reason = STOP_REASONS[sequence.finish_reason]
        if reason == "stop_sequence" and not self._stop_sequence(sequence):
            reason = "end_turn"  # a stop string of the model's own
        if reason == "end_turn" and self._parser.has_calls:
            return "tool_use"
        asked = sequence.prepared.max_new_tokens
        if sequence.is_truncated and asked and sequence.tokens >= sequence.max_new_tokens < asked:
            return "model_context_window_exceeded"
        return reason

    def _read(self, sequence: GeneratedSequence, pieces: list[Piece]) -> Iterator[Json]:
        """The events that `pieces` add; each has to be used before the next one is made."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._response(sequence)}
            yield {"type": "ping"}
        for piece in pieces:
            for part in self._parser.read(piece):
                yield from self._take(part)
        if sequence.finish_reason is not None:
            for part in self._parser.finish(sequence.is_truncated):
                yield from self._take(part)
            yield from self._end_block()

    def _take(self, part: output_parser.OutputPart) -> Iterator[Json]:
        newest = self._content[-1] if self._content else None
        if isinstance(part, CallBegin):
            yield from self._begin_block(ToolUseBlock(part.id, part.name))
        elif isinstance(part, Arguments):
            self._arguments += part.text
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Reasoning):
            if not isinstance(newest, ThinkingBlock):
                yield from self._begin_block(ThinkingBlock())
            if self._omits_thinking:
                self._thoughts += part.text
            else:
                self._content[-1].thinking += part.text
                yield self._delta({"type": "thinking_delta", "thinking": part.text})
        elif isinstance(part, Content) and part.text:
            if not isinstance(newest, TextBlock):
                yield from self._begin_block(TextBlock())
            self._content[-1].text += part.text
            yield self._delta({"type": "text_delta", "text": part.text})

    def _begin_block(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[Json]:
        yield from self._end_block()
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _end_block(self) -> Iterator[Json]:
        if not self._content:
            return
        newest = self._content[-1]
        if isinstance(newest, ToolUseBlock):
            newest.input = complete_members(self._arguments)
            self._arguments = ""
        if isinstance(newest, ThinkingBlock):
            newest.signature = seal(self._thoughts)
            yield self._delta({"type": "signature_delta", "signature": newest.signature})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}
