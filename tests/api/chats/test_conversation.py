"""Chats of every API: messages as the model's template reads them, and the prepared that a chat makes."""

import functools
import json
import re
import time
from dataclasses import replace

import pytest
from asked import CONFIG, DIALECTS, USER, answer_to, nameless, prepared, record_renders, refusal, serving, written
from tool_calls import FORMATS, TOOLS, WRITTEN, use

from api.chats.content import PARTS, ContentReader
from api.chats.conversation import ROLES
from text.output.parser import OutputParser
from text.output.reasoning_formats import THINK, ModelReasoning
from text.template import RESERVED, ChatTemplate, renderer
from text.template_capabilities import TemplateCapabilities

ASSISTANT = {"role": "assistant", "content": "Well "}
UNSEEN = "[image omitted: this server reads text only]"


def prompt_of(*messages):
    return prepared("chat", messages=messages).prompt


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([USER], "u:Hi;a:"),
        ([{"role": "system", "content": "Be brief"}, USER], "s:Be brief;u:Hi;a:"),
        ([{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}], "u:Hi;a:"),
        ([{"role": "user", "content": []}], "u:;a:"),
        ([{"role": "function", "content": "a", "name": "n", "tool_call_id": "1", "refusal": None}], "t:an1;a:"),
        ([{"role": "developer", "content": "a"}, {"role": "ctx", "content": "b"}], "s:a;u:b;a:"),
        ([{"role": "tool", "content": "a", "tool_call_id": "1"}], "t:a1;a:"),
        ([{"role": "user", "content": [{"type": "image_url"}, {"type": "x"}]}], f"u:{UNSEEN};a:"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "H"}, {"type": "output_text", "text": "i"}]}], "u:Hi;a:"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}], f"u:{UNSEEN};a:"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], f"u:{UNSEEN.replace('image', 'file', 1)};a:"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}, USER], "a:No;u:Hi;a:"),
        ([{"role": "assistant", "content": None, "refusal": "No"}, USER], "a:No;u:Hi;a:"),
        ([{"role": "assistant", "reasoning_content": "Hm."}, USER], "a:;u:Hi;a:"),  # truncated before its text
        ([{"role": "assistant", "audio": {"id": "audio_1"}}, USER], "a:;u:Hi;a:"),
        ([{"role": "tool", "tool_call_id": "1"}], "t:1;a:"),  # a tool that returned nothing
        ([{"role": "function", "content": None, "name": "n"}], "t:nn;a:"),
        ([{"role": "function", "content": "a", "name": "n"}], "t:ann;a:"),  # the result of a `function_call`
        ([{"role": "ipython", "content": "a"}], "i:a;a:"),  # the template has the word in quotes
        ([USER, ASSISTANT], "u:Hi;a:Well "),  # which is continued, with its spaces
    ],
)
def test_a_chat_is_what_its_template_makes_of_its_messages(messages, prompt):
    assert prompt_of(*messages) == prompt
    assert not prepared("chat", messages=messages).add_special_tokens, "the template has put them"


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "`messages` cannot be empty"),
        ([{"role": "user"}], "messages[0]", "`messages[0]` needs `content`"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "needs `text`"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]", "needs `type`"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type", "must be a string"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text", "must be a string"),
        ([{"role": "assistant", "function_call": {}}], "messages[0].function_call", "needs `name`"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function",
            "needs `name`",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": 5}}]}],
            "messages[0].tool_calls[0].function.name",
            "must be a string",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"input": "x"}}]}],
            "messages[0].tool_calls[0].custom",
            "needs `name`",
        ),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0]", "needs `custom`"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
            "messages[0].tool_calls[0].custom",
            "needs `input`",
        ),
        ([{"content": "x"}], "messages[0].role", "missing required field `role`"),
        ([USER, {"role": "<|end|>", "content": "x"}], "messages[1].role", rf"{', '.join(ROLES)}, .* Given: '<\|end\|>'"),
        ("Hi", "messages", "messages: Expected `array`, got `str`"),
        ([{"role": "tool", "content": "x"}], None, "Template error: no id of `messages`"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_with_the_reason(messages, param, words):
    error = refusal("chat", messages=messages)
    assert (error.status, error.param) == (422, param)
    assert re.search(words if "Given" in words else re.escape(words), str(error))


def of_call(dialect, arguments):
    """A body whose history has a call with these arguments."""
    if dialect == "chat":
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    if dialect == "responses":
        return {"input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}]}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
    return {"messages": [USER, {"role": "assistant", "content": [block]}]}


@pytest.mark.parametrize(
    ("dialect", "arguments", "read"),
    [
        *(
            (dialect, arguments, read)
            for dialect in ("chat", "responses")
            for arguments, read in [
                ('{"a": 1}', {"a": 1}),
                (None, {}),
                ("", {}),
                (" null ", {}),
                ('{"a": {"b": [1, 2', {"a": {"b": [1]}}),
                ('{"a": "x", "b": "y', {"a": "x"}),
            ]
        ),
        ("chat", {"a": 1}, {"a": 1}),
        ("messages", None, {}),
        ("messages", {"a": 1}, {"a": 1}),
    ],
)
def test_a_template_gets_the_arguments_of_a_call_as_an_object(dialect, arguments, read, monkeypatch):
    rendered = record_renders(monkeypatch)
    prepared(dialect, **of_call(dialect, arguments))
    (((_, message), _),) = rendered
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


@pytest.mark.parametrize(
    ("call", "read"),
    [
        ({"function_call": {"name": "f", "arguments": '{"a": 1}'}}, {"name": "f", "arguments": {"a": 1}}),
        (
            {"tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "ls"}}]},
            {"name": "f", "arguments": {"input": "ls"}},
        ),
    ],
)
def test_calls_in_an_older_and_in_a_custom_form_are_calls_of_functions(call, read, monkeypatch):
    rendered = record_renders(monkeypatch)
    prompt_of({"role": "assistant", "content": None} | call)
    (((message,), _),) = rendered
    assert [each["function"] for each in message["tool_calls"]] == [read]


@pytest.mark.parametrize(
    ("dialect", "arguments", "param"),
    [
        *(
            (dialect, arguments, param)
            for dialect, param in [
                ("chat", "messages[1].tool_calls[0].function.arguments"),
                ("responses", "input[1].arguments"),
            ]
            for arguments in (
                '{"a": ' * 99_999,
                "{'a': b}",
                "{not json",
                '{"a": /b',
                "nonsense",
                '"text"',
                "[1]",
                "7",
                "[" * 9999,
                [1],
                7,
            )
        ),
        ("messages", "text", "messages[1].content[0].input"),
        ("messages", [1], "messages[1].content[0].input"),
    ],
)
def test_arguments_that_are_no_object_are_refused_by_the_name_of_the_field(dialect, arguments, param):
    error = refusal(dialect, **of_call(dialect, arguments))
    assert error.status == 422
    # msgspec leaves out the numbers.
    assert error.param in (param, re.sub(r"\d+", "...", param))


# Needs the arguments of calls as an object, and leaves out nothing.
STRICT = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% for key, value in c.function.arguments.items() %}"
    "<{{ key }}>{{ value }}{% endfor %}{% endfor %}</{{ m.role }}>{% endfor %}<assistant>"
)


@functools.cache
def calling(name, thinking):
    """A model that writes calls in this format."""
    template = ChatTemplate(STRICT, {})
    served = serving()
    text = served.text._replace(
        template=template,
        tools=use(name).model,
        capabilities=TemplateCapabilities.of(template),
        reasoning=ModelReasoning(THINK if thinking else None),
    )
    return replace(served, text=text)


def sent_back(dialect, answer):
    """What a client puts into its history of an answer: items; texts; names and arguments of calls."""
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        texts = [message["content"] or "", message.get("reasoning_content", "")]
        return [message], texts, [(call["name"], call["arguments"]) for call in calls]
    if dialect == "messages":
        calls = [(block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"]
        texts = [block.get("text", block.get("thinking", "")) for block in answer["content"]]
        return [{"role": "assistant", "content": answer["content"]}], texts, calls
    items = answer["output"]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    texts = [part["text"] for item in items for part in item.get("content", ())]
    return items, texts, calls


TOOLS_OF = {
    "chat": TOOLS,
    "responses": [{"type": "function"} | tool["function"] for tool in TOOLS],
    "messages": [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
        for tool in TOOLS
    ],
}


@pytest.mark.parametrize("before", ["", "Text. ", "<think>Thought.</think>"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dialect", TOOLS_OF)
def test_an_answer_that_max_tokens_has_truncated_after_any_token_is_taken_back(dialect, name, before, monkeypatch):
    monkeypatch.setattr("text.template.rendered", renderer(99_999))  # without its process
    make, body = DIALECTS[dialect]
    history = "input" if dialect == "responses" else "messages"
    served = calling(name, thinking="<think>" in before)
    whole = before + WRITTEN[name]
    asked_for = body | {history: [USER], "tools": TOOLS_OF[dialect]}
    for end in [token.end() for token in re.finditer(r"\w+|\W", whole)]:
        answer = written(make(asked_for, served), whole[:end], "length")
        items, texts, calls = sent_back(dialect, answer)
        prompt = make(asked_for | {history: [USER, *items, USER]}, served).requests[0].prompt
        values = ["Bern" for _, arguments in calls if '"Bern"' in arguments]
        missing = [text for text in [*texts, *values, *(f"<call>{called}" for called, _ in calls)] if text not in prompt]
        assert not missing, (whole[:end], prompt)


@pytest.mark.parametrize("stop", [None, "Done"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", TOOLS_OF)
def test_each_token_is_parsed_once(dialect, streams, stop, monkeypatch):
    parsed = []
    push = OutputParser.push

    def counted(parser, text):
        parsed.append(text)
        return push(parser, text)

    make, body = DIALECTS[dialect]
    body = body | {"stream": streams, "tools": TOOLS_OF[dialect]}
    if stop and dialect != "responses":
        body |= {"stop_sequences" if dialect == "messages" else "stop": [stop]}
    answer = make(body, calling("hermes", thinking=True))
    text = "<think>Hm.</think>Text. " + WRITTEN["hermes"]
    monkeypatch.setattr(OutputParser, "push", counted)
    told = json.dumps(written(answer, text, "eos_token"))
    assert "weather" in told and "now" in told
    assert "".join(parsed) == text
    assert len(parsed) == len(text) + 2  # a byte a token, the EOS token, and the end


CONVERSATIONS = {  # with what the assistant thought before its call
    "chat": {"messages": [USER, ASSISTANT | {"reasoning_content": "Hm."}, USER]},
    "chat, vLLM's name": {"messages": [USER, ASSISTANT | {"reasoning": "Hm."}, USER]},
    "responses": {
        "input": [
            USER,
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
            ASSISTANT,
            USER,
        ]
    },
    "responses, summary": {
        "input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, ASSISTANT, USER]
    },
    "responses, in two items": {
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "H"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "m."}]},
            ASSISTANT,
            USER,
        ]
    },
    "messages": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Well "}],
            },
            USER,
        ],
    },
}


@pytest.mark.parametrize("dialect", CONVERSATIONS)
def test_earlier_thinking_is_given_to_the_template(dialect, monkeypatch):
    rendered = record_renders(monkeypatch)
    prepared(dialect.partition(",")[0], **CONVERSATIONS[dialect])
    (((first, answer, last), _options),) = rendered
    assert [first, last] == [USER, USER]
    assert answer | {"reasoning_content": answer["reasoning_content"].replace("\n", "")} == ASSISTANT | {
        "reasoning_content": "Hm."
    }


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_variables_for_the_template_are_the_requests_before_the_servers(dialect, monkeypatch):
    rendered = record_renders(monkeypatch)
    config = replace(CONFIG, chat_template_kwargs='{"enable_thinking": false, "style": "brief"}')
    prepared(dialect, config=config)
    prepared(dialect, config=config, chat_template_kwargs={"enable_thinking": True, "names": ["a", {"b": [None]}]})
    assert [options for _, options in rendered] == [
        {"enable_thinking": False, "style": "brief"},
        {"enable_thinking": True, "style": "brief", "names": ["a", {"b": [None]}]},
    ]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    "options",
    [*({name: "x"} for name in sorted(RESERVED)), {"no name": 1}, {"_x": 1}],
    ids=str,
)
def test_what_is_no_variable_for_clients_is_refused(dialect, options):
    error = refusal(dialect, chat_template_kwargs=options)
    assert error.param == "chat_template_kwargs" and next(iter(options)) in str(error)


def test_a_role_that_the_template_names_and_leaves_out_is_refused_by_name(monkeypatch):
    source = (
        "{# 'critic' #}{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    )
    without = serving().text._replace(template=ChatTemplate(source, {}))
    monkeypatch.setattr("asked.text", lambda: without)
    error = refusal("chat", messages=[USER, {"role": "critic", "content": "No"}])
    assert error.param == "messages"
    assert str(error).endswith("has a role that the model's chat template leaves out. Given: 'critic'")


def test_more_messages_than_a_prompt_has_tokens_are_refused():
    assert prepared("chat", messages=[USER] * 100)
    error = refusal("chat", messages=[USER] * 101)
    assert re.search(r"`messages` has 101 messages, more than the 100 tokens .*\(--max-input-tokens", str(error))


def test_a_model_without_a_template_says_so(monkeypatch):
    without = serving().text._replace(template=None)
    monkeypatch.setattr("asked.text", lambda: without)
    error = refusal("chat")
    assert (error.status, str(error), error.error_type) == (422, "Template error: template not found", "template_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 9, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_what_a_chat_does_not_support_is_rejected_by_name(fields, param):
    error = refusal("chat", **fields)
    assert (error.status, error.param) == (422, param)
    assert f"`{param}`" in str(error)


def test_a_chat_asks_for_what_its_fields_say():
    asked = prepared("chat", logprobs=True, top_logprobs=20, max_tokens=50, max_completion_tokens=12)
    assert (asked.logprobs, asked.top_n_tokens, asked.max_new_tokens) == (True, 20, 12)
    assert [prepared("chat", logprobs=wanted).logprobs for wanted in (None, False, True)] == [False, False, True]


CHAT = {"messages": [USER, ASSISTANT, USER], "temperature": 0, "max_tokens": 7}
FORMS = {
    "vertex": {"instances": [CHAT]},
    "responses": {"input": CHAT["messages"], "temperature": 0, "max_output_tokens": 7},
    "messages": CHAT,
}


@pytest.mark.parametrize("dialect", FORMS)
def test_every_dialect_with_chats_makes_the_same_job_of_one(dialect):
    (made,) = answer_to(dialect, FORMS[dialect]).requests
    (expected,) = answer_to("chat", CHAT).requests
    assert nameless(made) == nameless(expected)


MANY = range(12_000)
NAMED = [{"type": "function", "name": f"f{n}"} for n in MANY]
LONG = {
    "responses": {"input": [USER, *({"type": "function_call", "call_id": "1", "name": "g"} for _ in MANY)], "tools": NAMED},
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "tool_reference", "tool_name": f"f{n}"} for n in reversed(MANY)]}],
        "tools": [{"name": f"f{n}", "input_schema": {}} for n in MANY],
    },
}


@pytest.mark.parametrize("dialect", LONG)
def test_many_tools_are_found_in_time_that_grows_with_their_number(dialect, monkeypatch):
    record_renders(monkeypatch)
    body = json.dumps(DIALECTS[dialect][1] | LONG[dialect])
    started_at = time.thread_time()
    answer_to(dialect, body.encode())
    assert time.thread_time() - started_at < 5  # 0.5 on an idle processor; half a minute where each looks at each


def test_the_text_of_many_parts_is_made_in_time_that_grows_with_its_length():
    started_at = time.thread_time()
    assert ContentReader(PARTS).text("content", ["a"] * 400_000) == "\n".join(["a"] * 400_000)
    assert time.thread_time() - started_at < 3  # 0.4 on an idle processor; 20 where each part copies the text before it
