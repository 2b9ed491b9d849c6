"""What requests ask of reasoning, and its opaque form in responses."""

from dataclasses import replace

import pytest
import templates
from asked import ON_DEVICE, USER, record_renders, serving

from api.anthropic import messages
from api.chats.reasoning import seal, unseal
from api.http.errors import ApiError
from api.openai import chat, responses
from text.grammar import MAX_GRAMMAR_BYTES
from text.output.reasoning_formats import REASONING_FORMATS, THINK, ModelReasoning
from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities

CLOSE_ID = 7


def thinking(served):
    """A model that thinks, whose markers are tokens."""
    return replace(served, text=served.text._replace(reasoning=ModelReasoning(THINK, {"</think>": CLOSE_ID}.get)))


MAKE = {"chat": chat.chat, "responses": responses.responses, "messages": messages.messages}
BODIES = {
    "chat": {"messages": [USER]},
    "responses": {"input": "Hi"},
    "messages": {"messages": [USER], "max_tokens": 50},
}


def efforts(effort):
    return [
        ("chat", {"reasoning_effort": effort}),
        ("responses", {"reasoning": {"effort": effort}}),
        ("messages", {"output_config": {"effort": effort}}),
    ]


@pytest.mark.parametrize(("dialect", "fields"), [*efforts("none"), ("messages", {"thinking": {"type": "disabled"}})])
def test_no_effort_turns_reasoning_off(dialect, fields, monkeypatch):
    rendered = record_renders(monkeypatch)
    MAKE[dialect](BODIES[dialect] | fields, serving())
    ((_, options),) = rendered
    assert options == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(("dialect", "fields"), efforts("high"))
def test_an_effort_is_a_variable_of_the_template(dialect, fields, monkeypatch):
    rendered = record_renders(monkeypatch)
    MAKE[dialect](BODIES[dialect] | fields, serving())
    MAKE[dialect](BODIES[dialect] | fields | {"chat_template_kwargs": {"enable_thinking": None, "a": 1}}, serving())
    on = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high", "low_effort": False}
    assert [options for _, options in rendered] == [on, on | {"enable_thinking": None, "a": 1}]


@pytest.mark.parametrize(
    ("effort", "known"), [("minimal", "low"), ("high", "high"), ("max", "high"), ("xhigh", "high"), ("new", "new")]
)
@pytest.mark.parametrize("strongest", ["high", "xhigh"])
def test_an_effort_that_the_template_does_not_name_is_the_nearest_one(strongest, effort, known, monkeypatch):
    rendered = record_renders(monkeypatch)
    served = serving()
    known = strongest if known == "high" else known
    template = ChatTemplate(f"{{{{ '{strongest}' }}}}", {})
    served = replace(served, text=served.text._replace(template=template))
    chat.chat(BODIES["chat"] | {"reasoning_effort": effort}, served)
    assert rendered[0][1]["reasoning_effort"] == known


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", {"thinking_token_budget": 5}),
        ("chat", {"thinking_budget_tokens": 5}),
        ("chat", {"thinking_budget": 5}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
)
def test_a_budget_limits_reasoning(dialect, fields):
    body = BODIES[dialect] | {"max_tokens": 9} | fields
    (made,) = MAKE[dialect](body, thinking(serving())).requests
    assert "thought[max_tokens=5]" in made.grammar and f"<[{CLOSE_ID}]>" in made.grammar
    (without,) = MAKE[dialect](body, serving()).requests
    assert without.grammar == "", "a model that does not think keeps within any budget"
    (far,) = MAKE[dialect](body | {"max_tokens": 5}, thinking(serving())).requests
    assert far.grammar == "", "the output ends before"


def test_a_negative_budget_is_none():
    (made,) = chat.chat(BODIES["chat"] | {"thinking_token_budget": -1}, thinking(serving())).requests
    assert made.grammar == ""


@pytest.mark.parametrize(
    ("dialect", "fields", "name"),
    [
        ("chat", {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ],
)
def test_a_budget_needs_host_sampling(dialect, fields, name):
    with pytest.raises(Exception, match=f"`{name}` needs --sampling host"):
        MAKE[dialect](BODIES[dialect] | fields, thinking(serving(ON_DEVICE)))


@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_object"}}], ids=["alone", "with a format"])
def test_a_budget_needs_a_closing_marker_that_is_a_token(more):
    served = serving()
    served = replace(served, text=served.text._replace(reasoning=ModelReasoning(THINK)))
    body = BODIES["chat"] | {"thinking_token_budget": 5} | more
    with pytest.raises(ApiError, match="`</think>` is not one token") as refused:
        chat.chat(body, served)
    assert refused.value.param == "thinking_token_budget"


def test_a_format_that_is_too_large_with_the_header_of_its_message_is_refused_by_name():
    served = serving()
    harmony = next(form for form in REASONING_FORMATS if form.answer)
    served = replace(served, text=served.text._replace(reasoning=ModelReasoning(harmony)))
    schema = {"type": "object", "description": "x" * (MAX_GRAMMAR_BYTES - 100)}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(ApiError, match="must have at most") as refused:
        chat.chat(BODIES["chat"] | {"response_format": form}, served)
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("text", ["", "Hm.", "é😀\n" * 1000])
def test_sealed_reasoning_is_opaque_and_can_be_read_back(text):
    sealed = seal(text)
    assert sealed and (not text or text not in sealed)
    assert unseal(sealed) == text


@pytest.mark.parametrize("sealed", [None, 5, "", "gAAAA", "v1.!!", "v1.SG0", "v1.//8=", "v2.SG0=", "v1.é"])
def test_what_another_server_sealed_is_skipped(sealed):
    assert unseal(sealed) == ""


def test_sealed_text_is_never_shorter_than_what_it_becomes():
    assert len(seal("a" * 100_000)) >= 100_000


@pytest.mark.parametrize(
    ("dialect", "history"),
    [
        ("responses", {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": seal("Hm.")}, USER]}),
        (
            "messages",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": seal("Hm.")}]},
                    USER,
                ]
            },
        ),
    ],
)
def test_sealed_reasoning_is_earlier_reasoning(dialect, history, monkeypatch):
    rendered = record_renders(monkeypatch)
    MAKE[dialect](BODIES[dialect] | history, serving())
    (((_, answer, _), _options),) = rendered
    assert answer["reasoning_content"] == "Hm."


def test_reasoning_before_a_call_is_in_the_prompt_of_gpt_oss():
    template = templates.collected("gpt-oss")
    if template is None:
        pytest.skip("the published templates are not installed")
    served = serving()
    text = served.text._replace(template=template, capabilities=TemplateCapabilities.of(template))
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "", "reasoning_content": "Quokka", "tool_calls": [call]}
    body = {"messages": [USER, calling, {"role": "tool", "tool_call_id": "call_1", "content": "sun"}]}
    made = chat.chat(body, replace(served, text=text))
    assert "<|channel|>analysis<|message|>Quokka<|end|>" in made.requests[0].prompt
