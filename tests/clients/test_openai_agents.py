"""openai-agents with its default model class, which speaks the Responses API, and with the one for chat completions."""

import asyncio
import dataclasses

import pytest
from agents import Agent, ApplyPatchTool, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from agents.items import ToolCallItem, ToolCallOutputItem
from demo_server import QUESTION
from openai import AsyncOpenAI
from weather import MODEL, City, Forecast

SETTINGS = ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False)


@pytest.fixture(params=[True, False], ids=["responses", "chat"])
def config(request, url):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client, use_responses=request.param)
    return RunConfig(model=MODEL, model_provider=provider, model_settings=SETTINGS, tracing_disabled=True)


@function_tool
def get_weather(city: City) -> str:
    """Returns the weather in a city."""
    return f"sunny in {city}"


CALLER = Agent(
    name="caller", instructions="Be brief.", tools=[get_weather], model_settings=ModelSettings(tool_choice="required")
)
FORECASTER = Agent(name="forecaster", output_type=Forecast)


def test_the_final_output_is_an_instance_of_the_model(config):
    assert isinstance(Runner.run_sync(FORECASTER, QUESTION, run_config=config).final_output, Forecast)


def test_a_tool_is_called_and_its_result_answered(config):
    result = Runner.run_sync(CALLER, QUESTION, run_config=config, max_turns=3)
    called, returned, *_ = result.new_items
    assert isinstance(called, ToolCallItem)
    assert isinstance(returned, ToolCallOutputItem)
    assert returned.output.startswith("sunny in ")
    assert result.final_output


@pytest.mark.parametrize("agent", [CALLER, FORECASTER], ids=lambda agent: agent.name)
def test_a_streamed_run_ends_as_a_whole_one_does(config, agent):
    async def both():
        streamed = Runner.run_streamed(agent, QUESTION, run_config=config, max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        assert kinds.count("raw_response_event") > 10
        return streamed, await Runner.run(agent, QUESTION, run_config=config, max_turns=3)

    streamed, whole = asyncio.run(both())
    assert streamed.final_output == whole.final_output


class Editor:
    """Notes the paths of the files that it is told to change."""

    def __init__(self):
        self.paths = []

    def create_file(self, operation):
        self.paths.append(operation.path)
        return "Changed."

    update_file = delete_file = create_file


@pytest.mark.parametrize("config", [True], ids=["responses"], indirect=True)
def test_a_patch_is_applied_where_the_client_is(config):
    editor = Editor()
    forced = ModelSettings(tool_choice="apply_patch")
    agent = Agent(name="editor", tools=[ApplyPatchTool(editor=editor)], model_settings=forced)
    result = Runner.run_sync(agent, QUESTION, run_config=config, max_turns=3)
    called, returned, *_ = result.new_items
    assert [called.raw_item["operation"]["path"]] == editor.paths
    assert "Changed." in returned.output and result.final_output


def test_five_turns_with_a_tool_keep_their_prefix(config):
    config = dataclasses.replace(config, model_settings=dataclasses.replace(SETTINGS, max_tokens=100))
    items = []
    before = 0
    for turn in range(5):
        items.append({"role": "user", "content": f"{QUESTION} Turn {turn}."})
        result = Runner.run_sync(CALLER, items, run_config=config, max_turns=3)
        assert any(isinstance(item, ToolCallOutputItem) for item in result.new_items)
        for response in result.raw_responses:
            assert response.usage.input_tokens_details.cached_tokens >= before - 32
            before = response.usage.input_tokens
        items = result.to_input_list()
