"""Numbers of schemas: every number that a bound allows can be written as people write it, and none that it does not; and
nothing that a model happens to write ends an answer."""

import json
from fractions import Fraction
from random import Random

import pytest
from grammars import accepts, checker, demo, written
from hypothesis import assume, example, given
from hypothesis import strategies as st

from text.grammar import GrammarError, left_out, of_json_schema
from text.json_schema import enforceable

NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}
COUNT, POSITIVE = INTEGER | {"minimum": 0}, INTEGER | {"exclusiveMinimum": 0}
PRICE = NUMBER | {"exclusiveMinimum": 0}
WEEK_S = 604_800
DAY_S = 86_400
YEAR_S = 365 * DAY_S
SAFE = 2**53 - 1

# A schema, texts of it, and texts that are not.
TEXTS = {
    "a price": (PRICE, ["0.5", "0.50", "0.010", "12.00"], ["0", "0.0", "-0.50"]),
    "a share": (PRICE | {"exclusiveMaximum": 1}, ["0.5", "0.990", "0.9"], ["1", "1.0", "0.0"]),
    "a latitude": (NUMBER | {"minimum": -90, "maximum": 90}, ["-0.50", "0", "0.0", "-90.00", "90"], ["90.1", "-90.01"]),
    "below zero": (NUMBER | {"exclusiveMaximum": 0}, ["-0.50", "-3"], ["0", "0.0", "1"]),
    "at most zero": (NUMBER | {"maximum": 0}, ["-0.50", "0"], ["0.1"]),
    "above a number": (NUMBER | {"exclusiveMinimum": 5}, ["5.10", "6"], ["5", "5.0"]),
    "up to hundredths": (NUMBER | {"minimum": 0, "maximum": 0.95}, ["0.9", "0.90", "0.95", "0"], ["0.96", "1"]),
    "above hundredths": (NUMBER | {"minimum": -0.95}, ["-0.9", "-0.95", "-0.10", "7.50"], ["-0.96", "-1"]),
    "two bounds of a kind": (PRICE | {"minimum": 0}, ["0.50"], ["0"]),
    "open bounds of old drafts": (NUMBER | {"minimum": 0, "exclusiveMinimum": True, "maximum": 2}, ["0.50", "2"], ["0", "2.1"]),
    "closed bounds of old drafts": (INTEGER | {"maximum": 5, "exclusiveMaximum": False}, ["5"], ["6"]),
    "just below one": (NUMBER | {"minimum": 0, "maximum": 0.9999999999999999}, ["0.99"], ["1", "1.0"]),
    "safe integers": (INTEGER | {"minimum": -SAFE, "maximum": SAFE}, [str(SAFE), str(-SAFE)], [str(SAFE + 1), str(-SAFE - 1)]),
    "a positive safe integer": (INTEGER | {"exclusiveMinimum": 0, "maximum": SAFE}, ["1", str(SAFE)], ["0", str(SAFE + 1)]),
    "without a type": ({"minimum": -1.5}, ["-0.50", '"any"', "null", "{}"], ["-1.6"]),
    "a number or null": ({"type": ["number", "null"], "minimum": -1}, ["null", "-0.50", "2"], ["-2", '"a"']),
    "in two schemas": ({"allOf": [PRICE, {"maximum": 10}]}, ["0.50", "10"], ["0", "11"]),
    "cents": (PRICE | {"multipleOf": 0.01}, ["0.50", "0.5", "19.99", "3"], ["0.005", "0"]),
}
LEFT_OUT = {
    "a day in seconds": COUNT | {"multipleOf": DAY_S},
    "an hour in seconds of a week": COUNT | {"maximum": WEEK_S, "multipleOf": 3600},
    "a divisor beyond float64": INTEGER | {"multipleOf": 10**400},
    "divisors of a name and of a pattern": {
        "properties": {"a": INTEGER | {"multipleOf": 999}},
        "patternProperties": {"^a$": {"multipleOf": 997}},
    },
    "a divisor of many digits": NUMBER | {"multipleOf": 0.07},
    "divisors that meet": {"allOf": [INTEGER | {"multipleOf": 999}, {"multipleOf": 998}]},
    "a divisor in a reference": {"$defs": {"a": {"multipleOf": 999}}, "$ref": "#/$defs/a", "multipleOf": 998} | INTEGER,
}


@pytest.mark.parametrize(("schema", "valid", "invalid"), TEXTS.values(), ids=TEXTS)
def test_what_a_schema_allows_can_be_written_as_people_write_it(schema, valid, invalid):
    grammar = of_json_schema(schema, is_strict=True)
    checker().check(grammar)
    assert [text for text in valid if not accepts(text, grammar)] == []
    assert [text for text in invalid if accepts(text, grammar)] == []


@pytest.mark.parametrize("schema", LEFT_OUT.values(), ids=LEFT_OUT)
def test_divisors_that_no_lexer_can_keep_track_of_are_left_out_by_name(schema):
    assert {place.rpartition("/")[2] for place in left_out(schema)} == {"multipleOf"}
    checker().check(of_json_schema(schema))


def test_a_listed_number_that_llguidance_reads_as_another_is_left_out():
    near = 0.00011091616694542461
    assert left_out({"const": near}) == ("/const",)
    assert enforceable({"enum": [0.1, near, -2.5]}) == ({"enum": [0.1, -2.5]}, ())


def number(places):
    return st.decimals(-2000, 2000, places=places).map(lambda value: float(value) if places else int(value))


BOUNDED = st.fixed_dictionaries(
    {"type": st.just("number")},
    optional={
        name: st.sampled_from([0, 1, -1, 0.5, 100]) | st.integers(0, 4).flatmap(number)
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    },
)


def is_valid(schema, text):
    value = Fraction(text)
    bounds = {name: Fraction(str(bound)) for name, bound in schema.items() if name != "type"}
    return (
        bounds.get("minimum", value) <= value <= bounds.get("maximum", value)
        and not value <= bounds.get("exclusiveMinimum", value - 1)
        and not value >= bounds.get("exclusiveMaximum", value + 1)
    )


@given(BOUNDED, st.decimals(-2000, 2000, places=3), st.integers(0, 4))
@example({"type": "number", "minimum": 0, "exclusiveMaximum": 0}, 0, 0)
def test_a_number_is_allowed_exactly_where_it_is_within_the_bounds(schema, value, places):
    text = f"{value:.{places}f}"
    bounds = [Fraction(str(bound)) for name, bound in schema.items() if name != "type"]
    assume(Fraction(text) or not text.startswith("-"))
    try:
        allowed = accepts(text, of_json_schema(schema))
    except GrammarError:  # the bounds contradict each other
        allowed = False
    # A bound is written as it is given. Between zero and the first digit of one, all digits have to be written.
    if Fraction(text) not in bounds and abs(Fraction(text)) >= Fraction("0.1"):
        assert allowed == is_valid(schema, text)
    assert is_valid(schema, text) or not allowed


# Pydantic's and zod's types of numbers, and what people make of them.
FIELDS = [
    *(
        NUMBER | {"exclusiveMinimum": 0} | more
        for more in ({}, {"maximum": 1}, {"multipleOf": 0.01}, {"exclusiveMaximum": 1e6})
    ),
    *(NUMBER | {"minimum": 0} | more for more in ({}, {"maximum": 1}, {"maximum": 0.95}, {"maximum": 5, "multipleOf": 0.5})),
    *(NUMBER | {"minimum": -end, "maximum": end} for end in (1, 1.5, 90, 180, 1e-3, 0.05)),
    *(NUMBER | {"maximum": 0}, NUMBER | {"exclusiveMaximum": 0}, NUMBER | {"exclusiveMaximum": -0.5}),
    *(NUMBER | {"multipleOf": divisor} for divisor in (0.01, 0.05, 0.1, 0.25, 0.5, 5, 0.001)),
    *(POSITIVE | more for more in ({}, {"maximum": SAFE}, {"multipleOf": 3600})),
    *(INTEGER | {"minimum": least, "maximum": most} for least, most in ((-SAFE, SAFE), (0, SAFE), (-128, 127), (1, 65535))),
    *(
        COUNT | {"multipleOf": divisor, "maximum": most}
        for divisor, most in ((3600, 604800), (86400, YEAR_S), (15, 1440), (7, 999))
    ),
    *(COUNT | {"multipleOf": divisor} for divisor in (2, 5, 10, 60, 365)),
]


@pytest.mark.parametrize("schema", FIELDS, ids=map(json.dumps, FIELDS))
def test_whatever_a_model_writes_is_valid_and_never_the_end_of_an_answer(schema, seeds=10):
    named = {place.rpartition("/")[2] for place in left_out(schema)}
    grammar = of_json_schema({"type": "object", "properties": {"of": schema}, "required": ["of"]})
    checker().check(grammar)
    tokenizer, grammars = demo()
    for seed in range(seeds):
        for text in written(Random(seed), grammars.matcher(grammar), tokenizer):
            exact = json.loads(text, parse_float=Fraction, parse_int=Fraction)["of"]
            assert is_valid({name: value for name, value in schema.items() if name != "multipleOf"}, exact), text
            assert "multipleOf" not in schema.keys() - named or (exact / Fraction(str(schema["multipleOf"]))).denominator == 1
            assert schema["type"] == "number" or exact.denominator == 1
