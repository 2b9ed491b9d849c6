"""Routes without a body: health, metrics, the names of the model, stored responses, and the page for
browsers."""

from __future__ import annotations

import html

from flask import Response, request
from msgspec import Struct

from api.anthropic.types import AnthropicModelCard, AnthropicModelList
from api.chats.openai_shared import ModelCard, ModelList
from api.http.errors import ApiError, invalid
from api.server import Server, empty_response, json_response
from config import VERSION
from run import HERE

PAGE = HERE / "api" / "page.html"
PAGE_FILES = HERE / "api" / "page"  # what it loads
# The page loads nothing from elsewhere, sends nothing elsewhere, and its scripts cannot write HTML.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


class Version(Struct):
    version: str


def version(_server: Server) -> Response:
    return json_response(Version(VERSION))


def live(_server: Server) -> Response:
    return empty_response()


def health(server: Server) -> Response:
    """Returns an empty response if requests are accepted. Raises ApiError (503), with the worker's phase and
    progress, if not. Waits up to half a minute for a tokenizer that is being loaded."""
    engine = server.engine
    engine.wait_while_loading()
    if engine.phase != "ready":
        raise ApiError(
            503, "healthcheck", "unhealthy", retry_after_s=5, phase=engine.phase, progress=engine.progress
        )
    return empty_response()


def metrics(server: Server) -> Response:
    """Returns the metrics of all processes, which the worker has. Raises EngineError if the worker is lost,
    or does not answer in METRICS_TIMEOUT_S."""
    return Response(server.engine.metrics(), content_type="text/plain; version=0.0.4; charset=utf-8")


def models(server: Server) -> Response:
    """Returns the cards of the model and of its LoRA adapters. They are Anthropic's if the request has the
    header `anthropic-version`, else OpenAI's. Waits up to half a minute for a tokenizer that is being loaded.
    Raises ApiError (503) while the model is not ready."""
    info = server.served.info
    if "anthropic-version" in request.headers:
        cards = [AnthropicModelCard(name, name) for name in (info.model_name, *info.adapters)]
        return json_response(AnthropicModelList(cards, cards[0].id, cards[-1].id))
    return json_response(ModelList("list", ModelCard.all_of(info)))


def model(server: Server, name: str) -> Response:
    """Returns the card of the model, or of a LoRA adapter. Raises ApiError: 404 for another name, 503 while
    the model is not ready. The card is Anthropic's if the request has the header `anthropic-version`, else
    OpenAI's."""
    served = server.served
    served.with_adapter(name)
    if "anthropic-version" in request.headers:
        return json_response(AnthropicModelCard(name, name))
    return json_response(next(card for card in ModelCard.all_of(served.info) if card.id == name))


class DeletedResponse(Struct):
    id: str
    object: str = "response.deleted"
    deleted: bool = True


def response(server: Server, response_id: str) -> Response:
    """Returns a stored response of the request's API key, as JSON. Raises ApiError: 404 if it is not stored,
    and for its input items; 422 for a stream. Raises StoreError if the store cannot be used."""
    if response_id.endswith("/input_items"):
        what = "The input items of a response cannot be listed; keep those that you send"
        raise ApiError(404, "not_found", what)
    if request.args.get("stream", "false").lower() not in ("false", "0"):
        raise invalid("stream", "is not supported: a stored response is returned whole")
    return Response(server.responses.get(response_id), mimetype="application/json")


def delete_response(server: Server, response_id: str) -> Response:
    """Deletes a stored response of the request's API key. Raises ApiError (404) if it is not stored,
    StoreError if the store cannot be used."""
    server.responses.delete(response_id)
    return json_response(DeletedResponse(response_id))


def root(server: Server) -> Response:
    """Returns the page if the client is a browser (`Accept` has text/html) and the page is on, else what `GET
    /health` returns or raises. The page is returned before the model is ready, too."""
    is_browser = "text/html" in request.headers.get("Accept", "")
    if is_browser and not server.config.no_web_page:
        return _page(server)
    return health(server)


def _page(server: Server) -> Response:
    """Returns the page for browsers. The attributes `data-…` of its body are the facts that its script has to
    know; until the model is ready, only its name."""
    facts = {"preparing": server.config.model_name}
    if server.engine.phase == "ready":
        info = server.engine.info
        text = server.engine.text
        facts = {
            "model": info.model_name,
            "context": info.max_total_tokens,
            "precision": info.quantize or info.dtype,
            "device": info.device,
            "sampling": info.sampling,
            "chats": text.template is not None,
            "images": info.reads_images,
            "tools": not text.tools.in_prompt and getattr(text.tools.format, "name", None),
            "key": server.config.needs_key,
        }
    # What is not so has no attribute.
    data = "".join(f' data-{name}="{html.escape(str(value))}"' for name, value in facts.items() if value)
    page = PAGE.read_text().replace("<body", "<body" + data)
    return Response(page, mimetype="text/html", headers={"Content-Security-Policy": PAGE_POLICY})
