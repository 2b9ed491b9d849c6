"""The page docs/routes.md, made of the OpenAPI document: each route with its request, response and stream.

PYTHONPATH=. python tests/routes_pages.py --write     puts it there
"""

import json
import sys

from api.routes import openapi_document
from run import HERE

DOCUMENT = HERE / "docs" / "routes.md"
HEAD = """# Routes

Made from the server's OpenAPI document, which `GET /api-doc/openapi.json` returns and `GET /docs` shows, to try it out.
[The API](api.md) says what each field does. Routes marked with 🔑 require the API key if the server has one.

A stream consists of server-sent events: `data: ` with JSON, and an empty line. OpenAI's streams end with `data: [DONE]`; the
events of `/v1/responses` and `/v1/messages` have names. [Types](#types) has the fields of the types.
"""
API = openapi_document()


TYPES = API["components"]["schemas"]


def named(schema: dict) -> list[str]:
    """The types of the table that a schema refers to, as links; also those of a list and of the events of a stream."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return [f"[`{name}`](#{name.lower()})"]
    if schema.get("type") == "array":
        return [f"list of {link}" for link in named(schema.get("items", {}))]
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("properties", {}).values()]
    parts += [schema.get("contentSchema"), schema.get("additionalProperties")]
    return [link for part in parts if isinstance(part, dict) for link in named(part)]


def content(what: str, media_type: str, schema: dict) -> list[str]:
    """A line for what a body of this media type may be."""
    links = ", or ".join(named(schema))
    return [f"**{what}**, `{media_type}`" + (f": {links}" if links else ""), ""]


def section(method: str, path: str, route: dict) -> list[str]:
    key = " 🔑" if route["security"] else ""
    lines = [f"## {method.upper()} {path}", "", f"{route['summary']}.{key}", ""]
    for media_type, body in route.get("requestBody", {}).get("content", {}).items():
        lines += content("Request", media_type, body["schema"])
        if "example" in body and media_type == "application/json":
            lines += ["```json", json.dumps(body["example"], indent=2, ensure_ascii=False), "```", ""]
    for media_type, body in route["responses"].get("200", {}).get("content", {}).items():
        what = "Stream" if media_type == "text/event-stream" else "Response"
        lines += content(what, media_type, body.get("schema", {}))
    return lines


def type_section(name: str) -> list[str]:
    fields = []
    for field, schema in TYPES[name].get("properties", {}).items():
        links = " or ".join(named(schema))
        fields.append(f"`{field}`" + (f" ({links})" if links else ""))
    return [f"### {name}", "", ", ".join(fields), ""]


def page() -> str:
    routes: list[str] = []
    for path, methods in API["paths"].items():
        for method, route in methods.items():
            routes += section(method, path, route)
    # The types that the routes name, then those that these name, and so on.
    types: dict[str, list[str]] = {}
    text = "\n".join(routes)
    while more := {name for name in TYPES if name not in types and f"(#{name.lower()})" in text}:
        types |= {name: type_section(name) for name in more}
        text = "\n".join(line for name in more for line in types[name])
    lines = [HEAD, *routes, "## Types", ""]
    for name in sorted(types):
        lines += types[name]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(page())
    else:
        print(page())
