"""openai's structured output and tools, by chat completions and by the Responses API."""

import json

import openai
import pytest
from demo_server import CHAT, CHAT_ANSWER, CHAT_ANSWER_TOKENS, QUESTION
from weather import MODEL, TOOL, Forecast, GetWeather

ASK = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 200}
RESPOND = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 200}
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}
STRICT_TOOL = openai.pydantic_function_tool(GetWeather)
FUNCTION = {"type": "function", **TOOL["function"], "strict": False}


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_parse_gives_an_instance_of_the_model(client):
    (choice,) = client.chat.completions.parse(**ASK, response_format=Forecast).choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Forecast)


def test_a_stream_with_a_format_ends_with_the_parsed_instance(client):
    with client.chat.completions.stream(**ASK, response_format=Forecast) as stream:
        events = [event for event in stream if event.type != "chunk"]
        final = stream.get_final_completion().choices[0].message
    assert {event.type for event in events[:-1]} == {"content.delta"}
    assert events[-1].type == "content.done"
    assert isinstance(events[-1].parsed, Forecast)
    assert final.parsed == events[-1].parsed == Forecast.model_validate_json(final.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}], ids=str)
def test_parse_gives_the_arguments_of_a_forced_call(client, choice):
    message = (
        client.chat.completions.parse(**ASK, tools=[STRICT_TOOL], tool_choice=choice, parallel_tool_calls=False)
        .choices[0]
        .message
    )
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert not message.content


def test_a_streamed_call_comes_in_pieces_that_the_client_puts_together(client):
    with client.chat.completions.stream(**ASK, tools=[STRICT_TOOL], **FORCED) as stream:
        events = [event for event in stream if event.type.startswith("tool_calls")]
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    *deltas, done = events
    assert {event.type for event in deltas} == {"tool_calls.function.arguments.delta"}
    assert len(deltas) > 1
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == call.function.arguments
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert (call.function.name, choice.finish_reason) == ("GetWeather", "tool_calls")


def test_the_result_of_a_call_is_answered(client):
    called = client.chat.completions.create(**ASK, tools=[TOOL], **FORCED).choices[0].message
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*CHAT, called, result]
    message = client.chat.completions.create(**ASK | {"messages": messages}, tools=[TOOL]).choices[0].message
    assert message.content or message.tool_calls


def test_without_tool_choice_the_model_may_answer_in_words(client):
    (choice,) = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="none").choices
    assert choice.message.content
    assert choice.message.tool_calls is None


def test_a_tool_choice_that_names_no_tool_is_an_error_about_tool_choice(client):
    other = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=other)
    assert caught.value.param == "tool_choice.function"


def test_a_response_is_created_with_its_usage(client):
    response = client.responses.create(**RESPOND)
    assert (response.output_text, response.status) == (CHAT_ANSWER, "completed")
    assert response.usage.output_tokens == CHAT_ANSWER_TOKENS


def test_a_streamed_response_has_the_events_in_their_order(client):
    events = list(client.responses.create(**RESPOND, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 10
    assert "".join(deltas) == CHAT_ANSWER
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1].response.output_text == CHAT_ANSWER


def test_a_limit_leaves_a_response_incomplete(client):
    response = client.responses.create(**RESPOND | {"max_output_tokens": 3})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_parsed_response_holds_an_instance_of_the_model(client):
    assert isinstance(client.responses.parse(**RESPOND, text_format=Forecast).output_parsed, Forecast)


def test_a_parsed_stream_of_a_response_ends_with_the_instance(client):
    with client.responses.stream(**RESPOND, text_format=Forecast) as stream:
        (done,) = (event for event in stream if event.type == "response.output_text.done")
        assert isinstance(done.parsed, Forecast)
        assert stream.get_final_response().output_parsed == done.parsed


def test_a_response_calls_a_function_and_takes_its_result(client):
    response = client.responses.create(**RESPOND, tools=[FUNCTION], **FORCED)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "GetWeather")
    GetWeather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": QUESTION}, call, result]
    assert client.responses.create(**RESPOND | {"input": items}, tools=[FUNCTION]).output


def test_the_arguments_of_a_streamed_function_call_come_in_pieces(client):
    with client.responses.stream(**RESPOND, tools=[openai.pydantic_function_tool(GetWeather)], **FORCED) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 1
    assert isinstance(call.parsed_arguments, GetWeather)
    assert json.loads(call.arguments) == call.parsed_arguments.model_dump()


def test_a_stored_response_is_retrieved_continued_and_deleted(client):
    first = client.responses.create(**RESPOND)
    assert first.store is True
    assert client.responses.retrieve(first.id) == first
    more = RESPOND | {"input": "What is continuous batching?"}
    with client.responses.stream(**more, previous_response_id=first.id) as stream:
        second = stream.until_done().get_final_response()
    said = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": more["input"]}]
    sent = client.responses.create(**RESPOND | {"input": said}, store=False)
    assert (second.output_text, second.usage.input_tokens) == (sent.output_text, sent.usage.input_tokens)
    client.responses.delete(first.id)
    for response in (first, sent):
        with pytest.raises(openai.NotFoundError, match="--response-store-size"):
            client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**more, previous_response_id=second.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_the_regular_expression_of_a_custom_tool_holds_in_chats_and_responses(client):
    grammar = {"type": "grammar", "syntax": "regex", "definition": "sun|rain"}
    chosen = {"type": "custom", "name": "note"}
    response = client.responses.create(**RESPOND, tools=[chosen | {"format": grammar}], tool_choice=chosen)
    (item,) = response.output
    assert (item.type, item.name) == ("custom_tool_call", "note") and item.input in ("sun", "rain")
    custom = {"name": "note", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "sun|rain"}}}
    tools, choice = [{"type": "custom", "custom": custom}], {"type": "custom", "custom": {"name": "note"}}
    (choice,) = client.chat.completions.create(**ASK, tools=tools, tool_choice=choice).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "note", item.input)
