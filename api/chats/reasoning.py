"""Reasoning as all chat APIs share it: how much of it a request asks for, and its opaque form in responses.

The models' formats are in text/output/reasoning_formats.py.
"""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

# The nearest efforts, for one that the model's template does not name; the last one if it names none.
NEAREST = {"minimal": ["low"], "high": ["xhigh", "high"], "xhigh": ["high"], "max": ["xhigh", "high"]}
THINKING_ON = {"enable_thinking": True, "thinking": True}
THINKING_OFF = {"enable_thinking": False, "thinking": False}
SEAL = "v1."


def template_variables(
    effort: str | None, is_on: bool | None, template_words: Collection[str]
) -> dict[str, Any]:
    """Returns the variables of chat templates for an effort and for reasoning that is on or off; {}: nothing
    is asked for.

    The effort `none`, or `is_on` False, turns reasoning off, whatever the other says. Any other effort, such
    as `high`, turns reasoning on. An effort that the template does not name becomes the nearest one; one that
    NEAREST does not have stays. template_words: the words that the template has in quotes. Example: for a
    template that names `low` and `high`, the effort `max` becomes `high`. The result must not be changed.
    """
    if effort == "none" or is_on is False:
        return THINKING_OFF
    if effort is None:
        return THINKING_ON if is_on else {}
    nearest = NEAREST.get(effort, [effort])
    known = next((each for each in (effort, *nearest) if each in template_words), nearest[-1])
    return THINKING_ON | {"reasoning_effort": known, "low_effort": known == "low"}


def seal(text: str) -> str:
    """A text (reasoning or a summary) in an opaque form without a secret, which any replica can `unseal`. The
    form is not compressed: a client could send a short text in that form that grows without bound."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: Any) -> str:
    """Returns the text in what `seal` made; "" for anything else, such as another server's form or a value
    that is no text."""
    if not isinstance(sealed, str) or not sealed.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return ""
