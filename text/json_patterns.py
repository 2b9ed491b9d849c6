"""Regular expressions as ECMA-262 or Python has them, in Rust's syntax, which llguidance reads."""

from __future__ import annotations

import functools
import json
import re

from llguidance import LLMatcher

# Characters that JSON can only write with \u, which text/grammar.py does not allow. llguidance drops them.
UNWRITABLE = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
# The same, or their escape sequences.
UNWRITABLE_IN_PATTERN = (
    rf"(?:{UNWRITABLE}|\\(?:x|u00)(?:0[0-7bBeEfF]|1[\da-fA-F]|7[fF])"
    r"|\\[xu]\{0*(?:[0-7bBeEfF]|1[\da-fA-F]|7[fF])\}|\\[av]|\\c[^H-JLMh-jlm])"
)
ESCAPE_SEQUENCE = r"\\[pPux]\{[^}]{1,40}\}|\\u[\da-fA-F]{4}|\\x[\da-fA-F]{2}|\\c[A-Za-z]|\\."
PAIR = re.compile(r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}")  # of UTF-16: one character
TOKEN = re.compile(
    # Flags that change the syntax, Python's {,2}, characters that cannot be written, what is cut off, and
    # repetitions that do not go back.
    rf"(?P<unclear>{UNWRITABLE_IN_PATTERN}|\[{UNWRITABLE_IN_PATTERN}\]"
    r"|\(\?(?!i?[:)]|P?<)|\{,\d*\}|\\\Z|[*+?]\+|\{\d+(?:,\d*)?\}\+)"
    r"|(?P<characters>\[\^?(?:\\.|[^\]\\])*\])"
    rf"|(?P<kept>\{{\d+(?:,\d*)?\}}|{ESCAPE_SEQUENCE})|.",
    re.DOTALL,
)
ATOM = rf"(?:{ESCAPE_SEQUENCE}|[^\\])"
RANGE = re.compile(rf"({ATOM})(?:-({ATOM}))?", re.DOTALL)
SEVERAL = re.compile(r"\\[dDwWsSpP]")
ENDS_OF_WORDS = {r"\<": "<", r"\>": ">"}  # in Rust
OUTSIDE = ENDS_OF_WORDS | {".": r"[^\n\r\u2028\u2029]", "{": r"\{", r"\Z": r"\z"}
IN_BRACKETS = ENDS_OF_WORDS | {character: f"\\{character}" for character in "[&~-^"} | {r"\b": r"\x08"}


@functools.lru_cache(200)
def in_rust(pattern: str) -> str | None:
    """Returns the expression in Rust's syntax; None if llguidance lacks a part of the expression, or if
    ECMA-262 and Python read the expression differently. Also None for an expression that is not valid."""
    parts = []
    for token in TOKEN.finditer(PAIR.sub(lambda pair: json.loads(f'"{pair[0]}"'), pattern)):
        text = token[0]
        if token["characters"]:
            text = _characters(text)
        elif text.startswith(r"\c"):
            text = _atom(text)
        if token["unclear"] or not text:
            return None
        parts.append(OUTSIDE.get(text, text))
    result = "".join(parts)
    schema = json.dumps({"type": "string", "pattern": result}, ensure_ascii=False)
    return None if LLMatcher.validate_grammar(f"start: %json {schema}") else result


def _characters(given: str) -> str:
    """Returns a bracket expression, such as [^a-z], in Rust's syntax; "" where Python and ECMA-262 differ,
    and for POSIX classes."""
    negation = "^" * given.startswith("[^")
    body = given[1 + len(negation) : -1]
    if "[:" in body:
        return ""
    parts = []
    for first, last in RANGE.findall(body):
        is_range = last and not SEVERAL.match(first) and not SEVERAL.match(last)
        between = "-" if is_range else r"\-" * bool(last)
        parts.append(_atom(first) + between + _atom(last))
    # With a class that has all control characters, llguidance also allows a quote and a backslash; one that
    # has a single character is that character, which may be one that is dropped.
    if negation:
        parts.append(r"\x01")
    elif re.search(UNWRITABLE_IN_PATTERN, body):
        parts.append(f"--{UNWRITABLE}")
    return f"[{negation}{''.join(parts)}]" if body else ""


def _atom(text: str) -> str:
    """Returns in Rust's syntax one character of a bracket expression, or an escape; "" for ""."""
    if letter := re.fullmatch(r"\\c([A-Za-z])", text):
        return rf"\x{ord(letter[1]) % 32:02x}"
    return IN_BRACKETS.get(text, text)
