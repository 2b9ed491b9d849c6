"""The errors that clients read: status, `error_type`, message, and their shapes for TGI's and OpenAI's routes.

A message is written where its error is raised; those that several places raise are here. This layer knows neither Flask nor
ZeroMQ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from api.types import ErrorBody, OpenAIErrorBody, OpenAIErrorDetail, encode


@dataclass(eq=False)
class ApiError(Exception):
    """A response that is not 200. `json` is its body on TGI's routes, `openai_json` on OpenAI's."""

    status: int
    error_type: str
    message: str
    retry_after_s: int | None = None
    code: str | None = None  # OpenAI's; None: the `error_type`
    phase: str | None = None  # of the worker, when it is not ready
    param: str | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def json(self) -> bytes:
        return encode(ErrorBody(self.message, self.error_type, self.phase))

    @property
    def openai_json(self) -> bytes:
        kind = "server_error" if self.status >= 500 or self.status == 424 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        detail = OpenAIErrorDetail(self.message, kind, self.param, self.code or self.error_type, self.phase)
        return encode(OpenAIErrorBody(detail))

    @property
    def outcome(self) -> str:
        """The label of TGI's metric of failed requests."""
        labels = {
            "overloaded": "overloaded",
            "template_error": "template",
            "incomplete_generation": "incomplete",
        }
        return labels.get(self.error_type, "validation" if self.status < 424 else "generation")


def invalid(param: str | None, detail: str, code: str | None = None) -> ApiError:
    """The field `param` has an invalid value; without `param` the request as a whole is invalid."""
    sentence = f"`{param}` {detail}" if param else detail
    return ApiError(422, "validation", f"Input validation error: {sentence}", code=code, param=param)


def overloaded() -> ApiError:
    return ApiError(429, "overloaded", "Model is overloaded", retry_after_s=1, code="rate_limit_exceeded")


def too_large(limit: int) -> ApiError:
    what = "Failed to buffer the request body: length limit exceeded"
    return ApiError(413, "validation", f"{what} (at most {limit} bytes; --payload-limit raises it)")


def not_ready(phase: str) -> ApiError:
    return ApiError(
        503, "unavailable", f"The model cannot take requests now: {phase}", retry_after_s=5, phase=phase
    )


def wrong_type(message: str) -> ApiError:
    """`message` is msgspec's, which may end with the path of the field."""
    message, _, path = message.partition(" - at `$")
    path = path.strip("`.")
    missing = re.search(r"required field `(\w+)`", message)
    param = ".".join(filter(None, [path, missing[1] if missing else ""])) or None
    what = "Failed to deserialize the JSON body into the target type: " + (
        f"{path}: {message}" if path else message
    )
    return ApiError(422, "validation", what, param=param)
