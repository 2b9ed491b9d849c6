"""Logits to token ids: penalties, temperature, top-k, top-p, typical-p, seeds and log-probabilities.

`sample` chooses the next token of every row of a step, each row with its own `Sampler`: that request's parameters, its own
random stream and its own history. What a row yields depends on its own logits, parameters and seed alone, never on its
neighbours. Log-probabilities are of the model's own distribution, before any parameter changes it.

This layer knows neither slots nor sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from protocol import Sampling


class SamplingError(Exception):
    """Logits from which nothing can be chosen; the message may be read by the client."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of a row: its id, its log-probability, and the likeliest (id, log-probability) pairs if asked for."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Sampler:
    """What one request brings to the choice of its next token.

    `prompt` counts for the repetition penalty (as in transformers), not for the frequency penalty (as in OpenAI's API).
    """

    def __init__(self, sampling: Sampling, prompt: list[int], top_n_tokens: int = 0):
        self.sampling = sampling
        self.top_n_tokens = top_n_tokens
        self._random = None if sampling.seed is None else np.random.Generator(np.random.Philox(key=sampling.seed))
        self._seen = np.unique(prompt) if sampling.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}

    @property
    def takes_likeliest(self) -> bool:
        """Greedy without a penalty: the largest logit is the answer."""
        return self._random is None and not self._has_penalty

    @property
    def _has_penalty(self) -> bool:
        return self.sampling.repetition_penalty != 1.0 or self.sampling.frequency_penalty != 0.0

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")  # -inf is what an impossible token scores
    def choose(self, logits: np.ndarray) -> int:
        """The next token id for `logits`, float32 [vocab], which stay as they are.

        The order is transformers' and TGI's: penalties, temperature, top-k, top-p, typical-p.
        """
        scores = self._penalized(logits.astype(np.float64))
        if self._random is None:
            return int(scores.argmax())
        # One number is drawn for each token whatever the parameters, so a stream's n-th draw is its n-th token's.
        draw = self._random.random()
        ids, probabilities = self._candidates(scores)
        cumulative = np.cumsum(probabilities)
        return int(ids[min(np.searchsorted(cumulative, draw * cumulative[-1], side="right"), len(ids) - 1)])

    def record(self, token: int) -> None:
        """Tells which token was taken, for the penalties of the next one."""
        if self.sampling.frequency_penalty != 0.0:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def _penalized(self, scores: np.ndarray) -> np.ndarray:
        if self._seen is not None:
            seen = scores[self._seen]
            penalty = self.sampling.repetition_penalty
            penalized = np.where(seen > 0, seen / penalty, seen * penalty)
            # Kept finite, so that differences stay numbers; an impossible token stays impossible.
            scores[self._seen] = np.where(np.isneginf(seen), seen, np.clip(penalized, -1e30, 1e30))
        if self._counts:
            ids = np.fromiter(self._counts, dtype=np.int64)
            scores[ids] -= self.sampling.frequency_penalty * np.fromiter(self._counts.values(), dtype=np.float64)
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


def sample(logits: torch.Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
    """The next token of each row. logits: float32 [rows, vocab], on the CPU, one sampler a row.

    A row that fails yields its exception in its place; the others do not notice.
    """
    likeliest = logits.argmax(dim=-1).tolist()
    # Counted from the largest, because float32 would round the sum for large logits by more than a log-probability may err.
    normalizers = torch.logsumexp(logits - logits.amax(dim=-1, keepdim=True), dim=-1).tolist()
    rows = logits.numpy()
    choices: list[Choice | Exception] = []
    for row, sampler in enumerate(samplers):
        try:
            choices.append(_choose(rows[row], sampler, likeliest[row], normalizers[row]))
        except Exception as error:
            choices.append(error)
    return choices


def _choose(logits: np.ndarray, sampler: Sampler, likeliest: int, normalizer: float) -> Choice:
    if not np.isfinite(normalizer):
        raise SamplingError("the model's output is not a number")
    peak = float(logits[likeliest])
    token = likeliest if sampler.takes_likeliest else sampler.choose(logits)
    sampler.record(token)
    top = []
    if sampler.top_n_tokens:
        n = min(sampler.top_n_tokens, len(logits))
        best = np.flatnonzero(logits >= np.partition(logits, -n)[-n])  # ascending: of equals the lowest id, as in argmax
        best = best[np.argsort(-logits[best], kind="stable")][:n]
        top = [(int(i), float(logits[i]) - peak - normalizer) for i in best]
    return Choice(token, float(logits[token]) - peak - normalizer, top)
