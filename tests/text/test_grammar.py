"""What becomes of schemas, expressions and choices; which texts the masks allow; what a child process with limits refuses."""

import contextlib
import json
import threading
import time
from random import Random

import pytest
from grammars import accepts, checker, demo, grammars_of, mask_of
from tiny_tokenizers import KINDS

from config import DEMO_MODEL
from text import grammar
from text.grammar import GrammarChecker, GrammarError, Grammars, of_choice, of_json_schema, of_regex

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    "text, allowed",
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name":"Ada","age":36}', True),
        ('{\n  "name": "Ada",\n  "age": 36\n}', True),
        ('{"age": 36, "name": "Ada"}', False),  # in the order of the schema
        ('{"name": "Ada", "age": 151}', False),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": 36, "more": 1}', False),  # nothing that is not named
        (' {"name": "Ada", "age": 36}', False),
        ("{" + 50 * " " + '"name": "Ada", "age": 36}', False),
    ],
)
def test_a_schema_allows_its_documents_with_the_usual_blanks(text, allowed):
    assert accepts(text, of_json_schema(PERSON)) == allowed


@pytest.mark.parametrize(
    "whitespace, allowed", [(None, ['{"a":1}']), ("[ ]?", ['{"a":1}', '{"a": 1}']), (r"\s{0,60}", ['{"a":' + 40 * " " + "1}"])]
)
def test_a_pattern_decides_which_blanks_are_allowed(whitespace, allowed):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text in ('{"a":1}', '{"a": 1}', '{"a":' + 40 * " " + "1}"):
        assert accepts(text, of_json_schema(schema, whitespace)) == (text in allowed or whitespace == r"\s{0,60}")


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"type": "object"}, '{"any": [1, null]}'),
        ({"properties": {"a": {}}, "required": ["b"]}, '{"a": 1, "b": 2}'),  # a name that is required but not described
        ({"properties": {"a": {}}, "additionalProperties": True}, '{"a": 1, "b": 2}'),
        ({"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}]}, '{"a": 1, "b": 2}'),
        ({"$defs": {"x": PERSON}, "type": "array", "items": {"$ref": "#/$defs/x"}}, '[{"name": "", "age": 1}]'),
        ({"oneOf": [{"const": "a"}, {"enum": ["b", 3]}]}, "3"),
        ({"type": "string", "format": "int64"}, '"whatever"'),  # unknown formats only describe
        ({"properties": {"format": {"type": "string", "format": "date"}}}, '{"format": "2026-11-23"}'),
        ({"properties": {"a": {"type": "string", "required": True}}}, '{"a": "x"}'),
        ({"const": {"format": "int64"}}, '{"format": "int64"}'),
        ({"type": "array", "items": False, "prefixItems": [{"type": "integer"}]}, "[7]"),
    ],
)
def test_schemas_of_many_forms_allow_their_documents(schema, text):
    assert accepts(text, of_json_schema(schema))


def test_an_object_may_have_hundreds_of_properties_that_are_not_required_with_any_vocabulary():
    tokenizer = KINDS["byte-level"]()
    tokenizer.add_tokens([f'"{n * " "},' for n in range(1, 17)])  # vocabularies of 200,000 tokens have such in many forms
    grammars = grammars_of(tokenizer)
    text = '{"p0": "on", "p119": "off", "p450": "x"}'
    names = [f"p{n}" for n in range(490)]
    started_at = time.thread_time()
    schema = of_json_schema({"type": "object", "properties": {name: {"type": "string"} for name in names}})
    assert accepts(text, schema, tokenizer, grammars)
    assert time.thread_time() - started_at < 2


def test_expressions_and_choices_allow_whole_matches_only():
    assert accepts("415-ab", of_regex("[0-9]{3}-[a-z]{2}")) and not accepts("415-ab!", of_regex("[0-9]{3}-[a-z]{2}"))
    assert accepts("maybe", of_choice(["yes", "no", "maybe"])) and not accepts("ye", of_choice(["yes", "no"]))
    ascii_text = "".join(map(chr, range(128)))
    assert accepts(ascii_text, of_choice([ascii_text])) and accepts("é😀", of_choice(["é😀"]))


# Their tokens do not say what bytes they stand for.
NOT_ENFORCEABLE = {"metaspace-bpe", "metaspace-unigram", "suffix-bpe", "word-piece", "word-level"}


def of_kind(kind):
    tokenizer = KINDS[kind]()
    return tokenizer, grammars_of(tokenizer)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - NOT_ENFORCEABLE))
def test_masks_fit_every_kind_of_tokenizer_whose_tokens_say_their_bytes(kind):
    serialized = of_regex(" ?[a-z]{4} [0-9]+é")  # some put a space in front of every text
    assert accepts("line 12é", serialized, *of_kind(kind))
    assert not accepts("line x", serialized, *of_kind(kind))


@pytest.mark.parametrize("kind", sorted(NOT_ENFORCEABLE))
def test_a_grammar_for_another_kind_of_tokenizer_is_an_error_that_says_so(kind):
    with pytest.raises(GrammarError, match="this model's tokenizer"):
        of_kind(kind)[1].matcher(of_regex("a"))


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def combined(levels, leaf):
    """A schema of a few bytes a level, each of which has more than twice the alternatives of the one below it."""
    below = [{"$ref": f"#/$defs/{n + 1}"} for n in range(levels)]
    defs = {str(n): {"allOf": [below[n], {"anyOf": [below[n], {"type": "string", "minLength": n}]}]} for n in range(levels)}
    return {"$defs": {**defs, str(levels): leaf}, "$ref": "#/$defs/0"}


def either(*formats):
    return {"anyOf": [{"type": "string", "format": name} for name in formats]}


def properties(count):
    return {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}


SCORED = {"type": "object", "properties": {"score": {"const": 1}}, "required": ["score"]}
REFUSED = [
    ([], "must be a JSON schema"),
    ({"type": "nope"}, "Invalid type: nope"),
    ({"properties": 5}, "properties must be an object"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable schema"),
    ({"$ref": "#"}, "allows no text"),
    ({"$ref": "https://example.com/schema"}, "example.com"),
    (deep(500), "nested too deeply"),
    (deep(4000), "nested too deeply"),
    ({"description": "a" * 120_000}, "at most 120000 bytes"),
    (
        SCORED | {"patternProperties": {"^[s]core$": {}}, "additionalProperties": False},
        "`patternProperties`",
    ),
    ({"type": "object", "properties": {f"p{n}": {} for n in range(600)}}, "too complex: .* about 500 properties"),
    ({"allOf": [{"$ref": "#a"}, {"$ref": "#b"}]}, "does not exist"),
]
# Some of these would take seconds, some gigabytes, some both.
EXPENSIVE = {
    "a long value": {"const": "a" * 100_000},
    "many properties": {"properties": {str(n): {} for n in range(5001)}},
    "many properties that may be missing": properties(1000),
    "many multiples": {"properties": {str(n): {"type": "integer", "multipleOf": 999 - n} for n in range(600)}},
    "references to itself": {"anyOf": [{"allOf": [{"$ref": ""}]} for _ in range(2600)]},
    "patterns together": {"allOf": [{"type": "string", "pattern": f"a.*{c}"} for c in "abcdefghijklmnopqrst"]},
    "alternatives of long patterns": combined(20, {"type": "string", "pattern": "a" * 3_900}),
    "alternatives with ids": combined(20, {"$id": "a:b", "type": "string"}),
    "alternatives in deep references": combined(240, {"type": "string"}),
    "alternatives of formats": {"allOf": [either("uri", "email")] * 12},
}
TOO_MUCH = "too complex|too large|Too many items|row has|too many expressions|Unable to determine"


@pytest.mark.parametrize("schema, reason", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema, reason):
    with pytest.raises(GrammarError, match=reason):
        checker().check(of_json_schema(schema))


@pytest.mark.parametrize("schema", EXPENSIVE.values(), ids=EXPENSIVE)
def test_a_schema_that_takes_too_much_is_refused_and_the_next_one_is_not(schema):
    with pytest.raises(GrammarError, match=TOO_MUCH):
        checker().check(of_json_schema(schema))
    checker().check(of_json_schema(PERSON))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/a~1b%20"}], "default": {}, "$defs": {"a/b ": either("uri", "email")}},  # as pydantic's
        {"properties": {f"p{n}": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]} for n in range(300)}, "$defs": {"t": {}}},
        {"allOf": [properties(9), {"properties": {"a": either("uri", "email")}}, {"required": ["p1"]}]},
        {"type": "object", "oneOf": [{"properties": {"kind": {"const": n}}, "required": ["kind"]} for n in range(300)]},
        {"$defs": {"t": {"properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}}, "$ref": "#/$defs/t"},
        {"properties": {"$ref": {"type": "string"}, "format": {}, "allOf": {}, "items": {}}},  # these are names, not keywords
        {"properties": {"a": {}, "b": {"items": {"$ref": "#"}}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        deep(100),
        {"enum": list(range(5000))},
        {"const": "a" * 5_000},
        {"properties": {"a" * 5_000: {}}, "required": ["a" * 5_000]},
        properties(300),
    ],
)
def test_what_is_accepted_is_cheap_for_the_worker(schema):
    serialized = of_json_schema(schema)
    checker().check(serialized)
    assert checker().knows(serialized)
    started_at = time.thread_time()
    matcher = demo()[1].matcher(serialized)
    for _ in range(60):
        if matcher.is_complete:
            break
        matcher.consume(int(mask_of(matcher).nonzero()[0][-1]))
    assert time.thread_time() - started_at < 2


@pytest.mark.parametrize(
    "text, reason",
    [
        ("a(", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        ("a\0b", "NUL"),
        ("", "must not be empty"),
        ("a" * 4001, "at most 4000 bytes in a regular expression. Given: 4001"),
        ("(((a{100}){100}){100}){100}", TOO_MUCH),
        ("(a?){500}a{500}", TOO_MUCH),
        ("(.{1,100}){1,100}", TOO_MUCH),  # after nine tokens
    ],
)
def test_an_expression_that_cannot_be_enforced_is_refused_with_the_reason(text, reason):
    with pytest.raises(GrammarError, match=reason):
        checker().check(of_regex(text))


@pytest.mark.parametrize("text", ["[ab]*a[ab]{40}", "(a|aa)+", "(x+x+)+y", ".*a.{200}", "(.{1,100}){1,100}"])
def test_expressions_that_other_engines_take_for_ever_for_are_harmless(text):
    matcher, started_at = demo()[1].matcher(of_regex(text)), time.thread_time()
    try:
        for _ in range(60):
            matcher.consume(int(mask_of(matcher).nonzero()[0][-1]))
    except GrammarError:
        pass  # the limits of a step may end it
    assert time.thread_time() - started_at < 2


@pytest.mark.parametrize("choices", [[], [""], [1], ["a" * 120_001]])
def test_choices_that_are_none_are_refused(choices):
    with pytest.raises(GrammarError):
        of_choice(choices)


def test_a_mask_that_takes_long_twice_ends_the_text(monkeypatch):
    matcher = demo()[1].matcher(of_regex("[ab]{9}"))
    mask_of(matcher)
    monkeypatch.setattr(grammar, "SLOW_MASK_S", -1)
    mask_of(matcher)
    with pytest.raises(GrammarError, match="too complex"):
        mask_of(matcher)


def test_a_token_that_is_not_allowed_is_an_error_and_no_quiet_end():
    tokenizer, grammars = demo()
    matcher = grammars.matcher(of_regex("[ab]{9}"))
    with pytest.raises(GrammarError):
        matcher.consume(tokenizer.token_to_id("c"))


def test_matchers_of_one_grammar_do_not_disturb_each_other():
    tokenizer, grammars = demo()
    serialized = of_regex("ab|ba")
    first, second = grammars.matcher(serialized), grammars.matcher(serialized)
    first.consume(tokenizer.token_to_id("a"))
    second.consume(tokenizer.token_to_id("b"))
    assert mask_of(first).nonzero()[0].tolist() == [tokenizer.token_to_id("b")]
    assert mask_of(second).nonzero()[0].tolist() == [tokenizer.token_to_id("a")]


@pytest.mark.parametrize("length", [10_000, 25_000])
def test_a_text_that_exhausts_the_lexer_ends_no_other_text_of_the_same_grammar(length):
    tokenizer, grammars = demo()
    serialized = of_json_schema(
        {"type": "object", "required": ["a"], "properties": {"a": {"type": "string", "maxLength": 2 * length}}}
    )
    running = grammars.matcher(serialized)
    running.consume(tokenizer.token_to_id("{"))
    for seed in range(4):  # states of the lexer do not add up over texts, either
        words = Random(seed).choices(["lorem", "ipsum", "dolor", "sit", "amet"], k=length // 3)
        with contextlib.suppress(GrammarError):
            accepts(json.dumps({"a": " ".join(words)}), serialized, tokenizer, grammars)
    assert accepts('{"a": "x"}', serialized, tokenizer, grammars)
    assert mask_of(running).any()


def test_threads_may_compile_and_use_the_same_grammar_at_once():
    serialized, errors, begin = of_json_schema(PERSON), [], threading.Barrier(8)
    tokenizer, grammars = demo()[0], Grammars(DEMO_MODEL, 2048, [0])

    def use():
        begin.wait()
        try:
            assert accepts('{"name": "Ada", "age": 36}', serialized, tokenizer, grammars)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_tokenizer_that_cannot_be_used_is_an_error_once_a_grammar_is_requested(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="this model's tokenizer"):
        GrammarChecker(tmp_path, 10, [0]).check(of_regex("a"))
    with pytest.raises(GrammarError, match="this model's tokenizer"):
        Grammars(DEMO_MODEL, 100, [0]).matcher(of_regex("a"))


def test_of_many_accepted_grammars_the_newest_are_known(monkeypatch):
    monkeypatch.setattr(grammar, "ACCEPTED", 2)
    fresh, texts = GrammarChecker(DEMO_MODEL, 2048, [0]), [of_regex(f"a{{{n}}}") for n in range(1, 4)]
    for text in texts:
        assert not fresh.knows(text)
        fresh.check(text)
    assert [fresh.knows(text) for text in texts] == [False, False, True]
