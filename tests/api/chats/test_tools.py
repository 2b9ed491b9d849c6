"""`tools` and `tool_choice` of a request: what is asked for, what is refused, and how calls are answered."""

import json
import re
from dataclasses import replace

import pytest
import served as served_app
import tiny_tokenizers
from asked import allows, grammars, serving
from tool_calls import (
    BOTH,
    CALLS,
    FORMATS,
    KINDS,
    LITERALS,
    NOW,
    TOOLS,
    WRITTEN,
    beside,
    thinking_of,
    tokenizer_of,
    tool,
    use,
)

from api.anthropic.output import MessagesResponseWriter
from api.anthropic.tools import CLIENT_TOOLS, MessagesTools
from api.anthropic.types import MessagesRequest
from api.chats.conversation import NEVER, ChatRequest
from api.chats.tools import CUSTOM_INPUT, OfferedTools, as_function, tool_policy
from api.generation.prepared_request import PreparedRequest, TokenizedPrompt
from api.generation.response_writer import GeneratedSequence
from api.http.errors import ApiError
from api.http.fields import CHAT_FIELDS
from api.http.types import encode_json
from api.openai import chat
from api.openai.chat import ChatResponseWriter
from api.openai.responses_output import ResponsesWriter
from api.openai.responses_tools import BUILT_IN, ResponsesTools
from api.openai.responses_types import ResponsesRequest
from protocol import Token
from text.output.call_syntaxes import ModelTools
from text.output.json_mender import complete_members
from text.output.parser import ParserConfig
from text.tokenizer import Tokenizer

# Requests


def custom(syntax=None, definition=None, name="note"):
    """A custom tool of a chat."""
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else {"type": "text"}
    return {"type": "custom", "custom": {"name": name, "description": "Keeps a note", "format": form}}


NOTE = custom()


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "names"),
    [
        (TOOLS, None, "auto", ["weather", "now"]),
        (TOOLS, "auto", "auto", ["weather", "now"]),
        (TOOLS, "required", "required", ["weather", "now"]),
        (TOOLS, "now", "named", ["now"]),
        (TOOLS, {"type": "function", "function": {"name": "now"}}, "named", ["now"]),
        (TOOLS, {"function": {"name": "now"}}, "named", ["now"]),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}, "auto", ["now"]),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}, "required", ["now"]),
        ([*TOOLS, NOTE], "required", "required", ["weather", "now", "note"]),
        ([*TOOLS, NOTE], {"type": "custom", "custom": {"name": "note"}}, "named", ["note"]),
        ([*TOOLS, NOTE], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOTE]}}, "auto", ["note"]),
    ],
)
def test_a_tool_choice_says_whether_and_what_is_called(tools, choice, mode, names):
    found = use(tools=tools, choice=choice)
    assert (found.mode, found.names) == (mode, names)
    assert found.requires_call == (mode != "auto") == bool(found.constraint.grammar)


@pytest.mark.parametrize(("tools", "choice"), [([], None), ([], "auto"), ([], "none"), (TOOLS, "none")])
@pytest.mark.parametrize("model", [None, ModelTools(None)])
def test_nothing_is_called_without_tools_and_with_the_choice_none(tools, choice, model):
    assert tool_policy(OfferedTools(tools).listed, choice, None, model, CHAT_FIELDS) is None
    assert use("hermes", tools, choice) is None


@pytest.mark.parametrize("kind", KINDS)
def test_without_calls_their_marker_is_not_generated_where_it_is_a_token(kind):
    made = tokenizer_of(kind)
    served = serving()
    tools = ModelTools(use("hermes").format, made.token_to_id)
    served = replace(served, text=served.text._replace(tools=tools))
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    marker = made.token_to_id("<tool_call>")
    biases = {
        choice: chat.chat(body | {"tool_choice": choice}, served).requests[0].sampling.logit_bias for choice in ("none", "auto")
    }
    assert biases == {"none": [] if kind == "text" else [(marker, NEVER)], "auto": []}


def allowed(**more):
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW], **more}}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        ([], "required", "tool_choice", "needs `tools`"),
        ([], {"function": {"name": "f"}}, "tool_choice", "needs `tools`"),
        (TOOLS, "other", "tool_choice", "'other'"),
        (TOOLS, "", "tool_choice", "''"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "tool_choice.function", "'other'"),
        (TOOLS, {"type": "function"}, "tool_choice.function", "missing"),
        (TOOLS, {"type": "function", "function": {}}, "tool_choice.function.name", "missing"),
        (TOOLS, {"type": "custom"}, "tool_choice.custom", "missing"),
        (TOOLS, {"type": "mcp"}, "tool_choice.type", "'mcp'"),
        (TOOLS, allowed(mode="none"), "tool_choice.allowed_tools", "mode"),
        (TOOLS, allowed(tools=None), "tool_choice.allowed_tools", "tools"),
        (TOOLS, allowed(tools=[]), "tool_choice.allowed_tools", "no tool"),
        (TOOLS, allowed(tools=["now"]), "tool_choice.allowed_tools.tools[0].function", "missing"),
        (TOOLS, allowed(tools=[tool("other")]), "tool_choice.allowed_tools", "'other'"),
        ([{"type": "web_search"}], None, "tools[0].type", "web_search"),
        ([tool(), {}], None, "tools[1].function", "missing"),
        ([{"function": {"name": 1}}], None, "tools[0].function.name", "missing"),
        ([tool("a b")], None, "tools[0].function.name", "'a b'"),
        ([tool("")], None, "tools[0].function.name", "''"),
        ([tool("x" * 129)], "none", "tools[0].function.name", "128"),
        ([tool(), tool()], None, "tools[1].function.name", "'weather'"),
        ([custom("regex", "a" * 120_000)], None, "tools[0].custom.format", "at most 120000 bytes"),
        ([tool(parameters=[])], None, "tools[0].function.parameters", "object"),
        ([{"function": {"name": "f", "inputSchema": {}}}], None, "tools[0].function.inputSchema", "use `parameters`"),
        ([tool(description=5)], None, "tools[0].function.description", "string"),
        ([{"type": "custom"}], None, "tools[0].custom", "missing"),
        ([{"type": "custom", "custom": {"name": "a b"}}], None, "tools[0].custom.name", "'a b'"),
        ([{"type": "custom", "custom": {"name": "a", "format": 5}}], None, "tools[0].custom.format", "object"),
        ([custom("regex", 5)], None, "tools[0].custom.format", "`definition`"),
        (
            [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}],
            None,
            "tools[0].custom.format",
            "`definition`",
        ),
        ([NOTE], {"type": "custom", "custom": {"name": "other"}}, "tool_choice.custom", "'other'"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters", "object"),
        ([tool(parameters={"properties": []})], None, "tools[0].function.parameters", "object"),
        ([tool(), tool("g", {"description": "x" * 120_000})], "g", "tools[1].function.parameters", "at most 120000 bytes"),
        ([tool(f"t{n}", {"description": "x" * 15_000}) for n in range(9)], "required", "tools", "at most 120000 bytes"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_by_the_name_of_the_field(tools, choice, param, words):
    with pytest.raises(ApiError, match=re.escape(words)) as raised:
        assert use(tools=tools, choice=choice).constraint.grammar
    assert (raised.value.status, raised.value.param) == (422, param)


@pytest.mark.parametrize(
    ("name", "tools", "choice", "param", "words"),
    [
        ("unknown", TOOLS, "required", "tools", "--tool-parser (TOOL_PARSER)"),
        ("none", TOOLS, "required", "tool_choice", "--tool-parser none"),
        ("none", [tool(strict=True)], "auto", "tools", "--tool-parser none"),
    ],
)
def test_tools_that_the_model_cannot_call_are_refused_with_what_to_do(name, tools, choice, param, words):
    with pytest.raises(ApiError, match=re.escape(words)) as raised:
        use(name, tools, choice)
    assert (raised.value.status, raised.value.param) == (422, param)
    assert use("none") is None, "calls stay text"


def noted(text):
    return f'<tool_call>\n{{"name": "note", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_regular_expression_of_a_custom_tool_holds_for_its_whole_input(choice):
    policy = use(tools=[custom("regex", r'a|b"\d+')], choice=choice)
    for text, fits in [("a", True), ('b"12', True), ("ab", False), ("xa", False), ("b12", False), ('b"12\n', False)]:
        assert allows(policy.constraint.grammar, noted(text)) == fits, text
    assert not use(tools=[custom("lark", "start: /a/")], choice="auto").constraint.grammar, "which is only described"
    assert allows(use(tools=[custom("lark", "start: /a/")], choice="required").constraint.grammar, noted("b"))


@pytest.mark.parametrize("nests", [True, False])
def test_the_grammar_of_a_custom_tool_is_described_to_the_model(nests):
    tool = custom("lark", "start: /a/")
    if not nests:
        tool["custom"]["format"] = {"type": "grammar"} | tool["custom"]["format"]["grammar"]
    function = as_function(tool)["function"]
    assert function["description"] == "Keeps a note\nThe input has to match this grammar (lark):\nstart: /a/"
    assert function["parameters"] == CUSTOM_INPUT


def test_a_forced_call_and_a_format_of_the_text_are_refused_together():
    with pytest.raises(ApiError, match="`response_format`") as raised:
        assert beside(use(choice="required"), "response_format", 'start: "a"').constraint
    assert raised.value.param == "tool_choice"


@pytest.mark.parametrize(("choice", "strict"), [("required", False), ("f", False), ("auto", True)])
def test_a_schema_that_is_too_large_to_be_enforced_is_refused_by_name(choice, strict):
    large = {"properties": {f"p{n}": {"type": "string", "description": "x" * 100} for n in range(1000)}}
    tools = [NOW, tool("f", large, strict=strict)]
    with pytest.raises(ApiError, match="of f must have at most 120000 bytes") as raised:
        assert use(tools=tools, choice=choice).constraint
    assert raised.value.param == "tools[1].function.parameters"
    with pytest.raises(ApiError, match="of f must have"):
        assert beside(use(tools=tools), "response_format", 'start: "a"').constraint
    assert not use(tools=[tool("f", large)]).constraint.grammar


# Answers


def sequences_of(folder, written, kind, parser_config, finish="eos_token", **options):
    """A model with a tokenizer of this kind, a request, and its sequences before they have the texts `written`, each with the
    ids and the finish reasons of its tokens."""
    tokenizer = Tokenizer(tiny_tokenizers.save(tokenizer_of(kind), folder))
    prepared = PreparedRequest("", parser_config=parser_config, sequences=len(written), **options)
    model = serving()
    model = replace(model, text=model.text._replace(tokenizer=tokenizer))
    tokens = []
    for n, text in enumerate(written):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ends = [None] * (len(ids) - 1) + [finish]
        taken = [Token(0, token, -1.0, [], end) for token, end in zip(ids, ends)]
        tokens.append((GeneratedSequence(tokenizer, TokenizedPrompt(prepared, [5], 99), n, n), taken))
    return model, prepared, tokens


def chat_answer(
    folder, written, kind="special", streams=False, parser_config=None, logprobs=False, finish="eos_token", tools=None
):
    """An answer whose sequences have the texts `written`, token by token: whole, or as the choices of its stream."""
    model, prepared, sequences = sequences_of(folder, written, kind, parser_config, finish, logprobs=logprobs)
    answer = ChatResponseWriter(prepared, model, ChatRequest(messages=[], logprobs=logprobs, stream=streams, tools=tools))
    events = b""
    for sequence, tokens in sequences:
        for token in tokens:
            pieces = sequence.take(token)
            sequence.pieces += pieces
            events += answer.events(sequence, pieces) if streams else b""
    if not streams:
        return json.loads(encode_json(answer.whole([sequence for sequence, _ in sequences])))["choices"]
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_written_whole_as_openai_writes_them(name, kind, tmp_path):
    (choice,) = chat_answer(tmp_path, [WRITTEN[name]], kind, parser_config=ParserConfig(use(name)))
    assert choice["finish_reason"] == "tool_calls"
    assert list(choice["message"]) == ["role", "content", "tool_calls"]
    assert choice["message"]["content"] is None
    for call, (called, arguments) in zip(choice["message"]["tool_calls"], BOTH, strict=True):
        assert call.keys() == {"id", "type", "function"} and call["type"] == "function"
        assert call["function"] == {"name": called, "arguments": json.dumps(arguments)}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_streamed_in_openais_sequence(kind, tmp_path):
    choices = chat_answer(tmp_path, ["Hm\n" + WRITTEN["hermes"]], kind, streams=True, parser_config=ParserConfig(use()))
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:] if "content" in delta) == "Hm\n"
    called = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(calls) == 1 for calls in called)
    for index, (name, arguments) in enumerate(BOTH):
        begin, *rest = [call for (call,) in called if call["index"] == index]
        assert re.fullmatch("call_[0-9a-f]{24}", begin.pop("id"))
        assert begin == {"index": index, "type": "function", "function": {"name": name, "arguments": ""}}
        assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
        assert json.loads("".join(call["function"]["arguments"] for call in rest)) == arguments
    assert deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


NOTED = 'One\n"two" \U0001f642.'


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_a_custom_tool_is_written_as_openai_writes_it(kind, tmp_path):
    written = f"Hm {noted(NOTED)}\n{CALLS['hermes'][0]}\n{noted('Two')}"
    tools = [*TOOLS, NOTE]
    config = ParserConfig(use(tools=tools))
    (choice,) = chat_answer(tmp_path, [written], kind, parser_config=config, tools=tools)
    first, second, third = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert first == {"id": first["id"], "type": "custom", "custom": {"name": "note", "input": NOTED}}
    assert (second["type"], second["function"]["name"]) == ("function", "weather")
    assert third["custom"] == {"name": "note", "input": "Two"}
    choices = chat_answer(tmp_path, [written], kind, streams=True, parser_config=config, tools=tools)
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]
    custom = [piece for piece in pieces if piece["index"] != 1]
    assert [piece.pop("id", "")[:5] for piece in custom] == ["call_", "", "call_", ""]
    assert custom == [
        {"index": 0, "type": "custom", "custom": {"name": "note", "input": ""}},
        {"index": 0, "custom": {"input": NOTED}},
        {"index": 2, "type": "custom", "custom": {"name": "note", "input": ""}},
        {"index": 2, "custom": {"input": "Two"}},
    ]
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_call_of_a_custom_tool_that_the_limit_of_tokens_cuts_has_the_input_so_far(tmp_path):
    text = noted(NOTED)
    text = text[: text.index("two")]
    config = ParserConfig(use(tools=[NOTE]))
    (choice,) = chat_answer(tmp_path, [text], parser_config=config, finish="length", tools=[NOTE])
    stream = chat_answer(tmp_path, [text], streams=True, parser_config=config, finish="length", tools=[NOTE])
    assert choice["finish_reason"] == stream[-1]["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "note", "input": 'One\n"'}
    assert stream[-2]["delta"]["tool_calls"] == [{"index": 0, "custom": {"input": 'One\n"'}}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("choice", "finish", "text", "reason"),
    [
        ("auto", "eos_token", CALLS["hermes"][0], "tool_calls"),
        ("auto", "stop_sequence", CALLS["hermes"][0], "tool_calls"),
        ("required", "eos_token", CALLS["hermes"][0], "tool_calls"),
        ("weather", "eos_token", CALLS["hermes"][0], "stop"),
        ("auto", "length", CALLS["hermes"][0], "length"),
        ("auto", "eos_token", "Hello", "stop"),
        ("auto", "eos_token", "<tool_call>x", "stop"),
        ("auto", "length", CALLS["hermes"][0][:-20], "length"),
    ],
)
def test_the_finish_reason_says_whether_tools_are_to_be_called(choice, finish, text, reason, streams, tmp_path):
    answer = chat_answer(tmp_path, [text], streams=streams, parser_config=ParserConfig(use(choice=choice)), finish=finish)
    assert answer[-1]["finish_reason"] == reason
    if not streams and choice in ("required", "weather"):
        assert answer[0]["message"]["content"] == ""
    if not streams and "weather" not in text:
        assert answer[0]["message"] == {"role": "assistant", "content": text}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_the_limit_of_tokens_cuts_is_given_as_far_as_it_goes(name, choice, kind, tmp_path):
    written = CALLS[name][0]
    text = written[: written.index("ern")]
    parser_config = ParserConfig(use(name, choice=choice))
    (choice,) = chat_answer(tmp_path, [text], kind, parser_config=parser_config, finish="length")
    stream = chat_answer(tmp_path, [text], kind, streams=True, parser_config=parser_config, finish="length")
    assert choice["finish_reason"] == stream[-1]["finish_reason"] == "length"
    assert not choice["message"]["content"] and not any(each["delta"].get("content") for each in stream)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"] == ("{" if name in LITERALS else '{"city": "B')
    pieces = [piece["function"] for each in stream for piece in each["delta"].get("tool_calls", [])]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["weather"]
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]


def dialect_answer(make, folder, name, text):
    """The whole answer and the events of the stream of a call that the limit of tokens cuts."""
    parser_config = ParserConfig(use(name, choice="required"))
    model, prepared, [(sequence, tokens)] = sequences_of(folder, [text], "special", parser_config, "length")
    streamed = make(prepared, model, True)
    events = b""
    for token in tokens:
        pieces = sequence.take(token)
        sequence.pieces += pieces
        events += streamed.events(sequence, pieces)
    events += streamed.stream_end([sequence])
    data = [line.removeprefix("data: ") for line in events.decode().split("\n") if line.startswith("data: ")]
    return json.loads(encode_json(make(prepared, model, False).whole([sequence]))), [json.loads(event) for event in data]


ONE_OF_TWO = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": ',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Bern", "days": ',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern", "days": ',
    "pythonic": '[weather(city="Bern", days=',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n",
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": ',
    "deepseek_v3": CALLS["deepseek_v3"][0].partition("}")[0] + ', "days": ',
    "deepseek_v31": CALLS["deepseek_v31"][0].partition("}")[0] + ', "days": ',
    "glm45": CALLS["glm45"][0].removesuffix("</tool_call>") + "<arg_key>days</arg_key>\n<arg_value>",
    "kimi_k2": CALLS["kimi_k2"][0].partition("}")[0] + ', "days": ',
    "minimax_m2": CALLS["minimax_m2"][0].removesuffix("</invoke>") + '<parameter name="days">',
    "lfm2": CALLS["lfm2"][0].removesuffix(")") + ", days=",
    "phi4_mini_json": CALLS["phi4_mini_json"][0].partition("}")[0] + ', "days": ',
    "openai": CALLS["openai"][0].partition("}")[0] + ', "days": ',
    "gemma4": CALLS["gemma4"][0].partition("}")[0] + ",days:",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_is_an_incomplete_item_of_a_response(name, tmp_path):
    def make(prepared, model, streams):
        request = ResponsesRequest(input="", stream=streams)
        return ResponsesWriter(prepared, model, request, ResponsesTools(request, []))

    whole, events = dialect_answer(make, tmp_path, name, ONE_OF_TWO[name])
    (item,) = whole["output"]
    assert (whole["status"], item["status"], item["type"], item["name"]) == (
        "incomplete",
        "incomplete",
        "function_call",
        "weather",
    )
    assert item["arguments"].startswith('{"city": "Bern"') and not item["arguments"].endswith("}")
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for own in ("id", "call_id"):
        done.pop(own), item.pop(own)
    assert done == item


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_has_in_a_message_the_arguments_that_are_complete(name, tmp_path):
    def make(prepared, model, streams):
        request = MessagesRequest(messages=[], max_tokens=9, stream=streams)
        return MessagesResponseWriter(prepared, model, request, MessagesTools(request))

    whole, events = dialect_answer(make, tmp_path, name, ONE_OF_TWO[name])
    (block,) = whole["content"]
    assert whole["stop_reason"] == "max_tokens"
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Bern"})
    (begun,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert (begun["type"], begun["name"]) == ("tool_use", "weather")
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert complete_members("".join(pieces)) == {"city": "Bern"}
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["max_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_each_choice_is_read_by_itself(streams, tmp_path):
    choices = chat_answer(tmp_path, [CALLS["hermes"][0], "Hello"], streams=streams, parser_config=ParserConfig(use()))
    first, second = ([choice for choice in choices if choice["index"] == index] for index in range(2))
    assert (first[-1]["finish_reason"], second[-1]["finish_reason"]) == ("tool_calls", "stop")
    texts = [choice.get("delta", choice.get("message")).get("content") or "" for choice in second]
    assert "".join(texts) == "Hello"


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_is_written_under_both_of_its_names(kind, tmp_path):
    parser_config = ParserConfig(None, thinking_of("before"))
    (choice,) = chat_answer(tmp_path, ["<think>Hm</think>Yes"], kind, parser_config=parser_config)
    assert choice["message"] == {"role": "assistant", "content": "Yes", "reasoning": "Hm", "reasoning_content": "Hm"}
    deltas = [
        c["delta"] for c in chat_answer(tmp_path, ["<think>Hm</think>Yes"], kind, streams=True, parser_config=parser_config)
    ]
    for name, written in (("content", "Yes"), ("reasoning", "Hm"), ("reasoning_content", "Hm")):
        assert "".join(delta.get(name, "") for delta in deltas) == written


@pytest.mark.parametrize("parser_config", [ParserConfig(use()), ParserConfig(use(), thinking_of("before"))])
def test_every_token_has_its_log_probability_whatever_is_held_back(parser_config, tmp_path):
    written = "<think>Hm</think>Hello" + CALLS["hermes"][0]
    (choice,) = chat_answer(tmp_path, [written], "text", parser_config=parser_config, logprobs=True)
    stream = chat_answer(tmp_path, [written], "text", streams=True, parser_config=parser_config, logprobs=True)
    streamed = [token for each in stream for token in (each["logprobs"] or {"content": []})["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert "".join(token["token"] for token in streamed) == written


# Over HTTP


def served_with(serve, monkeypatch, template, **settings):
    monkeypatch.setattr(served_app, "WINDOW", 600)
    made = serve(**settings)
    writing = served_app.TEMPLATE.replace("{{ m.content }}", "{{ m.content }}" + LLAMA_CALLS)
    (made.folder / "chat_template.jinja").write_text(template + writing)
    return made.get_ready()


USER = {"role": "user", "content": "Hi"}
SHORT = tool(
    parameters={"properties": {"day": {"enum": ["Monday", "Sunday"]}}, "required": ["day"], "additionalProperties": False}
)
LLAMA = "{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}"
LLAMA_CALLS = (
    '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}"
)


def streamed(response):
    events = [line.removeprefix("data: ") for line in response.get_data(as_text=True).split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), ("weather", "stop")])
def test_a_forced_call_is_answered_whole_and_streamed(serve, monkeypatch, choice, reason):
    served = served_with(serve, monkeypatch, LLAMA)
    body = {"messages": [USER], "temperature": 0, "tools": [SHORT], "tool_choice": choice, "parallel_tool_calls": False}
    answer = served.post("/v1/chat/completions", body).json["choices"][0]
    assert answer["finish_reason"] == reason
    message = answer["message"]
    assert list(message) == ["role", "content", "tool_calls"] and message["content"] == ""
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]).keys() == {"day"}
    stream = streamed(served.post("/v1/chat/completions", body | {"stream": True}))
    first, begin, *pieces, last = [choice["delta"] for choice in stream]
    assert first == {"role": "assistant", "content": ""}
    (begun,) = begin["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", begun.pop("id"))
    assert begun == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert all(piece["tool_calls"][0].keys() == {"index", "function"} for piece in pieces)
    arguments = [piece["tool_calls"][0]["function"] for piece in pieces]
    assert all(piece.keys() == {"arguments"} for piece in arguments)
    assert "".join(piece["arguments"] for piece in arguments) == call["function"]["arguments"]
    assert last == {} and stream[-1]["finish_reason"] == reason


def test_tools_are_printed_by_the_template_whatever_the_choice_is(serve, monkeypatch):
    served = served_with(serve, monkeypatch, LLAMA)
    for choice in ("auto", "none"):
        body = {"messages": [USER], "tools": [SHORT], "tool_choice": choice}
        assert served.post("/chat_tokenize", body).json["templated_text"].endswith("]<|python_tag|>u:Hi;a:")


@pytest.mark.parametrize(
    ("body", "param"), [({"tool_choice": "required"}, "tool_choice"), ({"tools": [tool(strict=True)]}, "tools")]
)
def test_a_device_that_samples_cannot_constrain_calls(serve, monkeypatch, body, param):
    served = served_with(serve, monkeypatch, LLAMA, sampling="device")
    body = {"messages": [USER], "tools": [SHORT], "max_tokens": 3} | body
    error = served.post("/v1/chat/completions", body).json["error"]
    assert error["param"] == param and "--sampling host" in error["message"]
    assert served.post("/v1/chat/completions", {"messages": [USER], "tools": [SHORT], "max_tokens": 3}).status_code == 200


def test_a_model_without_a_place_for_tools_refuses_them_where_calls_are_not_read(serve):
    served = serve(tool_parser="none").get_ready()
    error = served.post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS}).json["error"]
    assert error["param"] == "tools" and "no place for tools" in error["message"]
    assert served.post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}).status_code == 200


REMOTE = {"type": "object", "properties": {"city": {"$ref": "https://example.com/schema"}}}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [SHORT, tool("g", REMOTE)], "tool_choice": "required"}, "tools[1].function.parameters", "of g cannot be"),
        (
            {"tools": [SHORT, tool("g", REMOTE)], "response_format": {"type": "json_object"}},
            "tools[1].function.parameters",
            "example.com",
        ),
        (
            {"tools": [SHORT], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": REMOTE}}},
            "response_format.json_schema.schema",
            "example.com",
        ),
        (
            {"tools": [tool("g", REMOTE), custom("regex", "(")]},
            "tools[1].custom.format",
            "of note .*/input/pattern `",
        ),
    ],
)
def test_a_tool_whose_schema_does_not_compile_is_named(serve, monkeypatch, more, param, words):
    served = served_with(serve, monkeypatch, LLAMA)
    response = served.post("/v1/chat/completions", {"messages": [USER], **more})
    assert (response.status_code, response.json["error"]["param"]) == (400, param)
    assert re.search(words, response.json["error"]["message"])


def test_a_custom_tool_of_a_chat_is_called_and_taken_back(serve, monkeypatch):
    served = served_with(serve, monkeypatch, LLAMA)
    tool = custom("regex", "sun|rain")
    body = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "custom", "custom": {"name": "note"}}}
    message = served.post("/v1/chat/completions", body).json["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["custom"] == {"name": "note", "input": call["custom"]["input"]} and call["custom"]["input"] in ("sun", "rain")
    body["messages"] = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "Kept"}]
    prompt = served.post("/chat_tokenize", body).json["templated_text"]
    assert json.dumps({"name": "note", "description": as_function(tool)["function"]["description"]})[:-1] in prompt


SET = {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}}}
MESSAGES_SET = {"name": "g", "input_schema": SET}


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        ("/v1/chat/completions", {"tool_choice": "required"}, "uniqueItems"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "both"),
        ("/v1/chat/completions", {}, None),  # calls are not constrained
        ("/v1/chat/completions", {"tools": [tool("f", strict=True), tool("g", SET)]}, None),  # nor are those of g
        ("/v1/messages", {"tools": [MESSAGES_SET], "tool_choice": {"type": "any"}}, "uniqueItems"),
    ],
)
def test_keywords_that_cannot_be_enforced_refuse_no_tool(serve, monkeypatch, path, more, named):
    served = served_with(serve, monkeypatch, LLAMA)
    body = {"messages": [USER], "max_tokens": 3, "tools": [SHORT, tool("g", SET)], **more}
    response = served.post(path, body)
    assert response.status_code == 200
    assert response.headers.get("x-schema-not-enforced") == ("not, uniqueItems" if named == "both" else named)


DATED = {
    "minProperties": 1,
    "properties": {"day": {"type": "string", "pattern": "^1"}, "hour": {"type": "integer", "maximum": 9}},
}


@pytest.mark.parametrize("more", [{"tools": [tool("f", DATED, strict=True)]}, {"tool_choice": "required"}])
def test_a_format_that_does_not_write_json_names_what_it_does_not_enforce(serve, monkeypatch, more):
    served = served_with(serve, monkeypatch, LLAMA, tool_parser="qwen3_coder")
    body = {"messages": [USER], "max_tokens": 3, "tools": [tool("f", DATED)], **more}
    response = served.post("/v1/chat/completions", body)
    assert (response.status_code, response.headers.get("x-schema-not-enforced")) == (200, "minProperties, pattern")


@pytest.mark.parametrize(
    ("path", "tools", "param"),
    [
        ("/v1/chat/completions", [SHORT, tool("g", SET, strict=True)], "tools[1].function.parameters"),
        ("/v1/responses", [{"type": "function", "name": "g", "parameters": SET, "strict": True}], "tools[0].parameters"),
        ("/v1/messages", [MESSAGES_SET | {"strict": True}], "tools[0].input_schema"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}])
def test_with_strict_an_error_names_the_tool_and_the_place(serve, monkeypatch, path, tools, param, more):
    served = served_with(serve, monkeypatch, LLAMA)
    if path == "/v1/messages":
        more = {"max_tokens": 3} | ({"tool_choice": {"type": "any"}} if more else {})
    response = served.post(path, {"messages": [USER], "input": "Hi", "tools": tools, **more})
    assert response.status_code == 400
    wanted = f"`{param}` of g has keywords that cannot be enforced: /properties/tags/uniqueItems; .*`strict: false`"
    assert re.search(wanted.replace("[", r"\["), response.json["error"]["message"])


def test_a_tool_parser_may_be_set(serve, monkeypatch):
    served = served_with(serve, monkeypatch, LLAMA, tool_parser="pythonic")
    body = {"messages": [USER], "temperature": 0, "tools": [SHORT], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = served.post("/v1/chat/completions", body).json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"day"}


def test_a_format_begins_after_thinking_which_is_a_field_of_its_own(serve, monkeypatch):
    served = served_with(serve, monkeypatch, "", reasoning_parser="think")
    (served.folder / "chat_template.jinja").write_text("")
    body = {"messages": [USER], "temperature": 0, "response_format": {"type": "regex", "value": "ab{3}"}}
    body["logit_bias"] = {str(served.tokenizer.token_to_id("<")): -100}  # or the model could think
    message = served.post("/v1/chat/completions", body).json["choices"][0]["message"]
    assert message["content"] == "abbb"


# Tools that an API defines and the client runs.
DEFINITIONS = {name: row.definition for name, row in BUILT_IN.items()}
for name, definition in CLIENT_TOOLS.items():
    for date in ("20241022", "20260801"):
        DEFINITIONS[f"{name}_{date}"] = definition(date, {})


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_can_enforce_the_schema_of_every_tool(form):
    for name, definition in DEFINITIONS.items():
        function = {"name": name, **definition}
        policy = use(form, [{"type": "function", "function": function}], "required")
        grammars().compile(policy.constraint.grammar)


def test_every_description_and_schema_is_complete():
    for name, definition in DEFINITIONS.items():
        properties = definition["parameters"]["properties"]
        assert properties and set(definition["parameters"]["required"]) <= properties.keys(), name
        assert definition["description"].endswith((".", ").")), name
