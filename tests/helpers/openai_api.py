"""Requests to OpenAI's routes of a server (served.py), and what is read from their answers and streams."""

import json

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
PROMPT = {"prompt": "Hi", "max_tokens": 12, "temperature": 0}
SAMPLED = {"temperature": 0.9, "seed": 11}
UNCACHED = {
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"accepted_prediction_tokens": 0, "reasoning_tokens": 0},
}


def whole(served, route, body):
    response = served.post(route, body)
    assert response.status_code == 200, response.json
    return response.json


def chunks(served, route, body):
    """The events of a stream, without the last word."""
    response = served.post(route, body | {"stream": True})
    text = response.get_data(as_text=True)
    assert response.status_code == 200, text
    assert response.content_type == "text/event-stream; charset=utf-8"
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def refusal(served, route, body, status=400):
    response = served.post(route, body)
    assert response.status_code == status, response.get_data()
    assert response.content_type == "application/json"
    assert list(response.json) == ["error"]
    error = response.json["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def text_of(choice):
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta")).get("content") or ""


def streamed_text(stream, index=0):
    return "".join(text_of(choice) for chunk in stream for choice in chunk["choices"] if choice["index"] == index)
