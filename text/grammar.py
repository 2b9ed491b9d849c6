"""Grammars: what a generated text must look like, as JSON schemas, regular expressions and choices; and their
token masks.

Both sides use it. A web process turns what a client sent into a grammar in llguidance's serialized form, and
checks that it compiles and how long its masks take, before anything is generated. The worker keeps a
`Matcher` beside each request: it is given every sampled token and fills in which tokens may follow. This
layer knows no HTTP and no sockets.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WHITESPACE = r"\n? {0,16}"  # between JSON tokens: the ways in which models write it, without endless blanks
MAX_BYTES, MAX_REGEX_BYTES = 120_000, 4_000
MAX_STRING_BYTES = 1_000  # of a name or value: such bytes are forced, and tokenized together
MAX_NESTING, MAX_PROPERTIES, MAX_VALUES, MAX_REFERENCES = 64, 5_000, 1_000, 500
MAX_OPTIONAL = 499  # properties of an object: four items each of LIMITS' max_items_in_row
MAX_PATTERNS, MAX_NAME_PATTERNS = 4, 50  # within an allOf; in patternProperties
MAX_MULTIPLE = 10_000  # of the numerators in multipleOf: a state of the automaton for each remainder
MAX_COMBINED = 500  # alternatives of intersections: each is as large as its patterns, and takes milliseconds
COMPILE_S = 0.25  # of processor time
SLOW_MASK_S = 0.02  # a grammar whose masks take longer twice is given up
CACHED, CACHED_CHARACTERS = 64, 500_000  # compiled grammars; those of that length take about 60 MB
# Above these llguidance ends with an error instead of a step that takes long.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=400_000,
    step_lexer_fuel=60_000,
    step_max_items=15_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# JSON Schema's keywords by what they hold; all others hold plain values.
ONE_SCHEMA = (
    "additionalProperties",
    "items",
)  # llguidance refuses the others: `not`, `if`, `contains` and the like
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
PLAIN_VALUES = {
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "multipleOf",
    "minimum",
    "maximum",
    "enum",
    "const",
}


class GrammarError(Exception):
    """A grammar that cannot be used; the message is for the client."""


def of_json_schema(schema: Any, whitespace: str | None = WHITESPACE) -> str:
    """JSON that the schema allows. whitespace: a regular expression for what may stand between JSON tokens,
    None: nothing."""
    return f"start: {json_rule(schema, whitespace)}"


def json_rule(schema: Any, whitespace: str | None = WHITESPACE) -> str:
    """What a schema allows, in Lark."""
    if not isinstance(schema, dict):
        raise GrammarError("must be a JSON schema, which is an object")
    objects = list(_objects(schema))
    schema = json.loads(_checked_size(json.dumps(schema, ensure_ascii=False)))
    _check_size_of_parts(objects)
    check_work([schema])
    schemas = list(_schemas(schema))
    for each in schemas:  # unknown formats describe, and need not be enforced
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
    _close(schemas)
    schema["x-guidance"] = {"coerce_one_of": True, "whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        _check_regex(whitespace)
        schema["x-guidance"]["whitespace_pattern"] = whitespace
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def of_regex(text: str) -> str:
    """Text that matches the regular expression as a whole."""
    if not text:
        raise GrammarError("must not be empty")
    _check_regex(text)
    return json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]


def of_choice(choices: Sequence[str]) -> str:
    """One of these texts."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("must be a list of texts that are not empty")
    _at_most(MAX_VALUES, len(choices), "choices")
    for choice in choices:
        _checked_size(choice, MAX_STRING_BYTES, "bytes in a choice")
    return of_rules(["start: " + " | ".join(_lark_string(choice) for choice in choices)])


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # which JSON leaves as it is


def of_rules(rules: list[str], inner: str = "", name: str = "") -> str:
    """A grammar of Lark rules, the first of which is `start`; they may use the grammar `inner` as the rule
    `name`."""
    if inner:
        rules = [*rules, name + inner.removeprefix("start")]
    return _checked_size("\n".join(rules))


def _checked_size(text: str, limit: int = MAX_BYTES, what: str = "bytes") -> str:
    _at_most(limit, len(text.encode("utf-8", "replace")), what)
    return text


def _at_most(limit: int, given: int, what: str) -> None:
    if given > limit:
        raise GrammarError(f"must have at most {limit} {what}. Given: {given}")


def _check_regex(text: str) -> None:
    if "\0" in _checked_size(text, MAX_REGEX_BYTES, "bytes in a regular expression"):
        raise GrammarError("must not hold a NUL character")


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all that it is made of."""
    if not isinstance(schema, dict):
        return
    yield schema
    parts = [schema.get(name) for name in ONE_SCHEMA]
    for name in SCHEMA_LISTS:
        parts += schema[name] if isinstance(schema.get(name), list) else []
    for name in NAMED_SCHEMAS:
        parts += schema[name].values() if isinstance(schema.get(name), dict) else []
    for part in parts:
        yield from _schemas(part)


def _objects(value: Any, level: int = 0) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value: a `$ref` makes a schema of any of them."""
    if level > MAX_NESTING:
        raise GrammarError(f"is nested more deeply than {MAX_NESTING} levels")
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item, level + 1)


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value, whose bytes are forced and tokenized together."""
    if isinstance(value, str):
        yield value
    for item in (
        [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _texts(item)


def _properties(schema: dict[str, Any], keyword: str = "properties") -> dict[str, Any]:
    return schema[keyword] if isinstance(schema.get(keyword), dict) else {}


def _required(schema: dict[str, Any]) -> set[str]:
    return set(map(str, schema["required"])) if isinstance(schema.get("required"), list) else set()


def _patterns(objects: list[dict[str, Any]]) -> int:
    return sum(isinstance(each.get("pattern"), str) for each in objects)


def _check_size_of_parts(objects: list[dict[str, Any]]) -> None:
    """Limits what would take long to compile."""
    _at_most(MAX_PROPERTIES, sum(len(_properties(each)) for each in objects), "properties")
    name_patterns = [pattern for each in objects for pattern in _properties(each, "patternProperties")]
    _at_most(MAX_NAME_PATTERNS, len(name_patterns), "patterns in `patternProperties`")
    _at_most(MAX_REFERENCES, sum("$ref" in each for each in objects), "`$ref`s")
    in_all = _patterns(objects) if any("$ref" in each for each in objects) else None
    values = 0
    for each in objects:
        optional = _properties(each).keys() - _required(each)
        _at_most(MAX_OPTIONAL, len(optional), "properties of an object that are not required")
        fixed = [
            *(each["enum"] if isinstance(each.get("enum"), list) else []),
            *([each["const"]] if "const" in each else []),
        ]
        values += len(fixed)
        _at_most(MAX_VALUES, values, "values of enumerations")
        for text in _texts([fixed, *_properties(each), *_required(each)]):
            _checked_size(text, MAX_STRING_BYTES, "bytes in a value or name")
        if isinstance(each.get("pattern"), str):
            _check_regex(each["pattern"])
        if isinstance(each.get("allOf"), list):
            inner = _patterns(list(_objects(each))) if in_all is None else in_all
            _at_most(MAX_PATTERNS, inner, "patterns within an `allOf`")
    for pattern in name_patterns:
        _check_regex(pattern)


def check_work(schemas: Sequence[dict[str, Any]]) -> None:
    """Limits the work for the schemas of one grammar: of what is intersected, the automata and alternatives
    are multiplied."""
    multiple = combined = 0
    for schema in schemas:
        objects = list(_objects(schema))
        numbers = [each["multipleOf"] for each in objects if type(each.get("multipleOf")) in (int, float)]
        numerators = [Fraction(str(number)).numerator for number in numbers]
        combines = any(not each.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref")) for each in objects)
        multiple += math.lcm(*numerators) if combines and numerators else sum(numerators)
        alternatives = _Alternatives(objects)
        combined += sum(alternatives.of(each) for each in objects if len(alternatives.factors(each)) > 1)
    if multiple > MAX_MULTIPLE:
        raise GrammarError(f"must have numbers in `multipleOf` that are at most {MAX_MULTIPLE} all together")
    if combined > MAX_COMBINED:
        raise GrammarError(
            f"must combine at most {MAX_COMBINED} alternatives, with `allOf`, `$ref`s or beside other keywords"
        )


class _Alternatives:
    """How many alternatives `anyOf` and `oneOf` make of an object in a schema; intersections multiply those
    of their parts."""

    MANY = MAX_COMBINED + 1

    def __init__(self, objects: list[dict[str, Any]]):
        self._schema = objects[0]
        self._has_ids = any(isinstance(each.get(name), str) for each in objects[1:] for name in ("$id", "id"))
        self._known: dict[int, int] = {}

    def of(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in self._known:
            self._known[id(schema)] = (
                1  # within itself: of what is recursive, llguidance limits the depth of intersections
            )
            try:
                self._known[id(schema)] = min(math.prod(self.factors(schema)), self.MANY)
            except RecursionError:
                raise GrammarError("has `$ref`s that are nested too deeply") from None
        return self._known[id(schema)]

    def factors(self, schema: dict[str, Any]) -> list[int]:
        """The number for each of the schemas of which this one is the intersection."""
        lists = {name: schema[name] for name in SCHEMA_LISTS if isinstance(schema.get(name), list)}
        factors = [self.of(part) for part in lists.pop("allOf", ())]
        factors += [sum(map(self.of, lists.pop(name))) for name in ("anyOf", "oneOf") if name in lists]
        inner = [part for parts in lists.values() for part in parts] + [
            schema[name] for name in ONE_SCHEMA if name in schema
        ]
        inner += [
            part
            for name in ("properties", "patternProperties")
            for part in _properties(schema, name).values()
        ]
        factors += [max(map(self.of, inner))] if inner else []
        factors += [self._of_reference(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        return factors + [1] * (not PLAIN_VALUES.isdisjoint(schema))

    def _of_reference(self, reference: str) -> int:
        """The number for a path from the root, such as `#/$defs/name`. Other references are not looked up."""
        if self._has_ids or not f"{reference}/".startswith("#/"):
            return self.MANY
        target: Any = self._schema
        for key in unquote(reference).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                target = target.get(key) if isinstance(target, dict) else None
        return self.of(target)


def _close(schemas: list[dict[str, Any]]) -> None:
    """Allows no properties but those that are named, unless the schema says more about it: models go on
    inventing some."""
    parts = [name for each in schemas if "properties" in each or "required" in each for name in each]
    if not {"allOf", "anyOf", "oneOf", "$ref"}.intersection(parts) and not any(
        "allOf" in each for each in schemas
    ):
        for each in schemas:
            named, others = (
                _properties(each),
                {"patternProperties", "unevaluatedProperties"}.intersection(each),
            )
            if named and not others and named.keys() >= _required(each):
                each.setdefault("additionalProperties", False)


class Grammars:
    """The compiled grammars of one model. May be used from any thread.

    tokenizer_json: the text of its tokenizer.json; vocab_size: the width of the logits, in tokens.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]):
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the last used one is last
        self._error, self._tokenizer = "", None
        try:
            plain = json.dumps(
                json.loads(tokenizer_json) | {"padding": None, "truncation": None}, ensure_ascii=False
            )
            self._tokenizer = LLTokenizer(plain, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except Exception as error:  # of a tokenizer that llguidance cannot read: all else is served
            self._error = f"cannot be enforced with this model's tokenizer: {error}"

    @classmethod
    def load(cls, tokenizer_dir: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        return cls(
            (Path(tokenizer_dir) / "tokenizer.json").read_text(encoding="utf-8"), vocab_size, eos_token_ids
        )

    def check(self, grammar: str) -> None:
        """Compiles a grammar, and computes its masks for the first tokens. Raises GrammarError."""
        self._get(grammar, probes=True)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of the text; quick where the grammar is known. Raises GrammarError."""
        return Matcher(self._get(grammar, probes=False))

    def _get(self, grammar: str, probes: bool) -> LLMatcher:
        if self._error:
            raise GrammarError(self._error)
        with self._lock:
            if compiled := self._compiled.get(grammar):
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
        started_at = time.thread_time()
        compiled = _valid(LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS))
        if probes and (_is_slow(compiled.deep_copy()) or time.thread_time() - started_at > COMPILE_S):
            raise GrammarError("is too complex: it takes too long to compile")
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > CACHED or sum(map(len, self._compiled)) > CACHED_CHARACTERS:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def knows(self, grammar: str) -> bool:
        with self._lock:
            return grammar in self._compiled


def _is_slow(matcher: LLMatcher) -> bool:
    """Whether the masks of the first tokens take too long."""
    slow = 0
    for _ in range(3):
        started_at = time.thread_time()
        mask = matcher.compute_bitmask()
        slow += time.thread_time() - started_at > SLOW_MASK_S
        if _valid(matcher).is_stopped():
            break
        matcher.consume_token(next(i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1))
    return slow > 1


class Matcher:
    """How far the text of one request has come in its grammar. One thread at a time. Its methods raise
    GrammarError."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher
        self._slow_masks = 0

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped()

    def fill(self, address: int, size: int) -> None:
        """Writes the mask of the next token into memory of `size` bytes: a set bit allows the token."""
        started_at = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, size)
        _valid(self._matcher)
        self._slow_masks += time.thread_time() - started_at > SLOW_MASK_S
        if self._slow_masks > 1:
            raise GrammarError("is too complex: its masks take too long")

    def consume(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            _valid(self._matcher)


def _valid(matcher: LLMatcher) -> LLMatcher:
    """The matcher, unless it is in an error state: then its masks allow nothing but the end."""
    if matcher.is_error():
        lines = [
            line.strip()
            for line in matcher.get_error().replace("<non-verbose/>", "").splitlines()
            if line.strip()
        ]
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = re.sub(r"^at \d+\(\d+\): ", "", (reasons or lines or ["is not valid"])[0])[:500]
        raise GrammarError("allows no text" if reason == "NoExtensionBias" else f"cannot be used: {reason}")
    return matcher
