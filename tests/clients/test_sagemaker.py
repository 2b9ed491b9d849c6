"""boto3's sagemaker-runtime client, by way of a shim that stands for SageMaker, against the server as SageMaker starts it."""

import json
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from demo_server import ANSWER, ANSWER_TOKENS, CHAT, CHAT_ANSWER, QUESTION, serving
from sagemaker_shim import shim

ENDPOINT = {"EndpointName": "demo", "ContentType": "application/json"}


@pytest.fixture(scope="module")
def runtime():
    with serving(port_name="SAGEMAKER_BIND_TO_PORT") as url, shim(urlsplit(url).port) as endpoint_url:
        yield boto3.client(
            "sagemaker-runtime",
            endpoint_url=endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
            config=Config(retries={"total_max_attempts": 1}),
        )


def invoke(runtime, body):
    response = runtime.invoke_endpoint(Body=json.dumps(body), **ENDPOINT)
    assert response["ContentType"] == "application/json"
    return json.load(response["Body"])


def parts_of(runtime, body):
    response = runtime.invoke_endpoint_with_response_stream(Body=json.dumps(body), **ENDPOINT)
    assert response["ContentType"].startswith("text/event-stream")
    return [event["PayloadPart"]["Bytes"] for event in response["Body"]]


def events_in(parts):
    """The data of the SSE events, which the parts cut anywhere."""
    *events, rest = b"".join(parts).split(b"\n\n")
    assert rest == b"", "an event was not ended"
    return [event.removeprefix(b"data: ") for event in events]


def test_a_native_body_is_answered_as_tgi_does_with_a_list(runtime):
    body = {"inputs": QUESTION, "parameters": {"return_full_text": False}}
    assert invoke(runtime, body) == [{"generated_text": ANSWER}]


def test_a_chat_body_is_answered_as_a_chat(runtime):
    answer = invoke(runtime, {"messages": CHAT, "temperature": 0})
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == CHAT_ANSWER


def test_a_prompt_body_is_answered_as_a_completion(runtime):
    answer = invoke(runtime, {"prompt": QUESTION, "temperature": 0, "max_tokens": 100})
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == ANSWER


def test_a_native_stream_is_whole_when_its_parts_are_put_together(runtime):
    parts = parts_of(runtime, {"inputs": QUESTION, "stream": True, "parameters": {"return_full_text": False}})
    events = [json.loads(event) for event in events_in(parts)]
    assert len(parts) > len(events), "the parts are smaller than the events"
    assert len(events) == ANSWER_TOKENS
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == ANSWER
    assert events[-1]["generated_text"] == ANSWER


@pytest.mark.parametrize("operation", ["invoke_endpoint", "invoke_endpoint_with_response_stream"])
def test_a_prompt_as_plain_text_is_answered_with_plain_text(runtime, operation):
    response = getattr(runtime, operation)(EndpointName="demo", ContentType="text/plain", Body=QUESTION)
    assert response["ContentType"] == "text/plain; charset=utf-8"
    if operation == "invoke_endpoint":
        parts = [response["Body"].read()]
    else:
        parts = [event["PayloadPart"]["Bytes"] for event in response["Body"]]
        assert len(parts) > 10, "it comes as it is generated"
    assert b"".join(parts).decode() == ANSWER


def test_a_caller_that_accepts_json_alone_gets_the_native_answer_to_its_text(runtime):
    response = runtime.invoke_endpoint(EndpointName="demo", ContentType="text/plain", Accept="application/json", Body=QUESTION)
    assert json.load(response["Body"]) == [{"generated_text": QUESTION + ANSWER}]


def test_a_chat_stream_is_whole_when_its_parts_are_put_together(runtime):
    *chunks, done = events_in(parts_of(runtime, {"messages": CHAT, "temperature": 0, "stream": True}))
    assert done == b"[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == CHAT_ANSWER
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("operation", ["invoke_endpoint", "invoke_endpoint_with_response_stream"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"inputs": QUESTION, "stream": True, "parameters": {"top_p": 7}}, "`top_p` must be"),
        ({"messages": CHAT, "stream": True, "temperature": -1}, "`temperature` must be >= 0.0"),
        ({"question": QUESTION}, "`inputs`, `messages`, `prompt`"),
    ],
    ids=["native", "chat", "neither"],
)
def test_a_wrong_body_is_a_model_error_with_the_status_and_words_of_the_server(runtime, operation, body, told):
    with pytest.raises(runtime.exceptions.ModelError) as caught:
        getattr(runtime, operation)(Body=json.dumps(body), **ENDPOINT)
    assert caught.value.response["OriginalStatusCode"] == (400 if "messages" in body else 422)
    assert told in caught.value.response["OriginalMessage"]
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424


def test_a_body_that_is_no_json_is_a_model_error(runtime):
    with pytest.raises(runtime.exceptions.ModelError) as caught:
        runtime.invoke_endpoint(Body=b"{", **ENDPOINT)
    assert 400 <= caught.value.response["OriginalStatusCode"] < 500
    assert json.loads(caught.value.response["OriginalMessage"])["error_type"] == "validation"
