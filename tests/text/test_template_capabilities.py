"""What a chat template takes is found out by trying it."""

from dataclasses import fields

import pytest

from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities

EACH = "{% for m in messages %}"
END = "{% endfor %}"
PLAIN = EACH + "<{{ m.role }}>{{ m.content }}" + END
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
FULL = TOOLS + EACH + "<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}" + CALLS + END
DESCRIBED_FIRST = "// {{ t.function.description }} {{ t.function.name }}"
OF_CALLS = {"calls", "text_of_calls", "several_calls", "user_after_result"}


def missing(source, placeholder=""):
    """The capabilities that a template has not, but for `thinking`."""
    found = TemplateCapabilities.of(ChatTemplate(source, {}))
    return {field.name for field in fields(found) if getattr(found, field.name) is False} - {"thinking"}


def without(condition, source=FULL):
    """The template with a rule that every message has to keep."""
    return source.replace(EACH, EACH + "{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (FULL, {"developer"}),
        (PLAIN, {"developer", "tools"} | OF_CALLS),
        (FULL.replace("{{ m.reasoning_content }}", ""), {"developer"}),
        (FULL.replace(TOOLS, "{% if tools %}{% endif %}"), {"developer", "tools"}),
        (FULL.replace(TOOLS, "{% if tools %}{{ tools[0].function.name }}{% endif %}"), {"developer", "tools"}),
        (without("m.role not in ['user', 'assistant', 'system', 'tool']"), {"developer"}),
        (
            PLAIN.replace("<{{ m.role }}>", "{% if m.role in ['user', 'developer'] %}").replace(END, "{% endif %}" + END),
            {"system", "several_system", "later_system", "no_user", "assistants", "tools"} | OF_CALLS,
        ),
        (without("m.role == 'system' and not loop.first"), {"developer", "several_system", "later_system"}),
        (without("m.role == 'system'"), {"developer", "system", "several_system", "later_system"}),
        (without("not loop.first and m.role == 'user' and loop.previtem.role == 'user'"), {"developer", "users"}),
        (
            without("not loop.first and m.role == 'assistant' and loop.previtem.role == 'assistant'"),
            {"developer", "assistants"},
        ),
        (without("not loop.first and m.role == 'user' and loop.previtem.role == 'tool'"), {"developer", "user_after_result"}),
        (without("m.role == 'tool'"), {"developer"} | OF_CALLS),
        (without("m.tool_calls | length > 1"), {"developer", "several_calls"}),
        (FULL.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"), {"developer", "several_calls"}),
        (FULL.replace(TOOLS, "{% for t in tools or [] %}" + DESCRIBED_FIRST + "{% endfor %}"), {"developer"}),
        (FULL.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), {"developer", "text_of_calls"}),
        # The last system message wins, and stands in front of all.
        (
            "{% set ns = namespace(s='') %}" + EACH + "{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}" + END
            + "{{ ns.s }}" + EACH + "{% if m.role != 'system' %}{{ m.content }}{% endif %}" + END,
            {"developer", "several_system", "later_system", "tools"} | OF_CALLS,
        ),
        # The system text moves with the user's newest message.
        (
            "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}" + EACH
            + "{% if m.role != 'system' %}{% if m == users[-1] and messages[0].role == 'system' %}"
            "{{ messages[0].content }}{% endif %}{{ m.content }}{% endif %}" + END,
            {"developer", "system", "several_system", "later_system", "tools"} | OF_CALLS,
        ),
        # As Mistral's: the system text goes to the last message, if it is a user's.
        (
            EACH + "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
            "{{ messages[0].content }}{% endif %}"
            "{% if m.role != 'system' %}{{ m.content }}{% endif %}" + END,
            {"developer", "system", "several_system", "later_system", "tools"} | OF_CALLS,
        ),
    ],
)  # fmt: skip
def test_what_a_template_loses_or_refuses_is_found(source, expected):
    assert missing(source) == expected


@pytest.mark.parametrize("source", ["", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_of_a_template_that_writes_no_chat_nothing_is_known(source):
    assert TemplateCapabilities.of(ChatTemplate(source, {})) == TemplateCapabilities()


@pytest.mark.parametrize(
    ("source", "has_thinking"),
    [
        (FULL, False),
        (FULL.replace("reasoning_content", "thinking"), True),
        # As gpt-oss'.
        (without("m.content and m.thinking", FULL.replace("reasoning_content", "thinking")), False),
    ],
)
def test_reasoning_beside_the_content_may_be_called_thinking(source, has_thinking):
    assert TemplateCapabilities.of(ChatTemplate(source, {})).thinking == has_thinking


EACH_PART = "{% for p in m.content %}"
IN_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}" + EACH_PART + "{{ p.text or '<image>' }}{% endfor %}{% endif %}"
)
FIRST_THE_IMAGES = IN_PARTS.replace(EACH_PART, "{% for p in m.content if not p.text %}<image>{% endfor %}" + EACH_PART)
FIRST_THE_IMAGES = FIRST_THE_IMAGES.replace("{{ p.text or '<image>' }}", "{{ p.text }}")


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        (FULL, set()),  # which prints a list of parts as Python does
        (FULL.replace("{{ m.content }}", IN_PARTS), {"system", "user", "assistant", "tool"}),
        (FULL.replace("{{ m.content }}", FIRST_THE_IMAGES), {"system", "user", "assistant", "tool"}),
        (without("m.role != 'user' and m.content is not string").replace("{{ m.content }}", IN_PARTS), {"user"}),
        (FULL.replace("{{ m.content }}", IN_PARTS.replace("p.text or '<image>'", "'<image>' if not p.text")), set()),
    ],
)
def test_the_roles_in_whose_messages_a_template_writes_images_are_found(source, roles):
    assert TemplateCapabilities.of(ChatTemplate(source, {}), "<image>").image_roles == roles
    assert TemplateCapabilities.of(ChatTemplate(source, {})).image_roles == set()
