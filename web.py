"""HTTP: the Flask app, its routes, streaming, API key and CORS, clients that hang up, and the gunicorn server around it.

A web process parses and checks requests, turns text into token ids, asks the worker, and turns its tokens back into text.
Whatever a client can get wrong is answered here, before the worker hears of it. This layer knows no torch, no model and no
slots; it never waits for the device, only for messages.

    python3 web.py      serves, with the configuration that `entrypoint.sh` resolved for this run
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import gunicorn.app.base
import gunicorn.glogging
import gunicorn.util
import msgspec
from flask import Flask, Response, g, request
from flask_swagger_ui import get_swaggerui_blueprint
from gunicorn.http.errors import ParseException
from werkzeug.datastructures import Headers
from werkzeug.exceptions import ClientDisconnected, HTTPException

import config as configuration
import connections
import schema
from answers import Answer, ChatAnswer, CompletionAnswer, InferAnswer, NativeAnswer, PredictionsAnswer, Sequence
from config import Config
from protocol import (
    HEARTBEAT_S,
    SILENCE_S,
    Cancel,
    End,
    FromWorker,
    Generate,
    Hello,
    Metrics,
    MetricsRequest,
    ModelInfo,
    Prompt,
    RequestStats,
    Status,
    SubmitRequests,
    Token,
    Tokens,
    WebEnd,
)
from schema import ApiError, ChatRequest, CompletionRequest, GenerateRequest, Job, Parameters
from text import ChatTemplate, Piece, TemplateError, Tokenizer, TooManyTokens

logger = logging.getLogger("web")

HANG_UP_POLL_S = 0.1  # how often a waiting request looks whether its client is still there
KEEP_ALIVE_S = 15.0  # a stream without an event for this long carries a comment, so that proxies keep it open
METRICS_TIMEOUT_S = 2.0
FIRST_WORD_S = 1.0  # a worker that runs answers a new web process within milliseconds
LOADING_S = 30.0  # the largest tokenizers take about two
LONG_TEXT = 100_000  # characters
SAGEMAKER_DEADLINE_S = 55.0  # SageMaker gives up on an answer after 60
SPARE_THREADS = 16  # for what is neither generated text nor a probe, and for answers that clients are still reading
OPEN_ROUTES = {"/", "/health", "/ping", "/live", "/metrics"}  # GET needs no key: probes and scrapers have none
PROBES = OPEN_ROUTES | {"/info", "/v1/models"}  # answered from memory, whatever else runs
HANG_UP = 499  # the status of an answer that nobody reads


Batch = list[tuple[Sequence, list[Piece]]]  # what became certain together
Inbox = Callable[[list], None]  # takes messages that came together

_long_texts = threading.BoundedSemaphore(2)


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


class Worker:
    """The worker as this web process sees it: what it serves, how it is doing, and the requests that it has of ours."""

    def __init__(
        self,
        address: str,
        tokenizer_config_path: str | None = None,
        stuck_timeout_s: float = float("inf"),
        on_stuck: Callable[[], None] = lambda: None,
    ):
        self.facts: ModelInfo | None = None
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self._tokenizer_config_path = tokenizer_config_path
        self._status: Status | None = None
        self._lost: str | None = None  # "dead" or "stuck" when it is given up
        self._stuck_timeout_s = stuck_timeout_s
        self._on_stuck = on_stuck
        self._heard_at = self._beat_at = time.monotonic()
        self._stuck_s = 0.0
        self._said_ready = False
        self._heard = threading.Event()  # of how the worker is doing
        self._is_loaded = threading.Event()  # the tokenizer
        self._refused: queue.SimpleQueue[RequestStats] = queue.SimpleQueue()  # not counted yet
        self._inboxes: dict[int, Inbox | None] = {}  # None: nobody reads, but the end is not heard of yet
        self._end = WebEnd(address, self._on_message, self._on_lost, self._on_beat)
        self._end.send(Hello(os.getpid(), ready=False))

    @property
    def phase(self) -> str:
        """ "ready" when requests are taken, else what is going on."""
        if self._status is None:
            return self._lost or "starting"
        if self._lost and self._status.phase != "draining":
            return self._lost
        if self._status.phase != "ready":
            return self._status.phase
        if self.tokenizer is None:
            return "loading"
        return "stuck" if self._is_stuck else "ready"

    @property
    def is_full(self) -> bool:
        """Whether a request for text would be refused now, whatever it asks for."""
        return self.phase == "ready" and self._status.full

    @property
    def _is_stuck(self) -> bool:
        """Whether the worker is at a step that lasts many times longer than usual, or says nothing at all."""
        if self._status is None or self._status.phase not in ("ready", "draining"):  # a boot may take its time, and be silent
            return False
        now = time.monotonic()
        return 0 < self._status.due_at < now or now - self._heard_at > SILENCE_S

    def catch_up(self) -> None:
        """Waits for what a worker that takes requests has told other web processes before, and for the tokenizer.

        A process that takes the place of another one would refuse meanwhile what those beside it take. With a worker that is
        not that far, or silent, it does not wait: then it is the same to all.
        """
        if self._heard.wait(FIRST_WORD_S) and self._status.phase == "ready":
            self._is_loaded.wait(LOADING_S)

    def start(self, generates: list[Generate], inbox: Inbox) -> None:
        """Sends requests off, of which all are taken or none. Their Prompts, Tokens and Ends come to `inbox`, which must not
        block."""
        for generate in generates:
            self._inboxes[generate.id] = inbox
        self._end.send(SubmitRequests(generates))
        if self._lost:
            self._on_lost()

    def leave(self, request_id: int, reason: str) -> None:
        """Gives up a request. Nothing happens when it has ended; else its id is kept until the worker has ended it."""
        if self._inboxes.get(request_id) is not None:
            self._inboxes[request_id] = None
            self._end.send(Cancel(request_id, reason))

    def account(self, answered: RequestStats) -> None:
        """Has an HTTP request counted, in the one registry there is."""
        if not self._lost:
            self._end.send(answered)

    def account_refused(self, answered: RequestStats) -> None:
        """As `account`, for refusals, of which there may be hundreds at once: they are sent together, a little later."""
        self._refused.put(answered)

    def _send_refused(self) -> None:
        refused: Counter[RequestStats] = Counter()
        with contextlib.suppress(queue.Empty):
            while True:
                refused[self._refused.get_nowait()] += 1
        for answered, times in refused.items():
            self.account(msgspec.structs.replace(answered, times=times))

    def metrics(self) -> bytes:
        """What the registry holds, from the worker. Raises ApiError when it does not say."""
        told: queue.SimpleQueue = queue.SimpleQueue()
        request_id = secrets.randbits(63)
        self._inboxes[request_id] = told.put
        try:
            if not self._lost:
                self._send_refused()
                self._end.send(MetricsRequest(request_id))
                (message,) = told.get(timeout=METRICS_TIMEOUT_S)
                if isinstance(message, Metrics):
                    return message.text
        except queue.Empty:
            pass
        finally:
            self._inboxes.pop(request_id, None)
        raise schema.not_ready("busy" if self.phase == "ready" else self.phase)

    def _on_message(self, message: FromWorker) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, Tokens):
            self._deliver([*message.prompts, *message.tokens])
        elif isinstance(message, (End, Metrics)):
            self._deliver([message])
        elif isinstance(message, Status):
            self._status = message
            self._heard.set()
            self._say_when_ready()
        elif self.facts is None:
            self.facts = message
            threading.Thread(target=self._load_tokenizer, name="load-tokenizer", daemon=True).start()

    def _deliver(self, messages: list[Prompt | Token | End | Metrics]) -> None:
        """Each inbox gets all that is for it at once."""
        parts: dict[Inbox, list] = {}
        for message in messages:
            inbox = self._inboxes.get(message.id) if _goes_on(message) else self._inboxes.pop(message.id, None)
            if inbox is not None:
                parts.setdefault(inbox, []).append(message)
        for inbox, part in parts.items():
            inbox(part)

    def _load_tokenizer(self) -> None:
        self.template = ChatTemplate.load(self.facts.model_dir, self._tokenizer_config_path)
        self.tokenizer = Tokenizer(self.facts.tokenizer_dir, self.facts.eos_token_ids)
        self._is_loaded.set()
        self._say_when_ready()

    def _say_when_ready(self) -> None:
        if not self._said_ready and self.phase == "ready":
            self._said_ready = True
            self._end.send(Hello(os.getpid(), ready=True))

    def _on_beat(self) -> None:
        """Gives the worker up when it has been stuck for too long."""
        self._send_refused()
        now = time.monotonic()
        # Beats are counted and not the time between two: when this process was stopped itself, the worker may be well.
        passed_s, self._beat_at = min(now - self._beat_at, 2 * HEARTBEAT_S), now
        was_stuck, is_stuck = self._stuck_s > 0, self._is_stuck
        self._stuck_s = self._stuck_s + passed_s if is_stuck else 0.0
        if is_stuck != was_stuck:
            logger.warning("the worker %s", "makes no progress" if is_stuck else "makes progress again")
        if self._stuck_s >= self._stuck_timeout_s and not self._lost:
            self._on_lost()
            self._on_stuck()

    def _on_lost(self) -> None:
        self._lost = self._lost or ("stuck" if self._stuck_s else "dead")
        self._deliver([End(request_id, self._lost) for request_id in list(self._inboxes)])


def _goes_on(message: Prompt | Token | End | Metrics) -> bool:
    """Whether more is to come for the same id."""
    return message.finish_reason is None if type(message) is Token else type(message) is Prompt


class Call:
    """One HTTP request in flight, with the sequences that are generated for it. Times are CLOCK_MONOTONIC, in seconds.

    Iterating yields what became certain, as (sequence, pieces), each sequence once, until all have finished; an empty list
    means that KEEP_ALIVE_S passed without a token, or no more than that it is time to look. Raises ApiError when the worker
    refuses or fails, and ClientGone when `client_is_gone` says so. What is unfinished at `deadline_at` ends there. `close`
    frees everything, at any time, as often as one likes.

    To wake a thread for each token costs more than all that is done with it. So who iterates may name a `relay`: while it
    waits, what becomes certain goes there instead, on the thread of the socket. A relay must not block, and returns whether
    it can take more; it is not asked when a sequence comes to its end, nor again before the iteration has gone on.
    """

    def __init__(
        self,
        worker: Worker,
        jobs: list[Job],
        started_at: float,
        deadline_at: float = float("inf"),
        client_is_gone: Callable[[], bool] = lambda: False,
    ):
        self.started_at = started_at
        self.first_token_at: float | None = None
        self.is_settled = False
        self.relay: Callable[[Batch], bool] | None = None
        self._worker = worker
        self._deadline_at = deadline_at
        self._client_is_gone = client_is_gone
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # of lists of messages
        self._lock = threading.Lock()  # who holds it may change what follows, and relay
        self._is_lent = False  # its thread waits, and the relay has its place
        self._relay_error: Exception | None = None
        self._quiet_since = 0.0
        prompts = [(job, *schema.fit(job, _tokenize(worker.tokenizer, job), worker.facts)) for job in jobs]
        self.sent_at = self._looked_at = time.monotonic()
        self._by_id: dict[int, Sequence] = {}
        generates = []
        for job, prompt, max_new_tokens in prompts:
            for number in range(job.sequences):
                sequence = Sequence(worker.tokenizer, job, prompt, max_new_tokens, number, len(self._by_id))
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
        worker.start(generates, self._take_in)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_id.values())

    @property
    def _unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self._by_id.values() if sequence.finish_reason is None]

    def __iter__(self) -> Iterator[Batch]:
        while self._unfinished:
            messages = self._receive()
            gained = self._advance(messages)
            if self._unfinished and time.monotonic() >= self._deadline_at:
                for sequence, pieces in self._cut():
                    gained.setdefault(sequence, []).extend(pieces)
            if gained or not messages:  # a prompt that has been run is no reason yet to begin an answer
                yield list(gained.items())

    def _advance(self, messages: list[Prompt | Token | End]) -> dict[Sequence, list[Piece]]:
        gained: dict[Sequence, list[Piece]] = {}
        for message in messages:
            sequence = self._by_id[message.id]
            if sequence.finish_reason is not None:  # what still comes after a stop string
                continue
            if isinstance(message, End):
                raise _why_it_ended(message)
            if isinstance(message, Prompt):
                sequence.ran = message
            else:
                gained.setdefault(sequence, []).extend(self._take(message, sequence))
        return gained

    def close(self, reason: str = "client hung up") -> None:
        for request_id in self._by_id:
            self._worker.leave(request_id, reason)

    def settle(self, outcome: str, status: int = 200) -> None:
        """Closes, and has the request counted; only the first word on how it went counts."""
        self.close()
        if not self.is_settled:
            self.is_settled = True
            self._worker.account(self._answered(outcome, status))

    def _answered(self, outcome: str, status: int) -> RequestStats:
        """What the metrics are to know of it."""
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
            self._worker.leave(token.id, "stop sequence")
        return pieces

    def _cut(self) -> list[tuple[Sequence, list[Piece]]]:
        if self.first_token_at is None:
            raise schema.overloaded()  # it has only waited, which coming back later may mend
        cut = [(sequence, sequence.cut()) for sequence in self._unfinished]
        self.close("deadline")
        return cut

    def _take_in(self, messages: list[Prompt | Token | End]) -> None:
        """On the thread of the socket: relays messages, or wakes who waits for them."""
        with self._lock:
            if self._is_lent:
                if self._relayed(messages):
                    return
                self._is_lent = False
            self._inbox.put(messages)

    def _relayed(self, messages: list[Prompt | Token | End]) -> bool:
        """Whether nothing is left to do for its own thread; what it has to handle itself stays in `messages`."""
        if not all(type(message) is Token and message.finish_reason is None for message in messages):
            return False
        try:
            relay_goes_on = self.relay(list(self._advance(messages).items()))
        except Exception as error:
            self._relay_error = error
            relay_goes_on = False
        messages.clear()
        self._quiet_since = time.monotonic()
        return relay_goes_on and any(sequence.finish_reason is None for sequence in self._by_id.values())

    def _receive(self) -> list[Prompt | Token | End]:
        """All messages that wait; none when KEEP_ALIVE_S pass, when the deadline comes, and when the relay has ended."""
        self._quiet_since = time.monotonic()
        with self._lock:
            self._is_lent = self.relay is not None and self._inbox.empty()
        try:
            messages = self._wait()
        finally:
            with self._lock:
                self._is_lent = False
        if self._relay_error:
            raise self._relay_error
        return messages

    def _wait(self) -> list[Prompt | Token | End]:
        while True:
            messages = None
            with contextlib.suppress(queue.Empty):
                messages = self._inbox.get(timeout=max(0.0, min(HANG_UP_POLL_S, self._deadline_at - time.monotonic())))
                while messages:  # the word that the relay has ended comes alone: what it left goes out first
                    messages += self._inbox.get_nowait()
            now = time.monotonic()
            if now - self._looked_at >= HANG_UP_POLL_S:
                self._looked_at = now
                if self._client_is_gone():
                    raise ClientGone
            if messages is not None:
                return messages
            if now >= min(self._quiet_since + KEEP_ALIVE_S, self._deadline_at):
                return []


@contextlib.contextmanager
def _patience(text: str) -> Iterator[None]:
    """Few long texts at a time: the tokens of a megabyte take a hundred."""
    with _long_texts if len(text) >= LONG_TEXT else contextlib.nullcontext():
        yield


def _tokenize(tokenizer: Tokenizer, job: Job) -> list[int]:
    if not isinstance(job.prompt, str):
        return job.prompt
    try:
        with _patience(job.prompt):
            return tokenizer.encode(job.prompt, job.add_special_tokens)
    except Exception as error:
        raise schema.invalid(f"tokenizer error {error}") from None


def _why_it_ended(end: End) -> ApiError:
    if end.reason == "overloaded":
        return schema.overloaded()
    if end.reason in ("draining", "dead", "stuck"):
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


class Readers:
    """Bodies of requests to answers: what has to run, and how it is told. Each raises ApiError for what is wrong."""

    def __init__(self, config: Config, worker: Worker):
        self._config = config
        self._worker = worker

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
        jobs = schema.check_completion(completion, self._config, self._worker.facts)
        return CompletionAnswer(jobs, *self._parts(completion.stream), request=completion)

    def invocation(self, body: bytes) -> Answer:
        readers = {GenerateRequest: self.compat, ChatRequest: self.chat, CompletionRequest: self.completion}
        kinds = {"inputs": GenerateRequest, "messages": ChatRequest, "prompt": CompletionRequest}
        kind = schema.kind_of(body, kinds)
        g.speaks_openai = kind is not GenerateRequest
        return readers[kind](body)

    def vertex(self, body: bytes) -> Answer:
        jobs, prefixes = [], []
        for instance in schema.vertex_instances(schema.parse(body, schema.VertexRequest), self._config):
            if isinstance(instance, ChatRequest):
                jobs.append(self._chat_job(instance))
                prefixes.append("")
            else:
                jobs.append(schema.check(instance, self._config, self._worker.facts, streaming=False))
                wants_prompt = instance.parameters and instance.parameters.return_full_text
                prefixes.append(instance.inputs if wants_prompt else "")
        return PredictionsAnswer(jobs, *self._parts(), prefixes=prefixes)

    def infer(self, sentence: str) -> Answer:
        job = schema.check_sentence(sentence, self._config, self._worker.facts)
        return InferAnswer([job], *self._parts(), prefixes=[sentence])

    def chat_prompt(self, chat: ChatRequest) -> str:
        """The text that the model's chat template makes of the messages."""
        messages = schema.messages_of(chat.messages)
        if self._worker.template is None:
            raise schema.template_failed("template not found")
        try:
            return self._worker.template.render(messages)
        except TemplateError as error:
            raise schema.template_failed(str(error)) from None

    def _native(self, generate: GenerateRequest, streams: bool, in_list: bool = False, full_text: bool = False) -> Answer:
        parameters = generate.parameters or Parameters()
        if parameters.return_full_text is None:
            parameters.return_full_text = full_text
        job = schema.check(generate, self._config, self._worker.facts, streams)
        return NativeAnswer([job], *self._parts(streams), parameters=parameters, in_list=in_list)

    def _chat_job(self, chat: ChatRequest) -> Job:
        job = schema.check_chat(chat, self._config, self._worker.facts)
        return replace(job, prompt=self.chat_prompt(chat))

    def _parts(self, streams: bool | None = False) -> tuple[ModelInfo, Tokenizer, bool]:
        return self._worker.facts, self._worker.tokenizer, bool(streams)


class App(Flask):
    def ensure_sync(self, func: Callable) -> Callable:
        return func  # all of ours are; to ask that of each takes longer than some of them


class EventStream(Response):
    """Its headers go out as they are: there is no location among them that has to be made absolute, and no length."""

    def get_wsgi_headers(self, environ: dict) -> Headers:
        return self.headers


def create_app(config: Config, worker: Worker) -> Flask:
    """The WSGI application. Serves from the first moment; until the model is ready it says so with 503."""
    app = App("neuron-textgen", static_folder=None)
    "idna".encode("idna")  # loads what werkzeug needs for the first Host that it sees
    app.config["MAX_CONTENT_LENGTH"] = config.payload_limit + 1  # werkzeug cuts a chunked body here without a word
    app.register_blueprint(get_swaggerui_blueprint("/docs", "/api-doc/openapi.json"))
    readers = Readers(config, worker)
    _guard(app, Guard(config))
    _answer_errors(app, config, worker)

    def generates(path: str, read: Callable[[bytes], Answer], deadline_s: float | None = config.response_deadline) -> None:
        """A route that generates text from a JSON body."""

        def view() -> Response:
            return _respond(config, worker, lambda: read(_body(config)), deadline_s)

        app.add_url_rule(path, f"POST {path}", view, methods=["POST"])

    generates("/", readers.compat)
    generates("/v1", readers.compat)  # for huggingface_hub's text_generation with a base_url that ends in /v1
    generates("/generate", readers.generate)
    generates("/generate_stream", readers.generate_stream)
    generates("/v1/chat/completions", readers.chat)
    generates("/v1/completions", readers.completion)
    generates("/invocations", readers.invocation, config.response_deadline or SAGEMAKER_DEADLINE_S)
    generates("/vertex", readers.vertex)

    @app.get("/infer")
    def infer() -> Response:
        sentence = request.args.get("sentence", "")
        return _respond(config, worker, lambda: readers.infer(sentence), config.response_deadline)

    @app.post("/tokenize")
    def tokenize() -> Response:
        _facts(worker)
        inputs = schema.parse(_body(config), GenerateRequest).inputs
        return _json(_simple_tokens(worker.tokenizer, inputs, add_special_tokens=True))

    @app.post("/chat_tokenize")
    def chat_tokenize() -> Response:
        _facts(worker)
        text = readers.chat(_body(config)).jobs[0].prompt
        tokens = _simple_tokens(worker.tokenizer, text, add_special_tokens=False)
        return _json(schema.ChatTokenizeResponse(tokens, text))

    @app.get("/live")
    def live() -> Response:
        return _empty()

    @app.get("/")
    @app.get("/health")
    @app.get("/ping")
    def health() -> Response:
        if worker.phase != "ready":
            raise schema.unhealthy(worker.phase)
        return _empty()

    @app.get("/info")
    def info() -> Response:
        return _json(schema.Info.of(config, _facts(worker)))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(worker.metrics(), content_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models() -> Response:
        return _json(schema.ModelList("list", [schema.ModelCard.of(_facts(worker))]))

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        card = schema.ModelCard.of(_facts(worker))
        if name != card.id:
            raise schema.no_such_model(name, card.id)
        return _json(card)

    @app.get("/api-doc/openapi.json")
    def openapi() -> Response:
        return _json(schema.openapi())

    return app


class Guard:
    """Who may ask, and what a browser is told about it: API key and CORS."""

    def __init__(self, config: Config):
        self._origins = config.cors_allow_origin.split(",")
        self._key = config.api_key.encode() if config.api_key else None

    def lets_in(self, method: str, path: str, authorization: str) -> bool:
        if self._key is None or (path in OPEN_ROUTES and method in ("GET", "HEAD")):
            return True
        scheme, _, given = authorization.partition(" ")
        # WSGI hands the bytes of a header over as Latin-1.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)

    def headers(self, method: str, origin: str, asked: str) -> dict[str, str]:
        """`asked`: which headers a browser wants to send; clients of OpenAI's send many of their own."""
        headers = {"Vary": "origin, access-control-request-method, access-control-request-headers"}
        if "*" in self._origins:
            headers["Access-Control-Allow-Origin"] = "*"
        elif origin in self._origins:
            headers["Access-Control-Allow-Origin"] = origin
        if method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = "GET,POST"
            headers["Access-Control-Allow-Headers"] = ",".join(filter(None, ["authorization,content-type", asked]))
        return headers


def _guard(app: Flask, guard: Guard) -> None:
    """API key and CORS, before and after every route."""

    @app.before_request
    def check_key() -> Response | None:
        if request.method == "OPTIONS":
            return _empty()  # a browser asks first, and without the key
        if not guard.lets_in(request.method, request.path, request.headers.get("Authorization", "")):
            raise schema.unauthorized()
        return None

    @app.after_request
    def allow_origins(response: Response) -> Response:
        asked = request.headers.get("Access-Control-Request-Headers", "")
        response.headers.extend(guard.headers(request.method, request.headers.get("Origin", ""), asked))
        return response


class Refusal:
    """What takes the app's place for requests that find every thread taken, and for those that the worker would refuse anyway.

    Says what the app would say without a look at the body, in a fraction of the time: so a crowd is told to come back before
    those that may stay are read.
    """

    def __init__(self, app: Flask, config: Config, worker: Worker):
        self._guard = Guard(config)
        self._worker = worker
        self._generates = {rule.rule for rule in app.url_map.iter_rules() if rule.endpoint.startswith("POST ")}

    @property
    def is_full(self) -> bool:
        return self._worker.is_full

    def takes_place(self, method: str, path: str) -> bool:
        return method == "POST" and path in self._generates

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        asked = environ.get("HTTP_ACCESS_CONTROL_REQUEST_HEADERS", "")
        cors = self._guard.headers(method, environ.get("HTTP_ORIGIN", ""), asked)
        if method == "OPTIONS":
            start_response("200 OK", [("Content-Length", "0"), *cors.items()])
            return []
        error, outcome = schema.overloaded(), None
        if not self._guard.lets_in(method, path, environ.get("HTTP_AUTHORIZATION", "")):
            error = schema.unauthorized()
        elif self.takes_place(method, path):
            outcome = error.outcome
        self._worker.account_refused(RequestStats(error.status, outcome))
        body, headers = _told(error, speaks_openai=path.startswith("/v1/"))
        status = f"{error.status} {HTTPStatus(error.status).phrase.upper()}"
        start_response(status, [*headers.items(), ("Content-Length", str(len(body))), *cors.items()])
        return [] if method == "HEAD" else [body]


def _told(error: ApiError, speaks_openai: bool) -> tuple[bytes, dict[str, str]]:
    """The body of an error, and the headers that go with it."""
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return (error.openai_json if speaks_openai else error.json), headers


def _answer_errors(app: Flask, config: Config, worker: Worker) -> None:
    """Whatever goes wrong is told in JSON, in the shape of the route's own API, and counted."""

    @app.errorhandler(ApiError)
    def api_error(error: ApiError) -> Response:
        speaks_openai = g.get("speaks_openai", request.path.startswith("/v1/"))
        body, headers = _told(error, speaks_openai)
        response = Response(body, error.status, headers)
        if "generates" in g:
            g.outcome = error.outcome
        return response

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        if isinstance(error, ClientDisconnected):
            g.outcome = "dropped" if "generates" in g else None
            return _hung_up()
        response = api_error(_http_error(error, config))
        if allowed := getattr(error, "valid_methods", None):
            response.headers["Allow"] = ", ".join(allowed)
        return response

    @app.errorhandler(Exception)
    def bug(error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return api_error(ApiError(500, "internal", "Internal server error"))

    @app.after_request
    def account(response: Response) -> Response:
        if response.status_code >= 400 and not ("call" in g and g.call.is_settled):
            worker.account(RequestStats(response.status_code, g.get("outcome")))
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


def _hung_up() -> Response:
    """For the log and the metrics; nobody reads it."""
    return Response(status=HANG_UP)


def _json(body) -> Response:
    return Response(schema.encode(body), mimetype="application/json")


def _facts(worker: Worker) -> ModelInfo:
    if worker.phase != "ready":
        raise schema.not_ready(worker.phase)
    return worker.facts


def _body(config: Config) -> bytes:
    if not (request.mimetype == "application/json" or request.mimetype.endswith("+json")):
        raise schema.wrong_content_type()
    try:
        body = request.get_data()
    except ParseException as error:  # chunks that are none
        raise ApiError(400, "validation", f"Failed to read the request body: {error}") from None
    if len(body) > config.payload_limit:
        raise schema.too_large(config.payload_limit)
    return body


def _simple_tokens(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[schema.SimpleToken]:
    raw = text.encode()
    try:
        with _patience(text):
            spans = tokenizer.spans(text, add_special_tokens, schema.MAX_TOLD_TOKENS)
    except TooManyTokens as error:
        raise schema.too_many_to_tell(error.count, schema.MAX_TOLD_TOKENS) from None
    return [schema.SimpleToken(i, raw[start:stop].decode(errors="replace"), start, stop) for i, start, stop in spans]


def _respond(config: Config, worker: Worker, read: Callable[[], Answer], deadline_s: float | None) -> Response:
    """Generates what `read` asks for, and answers in one piece or as a stream."""
    g.generates = True
    started_at = time.monotonic()
    _facts(worker)
    answer = read()
    deadline_at = started_at + deadline_s if deadline_s and not answer.streams else float("inf")
    client_is_gone = _hang_up_detector(request.environ.get("gunicorn.socket"))
    schema.check_sequences(answer.jobs, config)
    call = g.call = Call(worker, answer.jobs, started_at, deadline_at, client_is_gone)
    try:
        if not answer.streams:
            return _whole(config, worker, answer, call)
        batches = iter(call)
        first = next(batches)  # what fails before the first token is answered with its own status
    except ClientGone:
        call.settle("dropped")
        return _hung_up()
    except ApiError as error:
        call.settle(error.outcome, error.status)
        raise
    except BaseException:
        call.settle("generation", 500)
        raise
    outlet = connections.Outlet(request.environ) if "gunicorn.socket" in request.environ else None
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    headers |= _compute_headers(config, worker, answer)
    response = EventStream(_events(answer, call, first, batches, outlet), headers=headers)
    response.call_on_close(lambda: call.settle("dropped"))  # a client may be gone before the first event is asked for
    return response


def _whole(config: Config, worker: Worker, answer: Answer, call: Call) -> Response:
    def keep(batch: Batch) -> bool:
        for sequence, pieces in batch:
            sequence.pieces += pieces
        return True

    call.relay = keep
    for batch in call:
        keep(batch)
    response = _json(answer.whole(call.sequences))
    response.headers.extend(_compute_headers(config, worker, answer) | _timing_headers(call))
    call.settle("success")
    return response


def _events(
    answer: Answer, call: Call, batch: Batch | None, rest: Iterator[Batch], outlet: connections.Outlet | None
) -> Iterator[bytes]:
    """The body of a stream. What became certain together goes out in one write; where there is an `outlet`, through it as
    long as the client reads, and this yields only the rest."""
    outcome = "dropped"  # unless it comes to its end
    spoke_at = call.started_at

    def written(batch: Batch) -> bytes:
        nonlocal spoke_at
        told = b"".join(answer.events(sequence, pieces) for sequence, pieces in batch)
        now = time.monotonic()
        if not told and now - spoke_at >= KEEP_ALIVE_S:
            told = b":\n\n"
        spoke_at = now if told else spoke_at
        return told

    def relay(batch: Batch) -> bool:
        told = written(batch)
        try:
            return not told or outlet.write(told)
        except OSError as error:
            raise ClientGone from error

    try:
        while batch is not None:
            if told := written(batch):
                yield told
                call.relay = outlet and relay  # the head is out
            batch = next(rest, None)
            if outlet:
                outlet.flush()
        outcome = "success"
        if closing := answer.closing(call.sequences):
            yield closing
    except ApiError as error:
        outcome = error.outcome
        yield answer.failure(error)
    except ClientGone:
        pass
    except OSError:  # of the outlet, for who serves the connection
        raise
    except Exception:
        outcome = "generation"
        logger.exception("a stream of %s failed", type(answer).__name__)
        yield answer.failure(ApiError(500, "internal", "Internal server error"))
    finally:
        call.settle(outcome)


def _compute_headers(config: Config, worker: Worker, answer: Answer) -> dict[str, str]:
    characters = sum(job.characters for job in answer.jobs)
    return {
        "x-compute-type": config.compute_type or worker.facts.device,
        "x-compute-characters": str(characters),
    }


def _timing_headers(call: Call) -> dict[str, str]:
    """TGI's, in whole milliseconds; of several sequences the sums."""
    sequences = call.sequences
    total_s = sum(sequence.finished_at - call.started_at for sequence in sequences)
    validation_s = (call.sent_at - call.started_at) * len(sequences)
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
        {"x-compute-time": f"{time.monotonic() - call.started_at:.6f}"}
        | {name: str(int(seconds * 1000)) for name, seconds in times.items()}
        | {
            "x-prompt-tokens": str(sum(len(sequence.prompt) for sequence in sequences if sequence.number == 0)),
            "x-generated-tokens": str(generated),
        }
    )


def _write_error(client: socket.socket, status: int, reason: str, message: str) -> None:
    """What gunicorn answers to what is no HTTP, or more of it than it takes: in JSON instead of HTML."""
    body = ApiError(status, "http", f"{reason}: {message}").json
    head = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    gunicorn.util.write_nonblock(client, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


class _GunicornLog(gunicorn.glogging.Logger):
    """Gunicorn's warnings go where our own log goes, in its form."""

    def setup(self, cfg) -> None:
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)


class Server(gunicorn.app.base.BaseApplication):
    """Gunicorn with a thread for every request that may be in flight."""

    def __init__(self, config: Config, listener: socket.socket):
        self._config = config
        self.limits = connections.Limits(
            config.payload_limit,
            config.client_timeout,
            frozenset(PROBES),
            most_begun=config.max_concurrent_requests + SPARE_THREADS,
        )
        self.begun = connections.Begun(config.web_concurrency)
        self._connections = connections.prepare(listener, self.limits)
        self._listener_fd = listener.detach()  # gunicorn's from now on
        super().__init__()

    def load_config(self) -> None:
        threads = self._config.max_concurrent_requests + SPARE_THREADS
        settings = {
            "bind": [f"fd://{self._listener_fd}"],
            "workers": self._config.web_concurrency,
            "worker_class": connections.ConnectionWorker,
            "threads": threads,
            "worker_connections": min(max(1000, 2 * threads), self._connections),
            "keepalive": 75,
            "forwarder_headers": "",  # nobody may say under which path we are mounted
            "limit_request_line": 8190,  # the most that gunicorn takes: GET /infer carries its sentence there
            "limit_request_fields": 100,
            "limit_request_field_size": 8190,
            "timeout": 120,  # of gunicorn's own heartbeat, not of a request
            "graceful_timeout": int(self._config.graceful_termination_timeout) + 5,  # entrypoint.sh is the one that counts
            "worker_tmp_dir": "/dev/shm" if Path("/dev/shm").is_dir() else None,
            "control_socket_disable": True,
            "logger_class": _GunicornLog,
            "pre_fork": lambda _arbiter, process: self.begun.join(process),
            "child_exit": lambda _arbiter, process: self.begun.leave(process),
        }
        for name, value in settings.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        """Runs in each web process, after the fork: a ZeroMQ context must not be carried across one."""
        configuration.die_with_parent()
        worker = Worker(
            configuration.socket_address(),
            self._config.tokenizer_config_path,
            self._config.stuck_timeout,
            on_stuck=(configuration.run_dir() / "stuck").touch,  # entrypoint.sh looks for it
        )

        def write_error(client: socket.socket, status: int, reason: str, message: str) -> None:
            worker.account_refused(RequestStats(status))
            _write_error(client, status, reason, message)

        gunicorn.util.write_error = write_error
        app = create_app(self._config, worker)
        self.refusal = Refusal(app, self._config, worker)
        worker.catch_up()
        return app


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
