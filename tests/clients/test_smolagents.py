"""smolagents: its model for servers that speak OpenAI's API, and an agent that calls tools."""

import pytest
from demo_server import QUESTION
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import agglomerate_stream_deltas
from weather import MODEL, SCHEMA, Forecast

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
# The agent's own prompts are longer than this model's context.
PROMPTS = {
    "system_prompt": "Call a tool.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Now answer.", "post_messages": "{{task}}"},
}


@pytest.fixture(scope="module")
def model(url):
    settings = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
    return OpenAIModel(MODEL, api_base=f"{url}/v1", api_key="none", client_kwargs={"max_retries": 0}, **settings)


@tool
def get_weather(city: str, days: int) -> str:
    """Returns the weather of the next days in a city.

    Args:
        city: its name
        days: how many
    """
    return f"{days} sunny days in {city}"


get_weather.inputs["city"]["enum"] = ["Paris", "Rome"]  # its own schema has no bounds
get_weather.inputs["days"]["enum"] = [1, 3, 7]


def test_an_answer_has_the_form_of_the_schema(url):
    model = OpenAIModel(MODEL, api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=200)
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}
    Forecast.model_validate_json(model.generate(MESSAGES, response_format=form).content)


def test_a_tool_is_called_whole_or_streamed(model):
    (call,) = model.generate(MESSAGES, tools_to_call_from=[get_weather]).tool_calls
    assert call.function.name == "get_weather"
    streamed = agglomerate_stream_deltas(list(model.generate_stream(MESSAGES, tools_to_call_from=[get_weather])))
    assert streamed.tool_calls[0].function.arguments == call.function.arguments


def test_an_agent_takes_its_steps(model):
    agent = ToolCallingAgent([get_weather], model, prompt_templates=PROMPTS, verbosity_level=0, max_steps=2)
    assert agent.run(QUESTION)
    calls = [call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []]
    assert {call.name for call in calls} <= {"get_weather", "final_answer"}
    assert calls
