"""outlines, by the models it has for TGI, for vLLM and for OpenAI."""

from typing import Literal

import openai
import outlines
import pytest
from demo_server import QUESTION
from huggingface_hub import InferenceClient
from outlines.types import Regex
from weather import MODEL, Forecast

END = "<|endoftext|>"  # huggingface_hub leaves it in a stream


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=["tgi", "vllm"])
def model(request, url, client):
    if request.param == "tgi":
        return outlines.from_tgi(InferenceClient(url))
    return outlines.from_vllm(client, MODEL)


def settings(model, tokens):
    """TGI's route for this client gives the prompt back by default."""
    if isinstance(model, outlines.models.TGI):
        return {"max_new_tokens": tokens, "return_full_text": False}
    return {"max_tokens": tokens, "temperature": 0}


def test_a_choice_is_one_of_the_choices(model):
    assert model(QUESTION, Literal["rain", "sun"], **settings(model, 20)) in ("rain", "sun")


def test_a_number_is_a_number(model):
    assert int(model(QUESTION, Regex("[0-9]{3}"), **settings(model, 20))) < 1000


def test_a_model_is_filled_in(model):
    Forecast.model_validate_json(model(QUESTION, Forecast, **settings(model, 200)))


def test_a_stream_adds_up_to_a_filled_in_model(model):
    Forecast.model_validate_json("".join(model.stream(QUESTION, Forecast, **settings(model, 200))).removesuffix(END))


def test_the_model_for_openai_fills_in_a_form(client):
    answer = outlines.from_openai(client, MODEL)(QUESTION, Forecast, temperature=0, max_tokens=200)
    Forecast.model_validate_json(answer)
