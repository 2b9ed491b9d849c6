"""A request in the worker: what it asks for, and how far it has come."""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.sampling.ngram_proposer import NgramProposer
from engine.sampling.sampling import RowLogprobs, SamplerState
from protocol import Generate
from text.grammar import Matcher

logger = logging.getLogger("worker")


class RequestState(enum.Enum):
    """How far a request has come. A request goes through these states in their order, and may end in any of
    them."""

    PREPARING = enum.auto()  # until its grammar and its images are ready (preparation.py)
    WAITING = enum.auto()  # for a slot
    PREFILLING = enum.auto()  # it has a slot, and parts of its prompt have to run
    RUNNING = enum.auto()  # each step generates its next token
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The sequences of one HTTP request: all are served, or all are rejected."""

    has_started: bool = False  # one of them has had a slot


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence to generate, waiting or running. Times are CLOCK_MONOTONIC, in seconds."""

    generate: Generate
    max_new_tokens: int  # within the context length
    arrived_at: float
    peer: bytes  # the API server process that it came from
    group: RequestGroup
    eos_token_ids: Collection[int]
    images: Mapping[int, int]  # key → tokens
    adapter: int = 0  # the number of its LoRA adapter (models/adapters.py); 0: none
    sampler: SamplerState | None = None  # None with on-device sampling
    matcher: Matcher | None = None  # with constrained decoding
    proposer: NgramProposer | None = None  # with speculative decoding
    state: RequestState = RequestState.PREPARING
    # Kept by the preparation:
    # Of its grammar and its images; a result says why it failed, "" if it did not. None: not yet begun.
    preparations: Sequence[Future[str]] | None = None
    # Kept by the scheduler:
    slot: int | None = None  # None: it has none
    cached: int = 0  # prompt tokens found in the prefix cache
    prefilled: int = 0  # prompt tokens that have been run, or were cached
    generated: int = 0
    last_token: int = 0
    started_at: float = 0.0  # when its first prompt chunk was scheduled
    exceeded_wait: bool = False  # it started because of `max_waiting_tokens`, while too few requests waited
    # Kept by the step:
    is_complete: bool = False  # its grammar allows nothing but the end
    first_token_at: float = 0.0
    # Kept by the output thread:
    prompt_scores: list[RowLogprobs] = field(default_factory=list)
    has_ended: bool = False  # its terminal message has been sent
    last_token_at: float = 0.0  # when the step of its last token was done

    @property
    def has_slot(self) -> bool:
        return self.slot is not None

    @property
    def id(self) -> int:
        return self.generate.id

    @property
    def prompt(self) -> Sequence[int]:
        return self.generate.prompt

    @property
    def all_logits(self) -> bool:
        """The logits after every prompt token are wanted."""
        return self.generate.prompt_logprobs

    def log(self, event: str, **fields) -> None:
        """Logs an event of the request at the level debug, with its id and these named values."""
        logger.debug(event, extra={"fields": {"request_id": self.generate.request_id, **fields}})
