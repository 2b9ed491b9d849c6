"""Requests and schedulers, with the values of tests where a test names none."""

from config import Config
from engine.request import Request, RequestGroup
from engine.scheduler import Scheduler
from models.base import StaticBatchModel

SETTINGS = (
    "max_batch_prefill_tokens",
    "max_queue_time",
    "queue_threshold_ms",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "web_concurrency",
    "port",
)


def settings_in(facts):
    """The settings among these facts, which are taken out."""
    return Config(**{name: facts.pop(name) for name in SETTINGS if name in facts})


def scheduler_of(slots, prefix_slots=0, **facts):
    """`facts`: of a model that runs nothing, and limits of the operator."""
    config, model = settings_in(facts), StaticBatchModel()
    vars(model).update({"batch_size": slots, "prefix_slots": prefix_slots or slots, "prefix_granularity": None} | facts)
    return Scheduler(model, config)


def request_of(generate, arrived_at=0.0, kind=Request, **fields):
    given = {"peer": b"", "group": RequestGroup(), "eos_token_ids": (), "images": {}} | fields
    return kind(generate=generate, max_new_tokens=generate.max_new_tokens, arrived_at=arrived_at, **given)
