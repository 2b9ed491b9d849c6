"""Filling in the middle: the prompt that a code model reads for a text before and a text after its output.

`INFILL_LAYOUTS` has one row for each way to write it. Sources: the model cards of Qwen2.5-Coder, CodeGemma,
StarCoder, Granite Code and DeepSeek-Coder.
"""

from __future__ import annotations

from typing import NamedTuple

from text.tokenizer import Tokenizer


class InfillLayout(NamedTuple):
    """The tokens in front of the text before, in front of the text after, and in front of the output."""

    before: str
    after: str
    middle: str

    def prompt(self, before: str, after: str) -> str:
        return f"{self.before}{before}{self.after}{after}{self.middle}"

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of the three tokens; [] if the tokenizer lacks one of them."""
        ids = [tokenizer.token_to_id(token) for token in self]
        return [] if None in ids else ids


INFILL_LAYOUTS = (
    InfillLayout("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    InfillLayout("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    InfillLayout("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def layout_of(tokenizer: Tokenizer) -> InfillLayout | None:
    """Returns the first layout whose tokens the tokenizer has; None: the tokenizer has those of none."""
    return next((layout for layout in INFILL_LAYOUTS if layout.token_ids(tokenizer)), None)
