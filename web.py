"""HTTP: the Flask app, its routes, streaming, API key and CORS, and the gunicorn server around it.

A web process reads and validates requests, turns text into token ids, sends them to the worker (engine_client.py) and turns
the generated tokens back into text. Whatever a client can get wrong is answered here, before the worker is asked. Each request
runs in a greenlet of gunicorn's gevent worker; work that would hold up the event loop runs in a few threads (`TextThreads`).
This layer knows no torch, no model and no slots.

    python3 web.py      serves, with the configuration that `entrypoint.sh` resolved for this run
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import html
import logging
import math
import os
import re
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gevent
import gunicorn.app.base
import gunicorn.glogging
from flask import Flask, Response, g, redirect, request
from flask_swagger_ui import get_swaggerui_blueprint
from gevent.threadpool import ThreadPool
from werkzeug.exceptions import ClientDisconnected, HTTPException

import config as configuration
import logs
from api import errors, tracing
from api import fields as validate
from api import routes as openapi
from api import types as schema
from api.answer import Answer
from api.bodies import Bodies, discard_rest
from api.engine_client import ClientGone, EngineClient, EngineError
from api.errors import ApiError
from api.handlers import Handlers, ModelText, prompt_ids
from api.stream import HANG_UP, KEEP_ALIVE_S, Batch, Generation, watch
from config import Config
from protocol import ModelInfo, RequestStats
from run import HERE, ConfigError, die_with_parent, run_dir, socket_address
from text.grammar import GrammarError

logger = logging.getLogger("web")


SAGEMAKER_DEADLINE_S = 55.0  # SageMaker gives up on an answer after 60
# GET needs no key: probes and scrapers have none, nor has a browser that opens a page.
OPEN_ROUTES = {"/", "/health", "/ping", "/live", "/metrics", "/api-doc/openapi.json"}
DOCS = "/docs/"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

LONG_TEXT = 20_000  # bytes; shorter ones are tokenized in less than a millisecond
TEXT_THREADS = 2
ROOM_S = 0.1  # before a refusal: a client may know that a request has ended before the worker's report of it arrives here
SPARE_FDS = 200  # for everything but connections


class TextThreads:
    """A few threads for what would hold up the event loop: rendering chat templates, tokenizing long texts.

    `run` must be given functions that neither log nor use Flask's request nor the socket to the worker.
    """

    def __init__(self, max_pending: int):
        self._threads = ThreadPool(TEXT_THREADS)
        self._max_pending = max_pending
        self._pending = 0

    def run(self, function: Callable):
        """`function()`, when a thread is free. Raises ApiError (429) when too many wait."""
        if self._pending >= self._max_pending:
            raise errors.overloaded()
        self._pending += 1
        try:
            result = self._threads.apply(_attempt, (function,))
        finally:
            self._pending -= 1
        if isinstance(result, Exception):
            raise result
        return result


def _attempt(function: Callable):
    """What `function()` returns or raises; gevent would print the traceback of an error that leaves its thread."""
    try:
        return function()
    except Exception as error:
        return error


def create_app(config: Config, engine: EngineClient) -> Flask:
    """The WSGI application. Serves from the first moment; until the model is ready it answers 503."""
    app = Flask("neuron-textgen", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = (
        config.payload_limit + 1
    )  # werkzeug cuts a chunked body here without an error
    app.register_blueprint(get_swaggerui_blueprint(DOCS.rstrip("/"), "/api-doc/openapi.json"))
    handlers, bodies, threads = (
        Handlers(config, engine),
        Bodies(config),
        TextThreads(config.max_concurrent_requests),
    )
    contract, page = openapi.openapi(), _page(engine)
    tracer = tracing.Tracer(config.otlp_endpoint, config.otlp_service_name) if config.otlp_endpoint else None
    in_progress: set[Generation] = set()
    gevent.spawn(watch, in_progress)
    _guard(app, config)
    _answer_errors(app, config, engine)

    def prepare(read: Callable[[], Answer], in_thread: bool) -> tuple[Answer, list[tuple[list[int], int]]]:
        """What `read` asks for: the answer to make, and each job's token ids and max_new_tokens."""

        def run() -> tuple[Answer, list[tuple[list[int], int]]]:
            answer = read()
            validate.check_sequences(answer.jobs, config)
            return answer, [validate.fit(job, prompt_ids(engine, job), engine.info) for job in answer.jobs]

        answer, prompts = threads.run(run) if in_thread else run()
        for job in {job.grammar: job for job in answer.jobs if job.grammar}.values():
            if not engine.text.grammars.knows(job.grammar):
                try:
                    threads.run(functools.partial(engine.text.grammars.check, job.grammar))
                except GrammarError as error:
                    raise errors.invalid(job.grammar_name, str(error)) from None
        return answer, prompts

    def generate(
        answer: Answer, prompts: list, deadline_s: float | None = config.response_deadline
    ) -> Response:
        """Generates, and answers as a whole or as a stream."""
        deadline_at = g.started_at + deadline_s if deadline_s and not answer.streams else float("inf")
        client = request.environ.get("gunicorn.socket")
        is_last = (
            request.environ["SERVER_PROTOCOL"] == "HTTP/1.0"
            or "close" in request.headers.get("Connection", "").lower()
        )
        times, on_settled = (g.started_at, deadline_at), g.trace.end if "trace" in g else None
        generation = Generation(
            engine, answer.jobs, prompts, in_progress, g.request_id, *times, client, is_last, on_settled
        )
        answer.request_id = g.request_id
        g.generation = generation
        return _respond(config, engine, answer, generation)

    def begin() -> None:
        """Refuses what need not be read."""
        g.generates, g.started_at = True, time.monotonic()
        if tracer:
            route = f"{request.method} {request.path}"
            g.trace = tracing.RequestTrace(tracer, route, request.headers, g.request_id, g.started_at)
        _ready(engine)
        if engine.is_full:
            gevent.sleep(ROOM_S)
            if engine.is_full:
                raise errors.overloaded()

    def generates(path: str, read: Callable[[bytes], Answer], renders: bool = False) -> None:
        """A route that generates text from a JSON body; `renders`: with the chat template."""

        def view() -> Response:
            begin()
            with bodies.read() as body:
                prepared = prepare(lambda: read(body), renders or len(body) >= LONG_TEXT)
            return generate(*prepared)

        app.add_url_rule(path, f"POST {path}", view, methods=["POST"])

    generates("/", handlers.compat)
    generates(
        "/v1", handlers.compat
    )  # for huggingface_hub's text_generation with a base_url that ends in /v1
    generates("/generate", handlers.generate)
    generates("/generate_stream", handlers.generate_stream)
    generates("/v1/chat/completions", handlers.chat, renders=True)
    generates("/v1/completions", handlers.completion)
    generates("/v1/responses", handlers.responses, renders=True)
    generates("/vertex", handlers.vertex, renders=True)

    @app.post("/invocations")
    def invocations() -> Response:
        begin()
        with bodies.read() as body:
            read, g.speaks_openai = handlers.of_invocation(body)
            prepared = prepare(lambda: read(body), in_thread=True)
        return generate(*prepared, config.response_deadline or SAGEMAKER_DEADLINE_S)

    @app.get("/infer")
    def infer() -> Response:
        begin()
        sentence = request.args.get("sentence", "")
        return generate(*prepare(lambda: handlers.infer(sentence), in_thread=False))

    @app.post("/tokenize")
    def tokenize() -> Response:
        _ready(engine)
        with bodies.read() as body:
            return _json(threads.run(lambda: handlers.tokenize(body)))

    @app.post("/chat_tokenize")
    def chat_tokenize() -> Response:
        _ready(engine)
        with bodies.read() as body:
            return _json(threads.run(lambda: handlers.chat_tokenize(body)))

    @app.get(DOCS.rstrip("/"))
    def docs() -> Response:
        return redirect(DOCS)  # without a host, which may be anybody's in the request's own header

    @app.get("/live")
    def live() -> Response:
        return _empty()

    @app.get("/")
    def root() -> Response:
        is_browser = "text/html" in request.headers.get("Accept", "")
        return page() if is_browser and not config.no_web_page else health()

    @app.get("/health")
    @app.get("/ping")
    def health() -> Response:
        if engine.phase != "ready":
            raise ApiError(503, "healthcheck", "unhealthy", retry_after_s=5, phase=engine.phase)
        return _empty()

    @app.get("/info")
    def info() -> Response:
        return _json(schema.Info.of(config, _ready(engine)))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(engine.metrics(), content_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models() -> Response:
        return _json(schema.ModelList("list", [schema.ModelCard.of(_ready(engine))]))

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        card = schema.ModelCard.of(_ready(engine))
        if name != card.id:
            what = f"The model {name!r} is not served here, {card.id!r} is"
            raise ApiError(404, "not_found", what, code="model_not_found")
        return _json(card)

    @app.get("/api-doc/openapi.json")
    def document() -> Response:
        return _json(contract)

    return app


def _page(engine: EngineClient) -> Callable[[], Response]:
    """The page for browsers at `/`: one file that loads nothing else, under a policy that allows nothing else."""
    text, sources = (HERE / "api" / "page.html").read_text(), []
    for tag in ("script", "style"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        sources.append(
            f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
        )
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": "; ".join(["default-src 'none'", *sources, rest])}

    def page() -> Response:
        data = ""
        if engine.phase == "ready":
            chats = "true" if engine.text.template else "false"
            data = f' data-model="{html.escape(engine.info.model_name)}" data-chats="{chats}"'
        return Response(text.replace("<body>", f"<body{data}>"), mimetype="text/html", headers=headers)

    return page


def _guard(app: Flask, config: Config) -> None:
    """API key and CORS, before and after every route."""
    origins, key = config.cors_allow_origin.split(","), config.api_key.encode() if config.api_key else None

    def is_allowed() -> bool:
        is_open = request.method in ("GET", "HEAD") and (
            request.path in OPEN_ROUTES or request.path.startswith(DOCS)
        )
        if key is None or is_open:
            return True
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # WSGI hands the bytes of a header over as Latin-1.
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1", "replace"), key
        )

    @app.before_request
    def check_key() -> Response | None:
        gevent.sleep(0)  # a client that sends requests ahead must not keep the event loop to itself
        given = request.headers.get("X-Request-Id", "")
        g.request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        logger.debug("%s %s", request.method, request.path, extra={"fields": {"request_id": g.request_id}})
        if request.method == "OPTIONS":
            return _empty()  # a browser's preflight request carries no key
        if not is_allowed():
            what = "Unauthorized: this server requires its API key in the header `Authorization: Bearer`"
            raise ApiError(401, "unauthorized", what, code="invalid_api_key")
        return None

    @app.after_request
    def add_headers(response: Response) -> Response:
        discard_rest()
        response.headers["x-request-id"] = g.request_id
        logger.debug(
            "response begins", extra={"fields": {"request_id": g.request_id, "status": response.status_code}}
        )
        response.headers.add("Vary", "origin, access-control-request-method, access-control-request-headers")
        origin = "*" if "*" in origins else request.headers.get("Origin", "")
        if origin in origins:
            response.headers["Access-Control-Allow-Origin"] = origin
        if request.method == "OPTIONS":
            requested = request.headers.get(
                "Access-Control-Request-Headers"
            )  # OpenAI's clients send many of their own
            response.headers["Access-Control-Allow-Methods"] = "GET,POST"
            response.headers["Access-Control-Allow-Headers"] = ",".join(
                filter(None, ["authorization,content-type", requested])
            )
        return response


def _answer_errors(app: Flask, config: Config, engine: EngineClient) -> None:
    """Every error is answered in JSON, in the shape of the route's own API, and counted."""

    @app.errorhandler(ApiError)
    def api_error(error: ApiError) -> Response:
        speaks_openai = g.get("speaks_openai", request.path.startswith("/v1/"))
        body = error.openai_json if speaks_openai else error.json
        response = Response(body, error.status, mimetype="application/json")
        if error.retry_after_s is not None:
            response.headers["Retry-After"] = str(error.retry_after_s)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if "generates" in g:
            g.outcome = error.outcome
        return response

    @app.errorhandler(EngineError)
    def engine_error(error: EngineError) -> Response:
        return api_error(errors.not_ready(str(error)))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        if isinstance(error, ClientDisconnected):
            g.outcome = "dropped" if "generates" in g else None
            return Response(status=HANG_UP)  # for the metrics; the client is gone
        response = api_error(_http_error(error, config))
        if allowed := getattr(error, "valid_methods", None):
            response.headers["Allow"] = ", ".join(allowed)
        return response

    @app.errorhandler(Exception)
    def bug(error: Exception) -> Response:
        fields = {"request_id": g.request_id}
        logger.error("%s %s failed", request.method, request.path, exc_info=error, extra={"fields": fields})
        return api_error(ApiError(500, "internal", "Internal server error"))

    @app.after_request
    def record(response: Response) -> Response:
        if response.status_code >= 400 and not ("generation" in g and g.generation.is_settled):
            stats = RequestStats(response.status_code, g.get("outcome"))
            engine.record(stats)
            if "trace" in g:
                g.trace.end(stats)
        return response


def _http_error(error: HTTPException, config: Config) -> ApiError:
    if error.code == 404:
        return ApiError(404, "not_found", f"There is no route {request.path}")
    if error.code == 405:
        return ApiError(405, "method_not_allowed", f"{request.path} does not take {request.method}")
    if error.code == 413:
        return errors.too_large(config.payload_limit)
    return ApiError(error.code or 500, "http", error.description or error.name)


def _empty() -> Response:
    response = Response(status=200)
    del response.headers["Content-Type"]
    return response


def _json(body) -> Response:
    return Response(schema.encode(body), mimetype="application/json")


def _ready(engine: EngineClient) -> ModelInfo:
    if engine.phase != "ready":
        raise errors.not_ready(engine.phase)
    return engine.info


def _respond(config: Config, engine: EngineClient, answer: Answer, generation: Generation) -> Response:
    """The response, as soon as its status is certain: of a stream with its first text, of a whole answer at its end."""
    characters = sum(job.characters for job in answer.jobs)
    headers = {
        "x-compute-type": config.compute_type or engine.info.device,
        "x-compute-characters": str(characters),
    }
    batches = iter(generation)
    try:
        if not answer.streams:
            for batch in batches:
                for sequence, pieces in batch:
                    sequence.pieces += pieces
            response = _json(answer.whole(generation.sequences))
            response.headers.extend(headers | _timing_headers(generation))
            generation.settle("success")
            return response
        first = next(batches)
    except ClientGone:
        generation.settle("dropped")
        return Response(status=HANG_UP)
    except ApiError as error:
        generation.settle(error.outcome, error.status)
        raise
    except BaseException:
        generation.settle("generation", 500)
        raise
    headers |= {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = Response(_events(answer, generation, first, batches), headers=headers)
    response.call_on_close(
        lambda: generation.settle("dropped")
    )  # a client may disconnect before the first event is written
    return response


def _events(
    answer: Answer, generation: Generation, batch: Batch | None, rest: Iterator[Batch]
) -> Iterator[bytes]:
    """The body of a stream. What became certain together is one write."""
    outcome = "dropped"  # unless it comes to its end
    written_at = generation.started_at
    generation.streams_at = time.monotonic()
    try:
        while batch is not None:
            data = b"".join(answer.events(sequence, pieces) for sequence, pieces in batch)
            now = time.monotonic()
            if not data and now - written_at >= KEEP_ALIVE_S:
                data = b":\n\n"
            if data:
                written_at = now
                yield data
            batch = next(rest, None)
        outcome = "success"
        if closing := answer.closing(generation.sequences):
            yield closing
    except ApiError as error:
        outcome = error.outcome
        yield answer.failure(error)
    except ClientGone:
        pass
    except Exception:
        outcome = "generation"
        logger.exception("a stream failed", extra={"fields": {"request_id": answer.request_id}})
        yield answer.failure(ApiError(500, "internal", "Internal server error"))
    finally:
        generation.settle(outcome)


def _timing_headers(generation: Generation) -> dict[str, str]:
    """TGI's, in whole milliseconds; the sums over all sequences."""
    sequences = generation.sequences
    total_s = sum(sequence.finished_at - generation.started_at for sequence in sequences)
    validation_s = (generation.sent_at - generation.started_at) * len(sequences)
    queue_s = sum(sequence.queue_s for sequence in sequences)
    inference_s = max(0.0, total_s - validation_s - queue_s)
    generated = sum(sequence.tokens for sequence in sequences)
    headers = {
        "x-compute-time": f"{time.monotonic() - generation.started_at:.6f}",
        "x-prompt-tokens": sum(len(sequence.prompt) for sequence in sequences if sequence.number == 0),
        "x-generated-tokens": generated,
        "x-total-time": int(total_s * 1000),
        "x-validation-time": int(validation_s * 1000),
        "x-queue-time": int(queue_s * 1000),
        "x-inference-time": int(inference_s * 1000),
        "x-time-per-token": int(inference_s / max(1, generated) * 1000),
    }
    return {name: str(value) for name, value in headers.items()}


class _GunicornLog(gunicorn.glogging.Logger):
    """Gunicorn's warnings go where this server's log goes, in its format."""

    def setup(self, cfg) -> None:
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)

    def exception(self, msg: str, *args, **kwargs) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that broke its connection or never reads
            super().exception(msg, *args, **kwargs)


class Server(gunicorn.app.base.BaseApplication):
    """Gunicorn with its gevent worker: a connection costs a greenlet, so slow and silent clients delay no others."""

    def __init__(self, config: Config, listener: socket.socket):
        self._config = config
        self._in_progress = 0  # requests of this process
        # A client that never reads is disconnected by the kernel; accepted connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.client_timeout * 1000))
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        max_fds = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_fds, hard))
        self._max_connections = max(SPARE_FDS, max_fds - SPARE_FDS)
        self._listener_fd = listener.detach()  # gunicorn's from now on
        super().__init__()

    def load_config(self) -> None:
        settings = {
            "bind": [f"fd://{self._listener_fd}"],
            "workers": self._config.web_concurrency,
            "worker_class": "gevent",
            "worker_connections": self._max_connections,
            "keepalive": math.ceil(self._config.client_timeout),  # for the headers, and between requests
            "forwarder_headers": "",  # no client may set the path under which this server is mounted
            "limit_request_line": 8190,  # the most that gunicorn allows: GET /infer carries its sentence there
            "limit_request_fields": 100,
            "limit_request_field_size": 8190,
            "sendfile": False,
            "timeout": 120,  # of gunicorn's own heartbeat, not of a request
            "graceful_timeout": int(self._config.graceful_termination_timeout)
            + 5,  # entrypoint.sh enforces the real one
            "worker_tmp_dir": "/dev/shm" if Path("/dev/shm").is_dir() else None,
            "control_socket_disable": True,
            "logger_class": _GunicornLog,
            "pre_request": lambda _worker, _request: self._count(1),
            "post_request": lambda _worker, _request, _environ, _response: self._count(-1),
            "post_worker_init": lambda worker: gevent.spawn(self._quit_when_done, worker),
        }
        for name, value in settings.items():
            self.cfg.set(name, value)

    def _count(self, change: int) -> None:
        self._in_progress += change

    def _quit_when_done(self, worker) -> None:
        """On SIGTERM gunicorn waits for connections, and idle ones stay; this waits for requests in progress only."""
        while worker.alive or self._in_progress:
            gevent.sleep(0.1)
        os.kill(os.getpid(), signal.SIGQUIT)

    def load(self) -> Flask:
        """Runs in each web process, after the fork."""
        die_with_parent()
        engine = EngineClient(
            socket_address(),
            lambda info: ModelText.load(info, self._config),
            self._config.stuck_timeout,
            on_stuck=(run_dir() / "stuck").touch,  # entrypoint.sh looks for it
        )
        app = create_app(self._config, engine)
        engine.wait_until_known()
        return app


def main() -> int:
    die_with_parent()
    config = configuration.load()
    logs.set_up(config.log_level, config.json_output)
    family = socket.AF_INET6 if ":" in config.hostname else socket.AF_INET
    try:
        if config.otlp_endpoint:
            tracing.check(os.environ)
        listener = socket.create_server((config.hostname, config.port), family=family, backlog=2048)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except OSError as error:
        logger.error(
            "port %d of %s cannot be used: %s; choose another with --port (PORT)",
            config.port,
            config.hostname,
            error.strerror,
        )
        return 2
    Server(config, listener).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
