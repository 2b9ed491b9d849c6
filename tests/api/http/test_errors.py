"""The errors that clients get: statuses, words, and their format in each API."""

import pytest
from asked import as_openai, as_tgi

from api.generation.stream import end_error
from api.http import errors
from api.http.errors import OPENAI, TGI, ApiError

TOO_LARGE = "Failed to buffer the request body: length limit exceeded (at most 2000 bytes; --payload-limit raises it)"
LOADING = "The server is not ready: loading"
FAILED = "Request failed during generation: oh"
ERRORS = [  # the error, its status, when to come again, TGI's body, OpenAI's type and code, the outcome in the metrics
    (errors.invalid("a", "b"), 422, None, "Input validation error: `a` b", "validation", "invalid_request_error", "validation"),
    (errors.too_large(2000), 413, None, TOO_LARGE, "validation", "invalid_request_error", "validation"),
    (errors.overloaded(), 429, 1, "Model is overloaded", "overloaded", "rate_limit_error", "overloaded"),
    (errors.internal(), 500, None, "Internal server error", "internal", "server_error", "generation"),
    (errors.not_ready("loading"), 503, 5, LOADING, "unavailable", "server_error", "generation"),
    (end_error("failed", "oh"), 424, None, FAILED, "generation", "server_error", "generation"),
    (end_error("cancelled", ""), 500, None, "Incomplete generation", "incomplete_generation", "server_error", "incomplete"),
    (end_error("overloaded", ""), 429, 1, "Model is overloaded", "overloaded", "rate_limit_error", "overloaded"),
    (end_error("dead", ""), 503, 5, "The server is not ready: dead", "unavailable", "server_error", "generation"),
    (ApiError(408, "timeout", "late"), 408, None, "late", "timeout", "invalid_request_error", "validation"),
    (ApiError(501, "validation", "no"), 501, None, "no", "validation", "server_error", "validation"),
    (ApiError(422, "template_error", "no"), 422, None, "no", "template_error", "invalid_request_error", "template"),
]


@pytest.mark.parametrize(("error", "status", "retry_after_s", "message", "error_type", "openai_type", "outcome"), ERRORS)
def test_an_error_has_its_status_and_its_words_in_every_dialect(
    error, status, retry_after_s, message, error_type, openai_type, outcome
):
    assert (error.status, error.retry_after_s, str(error), error.outcome) == (status, retry_after_s, message, outcome)
    phase = {"phase": error.phase} if error.phase else {}
    assert as_tgi(error) == {"error": message, "error_type": error_type} | phase
    code = "rate_limit_exceeded" if status == 429 else error_type
    assert as_openai(error) == {"message": message, "type": openai_type, "param": error.param, "code": code} | phase


def test_what_the_client_wrote_stands_behind_the_message_and_is_quoted():
    error = errors.invalid("truncation", "must be disabled", given="`x`")
    assert (error.text, str(error)) == (
        "Input validation error: `truncation` must be disabled",
        "Input validation error: `truncation` must be disabled. Given: '`x`'",
    )


def test_the_innermost_dialect_decides_the_shape():
    error = errors.overloaded()
    error.format = OPENAI
    assert isinstance(error.body(TGI), OPENAI.body_type)
