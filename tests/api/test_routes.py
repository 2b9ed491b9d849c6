"""The table of routes: what answers, in which type and shape, with which key; the OpenAPI document that says so."""

import json
import re
import subprocess
import sys

import openapi_spec_validator
import pytest

from api.routes import BY_NAME, ROUTES, openapi_document
from run import HERE

OPEN = {f"GET {path}" for path in ("/", "/health", "/ping", "/live", "/metrics", "/api-doc/openapi.json")}


def ask(served, route, **options):
    path = route.path.replace("{name}", "m") + ("?sentence=Hi" if route.path == "/infer" else "")
    if "{response_id}" in path:
        made = served.post("/v1/responses", BY_NAME["POST /v1/responses"].example, **options).json
        path = path.replace("{response_id}", made.get("id", "unknown"))
    if route.bodies:
        return served.post(path, route.example, **options)
    return served.client.open(path, method=route.method, data=b"Hi" if route.takes_text else None, **options)


def test_the_openapi_document_tells_every_route_and_no_other(served):
    document = served.client.get("/api-doc/openapi.json").json
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    rules = served.client.application.url_map.iter_rules()
    there = {(method, rule.rule) for rule in rules for method in rule.methods - {"OPTIONS", "HEAD"}}
    there = {(method, re.sub("<name:(.*?)>", r"{\1}", path)) for method, path in there}
    pages = ("/docs", "/page/")  # for people
    assert told == {(method, path) for method, path in there if not path.startswith(pages)}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_answers_in_the_type_that_it_promises(served, route):
    response = ask(served, route)
    if "adapter" in route.path:
        assert response.status_code == 403  # without --lora-folder
        return
    assert response.status_code == 200
    promised = served.client.get("/api-doc/openapi.json").json["paths"][route.path][route.method.lower()]["responses"]["200"]
    kinds = promised.get("content")
    assert (response.mimetype or None) in (kinds or [None])


def test_the_openapi_document_is_valid_and_serves_client_generators():
    document = json.loads(json.dumps(openapi_document()))
    openapi_spec_validator.validate(document)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert len({operation["summary"] for operation in operations}) == len(operations)
    text = json.dumps(document)
    assert '"default": null' not in text, "generators take such a field for a required one"
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "model" in chat and all("items" in kind for kind in chat["tools"]["anyOf"] if kind["type"] == "array")


def test_the_document_says_that_log_probabilities_and_seeds_may_be_null():
    schemas = openapi_document()["components"]["schemas"]
    for kind, field in [("TokenOut", "logprob"), ("Details", "seed"), ("StreamDetails", "seed"), ("BestOfSequence", "seed")]:
        assert {"type": "null"} in schemas[kind]["properties"][field]["anyOf"]


def test_with_an_api_key_only_health_and_metrics_are_open(serve):
    served = serve(api_key="Secret").get_ready()
    for route in ROUTES:
        accepted = 403 if "adapter" in route.path else 200  # without --lora-folder
        refused = ask(served, route)
        if route.name in OPEN:
            assert refused.status_code == 200 and not route.needs_key
            continue
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        for wrong in ("Secret", "Bearer secret", "Bearer", "Bearer Secre", "Bearer Secrets", "Basic Secret", "Bearer Sécret"):
            assert ask(served, route, headers={"Authorization": wrong}).status_code == 401
        assert ask(served, route, headers={"x-api-key": "secret"}).status_code == 401
        rights = {"Authorization": "Bearer Secret"}, {"Authorization": "bearer Secret"}, {"x-api-key": "Secret"}
        for right in rights:
            assert ask(served, route, headers=right).status_code == accepted


def test_a_refusal_for_want_of_the_key_has_the_shape_of_its_api(serve):
    served = serve(api_key="Secret").get_ready()
    assert served.post("/generate", {"inputs": "a"}).json["error_type"] == "unauthorized"
    assert served.post("/v1/completions", {"prompt": "a"}).json["error"]["code"] == "invalid_api_key"
    assert served.post("/v1/messages", {}).json["error"]["type"] == "authentication_error"
    assert served.client.get("/nowhere").status_code == 401, "what is there is nobody's business"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error_type"),
    [
        ("POST", "{}", b"{", 400, "validation"),
        ("GET", "{}/nothing", None, 404, "not_found"),
        ("GET", "{}", None, 405, "method_not_allowed"),
        ("POST", "{}", b" " * 5001, 413, "validation"),
        ("POST", "{}", b"{}", 400, "validation"),
    ],
)
def test_what_http_refuses_has_the_shape_of_the_dialect_in_whose_paths_the_client_looked(
    served, method, path, body, status, error_type
):
    for route in ("/generate", "/v1/completions"):
        response = served.client.open(path.format(route), method=method, data=body, content_type="application/json")
        assert response.status_code == (422 if body == b"{}" and route == "/generate" else status)
        assert status != 405 or "POST" in response.headers["Allow"]
        if route == "/generate":
            assert response.json["error_type"] == error_type
        else:
            assert response.json["error"]["code"] == error_type
            assert response.json["error"]["type"] == "invalid_request_error"


def test_the_first_requests_of_a_process_may_come_all_at_once():
    """msgspec crashes when several threads make it learn a type, so none of them may be the first to need it."""
    program = """
import os, sys, threading
from api import routes
from api.http import fields
sys.setswitchinterval(1e-6)
threading.excepthook = lambda failure: (sys.__excepthook__(failure.exc_type, failure.exc_value, None), os._exit(1))
bodies = [(route.bodies[0], route.example) for route in routes.ROUTES if route.bodies]
together = threading.Barrier(64)
def read(n):
    kind, body = bodies[n % len(bodies)]
    together.wait()
    fields.read(body, kind)
threads = [threading.Thread(target=read, args=[n]) for n in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", program], cwd=HERE, check=True)


def test_every_type_of_the_document_has_a_name_of_its_own():
    """msgspec puts the module before names that two types have, and generators of clients cut it off again."""
    assert [name for name in openapi_document()["components"]["schemas"] if "." in name or "_" in name] == []
