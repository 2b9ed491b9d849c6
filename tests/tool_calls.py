"""Calls of tools as models write them in each format, and the chat templates that show which format it is."""

import tiny_tokenizers
from tokenizers import AddedToken

from api.tools import tool_policy
from text import tool_formats
from text.reasoning import Thinking
from text.stream import Piece
from text.tool_formats import ModelTools

FORMS = {form.name: form for form in (*tool_formats.FORMATS, tool_formats.AS_TEXT)}

# Written for these tests, in the style of the published ones.
TEMPLATES = {
    "hermes": (
        "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n"
        'Write calls as <tool_call>\n{"name": <function-name>, "arguments": <object>}\n</tool_call><|im_end|>{% endif %}'
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant\n"
    ),
    "llama3_json": (
        "{% if tools is not none %}<|start_header_id|>system<|end_header_id|>Environment: ipython{% for t in tools %}{{ t }}"
        '{% endfor %}{{ \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}{% endif %}'
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        '{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}{{ m.content }}{% endfor %}'
    ),
    "pythonic": (
        "{% if tools %}Put calls in the format of [func_name1(params_name1=params_value1), func_name2(params)]"
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|start_header_id|>{% for m in messages %}{{ m.content }}"
        "{% endfor %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}{{ c.id }}{% endfor %}]'
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.tool_call_id }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    "qwen3_coder": (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}\nReply with\n"
        "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
        "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    "mistral_v11": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]{% else %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
    ),
    "deepseek_v3": (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '\n' if not loop.first }}"
        "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>"
        "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜Assistant｜>"
    ),
    "deepseek_v31": (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
        "{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
        "<｜Assistant｜></think>"
    ),
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# What each format makes of `weather(city="Bern")` and `now()`.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ('{"name": "weather", "parameters": {"city": "Bern"}}', '; {"name": "now", "parameters": {}}'),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}', ', {"name": "now", "arguments": {}}'),
    "pythonic": ('[weather(city="Bern")', ", now()"),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "mistral_v11": ('[TOOL_CALLS]weather[ARGS]{"city": "Bern"}', "[TOOL_CALLS]now[ARGS]{}"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Bern"}\n```<｜tool▁call▁end｜>',
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bern"}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ),
}
ENDS = {
    "mistral": "]",
    "pythonic": "]",
    "deepseek_v3": "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁end｜>",
}
FORMATS = list(CALLS)
WRITTEN = {name: "".join(CALLS[name]) + ENDS.get(name, "") for name in FORMATS}
BOTH = [("weather", {"city": "Bern"}), ("now", {})]


def tool(name="weather", parameters=WEATHER, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [tool(), NOW]


def use(name="hermes", tools=TOOLS, choice=None, parallel=None, **known):
    """What a chat with these tools may call, of a model that writes calls in the format of this name."""
    return tool_policy(tools, choice, parallel, ModelTools(FORMS.get(name), **known))


THINKING = ("<think>", "</think>")


def thinking_of(begin):
    """The reasoning of an output before whose first token the prompt has, or has not, opened it."""
    return {"": None, "before": Thinking(), "inside": Thinking(is_open=True)}[begin]


def parsed(parser_config, text, is_truncated=False):
    """A complete output of this text."""
    return parser_config.whole([Piece(0, text, None, False)], is_truncated)


KINDS = ["text", "added", "special"]  # what the markers are in the tokenizer


def tokenizer_of(kind):
    tokenizer = tiny_tokenizers.byte_level()
    if kind != "text":
        markers = [marker for form in FORMS.values() for marker in form.markers] + [*THINKING]
        tokenizer.add_tokens([AddedToken(marker, special=kind == "special", normalized=False) for marker in markers])
    return tokenizer
