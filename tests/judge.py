"""Which texts a grammar allows, for a tokenizer."""

from llguidance import LLMatcher, LLTokenizer


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
