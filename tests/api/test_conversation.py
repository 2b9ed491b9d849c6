"""Chats of every API: messages as the model's template reads them, and the prepared that a chat makes."""

import re
from dataclasses import replace

import pytest
from asked import CONFIG, USER, answer_to, nameless, prepared, record_renders, refusal, serving

from api.conversation import ROLES
from text.template import RESERVED, ChatTemplate

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
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}, USER], "a:No;u:Hi;a:"),
        ([{"role": "assistant", "content": None, "refusal": "No"}, USER], "a:No;u:Hi;a:"),
        ([{"role": "assistant", "reasoning_content": "Hm."}, USER], "a:;u:Hi;a:"),  # truncated before its text
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


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("nonsense", "nonsense"), ("[" * 9999, "[" * 9999)],
)
def test_a_template_gets_the_arguments_of_a_call_as_an_object_where_they_can_be_read(arguments, read, monkeypatch):
    rendered = record_renders(monkeypatch)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    prompt_of({"role": "assistant", "content": None, "tool_calls": [call]})
    (((message,), _),) = rendered
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
    assert [messages for messages, _ in rendered] == [[USER, ASSISTANT | {"reasoning_content": "Hm."}, USER]]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_variables_for_the_template_are_the_requests_before_the_servers(dialect, monkeypatch):
    rendered = record_renders(monkeypatch)
    config = replace(CONFIG, chat_template_kwargs='{"enable_thinking": false, "style": "brief"}')
    prepared(dialect, config=config)
    prepared(dialect, config=config, chat_template_kwargs={"enable_thinking": True, "names": ["a", 1, None]})
    assert [options for _, options in rendered] == [
        {"enable_thinking": False, "style": "brief"},
        {"enable_thinking": True, "style": "brief", "names": ["a", 1, None]},
    ]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    "options",
    [*({name: "x"} for name in sorted(RESERVED)), {"no name": 1}, {"_x": 1}, {"x": {}}, {"x": [[1]]}, {"x": [{}]}],
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
