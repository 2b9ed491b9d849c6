"""The public contract: the types of requests and responses, the rules of every field, the catalogue of errors.

A request body becomes a typed struct, is checked against its rules in TGI's order, and comes out as a `Job`: what to
generate, with nothing left to doubt. The only place that knows a field's rule. It knows neither Flask nor ZeroMQ.

Source of shapes and words: the HTTP API of Text Generation Inference 3.3; `null` means absent, everywhere.
"""

from __future__ import annotations

import math
import secrets
import struct
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from config import VERSION, Config
from protocol import Facts, Sampling

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
FLOAT32 = struct.Struct("<f")
U64_MAX = 2**64 - 1  # msgspec's constraints end at 63 bits


class ApiError(Exception):
    """An answer that is not 200: its status, its `error_type` and the sentence that the client reads."""

    def __init__(self, status: int, error_type: str, message: str, retry_after_s: int | None = None, **extra: str):
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.retry_after_s = retry_after_s
        self.body = {"error": message, "error_type": error_type, **extra}

    @property
    def json(self) -> bytes:
        return encode(self.body)


def invalid(detail: str) -> ApiError:
    return ApiError(422, "validation", f"Input validation error: {detail}")


def overloaded() -> ApiError:
    return ApiError(429, "overloaded", "Model is overloaded", retry_after_s=1)


def too_large(limit: int) -> ApiError:
    what = "Failed to buffer the request body: length limit exceeded"
    return ApiError(413, "validation", f"{what} (at most {limit} bytes; --payload-limit raises it)")


def generation_failed(message: str) -> ApiError:
    return ApiError(424, "generation", f"Request failed during generation: {message}")


def incomplete() -> ApiError:
    return ApiError(500, "incomplete_generation", "Incomplete generation")


def unhealthy(phase: str) -> ApiError:
    return ApiError(503, "healthcheck", "unhealthy", retry_after_s=5, phase=phase)


def not_ready(phase: str) -> ApiError:
    return ApiError(503, "unavailable", f"The model cannot take requests now: {phase}", retry_after_s=5, phase=phase)


class Parameters(Struct):
    """`parameters` of the native routes (TGI's GenerateParameters)."""

    best_of: U32 | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: I32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: U32 | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: U32 | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    top_n_tokens: U32 | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class GenerateRequest(Struct):
    """Body of `POST /generate` and `/generate_stream`."""

    inputs: str
    parameters: Parameters | None = None


class TokenOut(Struct):
    id: int
    text: str
    logprob: float
    special: bool


class StreamDetails(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """One event of a native stream; `generated_text` and `details` come with the last."""

    index: int
    token: TokenOut
    top_tokens: list[TokenOut] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class Details(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[TokenOut]
    tokens: list[TokenOut]
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class GenerateResponse(Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class Info(Struct):
    """Body of `GET /info`: TGI's keys in TGI's order, then ours."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    max_batch_size: int
    model_device_type: str
    model_dtype: str
    eos_token_ids: list[int]

    @classmethod
    def of(cls, config: Config, facts: Facts) -> Info:
        return cls(
            model_id=facts.model_name,
            model_sha=facts.model_sha,
            model_pipeline_tag=None,
            max_concurrent_requests=config.max_concurrent_requests,
            max_best_of=1,
            max_stop_sequences=config.max_stop_sequences,
            max_input_tokens=facts.max_input_tokens,
            max_total_tokens=facts.max_total_tokens,
            validation_workers=config.web_concurrency,
            max_client_batch_size=1,
            router="neuron-textgen",
            version=VERSION,
            sha=None,
            docker_label=None,
            max_batch_size=facts.batch_size,
            model_device_type=facts.device,
            model_dtype=facts.dtype,
            eos_token_ids=facts.eos_token_ids,
        )


encode = msgspec.json.Encoder().encode

T = TypeVar("T", bound=Struct)


def parse(body: bytes, kind: type[T]) -> T:
    """A request body as `kind`. Raises ApiError: 400 when it is no JSON, 422 when a field has the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "validation", f"Failed to parse the request body as JSON: {error}") from None


def wrong_type(message: str) -> ApiError:
    message, _, path = message.partition(" - at `$")
    path = path.strip("`.")
    return ApiError(
        422,
        "validation",
        "Failed to deserialize the JSON body into the target type: " + (f"{path}: {message}" if path else message),
    )


@dataclass(frozen=True)
class Job:
    """A checked request: what to generate and what to tell of it. `max_new_tokens` None: what is left of the window."""

    inputs: str
    sampling: Sampling
    max_new_tokens: int | None
    stop: list[str]
    truncate: int | None
    top_n_tokens: int
    details: bool
    return_full_text: bool


def check(request: GenerateRequest, config: Config, facts: Facts, streaming: bool) -> Job:
    """Checks every field of a native request in TGI's order; the first that fails is raised as an ApiError."""
    p = request.parameters or Parameters()
    if p.seed is not None and p.seed > U64_MAX:
        raise wrong_type(f"Expected `int` <= {U64_MAX} - at `$.parameters.seed`")
    _refuse_what_is_not_built(p, streaming)
    _require(p.temperature is None or p.temperature > 0, "`temperature` must be strictly positive")
    _require(p.repetition_penalty is None or p.repetition_penalty > 0, "`repetition_penalty` must be strictly positive")
    _require(p.frequency_penalty is None or -2 <= p.frequency_penalty <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0")
    # The words are TGI's; unlike there 1.0 is taken, because clients send it to say that they want nothing filtered.
    _require(p.top_p is None or 0 < p.top_p <= 1, "`top_p` must be > 0.0 and < 1.0")
    _require(p.typical_p is None or 0 < p.typical_p <= 1, "`typical_p` must be > 0.0 and < 1.0")
    _require(p.top_k is None or p.top_k > 0, "`top_k` must be strictly positive")
    _require(p.max_new_tokens != 0, "`max_new_tokens` must be strictly positive")
    stop = p.stop or []
    _require(
        len(stop) <= config.max_stop_sequences,
        f"`stop` supports up to {config.max_stop_sequences} stop sequences. Given: {len(stop)}",
    )
    top_n_tokens = p.top_n_tokens or 0
    _require(
        top_n_tokens <= config.max_top_n_tokens,
        f"`top_n_tokens` must be >= 0 and <= {config.max_top_n_tokens}. Given: {top_n_tokens}",
    )
    _require(request.inputs != "", "`inputs` cannot be empty")
    _require(
        p.truncate is None or 1 <= p.truncate <= facts.max_input_tokens,
        f"`truncate` must be strictly positive and less than {facts.max_input_tokens}. Given: {p.truncate}",
    )
    return Job(
        inputs=request.inputs,
        sampling=_sampling(p),
        max_new_tokens=p.max_new_tokens,
        stop=stop,
        truncate=p.truncate,
        top_n_tokens=top_n_tokens,
        details=bool(p.details),
        return_full_text=bool(p.return_full_text),
    )


def _require(holds: bool, detail: str) -> None:
    if not holds:
        raise invalid(detail)


def _refuse_what_is_not_built(p: Parameters, streaming: bool) -> None:
    """Parameters that TGI knows and this server does not honour yet; asking for nothing with them is fine."""
    if streaming:
        _require(p.best_of in (None, 1), "`best_of` != 1 is not supported when streaming tokens")
        _require(not p.decoder_input_details, "`decoder_input_details` == true is not supported when streaming tokens")
    _require((p.best_of or 1) == 1, "`best_of` != 1 is not allowed for this endpoint")
    _require(not p.decoder_input_details, "`decoder_input_details` is not supported")
    _require(not p.watermark, "`watermark` is not supported")
    _require(not p.adapter_id, "`adapter_id` is not supported")
    _require(p.grammar is None, "`grammar` is not supported")


def _sampling(p: Parameters) -> Sampling:
    """Sampling is on when asked for, or when a parameter is given that means nothing without it (a 1.0 that does nothing
    does not count)."""
    samples = (
        p.do_sample or p.temperature is not None or p.top_k is not None or (p.top_p or 1.0) < 1.0 or (p.typical_p or 1.0) < 1.0
    )
    seed = None
    if samples:
        seed = p.seed if p.seed is not None else secrets.randbits(64)
    return Sampling(
        seed=seed,
        temperature=p.temperature or 1.0,
        top_k=p.top_k or 0,
        top_p=p.top_p or 1.0,
        typical_p=p.typical_p or 1.0,
        repetition_penalty=p.repetition_penalty or 1.0,
        frequency_penalty=p.frequency_penalty or 0.0,
    )


def fit(job: Job, prompt: list[int], facts: Facts) -> tuple[list[int], int]:
    """The prompt as it will be run (cut to its last `truncate` tokens if asked) and how many tokens may follow it.

    Raises ApiError when the two do not fit into the window, with the numbers.
    """
    if job.truncate is not None:
        prompt = prompt[-job.truncate :]
    length, window = len(prompt), facts.max_total_tokens
    max_new_tokens = job.max_new_tokens if job.max_new_tokens is not None else window - length
    _require(
        length + max_new_tokens <= window or job.max_new_tokens is None,
        f"`inputs` tokens + `max_new_tokens` must be <= {window}. Given: {length} `inputs` tokens and {max_new_tokens} "
        "`max_new_tokens`",
    )
    _require(
        length <= facts.max_input_tokens,
        f"`inputs` must have less than {facts.max_input_tokens} tokens. Given: {length}",
    )
    _require(length > 0, "`inputs` cannot be empty")
    largest = max(prompt)
    _require(
        largest < facts.vocab_size,
        f"`inputs` holds token {largest}, but the model's vocabulary has only {facts.vocab_size} tokens",
    )
    return prompt, max_new_tokens


def shortest_float(logprob: float) -> float:
    """A float32 written with as few digits as tell it apart, as TGI writes it, not with a float64's seventeen."""
    if not math.isfinite(logprob):
        return logprob
    exact = FLOAT32.pack(logprob)
    candidates = (float(f"{FLOAT32.unpack(exact)[0]:.{digits}g}") for digits in (6, 7, 8, 9))  # nine are always enough
    return next(short for short in candidates if FLOAT32.pack(short) == exact)
