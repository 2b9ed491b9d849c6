"""A form and a function for structured output and tools, both short: the demonstration model fills them with nonsense."""

from typing import Literal

from pydantic import BaseModel, Field

City = Literal["Paris", "Rome", "Oslo"]
MODEL = "neuron-textgen/demo"
QUESTION = "What is the weather in Paris?"


class Forecast(BaseModel):
    """The weather of one day."""

    city: City
    degrees: int = Field(ge=0, le=40)
    sunny: bool


class GetWeather(BaseModel):
    """Returns the weather of the next days in a city."""

    city: City
    days: int = Field(ge=1, le=9)


SCHEMA = Forecast.model_json_schema()
TOOL = {
    "type": "function",
    "function": {"name": "GetWeather", "description": GetWeather.__doc__, "parameters": GetWeather.model_json_schema()},
}
