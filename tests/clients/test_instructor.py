"""instructor, in its modes for OpenAI's API."""

import instructor
import openai
import pytest
from demo_server import CHAT
from weather import MODEL, Forecast

ASK = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_retries": 0}
CHAT_MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


def connect(url, mode):
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", CHAT_MODES, ids=lambda mode: mode.name)
def test_an_answer_is_an_instance_of_the_model(url, mode):
    assert isinstance(connect(url, mode).create(response_model=Forecast, **ASK), Forecast)


@pytest.mark.parametrize("mode", CHAT_MODES, ids=lambda mode: mode.name)
def test_a_partial_instance_grows_until_it_is_whole(url, mode):
    *_, last = connect(url, mode).create_partial(response_model=Forecast, **ASK)
    Forecast.model_validate(last.model_dump())
