"""Speculative decoding by prompt lookup (n-grams): proposes the tokens that followed an earlier copy of a
request's last tokens. Edited code, quotations and long keys repeat; a step verifies several draft tokens for
little more than one token costs.

The longest copy counts, the latest of equal ones, from MIN_NGRAM tokens on. A step doubles the number of
draft tokens if all were accepted, else sets it to two more than were accepted. If none was, proposals pause
for 1 token, then 2, 4, up to 64, so a text that does not repeat itself costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_NGRAM = 2  # tokens; shorter copies are chance
MAX_NGRAM = 16  # most tokens of a copy that are compared
# Most copies of the last token that are compared, the latest ones: a text may consist of it, and every
# running request waits for this.
MAX_COPIES = 10_000
INITIAL_DRAFT_TOKENS = 4
MAX_PAUSE = 64  # tokens


class NgramProposer:
    """Proposes draft tokens of one request, from its prompt, its generated tokens and `prediction`.

    `prediction` is the output that the client expects. Its first tokens are proposed at the beginning of the
    output; later it counts as text that comes before the prompt. `max_new_tokens`: how many tokens `add` may
    get in all.
    """

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int], max_new_tokens: int):
        self._prediction = list(prediction)
        self._begin = len(prediction) + len(prompt)  # of the generated tokens
        self._end = self._begin
        self._tokens = np.empty(self._begin + max_new_tokens, np.int64)
        self._tokens[: len(prediction)] = prediction
        self._tokens[len(prediction) : self._begin] = prompt
        self._length = INITIAL_DRAFT_TOKENS
        self._pause = 0
        self._next_pause = 1

    def add(self, tokens: Sequence[int]) -> None:
        """Adds generated tokens, which also shorten a pause of the proposals."""
        self._tokens[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)
        self._pause = max(0, self._pause - len(tokens))

    def propose(self, most: int) -> list[int]:
        """Returns at most `most` draft tokens, which never include image tokens; none without a copy, or
        during a pause. Changes nothing."""
        if most <= 0 or self._pause:
            return []
        begin = self._find()
        draft_tokens = self._tokens[begin : min(begin + most, begin + self._length, self._end)]
        if (draft_tokens < 0).any():  # image tokens, which are never generated
            draft_tokens = draft_tokens[: int((draft_tokens < 0).argmax())]
        return draft_tokens.tolist()

    def record_acceptance(self, draft_tokens: int, accepted: int) -> None:
        """Records how many of the last draft tokens were accepted, which decides how many are proposed next,
        and whether proposals pause. draft_tokens: how many of them were verified, at least one."""
        self._length = 2 * draft_tokens if accepted == draft_tokens else accepted + 2
        if accepted:
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)

    def _find(self) -> int:
        """Returns where in `_tokens` the draft tokens begin; `_end` if there are none.

        While the output has fewer than MIN_NGRAM tokens, all as in the prediction, they begin there.
        Otherwise they follow the copy with the most of the last tokens, the latest of equal ones, if it has
        MIN_NGRAM or more.
        """
        tokens = self._tokens[: self._end]
        generated = self._end - self._begin
        if generated < MIN_NGRAM and tokens[self._begin :].tolist() == self._prediction[:generated]:
            return generated
        found = np.flatnonzero(tokens[:-1] == tokens[-1])[-MAX_COPIES:]
        length = 1
        while length < MAX_NGRAM:
            longer = found[found >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            found = longer
            length += 1
        return int(found[-1]) + 1 if length >= MIN_NGRAM else self._end
