"""What a model can read of a conversation's parts: content parts, blocks and items, chosen by their `type`.

Each API has one table of types. A part is a plain JSON object, of which only the fields that are read are
checked. A part of another type is skipped: clients send new types at any time, and an error for one would
refuse the whole conversation.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from api.generation.request_images import DETAILS, NO_IMAGES, RequestImages
from api.http.errors import invalid
from api.http.fields import Json, require
from text.template import images_of

logger = logging.getLogger("web")
# Claude Code's first system block, which says nothing to a model and changes: nothing behind it would be
# reused.
BILLING = re.compile(r"^[ \t]*x-anthropic-billing-header:.*\n?", re.IGNORECASE | re.MULTILINE)
SYSTEM_ROLES = ("system", "developer")
TYPES_IN_WORDS = {str: "a string", dict: "an object", list: "a list"}

V = TypeVar("V", str, Json, list)


class ContentReader:
    """Reads the parts of one request.

    types: how to read a part, by its type: the names of its readable fields, such as "title? content", or a
    function of the ContentPart. The value of a field is a text, a part, or a list of these; a field whose
    name ends with `?` may be missing. images: the images of the request, which functions add to; a mark in a
    text stands for each image. tools: the tools of the request, for such functions.
    """

    def __init__(
        self,
        types: Mapping[str, str | Callable[[ContentPart], Any]],
        images: RequestImages = NO_IMAGES,
        tools: Any = None,
    ):
        self.images = images
        self.tools = tools
        self._types = types
        self._skipped: set[str] = set()

    def parts(self, path: str, content: Any) -> Iterator[tuple[str, Any]]:
        """Yields the type and the value (see `part`) of each readable part of `content`, and reads them as it
        goes on. Raises ApiError for a part without a type, for content of another kind, and for what the
        reader of a type rejects.

        content: a text, a part, or a list of these, also within lists. A text has the type "". Parts without
        a value, and empty texts, are left out. path: that of `content` in the request, for errors.
        """
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

    def part(self, path: str, kind: str, fields: Json) -> Any:
        """Returns the value of one part of the type `kind`. None or "": the part says nothing. None is also
        the value of an unknown type, which `log_skipped` will name. Raises ApiError for a field that the type
        needs and that is missing or wrong.

        The value is the text of the part, or an API's own form that the function of the type returns, such as
        a message with a tool call. Such a function may add an image to the request, or change `tools`. path:
        that of the part.
        """
        read = self._types.get(kind)
        if read is None:
            self.skip(kind)
            return None
        part = ContentPart(self, path, fields)
        return part.text(read) if isinstance(read, str) else read(part)

    def text(self, path: str, content: Any, between: str = "\n", role: str = "") -> str:
        """Returns the text of `content`, which has the forms that `parts` takes; "": no part has a text. The
        texts of parts are joined with `between`, except at an image. Parts are read as `part` does; those
        whose value is not a text are then left out. Raises the errors of `parts`. role: that of the message;
        the text of a system or developer message loses the line BILLING."""
        texts = (part for _kind, part in self.parts(path, content) if isinstance(part, str))
        if role in SYSTEM_ROLES:
            texts = (BILLING.sub("", text) for text in texts)
        return joined(texts, between)

    def omission(self, kind: str) -> str:
        """The note that replaces content that the model cannot read, so that the conversation goes on."""
        readable = "text and images" if self.images.are_read else "text"
        return f"[{kind} omitted: this server reads {readable} only]"

    def skip(self, kind: str) -> None:
        """Notes for the log that a part of this type is left out."""
        self._skipped.add(kind[:40])

    def log_skipped(self) -> None:
        """Logs the types of the skipped parts, at level debug, if there are any."""
        if self._skipped:
            names = ", ".join(sorted(self._skipped))
            logger.debug("skipped parts of the conversation that this server does not read: %s", names)


class ContentPart(NamedTuple):
    """A part of a conversation, with its path in the request."""

    reader: ContentReader
    path: str
    fields: Json

    def get(self, name: str) -> Any:
        """Returns the value of a field; None: it is missing or null."""
        return self.fields.get(name)

    def needed(self, name: str, kind: type[V] | None = None) -> V:
        """Returns the value of a field. Raises ApiError if it is missing or null, or no `kind`."""
        return needed(self.path, self.fields, name, kind)

    def inner(self, name: str) -> ContentPart:
        """Returns the object in a field, as a part. Raises ApiError if the field is missing, or no object."""
        return ContentPart(self.reader, f"{self.path}.{name}", self.needed(name, dict))

    def text(self, names: str) -> str:
        """Returns the texts of these fields, a line each; empty texts have none. A value may be a text, a
        part, or a list of these. Raises ApiError if the part is no object, if a field without `?` is missing
        or null, or if a value is other content.

        Example: `title? content` is the title, if there is one, and the content.
        """
        require(isinstance(self.fields, dict), self.path, "must be an object")
        texts = []
        for name in names.split():
            key = name.removesuffix("?")
            value = self.get(key) if key != name else self.needed(name)
            if value is not None:
                texts.append(self.reader.text(f"{self.path}.{key}", value))
        return "\n".join(filter(None, texts))

    def unbroken(self, name: str, role: str = "") -> str:
        """Returns the text of a field, whose parts follow each other without a line break; "": no such field.
        role: that of the message. Raises ApiError for a value that is not readable content."""
        return self.reader.text(f"{self.path}.{name}", self.get(name) or "", "", role)


def needed(path: str, fields: Json, name: str, kind: type[V] | None = None) -> V:
    """Returns the value of the field `name` of the object at `path`. Raises ApiError if the field is missing
    or null, or if the value is no `kind`: str, dict or list. kind: None: any."""
    value = fields.get(name)
    if value is None:
        raise invalid(path, f"needs `{name}`")
    if kind is not None:
        require(isinstance(value, kind), f"{path}.{name}", f"must be {TYPES_IN_WORDS[kind]}")
    return value


def omitted(kind: str) -> Callable[[ContentPart], str]:
    """Returns a function that gives a note for any part. kind: what the note says is omitted, such as
    "audio"."""
    return lambda part: part.reader.omission(kind)


def image(part: ContentPart) -> str:
    """Adds the image of a part to the request's images, which fetch and decode it later, and returns its
    mark. If the model reads no images, returns a note, and neither adds nor checks anything. Raises ApiError
    for a part without an image, a stored file (`file_id`), and an image that cannot be added.

    The first of these fields counts: `source`, as Anthropic has it; `base64`, of Hugging Face's templates;
    `image_url`; `image` and `url`, of Hugging Face's templates. Each of the last three is a text, or an
    object with a `url`.
    """
    if not part.reader.images.are_read:
        return part.reader.omission("image")
    if part.get("source") is not None:
        return _sourced(part.inner("source"))
    if part.get("base64") is not None:
        return _encoded(part, "base64")
    no_files = "is not supported: this server stores no files; send the image as `image_url`"
    require(part.get("file_id") is None, f"{part.path}.file_id", no_files)
    usual = "source" if part.get("type") == "image" else "image_url"
    name = next((name for name in ("image_url", "image", "url") if part.get(name) is not None), usual)
    given = part.needed(name)
    if isinstance(given, dict):
        fields = {"detail": part.get("detail")} | given
        return _linked(ContentPart(part.reader, f"{part.path}.{name}", fields), "url")
    return _linked(part, name)


def _linked(part: ContentPart, name: str) -> str:
    """Adds the image whose URL is in the field `name`, and returns its mark. Raises ApiError for a URL that
    is missing, is no text or cannot be added, and for an unknown `detail`."""
    url = part.needed(name, str)
    detail = part.get("detail")
    known = f"must be one of {', '.join(DETAILS)}"
    require(detail in (None, *DETAILS), f"{part.path}.detail", known, given=str(detail)[:40])
    return part.reader.images.add(f"{part.path}.{name}", url, detail)


def _encoded(part: ContentPart, name: str) -> str:
    """Adds the image whose file is in the field `name`, in base64, and returns its mark. Raises ApiError for
    a missing field, for what is not base64, empty or too large, and for one image too many."""
    return part.reader.images.add(f"{part.path}.{name}", f"data:;base64,{part.needed(name, str)}")


def _sourced(source: ContentPart) -> str:
    """Adds the image in a `source`, as Anthropic has it, and returns its mark. Raises ApiError for a type
    other than base64 and url, and for an image that cannot be added."""
    kind = source.needed("type", str)
    detail = "must be base64 or url: no files are stored here"
    require(kind in ("base64", "url"), f"{source.path}.type", detail, given=kind[:40])
    return _encoded(source, "data") if kind == "base64" else _linked(source, "url")


# The parts that clients send whatever the API: those of another API are read where they can be.
PARTS = {
    **dict.fromkeys(["text", "input_text", "output_text"], "text"),
    "refusal": "refusal?",
    **dict.fromkeys(["image", "image_url", "input_image"], image),
    **dict.fromkeys(["audio", "audio_url", "input_audio"], omitted("audio")),
    **dict.fromkeys(["video", "video_url", "input_video"], omitted("video")),
    **dict.fromkeys(["file", "input_file", "document"], omitted("file")),
}


def joined(texts: Iterable[str], between: str) -> str:
    """Returns texts as one, with `between` between two of them unless they meet at an image. Empty texts do
    not count. Takes time that grows with the length of the result, however many texts there are."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (images_of(pieces[-1][-2:]) or images_of(text[:2])):
            pieces.append(between)
        pieces.append(text)
    return "".join(pieces)
