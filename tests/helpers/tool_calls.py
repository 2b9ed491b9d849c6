"""Calls of tools as models write them in each format, and the chat templates that show which format it is."""

import dataclasses
from typing import NamedTuple

import tiny_tokenizers
from tokenizers import AddedToken

from api.chats.formats import Constraint
from api.chats.tools import OfferedTools, tool_policy
from api.http.fields import CHAT_FIELDS
from text.output import tool_formats
from text.output.call_syntaxes import ModelTools
from text.output.parser import Content, Reasoning
from text.output.reasoning_formats import Thinking
from text.stream import Piece

FORMS = {form.name: form for form in (*tool_formats.TOOL_FORMATS, tool_formats.AS_TEXT)}

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
        '{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}{{ m.content }}'
        '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% endfor %}{% endfor %}"
    ),
    "pythonic": (
        "{% if tools %}Put calls in the format of [func_name1(params_name1=params_value1), func_name2(params)]"
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}\n"
        "{{ m.content }}{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|eot_id|>{% endfor %}<|start_header_id|>assistant\n"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}'
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ ', ' if not loop.last }}{% endfor %}]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.tool_call_id }}[{{ m.content }}][/TOOL_RESULTS]"
        "{% else %}{{ m.content }}{% endif %}"
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
    "glm45": (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}"
        "\n</tool_call>{% endfor %}{% endfor %}<|assistant|>\n"
    ),
    # An id stands for the name: the server gives it one with the name in it.
    "kimi_k2": (
        "{{ tools | tojson if tools }}{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
        "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
        "{% if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}<|im_end|>{% endfor %}<|im_assistant|>"
    ),
    "minimax_m2": (
        "{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>\n{% endfor %}"
        "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}\n"
        "<minimax:tool_call>\n{% for c in m.tool_calls %}"
        '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
        "[e~[\n{% endfor %}]~b]ai\n<think>\n"
    ),
    "lfm2": (
        "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    "phi4_mini_json": (
        "{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}"
        "{% endfor %}]<|/tool_call|>{% endif %}<|end|>{% endfor %}<|assistant|>"
    ),
    # As gpt-oss', it writes one call of a message and describes a function before it names it.
    "openai": (
        "{% for t in tools or [] %}// {{ t.function.description }}\ntype {{ t.function.name }} = any\n{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
        "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
        "{{ call.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
    ),
    "gemma4": (
        '{% macro literal(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}'
        "{ {{- pairs(value) -}} }{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
        "{% macro pairs(values) %}{% for k, v in values | dictsort %}"
        "{{ k }}:{{ literal(v) }}{{ ',' if not loop.last }}{% endfor %}{% endmacro %}"
        "{% for tool in tools or [] %}<|tool>{{ tool | tojson }}<tool|>{% endfor %}{% for m in messages %}<|turn>{{ m.role }}\n"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{ {{- pairs(c.function.arguments) -}} }"
        "<tool_call|>{% endfor %}{{ m.content }}<turn|>\n{% endfor %}<|turn>model\n"
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
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
        "\n<tool_call>now\n</tool_call>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Bern"}<|tool_call_end|>',
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n</invoke>',
        '\n<invoke name="now">\n</invoke>',
    ),
    "lfm2": ('<|tool_call_start|>[weather(city="Bern")', ", now()"),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bern"}}',
        ', {"name": "now", "arguments": {}}',
    ),
    "openai": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}',
        "<|call|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    ),
    "gemma4": ('<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>', "<|tool_call>call:now{}<tool_call|>"),
}
ENDS = {
    "mistral": "]",
    "pythonic": "]",
    "deepseek_v3": "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_end|>",
    "minimax_m2": "\n</minimax:tool_call>",
    "lfm2": "]<|tool_call_end|>",
    "phi4_mini_json": "]",
}
PYTHON = ("pythonic", "lfm2")  # calls are written as in Python
LITERALS = (*PYTHON, "gemma4", "qwen3_coder", "glm45", "minimax_m2")  # arguments are not JSON
# Of formats in tags: what begins a call, a parameter, what ends the call.
TAGS = {
    "qwen3_coder": ("<tool_call>\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"),
    "glm45": ("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{}">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
}
FORMATS = list(CALLS)
WRITTEN = {name: "".join(CALLS[name]) + ENDS.get(name, "") for name in FORMATS}
BOTH = [("weather", {"city": "Bern"}), ("now", {})]


def argument(name, key, value, raw):
    """An argument as a call in this format has it; raw: it stands there as it is, without quotes."""
    if name in TAGS:
        return TAGS[name][1].format(key, value)
    if name == "gemma4":
        return f"{key}:{value}" if raw else f'{key}:<|"|>{value}<|"|>'
    written = value if raw else f'"{value}"'
    return f"{key}={written}" if name in PYTHON else f'"{key}": {written}'


def with_argument(name, key="city", value="Bern", raw=False, function="weather"):
    """The first of CALLS, with another argument and function; key "": without an argument."""
    written = CALLS[name][0] + ENDS.get(name, "")
    other = argument(name, key, value, raw) if key else ""
    return written.replace(argument(name, "city", "Bern", False), other).replace("weather", function)


def in_tags(name, function="weather", **values):
    """A call in a format that puts values in tags."""
    begin, parameter, end = TAGS[name]
    return begin.format(function) + "".join(parameter.format(*item) for item in values.items()) + end


def tool(name="weather", parameters=WEATHER, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [tool(), NOW]


def use(name="hermes", tools=TOOLS, choice=None, parallel=None, **known):
    """What a chat with these tools may call, of a model that writes calls in the format of this name."""
    return tool_policy(OfferedTools(tools).listed, choice, parallel, ModelTools(FORMS.get(name), **known), CHAT_FIELDS)


def beside(policy, name, grammar):
    """The same for a chat whose content the field of this name constrains to a grammar."""
    return dataclasses.replace(policy, answer=Constraint(name, grammar))


THINKING = ("<think>", "</think>")


def thinking_of(begin):
    """The reasoning of an output before whose first token the prompt has, or has not, opened it."""
    return {"": None, "before": Thinking(), "inside": Thinking(is_open=True)}[begin]


class Called(NamedTuple):
    id: str
    name: str
    arguments: str


class Whole(NamedTuple):
    """A complete output."""

    content: str
    reasoning: str
    calls: list[Called]
    is_truncated: bool = False  # in the last call


def whole(output):
    calls = [Called(call.id, call.name, call.text) for call in output.calls]
    is_truncated = bool(calls) and not output.has_calls
    return Whole(output.text_of(Content), output.text_of(Reasoning), calls, is_truncated)


def parsed_pieces(parser_config, pieces, is_truncated=False):
    parser = parser_config.parser()
    output = parser.output
    for piece in pieces:
        parser.read(piece, piece.text)
    parser.finish(is_truncated)
    return whole(output)


def parsed(parser_config, text, is_truncated=False):
    """A complete output of this text."""
    return parsed_pieces(parser_config, [Piece(0, text, None, False, [])], is_truncated)


# What is a token in the models' own tokenizers, besides the markers around calls.
TOKENS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"]
TOKENS += ["<|end|>", "<|call|>", '<|"|>', "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
KINDS = ["text", "added", "special"]  # what the markers are in the tokenizer


def tokenizer_of(kind):
    tokenizer = tiny_tokenizers.byte_level()
    if kind != "text":
        markers = dict.fromkeys([*TOKENS, *(marker for form in FORMS.values() for marker in form.markers), *THINKING])
        tokenizer.add_tokens([AddedToken(marker, special=kind == "special", normalized=False) for marker in markers])
    return tokenizer


BERN = [("weather", {"city": "Bern"})]
NOW_CALL = [("now", {})]
HERMES = "<tool_call>\n{}\n</tool_call>"
CODER = "<tool_call>\n<function=weather>\n{}\n</tool_call>"
CITY = "<parameter=city>\nBern\n</parameter>\n"
GEMMA = "<|tool_call>call:weather{}<tool_call|>"
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'

# Calls that models have written almost right: what is wrong, the format, the text, and the calls that it is.
MISWRITTEN = [
    ("no arguments, or null, or an empty text", "hermes", HERMES.format('{"name": "now"}'), NOW_CALL),
    ("no arguments, or null, or an empty text", "hermes", HERMES.format('{"name": "now", "arguments": null}'), NOW_CALL),
    ("no arguments, or null, or an empty text", "mistral", '[TOOL_CALLS] [{"name": "now", "arguments": ""}]', NOW_CALL),
    ("OpenAI's form of a call", "hermes", HERMES.format(f'{{"type": "function", "function": {CALL}}}'), BERN),
    ("`function` for `name`", "llama3_json", '{"function": "weather", "parameters": {"city": "Bern"}}', BERN),
    ("a fence around the call", "hermes", HERMES.format(f"```json\n{CALL}\n```"), BERN),
    ("Python's literals", "hermes", HERMES.format("{'name': 'weather', 'arguments': {'city': 'Bern'}}"), BERN),
    (
        "Python's literals",
        "mistral_v11",
        "[TOOL_CALLS]weather[ARGS]{'city': 'Bern', 'unit': None}",
        [("weather", {"city": "Bern", "unit": None})],
    ),
    (
        "escapes that JSON does not have",
        "hermes",
        HERMES.format(r'{"name": "weather", "arguments": {"city": "C:\Users\me"}}'),
        [("weather", {"city": r"C:\Users\me"})],
    ),
    (
        "line breaks in strings, commas too many, missing brackets",
        "hermes",
        HERMES.format('{"name": "weather", "arguments": {"city": "Be\nrn",}'),
        [("weather", {"city": "Be\nrn"})],
    ),
    (
        "arguments as JSON in a string",
        "hermes",
        HERMES.format('{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}'),
        BERN,
    ),
    ("several calls between the markers", "hermes", HERMES.format(f'{CALL}\n{{"name": "now", "arguments": {{}}}}'), BOTH),
    ("several calls between the markers", "hermes", HERMES.format(f'[{CALL}, {{"name": "now"}}]'), BOTH),
    ("a comment behind the call", "hermes", HERMES.format(f"{CALL} // as asked"), BERN),
    ("no opening marker", "qwen3_coder", f"I look.\n<function=weather>\n{CITY}</function>\n</tool_call>", BERN),
    ("no opening marker", "minimax_m2", '<invoke name="weather">\n<parameter name="city">Bern</parameter>\n</invoke>', BERN),
    ("no opening marker", "glm45", WRITTEN["glm45"].split("\n<tool_call>")[0].removeprefix("<tool_call>"), BERN),
    ("no opening marker", "gemma4", 'call:weather{city:<|"|>Bern<|"|>}<tool_call|>', BERN),
    (
        "no opening marker",
        "kimi_k2",
        '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|>',
        BERN,
    ),
    ("no opening marker", "lfm2", '[weather(city="Bern")]', BERN),
    (
        "quotes and line breaks in strings as they are",
        "lfm2",
        "<|tool_call_start|>[weather(city='Be\n'r'n', days=2), now()]<|tool_call_end|>",
        [("weather", {"city": "Be\n'r'n", "days": 2}), *NOW_CALL],
    ),
    (
        "names that Python does not have",
        "lfm2",
        '<|tool_call_start|>[weather(from="Bern", in-days=[2])]<|tool_call_end|>',
        [("weather", {"from": "Bern", "in-days": [2]})],
    ),
    (
        "no `functions.`, or one too many",
        "openai",
        '<|channel|>commentary to=weather <|constrain|>json<|message|>{"city": "Bern"}',
        BERN,
    ),
    ("no `functions.`, or one too many", "kimi_k2", WRITTEN["kimi_k2"].replace("functions.", ""), BOTH),
    ("no `functions.`, or one too many", "hermes", HERMES.format('{"name": "functions.now", "arguments": {}}'), NOW_CALL),
    ("an id without an index", "kimi_k2", WRITTEN["kimi_k2"].replace(":0", "").replace(":1", ""), BOTH),
    (
        "no tag after a value",
        "qwen3_coder",
        CODER.format("<parameter=city>\nBern\n<parameter=days>\n2\n</parameter>\n</function>"),
        [("weather", {"city": "Bern", "days": 2})],
    ),
    ("no tag after a value", "qwen3_coder", CODER.format("<parameter=city>\nBern\n</function>"), BERN),
    ("no tag after a value", "glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern\n</tool_call>", BERN),
    ("no tag after the call", "qwen3_coder", CODER.format(CITY), BERN),
    ("spaces in tags", "qwen3_coder", CODER.format("<parameter = city >\nBern\n</parameter>\n</function>"), BERN),
    (
        "strings and keys in JSON's quotes",
        "gemma4",
        GEMMA.format('{"city": "Bern", "days": 2}'),
        [("weather", {"city": "Bern", "days": 2})],
    ),
    (
        "strings without quotes, or in single ones",
        "gemma4",
        GEMMA.format("{city: Sankt Gallen, unit: 'C'}"),
        [("weather", {"city": "Sankt Gallen", "unit": "C"})],
    ),
    ("`=` for a colon", "gemma4", GEMMA.format('{city=<|"|>Bern<|"|>}'), BERN),
    ("another format: JSON", "pythonic", CALL, BERN),
    ("another format: JSON", "lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", BERN),
    ("another format: JSON", "qwen3_coder", HERMES.format(CALL), BERN),
    ("another format: JSON", "glm45", HERMES.format(CALL), BERN),
    ("another format: Python", "llama3_json", '[weather(city="Bern"), now()]', BOTH),
    ("another format: Python", "hermes", HERMES.format('weather(city="Bern")'), BERN),
    ("another format: a name in front of JSON", "hermes", HERMES.format('weather {"city": "Bern"}'), BERN),
    ("another format: a name in front of JSON", "deepseek_v3", WRITTEN["deepseek_v31"], BOTH),
]
