"""Which format of tool calls a chat template writes: the first one that reads a rendered call back.

A marker in the template's source proves nothing: Hermes, Qwen3-Coder and GLM-4.5 share `<tool_call>`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from text.output.call_syntaxes import AllowedCalls, Function, ModelTools, ToolFormat
from text.output.parser import ParserConfig
from text.output.tool_formats import AS_TEXT, HERMES, TOOL_FORMATS, format_named
from text.template import ChatTemplate
from text.template_capabilities import USER, TemplateCapabilities, calls_and_results
from text.tokenizer import Tokenizer

ANSWER = {"role": "assistant", "content": "Wombat"}
ARGUMENTS = {"animal": "Numbat", "area": {"name": "Dingo", "size": 2.5}, "count": 3}
PARAMETERS = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "description": "Which"},
        "area": {
            "type": "object",
            "description": "Where",
            "properties": {
                "name": {"type": "string", "description": "Its name"},
                "size": {"type": "number", "description": "Its size"},
            },
        },
        "count": {"type": "integer", "description": "How many"},
    },
    "required": ["animal"],
}
NAME = "bilby"
FUNCTION = {"name": NAME, "description": "Looks", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def model_tools(
    template: ChatTemplate | None,
    capabilities: TemplateCapabilities,
    tokenizer: Tokenizer,
    parser: str | None,
) -> ModelTools:
    """Returns the tool support of a model with this chat template, for which it renders some chats, and waits
    for that. Raises ConfigError for an unknown `parser`.

    The format is the first that is found: the format of the calls that the template writes, of its response
    template, or of its words. It is None if none is found. A model without a template, or with one that
    writes no tools, has HERMES, described in the system message (`in_prompt`).

    parser: --tool-parser, a name for `format_named`, which counts before that. There are two exceptions:
    `mistral` leaves the found `mistral_v11`, and a template without tools can only have `none` instead; other
    names are ignored there.
    """
    named = format_named(parser) if parser else None
    if template is None or not capabilities.tools:
        form = AS_TEXT if named is AS_TEXT else HERMES
        return ModelTools(form, tokenizer.token_to_id, in_prompt=True)
    template = template.for_tools
    written = written_format(template)
    found = (
        written or _parsed_format(template.response_template) or _described_format(template.source, tokenizer)
    )
    if named and not (found and found.name.startswith(f"{named.name}_v")):  # vLLM's `mistral` is both
        found = named
    return ModelTools(
        format=found,
        token_id=tokenizer.token_to_id,
        parallel=written is None or capabilities.several_calls,
        short_ids=template.needs_short_ids,
    )


def written_format(template: ChatTemplate) -> ToolFormat | None:
    """Returns the first format that reads a call as the template writes it, with arguments as an object or as
    JSON text. None: no format does, or the template rejects the chat."""
    chats = [_chat_with_call(template, arguments) for arguments in (ARGUMENTS, json.dumps(ARGUMENTS))]
    return next((form for form in TOOL_FORMATS if any(_reads(form, chat) for chat in chats)), None)


def _parsed_format(response_template: Any) -> ToolFormat | None:
    """The format that transformers' `response_template` parses: of those whose texts all are in its patterns
    for tool calls, the one with the longest texts. None: there is none."""
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    patterns = json.dumps(fields.get("tool_calls"), ensure_ascii=False) if isinstance(fields, dict) else ""
    patterns = patterns.replace("\\", "")
    fitting = [form for form in TOOL_FORMATS if all(text in patterns for text in form.parts)]
    return max(fitting, key=lambda form: sum(map(len, form.parts)), default=None)


def _described_format(source: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The first format whose words the template has, or the vocabulary as a token. None: there is none.

    This is for templates that write no calls: they ask the model for calls in words of the format.
    """
    for form in TOOL_FORMATS:
        if any(words in source or tokenizer.token_to_id(words) is not None for words in form.described_by):
            return form
    return None


def _chat_with_call(template: ChatTemplate, arguments: Any) -> str:
    """Returns a chat in which an assistant calls the function, from where the chat begins to differ from one
    without a call; "": the template rejects the chat."""
    with_call = template.attempt([USER, *calls_and_results((NAME, arguments))], TOOLS)
    with_text = template.attempt([USER, ANSWER, USER], TOOLS)
    common = os.path.commonprefix([with_call, with_text])  # noqa: RUF071 of any texts, not of paths
    return with_call.removeprefix(common)


def _reads(form: ToolFormat, chat: str) -> bool:
    """Whether the format reads the text `chat` as exactly one call, that of NAME with ARGUMENTS, with their
    types."""
    calls = AllowedCalls(ModelTools(form), [Function(NAME, PARAMETERS)], "auto", parallel=True)
    parser = ParserConfig(calls, enforces_calls=True).parser()
    parser.push(chat)
    parser.finish()
    return [(call.name, json.loads(call.text)) for call in parser.output.calls] == [(NAME, ARGUMENTS)]
