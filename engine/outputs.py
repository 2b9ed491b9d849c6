"""The requests that the worker knows, the output of a step, and the messages that it becomes for the web processes.

The loop (`worker.py`) hands over plain data, a `StepOutput`. `messages_of` runs on the output thread while the next step runs:
it computes log-probabilities and changes nothing that the loop reads but `publish_failed`. Knows no sockets, no models.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from config import MAX_TOP_TOKENS
from engine import sampling
from engine.sampling import RowSampler
from engine.scheduler import Request, Step
from models.base import StaticBatchModel
from protocol import End, Generate, Prompt, Token, Tokens
from text.grammar import Matcher

logger = logging.getLogger("worker")


@dataclass(slots=True, eq=False, kw_only=True)
class ActiveRequest(Request):
    """A request that the worker knows, waiting or running. Times are CLOCK_MONOTONIC, in seconds."""

    peer: bytes
    generate: Generate
    sampler: RowSampler  # unused where the device samples
    matcher: Matcher | None = None  # where the text has a grammar
    prefilled_at: float = 0.0
    prompt_logprobs: list[float] = field(default_factory=list)  # filled on the output thread
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)
    publish_failed: bool = False  # set on the output thread; the loop then ends the request


def wrong_with(generate: Generate, model: StaticBatchModel) -> str | None:
    """Why the model cannot run this, if so. Web processes check the same (validate.py), but one may be taken over."""
    prompt, biased = generate.prompt, [token for token, _bias in generate.sampling.logit_bias]
    if not 0 < len(prompt) <= model.max_input_tokens:
        return f"{len(prompt)} prompt tokens, where 1 to {model.max_input_tokens} are possible"
    if generate.max_new_tokens < 1:
        return f"{generate.max_new_tokens} new tokens"
    if not 0 <= min(prompt + biased) <= max(prompt + biased) < model.vocab_size:
        return f"a token outside of the vocabulary, which has {model.vocab_size}"
    if not 0 <= generate.top_n_tokens <= MAX_TOP_TOKENS:
        return f"{generate.top_n_tokens} top tokens, where {MAX_TOP_TOKENS} are possible"
    if generate.prompt_logprobs and not model.gives_prompt_logits:
        return "this device gives no logits of the prompt"
    if generate.grammar and model.sampling == "device":
        return "this device samples, so it cannot follow a grammar"
    return None


class StepOutput(NamedTuple):
    """What a step produced, one entry a chunk of `step`. Times are CLOCK_MONOTONIC, in seconds."""

    step: Step
    tokens: list[int | None]  # None: the chunk sampled nothing, or its request has failed
    finish_reasons: list[str | None]
    logits: np.ndarray | None  # [rows, vocab]; None where the device samples or nothing needs them
    maxima: np.ndarray | None  # of the sampled rows (sampling.SamplingBatch)
    started_at: float
    ran_at: float
    sampled_at: float
    done_at: float
    running: int  # requests that were generating when the step began
    mask_s: float | None  # that the masks of the step took; None without grammars
    interval_s: float | None  # since the running requests' previous tokens; None for a prefill


def last_rows(step: Step) -> list[int]:
    """For each chunk, the row of the step's logits that follows its last token."""
    if not any(chunk.keep_all for chunk in step.chunks):
        return list(range(len(step.chunks)))
    return (np.cumsum([len(chunk.tokens) if chunk.keep_all else 1 for chunk in step.chunks]) - 1).tolist()


def rows_of(logits: np.ndarray, rows: list[int]) -> np.ndarray:
    """Some rows of the logits, in this order; without a copy if they are the first ones."""
    return logits[: len(rows)] if rows == list(range(len(rows))) else logits[rows]


def messages_of(output: StepOutput) -> Iterator[tuple[bytes, Tokens | End]]:
    """One message a web process: the tokens of its requests, with log-probabilities where they were requested."""
    logprobs = logprobs_of(output)
    messages: defaultdict[bytes, Tokens] = defaultdict(lambda: Tokens([]))
    for i, (request, token) in enumerate(zip(output.step.requests, output.tokens)):
        generate, logprob = request.generate, logprobs.get(i, (None, []))
        if isinstance(logprob, Exception) and not request.publish_failed:
            logger.error("no log-probabilities for request %s", generate.request_id, exc_info=logprob)
            request.publish_failed = True  # the loop ends the request, unless this was its last step
        if request.publish_failed and output.finish_reasons[i]:
            yield request.peer, End(generate.id, "failed", "the next token could not be published")
        if request.publish_failed or token is None:
            continue
        message = messages[request.peer]
        if i >= output.step.rows:
            queued_s = request.started_at - request.arrived_at
            message.prompts.append(
                Prompt(generate.id, queued_s, request.cached, request.prompt_logprobs, request.prompt_top)
            )
        message.tokens.append(Token(generate.id, token, *logprob, output.finish_reasons[i]))
    yield from messages.items()


def logprobs_of(output: StepOutput) -> dict[int, tuple[float, list[tuple[int, float]]] | Exception]:
    """By chunk, the log-probability of its token and the most likely ones, where requested. Those of prompts are added to the
    request."""
    if output.logits is None:
        return {}
    rows, found = last_rows(output.step), {}
    wanted = [
        i
        for i, token in enumerate(output.tokens)
        if token is not None and output.step.requests[i].generate.logprobs
    ]
    try:
        logits = rows_of(output.logits, [rows[i] for i in wanted])
        top_n = [output.step.requests[i].generate.top_n_tokens for i in wanted]
        tokens, maxima = (
            [output.tokens[i] for i in wanted],
            output.maxima if wanted == output.step.samples else None,
        )
        found = dict(zip(wanted, sampling.logprobs(logits, tokens, top_n, maxima))) if wanted else {}
    except Exception as error:
        found = dict.fromkeys(wanted, error)
    for i, (chunk, request) in enumerate(zip(output.step.chunks, output.step.requests)):
        if chunk.keep_all:
            end = chunk.begin + len(chunk.tokens)
            followers = request.prompt[chunk.begin + 1 : end + 1]
            try:
                logits = output.logits[rows[i] + 1 - len(chunk.tokens) : rows[i] + 1]
                top_n = [request.generate.top_n_tokens] * len(followers)
                for scored in sampling.logprobs(logits[: len(followers)], followers, top_n):
                    if isinstance(scored, Exception):
                        raise scored
                    request.prompt_logprobs.append(scored[0])
                    request.prompt_top.append(scored[1])
            except Exception as error:
                found[i] = error
    return found
