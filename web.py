"""HTTP: the Flask app, its routes, streaming, clients that hang up, and the gunicorn server around it.

A web process parses and checks requests, turns text into token ids, asks the worker, and turns its tokens back into text.
Whatever a client can get wrong is answered here, before the worker hears of it. This layer knows no torch, no model and no
slots; it never waits for the device, only for messages.

    python3 web.py      serves, with the configuration that `entrypoint.sh` resolved for this run
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gunicorn.app.base
import gunicorn.glogging
from flask import Flask, Response, request
from msgspec import UNSET
from werkzeug.exceptions import HTTPException

import config as configuration
import schema
from config import Config
from protocol import Cancel, End, Facts, FromWorker, Generate, Hello, Status, Token, Tokens, WebEnd
from schema import ApiError, Job
from text import Piece, TextStream, Tokenizer

logger = logging.getLogger("web")

HANG_UP_POLL_S = 0.1  # how often a waiting request looks whether its client is still there
KEEP_ALIVE_S = 15.0  # a stream without an event for this long carries a comment, so that proxies keep it open
PROBE_THREADS = 16  # for health, info and refusals while every request that is allowed holds a thread


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


class Worker:
    """The worker as this web process sees it: what it serves, how it is doing, and the requests that it has of ours."""

    def __init__(self, address: str):
        self.facts: Facts | None = None
        self.tokenizer: Tokenizer | None = None
        self._status: Status | None = None
        self._lost = False
        self._said_ready = False
        self._inboxes: dict[int, queue.SimpleQueue | None] = {}  # None: nobody reads, but the end is not heard of yet
        self._end = WebEnd(address, self._on_message, self._on_lost)
        self._end.send(Hello(os.getpid(), ready=False))

    @property
    def phase(self) -> str:
        """ "ready" when requests are taken, else what is going on."""
        if self._status is None:
            return "dead" if self._lost else "starting"
        if self._lost and self._status.phase != "draining":
            return "dead"
        if self._status.phase == "ready" and self.tokenizer is None:
            return "loading"
        return self._status.phase

    def start(self, generate: Generate) -> queue.SimpleQueue:
        """Sends a request off. Its Tokens and its End come to the queue that is returned."""
        inbox = self._inboxes[generate.id] = queue.SimpleQueue()
        self._end.send(generate)
        if self._lost:
            self._on_lost()
        return inbox

    def leave(self, request_id: int, reason: str) -> None:
        """Gives up a request. Nothing happens when it has ended; else its id is kept until the worker has ended it."""
        if self._inboxes.get(request_id) is not None:
            self._inboxes[request_id] = None
            self._end.send(Cancel(request_id, reason))

    def _on_message(self, message: FromWorker) -> None:
        if isinstance(message, Tokens):
            for token in message.tokens:
                self._deliver(token, last=token.finish_reason is not None)
        elif isinstance(message, End):
            self._deliver(message, last=True)
        elif isinstance(message, Status):
            self._status = message
            self._say_when_ready()
        elif self.facts is None:
            self.facts = message
            threading.Thread(target=self._load_tokenizer, name="load-tokenizer", daemon=True).start()

    def _deliver(self, message: Token | End, last: bool) -> None:
        inbox = self._inboxes.pop(message.id, None) if last else self._inboxes.get(message.id)
        if inbox is not None:
            inbox.put(message)

    def _load_tokenizer(self) -> None:
        self.tokenizer = Tokenizer(self.facts.tokenizer_dir, self.facts.eos_token_ids)
        self._say_when_ready()

    def _say_when_ready(self) -> None:
        if not self._said_ready and self.phase == "ready":
            self._said_ready = True
            self._end.send(Hello(os.getpid(), ready=True))

    def _on_lost(self) -> None:
        self._lost = True
        for request_id in list(self._inboxes):
            self._deliver(End(request_id, "dead"), last=True)


class Generation:
    """One request in flight. Iterating yields its pieces of text as they become certain, in batches.

    An empty batch means that KEEP_ALIVE_S passed without a token. Raises ApiError when the worker refuses or fails, and
    ClientGone when `client_is_gone` says so. `close` frees everything, at any time, as often as one likes.
    """

    def __init__(self, worker: Worker, job: Job, prompt: list[int], max_new_tokens: int, client_is_gone: Callable[[], bool]):
        self.job = job
        self.prompt_tokens = len(prompt)
        self.finish_reason: str | None = None
        self.stream = TextStream(worker.tokenizer, prompt, job.stop)
        self._worker = worker
        self._client_is_gone = client_is_gone
        self._looked_at = time.monotonic()
        self._id = secrets.randbits(63)
        self._inbox = worker.start(Generate(self._id, prompt, max_new_tokens, job.sampling, job.top_n_tokens))

    def __iter__(self) -> Iterator[list[Piece]]:
        while self.finish_reason is None:
            pieces: list[Piece] = []
            for message in self._receive():
                if isinstance(message, End):
                    raise _why_it_ended(message)
                if self.finish_reason is None:
                    pieces += self._take(message)
            yield pieces

    def close(self, reason: str = "client hung up") -> None:
        self._worker.leave(self._id, reason)

    @property
    def text(self) -> str:
        return (self.job.inputs if self.job.return_full_text else "") + self.stream.text

    def _take(self, token: Token) -> list[Piece]:
        last = token.finish_reason is not None
        pieces = self.stream.push(token.token, token.logprob, token.top, last)
        if self.stream.stopped:
            self.finish_reason = "stop_sequence"
            self.close("stop sequence")
        elif last:
            self.finish_reason = token.finish_reason
        return pieces

    def _receive(self) -> list[Token | End]:
        """All messages that wait, at least one unless KEEP_ALIVE_S passes."""
        give_up_at = time.monotonic() + KEEP_ALIVE_S
        messages: list[Token | End] = []
        while not messages:
            try:
                messages.append(self._inbox.get(timeout=HANG_UP_POLL_S))
                while True:
                    messages.append(self._inbox.get_nowait())
            except queue.Empty:
                pass
            now = time.monotonic()
            if now - self._looked_at >= HANG_UP_POLL_S:
                self._looked_at = now
                if self._client_is_gone():
                    raise ClientGone
            if now >= give_up_at:
                break
        return messages


def _why_it_ended(end: End) -> ApiError:
    if end.reason == "overloaded":
        return schema.overloaded()
    if end.reason in ("draining", "dead"):
        return schema.not_ready(end.reason)
    if end.reason == "failed":
        return schema.generation_failed(end.message)
    return schema.incomplete()


def _hang_up_detector(client: socket.socket | None) -> Callable[[], bool]:
    """Tells whether the other side has closed its end, without reading what it may have sent ahead."""
    if client is None:
        return lambda: False
    poller = select.poll()
    poller.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return lambda: bool(poller.poll(0))


def create_app(config: Config, worker: Worker) -> Flask:
    """The WSGI application. Serves from the first moment; until the model is ready it says so with 503."""
    app = Flask("neuron-textgen", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.payload_limit + 1  # werkzeug cuts a chunked body here without a word

    @app.get("/live")
    def live() -> Response:
        return _empty()

    @app.get("/health")
    def health() -> Response:
        if worker.phase != "ready":
            raise schema.unhealthy(worker.phase)
        return _empty()

    @app.get("/info")
    def info() -> Response:
        return _json(schema.Info.of(config, _facts(worker)))

    @app.post("/generate")
    def generate() -> Response:
        generation = _start(config, worker, streaming=False)
        try:
            return _json(_whole_response(generation, worker.tokenizer))
        except ClientGone:
            return Response(status=499)  # nobody reads it
        finally:
            generation.close()

    @app.post("/generate_stream")
    def generate_stream() -> Response:
        generation = _start(config, worker, streaming=True)
        try:
            batches = iter(generation)
            first = next(batches)  # what fails before the first token is answered with its own status
        except ClientGone:
            generation.close()
            return Response(status=499)
        except BaseException:
            generation.close()
            raise
        response = Response(_events(generation, first, batches, worker.tokenizer), content_type="text/event-stream")
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        response.call_on_close(generation.close)
        return response

    @app.errorhandler(ApiError)
    def api_error(error: ApiError) -> Response:
        response = Response(error.json, error.status, mimetype="application/json")
        if error.retry_after_s is not None:
            response.headers["Retry-After"] = str(error.retry_after_s)
        return response

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        response = Response(_http_error(error, config).json, error.code, mimetype="application/json")
        if allowed := getattr(error, "valid_methods", None):
            response.headers["Allow"] = ", ".join(allowed)
        return response

    @app.errorhandler(Exception)
    def bug(error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return Response(ApiError(500, "internal", "Internal server error").json, 500, mimetype="application/json")

    return app


def _http_error(error: HTTPException, config: Config) -> ApiError:
    if error.code == 404:
        return ApiError(404, "not_found", f"There is no route {request.path}")
    if error.code == 405:
        return ApiError(405, "method_not_allowed", f"{request.path} does not take {request.method}")
    if error.code == 413:
        return schema.too_large(config.payload_limit)
    return ApiError(error.code or 500, "http", error.description or error.name)


def _empty() -> Response:
    response = Response(status=200)
    del response.headers["Content-Type"]
    return response


def _json(body) -> Response:
    return Response(schema.encode(body), mimetype="application/json")


def _facts(worker: Worker) -> Facts:
    if worker.phase != "ready":
        raise schema.not_ready(worker.phase)
    return worker.facts


def _start(config: Config, worker: Worker, streaming: bool) -> Generation:
    """Checks the request that is being handled, and sends it to the worker. Raises ApiError for what is wrong with it."""
    facts = _facts(worker)
    if not (request.mimetype == "application/json" or request.mimetype.endswith("+json")):
        raise ApiError(415, "validation", "Expected request with `Content-Type: application/json`")
    body = request.get_data()
    if len(body) > config.payload_limit:
        raise schema.too_large(config.payload_limit)
    job = schema.check(schema.parse(body, schema.GenerateRequest), config, facts, streaming)
    try:
        prompt = worker.tokenizer.encode(job.inputs)
    except Exception as error:
        raise schema.invalid(f"tokenizer error {error}") from None
    prompt, max_new_tokens = schema.fit(job, prompt, facts)
    client_is_gone = _hang_up_detector(request.environ.get("gunicorn.socket"))
    return Generation(worker, job, prompt, max_new_tokens, client_is_gone)


def _whole_response(generation: Generation, tokenizer: Tokenizer) -> schema.GenerateResponse:
    pieces = [piece for batch in generation for piece in batch]
    response = schema.GenerateResponse(generation.text)
    if generation.job.details:
        response.details = schema.Details(
            finish_reason=generation.finish_reason,
            generated_tokens=generation.stream.tokens,
            seed=generation.job.sampling.seed,
            prefill=[],
            tokens=[_token(piece) for piece in pieces],
            top_tokens=[_top_tokens(piece, tokenizer) for piece in pieces] if generation.job.top_n_tokens else UNSET,
        )
    return response


def _events(generation: Generation, first: list[Piece], rest: Iterator[list[Piece]], tokenizer: Tokenizer) -> Iterator[bytes]:
    """The body of a stream. Pieces that wait together go out in one write."""
    index = 0

    def event(piece: Piece, is_last: bool) -> bytes:
        response = schema.StreamResponse(index, _token(piece))
        if piece.top:
            response.top_tokens = _top_tokens(piece, tokenizer)
        if is_last:
            response.generated_text = generation.text
            if generation.job.details:
                response.details = schema.StreamDetails(
                    finish_reason=generation.finish_reason,
                    generated_tokens=generation.stream.tokens,
                    seed=generation.job.sampling.seed,
                    input_length=generation.prompt_tokens,
                )
        return b"data: " + schema.encode(response) + b"\n\n"

    try:
        batch: list[Piece] | None = first
        waited = not first
        while batch is not None:
            events = []
            for piece in batch:
                index += 1
                events.append(event(piece, is_last=generation.finish_reason is not None and piece is batch[-1]))
            if events:
                yield b"".join(events)
            elif waited:
                yield b":\n\n"
            batch = next(rest, None)
            waited = True
    except ApiError as error:
        yield b"data: " + error.json + b"\n\n"
    except ClientGone:
        pass
    finally:
        generation.close()


def _token(piece: Piece) -> schema.TokenOut:
    return schema.TokenOut(piece.id, piece.text, schema.shortest_float(piece.logprob), piece.special)


def _top_tokens(piece: Piece, tokenizer: Tokenizer) -> list[schema.TokenOut]:
    return [
        schema.TokenOut(i, tokenizer.token_text(i), schema.shortest_float(logprob), i in tokenizer.special_ids)
        for i, logprob in piece.top
    ]


class _GunicornLog(gunicorn.glogging.Logger):
    """Gunicorn's warnings go where our own log goes, in its form."""

    def setup(self, cfg) -> None:
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)


class Server(gunicorn.app.base.BaseApplication):
    """Gunicorn with a thread for every request that may be in flight."""

    def __init__(self, config: Config, listener: socket.socket):
        self._config = config
        self._listener_fd = listener.detach()  # gunicorn's from now on
        super().__init__()

    def load_config(self) -> None:
        threads = self._config.max_concurrent_requests + PROBE_THREADS
        settings = {
            "bind": [f"fd://{self._listener_fd}"],
            "workers": self._config.web_concurrency,
            "worker_class": "gthread",
            "threads": threads,
            "worker_connections": max(1000, 2 * threads),
            "keepalive": 75,
            "timeout": 120,  # of gunicorn's own heartbeat, not of a request
            "graceful_timeout": int(self._config.graceful_termination_timeout) + 5,  # entrypoint.sh is the one that counts
            "worker_tmp_dir": "/dev/shm" if Path("/dev/shm").is_dir() else None,
            "control_socket_disable": True,
            "logger_class": _GunicornLog,
        }
        for name, value in settings.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        """Runs in each web process, after the fork: a ZeroMQ context must not be carried across one."""
        configuration.die_with_parent()
        return create_app(self._config, Worker(configuration.socket_address()))


def main() -> int:
    configuration.die_with_parent()
    config = configuration.load()
    configuration.set_up_logging(config.json_output)
    family = socket.AF_INET6 if ":" in config.hostname else socket.AF_INET
    try:
        listener = socket.create_server((config.hostname, config.port), family=family, backlog=2048)
    except OSError as error:
        logger.error(
            "port %d of %s cannot be used: %s; choose another with --port (PORT)", config.port, config.hostname, error.strerror
        )
        return 2
    Server(config, listener).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
