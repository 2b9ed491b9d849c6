"""What a chat template supports: system messages, consecutive messages of one role, tool calls and results,
images.

Templates differ, and most silently leave out what they do not support. So each is tried with short chats,
once, when it is loaded: the chat's words have to be in the prompt, in their order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from run import Json
from text.template import ChatTemplate, image_mark

# Words that no template writes by itself.
FIRST, SECOND, THIRD, FOURTH, FIFTH = "Quokka", "Wombat", "Numbat", "Dingo", "Bilby"
USER = {"role": "user", "content": FIRST}


@dataclass(frozen=True)
class TemplateCapabilities:
    """What a template supports apart from alternating users and assistants."""

    system: bool = True  # a system message at the beginning, which stays there while the chat grows
    several_system: bool = True  # two of them there
    later_system: bool = True  # one after other messages
    developer: bool = False  # the role of this name, unlike unknown roles
    no_user: bool = True  # a chat without a user message
    users: bool = True  # two in a row
    assistants: bool = True
    tools: bool = True  # which may be called
    calls: bool = True  # earlier ones, and their results
    text_of_calls: bool = True  # the content of a message that has calls
    thinking: bool = False  # reasoning under this name beside the content
    several_calls: bool = True  # in one message
    user_after_result: bool = True  # a user message right after a tool result
    image_roles: frozenset[str] = frozenset()  # the roles of messages that may have images

    @classmethod
    def of(cls, template: ChatTemplate, placeholder: str = "") -> TemplateCapabilities:
        """Finds what the template supports: renders some twenty short chats in child processes, one after
        another. A template that cannot write the simplest chat has the default capabilities, and fails the
        first request.

        Calls, results and images are tried with the template for tools, the rest with `template` itself.
        placeholder: what the template writes for an image; "": the model reads no images.
        """
        if not _writes(template, [USER]):
            return cls()
        system = {"role": "system", "content": FIRST}
        user = {"role": "user", "content": SECOND}
        answer = {"role": "assistant", "content": SECOND}
        function = {"name": SECOND, "description": THIRD, "parameters": {"type": "object", "properties": {}}}
        call = (SECOND, {"a": THIRD})
        calling, result = calls_and_results(call)
        tools = [{"type": "function", "function": function}]
        third = {"content": THIRD}
        said = {"content": FIFTH}
        end = {"role": "user", "content": FOURTH}
        for_tools = template.for_tools
        writes = functools.partial(_writes, template)
        writes_calls = functools.partial(_writes, for_tools, tools=tools)
        calls = writes_calls([USER, calling, result])
        with_system = [system, user, answer | third, end]
        takes_system = all(writes(with_system[:length]) for length in (2, 3, 4)) and (
            not calls or writes_calls([system | said, USER, calling, result])
        )
        image = {"content": FIFTH + image_mark(0)}
        with_image = {
            "user": [USER | image],
            "system": [system | image, user],
            "assistant": [USER, answer | image, end],
            "tool": [USER, calling, result | image],
        }
        return cls(
            system=takes_system,
            several_system=writes([system, system | {"content": SECOND}, end]),
            later_system=takes_system and writes([USER, answer, system | third, end]),
            developer=writes([USER | {"role": "developer"}, user])
            and not writes([USER | {"role": "bandicoot"}, user]),
            no_user=writes([answer]),
            users=writes([USER, user]),
            assistants=writes([USER, answer, answer | third, end]),
            # gpt-oss' describes a function before it names it.
            tools=_has_words(for_tools.attempt([USER], tools), SECOND, THIRD),
            calls=calls,
            text_of_calls=writes_calls([USER, calling | said, result]),
            thinking=writes_calls(
                [USER, calling | said | {"thinking": THIRD}, result], words=(FIRST, THIRD, FIFTH)
            ),
            several_calls=writes_calls([USER, *calls_and_results(call, (SECOND, {"a": FIFTH}))]),
            user_after_result=writes_calls([USER, calling, result, end | said]),
            # An image may be written before the text.
            image_roles=frozenset(
                role
                for role, chat in with_image.items()
                if placeholder and _has_words(for_tools.attempt(chat), placeholder, FIFTH)
            ),
        )


def calls_and_results(*calls: tuple[str, Any]) -> list[Json]:
    """Returns the assistant's message with these calls, then a result for each call. calls: the name of a
    function and its arguments, as an object or as JSON text."""
    written = [
        {"id": f"call0123{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    results = [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": FOURTH}
        for call in written
    ]
    return [{"role": "assistant", "content": "", "tool_calls": written}, *results]


def _has_words(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def _writes(
    template: ChatTemplate,
    messages: list[Json],
    tools: list[Json] | None = None,
    words: tuple[str, ...] = (),
) -> bool:
    """Whether the template writes these messages with all `words`, in their order; False if it rejects the
    chat. Without `words`, these are the contents of the messages, and their calls with the arguments."""
    text = template.attempt(messages, tools)
    # From the end: a list of tools may have some of the words before.
    for word in reversed(words or _words(messages)):
        text, found, _rest = text.rpartition(word)
        if not found:
            return False
    return True


def _words(messages: list[Json]) -> list[str]:
    """Returns the words that a template has to write for these messages, in their order: contents, names of
    called functions, and the values of their arguments."""
    words = []
    for message in messages:
        if message["content"]:
            words.append(message["content"])
        for call in message.get("tool_calls", ()):
            words += [call["function"]["name"], *call["function"]["arguments"].values()]
    return words
