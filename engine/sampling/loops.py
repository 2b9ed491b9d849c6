"""The loops of sampling.py, compiled by numba: over logits as they lie in memory, float32 or bfloat16, by row
or by token.

A row's token depends on that row alone, to the bit. So sums have one fixed order, whatever the memory order
and the number of rows. To be fast, the loops read a row once, and sort only the tokens that filters may keep.
This is how a token is chosen:

1. `maxima_of` reads all logits. A lane is each LANES-th token of a group; its maximum is kept. The highest
   maximum of a row is its peak.
2. `threshold_of` finds the k-th highest maximum. k lanes reach it, so at least k logits do, and no token
   below it is among the top k.
3. `list_top` reads the lanes that reach the threshold, and sorts what reaches it: the top k, with ties.
4. `draw_listed` gives each listed token its weight, e to the power of (score - peak) / temperature, drops
   what top-p and min-p exclude, and takes the token at the share `draw` of the rest.

Without top-k it is not known how many tokens top-p and min-p keep: 64 are listed, then 512 if these were too
few, then `sampling.sample_whole_row` sorts the row. Top-p also needs the sum of all weights (`sums_of`).
Without any filter, `draw_any` takes the token from the sums of the groups, and nothing is listed.

An example with three lanes, five tokens, temperature 1 and the random number 0.7:

    token     0     1     2     3     4
    logit   1.0   3.0   0.5   2.0   2.5
    lane      0     1     2     0     1
    weight  0.14  1.00  0.08  0.37  0.61      the sum is 2.19

    maxima    lane 0: 2.0, lane 1: 3.0, lane 2: 0.5; the peak is 3.0
    top_k 2   The threshold is 2.0. Lane 2 is not read again. Tokens 1, 4 and 3 reach the threshold; 1 and 4
              are listed. 0.7 of their weights is 1.12, which token 1 (up to 1.00) does not reach: token 4.
    top_p 0.8 The limit is 0.8 * 2.19 = 1.75. Tokens 1 and 4 have 1.61 together, so token 3 is kept as well.
              0.7 of their weights is 1.38: token 4.
    no filter 0.7 of all weights is 1.53. In the order of ids: token 0 reaches to 0.14, 1 to 1.14, 2 to 1.22,
              3 to 1.59: token 3.

Three things in the code look odd, and stay as they are:

- Logits are compared as integers (`sortable_bits`). The compiler makes vector instructions of a maximum of
  integers, and not of one of floats, where NaN is unequal to itself. Less an offset, NaNs of both signs are
  the highest integers, so a NaN becomes the maximum of its lane and the row fails.
- One loop reads both memory orders. transformers-neuronx leaves the logits of a token side by side
  (`Source.adjacent` is the number of rows), other engines those of a row (`adjacent` is 1). In both cases the
  logits of LANES tokens are LANES * adjacent numbers side by side, which the loop takes together.
- Conditions are written as one expression, for the compiler: see the comments at these lines.
"""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

# At LOG_LEVEL=debug numba would write 24,000 lines about its own work.
logging.getLogger("numba").setLevel(logging.WARNING)

import numba  # noqa: E402
from numba.core.caching import UserProvidedCacheLocator  # noqa: E402

LANES = 32  # a lane: each LANES-th token of a group
STEPS = 16  # tokens of a lane
GROUP = LANES * STEPS
FIRST_TOP_TOKENS = 64  # top tokens listed first for top-p and min-p without top-k
NEEDS_FULL_SORT = -1  # in the place of a token: `sampling.sample_whole_row` has to choose it
FAILED = -2
NO_MASK = np.empty((0, 0), np.uint32)
# The highest signed integer of a float's size, and how far negative NaNs are from the lowest one in the order
# of floats.
FLOAT32 = (np.int32(0x7FFFFFFF), np.int32(0x7FFFFF))
BFLOAT16 = (np.int16(0x7FFF), np.int16(0x7F))
INT32_MAX = np.int32(0x7FFFFFFF)
FINITE_BITS = 0x7F7FFFFF  # of the highest finite float32
# 2 ** x for |x| <= 1/2, relative error below 3e-6 (Remez algorithm).
POWER_1 = np.float32(0.6931242)
POWER_2 = np.float32(0.24024099)
POWER_3 = np.float32(0.05590637)
POWER_4 = np.float32(0.00958282)
MIN_EXPONENT = np.float32(-100.0)
ROUND = np.float32(1.5 * 2**23)  # adding it rounds a float32 to a whole number
# SplitMix64 (Steele, Lea and Flood 2014).
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


class BatchSamplingParams(NamedTuple):
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


def source_of(logits: np.ndarray, mask: np.ndarray = NO_MASK) -> Source:
    """Returns logits as the loops read them. Copies the logits only if they are read-only or not contiguous;
    else the result shares their memory.

    logits: float32 [rows, vocab], or uint16, the bits of bfloat16; in either memory order. mask: uint32
    [rows, ceil(vocab / 32)], a set bit allows the token; NO_MASK: all tokens are allowed.
    """
    assert logits.dtype in (np.float32, np.uint16), "logits are float32, or bfloat16 as uint16"
    if not logits.flags.writeable:  # read-only arrays are another type for the compiler
        logits = logits.copy()
    rows, vocab = logits.shape
    is_by_token = rows > 1 and logits.strides[0] < logits.strides[1]
    highest, nan_offset = FLOAT32 if logits.dtype == np.float32 else BFLOAT16
    in_memory_order = logits.T if is_by_token else logits
    words = mask.T if is_by_token else mask
    return Source(
        flat=in_memory_order.reshape(-1).view(highest.dtype),
        highest=highest,
        nan_offset=nan_offset,
        rows=rows,
        adjacent=rows if is_by_token else 1,
        vocab=vocab,
        groups=-(-vocab // GROUP),
        mask=words.reshape(-1),
        words=mask.shape[1],
    )


class LoopsCache(UserProvidedCacheLocator):
    """Names the cache folder below NUMBA_CACHE_DIR by the text of this file, not by its path as numba does:
    checkouts with the same text share their compiled loops."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return f"loops-{hashlib.sha256(Path(py_file).read_bytes()).hexdigest()[:16]}"


numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.LoopsCache,InTreeCacheLocator"


def _njit(function):
    """Compiles a function at its first call. The result is cached in a folder, if one can be written. The
    function releases the interpreter's lock."""
    try:
        return numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(function, nogil=True, error_model="numpy")


@_njit
def float32_of(bits):
    """The float32 with these bits, or these of its upper half: a bfloat16. The compiler knows their size."""
    integer = type(bits)
    return np.int32(np.int32(bits) << (16 * (integer(1 << 16) == 0))).view(np.float32)


@_njit
def score_of(source, row, token):
    """Returns the logit of a token in a row, as float32; -inf if the mask excludes the token."""
    first = row
    word = row
    if source.adjacent == 1:
        first = row * source.vocab
        word = row * source.words
    if source.words > 0:
        bits = source.mask[word + token // 32 * source.adjacent]
        if not (bits >> np.uint32(token % 32)) & np.uint32(1):
            return -np.float32(np.inf)
    return float32_of(source.flat[first + token * source.adjacent])


@_njit
def copied(source, rows):
    """Returns rows of the source as a new array, float32 [len(rows), vocab], with -inf for tokens that the
    mask excludes."""
    scores = np.empty((len(rows), source.vocab), np.float32)
    for begin in range(0, source.vocab, 32):
        for i in range(len(rows)):
            for token in range(begin, min(begin + 32, source.vocab)):
                scores[i, token] = score_of(source, rows[i], token)
    return scores


@_njit
def masked_scores(source, row, start, part, masked):
    """Returns `part` with -inf for the tokens that the mask excludes; an empty array if the mask excludes
    all, `part` itself if it allows all.

    part: the bits of the logits of LANES tokens from `start` on, of `Source.adjacent` rows from `row` on.
    masked: an array for the result, of the size of `part`.
    """
    integer = type(source.highest)
    adjacent = source.adjacent
    first = row * source.words + start // LANES
    words = source.mask[first : first + adjacent]
    any_allowed = np.uint32(0)
    all_allowed = np.uint32(0xFFFFFFFF)
    for word in words:
        any_allowed = any_allowed | word
        all_allowed = all_allowed & word
    if any_allowed == 0:
        return part[:0]
    if all_allowed == 0xFFFFFFFF:
        return part
    for lane in range(len(part) // adjacent):
        for i in range(adjacent):
            kept = integer(-np.int32((words[i] >> np.uint32(lane)) & np.uint32(1)))  # all bits or none
            masked[lane * adjacent + i] = (part[lane * adjacent + i] & kept) | (~source.nan_offset & ~kept)
    return masked[: len(part)]


@_njit
def sortable_bits(bits, highest):
    """An integer that is ordered as the float with these bits. Applied to that integer, the function returns
    the bits. highest: the highest integer of this size."""
    integer = type(highest)
    return integer(bits ^ integer(integer(bits >> integer(31)) & highest))


@_njit
def maxima_of(source):
    """Returns the highest score of each lane, float32 [rows, groups * LANES]: NaN if the lane has NaN, -inf
    if the lane has no possible token.

    Scores are compared as integers of their size, less an offset that brings NaNs of both signs to the top.
    """
    integer = type(source.highest)
    width = LANES * source.adjacent
    size = source.vocab * source.adjacent
    maxima = np.empty((source.rows, source.groups * LANES), np.float32)
    best = np.empty(width, source.flat.dtype)
    masked = np.empty(width, source.flat.dtype)
    for row in range(0, source.rows, source.adjacent):
        for group in range(source.groups):
            begin = group * STEPS * width
            best[:] = ~source.highest
            for start in range(begin, min(begin + STEPS * width, size), width):
                part = source.flat[row * source.vocab + start : row * source.vocab + min(start + width, size)]
                # One expression: with an `if` the compiler leaves the loop below a third slower or more.
                part = part if source.words == 0 else masked_scores(source, row, start, part, masked)
                for i in range(len(part)):
                    best[i] = max(
                        best[i], integer(sortable_bits(part[i], source.highest) - source.nan_offset)
                    )
            for i in range(source.adjacent):
                for lane in range(LANES):
                    bits = integer(best[lane * source.adjacent + i] + source.nan_offset)
                    maxima[row + i, group * LANES + lane] = float32_of(sortable_bits(bits, source.highest))
    return maxima


@_njit
def weight_of(score, peak, scale):
    """Returns 2 ** ((score - peak) * scale) in float32; 0 below 2 ** -100 and for impossible tokens. peak:
    the highest score of the row. scale: log2(e) / temperature."""
    exponent = np.float32((score - peak) * scale)
    is_positive = exponent > MIN_EXPONENT  # not where it is NaN: -inf * 0
    exponent = exponent if is_positive else MIN_EXPONENT
    rounded = np.float32(exponent + ROUND)
    x = np.float32(exponent - np.float32(rounded - ROUND))
    power = np.float32(np.float32(1.0) + x * (POWER_1 + x * (POWER_2 + x * (POWER_3 + x * POWER_4))))
    bits = np.int32(power.view(np.int32) + np.int32(rounded.view(np.int32) << np.int32(23)))
    return bits.view(np.float32) if is_positive else np.float32(0.0)


@_njit
def sums_of(source, peaks, scales):
    """Returns the sum of the weights of each group of tokens, float64 [rows, groups]. Each lane is summed
    first, then the lanes, whatever the memory order. peaks: the highest score of each row. scales: log2(e) /
    temperature of each row."""
    width = LANES * source.adjacent
    size = source.vocab * source.adjacent
    sums = np.zeros((source.rows, source.groups))
    lanes = np.empty(width, np.float32)
    peak = np.empty(width, np.float32)
    scale = np.empty(width, np.float32)
    masked = np.empty(width, source.flat.dtype)
    for row in range(0, source.rows, source.adjacent):
        for i in range(width):
            peak[i] = peaks[row + i % source.adjacent]
            scale[i] = scales[row + i % source.adjacent]
        for group in range(source.groups):
            begin = group * STEPS * width
            lanes[:] = 0
            for start in range(begin, min(begin + STEPS * width, size), width):
                part = source.flat[row * source.vocab + start : row * source.vocab + min(start + width, size)]
                # One expression: with an `if` the compiler leaves the loop below a third slower or more.
                part = part if source.words == 0 else masked_scores(source, row, start, part, masked)
                for i in range(len(part)):
                    lanes[i] += weight_of(float32_of(part[i]), peak[i], scale[i])
            for i in range(source.adjacent):
                for lane in range(LANES):
                    sums[row + i, group] += lanes[lane * source.adjacent + i]
    return sums


@_njit
def sort(scores, ids, count):
    """Sorts the first `count` scores with their ids, in place: highest scores first, equal ones by id (Shell
    sort)."""
    for gap in (1750, 701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, count):
            id = ids[i]
            score = scores[i]
            while i >= gap and (scores[i - gap] < score or (scores[i - gap] == score and ids[i - gap] > id)):
                ids[i] = ids[i - gap]
                scores[i] = scores[i - gap]
                i -= gap
            ids[i] = id
            scores[i] = score


@_njit
def threshold_of(scores, k):
    """Returns a score that `k` of the scores reach, or more if several equal the k-th highest. If fewer than
    `k` are finite, this is the lowest finite float32. Bisects the integers in their order."""
    low, high = ~FINITE_BITS, FINITE_BITS
    while low < high:
        middle = (low + high + 1) >> 1
        score = float32_of(sortable_bits(np.int32(middle), INT32_MAX))
        count = np.uint32(0)  # as small as the scores: fast
        for i in range(len(scores)):
            count = np.uint32(count + np.uint32(scores[i] >= score))
        if count < k:
            high = middle - 1
        else:
            low = middle
            if count == k:
                high = middle
    return float32_of(sortable_bits(np.int32(low), INT32_MAX))


@_njit
def list_top(source, row, maxima, peak, k, ids, scores):
    """Writes the top k possible tokens of a row, and ties of the k-th, into `ids` and `scores`. Returns how
    many tokens these are: fewer than k if fewer are possible.

    The most likely token comes first, ties by id. maxima: the row's lanes, from `maxima_of`. peak: the
    highest of them. The arrays have room for all tokens; what they hold after the returned number is
    undefined.
    """
    threshold = peak if k == 1 else threshold_of(maxima, k)
    count = 0
    for lane in range(len(maxima)):
        if maxima[lane] >= threshold:
            begin = lane // LANES * GROUP + lane % LANES
            for token in range(begin, min(begin + GROUP, source.vocab), LANES):
                score = score_of(source, row, token)
                if score >= threshold:
                    ids[count] = token
                    scores[count] = score
                    count += 1
    sort(scores, ids, count)
    listed = min(k, count)
    while listed < count and scores[listed] == scores[listed - 1]:
        listed += 1
    return listed


@_njit
def sample_index(weights, draw):
    """Returns the index at the share `draw` of all weights, and which share of the weight at that index is
    below this point. The index is never one without weight, unless all are: then both are 0."""
    wanted = draw * weights.sum()
    cumulative = 0.0
    place = 0
    share = 0.0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            place = i
            share = (wanted - cumulative) / weights[i]
            cumulative += weights[i]
            if cumulative > wanted:
                break
    return place, share


@_njit
def draw_listed(ids, scores, is_complete, sums, peak, temperature, top_p, min_p, draw):
    """Returns a token from the listed ones, most likely first; NEEDS_FULL_SORT if top-p and min-p may keep
    others.

    ids, scores: the listed tokens. is_complete: no other token counts, because of top-k or because the others
    are impossible. sums: the weights of all tokens by group, for top-p if the list is not complete. draw: a
    number in [0, 1).
    """
    weights = np.exp((scores.astype(np.float64) - peak) / temperature)
    limit = top_p * (weights if is_complete else sums).sum()
    cumulative = 0.0
    for i in range(len(scores)):
        if weights[i] < min_p or (top_p < 1.0 and cumulative >= limit):
            weights[i:] = 0.0
            is_complete = True
            break
        cumulative += weights[i]
    if is_complete or (top_p < 1.0 and cumulative >= limit):
        return ids[sample_index(weights, draw)[0]]
    return NEEDS_FULL_SORT


@_njit
def draw_any(source, place, sums, peak, scale, draw):
    """Returns a token from all tokens of a row, at the share `draw` of their weights in the order of their
    ids. place: the row in the source. sums: the weights of the row by group."""
    group, share = sample_index(sums, draw)
    weights = np.zeros(GROUP)
    for i in range(min(GROUP, source.vocab - group * GROUP)):
        weights[i] = weight_of(score_of(source, place, group * GROUP + i), peak, scale)
    return group * GROUP + sample_index(weights, share)[0]


@_njit
def next_draw(streams, row):
    """Returns the next random number of a row's stream, in [0, 1), and advances the stream."""
    state = streams[row] = streams[row] + GAMMA
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@_njit
def choose_tokens(source, maxima, peaks, indices, parameters):
    """Returns the token of each row, NEEDS_FULL_SORT, or FAILED if the highest score is not finite: int64
    [rows]. Takes the next random number of each row into `parameters.draws`; a greedy row gets 0 there.

    indices: the place of each row in `parameters`; -1 leaves the row out, and its token is undefined. maxima:
    what `maxima_of` returns for the source. peaks: the highest of each row.
    """
    scales = parameters.scale[indices]
    weighted = parameters.weighted[indices] & (indices >= 0)
    sums = sums_of(source, peaks, scales) if weighted.any() else np.empty((source.rows, 0))
    ids = np.empty(source.vocab, np.int64)
    scores = np.empty(source.vocab, np.float32)
    tokens = np.empty(source.rows, np.int64)
    for place in range(source.rows):
        row = indices[place]
        if row < 0:
            continue
        draw = next_draw(parameters.streams, row)
        if parameters.greedy[row]:
            draw = 0.0
        parameters.draws[row] = draw
        peak = peaks[place]
        top_k = parameters.top_k[row]
        top_p = parameters.top_p[row]
        min_p = parameters.min_p[row]
        tokens[place] = NEEDS_FULL_SORT
        if not math.isfinite(peak):
            tokens[place] = FAILED
        elif parameters.whole_row[row]:
            continue
        elif top_k == 0 and top_p >= 1.0 and min_p == 0.0:
            tokens[place] = draw_any(source, place, sums[place], peak, scales[place], draw)
        wanted = top_k if top_k > 0 else FIRST_TOP_TOKENS
        while tokens[place] == NEEDS_FULL_SORT and wanted <= 8 * max(FIRST_TOP_TOKENS, top_k):
            count = list_top(source, place, maxima[place], peak, wanted, ids, scores)
            is_complete = top_k > 0 or count < wanted
            temperature = parameters.temperature[row]
            tokens[place] = draw_listed(
                ids, scores[:count], is_complete, sums[place], peak, temperature, top_p, min_p, draw
            )
            wanted *= 8
    return tokens
