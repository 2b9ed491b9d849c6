"""The errors that clients get: status, `error_type`, message, and their format in each API.

A message is where its error is raised, or here if several places raise it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from api.http.types import encode_json
from run import Json

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
CLIENT_CLOSED_REQUEST = 499  # the status of a response to a client that has disconnected, in the metrics


class ErrorBody(Struct, omit_defaults=True):
    """An error of the native routes. phase: the state of a server that is not ready; progress: what takes
    long in it."""

    error: str
    error_type: str
    phase: str | None = None
    progress: str = ""


class OpenAIErrorDetail(Struct, omit_defaults=True):
    message: str
    type: str
    param: str | None
    code: str | None
    phase: str | None = None


class OpenAIErrorBody(Struct):
    """An error of OpenAI's routes."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(Struct):
    type: str
    message: str


class AnthropicErrorBody(Struct):
    """An error of Anthropic's routes."""

    error: AnthropicErrorDetail
    request_id: str | None = None
    type: str = "error"


@dataclass(eq=False)
class ApiError(Exception):
    """A response that is not 200. Its message is `text`, then `quoted`, the client's words, which the log
    does not get."""

    status: int
    error_type: str
    text: str
    retry_after_s: int | None = None
    code: str | None = None  # OpenAI's; None: the `error_type`
    phase: str | None = None  # of the worker, when it is not ready
    progress: str = ""  # in that phase
    param: str | None = None
    quoted: str = ""
    format: ErrorFormat | None = None  # None: that of the request's route
    request_id: str | None = None

    def __str__(self) -> str:
        return self.text + self.quoted

    @property
    def outcome(self) -> str:
        """The label of TGI's metric of failed requests: validation, overloaded, template, incomplete or
        generation."""
        labels = {
            "validation": "validation",
            "overloaded": "overloaded",
            "template_error": "template",
            "incomplete_generation": "incomplete",
        }
        return labels.get(self.error_type, "validation" if self.status < 424 else "generation")

    def body(self, error_format: ErrorFormat) -> Struct:
        """The body in the error's own format, else in `error_format`. Also sets the error's `status` to that
        of the format."""
        chosen = self.format or error_format
        self.status = chosen.statuses.get(self.status, self.status)
        return chosen.body(self)


def _tgi_body(error: ApiError) -> ErrorBody:
    return ErrorBody(str(error), error.error_type, error.phase, error.progress)


def _openai_body(error: ApiError) -> OpenAIErrorBody:
    """Returns the body; its type is rate_limit_error for 429, server_error from 500 on and for 424, else
    invalid_request_error."""
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500 or error.status == 424:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    code = error.code or error.error_type
    return OpenAIErrorBody(OpenAIErrorDetail(str(error), kind, error.param, code, error.phase))


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    529: "overloaded_error",
}


def _anthropic_body(error: ApiError) -> AnthropicErrorBody:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error")
    # Claude Code looks for these words, and then makes the conversation shorter.
    is_too_long = error.code == CONTEXT_LENGTH_EXCEEDED
    message = f"Prompt is too long. {error}" if is_too_long else str(error)
    return AnthropicErrorBody(AnthropicErrorDetail(kind, message), error.request_id)


@dataclass(frozen=True)
class ErrorFormat:
    """An API's error format. body: makes the body of an error. statuses: the API's own status by that of TGI,
    where the two differ."""

    body_type: type[Struct]
    body: Callable[[ApiError], Struct]
    statuses: Mapping[int, int]


TGI = ErrorFormat(ErrorBody, _tgi_body, {})
OPENAI = ErrorFormat(OpenAIErrorBody, _openai_body, {422: 400})
ANTHROPIC = ErrorFormat(
    AnthropicErrorBody,
    _anthropic_body,
    {405: 404, 408: 400, 415: 400, 422: 400, 424: 500, 429: 529, 501: 400, 503: 529},
)


def event(body: Struct | Json) -> bytes:
    """Returns a server-sent event with `body` as JSON."""
    return b"data: " + encode_json(body) + b"\n\n"


def named_event(body: Json) -> bytes:
    """A server-sent event whose name is its `type`."""
    return f"event: {body['type']}\n".encode() + event(body)


def invalid(param: str | None, detail: str, code: str | None = None, given: str | None = None) -> ApiError:
    """Returns the error (422) of a field `param` with an invalid value. None: the request as a whole is
    invalid.

    detail: goes on after the name of the field, as in "must be positive". given: the client's own words,
    which the client reads and the log does not get.
    """
    sentence = f"`{param}` {detail}" if param else detail
    quoted = "" if given is None else f". Given: {given!r}"
    text = f"Input validation error: {sentence}"
    return ApiError(422, "validation", text, code=code, param=param, quoted=quoted)


def unknown_model(text: str) -> ApiError:
    return ApiError(404, "not_found", text, code="model_not_found")


def overloaded() -> ApiError:
    return ApiError(429, "overloaded", "Model is overloaded", retry_after_s=1, code="rate_limit_exceeded")


def too_large(limit: int) -> ApiError:
    what = "Failed to buffer the request body: length limit exceeded"
    return ApiError(413, "validation", f"{what} (at most {limit} bytes; --payload-limit raises it)")


def not_ready(phase: str) -> ApiError:
    what = f"The server is not ready: {phase}"
    return ApiError(503, "unavailable", what, retry_after_s=5, phase=phase)


def internal() -> ApiError:
    return ApiError(500, "internal", "Internal server error")


def wrong_type(message: str) -> ApiError:
    """Returns the error (422) of a body with a field of the wrong type, with the path of that field in
    `param`. message: msgspec's, which may end with the path: "Expected `int`, got `str` - at `$.n`"."""
    message, _, path = message.partition(" - at `$")
    path = path.strip("`.")
    missing = re.search(r"required field `(\w+)`", message)
    names = [path, missing[1] if missing else ""]
    what = "Failed to deserialize the JSON body into the target type: "
    what += f"{path}: {message}" if path else message
    return ApiError(422, "validation", what, param=".".join(filter(None, names)) or None)
