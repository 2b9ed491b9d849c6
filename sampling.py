"""Logits to token ids: penalties, biases, temperature, top-k, top-p, typical-p, seeds and log-probabilities.

`choose` gives the next token of every row of a step, each row with its own `Sampler`: that request's parameters, its own
random stream and its own history. It is what a device waits for; `describe` gives the log-probabilities, for which it need
not. What a row yields depends on its own logits, parameters and seed alone, never on its neighbours. Log-probabilities are of
the model's own distribution, before any parameter changes it; `prompt_logprobs` gives those of a prompt. Where the device
chooses itself, `device_parameters` are what it is told, and `drawn` reads what it says.

A vocabulary is large, and few of its tokens can be drawn. So the logits are read from memory once, for the largest of each
block of tokens. The likeliest token is in the block with the largest, the k likeliest are in the k blocks with the largest, and
what is computed of those few, in float64 and for all rows at once, proves that the whole vocabulary would have told the same.
Where it cannot, and where a parameter needs more, rows are gone through one by one. What must see a whole row is done in
float32 while it is in the processor's cache, in calls that take the same numbers in the same order whatever else is in the
batch, so that not a bit of a row depends on its neighbours.

This layer knows neither slots nor sockets.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import torch

from protocol import Sampling

BLOCK = 64
SHORTLIST = 64  # as a rule, top-p takes fewer tokens
LONGEST_SHORTLIST = 256  # with more, rows are quicker one by one
FEW_ROWS = 4
NO_NUMBER = "the model's output is not a number"
LEAST_EXPONENT = -80.0  # below -87 exp is a hundred times slower in float32, and that is next to nothing
# By what share a mass may be wrong. In float32: an exponent of up to 80 is rounded three times, then exp, then the sum.
FAST_ERROR, FULL_ERROR = 2e-5, 1e-10


class SamplingError(Exception):
    """Logits from which nothing can be chosen; the message may be read by the client."""


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
        self.is_greedy = sampling.seed is None
        # How many of the likeliest tokens tell what can be drawn; 0 where more is needed.
        self.shortlist = 0 if sampling.typical_p < 1.0 else sampling.top_k or SHORTLIST * (sampling.top_p < 1.0)
        self.is_unfiltered = sampling.top_k == 0 and sampling.top_p == sampling.typical_p == 1.0
        self._random = None if self.is_greedy else np.random.Generator(np.random.Philox(key=sampling.seed))
        self._seen = np.unique(prompt) if sampling.repetition_penalty != 1.0 else None
        self._counts_tokens = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._counts: dict[int, int] = {}
        self._bias_ids = np.array([token for token, _bias in sampling.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _token, bias in sampling.logit_bias], dtype=np.float64)
        self._banned = np.array(list(banned), dtype=np.int64)
        self._banned_for = banned_for if banned else 0
        self.remembers = self._seen is not None or self._counts_tokens or self._banned_for > 0  # what was chosen
        self._may_change = self.remembers or len(self._bias_ids) > 0

    @property
    def changes_scores(self) -> bool:
        """Whether penalties, biases or bans are in force."""
        return self._may_change and (
            self._seen is not None or bool(self._counts) or len(self._bias_ids) > 0 or self._banned_for > 0
        )

    def draw(self) -> float:
        """0 <= draw < 1. One number for each token whatever the parameters, so a stream's n-th draw is its n-th token's."""
        return 0.0 if self.is_greedy else self._random.random()

    def choose(self, row: _Row, draw: float) -> int:
        """The next token id for scores that are changed already, from the whole row."""
        ids, weights = self._candidates(row)
        return int(ids[_drawn(weights, draw)])

    def record(self, token: int) -> None:
        """Tells which token was taken, for the penalties of the next one."""
        self._banned_for -= 1
        if self._counts_tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def changed(self, scores: np.ndarray) -> np.ndarray:
        """The model's own scores with penalties, biases and bans, rounded to float32 as in transformers. Raises SamplingError
        when only banned tokens are possible. The order is transformers' and TGI's: this, temperature, top-k, top-p, typical-p.
        """
        scores = scores.copy()
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
        if scores.max() == -np.inf:
            raise SamplingError("no token is possible but those that may not come yet (min_new_tokens)")
        return scores

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
            ids, weights = np.arange(len(row.scores)), row.weights(row.scores, sampling.temperature)
        if sampling.typical_p < 1.0:
            kept = _typical_p(weights, sampling.typical_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def _top_k(self, row: _Row) -> tuple[np.ndarray, np.ndarray]:
        """The `top_k` likeliest, and those as likely as the last of them: ids, ascending, and weights."""
        k = self.sampling.top_k
        _floor, ids = row.shortlist(k)
        scores = row.scores[ids]
        kept = scores >= np.partition(scores, -k)[-k]
        return ids[kept], row.weights(scores[kept], self.sampling.temperature)

    def _nucleus(self, row: _Row) -> tuple[np.ndarray, np.ndarray]:
        """The fewest likeliest whose share of all weights reaches `top_p`: ids, ascending, and weights."""
        top_p, temperature = self.sampling.top_p, self.sampling.temperature
        total = row.total(temperature)
        floor, ids = row.shortlist(SHORTLIST)
        weights = row.weights(row.scores[ids], temperature)
        if not weights.sum() > top_p * total:
            # Below this floor all together have a share of less than 1 - top_p.
            floor = row.highest + temperature * np.log(0.9 * (1.0 - top_p) * total / len(row.scores))
            ids = row.at_least(floor)
            weights = row.weights(row.scores[ids], temperature)
        kept = _top_p(weights, top_p, total, FAST_ERROR)
        if kept is None:
            kept = _top_p(weights, top_p, row.weights(row.scores, temperature).sum(), FULL_ERROR)
        if kept is None or not weights[kept].min() > row.weights(_below(floor), temperature):
            self.in_full += 1
            ids, weights = np.arange(len(row.scores)), row.weights(row.scores, temperature)
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


class _Row:
    """The scores of one place, float32 [vocab], and what can be found out about them.

    A token's weight is exp((its score - the highest) / temperature): 1 for the likeliest, whatever the temperature.
    """

    def __init__(self, scores: torch.Tensor):
        self.scores = scores.numpy()
        self._tensor = scores

    @functools.cached_property
    def _blocks(self) -> torch.Tensor:
        """float32 [blocks, BLOCK]."""
        return _padded(self._tensor).view(-1, BLOCK)

    @functools.cached_property
    def _peaks(self) -> np.ndarray:
        return self._blocks.amax(dim=-1).numpy()

    @functools.cached_property
    def highest(self) -> float:
        """Not a number if one of them is none."""
        return float(self._tensor.amax())

    def weights(self, scores: np.ndarray | float, temperature: float) -> np.ndarray | float:
        """float64. From the highest down, so that a tiny temperature brings no infinities."""
        if isinstance(scores, np.ndarray):
            scores = scores.astype(np.float64)
        return np.exp((scores - self.highest) / temperature)

    def total(self, temperature: float) -> float:
        """The sum of all weights, right to FAST_ERROR; not a number if that cannot be had."""
        blocks, highest = self._blocks[:, :, None], np.array([self.highest])
        return float(_masses(blocks, highest, np.array([temperature])).sum())

    def shortlist(self, n: int) -> tuple[float, np.ndarray]:
        """A score that at least `n` tokens reach (all, if there are fewer) and few more, and the ids of these, ascending."""
        n = min(n, len(self.scores))
        if n > len(self._peaks) // 2:
            floor = np.partition(self.scores, -n)[-n]
            return floor, self.at_least(floor)
        floor = np.partition(self._peaks, -n)[-n]  # n blocks have a token that reaches it
        reaching = (self._peaks >= floor).nonzero()[0]
        inside = (self._blocks.numpy()[reaching] >= floor).ravel().nonzero()[0]
        ids = reaching[inside // BLOCK] * BLOCK + inside % BLOCK
        return floor, ids[ids < len(self.scores)]

    def at_least(self, floor: float) -> np.ndarray:
        """The ids of the scores that reach `floor`, ascending."""
        return np.flatnonzero(self.scores >= np.float32(floor))


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # -inf is what an impossible token scores
def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> tuple[list[int | Exception], Blocks]:
    """The next token of each row, and the logits as they were looked at, for `describe`. logits: float32 [rows, vocab], on the
    CPU, one sampler a row.

    A row that fails yields its exception in its place; the others do not notice.
    """
    with _one_thread():
        draws: list[float] = []
        failed: dict[int, Exception] = {}
        for row, sampler in enumerate(samplers):
            try:
                draws.append(sampler.draw())
            except Exception as error:
                draws.append(0.0)
                failed[row] = error
        blocks = Blocks(logits)
        changing = [row for row, sampler in enumerate(samplers) if sampler.changes_scores]
        chosen = blocks.choose(samplers, draws, changing)
        for row, error in failed.items():
            chosen[row] = error
        changed: dict[int, np.ndarray] = {}
        for row in changing:
            try:
                if not isinstance(chosen[row], Exception):
                    changed[row] = samplers[row].changed(blocks.row(row).numpy())
            except Exception as error:
                chosen[row] = error
        if changed:
            scores = torch.from_numpy(np.stack(list(changed.values())))
            tokens = Blocks(scores).choose([samplers[row] for row in changed], [draws[row] for row in changed])
            for row, token in zip(changed, tokens):
                chosen[row] = token
    for row, sampler in enumerate(samplers):
        if sampler.remembers and not isinstance(chosen[row], Exception):
            try:
                sampler.record(chosen[row])
            except Exception as error:
                chosen[row] = error
    return chosen, blocks


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def describe(
    blocks: Blocks, tokens: Sequence[int], top_n: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]]] | Exception]:
    """The log-probability of the token that was chosen for each row, and the `top_n` likeliest (token id, log-probability).
    blocks: what `choose` gave. A row that fails yields its exception."""
    described: list[tuple[float, list[tuple[int, float]]] | Exception] = []
    with _one_thread():
        logprobs = blocks.logprobs(tokens)
        for row, (logprob, n) in enumerate(zip(logprobs.tolist(), top_n)):
            try:
                described.append((logprob, blocks.top(row, n)))
            except Exception as error:
                described.append(error)
        for row in blocks.broken.tolist():
            described[row] = SamplingError(NO_NUMBER)
    return described


class Blocks:
    """The logits of a step by blocks, and what the largest of each tell. logits: float32 [rows, vocab].

    They may lie in memory row by row, as they do on a CPU, or token by token, as a sharded device brings them; to turn that
    round would take longer than all the rest.
    """

    def __init__(self, logits: torch.Tensor):
        self._logits = logits
        self._rows: torch.Tensor | None = None  # row by row, if need be
        self._fetched = 0
        rows = len(logits)
        self._by_token = logits.stride(0) == 1 and not logits.is_contiguous()
        if self._by_token:
            tokens = _padded(logits.t(), dim=0)
            self._blocks = tokens.unflatten(0, (-1, BLOCK))
            if tokens.is_contiguous():
                several = _tokens_abreast(rows)
                highest = tokens.view(-1, BLOCK // several, several * rows).amax(dim=1).view(-1, several, rows).amax(dim=1)
            else:  # some rows of more
                highest = self._blocks.amax(dim=1)
            peaks = highest.t().contiguous()
        else:
            self._blocks = _padded(logits.contiguous()).view(rows, -1, BLOCK)
            peaks = self._blocks.amax(dim=-1)
        self._peaks = peaks.numpy()  # float32 [rows, blocks of a row]
        every = np.arange(rows)
        block = self._peaks.argmax(axis=1)
        inside = self._inside(every, block)
        at = inside.argmax(axis=1)
        self.likeliest = block * BLOCK + at  # of equals the lowest id; int64 [rows]
        self._highest = inside[every, at].astype(np.float64)
        self.broken = (~np.isfinite(self._highest)).nonzero()[0]  # the highest of a row with what is no number is none
        self._longest_shortlist = min(LONGEST_SHORTLIST, self._peaks.shape[1] // 2)

    def _inside(self, rows: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """What is in blocks of rows: int64 [n] each → float32 [n, BLOCK]."""
        if not self._by_token:
            return self._blocks.numpy().reshape(-1, BLOCK).take(rows * self._peaks.shape[1] + blocks, axis=0)
        order = blocks.argsort(kind="stable")  # what different rows have in a block lies side by side
        inside = np.empty((len(rows), BLOCK), dtype=np.float32)
        inside[order] = self._blocks.numpy()[blocks[order], :, rows[order]]
        return inside

    def row(self, index: int) -> torch.Tensor:
        """float32 [vocab]. Some are fetched one by one, but many by turning the whole round."""
        if not self._by_token:
            return self._logits[index]
        self._fetched += 1
        if self._rows is None and self._fetched > FEW_ROWS:
            self._rows = self._logits.contiguous()
        return self._logits[index].contiguous() if self._rows is None else self._rows[index]

    @functools.cached_property
    def _normalizers(self) -> np.ndarray:
        """The logarithms of the sums of all weights at a temperature of 1, float64 [rows]."""
        # Not the blocks' sums: what is far apart in the vocabulary is added, because that is quicker row by row, too.
        if self._by_token:
            far_apart = [self._blocks.reshape(BLOCK, -1, len(self._logits))]
        else:
            far_apart = [row.view(BLOCK, -1, 1) for row in self._blocks]
        highest = np.split(self._highest, len(far_apart))
        ones = np.ones(len(highest[0]))
        sums = [_masses(scores.transpose(0, 1), of, ones) for scores, of in zip(far_apart, highest)]
        return np.log(np.concatenate(sums).sum(axis=1))

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of one token of each row, float64 [rows]."""
        ids = np.array(tokens)
        every = np.arange(len(ids))
        return self._inside(every, ids // BLOCK)[every, ids % BLOCK] - self._highest - self._normalizers

    def top(self, row: int, n: int) -> list[tuple[int, float]]:
        """The `n` likeliest (token id, log-probability) of a row, likeliest first."""
        n = min(n, self._logits.shape[-1])
        if n == 0:
            return []
        peaks = self._peaks[row]
        floor = np.partition(peaks, -n)[-n] if n <= len(peaks) else -np.inf
        blocks = (peaks >= floor).nonzero()[0]
        inside = self._inside(np.full(len(blocks), row), blocks)
        found = (inside >= floor).ravel().nonzero()[0]
        found = found[np.argsort(-inside.ravel()[found], kind="stable")][:n]  # of equals the lowest ids, as in argmax
        ids = blocks[found // BLOCK] * BLOCK + found % BLOCK
        logprobs = inside.ravel()[found] - self._highest[row] - self._normalizers[row]
        return list(zip(ids.tolist(), logprobs.tolist()))

    def choose(
        self, samplers: Sequence[Sampler], draws: Sequence[float], others: Collection[int] = ()
    ) -> list[int | Exception]:
        """The next token of each row, for scores that are changed already; of `others` the likeliest."""
        chosen: list[int | Exception] = self.likeliest.tolist()
        for row in self.broken.tolist():
            chosen[row] = SamplingError(NO_NUMBER)
        drawing = [
            row
            for row, sampler in enumerate(samplers)
            if not (sampler.is_greedy or row in others or isinstance(chosen[row], Exception))
        ]
        if not drawing:
            return chosen
        listed = [row for row in drawing if 0 < samplers[row].shortlist <= self._longest_shortlist]
        unfiltered = [row for row in drawing if samplers[row].is_unfiltered]
        masses: dict[int, np.ndarray] = {}
        if weighed := sorted(unfiltered + [row for row in listed if not samplers[row].sampling.top_k]):
            temperatures = np.array([samplers[row].sampling.temperature for row in weighed])
            masses = dict(zip(weighed, self._masses(weighed, temperatures)))
        tokens = {}
        for rows, draw in ((listed, self._draw_listed), (unfiltered, self._draw_unfiltered)):
            if rows:
                found = draw(rows, [samplers[row] for row in rows], np.array([draws[row] for row in rows]), masses)
                tokens |= dict(zip(rows, found))
        for row in drawing:
            chosen[row] = tokens.get(row, -1)
            if chosen[row] < 0:
                try:
                    chosen[row] = samplers[row].choose(_Row(self.row(row)), draws[row])
                except Exception as error:
                    chosen[row] = error
        return chosen

    def _masses(self, rows: list[int], temperatures: np.ndarray) -> np.ndarray:
        """The sum of the weights of each block of some rows, ascending, as `_masses` gives them."""
        highest = self._highest[rows]
        if self._by_token:
            blocks = self._blocks if len(rows) == len(self._peaks) else self._blocks.index_select(-1, torch.tensor(rows))
            return _masses(blocks, highest, temperatures)
        each = [self._blocks[row, :, :, None] for row in rows]
        return np.concatenate([_masses(blocks, *of) for blocks, *of in zip(each, highest[:, None], temperatures[:, None])])

    def _draw_unfiltered(
        self, rows: list[int], samplers: list[Sampler], draws: np.ndarray, masses: dict[int, np.ndarray]
    ) -> list[int]:
        """The tokens at the shares `draws` of all weights: their blocks, then themselves; -1 where float32 cannot tell."""
        each = np.arange(len(rows))
        temperature = np.array([sampler.sampling.temperature for sampler in samplers])
        mass = np.stack([masses[row] for row in rows])
        cumulative = mass.cumsum(axis=1)
        wanted = draws * cumulative[:, -1]
        block = np.minimum(np.count_nonzero(cumulative <= wanted[:, None], axis=1), mass.shape[1] - 1)
        before = np.where(block > 0, cumulative[each, block - 1], 0.0)
        share = np.minimum((wanted - before) / mass[each, block], 1.0 - 2.0**-53)
        inside = self._inside(np.array(rows), block).astype(np.float64)
        weights = np.exp((inside - self._highest[rows][:, None]) / temperature[:, None])
        place = _places(weights, share)
        proven = np.isfinite(wanted) & weights.any(axis=1)
        return np.where(proven, block * BLOCK + place, -1).tolist()

    def _draw_listed(
        self, rows: list[int], samplers: list[Sampler], draws: np.ndarray, masses: dict[int, np.ndarray]
    ) -> list[int]:
        """What `Sampler.choose` would give for `rows`, from the tokens that are as likely as the likeliest blocks' likeliest;
        -1 where these do not tell. `masses` are needed where there is no top-k. Arrays are [rows] or [rows, tokens], where the
        tokens of a row are in the order of their ids, and then noughts.
        """
        each = np.arange(len(rows))
        most = max(sampler.shortlist for sampler in samplers)
        top_k = np.array([sampler.sampling.top_k for sampler in samplers])
        top_p = np.array([sampler.sampling.top_p for sampler in samplers])
        temperature = np.array([sampler.sampling.temperature for sampler in samplers])
        highest = self._highest[rows]

        def weights_of(scores: np.ndarray) -> np.ndarray:
            return np.exp((scores - highest[:, None]) / temperature[:, None])

        # As many blocks' highest reach this, so as many tokens do, and they are all in these blocks.
        peaks = self._peaks[rows]
        floor = np.partition(peaks, -most, axis=1)[:, -most]
        reaching = peaks >= floor[:, None]
        proven = np.count_nonzero(reaching, axis=1) <= 2 * most  # else too many are equal
        block_row, block = (reaching & proven[:, None]).nonzero()
        inside = self._inside(np.array(rows)[block_row], block)
        found = (inside >= floor[block_row][:, None]).ravel().nonzero()[0]
        which, at = np.divmod(found, BLOCK)
        row = block_row[which]
        place = np.arange(len(row)) - row.searchsorted(each)[row]
        shape = len(rows), max(most, int(place.max(initial=0)) + 1)
        scores, ids = np.full(shape, -np.inf), np.zeros(shape, dtype=np.int64)
        scores[row, place] = inside.ravel()[found]
        ids[row, place] = block[which] * BLOCK + at

        # Top-k: the k-th highest, and what is as high.
        descending = np.sort(scores, axis=1)[:, ::-1]
        kth = np.where(top_k > 0, descending[each, np.maximum(top_k, 1) - 1], -np.inf)
        weights = np.where(scores >= kth[:, None], weights_of(scores), 0.0)
        descending = np.sort(weights, axis=1)[:, ::-1]

        # Top-p: the fewest largest whose share reaches it, and of those that weigh as much as the least of them the first.
        cumulative = descending.cumsum(axis=1)
        total = np.array([masses[row].sum() if row in masses else own for row, own in zip(rows, cumulative[:, -1])])
        error = np.where(top_k > 0, 0.0, FAST_ERROR)
        last = np.count_nonzero(cumulative < (top_p * total * (1.0 - error))[:, None], axis=1)
        proven &= last < shape[1]
        last = np.minimum(last, shape[1] - 1)
        least = descending[each, last]
        is_sure = (cumulative[each, last] >= top_p * total * (1.0 + error)) & (least > weights_of(floor[:, None])[:, 0])
        proven &= (top_k > 0) | is_sure
        kept, equal = weights > least[:, None], weights == least[:, None]
        kept |= equal & (equal.cumsum(axis=1) <= (last + 1 - np.count_nonzero(kept, axis=1))[:, None])
        kept = (kept | (top_p == 1.0)[:, None]) & (weights > 0.0)

        place = _places(np.where(kept, weights, 0.0), draws)
        return np.where(proven, ids[each, place], -1).tolist()


def _places(weights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """The index at the share `draws` of all weights of each row, never that of a weight of 0. weights: float64 [rows, n]."""
    cumulative = weights.cumsum(axis=1)
    place = np.count_nonzero(cumulative <= (draws * cumulative[:, -1])[:, None], axis=1)
    return np.minimum(place, weights.shape[1] - 1 - (weights > 0.0)[:, ::-1].argmax(axis=1))


def _masses(scores: torch.Tensor, highest: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """The sum of the weights of each block of each row, right to FAST_ERROR; not numbers where float32 does not tell.
    float32 [blocks, BLOCK, rows], float64 [rows], [rows] → float64 [rows, blocks].

    A sum adds one half of the block to the other, and so on: each time numbers of one row to numbers of the same row, so that
    its bits do not depend on how many rows there are.
    """
    blocks, _, rows = scores.shape
    highest = torch.from_numpy(highest).float()
    scales = torch.from_numpy(np.minimum(1.0 / temperatures, 1e38)).float()
    is_scaled = bool((temperatures != 1.0).any())  # by 1 nothing would change
    masses = torch.empty(blocks, rows)
    some = max(1, 262144 // (BLOCK * rows))  # as many as stay in the processor's cache
    weights = torch.empty(0)
    for begin in range(0, blocks, some):
        part = scores[begin : begin + some]
        if len(weights) != len(part):  # always one piece of memory: at the ends of several exp would round otherwise
            lies_in_blocks = scores.stride(0) >= scores.stride(1)
            shape = (len(part), BLOCK, rows) if lies_in_blocks else (BLOCK, len(part), rows)
            weights = torch.empty(shape) if lies_in_blocks else torch.empty(shape).transpose(0, 1)
        torch.sub(part, highest, out=weights)
        if is_scaled:
            weights.mul_(scales)
        weights.clamp_(min=LEAST_EXPONENT).exp_()
        half = BLOCK // 2
        while half > 1:
            weights[:, :half].add_(weights[:, half : 2 * half])
            half //= 2
        torch.add(weights[:, 0], weights[:, 1], out=masses[begin : begin + some])
    return masses.t().numpy().astype(np.float64)


def _padded(scores: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """With tokens that are impossible up to whole blocks."""
    missing = -scores.shape[dim] % BLOCK
    if not missing:
        return scores
    shape = list(scores.shape)
    shape[dim] = missing
    return torch.cat([scores, scores.new_full(shape, -torch.inf)], dim=dim)


def _tokens_abreast(rows: int) -> int:
    """How many neighbouring tokens of all rows are compared with as many others at once: a power of two, up to BLOCK / 2.
    Of few rows it takes several to fill the processor's vectors."""
    powers = [1 << power for power in range(BLOCK.bit_length() - 1)]
    filling = [several for several in powers if several * rows % 32 == 0 and several * rows <= 256]
    return min(filling, default=min((several for several in powers if several * rows >= 64), default=powers[-1]))


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


def device_parameters(sampling: Sampling) -> tuple[int, float, float]:
    """top_k, top_p and temperature for a device that samples; the likeliest token is the one that top_k 1 leaves."""
    if sampling.seed is None:
        return 1, 1.0, 1.0
    return sampling.top_k, sampling.top_p, sampling.temperature


def drawn(ids: torch.Tensor, vocab_size: int) -> list[int | Exception]:
    """What the device chose for each row: int64 [rows]. An id that is no token yields an exception in its place."""
    return [
        token if 0 <= token < vocab_size else SamplingError("the device chose a token that does not exist")
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
        told = list(itertools.islice(followers, len(chunk)))
        if not told:
            continue
        with _one_thread():
            blocks = Blocks(chunk[: len(told)])
            if len(blocks.broken):
                raise SamplingError(NO_NUMBER)
            logprobs += blocks.logprobs(told).tolist()
            top += [blocks.top(row, top_n) for row in range(len(told))]
    return last, logprobs, top
