"""What the routes of an API server process share: reading and preparing requests, generating, JSON responses.

Work that would hold up the event loop (chat templates, long texts, grammars) runs in a few threads.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import gevent
from flask import Response, g, request
from gevent.threadpool import ThreadPool
from werkzeug.exceptions import ClientDisconnected

from api.generation.prepared_request import PreparedRequest, Served, TokenizedPrompt, prompts_of
from api.generation.request_images import Later, RequestImages
from api.generation.response_writer import ResponseWriter
from api.generation.stream import (
    ActiveRequest,
    Arrival,
    Connection,
    ConnectionMonitor,
    event_stream,
    timing_headers,
)
from api.generation.tracing import RequestTrace, Tracer
from api.http import errors, fields
from api.http.bodies import Bodies
from api.http.engine_client import EngineClient, attempt, settled
from api.http.errors import ApiError
from api.http.fields import Json
from api.http.response_store import OwnedResponses, ResponseStore
from api.http.types import encode_json
from config import Config
from text.grammar import GrammarError

logger = logging.getLogger("web")

JSON = "application/json"
CHARSETS = ("utf-8", "us-ascii", "iso-8859-1")  # of plain text
LONG_TEXT = 20_000  # bytes; shorter ones are tokenized in less than a millisecond
TEXT_THREADS = 2
# Before a 429: a client may know that a request has ended before the worker's report of it arrives here.
OVERLOAD_RECHECK_S = 0.1
MAX_NOT_ENFORCED = 10  # keywords in the header
FIND_TOOL_S = 2.0  # for which of the tools a grammar cannot be used

Read = Callable[[Json, Served], ResponseWriter]  # of an API: from a body to the writer of its response
Parse = Callable[[bytes], Json]
T = TypeVar("T")


def json_parser() -> Parse:
    """Returns the function that parses the JSON body of the current request. Raises ApiError (415) if the
    body has another type."""
    if not (request.mimetype == JSON or request.mimetype.endswith("+json")):
        raise _wrong_content_type(JSON)
    return fields.parse_body


def no_parser() -> Parse:
    """Returns a function that gives {} for any body, for a request that says everything in its URL."""
    return lambda _body: {}


def text_parser() -> Parse:
    """Returns the function that parses a body that is the prompt itself, to {"inputs": prompt}. Raises
    ApiError (415) for a body of a type other than text/plain or none, or with a charset that is not in
    CHARSETS."""
    if request.mimetype not in ("", "text/plain"):
        raise _wrong_content_type("text/plain")
    charset = request.mimetype_params.get("charset", CHARSETS[0]).lower()
    if charset not in CHARSETS:
        known = " or ".join(f"`{name}`" for name in CHARSETS)
        what = f"The `charset` of a text must be {known}"
        raise ApiError(415, "validation", what, quoted=f". Given: {charset[:40]!r}")
    return functools.partial(fields.parse_text, charset=charset)


def _wrong_content_type(expected: str) -> ApiError:
    given = request.headers.get("Content-Type")
    quoted = f". Given: {given[:80]!r}" if given else ". Given: none"
    return ApiError(415, "validation", f"Expected request with `Content-Type: {expected}`", quoted=quoted)


class TextThreads:
    """A few threads for what would hold up the event loop. max_pending: how many calls may run or wait when
    `run` adds one.

    They must be given functions that neither log nor use Flask's request nor the socket to the worker.
    """

    def __init__(self, max_pending: int):
        self._threads = ThreadPool(TEXT_THREADS)
        self._max_pending = max_pending
        self._pending = 0

    def run(self, function: Callable[[], T], is_long: bool = True) -> T:
        """Returns what `function()` returns, or raises what it raises. A thread runs it, and the caller's
        greenlet waits; if it is not `is_long`, it runs at once in that greenlet. Raises ApiError (429) if too
        many calls are pending."""
        if is_long and self._pending >= self._max_pending:
            raise errors.overloaded()
        return self.run_admitted(function, is_long)

    def run_admitted(self, function: Callable[[], T], is_long: bool) -> T:
        """As `run`, for a request that has generated its output: waits, however many calls are pending."""
        if not is_long:
            return function()
        self._pending += 1
        try:
            return settled(self._threads.apply(attempt, (function,)))
        finally:
            self._pending -= 1


class Server:
    """One API server process: what routes do with the current request of Flask. To be made after the fork:
    the constructor starts the greenlet that polls requests and, with --otlp-endpoint, the exporter of
    traces."""

    def __init__(self, config: Config, engine: EngineClient, store: Path):
        """store: the file of stored responses."""
        self.config = config
        self.engine = engine
        self._store = ResponseStore(store, config.response_store_size << 20)
        self._bodies = Bodies(config.client_timeout)
        self._threads = TextThreads(config.max_concurrent_requests)
        self._image_threads = TextThreads(config.max_concurrent_requests)
        self._monitor = ConnectionMonitor()
        self._tracer: Tracer | None = None
        if config.otlp_endpoint:
            self._tracer = Tracer(config.otlp_endpoint)

    @property
    def served(self) -> Served:
        """What a request is checked against, made anew, without images yet. Waits up to half a minute for a
        tokenizer that is being loaded. Raises ApiError (503) while the model is not ready."""
        self.engine.wait_while_loading()
        if self.engine.phase != "ready":
            raise errors.not_ready(self.engine.phase)
        text = self.engine.text
        images = RequestImages(text.images, self._image_threads.run, self.config.allowed_media_domains)
        return Served(self.config, self.engine.info, text, self.responses, images)

    @property
    def responses(self) -> OwnedResponses:
        """The stored responses of the API key of the request."""
        return OwnedResponses(self._store, g.api_key, self.payload_limit)

    @property
    def payload_limit(self) -> int:
        """Bytes of the largest request body, that of a model without images until the model is known."""
        info = self.engine.info
        return self.config.body_limit(info is not None and info.reads_images)

    def read(self, kind: type[T]) -> T:
        """Returns the JSON body of the request, as `kind`. Waits for a tokenizer that is being loaded, and
        for the body. Raises the errors of `Bodies.read`, and ApiError: 503 while the model is not ready, 415
        for another type of body, 400 for a body that is not JSON, 422 for fields that are wrong."""
        _served = self.served  # not before the model is ready
        parse = json_parser()
        with self._bodies.read(self.payload_limit) as body:
            return fields.read(parse(body), kind)

    def reply(self, make: Callable[[Json, Served], Later]) -> Response:
        """Returns the response to a JSON body, without generated text. Raises ApiError for a body that cannot
        be read, for what `make` rejects, for images that cannot be loaded, 503 while the model is not ready,
        and 429 if too many calls wait for threads. Raises ClientDisconnected.

        make: reads and checks the body. Returns a function, which makes the body of the response once the
        images are loaded. Threads run both.
        """
        served = self.served
        parse = json_parser()
        with self._bodies.read(self.payload_limit) as body, served.images:
            respond = self._threads.run(lambda: make(parse(body), served))
            served.images.load(self._check_client)
            return json_response(self._threads.run(respond))

    def generate(
        self,
        read: Read,
        renders: bool = False,
        deadline_s: float | None = None,
        parser: Callable[[], Parse] = json_parser,
    ) -> Response:
        """Returns the response with what the body of the request asks for. Waits until all is generated or,
        for a stream, until its first token: the rest follows while the response is sent.

        Raises ApiError for a request that is rejected or fails until then, ClientDisconnected if the client
        disconnects until then, and what `read` raises. renders: whether `read` may render a chat template,
        which takes long. deadline_s: of a response that is not streamed, from the arrival; one that is
        configured counts before. parser: checks the type of the body, and returns what parses the body.
        """
        served = self._begin()
        parse = parser()
        with self._bodies.read(self.payload_limit) as body, served.images:
            writer = self._threads.run(lambda: read(parse(body), served), renders or len(body) >= LONG_TEXT)
            generation = self._submit(writer, served, deadline_s)
        return self._respond(writer, generation)

    def _check_client(self) -> None:
        """Raises ClientDisconnected if the client has disconnected."""
        if self._connection().is_lost:
            raise ClientDisconnected

    def _begin(self) -> Served:
        """Returns what the request is checked against. Marks the request as one that generates
        (`g.generates`, `g.started_at`), and begins its trace.

        Waits for a tokenizer that is being loaded, and OVERLOAD_RECHECK_S if the worker is full. Raises
        ApiError if the model is not ready (503) or the worker is still full (429), whatever the body says.
        """
        g.generates = True
        g.started_at = time.monotonic()
        if self._tracer:
            route = f"{request.method} {request.path}"
            g.trace = RequestTrace(self._tracer, route, request.headers, g.request_id, g.started_at)
        served = self.served
        if self.engine.is_full:
            gevent.sleep(OVERLOAD_RECHECK_S)
            if self.engine.is_full:
                raise errors.overloaded()
        return served

    def _submit(self, writer: ResponseWriter, served: Served, deadline_s: float | None) -> ActiveRequest:
        """Loads the images, tokenizes the prompts, compiles their grammars as a check, and sends the prompts
        to the worker. Returns the running request, which is also `g.generation`. Sets `g.error_format` and
        the `request_id` of the writer, logs what the response leaves out, and waits for threads and child
        processes.

        Raises ApiError for an image, a prompt or a grammar that cannot be used, and 429 if too many calls
        wait for threads. Raises ClientDisconnected while images are loaded. deadline_s: that of `generate`.
        Images are loaded in the request's own greenlet, so that they hold no thread for texts.
        """
        g.error_format = writer.error_format
        served.images.load(self._check_client)
        tokenize = functools.partial(prompts_of, writer.requests, served)
        characters = sum(prepared.characters for prepared in writer.requests)
        prompts = self._threads.run(tokenize, served.images.are_given or characters >= LONG_TEXT)
        _log_changes(writer, prompts)
        self._check_grammars(prompts)
        writer.request_id = g.request_id
        arrival = Arrival(g.request_id, g.started_at, self._connection(), g.get("trace"))
        deadline_s = self.config.response_deadline or deadline_s
        deadline_at = g.started_at + deadline_s if deadline_s and not writer.streams else float("inf")
        g.generation = ActiveRequest(self.engine, prompts, arrival, self._monitor, deadline_at)
        return g.generation

    def _respond(self, writer: ResponseWriter, generation: ActiveRequest) -> Response:
        """Returns the response to a request that was sent to the worker: a stream, or the whole body. Raises
        ApiError if generating fails before the body, or the first token of a stream, is there, and
        ClientDisconnected if the client disconnects before. The request is closed at the end of the response,
        or with the error."""
        headers = {
            "x-compute-type": self.engine.info.device,
            "x-compute-characters": str(sum(prepared.characters for prepared in writer.requests)),
        }
        if keywords := {place.rpartition("/")[2] for place in _not_enforced(writer.requests)}:
            headers["x-schema-not-enforced"] = ", ".join(sorted(keywords)[:MAX_NOT_ENFORCED])
        if writer.streams:
            stream = event_stream(writer, generation, self._threads.run_admitted)
            next(stream)  # waits until the status is certain
            headers["Content-Type"] = writer.content_type
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            response = Response(stream, headers=headers)
            response.call_on_close(generation.close)  # also before the first event is written
            return response
        with generation:
            generation.run()
            # To list the 30,000 tokens of a prompt takes half a second.
            body = self._threads.run_admitted(
                lambda: encode_json(writer.whole(generation.sequences)), writer.lists_prompts
            )
            return Response(body, headers=headers | timing_headers(generation), mimetype=JSON)

    def _check_grammars(self, prompts: list[TokenizedPrompt]) -> None:
        """Compiles each grammar of the prompts in a child process, unless it was accepted before. Raises
        ApiError for a grammar that does not compile or exceeds the limits, with the name of the field, or of
        the first tool, that causes it; 429 if too many calls wait for threads."""
        by_grammar = {prompt.prepared.grammar: prompt.prepared for prompt in prompts}
        for grammar, prepared in by_grammar.items():
            try:
                self._check_grammar(grammar)
            except GrammarError as error:
                self._check_tools(prepared)
                raise errors.invalid(prepared.grammar_name, str(error)) from None

    def _check_grammar(self, grammar: str) -> None:
        """Raises GrammarError if the grammar does not compile or exceeds the limits, and ApiError (429) if
        too many calls wait for threads. "", and a grammar that was accepted before, pass at once."""
        grammars = self.engine.text.grammars
        if grammar and not grammars.knows(grammar):
            self._threads.run(functools.partial(grammars.check, grammar))

    def _check_tools(self, prepared: PreparedRequest) -> None:
        """Raises ApiError for the first tool for whose calls no grammar compiles. Returns if there is none,
        if the request has no tools, or after FIND_TOOL_S. Waits for child processes; 429 as in
        `_check_grammar`."""
        policy = prepared.parser_config.calls
        if policy is None:
            return
        ends_at = time.monotonic() + FIND_TOOL_S
        for function, grammar in policy.alone:
            try:
                self._check_grammar(grammar)
            except GrammarError as error:
                raise errors.invalid(function.path, f"of {function.name} {error}") from None
            if time.monotonic() > ends_at:
                return

    def _connection(self) -> Connection:
        """Returns the connection of the current request. A client may end its input without a disconnect if
        the request is the last one of its connection."""
        asks_to_close = "close" in request.headers.get("Connection", "").lower()
        is_last = request.environ["SERVER_PROTOCOL"] == "HTTP/1.0" or asks_to_close
        return Connection(request.environ.get("gunicorn.socket"), input_may_end=is_last)


def log_fields(**more: Any) -> Json:
    """`extra` of a line in the log about the current request."""
    return {"fields": {"request_id": g.request_id, **more}}


def json_response(body: Any) -> Response:
    return Response(encode_json(body), mimetype=JSON)


def empty_response() -> Response:
    response = Response()
    del response.headers["Content-Type"]
    return response


def _log_changes(writer: ResponseWriter, prompts: list[TokenizedPrompt]) -> None:
    """Logs, at level debug, where the response differs from the request without an error. Logged are tools
    that are left out, keywords of JSON schemas that are not enforced, and a clamped `max_tokens`."""
    if writer.left_out:
        names = ", ".join(sorted(writer.left_out))
        logger.debug("left out tools that this server does not run: %s", names, extra=log_fields())
    if places := _not_enforced(writer.requests):
        logger.debug("not enforced of JSON schemas: %s", ", ".join(places), extra=log_fields())
    for prompt in prompts:
        prepared = prompt.prepared
        most = prompt.max_new_tokens
        if prepared.clamps_max_tokens and prepared.max_new_tokens and most < prepared.max_new_tokens:
            words = "clamped `%s` from %d to the %d tokens that are left of the context length"
            logger.debug(words, prepared.limit_name, prepared.max_new_tokens, most, extra=log_fields())


def _not_enforced(requests: list[PreparedRequest]) -> list[str]:
    """JSON pointers to the keywords of JSON schemas that the output may violate, each once."""
    return list(dict.fromkeys(place for prepared in requests for place in prepared.not_enforced))
