"""One step of the device: copies, masks, forward, sampling. `StepRunner.run` reads from top to bottom.

Failures are part of the result: a `StepOutput` has tokens or an error message for each request, and one bad
row does not end the others. Only a lost device requires a restart of the process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from config import DEVICE_TOP_K
from engine.request import Request
from engine.sampling import sampling
from engine.sampling.sampling import SamplingBatch, SamplingError, TokenOrError
from engine.scheduler import PREFILL_TOKENS_WITH_DECODE, Step
from models.base import Logits, SampledIds, StaticBatchModel
from models.errors import DeviceLost
from protocol import SamplingParams
from text.grammar import GrammarError, Matcher

logger = logging.getLogger("worker")

GREEDY = SamplingParams(top_k=1)  # as the device has it


@dataclass(slots=True, eq=False)
class StepOutput:
    """The output of a step, one entry per chunk of `step`. Times are CLOCK_MONOTONIC, in seconds."""

    step: Step
    tokens: list[list[int]]  # new ones of each request; [] for a part of a prompt, or after an error
    started_at: float
    ran_at: float = 0.0
    sampled_at: float = 0.0
    done_at: float = 0.0  # when slots and requests were updated
    errors: dict[int, str] = field(default_factory=dict)  # by chunk, for the client
    failure: Exception | None = None  # of the whole step; all requests have errors
    finish_reasons: list[str | None] = field(default_factory=list)  # what `Scheduler.update` returned
    # [rows, vocab]; None with on-device sampling, or if no request wants log-probabilities.
    logits: np.ndarray | None = None
    mask_s: float = 0.0  # that the masks took; 0 without grammars


class Masks(NamedTuple):
    """Which tokens grammars allow in the rows of a step."""

    mask: np.ndarray  # uint32 [rows, ceil(vocab / 32)] as in sampling.py: sample
    errors: dict[int, Exception]  # of rows without a mask
    seconds: float  # that they took


def masks_of(matchers: Sequence[Matcher | None], vocab_size: int) -> Masks:
    """Returns the masks of a step's rows, in the order of `matchers`; a row without a matcher allows all
    tokens. A matcher that fails leaves its row such a mask, and an error in `errors`."""
    started_at = time.monotonic()
    errors = {}
    mask = np.full((len(matchers), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for row, matcher in enumerate(matchers):
        try:
            if matcher:
                mask[row] = np.frombuffer(matcher.mask(), np.uint32, mask.shape[1])
        except Exception as error:  # one row must not stop the others
            errors[row] = error
    return Masks(mask, errors, time.monotonic() - started_at)


class StepRunner:
    """Runs steps on a model. Computes the masks of grammars in a thread of its own."""

    def __init__(self, model: StaticBatchModel):
        self._model = model
        self._mask_thread = ThreadPoolExecutor(1, "worker-masks")
        self._batch = SamplingBatch([])  # of the last step

    def run(self, step: Step) -> StepOutput:
        """Copies prefixes, runs the step on the device, and samples the next tokens. Returns the output, also
        after a failure; one of the device is logged, and none is raised.

        If the device fails, `failure` is set, and all requests have an error. If sampling fails, the requests
        that sample have one. Advances the requests' random streams and grammars. Frees no slot, and leaves
        `done_at` and `finish_reasons` of the output to the caller.
        """
        requests = [step.requests[i] for i in step.sample_indices]
        masks = self._start_masks(requests)
        output = StepOutput(step, [[] for _ in step.chunks], time.monotonic())
        try:
            self._copy_prefixes(step)
            self._use_device_sampling(step, requests)
            result = self._model.forward(step.chunks)
        except Exception as error:
            logger.exception("a step of %d slots failed", len(step.chunks))
            output.failure = error
            output.errors = dict.fromkeys(range(len(step.chunks)), "a step on the device failed")
            return output
        output.ran_at = time.monotonic()
        try:
            self._sample(output, result, masks)
        except Exception as error:
            output.tokens = [[] for _ in step.chunks]
            output.errors = {i: _message_of(error, step.requests[i]) for i in step.sample_indices}
            output.logits = None
        output.sampled_at = time.monotonic()
        return output

    def _start_masks(self, requests: Sequence[Request]) -> Future[Masks] | None:
        """Begins to compute the masks of these requests' next tokens, which takes milliseconds, while the
        device runs. None: no request has a grammar."""
        matchers = [request.matcher for request in requests]
        return self._mask_thread.submit(masks_of, matchers, self._model.vocab_size) if any(matchers) else None

    def _copy_prefixes(self, step: Step) -> None:
        """Copies the cached prompt tokens that the step names. Raises DeviceLost if that fails."""
        try:
            for slot, tokens, source in step.copies:
                self._model.copy_prefix(source, slot, tokens)
        except Exception as error:  # requests that have no chunk in this step rely on the copies, too
            raise DeviceLost(f"a prefix cannot be copied: {error}") from error

    def _use_device_sampling(self, step: Step, sampled: Sequence[Request]) -> None:
        """Sets the parameters of requests that start, and, if the device or the host may sample ("hybrid"),
        which of them does: the host, if a request needs logits. Does nothing if only the host samples.
        sampled: the requests that get a token in the step."""
        if self._model.sampling == "host":
            return
        if self._model.sampling == "hybrid":
            is_scored = any(chunk.all_logits for chunk in step.chunks)
            self._model.return_token_ids(ids=not (is_scored or any(map(needs_logits, sampled))))
        for request in step.started:
            wanted = request.generate.sampling
            if wanted.seed is None:
                wanted = GREEDY
            self._model.set_sampling(request.slot, wanted.top_k, wanted.top_p, wanted.temperature)

    def _sample(self, output: StepOutput, result: Logits | SampledIds, masks: Future[Masks] | None) -> None:
        """Adds to `output` the next tokens of each request that samples, or its error. Raises what makes all
        rows fail.

        A request gets one token, and one more after each accepted draft token. An error after the first token
        only ends its tokens: the next step finds the same error. The logits are added if a request wants
        log-probabilities.
        """
        step = output.step
        wants_logits = any(request.generate.logprobs or request.all_logits for request in step.requests)
        if wants_logits and not isinstance(result, SampledIds):
            output.logits = result
        rows_by_chunk = sampled_rows(step)
        samples = step.sample_indices
        depth = 0
        while samples:
            requests = [step.requests[i] for i in samples]
            rows = [rows_by_chunk[i][depth] for i in samples]
            if depth:
                masks = self._start_masks(requests)
            choices = self._choices(output, requests, rows, result, masks)
            going = []
            for i, request, choice in zip(samples, requests, choices):
                if not isinstance(choice, Exception):
                    output.tokens[i].append(choice)
                    chunk = step.chunks[i]
                    next_draft = chunk.tokens[depth + 1 : depth + 2] if chunk.verify else ()
                    if choice in next_draft and not request.is_complete:
                        going.append(i)
                elif not depth:  # otherwise the next step finds the same error
                    output.errors[i] = _message_of(choice, request)
            samples = going
            depth += 1

    def _choices(
        self,
        output: StepOutput,
        requests: list[Request],
        rows: list[int],
        result: Logits | SampledIds,
        masks: Future[Masks] | None,
    ) -> list[TokenOrError]:
        """Returns the next token of each request, or the exception of its row. A token that is sampled here
        advances the request's grammar; an id that the device sampled does not.

        output: only its `mask_s` changes. rows: the row of `result` for each request. masks: the masks of
        these rows; None: no request has a grammar.
        """
        if isinstance(result, SampledIds):
            unknown = SamplingError("the device chose a token that does not exist")
            ids = result.ids[rows].tolist()
            return [token if 0 <= token < self._model.vocab_size else unknown for token in ids]
        samplers = [request.sampler for request in requests]
        if samplers != self._batch.rows:  # else the arrays of the last step are right
            self._batch = SamplingBatch(samplers)
        found = masks.result() if masks else Masks(sampling.NO_MASK, {}, 0.0)
        output.mask_s += found.seconds
        choices = sampling.sample(rows_of(result, rows), self._batch, found.mask)
        return [
            found.errors.get(place) or _follow_grammar(request, choice)
            for place, (request, choice) in enumerate(zip(requests, choices))
        ]


def needs_logits(request: Request) -> bool:
    """Whether a request's next token needs host sampling, or the client wants more than the token's id.

    Host sampling is needed for a parameter that the device lacks and that has an effect, a `top_k` above
    DEVICE_TOP_K, logit biases, a given seed, `min_new_tokens`, and a grammar; log-probabilities are more than
    the id.
    """
    generate = request.generate
    needs_host = generate.sampling.host_only or generate.sampling.top_k > DEVICE_TOP_K
    return bool(needs_host or generate.min_new_tokens or generate.logprobs or generate.grammar)


def sampled_rows(step: Step) -> list[range]:
    """Returns, for each chunk, the rows of the step's logits that new tokens may come from: the row of its
    last token; with draft tokens the rows of all its tokens. Chunks that sample nothing have a row, too."""
    found = []
    end = 0
    for chunk in step.chunks:
        end += chunk.rows
        found.append(range(end - (chunk.rows if chunk.verify else 1), end))
    return found


def rows_of(logits: np.ndarray, rows: list[int]) -> np.ndarray:
    """Returns some rows of the logits, in this order: a view if they are adjacent, else a copy. rows: at
    least one."""
    first = rows[0]
    end = first + len(rows)
    return logits[first:end] if rows == list(range(first, end)) else logits[rows]


def _follow_grammar(request: Request, choice: TokenOrError) -> TokenOrError:
    """Advances the request's matcher past the token. Returns the token, or the grammar's error. A `choice`
    that is an error is returned as it is.

    If the grammar then allows only the end, EOS tokens may be sampled, and the request is complete, unless it
    wants an EOS token (`keep_eos`).
    """
    if request.matcher is None or isinstance(choice, Exception):
        return choice
    try:
        request.matcher.consume(choice)
    except Exception as error:
        return error
    if request.matcher.is_complete:
        request.sampler.allow_eos()  # only tokens that end the output are left
        request.is_complete = not request.generate.keep_eos
    return choice


def _message_of(error: Exception, request: Request) -> str:
    """Returns what the client reads. An error that is neither of the grammar nor of the sampling is logged,
    and not shown."""
    if isinstance(error, GrammarError):
        return f"the grammar {error}"
    if isinstance(error, SamplingError):
        return str(error)
    logger.error("no token for request %s", request.generate.request_id, exc_info=error)
    return "the next token could not be sampled"


class StepTimer:
    """Learns from past steps how long a step may take before the device counts as stuck, and how many prompt
    tokens a step has time for."""

    FACTOR = 20  # times the typical duration
    MINIMUM_S = 5.0  # a busy machine sometimes delays a step by that much
    FIRST_S = 100.0  # for the first step of a kind, plus a second for each of its tokens
    RECENT_STEPS = 9  # durations that the typical one, their median, is taken from
    PROMPTS_S = 0.15  # of a step are for prompts, or as much as a decode step takes if that is longer
    LEAST_TOKENS = 16  # of prompts; a step with fewer of them says little about the time of one
    MOST_TOKENS = 512

    def __init__(self):
        self._decode_s: deque[float] = deque(maxlen=self.RECENT_STEPS)
        self._prompt_token_s: deque[float] = deque(maxlen=self.RECENT_STEPS)

    def limit_s(self, prompt_tokens: int) -> float:
        """Returns the seconds that a step with so many prompt tokens may take; 0 prompt tokens: a decode
        step.

        The limit is FACTOR times the typical duration, and at least MINIMUM_S. Until a step of the kind has
        been recorded, it is FIRST_S, and a second more for each prompt token.
        """
        recent = self._prompt_token_s if prompt_tokens else self._decode_s
        if not recent:
            return self.FIRST_S + prompt_tokens
        typical_s = _median(self._decode_s) + prompt_tokens * _median(self._prompt_token_s)
        return max(self.MINIMUM_S, self.FACTOR * typical_s)

    @property
    def prompt_budget(self) -> int:
        """How many prompt tokens a step has time for beside running requests, from LEAST_TOKENS to
        MOST_TOKENS; PREFILL_TOKENS_WITH_DECODE until a step with prompt tokens has been recorded."""
        if not self._prompt_token_s:
            return PREFILL_TOKENS_WITH_DECODE
        tokens = max(self.PROMPTS_S, _median(self._decode_s)) / _median(self._prompt_token_s)
        return int(min(max(tokens, self.LEAST_TOKENS), self.MOST_TOKENS))

    def record(self, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step that took `seconds` on the device. Steps with fewer prompt tokens than
        LEAST_TOKENS, but with some, do not count after the first one."""
        if not prompt_tokens:
            self._decode_s.append(seconds)
        elif prompt_tokens >= self.LEAST_TOKENS or not self._prompt_token_s:
            prompts_s = max(seconds - _median(self._decode_s), 1e-6)
            self._prompt_token_s.append(prompts_s / prompt_tokens)


def _median(recent: Sequence[float]) -> float:
    """Returns the median, of an even number the higher one in the middle; 0 for none."""
    return sorted(recent)[len(recent) // 2] if recent else 0.0
