"""Session affinity: the turns of a conversation prefer one replica, whose slots still hold the conversation's
prefix.

Owns what identifies a conversation, and which server it prefers. The choice needs no shared state but the
list of servers, and moves few conversations when the list changes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection

SESSION_HEADER = "x-session-id"
CHAT_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations")


def session_of(path: str, header: str | None, body: bytes) -> str | None:
    """The header's value, else, for a chat, a hash of its messages up to the first one of the user; None
    without either."""
    if header or not path.endswith(CHAT_ROUTES):
        return header or None
    try:
        chat = json.loads(body)
        messages = chat.get("messages") or chat["input"]  # `input` is that of /v1/responses
        first = next(i for i, message in enumerate(messages) if message.get("role") == "user")
        begin = [chat.get("system"), messages[: first + 1]]  # Anthropic's messages have `system` beside them
        return json.dumps(begin, sort_keys=True)
    except (ValueError, KeyError, AttributeError, TypeError, StopIteration, RecursionError):
        return None  # the server says what is wrong, if anything is


def candidates(session: str | None, own: str, addresses: Collection[str]) -> list[str]:
    """The servers to try in turn: the one that the session prefers, the replica's own, another one."""
    preferred = max({own, *addresses}, key=lambda address: _weight(session, address)) if session else own
    others = [address for address in addresses if address not in (own, preferred)]
    return list(dict.fromkeys([preferred, own, *random.sample(others, min(1, len(others)))]))


def _weight(session: str, address: str) -> bytes:
    """Rendezvous hashing: each session ranks all addresses, in an order of its own."""
    return hashlib.blake2b(f"{address} {session}".encode(errors="surrogatepass"), digest_size=8).digest()
