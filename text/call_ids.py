"""The ids of calls of tools: one row for each rule that some chat templates have about them."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from run import Json


class CallIds:
    """No rule: new ids as OpenAI's, and those of a conversation as they are."""

    def new(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def written(self, messages: list[Json]) -> list[Json]:
        """The messages with the ids as the template writes them."""
        return messages


class ShortIds(CallIds):
    """Mistral's templates require 9 letters and digits."""

    def new(self) -> str:
        return secrets.token_hex(5)[:9]

    def written(self, messages: list[Json]) -> list[Json]:
        return [_with_short_ids(message) for message in messages]


class NamedIds(CallIds):
    """Kimi's templates write an id in the place of the function's name."""

    def written(self, messages: list[Json]) -> list[Json]:
        ids = {}
        number = 0
        changed = []
        for message in messages:
            message = dict(message)
            calls = []
            for call in message.get("tool_calls") or ():
                calls.append(call | {"id": f"functions.{call['function']['name']}:{number}"})
                ids[str(call.get("id"))] = calls[-1]["id"]
                number += 1
            if calls:
                message["tool_calls"] = calls
            if "tool_call_id" in message:
                message["tool_call_id"] = ids.get(str(message["tool_call_id"]), message["tool_call_id"])
            changed.append(message)
        return changed


def _with_short_ids(message: Json) -> Json:
    message = dict(message)
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            call | {"id": _short_id(call["id"])} if "id" in call else call for call in calls
        ]
    return message


def _short_id(given: Any) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", str(given)):
        return given
    return hashlib.sha256(str(given).encode()).hexdigest()[:9]


ANY_IDS = CallIds()
# By what the source of a template has.
RULES = {"[TOOL_CALLS]": ShortIds(), "<|tool_call_begin|>": NamedIds()}


def call_ids_of(source: str) -> CallIds:
    """The rule of a chat template with this source."""
    return next((rule for mark, rule in RULES.items() if mark in source), ANY_IDS)
