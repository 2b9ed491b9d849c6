"""The texts that a grammar accepts, with the demonstration model's tokenizer or another one."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from config import DEMO_MODEL
from text.grammar import GrammarChecker, Grammars


@cache
def demo():
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), Grammars(DEMO_MODEL, 2048, [0])


def grammars_of(tokenizer, vocab_size=None, eos_token_ids=(0,)):
    """The grammars of a tokenizer that no file has."""
    with TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        return Grammars(folder, vocab_size or tokenizer.get_vocab_size(), eos_token_ids)


@cache
def checker():
    return GrammarChecker(DEMO_MODEL, 2048, [0])


def mask_of(matcher, tokens=2048):
    return np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")[:tokens].astype(bool)


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


class Judge:
    """Which texts a grammar allows."""

    def __init__(self, tokenizer, grammar):
        self.tokenizer = tokenizer
        ll_tokenizer = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))
        self.matcher = LLMatcher(ll_tokenizer, grammar, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def allows(self, text):
        """Whether `text` is allowed as a whole; None: as a beginning."""
        matcher = self.matcher.deep_copy()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) < len(ids):
            return False
        assert not matcher.is_error(), matcher.get_error()
        return matcher.is_accepting() or None
