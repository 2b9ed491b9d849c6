"""One form of a chat for all dialects: its messages, how a chat template reads them, and the job that they
make.

Chat completions, Responses, Vertex AI, SageMaker and `/chat_tokenize` bring their chats here as a
`ChatRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from api import formats
from api.errors import ApiError, invalid
from api.fields import check_top_n, require
from api.job import Job, Served, with_grammar
from api.openai import OpenAIRequest, check_openai
from api.tools import ToolUse, tool_use
from api.types import U32
from text.grammar import GrammarError
from text.reader import Reading
from text.stream import Piece
from text.template import TemplateError
from text.tool_formats import THINK, after_thinking

OPENAI_TOP_LOGPROBS = 20  # OpenAI's own limit
ROLES = ("system", "user", "assistant", "tool", "developer", "function")


class Part(Struct):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class Message(Struct, omit_defaults=True):
    """One message of a chat. The text parts of `content` are joined."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def chat_job(chat: ChatRequest, served: Served) -> Job:
    """The job of a chat, with the grammar of its format, its tools and its thinking together. Raises
    ApiError."""
    text = served.text
    job = _check(chat, served)
    use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls, text.tools)
    prompt = _prompt(chat, served)
    thinking = ""
    if served.config.reasoning_parser:
        thinking = "inside" if prompt.rstrip().endswith(THINK) else "before"
    name, grammar = _grammar(job, use)
    if grammar:
        try:
            grammar = after_thinking(grammar, thinking, text.tokenizer.token_to_id)
        except GrammarError as error:
            raise invalid(name, str(error)) from None
    job = with_grammar(job, name, grammar, served.info)
    if name == "tool_choice":
        job = replace(job, grammar_name="tools")  # whose schemas may fail to compile
    return replace(job, prompt=prompt, reading=Reading(use, thinking))


def _grammar(job: Job, use: ToolUse | None) -> tuple[str, str]:
    """The grammar of a job's format and its tools together, and the name of the field that asks for it."""
    if use is None:
        return job.grammar_name, job.grammar
    if job.grammar:
        return job.grammar_name, use.grammar_beside(job.grammar_name, job.grammar)
    return "tool_choice" if use.is_forced else "tools", use.grammar


def readable(piece: Piece, reading: Reading) -> str:
    """What a piece adds to the text that a reader of the answer reads."""
    is_hidden = piece.special and piece.text not in reading.markers
    return "" if is_hidden else piece.text


def _check(chat: ChatRequest, served: Served) -> Job:
    """Checks all fields but the messages and tools. The job's prompt is empty: the chat template writes
    it."""
    require(bool(chat.logprobs or not chat.top_logprobs), "top_logprobs", "needs `logprobs` to be true")
    limit_name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(chat, limit_name)
    require(limit != 0, limit_name, "must be strictly positive")
    count = len(chat.messages)
    most = served.info.max_input_tokens
    limits = f"each takes a token at least, and a prompt may have {most} (--max-input-tokens raises it)"
    require(count <= most, "messages", f"holds {count}: {limits}")
    job = check_openai(chat, "", limit, bool(chat.logprobs), served)
    most = max(OPENAI_TOP_LOGPROBS, served.config.max_top_n_tokens)
    check_top_n(chat.top_logprobs, "top_logprobs", most)
    job = replace(
        job,
        top_n_tokens=chat.top_logprobs or 0,
        add_special_tokens=False,  # the template writes them
        prompt_name="messages",
        limit_name=limit_name,
    )
    return with_grammar(job, *formats.of_openai(chat), served.info)


def _prompt(chat: ChatRequest, served: Served) -> str:
    """The text that the model's chat template makes of the messages and tools."""
    template = served.text.template
    escape = served.text.tokenizer.escape
    if template and chat.tools:
        template = template.for_tools
    messages = _messages(chat.messages, template.words if template else ())
    try:
        if template is None:
            raise TemplateError("template not found")
        # A role is a word that the template expects.
        escaped = [escape(message) | {"role": message["role"]} for message in messages]
        return template.render(escaped, escape(chat.tools))
    except (TemplateError, RecursionError) as error:
        # What a template says may repeat the client's own words.
        raise ApiError(422, "template_error", "Template error: ", quoted=str(error)) from None


def _messages(messages: list[Message], template_words: Collection[str]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them, the content of each as one text. Raises ApiError.

    A role is one of ROLES, or a word that the template has in quotes: templates may write any other next to
    control tokens.
    """
    require(len(messages) > 0, "messages", "cannot be empty")
    for n, message in enumerate(messages):
        is_known = message.role in ROLES or message.role in template_words
        detail = f"must be one of {', '.join(ROLES)}, or another role that the model's chat template names"
        require(is_known, f"messages[{n}].role", detail, given=message.role[:40])
    return [_message(f"messages[{n}]", message) for n, message in enumerate(messages)]


def _message(path: str, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(_part(f"{path}.content[{i}]", part) for i, part in enumerate(content))
    require(content is not None or bool(message.tool_calls), path, "needs `content`")
    written: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        written["name"] = message.name
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        written["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    return written


def _part(path: str, part: Part) -> str:
    require(part.type == "text", f"{path}.type", f"{part.type[:40]} is not supported, only text is")
    if part.text is None:
        raise invalid(path, "needs `text`")
    return part.text


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI sends them as JSON in a string, templates expect
    the object."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(arguments)}}
    except (ValueError, RecursionError):
        return call
