"""From logits to token ids: the distribution is exact, a seed decides alone, and no row and no parameter changes another row.

The reference distributions come from transformers' own processors in the documented order: penalties, temperature, top-k,
top-p, min-p, typical-p; for single draws from `sampling.sample_whole_row`, the readable computation.
"""

import math
import os
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sampling import loops, sampling
from engine.sampling.sampling import (
    NO_MASK,
    SamplerState,
    SamplingBatch,
    SamplingError,
    filtered_weights,
    logprobs,
    sample,
    sample_whole_row,
)
from protocol import SamplingParams
from run import HERE

INF, NAN = math.inf, math.nan
LOGITS = np.array([0.3, -1.2, 2.1, 1.9, 0.0, -0.4, 1.1, -2.5, 0.8, 1.5, -0.9, -INF], np.float32)
with_transformers = pytest.mark.models
VOCAB, DRAWS = len(LOGITS), 2500
PROMPT, GENERATED = [2, 2, 5, 8, 11], [3, 3, 6, 3]


def rows_of(*rows) -> np.ndarray:
    return np.array(rows, np.float32)


def sampler_after(parameters: SamplingParams, prompt=(0,), generated=()) -> SamplerState:
    sampler = SamplerState(parameters, prompt)
    for token in generated:
        sampler.record(token)
    return sampler


def tokens_of(logits: np.ndarray, samplers: list[SamplerState], mask=NO_MASK) -> list[int]:
    tokens = sample(logits, SamplingBatch(samplers), mask)
    for token in tokens:
        if isinstance(token, Exception):
            raise token
    return tokens


def steps(logits, sampler: SamplerState, count: int, mask=NO_MASK) -> list[int]:
    return [tokens_of(rows_of(logits), [sampler], mask)[0] for _ in range(count)]


def column_major(logits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(logits.T).T


def bfloat16(logits: np.ndarray) -> np.ndarray:
    """The bit patterns of values that bfloat16 can hold."""
    return (np.ascontiguousarray(logits).view(np.uint32) >> 16).astype(np.uint16)


def rounded(logits: np.ndarray) -> np.ndarray:
    """float32 values that bfloat16 can hold."""
    return (bfloat16(logits).astype(np.uint32) << 16).view(np.float32)


def warped(logits: np.ndarray, parameters: SamplingParams, prompt=(), generated=()) -> np.ndarray:
    """The distribution that transformers samples from, float64 [vocab]; OpenAI's penalties and biases added."""
    import torch  # here, because these imports take seconds
    import transformers as hf

    ids, scores = (torch.tensor([[*prompt, *generated]], dtype=torch.long), torch.from_numpy(logits).double()[None].clone())
    if parameters.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty)(ids, scores)
    for token, count in Counter(generated).items():
        scores[0, token] -= parameters.frequency_penalty * count + parameters.presence_penalty
    for token, bias in parameters.logit_bias:
        scores[0, token] += bias
    scores = hf.TemperatureLogitsWarper(parameters.temperature)(ids, scores)
    if parameters.top_k:
        scores = hf.TopKLogitsWarper(parameters.top_k)(ids, scores)
    if parameters.top_p < 1.0:
        scores = hf.TopPLogitsWarper(parameters.top_p)(ids, scores)
    if parameters.min_p > 0.0:
        scores = hf.MinPLogitsWarper(parameters.min_p)(ids, scores)
    if parameters.typical_p < 1.0:
        scores = hf.TypicalLogitsWarper(parameters.typical_p)(ids, scores)
    return torch.softmax(scores[0], dim=-1).numpy()


def chi_square_excess(counts: Counter, expected: np.ndarray) -> float:
    """Pearson's statistic over its critical value at p = 0.001: above 1, the counts are not drawn from `expected`.

    Cells that expect fewer than five are added up. The critical value is Wilson and Hilferty's approximation (1931).
    """
    total = sum(counts.values())
    if any(expected[token] == 0 for token in counts):
        return INF
    cells = sorted((share * total, counts[token]) for token, share in enumerate(expected) if share > 0)
    rare = [cell for cell in cells if cell[0] < 5]
    cells = cells[len(rare) :] + ([(sum(e for e, _ in rare), sum(o for _, o in rare))] if rare else [])
    if (freedom := len(cells) - 1) == 0:
        return 0.0
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3)


def first_draws(prompt=(), generated=(), **parameters) -> Counter:
    """The tokens of the seeds 0, 1, 2, ... after `prompt` and `generated`."""
    samplers = [sampler_after(SamplingParams(seed=seed, **parameters), prompt, generated) for seed in range(DRAWS)]
    return Counter(tokens_of(np.repeat(LOGITS[None], DRAWS, axis=0), samplers))


PARAMETERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 100},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 0.5, "temperature": 1.5},
    {"typical_p": 0.2},
    {"typical_p": 0.7},
    {"typical_p": 0.95},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.5},
    {"presence_penalty": 0.9},
    {"presence_penalty": -0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"logit_bias": [(7, 3.0), (2, -1.5), (11, 100.0)]},
    {"logit_bias": [(3, 1.0)], "repetition_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 8, "typical_p": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "typical_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
]


@with_transformers
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_tokens_are_drawn_from_exactly_the_distribution_of_the_parameters(parameters):
    expected = warped(LOGITS, SamplingParams(**parameters), PROMPT, GENERATED)
    assert chi_square_excess(first_draws(PROMPT, GENERATED, **parameters), expected) < 1


@with_transformers
@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.6, "top_k": 6}, {"temperature": 2.0, "top_p": 0.9}], ids=str)
def test_the_tokens_of_one_seed_follow_the_distribution_too(parameters):
    batch = SamplingBatch([SamplerState(SamplingParams(seed=7, **parameters), PROMPT)])
    counts = Counter(sample(LOGITS[None], batch)[0] for _ in range(DRAWS))
    assert chi_square_excess(counts, warped(LOGITS, SamplingParams(**parameters))) < 1


@with_transformers
@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        ({"temperature": 1.0}, {"temperature": 1.2}),
        ({"top_k": 5}, {"top_k": 6}),
        ({"top_p": 0.9}, {"top_p": 0.95}),
        ({"min_p": 0.2}, {"min_p": 0.3}),
        ({"typical_p": 0.6}, {"top_p": 0.6}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.3}),
        ({"presence_penalty": 0.6}, {"frequency_penalty": 0.6}),
        ({"logit_bias": [(2, 0.5)]}, {"logit_bias": [(2, 0.8)]}),
    ],
    ids=str,
)
def test_the_chi_square_test_distinguishes_similar_distributions(drawn, claimed):
    expected = warped(LOGITS, SamplingParams(**claimed), PROMPT, GENERATED)
    assert chi_square_excess(first_draws(PROMPT, GENERATED, **drawn), expected) > 1


shares = st.sampled_from([0.05, 0.25, 0.5, 0.9, 0.95, 0.999]) | st.floats(0.01, 0.999)
FILTERS = st.fixed_dictionaries(
    {}, optional={"top_k": st.integers(1, 60), "top_p": shares, "min_p": shares, "typical_p": shares}
)


@with_transformers
@given(seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.4, 1.0, 1.8]), filters=FILTERS)
def test_the_reference_keeps_the_tokens_that_transformers_keeps(seed, temperature, filters):
    row = np.random.default_rng(seed).standard_normal(50).astype(np.float32) * 2
    parameters = SamplingParams(temperature=temperature, **filters)
    weights = filtered_weights(-np.sort(-row), parameters)
    kept = np.argsort(-row)[weights > 0]
    assert set(kept.tolist()) == set(np.flatnonzero(warped(row, parameters)).tolist())


@with_transformers
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 50), p=shares, min_p=shares)
def test_min_p_commutes_with_top_k_and_after_top_p_keeps_at_least_what_it_keeps_before(seed, k, p, min_p):
    """transformers, and this server, apply min-p after top-p; vLLM applies it first, so that top-p may keep fewer."""
    import torch
    import transformers as hf

    scores = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, 50)) * 2)

    def kept(*warpers):
        found = scores
        for warper in warpers:
            found = warper(None, found)
        return set(torch.isfinite(found[0]).nonzero().flatten().tolist())

    top_k, top_p, minimum = hf.TopKLogitsWarper(k), hf.TopPLogitsWarper(p), hf.MinPLogitsWarper(min_p)
    assert kept(top_k, minimum) == kept(minimum, top_k)
    assert kept(minimum, top_p) <= kept(top_p, minimum)


def test_min_p_and_top_p_in_either_order_may_differ_and_transformers_order_is_used():
    logits = np.log(rows_of([0.5, 0.3, 0.1, 0.05, 0.05]))
    samplers = [SamplerState(SamplingParams(seed=seed, top_p=0.85, min_p=0.15), []) for seed in range(200)]
    assert set(tokens_of(np.repeat(logits, 200, axis=0), samplers)) == {0, 1, 2}  # vLLM: 0 and 1


def test_greedy_penalties_count_the_prompt_or_the_generated_tokens_as_their_apis_do():
    logits = [2.0, 1.9, -1.0]
    assert steps(logits, SamplerState(SamplingParams(repetition_penalty=1.5), [0]), 1) == [1]
    assert steps(logits, SamplerState(SamplingParams(repetition_penalty=1.5), [2]), 1) == [0]
    image = [-3, -1 - (2**45 << 16)]  # its tokens are none of the vocabulary
    assert steps(logits, SamplerState(SamplingParams(repetition_penalty=1.5), [*image, 2]), 1) == [0]
    assert steps(logits, SamplerState(SamplingParams(repetition_penalty=1.5), image), 1) == [0]
    assert steps(logits, SamplerState(SamplingParams(frequency_penalty=2.0), [0, 0, 0]), 1) == [0]
    assert steps([-1.0, -1.2], SamplerState(SamplingParams(repetition_penalty=1.5), [0]), 1) == [1]  # negative logits, too
    assert steps(logits, SamplerState(SamplingParams(repetition_penalty=0.5), [1]), 1) == [1]
    assert steps([3.0, 2.5, 2.2, -1.0], SamplerState(SamplingParams(repetition_penalty=1.5), [3]), 4) == [0, 1, 2, 0]
    # 3.0 | 2.5 | 2.0 2.2 | 2.0 1.7 | 1.5 1.7 1.9 | 1.5 1.7 1.4
    assert steps([3.0, 2.2, 1.9, -1.0], SamplerState(SamplingParams(frequency_penalty=0.5), [0]), 6) == [0, 0, 1, 0, 2, 1]
    # 3.0 | 2.5 2.7 | 2.5 2.2 2.4, unchanged until 2 is generated: never
    assert steps([3.0, 2.7, 2.4, -1.0], SamplerState(SamplingParams(presence_penalty=0.5), [0]), 5) == [0, 1, 0, 0, 0]
    both = SamplingParams(presence_penalty=0.5, frequency_penalty=0.5)  # 3.0 | 2.0 2.2 | 2.0 1.2 1.9 | 1.5 1.2 1.9
    assert steps([3.0, 2.2, 1.9, -1.0], SamplerState(both, [0]), 4) == [0, 1, 0, 2]


def test_a_bias_is_added_after_the_repetition_penalty_and_leaves_impossible_tokens_impossible():
    assert steps([3.0, 2.0, -1.0], SamplerState(SamplingParams(logit_bias=[(2, 4.5)]), [0]), 1) == [2]
    assert steps([3.0, -INF], SamplerState(SamplingParams(logit_bias=[(1, 100.0)]), [0]), 1) == [0]
    # 2 / 2 + 4 = 5 beats 4; (2 + 4) / 2 = 3 would not
    assert steps([2.0, 4.0], SamplerState(SamplingParams(repetition_penalty=2.0, logit_bias=[(0, 4.0)]), [0]), 1) == [0]


@pytest.mark.parametrize(
    "parameters", [SamplingParams(), SamplingParams(seed=5), SamplingParams(repetition_penalty=1.1)], ids=str
)
def test_banned_tokens_come_only_after_the_first_tokens_and_may_be_outside_of_the_vocabulary(parameters):
    sampler = SamplerState(parameters, [3], banned=frozenset([0, 1, 50]), banned_for=3)
    tokens = steps([9.0, 8.0, 1.0, 0.5], sampler, 9)
    assert not {0, 1} & set(tokens[:3])
    assert set(tokens[3:]) <= {0, 1}


@pytest.mark.parametrize("seed", [None, 4])
def test_a_row_without_a_possible_token_fails_alone(seed):
    def row(**ban):
        return SamplerState(SamplingParams(seed=seed), [0], **ban)

    logits = rows_of([1.0, 2.0, -INF], [1.0, 2.0, -INF], [-INF] * 3)
    banned, other, impossible = sample(logits, SamplingBatch([row(banned=[0, 1], banned_for=1), row(), row()]))
    _allowed, masked, _ = sample(logits, SamplingBatch([row(), row(), row()]), np.array([[7], [4], [7]], np.uint32))
    for failed in (banned, impossible, masked):
        assert isinstance(failed, SamplingError) and "no token is possible" in str(failed)
    assert other in (0, 1)


@pytest.mark.parametrize("parameters", [{}, {"seed": 3}, {"seed": 3, "top_k": 2}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("as_laid_out", [np.ascontiguousarray, column_major])
def test_a_row_that_is_not_a_number_fails_alone(parameters, value, as_laid_out):
    logits = np.repeat(LOGITS[None], 3, axis=0)
    logits[1, 4] = value
    batch = SamplingBatch([SamplerState(SamplingParams(**parameters), [0])] * 3)
    first, failed, last = sample(as_laid_out(logits), batch)
    assert isinstance(failed, SamplingError) and "NaN logits" in str(failed)
    assert isinstance(first, int) and isinstance(last, int)
    without_it = np.full((3, 1), 0xFEF, np.uint32)
    assert all(isinstance(token, int) for token in sample(as_laid_out(logits), batch, without_it))
    assert isinstance(logprobs(as_laid_out(logits), [0] * 3, [1] * 3)[1], SamplingError)


def test_an_exception_in_one_row_is_that_rows_result():
    outside = SamplerState(SamplingParams(logit_bias=[(99, 1.0)]), [0])
    first, failed = sample(rows_of([1.0, 2.0], [1.0, 2.0]), SamplingBatch([SamplerState(SamplingParams(), [0]), outside]))
    assert first == 1 and isinstance(failed, IndexError)


def mask_of(rows: int, vocab: int, allowed) -> np.ndarray:
    bits = np.zeros((rows, -(-vocab // 32) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@with_transformers
@pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3, "temperature": 2.0}], ids=str)
def test_a_mask_restricts_a_row_before_temperature_and_filters(parameters):
    allowed = [1, 4, 5, 7, 8]
    masked = np.full_like(LOGITS, -INF)
    masked[allowed] = LOGITS[allowed]
    samplers = [SamplerState(SamplingParams(seed=seed, **parameters), [0]) for seed in range(DRAWS)]
    mask = mask_of(DRAWS, VOCAB, [allowed] * DRAWS)
    counts = Counter(tokens_of(np.repeat(LOGITS[None], DRAWS, axis=0), samplers, mask))
    assert chi_square_excess(counts, warped(masked, SamplingParams(**parameters))) < 1


@pytest.mark.parametrize("vocab", [31, 32, 1000, 5001])
def test_a_mask_of_ones_changes_nothing_and_each_row_has_its_own(vocab):
    logits = large_rows("normal", 4, vocab)
    ones = np.full((4, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    kinds = [
        SamplingParams(),
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2),
        SamplingParams(repetition_penalty=1.2),
    ]

    def chosen(mask):
        return tokens_of(column_major(logits), [SamplerState(kind, [1]) for kind in kinds], mask)

    assert chosen(ones) == chosen(NO_MASK)
    second = ones.copy()
    second[1] = mask_of(1, vocab, [[7]])[0]
    assert chosen(second) == [chosen(NO_MASK)[0], 7, *chosen(NO_MASK)[2:]]


SHAPES = ("normal", "plateaus", "two values", "equal", "ranks", "rising", "impossible")


def large_rows(shape: str, rows: int, vocab: int, seed: int = 0, scale: float = 2.0, offset: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    normal = random.standard_normal((rows, vocab))
    values = {
        "normal": normal,
        "plateaus": np.round(normal),
        "two values": (normal > 2.5).astype(float),
        "equal": normal * 0.0,
        "ranks": -np.log(np.argsort(normal, axis=1) + 1.0),
        "rising": np.sort(normal, axis=1),
        "impossible": np.where((normal < 2.0) & (np.arange(vocab) > 0), -INF, normal),
    }[shape]
    return (values * scale + offset).astype(np.float32)


ANY_ROW = st.builds(
    large_rows,
    shape=st.sampled_from(SHAPES),
    rows=st.just(1),
    vocab=st.sampled_from([1, 2, 31, 33, 1000, 1024, 5120, 20000, 33001]),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 2.5, 10.0, 300.0]),
    offset=st.sampled_from([0.0, 20.0, -70.0, -1000.0, 1e6]),
)
ANY_SHARE = st.sampled_from([1e-300, 1e-6, 0.99999, 1 - 1e-16]) | shares
ANY_FILTER = st.fixed_dictionaries(
    {}, optional={"top_k": st.integers(1, 600), "top_p": ANY_SHARE, "min_p": ANY_SHARE, "typical_p": ANY_SHARE}
)
TEMPERATURES = st.sampled_from([1e-300, 0.01, 0.3, 0.8, 1.0, 1.5, 5.0, 1e300]) | st.floats(0.1, 2.0)


@given(logits=ANY_ROW, temperature=TEMPERATURES, filters=ANY_FILTER, seed=st.integers(0, 2**64 - 1))
def test_the_loops_choose_the_token_that_the_readable_computation_chooses(logits, temperature, filters, seed):
    """Up to the precision of float32 sums: a share that is wrong by 1e-5 moves the limit of top-p or the place of a draw."""
    parameters = SamplingParams(seed=seed, temperature=temperature, **filters)
    batch = SamplingBatch([SamplerState(parameters, [0])])
    for _ in range(3):
        (token,) = sample(logits, batch)
        draw = float(batch.parameters.draws[0])
        near = [max(0.0, draw - 2e-5), draw, min(draw + 2e-5, 1 - 2**-53)]
        possible = set()
        if filters:
            limits = [parameters.top_p] if parameters.top_p == 1.0 else [parameters.top_p * (1 + x) for x in (-2e-5, 0, 2e-5)]
            for limit in limits:
                of_limit = SamplingParams(seed=0, temperature=temperature, **{**filters, "top_p": min(limit, 1.0)})
                ranks = [rank_of(logits[0], sample_whole_row(logits[0], of_limit, share)) for share in near]
                possible |= set(range(min(ranks), max(ranks) + 1))
            assert rank_of(logits[0], token) in possible
        else:  # in the order of the ids
            weights = np.exp((logits[0].astype(float) - float(logits.max())) / temperature)
            low, high = (np.searchsorted(np.cumsum(weights), share * weights.sum(), side="right") for share in near[::2])
            assert low <= token <= high and logits[0, token] > -INF


def rank_of(row: np.ndarray, token: int) -> int:
    return int((row > row[token]).sum() + (row[:token] == row[token]).sum())


def test_tokens_as_likely_as_the_last_of_top_k_stay():
    ordered = np.array([2.0, 1.0, 1.0, 0.0])
    assert list(filtered_weights(ordered, SamplingParams(top_k=2)) > 0) == [True, True, True, False]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 300}], ids=str)
@pytest.mark.parametrize(("shape", "scale"), [("normal", 0.7), ("plateaus", 0.2), ("ranks", 0.5), ("impossible", 0.3)])
def test_every_kept_token_of_a_large_row_is_drawn_as_often_as_it_should_be(shape, scale, filters):
    (row,) = large_rows(shape, 1, 3000, 5, scale)
    parameters = SamplingParams(temperature=0.9, **filters)
    weights = filtered_weights(-np.sort(-row[row > -INF]), parameters)
    batch = SamplingBatch([SamplerState(replace(parameters, seed=seed), [0]) for seed in range(600)])
    tokens = sample(np.repeat(row[None], 600, axis=0), batch)
    counts = Counter(rank_of(row, token) * 12 // len(weights) for token in tokens)
    expected = np.bincount(np.arange(len(weights)) * 12 // len(weights), weights / weights.sum())
    assert chi_square_excess(counts, expected) < 1


MIXED = [
    {},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_k": 5},
    {"seed": 3, "top_p": 0.8, "repetition_penalty": 1.3},
    {"seed": 4, "top_p": 0.99, "temperature": 1.5},
    {"seed": 5, "min_p": 0.1},
    {"seed": 6, "typical_p": 0.7, "frequency_penalty": 0.5},
    {"seed": 7, "top_k": 20, "top_p": 0.9},
    {"presence_penalty": 0.7, "logit_bias": [(0, 2.0)]},
]


def generated(logits: np.ndarray, rows, as_laid_out=np.ascontiguousarray, count: int = 3) -> list:
    """What rows of the logits yield in one batch: tokens, log-probabilities and top tokens of some steps."""
    batch = SamplingBatch([SamplerState(SamplingParams(**MIXED[row % len(MIXED)]), [0]) for row in rows])
    found = []
    for step in range(count):
        laid_out = as_laid_out(np.roll(logits, step, axis=1)[list(rows)])
        before = laid_out.copy()
        tokens = sample(laid_out, batch)
        found.append(list(zip(tokens, logprobs(laid_out, tokens, [row % 7 for row in rows]))))
        assert np.array_equal(laid_out, before)
    return list(zip(*found))


@pytest.mark.parametrize("vocab", [1, 63, 1000, 4096, 20001])
def test_not_a_bit_of_a_row_depends_on_its_neighbours_their_number_memory_order_or_dtype(vocab):
    logits = rounded(large_rows("normal", 64, vocab))
    alone = [generated(logits, [row])[0] for row in range(64)]
    for count in (2, 5, 16, 31, 64):
        for as_laid_out in (np.ascontiguousarray, column_major):
            assert generated(logits, range(count), as_laid_out) == alone[:count]
            assert generated(logits, range(count), lambda x, laid=as_laid_out: laid(bfloat16(x))) == alone[:count]
    assert generated(logits, range(31, -1, -1), column_major) == alone[31::-1]
    assert generated(logits, range(32), lambda x: column_major(np.concatenate((x, x)))[: len(x)]) == alone[:32]


def test_a_seed_decides_and_another_seed_decides_otherwise():
    def text(seed):
        return tuple(steps(np.zeros(1000), SamplerState(SamplingParams(seed=seed), [0]), 10))

    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    assert len({text(seed) for seed in seeds}) == len(seeds)
    assert [text(seed) for seed in seeds] == [text(seed) for seed in seeds]


def test_the_numbers_are_those_of_splitmix64_one_a_token():
    def mixed(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return (state ^ (state >> 31)) >> 11

    tokens = steps(np.zeros(1000), SamplerState(SamplingParams(seed=7), [0]), 5)
    assert tokens == [mixed((7 + n * 0x9E3779B97F4A7C15) % 2**64) * 1000 // 2**53 for n in range(1, 6)]


def test_a_random_stream_continues_whichever_rows_are_in_the_batch():
    (row,) = large_rows("normal", 1, 1000)
    one, other, late = (SamplerState(SamplingParams(seed=seed), [0]) for seed in (7, 8, 9))
    batches = [other, one], [one], [one, other, late], [late, one], [one], [other, one]
    drawn = [tokens_of(np.repeat(row[None], len(batch), axis=0), batch)[batch.index(one)] for batch in batches]
    assert drawn == steps(row, SamplerState(SamplingParams(seed=7), [0]), len(batches))


EXTREMES = [
    {"temperature": 1e-300},
    {"temperature": 5e-324},
    {"temperature": 1e300},
    {"repetition_penalty": 1e-300, "temperature": 1e-300},
    {"repetition_penalty": 1e300, "temperature": 1e300},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": 1e300},
    {"logit_bias": [(0, 100.0), (11, 100.0)], "temperature": 1e-300},
    {"top_k": 2**31 - 1, "top_p": 1e-300},
    {"top_p": 1 - 1e-16},
    {"min_p": 1.0},
    {"min_p": 1e-300, "temperature": 1e300},
    {"typical_p": 1e-300},
    {"typical_p": 0.5, "top_p": 1e-300, "top_k": 1, "temperature": 1e-300},
]
EXTREME_ROWS = {
    "usual": LOGITS.tolist(),
    "equal": [1.0] * VOCAB,
    "huge": [3e38, -3e38, 1e30, -1e30, 3.3e38, 0.0, 1e-38, -1e-38, 1e-45, 1.0, -1.0, -INF],
    "one is possible": [-INF] * 7 + [-5.0] + [-INF] * 4,
    "one token": [4.0],
}


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
@pytest.mark.parametrize("row", EXTREME_ROWS)
@pytest.mark.parametrize("parameters", EXTREMES, ids=str)
def test_extreme_parameters_always_choose_a_possible_token(parameters, row, seed):
    scores = EXTREME_ROWS[row]
    bias = [each for each in parameters.get("logit_bias", []) if each[0] < len(scores)]
    ids = range(len(scores))
    sampler = sampler_after(
        SamplingParams(seed=seed, **{**parameters, "logit_bias": bias}), ids, [t for t in GENERATED if t in ids]
    )
    assert all(scores[token] > -INF for token in steps(scores, sampler, 10))


@pytest.mark.parametrize("bits", [0, 2**53 - 1])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.01}, {"top_p": 0.999}, {"top_k": 700}, {"typical_p": 0.9}], ids=str)
def test_the_smallest_and_the_largest_draw_fall_on_a_possible_token(filters, bits):
    def unshifted(state: int, by: int) -> int:
        found = state
        for _ in range(64 // by):
            found = state ^ (found >> by)
        return found

    state = unshifted(bits << 11, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    state = unshifted(unshifted(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)
    (row,) = large_rows("normal", 1, 3000)
    row[:1100] = row[2900:] = -INF
    batch = SamplingBatch([SamplerState(SamplingParams(seed=(state - 0x9E3779B97F4A7C15) % 2**64, **filters), [0])])
    assert row[sample(row[None], batch)[0]] > -INF
    assert batch.parameters.draws[0] == bits / 2**53


def test_greedy_and_top_k_resolve_ties_by_the_lowest_id_and_keep_those_of_the_k_th():
    logits = np.zeros((1, 5000), np.float32)
    logits[0, [4100, 33, 1057]] = 2.0
    logits[0, [4999, 70]] = 1.0
    assert tokens_of(logits, [SamplerState(SamplingParams(), [0])]) == [33]
    batch = SamplingBatch([SamplerState(SamplingParams(seed=1, top_k=4, temperature=5.0), [0])])
    assert {sample(logits, batch)[0] for _ in range(200)} == {33, 1057, 4100, 70, 4999}
    assert [token for token, _ in logprobs(logits, [0], [6])[0][1]] == [33, 1057, 4100, 70, 4999, 0]


def test_top_k_takes_the_highest_even_where_a_temperature_makes_all_equally_likely():
    logits = np.arange(20000, dtype=np.float32)[None] * np.float32(1e-30)
    logits[0, 5] = 1.0
    batch = SamplingBatch([SamplerState(SamplingParams(seed=2, top_k=2, temperature=1e20), [0])])
    assert {sample(logits, batch)[0] for _ in range(30)} == {5, 19999}


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.95}, {"min_p": 0.05}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_usual_parameters_do_not_need_the_slow_computation_over_the_whole_row(filters, vocab, monkeypatch):
    logits = np.repeat(large_rows("ranks", 1, vocab, scale=1.5, offset=18.0), 20, axis=0)
    monkeypatch.setattr(sampling, "sample_whole_row", lambda *_: pytest.fail("slow"))
    tokens_of(logits, [SamplerState(SamplingParams(seed=seed, temperature=0.8, **filters), [0]) for seed in range(20)])


@given(logits=ANY_ROW, n=st.integers(0, 40), data=st.data())
def test_log_probabilities_are_log_softmax_and_top_tokens_the_likeliest_in_order(logits, n, data):
    row = logits[0].astype(np.float64)
    token = data.draw(st.integers(0, len(row) - 1))
    ((logprob, top),) = logprobs(logits, [token], [n])
    expected = row - row.max() - math.log(np.exp(row - row.max()).sum())
    assert logprob == pytest.approx(expected[token], abs=1e-5, rel=1e-6)
    ranking = [each for each in np.argsort(-row, kind="stable")[:n].tolist() if row[each] > -INF]
    assert [each for each, _ in top] == ranking
    assert [each for _, each in top] == pytest.approx(expected[ranking], abs=1e-5, rel=1e-6)


def test_log_probabilities_are_the_models_own_whatever_the_parameters_and_the_mask():
    plain = logprobs(LOGITS[None], [9], [VOCAB])
    sampler = SamplerState(
        SamplingParams(logit_bias=[(9, 10.0)], temperature=2.0, seed=1, top_k=1), [0], banned=(2,), banned_for=1
    )
    assert tokens_of(LOGITS[None].copy(), [sampler], mask_of(1, VOCAB, [[9, 3]])) == [9]
    assert logprobs(LOGITS[None], [9], [VOCAB]) == plain


@pytest.mark.parametrize("as_laid_out", [np.ascontiguousarray, column_major, lambda x: column_major(bfloat16(x))])
def test_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(as_laid_out):
    logits = rounded(large_rows("normal", 6, 5025))
    prompt, whole = [1, 2, 3, 4, 5, 6], logprobs(logits[:5], [2, 3, 4, 5, 6], [4] * 5)
    for size in (1, 2, 6):
        found = []
        for begin in range(0, 5, size):
            followers = prompt[begin + 1 : begin + size + 1]
            found += logprobs(as_laid_out(logits[begin : begin + len(followers)]), followers, [4] * len(followers))
        assert found == whole


def test_other_dtypes_are_not_read_as_if_they_were_logits():
    with pytest.raises(AssertionError, match="logits are float32"):
        sample(np.zeros((1, 8), np.float64), SamplingBatch([SamplerState(SamplingParams(), [0])]))


def test_the_example_that_explains_the_loops_is_right():
    source = loops.source_of(rows_of([1.0, 3.0, 0.5, 2.0, 2.5]))
    maxima = loops.maxima_of(source)
    sums = loops.sums_of(source, np.float32([3.0]), np.float32([sampling.LOG2_E]))[0]
    assert sums.sum() == pytest.approx(2.19, abs=0.005)

    def listed(k):
        ids, scores = np.empty(5, np.int64), np.empty(5, np.float32)
        count = loops.list_top(source, 0, maxima[0], 3.0, k, ids, scores)
        return ids, scores[:count], k == 2 or count < k

    ids, scores, is_complete = listed(2)
    assert ids[:2].tolist() == [1, 4]
    assert loops.draw_listed(ids, scores, is_complete, sums, 3.0, 1.0, 1.0, 0.0, 0.7) == 4
    assert loops.draw_listed(*listed(loops.FIRST_TOP_TOKENS), sums, 3.0, 1.0, 0.8, 0.0, 0.7) == 4
    assert loops.draw_any(source, 0, sums, np.float32(3.0), np.float32(sampling.LOG2_E), 0.7) == 3


@pytest.mark.processes
def test_the_first_steps_wait_for_no_compiler():
    """In a process of its own, where no other test has compiled anything."""
    code = """
import numpy as np
from engine.sampling import sampling
from engine.sampling import loops as sampling_loops
from engine.sampling.sampling import *
from protocol import SamplingParams

def compiled():
    return {name: len(loop.signatures) for name, loop in vars(sampling_loops).items() if hasattr(loop, "signatures")}

compile_loops(["float32", "bfloat16"])
before = compiled()
assert before["choose_tokens"]
filters = {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.2}, {"typical_p": 0.5}, {"top_k": 700}, {"repetition_penalty": 2.0}
for vocab in 40, 4096:
    rows = len(filters) + 1
    flat = np.random.default_rng(0).standard_normal((rows, vocab)).astype(np.float32)
    read_only = flat.copy()
    read_only.flags.writeable = False
    for logits in flat, flat * 0, np.ascontiguousarray(flat.T).T, flat.view(np.uint32).astype(np.uint16) >> 8, read_only:
        kinds = [SamplingParams(), *(SamplingParams(seed=1, **each) for each in filters)]
        for mask in NO_MASK, np.full((rows, -(-vocab // 32)), 0x7FFFFFFF, np.uint32):
            tokens = sampling.sample(logits, SamplingBatch([SamplerState(kind, [0]) for kind in kinds]), mask)
        sampling.logprobs(logits, [0] * rows, range(rows))
print({name: count for name, count in compiled().items() if count != before[name]})
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "{}"


@pytest.mark.processes
def test_loops_are_compiled_also_where_they_cannot_be_cached(tmp_path):
    """As in a container with a read-only file system."""
    (tmp_path / "engine" / "sampling").mkdir(parents=True)
    sampling = [f"engine/sampling/{name}.py" for name in ("__init__", "sampling", "loops")]
    for name in ("engine/__init__.py", *sampling, "protocol.py"):
        shutil.copy(HERE / name, tmp_path / name)
    (tmp_path / "engine" / "sampling" / "__pycache__").write_text("no folder")
    (tmp_path / "home").write_text("no folder")
    nowhere = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": ""}
    code = "from engine.sampling import sampling; import numpy as np\n"
    code += "print(round(sampling.logprobs(np.zeros((1, 4), np.float32), [0], [0])[0][0], 4))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | nowhere, capture_output=True, text=True, check=True
    )
    assert (ran.stdout, ran.stderr) == ("-1.3863\n", ""), "the log of a quarter"


@pytest.mark.parametrize("as_laid_out", [np.ascontiguousarray, column_major, bfloat16, lambda x: column_major(bfloat16(x))])
@given(logits=ANY_ROW)
def test_greedy_rows_get_the_highest_logit_with_the_lowest_id_in_every_layout(as_laid_out, logits):
    rows = rounded(np.concatenate([logits, np.roll(logits, 1, axis=1), np.flip(logits, axis=1)]))
    tokens = sample(as_laid_out(rows), SamplingBatch([SamplerState(SamplingParams(), [0]) for _ in rows]))
    assert tokens == rows.argmax(axis=1).tolist()


@pytest.mark.processes
def test_another_checkout_loads_the_loops_that_one_has_compiled(tmp_path):
    code = """
import numpy as np
from engine.sampling import loops as sampling_loops
sampling_loops.sample_index(np.ones(3), 0.5)
print(sum(sampling_loops.sample_index.stats.cache_hits.values()))
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    hits = []
    for name in ("one", "another"):
        shutil.copytree(HERE / "engine", tmp_path / name / "engine")
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, cwd=tmp_path / name, env=environment, capture_output=True, text=True, check=True)
        hits.append(ran.stdout)
    assert hits == ["0\n", "1\n"]


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_loops_in_the_cache_are_compiled_again_with_a_warning(tmp_path, ending):
    code = """
import numpy as np
from engine.sampling import loops, sampling
sampling.sample = lambda *_: None
sampling.logprobs = lambda *_: loops.sample_index(np.ones(3), 0.5)  # the one that compiles soonest
sampling.compile_loops(["float32"])
print(sum(loops.sample_index.stats.cache_hits.values()))
"""

    def start():
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=True)
        return ran.stdout, ran.stderr

    assert start() == ("0\n", "")
    for damage in (0, 40):
        (file,) = tmp_path.glob(f"loops-*/*.{ending}")
        os.truncate(file, damage)
        hits, warning = start()
        assert hits == "0\n" and f"The compiled loops in {file.parent} are damaged" in warning
        assert start() == ("1\n", "")


def test_loops_that_lack_memory_keep_their_cache(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(sampling, "_run_loops", fail)
    monkeypatch.setattr(sampling.shutil, "rmtree", lambda folder: pytest.fail(f"{folder} is removed"))
    with pytest.raises(MemoryError):
        sampling.compile_loops(["float32"])


@pytest.mark.processes
def test_numba_writes_nothing_into_a_debug_log(tmp_path):
    code = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
from engine.sampling import sampling
from engine.sampling import loops as sampling_loops
import numpy as np
sampling_loops.sample_index(np.ones(3), 0.5)
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == ""
