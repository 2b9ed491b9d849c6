"""Renders chat templates, in a process of its own that chat.py starts.

A template is a program that comes with a model and is not trusted: it runs in Jinja's sandbox, and the kernel
limits the memory and the time of this process, which ends when a template exceeds them. It knows no messages,
no HTTP and no tokens.

    python3 templates.py

reads requests from its standard input until that ends, each as four bytes of length and JSON: `source`,
`variables` and `limits`. Writes for each whether it was rendered (a byte), four bytes of length, and the text
or the error in UTF-8.
"""

from __future__ import annotations

import datetime
import errno
import functools
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

ERROR_CHARACTERS = 2000  # of a message for clients, which a template may choose


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the assistant says; here it prints it."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What chat templates are written for: transformers' settings, filters and functions."""

    def __init__(self):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja's own waits until it is used, and prints as nothing.
        raise jinja2.sandbox.SecurityError(
            f"the template may not use `{attribute}` of a {type(obj).__name__}"
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


_compiled = functools.lru_cache(8)(_TemplateEnvironment().from_string)


def _render(source: str, variables: dict[str, Any], limits: dict[str, int]) -> tuple[bool, str]:
    """True and the text, or False and what is wrong, for the client."""
    try:
        text = _compiled(source).render(variables)
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return False, f"this model's chat template does not compile: {error.message} (line {error.lineno})"
    except Exception as error:  # a template is a program, which can fail in every way
        return False, (str(error) or type(error).__name__)[:ERROR_CHARACTERS]
    if len(text) > limits["characters"]:
        return False, f"the model's chat template writes more than {limits['characters']} characters"
    return True, text


def _limit(kind: int, most: int) -> None:
    """Sets the soft limit, which ends this process; it cannot be above the hard one."""
    _soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the web process has open
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing that a template does may fill the log
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 16)):
        _limit(kind, most)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(4):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        _limit(resource.RLIMIT_AS, request["limits"]["memory_bytes"])
        signal.setitimer(
            signal.ITIMER_PROF, request["limits"]["cpu_s"]
        )  # SIGPROF ends it; RLIMIT_CPU counts whole seconds
        rendered, text = _render(**request)
        data = text.encode("utf-8", "surrogatepass")
        answers.write(struct.pack(">?I", rendered, len(data)) + data)
        answers.flush()


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(errno.ENOMEM)  # chat.py has the words for it
