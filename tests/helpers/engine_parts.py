"""Requests and limits of the engine, with the values of tests where a test names none."""

import math

from engine.request import Request, RequestGroup
from engine.scheduler import SchedulerConfig

LIMITS = {
    "prefix_slots": 0,
    "supports_chunked_prefill": False,
    "prefill_chunk": None,
    "chunk_granularity": 1,
    "prefix_granularity": None,
    "supports_prefix_copy": False,
    "whole_images": False,
    "states": None,
    "max_batch_prefill_tokens": None,
    "max_draft_rows": 0,
    "verify_length": 0,
    "max_queue_time_s": math.inf,
    "queue_threshold_s": None,
    "waiting_served_ratio": 0.0,
    "max_waiting_tokens": 20,
}


def limits_of(**limits):
    return SchedulerConfig(**LIMITS | limits)


def request_of(generate, arrived_at=0.0, kind=Request, **fields):
    given = {"peer": b"", "group": RequestGroup(), "eos_token_ids": (), "images": {}} | fields
    return kind(generate=generate, max_new_tokens=generate.max_new_tokens, arrived_at=arrived_at, **given)
