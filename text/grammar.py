"""Structured output: grammars for JSON schemas, regular expressions and choices, and their token masks.

A grammar is text in llguidance's dialect of Lark whose first rule is `start`. An API server makes it of what
a client sent, and has a `GrammarChecker` compile it in a child process with limits, before anything is
generated. The worker compiles what was accepted (`Grammars`) and keeps a `Matcher` for each request, which
gets every sampled token and fills in the mask of the next one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from run import Json
from text.json_patterns import in_rust
from text.json_schema import enforceable, referred, without_nulls
from text.limited import LimitExceeded, Rejected, SandboxedFunction

WHITESPACE = r"\n? {0,16}"  # between JSON tokens: the ways in which models write it, without endless spaces
MAX_GRAMMAR_BYTES = 120_000
MAX_REGEX_BYTES = 4_000
COMPILE_S = 0.25  # of processor time, in the worker, too
CHECK_S = 1.0  # of processor time, for compiling and the masks of the first tokens
CHECK_BYTES = 128 * 2**20  # for the same, beyond the tokenizer
DRY_RUN_TOKENS = 50
WALKS = 4  # of so many tokens by chance, beside the lowest and the highest ones
SLOW_MASK_S = 0.02  # a grammar whose masks take longer twice is given up
ACCEPTED = 1_000  # grammars that an API server process does not check again
# Beyond these limits llguidance reports an error instead of computing a long step.
# - max_lexer_states: a string of 20,000 characters whose length is limited needs 100,000 states of the lexer.
#   They take 90 MB until the request ends.
# - max_items_in_row: each property that is not required adds four items to a row.
# - step_max_items: a token may end a string and begin such a property. A step has a row for each way in which
#   a token does: 110 rows with a large vocabulary. Such a step takes 10 ms.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=400_000,
    step_lexer_fuel=60_000,
    step_max_items=250_000,
    max_lexer_states=100_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_PLACES = 10  # in an error
NO_TEXT = "allows no text: it needs itself, or its `patternProperties` match only names that `properties` has"
NESTED = "is nested too deeply"
TOO_MANY_ITEMS = "An object may have about 500 properties that are not required"


class GrammarError(Exception):
    """A grammar that cannot be used; the message is for the client."""


def of_json_schema(schema: Any, whitespace: str | None = WHITESPACE, is_strict: bool = False) -> str:
    """Returns the grammar of JSON that the schema allows. Does not compile it: a GrammarChecker does.

    whitespace: a regular expression for what may stand between JSON tokens; None: nothing may. is_strict:
    every keyword must be enforced; otherwise some are left out, which `left_out` names. Raises GrammarError
    for a schema that is no object, too large or nested too deeply, for a `whitespace` that is too long or has
    a NUL and, with `is_strict`, for a keyword that cannot be enforced.
    """
    return f"start: {json_rule(schema, whitespace, is_strict)}"


def json_rule(schema: Any, whitespace: str | None, is_strict: bool = False) -> str:
    """Returns the right side of a Lark rule for the JSON that a schema allows. `schema` is not changed.

    The keywords that `left_out` names are not enforced. whitespace: a regular expression for what may stand
    between JSON tokens; None: nothing may. Raises GrammarError for a schema that is no object, too large or
    nested too deeply, for a `whitespace` that is too long or has a NUL and, with `is_strict`, for keywords
    that cannot be enforced, of which the message names the first MAX_PLACES.
    """
    enforced, places = _enforceable(schema)
    if places and is_strict:
        given = {place: referred(f"#{quote(place)}", schema).schema for place in places[:MAX_PLACES]}
        named = ", ".join(
            f"{place} `{value}`" if isinstance(value, str) else place for place, value in given.items()
        )
        raise GrammarError(
            f"has keywords that cannot be enforced: {named}; remove them, or set `strict: false`"
        )
    options = {
        "coerce_one_of": True,
        "whitespace_flexible": whitespace is not None,
        # Without \\u: in an object with other properties it could spell the name of one that the schema has.
        "json_allowed_escapes": 'nrbtf\\"',
    }
    if whitespace is not None:
        _check_regex(whitespace)
        options["whitespace_pattern"] = whitespace
    return f"%json {json.dumps(enforced | {'x-guidance': options}, ensure_ascii=False)}"


def left_out(schema: Any) -> tuple[str, ...]:
    """Returns what the grammar of a JSON schema does not enforce: a JSON pointer to the first place of each
    keyword; () if all is enforced. Raises GrammarError for a schema that is no object, too large or nested
    too deeply."""
    return _enforceable(schema)[1]


def _enforceable(schema: Any) -> tuple[Json, tuple[str, ...]]:
    """Returns the schema as a grammar enforces it, and JSON pointers to what is left out. Members that are
    null do not count. `schema` is not changed. The result must not be changed: later calls may return it,
    too. Raises GrammarError for a schema that is no object, too large or nested too deeply."""
    if not isinstance(schema, dict):
        raise GrammarError("must be a JSON schema, which is an object")
    try:
        return _enforceable_text(_checked_size(json.dumps(without_nulls(schema), ensure_ascii=False)))
    except RecursionError:
        raise GrammarError(NESTED) from None


# Requests of one application have the same schemas: 2 ms of the event loop. Few, as a long one takes 2 MB.
@functools.lru_cache(8)
def _enforceable_text(schema: str) -> tuple[Json, tuple[str, ...]]:
    return enforceable(json.loads(schema))


def of_regex(text: str) -> str:
    """Returns the grammar of text that matches the regular expression as a whole. text: in the syntax of
    ECMA-262 or Python, else in Rust's. Raises GrammarError for one that is empty, too long or has a NUL;
    whether it is valid is found by a GrammarChecker."""
    if not text:
        raise GrammarError("must not be empty")
    _check_regex(text)
    grammar = LLMatcher.grammar_from_regex(in_rust(text) or text)
    return json.loads(grammar)["grammars"][0]["lark_grammar"]


def of_choice(choices: Sequence[str]) -> str:
    """Returns the grammar of one of these texts. Raises GrammarError if there are none, if one is empty or no
    string, and if they are too long together."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("must be a list of non-empty strings")
    return of_rules(["start: " + " | ".join(map(lark_string, choices))])


def of_rules(rules: list[str], inner: str = "", name: str = "") -> str:
    """Joins Lark rules, the first of which is `start`, to a grammar. Raises GrammarError for a grammar of
    more than MAX_GRAMMAR_BYTES.

    The rules may use another grammar, `inner`, as the rule called `name`.
    """
    if inner:
        rules = [*rules, name + inner.removeprefix("start")]
    return _checked_size("\n".join(rules))


def lark_string(text: str) -> str:
    """Returns a text as a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # which JSON leaves as it is


def _checked_size(text: str, limit: int = MAX_GRAMMAR_BYTES, what: str = "bytes") -> str:
    given = len(text.encode("utf-8", "replace"))
    if given > limit:
        raise GrammarError(f"must have at most {limit} {what}. Given: {given}")
    return text


def _check_regex(text: str) -> None:
    if "\0" in _checked_size(text, MAX_REGEX_BYTES, "bytes in a regular expression"):
        raise GrammarError("must not hold a NUL character")


class GrammarChecker:
    """Checks whether grammars can be used with a model's tokenizer. Threads may share it.

    Child processes compile the grammars. A grammar that exhausts time or memory harms nothing but its child.
    """

    def __init__(self, tokenizer_dir: str | Path, vocab_size: int, eos_token_ids: Sequence[int]):
        self._probe = SandboxedFunction(
            "text.grammar:dry_run",
            [str(tokenizer_dir), vocab_size, list(eos_token_ids)],
            cpu_s=CHECK_S,
            memory_bytes=CHECK_BYTES,
        )
        self._accepted: set[bytes] = set()

    def start(self) -> None:
        """Starts a child, which loads the tokenizer: that takes a second where it has 128,000 tokens. Does
        not wait for it. Raises OSError if no process can be started."""
        self._probe.start()

    def knows(self, grammar: str) -> bool:
        """Whether `check` has accepted the grammar. Accepted grammars are forgotten from time to time."""
        return _digest(grammar) in self._accepted

    def check(self, grammar: str) -> None:
        """Has a child compile the grammar and compute masks, and waits for it: usually milliseconds, at most
        the limits of `SandboxedFunction`. An accepted grammar is remembered for `knows`, and is not skipped
        here. Raises GrammarError for a grammar that does not compile, exceeds the limits or ends the child,
        and OSError if no process can be started."""
        try:
            self._probe(grammar)
        except Rejected as error:
            raise GrammarError(str(error)) from None
        except LimitExceeded as error:
            raise GrammarError(f"is too complex: it {error}") from None
        if len(self._accepted) >= ACCEPTED:
            self._accepted.clear()
        self._accepted.add(_digest(grammar))


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def dry_run(tokenizer_dir: str, vocab_size: int, eos_token_ids: list[int]) -> Callable[[str], str]:
    """Loads the tokenizer, and returns the function that the child of a `GrammarChecker` runs. The function
    compiles a grammar, computes the masks of the first tokens of several outputs, and returns "". It raises
    Rejected for a grammar that does not compile, takes longer than COMPILE_S for that, reaches one of LIMITS,
    or has slow masks."""
    grammars = Grammars(tokenizer_dir, vocab_size, eos_token_ids)
    ends = sum(1 << token_id for token_id in set(eos_token_ids))

    def run(grammar: str) -> str:
        started_at = time.process_time()
        try:
            compiled = grammars.compile(grammar)
            if time.process_time() - started_at > COMPILE_S:
                raise GrammarError("is too complex: it takes too long to compile")
            by_chance = (Random(n).randrange for n in range(WALKS))
            for choose in (lambda _count: 0, lambda count: count - 1, *by_chance):
                _try_tokens(Matcher(compiled.deep_copy()), choose, ends)
        except GrammarError as error:
            raise Rejected(str(error)) from None
        return ""

    return run


def _try_tokens(matcher: Matcher, choose: Callable[[int], int], ends: int) -> None:
    """Computes the masks of the first DRY_RUN_TOKENS tokens of one output, or of fewer if the output ends.
    Raises GrammarError if the grammar has an error, or slow masks.

    choose: takes a number of token ids and returns an id below that number. The next token is the first
    allowed id from the returned one on. Choices by chance make numbers in JSON both short and long. ends: an
    integer whose set bits are the EOS tokens, which are never the next token.
    """
    for _ in range(DRY_RUN_TOKENS):
        following = int.from_bytes(matcher.mask(), "little") & ~ends
        if matcher.is_complete or not following:
            return
        first = choose(following.bit_length())
        rest = following >> first
        matcher.consume(first + (rest & -rest).bit_length() - 1)


class Grammars:
    """Compiles grammars for one model. May be used from any thread.

    vocab_size: the width of the logits, in tokens. The constructor reads tokenizer.json, and raises OSError
    if it cannot. If llguidance cannot use the tokenizer, this is no error yet: every grammar then raises
    GrammarError.
    """

    def __init__(self, tokenizer_dir: str | Path, vocab_size: int, eos_token_ids: Sequence[int]):
        tokenizer_json = (Path(tokenizer_dir) / "tokenizer.json").read_bytes()
        self._error = ""
        try:
            # Its vocabulary stays text: as objects it would take 250 MB where it has 262,144 tokens.
            fields = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
            plain = msgspec.json.encode(fields | {"padding": None, "truncation": None})
            self._tokenizer = LLTokenizer(
                plain.decode(),
                n_vocab=vocab_size,
                eos_token=list(eos_token_ids) or None,
            )
        except Exception as error:  # of a tokenizer that llguidance cannot read: all else is served
            self._error = f"cannot be enforced with this model's tokenizer: {error}"

    def matcher(self, grammar: str) -> Matcher:
        """Returns a new matcher, for one output from its beginning. Raises GrammarError for a grammar that
        does not compile, and for any if the tokenizer cannot be used.

        Each call compiles the grammar anew, in milliseconds. Copies of a compiled grammar would share a
        lexer: its states add up over all outputs, and an error in one output would end all others.
        """
        return Matcher(self.compile(grammar))

    def compile(self, grammar: str) -> LLMatcher:
        """The compiled grammar, at the beginning of an output: llguidance's own, for a `Matcher`. Raises
        GrammarError for a grammar that does not compile, and for any if the tokenizer cannot be used."""
        if self._error:
            raise GrammarError(self._error)
        return _valid(LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS))


class Matcher:
    """The state of one request's output in its grammar. For one thread. `mask` does not advance it, `consume`
    does. An error stays: after a GrammarError the matcher must not be used any more."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher
        self._slow_masks = 0

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        """Returns the mask of the next token: a set bit allows the token, the lowest bit of the first byte is
        for token 0. The bytes may go beyond the vocabulary. Raises GrammarError if llguidance reaches a
        limit, and at the second mask of the output that takes longer than SLOW_MASK_S."""
        started_at = time.thread_time()
        mask = self._matcher.compute_bitmask()
        _valid(self._matcher)
        self._slow_masks += time.thread_time() - started_at > SLOW_MASK_S
        if self._slow_masks > 1:
            raise GrammarError("is too complex: its masks take too long")
        return mask

    def consume(self, token: int) -> None:
        """Advances past the next token of the output. Does nothing if the output `is_complete`. Raises
        GrammarError for a token that the mask does not allow, and if llguidance reaches a limit."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            _valid(self._matcher)


def _valid(matcher: LLMatcher) -> LLMatcher:
    """Returns the same matcher. Raises GrammarError, with llguidance's reason, for a matcher in an error
    state, whose masks allow nothing but the end."""
    if matcher.is_error():
        text = matcher.get_error().replace("<non-verbose/>", "")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = re.sub(r"^at \d+\(\d+\): ", "", (reasons or lines or ["is not valid"])[0])[:500]
        if reason == "NoExtensionBias":
            raise GrammarError(NO_TEXT)
        if "recursion limit exceeded" in reason:
            raise GrammarError(NESTED)
        if "Current row has" in reason or "Too many items" in reason:
            raise GrammarError(f"is too complex: {reason}. {TOO_MANY_ITEMS}")
        raise GrammarError(f"cannot be used: {reason}")
    return matcher
