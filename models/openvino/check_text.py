"""The text that conversions are checked with, as token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

CHECK_TEXT = Path(__file__).with_suffix(".txt")  # all models know it
SHORT_CHECK_TOKENS = 80  # crosses the edges of two blocks


def ids_of_text(folder: Path, vocab_size: int) -> list[int]:
    """The tokens of CHECK_TEXT; none where the folder has no tokenizer.json, or that of another model."""
    text = CHECK_TEXT.read_text()
    try:
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    except Exception:  # tokenizers raises nothing more specific
        return []
    return ids if max(ids, default=vocab_size) < vocab_size else []
