"""HTTP: the Flask app with its API key, CORS and errors, and the gunicorn server around it.

An API server process reads and validates requests, turns text into token ids, sends them to the worker
(api/http/engine_client.py) and turns the generated tokens back into text. Client errors are answered here,
before anything is sent to the worker. Each request runs in a greenlet of gunicorn's gevent worker. The routes
are in api/routes.py.

    python3 web.py      serves, with the configuration that `entrypoint.sh` resolved for this run
"""

from __future__ import annotations

import functools
import hmac
import logging
import math
import os
import re
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import gevent
import gunicorn.app.base
import gunicorn.glogging
from flask import Flask, Response, g, redirect, request
from flask_swagger_ui import get_swaggerui_blueprint
from werkzeug.exceptions import ClientDisconnected, HTTPException
from werkzeug.routing import BaseConverter

import config as configuration
from api import routes, server, status
from api.generation import tracing
from api.generation.prepared_request import ModelText
from api.http import errors
from api.http.bodies import drain_body
from api.http.engine_client import EngineClient, EngineError
from api.http.errors import ANTHROPIC, CLIENT_CLOSED_REQUEST, ApiError
from api.http.response_store import FILE, RETRY_S, StoreError
from config import Config, keys_of
from protocol import ModelInfo, RequestStats
from run import ConfigError, die_with_parent, run_dir, socket_address, trim_memory
from text.output.tool_formats import format_named

logger = logging.getLogger("web")

DOCS = "/docs"
DOCUMENT = "/api-doc/openapi.json"
# What needs no key, besides the pages at /docs. Probes and scrapers have no key, nor has a browser that opens
# a page.
OPEN_ENDPOINTS = {"docs", "static", *(route.name for route in routes.ROUTES if not route.needs_key)}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
SPARE_FDS = 200  # for everything but connections
PROBES = 5  # of a silent connection, in the time of --client-timeout
MAX_PROBE_S = 32_767  # the longest time between probes that the kernel takes


def create_app(config: Config, engine: EngineClient, store: Path) -> Flask:
    """Returns the WSGI application of an API server process. To be called after the fork. Until the model is
    ready, routes that need the model answer 503. store: the file of stored responses, which need not
    exist."""
    files = None if config.no_web_page else status.PAGE_FILES
    app = Flask("neuron-textgen", static_folder=files, static_url_path="/page")
    if config.root_path:
        app.wsgi_app = RootPathMiddleware(app, config.root_path)
    # The pages at /docs, and a redirect to them without a host, because a request's Host header may name any.
    app.register_blueprint(get_swaggerui_blueprint(DOCS, f"..{DOCUMENT}"))
    app.add_url_rule(DOCS, "docs", lambda: redirect(f"{request.script_root}{DOCS}/"))
    app.url_map.converters["name"] = NameConverter
    process = server.Server(config, engine, store)
    for route in routes.ROUTES:
        view = functools.partial(route.view, process)
        app.add_url_rule(route.rule, route.name, view, methods=[route.method])
    app.add_url_rule(config.health_route, "GET /health")
    app.add_url_rule(config.predict_route, "POST /vertex", methods=["POST"])
    guard = AuthAndCors(config)
    app.before_request(guard.admit)
    app.after_request(guard.add_headers)
    handlers = ErrorHandlers(process)
    app.register_error_handler(Exception, handlers.respond)
    app.after_request(handlers.record)
    return app


class NameConverter(BaseConverter):
    """Flask's variable for the rest of a path. It may begin with a slash, as the name of a model in a folder
    does."""

    regex = ".+"
    part_isolating = False  # it may have slashes


class RootPathMiddleware:
    """WSGI: strips `--root-path` from the beginning of a path, unless method and path are a route by
    themselves. With the root path /v1, both /v1/models and /v1/v1/models are the route /v1/models."""

    def __init__(self, app: Flask, root_path: str):
        self._app = app.wsgi_app
        self._is_route = app.url_map.bind("").test
        self._root_path = root_path

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        is_below = f"{path}/".startswith(f"{self._root_path}/")
        if is_below and not self._is_route(path, environ["REQUEST_METHOD"]):
            environ["SCRIPT_NAME"] = self._root_path
            environ["PATH_INFO"] = path.removeprefix(self._root_path)
        return self._app(environ, start_response)


class AuthAndCors:
    """The API key and CORS, before and after every route."""

    def __init__(self, config: Config):
        self._origins = config.cors_allow_origin
        self._needs_key = config.needs_key
        self._keys = ApiKeys(config)

    def admit(self) -> Response | None:
        """Runs before a route, once other greenlets have run. Returns the response to an OPTIONS request,
        else None: the route runs. Raises ApiError (401) if the request needs a key and has none that is
        accepted.

        Sets `g.request_id`, which is the header X-Request-Id if that is valid, else random; and, but for
        OPTIONS, `g.api_key`: the accepted key, or b"" if the request needs none.
        """
        gevent.sleep(0)  # a client that pipelines requests must not keep the event loop to itself
        given = request.headers.get("X-Request-Id", "")
        g.request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        logger.debug("%s %s", request.method, request.path, extra=server.log_fields())
        if request.method == "OPTIONS":
            return server.empty_response()  # a browser's preflight request carries no key
        g.api_key = b"" if self._is_open() else self._key()
        if g.api_key is None:
            headers = "`Authorization: Bearer` or `x-api-key`"
            what = f"Unauthorized: this server requires its API key in the header {headers}"
            raise ApiError(401, "unauthorized", what, code="invalid_api_key")
        return None

    def add_headers(self, response: Response) -> Response:
        """Runs after a route or an error, and returns the same response. First reads and drops the rest of
        the request's body, for DISCARD_S at most.

        Adds the request's id, `Vary`, and the headers of CORS: the origin if it is allowed, or `*` if all
        are; for OPTIONS also the methods and all headers that the browser asks for.
        """
        drain_body()
        response.headers["x-request-id"] = g.request_id
        if routes.error_format() is ANTHROPIC:
            response.headers["request-id"] = g.request_id  # Anthropic's name
        logger.debug("response begins", extra=server.log_fields(status=response.status_code))
        varies = "origin, access-control-request-method, access-control-request-headers"
        response.headers.add("Vary", varies)
        origin = "*" if "*" in self._origins else request.headers.get("Origin", "")
        if origin in self._origins:
            response.headers["Access-Control-Allow-Origin"] = origin
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET,POST,PUT,DELETE"
            allowed = ["authorization,content-type"]
            if requested := request.headers.get("Access-Control-Request-Headers"):
                allowed.append(requested)  # OpenAI's clients send many of their own
            response.headers["Access-Control-Allow-Headers"] = ",".join(allowed)
        return response

    def _is_open(self) -> bool:
        """Whether the request needs no key: GET or HEAD of a page, or of a route without `needs_key`, not of
        an unknown path."""
        is_page_of_docs = request.blueprint is not None
        return request.method in ("GET", "HEAD") and (is_page_of_docs or request.endpoint in OPEN_ENDPOINTS)

    def _key(self) -> bytes | None:
        """Returns the first accepted API key of the request, `x-api-key` before `Authorization`. None: it has
        none that is accepted; b"": the server has no keys, and needs none."""
        if not self._needs_key:
            return b""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        keys = [request.headers.get("x-api-key", "")]  # used by Anthropic's clients
        if scheme.lower() == "bearer":
            keys.append(given)
        # WSGI hands the bytes of a header over as Latin-1.
        candidates = [key.strip().encode("latin-1", "replace") for key in keys]
        return next(filter(self._keys.has, candidates), None)


class ApiKeys:
    """The accepted keys: that of `--api-key`, and those in `--api-key-file`, which may change while the
    server runs."""

    def __init__(self, config: Config):
        self._own = [config.api_key.encode()] if config.api_key else []
        self._file = config.api_key_file
        self._version: tuple[int, int] | None = None  # of the file, as last read
        self._of_file: list[bytes] = []

    def has(self, given: bytes) -> bool:
        """Whether a key is accepted. Reads the file again first, if it has changed."""
        self._refresh()
        return any(hmac.compare_digest(given, key) for key in (*self._own, *self._of_file))

    def _refresh(self) -> None:
        """Reads the file of keys again if it has changed. If the file is missing, or has no key or an invalid
        one, the keys stay, the log says why, and the next call tries again."""
        if not self._file:
            return
        try:
            found = os.stat(self._file)
            version = (found.st_mtime_ns, found.st_ino)
            if version != self._version:
                self._of_file = [key.encode() for key in keys_of(self._file)]
                self._version = version
        except (OSError, ValueError) as error:
            logger.warning("--api-key-file: reload failed, keeping the current keys: %s", error)


class ErrorHandlers:
    """Returns every error as JSON, in the error format of the route's API, and counts it."""

    def __init__(self, process: server.Server):
        self._process = process

    def respond(self, error: Exception) -> Response:
        """Returns the response to a request that has raised an error; for a client that has disconnected,
        status 499 alone.

        The error format is that of the error, else that of the response's writer, else that of the route. An
        unexpected exception is logged, and its response (500) does not name it. Gives an ApiError the
        request's id. Sets `g.rejection`, the text for the log, and, if the request would generate text,
        `g.outcome` for the metrics: `record` reads both.
        """
        if isinstance(error, ClientDisconnected):
            g.outcome = "dropped" if "generates" in g else None
            return Response(status=CLIENT_CLOSED_REQUEST)  # for the metrics; the client has disconnected
        shown = self._for_client(error)
        shown.request_id = g.request_id
        g.rejection = shown.text[:200]
        response = server.json_response(shown.body(g.get("error_format") or routes.error_format()))
        response.status_code = shown.status
        if shown.retry_after_s is not None:
            response.headers["Retry-After"] = str(shown.retry_after_s)
        if shown.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if allowed := getattr(error, "valid_methods", None):
            response.headers["Allow"] = ", ".join(allowed)
        if "generates" in g:
            g.outcome = shown.outcome
        return response

    def record(self, response: Response) -> Response:
        """Adds a failed request (a status from 400 on) to the metrics and traces. Returns the response as it
        is. A request that was sent to the worker is added by `ActiveRequest.close`. An error below 500 is
        logged here."""
        if response.status_code >= 400 and "generation" not in g:
            stats = RequestStats(response.status_code, g.get("outcome"))
            self._process.engine.record(stats)
            if "trace" in g:
                g.trace.end(stats)
        if response.status_code < 500 and "rejection" in g:
            extra = server.log_fields(status=response.status_code, error=g.rejection)
            logger.info("request rejected", extra=extra | {"is_limited": True})
        return response

    def _for_client(self, error: Exception) -> ApiError:
        """Returns the error that the client reads: an ApiError itself. An EngineError becomes 503; stored
        responses that cannot be used are logged in one line, and become 503. Any RecursionError becomes 400,
        for JSON that is nested too deeply. An HTTP error keeps its status. Another exception is logged with
        its traceback, and becomes "Internal server error" (500)."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineError):
            return errors.not_ready(str(error))
        if isinstance(error, StoreError):
            logger.warning("stored responses cannot be used: %s", error, extra=server.log_fields())
            what = f"The stored responses cannot be used now: {error}; send the items themselves"
            return ApiError(503, "unavailable", what, retry_after_s=RETRY_S)
        if isinstance(error, RecursionError):
            return ApiError(400, "validation", "The JSON of the request is nested too deeply")
        if not isinstance(error, HTTPException):
            extra = server.log_fields()
            logger.error("%s %s failed", request.method, request.path, exc_info=error, extra=extra)
            return errors.internal()
        if error.code == 404:
            return ApiError(404, "not_found", f"There is no route {request.path}")
        if error.code == 405:
            what = f"{request.path} does not support {request.method}"
            return ApiError(405, "method_not_allowed", what)
        if error.code == 413:
            return errors.too_large(self._process.payload_limit)
        return ApiError(error.code or 500, "http", error.description or error.name)


class _GunicornLog(gunicorn.glogging.Logger):
    """Sends gunicorn's warnings to this server's log, in its format."""

    def setup(self, cfg) -> None:
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)

    def exception(self, msg: str, *args, **kwargs) -> None:
        """Logs the exception that is being handled, unless it is an OSError: a client broke its connection or
        never reads."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().exception(msg, *args, **kwargs)


class GunicornServer(gunicorn.app.base.BaseApplication):
    """Gunicorn with its gevent worker: a connection costs a greenlet, so slow and silent clients delay no
    others."""

    def __init__(self, config: Config, listener: socket.socket):
        """Takes over the listening socket: the caller must not use `listener` any more. Sets on it, from
        `client_timeout`, the timeouts that end connections of silent clients. Sets this process's limit of
        open files to 65,536 or, if that is lower, to the hard limit; how many connections a process may have
        follows from it. Loads gunicorn's settings: an error in them ends the process. Does not serve: `run`
        does."""
        self._config = config
        self._in_progress = 0  # requests of this process
        self._engine: EngineClient | None = None  # of this process, after the fork
        # A client that never reads is disconnected by the kernel, and so is one that has disconnected or
        # vanished without a sign (api/generation/stream.py: Connection): it does not answer probes. Accepted
        # connections inherit it.
        probe_s = min(math.ceil(config.client_timeout / PROBES), MAX_PROBE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.client_timeout * 1000))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        max_fds = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_fds, hard))
        self._max_connections = max(SPARE_FDS, max_fds - SPARE_FDS)
        self._listener_fd = listener.detach()  # gunicorn's from now on
        super().__init__()

    def load_config(self) -> None:
        """Sets gunicorn's settings. gunicorn calls this method."""
        settings = {
            "bind": [f"fd://{self._listener_fd}"],
            "workers": self._config.web_concurrency,
            "worker_class": "gevent",
            "worker_connections": self._max_connections,
            "keepalive": math.ceil(self._config.client_timeout),  # for the headers, and between requests
            "forwarder_headers": "",  # no client may set the path under which this server is mounted
            # The most that gunicorn allows: GET /infer has its text there.
            "limit_request_line": 8190,
            "sendfile": False,
            "timeout": 120,  # of gunicorn's own heartbeat, not of a request
            # entrypoint.sh enforces the real one.
            "graceful_timeout": int(self._config.graceful_termination_timeout) + 5,
            "worker_tmp_dir": "/dev/shm" if Path("/dev/shm").is_dir() else None,
            "control_socket_disable": True,
            "logger_class": _GunicornLog,
            "pre_request": self._count_arrival,
            "post_request": self._count_end,
            "post_worker_init": self._begin,
        }
        for name, value in settings.items():
            self.cfg.set(name, value)

    def _begin(self, worker) -> None:
        """Runs in each API server process when it begins to serve. Starts the greenlet that ends the process.
        In the first process another greenlet logs a note about tool calls, if there is one, once the model's
        text side is loaded."""
        gevent.spawn(self._quit_when_done, worker)
        if worker.age == 1:  # one line, whatever the number of processes
            gevent.spawn(self._log_tools)

    def _log_tools(self) -> None:
        """Waits until the model's text side is loaded, then logs its note about tool calls, if there is
        one."""
        self._engine.has_text.wait()
        if note := self._engine.text.tools_note:
            logger.info("%s", note)

    def _count_arrival(self, _worker, http_request) -> None:
        """Counts a request that has arrived. While the worker drains, its connection is closed after the
        response."""
        self._in_progress += 1
        if self._engine.phase == "draining":  # so that the client's next request goes to another replica
            http_request.force_close()

    def _count_end(self, _worker, _http_request) -> None:
        self._in_progress -= 1

    def _quit_when_done(self, worker) -> None:
        """Runs as a greenlet until gunicorn was told to stop this process and no request is in progress. Then
        ends the process with SIGQUIT. gunicorn itself would wait for all connections, idle ones too."""
        while worker.alive or self._in_progress:
            gevent.sleep(0.1)
        os.kill(os.getpid(), signal.SIGQUIT)

    def load(self) -> Flask:
        """Returns the application of an API server process. gunicorn calls this method in each process, after
        the fork. The process then ends when its parent does.

        Connects to the worker, and waits up to a second for its status. If the worker is ready, it also waits
        for the tokenizer, up to LOADING_S (api/http/engine_client.py). When the worker has been stuck for
        --stuck-timeout, a file `stuck` appears in the run's folder.
        """
        die_with_parent()
        engine = EngineClient(
            socket_address(),
            self._load_text,
            self._config.stuck_timeout,
            on_stuck=(run_dir() / "stuck").touch,  # entrypoint.sh looks for it
        )
        self._engine = engine
        app = create_app(self._config, engine, run_dir() / FILE)
        engine.wait_until_known()
        return app

    def _load_text(self, info: ModelInfo) -> ModelText:
        """Loads the model's text side, and starts the child process of its grammars, unless the device
        samples. Called in a thread, once in each process. Raises ConfigError if a file or a setting cannot be
        used."""
        text = ModelText.load(info, self._config)
        if info.sampling != "device":  # which supports no grammars
            text.grammars.start()
        trim_memory()
        return text


def main() -> int:
    """Serves until gunicorn ends the process. Returns the exit code 2, after one line in the log, if the
    address, the tool parser or the packages for traces cannot be used."""
    die_with_parent()
    config = configuration.resolved()
    config.set_up_log()
    try:
        if config.otlp_endpoint:
            tracing.check_installed()
        if config.tool_parser:
            format_named(config.tool_parser)
        listener = configuration.listen(config)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    GunicornServer(config, listener).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
