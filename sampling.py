"""Logits to token ids: penalties, biases, temperature, top-k, top-p, typical-p, seeds and log-probabilities.

`choose` gives the next token of every row of a step, each row with its own `Sampler`: that request's parameters, its own
random stream and its own history. It is what a device waits for; `describe` gives the log-probabilities, for which it need
not. What a row yields depends on its own logits, parameters and seed alone, never on its neighbours. Log-probabilities are of
the model's own distribution, before any parameter changes it; `prompt_logprobs` gives those of a prompt. Where the device
chooses itself, `device_parameters` are what it is told, and `drawn` reads what it says.

As a rule the likeliest tokens of a row, which logits.py finds, prove what the whole vocabulary would have told. With a
temperature alone they bound what any other weighs, so that tokens can be drawn by rejection; from a nucleus that is larger than
they are, too, where the sum of what is likelier tells whether a token is in it. All this is done in float64, but for sums over
whole vocabularies: float32, with a known error. Rows for which that proves nothing, and parameters that need more, are computed
in full, one after the other.

This layer knows neither slots nor sockets.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch
from numba import types
from numba.extending import overload

from logits import NO_TEMPERATURES, Helper, Logits, compiled, nth_highest, ranked
from protocol import Sampling

SHORTLIST = 64  # as a rule, top-p takes fewer tokens, and few others are drawn without it
LONGEST_SHORTLIST = 256  # with more, rows are gone through one by one
MOST_ROUNDS = 6  # of two proposals each
UNLISTED, TOO_FEW = -(2**61), -(2**62)  # in the place of a token
NO_STREAMS, NO_IDS, NO_BIAS = np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.float64)
NO_NUMBER = "the model's output is not a number"
# By what share a sum of weights may be wrong; in float32: exponents are rounded, then 2 to them, then the sum of a few.
FAST_ERROR, FULL_ERROR = 2e-5, 1e-10
# Of SplitMix64 (Steele, Lea and Flood 2014).
STEP, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def without_warnings(function: Callable) -> Callable:
    """Without those that an impossible token's score, -inf, would cause. Several threads may be in it at a time, which
    numpy 1's errstate as a decorator does not allow."""

    @functools.wraps(function)
    def quietly(*arguments, **named):
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return function(*arguments, **named)

    return quietly


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
        self.shortlist = 0 if self.is_greedy or sampling.typical_p < 1.0 else sampling.top_k or SHORTLIST
        self.is_unfiltered = sampling.top_k == 0 and sampling.top_p == sampling.typical_p == 1.0
        self.stream = np.array([sampling.seed or 0], dtype=np.uint64)  # its state: SplitMix64's, which `_draw` moves on
        self._seen = np.unique(prompt) if sampling.repetition_penalty != 1.0 else None
        self._counts_tokens = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._counts: dict[int, int] = {}
        self._bias_ids, self._bias, self._banned = NO_IDS, NO_BIAS, NO_IDS
        if sampling.logit_bias:
            self._bias_ids = np.array([token for token, _bias in sampling.logit_bias], dtype=np.int64)
            self._bias = np.array([bias for _token, bias in sampling.logit_bias], dtype=np.float64)
        self._banned_for = banned_for if banned else 0
        if self._banned_for:
            self._banned = np.array(list(banned), dtype=np.int64)
        self.remembers = self._seen is not None or self._counts_tokens or self._banned_for > 0  # what was chosen
        self.may_change = self.remembers or len(self._bias_ids) > 0

    @property
    def changes_scores(self) -> bool:
        """Whether penalties, biases or bans are in force."""
        return self.may_change and (
            self._seen is not None or bool(self._counts) or len(self._bias_ids) > 0 or self._banned_for > 0
        )

    @without_warnings
    def choose(self, scores: np.ndarray, total: float, draw: float, proposed: int = -1) -> int:
        """The next token id, from the whole row: float32 [vocab], changed already. total: the sum of all weights, right to
        FAST_ERROR, needed for top-p without top-k. A token's weight is exp((its score - the highest) / temperature). proposed:
        a token that it is if it can be drawn at all."""
        sampling = self.sampling

        def weights_of(ids: np.ndarray) -> np.ndarray:
            return np.exp((scores[ids].astype(np.float64) - float(scores.max())) / sampling.temperature)

        ids = np.arange(len(scores))
        if sampling.top_k:  # and what is as likely as the last of them
            ids = ranked(scores, nth_highest(scores.copy(), min(sampling.top_k, len(scores))))
        elif sampling.top_p < 1.0:
            # All together that do not reach this have a share of less than 1 - top_p.
            floor = np.log(0.9 * (1.0 - sampling.top_p) * total / len(scores))
            ids = ranked(scores, float(scores.max()) + sampling.temperature * floor)
        weights = weights_of(ids)
        if sampling.top_p < 1.0:
            if sampling.top_k:
                fewest, most = _top_p(weights, sampling.top_p, _sum(weights), 0.0)
            else:
                fewest, most = _top_p(weights, sampling.top_p, weights_of(np.arange(len(scores))).sum(), FULL_ERROR)
            if fewest != most or most == 0:
                weights = weights_of(ids := ranked(scores, -np.inf))
                _fewest, most = _top_p(weights, sampling.top_p, _sum(weights), 0.0)
            ids, weights = ids[:most], weights[:most]
        if sampling.typical_p < 1.0:
            kept = _typical_p(weights, sampling.typical_p)
            ids, weights = ids[kept], weights[kept]
        return proposed if proposed in ids else int(ids[_place(weights, draw)])

    def record(self, token: int) -> None:
        """Tells which token was taken, for the penalties of the next one."""
        self._banned_for -= 1
        if self._counts_tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def touched(self, vocab_size: int) -> np.ndarray:
        """The ids whose scores `change` changes; some may come twice."""
        seen = self._bias_ids if self._seen is None else np.concatenate((self._bias_ids, self._seen))
        counted = np.fromiter(self._counts, dtype=np.int64)
        banned = self._banned[self._banned < vocab_size] if self._banned_for > 0 else counted[:0]
        return np.concatenate((seen, counted, banned))

    @without_warnings
    def change(self, scores: np.ndarray) -> None:
        """Puts penalties, biases and bans into the model's own scores, float32 [vocab], rounded to float32 as in transformers.
        The order is transformers' and TGI's: this, temperature, top-k, top-p, typical-p."""
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


def _typical_p(probabilities: np.ndarray, typical_p: float) -> np.ndarray:
    """Locally typical sampling (Meister et al. 2022): those whose surprise is nearest to the expected one, up to a share."""
    shares = probabilities / probabilities.sum()
    surprise = -np.log(shares)
    entropy = np.sum(shares * surprise, where=shares > 0)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    cumulative = np.cumsum(probabilities[order])
    return np.sort(order[: np.searchsorted(cumulative, typical_p * cumulative[-1]) + 1])


class Plan:
    """Samplers, one for each row of a batch, and what their parameters ask for: lists of rows, and arrays, [rows] or [drawing]:
    for those that are not greedy. Good for as many steps as the batch stays the same. A sampler's random stream goes on in the
    plan that was made last with it, so earlier ones must not be used any more."""

    def __init__(self, samplers: Sequence[Sampler]):
        self.samplers = samplers
        self.changeable = [row for row, sampler in enumerate(samplers) if sampler.may_change]
        self.remembering = [row for row, sampler in enumerate(samplers) if sampler.remembers]
        shortlists = [sampler.shortlist if sampler.shortlist <= LONGEST_SHORTLIST else 0 for sampler in samplers]
        self.wanted = np.array([max(1, n, sampler.top_n_tokens) for n, sampler in zip(shortlists, samplers)])
        self.drawing = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
        own = [samplers[row].sampling for row in self.drawing]
        self.has_unfiltered = any(samplers[row].is_unfiltered for row in self.drawing)
        self.weighs = any(each.top_k == 0 and each.top_p < 1.0 for each in own)
        # float64 [7, drawing]: for `_draw`, which gets one array sooner than seven, and puts what it draws into the last line.
        self.asked = np.array(
            [
                (row, shortlists[row] > 0, samplers[row].is_unfiltered, each.top_k, each.top_p, each.temperature, 0.0)
                for row, each in zip(self.drawing, own)
            ],
            dtype=np.float64,
        ).T.copy()
        # The states of their random streams, which are one with the samplers' own from now on.
        self.streams = np.array([samplers[row].stream[0] for row in self.drawing], dtype=np.uint64)
        for place, row in enumerate(self.drawing):
            samplers[row].stream = self.streams[place : place + 1]
        self.weighed_at = NO_TEMPERATURES
        if self.weighs:  # at which temperature the sum of all its weights is needed
            self.weighed_at = np.full(len(samplers), np.inf)
            for row, each in zip(self.drawing, own):
                if each.top_k == 0 and each.top_p < 1.0:
                    self.weighed_at[row] = each.temperature


def choose(
    logits: torch.Tensor, plan: Plan, helper: Helper | None = None
) -> tuple[list[int | Exception], Logits | torch.Tensor]:
    """The next token of each row, and what `describe` needs. logits: float32 or bfloat16 [rows, vocab], on the CPU. Meanwhile
    they may have penalties in them; afterwards they are as they were.

    A row that fails yields its exception in its place; the others do not notice.
    """
    if not plan.changeable:
        return _choose(logits, plan, {}, helper)
    failed: dict[int, Exception] = {}
    if changing := [row for row in plan.changeable if plan.samplers[row].changes_scores]:
        chosen = _choose_changed(logits, plan, changing, failed, helper)
        looked_at = logits
    else:
        chosen, looked_at = _choose(logits, plan, failed, helper)
    for row in plan.remembering:
        if not isinstance(chosen[row], Exception):
            try:
                plan.samplers[row].record(chosen[row])
            except Exception as error:
                chosen[row] = error
    return chosen, looked_at


@without_warnings
def describe(
    logits: Logits | torch.Tensor, tokens: Sequence[int], top_n: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]]] | Exception]:
    """The log-probability of the token that was chosen for each row, and the `top_n` likeliest (token id, log-probability).
    logits: what `choose` gave. A row that fails yields its exception."""
    if isinstance(logits, torch.Tensor):
        logits = Logits(logits, [max(1, n) for n in top_n])
    described: list[tuple[float, list[tuple[int, float]]] | Exception] = []
    for row, (logprob, n) in enumerate(zip(logits.logprobs(tokens).tolist(), top_n)):
        try:
            described.append((logprob, logits.top(row, n)))
        except Exception as error:
            described.append(error)
    for row in logits.broken:
        described[row] = SamplingError(NO_NUMBER)
    return described


def _choose_changed(
    logits: torch.Tensor,
    plan: Plan,
    changing: list[int],
    failed: dict[int, Exception],
    helper: Helper | None,
) -> list[int | Exception]:
    """`_choose` for logits in which the scores of some rows are changed meanwhile."""
    if logits.dtype != torch.float32:  # which has room for what is put in
        logits = logits.float()
    if logits.stride(0) == 0:  # rows that are one in memory could not be changed each by itself
        logits = logits.contiguous()
    scores = logits.detach().numpy()
    before: list[tuple[int, np.ndarray, np.ndarray]] = []
    try:
        for row in changing:
            try:
                touched = plan.samplers[row].touched(scores.shape[1])
                before.append((row, touched, scores[row, touched]))
                plan.samplers[row].change(scores[row])
            except Exception as error:
                failed[row] = error
        chosen, looked_at = _choose(logits, plan, failed, helper)
    finally:
        for row, touched, values in before:
            scores[row, touched] = values
    for row in looked_at.broken:
        if row in changing and row not in failed and np.isfinite(scores[row].max()):
            chosen[row] = SamplingError("no token is possible but those that may not come yet (min_new_tokens)")
    return chosen


def _choose(
    scores: torch.Tensor,
    plan: Plan,
    failed: dict[int, Exception],
    helper: Helper | None,
) -> tuple[list[int | Exception], Logits]:
    """The next token of each row, for scores that are changed already; for those that have failed, why."""
    logits = Logits(scores, plan.wanted, helper, plan.weighed_at)
    tokens, undecided, in_full = logits.likeliest, 0, set()  # others are drawn into their places
    if plan.drawing:
        totals = logits.weighed
        lanes = logits.lanes if plan.has_unfiltered else logits.no_lanes
        shape = logits.rows_abreast, logits.vocab_size
        undecided = _draw(tokens, plan.asked, plan.streams, totals, lanes, *shape, *logits.found)
        if undecided:
            if unlisted := [place for place, row in enumerate(plan.drawing) if tokens[row] == UNLISTED]:
                in_full = {plan.drawing[place] for place in unlisted}
                for row in in_full:
                    logits.list_anew(row, SHORTLIST)
                again = np.ascontiguousarray(plan.asked[:, unlisted])
                _draw(tokens, again, NO_STREAMS, totals, lanes, *shape, *logits.found)
            if plan.weighs:
                _draw_from_large_nuclei(tokens, plan, totals, logits)
    chosen: list[int | Exception] = tokens.tolist()
    broken = logits.broken
    if undecided:
        for row, draw in zip(plan.drawing, plan.asked[-1].tolist()):
            if chosen[row] < 0 and row not in broken and row not in failed:
                in_full.add(row)
                try:
                    chosen[row] = plan.samplers[row].choose(logits.row(row), totals[row], draw, -2 - chosen[row])
                except Exception as error:
                    chosen[row] = error
    for row in in_full:
        plan.samplers[row].in_full += 1
    for row in broken:
        chosen[row] = SamplingError(NO_NUMBER)
    for row, error in failed.items():
        chosen[row] = error
    return chosen, logits


@compiled
def _draw(tokens, asked, streams, totals, lanes, abreast, vocab_size, *found):
    """Draws for some rows, and puts their tokens into `tokens`, int64 [rows], where the likeliest tokens and float32 can tell;
    else -1, or TOO_FEW where all the likeliest tokens are in the nucleus, or UNLISTED where only a list of them is missing for
    it. Returns for how many they cannot. asked, streams: of these rows, as in `Plan`; without streams the draws stay as they
    are. Of every row: the others, as in `Logits`."""
    scores, ids, counts, highest, _likeliest = found
    undecided = 0
    for i in range(asked.shape[1]):
        if len(streams) > 0:
            streams[i], asked[-1, i] = _uniform(streams[i])  # one number for each token, so the n-th is the n-th token's
        row, is_listed, is_unfiltered, top_k, top_p, temperature, draw = asked[:, i]
        row = int(row)
        tokens[row] = -1
        if is_listed and counts[row] > 0 and math.isfinite(highest[row]):
            listed = scores[row, : counts[row]], ids[row, : counts[row]]
            if is_unfiltered:
                few = listed[0][:SHORTLIST], listed[1][:SHORTLIST]
                everyones = lanes, row, abreast, vocab_size
                tokens[row] = _draw_unfiltered(*few, *everyones, highest[row], temperature, draw)
            else:
                tokens[row] = _draw_listed(*listed, highest[row], totals[row], int(top_k), top_p, temperature, draw)
        elif is_listed and top_k == 0 and counts[row] < 0 and math.isfinite(highest[row]):
            tokens[row] = UNLISTED
        undecided += tokens[row] < 0
    return undecided


def _draw_from_large_nuclei(tokens: np.ndarray, plan: Plan, totals: np.ndarray, logits: Logits) -> None:
    """Puts tokens in the places of TOO_FEW, by rejection: tokens are drawn from all, two at a time, and the first one that is
    in the nucleus is taken. That is one for which what is likelier weighs less than top_p of all. Where float32 cannot tell,
    -2 - that token is put there, and -1 where none of many was in it."""
    floors, proposals = np.empty((2, len(tokens)), np.float32), np.empty((2, len(tokens)), np.int64)
    for _ in range(MOST_ROUNDS):
        shape = logits.rows_abreast, logits.vocab_size
        if not _propose(tokens, proposals, floors, plan.asked, logits.lanes, *shape, *logits.found):
            return
        _accept(tokens, proposals, floors, *logits.masses(plan.weighed_at, floors), plan.asked, totals)
    tokens[tokens == TOO_FEW] = -1


@compiled
def _propose(tokens, proposals, floors, asked, lanes, abreast, vocab_size, *found):
    """Draws two tokens for each row that has TOO_FEW, and sets its floors to their scores, those of others to inf. Returns how
    many such rows there are. A draw becomes the next of the stream that it begins."""
    scores, ids, counts, highest, _likeliest = found
    floors[:] = np.inf
    waiting = 0
    for i in range(asked.shape[1]):
        row, temperature, draw = int(asked[0, i]), asked[5, i], asked[6, i]
        if tokens[row] == TOO_FEW:
            few = scores[row, : min(SHORTLIST, counts[row])], ids[row, : min(SHORTLIST, counts[row])]
            state = np.uint64(draw * 2.0**53)
            for n in range(2):
                state, share = _uniform(state)
                token = _draw_unfiltered(*few, lanes, row, abreast, vocab_size, highest[row], temperature, share)
                proposals[n, row] = token
                floors[n, row] = _score(lanes, row, abreast, token)
            state, asked[6, i] = _uniform(state)
            waiting += 1
    return waiting


@compiled
def _accept(tokens, proposals, floors, above, reaching, asked, totals):
    """Takes the first proposal of each row that is in its nucleus. above, reaching: as from `Logits.masses`."""
    for i in range(asked.shape[1]):
        row, limit = int(asked[0, i]), asked[4, i] * totals[int(asked[0, i])]
        if floors[0, row] == np.inf:
            continue
        for n in range(2):
            if reaching[n, row] < limit * (1.0 - 2.0 * FAST_ERROR):
                tokens[row] = proposals[n, row]
                break
            if above[n, row] < limit * (1.0 + 2.0 * FAST_ERROR):
                tokens[row] = -2 - proposals[n, row]
                break


@compiled
def _draw_listed(scores, ids, highest, total, top_k, top_p, temperature, draw):
    """What `Sampler.choose` would give, from the likeliest tokens in their order: scores and ids, float32 and int64 [n]."""
    count, error = min(SHORTLIST, len(scores)), FAST_ERROR  # not what happened to be found besides
    if top_k > 0:
        count, error = min(top_k, len(scores)), 0.0
        while count < len(scores) and scores[count] == scores[count - 1]:
            count += 1
    weights = np.empty(count, np.float64)
    for i in range(count):
        weights[i] = math.exp((scores[i] - highest) / temperature)
    if top_p < 1.0:
        if top_k == 0 and _sum(weights) < top_p * total * (1.0 - 2.0 * error):
            return TOO_FEW
        fewest, most = _top_p(weights, top_p, _sum(weights) if top_k > 0 else total, error)
        if most == 0:
            return -1
        if fewest < most and _place(weights[:fewest], draw) != _place(weights[:most], draw):
            return -1  # seldom: one token more or less in the nucleus moves few draws onto another one
        weights = weights[:most]
    return ids[_place(weights, draw)]


@compiled
def _top_p(weights, top_p, total, error):
    """Nucleus sampling (Holtzman et al. 2019): how many of the likeliest it takes until their share of `total` reaches `top_p`,
    at least and at most, as the total may be wrong by the share `error`; 0 where all of them may be too few. weights: float64
    [n], of the likeliest tokens."""
    fewest, cumulative = 0, 0.0
    for i in range(len(weights)):
        cumulative += weights[i]
        if fewest == 0 and cumulative >= top_p * total * (1.0 - error):
            fewest = i + 1
        if cumulative >= top_p * total * (1.0 + error):
            return fewest, i + 1
    return fewest, 0


@compiled
def _draw_unfiltered(scores, ids, lanes, row, abreast, vocab_size, highest, temperature, draw):
    """A token as often as its weight asks, without all weights, by rejection (von Neumann 1951).

    What the likeliest weigh more than the last of them is shared out among them; to that much every token has a claim, and is
    taken as often as its weight comes up to it. The rest is drawn anew: with k likeliest tokens at most vocab / k times, on
    average. scores, ids: float32, int64 [n], of the SHORTLIST likeliest in their order, or of all that are possible; lanes,
    with `abreast` rows a plane: everyone's, as in `Logits`.
    """
    weights = np.empty(len(scores), np.float64)
    for i in range(len(scores)):
        weights[i] = math.exp((scores[i] - highest) / temperature)
    claim = weights[-1] if len(scores) == SHORTLIST else 0.0
    for i in range(len(weights)):
        weights[i] -= claim
    excess = _sum(weights)
    state = np.uint64(draw * 2.0**53)
    while True:
        state, share = _uniform(state)
        if share * (excess + claim * vocab_size) < excess:
            state, share = _uniform(state)
            return ids[_place(weights, share)]
        state, share = _uniform(state)
        token = int(share * vocab_size)
        state, share = _uniform(state)
        if share * claim < math.exp((_score(lanes, row, abreast, token) - highest) / temperature):
            return token


def _wide(number):
    """The float32 of a number of `lanes`: of a float32 or, as its bits, of a bfloat16."""


@overload(_wide)
def _wide_for(number):
    if number == types.float32:
        return lambda number: number
    return lambda number: np.int32(np.int32(number) << np.int32(16)).view(np.float32)


@compiled
def _score(lanes, row, abreast, token):
    """Of a token of a row. lanes, with `abreast` rows a plane: as in `Logits`."""
    across = lanes.shape[2] // abreast
    return _wide(lanes[row // abreast, token // across, token % across * abreast + row % abreast])


@compiled
def _uniform(state):
    """The next state of SplitMix64, and its number, 0 <= number < 1."""
    state += STEP
    bits = (state ^ (state >> np.uint64(30))) * FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * SECOND
    return state, ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def _sum(weights):
    """In float64, one after the other."""
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    return total


@compiled
def _place(weights, draw):
    """The index at the share `draw` of all weights [n], never that of a weight of 0."""
    wanted = draw * _sum(weights)
    place, cumulative = 0, 0.0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            place = i
            cumulative += weights[i]
            if cumulative > wanted:
                break
    return place


def are_kept() -> bool:
    """Whether an earlier start has had the loops compiled. True also where there is nowhere to keep them."""
    _uniform.compile((types.uint64,))
    return _uniform.stats.cache_path is None or bool(_uniform.stats.cache_hits)


def compile_loops(dtypes: Sequence[torch.dtype], with_helper: bool = False) -> None:
    """Makes the machine code that the first choices from logits of these types would wait for. It takes seconds, unless it was
    kept from another time."""
    if with_helper:
        Helper().end()
    long = {"top_k": LONGEST_SHORTLIST + 1, "top_p": 0.5}
    filters = {}, {"top_k": 2, "top_p": 0.5}, {"top_k": 2, "typical_p": 0.5}, {"top_p": 0.9}, long
    plan = Plan([Sampler(Sampling(seed=0, **each), [0]) for each in filters])
    rows = torch.linspace(0, 1, 3 * SHORTLIST), torch.zeros(3 * SHORTLIST)
    for row, dtype in itertools.product(rows, dtypes):
        chosen, looked_at = choose(row.repeat(len(filters), 1).to(dtype), plan)
        describe(looked_at, chosen, range(len(filters)))


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


@without_warnings
def prompt_logprobs(
    chunks: Iterable[torch.Tensor], prompt: list[int], top_n: int
) -> tuple[torch.Tensor, list[float], list[list[tuple[int, float]]]]:
    """What the model thought of a prompt. chunks: the logits after each of its tokens in order, float32 [n, vocab] each.

    Returns the logits after the last token, float32 [1, vocab]; the log-probability of each token from the second on; and as
    many lists of the `top_n` likeliest (token id, log-probability) at each of these places. Chunks are not kept. Raises
    SamplingError for logits that are no numbers.
    """
    last = torch.empty(0)
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    followers = iter(prompt[1:])  # the logits after a token are about the next one
    for chunk in chunks:
        last = chunk[-1:].clone()  # a view would hold the chunk
        told = list(itertools.islice(followers, len(chunk)))
        if not told:
            continue
        logits = Logits(chunk[: len(told)], [max(1, top_n)] * len(told))
        if logits.broken:
            raise SamplingError(NO_NUMBER)
        logprobs += logits.logprobs(told).tolist()
        top += [logits.top(row, top_n) for row in range(len(told))]
    return last, logprobs, top
