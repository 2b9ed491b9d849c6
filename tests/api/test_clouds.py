"""The routes of cloud platforms: they wrap requests of the other APIs, in whose formats they answer."""

import re

import pytest
from openai_api import CHAT, COMPLETION, MESSAGES, PROMPT, whole

NATIVE = {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}


def predictions(served, *instances):
    return whole(served, "/vertex", {"instances": instances})["predictions"]


def test_an_adapter_that_is_not_served_is_refused_by_name(served):
    refused = served.post("/invocations", MESSAGES, headers={"X-Amzn-SageMaker-Adapter-Identifier": "french"})
    assert (refused.status_code, refused.json["error"]) == (404, "The model 'french' is not served here; served: 'm'")


def test_an_invocation_is_whichever_request_it_looks_like(served):
    assert whole(served, "/invocations", MESSAGES)["choices"] == whole(served, CHAT, MESSAGES)["choices"]
    assert whole(served, "/invocations", PROMPT)["choices"] == whole(served, COMPLETION, PROMPT)["choices"]
    assert whole(served, "/invocations", PROMPT | {"inputs": None})["choices"]
    text = whole(served, "/generate", NATIVE)["generated_text"]
    assert whole(served, "/invocations", NATIVE | {"messages": []}) == [{"generated_text": "Hi" + text}]


NOT = {"type": "json", "value": {"$ref": "https://example.com/schema"}}  # a grammar cannot say this


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (MESSAGES | {"n": 0}, 400, "n"),
        (PROMPT | {"tempreature": 1}, 400, "tempreature"),
        (PROMPT | {"prompt": "a" * 100}, 400, "prompt"),
        (MESSAGES | {"messages": [{"role": "user", "content": "a" * 100}]}, 400, "messages"),
        (PROMPT | {"prompt": ["a"] * 4, "n": 2}, 400, None),
        (PROMPT | {"response_format": NOT}, 400, "response_format.value"),
        (MESSAGES | {"response_format": NOT, "stream": True}, 400, "response_format.value"),
        (NATIVE | {"parameters": {"top_k": 0}}, 422, ...),
        (NATIVE | {"inputs": "a" * 100}, 422, ...),
        (NATIVE | {"parameters": {"grammar": NOT}}, 422, ...),
        ({"text": "Hi"}, 422, ...),
        ([], 422, ...),
        (b"{", 400, ...),
    ],
)
def test_an_invocation_that_cannot_be_served_is_refused_in_the_dialect_of_its_body(served, body, status, param):
    response = served.post("/invocations", body)
    assert response.status_code == status
    if param is ...:
        assert list(response.json) == ["error", "error_type"]
    else:
        assert response.json["error"]["param"] == param


def test_an_invocation_without_a_known_field_is_told_which_there_are(served):
    error = served.post("/invocations", {"text": "Hi", "inputs": None}).json["error"]
    assert error.endswith("did not match any variant: one of `inputs`, `messages`, `prompt` is needed")


def streamed_text(served, path="/invocations", body=b"Hi", method="POST", **options):
    """What a client of TorchServe reads, piece by piece."""
    options.setdefault("content_type", "text/plain")
    response = served.client.open(path, method=method, data=body, **options)
    assert (response.status_code, response.content_type) == (200, "text/plain; charset=utf-8"), response.text
    return list(response.iter_encoded())


def continuation(served, prompt):
    return whole(served, "/generate", {"inputs": prompt})["generated_text"]


@pytest.mark.parametrize("path", ["/invocations", "/predictions/m"])
def test_a_prompt_as_plain_text_is_answered_with_its_continuation_as_plain_text_while_it_is_generated(served, path):
    pieces = streamed_text(served, path)
    assert len(pieces) > 1
    assert b"".join(pieces).decode() == continuation(served, "Hi")


def test_a_prompt_for_torchserve_needs_no_content_type_and_may_be_put(served):
    expected = continuation(served, "Hi\n").encode()
    for options in ({"method": "PUT"}, {"content_type": None}, {"headers": {"Accept": "*/*"}}):
        assert b"".join(streamed_text(served, "/predictions/m", b"Hi\n", **options)) == expected


def test_the_model_of_a_prediction_is_the_one_that_is_served(served):
    response = served.client.post("/predictions/other", data=b"Hi", content_type="text/plain")
    assert (response.status_code, response.json["error"]) == (404, "The model 'other' is not served here; served: 'm'")


def test_a_client_that_accepts_json_alone_gets_the_native_answer_to_its_text(served):
    response = served.client.post("/invocations", data=b"Hi", content_type="text/plain", headers={"Accept": "application/json"})
    assert response.json == [{"generated_text": "Hi" + continuation(served, "Hi")}]


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", "iso-8859-1"])
def test_the_charset_of_a_text_is_used(served, charset):
    options = {"content_type": f"text/plain; charset={charset}"}
    assert b"".join(streamed_text(served, body="Zoë".encode(charset), **options)).decode() == continuation(served, "Zoë")


@pytest.mark.parametrize(
    ("body", "content_type", "status", "error"),
    [
        (b"", "text/plain", 422, "`inputs` cannot be empty: the request body is the prompt. Given: no body"),
        (b"a" * 99, "text/plain", 422, "`inputs` must have at most 59 tokens"),
        (b"Zo\xeb", "text/plain", 400, "Failed to read the request body as text in utf-8: unexpected end of data (byte 2)"),
        (b"a", "text/plain; charset=utf-7", 415, "must be `utf-8` or `us-ascii` or `iso-8859-1`. Given: 'utf-7'"),
        (b"a", "application/x-www-form-urlencoded", 415, "Given: 'application/x-www-form-urlencoded'"),
    ],
    ids=["empty", "long", "other characters", "other charset", "form"],
)
def test_a_text_that_cannot_be_a_prompt_is_refused_by_what_was_given(served, body, content_type, status, error):
    for path in ("/invocations", "/predictions/m"):
        response = served.client.post(path, data=body, content_type=content_type)
        assert response.status_code == status
        assert error in response.json["error"]


def test_an_error_in_a_text_that_has_begun_breaks_the_connection(served):
    response = served.client.post("/invocations", data=b"Hi", content_type="text/plain", buffered=False)
    pieces = response.iter_encoded()
    assert next(pieces)
    served.model.fail_next_decode = True
    with pytest.raises(ConnectionResetError, match="Request failed during generation"):
        list(pieces)
    response.close()
    served.wait_for_count("tgi_request_failure_total,generation", 1)


def test_vertex_predicts_a_text_for_each_instance(served):
    full = NATIVE | {"parameters": {"max_new_tokens": 5, "return_full_text": True}}
    text = whole(served, "/generate", NATIVE)["generated_text"]
    chat = whole(served, CHAT, MESSAGES)["choices"][0]["message"]["content"]
    assert predictions(served, NATIVE, MESSAGES, full) == [text, chat, "Hi" + text]


@pytest.mark.parametrize(
    ("instances", "error_type", "words"),
    [
        ([], "Input validation error", "Input validation error: `instances` cannot be empty"),
        ([NATIVE] * 33, "batch size exceeded", "exceeds the maximum allowed batch size of 32"),
        ([NATIVE, NATIVE | {"inputs": ""}], "validation", "`inputs` cannot be empty"),
        ([NATIVE, 5], "validation", "Expected `object`, got `int`"),
        ([PROMPT], "validation", "one of `inputs`, `messages` is needed"),
        ([NATIVE | {"max_tokens": 5}], "validation", "`max_tokens` is an unknown field; use `max_new_tokens`"),
        ([MESSAGES | {"n": 2}], "validation", "`n` != 1 is not supported in `instances`"),
        *[
            ([MESSAGES | {name: value}], "validation", f"`{name}` is not supported in `instances`: a prediction is a text")
            for name, value in {"stream": True, "logprobs": True, "top_logprobs": 2, "tools": [{}]}.items()
        ],
        *[
            ([{"inputs": "a", "parameters": {name: 1 if "top" in name else True}}], "validation", f"`{name}` is not supported")
            for name in ("details", "decoder_input_details", "top_n_tokens")
        ],
    ],
)
def test_vertex_refuses_what_gives_no_texts(served, instances, error_type, words):
    response = served.post("/vertex", {"instances": instances})
    assert (response.status_code, response.json["error_type"]) == (422, error_type)
    assert re.search(re.escape(words), response.json["error"])


def test_the_route_of_the_ray_blueprint_gives_prompt_and_answer_in_a_list(served):
    text = whole(served, "/generate", {"inputs": "Hi there"})["generated_text"]
    response = served.client.get("/infer?sentence=Hi%20there")
    assert (response.status_code, response.json) == (200, ["Hi there" + text])
    for path in ("/infer", "/infer?sentence="):
        assert "`sentence` cannot be empty" in served.client.get(path).json["error"]
    assert "`sentence` must have at most 59 tokens" in served.client.get(f"/infer?sentence={'a' * 99}").json["error"]
