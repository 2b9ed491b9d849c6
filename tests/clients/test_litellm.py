"""litellm, by each of the providers that people put before a server like this one."""

import asyncio

import litellm
import pytest
from demo_server import ANSWER, ANSWER_TOKENS, CHAT, CHAT_ANSWER, CHAT_ANSWER_TOKENS, QUESTION
from weather import TOOL, Forecast, GetWeather

CHATS = [  # model, what api_base ends in
    ("openai/neuron-textgen/demo", "/v1"),
    ("hosted_vllm/neuron-textgen/demo", "/v1"),
    ("huggingface/neuron-textgen/demo", ""),
    ("huggingface/neuron-textgen/demo", "/v1/chat/completions"),
]


@pytest.fixture(params=CHATS, ids=lambda given: given[0].split("/")[0] + given[1].replace("/", "-"))
def chat(request, url):
    model, ending = request.param
    return {"model": model, "api_base": url + ending, "api_key": "none", "messages": CHAT, "temperature": 0, "timeout": 60}


@pytest.fixture
def text(url):
    return {
        "model": "text-completion-openai/neuron-textgen/demo",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "prompt": QUESTION,
        "temperature": 0,
        "max_tokens": 100,
        "timeout": 60,
    }


def test_a_chat_is_answered_with_its_usage(chat):
    answer = litellm.completion(**chat)
    assert answer.choices[0].message.content == CHAT_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == CHAT_ANSWER_TOKENS


def test_a_streamed_chat_comes_in_pieces_and_ends_with_its_reason(chat):
    *chunks, last = litellm.completion(stream=True, **chat)
    assert len(chunks) > 10
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CHAT_ANSWER
    assert last.choices[0].finish_reason == "stop"


def test_a_limit_cuts_the_answer(chat):
    answer = litellm.completion(max_tokens=3, **chat)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_a_wrong_value_is_an_error_with_the_words_of_the_server(chat):
    with pytest.raises(litellm.BadRequestError, match="`top_p` must be") as caught:
        litellm.completion(**chat, top_p=7, max_retries=0)
    assert caught.value.status_code == 400


def test_an_answer_has_the_form_of_a_model(chat):
    (choice,) = litellm.completion(response_format=Forecast, max_tokens=200, **chat).choices
    assert choice.finish_reason == "stop"
    Forecast.model_validate_json(choice.message.content)


def test_a_tool_is_called_whole_or_streamed(chat):
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "GetWeather"}}, "max_tokens": 200}
    (call,) = litellm.completion(**chat, **forced).choices[0].message.tool_calls
    assert call.function.name == "GetWeather"
    GetWeather.model_validate_json(call.function.arguments)
    chunks = litellm.completion(stream=True, **chat, **forced)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "GetWeather"
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments


def test_a_text_is_completed_whole_or_streamed(text):
    answer = litellm.text_completion(**text)
    assert answer.choices[0].text == ANSWER
    assert answer.usage.completion_tokens == ANSWER_TOKENS
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **text)) == ANSWER


def test_the_async_call_answers_several_chats_at_once(chat):
    async def ask():
        return await asyncio.gather(*(litellm.acompletion(**chat) for _ in range(3)))

    assert [answer.choices[0].message.content for answer in asyncio.run(ask())] == [CHAT_ANSWER] * 3
