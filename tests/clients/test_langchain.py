"""langchain-huggingface: an endpoint as a language model, and as a chat model."""

import asyncio

import pytest
from demo_server import ANSWER, CHAT, CHAT_ANSWER, QUESTION
from huggingface_hub.errors import ValidationError
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from weather import SCHEMA, Forecast, GetWeather

END = "<|endoftext|>"  # this client gives the special tokens of a stream too, as they come; TGI sends them as well


def endpoint(url, **parameters):
    return HuggingFaceEndpoint(endpoint_url=url, task="text-generation", **({"max_new_tokens": 200, "top_k": 1} | parameters))


@pytest.fixture(scope="module")
def llm(url):
    """It always sends a temperature, so the server samples; from the one likeliest token."""
    return endpoint(url)


@pytest.fixture(scope="module")
def chat(url):
    """It takes the temperature of its endpoint, but not `top_k`."""
    return ChatHuggingFace(llm=endpoint(url, temperature=1e-3), model_id="neuron-textgen/demo")


def test_a_prompt_is_continued(llm):
    assert llm.invoke(QUESTION) == ANSWER


def test_a_streamed_text_comes_in_pieces(llm):
    pieces = list(llm.stream(QUESTION))
    assert len(pieces) > 10
    assert "".join(pieces) == ANSWER + END


def test_a_batch_gets_its_answers_in_order(llm):
    first, second = llm.batch([QUESTION, "What is AWS Inferentia?"])
    assert first == ANSWER
    assert second.startswith(" AWS Inferentia is")


def test_a_stop_text_ends_the_answer_and_is_cut_off(llm):
    assert llm.invoke(QUESTION, stop=[" neural"]) == ANSWER[: ANSWER.index(" neural")]


def test_a_limit_beyond_the_window_is_a_validation_error(url):
    with pytest.raises(ValidationError, match="`max_new_tokens` must be <= 1024"):
        endpoint(url, max_new_tokens=5000).invoke(QUESTION)


def test_the_async_calls_give_the_same_text(llm):
    async def ask():
        return await llm.ainvoke(QUESTION), "".join([piece async for piece in llm.astream(QUESTION)])

    whole, streamed = asyncio.run(ask())
    assert (whole, streamed) == (ANSWER, ANSWER + END)


def test_a_chat_is_answered_with_its_usage(chat):
    message = chat.invoke([(message["role"], message["content"]) for message in CHAT])
    assert message.content == CHAT_ANSWER
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata["output_tokens"] > 10


def test_a_streamed_chat_comes_in_pieces(chat):
    pieces = [chunk.content for chunk in chat.stream(QUESTION)]
    assert len(pieces) > 10
    assert "".join(pieces) == CHAT_ANSWER


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_has_the_form_of_the_model(chat, method):
    Forecast.model_validate(chat.with_structured_output(SCHEMA, method=method).invoke(QUESTION))


def test_structured_output_in_json_mode_is_an_object(chat):
    assert isinstance(chat.with_structured_output(method="json_mode").invoke("Return a JSON object."), dict)


def test_a_tool_is_called(chat):
    (call,) = chat.bind_tools([GetWeather], tool_choice="GetWeather").invoke(QUESTION).tool_calls
    assert call["name"] == "GetWeather"
    GetWeather.model_validate(call["args"])
