"""The OpenAPI document: the routes, and the types of their requests and responses.

The types are those that requests are parsed into and responses are made of (schema.py), so the document cannot differ from
them. This layer knows neither Flask nor ZeroMQ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from api import types as schema
from api.types import ChatRequest, CompletionRequest, GenerateRequest, ResponsesRequest, VertexRequest
from config import VERSION


@dataclass(frozen=True)
class Route:
    """A route. `answers` are the types of its JSON responses with status 200, `events` those of the events of its streams.
    `parameter` is the place and the name of its one parameter."""

    method: str
    path: str
    summary: str
    bodies: tuple = ()
    answers: tuple = ()
    events: tuple = ()
    parameter: tuple[str, str] | None = None
    needs_key: bool = True
    content_type: str | None = None  # of a response that is not JSON


QUESTION = "What is Deep Learning?"
EXAMPLES = {
    GenerateRequest: {"inputs": QUESTION, "parameters": {"max_new_tokens": 20}},
    ChatRequest: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20},
    CompletionRequest: {"prompt": QUESTION, "max_tokens": 20},
    ResponsesRequest: {"input": QUESTION, "max_output_tokens": 20},
    VertexRequest: {"instances": [{"inputs": QUESTION, "parameters": {"max_new_tokens": 20}}]},
}
NATIVE, CHAT, COMPLETION = (GenerateRequest,), (ChatRequest,), (CompletionRequest,)
LIST, EVENT, COMPLETED = (list[schema.GenerateResponse],), (schema.StreamResponse,), (schema.Completion,)
CHATTED, CHUNK = (schema.ChatCompletion,), (schema.ChatChunk,)
SAGEMAKER = "SageMaker: a native, chat or completion request, which its required field identifies"
INFER = "The Ray Serve blueprint for Inferentia: the sentence and its continuation"
ROUTES = (
    Route("POST", "/generate", "Generate text, as one response", NATIVE, (schema.GenerateResponse,)),
    Route("POST", "/generate_stream", "Generate text, one event per token", NATIVE, events=EVENT),
    Route("POST", "/", "Generate text, streamed if `stream` is true", NATIVE, LIST, EVENT),
    Route("POST", "/v1", "`POST /` for base URLs that end in /v1", NATIVE, LIST, EVENT),
    Route("POST", "/tokenize", "The tokens of `inputs`", NATIVE, (list[schema.SimpleToken],)),
    Route(
        "POST", "/chat_tokenize", "The text and the tokens of a chat", CHAT, (schema.ChatTokenizeResponse,)
    ),
    Route("POST", "/v1/chat/completions", "OpenAI's chat completions", CHAT, CHATTED, CHUNK),
    Route("POST", "/v1/completions", "OpenAI's completions", COMPLETION, COMPLETED, COMPLETED),
    Route(
        "POST",
        "/v1/responses",
        "OpenAI's responses",
        (ResponsesRequest,),
        (schema.ResponsesResponse,),
        (dict[str, Any],),
    ),
    Route("GET", "/v1/models", "The served model, in a list", answers=(schema.ModelList,)),
    Route(
        "GET",
        "/v1/models/{name}",
        "The served model",
        answers=(schema.ModelCard,),
        parameter=("path", "name"),
    ),
    Route(
        "POST",
        "/invocations",
        SAGEMAKER,
        NATIVE + CHAT + COMPLETION,
        LIST + CHATTED + COMPLETED,
        EVENT + CHUNK + COMPLETED,
    ),
    Route(
        "POST", "/vertex", "Vertex AI: several requests at once", (VertexRequest,), (schema.VertexResponse,)
    ),
    Route("GET", "/infer", INFER, answers=(list[str],), parameter=("query", "sentence")),
    Route("GET", "/info", "The model, and the limits in force", answers=(schema.Info,)),
    Route("GET", "/health", "200 when requests are accepted", needs_key=False),
    Route("GET", "/ping", "`GET /health` under SageMaker's name", needs_key=False),
    Route("GET", "/", "`GET /health` for probes of the root", needs_key=False),
    Route("GET", "/live", "200 when this web process responds", needs_key=False),
    Route("GET", "/metrics", "Metrics for Prometheus", needs_key=False, content_type="text/plain"),
    Route("GET", "/api-doc/openapi.json", "This document", answers=(dict[str, Any],), needs_key=False),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    used = [kind for route in ROUTES for kind in (*route.bodies, *route.answers, *route.events)]
    used += [schema.ErrorBody, schema.OpenAIErrorBody]
    refs, components = msgspec.json.schema_components(used, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(used, refs))

    def content(kinds: tuple) -> dict[str, Any]:
        schemas = [schema_of[kind] for kind in kinds]
        return {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}

    components["VertexRequest"]["properties"]["instances"]["items"] = content(NATIVE + CHAT)["schema"]
    for component in components.values():
        for field in component.get("properties", {}).values():
            if field.get("default", ...) is None:
                del field["default"]  # client generators take a field with a default for a required one
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, content)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "neuron-textgen",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, content: Callable[[tuple], dict[str, Any]]) -> dict[str, Any]:
    """`content` makes the description of a body that has one of several types."""
    ok: dict[str, Any] = {}
    if route.answers:
        ok["application/json"] = content(route.answers)
    if route.events:
        data = {"contentMediaType": "application/json", "contentSchema": content(route.events)["schema"]}
        data = {"type": "string", "anyOf": [data, {"const": "[DONE]"}]}  # the last one of OpenAI's streams
        event = {
            "type": "object",
            "properties": {"data": data},
        }  # for validators; generated clients get the stream as text
        ok["text/event-stream"] = {"schema": {"anyOf": [{"type": "string"}, event]}}
    if route.content_type:
        ok[route.content_type] = {"schema": {"type": "string"}}
    native = () if route.path.startswith("/v1/") else (schema.ErrorBody,)
    openai = (schema.OpenAIErrorBody,) if route.path.startswith(("/v1/", "/invocations")) else ()
    error = {"description": "The error", "content": {"application/json": content(native + openai)}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.summary,
        "responses": {
            "200": {"description": "OK"} | ({"content": ok} if ok else {}),
            "4XX": error,
            "5XX": error,
        },
        "security": [{"key": []}, {}] if route.needs_key else [],
    }
    if route.bodies:
        body = content(route.bodies) | {"example": EXAMPLES[route.bodies[0]]}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if route.parameter:
        place, name = route.parameter
        operation["parameters"] = [
            {"in": place, "name": name, "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return operation
