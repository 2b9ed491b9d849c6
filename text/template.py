"""Chat templates: a model's own Jinja template turns messages into the text that it was trained on.

Templates are programs that come with a model and are not trusted: other processes (templates.py) render them,
within limits of time and memory. This layer knows no HTTP, no sockets, no torch and no tokens.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posix
import re
import secrets
import signal
import struct
import sys
from collections import deque
from pathlib import Path
from typing import Any

from manifest import read_json
from run import HERE, ConfigError

# Of a template, which is a program that does as much as the messages make it do.
TEMPLATE_CPU_S = 1.0
TEMPLATE_BYTES = 256 * 2**20
TEMPLATE_CHARACTERS = 4_000_000
WORD = re.compile(r"""(?<=['"])[A-Za-z][A-Za-z0-9_-]*(?=['"])""")
PIPE_BYTES = 2**16  # what a pipe holds
# What Python needs to start, and what shows to which run a process belongs: no keys.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "NEURON_TEXTGEN_RUN_DIR")


class TemplateError(Exception):
    """A chat that the model's template cannot write; the message is for the client."""


class ChatTemplate:
    """How a model wants its chats written: a Jinja template, and the special tokens that it may name.

    Safe to share between threads. What templates may use is what transformers' `apply_chat_template` gives
    them.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self.source = source
        self.for_tools = self  # the template for chats with tools; some models have one of its own
        self.words = frozenset(WORD.findall(source))  # in quotes, such as the names of roles
        self.needs_short_ids = "[TOOL_CALLS]" in source  # Mistral's: ids of calls have 9 letters and digits
        self._special_tokens = special_tokens

    @classmethod
    def load(
        cls, model_dir: str | Path, tokenizer_config_path: str | Path | None = None
    ) -> ChatTemplate | None:
        """The template of a model folder; None if it has none.

        `tokenizer_config_path` names a file that takes the place of the folder's tokenizer_config.json, and
        whose template goes before every other. Raises ConfigError for a file that cannot be read. A template
        that does not compile is found out by `render`: it harms nothing but chats.
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

        A last message of the assistant's is continued: the text ends right behind its content. Raises
        TemplateError, and RecursionError for messages that are nested too deeply.
        """
        if self.needs_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            return self._write(messages, tools, add_generation_prompt=True)
        content = last.get("content") or ""
        if not content.strip():  # nothing to continue; a call of a tool stays part of the chat
            kept = messages if last.get("tool_calls") else messages[:-1]
            return self._write(kept, tools, add_generation_prompt=True)
        # The content itself may occur anywhere in the chat, or be trimmed; this occurs nowhere else and is no
        # space.
        marker = secrets.token_hex(16)
        marked = [*messages[:-1], {**last, "content": content + marker}]
        text, found, _ = self._write(marked, tools, add_generation_prompt=False).rpartition(marker)
        if not found:
            raise TemplateError(
                "this model's chat template does not print the last message of the assistant, so it cannot be continued"
            )
        return text.replace(marker, "").rstrip()  # the template may have printed it before

    def _write(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool) -> str:
        chat = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _rendered(self.source, self._special_tokens | chat)


class _Renderer:
    """A process that renders templates (templates.py), for one thread at a time.

    It is started and waited for in threads beside an event loop, whose library replaces functions of `os` by
    its own: those of `posix` are the real ones.
    """

    def __init__(self):
        requests, self._requests = posix.pipe()  # which no other process inherits
        self._answers, answers = posix.pipe()
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        streams = [(os.POSIX_SPAWN_DUP2, requests, 0), (os.POSIX_SPAWN_DUP2, answers, 1)]
        command = [sys.executable, str(HERE / "text" / "limited.py")]
        try:
            self._pid = posix.posix_spawn(sys.executable, command, environment, file_actions=streams)
        except OSError:
            self._close()
            raise
        finally:
            posix.close(requests)
            posix.close(answers)

    @property
    def is_alive(self) -> bool:
        if posix.waitpid(self._pid, os.WNOHANG) == (0, 0):
            return True
        self._close()
        return False

    def render(self, request: bytes) -> tuple[bool, str] | None:
        """Whether it was rendered, and the text or the error; None: the process has ended."""
        unsent = memoryview(len(request).to_bytes(4, "big") + request)
        try:
            while unsent:
                unsent = unsent[posix.write(self._requests, unsent) :]
            rendered, length = struct.unpack(">?I", self._read(5))
            if length > 4 * TEMPLATE_CHARACTERS:
                posix.kill(self._pid, signal.SIGKILL)
                return None
            return rendered, self._read(length).decode("utf-8", "surrogatepass")
        except (BrokenPipeError, EOFError):
            return None

    def end(self) -> str:
        """Why the process has ended."""
        self._close()
        code = os.waitstatus_to_exitcode(posix.waitpid(self._pid, 0)[1])
        reasons = {
            -signal.SIGPROF: f"takes longer than {TEMPLATE_CPU_S:g} s of processor time",
            errno.ENOMEM: f"needs more than {TEMPLATE_BYTES // 2**20} MiB of memory",
        }
        return reasons.get(code, f"ended the process that renders it (code {code})")

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(posix.read(self._answers, min(size, PIPE_BYTES)))
            size -= len(parts[-1])
            if not parts[-1]:
                raise EOFError
        return b"".join(parts)

    def _close(self) -> None:
        posix.close(self._requests)
        posix.close(self._answers)


_idle: deque[_Renderer] = deque()  # as many as threads have rendered at the same time


def _take() -> _Renderer:
    """An idle process, or a new one."""
    with contextlib.suppress(IndexError):
        while True:
            if (renderer := _idle.pop()).is_alive:
                return renderer
    return _Renderer()


def _rendered(source: str, variables: dict[str, Any]) -> str:
    """The text that a template makes of its variables. Raises TemplateError."""
    limits = {"cpu_s": TEMPLATE_CPU_S, "memory_bytes": TEMPLATE_BYTES, "characters": TEMPLATE_CHARACTERS}
    request = json.dumps({"source": source, "variables": variables, "limits": limits}).encode()
    renderer = _take()
    answer = renderer.render(request)
    if answer is None:
        raise TemplateError(f"the model's chat template {renderer.end()}")
    _idle.append(renderer)
    rendered, text = answer
    if not rendered:
        raise TemplateError(text)
    return text


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The ids of calls as Mistral's templates require them: 9 letters and digits."""
    message = dict(message)
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            call | {"id": _short_id(call["id"])} if "id" in call else call for call in calls
        ]
    return message


def _short_id(given: Any) -> str:
    return (
        given
        if re.fullmatch("[A-Za-z0-9]{9}", str(given))
        else hashlib.sha256(str(given).encode()).hexdigest()[:9]
    )


def _template_in(config: dict[str, Any], name: str = "default") -> str | None:
    """Of several with names the one called `name`; the only one is the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        chosen = [entry for entry in entries if entry.get("name") == name]
        chosen = chosen or (entries if name == "default" else [])
        return (
            chosen[0].get("template")
            if len(chosen) == 1 and isinstance(chosen[0].get("template"), str)
            else None
        )
    return template if isinstance(template, str) and name == "default" else None


def _read_if_there(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
