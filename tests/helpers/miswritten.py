"""Calls that models have written almost right: what is wrong, the format, the text, and the calls that it is."""

from tool_calls import BOTH, WRITTEN

BERN = [("weather", {"city": "Bern"})]
NOW = [("now", {})]
HERMES = "<tool_call>\n{}\n</tool_call>"
CODER = "<tool_call>\n<function=weather>\n{}\n</tool_call>"
CITY = "<parameter=city>\nBern\n</parameter>\n"
GEMMA = "<|tool_call>call:weather{}<tool_call|>"
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'

MISWRITTEN = [
    ("no arguments, or null, or an empty text", "hermes", HERMES.format('{"name": "now"}'), NOW),
    ("no arguments, or null, or an empty text", "hermes", HERMES.format('{"name": "now", "arguments": null}'), NOW),
    ("no arguments, or null, or an empty text", "mistral", '[TOOL_CALLS] [{"name": "now", "arguments": ""}]', NOW),
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
    (
        "no `functions.`, or one too many",
        "openai",
        '<|channel|>commentary to=weather <|constrain|>json<|message|>{"city": "Bern"}',
        BERN,
    ),
    ("no `functions.`, or one too many", "kimi_k2", WRITTEN["kimi_k2"].replace("functions.", ""), BOTH),
    ("no `functions.`, or one too many", "hermes", HERMES.format('{"name": "functions.now", "arguments": {}}'), NOW),
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
