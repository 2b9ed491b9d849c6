"""anthropic's own client against /v1/messages."""

import anthropic
import pytest
from demo_server import CHAT, CHAT_ANSWER, CHAT_ANSWER_TOKENS, CHAT_TOKENS, serving
from weather import TOOL, City, GetWeather

MODEL = "neuron-textgen/demo"
FUNCTION = TOOL["function"]
WEATHER = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def connect(url, key="none", **settings):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=60, **settings)


@pytest.fixture(scope="module")
def client(url):
    with connect(url) as client:
        yield client


@pytest.fixture
def ask(client):
    """Asks the one question without sampling."""
    return lambda **fields: client.messages.create(**{**ASKED, **fields})


GREEDY = {"temperature": 0}  # which this client has no name for any more
ASKED = {"model": MODEL, "messages": CHAT, "max_tokens": 200, "extra_body": GREEDY}
FORCED = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def test_a_message_is_answered_with_its_usage(ask):
    message = ask()
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", CHAT_ANSWER, "end_turn")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == CHAT_TOKENS
    assert usage.output_tokens == CHAT_ANSWER_TOKENS
    assert (message.role, message.model) == ("assistant", MODEL)


def test_a_limit_beyond_the_window_is_cut_and_one_below_is_the_reason(ask):
    assert ask(max_tokens=32_000).content[0].text == CHAT_ANSWER
    message = ask(max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_a_stop_sequence_ends_the_message_and_is_named(ask):
    message = ask(stop_sequences=[" neural"])
    assert message.content[0].text == CHAT_ANSWER[: CHAT_ANSWER.index(" neural")]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " neural")


def test_the_stream_helper_gives_the_message_that_the_plain_call_gives(client, ask):
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    plain = ask()
    assert text == plain.content[0].text
    apart = {"id", "usage"}  # the usage has what a slot still held
    assert message.model_dump(exclude=apart) == plain.model_dump(exclude=apart)
    assert message.usage.output_tokens == plain.usage.output_tokens


def test_a_stream_has_the_events_that_the_types_know(ask):
    kinds = [event.type for event in ask(stream=True)]
    begin = ["message_start", "content_block_start"]  # the client keeps pings to itself
    end = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == begin + ["content_block_delta"] * (len(kinds) - len(begin) - len(end)) + end
    assert len(kinds) > CHAT_ANSWER_TOKENS / 2


def test_a_forced_call_fits_its_schema_and_its_result_is_answered(client, ask):
    message = ask(**FORCED)
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "GetWeather")
    assert GetWeather(**call.input).city in City.__args__
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*CHAT, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert ask(messages=turns, tools=[WEATHER, SEARCH]).content[0].type == "text"
    with client.messages.stream(**ASKED, **FORCED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert len(pieces) > 1 and streamed.input == call.input


def test_a_tool_that_anthropic_defines_is_called_and_its_result_answered(ask):
    tools = [{"type": "memory_20250818", "name": "memory"}]
    choice = {"type": "tool", "name": "memory", "disable_parallel_tool_use": True}
    (call,) = ask(tools=tools, tool_choice=choice).content
    assert (call.type, call.name) == ("tool_use", "memory") and call.input["command"]
    turns = [*CHAT, {"role": "assistant", "content": [call]}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Done"}]})
    assert ask(messages=turns, tools=tools, max_tokens=3).content[0].type == "text"


def test_a_named_tool_is_called_and_none_is_when_there_may_be_none(ask):
    choice = {"type": "tool", "name": "GetWeather"}
    assert ask(tools=[WEATHER], tool_choice=choice).content[0].name == "GetWeather"
    assert ask(tools=[WEATHER], tool_choice={"type": "none"}).stop_reason == "end_turn"


def test_a_schema_is_kept(ask):
    schema = GetWeather.model_json_schema()
    message = ask(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert GetWeather.model_validate_json(message.content[0].text)


def test_system_texts_thinking_and_pictures_are_taken(ask):
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    turns = [
        *CHAT,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "A method."}]},
        {"role": "user", "content": [picture, {"type": "text", "text": "And this?"}]},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert ask(messages=turns, system=system, thinking={"type": "enabled", "budget_tokens": 1024}).content


def test_tokens_are_counted_as_they_are_used(client):
    assert client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens == CHAT_TOKENS
    assert client.messages.count_tokens(model=MODEL, messages=CHAT, tools=[WEATHER]).input_tokens > CHAT_TOKENS


def test_the_one_model_is_listed_and_found_by_its_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL
    with pytest.raises(anthropic.NotFoundError, match=MODEL):
        client.models.retrieve("claude")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"extra_body": {"temperature": -1}}, "`temperature`"),
        ({"max_tokens": -1}, "max_tokens: Expected `int` >= 0"),
        ({"messages": [{"role": "user", "content": "Why? " * 2000}]}, "[Pp]rompt is too long.* --max-total-tokens"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "`tool_choice.name`"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_wrong_value_is_a_bad_request_and_the_message_names_it(ask, wrong, words, stream):
    with pytest.raises(anthropic.BadRequestError, match=words.replace(" --", r".*--")) as caught:
        ask(stream=stream, **wrong)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("busy", [4], indirect=True)
def test_a_busy_server_is_overloaded(client, busy):
    with pytest.raises(anthropic.InternalServerError, match="overloaded") as caught:
        client.messages.create(**ASKED)
    assert caught.value.status_code == 529
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_the_key_opens_every_route_and_another_is_an_authentication_error():
    with serving(API_KEY="secret") as url:
        with connect(url, key="secret") as client:
            assert client.messages.create(**ASKED).content[0].text == CHAT_ANSWER
            assert client.models.list().data[0].id == MODEL
        with connect(url, key="wrong") as client, pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            client.messages.create(**ASKED)
