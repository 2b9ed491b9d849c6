"""langchain-openai: structured output by its three methods, and tools, by chat completions and by the Responses API."""

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from weather import MODEL, QUESTION, Forecast, GetWeather


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def chat(request, url):
    return ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=300, use_responses_api=request.param
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance_of_the_model(chat, method):
    assert isinstance(chat.with_structured_output(Forecast, method=method).invoke(QUESTION), Forecast)


def test_structured_output_in_json_mode_is_an_object(chat):
    assert isinstance(chat.with_structured_output(method="json_mode").invoke("Return a JSON object."), dict)


def test_any_of_the_tools_is_called_and_its_result_answered(chat):
    tools = chat.bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    message = tools.invoke(QUESTION)
    (call,) = message.tool_calls
    assert call["name"] == "GetWeather"
    GetWeather.model_validate(call["args"])
    history = [HumanMessage(QUESTION), message, ToolMessage("sunny", tool_call_id=call["id"])]
    assert chat.bind_tools([GetWeather]).invoke(history).content


def test_a_streamed_call_adds_up_to_the_whole_one(chat):
    tools = chat.bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    first, *others = tools.stream(QUESTION)
    (call,) = sum(others, first).tool_calls
    assert call["args"] == tools.invoke(QUESTION).tool_calls[0]["args"]
