"""Keywords that no mask can say: said in others, or left out and named; whatever is generated is valid by the rest."""

import contextlib
import json
import time
from random import Random

import jsonschema
import pytest
from grammars import accepts, checker, demo, written

from text.grammar import GrammarError, left_out, of_json_schema

OBJECT = {"type": "object"}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"], "additionalProperties": False}
COLORS = {"$defs": {"Color": {"type": "string", "enum": ["red", "dark red"]}}}
BIG = 2**53 + 1  # no float holds it
LAST = 9 * 10**18
TAGGED = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")]

# Said in other keywords: a schema, texts of it, and texts that are not.
SAID = {
    "names that are any text": (
        {"propertyNames": {"type": "string", "title": "Name"}, "additionalProperties": {"type": "number"}},
        ['{"a": 1}', "{}"],
        ['{"a": "x"}'],
    ),
    "names by a pattern": (OBJECT | {"propertyNames": {"pattern": "^[a-z]+$"}}, ['{"a": 1}'], ['{"A": 1}']),
    "names that are listed": (
        OBJECT | COLORS | {"propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": {"type": "integer"}},
        ['{"red": 1}', '{"dark red": 1}'],
        ['{"blue": 1}', '{"red": "x"}', '{"red dark": 1}'],
    ),
    "what depends on a name": (AB | {"dependentRequired": {"a": ["b"]}}, ['{"b": 1}', '{"a": 1, "b": 1}', "{}"], ['{"a": 1}']),
    "dependencies": (
        AB | {"dependencies": {"a": ["b"], "b": {"properties": {"b": {"minimum": 5}}}}},
        ['{"b": 5}', '{"a": 1, "b": 7}'],
        ['{"a": 1}', '{"b": 4}'],
    ),
    "the ends of int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        ["0", str(LAST), str(-LAST)],
        [str(2**64), str(-(2**63) - 1)],
    ),
    "the ends of float64": ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, ["0.5", str(LAST)], ["true"]),
    "a bound that no float holds": ({"type": "integer", "minimum": BIG}, [str(BIG + 1000)], [str(BIG - 1)]),
    "values that no float holds": ({"enum": ["a", [BIG], 2**63]}, ['"a"'], [f"[{BIG - 1}]", str(2**63 - 1)]),
    "a null keyword": (AB | {"required": None, "enum": None}, ["{}", '{"a": 1}'], ['{"a": "x"}']),
    "a name of a pattern, too": (
        SCORE | {"patternProperties": {"^score$": {"minimum": 0, "maximum": 9}}},
        ['{"score": 5}'],
        ['{"score": 10}', '{"score": "x"}'],
    ),
    "a name of a pattern of several": (
        SCORE | {"patternProperties": {"^s": {"minimum": 0}}},
        ['{"score": 5}', '{"score": 5, "s": 1}'],
        ['{"score": -1}', '{"score": 5, "s": -1}'],
    ),
    "nothing is left over": (AB | {"unevaluatedProperties": False}, ['{"a": 1}'], ['{"c": 1}']),
    "no item is left over": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        ["[1]"],
        ["[1, 2]", '["a"]'],
    ),
    "items by their place": ({"type": "array", "prefixItems": [{"const": 1}], "additionalItems": False}, ["[1]"], ["[2]"]),
    "one property at least": (AB | {"minProperties": 1}, ['{"a": 1}'], ["{}"]),
    "more properties than there are": (AB | {"maxProperties": 2}, ['{"a": 1, "b": 2}'], ['{"c": 1}']),
    "options with a tag": ({"oneOf": [*TAGGED, {"type": "null"}]}, ['{"kind": "b"}', "null"], ['{"kind": "c"}']),
    "options by their values": ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, ['"a"', '"c"'], ['"d"']),
    "plain characters of a class": ({"type": "string", "pattern": r"^[(?=\d]+$"}, ['"(=1"'], ['"a"']),
    "other types": (
        {"type": "integer", "uniqueItems": True, "propertyNames": {"maxLength": 2}, "pattern": "(?=a)"},
        ["1"],
        ['"a"'],
    ),
    "nothing": (
        {"type": "array", "uniqueItems": False, "not": False, "if": {}, "minContains": 2, "$dynamicAnchor": "x"},
        ["[1, 1]"],
        ["1"],
    ),
    "a name in other letters": (AB | {"additionalProperties": True}, ['{"c": "x"}'], [r'{"\u0061": "x"}', '{"a": "x"}']),
    "no keyword": (
        {"const": {"not": {}, "format": "x"}, "default": {"uniqueItems": True}},
        ['{"not": {}, "format": "x"}'],
        ["{}"],
    ),
    "a property that is named as a keyword": (
        {"properties": {"properties": {"const": None}}},
        ['{"properties": null}'],
        ['{"properties": 1}'],
    ),
    "names of properties": ({"properties": {"not": {"type": "null"}}, "required": ["not"]}, ['{"not": null}'], ["{}"]),
}
# Left out: a schema, the places that are named, and a text that the rest allows.
LEFT_OUT = [
    ({"type": "array", "uniqueItems": True}, ["/uniqueItems"], "[1, 1]"),
    ({"not": {"type": "string"}}, ["/not"], '"a"'),
    (AB | {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": False}, ["/if"], '{"a": 1, "c": 1}'),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2}, ["/contains"], "[]"),
    (OBJECT | {"propertyNames": {"minLength": 2}}, ["/propertyNames"], '{"a": 1}'),
    (AB | {"propertyNames": {"pattern": "^a"}}, ["/propertyNames"], '{"b": 1}'),
    (OBJECT | {"propertyNames": {"pattern": []}}, ["/propertyNames"], '{"a": 1}'),
    (COLORS | {"propertyNames": {"$ref": "#/$defs/Color", "maxLength": 3}}, ["/propertyNames"], '{"x": 1}'),
    (
        AB | {"patternProperties": {"^(a|b)$": {"minimum": 0}}, "additionalProperties": False},
        ["/patternProperties"],
        '{"a": -1}',
    ),
    (AB | {"dependentRequired": {name: ["b"] for name in "acde"}}, ["/dependentRequired"], '{"a": 1}'),
    (AB | {"dependentSchemas": {"a": {"properties": {"b": {"$ref": "#"}}}}}, ["/dependentSchemas"], '{"a": 1, "b": 2}'),
    (AB | {"minProperties": 2}, ["/minProperties"], '{"a": 1}'),
    ({"allOf": [AB], "minProperties": 1}, ["/minProperties"], "{}"),
    (OBJECT | {"minProperties": 3}, ["/minProperties"], '{"a": 1, "a": 1, "b": 1}'),
    (AB | {"maxProperties": 1, "additionalProperties": True}, ["/maxProperties"], '{"a": 1, "b": 1}'),
    ({"type": "string", "pattern": "^(?!a)"}, ["/pattern"], '"a"'),
    ({"type": "string", "pattern": r"\bfoo\b"}, ["/pattern"], '"a"'),
    ({"type": "string", "pattern": r"\[(?=a)\]"}, ["/pattern"], '"a"'),
    ({"type": "string", "format": "phone"}, ["/format"], '"a"'),
    (
        {"type": "object", "patternProperties": {"(?<=a)b": {"type": "null"}}, "additionalProperties": False},
        ["/patternProperties", "/additionalProperties"],
        '{"ab": 1}',
    ),
    (
        {"type": "object", "patternProperties": {"^(?=a)": {}}, "unevaluatedProperties": False, "required": ["ab"]},
        ["/patternProperties", "/unevaluatedProperties"],
        '{"ab": 1}',
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["/oneOf"], "1"),
    ({"oneOf": [TAGGED[0], TAGGED[0]]}, ["/oneOf"], '{"kind": "a"}'),
    ({"allOf": [AB], "unevaluatedProperties": False}, ["/unevaluatedProperties"], '{"c": 1}'),
    ({"const": BIG}, ["/const"], str(BIG)),
    ({"const": "a\0b"}, ["/const"], '"ab"'),
    ({"const": "a\x7fb"}, ["/const"], '"ab"'),
    ({"$ref": "#/types/a~1b", "types": {"a/b": {"type": "string", "format": "url"}}}, ["/types/a~1b/format"], '"x"'),
    ({"anyOf": [{"properties": {"a b": {"items": [{"not": {}}]}}}]}, ["/anyOf/0/properties/a b/items/0/not"], '{"a b": [1]}'),
    ({"items": {"not": {}}, "$defs": {"x": {"not": {}}}}, ["/items/not"], "[1]"),  # the first place of each keyword
]

# Random schemas, and values of which many are valid by them: both have few names and few values.
NAMES = ["a", "b", "c", "ab"]
SCALARS = [None, True, False, 0, 1, 2, -1, 1.5, -5, 10, 2**53 + 1, 2**63, "", "a", "b", "ab", "aa"]
PATTERNS = ["^a", "b$", "^a$", "^(a|b)$", "a+b", "^(?=a)", "^.{1,2}$", "[ab]", "^c$", "^[a-b]+$"]
SIMPLE = [True, False, {}, *({"type": kind} for kind in ("string", "integer", "null", "boolean", ["string", "integer"]))]
ONE = {"additionalProperties", "items", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "contains"}
ONE |= {"not", "if", "then"}
LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
NAMED = {"properties", "patternProperties", "$defs", "things", "dependentSchemas", "dependencies"}
GROUPS = {"if": {"then", "else"}, "contains": {"minContains", "maxContains"}}


def some(rng, items, share=0.5):
    return [item for item in items if rng.random() < share]


def random_value(rng, depth=3):
    kind = rng.random()
    if depth == 0 or kind < 0.45:
        return rng.choice(SCALARS)
    if kind < 0.7:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {name: random_value(rng, depth - 1) for name in some(rng, NAMES)}


def random_document(rng):
    references = ["#/$defs/x", "#/$defs/y", "#/things/z"][: rng.randint(0, 3)]
    x, z = (random_schema(rng, 2, references) for _ in range(2))
    named = {"$defs": {"x": x, "y": random_schema(rng, 2)}, "things": {"z": z}}
    return {"allOf": [random_schema(rng, 3, references)]} | named if rng.random() < 0.1 else _whole(rng, 3, references) | named


def random_schema(rng, depth, references=()):
    if depth == 0 or rng.random() < 0.12:
        listed = [{"const": rng.choice(SCALARS)}, {"enum": [rng.choice(SCALARS), rng.choice(SCALARS)]}]
        return rng.choice([*SIMPLE, *listed])
    if references and rng.random() < 0.12:
        return {"$ref": rng.choice(references)}
    return _whole(rng, depth, references)


def _whole(rng, depth, references):
    """A schema of some keywords of its type, in any order."""

    def part():
        return random_schema(rng, depth - 1, references)

    def parts(most=2):
        return [part() for _ in range(rng.randint(1, most))]

    def named(names, share=0.5):
        return {name: part() for name in some(rng, names, share)}

    by_type = {
        "string": {
            "minLength": (0.3, lambda: rng.randint(0, 2)),
            "maxLength": (0.3, lambda: rng.randint(1, 4)),
            "pattern": (0.3, lambda: rng.choice(PATTERNS)),
            "format": (0.05, lambda: rng.choice(["ipv4", "phone"])),
        },
        "number": {
            "minimum": (0.3, lambda: rng.choice([0, 1, -3, 1.5, -(2**63), 2**53 + 1])),
            "maximum": (0.3, lambda: rng.choice([0, 1, 7, 9.5, 2**63 - 1, 2**64])),
            "exclusiveMinimum": (0.15, lambda: rng.choice([0, -1, 0.5])),
            "exclusiveMaximum": (0.15, lambda: rng.choice([1, 5, 2.5])),
            "multipleOf": (0.15, lambda: rng.choice([2, 3, 0.5])),
        },
        "array": {
            "items": (0.6, part),
            "prefixItems": (0.3, parts),
            "minItems": (0.3, lambda: rng.randint(0, 2)),
            "maxItems": (0.3, lambda: rng.randint(0, 3)),
            "uniqueItems": (0.1, lambda: True),
            "contains": (0.05, part),
            "minContains": (0.05, lambda: rng.randint(0, 2)),
            "additionalItems": (0.1, part),
            "unevaluatedItems": (0.05, part),
        },
        "object": {
            "properties": (0.8, lambda: named(NAMES)),
            "required": (0.5, lambda: rng.choice([some(rng, NAMES, 0.4), None])),
            "additionalProperties": (0.35, lambda: rng.choice([True, False, part()])),
            "patternProperties": (0.2, lambda: {rng.choice(PATTERNS): part() for _ in range(2)}),
            "propertyNames": (0.15, lambda: rng.choice([{"pattern": rng.choice(PATTERNS)}, {"enum": some(rng, NAMES)}, True])),
            "minProperties": (0.1, lambda: rng.randint(0, 3)),
            "maxProperties": (0.1, lambda: rng.randint(0, 4)),
            "dependentRequired": (0.15, lambda: {name: some(rng, NAMES) for name in some(rng, NAMES, 0.3)}),
            "dependentSchemas": (0.05, lambda: named(NAMES, 0.3)),
            "dependencies": (0.03, lambda: named(NAMES, 0.3)),
            "unevaluatedProperties": (0.05, lambda: rng.choice([False, part()])),
        },
        "any": {
            "not": (0.03, part),
            "if": (0.03, part),
            "then": (0.03, part),
            "anyOf": (0.05, parts),
            "oneOf": (0.05, parts),
            "allOf": (0.05, parts),
            "enum": (0.05, lambda: [random_value(rng, 2) for _ in range(3)]),
        },
    }
    kind = rng.choice(["string", "integer", "number", "array", "object", "object", "object"])
    schema = {"type": kind} if rng.random() < 0.8 else {}
    for keyword, (share, make) in [*by_type["number" if kind == "integer" else kind].items(), *by_type["any"].items()]:
        if rng.random() < share:
            schema[keyword] = make()
    keywords = list(schema)
    rng.shuffle(keywords)
    return {keyword: schema[keyword] for keyword in keywords}


def without(schema, keywords):
    """The schema without some of its keywords, and without those that are null."""
    if not isinstance(schema, dict):
        return schema
    gone = keywords.union(*(GROUPS.get(keyword, set()) for keyword in keywords))
    kept = {}
    for keyword, value in schema.items():
        if keyword in gone or (value is None and keyword != "const"):
            continue
        if keyword in NAMED:
            value = {name: without(part, keywords) for name, part in value.items()}
        if keyword in LISTS:
            value = [without(part, keywords) for part in value]
        kept[keyword] = without(value, keywords) if keyword in ONE else value
    return kept


@pytest.mark.parametrize(("schema", "valid", "invalid"), SAID.values(), ids=SAID)
def test_what_can_be_said_in_other_keywords_is_enforced(schema, valid, invalid):
    assert left_out(schema) == ()
    grammar = of_json_schema(schema, is_strict=True)
    assert [text for text in valid if not accepts(text, grammar)] == []
    assert [text for text in invalid if accepts(text, grammar)] == []


@pytest.mark.parametrize(("schema", "places", "text"), LEFT_OUT)
def test_what_cannot_be_said_is_left_out_and_named_or_refused(schema, places, text):
    before = json.dumps(schema)
    assert left_out(schema) == tuple(places)
    assert accepts(text, of_json_schema(schema))
    with pytest.raises(GrammarError) as error:
        of_json_schema(schema, is_strict=True)
    assert places[0] in str(error.value) and "`strict: false`" in str(error.value)
    assert json.dumps(schema) == before, "the client's schema stays as it is"


def test_what_is_left_out_loosens_nothing_else():
    listed = {"const": {"a": [BIG]}, "unevaluatedItems": {"type": "null"}}
    assert left_out(listed) == ("/const",)
    assert accepts("[null]", of_json_schema(listed)) and not accepts("[1]", of_json_schema(listed))
    assert not accepts("{}", of_json_schema(OBJECT | {"minProperties": 3}))


def test_a_listed_value_stays_as_it_is_where_a_reference_names_it():
    schema = {"properties": {"a": {"const": {"not": {}}}, "b": {"$ref": "#/properties/a/const"}}}
    with pytest.raises(GrammarError, match="Unimplemented keys"):  # llguidance's own refusal
        checker().check(of_json_schema(schema))


def nested(levels):
    schema = {"not": {}}
    for n in range(levels):
        schema = {"properties": {f"{n}" * 9: schema, "r": {"$ref": "#" + "/properties/r" * n}}}
    return schema


REQUIRED = [str(n) for n in range(4_000)]
HOSTILE = {
    "depth": nested(130),
    "a long name": {"properties": {"x" * 60_000: {"items": [{"not": {}}] * 4_000}}},
    "references in a circle": {
        "$defs": {str(n): {"$ref": f"#/$defs/{(n + 1) % 2_000}"} for n in range(2_000)},
        "$ref": "#/$defs/0",
    },
    "options": {"oneOf": [{"required": [str(n)], "properties": {str(n): {"const": n}}} for n in range(1_800)]},
    "options that are references": {"oneOf": [{"$ref": "#"}] * 6_000},
    "options of long lists": {
        "$defs": {"v": {"enum": list(range(9_000))}},
        "allOf": [{"oneOf": [{"$ref": "#/$defs/v"}] * 9}] * 300,
    },
    "options of many names": {
        "$defs": {n: {"required": REQUIRED, "properties": {"x": {"const": n}}} for n in "ab"},
        "allOf": [{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}] * 400,
    },
    "names of references": {
        "$defs": {"v": {"enum": REQUIRED}},
        "allOf": [{"propertyNames": {"$ref": "#/$defs/v"}}] * 1_200,
    },
    "a pattern": {"pattern": "[" * 100_000},
    "a pattern of letters of either case": {"pattern": "(?i)" + r"[\PL]" * 19_000},
    "patterns of letters of either case": {"patternProperties": {f"(?i){n}" + r"[\PL]" * 90: {} for n in range(195)}},
    "a pattern of classes": {"pattern": r"\p{" * 25_000},
    "a pattern of characters": {"pattern": "[" + "".join(map(chr, range(0x100, 0xA000, 2))) + "]"},
    "patterns": {"patternProperties": {f"{n}(?=": {} for n in range(6_000)}},
    "dependencies": {"dependencies": {str(n): [str(n)] for n in range(6_000)}},
    "names": {"propertyNames": {"enum": [str(n) for n in range(9_000)]}},
    "values in values": {"enum": [{"enum": [n, {"const": [BIG]}]} for n in range(2_000)]},
    "a large number": {"minimum": 10**400, "maximum": -(10**400), "enum": [10**400]},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_costs_little(schema):
    started_at = time.thread_time()
    left_out(schema)
    assert time.thread_time() - started_at < 2  # 0.1 to 0.4 on an idle processor; minutes where work is repeated
    with contextlib.suppress(GrammarError):
        checker().check(of_json_schema(schema))


@pytest.mark.parametrize("value", [None, True, -5, 1.5, "x", [], {}, [None], [[5]], {"a": None}, {"a": {"a": []}}, {"a": 5}])
def test_a_keyword_that_holds_anything_is_no_crash(value):
    keywords = """$defs $dynamicRef $recursiveRef $ref additionalItems additionalProperties allOf anyOf const contains
    dependencies dependentRequired dependentSchemas enum exclusiveMaximum exclusiveMinimum format if items
    maxContains maximum maxProperties minimum minContains minProperties multipleOf not oneOf pattern patternProperties
    prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems"""
    for keyword in keywords.split():
        for more in ({}, {"properties": value}, {"allOf": value, "required": value}, {"maxProperties": value, "items": value}):
            left_out({**more, keyword: value})


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_grammar_allows_is_valid_but_for_what_is_named(seed):
    rng = Random(seed)
    tokenizer, grammars = demo()
    judged = 0
    while judged < 200:
        schema = random_document(rng)
        try:
            grammar = of_json_schema(schema)
            matcher = grammars.compile(grammar)
        except GrammarError:  # most contradict themselves
            continue
        named = {place.rpartition("/")[2] for place in left_out(schema)}
        as_given, enforced = (jsonschema.Draft202012Validator(without(schema, names)) for names in (set(), named))
        values = [random_value(rng) for _ in range(20)]
        texts = [text for text in map(json.dumps, values) if _is_allowed(text, matcher, tokenizer)]
        for text in [*texts, *written(rng, grammars.matcher(grammar), tokenizer)]:
            value = json.loads(text)
            assert enforced.is_valid(value) or as_given.is_valid(value), (schema, named, text)
            judged += 1


def _is_allowed(text, matcher, tokenizer):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    copy = matcher.deep_copy()
    return copy.validate_tokens(ids) == len(ids) and all(map(copy.consume_token, ids)) and copy.is_accepting()


@pytest.mark.parametrize("place", ["0000000000999", "9", "0" * 9 + "9" * 5000, "-1", "x"])
def test_a_reference_to_a_place_that_a_list_does_not_have_is_said_to_be_wrong(place):
    schema = {"anyOf": [{}], "properties": {"x": {"$ref": f"#/anyOf/{place}"}}}
    with pytest.raises(GrammarError):
        checker().check(of_json_schema(schema))
