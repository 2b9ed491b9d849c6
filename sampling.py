"""Logits to token ids: penalties, biases, temperature, top-k, top-p, typical-p, seeds and log-probabilities.

`sample` chooses the next token of every row of a step, each row with its own `Sampler`: that request's parameters, its own
random stream and its own history. What a row yields depends on its own logits, parameters and seed alone, never on its
neighbours. Log-probabilities are of the model's own distribution, before any parameter changes it; `prompt_logprobs` gives
those of a prompt. Where the device chooses itself, `device_parameters` are what it is told, and `drawn` reads what it says.

This layer knows neither slots nor sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protocol import Sampling


class SamplingError(Exception):
    """Logits from which nothing can be chosen; the message may be read by the client."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of a row: its id, its log-probability (None where the device chose), and the likeliest (id,
    log-probability) pairs if asked for."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class Sampler:
    """What one request brings to the choice of its next token.

    `prompt` counts for the repetition penalty (as in transformers), not for the frequency and presence penalties (as in
    OpenAI's API). The ids in `banned` are not chosen for the first `banned_for` tokens. The ids of a logit bias must differ
    and be in the vocabulary; a banned one need not be.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: list[int],
        top_n_tokens: int = 0,
        banned: Collection[int] = (),
        banned_for: int = 0,
    ):
        self.sampling = sampling
        self.top_n_tokens = top_n_tokens
        self._random = None if sampling.seed is None else np.random.Generator(np.random.Philox(key=sampling.seed))
        self._seen = np.unique(prompt) if sampling.repetition_penalty != 1.0 else None
        self._counts_tokens = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._counts: dict[int, int] = {}
        self._bias_ids = np.array([token for token, _bias in sampling.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _token, bias in sampling.logit_bias], dtype=np.float64)
        self._banned = np.array(list(banned), dtype=np.int64)
        self._banned_for = banned_for if banned else 0

    @property
    def takes_likeliest(self) -> bool:
        """Greedy, and nothing changes the logits: the largest is the answer."""
        changes = self._seen is not None or self._counts_tokens or len(self._bias_ids) or self._banned_for > 0
        return self._random is None and not changes

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")  # -inf is what an impossible token scores
    def choose(self, logits: np.ndarray) -> int:
        """The next token id for `logits`, float32 [vocab], which stay as they are.

        The order is transformers' and TGI's: penalties, temperature, top-k, top-p, typical-p. Raises SamplingError when
        only banned tokens are possible.
        """
        scores = self._changed(logits.astype(np.float64))
        if self._random is None:
            return int(scores.argmax())
        # One number is drawn for each token whatever the parameters, so a stream's n-th draw is its n-th token's.
        draw = self._random.random()
        ids, probabilities = self._candidates(scores)
        cumulative = np.cumsum(probabilities)
        return int(ids[min(np.searchsorted(cumulative, draw * cumulative[-1], side="right"), len(ids) - 1)])

    def record(self, token: int) -> None:
        """Tells which token was taken, for the penalties of the next one."""
        self._banned_for -= 1
        if self._counts_tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def _changed(self, scores: np.ndarray) -> np.ndarray:
        if self._seen is not None:
            seen = scores[self._seen]
            penalty = self.sampling.repetition_penalty
            penalized = np.where(seen > 0, seen / penalty, seen * penalty)
            # Kept finite, so that differences stay numbers; an impossible token stays impossible.
            scores[self._seen] = np.where(np.isneginf(seen), seen, np.clip(penalized, -1e30, 1e30))
        if self._counts:
            ids = np.fromiter(self._counts, dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float64)
            scores[ids] -= self.sampling.frequency_penalty * counts + self.sampling.presence_penalty
        scores[self._bias_ids] += self._bias
        if self._banned_for > 0:
            scores[self._banned[self._banned < len(scores)]] = -np.inf
            if np.isneginf(scores.max()):
                raise SamplingError("no token is possible but those that may not come yet (min_new_tokens)")
        return scores

    def _candidates(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids that may be drawn, ascending, and how likely each is (not normalized)."""
        sampling = self.sampling
        # From the largest down, so that a tiny temperature ends in the likeliest token instead of in infinities.
        scores = (scores - scores.max()) / sampling.temperature
        ids = np.arange(len(scores))
        if 0 < sampling.top_k < len(scores):
            kth = np.partition(scores, -sampling.top_k)[-sampling.top_k]
            ids = np.flatnonzero(scores >= kth)
        probabilities = np.exp(scores[ids])
        if sampling.top_p < 1.0:
            kept = _top_p(probabilities, sampling.top_p)
            ids, probabilities = ids[kept], probabilities[kept]
        if sampling.typical_p < 1.0:
            kept = _typical_p(probabilities, sampling.typical_p)
            ids, probabilities = ids[kept], probabilities[kept]
        return ids, probabilities


def _top_p(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Nucleus sampling (Holtzman et al. 2019): the fewest likeliest tokens whose share reaches `top_p`. Indices, ascending."""
    order = np.argsort(-probabilities, kind="stable")
    return _first_share(order, probabilities, top_p)


def _typical_p(probabilities: np.ndarray, typical_p: float) -> np.ndarray:
    """Locally typical sampling (Meister et al. 2022): those whose surprise is nearest to the expected one, up to a share."""
    shares = probabilities / probabilities.sum()
    surprise = -np.log(shares)
    entropy = np.sum(shares * surprise, where=shares > 0)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    return _first_share(order, probabilities, typical_p)


def _first_share(order: np.ndarray, probabilities: np.ndarray, share: float) -> np.ndarray:
    """The first entries of `order` that together hold `share` of all, at least one; ascending."""
    cumulative = np.cumsum(probabilities[order])
    count = int(np.searchsorted(cumulative, share * cumulative[-1], side="left")) + 1
    return np.sort(order[:count])


@dataclass(frozen=True, slots=True)
class _Row:
    """The logits of one place, float32 [vocab], and what turns them into the model's own log-probabilities."""

    logits: np.ndarray
    likeliest: int
    normalizer: float

    def check(self) -> None:
        if not np.isfinite(self.normalizer):
            raise SamplingError("the model's output is not a number")

    def logprob(self, token: int) -> float:
        return float(self.logits[token]) - float(self.logits[self.likeliest]) - self.normalizer

    def top(self, n: int) -> list[tuple[int, float]]:
        """The `n` likeliest (token id, log-probability), likeliest first."""
        n = min(n, len(self.logits))
        if n == 0:
            return []
        # Ascending: of equals the lowest id, as in argmax.
        best = np.flatnonzero(self.logits >= np.partition(self.logits, -n)[-n])
        best = best[np.argsort(-self.logits[best], kind="stable")][:n]
        return [(int(token), self.logprob(token)) for token in best]


def _rows(logits: torch.Tensor) -> Iterator[_Row]:
    """logits: float32 [rows, vocab], on the CPU."""
    likeliest = logits.argmax(dim=-1).tolist()
    # Counted from the largest, because float32 would round the sum for large logits by more than a log-probability may err.
    normalizers = torch.logsumexp(logits - logits.amax(dim=-1, keepdim=True), dim=-1).tolist()
    return map(_Row, logits.numpy(), likeliest, normalizers)


def sample(logits: torch.Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
    """The next token of each row. logits: float32 [rows, vocab], on the CPU, one sampler a row.

    A row that fails yields its exception in its place; the others do not notice.
    """
    choices: list[Choice | Exception] = []
    for row, sampler in zip(_rows(logits), samplers):
        try:
            choices.append(_choose(row, sampler))
        except Exception as error:
            choices.append(error)
    return choices


def _choose(row: _Row, sampler: Sampler) -> Choice:
    row.check()
    token = row.likeliest if sampler.takes_likeliest else sampler.choose(row.logits)
    sampler.record(token)
    return Choice(token, row.logprob(token), row.top(sampler.top_n_tokens))


def device_parameters(sampling: Sampling) -> tuple[int, float, float]:
    """top_k, top_p and temperature for a device that samples; the likeliest token is the one that top_k 1 leaves."""
    if sampling.seed is None:
        return 1, 1.0, 1.0
    return sampling.top_k, sampling.top_p, sampling.temperature


def drawn(ids: torch.Tensor, vocab_size: int) -> list[Choice | Exception]:
    """What the device chose for each row: int64 [rows]. An id that is no token yields an exception in its place."""
    return [
        Choice(token, None, []) if 0 <= token < vocab_size else SamplingError("the device chose a token that does not exist")
        for token in ids.tolist()
    ]


def prompt_logprobs(
    chunks: Iterable[torch.Tensor], prompt: list[int], top_n: int
) -> tuple[torch.Tensor, list[float], list[list[tuple[int, float]]]]:
    """What the model thought of a prompt. chunks: the logits after each of its tokens in order, float32 [n, vocab] each.

    Returns the logits after the last token, float32 [vocab]; the log-probability of each token from the second on; and as
    many lists of the `top_n` likeliest (token id, log-probability) at each of these places. Chunks are not kept. Raises
    SamplingError for logits that are no numbers.
    """
    last = torch.empty(0)
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    followers = iter(prompt[1:])  # the logits after a token are about the next one
    for chunk in chunks:
        last = chunk[-1].clone()  # a view would hold the chunk
        for row, token in zip(_rows(chunk), followers):  # in this order: zip takes one too many of its first
            row.check()
            logprobs.append(row.logprob(token))
            top.append(row.top(top_n))
    return last, logprobs, top
