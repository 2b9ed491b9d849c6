"""Grammars: what a generated text must look like, as JSON schemas, regular expressions and choices; and their token masks.

Both sides use it. A web process turns what a client sent into a grammar in llguidance's serialized form, and checks that it
compiles and how long its masks take, before anything is generated. The worker keeps a `Matcher` beside each request: it is
given every sampled token and fills in which tokens may follow. This layer knows no HTTP and no sockets.
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

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WHITESPACE = r"\n? {0,16}"  # between JSON tokens: the ways in which models write it, without endless blanks
MAX_BYTES, MAX_REGEX_BYTES, MAX_STRING_BYTES = 120_000, 4_000, 1_000
MAX_NESTING, MAX_PROPERTIES, MAX_OPTIONAL, MAX_VALUES, MAX_PATTERNS = 64, 5_000, 499, 1_000, 4
MAX_MULTIPLE = 10_000  # of a multipleOf's numerator: a state of the automaton for each remainder
COMPILE_S = 0.25  # of processor time
SLOW_MASK_S = 0.02  # a grammar whose masks take longer twice is given up
CACHED = 64  # compiled grammars
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
ONE_SCHEMA = ("additionalProperties", "items")  # llguidance refuses the others: `not`, `if`, `contains` and the like
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class GrammarError(Exception):
    """A grammar that cannot be used; the message is for the client."""


def of_json_schema(schema: Any, whitespace: str | None = WHITESPACE) -> str:
    """JSON that the schema allows. whitespace: a regular expression for what may stand between JSON tokens, None: nothing."""
    return LLMatcher.grammar_from_json_schema(json_rule(schema, whitespace))


def json_rule(schema: Any, whitespace: str | None = WHITESPACE) -> str:
    """The schema, checked, as it stands behind `%json` in a Lark grammar."""
    if not isinstance(schema, dict):
        raise GrammarError("must be a JSON schema, which is an object")
    _check_nesting(schema)
    schema = json.loads(_checked_size(json.dumps(schema, ensure_ascii=False)))
    schemas = list(_schemas(schema))
    properties = [each["properties"] for each in schemas if isinstance(each.get("properties"), dict)]
    _at_most(MAX_PROPERTIES, sum(map(len, properties)), "properties")
    for each in schemas:
        named = each["properties"] if isinstance(each.get("properties"), dict) else {}
        optional = named.keys() - set(map(str, each.get("required") or ()))
        _at_most(MAX_OPTIONAL, len(optional), "properties of an object that are not required")
    values = [value for each in schemas for value in _values(each)]
    _at_most(MAX_VALUES, len(values), "values of enumerations")
    for text in _texts([values, [list(names) for names in properties]]):
        _checked_size(text, MAX_STRING_BYTES, "bytes in a value or name")
    _check_numbers_and_patterns(schemas)
    for each in schemas:  # unknown formats describe, and need not be enforced
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
    _close(schemas)
    schema["x-guidance"] = {"coerce_one_of": True, "whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        _check_regex(whitespace)
        schema["x-guidance"]["whitespace_pattern"] = whitespace
    return json.dumps(schema, ensure_ascii=False)


def of_regex(text: str) -> str:
    """Text that matches the regular expression as a whole."""
    _check_regex(text)
    return LLMatcher.grammar_from_regex(text)


def of_choice(choices: Sequence[str]) -> str:
    """One of these texts."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("must be a list of texts that are not empty")
    _at_most(MAX_VALUES, len(choices), "choices")
    for choice in choices:
        _checked_size(choice, MAX_STRING_BYTES, "bytes in a choice")
    return of_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def of_lark(text: str) -> str:
    """Text that a Lark grammar of this server's own making allows."""
    return LLMatcher.grammar_from_lark(_checked_size(text))


def _checked_size(text: str, limit: int = MAX_BYTES, what: str = "bytes") -> str:
    _at_most(limit, len(text.encode("utf-8", "replace")), what)
    return text


def _at_most(limit: int, given: int, what: str) -> None:
    if given > limit:
        raise GrammarError(f"must have at most {limit} {what}. Given: {given}")


def _check_regex(text: str) -> None:
    if "\0" in _checked_size(text, MAX_REGEX_BYTES, "bytes in a regular expression"):
        raise GrammarError("must not hold a NUL character")


def _check_nesting(value: Any, level: int = 0) -> None:
    if level > MAX_NESTING:
        raise GrammarError(f"is nested more deeply than {MAX_NESTING} levels")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_nesting(item, level + 1)


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


def _values(schema: dict[str, Any]) -> list:
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    return [*values, schema["const"]] if "const" in schema else values


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value, whose bytes are forced and tokenized together."""
    if isinstance(value, str):
        yield value
    for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _check_numbers_and_patterns(schemas: list[dict[str, Any]]) -> None:
    """Limits what is intersected: the automata of several multiples or patterns are multiplied with each other."""
    multiple, combines = 1, any(not each.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref")) for each in schemas)
    for each in schemas:
        if type(each.get("multipleOf")) in (int, float):  # bool is an int to isinstance
            numerator = Fraction(str(each["multipleOf"])).numerator
            multiple = math.lcm(multiple, numerator) if combines else numerator
            if multiple > MAX_MULTIPLE:
                together = " (the least common multiple of all that may be combined)" if multiple != numerator else ""
                raise GrammarError(f"must have a `multipleOf` of at most {MAX_MULTIPLE}{together}. Given: {multiple}")
        if isinstance(each.get("pattern"), str):
            _check_regex(each["pattern"])
        if isinstance(each.get("allOf"), list):
            inner = list(_schemas(each))
            inner = schemas if any("$ref" in part for part in inner) else inner
            _at_most(MAX_PATTERNS, sum(isinstance(part.get("pattern"), str) for part in inner), "patterns within an `allOf`")


def _close(schemas: list[dict[str, Any]]) -> None:
    """Allows no properties but those that are named, unless the schema says more about it: models go on inventing some."""
    parts = [name for each in schemas if "properties" in each or "required" in each for name in each]
    if not {"allOf", "anyOf", "oneOf", "$ref"}.intersection(parts) and not any("allOf" in each for each in schemas):
        for each in schemas:
            named, others = each.get("properties"), {"patternProperties", "unevaluatedProperties"}.intersection(each)
            if isinstance(named, dict) and not others and named.keys() >= set(map(str, each.get("required") or ())):
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
            plain = json.dumps(json.loads(tokenizer_json) | {"padding": None, "truncation": None}, ensure_ascii=False)
            self._tokenizer = LLTokenizer(plain, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except Exception as error:  # of a tokenizer that llguidance cannot read: all else is served
            self._error = f"cannot be enforced with this model's tokenizer: {error}"

    @classmethod
    def load(cls, tokenizer_dir: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        return cls((Path(tokenizer_dir) / "tokenizer.json").read_text(encoding="utf-8"), vocab_size, eos_token_ids)

    def check(self, grammar: str) -> None:
        """Compiles a grammar, and computes its masks for the first tokens. Raises GrammarError."""
        if self._error:
            raise GrammarError(self._error)
        with self._lock:
            if grammar in self._compiled:
                return
        started_at = time.thread_time()
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        probed, slow = _valid(compiled).deep_copy(), 0
        for _ in range(3):
            mask_at = time.thread_time()
            mask = probed.compute_bitmask()
            slow += time.thread_time() - mask_at > SLOW_MASK_S
            if _valid(probed).is_stopped() or slow > 1:
                break
            probed.consume_token(next(i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1))
        if slow > 1 or time.thread_time() - started_at > COMPILE_S:
            raise GrammarError("is too complex: it takes too long to compile")
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of the text; quick where `check` has been called before. Raises GrammarError."""
        self.check(grammar)
        with self._lock:
            self._compiled.move_to_end(grammar)
            return Matcher(self._compiled[grammar].deep_copy())

    def knows(self, grammar: str) -> bool:
        with self._lock:
            return grammar in self._compiled


class Matcher:
    """How far the text of one request has come in its grammar. One thread at a time. Its methods raise GrammarError."""

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
            raise GrammarError("the grammar is too complex: its masks take too long")

    def consume(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            _valid(self._matcher)


def _valid(matcher: LLMatcher) -> LLMatcher:
    """The matcher, unless it is in an error state: then its masks allow nothing but the end."""
    if matcher.is_error():
        lines = [line.strip() for line in matcher.get_error().replace("<non-verbose/>", "").splitlines() if line.strip()]
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = re.sub(r"^at \d+\(\d+\): ", "", (reasons or lines or ["is not valid"])[0])[:500]
        raise GrammarError("allows no text" if reason == "NoExtensionBias" else f"cannot be used: {reason}")
    return matcher
