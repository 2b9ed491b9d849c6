"""JSON schemas in the keywords that llguidance has: others are rewritten in these, or left out and named.

Schemas come from clients. So all work here is linear in the size of a schema, which text/grammar.py limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

from text import json_numbers
from text.json_patterns import UNWRITABLE, in_rust

Schema = dict[str, Any]

# JSON Schema's keywords that hold a schema or a list of them, and those that hold schemas by name.
SCHEMAS = {
    *("additionalProperties", "items", "additionalItems", "unevaluatedProperties", "unevaluatedItems"),
    *("allOf", "anyOf", "oneOf", "prefixItems"),
}
NAMED_SCHEMAS = {
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
}
VALUES = ("const", "enum")
MAY_BE_NULL = {"const", "default"}
AS_GIVEN = {*VALUES, "default", "examples"}
ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated"}
COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef"}
DEPENDENTS = ("dependencies", "dependentRequired", "dependentSchemas")
OPEN = {"patternProperties", "unevaluatedProperties"}  # say which other properties are allowed
OTHERS = ("additionalProperties", "unevaluatedProperties")  # the schema of properties without one
BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
STRING_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
TYPE_NAMES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
JSON_TYPES = {*TYPE_NAMES.values()} - {"integer"}  # integers are numbers, too
LIST_PATTERN = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w |-]+)\))\$")
MAX_DEPENDENTS = 3  # names that others depend on: each doubles the alternatives
MAX_DEPENDENT_PROPERTIES = 40  # of an object that has such names
MAX_HOPS = 8  # from reference to reference
MAX_LISTED = 100  # keywords, values or names in a schema that is looked at for every reference to it
MAX_PLACE = 200  # characters
MAX_PATTERNS = 4_000  # characters, each of which may take 0.08 ms
PER_PATTERN = 20  # characters that each counts as more than it has


class Place(NamedTuple):
    """A schema within a document, and its JSON pointer `path`. The schema is None if there is none at
    `path`."""

    schema: Any
    path: str


class Context(NamedTuple):
    """What the rules look up beyond the schema that they change."""

    document: Schema
    has_few_dependents: bool
    has_one_divisor: bool  # where schemas may be about the same number
    patterns: set[str]  # that `in_rust` has read

    def in_rust(self, pattern: Any) -> str | None:
        """Returns the pattern in Rust's syntax; None if there is none, or `pattern` is no text. Also None if
        all patterns together exceed MAX_PATTERNS; else adds the pattern to `patterns`."""
        if not isinstance(pattern, str):
            return None
        patterns = self.patterns | {pattern}
        if sum(len(each) + PER_PATTERN for each in patterns) > MAX_PATTERNS:
            return None
        self.patterns.add(pattern)
        return in_rust(pattern)


def without_nulls(schema: Any, has_names: bool = False) -> Any:
    """Returns a copy of a JSON schema without members that are null: clients in Go and others write absent
    members so.

    A null `const` or `default` stays, and so do nulls in lists, and within listed values, defaults and
    examples; the copy shares these three with `schema`. has_names: the keys of `schema` are names of
    properties, not keywords. Raises RecursionError for a schema that is nested too deeply.
    """
    if isinstance(schema, list):
        return [without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        keyword = "" if has_names else name
        if value is not None or keyword in MAY_BE_NULL:
            kept[name] = value if keyword in AS_GIVEN else without_nulls(value, keyword in NAMED_SCHEMAS)
    return kept


def enforceable(document: Schema) -> tuple[Schema, tuple[str, ...]]:
    """Changes `document` so that a grammar can enforce it. Returns the document, and what is left out: a JSON
    pointer to the first place of each keyword, () if nothing is. A long pointer is cut at its beginning.

    A value that the resulting schema allows is valid by all keywords that are not left out. A keyword is left
    out only where the resulting schema cannot express that keyword within the limits of this file. Keywords
    that are unknown here stay: llguidance rejects them. Objects that name their properties are closed
    (`_close`).
    """
    places = _places(document)
    _close([schema for schema, _ in places])
    names = sum(len(_by_name(schema, keyword)) for schema, _ in places for keyword in DEPENDENTS)
    divisors = {schema["multipleOf"] for schema, _ in places if _is_divisor(schema.get("multipleOf"))}
    # Whether several schemas may be about the same value.
    may_meet = any(
        not {"allOf", "dependencies"}.isdisjoint(schema)
        or {"properties", "patternProperties"} <= schema.keys()
        or (not COMBINING.isdisjoint(schema) and len(schema.keys() - ANNOTATIONS) > 1)
        for schema, _ in places
    )
    context = Context(document, names <= MAX_DEPENDENTS, len(divisors) <= 1 or not may_meet, set())
    left_out: dict[str, str] = {}
    for schema, path in places:
        for rule in RULES:
            for keyword in rule(schema, context):
                left_out.setdefault(keyword, f"{path}/{keyword}")
    return document, tuple(left_out.values())


def _places(document: Schema) -> list[Place]:
    """Returns the schemas that `document` is made of or refers to, but for true and false: each once, the
    document first and outer ones before inner ones. A schema that is also something else is left out: a
    listed value, or an object whose keys are names of properties."""
    found = [Place(document, "")]
    seen = {id(document)}
    others = set()
    for schema, path in found:
        others.update(id(value) for name in VALUES for value in _nested_values(schema.get(name)))
        others.update(id(schema[name]) for name in NAMED_SCHEMAS if name in schema)
        for part in _parts(schema, path, document):
            if isinstance(part.schema, dict) and id(part.schema) not in seen:
                seen.add(id(part.schema))
                found.append(part)
    return [place for place in found if id(place.schema) not in others]


def _parts(schema: Schema, path: str, document: Schema) -> Iterator[Place]:
    """Yields the values where a schema holds schemas directly, and the place that it refers to. Not each is
    an object: true, lists and None are yielded, too."""
    for keyword, value in schema.items():
        place = within(path, keyword)
        if keyword == "$ref":
            yield referred(value, document)
        elif keyword in NAMED_SCHEMAS:
            yield from (Place(part, within(place, name)) for name, part in _by_name(schema, keyword).items())
        elif keyword in SCHEMAS:
            yield Place(value, place)
            if isinstance(value, list):
                yield from (Place(part, within(place, n)) for n, part in enumerate(value))


def _nested_values(value: Any) -> Iterator[Any]:
    """The value and all that it holds."""
    waiting = [value]
    for each in waiting:
        yield each
        if isinstance(each, (dict, list)):
            waiting += each.values() if isinstance(each, dict) else each


def referred(reference: Any, document: Schema) -> Place:
    """Returns the place that a `$ref` names in the document. Its schema is None if `reference` is no JSON
    pointer such as `#/$defs/a`, or leads to nothing; else it may be any value, not only a schema. The path of
    the place may be cut at its beginning, and means nothing if the schema is None. A reference in what is
    found is not followed."""
    text = unquote(reference) if isinstance(reference, str) else ""
    begin, *names = text.split("/")
    found: Any = document if begin == "#" else None
    try:
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
    except (LookupError, TypeError, ValueError):
        found = None
    return Place(found, _end_of(text[1:]))


def _resolved(schema: Any, document: Schema) -> Any:
    """Returns what a chain of references leads to, None if it leads to nothing; `schema` itself if that is no
    reference. Follows MAX_HOPS references at most, so the result may be a reference. One with other keywords
    beside it is not followed, unless these are annotations."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"$ref"}:
            break
        schema = referred(schema["$ref"], document).schema
    return schema


def within(path: str, key: Any) -> str:
    """The JSON pointer to what is below `key` of the schema at `path`."""
    return _end_of(f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}")


def _end_of(path: str) -> str:
    """A JSON pointer, or the end of a long one: with all of it, texts would grow with the depth."""
    return path if len(path) <= MAX_PLACE else f"…{path[-MAX_PLACE:]}"


def _close(schemas: list[Schema]) -> None:
    """Forbids properties that a schema does not name, as models go on inventing properties: sets
    `additionalProperties` to false in the schemas.

    A schema stays open if it names no properties, if it requires a name that `properties` lacks, or if it has
    `additionalProperties`, `patternProperties` or `unevaluatedProperties`. All schemas stay open if one
    schema has `allOf`, or has another combining keyword beside `properties` or `required`; `dependencies`
    with a schema count as one.
    """
    for each in schemas:
        has_schemas = any(isinstance(then, dict) for then in _by_name(each, "dependencies").values())
        combines = has_schemas or not COMBINING.isdisjoint(each)
        if "allOf" in each or (combines and ("properties" in each or "required" in each)):
            return
    for each in schemas:
        named = _by_name(each, "properties")
        if named and OPEN.isdisjoint(each) and named.keys() >= required_names(each):
            each.setdefault("additionalProperties", False)


def _by_name(schema: Schema, keyword: str) -> Schema:
    """The value of a keyword that holds something by name; {} if it is absent or no object."""
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _types(schema: Any) -> set[str]:
    """Returns the names of the types that a schema allows, by its `type`, else by its listed values, else all
    types. False allows none. A schema that names `integer` or lists an integer has `integer` and `number`;
    all types are those without `integer`. Unknown names in `type` stay. The set must not be changed: it may
    be JSON_TYPES itself.

    Example: {"type": "integer"} has both, {} has `number` alone of the two.
    """
    if not isinstance(schema, dict):
        return set() if schema is False else JSON_TYPES
    names = named_types(schema)
    if names is None:
        return JSON_TYPES
    return names | {"number"} if "integer" in names else names


def named_types(schema: Schema) -> set[str] | None:
    """Returns the types that `type` names, else those of the listed values; None: a schema without either. An
    integer that is listed has the type `integer` alone. `type` may name unknown types; they are returned as
    text."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if given is None and (values := allowed_values(schema)) is not None:
        return {TYPE_NAMES[type(value)] for value in values}
    return set(map(str, given)) if isinstance(given, list) else None


def allowed_values(schema: Any) -> list[Any] | None:
    """Returns the only values that a schema allows, by its `const`, else by its `enum`; None: it lists none.
    The list may be that of the schema."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


# Rules: each changes a schema so that its keywords can be enforced, and yields those that are left out.


def _unsupported(schema: Schema, context: Context) -> Iterator[str]:
    """Removes the keywords that llguidance does not have, and writes their meaning in others. Yields those
    whose meaning is lost. A keyword of a type that the schema does not allow has no meaning."""
    for keyword, (kind, is_said) in UNSUPPORTED_KEYWORDS.items():
        if keyword not in schema:
            continue
        value = schema.pop(keyword)
        if kind and kind not in _types(schema):
            continue
        if not is_said(schema, value, context):
            yield keyword
    for keyword in COMPANIONS:
        schema.pop(keyword, None)
    if not isinstance(schema.get("items"), list):  # beside which llguidance overlooks `prefixItems`
        schema.pop("additionalItems", None)


def _says_unevaluated(others: str, schema: Schema, value: Any, _: Context) -> bool:
    """Writes `unevaluatedX`, whose value is given, as the keyword `others` of the schema. Returns whether the
    meaning is kept.

    The meaning is kept unless the schema combines schemas or has a list as `items`; if it is lost, nothing is
    written. A schema that has `others` keeps that keyword as it is. A value that allows everything is
    dropped.
    """
    if value in (True, {}):
        return True
    if not COMBINING.isdisjoint(schema) or isinstance(schema.get("items"), list):
        return False
    schema.setdefault(others, value)
    return True


def _says_names(schema: Schema, value: Any, context: Context) -> bool:
    """Writes `propertyNames`, whose value is given, as a pattern of additional properties. Returns whether
    the meaning is kept; if not, nothing is written.

    The meaning is kept if one pattern or a list describes the names, and the schema has neither `properties`
    nor `patternProperties`. A value that allows all names is dropped. The schema of the pattern is what
    `additionalProperties` was. Example: {"pattern": "^a"} becomes "patternProperties": {"^a": true},
    "additionalProperties": false.
    """
    value = _resolved(value, context.document)
    if value is True:
        return True
    if not isinstance(value, dict) or _is_long(value):
        return False
    said = {name: value[name] for name in value.keys() - ANNOTATIONS}
    if said.pop("type", "string") != "string":
        return False
    if not said:
        return True
    names = allowed_values(said)
    pattern = said.get("pattern")
    if names and all(isinstance(name, str) for name in names):
        pattern = f"^(?:{'|'.join(map(re.escape, names))})$"
    pattern = context.in_rust(pattern) if len(said) == 1 else None
    if not pattern or schema.get("properties") or schema.get("patternProperties"):
        return False
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False
    return True


def _says_dependents(schema: Schema, value: Any, context: Context) -> bool:
    """Writes in `allOf`, for each name: the property is absent, or what depends on that property holds.
    value: names, or a schema, by the name that they depend on.

    Returns whether the meaning is kept. Nothing is written, and the meaning is lost, with more than
    MAX_DEPENDENTS names in the document, more than MAX_DEPENDENT_PROPERTIES properties, or references. The
    same holds for a value that is no object, and for an `allOf` that is no list.
    """
    if value == {}:
        return True
    conditions = schema.get("allOf", [])
    if not isinstance(value, dict) or not isinstance(conditions, list):
        return False
    if not context.has_few_dependents or len(_by_name(schema, "properties")) > MAX_DEPENDENT_PROPERTIES:
        return False
    # llguidance has no combinations of references in a circle.
    if any(isinstance(part, dict) and "$ref" in part for part in _nested_values(value)):
        return False
    schema["allOf"] = [*conditions]
    for name, then in value.items():
        is_list = isinstance(then, list)
        follows = {"required": [name, *then]} if is_list else {"required": [name], "allOf": [then]}
        schema["allOf"].append({"anyOf": [{"properties": {name: False}}, follows]})
    return True


# The types to which keywords apply ("": any), and whether the schema says the same without them.
UNSUPPORTED_KEYWORDS: dict[str, tuple[str, Callable[[Schema, Any, Context], bool]]] = {
    "unevaluatedProperties": ("object", partial(_says_unevaluated, "additionalProperties")),
    "unevaluatedItems": ("array", partial(_says_unevaluated, "items")),
    "propertyNames": ("object", _says_names),
    **dict.fromkeys(DEPENDENTS, ("object", _says_dependents)),
    "uniqueItems": ("array", lambda schema, value, _: value is not True or schema.get("maxItems") in (0, 1)),
    "contains": ("array", lambda schema, *_: schema.get("minContains") == 0 and "maxContains" not in schema),
    "not": ("", lambda _schema, value, _: value is False),
    "if": ("", lambda schema, *_: "then" not in schema and "else" not in schema),
    "$dynamicRef": ("", lambda *_: False),
    "$recursiveRef": ("", lambda *_: False),
}
# Which say nothing without one of these.
COMPANIONS = ("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
# What says which values are valid, but for definitions.
CONSTRAINTS = {
    *SCHEMAS,
    *UNSUPPORTED_KEYWORDS,
    *VALUES,
    *("type", "$ref", "minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minProperties", "maxProperties"),
    *("properties", "patternProperties", "required"),
}


def _strings(schema: Schema, context: Context) -> Iterator[str]:
    """Writes patterns in Rust's syntax, and keeps the formats that llguidance has. Removes the others, and
    yields them if the schema allows strings."""
    is_text = "string" in _types(schema)
    if isinstance(schema.get("pattern"), str):
        pattern = context.in_rust(schema.pop("pattern"))
        if pattern is not None:
            schema["pattern"] = pattern
        elif is_text:
            yield "pattern"
    form = schema.get("format")
    if isinstance(form, str) and form not in STRING_FORMATS:
        del schema["format"]
        if is_text:
            yield "format"


def _numbers(schema: Schema, context: Context) -> Iterator[str]:
    """Writes bounds and multiples of the schema as llguidance reads them. Removes `multipleOf` where
    llguidance cannot track it, and yields it if the schema allows numbers.

    Exclusive bounds become inclusive. A range that llguidance reads only in parts becomes an `anyOf`, unless
    the schema has the type `integer`, lists its values or combines schemas.
    """
    types = _types(schema)
    # Whether no other schema is about the same number.
    is_alone = COMBINING.union(VALUES).isdisjoint(schema)
    least, most = (_bound(schema, *names) for names in BOUNDS)
    divisor = schema.get("multipleOf")
    if _is_divisor(divisor) and not (context.has_one_divisor and json_numbers.has_few_remainders(divisor)):
        del schema["multipleOf"]
        if "number" in types:
            yield "multipleOf"
    ranges = [(least, most)]
    if is_alone and "number" in types and "integer" not in types:
        ranges = json_numbers.ranges(least, most)
    parts = [without_nulls({"minimum": least, "maximum": most}) for least, most in ranges]
    if len(parts) == 1:
        schema.update(*parts)
    else:
        schema["anyOf"] = [{"type": "number"} | part for part in parts]
        if others := sorted(types - {"number"}):
            schema["anyOf"].append({"type": others})


def _bound(schema: Schema, closed: str, opened: str) -> int | float | None:
    """Takes the lower or the upper bound out of a schema. Returns the last number that it allows, None
    without a bound.

    `closed` and `opened` are keywords; the stricter one counts. Drafts before 6 write true or false as
    `opened`. Example: `"minimum": 5, "exclusiveMinimum": true` is the next number above 5.
    """
    is_lower = closed == "minimum"
    if schema.get(opened) is True and closed in schema:
        schema[opened] = schema.pop(closed)
    given = [name for name in (closed, opened) if _is_number(schema.get(name))]
    ends = [json_numbers.first_allowed(schema.pop(name), is_lower, name == opened) for name in given]
    return (max if is_lower else min)(ends, default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _listed(schema: Schema, _: Context) -> Iterator[str]:
    """Keeps the listed values that llguidance reads exactly, and removes the others. Yields a keyword only if
    it has values and none of them stays; then the keyword is removed."""
    for keyword in VALUES:
        values = allowed_values({keyword: schema[keyword]}) if keyword in schema else None
        exact = [value for value in values or [] if all(map(_is_exact, _nested_values(value)))]
        if values and not exact:
            del schema[keyword]
            yield keyword
        elif keyword == "enum" and values:
            schema[keyword] = exact


def _is_exact(value: Any) -> bool:
    """Whether llguidance reads a listed value exactly. A text with a character that JSON can only write with
    \\u is not read exactly, because text/grammar.py does not allow \\u."""
    if isinstance(value, str):
        return not re.search(UNWRITABLE, value)
    return not _is_number(value) or json_numbers.is_exact(value)


def _patterns(schema: Schema, context: Context) -> Iterator[str]:
    """Writes patterns of names in Rust's syntax. Yields `patternProperties` for each pattern that is left
    out.

    In a closed object llguidance would allow a comma after the last property, although a pattern such as
    `^(a|b)$` matches only names that `properties` has. The schema of such a pattern with one name moves to
    the property. Such a pattern with several names is left out. So is a pattern that `Context.in_rust` has no
    text for; then the keywords of OTHERS are removed and yielded, too.
    """
    patterns = _by_name(schema, "patternProperties")
    if not patterns:
        return
    named = _by_name(schema, "properties")
    is_closed = any(schema.get(keyword) is False for keyword in OTHERS)
    said: Schema = {}
    for pattern, value in patterns.items():
        names = _listed_names(pattern)
        if (written := context.in_rust(pattern)) is None:
            yield "patternProperties"
            for keyword in OTHERS:  # which would be for the names of the pattern, too
                if keyword in schema:
                    del schema[keyword]
                    yield keyword
        elif not (is_closed and names and names <= named.keys()):
            said[written] = {"allOf": [said[written], value]} if written in said else value
        elif len(names) == 1:
            (name,) = names
            named[name] = {"allOf": [named[name], value]}
        else:
            yield "patternProperties"
    schema["patternProperties"] = said
    if not said:
        del schema["patternProperties"]


def _listed_names(pattern: str) -> set[str]:
    """The names that a pattern lists, as in `^(a|b)$`; none: it may match others."""
    listed = LIST_PATTERN.fullmatch(pattern)
    return set((listed[1] or listed[2]).split("|")) if listed else set()


def _counts(schema: Schema, _: Context) -> Iterator[str]:
    """Keeps `minProperties` and `maxProperties` where llguidance counts right, and yields the others, which
    are removed.

    llguidance counts either additional properties alone, or one named property that may be missing; a name
    that is given twice counts as two. A `minProperties` that is yielded may stay, as it prevents empty
    objects. A `maxProperties` that a closed object cannot exceed is removed, and not yielded.
    """
    least = schema.get("minProperties", 0)
    most = schema.get("maxProperties", math.inf)
    if "object" not in _types(schema) or not all(map(_is_number, (least, most))):
        return
    names = set(_by_name(schema, "properties"))
    required = required_names(schema)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    is_alone = COMBINING.isdisjoint(schema)
    if is_closed and most >= len(names | required):
        schema.pop("maxProperties", None)
        most = math.inf
    more = least - len(required)
    counts_one = is_closed and is_alone and more <= 1
    if is_alone and names <= required:  # it counts additional properties
        if more > 1:
            yield "minProperties"  # though it is kept: it prevents empty objects
        return
    if most < math.inf and not (counts_one and most == len(required) + 1):
        del schema["maxProperties"]
        yield "maxProperties"
    if more > 0 and not counts_one:
        del schema["minProperties"]
        yield "minProperties"


def _one_of_keyword(schema: Schema, context: Context) -> Iterator[str]:
    """Yields `oneOf` where a value may be allowed by two of its options: llguidance takes `oneOf` for
    `anyOf`. The keyword stays in the schema."""
    options = schema.get("oneOf")
    if isinstance(options, list) and not _are_exclusive(options, _types(schema), context.document):
        yield "oneOf"


def _are_exclusive(options: list[Any], types: set[str], document: Schema) -> bool:
    """Whether no value of these `types` is allowed by two of the options, as far as this function sees: False
    may be wrong, True is certain.

    Options differ by their types, by their listed values, or by the listed values of a property that all of
    them require. False if an option is too long to be examined.
    """
    options = [_resolved(option, document) for option in options]
    if any(map(_is_long, options)):
        return False
    for kind in types:
        rivals = [option for option in options if kind in _types(option)]
        if len(rivals) < 2 or _differ(rivals):
            continue
        tags = set.intersection(*map(required_names, rivals)) if kind == "object" else ()
        if not any(
            _differ(_resolved(_by_name(option, "properties").get(tag), document) for option in rivals)
            for tag in tags
        ):
            return False
    return True


def required_names(schema: Any) -> set[str]:
    """Returns the names in `required` that are texts; an empty set if there are none, or if the schema is no
    object."""
    required = schema.get("required") if isinstance(schema, dict) else None
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _is_long(schema: Any) -> bool:
    """Whether a schema is too long to be examined at every reference to it."""
    if not isinstance(schema, dict):
        return False
    listed = (schema, schema.get("enum"), schema.get("required"))
    return any(len(each) > MAX_LISTED for each in listed if isinstance(each, (dict, list)))


def _differ(schemas: Iterable[Any]) -> bool:
    """Whether all schemas list their values, and no value is listed twice. False for listed objects and
    lists, and for long schemas."""
    values = []
    for schema in schemas:
        if (listed := allowed_values(schema)) is None or _is_long(schema):
            return False
        values += listed
    is_plain = not any(isinstance(value, (dict, list)) for value in values)
    return is_plain and len(set(values)) == len(values)


# The order matters: the values that stay listed show the types; which other properties are allowed follows
# from the patterns that stay.
RULES = (
    _numbers,
    _listed,
    _one_of_keyword,
    _patterns,
    _unsupported,
    _strings,
    _counts,
)
