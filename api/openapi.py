"""The type of a route, and the OpenAPI document made of routes and of their request and response types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args

import msgspec
from flask import Response

from api.http.errors import ANTHROPIC, OPENAI, TGI, ErrorFormat
from api.http.fields import Json
from api.http.types import SCHEMA
from config import VERSION

QUESTION = "What is Deep Learning?"


@dataclass(frozen=True)
class Route:
    """A route and its description in the OpenAPI document.

    body: the type of the JSON body that the route takes; response: the type of the JSON response with status
    200; event: the type of the events of the stream. Each may be a union; None: no JSON body, no JSON
    response, no stream. example: a body of the first type in `body`.
    """

    method: str
    path: str  # as OpenAPI writes it
    summary: str
    view: Callable[..., Response]  # called with the Server, and a parameter of the path
    other_errors: tuple[ErrorFormat, ...] = ()  # that the view may choose
    needs_key: bool = True
    body: Any = None
    example: Json | None = None
    response: Any = None
    event: Any = None
    query: str = ""  # the name of its one parameter there
    content_type: str | None = None  # of a response that is not JSON
    takes_text: bool = False  # a prompt as plain text, whose continuation is the response, as such

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def bodies(self) -> tuple:
        return kinds_of(self.body)

    @property
    def errors(self) -> tuple[ErrorFormat, ...]:
        return (format_of(self.path), *self.other_errors)

    @property
    def rule(self) -> str:
        """The path as Flask writes it, with the `NameConverter` of web.py."""
        return self.path.replace("{", "<name:").replace("}", ">")


def kinds_of(union: Any) -> tuple:
    """Returns the types of a union; () for None. Any other type is returned alone."""
    if isinstance(union, UnionType):
        return get_args(union)
    return () if union is None else (union,)


def format_of(path: str) -> ErrorFormat:
    """Returns the error format of the API that a path belongs to."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return OPENAI if path.startswith("/v1/") else TGI


def openapi(routes: Sequence[Route]) -> Json:
    """Returns the OpenAPI 3.1 document of these routes: their operations, and the schemas of their types and
    of all errors. It has no `servers`."""
    types = [each for route in routes for each in (route.body, route.response, route.event)]
    types += [error_format.body_type for error_format in (TGI, OPENAI, ANTHROPIC)]
    used = [kind for each in types for kind in kinds_of(each)]
    refs, components = msgspec.json.schema_components(used, ref_template=SCHEMA)
    schema_of = dict(zip(used, refs))

    def content(kinds: tuple) -> Json:
        schemas = [schema_of[kind] for kind in kinds]
        return {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}

    for component in components.values():
        for field in component.get("properties", {}).values():
            if field.get("default", ...) is None:
                del field["default"]  # client generators take a field with a default for a required one
    paths = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, content)
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "neuron-textgen",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": key}},
    }


def _operation(route: Route, content: Callable[[tuple], Json]) -> Json:
    """Returns the OpenAPI operation of a route. content: makes the description of a body that has one of
    several types."""
    ok = {"description": "OK"}
    if responses := _responses(route, content):
        ok["content"] = responses
    error_bodies = tuple(error_format.body_type for error_format in route.errors)
    error = {"description": "The error", "content": {"application/json": content(error_bodies)}}
    operation: Json = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.summary,
        "responses": {"200": ok, "4XX": error, "5XX": error},
        "security": [{"key": []}, {}] if route.needs_key else [],
    }
    bodies = {}
    if route.body:
        bodies["application/json"] = content(route.bodies) | {"example": route.example}
    if route.takes_text:
        bodies["text/plain"] = {"schema": {"type": "string", "minLength": 1}, "example": QUESTION}
    if bodies:
        operation["requestBody"] = {"required": True, "content": bodies}
    places = dict.fromkeys(re.findall("{(.*?)}", route.path), "path")
    if route.query:
        places[route.query] = "query"
    if places:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [
            {"in": place, "name": name, "required": True, "schema": schema} for name, place in places.items()
        ]
    return operation


def _responses(route: Route, content: Callable[[tuple], Json]) -> Json:
    """Returns the descriptions of a route's responses with status 200, by their content type; {}: the route
    has no content."""
    responses = {}
    if route.response:
        responses["application/json"] = content(kinds_of(route.response))
    if route.event:
        event = {
            "contentMediaType": "application/json",
            "contentSchema": content(kinds_of(route.event))["schema"],
        }
        data = {"type": "string", "anyOf": [event, {"const": "[DONE]"}]}  # the last one of OpenAI's streams
        stream = {"type": "object", "properties": {"data": data}}
        # The object is for validators; generated clients get the stream as text.
        responses["text/event-stream"] = {"schema": {"anyOf": [{"type": "string"}, stream]}}
    if content_type := "text/plain" if route.takes_text else route.content_type:
        responses[content_type] = {"schema": {"type": "string"}}
    return responses
