"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

A request becomes a chat (api/chats/conversation.py). `BLOCKS` has the types of content blocks that are read,
and how; others are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from api.anthropic.output import MessagesResponseWriter
from api.anthropic.tools import MessagesTools
from api.anthropic.types import (
    AnthropicToolChoice,
    CountRequest,
    InputMessage,
    MessagesRequest,
    OutputConfig,
    TokenCount,
)
from api.chats.content import PARTS, ContentPart, ContentReader, joined
from api.chats.conversation import ChatRequest, Message, ReasoningSwitch, call_message, prepare_chat
from api.chats.reasoning import unseal
from api.chats.tools import ADDED_TOOLS
from api.generation.prepared_request import PreparedRequest, Served, ids_of
from api.generation.request_images import Later
from api.generation.response_writer import ResponseWriter
from api.http import fields
from api.http.fields import FieldNames, Json, require
from protocol import SAMPLING_PARAMETERS


def messages(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of the response to a request of the Messages API. Waits for a child process that
    renders the prompt. Adds the request's images to `served.images`, which loads them later. Logs the blocks
    that are skipped. Neither the length of the prompt nor the grammar is checked yet.

    Raises ApiError for a field that is wrong or not supported, such as `compaction` and a `thread` that
    continues another one, and for a chat that the template rejects.
    """
    request = fields.read(data, MessagesRequest)
    require(not request.compaction, "compaction", "is not supported")
    continues = bool(request.thread) and request.thread.get("type") != "create"
    require(not continues, "thread", "cannot be continued: no messages are stored here; send all of them")
    tools = MessagesTools(request)
    sampling = SAMPLING_PARAMETERS.keys() & MessagesRequest.__struct_fields__
    prepared = _prepare(
        request,
        tools,
        served,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        **{name: getattr(request, name) for name in sampling},
    )
    return MessagesResponseWriter(prepared, served, request, tools)


def count_tokens(data: Json, served: Served) -> Later:
    """Returns the function that counts the prompt's tokens once the images are loaded; adds these to
    `served.images`. Waits for a child process that renders the prompt. Logs skipped blocks. Raises ApiError
    for a wrong field, and for a chat that the template rejects; the function does so for a prompt that is far
    too long. The request needs no `max_tokens`, and any value of it is ignored."""
    request = fields.read(data | {"max_tokens": 1}, MessagesRequest)
    prepared = _prepare(request, MessagesTools(request), served)
    return lambda: TokenCount(len(ids_of(prepared, served)))


def _prepare(request: CountRequest, tools: MessagesTools, served: Served, **more: Any) -> PreparedRequest:
    """Returns the prepared request of the chat that `request` is. Adds its images to `served.images`, logs
    skipped blocks, and waits for a child process that renders the prompt. Tools that blocks add or remove
    change `tools`. Raises ApiError for a wrong field, and for a chat that the template rejects. more: fields
    of the ChatRequest on which the prompt does not depend."""
    reader = ContentReader(BLOCKS, served.images, tools)
    paths = []
    messages: list[Message] = []
    if request.system:
        paths.append("system")
        messages.append(Message("system", reader.text("system", request.system)))
    for n, given in enumerate(request.messages):
        for message in _messages_of(reader, f"messages[{n}]", given):
            paths.append(f"messages[{n}]")
            messages.append(message)
    reader.log_skipped()
    choice = request.tool_choice or AnthropicToolChoice("auto")
    output = request.output_config or OutputConfig()
    is_single = choice.disable_parallel_tool_use
    given = request.thinking
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tool_choice=tools.choice(choice),
        parallel_tool_calls=None if is_single is None else not is_single,
        response_format=output.format or request.output_format,
        reasoning_effort=output.effort,
        thinking=given and ReasoningSwitch(given.type, budget_tokens=given.budget_tokens),
        chat_template_kwargs=request.chat_template_kwargs,
        **more,
    )
    names = FieldNames(
        messages=paths,
        limit="max_tokens",
        least_limit=0,  # for prefix caching alone
        stop="stop_sequences",
        budget="thinking.budget_tokens",
        format="output_config.format" if output.format else "output_format",
        nests_tools=False,
        parameters=".input_schema",
    )
    return prepare_chat(chat, served, names, tools)


def _messages_of(reader: ContentReader, path: str, given: InputMessage) -> Iterator[Message]:
    """Yields the chat's messages for one message of the request. Blocks are read as the messages are yielded:
    they add images and change the reader's `tools`. Raises ApiError for a block that is malformed. A message
    without readable blocks gives one with the content "".

    A block of another role, such as a tool's result, becomes a message of its own, which divides the blocks
    around it. Example: a user's message of a text, a tool's result and a text becomes three messages.
    """
    own: list[tuple[str, str | Message]] = []
    is_alone = True
    for kind, part in reader.parts(f"{path}.content", given.content):
        if isinstance(part, str) or part.role == given.role:
            own.append((kind, part))
            continue
        if own:
            yield _turn(given.role, own)
        yield part
        own = []
        is_alone = False
    if own or is_alone:
        yield _turn(given.role, own)


def _turn(role: str, parts: list[tuple[str, str | Message]]) -> Message:
    """Returns a message with these texts, reasoning and calls, each with the type of its block. Text blocks
    of an assistant follow each other without a line break; other texts are on lines of their own."""
    texts = []
    thoughts = []
    calls = []
    for kind, part in parts:
        if isinstance(part, Message):
            thoughts.append(part.reasoning_content or "")
            calls += part.tool_calls or ()
        elif role == "assistant" and kind not in ("", "text"):
            texts.append(f"\n{part}\n")
        else:
            texts.append(part)
    content = joined(texts, "" if role == "assistant" else "\n")
    return Message(role, content, tool_calls=calls, reasoning_content="".join(thoughts))


def _thoughts(block: ContentPart) -> Message:
    thoughts = block.text("thinking?") or unseal(block.get("signature"))
    return Message("assistant", reasoning_content=thoughts)


def _tool_use(block: ContentPart) -> Message:
    """Returns the assistant's message with the call in a block. A member of a toolset becomes a call of the
    toolset, with the member's name as the argument `action`, unless `input` has one. Raises ApiError for a
    block without a name or an id, and for an `input` that is no object; null is {}."""
    given = block.needed("input", dict) if block.get("input") is not None else {}
    name = block.needed("name", str)
    if block.get("toolset_name") is not None:  # a member of a toolset, in a conversation with another server
        given = {"action": name} | given
        name = block.needed("toolset_name", str)
    return call_message(block.needed("id", str), name, given)


def _tool_result(block: ContentPart) -> Message:
    text = block.text("content?")
    if block.get("is_error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.needed("tool_use_id", str))


def _document(block: ContentPart) -> str:
    """Returns the title, the context and the text of a document, a line each, or a note in its place if the
    type of its source is neither `text` nor `content`. Raises ApiError for a document without a source, and
    for a source without a type or without what its type names."""
    source = block.inner("source")
    readable = {"text": "data", "content": "content"}.get(source.needed("type", str))
    if readable is None:
        return block.reader.omission("document")
    return "\n".join(filter(None, [block.text("title? context?"), source.text(readable)]))


def _tool_reference(block: ContentPart) -> str:
    """Allows calls of the tool that the block names, and returns its definition, or the name alone if there
    is no such tool."""
    name = "name" if "name" in block.fields else "tool_name"  # in a tool_addition, in a result
    return block.reader.tools.add(block.needed(name, str))


def _tool_definition(block: ContentPart) -> str:
    """Allows calls of the tool that the block defines, and returns its definition; "" if Anthropic runs the
    tool."""
    return block.reader.tools.define(f"{block.path}.definition", block.needed("definition", dict))


def _tool_addition(block: ContentPart) -> str:
    """Allows calls of the tool that the block adds by name or defines. Returns its definition, with a
    sentence in front of it; "": there is none."""
    added = block.text("tool")
    return ADDED_TOOLS + added if added else ""


def _tool_removal(block: ContentPart) -> str:
    """Forbids calls of the tool that the block names, from here on, and returns a sentence that says so; ""
    for tools that Anthropic runs."""
    reference = block.inner("tool")
    if reference.get("type") != "tool_reference":
        return ""  # to tools that Anthropic runs
    name = reference.needed("name", str)
    block.reader.tools.remove(name)
    return f"You may no longer call the function {name}."


def _browser_state(block: ContentPart) -> str:
    return f"Browser tabs: {json.dumps(block.get('tabs'), ensure_ascii=False)}"


# The readable types of blocks, and of what is in them.
BLOCKS = PARTS | {
    "thinking": _thoughts,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
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
