"""How web processes and the worker communicate: the message types, their encoding, and the worker's end of the socket.

The worker binds one ROUTER in the private folder of this run; each web process connects one DEALER (engine_client.py). The
worker's socket is owned by a thread (ZeroMQ sockets must not be shared between threads); a second one, the output thread, turns
the outputs of a step into messages, while the next step runs. Messages are msgspec structs in msgpack, never pickle. This layer
does not know what the messages are for.

A request on the wire: `Generate` (in a `SubmitRequests`), then a `Prompt` and `Token`s inside the `Tokens` of each step, until
exactly one terminal message: a `Token` with a `finish_reason`, or an `End`. `Cancel` asks for an early end, with the same rule.
A web process that was taken over may send anything: decoding checks the ranges that the types give, and what one web process
sends is bounded, so that it can neither end the worker nor keep it from the others.
`IMMEDIATE` messages and refusals for lack of room are handled on the socket's thread: they never wait for a step.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

logger = logging.getLogger("protocol")

HEARTBEAT_S = 0.25
SILENCE_S = 20 * HEARTBEAT_S  # a worker that is silent for that long is not running
METRICS_S = 0.1  # between two times that the metrics are rendered, which takes about 20 ms
# Limits of what a web process can make the worker do.
MAX_MESSAGE_BYTES = 64_000_000  # ZeroMQ disconnects a web process that sends more
MAX_SEQUENCES = 10_000  # of an HTTP request
MAX_PER_ROUND = 100  # messages that are read before others are sent: about 1 ms
MAX_PER_STEP = 1_000  # messages that the loop takes between two steps: about 1 ms
MAX_WAITING = 10_000  # messages of a web process that the loop has not taken
MAX_UNREAD = 10_000  # messages to a web process that does not read: minutes of its tokens
MAX_PEERS = 1_000  # connected web processes
MAX_METRICS_REQUESTS = 10  # of a web process, that wait to be answered
MAX_LOGIT_BIAS = 1024  # tokens; more would take longer than a decode step
MAX_GRAMMAR = 500_000  # characters

Count = Annotated[int, Meta(ge=0)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 32)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Text = Annotated[str, Meta(max_length=200)]


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is sampled from the logits. `seed` None means greedy: the most likely token."""

    seed: Count | None = None
    temperature: Positive = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # 0: off
    top_p: Share = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # 0: off
    typical_p: Share = 1.0
    repetition_penalty: Positive = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    # (token id, value added to its logit)
    logit_bias: Annotated[list[tuple[Count, Bias]], Meta(max_length=MAX_LOGIT_BIAS)] = []


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's `Job` (validate.py) and its `Generate` share."""

    sampling: Sampling = Sampling()
    top_n_tokens: Count = 0
    min_new_tokens: Count = 0  # no end-of-sequence token before that many tokens
    ignore_eos: bool = False  # an end-of-sequence token does not end the completion
    logprobs: bool = True  # of generated tokens; never available where the device samples
    prompt_logprobs: bool = False
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""  # of the text (grammar.py); "": any text
    keep_eos: bool = False  # a text that its grammar completes still gets its end-of-sequence token


class Generate(GenerateOptions, frozen=True):
    """Continue `prompt`. `id` is random, 63 bits, unique among all web processes."""

    id: Count
    prompt: Annotated[list[Count], Meta(min_length=1)]
    max_new_tokens: Annotated[int, Meta(ge=1)]
    sent_at: float = 0.0  # CLOCK_MONOTONIC in seconds, the same for all processes; 0: unknown
    request_id: Text = ""  # of the HTTP request, for the log


class SubmitRequests(msgspec.Struct, tag="submit", frozen=True):
    """Web → worker: everything that one HTTP request asks for. All of it is accepted, or all of it is refused."""

    generates: Annotated[list[Generate], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Web → worker: end this request. `reason` is for the log: a stop sequence, a client disconnect."""

    id: Count
    reason: Text


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Web → worker: a web process has started; `ready` once it accepts requests."""

    pid: int
    ready: bool


class RequestStats(msgspec.Struct, tag="request_stats", frozen=True):
    """Web → worker: a finished HTTP request, for the metrics.

    `outcome` is None for a route that generates no text, else "success" or the reason of the failure: overloaded, validation,
    incomplete, template, generation, dropped. `first_token_s` counts from the arrival of the HTTP request.
    """

    status: Annotated[int, Meta(ge=0, le=599)]  # HTTP; 499: client disconnect; 0: the web process is gone
    outcome: Text | None = None
    duration_s: Seconds = 0.0
    validation_s: Seconds = 0.0
    queue_s: Seconds = 0.0
    inference_s: Seconds = 0.0
    first_token_s: Seconds | None = None
    input_tokens: TokenCount = 0
    generated_tokens: TokenCount = 0
    max_new_tokens: TokenCount = 0


class MetricsRequest(msgspec.Struct, tag="metrics_request", frozen=True):
    """Web → worker: asks for `Metrics` with the same `id`."""

    id: Count


class Token(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One generated token. `logprob` is of the model's own distribution, None where it was not requested or the device samples;
    `top` holds (token id, logprob), most likely first."""

    id: int
    token: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    finish_reason: str | None = None  # "length" or "eos_token" on the last token


class Prompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The prompt of a request has been run, but for the `cached` tokens that a slot held. `logprobs` are of its tokens from the
    second on, if requested; `top` holds the `top_n_tokens` most likely (token id, logprob) at each of these positions."""

    id: int
    queued_s: float
    cached: int = 0
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """Worker → web: the outputs of one step for one web process; no token comes before its request's `Prompt`."""

    tokens: list[Token]
    prompts: list[Prompt] = []


class End(msgspec.Struct, tag="end", frozen=True):
    """Worker → web: the request `id` ends without a (further) token.

    `reason`: "cancelled", "overloaded" or "draining" (refused at once), or "failed" with a `message` that a client may read.
    """

    id: int
    reason: str
    message: str = ""


class Status(msgspec.Struct, tag="status", frozen=True):
    """Worker → web, every HEARTBEAT_S: the worker's state.

    `phase` is "ready" when requests are accepted, before that the phase of the boot. `due_at` is when the running step counts
    as stuck, in seconds of CLOCK_MONOTONIC (which on Linux stands still while the machine is suspended), or 0 when the device
    is idle. `full`: new requests are refused as overload.
    """

    phase: str
    steps: int = 0
    running: int = 0
    queued: int = 0
    due_at: float = 0.0
    full: bool = False


class ModelInfo(msgspec.Struct, tag="model_info", frozen=True):
    """Worker → web: the model that is served. Limits are in tokens."""

    model_name: str
    model_sha: str | None
    tokenizer_dir: str
    vocab_size: int
    eos_token_ids: list[int]
    batch_size: int
    max_input_tokens: int
    max_total_tokens: int
    device: str
    dtype: str
    model_dir: str = ""
    prompt_logprobs: bool = True  # whether log-probabilities of prompts are available
    sampling: str = "host"  # or "device": token ids only, no log-probabilities
    quantize: str | None = None  # or "int8", "int4"


class Metrics(msgspec.Struct, tag="metrics", frozen=True):
    """Worker → web: all metrics, in Prometheus' text format."""

    id: int
    text: bytes


FromWeb = SubmitRequests | Cancel | Hello | RequestStats | MetricsRequest
FromWorker = Tokens | End | Status | ModelInfo | Metrics
IMMEDIATE = (RequestStats, MetricsRequest)  # handled on the socket's thread, never by the loop


encode = msgspec.msgpack.Encoder().encode


def decode(decoder: msgspec.msgpack.Decoder, frames: list[bytes]):
    """The message in `frames`; None, with a log line, for anything else: it must not end the thread that reads."""
    try:
        (body,) = frames
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # from msgspec, from UTF-8, and for more frames than one
        logger.error("dropped a message that cannot be decoded: %s", error)
        return None
