"""HTTP as clients see it: a real app and a real socket, with a worker on a fake model behind it."""

import contextlib
import io
import json
import socket
import threading
import time

import gevent
import openapi_spec_validator
import pytest
from gunicorn.http.errors import InvalidChunkSize
from prometheus_client.parser import text_string_to_metric_families
from served import LIMITS, WAIT_S, WINDOW, events, wait_until
from werkzeug.exceptions import ClientDisconnected

from api import engine_client, errors, tgi
from api import stream as generation
from api.engine_client import EngineClient
from api.job import ModelText, Served
from api.job import Prompt as PromptToRun
from api.openapi import EXAMPLES, openapi
from api.routes import ROUTES
from api.tgi import NativeAnswer
from protocol import End, Prompt, Token


def test_before_the_model_is_ready_everything_says_what_is_going_on(booting):
    wait_until(lambda: booting.seen.phase == "starting")
    assert booting.client.get("/live").status_code == 200
    health = booting.client.get("/health")
    assert health.status_code == 503
    assert health.json == {"error": "unhealthy", "error_type": "healthcheck", "phase": "starting"}
    assert health.headers["Retry-After"] == "5"
    refused = booting.post("/generate", {"inputs": "a"})
    assert refused.status_code == 503
    assert refused.json["phase"] == "starting"
    assert int(refused.headers["Retry-After"]) > 0


def test_health_is_200_and_empty_when_ready(served):
    response = served.client.get("/health")
    assert (response.status_code, response.data) == (200, b"")


def test_info_tells_the_limits_in_force(served):
    info = served.client.get("/info").json
    assert info["max_total_tokens"] == WINDOW
    assert info["max_concurrent_requests"] == LIMITS["max_concurrent_requests"]
    assert list(info)[:3] == ["model_id", "model_sha", "model_pipeline_tag"]


def test_generate_returns_the_text_of_the_models_tokens(served):
    response = served.post("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 8, "details": True}})
    assert response.status_code == 200
    expected = served.expected("Hello", 8)
    assert response.json["generated_text"] == served.tokenizer.decode(expected)
    assert [token["id"] for token in response.json["details"]["tokens"]] == expected
    assert response.json["details"]["generated_tokens"] == len(expected)


def test_without_details_there_is_only_the_text(served):
    response = served.post("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}})
    assert list(response.json) == ["generated_text"]


def test_a_stream_says_the_same_as_a_whole_response(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 12, "details": True, "seed": 5, "temperature": 0.8}}
    whole = served.post("/generate", body).json
    response = served.post("/generate_stream", body)
    assert response.content_type == "text/event-stream"
    assert response.headers["Cache-Control"] == "no-cache"
    stream = events(response)
    assert [event["index"] for event in stream] == list(range(1, len(stream) + 1))
    assert [event["token"] for event in stream] == whole["details"]["tokens"]
    assert all(event["generated_text"] is None and event["details"] is None for event in stream[:-1])
    assert stream[-1]["generated_text"] == whole["generated_text"]
    assert "".join(event["token"]["text"] for event in stream if not event["token"]["special"]) == whole["generated_text"]
    assert stream[-1]["details"] == {
        "finish_reason": whole["details"]["finish_reason"],
        "generated_tokens": len(stream),
        "seed": 5,
        "input_length": 5,
    }


@pytest.fixture
def sampled(serve):
    """Behind it is a device that samples."""
    served = serve(sampling="device").get_ready()
    yield served
    served.assert_idle()


def test_a_device_that_samples_gives_the_same_greedy_text_and_null_for_what_it_does_not_tell(sampled):
    assert sampled.client.get("/info").json["sampling"] == "device"
    expected = sampled.expected("Hello", 8)
    for more in ({}, {"do_sample": True, "top_k": 1}):
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 8, "details": True} | more}
        whole = sampled.post("/generate", body).json
        assert [token["id"] for token in whole["details"]["tokens"]] == expected
        assert whole["generated_text"] == sampled.tokenizer.decode(expected)
        assert {token["logprob"] for token in whole["details"]["tokens"]} == {None}
        assert whole["details"]["seed"] is None
        stream = events(sampled.post("/generate_stream", body))
        assert [event["token"] for event in stream] == whole["details"]["tokens"]
        assert stream[-1]["details"]["seed"] is None


def test_a_device_that_samples_serves_openais_routes_and_the_others(sampled):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "n": 2, "top_p": 0.9, "stop": "zz"}
    answer = sampled.post("/v1/chat/completions", chat).json
    assert [(choice["index"], choice["logprobs"]) for choice in answer["choices"]] == [(0, None), (1, None)]
    completion = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "seed": 1, "ignore_eos": True, "echo": True}
    expected = sampled.tokenizer.decode(sampled.expected("Hello", 8))
    assert sampled.post("/v1/completions", completion).json["choices"][0]["text"].startswith("Hello" + expected)
    assert sampled.client.get("/infer?sentence=Hello").json[0].startswith("Hello" + expected)
    predictions = sampled.post("/vertex", {"instances": [{"inputs": "Hello", "parameters": {"max_new_tokens": 8}}]}).json
    assert predictions == {"predictions": [expected]}


def test_a_device_that_samples_draws_when_it_is_asked_to(sampled):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 30, "temperature": 5.0}}
    assert len({sampled.post("/generate", body).json["generated_text"] for _ in range(4)}) > 1


def test_return_full_text_puts_the_prompt_first(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3, "return_full_text": True}}
    whole = served.post("/generate", body).json["generated_text"]
    assert whole.startswith("Hello")
    assert events(served.post("/generate_stream", body))[-1]["generated_text"] == whole


def test_top_tokens_come_when_asked_for(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 3}}
    top = served.post("/generate", body).json["details"]["top_tokens"]
    assert [len(tokens) for tokens in top] == [3, 3]
    assert [event["top_tokens"] for event in events(served.post("/generate_stream", body))] == top
    del body["parameters"]["top_n_tokens"]
    assert "top_tokens" not in served.post("/generate", body).json["details"]
    assert "top_tokens" not in events(served.post("/generate_stream", body))[0]


def test_a_stop_string_ends_the_text_and_frees_the_slot(served):
    full = served.post("/generate", {"inputs": "stop", "parameters": {"max_new_tokens": 30}}).json["generated_text"]
    stop = full[4:7]
    body = {"inputs": "stop", "parameters": {"max_new_tokens": 30, "stop": [stop], "details": True}}
    response = served.post("/generate", body).json
    assert response["generated_text"] == full[: full.index(stop) + len(stop)]
    assert response["details"]["finish_reason"] == "stop_sequence"
    last = events(served.post("/generate_stream", body))[-1]
    assert last["generated_text"] == response["generated_text"]
    assert last["details"]["finish_reason"] == "stop_sequence"


def test_truncate_runs_the_end_of_the_prompt(served):
    truncated = {"inputs": "abcdefgh", "parameters": {"max_new_tokens": 5, "truncate": 3}}
    short = {"inputs": "fgh", "parameters": {"max_new_tokens": 5}}
    assert served.post("/generate", truncated).json == served.post("/generate", short).json


BAD = [
    ({"parameters": {}}, 422, "Failed to deserialize the JSON body into the target type: "),
    ({"inputs": ""}, 422, "Input validation error: `inputs` cannot be empty"),
    ({"inputs": ["a"]}, 422, "Failed to deserialize the JSON body into the target type: inputs: "),
    (b"{", 400, "Failed to parse the request body as JSON: "),
    (b"\xff", 400, "Failed to parse the request body as JSON: "),
    (b"", 400, "Failed to parse the request body as JSON: "),
    ({"inputs": "a", "parameters": {"temperature": 0}}, 422, "Input validation error: `temperature` must be strictly positive"),
    (
        {"inputs": "a", "parameters": {"top_k": "x"}},
        422,
        "Failed to deserialize the JSON body into the target type: parameters.top_k: ",
    ),
    ({"inputs": "a", "parameters": {"watermark": True}}, 422, "Input validation error: `watermark` is not supported"),
    ({"inputs": "a" * WINDOW}, 422, f"Input validation error: `inputs` must have at most {WINDOW - 1} tokens. Given: {WINDOW}"),
    (
        {"inputs": "abc", "parameters": {"max_new_tokens": WINDOW}},
        422,
        f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {WINDOW}. "
        f"Given: 3 `inputs` tokens and {WINDOW} `max_new_tokens`",
    ),
]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_a_bad_body_gets_its_status_and_words_before_the_first_byte(served, route, body, status, words):
    response = served.post(route, body)
    assert response.status_code == status
    assert response.content_type == "application/json"
    assert list(response.json) == ["error", "error_type"]
    assert response.json["error_type"] == "validation"
    assert response.json["error"].startswith(words)


def test_other_content_types_are_refused(served):
    response = served.post("/generate", {"inputs": "a"}, content_type="application/x-www-form-urlencoded")
    assert response.status_code == 415
    assert response.json["error"] == "Expected request with `Content-Type: application/json`"
    assert served.post("/generate", {"inputs": "a"}, content_type="application/vnd.api+json; charset=utf-8").status_code == 200


def test_what_http_refuses_is_json_too(served):
    assert served.client.get("/nowhere").status_code == 404
    assert served.client.get("/nowhere").json["error_type"] == "not_found"
    wrong_method = served.client.get("/generate")
    assert wrong_method.status_code == 405
    assert "POST" in wrong_method.headers["Allow"]
    assert wrong_method.json["error_type"] == "method_not_allowed"
    too_large = served.post("/generate", {"inputs": "a" * LIMITS["payload_limit"]})
    assert too_large.status_code == 413
    assert str(LIMITS["payload_limit"]) in too_large.json["error"]


@pytest.mark.parametrize("excess", [1, 1000])
def test_a_chunked_body_that_is_too_large_is_refused_whole(served, excess):
    fits = json.dumps({"inputs": "Hi", "parameters": {"max_new_tokens": 1}}).encode()
    body = io.BytesIO(fits.ljust(LIMITS["payload_limit"] + excess))
    chunked = {"wsgi.input_terminated": True, "CONTENT_LENGTH": None, "wsgi.input": body}
    assert served.post("/generate", b"", environ_overrides=chunked).status_code == 413
    body = io.BytesIO(fits.ljust(LIMITS["payload_limit"]))
    assert served.post("/generate", b"", environ_overrides=chunked | {"wsgi.input": body}).status_code == 200


def full(served):
    served.admission.limit = 0
    served.link.interrupt()
    wait_until(lambda: served.seen.is_full)


def test_a_full_house_is_told_before_anyone_asks_and_so_is_a_free_place(served):
    served.admission.limit = 1
    served.model.may_decode.clear()
    with served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}, buffered=False) as stream:
        wait_until(lambda: served.seen.is_full)
        served.model.may_decode.set()
        assert b"".join(stream.response).count(b"data: ") == 2
    wait_until(lambda: not served.seen.is_full)


def test_a_client_that_asks_before_the_report_of_a_free_place_arrives_is_served(served, monkeypatch):
    monkeypatch.setattr("api.server.ROOM_S", 1.0)
    full(served)
    answer = gevent.spawn(served.post, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}})
    gevent.idle()  # the request has been found too much
    served.admission.limit = 1
    served.link.interrupt()
    assert answer.get(timeout=WAIT_S).status_code == 200


def test_a_stream_too_many_is_429_before_its_first_byte(served):
    served.admission.limit = 0
    response = served.post("/generate_stream", {"inputs": "Hello"})
    assert response.status_code == 429
    assert response.json == {"error": "Model is overloaded", "error_type": "overloaded"}
    assert int(response.headers["Retry-After"]) > 0


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_a_failure_before_the_first_token_has_its_own_status(served, route):
    served.model.fail_next_prefill = True
    response = served.post(route, {"inputs": "a"})
    assert response.status_code == 424
    assert response.json == {
        "error": "Request failed during generation: a step on the device failed",
        "error_type": "generation",
    }


def test_a_prompt_that_has_been_run_does_not_begin_an_answer_that_then_fails(served, monkeypatch):
    generating, request_id, queue = generation_of(served, monkeypatch)
    queue.put([Prompt(request_id, 0.0)])
    gevent.spawn_later(0.01, queue.put, [End(request_id, "failed", "no number")])
    with pytest.raises(errors.ApiError) as error:
        next(iter(generating))
    assert error.value.status == 424


def test_tokens_that_arrive_together_with_the_end_of_their_request_are_not_lost(served, monkeypatch):
    generating, request_id, queue = generation_of(served, monkeypatch)
    queue.put([Prompt(request_id, 0.0), Token(request_id, 97, None), End(request_id, "failed", "no number")])
    batches = iter(generating)
    ((_sequence, pieces),) = next(batches)
    assert [piece.id for piece in pieces] == [97]
    with pytest.raises(errors.ApiError, match="no number"):
        next(batches)


def generation_of(served, monkeypatch):
    """A generation for the prompt "a", its id, and the queue for its messages, which the worker does not hear of."""
    sent = []
    monkeypatch.setattr(served.seen, "submit", lambda generates, queue: sent.append((generates[0].id, queue)))
    of = Served(served.config, served.info, served.seen.text)
    prompt = PromptToRun(tgi.check(tgi.GenerateRequest("a"), of, streams=True), [97], 5)
    connection = generation.Connection(None, input_may_end=False)
    arrival = generation.Arrival("an-id", time.monotonic(), connection)
    return generation.Generation(served.seen, [prompt], arrival, generation.Watch()), *sent[0]


def test_a_failure_in_the_middle_of_a_stream_is_an_event(served):
    served.model.may_decode.clear()
    with served.post("/generate_stream", {"inputs": "Hello"}) as response:
        assert response.status_code == 200
        served.model.fail_next_decode = True
        served.model.may_decode.set()
        stream = events(response)
    assert stream[0]["index"] == 1
    assert stream[-1] == {"error": "Request failed during generation: a step on the device failed", "error_type": "generation"}


def test_a_silent_stream_is_kept_open_with_comments(served, monkeypatch):
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.05)
    served.model.may_decode.clear()
    with served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}, buffered=False) as response:
        chunks = iter(response.response)
        assert next(chunks).startswith(b"data: ")
        assert next(chunks) == b":\n\n"
        served.model.may_decode.set()
        rest = b"".join(chunks)
    assert rest.count(b"data: ") == len(served.expected("Hello", 3)) - 1


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_a_client_that_hangs_up_while_its_prompt_is_run_frees_its_slot_after_the_chunk_that_runs(serve, route):
    served = serve(prefill_chunk=4).get_ready()
    chunks, there, may_go_on, forward = [], threading.Event(), threading.Event(), served.model.forward

    def pause_in_third_chunk(step):
        if step[0].slot == 1:
            chunks.append(step[0].begin)
            if step[0].begin == 8:
                there.set()
                assert may_go_on.wait(WAIT_S)
        return forward(step)

    served.model.forward = pause_in_third_chunk
    other = served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 50}}, buffered=False)
    ours, theirs = socket.socketpair()
    asking = gevent.spawn(
        lambda: served.post(route, {"inputs": "a" * 40}, environ_overrides={"gunicorn.socket": ours}, buffered=False)
    )
    wait_until(there.is_set)
    theirs.close()
    asking.join(WAIT_S)
    assert asking.ready(), "it waits for the device, though nobody reads"
    wait_until(lambda: served.link._inbox.qsize())  # the worker has been told
    may_go_on.set()
    assert b"".join(other.response).count(b"data: ") == len(served.expected("Hello", 50))
    assert chunks == [0, 4, 8]
    served.assert_idle()
    ours.close()


@contextlib.contextmanager
def waiting_with_a_socket(served, **headers):
    """A request that waits for the device: its greenlet, and the client's end of its connection."""
    served.model.may_decode.clear()
    ours, theirs = socket.socketpair()
    options = {"environ_overrides": {"gunicorn.socket": ours}, "headers": headers}
    asking = gevent.spawn(lambda: served.post("/generate", {"inputs": "Hello"}, **options))
    wait_until(lambda: len(served.seen._queues) == 1)
    with ours, theirs:
        yield asking, theirs
        served.model.may_decode.set()


def test_what_a_client_sent_ahead_does_not_hide_that_it_hung_up(served):
    with waiting_with_a_socket(served) as (asking, theirs):
        theirs.sendall(b"GET /health HTTP/1.1\r\n")
        asking.join(3 * generation.WATCH_S)
        assert not asking.ready()
        theirs.close()
        assert asking.get(timeout=WAIT_S).status_code == errors.HANG_UP


def test_a_client_that_announced_its_last_request_may_close_its_sending_side(served):
    with waiting_with_a_socket(served, Connection="close") as (asking, theirs):
        theirs.shutdown(socket.SHUT_WR)
        asking.join(3 * generation.WATCH_S)
        assert not asking.ready()
        served.model.may_decode.set()
        assert asking.get(timeout=WAIT_S).status_code == 200


def test_a_bug_in_the_middle_of_a_stream_is_an_event_and_ends_that_stream_alone(served, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(NativeAnswer, "events", lambda *_: 1 / 0)
        *_, last = events(served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 5}}))
    assert last["error_type"] == "internal"
    assert "ZeroDivisionError" in caplog.text
    assert served.post("/generate", {"inputs": "Hello"}).status_code == 200


def test_a_bug_of_ours_is_an_answer_too(served, monkeypatch, caplog):
    monkeypatch.setattr(served.seen.text.tokenizer.__class__, "encode", lambda *_: 1 // 0)
    response = served.post("/generate", {"inputs": "a"})
    assert response.status_code == 422
    monkeypatch.setattr("api.fields.parse", lambda *_: 1 // 0)
    response = served.post("/generate", {"inputs": "a"})
    assert response.status_code == 500
    assert response.json == {"error": "Internal server error", "error_type": "internal"}
    assert "ZeroDivisionError" in caplog.text


# What every route has in common


def test_a_request_keeps_the_id_of_its_client_in_header_answer_and_log(served, caplog):
    caplog.set_level("INFO")
    given = {"X-Request-Id": "client-1.a_B"}
    answer = served.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, headers=given)
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("client-1.a_B", "cmpl-client-1.a_B")
    wait_until(lambda: any(getattr(record, "fields", {}).get("request_id") == "client-1.a_B" for record in caplog.records))
    refused = served.post("/generate", b"{", headers=given)
    assert refused.headers["x-request-id"] == "client-1.a_B"


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "ä", "a\tb"])
def test_an_id_that_is_none_is_replaced_by_a_new_one(served, given):
    headers = {"X-Request-Id": given} if given else {}
    first, second = (served.client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first != second and len(first) == 24


def body_of(route):
    """A small request for each route that takes one."""
    if "chat" in route:
        return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    if route == "/v1/completions":
        return {"prompt": "Hi", "max_tokens": 3, "temperature": 0}
    if route == "/v1/responses":
        return {"input": "Hi", "max_output_tokens": 3, "temperature": 0}
    instance = {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}
    return {"instances": [instance]} if route == "/vertex" else instance


def ask(served, route, **options):
    path = route.path.replace("{name}", "m") + ("?sentence=Hi" if route.path == "/infer" else "")
    if route.method == "GET":
        return served.client.get(path, **options)
    return served.post(path, body_of(path), **options)


def test_the_openapi_document_tells_every_route_and_no_other(served):
    document = served.client.get("/api-doc/openapi.json").json
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    rules = served.client.application.url_map.iter_rules()
    there = {(method, rule.rule) for rule in rules for method in rule.methods - {"OPTIONS", "HEAD"}}
    there = {(method, path.replace("<path:name>", "{name}")) for method, path in there}
    assert told == {(method, path) for method, path in there if not path.startswith("/docs")}, "but the page for people"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_answers_in_the_type_that_it_promises(served, route):
    response = ask(served, route)
    assert response.status_code == 200
    promised = served.client.get("/api-doc/openapi.json").json["paths"][route.path][route.method.lower()]["responses"]["200"]
    kinds = promised.get("content")
    assert (response.mimetype or None) in (kinds or [None])


def test_the_openapi_document_is_valid_and_serves_client_generators():
    document = json.loads(json.dumps(openapi()))
    openapi_spec_validator.validate(document)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert len({operation["summary"] for operation in operations}) == len(operations)
    text = json.dumps(document)
    assert '"default": null' not in text, "generators take such a field for a required one"
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "model" in chat and all("items" in kind for kind in chat["tools"]["anyOf"] if kind["type"] == "array")


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_example_of_the_document_is_a_request_that_is_served(served, kind):
    (path,) = [route.path for route in ROUTES if route.bodies == (kind,)][:1]
    assert served.post(path, EXAMPLES[kind]).status_code == 200


def test_the_page_of_the_document_needs_no_other_server(served):
    page = served.client.get("/docs/").get_data(as_text=True)
    assert "swagger" in page
    assert "http://" not in page.replace("http://localhost/", "")
    assert "https://" not in page


def test_with_an_api_key_only_health_and_metrics_are_open(serve):
    served = serve(api_key="Secret").get_ready()
    for route in ROUTES:
        refused = ask(served, route)
        if not route.needs_key:
            assert refused.status_code == 200
            continue
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        for wrong in ("Secret", "Bearer secret", "Bearer", "Bearer Secre", "Bearer Secrets", "Basic Secret", "Bearer Sécret"):
            assert ask(served, route, headers={"Authorization": wrong}).status_code == 401
        for right in ("Bearer Secret", "bearer Secret"):
            assert ask(served, route, headers={"Authorization": right}).status_code == 200


def test_a_refusal_for_want_of_the_key_has_the_shape_of_its_api(serve):
    served = serve(api_key="Secret").get_ready()
    assert served.post("/generate", {"inputs": "a"}).json["error_type"] == "unauthorized"
    assert served.post("/v1/completions", {"prompt": "a"}).json["error"]["code"] == "invalid_api_key"
    assert served.client.get("/nowhere").status_code == 401, "what is there is nobody's business"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/nowhere"])
def test_browsers_may_ask_from_anywhere_unless_told_otherwise(serve, path):
    served = serve(api_key="Secret").get_ready()
    asked = served.client.options(path, headers={"Origin": "https://a.example", "Access-Control-Request-Method": "POST"})
    assert asked.status_code == 200
    assert asked.headers["Access-Control-Allow-Origin"] == "*"
    assert asked.headers["Access-Control-Allow-Methods"] == "GET,POST"
    assert {"authorization", "content-type"} <= set(asked.headers["Access-Control-Allow-Headers"].split(","))
    refused = served.client.get(path)
    assert refused.headers["Access-Control-Allow-Origin"] == "*"
    assert "origin" in refused.headers["Vary"].lower()


def test_with_a_list_of_origins_only_these_may_ask(serve):
    served = serve(cors_allow_origin="https://a.example,https://b.example").get_ready()
    for origin in ("https://a.example", "https://b.example"):
        response = served.client.get("/health", headers={"Origin": origin})
        assert response.headers["Access-Control-Allow-Origin"] == origin
    for origin in ("https://c.example", "https://a.example.evil", ""):
        assert "Access-Control-Allow-Origin" not in served.client.get("/health", headers={"Origin": origin}).headers


def test_errors_of_openais_routes_have_openais_shape(served):
    for response, status, code in [
        (served.post("/v1/completions", b"{"), 400, "validation"),
        (served.client.get("/v1/nothing"), 404, "not_found"),
        (served.client.get("/v1/completions"), 405, "method_not_allowed"),
        (served.post("/v1/completions", b" " * (LIMITS["payload_limit"] + 1)), 413, "validation"),
        (served.post("/v1/completions", {"prompt": "a"}, content_type="text/plain"), 415, "validation"),
        (served.post("/v1/completions", {}), 422, "validation"),
    ]:
        assert response.status_code == status
        assert list(response.json) == ["error"]
        assert response.json["error"]["code"] == code
        assert response.json["error"]["type"] == "invalid_request_error"
    served.admission.limit = 0
    refused = served.post("/v1/completions", {"prompt": "a", "stream": True})
    assert (refused.status_code, refused.json["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["Retry-After"]) > 0


def test_a_request_of_several_sequences_is_refused_before_its_first_byte_or_not_at_all(served):
    served.admission.limit = 2
    body = {"prompt": "Hello", "n": 3, "stream": True}
    for _ in range(5):
        assert served.post("/v1/completions", body).status_code == 429


class BrokenBody(io.BytesIO):
    """A request body that ends in an error, as gunicorn's do."""

    def __init__(self, error):
        self.error = error

    def read(self, *_):
        raise self.error

    readinto = readline = read


@pytest.mark.parametrize(
    ("error", "status", "counts"),
    [(InvalidChunkSize(b"zz"), 400, "tgi_http_errors_total,400"), (ClientDisconnected(), 499, "tgi_client_hang_ups_total")],
)
def test_a_body_that_does_not_come_to_its_end_is_told_or_counted_as_what_it_is(served, error, status, counts):
    broken = {"wsgi.input_terminated": True, "CONTENT_LENGTH": None, "wsgi.input": BrokenBody(error)}
    response = served.post("/generate", b"", environ_overrides=broken)
    assert response.status_code == status
    counted(served, counts, 1)
    assert metrics(served)["tgi_request_count_total"] == 1
    assert "failed" not in (response.get_data(as_text=True) if status == 499 else "")


def test_a_key_beyond_ascii_works_as_curl_sends_it(serve):
    served = serve(api_key="Schlüssel").get_ready()
    sent = "Bearer Schlüssel".encode().decode("latin-1")
    assert served.client.get("/info", headers={"Authorization": sent}).status_code == 200


def test_a_long_text_is_tokenized_while_others_are_answered(serve):
    served = serve(payload_limit=2_000_000).get_ready()
    text, gaps = "a" * 1_000_000, []

    def watch():
        while True:
            last = time.monotonic()
            gevent.sleep(0.001)
            gaps.append(time.monotonic() - last)

    watching = gevent.spawn(watch)
    started_at = time.monotonic()
    body = {"inputs": text, "parameters": {"truncate": 10, "max_new_tokens": 1}}  # else it is refused before
    assert served.post("/generate", body).status_code == 200
    taken = time.monotonic() - started_at
    watching.kill()
    assert max(gaps) < taken / 2, f"{max(gaps):.2f} of {taken:.2f} s nobody else could run"


def test_a_new_web_process_accepts_nothing_before_it_can_serve_what_the_worker_accepts(served, monkeypatch):
    monkeypatch.setattr(engine_client, "FIRST_MESSAGE_S", WAIT_S)
    may_load = threading.Event()
    newcomer = EngineClient(served.address, lambda info: may_load.wait(WAIT_S) and ModelText.load(info, served.config))
    try:
        waiting = gevent.spawn(newcomer.wait_until_known)
        wait_until(lambda: newcomer.phase == "loading")
        assert not waiting.ready()
        may_load.set()
        waiting.join(WAIT_S)
        assert newcomer.phase == "ready" and waiting.ready()
    finally:
        may_load.set()
        newcomer.close()


def test_a_web_process_waits_neither_for_a_worker_that_boots_nor_for_one_that_is_not_there(serve, tmp_path, monkeypatch):
    served = serve()
    monkeypatch.setattr(engine_client, "FIRST_MESSAGE_S", WAIT_S)
    monkeypatch.setattr(engine_client, "LOADING_S", 10 * WAIT_S)
    with gevent.Timeout(2 * WAIT_S):
        served.seen.wait_until_known()
    assert served.seen.phase == "starting" and served.seen.text is None
    monkeypatch.setattr(engine_client, "FIRST_MESSAGE_S", 0.01)
    alone = EngineClient(f"ipc://{tmp_path}/nobody.sock", lambda info: None)
    alone.wait_until_known()
    assert alone.phase == "starting"
    alone.close()


def test_an_openai_stream_that_fails_says_so_and_is_done(served):
    served.model.may_decode.clear()
    with served.post("/v1/completions", {"prompt": "Hello", "stream": True, "temperature": 0}) as response:
        assert response.status_code == 200
        served.model.fail_next_decode = True
        served.model.may_decode.set()
        text = response.get_data(as_text=True)
    *_, error, done, rest = text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation"
    assert (done, rest) == ("data: [DONE]", "")


def test_the_headers_tell_what_a_request_took(served):
    response = served.post("/generate", {"inputs": "Héllo", "parameters": {"max_new_tokens": 4}})
    headers = {name: value for name, value in response.headers.items() if name.startswith("x-") and name != "x-request-id"}
    assert headers.pop("x-compute-type") == "fake"
    assert headers.pop("x-compute-characters") == "5"
    assert 0 < float(headers.pop("x-compute-time")) < WAIT_S
    assert headers.pop("x-prompt-tokens") == "6"
    assert headers.pop("x-generated-tokens") == str(len(served.expected("Héllo", 4)))
    milliseconds = {name: int(value) for name, value in headers.items()}
    assert set(milliseconds) == {"x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"}
    parts = sum(milliseconds[f"x-{part}-time"] for part in ("validation", "queue", "inference"))
    assert parts <= milliseconds["x-total-time"] <= parts + 3
    stream = served.post("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 2}})
    assert (stream.headers["x-compute-type"], stream.headers["x-compute-characters"]) == ("fake", "2")
    assert "x-total-time" not in stream.headers
    stream.get_data()


def test_the_time_in_the_queue_is_told_apart_from_the_rest(served):
    served.model.may_decode.clear()
    running = gevent.spawn(served.post, "/generate", {"inputs": "a"})
    wait_until(lambda: served.model.is_paused)  # sooner, the second one's prompt could run right behind the first one's
    answers = []
    body = {"inputs": "c", "parameters": {"max_new_tokens": 1}}
    waiting = gevent.spawn(lambda: answers.append(served.post("/generate", body)))
    wait_until(lambda: len(served.seen._queues) == 2)
    sent_at = time.monotonic()
    wait_until(lambda: time.monotonic() - sent_at > 0.1)
    served.model.may_decode.set()
    for thread in (running, waiting):
        thread.join(WAIT_S)
    assert int(answers[0].headers["x-queue-time"]) >= 50
    assert int(answers[0].headers["x-inference-time"]) < int(answers[0].headers["x-queue-time"])


def test_a_request_of_several_sequences_tells_their_sums(served):
    body = {"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    headers = served.post("/v1/completions", body).headers
    assert (headers["x-compute-characters"], headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("4", "4", "12")


# Deadlines

DEADLINE_S = 1.5  # long enough for the first token, also on a busy machine


def late(served, route, body):
    """Answers while the device stands still after the first token, until the deadline."""
    served.model.may_decode.clear()
    response = served.post(route, body)
    served.model.may_decode.set()
    return response


def test_an_answer_ends_at_its_deadline_with_the_text_so_far(serve):
    served = serve(response_deadline=DEADLINE_S).get_ready()
    first = served.tokenizer.decode(served.expected("Hello", 1))
    response = late(served, "/generate", {"inputs": "Hello", "parameters": {"details": True}})
    assert (response.status_code, response.json["generated_text"]) == (200, first)
    assert (response.json["details"]["finish_reason"], response.json["details"]["generated_tokens"]) == ("length", 1)
    served.assert_idle()
    response = late(served, "/v1/completions", {"prompt": "Hello", "temperature": 0})
    assert response.json["choices"][0]["finish_reason"] == "length"
    assert response.json["usage"]["completion_tokens"] == 1
    served.assert_idle()


@pytest.fixture
def narrow(serve):
    """One slot and a deadline: of several sequences only the first has begun when it comes."""
    served = serve(slots=1, response_deadline=DEADLINE_S).get_ready()
    yield served
    served.assert_idle()


def test_at_the_deadline_the_best_is_one_that_has_begun(narrow):
    parameters = {"best_of": 2, "temperature": 0.5, "details": True, "decoder_input_details": True}
    response = late(narrow, "/generate", {"inputs": "Hello", "parameters": parameters})
    assert response.status_code == 200
    assert response.json["details"]["generated_tokens"] == 1
    (other,) = response.json["details"]["best_of_sequences"]
    assert (other["generated_tokens"], other["generated_text"]) == (0, "")
    assert [token["logprob"] for token in other["prefill"]] == [None] * 5
    narrow.assert_idle()
    body = {"prompt": ["Hello", "Hi"], "echo": True, "logprobs": 1, "temperature": 0}
    response = late(narrow, "/v1/completions", body)
    assert response.status_code == 200
    assert [len(choice["logprobs"]["tokens"]) for choice in response.json["choices"]] == [6, 2]


def test_an_invocation_has_a_deadline_of_its_own(serve, monkeypatch):
    monkeypatch.setattr("api.routes.SAGEMAKER_DEADLINE_S", DEADLINE_S)
    served = serve().get_ready()
    body = {"inputs": "Hello", "parameters": {"return_full_text": False}}
    assert late(served, "/invocations", body).json[0]["generated_text"] == served.tokenizer.decode(served.expected("Hello", 1))
    served.assert_idle()


def test_a_stream_has_no_deadline(serve):
    served = serve(response_deadline=1e-9).get_ready()
    stream = events(served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 12}}))
    assert len(stream) == len(served.expected("Hello", 12))


def test_who_has_only_waited_until_the_deadline_is_told_to_come_again(serve):
    served = serve(slots=1, response_deadline=0.3).get_ready()
    served.model.may_decode.clear()
    busy = served.post("/generate_stream", {"inputs": "a"}, buffered=False)
    response = served.post("/generate", {"inputs": "c"})
    assert (response.status_code, response.json["error_type"]) == (429, "overloaded")
    assert "Retry-After" in response.headers
    served.model.may_decode.set()
    busy.close()
    served.assert_idle()


# Metrics


def metrics(served):
    text = served.client.get("/metrics").get_data(as_text=True)
    return {
        sample.name + "".join(f",{value}" for label, value in sample.labels.items() if label != "le"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def counted(served, name, value):
    wait_until(lambda: metrics(served)[name] == value)


def test_a_request_for_more_sequences_than_may_ever_run_and_wait_is_not_told_to_come_back(serve):
    served = serve(max_concurrent_requests=2, max_client_batch_size=4).get_ready()
    response = served.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "temperature": 1})
    assert response.status_code == 422
    assert "the request asks for 4 sequences, and at most 2" in response.json["error"]["message"]
    assert served.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}).status_code == 200


def test_more_than_a_message_to_the_worker_holds_is_refused_and_not_sent(served, monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_MESSAGE_BYTES", 1000)
    response = served.post("/v1/completions", {"prompt": ["a" * 30, "b" * 30], "n": 2, "temperature": 1})
    assert response.status_code == 422
    message = "the request asks for 4 sequences whose prompts have 120 tokens altogether, too many to be sent at once"
    assert message in response.json["error"]["message"]
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_every_request_for_text_is_counted_once(served):
    assert metrics(served)["tgi_request_count_total"] == 0
    small = {"max_new_tokens": 3, "temperature": 0.5}
    served.post("/generate", {"inputs": "a", "parameters": small | {"best_of": 2}})
    served.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    with served.post("/v1/chat/completions", body_of("/v1/chat/completions") | {"stream": True}) as stream:
        stream.get_data()
    served.post("/vertex", {"instances": [{"inputs": "a", "parameters": small}] * 2})
    counted(served, "tgi_request_success_total", 4)
    served.post("/generate", {"inputs": ""})
    served.post("/v1/completions", b"{")
    served.post("/v1/chat/completions", {"messages": [{"role": "forbidden", "content": "x"}]})
    served.model.fail_next_prefill = True
    served.post("/generate", {"inputs": "a"})
    counted(served, "tgi_request_count_total", 8)
    seen = metrics(served)
    assert seen["tgi_request_success_total"] == seen["tgi_request_duration_count"] == 4
    assert seen["tgi_request_time_to_first_token_duration_count"] == 4
    failures = {name: value for name, value in seen.items() if name.startswith("tgi_request_failure") and value}
    assert failures == {
        f"tgi_request_failure_total,{err}": n for err, n in (("validation", 2), ("template", 1), ("generation", 1))
    }


def test_what_is_no_request_for_text_is_not_counted_as_one(served):
    served.client.get("/health")
    served.client.get("/info")
    served.post("/tokenize", {"inputs": "a"})
    served.client.get("/nowhere")
    served.client.get("/generate")
    served.post("/tokenize", b"{")
    counted(served, "tgi_http_errors_total,400", 1)
    seen = metrics(served)
    assert (seen["tgi_http_errors_total,404"], seen["tgi_http_errors_total,405"]) == (1, 1)
    assert seen["tgi_request_count_total"] == 0


def test_who_hangs_up_is_counted_as_dropped(served):
    served.model.may_decode.clear()
    response = served.post("/generate_stream", {"inputs": "Hello"}, buffered=False)
    next(iter(response.response))
    response.close()
    counted(served, "tgi_client_hang_ups_total", 1)
    assert metrics(served)["tgi_request_failure_total,dropped"] == 1
    served.model.may_decode.set()


def test_who_hangs_up_before_the_first_event_is_counted_too(served):
    served.post("/generate_stream", {"inputs": "Hello"}, buffered=False).close()
    counted(served, "tgi_request_failure_total,dropped", 1)
    assert metrics(served)["tgi_request_count_total"] == 1


def test_metrics_are_there_while_the_device_stands_still_and_before_it_is_ready(booting):
    assert "tgi_request_count 0.0" in booting.client.get("/metrics").get_data(as_text=True)
    booting.get_ready()
    booting.model.may_decode.clear()
    stream = booting.post("/generate_stream", {"inputs": "Hello"}, buffered=False)
    assert metrics(booting)["tgi_slots_busy"] == 1
    booting.model.may_decode.set()
    stream.close()


def test_without_a_worker_there_are_no_metrics_and_it_is_told(booting):
    booting.get_ready()
    booting.link.close()
    wait_until(lambda: booting.seen.phase == "dead")
    assert booting.client.get("/metrics").status_code == 503


def test_a_template_without_an_end_fails_its_chat_and_holds_up_nobody(serve, monkeypatch):
    monkeypatch.setattr("text.template.TEMPLATE_CPU_S", 1)
    served = serve()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (served.folder / "chat_template.jinja").write_text(endless)
    served.get_ready()
    chats = []
    chat = gevent.spawn(lambda: chats.append(served.post("/v1/chat/completions", body_of("/v1/chat/completions"))))
    assert served.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}).status_code == 200
    assert served.client.get("/health").status_code == 200
    assert not chat.ready(), "it is still at it"
    chat.join(WAIT_S)
    (refused,) = chats
    assert refused.status_code == 422 and "longer than 1 s of processor time" in refused.json["error"]["message"]


def test_a_text_of_too_many_tokens_is_not_listed_token_by_token(served, monkeypatch):
    monkeypatch.setattr("api.tokenize.MAX_LISTED_TOKENS", 10)
    assert len(served.post("/tokenize", {"inputs": "a" * 10}).json) == 10
    refused = served.post("/tokenize", {"inputs": "a" * 11})
    assert (refused.status_code, refused.json["error"].split(": ")[1]) == (422, "the text has 11 tokens; at most 10 are listed")
    assert served.post("/chat_tokenize", {"messages": [{"role": "user", "content": "a" * 11}]}).status_code == 422


def test_a_compressed_body_is_refused_by_name_instead_of_read_as_text(served):
    for header, status in (("Content-Encoding", 415), ("Transfer-Encoding", 501)):
        response = served.post("/generate", {"inputs": "a"}, headers={header: "gzip, chunked"})
        assert (response.status_code, header in response.json["error"]) == (status, True)
    assert served.post("/generate", {"inputs": "a"}, headers={"Content-Encoding": "identity"}).status_code == 200


def test_the_page_for_people_is_reached_on_this_host_whatever_the_request_calls_it(served):
    response = served.client.get("/docs", headers={"Host": "evil.example"})
    assert (response.status_code, response.headers["Location"]) == (302, "/docs/")


@pytest.mark.parametrize("route", ["/generate", "/tokenize"])
def test_a_panic_of_the_tokenizers_library_is_an_error_of_the_request(served, monkeypatch, route):
    class PanicException(BaseException):
        """As pyo3 makes of a panic: no Exception."""

    class Panics:
        def encode_batch(self, *_args, **_options):
            raise PanicException("called `Option::unwrap()` on a `None` value")

        encode_batch_fast = encode_batch

    monkeypatch.setattr(served.seen.text.tokenizer, "_tokenizer", Panics())
    response = served.post(route, {"inputs": "a"})
    assert response.status_code == 422
    assert response.json["error"].endswith("tokenizer error: the tokenizer cannot process this text")
