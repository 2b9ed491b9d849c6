"""HTTP: the Flask app, its routes, streaming, API key and CORS, client disconnects, and the gunicorn server around it.

A web process reads and validates requests, turns text into token ids, sends them to the worker (engine_client.py) and turns
the generated tokens back into text. Whatever a client can get wrong is answered here, before the worker is asked. Each request
runs in a greenlet of gunicorn's gevent worker; work that would hold up the event loop runs in a few threads (`TextThreads`).
This layer knows no torch, no model and no slots.

    python3 web.py      serves, with the configuration that `entrypoint.sh` resolved for this run
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gevent
import gunicorn.app.base
import gunicorn.glogging
from flask import Flask, Response, g, request
from flask_swagger_ui import get_swaggerui_blueprint
from gevent.monkey import get_original
from gevent.threadpool import ThreadPool
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected, HTTPException

import config as configuration
import schema
from answers import Answer, ChatAnswer, CompletionAnswer, InferAnswer, NativeAnswer, PredictionsAnswer, Sequence
from config import Config
from engine_client import ClientGone, EngineClient, EngineError, InFlightRequest
from protocol import End, Generate, ModelInfo, Prompt, RequestStats, Token
from schema import ApiError, ChatRequest, CompletionRequest, GenerateRequest, Job, Parameters
from text import ChatTemplate, Piece, TemplateError, Tokenizer, TooManyTokens

logger = logging.getLogger("web")

WATCH_S = 0.1  # how often a request looks whether its client is still connected
KEEP_ALIVE_S = 15.0  # a stream without an event for this long carries a comment, so that proxies keep it open
SAGEMAKER_DEADLINE_S = 55.0  # SageMaker gives up on an answer after 60
OPEN_ROUTES = {"/", "/health", "/ping", "/live", "/metrics"}  # GET needs no key: probes and scrapers have none
HANG_UP = 499  # the status of a response that nobody reads
LONG_TEXT = 20_000  # bytes; shorter ones are tokenized in less than a millisecond
TEXT_THREADS = 4
BODY_PIECE = 65_536  # bytes
HELD_LIMIT = 64_000_000  # bytes of bodies that are still arriving, in a web process
SPARE_FDS = 200  # for everything but connections

Batch = list[tuple[Sequence, list[Piece]]]  # what became certain together


class ModelText(NamedTuple):
    """The served model's tokenizer and chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def load(cls, info: ModelInfo, tokenizer_config_path: str | None) -> ModelText:
        template = ChatTemplate.load(info.model_dir, tokenizer_config_path)
        return cls(Tokenizer(info.tokenizer_dir, info.eos_token_ids), template)


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
            raise schema.overloaded()
        self._pending += 1
        try:
            result, error = self._threads.apply(_attempt, (function,))
        finally:
            self._pending -= 1
        if error is not None:
            raise error
        return result


def _attempt(function: Callable):
    """The result and the error of `function()`; gevent would print the traceback of an error that leaves its thread."""
    try:
        return function(), None
    except Exception as error:
        return None, error


class Generation:
    """The sequences that are generated for one HTTP request, as text. Times are CLOCK_MONOTONIC, in seconds.

    Iterating yields a Batch whenever text has become certain, each sequence once, until all have finished; an empty Batch
    means that KEEP_ALIVE_S passed without a token. Raises ApiError when the worker refuses or fails, and ClientGone when the
    client has disconnected. What is unfinished at `deadline_at` ends there. `settle` frees everything.
    """

    def __init__(
        self,
        engine: EngineClient,
        jobs: list[Job],
        prompts: list[tuple[list[int], int]],  # of each job: token ids, max_new_tokens
        started_at: float,
        deadline_at: float = float("inf"),
        client: socket.socket | None = None,
        input_may_end: bool = False,
    ):
        self.started_at = started_at
        self.sent_at = self._received_at = time.monotonic()
        self.first_token_at: float | None = None
        self.is_settled = False
        self._engine = engine
        self._deadline_at = deadline_at
        self._by_id: dict[int, Sequence] = {}
        generates = []
        for job, (prompt, max_new_tokens) in zip(jobs, prompts):
            for number in range(job.sequences):
                sequence = Sequence(engine.text.tokenizer, job, prompt, max_new_tokens, number, len(self._by_id))
                request_id = secrets.randbits(63)
                self._by_id[request_id] = sequence
                generate = Generate(
                    id=request_id,
                    prompt=prompt,
                    max_new_tokens=max_new_tokens,
                    sampling=sequence.sampling,
                    top_n_tokens=job.top_n_tokens,
                    min_new_tokens=job.min_new_tokens,
                    ignore_eos=job.ignore_eos,
                    logprobs=job.logprobs,
                    prompt_logprobs=job.prompt_logprobs,
                    sent_at=self.sent_at,
                )
                generates.append(generate)
        self._request = InFlightRequest(engine, generates)
        self._watcher = gevent.spawn(self._watch, client, input_may_end)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_id.values())

    @property
    def _unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self._by_id.values() if sequence.finish_reason is None]

    def __iter__(self) -> Iterator[Batch]:
        while self._unfinished:
            messages = self._request.receive()
            self._received_at = time.monotonic()
            batch = self._advance(messages)
            if self._unfinished and self._received_at >= self._deadline_at:
                for sequence, pieces in self._cut():
                    batch.setdefault(sequence, []).extend(pieces)
            if batch or not messages:  # a prompt that has been run is no reason yet to begin an answer
                yield list(batch.items())

    def _watch(self, client: socket.socket | None, input_may_end: bool) -> None:
        """Wakes the request when its client disconnects, at its deadline, and when it is time for a sign of life.

        The end of the client's input counts as a disconnect unless `input_may_end`: then only a broken connection does.
        """
        poller = get_original("select", "poll")()  # asked without waiting; gevent's own cannot see the end of the input
        if client is not None:
            poller.register(client, select.POLLHUP | select.POLLERR | (0 if input_may_end else select.POLLRDHUP))
        while not poller.poll(0):
            now = time.monotonic()
            gevent.sleep(min(WATCH_S, max(0.01, self._deadline_at - now)))
            if time.monotonic() >= min(self._received_at + KEEP_ALIVE_S, self._deadline_at):
                self._request.wake()
        self._request.hang_up()

    def _advance(self, messages: list[Prompt | Token | End]) -> dict[Sequence, list[Piece]]:
        batch: dict[Sequence, list[Piece]] = {}
        for message in messages:
            sequence = self._by_id[message.id]
            if sequence.finish_reason is not None:  # tokens that arrive after a stop string
                continue
            if isinstance(message, End):
                raise _end_error(message.reason, message.message)
            if isinstance(message, Prompt):
                sequence.ran = message
            else:
                batch.setdefault(sequence, []).extend(self._take(message, sequence))
        return batch

    def settle(self, outcome: str, status: int = 200) -> None:
        """Cancels what still runs, and adds the request to the metrics; only the first outcome counts."""
        self._request.close()
        self._watcher.kill(block=False)
        if not self.is_settled:
            self.is_settled = True
            self._engine.record(self._stats(outcome, status))

    def _stats(self, outcome: str, status: int) -> RequestStats:
        sequences = self.sequences
        duration_s = time.monotonic() - self.started_at
        validation_s = self.sent_at - self.started_at
        queue_s = max(sequence.queue_s for sequence in sequences)
        return RequestStats(
            status=HANG_UP if outcome == "dropped" else status,
            outcome=outcome,
            duration_s=duration_s,
            validation_s=validation_s,
            queue_s=queue_s,
            inference_s=max(0.0, duration_s - validation_s - queue_s),
            first_token_s=None if self.first_token_at is None else self.first_token_at - self.started_at,
            input_tokens=sum(len(sequence.prompt) for sequence in sequences if sequence.number == 0),
            generated_tokens=sum(sequence.tokens for sequence in sequences),
            max_new_tokens=sum(sequence.max_new_tokens for sequence in sequences),
        )

    def _take(self, token: Token, sequence: Sequence) -> list[Piece]:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        pieces = sequence.take(token)
        if sequence.finish_reason is not None and token.finish_reason is None:
            self._request.cancel(token.id, "stop sequence")
        return pieces

    def _cut(self) -> list[tuple[Sequence, list[Piece]]]:
        if self.first_token_at is None:
            raise schema.overloaded()  # it has only waited; a later attempt may be served
        cut = [(sequence, sequence.cut()) for sequence in self._unfinished]
        self._request.close("deadline")
        return cut


def _end_error(reason: str, message: str = "") -> ApiError:
    if reason == "overloaded":
        return schema.overloaded()
    if reason == "failed":
        return schema.generation_failed(message)
    if reason == "cancelled":
        return schema.incomplete()
    return schema.not_ready(reason)


class Readers:
    """From the body of a request to its Answer: the jobs to run, and the form of the response. Raise ApiError."""

    def __init__(self, config: Config, engine: EngineClient):
        self._config = config
        self._engine = engine

    def generate(self, body: bytes) -> Answer:
        return self._native(schema.parse(body, GenerateRequest), streams=False)

    def generate_stream(self, body: bytes) -> Answer:
        return self._native(schema.parse(body, GenerateRequest), streams=True)

    def compat(self, body: bytes) -> Answer:
        """`POST /`: streams when the body says so, and gives the prompt back unless it says not to."""
        generate = schema.parse(body, GenerateRequest)
        return self._native(generate, streams=bool(generate.stream), in_list=True, full_text=True)

    def chat(self, body: bytes) -> Answer:
        chat = schema.parse(body, ChatRequest)
        return ChatAnswer([self._chat_job(chat)], *self._parts(chat.stream), request=chat)

    def completion(self, body: bytes) -> Answer:
        completion = schema.parse(body, CompletionRequest)
        jobs = schema.check_completion(completion, self._config, self._engine.info)
        return CompletionAnswer(jobs, *self._parts(completion.stream), request=completion)

    def of_invocation(self, body: bytes) -> tuple[Callable[[bytes], Answer], bool]:
        """The reader for a body of `/invocations`, and whether it is one of OpenAI's."""
        readers = {GenerateRequest: self.compat, ChatRequest: self.chat, CompletionRequest: self.completion}
        kinds = {"inputs": GenerateRequest, "messages": ChatRequest, "prompt": CompletionRequest}
        kind = schema.kind_of(body, kinds)
        return readers[kind], kind is not GenerateRequest

    def vertex(self, body: bytes) -> Answer:
        jobs, prefixes = [], []
        for instance in schema.vertex_instances(schema.parse(body, schema.VertexRequest), self._config):
            if isinstance(instance, ChatRequest):
                jobs.append(self._chat_job(instance))
                prefixes.append("")
            else:
                jobs.append(schema.check(instance, self._config, self._engine.info, streaming=False))
                wants_prompt = instance.parameters and instance.parameters.return_full_text
                prefixes.append(instance.inputs if wants_prompt else "")
        return PredictionsAnswer(jobs, *self._parts(), prefixes=prefixes)

    def infer(self, sentence: str) -> Answer:
        job = schema.check_sentence(sentence, self._config, self._engine.info)
        return InferAnswer([job], *self._parts(), prefixes=[sentence])

    def chat_prompt(self, chat: ChatRequest) -> str:
        """The text that the model's chat template makes of the messages."""
        messages = schema.messages_of(chat.messages)
        if self._engine.text.template is None:
            raise schema.template_failed("template not found")
        try:
            return self._engine.text.template.render(messages)
        except TemplateError as error:
            raise schema.template_failed(str(error)) from None

    def _native(self, generate: GenerateRequest, streams: bool, in_list: bool = False, full_text: bool = False) -> Answer:
        parameters = generate.parameters or Parameters()
        if parameters.return_full_text is None:
            parameters.return_full_text = full_text
        job = schema.check(generate, self._config, self._engine.info, streams)
        return NativeAnswer([job], *self._parts(streams), parameters=parameters, in_list=in_list)

    def _chat_job(self, chat: ChatRequest) -> Job:
        job = schema.check_chat(chat, self._config, self._engine.info)
        return replace(job, prompt=self.chat_prompt(chat))

    def _parts(self, streams: bool | None = False) -> tuple[ModelInfo, Tokenizer, bool]:
        return self._engine.info, self._engine.text.tokenizer, bool(streams)


def create_app(config: Config, engine: EngineClient) -> Flask:
    """The WSGI application. Serves from the first moment; until the model is ready it answers 503."""
    app = Flask("neuron-textgen", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.payload_limit + 1  # werkzeug cuts a chunked body here without an error
    app.register_blueprint(get_swaggerui_blueprint("/docs", "/api-doc/openapi.json"))
    readers, bodies, threads = Readers(config, engine), Bodies(config), TextThreads(config.max_concurrent_requests)
    _guard(app, Guard(config))
    _answer_errors(app, config, engine)

    def generate(read: Callable[[], Answer], in_thread: bool, deadline_s: float | None = config.response_deadline) -> Response:
        """Runs what `read` asks for, and answers as a whole or as a stream."""

        def prepare() -> tuple[Answer, list[tuple[list[int], int]]]:
            answer = read()
            schema.check_sequences(answer.jobs, config)
            return answer, [schema.fit(job, _tokenize(engine, job), engine.info) for job in answer.jobs]

        answer, prompts = threads.run(prepare) if in_thread else prepare()
        deadline_at = g.started_at + deadline_s if deadline_s and not answer.streams else float("inf")
        client = request.environ.get("gunicorn.socket")
        is_last = request.environ["SERVER_PROTOCOL"] == "HTTP/1.0" or "close" in request.headers.get("Connection", "").lower()
        generation = Generation(engine, answer.jobs, prompts, g.started_at, deadline_at, client, input_may_end=is_last)
        g.generation = generation
        return _respond(config, engine, answer, generation)

    def begin() -> None:
        """Refuses what need not be read."""
        g.generates, g.started_at = True, time.monotonic()
        _ready(engine)
        if engine.is_full:
            raise schema.overloaded()

    def generates(path: str, read: Callable[[bytes], Answer], renders: bool = False) -> None:
        """A route that generates text from a JSON body; `renders`: with the chat template."""

        def view() -> Response:
            begin()
            body = bodies.read()
            return generate(lambda: read(body), renders or len(body) >= LONG_TEXT)

        app.add_url_rule(path, f"POST {path}", view, methods=["POST"])

    generates("/", readers.compat)
    generates("/v1", readers.compat)  # for huggingface_hub's text_generation with a base_url that ends in /v1
    generates("/generate", readers.generate)
    generates("/generate_stream", readers.generate_stream)
    generates("/v1/chat/completions", readers.chat, renders=True)
    generates("/v1/completions", readers.completion)
    generates("/vertex", readers.vertex, renders=True)

    @app.post("/invocations")
    def invocations() -> Response:
        begin()
        body = bodies.read()
        read, g.speaks_openai = readers.of_invocation(body)
        return generate(lambda: read(body), True, config.response_deadline or SAGEMAKER_DEADLINE_S)

    @app.get("/infer")
    def infer() -> Response:
        begin()
        sentence = request.args.get("sentence", "")
        return generate(lambda: readers.infer(sentence), in_thread=False)

    @app.post("/tokenize")
    def tokenize() -> Response:
        _ready(engine)
        inputs = schema.parse(bodies.read(), GenerateRequest).inputs
        return _json(threads.run(lambda: _simple_tokens(engine.text.tokenizer, inputs, add_special_tokens=True)))

    @app.post("/chat_tokenize")
    def chat_tokenize() -> Response:
        _ready(engine)
        body = bodies.read()

        def tokens() -> schema.ChatTokenizeResponse:
            text = readers.chat(body).jobs[0].prompt
            return schema.ChatTokenizeResponse(_simple_tokens(engine.text.tokenizer, text, add_special_tokens=False), text)

        return _json(threads.run(tokens))

    @app.get("/live")
    def live() -> Response:
        return _empty()

    @app.get("/")
    @app.get("/health")
    @app.get("/ping")
    def health() -> Response:
        if engine.phase != "ready":
            raise schema.unhealthy(engine.phase)
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
            raise schema.no_such_model(name, card.id)
        return _json(card)

    @app.get("/api-doc/openapi.json")
    def openapi() -> Response:
        return _json(schema.openapi())

    return app


class Guard:
    """Which requests are allowed, and what a browser has to know about it: API key and CORS."""

    def __init__(self, config: Config):
        self._origins = config.cors_allow_origin.split(",")
        self._key = config.api_key.encode() if config.api_key else None

    def allows(self, method: str, path: str, authorization: str) -> bool:
        if self._key is None or (path in OPEN_ROUTES and method in ("GET", "HEAD")):
            return True
        scheme, _, given = authorization.partition(" ")
        # WSGI hands the bytes of a header over as Latin-1.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)

    def headers(self, method: str, origin: str, requested: str) -> dict[str, str]:
        """`requested`: the headers that a browser wants to send; OpenAI's clients send many of their own."""
        headers = {"Vary": "origin, access-control-request-method, access-control-request-headers"}
        if "*" in self._origins:
            headers["Access-Control-Allow-Origin"] = "*"
        elif origin in self._origins:
            headers["Access-Control-Allow-Origin"] = origin
        if method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = "GET,POST"
            headers["Access-Control-Allow-Headers"] = ",".join(filter(None, ["authorization,content-type", requested]))
        return headers


def _guard(app: Flask, guard: Guard) -> None:
    """API key and CORS, before and after every route."""

    @app.before_request
    def check_key() -> Response | None:
        gevent.sleep(0)  # a client that sends requests ahead must not keep the event loop to itself
        if request.method == "OPTIONS":
            return _empty()  # a browser's preflight request carries no key
        if not guard.allows(request.method, request.path, request.headers.get("Authorization", "")):
            raise schema.unauthorized()
        return None

    @app.after_request
    def allow_origins(response: Response) -> Response:
        requested = request.headers.get("Access-Control-Request-Headers", "")
        response.headers.extend(guard.headers(request.method, request.headers.get("Origin", ""), requested))
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
        return api_error(_end_error(error.reason, error.message))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        if isinstance(error, ClientDisconnected):
            g.outcome = "dropped" if "generates" in g else None
            return Response(status=HANG_UP)  # for the metrics; nobody reads it
        response = api_error(_http_error(error, config))
        if allowed := getattr(error, "valid_methods", None):
            response.headers["Allow"] = ", ".join(allowed)
        return response

    @app.errorhandler(Exception)
    def bug(error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return api_error(ApiError(500, "internal", "Internal server error"))

    @app.after_request
    def record(response: Response) -> Response:
        if response.status_code >= 400 and not ("generation" in g and g.generation.is_settled):
            engine.record(RequestStats(response.status_code, g.get("outcome")))
        return response


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


def _ready(engine: EngineClient) -> ModelInfo:
    if engine.phase != "ready":
        raise schema.not_ready(engine.phase)
    return engine.info


class TooSlow(Exception):
    """A body takes longer than it may. Not a TimeoutError, which werkzeug takes for a disconnect."""


class Bodies:
    """Reads the bodies of requests, within limits of size, time and memory."""

    def __init__(self, config: Config):
        self._config = config
        self._held_bytes = 0  # of bodies that have not arrived completely

    def read(self) -> bytes:
        """The body of the current request. Raises ApiError."""
        if not (request.mimetype == "application/json" or request.mimetype.endswith("+json")):
            raise schema.wrong_content_type()
        body = bytearray()
        timeout_s = self._config.client_timeout
        try:
            with gevent.Timeout(timeout_s, TooSlow):
                while piece := request.stream.read(BODY_PIECE):
                    body += piece
                    self._held_bytes += len(piece)
                    if self._held_bytes > HELD_LIMIT:
                        raise ApiError(503, "unavailable", "Too many requests are still arriving", retry_after_s=1)
                    gevent.sleep(0)  # a body that arrives fast must not keep the event loop to itself
        except TooSlow:
            if client := request.environ.get("gunicorn.socket"):
                client.shutdown(socket.SHUT_RD)  # so that gunicorn does not wait for the rest of it
            limit = f"the request did not arrive within --client-timeout (CLIENT_TIMEOUT) {timeout_s:g} s"
            raise ApiError(408, "timeout", limit) from None
        except ParseException as error:  # malformed chunks
            raise ApiError(400, "validation", f"Failed to read the request body: {error}") from None
        except OSError:
            raise ClientDisconnected from None
        finally:
            self._held_bytes -= len(body)
        if len(body) > self._config.payload_limit:
            raise schema.too_large(self._config.payload_limit)
        return bytes(body)


def _tokenize(engine: EngineClient, job: Job) -> list[int]:
    if not isinstance(job.prompt, str):
        return job.prompt
    tokenizer = engine.text.tokenizer
    # Tokenizing a text takes a hundred times its memory, so one that cannot fit is refused before.
    if job.truncate is None and len(job.prompt) > engine.info.max_total_tokens * tokenizer.longest_token:
        raise schema.too_many_tokens(job, f"at least {len(job.prompt) // tokenizer.longest_token}", engine.info)
    try:
        return tokenizer.encode(job.prompt, job.add_special_tokens)
    except Exception as error:
        raise schema.invalid(f"tokenizer error {error}") from None


def _simple_tokens(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[schema.SimpleToken]:
    raw = text.encode()
    try:
        spans = tokenizer.spans(text, add_special_tokens, schema.MAX_TOLD_TOKENS)
    except TooManyTokens as error:
        raise schema.too_many_to_tell(error.count, schema.MAX_TOLD_TOKENS) from None
    return [schema.SimpleToken(i, raw[start:stop].decode(errors="replace"), start, stop) for i, start, stop in spans]


def _respond(config: Config, engine: EngineClient, answer: Answer, generation: Generation) -> Response:
    """The response, as soon as its status is certain: of a stream with its first text, of a whole answer at its end."""
    characters = sum(job.characters for job in answer.jobs)
    headers = {"x-compute-type": config.compute_type or engine.info.device, "x-compute-characters": str(characters)}
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
    response.call_on_close(lambda: generation.settle("dropped"))  # a client may disconnect before the first event is written
    return response


def _events(answer: Answer, generation: Generation, batch: Batch | None, rest: Iterator[Batch]) -> Iterator[bytes]:
    """The body of a stream. What became certain together is one write."""
    outcome = "dropped"  # unless it comes to its end
    written_at = generation.started_at
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
        logger.exception("a stream of %s failed", type(answer).__name__)
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
    times = {
        "x-total-time": total_s,
        "x-validation-time": validation_s,
        "x-queue-time": queue_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, generated),
    }
    return (
        {"x-compute-time": f"{time.monotonic() - generation.started_at:.6f}"}
        | {name: str(int(seconds * 1000)) for name, seconds in times.items()}
        | {
            "x-prompt-tokens": str(sum(len(sequence.prompt) for sequence in sequences if sequence.number == 0)),
            "x-generated-tokens": str(generated),
        }
    )


class _GunicornLog(gunicorn.glogging.Logger):
    """Gunicorn's warnings go where this server's log goes, in its format."""

    def setup(self, cfg) -> None:
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)

    def exception(self, msg: str, *args, **kwargs) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that broke its connection or never reads
            super().exception(msg, *args, **kwargs)


class Server(gunicorn.app.base.BaseApplication):
    """Gunicorn with its gevent worker: a connection costs a greenlet, so slow and silent clients hold up nobody."""

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
            "graceful_timeout": int(self._config.graceful_termination_timeout) + 5,  # entrypoint.sh enforces the real one
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
        configuration.die_with_parent()
        engine = EngineClient(
            configuration.socket_address(),
            lambda info: ModelText.load(info, self._config.tokenizer_config_path),
            self._config.stuck_timeout,
            on_stuck=(configuration.run_dir() / "stuck").touch,  # entrypoint.sh looks for it
        )
        app = create_app(self._config, engine)
        engine.wait_until_known()
        return app


def main() -> int:
    configuration.die_with_parent()
    config = configuration.load()
    configuration.set_up_logging(config)
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
