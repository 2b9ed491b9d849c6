"""Logits to token ids and log-probabilities.

Owns each request's random stream and token counts. The order is transformers': penalties, logit biases, bans
and the token mask; temperature; top-k (with ties of the k-th), top-p, min-p, typical-p. Sampling is
batch-invariant: a row's result depends on its own logits, parameters and seed alone, to the bit.

`sample_whole_row` is the readable reference. sampling/loops.py has the compiled loops that do the same for
almost all rows.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from engine.sampling import loops
from engine.sampling.loops import FAILED, NEEDS_FULL_SORT, NO_MASK, BatchSamplingParams, Source
from protocol import SamplingParams

logger = logging.getLogger("worker")

MAX_FAST_TOP_K = 256  # for a larger top-k the whole row is sorted
NOT_A_NUMBER = "the model produced NaN logits"
IMPOSSIBLE = "no token is possible: the model, min_new_tokens or the token mask excludes all"
LOG2_E = math.log2(math.e)
TokenOrError = int | Exception  # a token, or why there is none
TopTokens = list[tuple[int, float]]  # (token id, log-probability)
RowLogprobs = tuple[float, TopTokens] | Exception


class SamplingError(Exception):
    """No token can be sampled from a row; the message may be read by the client."""


class SamplerState:
    """The parameters, random stream and token counts of one request.

    `prompt` counts for the repetition penalty, as in transformers, not for OpenAI's frequency and presence
    penalties. The ids in `banned` are not sampled for the first `banned_for` tokens; ids outside of the
    vocabulary have no effect.
    """

    def __init__(
        self,
        parameters: SamplingParams,
        prompt: Sequence[int],
        banned: Collection[int] = (),
        banned_for: int = 0,
    ):
        self.parameters = parameters
        self.stream = np.array([parameters.seed or 0], np.uint64)  # state of SplitMix64: one number a token
        self._seen: np.ndarray | None = None
        if parameters.repetition_penalty != 1.0:
            seen = np.unique(np.array(prompt, np.int64))
            self._seen = seen[seen >= 0]  # without image tokens
        self._counts: Counter[int] = Counter()  # of generated tokens, if a penalty needs them
        self._banned = np.array(list(banned), np.int64)
        self._banned_for = banned_for

    @property
    def changes_logits(self) -> bool:
        """Whether `apply_penalties` may change the logits of the next token."""
        return bool(
            self._seen is not None or self._counts or self.parameters.logit_bias or self._banned_for > 0
        )

    def allow_eos(self) -> None:
        """Lets the banned tokens be sampled from now on."""
        self._banned_for = 0

    def record(self, token: int) -> None:
        """Counts a sampled token for the penalties and bans of the next one."""
        self._banned_for -= 1
        if self.parameters.frequency_penalty or self.parameters.presence_penalty:
            self._counts[token] += 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)

    def apply_penalties(self, scores: np.ndarray) -> None:
        """Applies penalties, biases and bans in place to `scores`, the logits of the next token: float32
        [vocab], on which the mask has been applied. Results are rounded to float32 as in transformers. Raises
        IndexError for a prompt token or a biased one outside of the vocabulary; `scores` may then have
        changed."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self._seen is not None:
                seen = scores[self._seen].astype(np.float64)
                penalty = self.parameters.repetition_penalty
                penalized = np.clip(np.where(seen > 0, seen / penalty, seen * penalty), -1e30, 1e30)
                scores[self._seen] = np.where(np.isfinite(seen), penalized, seen)
            if self._counts:
                counts = np.fromiter(self._counts.values(), np.float64)
                penalties = self.parameters.frequency_penalty * counts + self.parameters.presence_penalty
                scores[np.fromiter(self._counts, np.int64)] -= penalties
            for token, bias in self.parameters.logit_bias:
                scores[token] += bias
            if self._banned_for > 0:
                banned = self._banned[self._banned < len(scores)]
                # NaN stays visible.
                scores[banned] = np.where(scores[banned] < np.inf, -np.inf, scores[banned])


class SamplingBatch:
    """The sampling parameters of a step's rows, for all steps with the same rows in the same order.

    A new batch takes over the random streams of its rows, whose `stream` becomes a part of the batch's array:
    an earlier batch with one of these rows must not be used any more.
    """

    def __init__(self, rows: Sequence[SamplerState]):
        def array(name: str, dtype: type = np.float64) -> np.ndarray:
            return np.array([getattr(row.parameters, name) for row in rows], dtype)

        self.rows = rows
        greedy = np.array([row.parameters.seed is None for row in rows], bool)
        temperature = array("temperature")
        top_k = np.where(greedy, 1, array("top_k", np.int64))
        top_p = array("top_p")
        min_p = array("min_p")
        whole_row = ~greedy & ((array("typical_p") < 1.0) | (top_k > MAX_FAST_TOP_K))
        streams = np.array([row.stream[0] for row in rows], np.uint64)
        for index, row in enumerate(rows):
            row.stream = streams[index : index + 1]
        self.parameters = BatchSamplingParams(
            greedy=greedy,
            temperature=temperature,
            scale=(LOG2_E / np.maximum(temperature, 1e-37)).astype(np.float32),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            whole_row=whole_row,
            weighted=~whole_row & (top_k == 0) & ((top_p < 1.0) | (min_p == 0.0)),
            streams=streams,
            draws=np.zeros(len(rows)),
        )


def sample(logits: np.ndarray, batch: SamplingBatch, mask: np.ndarray = NO_MASK) -> list[TokenOrError]:
    """Returns the next token of each row; the exception in the place of the token for a row that fails: a
    SamplingError if its highest score is not finite, or what its penalties raise.

    Each row's random stream goes on by one number, and its token counts by the token. A row that fails counts
    none; if its penalties fail, its stream stays. Grammars do not advance. logits: float32 [rows, vocab], or
    uint16, the bits of bfloat16; in either memory order; not changed. mask: uint32 [rows, ceil(vocab / 32)],
    a set bit allows the token; applied before temperature and filters.
    """
    source = loops.source_of(logits, mask)
    chosen: list[TokenOrError | None] = [None] * source.rows
    # Rows whose logits are changed are copied, the others are read where they are.
    changed = [index for index, row in enumerate(batch.rows) if row.changes_logits]
    if len(changed) < source.rows:
        indices = np.arange(source.rows)
        indices[changed] = -1
        _choose(source, indices, batch, chosen)
    if changed:
        indices = np.array(changed)
        scores = loops.copied(source, indices)
        for place, row in enumerate(changed):
            try:
                batch.rows[row].apply_penalties(scores[place])
            except Exception as error:
                chosen[row] = error
                indices[place] = -1
        _choose(loops.source_of(scores), indices, batch, chosen)
    for row, token in zip(batch.rows, chosen):
        if not isinstance(token, Exception):
            row.record(token)
    return chosen


def _choose(source: Source, indices: np.ndarray, batch: SamplingBatch, chosen: list) -> None:
    """Puts the token of each row of a source, or its SamplingError, into `chosen`, and takes a number of each
    row's random stream.

    indices: the place of each row in `chosen` and in the batch; -1 leaves the row out.
    """
    maxima = loops.maxima_of(source)
    peaks = maxima.max(axis=1)
    tokens = loops.choose_tokens(source, maxima, peaks, indices, batch.parameters)
    for place, (row, token) in enumerate(zip(indices.tolist(), tokens.tolist())):
        if row < 0:
            continue
        if token == FAILED:
            chosen[row] = SamplingError(IMPOSSIBLE if peaks[place] == -math.inf else NOT_A_NUMBER)
        elif token == NEEDS_FULL_SORT:
            (scores,) = loops.copied(source, np.array([place]))
            chosen[row] = sample_whole_row(scores, batch.rows[row].parameters, batch.parameters.draws[row])
        else:
            chosen[row] = token


def sample_whole_row(scores: np.ndarray, parameters: SamplingParams, draw: float) -> int:
    """The reference of sampling: returns the id of the token at the share `draw` of the weights that the
    filters keep.

    Weights are added up from the most likely token on, ties by id. scores: [vocab], of which at least one is
    finite and none is NaN. draw: in [0, 1).
    """
    ordered = -np.sort(-scores[scores > -np.inf])
    weights = filtered_weights(ordered, parameters)
    place = np.searchsorted(np.cumsum(weights), draw * weights.sum(), side="right").clip(
        max=np.flatnonzero(weights)[-1]
    )
    equal = np.flatnonzero(scores == ordered[place])
    return int(equal[place - np.searchsorted(-ordered, -ordered[place])])


def filtered_weights(ordered: np.ndarray, parameters: SamplingParams) -> np.ndarray:
    """Returns the weights exp((score - highest) / temperature), in the order of the scores; 0 for tokens that
    the filters remove. ordered: the scores of all possible tokens, highest first. The temperature is above 0:
    greedy rows never come here."""
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


def logprobs(logits: np.ndarray, tokens: Sequence[int], top_n: Sequence[int]) -> list[RowLogprobs]:
    """Returns, for each row, the log-probability of its token, and the most likely tokens with theirs: those
    of the model, without temperature, filters, penalties and mask.

    A row gets as many most likely tokens as its number in `top_n`, without impossible tokens, ties by id. A
    row whose highest logit is NaN or infinite gets a SamplingError instead. logits: float32 [rows, vocab], or
    uint16, the bits of bfloat16; in either memory order; not changed.
    """
    source = loops.source_of(logits)
    maxima = loops.maxima_of(source)
    peaks = maxima.max(axis=1)
    totals = loops.sums_of(source, peaks, np.full(source.rows, LOG2_E, np.float32)).sum(axis=1)
    normalizers = peaks + np.log(totals, where=np.isfinite(peaks), out=totals)
    own = logits[range(source.rows), tokens]
    if own.dtype != np.float32:
        own = (own.astype(np.uint32) << 16).view(np.float32)
    ids = np.empty(source.vocab, np.int64)
    scores = np.empty(source.vocab, np.float32)
    found: list[RowLogprobs] = [SamplingError(NOT_A_NUMBER)] * source.rows
    for row in np.isfinite(peaks).nonzero()[0].tolist():
        top: TopTokens = []
        if top_n[row]:
            count = loops.list_top(source, row, maxima[row], peaks[row], top_n[row], ids, scores)
            n = min(top_n[row], count)
            top = list(zip(ids[:n].tolist(), (scores[:n] - normalizers[row]).tolist()))
        found[row] = float(own[row] - normalizers[row]), top
    return found


def compile_loops(dtypes: Sequence[str]) -> None:
    """Compiles the loops for float32 and for logits of these types, "float32" or "bfloat16". Writes them to
    numba's cache, if it has a folder, from which later processes load them. Where files of the cache are
    damaged, removes its folder, with a warning, and compiles again. Raises OSError if the cache has no space,
    or damaged files that cannot be removed."""
    try:
        _run_loops(dtypes)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # unpickling raises errors of many types
        folder = loops.maxima_of.stats.cache_path
        if not folder:
            raise
        logger.warning("The compiled loops in %s are damaged (%r): compiling again", folder, error)
        shutil.rmtree(folder)
        _run_loops(dtypes)


def _run_loops(dtypes: Sequence[str]) -> None:
    """Calls each loop with float32 and with logits of these types."""
    read_in_place = SamplerState(SamplingParams(), [0])
    changed = SamplerState(SamplingParams(), [0], banned=[1], banned_for=1 << 40)
    batch = SamplingBatch([read_in_place, changed])
    for dtype in {"float32", *dtypes}:  # logits that are changed are copied as float32
        logits = np.zeros((2, 1), np.float32 if dtype == "float32" else np.uint16)
        sample(logits, batch)
        logprobs(logits, [0, 0], [1, 1])
