"""Patterns as those who write schemas mean them: in Rust's syntax where that is clear, never with another meaning."""

import json
import re
from random import Random

import pytest
from grammars import accepts, checker, demo

from text.grammar import GrammarError, left_out, of_json_schema, of_regex

# A pattern, texts of it, and texts that are not.
READ = {
    "a bracket among characters": (r"^[^[\]]{1,3}$", ["ab", "{"], ["[", "]", "a]"]),
    "brackets among characters": (r"^[[a]b]$", ["ab]", "[b]"], ["a", "b"]),
    "braces": ("^{[a-z]{2}}$", ["{ab}"], ["ab", "{a}"]),
    "a brace that counts nothing": ("^a{x}$", ["a{x}"], ["ax"]),
    "Python's end": (r"^[A-Z]{2}\Z", ["AB"], ["ABC"]),
    "a control character that JSON can write": (r"^a\cIb$", ["a\tb"], ["acIb", "ab"]),
    "a backspace": (r"^[\b]$", ["\b"], ["b"]),
    "an ampersand twice": ("^[a&&b]$", ["a", "b", "&"], ["c"]),
    "a tilde twice": ("^[a~~b]$", ["a", "b", "~"], ["c"]),
    "a range to a hyphen": ("^[+--]$", ["+", ",", "-"], ["."]),
    "a hyphen behind a class": (r"^[\w-.]$", ["a", "-", "."], ["/"]),
    "a hyphen before a class": (r"^[a-\d]$", ["a", "-", "7"], ["b"]),
    "a hyphen at the end": ("^[a-]$", ["a", "-"], ["b"]),
    "a circumflex inside": ("^[a^]$", ["a", "^"], ["b"]),
    "angle brackets": (r"^\<b\>$", ["<b>"], ["b"]),
    "a plus again and again": (r"^\++$", ["+++"], [""]),
    "a slash": (r"^\/a$", ["/a"], [r"\/a"]),
    "a character of two halves": (r"^\ud83d\ude00$", ["😀"], ["a"]),
    "a range of such characters": (r"^[\ud83d\ude00-\ud83d\ude4f]$", ["😀", "🙏"], ["a"]),
    "a dot": ("^.$", ["a", "é"], ["\n", "\r", "\u2028"]),
    "digits of ASCII": (r"^\d\w$", ["1a"], ["\u0661a", "1é"]),
    "named groups": (r"^(?<y>\d)-(?P<m>\d)$", ["1-2"], ["12"]),
    "letters of either case": ("^(?i)ab$", ["AB"], ["b"]),
    "letters of a script": (r"^\p{Script=Greek}$", ["\u03b1"], ["a"]),
    "all but a quote": ('^[^"]+$', ["ab", "\\", "\n"], ['"', 'a"']),
    "all but a backslash": (r"^[^\\]+$", ["ab", '"', "\t"], ["\\", "a\\b"]),
    "no control characters, quotes and backslashes": (r'^[^\x00-\x1f"\\]+$', ["ab"], ['"', "\\", "\n"]),
    "characters up to the space": (r"^[\x00-\x20]+$", [" ", "\t"], ['"', "\\", "a"]),
    "characters of ASCII": (r"^[\x00-\x7f]+$", ["ab", '"', "\\", "\t"], ["é"]),
    "control characters that can be written among others": (r"^[\v\cA-\cZ\x7f]$", ["\t", "\n"], ["", "a", "\x7f"]),
    "a backslash before a number": (r"^\\x01$", ["\\x01"], ["\x01"]),
    "ends within alternatives": ("^a$|^b$", ["a", "b"], ["ab"]),
}
LEFT_OUT = {
    "what Python counts and ECMA-262 does not": "^a{,2}$",
    "characters that JSON would write as numbers": r"^\cA$",
    "a NUL": r"^\0$",
    "a control character": "^a\x01$",
    "the number of a control character": r"^a\x01$",
    "the number of a control character in four digits": r"^a\u001F$",
    "a delete": "^a\x7f$",
    "the number of a delete, as a class": r"^a[\x7F]$",
    "a vertical tab": r"^\v$",
    "a control character or a delete": r"^a[\x01\x7f]b$",
    "a vertical tab, as a class": r"^a[\v]b$",
    "control characters by their letters": r"^a[\cA\cK]b$",
    "a control character without its letter": r"^a[\c1]$",
    "the beginning of a control character": "^a\\c",
    "no character, or a bracket": "^[]$",
    "any character, or no bracket": "^[^]$",
    "a class of POSIX": "^[[:alpha:]]$",
    "a group that does not go back": "^(?>a)$",
    "flags": "^(?x)a b$",
    "a beginning in the middle": "a^b",
    "a look ahead": "^(?=a)b$",
    "a repetition that does not go back": "^a*+a$",
    "a count that does not go back": "^a{2}+a$",
    "more text than is looked at": "^" + "a" * 5_000,
    "a group again": r"^(a)\1$",
    "ends of words": r"\bfoo\b",
    "Perl's quotes": r"^\Qa\E$",
    "emoji of several characters": r"^\p{RGI_Emoji}$",
    "an open bracket": "^[a",
    "an open group": "^(a",
    "an escape of nothing": "a\\",
}


def of_pattern(pattern):
    return {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}


@pytest.mark.parametrize(("pattern", "valid", "invalid"), READ.values(), ids=READ)
def test_a_pattern_means_what_its_writer_means(pattern, valid, invalid):
    grammar = of_json_schema(of_pattern(pattern), is_strict=True)
    checker().check(grammar)

    def is_written(text):
        return accepts(json.dumps({"x": text}, ensure_ascii=False), grammar)

    assert [text for text in valid if not is_written(text)] == []
    assert [text for text in invalid if is_written(text)] == []


@pytest.mark.parametrize("pattern", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_pattern_that_cannot_be_enforced_is_left_out_by_name_and_rejected_with_its_place_where_all_has_to_hold(pattern):
    schema = of_pattern(pattern)
    assert left_out(schema) == ("/properties/x/pattern",)
    checker().check(of_json_schema(schema))
    with pytest.raises(GrammarError) as raised:
        of_json_schema(schema, is_strict=True)
    assert f"/properties/x/pattern `{pattern}`" in str(raised.value)


def test_names_by_patterns_are_read_the_same_way():
    schema = {"type": "object", "patternProperties": {r"^[^[\]]$": {"type": "integer"}}, "additionalProperties": False}
    assert accepts('{"a": 1}', of_json_schema(schema)) and not accepts('{"[": 1}', of_json_schema(schema))
    schema = {"type": "object", "propertyNames": {"pattern": "^{[a-z]}$"}}
    assert accepts('{"{a}": 1}', of_json_schema(schema)) and not accepts('{"a": 1}', of_json_schema(schema))


def test_two_patterns_that_come_to_the_same_both_hold():
    both = {"^{$": {"type": "integer"}, r"^\{$": {"minimum": 5}}
    grammar = of_json_schema({"type": "object", "patternProperties": both, "additionalProperties": False})
    assert accepts('{"{": 5}', grammar) and not accepts('{"{": 4}', grammar) and not accepts('{"{": "a"}', grammar)


def test_regular_expressions_of_their_own_field_are_read_the_same_way():
    assert accepts("ab", of_regex("[^[\\]]+")) and not accepts("a[", of_regex("[^[\\]]+"))


PIECES = [
    "a",
    "1",
    " ",
    "_",
    '"',
    r"\\",
    "/",
    r"\n",
    "é",
    r"\x41",
    r"\x01",
    "\x7f",
    "~",
    r"\w",
    r"\d",
    r"\s",
    r"\W",
    r"\D",
    r"\S",
]
IN_BRACKETS = [*PIECES, "a-z", "0-9", r"\x00-\x1f", r"\x00-\x7f", "!-~", " -~", r"\]", r"\^", r"\-"]
CHARACTERS = 'ab1 _-"\\/\n\t\b~é'


def random_pattern(rng):
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = rng.choice([*PIECES, "."])
        if rng.random() < 0.5:
            part = f"[{rng.choice(['', '^'])}{''.join(rng.choices(IN_BRACKETS, k=rng.randint(1, 4)))}]"
        parts.append(part + rng.choice(["", "", "?", "*", "{2}"]))
    return "".join(parts)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Python, about && and ~~ in brackets
@pytest.mark.parametrize("seed", range(3))
def test_of_random_patterns_the_texts_are_those_of_python(seed):
    rng = Random(seed)
    tokenizer, grammars = demo()
    for pattern in (random_pattern(rng) for _ in range(80)):
        schema = {"type": "string", "pattern": f"^{pattern}$"}
        if left_out(schema):
            continue
        try:
            matcher = grammars.compile(of_json_schema(schema))
        except GrammarError:  # no text matches
            continue
        for text in ("".join(rng.choices(CHARACTERS, k=rng.randint(0, 3))) for _ in range(40)):
            ids = tokenizer.encode(json.dumps(text, ensure_ascii=False)).ids
            copy = matcher.deep_copy()
            allowed = copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()
            assert allowed == bool(re.fullmatch(pattern, text, re.ASCII)), (pattern, text)
