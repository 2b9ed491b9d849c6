"""Grammars with the demonstration model's tokenizer, and the texts that they accept."""

from functools import cache

import numpy as np
from tokenizers import Tokenizer

from config import DEMO_MODEL
from text.grammar import GrammarChecker, Grammars


@cache
def demo():
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), Grammars.load(DEMO_MODEL, 2048, [0])


@cache
def checker():
    return GrammarChecker(DEMO_MODEL, 2048, [0])


def mask_of(matcher, tokens=2048):
    mask = np.zeros(-(-tokens // 32), np.uint32)
    matcher.fill(mask.ctypes.data, mask.nbytes)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:tokens].astype(bool)


def accepts(text, serialized, tokenizer=None, grammars=None):
    """Whether the text is one of the grammar's, as a model would write it: token by token, then the end."""
    if tokenizer is None:
        tokenizer, grammars = demo()
    matcher, size = grammars.matcher(serialized), tokenizer.get_vocab_size()
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if not mask_of(matcher, size)[token]:
            return False
        matcher.consume(token)
    return bool(mask_of(matcher, size)[0])


def written(rng, matcher, tokenizer, most=60):
    """A text of random tokens, if it ends soon: mostly those that a short text needs."""
    ids = []
    while len(ids) < most:
        allowed = mask_of(matcher).nonzero()[0].tolist()
        if 0 in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return [tokenizer.decode(ids)]
        short = [token for token in allowed if token and len(tokenizer.decode([token]).strip()) == 1]
        ids.append(rng.choice(short if short and rng.random() < 0.8 else [token for token in allowed if token]))
        matcher.consume(ids[-1])
        if matcher.is_complete:
            return [tokenizer.decode(ids)]
    return []
