"""From the fields of a request that say what the generated text must look like to its grammar.

The fields are those of TGI (`grammar`), OpenAI (`response_format`), vLLM (`structured_outputs`, before 0.12 `guided_json` and
others) and SGLang (`regex`, `json_schema`). grammar.py makes the grammar and knows the limits; this layer knows the fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from api.errors import invalid
from api.types import OpenAIRequest, Parameters, StructuredOutputs
from text.grammar import WHITESPACE, GrammarError, of_choice, of_json_schema, of_regex

# Where `response_format` and `grammar` have the schema or the regular expression, by their `type`: OpenAI's place and others.
PLACES = {
    "json_object": ["schema", "value"],
    "json_schema": ["json_schema.schema", "value.schema"],
    "json": ["value"],
    "regex": ["value"],
}
# What the other fields hold; those of `structured_outputs` have names of their own.
KINDS = {
    **dict.fromkeys(("json", "guided_json", "json_schema"), "json"),
    **dict.fromkeys(("regex", "guided_regex"), "regex"),
    **dict.fromkeys(("choice", "guided_choice"), "choice"),
    **dict.fromkeys(("grammar", "structural_tag"), "unsupported"),
    "json_object": "json_object",
}


class Format(NamedTuple):
    """What the field at `path` asks for."""

    path: str
    kind: str
    value: Any


def of_native(parameters: Parameters) -> tuple[str, str]:
    """The path of the field that asks for a grammar, and the grammar; both are empty when none does. Raises ApiError."""
    return _grammar(_of_type("grammar", parameters.grammar), WHITESPACE)


def of_openai(request: OpenAIRequest) -> tuple[str, str]:
    """As `of_native`, for the fields of chat and completion requests."""
    outputs = request.structured_outputs or StructuredOutputs()
    within = _of_fields("structured_outputs.", outputs)
    if request.structured_outputs is not None and not within:
        raise invalid("structured_outputs", "needs one of `json`, `regex`, `choice` and `json_object`")
    patterns = (outputs.whitespace_pattern, request.guided_whitespace_pattern, WHITESPACE)
    whitespace = (
        None
        if outputs.disable_any_whitespace
        else next(pattern for pattern in patterns if pattern is not None)
    )
    formats = [*_of_type("response_format", request.response_format), *within, *_of_fields("", request)]
    return _grammar(formats, whitespace)


def _of_type(name: str, given: dict[str, Any] | None) -> list[Format]:
    """What a field with a `type` asks for: a list of one, or of none."""
    kind = (given or {}).get("type")
    if not given or kind == "text":
        return []
    if not isinstance(kind, str) or kind not in PLACES:
        raise invalid(f"{name}.type", f"must be one of text, {', '.join(PLACES)}. Given: {str(kind)[:40]!r}")
    for place in PLACES[kind]:
        value = given
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return [Format(f"{name}.{place}", "regex" if kind == "regex" else "json", value)]
    if kind == "json_object":
        return [Format(name, "json_object", True)]
    raise invalid(name, f"of the type {kind} needs `{'` or `'.join(PLACES[kind])}`")


def _of_fields(prefix: str, fields: OpenAIRequest | StructuredOutputs) -> list[Format]:
    given = ((name, getattr(fields, name, None)) for name in KINDS)
    return [Format(prefix + name, KINDS[name], value) for name, value in given if value is not None]


def _grammar(formats: list[Format], whitespace: str | None) -> tuple[str, str]:
    if not formats:
        return "", ""
    path, kind, value = formats[0]
    if len(formats) > 1:
        raise invalid(formats[1].path, f"cannot be combined with `{path}`: a text has one format")
    if kind == "unsupported":
        raise invalid(path, "is not supported")
    if kind == "json_object" and not value:
        raise invalid(path, "must be true")
    if kind == "regex" and not isinstance(value, str):
        raise invalid(path, "must be a regular expression, as a string")
    try:
        if kind == "regex":
            return path, of_regex(value)
        if kind == "choice":
            return path, of_choice(value)
        schema = {"type": "object"} if kind == "json_object" else value
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        return path, of_json_schema(schema, whitespace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(path, f"must be a JSON schema: {error}") from None
    except GrammarError as error:
        raise invalid(path, str(error)) from None
