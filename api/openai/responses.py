"""`/v1/responses`: a request with its items becomes a chat.

The errors of the chat get the names that its fields have in a Responses request. responses_output.py writes
the response.
"""

from __future__ import annotations

import functools

from api.chats.content import PARTS, ContentPart, ContentReader, image, needed
from api.chats.conversation import ChatRequest, Message, arguments_of, call_message, prepare_chat
from api.chats.reasoning import unseal
from api.chats.tools import ADDED_TOOLS
from api.generation.prepared_request import PreparedRequest, Served, ids_of
from api.generation.request_images import Later, RequestImages
from api.generation.response_writer import ResponseWriter
from api.http import fields
from api.http.errors import invalid
from api.http.fields import FieldNames, Json, require
from api.http.response_store import OwnedResponses
from api.http.types import SamplingOptions, encode_json
from api.openai.responses_output import CompactionWriter, ResponsesWriter, TriggeredCompactionWriter
from api.openai.responses_tools import BUILT_IN, ResponsesTools
from api.openai.responses_types import CompactRequest, InputTokens, ReasoningConfig, ResponsesRequest

REJECTED_FIELDS = {
    "conversation": "is not supported; use `previous_response_id`",
    "background": "is not supported",
    "prompt": "is not supported",
}
SUMMARIZE = (
    "Summarize this conversation for an assistant that continues it without having seen it: what the user "
    "asked for, what was done and found out, decisions, open questions, and the names, numbers and code that "
    "are still needed. Write the summary only."
)
MAX_SUMMARY_TOKENS = 1_000
SUMMARY = "Summary of the conversation so far:\n{}"
TRIGGER = "compaction_trigger"
CIPHERTEXT = "gAAAA"  # begins what OpenAI's server encrypts
LOGPROBS = "message.output_text.logprobs"


def responses(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of a response, or of a summary if the last item of `input` has the type TRIGGER.
    Reads the stored responses that the request continues. Its own response is stored when it is complete,
    unless `store` is false, no responses are stored, or it is a summary. Adds images to `served.images`,
    which loads them later. Waits for a child process that renders the prompt. Logs skipped items. Neither the
    length of the prompt nor the grammar is checked yet.

    Raises ApiError for a wrong field or item, for one that is not stored, and for a chat that the template
    rejects; StoreError if the stored responses cannot be read.
    """
    request = _read_request(data)
    conversation = Conversation(request, served.responses)
    if conversation.own and conversation.own[-1].get("type") == TRIGGER:
        return _triggered(request, conversation, served)
    prepared = _prepare_response(request, conversation, served)
    request.store = request.store is not False and served.responses.is_on
    own_input = encode_json(conversation.own) if request.store else b""
    return ResponsesWriter(prepared, served, request, conversation.tools, own_input)


def _triggered(request: ResponsesRequest, conversation: Conversation, served: Served) -> ResponseWriter:
    """Returns the writer of a response to a `compaction_trigger`: a summary of the conversation. The response
    is not stored. Adds images, waits and logs as `_prepare_response` does.

    In `conversation` the request for a summary takes the place of the last item, and `request.store` becomes
    false. Raises ApiError if there is nothing to summarize, and for a wrong item.
    """
    conversation.own.pop()
    prepared = _prepare_summary(request, conversation, served, request.chat_template_kwargs)
    request.store = False
    return TriggeredCompactionWriter(prepared, served, request, conversation.tools)


def input_tokens(data: Json, served: Served) -> Later:
    """Returns the function that counts the prompt's tokens once the images are loaded; adds these to
    `served.images`. Waits for a child process that renders the prompt. Logs skipped items. Raises ApiError
    for a wrong field or item, for one that is not stored, and for a chat that the template rejects; the
    function does so for a prompt that is far too long. Raises StoreError if the stored responses cannot be
    read."""
    request = _read_request(data)
    prepared = _prepare_response(request, Conversation(request, served.responses), served)
    return lambda: InputTokens(len(ids_of(prepared, served)))


def compact(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of the response with the model's summary of the conversation, which is not stored.
    Adds images to `served.images`, waits for a child process that renders the prompt, and logs skipped items.
    Raises ApiError if there is nothing to summarize, for a wrong field or item, for one that is not stored,
    and for a chat that the template rejects; StoreError if the stored responses cannot be read."""
    request = fields.read(data, CompactRequest)
    prepared = _prepare_summary(request, Conversation(request, served.responses), served)
    return CompactionWriter([prepared], served)


def _prepare_summary(
    given: CompactRequest | ResponsesRequest,
    conversation: Conversation,
    served: Served,
    chat_template_kwargs: Json | None = None,
) -> PreparedRequest:
    """Returns the prepared request for a summary of a conversation, without reasoning and calls, greedy, and
    of at most MAX_SUMMARY_TOKENS. The prompt has the tools of the conversation if the template has a place
    for tools, so that its prefix is cached. Raises ApiError for a conversation without items, and for a wrong
    item. given: has the model and the instructions.

    Adds the message that asks for the summary to the conversation. Adds images, waits and logs as
    `_prepare_response` does.
    """
    require(conversation.items, "input", "has no conversation to summarize")
    conversation.own.append({"role": "user", "content": SUMMARIZE})
    request = ResponsesRequest(
        model=given.model,
        instructions=given.instructions,
        tool_choice="none",
        reasoning=ReasoningConfig("none"),
        max_output_tokens=MAX_SUMMARY_TOKENS,
        temperature=0,
        chat_template_kwargs=chat_template_kwargs,
    )
    return _prepare_response(request, conversation, served)


def _read_request(data: Json) -> ResponsesRequest:
    """Returns the request as its type. Raises ApiError for a wrong field, and for fields that are not
    supported. Items and tools are not checked here."""
    request = fields.read(data, ResponsesRequest)
    for name, why in REJECTED_FIELDS.items():
        if getattr(request, name):
            raise invalid(name, why)
    if request.truncation not in (None, "disabled", "auto"):
        raise invalid("truncation", "must be auto or disabled", given=request.truncation[:40])
    return request


def _prepare_response(
    request: ResponsesRequest, conversation: Conversation, served: Served
) -> PreparedRequest:
    """Returns the prepared request of the chat that the conversation is. Adds its images to `served.images`,
    logs skipped items, and waits for a child process that renders the prompt. Raises ApiError for a wrong
    field, item or tool, in the names of a Responses request, and for a chat that the template rejects."""
    tools = conversation.tools
    paths, messages = _chat_messages(request, conversation, served.images)
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=bool(request.top_logprobs) or LOGPROBS in (request.include or []),
        top_logprobs=request.top_logprobs,
        response_format=request.text and request.text.format,
        tool_choice=tools.choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        stream=request.stream,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
        **{name: getattr(request, name) for name in SamplingOptions.__struct_fields__},
    )
    names = FieldNames(
        messages=paths,
        prompt="input",
        limit="max_output_tokens",
        logprobs="top_logprobs",
        format="text.format",
        nests_tools=False,
        allowed_tools="",
    )
    return prepare_chat(chat, served, names, tools)


class Conversation:
    """The items and tools of a request. own: the items of its `input`, with stored items in place of
    references; a text is one message of the user. The items of the responses that the request continues are
    in front of these."""

    def __init__(self, request: ResponsesRequest | CompactRequest, stored: OwnedResponses):
        """Reads stored items. Raises ApiError for items that are not stored, are referred to twice or are too
        large together, for a malformed type, reference or tool, and for a tool of the request with which the
        model would use a computer or a browser; StoreError if the stored responses cannot be read."""
        previous = request.previous_response_id
        before = stored.conversation(previous) if previous else []
        self._before = [(f"previous_response_id[{i}]", item) for i, item in enumerate(before)]
        self.own: list[Json] = []
        given = request.input
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        for i, item in enumerate(given or ()):
            path = f"input[{i}]"
            if _kind(path, item) == "item_reference":
                item = stored.item(f"{path}.id", needed(path, item, "id", str))
            self.own.append(item)
        self.tools = ResponsesTools(request, self.items)

    @property
    def items(self) -> list[tuple[str, Json]]:
        """Pairs of an item's path in the request and the item, the oldest first. Examples of paths:
        `previous_response_id[0]`, `input[0]`."""
        return self._before + [(f"input[{i}]", item) for i, item in enumerate(self.own)]


def _chat_messages(
    request: ResponsesRequest, conversation: Conversation, images: RequestImages
) -> tuple[list[str], list[Message]]:
    """Returns the path of each message of the chat in the request, and the messages; the instructions are the
    first. Items of one answer (`_continues`) are one message, with the path of the first of these items. A
    content part in the place of an item, or the text of a tool that OpenAI ran, is a message of the user if
    its type begins with `input_`, else of the assistant. Adds images to `images`, and logs skipped items.
    Raises ApiError for a malformed item, and if there is `input`, but no message. Without `input` there may
    be none."""
    reader = ContentReader(ITEMS, images, conversation.tools)
    paths = []
    messages = []
    if request.instructions:
        paths.append("instructions")
        messages.append(Message("system", request.instructions))
    for path, item in conversation.items:
        kind = _kind(path, item)
        message = reader.part(path, kind, item)
        if isinstance(message, str):  # text of a tool that OpenAI ran, or a part without its message
            role = "user" if kind.startswith("input_") else "assistant"
            message = Message(role, message) if message else None
        if message is None:
            continue
        if _continues(messages, message):
            _join_turn(messages[-1], message)
        else:
            paths.append(path)
            messages.append(message)
    reader.log_skipped()
    if request.input and not messages:
        raise invalid("input", "needs an item that the model can read, such as a message")
    return paths, messages


def _kind(path: str, item: Json) -> str:
    """Returns the type of an item. An item without a type is an item_reference if it has an `id`, but neither
    `role` nor `content`; else it is a message. Raises ApiError for a type that is not a string."""
    if item.get("type") is not None:
        return needed(path, item, "type", str)
    return "item_reference" if "id" in item and not item.keys() & {"role", "content"} else "message"


def _continues(messages: list[Message], message: Message) -> bool:
    """Whether `message` becomes part of the last of `messages`. Both have to be the assistant's. A message
    with calls then always does; any other does if the last message has reasoning only.

    Example: reasoning, text, call, call are one message; a text behind these is another.
    """
    if not messages or messages[-1].role != "assistant" or message.role != "assistant":
        return False
    last = messages[-1]
    return bool(message.tool_calls) or (last.content is None and not last.tool_calls)


def _join_turn(turn: Message, other: Message) -> None:
    """Adds another message of the same answer to a turn, which changes in place: the reasoning, the calls
    and, if the turn has no content, the content. At most one of the two has content."""
    thoughts = filter(None, (turn.reasoning_content, other.reasoning_content))
    turn.reasoning_content = "\n".join(thoughts) or None
    turn.content = other.content if turn.content is None else turn.content
    turn.tool_calls = turn.tool_calls or []
    turn.tool_calls += other.tool_calls or ()


def _item_message(item: ContentPart) -> Message:
    role = item.needed("role", str)
    if role != "assistant":  # as in chats, an assistant's message may have no content
        item.needed("content")
    return Message(role, item.unbroken("content", role))


def _reasoning(item: ContentPart) -> Message | None:
    thoughts = item.unbroken("content" if item.get("content") else "summary")
    thoughts = thoughts or unseal(item.get("encrypted_content"))
    return Message("assistant", reasoning_content=thoughts) if thoughts else None


def _compacted(item: ContentPart) -> Message | None:
    summary = unseal(item.get("encrypted_content"))
    return Message("user", SUMMARY.format(summary)) if summary else None


def _agent_message(item: ContentPart) -> Message | None:
    """Returns a message of the user with the text that another agent of the same client wrote to this one;
    None: there is none."""
    text = item.unbroken("content")
    author = item.text("author?")
    return Message("user", f"Message from {author or 'an agent'}:\n{text}") if text else None


def _not_encrypted(part: ContentPart) -> str:
    """Returns the text of a part `encrypted_content`; "" if OpenAI's server has encrypted the text, which is
    then noted as skipped. Clients send an agent's message in this part as the model wrote it."""
    text = part.text("encrypted_content?")
    if text.startswith(CIPHERTEXT):
        part.reader.skip("encrypted_content")
        return ""
    return text


def _function_call(item: ContentPart) -> Message:
    return _call_message(item, arguments_of(f"{item.path}.arguments", item.get("arguments")))


def _custom_call(item: ContentPart) -> Message:
    return _call_message(item, {"input": item.needed("input", str)})


def _built_in_call(kind: str, item: ContentPart) -> Message:
    """Returns the call of a tool that OpenAI defines and the client runs, as a call of a function. Raises
    ApiError for an item without its arguments or its `call_id`."""
    row = BUILT_IN[kind]
    return _call_message(item, row.read(item.needed(row.field, dict)), kind)


def _tool_search_call(item: ContentPart) -> Message | None:
    if item.get("call_id") is None:
        return None  # OpenAI ran it
    return _built_in_call("tool_search", item)


def _computer_call(item: ContentPart) -> Message:
    """A call in a conversation with another server: this one has no computer use."""
    arguments = {name: item.get(name) for name in ("action", "actions") if item.get(name) is not None}
    return _call_message(item, arguments, "computer")


def _call_message(item: ContentPart, arguments: Json, name: str = "") -> Message:
    """Returns the message that calls a tool. name: of the tool; "": the name in the item. Raises ApiError for
    an item without a name or a `call_id`, and for a `namespace` that is no text."""
    namespace = item.get("namespace") and item.needed("namespace", str)
    name = item.reader.tools.name_of(name or item.needed("name", str), namespace)
    return call_message(item.needed("call_id", str), name, arguments)


def _call_output(item: ContentPart) -> Message:
    return _result_message(item, item.unbroken("output"))


def _result_message(item: ContentPart, text: str) -> Message:
    return Message("tool", text, tool_call_id=item.needed("call_id", str))


def _local_shell_output(item: ContentPart) -> Message:
    return _call_output(item._replace(fields={"call_id": item.get("id")} | item.fields))


def _shell_output(item: ContentPart) -> Message:
    """Returns the result of a shell call: the output of each command, with its exit code unless that is 0, or
    that it timed out. Raises ApiError for an output without its fields."""
    texts = []
    for i, given in enumerate(item.needed("output", list)):
        chunk = ContentPart(item.reader, f"{item.path}.output[{i}]", given)
        texts.append(chunk.text("stdout? stderr?"))
        outcome = chunk.needed("outcome", dict)
        if outcome.get("type") == "timeout":
            texts.append("timed out")
        elif outcome.get("exit_code"):
            texts.append(f"exit code {outcome['exit_code']}")
    return _result_message(item, "\n".join(filter(None, texts)))


def _patch_output(item: ContentPart) -> Message:
    return _result_message(item, item.text("status? output?"))


def _found_tools(item: ContentPart) -> Message | None:
    """Returns a result with the definitions of the tools that a search found; for a search that OpenAI ran, a
    system message with them, or None if there are none."""
    if item.get("call_id") is None:
        return _additional_tools(item)  # OpenAI ran it
    return _result_message(item, item.reader.tools.added.get(item.path, ""))  # "": it is in another item


def _additional_tools(item: ContentPart) -> Message | None:
    """Returns a system message with the definitions of the tools that an item adds; None: it adds none, or
    the prompt lists them already."""
    added = item.reader.tools.added.get(item.path)  # None: its tools are listed
    return Message("system", ADDED_TOOLS + added) if added else None


def _file_search(item: ContentPart) -> str:
    """Returns the names and texts of the files that a search of OpenAI's found, a line each; "": none."""
    results = item.needed("results", list) if item.get("results") is not None else []
    parts = (
        ContentPart(item.reader, f"{item.path}.results[{i}]", result) for i, result in enumerate(results)
    )
    return "\n".join(part.text("filename? text?") for part in parts)


def _image(part: ContentPart) -> str:
    """Adds the image in a part with `image`, `source` or `base64`, as other APIs have them, and returns its
    mark. Any other part is the result of a tool that OpenAI ran, and becomes a note. Raises ApiError for an
    image that cannot be added."""
    is_given = any(part.get(name) for name in ("image", "source", "base64"))
    return image(part) if is_given else part.reader.omission("image")


# The readable types of items, and of what is in them.
ITEMS = PARTS | {
    "message": _item_message,
    "agent_message": _agent_message,
    "encrypted_content": _not_encrypted,
    "reasoning": _reasoning,
    "compaction": _compacted,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "local_shell_call": functools.partial(_built_in_call, "local_shell"),
    "local_shell_call_output": _local_shell_output,
    "shell_call": functools.partial(_built_in_call, "shell"),
    "shell_call_output": _shell_output,
    "apply_patch_call": functools.partial(_built_in_call, "apply_patch"),
    "apply_patch_call_output": _patch_output,
    "computer_call": _computer_call,
    "computer_call_output": _call_output,
    "tool_search_call": _tool_search_call,
    "tool_search_output": _found_tools,
    "additional_tools": _additional_tools,
    **dict.fromkeys(["summary_text", "reasoning_text"], "text"),
    "computer_screenshot": image,
    "image": _image,
    # The results of tools that OpenAI ran.
    "file_search_call": _file_search,
    "code_interpreter_call": "code? outputs?",
    "logs": "logs?",
    "mcp_call": "output?",
    "program": "code?",
    "program_output": "result?",
}
