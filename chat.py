"""Chat templates: a model's own Jinja template turns messages into the text that it was trained on.

Templates are programs that come with a model and are not trusted: they run in Jinja's sandbox, within limits of time and
size. This layer knows no HTTP, no sockets, no torch and no tokens.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from config import ConfigError, read_json

TEMPLATE_S = 10.0  # for a chat template, which is a program that runs as long as the messages make it
TEMPLATE_INTEGER_BITS = 10_000
TEMPLATE_CHARACTERS = 20_000_000


class TemplateError(Exception):
    """A chat that the model's template cannot write; the message is for the client."""


class ChatTemplate:
    """How a model wants its chats written: a Jinja template, and the special tokens that it may name.

    Safe to share between threads. What templates may use is what transformers' `apply_chat_template` gives them.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self.source = source
        self.for_tools = self  # the template for chats with tools; some models have one of its own
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, model_dir: str | Path, tokenizer_config_path: str | Path | None = None) -> ChatTemplate | None:
        """The template of a model folder; None if it has none.

        `tokenizer_config_path` names a file that takes the place of the folder's tokenizer_config.json, and whose template
        goes before every other. Raises ConfigError for a file that cannot be read. A template that does not compile is
        found out by `render`: it harms nothing but chats.
        """
        folder = Path(model_dir)
        config_path = Path(tokenizer_config_path or folder / "tokenizer_config.json")
        if tokenizer_config_path and not config_path.exists():
            raise ConfigError(f"{config_path}: there is no such file")
        config = read_json(config_path)
        source = (
            (_template_in(config) if tokenizer_config_path else None)
            or _read_if_there(folder / "chat_template.jinja")
            or _template_in(read_json(folder / "chat_template.json"))
            or _template_in(config)
        )
        if not source:
            return None
        special_tokens: dict[str, str] = {}
        for name, token in [*read_json(folder / "special_tokens_map.json").items(), *config.items()]:
            token = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(token, str):
                special_tokens[name] = token
        template = cls(source, special_tokens)
        if tool_use := _template_in(config, "tool_use"):
            template.for_tools = cls(tool_use, special_tokens)
        return template

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        """The chat as the model reads it, up to where its answer begins.

        A last message of the assistant's is continued: the text ends right behind its content. Raises TemplateError.
        """
        if "[TOOL_CALLS]" in self.source:
            messages = [_with_short_ids(message) for message in messages]
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            return self._write(messages, tools, add_generation_prompt=True)
        content = last.get("content") or ""
        if not content.strip():  # nothing to continue; a call of a tool stays part of the chat
            kept = messages if last.get("tool_calls") else messages[:-1]
            return self._write(kept, tools, add_generation_prompt=True)
        # The content itself may occur anywhere in the chat, or be trimmed; this occurs nowhere else and is no space.
        marker = secrets.token_hex(16)
        marked = [*messages[:-1], {**last, "content": content + marker}]
        text, found, _ = self._write(marked, tools, add_generation_prompt=False).rpartition(marker)
        if not found:
            raise TemplateError(
                "this model's chat template does not print the last message of the assistant, so it cannot be continued"
            )
        return text.replace(marker, "").rstrip()  # the template may have printed it before

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _TemplateEnvironment().from_string(self.source)

    def _write(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool) -> str:
        written, characters = [], 0
        try:
            self._template.environment.limit_time()
            for piece in self._template.generate(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                written.append(piece)
                characters += len(piece)
                if characters > TEMPLATE_CHARACTERS:
                    raise TemplateError(f"the model's chat template writes more than {TEMPLATE_CHARACTERS} characters")
            return "".join(written)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"this model's chat template does not compile: {error.message} (line {error.lineno})") from None
        except Exception as error:  # a template is a program, which can fail in every way
            raise TemplateError(str(error) or type(error).__name__) from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the assistant says; here it prints it."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What chat templates are written for: transformers' settings, filters and functions. They are not trusted."""

    intercepted_binops = frozenset({"*", "**"})  # one of these can take all time and memory by itself

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        self._running = threading.local()

    def limit_time(self) -> None:
        """Ends what a template does from now on in this thread after TEMPLATE_S: looked at whenever it looks at anything, and
        in each turn of whatever it repeats."""
        self._running.until = time.monotonic() + TEMPLATE_S

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
            look = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(look).set_lineno(node.lineno))
        return template

    def call_filter(self, name: str, value: Any, *more: Any, **named: Any) -> Any:
        self.check_time()  # `map` and its like call it for each of their items
        return super().call_filter(name, value, *more, **named)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def check_time(self) -> None:
        if time.monotonic() > self._running.until:
            raise TemplateError(f"the model's chat template takes longer than {TEMPLATE_S:g} s for it")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            is_huge = bits > TEMPLATE_INTEGER_BITS
        else:
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            can_repeat = operator == "*" and isinstance(times, int) and isinstance(repeated, (str, list, tuple))
            is_huge = can_repeat and len(repeated) * times > TEMPLATE_CHARACTERS
        if is_huge:
            raise TemplateError(f"the model's chat template computes more with `{operator}` than fits")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja's own waits until it is used, and prints as nothing.
        raise jinja2.sandbox.SecurityError(f"the template may not use `{attribute}` of a {type(obj).__name__}")


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Unlike Jinja's own it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The ids of calls as Mistral's templates require them: 9 letters and digits."""
    message = dict(message)
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [call | {"id": _short_id(call["id"])} if "id" in call else call for call in calls]
    return message


def _short_id(given: Any) -> str:
    return given if re.fullmatch("[A-Za-z0-9]{9}", str(given)) else hashlib.sha256(str(given).encode()).hexdigest()[:9]


def _template_in(config: dict[str, Any], name: str = "default") -> str | None:
    """Of several with names the one called `name`; the only one is the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        chosen = [entry for entry in entries if entry.get("name") == name]
        chosen = chosen or (entries if name == "default" else [])
        return chosen[0].get("template") if len(chosen) == 1 and isinstance(chosen[0].get("template"), str) else None
    return template if isinstance(template, str) and name == "default" else None


def _read_if_there(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
