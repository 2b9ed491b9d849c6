"""pydantic-ai: structured output by a tool and by the API itself, by chat completions and by the Responses API."""

import asyncio

import pytest
from demo_server import QUESTION
from pydantic_ai import Agent, ModelRequest, NativeOutput, ToolDefinition, ToolOutput, ToolReturnPart
from pydantic_ai.direct import model_request_sync
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import MODEL, Forecast, GetWeather

SETTINGS = {"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False}


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request, url):
    return request.param(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput], ids=lambda output: output.__name__)
def test_the_output_is_an_instance_of_the_model(model, output):
    result = Agent(model, output_type=output(Forecast), model_settings=SETTINGS).run_sync(QUESTION)
    assert isinstance(result.output, Forecast)
    assert result.usage.output_tokens > 5


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput], ids=lambda output: output.__name__)
def test_a_streamed_output_ends_as_an_instance_of_the_model(model, output):
    async def ask():
        async with Agent(model, output_type=output(Forecast), model_settings=SETTINGS).run_stream(QUESTION) as result:
            return [output async for output in result.stream_output(debounce_by=None)]

    assert isinstance(asyncio.run(ask())[-1], Forecast)


def test_a_required_tool_is_called_and_its_result_answered(model):
    tool = ToolDefinition(name="get_weather", parameters_json_schema=GetWeather.model_json_schema())
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    messages = [ModelRequest.user_text_prompt(QUESTION)]
    called = model_request_sync(model, messages, model_settings=SETTINGS, model_request_parameters=parameters)
    (call,) = called.tool_calls
    assert call.tool_name == "get_weather"
    GetWeather.model_validate(call.args_as_dict())
    result = ModelRequest([ToolReturnPart(call.tool_name, "sunny", call.tool_call_id)])
    assert model_request_sync(model, [*messages, called, result], model_settings=SETTINGS).text
