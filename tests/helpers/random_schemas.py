"""Random JSON schemas, and values of which many are valid by them: both have few names and few values."""

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
