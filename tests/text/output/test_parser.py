"""What the text of an answer is read as, while it grows: content, reasoning and calls of tools."""

import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_calls import (
    BOTH,
    CALLS,
    ENDS,
    FORMATS,
    FORMS,
    MISWRITTEN,
    TAGS,
    THINKING,
    WRITTEN,
    Whole,
    in_tags,
    parsed,
    parsed_pieces,
    thinking_of,
    tool,
    use,
    with_argument,
)

from text.output.json_mender import complete_members
from text.output.parser import Call, Content, ParserConfig, Reasoning
from text.output.reasoning_formats import REASONING_FORMATS as FORMATS_OF_REASONING
from text.output.reasoning_formats import Thinking
from text.stream import Piece


def output_of(parser, text, size=None, is_truncated=False):
    """The output of `text`, which arrives in pieces of `size` characters."""
    output = parser.output
    for piece in [text[at : at + size] for at in range(0, len(text), size)] if size else [text]:
        parser.push(piece)
    parser.finish(is_truncated)
    assert [call.index for call in output.calls] == [*range(len(output.calls))]
    return output


def told(output):
    """Its parts as (kind, name, text)."""
    return [(type(part), getattr(part, "name", None), part.text) for part in output.parts]


def read(*args, **options):
    return told(output_of(*args, **options))


def joined(parts):
    """The parts of a stream as a complete output: content, reasoning and calls."""
    text = {kind: "".join(text for each, _, text in parts if each is kind) for kind in (Content, Reasoning)}
    return text[Content], text[Reasoning], [(name, text) for kind, name, text in parts if kind is Call]


def joined_whole(whole):
    return whole.content, whole.reasoning, [(call.name, call.arguments) for call in whole.calls]


JSON_IN_PYTHON = [("weather", {"city": "[)", "other": {"a": [True, None]}})]
TWICE = [("now", {}), ("now", {"a": "}"})]


def calls_of(whole):
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
def test_calls_are_read_however_the_text_is_split(name, size):
    parts = read(ParserConfig(use(name)).parser(), WRITTEN[name], size)
    assert parts == [(Call, "weather", '{"city": "Bern"}'), (Call, "now", "{}")]


SNIPPETS = [
    '{"name": "now", ',
    '"arguments": {',
    '"parameters": {',
    "}",
    "]",
    "[",
    "; ",
    " ",
    "\n",
    '"',
    "\\",
    "[now(",
    ")",
    "Hi",
]
SNIPPETS += ['"type": "function", ', '{"name": "oth', "<thi", "</", ",", *THINKING, *WRITTEN.values()]
SNIPPETS += ["now", "weather", "<parameter=", "city>", "</parameter>", "[AR", "aB3", "5", "True"]
SNIPPETS += ["<arg_key>city</arg_key>", "<arg_value>", "to=functions.now", "<|channel|>commentary ", "functools", "call:now{"]
SNIPPETS += ["functions.now:0", '<invoke name="now">', ":", "a"]
SNIPPETS += [marker for form in FORMS.values() for marker in form.markers]


@given(
    name=st.sampled_from(FORMATS),
    snippets=st.lists(st.sampled_from(SNIPPETS), max_size=9),
    thinking=st.sampled_from(["", "inside", "before"]),
    parallel=st.booleans(),
    size=st.integers(1, 9),
    is_truncated=st.booleans(),
    choice=st.sampled_from(["auto", "required", "now"]),
    enforces_calls=st.booleans(),
)
def test_any_text_gives_the_same_parts_however_it_is_split(
    name, snippets, thinking, parallel, size, is_truncated, choice, enforces_calls
):
    parser_config = ParserConfig(use(name, parallel=parallel, choice=choice), thinking_of(thinking), enforces_calls)
    text = "".join(snippets)
    output = output_of(parser_config.parser(), text, size, is_truncated)
    other = output_of(parser_config.parser(), text, None, is_truncated)
    parts = told(output)
    assert parts == told(other)
    assert [call.is_complete for call in output.calls] == [call.is_complete for call in other.calls]
    whole = parsed(parser_config, text, is_truncated)
    complete = whole.calls[:-1] if whole.is_truncated else whole.calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in complete)
    assert joined_whole(whole) == joined(parts)
    if not whole.calls and not thinking and choice == "auto":
        assert whole == Whole(text, "", [])


ALMOST_RIGHT = settings.default.max_examples  # for each format
MISTAKES = "{}[]()\"',:=<>\\\n x1"
CITIES = ["Bern", "Zü\nrich", "a}b", "[)", '<b> \\"x\\"', "{", "5"]


def almost_right(name, chance):
    """Two calls with a mistake or two."""
    text = with_argument(name, value=chance.choice(CITIES)) + chance.choice(["", "\n", WRITTEN[name], " Done."])
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(text))
        length = chance.choice([1, 1, 1, 2, 8])
        kept = chance.choice(["", chance.choice(MISTAKES), text[at : at + length] * 2, text[at : at + length][::-1]])
        text = text[:at] + kept + text[at + length :]
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_an_almost_right_output_has_the_same_parts_streamed_and_whole(name):
    chance = random.Random(name)
    outcomes = set()
    for _ in range(ALMOST_RIGHT):
        text = almost_right(name, chance)
        whole = parsed(ParserConfig(use(name)), text)
        output = output_of(ParserConfig(use(name)).parser(), text, chance.randint(1, 9))
        assert joined(told(output)) == joined_whole(whole), text
        assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls), text
        assert all(call.is_complete for call in output.calls) and not whole.is_truncated
        assert whole.calls or whole.content == text
        outcomes.add(bool(whole.calls))
    assert outcomes == {True, False}


@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere_is_the_same_in_a_stream_and_in_a_whole_answer(name, choice):
    parser_config = ParserConfig(use(name, choice=choice))
    written = CALLS[name][0] + ENDS.get(name, "")
    lengths = []
    for end in range(1, len(written) + 1):
        output = output_of(parser_config.parser(), written[:end], 3, is_truncated=True)
        parts = told(output)
        whole = parsed(parser_config, written[:end], is_truncated=True)
        assert whole.content == "".join(text for kind, _, text in parts if kind is Content)
        assert whole.is_truncated == (bool(output.calls) and not output.has_calls)
        assert [call.arguments for call in whole.calls] == (
            ["".join(text for kind, _, text in parts if kind is Call)] if whole.calls else []
        )
        assert all(call.name == "weather" for call in whole.calls)
        assert choice == "auto" or not whole.content
        assert choice != "weather" or whole.calls
        lengths += [len(call.arguments) for call in whole.calls]
    assert lengths == sorted(lengths) and lengths[-1] == len('{"city": "Bern"}')


def test_a_complete_call_stays_when_a_later_one_of_the_same_block_is_cut():
    first, _ = CALLS["minimax_m2"]
    second = first.removeprefix("<minimax:tool_call>").replace("Bern", "Rome")
    for end in ("", "</invoke>", "\n</invoke>"):
        text = first + second.removesuffix(end)
        output = output_of(ParserConfig(use("minimax_m2")).parser(), text, 3, is_truncated=True)
        assert [call.text for call in output.calls] == ['{"city": "Bern"}', '{"city": "Rome"']
        assert output.calls[0].is_complete and not output.has_calls


def test_a_stop_string_cuts_a_forced_call_too():
    text = CALLS["hermes"][0][:-20]
    assert [call.arguments for call in parsed(ParserConfig(use(choice="required")), text).calls] == ['{"city": "']
    assert parsed(ParserConfig(use()), text) == Whole(text, "", [])


@pytest.mark.parametrize(
    ("cut", "read"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a": 12', {}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": 12, "b', {"a": 12}),
        ('{"a": 12, "b": ', {"a": 12}),
        ('{"a": [1, {"b": "}"}, "c', {"a": [1, {"b": "}"}]}),
        ('{"a": "\\"}", "b": {"c": [], "d', {"a": '"}', "b": {"c": []}}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": ' + "[" * 100_000 + "2, 3", {}),
        ('{"a": 1, "b": 2', {"a": 1}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": 1, "b": "2", "c"', {"a": 1, "b": "2"}),
        ("nonsense", {}),
        ('{"a": [' + "1," * 1000, {"a": [1] * 1000}),
        ('{"a": [' + "1," * 100_000, {}),  # would take long
    ],
)
def test_what_is_complete_of_cut_arguments_can_be_read(cut, read):
    assert complete_members(cut) == read


@given(name=st.sampled_from(FORMATS), snippets=st.lists(st.sampled_from(SNIPPETS), max_size=9))
def test_no_text_is_lost_or_made_up_in_a_text_without_calls(name, snippets):
    text = "".join(snippets)
    parser = ParserConfig(use(name)).parser()
    parts = read(parser, text, 1)
    if not any(kind is Call for kind, *_ in parts):
        assert "".join(written for *_, written in parts) == text


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Let me see.\n" + WRITTEN["hermes"], "Let me see.\n", BOTH),
        ("hermes", "\n\n" + WRITTEN["hermes"] + "\n", "", BOTH),
        ("hermes", WRITTEN["hermes"] + " Done.", " Done.", BOTH),
        ("hermes", '<tool_call>{"name":"now","arguments":{}}', "", BOTH[1:]),
        ("hermes", '<tool_call>{"arguments": {"city": "}"}, "name": "weather"}</tool_call>', "", [("weather", {"city": "}"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "x"}</tool_call>', "", BOTH[1:]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\"}\\\\"}}', "", [("weather", {"city": '"}\\'})]),
        ("llama3_json", "<|python_tag|>" + WRITTEN["llama3_json"], "", BOTH),
        ("llama3_json", "One moment.<|python_tag|>" + WRITTEN["llama3_json"], "One moment.", BOTH),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", BOTH[1:]),
        ("llama3_json", '{"name": "now", "arguments": {}}', "", BOTH[1:]),
        ("llama3_json", WRITTEN["llama3_json"].replace(";", "\n") + "\nDone", "Done", BOTH),
        ("mistral", "Hm" + WRITTEN["mistral"], "Hm", BOTH),
        ("mistral", WRITTEN["mistral"].replace("] [", "][")[:-1] + " \n]", "", BOTH),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', "", BOTH[1:]),
        ("pythonic", "<|python_start|>" + WRITTEN["pythonic"] + "<|python_end|>", "", BOTH),
        ("pythonic", "[weather(city='[)', unit=\"F\")]", "", [("weather", {"city": "[)", "unit": "F"})]),
        ("qwen3_coder", "Let me see.\n" + WRITTEN["qwen3_coder"] + " Done.", "Let me see.\n Done.", BOTH),
        ("qwen3_coder", WRITTEN["qwen3_coder"].replace("\n", ""), "", BOTH),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>", "", BOTH[1:]),
        ("qwen3_coder", in_tags("qwen3_coder", city='\n "a\\\t"\nb\n '), "", [("weather", {"city": '\n "a\\\t"\nb\n '})]),
        ("qwen3_coder", in_tags("qwen3_coder", city="5", days="5"), "", [("weather", {"city": "5", "days": 5})]),
        ("qwen3_coder", in_tags("qwen3_coder", city="", days="soon"), "", [("weather", {"city": "", "days": "soon"})]),
        (
            "qwen3_coder",
            in_tags("qwen3_coder", city="<b>é</b>", other="[1, {}]"),
            "",
            [("weather", {"city": "<b>é</b>", "other": [1, {}]})],
        ),
        ("glm45", "Hm\n" + WRITTEN["glm45"] + "Done.", "Hm\nDone.", BOTH),
        ("glm45", WRITTEN["glm45"].replace("\n", ""), "", BOTH),
        ("glm45", in_tags("glm45", city="\n <b> \n", days="5"), "", [("weather", {"city": "\n <b> \n", "days": 5})]),
        ("glm45", in_tags("glm45", city="", other='{"a": [1]}'), "", [("weather", {"city": "", "other": {"a": [1]}})]),
        ("kimi_k2", "Hm" + WRITTEN["kimi_k2"] + "Done", "HmDone", BOTH),
        ("kimi_k2", WRITTEN["kimi_k2"].replace(":0", "").replace("<|tool_calls_section_end|>", ""), "", BOTH),
        ("minimax_m2", "Hm\n" + WRITTEN["minimax_m2"] + "\nDone", "Hm\n\nDone", BOTH),
        ("minimax_m2", WRITTEN["minimax_m2"].replace("\n", ""), "", BOTH),
        ("minimax_m2", in_tags("minimax_m2", city="\n", days="5"), "", [("weather", {"city": "\n", "days": 5})]),
        ("lfm2", "Hm" + WRITTEN["lfm2"] + "Done", "HmDone", BOTH),
        ("lfm2", "<|tool_call_start|>[weather(city='[)', other={\"a\": [true, null]})]", "", JSON_IN_PYTHON),
        ("phi4_mini_json", "Hm" + WRITTEN["phi4_mini_json"] + "<|/tool_call|>", "Hm", BOTH),
        ("phi4_mini_json", WRITTEN["phi4_mini_json"].replace("<|tool_call|>", "functools"), "", BOTH),
        ("phi4_mini_json", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', "", BOTH[1:]),
        ("openai", "Hm" + WRITTEN["openai"] + "<|call|>", "Hm", BOTH),
        ("openai", "<|start|>assistant" + WRITTEN["openai"], "", BOTH),
        ("openai", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", BOTH[1:]),
        ("openai", "<|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}", "", BOTH[1:]),
        ("openai", "<|channel|>analysis to=functions.now code<|message|>{}", "", BOTH[1:]),
        ("openai", "<|channel|>commentary to=functions.now\n<|constrain|>json\n<|message|> {}", "", BOTH[1:]),
        ("gemma4", "Hm" + WRITTEN["gemma4"] + "Done", "HmDone", BOTH),
        ("gemma4", "<|tool_call>call:now{}", "", BOTH[1:]),
        (
            "gemma4",
            '<|tool_call>call:weather{a:[1,-2.5e3,true,None],b:{c:<|"|>"{,\n<|"|>,<|"|>d<|"|>:{}}, unit: C}<tool_call|>',
            "",
            [("weather", {"a": [1, -2500.0, True, None], "b": {"c": '"{,\n', "d": {}}, "unit": "C"})],
        ),
        ("mistral_v11", "Hm" + WRITTEN["mistral_v11"], "Hm", BOTH),
        ("mistral_v11", '[TOOL_CALLS]now[CALL_ID]aB3456789[ARGS]{}[TOOL_CALLS]now[ARGS] {"a": "}"}', "", TWICE),
        ("deepseek_v3", "Hm\n" + WRITTEN["deepseek_v3"] + "\n", "Hm\n", BOTH),
        ("deepseek_v3", WRITTEN["deepseek_v3"].replace("<｜tool▁calls▁end｜>", ""), "", BOTH),
        ("deepseek_v31", "Hm" + WRITTEN["deepseek_v31"] + "Done", "HmDone", BOTH),
    ],
)
def test_calls_are_read_as_models_write_them(name, text, content, calls):
    whole = parsed(ParserConfig(use(name)), text)
    assert (whole.content, calls_of(whole)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Hello"),
        ("hermes", "a <b> <tool_"),
        ("hermes", "The tag <tool_call> begins a call."),
        ("hermes", CALLS["hermes"][1].replace("now", "then")),
        ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001),
        ("llama3_json", '{"name": "Alice", "parameters": {}}'),
        ("llama3_json", '{"answer": 1}'),
        ("llama3_json", "{} is an empty object"),
        ("llama3_json", 'Use {"name": "now", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] none"),
        ("pythonic", "[1] see below"),
        ("pythonic", "[now] is a tool"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[now(**{})]"),
        ("pythonic", "[now(a=b)]"),
        ("pythonic", "[now(a=1e999)]"),
        ("pythonic", "[now(a=" + "-" * 20000 + "1)]"),
        ("pythonic", "<|python_start|>"),
        ("qwen3_coder", CALLS["qwen3_coder"][1].replace("now", "then")),
        ("qwen3_coder", "<tool_call>\n<function=weather>\nBern\n</function>"),
        ("glm45", CALLS["glm45"][0].replace("weather", "weathers")),
        ("glm45", "<tool_call>weather is good</tool_call>"),
        ("kimi_k2", CALLS["kimi_k2"][0].replace("weather", "weathers")),
        ("kimi_k2", CALLS["kimi_k2"][0].replace(":0", ":x")),
        ("kimi_k2", "<|tool_calls_section_begin|>none"),
        ("minimax_m2", CALLS["qwen3_coder"][0]),
        ("minimax_m2", "<minimax:tool_call>\nnow\n</minimax:tool_call>"),
        ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
        ("lfm2", "[now] is a list, [now](now) a link"),
        ("lfm2", "[now(1)]"),
        ("lfm2", "<|tool_call_start|>[now(a='b)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[now(a=b)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[now(a='b'c', a='d')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[then(a='b'c')]<|tool_call_end|>"),
        ("phi4_mini_json", "functools is a module"),
        ("phi4_mini_json", "<|tool_call|>[1]"),
        ("openai", "<|channel|>commentary to=functions.then <|constrain|>json<|message|>{}"),
        ("openai", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>1"),
        ("openai", "<|channel|>commentary to=functions.now and more<|message|>{}"),
        ("openai", "<|channel|>commentary to=functions.nowhere <|message|>{}"),
        ("openai", "<|channel|>commentary to=python code<|message|>{}"),
        ("gemma4", "<|tool_call>call:then{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:now{a:}<tool_call|>"),
        ("gemma4", "<|tool_call>call:now{a:1]<tool_call|>"),
        ("gemma4", "<|tool_call>call:now{1}<tool_call|>"),
        ("gemma4", '<|tool_call>call:now{a<|"|>b<|"|>:1}<tool_call|>'),
        ("gemma4", "<|tool_call>call:now{a:" + "[" * 100_000 + "]" * 100_000 + "}"),
        ("mistral_v11", "[TOOL_CALLS] none"),
        ("mistral_v11", "[TOOL_CALLS]then[ARGS]{}"),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS]1"),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS]{nonsense}"),
        ("mistral_v11", "[TOOL_CALLS]now[CALL_ID]a-b[ARGS]{}"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>none"),
    ],
)
def test_what_is_not_a_call_stays_content(name, text):
    assert parsed(ParserConfig(use(name)), text) == Whole(text, "", [])


HARMONY = next(form for form in FORMATS_OF_REASONING if form.name == "openai_gptoss")
CALL_OF_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CALL_OF_NOW, "Hm.", "", BOTH[1:]),
        (
            "<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
            "Hm.",
            "",
            BOTH[1:],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant" + CALL_OF_NOW + "<|call|>",
            "Hm.",
            "I look.",
            BOTH[1:],
        ),
        (CALL_OF_NOW, "", "", BOTH[1:]),
        (" to=functions.now<|channel|>commentary json<|message|>{}", "", "", BOTH[1:]),
        ("<|channel|>final<|message|>Hi <|constrain|>", "", "Hi <|constrain|>", []),
    ],
)
def test_a_call_of_gpt_oss_follows_its_other_messages(text, reasoning, content, calls):
    config = ParserConfig(use("openai"), Thinking(HARMONY, close_id=2))
    tokens = [token for token in re.split(r"(<\|\w+\|>)", text) if token]
    ids = {"<|end|>": 2}
    whole = parsed_pieces(config, [Piece(ids.get(token, 1), token, None, token.startswith("<|"), []) for token in tokens])
    assert (whole.reasoning, whole.content, calls_of(whole)) == (reasoning, content, calls)


@pytest.mark.parametrize("rest", ["\n<tool_call>nonsense", '\n<tool_call>{"name": "now", "arguments": {"a" 1}}'])
def test_what_follows_a_call_and_is_none_is_content(rest):
    output = output_of(ParserConfig(use()).parser(), CALLS["hermes"][0] + rest, 1)
    assert told(output) == [(Call, "weather", '{"city": "Bern"}'), (Content, None, rest)]
    assert output.has_calls


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_no_grammar_enforces_is_held_back_until_it_is_complete(name):
    text = with_argument(name, value="Bern, " * 100)
    parser = ParserConfig(use(name)).parser()
    text += "\n" if name in (*TAGS, "gemma4") else ""  # a value may have the end of a call: what follows shows that it has not
    parts = [part for at, each in enumerate(text) for part in [*parser.push(each), at]]
    (added,) = [part for part in parts if not isinstance(part, int) and isinstance(part[0], Call)]
    assert json.loads(added[1]) == {"city": "Bern, " * 100}


def pushed(parser, text):
    return [(type(part), added) for part, added in parser.push(text)]


def test_nothing_is_held_back_that_cannot_belong_to_a_call():
    parser = ParserConfig(use(), enforces_calls=True).parser()
    assert pushed(parser, "Hello <") == [(Content, "Hello ")]
    assert pushed(parser, "b> <tool") == [(Content, "<b> ")]
    assert pushed(parser, "_call>") == []
    assert pushed(parser, '{"name": "weather", "arguments": {"ci') == [(Call, ""), (Call, '{"ci')]
    assert pushed(parser, 'ty": "B') == [(Call, 'ty": "B')]
    unknown = ParserConfig(use("glm45")).parser()
    assert pushed(unknown, "<tool_call>wea") == []
    assert pushed(unknown, "r") == [(Content, "<tool_call>wear")]
    json_answer = ParserConfig(use("llama3_json")).parser()
    assert pushed(json_answer, '{"na') == []
    assert pushed(json_answer, "il") == [(Content, '{"nail')]


def test_what_follows_a_name_is_not_held_back_for_long():
    parser = ParserConfig(use("mistral_v11")).parser()
    assert pushed(parser, "[TOOL_CALLS]now and then " + "x" * 900) == []
    assert pushed(parser, "x" * 100) == [(Content, "[TOOL_CALLS]now and then " + "x" * 1000)]


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("name", FORMATS)
def test_a_name_that_begins_with_that_of_another_tool_is_read_to_its_end(name, size):
    tools = [tool("now"), tool("nowhere")]
    parts = read(ParserConfig(use(name, tools)).parser(), with_argument(name, function="nowhere"), size)
    assert parts == [(Call, "nowhere", '{"city": "Bern"}')]


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_read_where_only_one_may_be_made(name):
    whole = parsed(ParserConfig(use(name, parallel=False)), WRITTEN[name] + " and more")
    assert calls_of(whole) == BOTH[:1]


def test_only_allowed_tools_are_called():
    found = use(choice="now")
    assert calls_of(parsed(ParserConfig(found), CALLS["hermes"][1])) == BOTH[1:]
    assert parsed(ParserConfig(found), CALLS["hermes"][0]).calls == []


def test_ids_have_the_form_that_templates_require():
    for short, form in ((False, r"call_[0-9a-f]{24}"), (True, r"[0-9a-zA-Z]{9}")):
        found = use(short_ids=short, parallel=True)
        first, second = parsed(ParserConfig(found), CALLS["hermes"][0] * 2).calls
        assert re.fullmatch(form, first.id) and first.id != second.id


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        ("inside", "Hm.\n</think>\n\nYes <think>", "Hm.\n", "Yes <think>"),
        ("inside", "Hm", "Hm", ""),
        ("before", "\n<think>Hm <tool_call></think>Yes", "Hm <tool_call>", "Yes"),
        ("before", "<think></think>Yes", "", "Yes"),
        ("before", " Yes</think>", "", " Yes</think>"),
        ("before", "<thin", "", "<thin"),
        ("", "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_thinking_is_separated_from_the_answer(thinking, text, reasoning, content):
    whole = parsed(ParserConfig(None, thinking_of(thinking)), text)
    assert (whole.content, whole.reasoning, whole.calls) == (content, reasoning, [])
    parts = read(ParserConfig(None, thinking_of(thinking)).parser(), text, 1)
    assert parts == [part for part in ((Reasoning, None, reasoning), (Content, None, content)) if part[2]]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_follow_thinking(name):
    whole = parsed(ParserConfig(use(name), thinking_of("inside")), "Bern?</think>\n\n" + WRITTEN[name])
    assert (whole.reasoning, whole.content, calls_of(whole)) == ("Bern?", "", BOTH)


def test_what_follows_thinking_and_is_no_call_is_content():
    failed = parsed(ParserConfig(use(), thinking_of("inside")), "Bern?</think>\n\n<tool_call>")
    assert (failed.content, failed.reasoning, failed.calls) == ("<tool_call>", "Bern?", [])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_v11"])
def test_an_answer_whose_last_call_is_sent_and_does_not_end_is_not_one_of_calls(name):
    text = WRITTEN[name]
    output = output_of(ParserConfig(use(name), enforces_calls=True).parser(), text[: text.rindex("{}") + 1])
    assert [(call.name, call.is_complete) for call in output.calls] == [("weather", True), ("now", False)]
    assert not output.has_calls


def call(arguments, end="}\n</tool_call>"):
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}{end}'


MENDED = {
    "the last brace is missing": (call('{"city": "Bern"}', "\n</tool_call>"), {"city": "Bern"}),
    "it is missing at the end of the output": (call('{"city": "Bern"}', ""), {"city": "Bern"}),
    "both braces are missing": (call('{"city": "Bern"', "\n</tool_call>"), {"city": "Bern"}),
    "a line break in a string": (call('{"city": "Be\nrn\t"}'), {"city": "Be\nrn\t"}),
    "a comma too many": (call('{"city": "Bern", }'), {"city": "Bern"}),
    "a comma too many in a list": (call('{"city": "Bern", "days": [1, 2,]}'), {"city": "Bern", "days": [1, 2]}),
    "a bracket is missing": (call('{"city": "Bern", "days": [1, 2', "\n</tool_call>"), {"city": "Bern", "days": [1, 2]}),
    "arguments as a string": (call(json.dumps('{"city": "Be\\"rn"}')), {"city": 'Be"rn'}),
}


@pytest.mark.parametrize("size", [1, 7, None])
@pytest.mark.parametrize("mistake", MENDED)
def test_a_call_that_is_almost_right_is_mended_the_same_in_a_stream(mistake, size):
    text, arguments = MENDED[mistake]
    whole = parsed(ParserConfig(use()), text)
    assert (whole.content, calls_of(whole)) == ("", [("weather", arguments)])
    parts = read(ParserConfig(use()).parser(), text, size)
    assert parts == [(Call, "weather", whole.calls[0].arguments)]


@pytest.mark.parametrize("arguments", ['{"city": }', '{"city" "Bern"}', '{"city": "Bern]', '{"city": Bern}', '"Bern"', "[]"])
def test_a_call_with_another_mistake_is_content(arguments):
    text = call(arguments)
    assert parsed(ParserConfig(use()), text) == Whole(text, "", [])


VALUES = st.recursive(
    st.text(max_size=5) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    mistakes=st.lists(st.sampled_from("},\n"), max_size=2),
    at=st.integers(0, 200),
    size=st.integers(1, 9),
)
def test_any_mistake_gives_valid_arguments_or_content(arguments, mistakes, at, size):
    written = json.dumps(arguments)
    for mistake in mistakes:
        where = at % (len(written) + 1)
        written = written[:where] + mistake + written[where:]
    text = call(written)
    whole = parsed(ParserConfig(use()), text)
    assert whole.content == text or whole.calls
    assert all(isinstance(json.loads(each.arguments), dict) for each in whole.calls)
    if whole.calls:
        parts = read(ParserConfig(use()).parser(), text, size)
        assert [each for each in parts if each[0] is Call] == [(Call, "weather", whole.calls[0].arguments)]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
@pytest.mark.parametrize("kind", ["inside", "token"])
def test_a_call_ends_the_reasoning_that_was_not_closed(kind, name):
    thinking = thinking_of("inside") if kind == "inside" else Thinking(is_open=True, close_id=7)
    whole = parsed(ParserConfig(use(name), thinking), "Bern?\n" + WRITTEN[name] + "\n</think>\n\nDone")
    assert (whole.reasoning, calls_of(whole), whole.content) == ("Bern?\n", BOTH, "\n\nDone")
    broken = "<tool_call>" + '{"name": "now", "arguments": {"a" 1}}'  # which a grammar allows in reasoning
    whole = parsed(ParserConfig(use(), thinking, enforces_calls=True), "Bern?\n" + broken)
    assert (whole.reasoning, whole.calls, whole.content) == ("Bern?\n", [], broken)


@pytest.mark.parametrize("enforces_calls", [False, True])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pythonic"])  # whose calls are in one list
def test_a_call_that_repeats_an_earlier_one_ends_the_output(name, enforces_calls):
    text = WRITTEN[name] + WRITTEN[name]
    for size in (1, None):
        parser = ParserConfig(use(name), enforces_calls=enforces_calls).parser()
        output = output_of(parser, text + "and more", size)
        assert [call.name for call in output.calls] == ["weather", "now"]
        assert parser.is_done and output.has_calls
        assert not output.text_of(Content).strip()
    assert len(parsed(ParserConfig(use(name, parallel=True)), text).calls) == (4 if use(name).parallel else 1)


def test_a_call_that_begins_like_an_earlier_one_is_a_call():
    calls = [call('{"city": "Bern"}'), call('{"city": "Bern", "days": 2}'), call('{"city": "B"}')]
    for size, enforces_calls in ((1, True), (1, False), (None, True)):
        parts = read(ParserConfig(use(), enforces_calls=enforces_calls).parser(), "".join(calls), size)
        assert [written for kind, _, written in parts if kind is Call] == [
            '{"city": "Bern"}',
            '{"city": "Bern", "days": 2}',
            '{"city": "B"}',
        ]
    truncated = parsed(ParserConfig(use()), calls[0] + calls[0][:-20], is_truncated=True)
    assert truncated.calls[0].arguments == '{"city": "Bern"}' and truncated.is_truncated


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, '\n{"a": [1]}\n', {"a": [1]}),
        ({"type": "object"}, "{'a': [True, None, 'é']}", {"a": [True, None, "é"]}),
        ({"type": "object"}, "{'a': 1}, b='2'", "{'a': 1}, b='2'"),
        ({"type": "array"}, "['\\ud800']", "['\\ud800']"),
        ({"type": "array"}, "{'a'}", "{'a'}"),
        ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Text"}, "1", "1"),
        ({"$ref": "#/$defs/Self"}, "1", 1),
        ({"$ref": "#/nowhere"}, "1", 1),
        ({}, "[1]", [1]),
        ({}, "a b", "a b"),
        (True, "a b", "a b"),
    ],
)
@pytest.mark.parametrize("name", TAGS)
def test_values_in_tags_have_the_type_that_the_schema_says(name, schema, text, value):
    definitions = {"Point": {"type": "object"}, "Text": {"const": "1"}, "Self": {"$ref": "#/$defs/Self"}}
    found = use(name, [tool("f", {"properties": {"x": schema}, "$defs": definitions})])
    (call,) = parsed(ParserConfig(found), in_tags(name, "f", x=text)).calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("size", [1, 5, None])
@pytest.mark.parametrize(("mistake", "name", "text", "calls"), MISWRITTEN, ids=lambda value: str(value)[:40])
def test_a_call_with_a_mistake_is_a_call(mistake, name, text, calls, size):
    told, content = parsed(ParserConfig(use(name)), text), text.partition("I look.\n")[1]
    assert (told.content, calls_of(told)) == (content, calls)
    assert joined(read(ParserConfig(use(name)).parser(), text, size)) == joined_whole(told)


@pytest.mark.parametrize(("mistake", "name", "text", "calls"), MISWRITTEN, ids=lambda value: str(value)[:40])
def test_a_call_with_a_mistake_of_a_tool_that_is_not_offered_is_content(mistake, name, text, calls):
    tools = [tool("elsewhere")]
    whole = parsed(ParserConfig(use(name, tools)), text)
    assert (whole.calls, whole.content) == ([], text)


@pytest.mark.parametrize("name", TAGS)
def test_a_required_call_may_have_the_tags_of_its_format_in_a_value(name):
    value = f"<a> {FORMS[name].key} {FORMS[name].open}"
    config = ParserConfig(use(name, choice="required"), enforces_calls=True)
    for size in (1, None):
        output = output_of(config.parser(), in_tags(name, city=value), size)
        assert [call.text for call in output.calls] == [json.dumps({"city": value})]
        assert output.has_calls


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "function", ["call", "message", "json", "function", "to", "functions", "tool", "weather_now", "functions.now"]
)
def test_a_tool_may_have_a_name_that_formats_have_beside_names(name, function):
    tools = [tool(function), tool("weather")]
    text = with_argument(name, function=function)
    for made in (text, text.replace('"Bern"', "'Bern'")):
        whole = parsed(ParserConfig(use(name, tools)), made)
        assert calls_of(whole) == [(function, {"city": "Bern"})], made


DOCUMENTED = "x</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", in_tags("qwen3_coder", city=DOCUMENTED)),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>a<|"|>,city:<|"|>b<|"|>}<tool_call|>'),
        ("hermes", call("{'city': 'a', 'city': 'b'}")),
        ("hermes", call(r'{"city": "C:\new\table\Users"}')),
        ("pythonic", "[weather(city='a', city='b')]"),
    ],
)
def test_what_may_be_read_in_two_ways_is_content(name, text):
    assert parsed(ParserConfig(use(name)), text) == Whole(text, "", [])


CODER = "<tool_call><function=weather><parameter="
HOSTILE = [
    ("qwen3_coder", CODER + " " * 5000 + "</function></tool_call>"),
    ("qwen3_coder", CODER + "days>[" + "1, " * 10_000 + "</parameter> " * 5000 + "</function></tool_call>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name=' + " " * 5000 + "</invoke></minimax:tool_call>"),
    ("glm45", "<tool_call>weather<arg_key>" + " " * 5000 + "</tool_call>"),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>" + "</tool_call>x" * 10_000),
    ("openai", "<|channel|>commentary to=functions.weather" + " " * 5000 + "x"),
    ("hermes", "<tool_call>weather(" + "/*" * 20_000 + "{</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "' + "</tool_call>" * 10_000),
]


@pytest.mark.parametrize("size", [500, None])
@pytest.mark.parametrize(("name", "text"), HOSTILE, ids=lambda value: str(value)[:40])
def test_a_hostile_output_costs_little(name, text, size):
    parser = ParserConfig(use(name)).parser()
    started_at = time.thread_time()
    assert told(output_of(parser, text, size)) == [(Content, None, text)]
    assert time.thread_time() - started_at < 5  # at most 1 on an idle processor; minutes or hours without limits


def test_tags_in_a_value_and_text_behind_a_call_do_not_change_it():
    value = "see <function=now> here"
    assert calls_of(parsed(ParserConfig(use("qwen3_coder")), in_tags("qwen3_coder", city=value))) == [
        ("weather", {"city": value})
    ]
    text = in_tags("qwen3_coder", city="Bern").replace("</tool_call>", "And more\n</tool_call>")
    whole = parsed(ParserConfig(use("qwen3_coder")), text)
    assert (calls_of(whole), whole.content) == ([("weather", {"city": "Bern"})], "\nAnd more\n</tool_call>")
