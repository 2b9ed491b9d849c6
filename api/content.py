"""What a model can read of a conversation's parts: content parts, blocks and items, chosen by their `type`.

Each API has one table of types. A part is a plain JSON object, of which only the fields that are read are
checked. A part of another type is skipped: clients send new types at any time, and an error for one would
refuse the whole conversation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from api.errors import invalid
from api.fields import Json, require

logger = logging.getLogger("web")
# In the place of what the model cannot read, so that a session with an image goes on.
IMAGE_OMITTED = "[{kind} omitted: this server reads text only]"
KINDS = {str: "a string", dict: "an object", list: "a list"}

V = TypeVar("V", str, Json, list)
M = TypeVar("M")  # an API's parts that are no text, such as tool calls


class ContentReader(Generic[M]):
    """Reads the parts of one request.

    types: the readable fields of each type, in their order, or a function of this reader, the part's path in
    the request and the part. A name that ends with `?` is optional. A field is a text, a part, or a list of
    them.
    """

    def __init__(self, types: Mapping[str, str | Callable[[Any, str, Json], str | M | None]]):
        self._types = types
        self._skipped: set[str] = set()

    def parts(self, path: str, content: Any) -> Iterator[tuple[str, str | M]]:
        """Each readable part of `content` (a text, a part, or a list of them) with its type. Raises
        ApiError."""
        if isinstance(content, list):
            for i, part in enumerate(content):
                yield from self.parts(f"{path}[{i}]", part)
        elif isinstance(content, dict):
            kind = needed(path, content, "type", str)
            part = self.part(path, kind, content)
            if part:
                yield kind, part
        else:
            require(isinstance(content, str), path, "must be a string, an object or a list")
            if content:
                yield "", content

    def part(self, path: str, kind: str, part: Json) -> str | M | None:
        """One part as what its type is. Raises ApiError."""
        reader = self._types.get(kind)
        if reader is None:
            self._skipped.add(kind[:40])
            return None
        return self.fields(path, part, reader) if isinstance(reader, str) else reader(self, path, part)

    def fields(self, path: str, part: Json, names: str) -> str:
        """The text of these fields, a line each. Raises ApiError."""
        require(isinstance(part, dict), path, "must be an object")
        texts: list[str] = []
        for name in names.split():
            if name.endswith("?"):
                name = name[:-1]
                value = part.get(name)
            else:
                value = needed(path, part, name)
            if value is not None:
                texts.append(self.text(f"{path}.{name}", value))
        return "\n".join(filter(None, texts))

    def text(self, path: str, content: Any, between: str = "\n") -> str:
        """The text of `content`. Raises ApiError."""
        return between.join(part for _kind, part in self.parts(path, content) if isinstance(part, str))

    def log_skipped(self) -> None:
        if self._skipped:
            names = ", ".join(sorted(self._skipped))
            logger.debug("skipped parts of the conversation that this server does not read: %s", names)


def needed(path: str, part: Json, name: str, kind: type[V] | None = None) -> V:
    """The value of a field that is read. Raises ApiError if it is missing, or no `kind`."""
    value = part.get(name)
    if value is None:
        raise invalid(path, f"needs `{name}`")
    if kind is not None:
        require(isinstance(value, kind), f"{path}.{name}", f"must be {KINDS[kind]}")
    return value


def omitted(kind: str) -> Callable[[ContentReader, str, Json], str]:
    """A reader that leaves a note."""
    return lambda _reader, _path, _part: IMAGE_OMITTED.format(kind=kind)
