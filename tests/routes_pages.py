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
"""
API = openapi_document()


def types_of(schema: dict) -> list[str]:
    """The names of the types that a schema refers to."""
    found = [schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else []
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if "items" in schema:
        parts.append(schema["items"])
    for part in parts:
        found += types_of(part)
    return found


def fields_of(schema: dict) -> list[str]:
    """A line for each type, with its fields."""
    lines = []
    for name in types_of(schema):
        fields = API["components"]["schemas"][name].get("properties", {})
        if fields:
            lines.append(f"- `{name}`: " + ", ".join(f"`{field}`" for field in fields))
    return lines


def section(method: str, path: str, route: dict) -> list[str]:
    key = " 🔑" if route["security"] else ""
    lines = [f"## {method.upper()} {path}", "", f"{route['summary']}.{key}", ""]
    body = route.get("requestBody", {}).get("content", {})
    for media_type, content in body.items():
        lines += [f"**Request**, `{media_type}`", "", *fields_of(content["schema"]), ""]
        if "example" in content and media_type == "application/json":
            lines += ["```json", json.dumps(content["example"], indent=2, ensure_ascii=False), "```", ""]
    for media_type, content in route["responses"].get("200", {}).get("content", {}).items():
        name = "Stream" if media_type == "text/event-stream" else "Response"
        fields = fields_of(content.get("schema", {}))
        if name == "Stream" and not fields:
            fields = ["Server-sent events: `data: ` with JSON, and an empty line."]
        lines += [f"**{name}**, `{media_type}`", "", *fields, ""]
    return lines


def page() -> str:
    lines = [HEAD]
    for path, methods in API["paths"].items():
        for method, route in methods.items():
            lines += section(method, path, route)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(page())
    else:
        print(page())
