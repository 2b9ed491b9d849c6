"""Logits to token ids and log-probabilities.

Owns each request's random stream and token counts, and the loops over the logits. Knows neither slots nor sockets.

The order is transformers': penalties, logit biases, bans and the token mask; temperature; top-k (with ties of the k-th), top-p,
min-p, typical-p. A row's result depends on its own logits, parameters and seed alone, to the bit: sums have one fixed order.

The logits are read once for the maxima of lanes of tokens. The k-th highest of these is at most the k-th highest logit, so only
lanes that reach it are searched for the top k. `sample_whole_row` is the readable reference, for what the loops do not cover.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

LANES, STEPS, GROUP = 32, 16, 32 * 16  # a lane: each LANES-th token of a group, STEPS tokens
LISTED, MAX_LISTED = (
    64,
    256,
)  # top tokens listed first for top-p and min-p without top-k; largest top-k that is listed
WHOLE_ROW, FAILED = -1, -2  # in the place of a token
NOT_A_NUMBER = "the model's output is not a number"
IMPOSSIBLE = "no token is possible: the model, min_new_tokens or the token mask excludes all"
NO_MASK = np.empty((0, 0), np.uint32)
INTEGERS = {
    4: (np.int32(0x7FFFFFFF), np.int32(0x7FFFFF)),
    2: (np.int16(0x7FFF), np.int16(0x7F)),
}  # see Source
INT32_MAX, FINITE_BITS = np.int32(0x7FFFFFFF), 0x7F7FFFFF  # FINITE_BITS: of the highest finite float32
TopTokens = list[tuple[int, float]]  # (token id, log-probability)
RowLogprobs = tuple[float, TopTokens] | Exception
LOG2_E = math.log2(math.e)
# 2 ** x for |x| <= 1/2, relative error below 3e-6 (Remez algorithm). Adding ROUND rounds a float32 to a whole number.
POWER_1, POWER_2, POWER_3, POWER_4 = (
    np.float32(factor) for factor in (0.6931242, 0.24024099, 0.05590637, 0.00958282)
)
ONE, ZERO, MIN_EXPONENT, ROUND = np.float32(1.0), np.float32(0.0), np.float32(-100.0), np.float32(1.5 * 2**23)
# SplitMix64 (Steele, Lea and Flood 2014).
GAMMA, MIX_1, MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


class SamplingError(Exception):
    """No token can be sampled from a row; the message may be read by the client."""


class RowSampler:
    """The parameters, random stream and token counts of one request.

    parameters: an object with the attributes of `protocol.Sampling`; seed None is greedy. `prompt` counts for the repetition
    penalty, as in transformers, not for OpenAI's frequency and presence penalties. The ids in `banned` may be outside of the
    vocabulary; they are not sampled for the first `banned_for` tokens.
    """

    def __init__(
        self, parameters: Any, prompt: Sequence[int], banned: Collection[int] = (), banned_for: int = 0
    ):
        self.parameters = parameters
        self.stream = np.array([parameters.seed or 0], np.uint64)  # state of SplitMix64: one number a token
        self._seen = np.unique(prompt) if parameters.repetition_penalty != 1.0 else None
        self._counts_tokens = parameters.frequency_penalty != 0.0 or parameters.presence_penalty != 0.0
        self._counts: dict[int, int] = {}
        self._banned = np.array(list(banned), np.int64)
        self._banned_for = banned_for if banned else 0

    @property
    def changes_logits(self) -> bool:
        return bool(
            self._seen is not None or self._counts or self.parameters.logit_bias or self._banned_for > 0
        )

    def lift_ban(self) -> None:
        """Lets the banned tokens be sampled from now on."""
        self._banned_for = 0

    def record(self, token: int) -> None:
        """Counts a sampled token for the penalties and bans of the next one."""
        self._banned_for -= 1
        if self._counts_tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def change(self, scores: np.ndarray) -> None:
        """Applies penalties, biases and bans in place to float32 [vocab], rounded to float32 as in transformers."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self._seen is not None:
                seen, penalty = scores[self._seen].astype(np.float64), self.parameters.repetition_penalty
                penalized = np.clip(np.where(seen > 0, seen / penalty, seen * penalty), -1e30, 1e30)
                scores[self._seen] = np.where(np.isfinite(seen), penalized, seen)
            if self._counts:
                counts, p = np.fromiter(self._counts.values(), np.float64), self.parameters
                scores[np.fromiter(self._counts, np.int64)] -= (
                    p.frequency_penalty * counts + p.presence_penalty
                )
            for token, bias in self.parameters.logit_bias:
                scores[token] += bias
            if self._banned_for > 0:
                banned = self._banned[self._banned < len(scores)]
                scores[banned] = np.where(
                    scores[banned] < np.inf, -np.inf, scores[banned]
                )  # NaN stays visible


class Parameters(NamedTuple):
    """The sampling parameters of a batch, [rows] each."""

    greedy: np.ndarray  # bool: top_k is 1
    temperature: np.ndarray  # float64
    scale: np.ndarray  # float32: log2(e) / temperature
    top_k: np.ndarray  # int64; 0: off
    top_p: np.ndarray  # float64
    min_p: np.ndarray  # float64
    whole_row: np.ndarray  # bool: needs `sample_whole_row`
    weighted: np.ndarray  # bool: needs the sum of all weights
    streams: np.ndarray  # uint64
    draws: np.ndarray  # float64: the random number of the current token


class SamplingBatch:
    """A step's rows. Reuse it while they stay the same. It takes over their random streams: discard earlier batches of them."""

    def __init__(self, rows: Sequence[RowSampler]):
        def array(name: str, dtype: type = np.float64) -> np.ndarray:
            return np.array([getattr(row.parameters, name) for row in rows], dtype)

        greedy, temperature = (
            np.array([row.parameters.seed is None for row in rows], bool),
            array("temperature"),
        )
        top_k, top_p, min_p = np.where(greedy, 1, array("top_k", np.int64)), array("top_p"), array("min_p")
        whole_row = ~greedy & ((array("typical_p") < 1.0) | (top_k > MAX_LISTED))
        weighted = ~whole_row & (top_k == 0) & ((top_p < 1.0) | (min_p == 0.0))
        streams, draws = np.array([row.stream[0] for row in rows], np.uint64), np.zeros(len(rows))
        for index, row in enumerate(rows):
            row.stream = streams[index : index + 1]
        self.rows, self.maxima = (
            rows,
            None,
        )  # maxima: of the last logits, where read; spare `logprobs` a pass over them
        scale = (LOG2_E / np.maximum(temperature, 1e-37)).astype(np.float32)
        self.parameters = Parameters(
            greedy, temperature, scale, top_k, top_p, min_p, whole_row, weighted, streams, draws
        )


class Source(NamedTuple):
    """Logits as the loops read them."""

    flat: np.ndarray  # int32 or int16, in memory order: the bits of float32 or bfloat16
    highest: np.signedinteger  # integer of their size
    nan_offset: np.signedinteger  # wraps the bits of negative NaNs around to the highest integers
    rows: int
    adjacent: int  # rows adjacent in memory for each token: all in column-major order, else 1
    vocab: int
    groups: int  # of GROUP tokens
    mask: np.ndarray  # uint32: the words of the mask in the memory order of the logits; empty: none
    words: int  # of a row's mask


def _source(logits: np.ndarray, mask: np.ndarray = NO_MASK) -> Source:
    assert logits.dtype in (np.float32, np.uint16), "logits are float32, or bfloat16 as uint16"
    logits = (
        logits if logits.flags.writeable else logits.copy()
    )  # read-only arrays are another type for the compiler
    rows, vocab = logits.shape
    by_token = rows > 1 and logits.strides[0] < logits.strides[1]
    highest, nan_offset = INTEGERS[logits.dtype.itemsize]
    flat = (logits.T if by_token else logits).reshape(-1).view(highest.dtype)
    words = (mask.T if by_token else mask).reshape(-1)
    return Source(
        flat,
        highest,
        nan_offset,
        rows,
        rows if by_token else 1,
        vocab,
        -(-vocab // GROUP),
        words,
        mask.shape[1],
    )


def sample(logits: np.ndarray, batch: SamplingBatch, mask: np.ndarray = NO_MASK) -> list[int | Exception]:
    """The next token of each row; a row that fails yields its exception in its place.

    logits: float32 [rows, vocab], or uint16, the bit patterns of bfloat16; row-major or column-major; not changed.
    mask: uint32 [rows, ceil(vocab / 32)], a set bit allows the token; applied before temperature and filters.
    """
    given, parameters, chosen, batch.maxima = (
        _source(logits, mask),
        batch.parameters,
        [None] * len(batch.rows),
        None,
    )
    changed = {index for index, row in enumerate(batch.rows) if row.changes_logits}
    kept = np.array([-1 if row in changed else row for row in range(given.rows)])
    parts = (
        [(given, kept)] if len(changed) < given.rows else []
    )  # with each row's index in the batch; -1: leave it out
    if changed:
        indices = np.array(sorted(changed))
        scores = _copied(given, indices)
        for place, row in enumerate(indices):
            try:
                batch.rows[row].change(scores[place])
            except Exception as error:
                chosen[row], indices[place] = error, -1
        parts.append((_source(scores), indices))
    for source, indices in parts:
        maxima = _maxima(source)
        batch.maxima = maxima if source is given and mask is NO_MASK else batch.maxima
        peaks = maxima.max(axis=1)
        tokens = _choose(source, maxima, peaks, indices, parameters)
        for place, (row, token) in enumerate(zip(indices.tolist(), tokens.tolist())):
            if row < 0:
                continue
            chosen[row] = token
            if token == FAILED:
                chosen[row] = SamplingError(IMPOSSIBLE if peaks[place] == -np.inf else NOT_A_NUMBER)
            elif token == WHOLE_ROW:
                (scores,) = _copied(source, np.array([place]))
                chosen[row] = sample_whole_row(scores, batch.rows[row].parameters, parameters.draws[row])
    for row, token in zip(batch.rows, chosen):
        if not isinstance(token, Exception):
            row.record(token)
    return chosen


def sample_whole_row(scores: np.ndarray, parameters: Any, draw: float) -> int:
    """The reference: the token at the share `draw` of the kept weights, most likely first, ties by id. scores: [vocab]."""
    ordered = -np.sort(-scores[scores > -np.inf])
    weights = filtered_weights(ordered, parameters)
    place = np.searchsorted(np.cumsum(weights), draw * weights.sum(), side="right").clip(
        max=np.flatnonzero(weights)[-1]
    )
    equal = np.flatnonzero(scores == ordered[place])
    return int(equal[place - np.searchsorted(-ordered, -ordered[place])])


def filtered_weights(ordered: np.ndarray, parameters: Any) -> np.ndarray:
    """exp((score - highest) / temperature), 0 for tokens that the filters remove. ordered: possible scores, highest first."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        weights = np.exp((ordered.astype(np.float64) - float(ordered[0])) / parameters.temperature)
        if parameters.top_k:
            weights[ordered < ordered[min(parameters.top_k, len(ordered)) - 1]] = 0.0
        if parameters.top_p < 1.0:
            weights[np.cumsum(weights) - weights >= parameters.top_p * weights.sum()] = 0.0
        weights[weights < parameters.min_p] = 0.0
        if parameters.typical_p < 1.0:  # locally typical sampling (Meister et al. 2022)
            shares = weights / weights.sum()
            surprise = -np.log(shares)
            order = np.argsort(np.abs(surprise - np.sum(shares * surprise, where=shares > 0)), kind="stable")
            weights[order[np.cumsum(shares[order]) - shares[order] >= parameters.typical_p]] = 0.0
    return weights


def logprobs(
    logits: np.ndarray, tokens: Sequence[int], top_n: Sequence[int], maxima=None
) -> list[RowLogprobs]:
    """The log-probability of each row's token, and the `top_n` most likely ones, ties by id, without impossible ones.
    logits: as for `sample`; maxima: what `sample` left in its batch for them. A row without a highest logit fails."""
    source = _source(logits)
    maxima = _maxima(source) if maxima is None else maxima
    peaks = maxima.max(axis=1)
    totals = _sums(source, peaks, np.full(source.rows, LOG2_E, np.float32)).sum(axis=1)
    normalizers = peaks + np.log(totals, where=np.isfinite(peaks), out=totals)
    own = logits[range(source.rows), tokens]
    own = own if own.dtype == np.float32 else (own.astype(np.uint32) << 16).view(np.float32)
    ids, scores = np.empty(source.vocab, np.int64), np.empty(source.vocab, np.float32)
    found: list[RowLogprobs] = [SamplingError(NOT_A_NUMBER)] * source.rows
    for row in np.isfinite(peaks).nonzero()[0].tolist():
        n = top_n[row] and min(
            top_n[row], _list(source, row, maxima[row], peaks[row], top_n[row], ids, scores)
        )
        top = zip(ids[:n].tolist(), (scores[:n] - normalizers[row]).tolist()) if n else ()
        found[row] = float(own[row] - normalizers[row]), list(top)
    return found


def compile_loops(dtypes: Sequence[str], neutral: Any) -> None:
    """Compiles the loops for logits of these types, "float32" or "bfloat16", or loads them from numba's cache.
    neutral: sampling parameters with which a row is read where it is; a row with a ban is changed."""
    batch = SamplingBatch(
        [RowSampler(neutral, [0]), RowSampler(neutral, [0], banned=[1], banned_for=1 << 40)]
    )
    for dtype in {"float32", *dtypes}:  # logits that are changed are copied as float32
        logits = np.zeros((2, 1), np.float32 if dtype == "float32" else np.uint16)
        sample(logits, batch)
        logprobs(logits, [0, 0], [1, 1])


def _compiled(function):
    try:
        return numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(function, nogil=True, error_model="numpy")


@_compiled
def _float32(bits):
    """The float32 with these bits, or these of its upper half: a bfloat16. The compiler knows their size."""
    integer = type(bits)
    return np.int32(np.int32(bits) << (16 * (integer(1 << 16) == 0))).view(np.float32)


@_compiled
def _score(source, row, token):
    """-inf for a token that the mask excludes."""
    first, word = (row * source.vocab, row * source.words) if source.adjacent == 1 else (row, row)
    if source.words > 0 and not (
        source.mask[word + token // 32 * source.adjacent] >> np.uint32(token % 32)
    ) & np.uint32(1):
        return -np.float32(np.inf)
    return _float32(source.flat[first + token * source.adjacent])


@_compiled
def _copied(source, rows):
    """Rows of the source, float32 [len(rows), vocab]."""
    scores = np.empty((len(rows), source.vocab), np.float32)
    for begin in range(0, source.vocab, 32):
        for i in range(len(rows)):
            for token in range(begin, min(begin + 32, source.vocab)):
                scores[i, token] = _score(source, rows[i], token)
    return scores


@_compiled
def _allowed(source, row, start, part, masked):
    """`part`, the LANES tokens from `start` on, with -inf for those that the mask excludes; empty if it excludes all."""
    first, adjacent, integer = row * source.words + start // LANES, source.adjacent, type(source.highest)
    words, any_allowed, all_allowed = (
        source.mask[first : first + adjacent],
        np.uint32(0),
        np.uint32(0xFFFFFFFF),
    )
    for word in words:
        any_allowed, all_allowed = any_allowed | word, all_allowed & word
    if any_allowed == 0 or all_allowed == 0xFFFFFFFF:
        return part if any_allowed else part[:0]
    for lane in range(len(part) // adjacent):
        for i in range(adjacent):
            kept = integer(-np.int32((words[i] >> np.uint32(lane)) & np.uint32(1)))  # all bits or none
            masked[lane * adjacent + i] = (part[lane * adjacent + i] & kept) | (~source.nan_offset & ~kept)
    return masked[: len(part)]


@_compiled
def _flipped(bits, highest):
    """An integer ordered as the float with these bits is; the same again makes the bits of it. highest: of the integers."""
    integer = type(highest)
    return integer(bits ^ integer(integer(bits >> integer(31)) & highest))


@_compiled
def _maxima(source):
    """The highest score of each lane, or NaN, float32 [rows, lanes]. Scores are compared as integers of their size, less an
    offset that brings NaNs of both signs to the top."""
    width, size, integer = LANES * source.adjacent, source.vocab * source.adjacent, type(source.highest)
    maxima = np.empty((source.rows, source.groups * LANES), np.float32)
    best, masked = np.empty(width, source.flat.dtype), np.empty(width, source.flat.dtype)
    for row in range(0, source.rows, source.adjacent):
        for group in range(source.groups):
            begin = group * STEPS * width
            best[:] = ~source.highest
            for start in range(begin, min(begin + STEPS * width, size), width):
                part = source.flat[row * source.vocab + start : row * source.vocab + min(start + width, size)]
                part = part if source.words == 0 else _allowed(source, row, start, part, masked)
                for i in range(len(part)):
                    best[i] = max(best[i], integer(_flipped(part[i], source.highest) - source.nan_offset))
            for i in range(source.adjacent):
                for lane in range(LANES):
                    bits = integer(best[lane * source.adjacent + i] + source.nan_offset)
                    maxima[row + i, group * LANES + lane] = _float32(_flipped(bits, source.highest))
    return maxima


@_compiled
def _weight(score, peak, scale):
    """2 ** ((score - peak) * scale) in float32; 0 below 2 ** -100 and for impossible tokens."""
    exponent = np.float32((score - peak) * scale)
    is_positive = exponent > MIN_EXPONENT  # not where it is NaN: -inf * 0
    exponent = exponent if is_positive else MIN_EXPONENT
    rounded = np.float32(exponent + ROUND)
    x = np.float32(exponent - np.float32(rounded - ROUND))
    power = np.float32(ONE + x * (POWER_1 + x * (POWER_2 + x * (POWER_3 + x * POWER_4))))
    scaled = np.int32(power.view(np.int32) + np.int32(rounded.view(np.int32) << np.int32(23))).view(
        np.float32
    )
    return scaled if is_positive else ZERO


@_compiled
def _sums(source, peaks, scales):
    """The sum of the weights of each group of tokens, float64 [rows, groups]: lanes first, whatever the memory order."""
    width, size = LANES * source.adjacent, source.vocab * source.adjacent
    sums = np.zeros((source.rows, source.groups))
    lanes, peak, scale = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    masked = np.empty(width, source.flat.dtype)
    for row in range(0, source.rows, source.adjacent):
        for i in range(width):
            peak[i], scale[i] = peaks[row + i % source.adjacent], scales[row + i % source.adjacent]
        for group in range(source.groups):
            begin = group * STEPS * width
            lanes[:] = 0
            for start in range(begin, min(begin + STEPS * width, size), width):
                part = source.flat[row * source.vocab + start : row * source.vocab + min(start + width, size)]
                part = part if source.words == 0 else _allowed(source, row, start, part, masked)
                for i in range(len(part)):
                    lanes[i] += _weight(_float32(part[i]), peak[i], scale[i])
            for i in range(source.adjacent):
                for lane in range(LANES):
                    sums[row + i, group] += lanes[lane * source.adjacent + i]
    return sums


@_compiled
def _sort(scores, ids, count):
    """Sorts the first `count`, highest scores first, equal ones by id (Shell sort)."""
    for gap in (1750, 701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, count):
            id, score = ids[i], scores[i]
            while i >= gap and (scores[i - gap] < score or (scores[i - gap] == score and ids[i - gap] > id)):
                ids[i], scores[i] = ids[i - gap], scores[i - gap]
                i -= gap
            ids[i], scores[i] = id, score


@_compiled
def _threshold(scores, k):
    """A score that k of them reach; the lowest finite float32 if fewer are finite. Bisects the integers in their order."""
    low, high = ~FINITE_BITS, FINITE_BITS
    while low < high:
        middle = (low + high + 1) >> 1
        score, count = (
            _float32(_flipped(np.int32(middle), INT32_MAX)),
            np.uint32(0),
        )  # as small as the scores: fast
        for i in range(len(scores)):
            count = np.uint32(count + np.uint32(scores[i] >= score))
        low, high = (low, middle - 1) if count < k else (middle, middle if count == k else high)
    return _float32(_flipped(np.int32(low), INT32_MAX))


@_compiled
def _list(source, row, maxima, peak, k, ids, scores):
    """Lists the top k possible tokens and ties of the k-th: most likely first, ties by id. Returns their number."""
    threshold, count = peak if k == 1 else _threshold(maxima, k), 0
    for lane in range(len(maxima)):
        if maxima[lane] >= threshold:
            begin = lane // LANES * GROUP + lane % LANES
            for token in range(begin, min(begin + GROUP, source.vocab), LANES):
                score = _score(source, row, token)
                if score >= threshold:
                    ids[count], scores[count] = token, score
                    count += 1
    _sort(scores, ids, count)
    listed = min(k, count)
    while listed < count and scores[listed] == scores[listed - 1]:
        listed += 1
    return listed


@_compiled
def _place(weights, draw):
    """The index at the share `draw` of all weights, never one without weight, and the share of that weight below it."""
    total, cumulative, place, share = weights.sum(), 0.0, 0, 0.0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            place, share = i, (draw * total - cumulative) / weights[i]
            cumulative += weights[i]
            if cumulative > draw * total:
                break
    return place, share


@_compiled
def _draw_listed(ids, scores, is_complete, sums, peak, temperature, top_p, min_p, draw):
    """A token from the listed ones, most likely first; WHOLE_ROW where top-p and min-p may keep others."""
    weights, cumulative = np.exp((scores.astype(np.float64) - peak) / temperature), 0.0
    limit = top_p * (weights if is_complete else sums).sum()
    for i in range(len(scores)):
        if weights[i] < min_p or (top_p < 1.0 and cumulative >= limit):
            weights[i:], is_complete = 0.0, True
            break
        cumulative += weights[i]
    if is_complete or (top_p < 1.0 and cumulative >= limit):
        return ids[_place(weights, draw)[0]]
    return WHOLE_ROW


@_compiled
def _choose(source, maxima, peaks, indices, parameters):
    """The token of each row, WHOLE_ROW or FAILED. indices: each row's place in `parameters`; -1 leaves it out."""
    scales, weighted = parameters.scale[indices], parameters.weighted[indices] & (indices >= 0)
    sums = _sums(source, peaks, scales) if weighted.any() else np.empty((source.rows, 0))
    ids, scores = np.empty(source.vocab, np.int64), np.empty(source.vocab, np.float32)
    tokens = np.empty(source.rows, np.int64)
    for place in range(source.rows):
        row, peak, token = indices[place], peaks[place], WHOLE_ROW
        if row < 0:
            continue
        state = parameters.streams[row] = parameters.streams[row] + GAMMA
        state = (state ^ (state >> np.uint64(30))) * MIX_1
        state = (state ^ (state >> np.uint64(27))) * MIX_2
        draw = (
            0.0
            if parameters.greedy[row]
            else ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
        )
        top_k, top_p, min_p = parameters.top_k[row], parameters.top_p[row], parameters.min_p[row]
        wanted = top_k if top_k > 0 else LISTED
        if not math.isfinite(peak):
            token = FAILED
        elif (
            not parameters.whole_row[row] and top_k == 0 and top_p >= 1.0 and min_p == 0.0
        ):  # in the order of the ids
            group, share = _place(sums[place], draw)
            weights = np.zeros(GROUP)
            for i in range(min(GROUP, source.vocab - group * GROUP)):
                weights[i] = _weight(_score(source, place, group * GROUP + i), peak, scales[place])
            token = group * GROUP + _place(weights, share)[0]
        while token == WHOLE_ROW and not parameters.whole_row[row] and wanted <= 8 * max(LISTED, top_k):
            count = _list(source, place, maxima[place], peak, wanted, ids, scores)
            is_complete, temperature = top_k > 0 or count < wanted, parameters.temperature[row]
            token = _draw_listed(
                ids, scores[:count], is_complete, sums[place], peak, temperature, top_p, min_p, draw
            )
            wanted *= 8
        tokens[place], parameters.draws[row] = token, draw
    return tokens
