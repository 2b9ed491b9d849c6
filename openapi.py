"""The OpenAPI document: the routes, and the types of what they take and answer.

The document is made from the types that requests are parsed into and responses are made of (schema.py), so it cannot differ
from them. This layer knows neither Flask nor ZeroMQ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from config import VERSION
from schema import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChatTokenizeResponse,
    Completion,
    CompletionRequest,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    Info,
    ModelCard,
    ModelList,
    OpenAIErrorBody,
    SimpleToken,
    StreamResponse,
    VertexRequest,
    VertexResponse,
)


@dataclass(frozen=True)
class Route:
    """One line of the contract. `answers` are the types of its 200 in JSON, if it has any; `events` those of its events, if
    it may be a stream; `parameter`: where the one that it has stands, and its name."""

    method: str
    path: str
    summary: str
    bodies: tuple = ()
    answers: tuple = ()
    events: tuple = ()
    parameter: tuple[str, str] | None = None
    needs_key: bool = True
    content_type: str | None = None  # of an answer that is no JSON


EXAMPLES = {
    GenerateRequest: {"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 20}},
    ChatRequest: {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 20},
    CompletionRequest: {"prompt": "What is Deep Learning?", "max_tokens": 20},
    VertexRequest: {"instances": [{"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 20}}]},
}
NATIVE, CHAT, COMPLETION = (GenerateRequest,), (ChatRequest,), (CompletionRequest,)
ROUTES = (
    Route("POST", "/generate", "Generate text, as a whole", NATIVE, (GenerateResponse,)),
    Route("POST", "/generate_stream", "Generate text, one event a token", NATIVE, events=(StreamResponse,)),
    Route(
        "POST",
        "/",
        "Generate text, whole or as `stream` says",
        NATIVE,
        (list[GenerateResponse],),
        (StreamResponse,),
    ),
    Route("POST", "/v1", "`POST /` for base URLs that end in /v1", NATIVE, (list[GenerateResponse],), (StreamResponse,)),
    Route("POST", "/tokenize", "The tokens of `inputs`", NATIVE, (list[SimpleToken],)),
    Route("POST", "/chat_tokenize", "The text and the tokens of a chat", CHAT, (ChatTokenizeResponse,)),
    Route("POST", "/v1/chat/completions", "OpenAI's chat completions", CHAT, (ChatCompletion,), (ChatChunk,)),
    Route("POST", "/v1/completions", "OpenAI's completions", COMPLETION, (Completion,), (Completion,)),
    Route("GET", "/v1/models", "The model that is served, in a list", answers=(ModelList,)),
    Route("GET", "/v1/models/{name}", "The model that is served", answers=(ModelCard,), parameter=("path", "name")),
    Route(
        "POST",
        "/invocations",
        "SageMaker: a native, a chat or a completion request, told apart by their fields",
        NATIVE + CHAT + COMPLETION,
        (list[GenerateResponse], ChatCompletion, Completion),
        (StreamResponse, ChatChunk, Completion),
    ),
    Route("POST", "/vertex", "Vertex AI: several requests at once", (VertexRequest,), (VertexResponse,)),
    Route(
        "GET",
        "/infer",
        "The Ray Serve blueprint for Inferentia: the sentence and what follows it",
        answers=(list[str],),
        parameter=("query", "sentence"),
    ),
    Route("GET", "/info", "The model, and the limits in force", answers=(Info,)),
    Route("GET", "/health", "200 when requests are accepted", needs_key=False),
    Route("GET", "/ping", "`GET /health` under the name that SageMaker asks for", needs_key=False),
    Route("GET", "/", "`GET /health` for probes of the root", needs_key=False),
    Route("GET", "/live", "200 when this web process answers", needs_key=False),
    Route("GET", "/metrics", "Metrics for Prometheus", needs_key=False, content_type="text/plain"),
    Route("GET", "/api-doc/openapi.json", "This document", answers=(dict[str, Any],), needs_key=False),
)


def openapi() -> dict[str, Any]:
    """The contract as an OpenAPI 3.1 document, from the types that requests are parsed into and answers are made of."""
    used = [kind for route in ROUTES for kind in (*route.bodies, *route.answers, *route.events)] + [ErrorBody, OpenAIErrorBody]
    refs, components = msgspec.json.schema_components(used, ref_template="#/components/schemas/{name}")
    schema_of = {str(kind): ref for kind, ref in zip(used, refs)}
    components["VertexRequest"]["properties"]["instances"]["items"] = _any_of([schema_of[str(kind)] for kind in NATIVE + CHAT])
    for component in components.values():
        for field in component.get("properties", {}).values():
            if field.get("default", ...) is None:
                del field["default"]  # `null` means absent; generators take a default for a required field
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "neuron-textgen", "version": VERSION, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    def of(kinds: tuple) -> dict[str, Any]:
        return _any_of([schema_of[str(kind)] for kind in kinds])

    def content(kinds: tuple) -> dict[str, Any]:
        return {"application/json": {"schema": of(kinds)}}

    ok: dict[str, Any] = {"description": "OK"}
    if route.answers or route.events or route.content_type:
        ok["content"] = content(route.answers) if route.answers else {}
        if route.events:
            data = {"type": "string", "contentMediaType": "application/json", "contentSchema": of(route.events)}
            ok["content"]["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": data}}}
        if route.content_type:
            ok["content"][route.content_type] = {"schema": {"type": "string"}}
    speaks_openai = route.path.startswith("/v1/")
    shapes = {True: (OpenAIErrorBody,), False: (ErrorBody,)}[speaks_openai]
    if route.path == "/invocations":
        shapes = (ErrorBody, OpenAIErrorBody)
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "responses": {"200": ok}
        | {status: {"description": "What went wrong", "content": content(shapes)} for status in ("4XX", "5XX")},
    }
    operation["security"] = [{"key": []}, {}] if route.needs_key else []
    if route.bodies:
        body = content(route.bodies)
        body["application/json"]["example"] = EXAMPLES[route.bodies[0]]
        operation["requestBody"] = {"required": True, "content": body}
    if route.parameter:
        place, name = route.parameter
        operation["parameters"] = [{"in": place, "name": name, "required": True, "schema": {"type": "string", "minLength": 1}}]
    return operation


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
