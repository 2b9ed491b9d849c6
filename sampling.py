"""Logits to token ids: penalties, biases, temperature, top-k, top-p, typical-p, seeds and log-probabilities.

`sample` chooses the next token of every row of a step, each row with its own `Sampler`: that request's parameters, its own
random stream and its own history. What a row yields depends on its own logits, parameters and seed alone, never on its
neighbours. Log-probabilities are of the model's own distribution, before any parameter changes it; `prompt_logprobs` gives
those of a prompt. Where the device chooses itself, `device_parameters` are what it is told, and `drawn` reads what it says.

A vocabulary is large, and few of its tokens can be drawn. So a row is read from memory once, and what must see all of it is
done while it is in the processor's cache, in float32: the likeliest token, the largest of each block, the mass of each
block. The rest is float64 arithmetic on the few that can be drawn, which proves that the whole vocabulary would have told
the same; where it cannot, the whole vocabulary is computed. Rows are gone through one by one, in calls whose shapes the
vocabulary alone decides, so that not a bit of a row's numbers depends on its neighbours.

This layer knows neither slots nor sockets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protocol import Sampling

BLOCK = 256
SHORTLIST = 64  # as a rule, top-p takes fewer tokens
# By what share a mass may be wrong. In float32: an exponent of up to 88 is rounded twice, then exp, then the sum of a block.
FAST_ERROR, FULL_ERROR = 2e-5, 1e-10


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
        self.in_full = 0  # of its tokens, those that only a computation over the whole vocabulary could tell
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

    def choose(self, row: _Row) -> int:
        """The next token id for the model's own logits, which stay as they are.

        The order is transformers' and TGI's: penalties, temperature, top-k, top-p, typical-p. Raises SamplingError when
        only banned tokens are possible.
        """
        row = self._changed(row)
        if self._random is None:
            return row.likeliest
        # One number is drawn for each token whatever the parameters, so a stream's n-th draw is its n-th token's.
        draw = self._random.random()
        sampling = self.sampling
        if not self._has_top_k(row) and sampling.top_p == sampling.typical_p == 1.0:
            token = row.draw(sampling.temperature, draw)
            if token is not None:
                return token
        ids, weights = self._candidates(row)
        return int(ids[_drawn(weights, draw)])

    def record(self, token: int) -> None:
        """Tells which token was taken, for the penalties of the next one."""
        self._banned_for -= 1
        if self._counts_tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def _changed(self, row: _Row) -> _Row:
        """The row with its penalties, biases and bans, rounded to float32 as in transformers; itself if there are none."""
        if not (self._seen is not None or self._counts or len(self._bias_ids) or self._banned_for > 0):
            return row
        scores = row.scores.copy()
        if self._seen is not None:
            seen = scores[self._seen].astype(np.float64)
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
        changed = row.like(scores)
        if changed.highest == -np.inf:
            raise SamplingError("no token is possible but those that may not come yet (min_new_tokens)")
        return changed

    def _has_top_k(self, row: _Row) -> bool:
        return 0 < self.sampling.top_k < len(row.scores)

    def _candidates(self, row: _Row) -> tuple[np.ndarray, np.ndarray]:
        """The ids that may be drawn, ascending, and the weight of each."""
        sampling = self.sampling
        if self._has_top_k(row):
            ids, weights = self._top_k(row)
            if sampling.top_p < 1.0:
                kept = _top_p(weights, sampling.top_p)
                ids, weights = ids[kept], weights[kept]
        elif sampling.top_p < 1.0:
            ids, weights = self._nucleus(row)
        else:
            self.in_full += 1
            ids, weights = np.arange(len(row.scores)), np.exp(row.scaled(row.scores, sampling.temperature))
        if sampling.typical_p < 1.0:
            kept = _typical_p(weights, sampling.typical_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def _top_k(self, row: _Row) -> tuple[np.ndarray, np.ndarray]:
        """The `top_k` likeliest, and those as likely as the last of them: ids, ascending, and weights."""
        k, temperature = self.sampling.top_k, self.sampling.temperature
        floor, ids = row.shortlist(k)
        scores = row.scaled(row.scores[ids], temperature)
        kth = np.partition(scores, -k)[-k]
        if not kth > row.scaled(_below(floor), temperature):  # others may be as likely
            self.in_full += 1
            ids, scores = np.arange(len(row.scores)), row.scaled(row.scores, temperature)
            kth = np.partition(scores, -k)[-k]
        kept = scores >= kth
        return ids[kept], np.exp(scores[kept])

    def _nucleus(self, row: _Row) -> tuple[np.ndarray, np.ndarray]:
        """The fewest likeliest whose share of all weights reaches `top_p`: ids, ascending, and weights."""
        top_p, temperature = self.sampling.top_p, self.sampling.temperature
        total = row.masses(temperature).sum()
        floor, ids = row.shortlist(SHORTLIST)
        weights = np.exp(row.scaled(row.scores[ids], temperature))
        if not weights.sum() > top_p * total:
            # Below this floor all together have a share of less than 1 - top_p.
            floor = row.highest + temperature * np.log(0.9 * (1.0 - top_p) * total / len(row.scores))
            ids = row.at_least(floor)
            weights = np.exp(row.scaled(row.scores[ids], temperature))
        kept = _top_p(weights, top_p, total, FAST_ERROR)
        if kept is None:
            kept = _top_p(weights, top_p, np.exp(row.scaled(row.scores, temperature)).sum(), FULL_ERROR)
        if kept is None or not weights[kept].min() > np.exp(row.scaled(_below(floor), temperature)):
            self.in_full += 1
            ids, weights = np.arange(len(row.scores)), np.exp(row.scaled(row.scores, temperature))
            kept = _top_p(weights, top_p)
        return ids[kept], weights[kept]


def _top_p(weights: np.ndarray, top_p: float, total: float | None = None, error: float = 0.0) -> np.ndarray | None:
    """Nucleus sampling (Holtzman et al. 2019): the fewest largest weights whose share reaches `top_p`. Indices, ascending.

    Their share is of `total`, by default of their sum. None if a total that is wrong by `error` could give others.
    """
    largest_first = np.sort(weights)[::-1]
    cumulative = largest_first.cumsum()
    wanted = top_p * (cumulative[-1] if total is None else total)
    last = cumulative.searchsorted(wanted * (1.0 - error))
    if last == len(weights) or (error and cumulative[last] < wanted * (1.0 + error)):
        return None
    kept = weights > largest_first[last]
    # Of equals the lowest ids, as many as are needed.
    kept[(weights == largest_first[last]).nonzero()[0][: last + 1 - np.count_nonzero(kept)]] = True
    return kept.nonzero()[0]


def _typical_p(probabilities: np.ndarray, typical_p: float) -> np.ndarray:
    """Locally typical sampling (Meister et al. 2022): those whose surprise is nearest to the expected one, up to a share."""
    shares = probabilities / probabilities.sum()
    surprise = -np.log(shares)
    entropy = np.sum(shares * surprise, where=shares > 0)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    cumulative = np.cumsum(probabilities[order])
    return np.sort(order[: np.searchsorted(cumulative, typical_p * cumulative[-1]) + 1])


def _drawn(weights: np.ndarray, draw: float) -> int:
    """The index at the share `draw` of all weights, 0 <= draw < 1; never that of a weight of 0."""
    cumulative = weights.cumsum()
    return min(int(cumulative.searchsorted(draw * cumulative[-1], side="right")), len(weights) - 1)


def _below(score: float) -> float:
    """The largest float32 that does not reach `score`."""
    return float(np.nextafter(np.float32(score), np.float32(-np.inf)))


class _Scratch:
    """Where the float32 weights of one row after the other lie, in blocks; the last of these ends in noughts."""

    def __init__(self, vocab: int):
        self.blocks = torch.zeros(-(-vocab // BLOCK), BLOCK)
        self.weights = self.blocks.view(-1)[:vocab]


class _Row:
    """The scores of one place, float32 [vocab], and what can be found out about them.

    A token's weight is exp((its score - the highest) / temperature): 1 for the likeliest, whatever the temperature.
    """

    def __init__(self, scores: torch.Tensor, scratch: _Scratch):
        self.scores = scores.numpy()
        self._tensor = scores
        self._scratch = scratch
        self._likeliest: int | None = None
        self._peaks: np.ndarray | None = None
        self._masses: np.ndarray | None = None
        self._normalizer = 0.0

    def like(self, scores: np.ndarray) -> _Row:
        """A row of other scores, float32 [vocab]."""
        return _Row(torch.from_numpy(scores), self._scratch)

    @property
    def likeliest(self) -> int:
        """The id of the highest score, or of one that is not a number."""
        if self._likeliest is None:
            self._likeliest = int(self.scores.argmax())
        return self._likeliest

    @property
    def highest(self) -> float:
        return float(self.scores[self.likeliest])

    def normalize(self) -> None:
        """Makes ready for `logprob` and `top`. Raises SamplingError for scores that are no numbers."""
        self._masses = self._sums(1.0)
        total = float(self._masses.sum())
        if not total < np.inf:
            raise SamplingError("the model's output is not a number")
        self._normalizer = math.log(total)

    def logprob(self, token: int) -> float:
        return float(self.scores[token]) - self.highest - self._normalizer

    def top(self, n: int) -> list[tuple[int, float]]:
        """The `n` likeliest (token id, log-probability), likeliest first."""
        n = min(n, len(self.scores))
        if n == 0:
            return []
        # Ascending: of equals the lowest id, as in argmax.
        _floor, best = self.shortlist(n)
        best = best[np.argsort(-self.scores[best], kind="stable")][:n]
        return [(int(token), self.logprob(token)) for token in best]

    def scaled(self, scores: np.ndarray | float, temperature: float) -> np.ndarray | float:
        """The logarithms of weights, float64. From the highest down, so that a tiny temperature brings no infinities."""
        if isinstance(scores, np.ndarray):
            scores = scores.astype(np.float64)
        return (scores - self.highest) / temperature

    def masses(self, temperature: float) -> np.ndarray:
        """The sum of the weights of each block, float64 [blocks], right to FAST_ERROR; not numbers if that cannot be had."""
        if temperature == 1.0 and self._masses is not None:
            return self._masses
        return self._sums(temperature)

    def _sums(self, temperature: float) -> np.ndarray:
        scale, weights = 1.0 / temperature, self._scratch.weights
        # exp is a hundred times slower on what is below -87, and that is next to nothing: there must not be much of it.
        if self.scores[:: BLOCK - 1].min() * scale > -80.0:
            torch.exp(self._tensor if scale == 1.0 else torch.mul(self._tensor, scale, out=weights), out=weights)
            sums = self._scratch.blocks.sum(dim=-1).numpy().astype(np.float64)
            one = weights[self.likeliest].item()
            if one > 1e-25 and sums.sum() < np.inf:
                return sums / one
        torch.sub(self._tensor, self.highest, out=weights).mul_(scale).clamp_(min=-80.0).exp_()
        return self._scratch.blocks.sum(dim=-1).numpy().astype(np.float64)

    def shortlist(self, n: int) -> tuple[float, np.ndarray]:
        """A score that at least `n` tokens reach (all, if there are fewer) and few more, and the ids of these, ascending."""
        n, blocks = min(n, len(self.scores)), len(self.scores) // BLOCK
        if n > blocks // 2:
            floor = np.partition(self.scores, -n)[-n]
            return floor, self.at_least(floor)
        begin_of_rest = blocks * BLOCK
        if self._peaks is None:
            self._peaks = self._tensor[:begin_of_rest].view(blocks, BLOCK).amax(dim=-1).numpy()
        floor = np.partition(self._peaks, -n)[-n]  # n blocks have a token that reaches it
        reaching = (self._peaks >= floor).nonzero()[0]
        inside = (self.scores[:begin_of_rest].reshape(blocks, BLOCK)[reaching] >= floor).ravel().nonzero()[0]
        ids = reaching[inside // BLOCK] * BLOCK + inside % BLOCK
        if begin_of_rest < len(self.scores):
            ids = np.append(ids, begin_of_rest + np.flatnonzero(self.scores[begin_of_rest:] >= floor))
        return floor, ids

    def at_least(self, floor: float) -> np.ndarray:
        """The ids of the scores that reach `floor`, ascending."""
        return np.flatnonzero(self.scores >= np.float32(floor))

    def draw(self, temperature: float, draw: float) -> int | None:
        """The token at the share `draw` of all weights: first its block, then itself. None if float32 cannot tell."""
        masses = self.masses(temperature)
        cumulative = masses.cumsum()
        wanted = draw * cumulative[-1]
        if not wanted < np.inf:
            return None
        block = int(cumulative.searchsorted(wanted, side="right"))
        share = (wanted - (cumulative[block - 1] if block else 0.0)) / masses[block]
        begin = block * BLOCK
        weights = np.exp(self.scaled(self.scores[begin : begin + BLOCK], temperature))
        return begin + _drawn(weights, min(share, 1.0 - 2.0**-53)) if weights.any() else None


def _rows(logits: torch.Tensor) -> Iterator[_Row]:
    """logits: float32 [rows, vocab], on the CPU. A row is good until the next one is asked for."""
    scratch = _Scratch(logits.shape[-1])
    for scores in logits:
        yield _Row(scores, scratch)


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # -inf is what an impossible token scores
def sample(logits: torch.Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
    """The next token of each row. logits: float32 [rows, vocab], on the CPU, one sampler a row.

    A row that fails yields its exception in its place; the others do not notice.
    """
    choices: list[Choice | Exception] = []
    with _one_thread():
        for row, sampler in zip(_rows(logits), samplers):
            try:
                choices.append(_choose(row, sampler))
            except Exception as error:
                choices.append(error)
    return choices


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A row is a handful of calls of microseconds each. Several threads would meet after each of them, and wait for one that
    has lost its processor to a web process: a hundred times as long as the call itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _choose(row: _Row, sampler: Sampler) -> Choice:
    row.normalize()
    token = row.likeliest if sampler.takes_likeliest else sampler.choose(row)
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


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
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
        with _one_thread():
            for row, token in zip(_rows(chunk), followers):  # in this order: zip takes one too many of its first
                row.normalize()
                logprobs.append(row.logprob(token))
                top.append(row.top(top_n))
    return last, logprobs, top
