"""Chat templates: a model's own Jinja template turns messages into the text that it was trained on.

A template is a program that clients can make expensive: it runs in Jinja's sandbox, in child processes with
limits on time and memory (limited.py).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from manifest import TEMPLATE_ORIGIN, read_json
from run import ConfigError, Json
from text.limited import LimitExceeded, Rejected, SandboxedFunction

WORD_OF_NONE = "Quokka"  # that no template writes by itself
ERROR_CHARACTERS = 2000  # of a message for clients, which a template may choose
WORD = re.compile(r"""(?<=['"])[A-Za-z][A-Za-z0-9_-]*(?=['"])""")
# Variables that are not for clients; so are the special tokens.
RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
}


class TemplateError(Exception):
    """A chat that the model's template cannot write; the message is for the client."""


# Followed by one of 256 characters from FIRST_IMAGE on, this stands for an image in the content of a message.
# No client can write lone surrogates, and text/escaping.py uses other ones.
IMAGE_PLACEHOLDER = "\ud800"
FIRST_IMAGE = 0xD900
IMAGE_MARK = re.compile(f"{IMAGE_PLACEHOLDER}([{chr(FIRST_IMAGE)}-{chr(FIRST_IMAGE + 255)}])")
# Around the thoughts of a system message or of an assistant in its content.
THOUGHT = "\ud800\udb00{}\ud800\udb01"
THOUGHTS = re.compile(THOUGHT.format("(.*?)"), re.DOTALL)


def image_mark(number: int) -> str:
    """What stands in the content of a message for the image with this number, below 256."""
    return IMAGE_PLACEHOLDER + chr(FIRST_IMAGE + number)


def images_of(text: str) -> list[int]:
    """Returns the numbers of the images in a text, in the order in which they stand there; [] for a text
    without images."""
    return [ord(number) - FIRST_IMAGE for number in IMAGE_MARK.findall(text)]


class ChatTemplate:
    """How a model wants its chats written: a Jinja template, and the special tokens that it may name.

    Safe to share between threads. What templates may use is what transformers' `apply_chat_template` gives
    them.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], response_template: Any = None, origin: str = ""
    ):
        self.source = source
        self.origin = origin  # the file that it is in, or its key in a GGUF file
        self.response_template = response_template  # transformers': how an answer is parsed
        self.for_tools = self  # the template for chats with tools; some models have one of its own
        self.words = frozenset(WORD.findall(source))  # in quotes, such as the names of roles
        self._write_id = next((write for mark, write in CALL_IDS.items() if mark in source), None)
        self._special_tokens = special_tokens

    @classmethod
    def load(
        cls, model_dir: str | Path, tokenizer_config_path: str | Path | None = None
    ) -> ChatTemplate | None:
        """Reads the template of a model folder; None if the folder has none. Renders nothing: a template that
        does not compile makes only `render` fail.

        Of several templates the first counts: that of `tokenizer_config_path`, chat_template.jinja,
        chat_template.json, tokenizer_config.json. The file at `tokenizer_config_path` takes the place of
        tokenizer_config.json, also for the special tokens. `for_tools` is another template if the folder has
        one called tool_use. Raises ConfigError for a `tokenizer_config_path` that does not exist, and for a
        file that cannot be read as JSON or as UTF-8.
        """
        folder = Path(model_dir)
        config_path = Path(tokenizer_config_path or folder / "tokenizer_config.json")
        if tokenizer_config_path and not config_path.exists():
            raise ConfigError(f"{config_path}: there is no such file")
        config = read_json(config_path)
        own = _template_in(config)
        sources = {
            str(tokenizer_config_path): own if tokenizer_config_path else None,
            "chat_template.jinja": _read_if_there(folder / "chat_template.jinja"),
            "chat_template.json": _template_in(read_json(folder / "chat_template.json")),
            config_path.name: own,
        }
        origin = next(filter(sources.get, sources), None)
        if origin is None:
            return None
        special_tokens = special_tokens_in(read_json(folder / "special_tokens_map.json"))
        special_tokens |= special_tokens_in(config)
        response_template = config.get("response_template")
        named = config.get(TEMPLATE_ORIGIN) or origin
        template = cls(sources[origin], special_tokens, response_template, named)
        additional = folder / "additional_chat_templates" / "tool_use.jinja"
        if tool_use := _read_if_there(additional) or _template_in(config, "tool_use"):
            template.for_tools = cls(tool_use, special_tokens, response_template)
        return template

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        options: Mapping[str, Any] | None = None,
        begins_answer: bool = True,
    ) -> str:
        """Returns the chat as the model reads it, up to where its response begins, or, without
        `begins_answer`, to the end of the last message. Waits for a child process.

        A last message of the assistant with a content is continued, whatever `begins_answer` is: the text
        ends right after that content. Spaces are no content. Without content and calls such a message is left
        out, unless it is the only one. messages: with image placeholders in their contents; they are not
        changed. options: further variables of the template, which never replace `messages`, `tools`,
        `documents`, `add_generation_prompt` or the special tokens.

        Raises TemplateError if the template does not compile, fails, raises an error of its own, exceeds a
        limit of `rendered`, or does not print a message that is to be continued. Raises RecursionError for
        arguments that are nested too deeply, and OSError if no child process can be started.
        """
        if self._write_id:
            messages = _with_ids(messages, self._write_id)
        last = messages[-1] if messages else {}
        content = last.get("content") or ""
        is_answer = last.get("role") == "assistant"
        if not is_answer or not content.strip():
            # Nothing is continued. A tool call stays part of the chat; templates fail without messages.
            if is_answer and not last.get("tool_calls") and len(messages) > 1:
                messages = messages[:-1]
            return self._write(messages, tools, options, begins_answer)
        # The content itself may occur anywhere in the chat, or be trimmed; this occurs nowhere else and is no
        # space.
        marker = secrets.token_hex(16)
        marked = [*messages[:-1], {**last, "content": content + marker}]
        text, found, _ = self._write(marked, tools, options, False).rpartition(marker)
        if not found:
            reason = "does not print the last message of the assistant, so it cannot be continued"
            raise TemplateError(f"this model's chat template {reason}")
        return text.replace(marker, "")  # the template may have printed it before

    def attempt(self, *chat: Any) -> str:
        """Returns what `render` returns for these arguments; "" where `render` raises TemplateError. Other
        errors pass through."""
        with contextlib.suppress(TemplateError):
            return self.render(*chat)
        return ""

    @property
    def needs_short_ids(self) -> bool:
        return self._write_id is _short_id

    def borders(
        self,
        prompt: str,
        messages: list[dict],
        tools: list[dict] | None = None,
        options: Mapping[str, Any] | None = None,
        begins_answer: bool = True,
    ) -> list[int]:
        """Returns where, in characters, other prompts of the same conversation may differ from `prompt`, in
        ascending order. `prompt` is what `render` returned for the other arguments.

        The places are before the user's first and newest message, and before the response. A template may
        drop earlier reasoning once there is a response; then the last place is before that reasoning. The
        beginning and the end of the prompt are left out, so the list may be empty.

        A place is found by comparing the prompt with another one: of the chat with another text in a message,
        without the beginning of a response, or with a response. These are up to four calls of `render`, each
        of which waits. A chat that the template rejects adds no place.
        """

        def common(chat: list[dict], begins_answer: bool) -> int:  # the length of the same beginning
            written = self.attempt(chat, tools, options, begins_answer) or prompt  # rejected: says nothing
            return len(os.path.commonprefix([prompt, written]))  # noqa: RUF071 of any texts, not of paths

        found = set()
        users = [n for n, message in enumerate(messages) if message.get("role") == "user"]
        for n in {*users[:1], *users[-1:]}:
            other = {**messages[n], "content": WORD_OF_NONE}
            found.add(common([*messages[:n], other, *messages[n + 1 :]], begins_answer))
        if begins_answer:
            response = {"role": "assistant", "content": WORD_OF_NONE}
            found.add(min(common(messages, False), common([*messages, response], True)))
        return sorted(found - {0, len(prompt)})

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether a content has to be a list of parts: some templates of vision-language models leave out a
        content that is a text, without an error. Found by rendering two short chats, at the first use."""
        text = {"role": "user", "content": WORD_OF_NONE}
        in_parts = text | {"content": [{"type": "text", "text": WORD_OF_NONE}]}
        return "image" in self.words and not self._writes([text]) and self._writes([in_parts])

    @functools.cached_property
    def roles_of_thoughts(self) -> frozenset[str]:
        """The roles whose content may have parts of the type `thinking`, as in Mistral's templates: of system
        and assistant. Found by rendering two short chats, at the first use."""
        if "thinking" not in self.words:
            return frozenset()
        user = {"role": "user", "content": "Wombat"}
        content = [{"type": "thinking", "thinking": WORD_OF_NONE}, {"type": "text", "text": "Numbat"}]
        before = {"system": [], "assistant": [user]}
        chats = {role: [*turns, {"role": role, "content": content}, user] for role, turns in before.items()}
        return frozenset(role for role, chat in chats.items() if self._writes(chat))

    def _writes(self, messages: list[Json]) -> bool:
        """Whether the template writes WORD_OF_NONE, as a text, of these messages; False if it rejects
        them."""
        try:
            written = self._run({"messages": messages})
        except TemplateError:
            return False
        return WORD_OF_NONE in written and "'type'" not in written  # as a list that is written as it is

    def _write(
        self,
        messages: list[dict],
        tools: list[dict] | None,
        options: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Renders messages with the contents that `_in_parts` returns; none is left out, and none continued.
        Raises what `render` raises."""
        chat = {
            "messages": [_in_parts(message, self) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run({**(options or {}), **self._special_tokens, **chat})

    def _run(self, variables: Json) -> str:
        """What the template writes with these variables, in a child process. Raises TemplateError, and
        RecursionError for variables that are nested too deeply."""
        try:
            return rendered([self.source, variables])
        except Rejected as error:
            raise TemplateError(str(error)) from None
        except LimitExceeded as error:
            raise TemplateError(f"the model's chat template {error}") from None


def special_tokens_in(config: Json) -> dict[str, str]:
    """Returns the special tokens that a file such as tokenizer_config.json names, by the name of the field.
    Example: {"eos_token": "</s>"}. Of an object, its `content` counts. Fields without a text, such as null
    and lists, are left out."""
    tokens = {}
    for name, token in config.items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only prints it."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What chat templates are written for: transformers' settings, filters and functions."""

    def __init__(self):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja's own waits until it is used, and prints as nothing.
        raise jinja2.sandbox.SecurityError(
            f"the template may not use `{attribute}` of a {type(obj).__name__}"
        )


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes characters for HTML: this one escapes none. The parameters
    and their order are transformers'."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


_compile_template = functools.lru_cache(8)(TemplateEnvironment().from_string)


def renderer(most_characters: int) -> Callable[[list], str]:
    """Returns the function of a child process: it takes [a template's source, variables] and returns the
    rendered text.

    The function raises Rejected for a template that does not compile or that fails in any way, and for a text
    of more than `most_characters`. It raises MemoryError if memory runs out.
    """

    def render(request: list) -> str:
        source, variables = request
        try:
            text = _compile_template(source).render(variables)
        except MemoryError:
            raise
        except jinja2.TemplateSyntaxError as error:
            reason = f"{error.message} (line {error.lineno})"
            raise Rejected(f"this model's chat template does not compile: {reason}") from None
        except Exception as error:  # a template is a program, which can fail in every way
            raise Rejected((str(error) or type(error).__name__)[:ERROR_CHARACTERS]) from None
        if len(text) > most_characters:
            raise Rejected(f"the model's chat template writes more than {most_characters} characters")
        return text

    return render


# The template is a program; its work depends on the messages.
rendered = SandboxedFunction("text.template:renderer", [4_000_000], cpu_s=1.0, memory_bytes=256 * 2**20)


def _in_parts(message: Json, template: ChatTemplate) -> Json:
    """Returns the message with its content as a list of parts, if the content needs them or the template
    requires them; else with a content that is a text. `message` itself is not changed.

    A content needs parts for images, and for thoughts of a role whose content may have thoughts. For such a
    role, `reasoning_content` becomes the first part, too, and stays beside the content. Other thoughts become
    text. A content that stays a text has no marks of thoughts. A content that is not a string is left as it
    is.
    """
    content = message.get("content")
    if not isinstance(content, str):
        return message
    role = message.get("role")
    if role not in template.roles_of_thoughts:
        content = THOUGHTS.sub(r"\1", content)
    elif thoughts := message.get("reasoning_content"):
        content = THOUGHT.format(thoughts) + content
    parts = []
    for n, piece in enumerate(THOUGHTS.split(content)):
        parts += [{"type": "thinking", "thinking": piece, "closed": True}] if n % 2 else _parts_of(piece)
    is_text = all(part["type"] == "text" for part in parts) and not template.takes_parts
    return message | {"content": content if is_text else parts or [{"type": "text", "text": ""}]}


def _parts_of(content: str) -> list[Json]:
    """Returns a content with image placeholders as parts, texts and images, in their order; [] for ""."""
    parts = []
    for n, piece in enumerate(IMAGE_MARK.split(content)):
        if n % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _with_ids(messages: list[Json], write_id: Callable[[str, str, int], str]) -> list[Json]:
    """Returns copies of the messages with the ids of calls that the template requires.

    write_id: takes the given id, the name of the function and the index of the call in the chat, and returns
    the new id. A tool result gets the id of its call. A result without such a call gets an id from
    `write_id`.
    """
    ids = {}
    number = 0
    changed = []
    for message in messages:
        message = dict(message)
        calls = []
        for call in message.get("tool_calls") or ():
            given = str(call.get("id") or number)
            ids[given] = write_id(given, call["function"]["name"], number)
            calls.append(call | {"id": ids[given]})
            number += 1
        if calls:
            message["tool_calls"] = calls
        if "tool_call_id" in message:
            given = str(message["tool_call_id"])
            message["tool_call_id"] = ids.get(given) or write_id(given, message.get("name", ""), number)
        changed.append(message)
    return changed


def _short_id(given: str, _name: str, _number: int) -> str:
    """9 letters and digits, as Mistral's templates require."""
    if re.fullmatch("[A-Za-z0-9]{9}", given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _named_id(_given: str, name: str, number: int) -> str:
    """What Kimi's templates write in the place of the function's name."""
    return f"functions.{name}:{number}"


# What writes ids of calls (`_with_ids`), for templates with a rule about them: by a part of their source.
CALL_IDS = {"[TOOL_CALLS]": _short_id, "<|tool_call_begin|>": _named_id}


def _template_in(config: Json, name: str = "default") -> str | None:
    """Returns the template called `name` in the field `chat_template` of a file; None if there is none.

    A text, or the only template of a list, is the default one, whatever it is called. Of several templates in
    a list exactly one must have the name.
    """
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        chosen = [entry for entry in entries if entry.get("name") == name]
        if name == "default":
            chosen = chosen or entries
        template = chosen[0].get("template") if len(chosen) == 1 else None
    elif name != "default":
        return None
    return template if isinstance(template, str) else None


def _read_if_there(path: Path) -> str | None:
    """Returns the text of a file; None if there is no such file. Raises ConfigError for a file that cannot be
    read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
