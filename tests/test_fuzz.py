"""Whatever anybody sends: HTTP bodies and texts.

A few seconds of it run with the other tests, always the same cases. RANDOM_EXAMPLES=10000 runs as many new ones in each test.
"""

import json

import msgspec
import pytest
import tiny_tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from api.routes import openapi_document
from config import DEMO_MODEL
from protocol import FromWeb, SubmitRequests, encode
from text.stream import TextStream, detokenizer_for, prompt_texts
from text.tokenizer import Tokenizer

LONGEST_ERROR = 1000  # bytes: a client's own words are not sent back to it in full
pytestmark = pytest.mark.hypothesis
fuzz = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


# JSON, and what looks like it, as text: so that it may say what no Python value says.


def mostly(values, others, share=12):
    """`others` once in `share` times; `|` would count the branches inside of either."""
    return st.integers(1, share).flatmap(lambda drawn: others if drawn == share else values)


NUMBERS = mostly(
    st.one_of(
        st.integers(-3, 12).map(str),
        st.integers().map(str),
        st.floats(allow_nan=False, allow_infinity=False).map(json.dumps),
        st.sampled_from(["1e308", "1e-999", "-0", "0.0", "1E+2", "2" * 400, "9" * 5000]),
        st.sampled_from([n + d for n in (2**31, 2**32, 2**63, 2**64, -(2**31), -(2**63)) for d in (-1, 0, 1)]).map(str),
    ),
    st.sampled_from(["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x10", "-"]),
)
STRINGS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["<eos>", "user", "assistant", "system", "forbidden", "text", "1", "256", "257", "\x00", "\ufffd"]),
)
HALVES = st.text(st.characters(codec=None), max_size=6)  # surrogates that have no other half may be among them
TEXTS = mostly(
    st.one_of(STRINGS.map(json.dumps), STRINGS.map(lambda text: json.dumps(text, ensure_ascii=False))),
    st.one_of(
        HALVES.map(json.dumps),
        HALVES.map(lambda text: json.dumps(text, ensure_ascii=False)),
        st.sampled_from(['"\\ud800"', '"\\udc00\\ud800"', '"\\u00"', '"\\x"', '"\t"', '"', "'a'"]),
    ),
)
WORDS = mostly(st.sampled_from(["null", "true", "false", "[]", "{}"]), st.sampled_from(["nan", "undefined", "", "True"]))
ATOMS = st.integers(1, 3).flatmap(lambda drawn: [NUMBERS, TEXTS, WORDS][drawn - 1])


def array_of(values, **sizes):
    return st.lists(values, **sizes).map(lambda items: "[" + ",".join(items) + "]")


def object_of(keys, values, **sizes):
    """Keys may come twice."""
    return st.lists(st.tuples(keys, values), **sizes).map(written)


def written(pairs):
    return "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"


DEPTHS = st.sampled_from([10, 200, 990, 1000, 1010, 3000])  # about Python's limit, and far beyond it
DEEP = st.tuples(DEPTHS, st.sampled_from([("[", "]"), ('{"a":', "}"), ("[", ""), ('{"type":[', "]}")])).map(
    lambda drawn: drawn[1][0] * drawn[0] + "1" * (drawn[1] != ("[", "")) + drawn[1][1] * drawn[0]
)
VALUES = st.recursive(ATOMS, lambda values: array_of(values, max_size=3) | object_of(TEXTS, values, max_size=3), max_leaves=6)
ANYTHING = st.integers(0, 9).flatmap(lambda drawn: VALUES if drawn < 9 else DEEP)


def field(pair):
    name, values = pair
    return st.tuples(st.just(json.dumps(name)), mostly(values, ANYTHING))


def body_of(required, known):
    """A body that has what it must have, mostly, and some of what it may have, mostly of the right type."""
    must = [field(pair) for pair in required.items()]
    stray = st.tuples(TEXTS, ANYTHING)
    may = mostly(st.one_of([field(pair) for pair in known.items()]), stray) if known else stray
    return st.tuples(st.tuples(*must), st.lists(may, max_size=4)).map(lambda parts: written([*parts[0], *parts[1]]))


SHORT = mostly(st.sampled_from(['"ab"', '"a"', '"  "', '"The quick"', '"é€😀"', '"<eos>"']), TEXTS)
COUNT = mostly(st.integers(1, 4).map(str), NUMBERS)
SHARE = mostly(st.sampled_from(["0.1", "0.9", "1", "1.0", "1e-9", "1e-320", "null"]), NUMBERS)
SWITCH = st.sampled_from(["true", "false", "null"])
STOPS = array_of(SHORT, max_size=5)
BIASES = object_of(st.sampled_from(['"0"', '"1"', '"256"', '"257"', '"-1"', '"1e3"', '"٣"', '""']), COUNT, max_size=3)
CALLS = array_of(object_of(st.just('"function"'), object_of(st.just('"arguments"'), TEXTS, max_size=1), max_size=1), max_size=2)
PARTS, INPUT_PARTS = (
    array_of(body_of({"type": mostly(st.just(kind), TEXTS), "text": SHORT}, {"text": SHORT}), max_size=3)
    for kind in ('"text"', '"input_text"')
)
ROLES = mostly(st.sampled_from(['"user"', '"assistant"', '"system"', '"forbidden"', '"tool"']), TEXTS)
MESSAGE = body_of(
    {"role": ROLES, "content": st.one_of(SHORT, SHORT, PARTS)},
    {"name": SHORT, "tool_calls": CALLS, "tool_call_id": SHORT, "content": PARTS, "role": ROLES},
)
NOTHING = st.sampled_from(["null", "[]", "{}", '"none"', '["text"]', '{"type":"text"}'])
LIKELY = {"boolean": SWITCH, "integer": COUNT, "number": SHARE, "string": SHORT}
API = openapi_document()
TYPES = API["components"]["schemas"]


def known_of(name, **given):
    """A strategy for each field of a type of the document, by the field's own type where none is given."""
    known = {}
    for field_name, schema in TYPES[name]["properties"].items():
        kinds = [kind.get("type") for kind in schema.get("anyOf", [schema])]
        likely = [LIKELY[kind] for kind in kinds if kind in LIKELY]
        known[field_name] = likely[0] if likely else mostly(NOTHING, ANYTHING, 3)
    return known | given


PARAMETERS = body_of({}, known_of("Parameters", stop=STOPS, max_new_tokens=COUNT, grammar=ANYTHING))
OPENAI = {"max_tokens": COUNT, "stop": STOPS | SHORT, "logit_bias": BIASES, "n": st.integers(0, 3).map(str)}
IDS = array_of(COUNT, max_size=4)
PROMPTS = st.one_of(SHORT, array_of(SHORT, max_size=3), IDS, array_of(IDS, max_size=3))
ITEM = body_of(
    {"role": ROLES, "content": st.one_of(SHORT, INPUT_PARTS)},
    {"type": st.sampled_from(['"message"', '"function_call"', '"function_call_output"', '"reasoning"']) | TEXTS}
    | dict.fromkeys(("call_id", "name", "arguments", "output"), SHORT),
)
OBJECT = mostly(object_of(TEXTS, ANYTHING, max_size=2), ANYTHING)
BLOCK_KINDS = (
    "text",
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "image",
    "document",
    "web_search_tool_result",
)
BLOCK = body_of(
    {"type": mostly(st.sampled_from(BLOCK_KINDS).map(json.dumps), TEXTS), "text": SHORT},
    dict.fromkeys(("id", "name", "tool_use_id", "thinking", "signature"), SHORT)
    | {"input": OBJECT, "content": SHORT | PARTS, "is_error": SWITCH, "source": OBJECT},
)
TURN = body_of({"role": ROLES, "content": st.one_of(SHORT, array_of(BLOCK, max_size=3))}, {"role": ROLES})
TYPED = body_of(
    {"name": SHORT, "input_schema": mostly(st.just('{"type":"object"}'), ANYTHING)}, {"type": SHORT, "strict": SWITCH}
)
CHOICE = body_of({"type": mostly(st.sampled_from(['"auto"', '"any"', '"tool"', '"none"']), TEXTS)}, {"name": SHORT})
CLAUDE = {
    "system": SHORT | PARTS,
    "tools": array_of(TYPED, max_size=2),
    "tool_choice": CHOICE,
    "thinking": body_of(
        {"type": mostly(st.sampled_from(['"enabled"', '"disabled"', '"adaptive"']), TEXTS)}, {"budget_tokens": COUNT}
    ),
    "output_config": body_of(
        {"format": body_of({"type": st.just('"json_schema"'), "schema": ANYTHING}, {})}, {"effort": SHORT}
    ),
}
TURNS = mostly(array_of(TURN, min_size=1, max_size=3), st.just("[]"))
NATIVE = body_of({"inputs": SHORT, "parameters": PARAMETERS}, {"stream": SWITCH, "inputs": SHORT})
CHAT = body_of({"messages": array_of(MESSAGE, max_size=3), "max_tokens": COUNT}, known_of("ChatRequest", **OPENAI))
BODIES = {
    "GenerateRequest": NATIVE,
    "ChatRequest": CHAT,
    "CompletionRequest": body_of(
        {"prompt": PROMPTS, "max_tokens": COUNT}, known_of("CompletionRequest", prompt=PROMPTS, **OPENAI)
    ),
    "ResponsesRequest": body_of(
        {"input": SHORT | array_of(ITEM, max_size=3), "max_output_tokens": COUNT}, known_of("ResponsesRequest")
    ),
    "MessagesRequest": body_of(
        {"messages": TURNS, "max_tokens": COUNT}, known_of("MessagesRequest", stop_sequences=STOPS, **CLAUDE)
    ),
    "CountRequest": body_of({"messages": TURNS}, known_of("CountRequest", **CLAUDE)),
    "VertexRequest": body_of({"instances": array_of(NATIVE | CHAT, max_size=3)}, {}),
}


def bodies_of(content):
    """Bodies of the types that a route takes as JSON by the document."""
    schema = content["application/json"]["schema"]
    names = [kind["$ref"].rpartition("/")[2] for kind in schema.get("anyOf", [schema])]
    return st.one_of([BODIES[name] if name in BODIES else body_of({}, known_of(name)) for name in names])


CONTENTS = {path: methods["post"]["requestBody"]["content"] for path, methods in API["paths"].items() if "post" in methods}
POSTS = {path: bodies_of(content) for path, content in CONTENTS.items() if "application/json" in content}


def encoded(text):
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw, bodies):
    data = bytearray(draw(bodies))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


def posts(bodies):
    bodies = bodies.map(encoded)
    return mostly(bodies, st.one_of(damaged(bodies), ANYTHING.map(encoded), st.binary(max_size=40)), share=4)


def strict(text):
    """JSON as the standard has it: no NaN, no Infinity, no half of a character."""
    read = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    json.dumps(read, ensure_ascii=False).encode()
    return read


SHAPES = {"/invocations": {"openai", "native"}, "/v1/messages": {"anthropic"}, "/v1/messages/count_tokens": {"anthropic"}}


def assert_error(answer, shapes):
    if "anthropic" in shapes:
        assert set(answer) == {"type", "error", "request_id"} and answer["request_id"]
        assert set(answer["error"]) == {"type", "message"} and answer["error"]["message"]
    elif isinstance(answer.get("error"), dict):
        assert "openai" in shapes
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"] == "invalid_request_error"
    else:
        assert "native" in shapes
        assert set(answer) == {"error", "error_type"}
        assert answer["error"] and answer["error_type"]


def assert_answered(response, route):
    """A whole answer, a stream that ends as one should, or an error that is the client's and has the route's shape."""
    body = response.get_data()
    if response.status_code == 200 and response.mimetype == "text/event-stream":
        events = [event for event in body.decode().split("\n\n") if event != ":"]  # a comment, where a token was long in coming
        if route in ("/v1/responses", "/v1/messages"):
            events = [event.partition("\n")[2] for event in events]  # behind the name of the event
        assert events.pop() == "" and all(event.startswith("data: ") for event in events)
        if events[-1] == "data: [DONE]":
            events.pop()
        answer = [strict(event.removeprefix("data: ")) for event in events]
        assert answer and not any("error" in event for event in answer)
        return
    assert response.mimetype == "application/json"
    answer = strict(body)
    if response.status_code == 200:
        return
    is_switched_off = response.status_code == 403 and "adapter" in route
    assert is_switched_off or response.status_code in (400, 413, 422), answer
    assert len(body) < LONGEST_ERROR
    assert_error(answer, SHAPES.get(route) or ({"openai"} if route.startswith("/v1/") else {"native"}))


@pytest.fixture
def roomy(serve):
    served = serve(payload_limit=100_000, max_client_batch_size=2)  # 2 x 2 is what the worker takes
    served.info = msgspec.structs.replace(served.info, sampling_defaults={"top_k": 20, "temperature": 0.7, "typical_p": 0.9})
    submit = served.seen.submit

    def submit_what_arrives_as_it_is(generates, messages, images):
        sent = encode(SubmitRequests(generates, images))
        assert encode(msgspec.msgpack.decode(sent, type=FromWeb)) == sent
        submit(generates, messages, images)

    served.seen.submit = submit_what_arrives_as_it_is
    yield served.get_ready()
    served.assert_idle()


@pytest.mark.parametrize("route", POSTS)
def test_any_body_is_answered_or_refused_as_documented(roomy, route):
    @fuzz
    @given(body=posts(POSTS[route]))
    def any_body(body):
        assert_answered(roomy.post(route, body), route)

    any_body()


def test_a_refusal_does_not_send_long_words_back(served):
    message = {"role": "a" * 4000, "content": "a"}
    response = served.post("/generate_stream", {"inputs": "a", "parameters": {"grammar": {"a" * 4000: 1}}})
    assert response.status_code == 422 and len(response.get_data()) < LONGEST_ERROR
    response = served.post("/v1/chat/completions", {"messages": [message]})
    assert response.status_code == 400 and len(response.get_data()) < LONGEST_ERROR


# Texts and tokens.


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    found = {"demo": Tokenizer(DEMO_MODEL)}
    for name, make in tiny_tokenizers.KINDS.items():
        found[name] = Tokenizer(tiny_tokenizers.save(make(), tmp_path_factory.mktemp(name)))
    return found


TOKENIZERS = ["demo", *tiny_tokenizers.KINDS]
TELLING = ["<s>", "</s>", "<unk>", "<|im_end|>", "<0xE2>", "\u2581", "\u0120", "\r\n", "e\u0301", "\x00", " "]
UNICODE = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cc", "Cf", "Co", "Cn", "Mn", "Zs", "Zl"]), max_size=12),
    st.lists(st.sampled_from(TELLING), max_size=8).map("".join),
)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_text_becomes_tokens_that_stand_where_they_say_and_text_again(tokenizers, name):
    tokenizer = tokenizers[name]

    @fuzz
    @given(text=UNICODE, add_special_tokens=st.booleans())
    @example(text="\x00", add_special_tokens=True)
    def any_text(text, add_special_tokens):
        ids = tokenizer.encode(text, add_special_tokens)
        spans = tokenizer.spans(text, add_special_tokens)
        length = len(text.encode())
        assert [i for i, _, _ in spans] == ids
        assert all(0 <= start <= stop <= length for _, start, stop in spans)
        tokenizer.decode(ids).encode()
        "".join(prompt_texts(tokenizer, ids)).encode()

    any_text()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_tokens_stream_as_a_text_that_their_pieces_add_up_to(tokenizers, name):
    tokenizer = tokenizers[name]
    least = st.integers(0, 5)
    ids = st.lists(st.integers(0, 450) | st.sampled_from([2**31, 2**32 - 1]), max_size=12)

    @fuzz
    @given(prompt=ids, tokens=ids, stops=st.lists(st.text(max_size=4), max_size=3), keep_stop=st.booleans(), least=least)
    def any_tokens(prompt, tokens, stops, keep_stop, least):
        stream, pieces = TextStream(tokenizer, prompt, stops, keep_stop, least), []
        for token in tokens:
            pieces += stream.push(token, -0.5, [])
            if stream.stopped:
                break
        pieces += stream.finish()
        assert [piece.id for piece in pieces] == tokens[: stream.tokens]
        assert "".join(piece.text for piece in pieces if not piece.special) == stream.text
        stream.text.encode()
        if not stops:
            detokenizer = detokenizer_for(tokenizer, prompt)
            assert stream.text == "".join([*map(detokenizer.push, tokens), detokenizer.finish()])

    any_tokens()
