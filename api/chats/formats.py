"""Structured output: from the fields of a request that constrain its output to a grammar.

The fields are those of TGI (`grammar`), OpenAI (`response_format`), vLLM (`structured_outputs`) and SGLang
(`regex`, `json_schema`). text/grammar.py makes the grammar and has the limits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from api.http.errors import invalid
from api.http.fields import CHAT_FIELDS, NEEDS_HOST, FieldNames, Json, require
from api.http.types import JsonSchema, SamplingOptions
from protocol import MAX_GRAMMAR, ModelInfo
from text.grammar import WHITESPACE, GrammarError, left_out, of_choice, of_json_schema, of_regex

# Where `response_format` and `grammar` have the schema or the regular expression, by their `type`: OpenAI's
# places, in chats and in responses, and others.
SCHEMA_PATHS = {
    "json_object": ["schema", "value"],
    "json_schema": ["json_schema.schema", "schema", "value.schema"],
    "json": ["value"],
    "regex": ["value"],
}
# What the other fields hold; those of `structured_outputs` have names of their own.
KINDS = {
    "disable_additional_properties": "unsupported",
    "json": "json",
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "unsupported",
    "structural_tag": "unsupported",
    "json_object": "json_object",
}


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: one of the first four fields. `grammar`, `structural_tag` and a true
    `disable_additional_properties` are not supported."""

    json: JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    grammar: str | None = None
    structural_tag: Any = None
    disable_additional_properties: bool | None = None


class FormatFields(SamplingOptions, kw_only=True):
    """Sampling fields, and the fields for structured output of OpenAI, vLLM and SGLang. A request may have
    one of the latter."""

    response_format: Json | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    json_schema: JsonSchema | None = None


class Format(NamedTuple):
    """What the field at `path` asks for."""

    path: str
    kind: str
    value: Any
    is_strict: bool = False  # every keyword of a JSON schema must be enforced


class Constraint(NamedTuple):
    """The grammar of an output, in the names of PreparedRequest's fields. `grammar` is "" if the output needs
    none; the others are then empty, too, unless the chat has tools."""

    grammar_name: str = ""  # the path of the field
    grammar: str = ""
    not_enforced: tuple[str, ...] = ()  # what the grammar leaves out of its JSON schema (`left_out`)

    def check(self, info: ModelInfo, ignores_eos: bool | None = False) -> None:
        """Raises ApiError for a grammar if the model samples on the device, if the grammar is too long, or if
        the request `ignores_eos`. Does not compile the grammar."""
        if not self.grammar:
            return
        name = self.grammar_name
        require(info.sampling != "device", name, NEEDS_HOST)
        detail = f"makes a grammar of more than {MAX_GRAMMAR} characters"
        require(len(self.grammar) <= MAX_GRAMMAR, name, detail)
        require(not ignores_eos, "ignore_eos", f"cannot be combined with `{name}`, which ends the text")


ANY_TEXT = Constraint()


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Raises ApiError for a GrammarError of the block: for the function whose parameters are the reason, else
    for the field `path`."""
    try:
        yield
    except GrammarError as error:
        raise invalid(getattr(error, "path", path), str(error)) from None


def of_native(grammar: Json | None) -> Constraint:
    """Returns what TGI's `grammar` asks for; None asks for nothing. Raises ApiError for an unknown type, and
    for a schema or a regular expression that cannot be used."""
    return _constraint(_of_type("grammar", grammar), WHITESPACE)


def of_openai(request: FormatFields, field_names: FieldNames = CHAT_FIELDS) -> Constraint:
    """Returns what the fields of a chat or completion request ask for, which may be nothing. Raises ApiError
    for more than one format, an unknown or unsupported one, a value that cannot be used, and for
    `structured_outputs` without a format. field_names: has the name of `response_format`, for errors."""
    outputs = request.structured_outputs or StructuredOutputs()
    within = _of_fields("structured_outputs.", outputs)
    if request.structured_outputs is not None and not within:
        raise invalid("structured_outputs", "needs one of `json`, `regex`, `choice` and `json_object`")
    formats = [
        *_of_type(field_names.format, request.response_format),
        *within,
        *_of_fields("", request),
    ]
    whitespace = WHITESPACE if outputs.whitespace_pattern is None else outputs.whitespace_pattern
    return _constraint(formats, None if outputs.disable_any_whitespace else whitespace)


def _of_type(name: str, given: Json | None) -> list[Format]:
    """Returns the format in the field `name`, as a list of one; [] if `given` is None or {}, or has the type
    `text`. Raises ApiError for an unknown type, and for one without its schema or regular expression;
    `json_object` needs none.

    given: the value of the field, an object with a `type`. The first place in SCHEMA_PATHS that has a schema
    or a regular expression counts, and `strict` beside it.
    """
    kind = (given or {}).get("type")
    if not given or kind == "text":
        return []
    if not isinstance(kind, str) or kind not in SCHEMA_PATHS:
        raise invalid(f"{name}.type", f"must be one of text, {', '.join(SCHEMA_PATHS)}", given=str(kind)[:40])
    for place in SCHEMA_PATHS[kind]:
        outer, _, key = place.rpartition(".")
        holder = given.get(outer) if outer else given
        if isinstance(holder, dict) and holder.get(key) is not None:
            is_strict = holder.get("strict") is True
            return [Format(f"{name}.{place}", "regex" if kind == "regex" else "json", holder[key], is_strict)]
    if kind == "json_object":
        return [Format(name, "json_object", True)]
    raise invalid(name, f"of the type {kind} needs `{'` or `'.join(SCHEMA_PATHS[kind])}`")


def _of_fields(prefix: str, fields: FormatFields | StructuredOutputs) -> list[Format]:
    """Returns the formats that the fields of KINDS ask for, in the order of KINDS. Fields that are null or
    false ask for none. prefix: what is in front of the fields' names in the request, such as
    "structured_outputs."."""
    given = ((name, getattr(fields, name, None)) for name in KINDS)
    return [Format(prefix + name, KINDS[name], value) for name, value in given if value not in (None, False)]


def _constraint(formats: list[Format], whitespace: str | None) -> Constraint:
    """Returns the constraint of the one format that a request may have; [] gives an empty constraint. Raises
    ApiError for several formats, for one that is not supported, and for a schema, a regular expression or
    choices that make no grammar. The grammar may still fail to compile. A schema may be JSON in a string.

    whitespace: the regular expression for what may stand between JSON tokens; None: nothing.
    """
    if not formats:
        return ANY_TEXT
    path, kind, value, is_strict = formats[0]
    require(kind != "unsupported", path, "is not supported")
    if len(formats) > 1:
        raise invalid(formats[1].path, f"cannot be combined with `{path}`: a request has one output format")
    is_text = kind != "regex" or isinstance(value, str)
    require(is_text, path, "must be a regular expression, as a string")
    schema = {"type": "object"} if kind == "json_object" else value
    with naming(path):
        if kind == "regex":
            return Constraint(path, of_regex(value))
        if kind == "choice":
            return Constraint(path, of_choice(value))
        try:
            if isinstance(schema, str):
                schema = msgspec.json.decode(schema)
            return Constraint(path, of_json_schema(schema, whitespace, is_strict), left_out(schema))
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(path, f"must be a JSON schema: {error}") from None
