"""The text that conversions are checked with, as token ids, and what an entry keeps of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from run import Json

CHECK_TEXT = Path(__file__).with_suffix(".txt")  # all models know it
SHORT_CHECK_TOKENS = 80  # crosses the edges of two blocks


def ids_of_text(folder: Path, vocab_size: int) -> list[int]:
    """Returns the tokens of CHECK_TEXT, with the tokenizer.json in `folder`; [] where the folder has no such
    file, one that cannot be read, or that of another model, which gives ids of `vocab_size` or more."""
    text = CHECK_TEXT.read_text()
    try:
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    except Exception:  # tokenizers raises nothing more specific
        return []
    return ids if max(ids, default=vocab_size) < vocab_size else []


def reference(ids: Sequence[int], logits: np.ndarray) -> Json:
    """Returns what each startup compares the logits of a model with: `ids`, the tokens of a text; `logits`
    after each of these tokens, those for the tokens of the text alone; and `columns`, the ids of these
    tokens, ascending. These are likely tokens: what differs there matters.

    logits: [tokens, vocab], of `ids` or of more tokens that begin with them.
    """
    columns = sorted(set(ids))
    return {"ids": ids, "columns": columns, "logits": logits[: len(ids), columns].tolist()}
