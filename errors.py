"""The errors that clients read: status, `error_type`, sentence, and their shapes for TGI's and OpenAI's routes.

Every sentence that is not about one field is made here; those about a field are made where the field is checked (validate.py).
This layer knows neither Flask nor ZeroMQ.
"""

from __future__ import annotations

import re

from msgspec.json import encode


class ApiError(Exception):
    """An answer that is not 200: its status, its `error_type` and the sentence that the client reads.

    It has two shapes: `json` for TGI's routes and `openai_json` for OpenAI's, which a `code` of theirs makes exact.
    """

    def __init__(
        self,
        status: int,
        error_type: str,
        message: str,
        retry_after_s: int | None = None,
        code: str | None = None,
        phase: str | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.retry_after_s = retry_after_s
        self._code = code or error_type
        self._param = param
        self._phase = {} if phase is None else {"phase": phase}

    @property
    def body(self) -> dict[str, str]:
        return {"error": str(self), "error_type": self.error_type, **self._phase}

    @property
    def json(self) -> bytes:
        return encode(self.body)

    @property
    def openai_json(self) -> bytes:
        kind = "server_error" if self.status >= 500 or self.status == 424 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": "rate_limit_error" if self.status == 429 else kind,
            "param": self._param,
            "code": self._code,
        }
        return encode({"error": error | self._phase})

    @property
    def outcome(self) -> str:
        """The word that TGI's metric of failures has for it."""
        words = {"overloaded": "overloaded", "template_error": "template", "incomplete_generation": "incomplete"}
        return words.get(self.error_type, "validation" if self.status < 424 else "generation")


def invalid(param: str | None, detail: str, code: str | None = None) -> ApiError:
    """The field `param` has a value that cannot be; without `param` the request as a whole is wrong."""
    sentence = f"`{param}` {detail}" if param else detail
    return ApiError(422, "validation", f"Input validation error: {sentence}", code=code, param=param)


def unauthorized() -> ApiError:
    what = "Unauthorized: this server asks for the header `Authorization: Bearer` with its API key"
    return ApiError(401, "unauthorized", what, code="invalid_api_key")


def template_failed(message: str) -> ApiError:
    return ApiError(422, "template_error", f"Template error: {message}")


def overloaded() -> ApiError:
    return ApiError(429, "overloaded", "Model is overloaded", retry_after_s=1, code="rate_limit_exceeded")


def too_large(limit: int) -> ApiError:
    what = "Failed to buffer the request body: length limit exceeded"
    return ApiError(413, "validation", f"{what} (at most {limit} bytes; --payload-limit raises it)")


def wrong_content_type() -> ApiError:
    return ApiError(415, "validation", "Expected request with `Content-Type: application/json`")


def no_such_model(name: str, served: str) -> ApiError:
    return ApiError(404, "not_found", f"The model {name!r} is not here; {served!r} is", code="model_not_found")


def generation_failed(message: str) -> ApiError:
    return ApiError(424, "generation", f"Request failed during generation: {message}")


def incomplete() -> ApiError:
    return ApiError(500, "incomplete_generation", "Incomplete generation")


def unhealthy(phase: str) -> ApiError:
    return ApiError(503, "healthcheck", "unhealthy", retry_after_s=5, phase=phase)


def not_ready(phase: str) -> ApiError:
    return ApiError(503, "unavailable", f"The model cannot take requests now: {phase}", retry_after_s=5, phase=phase)


def wrong_type(message: str) -> ApiError:
    message, _, path = message.partition(" - at `$")
    path = path.strip("`.")
    missing = re.search(r"required field `(\w+)`", message)
    param = ".".join(filter(None, [path, missing[1] if missing else ""])) or None
    what = "Failed to deserialize the JSON body into the target type: " + (f"{path}: {message}" if path else message)
    return ApiError(422, "validation", what, param=param)


def too_many_to_tell(count: int, most: int) -> ApiError:
    return invalid(None, f"the text has {count} tokens, of which at most {most} are told")
