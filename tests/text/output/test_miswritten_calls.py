"""Calls with any arguments, as each format has them and as models miswrite them: they are read as they were meant, or all of
the text stays content; whole and streamed alike."""

import json
import random

import pytest
from hypothesis import settings
from tool_calls import CALLS, ENDS, FORMATS, FORMS, PYTHON, TAGS, parsed, tool, use, whole

from text.output.parser import ParserConfig

EXAMPLES = settings.default.max_examples  # for each format and mistake
KEYS = ["city", "days", "Main Hall", "a.b", "c-d", "e"]
WORDS = [
    "Bern",
    "red fox",
    " ",
    "5",
    "true",
    "null",
    "",
    "Zü\nrich",
    '"',
    "'",
    "\\",
    "\\n",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "=",
    "a=1",
    "#",
    "//",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
}
TOOLS = [tool(parameters=SCHEMA), {"type": "function", "function": {"name": "now"}}]


def text_of(chance, name):
    markers = [*FORMS[name].markers, *TAG_TEXTS.get(name, ())]
    return "".join(chance.choice([*WORDS, *markers]) for _ in range(chance.randint(0, 4)))


TAG_TEXTS = {name: [part for part in "".join(TAGS[name]).replace("{}", "\n").split("\n") if part] for name in TAGS}


def value_of(chance, name, depth=2):
    kind = chance.choice(["text", "text", "number", "word", "list", "map"] if depth else ["text", "number", "word"])
    if kind == "text":
        return text_of(chance, name)
    if kind == "number":
        return chance.choice([0, -7, 12, 2.5, 1e30, 10**20])
    if kind == "word":
        return chance.choice([True, False, None])
    inner = [value_of(chance, name, depth - 1) for _ in range(chance.randint(0, 3))]
    if kind == "list":
        return inner
    keys = chance.sample(KEYS if name != "gemma4" else [key for key in KEYS if " " not in key], len(inner))
    return dict(zip(keys, inner, strict=True))


def arguments_of(chance, name):
    given = {
        "city": text_of(chance, name),
        "days": chance.choice([3, -1, 2_000]),
        "list": [value_of(chance, name, 1) for _ in range(chance.randint(0, 3))],
        "map": {"e": value_of(chance, name, 1)},
    }
    return {key: given[key] for key in chance.sample(list(given), chance.randint(0, 4))}


def gemma(value, quote='<|"|>', equals=":", in_json=False):
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if in_json else f"{quote}{value}{quote}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(each, quote, equals, in_json) for each in value) + "]"
    if isinstance(value, dict):
        key = json.dumps if in_json else str
        return "{" + ",".join(f"{key(k)}{equals}{gemma(v, quote, equals, in_json)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def written(name, arguments):
    """The call as the model's template writes it."""
    if name in TAGS:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        begin, parameter, end = TAGS[name]
        return begin.format("weather") + "".join(parameter.format(*item) for item in values.items()) + end
    call = CALLS[name][0] + ENDS.get(name, "")
    if name in PYTHON:
        values = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        return call.replace('city="Bern"', values)
    if name == "gemma4":
        return f"<|tool_call>call:weather{gemma(arguments)}<tool_call|>"
    return call.replace('{"city": "Bern"}', json.dumps(arguments, ensure_ascii=False))


def without_one(text, part, chance):
    """The text without one of the places of a part."""
    places = text.split(part)
    at = chance.randrange(1, len(places)) if len(places) > 1 else 0
    return part.join(places[:at]) + part.join(places[at:]) if at else text


def missing_end(name, arguments, chance):
    end = FORMS[name].value_end
    for key in [key for key, value in arguments.items() if end in json.dumps(value)]:
        del arguments[key]  # which would hold the one that is missing
    return without_one(written(name, arguments), end + "\n" * (name == "qwen3_coder"), chance)


def missing_end_of_call(name, arguments, chance):
    begin, end = written(name, arguments).rsplit(FORMS[name].call_end, 1)
    return begin + end


def blanks(name, arguments, chance):
    begin, parameter, end = TAGS[name]
    parameter = parameter.replace("=", " = ").replace("<arg_key>", "<arg_key> ")
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return begin.format("weather") + "".join(parameter.format(*item) for item in values.items()) + end


def json_quotes(name, arguments, chance):
    return f"<|tool_call>call:weather{gemma(arguments, in_json=True)}<tool_call|>"


def equals_sign(name, arguments, chance):
    return f"<|tool_call>call:weather{gemma(arguments, equals='=')}<tool_call|>"


def in_python(name, arguments, chance):
    call = CALLS[name][0] + ENDS.get(name, "")
    return call.replace('{"city": "Bern"}', repr(arguments)).replace(
        'city="Bern"', ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    )


def in_json(name, arguments, chance):
    opened = FORMS[name].open or ""
    key = chance.choice(["arguments", "parameters"])
    return opened + json.dumps({"name": "weather", key: arguments}, ensure_ascii=False) + (FORMS[name].close or "")


def as_its_template(name, arguments, chance):
    return written(name, arguments)


def mistakes(name):
    found = [as_its_template]
    if name in TAGS:
        found += [missing_end, missing_end_of_call, blanks]
    elif name == "gemma4":
        found += [json_quotes, equals_sign]
    else:
        found.append(in_python)
    return found if name == "openai" else [*found, in_json]


MISTAKES = [(name, mistake) for name in FORMATS for mistake in mistakes(name)]


def read(text, name, size):
    parser = ParserConfig(use(name, TOOLS)).parser()
    output = parser.output
    for at in range(0, len(text), size):
        parser.push(text[at : at + size])
    parser.finish()
    content, _reasoning, calls, _is_truncated = whole(output)
    return content, [call.name for call in calls], "".join(call.arguments for call in calls)


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_arguments_are_read_as_they_were_or_all_of_the_text_is_content(name, mistake):
    chance = random.Random(f"{name} {mistake.__name__}")
    is_read = False
    for _ in range(EXAMPLES):
        arguments = arguments_of(chance, name)
        text = mistake(name, arguments, chance)
        told = parsed(ParserConfig(use(name, TOOLS)), text)
        called = [(call.name, json.loads(call.arguments)) for call in told.calls]
        if called:
            assert (called, told.content) == ([("weather", arguments)], ""), text
            is_read = True
        else:
            assert told.content == text
        content, calls, joined = read(text, name, chance.randint(1, 7))
        assert (content, calls) == (told.content, [call.name for call in told.calls])
        assert joined == "".join(call.arguments for call in told.calls)
    assert is_read
