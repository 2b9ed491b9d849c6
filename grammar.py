"""Grammars: what a generated text must look like, as JSON schemas, regular expressions and choices; and their token masks.

Both sides use it. A web process turns what a client sent into a grammar in llguidance's serialized form, and checks that it
compiles and how long its masks take, before anything is generated. The worker keeps a `Matcher` beside each request: it is
given every sampled token and fills in which tokens may follow. This layer knows no HTTP and no sockets.
"""

from __future__ import annotations

WHITESPACE = r"\n? {0,16}"  # between JSON tokens: the ways in which models write it, without endless blanks


class GrammarError(Exception):
    """A grammar that cannot be used; the message is for the client."""
