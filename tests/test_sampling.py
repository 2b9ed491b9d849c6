"""From logits to token ids: the distribution is exact, a seed decides alone, and no row and no parameter spoils another.

The exact distributions are computed with transformers' own processors, in the order that is promised: penalties,
temperature, top-k, top-p, typical-p.
"""

import itertools
import math
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from config import HERE
from logits import ABREAST, Logits
from protocol import Sampling
from sampling import (
    FAST_ERROR,
    SHORTLIST,
    Plan,
    Sampler,
    SamplingError,
    choose,
    describe,
    device_parameters,
    drawn,
    prompt_logprobs,
)

INF = math.inf
VOCABULARY = 12
LOGITS = torch.tensor([0.3, -1.2, 2.1, 1.9, 0.0, -0.4, 1.1, -2.5, 0.8, 1.5, -0.9, -INF])
PROMPT = [2, 2, 5, 8, 11]
GENERATED = [3, 3, 6, 3]
DRAWS = 4000


class Choice(NamedTuple):
    token: int
    logprob: float
    top: list[tuple[int, float]]


def sample(logits: torch.Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
    """Chooses and describes."""
    chosen, looked_at = choose(logits, Plan(samplers))
    tokens = [0 if isinstance(token, Exception) else token for token in chosen]
    described = describe(looked_at, tokens, [sampler.top_n_tokens for sampler in samplers])
    return [
        token if isinstance(token, Exception) else what if isinstance(what, Exception) else Choice(token, *what)
        for token, what in zip(chosen, described)
    ]


def exact_distribution(logits: torch.Tensor, sampling: Sampling, prompt: list[int], generated: list[int]) -> np.ndarray:
    """What transformers would draw from, float64 [vocab]. What it lacks are OpenAI's formulas."""
    ids, scores = torch.tensor([prompt + generated]), logits.double()[None].clone()
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token in generated:
        scores[0, token] -= sampling.frequency_penalty
    for token in set(generated):
        scores[0, token] -= sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        scores[0, token] += bias
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.typical_p < 1.0:
        scores = TypicalLogitsWarper(sampling.typical_p)(ids, scores)
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
    freedom = len(cells) - 1
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    if freedom == 0:
        return 0.0
    z = 3.0902  # of the normal distribution at 0.999
    return statistic / (freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3)


def tokens_of(choices: list[Choice | Exception]) -> list[int]:
    for choice in choices:
        if isinstance(choice, Exception):
            raise choice
    return [choice.token for choice in choices]


def sampler_after(sampling: Sampling, prompt: list[int], generated: list[int]) -> Sampler:
    sampler = Sampler(sampling, prompt)
    for token in generated:
        sampler.record(token)
    return sampler


def first_draws(prompt: list[int], generated: list[int], **parameters) -> Counter:
    """What the seeds 0, 1, 2, ... choose as the token after `prompt` and `generated`."""
    samplers = [sampler_after(Sampling(seed=seed, **parameters), prompt, generated) for seed in range(DRAWS)]
    return Counter(tokens_of(sample(LOGITS.expand(DRAWS, -1), samplers)))


PARAMETERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 100},
    {"top_p": 0.6},
    {"top_p": 0.95},
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
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 8, "typical_p": 0.8},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "typical_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_tokens_are_drawn_from_exactly_the_distribution_that_was_asked_for(parameters):
    expected = exact_distribution(LOGITS, Sampling(**parameters), PROMPT, GENERATED)
    assert chi_square_excess(first_draws(PROMPT, GENERATED, **parameters), expected) < 1


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.6, "top_k": 6}, {"temperature": 2.0, "top_p": 0.9}], ids=str)
def test_the_tokens_of_one_seed_follow_the_distribution_too(parameters):
    sampler = Sampler(Sampling(seed=7, **parameters), PROMPT)
    counts = Counter(tokens_of(sample(LOGITS[None], [sampler]))[0] for _ in range(DRAWS))
    assert chi_square_excess(counts, exact_distribution(LOGITS, Sampling(**parameters), PROMPT, [])) < 1


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        ({"temperature": 1.0}, {"temperature": 1.2}),
        ({"top_k": 5}, {"top_k": 6}),
        ({"top_p": 0.9}, {"top_p": 0.95}),
        ({"typical_p": 0.6}, {"top_p": 0.6}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.3}),
        ({"frequency_penalty": 0.4}, {"frequency_penalty": 0.6}),
        ({"presence_penalty": 0.6}, {"presence_penalty": 0.9}),
        ({"presence_penalty": 0.6}, {"frequency_penalty": 0.6}),
        ({"logit_bias": [(2, 0.5)]}, {"logit_bias": [(2, 0.8)]}),
    ],
    ids=str,
)
def test_the_chi_square_test_tells_near_distributions_apart(drawn, claimed):
    expected = exact_distribution(LOGITS, Sampling(**claimed), PROMPT, GENERATED)
    assert chi_square_excess(first_draws(PROMPT, GENERATED, **drawn), expected) > 1


def test_the_repetition_penalty_counts_the_prompt_and_the_frequency_penalty_does_not():
    logits = torch.tensor([[2.0, 1.9, -1.0]])

    def greedy(prompt, **penalty):
        return tokens_of(sample(logits, [Sampler(Sampling(**penalty), prompt)]))

    assert greedy([2], repetition_penalty=1.5) == [0]
    assert greedy([0], repetition_penalty=1.5) == [1]
    assert greedy([0, 1, 2], repetition_penalty=100.0) == [0]
    assert greedy([0, 0, 0], frequency_penalty=2.0) == [0]


def test_greedy_applies_a_repetition_penalty_to_what_it_generated():
    sampler = Sampler(Sampling(repetition_penalty=1.5), [3])
    logits = torch.tensor([[3.0, 2.5, 2.2, -1.0]])
    assert [tokens_of(sample(logits, [sampler]))[0] for _ in range(4)] == [0, 1, 2, 0]


def test_a_repetition_penalty_lowers_negative_logits_too():
    logits = torch.tensor([[-1.0, -1.2]])
    assert tokens_of(sample(logits, [Sampler(Sampling(repetition_penalty=1.5), [0])])) == [1]


def test_greedy_applies_a_frequency_penalty_once_for_each_time_a_token_was_generated():
    sampler = Sampler(Sampling(frequency_penalty=0.5), [0])
    logits = torch.tensor([[3.0, 2.2, 1.9, -1.0]])
    # 3.0 | 2.5 | 2.0 2.2 | 2.0 1.7 | 1.5 1.7 1.9 | 1.5 1.7 1.4
    assert [tokens_of(sample(logits, [sampler]))[0] for _ in range(6)] == [0, 0, 1, 0, 2, 1]


def test_greedy_applies_a_presence_penalty_once_however_often_a_token_was_generated():
    sampler = Sampler(Sampling(presence_penalty=0.5), [0])
    logits = torch.tensor([[3.0, 2.7, 2.4, -1.0]])
    # 3.0 | 2.5 2.7 | 2.5 2.2 2.4, and so it stays until 2 was there: never
    assert [tokens_of(sample(logits, [sampler]))[0] for _ in range(5)] == [0, 1, 0, 0, 0]


def test_frequency_and_presence_penalties_add_up():
    sampler = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.5), [0])
    logits = torch.tensor([[3.0, 2.2, 1.9, -1.0]])
    # 3.0 | 2.0 2.2 | 2.0 1.2 1.9 | 1.5 1.2 1.9
    assert [tokens_of(sample(logits, [sampler]))[0] for _ in range(4)] == [0, 1, 0, 2]


def test_greedy_follows_a_bias_and_the_log_probability_is_still_the_models():
    logits = torch.tensor([[3.0, 2.0, -1.0, 0.0]])
    (plain,) = sample(logits, [Sampler(Sampling(), [0], top_n_tokens=4)])
    (biased,) = sample(logits, [Sampler(Sampling(logit_bias=[(2, 4.5)]), [0], top_n_tokens=4)])
    (forbidden,) = sample(logits, [Sampler(Sampling(logit_bias=[(0, -100.0)]), [0], top_n_tokens=4)])
    assert [plain.token, biased.token, forbidden.token] == [0, 2, 1]
    assert plain.top == biased.top == forbidden.top
    assert [biased.logprob, forbidden.logprob] == [dict(plain.top)[2], dict(plain.top)[1]]


def test_a_bias_does_not_make_an_impossible_token_possible():
    logits = torch.tensor([[3.0, -INF]])
    assert tokens_of(sample(logits, [Sampler(Sampling(logit_bias=[(1, 100.0)]), [0])])) == [0]


def test_the_repetition_penalty_is_of_the_models_logit_not_of_the_bias():
    logits = torch.tensor([[2.0, 4.0]])
    # 2 / 2 + 4 = 5 beats 4; (2 + 4) / 2 = 3 would not
    assert tokens_of(sample(logits, [Sampler(Sampling(repetition_penalty=2.0, logit_bias=[(0, 4.0)]), [0])])) == [0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=5), Sampling(repetition_penalty=1.1)], ids=str)
def test_banned_tokens_do_not_come_before_their_time_and_may_come_then(sampling):
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.5]])
    sampler = Sampler(sampling, [3], banned=frozenset([0, 1]), banned_for=3)
    tokens = [tokens_of(sample(logits, [sampler]))[0] for _ in range(9)]
    assert not {0, 1} & set(tokens[:3])
    assert set(tokens[3:]) <= {0, 1}


def test_a_ban_leaves_the_log_probabilities_of_the_model():
    sampler = Sampler(Sampling(), [0], top_n_tokens=2, banned=(2, 3), banned_for=1)
    (banned,), (plain,) = sample(LOGITS[None], [sampler]), sample(LOGITS[None], [Sampler(Sampling(), [0], VOCABULARY)])
    assert banned.token == 9
    assert [token for token, _ in banned.top] == [2, 3]
    assert banned.logprob == dict(plain.top)[9]


@pytest.mark.parametrize("seed", [None, 4])
def test_a_ban_that_leaves_nothing_fails_that_row_alone(seed):
    logits = torch.tensor([[1.0, 2.0, -INF], [1.0, 2.0, -INF]])
    sampling = Sampling(seed=seed)
    failed, other = sample(logits, [Sampler(sampling, [0], banned=[0, 1], banned_for=1), Sampler(sampling, [0])])
    assert isinstance(failed, SamplingError)
    assert isinstance(other, Choice)


def test_a_banned_token_need_not_be_in_the_vocabulary():
    assert tokens_of(sample(torch.tensor([[1.0, 2.0]]), [Sampler(Sampling(), [0], banned=[1, 50], banned_for=1)])) == [0]


def test_scores_are_changed_only_while_there_is_something_to_change():
    assert not Sampler(Sampling(), [0], banned=[1]).changes_scores
    assert Sampler(Sampling(logit_bias=[(1, 0.1)]), [0]).changes_scores
    penalized = Sampler(Sampling(presence_penalty=0.1), [0])
    assert not penalized.changes_scores
    penalized.record(2)
    assert penalized.changes_scores
    banned = Sampler(Sampling(), [0], banned=[1], banned_for=1)
    assert banned.changes_scores
    banned.record(2)
    assert not banned.changes_scores


def test_a_penalty_below_one_draws_a_token_back():
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    assert tokens_of(sample(logits, [Sampler(Sampling(repetition_penalty=0.5), [1])])) == [1]
    sampler = Sampler(Sampling(frequency_penalty=-1.0), [0])
    sampler.record(1)
    assert tokens_of(sample(logits, [sampler])) == [1]


MANY_KINDS = [
    Sampling(),
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.7, top_k=5),
    Sampling(seed=3, top_p=0.8, repetition_penalty=1.3),
    Sampling(seed=4, typical_p=0.7, frequency_penalty=0.5),
    Sampling(seed=1),
    Sampling(repetition_penalty=1.2),
    Sampling(presence_penalty=0.7, logit_bias=[(4, 2.0)]),
]
STEPS = 12


def texts(order: list[int]) -> dict[int, list[Choice]]:
    """What each request of MANY_KINDS in `order` generates in STEPS steps, all in one batch; each has its own logits."""
    logits = torch.randn(STEPS, len(MANY_KINDS), 50, generator=torch.Generator().manual_seed(0)) * 2
    samplers = [Sampler(MANY_KINDS[request], [1, 2, 3], top_n_tokens=request % 3) for request in order]
    steps = [sample(logits[step, order], samplers) for step in range(STEPS)]
    return {request: [step[row] for step in steps] for row, request in enumerate(order)}


@given(order=st.permutations(range(len(MANY_KINDS))), crowd=st.integers(1, len(MANY_KINDS)))
@settings(max_examples=60)
def test_a_request_generates_the_same_alone_and_in_any_row_of_a_crowd(order, crowd):
    together = texts(order[:crowd])
    for request, choices in together.items():
        assert choices == texts([request])[request]


def test_a_seed_decides_and_another_seed_decides_otherwise():
    logits = torch.zeros(1, 1000)

    def text(seed):
        sampler = Sampler(Sampling(seed=seed), [0])
        return tuple(tokens_of(sample(logits, [sampler]))[0] for _ in range(10))

    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    assert len({text(seed) for seed in seeds}) == len(seeds)
    assert [text(seed) for seed in seeds] == [text(seed) for seed in seeds]


anything = st.floats(allow_nan=False, allow_infinity=False, width=32)
numbers = st.floats(-30, 30, width=32) | st.floats(-(2**17), 2**17, width=32) | anything | st.just(-INF)
rows = st.lists(numbers, min_size=1, max_size=40).filter(lambda row: max(row) > -INF)


def log_softmax(row: list[float]) -> list[float]:
    """The definition, in float64."""
    peak = max(row)
    normalizer = math.log(math.fsum(math.exp(x - peak) for x in row))
    return [x - peak - normalizer for x in row]


@given(row=rows, seed=st.none() | st.integers(0, 2**64 - 1), temperature=st.floats(0.1, 3.0), data=st.data())
@settings(max_examples=300)
def test_log_probabilities_are_log_softmax_of_the_models_own_logits(row, seed, temperature, data):
    prompt = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=5))
    sampling = Sampling(seed=seed, temperature=temperature, repetition_penalty=1.2, frequency_penalty=0.3)
    (choice,) = sample(torch.tensor([row]), [Sampler(sampling, prompt, top_n_tokens=len(row))])
    expected = log_softmax(row)
    assert choice.logprob == pytest.approx(expected[choice.token], abs=1e-4, rel=1e-6)
    assert dict(choice.top) == pytest.approx(dict(enumerate(expected)), abs=1e-4, rel=1e-6)


@given(row=rows, n=st.integers(1, 50))
@settings(max_examples=300)
def test_greedy_is_the_likeliest_and_top_tokens_are_the_likeliest_ones_in_order(row, n):
    (choice,) = sample(torch.tensor([row]), [Sampler(Sampling(), [0], top_n_tokens=n)])
    ranking = sorted(range(len(row)), key=lambda token: (-row[token], token))
    assert choice.token == ranking[0]
    assert [token for token, _logprob in choice.top] == ranking[:n]


def test_no_top_tokens_unless_they_are_asked_for():
    (choice,) = sample(LOGITS[None], [Sampler(Sampling(), [0])])
    assert choice.top == []


@pytest.mark.parametrize("lie", ["row by row", "token by token", "as one row"])
def test_logits_stay_as_they_are(lie, monkeypatch):
    logits = LOGITS.expand(4, -1)
    if lie != "as one row":
        logits = logits.clone() if lie == "row by row" else by_token(logits)
    kinds = [Sampling(), Sampling(seed=1, top_p=0.5), Sampling(repetition_penalty=2.0, frequency_penalty=1.0)]
    samplers = [sampler_after(sampling, PROMPT, GENERATED) for sampling in [*kinds, kinds[-1]]]
    monkeypatch.setattr(samplers[-1], "change", lambda scores: scores.fill(0.0) or 1 / 0)
    touched = np.arange(VOCABULARY)
    monkeypatch.setattr(samplers[-1], "touched", lambda vocab_size: touched)
    *told, failed = sample(logits, samplers)
    assert isinstance(failed, ZeroDivisionError) and not any(isinstance(each, Exception) for each in told)
    assert torch.equal(logits, LOGITS.expand(4, -1))


EXTREMES = [
    {"temperature": 1e-300},
    {"temperature": 5e-324},
    {"temperature": 1e300},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e300, "temperature": 1e300},
    {"repetition_penalty": 1e-300, "temperature": 1e-300},
    {"frequency_penalty": 2.0, "temperature": 1e-300},
    {"frequency_penalty": -2.0, "temperature": 1e300},
    {"presence_penalty": 2.0, "temperature": 1e-300},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": 1e300},
    {"logit_bias": [(0, 100.0), (1, -100.0)], "temperature": 1e-300},
    {"logit_bias": [(11, 100.0)], "repetition_penalty": 1e-300, "temperature": 1e300},
    {"top_k": 10**9},
    {"top_k": 2**31 - 1, "top_p": 1e-300},
    {"top_p": 1e-300},
    {"top_p": 1 - 1e-16},
    {"typical_p": 1e-300},
    {"typical_p": 1 - 1e-16, "temperature": 1e300},
    {"typical_p": 0.5, "top_p": 1e-300, "top_k": 1, "temperature": 1e-300},
]
EXTREME_ROWS = {
    "usual": LOGITS.tolist(),
    "all equal": [1.0] * VOCABULARY,
    "all negative": [-float(token) - 1 for token in range(VOCABULARY)],
    "huge": [3e38, -3e38, 1e30, -1e30, 3.3e38, 0.0, 1e-38, -1e-38, 1e-45, 1.0, -1.0, -INF],
    "one is possible": [-INF] * 7 + [-5.0] + [-INF] * 4,
}


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
@pytest.mark.parametrize("row", EXTREME_ROWS)
@pytest.mark.parametrize("parameters", EXTREMES, ids=str)
def test_extreme_parameters_always_choose_a_possible_token(parameters, row, seed):
    logits = torch.tensor([EXTREME_ROWS[row]])
    sampler = sampler_after(Sampling(seed=seed, **parameters), list(range(VOCABULARY)), GENERATED)
    for _ in range(10):
        (choice,) = sample(logits, [sampler])
        assert isinstance(choice, Choice), choice
        assert 0 <= choice.token < VOCABULARY
        assert logits[0, choice.token] > -INF
        assert -INF < choice.logprob <= 1e-6


parameters = st.fixed_dictionaries(
    {
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "temperature": st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False),
        "top_k": st.integers(0, 2**31 - 1),
        "top_p": st.floats(0, 1, exclude_min=True),
        "typical_p": st.floats(0, 1, exclude_min=True),
        "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
    }
)


@given(row=rows, parameters=parameters, data=st.data())
@settings(max_examples=500)
def test_no_parameters_and_no_logits_bring_anything_but_a_possible_token(row, parameters, data):
    ids = st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=8)
    bias = data.draw(st.dictionaries(st.integers(0, len(row) - 1), st.floats(-100, 100), max_size=4))
    sampling = Sampling(**parameters, logit_bias=list(bias.items()))
    sampler = sampler_after(sampling, data.draw(ids), data.draw(ids))
    (choice,) = sample(torch.tensor([row]), [sampler])
    assert isinstance(choice, Choice), choice
    assert row[choice.token] > -INF


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=3), Sampling(repetition_penalty=1.2)])
@pytest.mark.parametrize("spoilt", [math.nan, INF])
def test_a_row_that_is_no_number_fails_alone(sampling, spoilt):
    logits = LOGITS.expand(3, -1).clone()
    logits[1, 4] = spoilt
    first, failed, last = sample(logits, [Sampler(sampling, [0]) for _ in range(3)])
    (alone,) = sample(LOGITS[None], [Sampler(sampling, [0])])
    assert isinstance(failed, SamplingError)
    assert first == last == alone


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_a_row_of_nothing_but_spoilt_logits_fails(value):
    (failed,) = sample(torch.full((1, VOCABULARY), value), [Sampler(Sampling(seed=1), [0])])
    assert isinstance(failed, SamplingError)


def test_a_vocabulary_of_one_token_leaves_no_choice():
    sampler = Sampler(Sampling(seed=1, top_k=1, top_p=0.5, typical_p=0.5), [0], top_n_tokens=5)
    assert sample(torch.tensor([[4.0]]), [sampler]) == [Choice(0, 0.0, [(0, 0.0)])]


def chunked(logits: torch.Tensor, sizes: list[int]):
    """logits in chunks of these sizes, over and over."""
    rest = logits
    for size in itertools.cycle(sizes):
        if not len(rest):
            return
        yield rest[:size]
        rest = rest[size:]


@given(
    row_and_prompt=st.integers(1, 12).flatmap(
        lambda vocabulary: st.lists(
            st.tuples(
                st.lists(numbers, min_size=vocabulary, max_size=vocabulary).filter(lambda row: max(row) > -INF),
                st.integers(0, vocabulary - 1),
            ),
            min_size=1,
            max_size=9,
        )
    ),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    n=st.integers(1, 15),
)
@settings(max_examples=200)
def test_prompt_log_probabilities_are_of_the_next_prompt_token_whatever_the_chunks(row_and_prompt, sizes, n):
    logits, prompt = torch.tensor([row for row, _ in row_and_prompt]), [token for _, token in row_and_prompt]
    last, logprobs, top = prompt_logprobs(chunked(logits, sizes), prompt, n)
    assert torch.equal(last, logits[-1:])
    assert len(logprobs) == len(top) == len(prompt) - 1
    for row, token, logprob, likeliest in zip(logits.tolist(), prompt[1:], logprobs, top):
        expected = log_softmax(row)
        assert logprob == pytest.approx(expected[token], abs=1e-4, rel=1e-6)
        ranking = sorted(range(len(row)), key=lambda i: (-row[i], i))
        assert [i for i, _ in likeliest] == ranking[:n]


def test_a_place_in_a_prompt_is_told_as_a_generated_token_is():
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    chosen = sample(logits, [Sampler(Sampling(), [0], top_n_tokens=3) for _ in range(5)])
    prompt = [0, *(choice.token for choice in chosen[:-1])]
    _last, logprobs, top = prompt_logprobs(chunked(logits, [2]), prompt, 3)
    assert logprobs == [choice.logprob for choice in chosen[:-1]]
    assert top == [choice.top for choice in chosen[:-1]]


def test_no_likeliest_tokens_of_a_prompt_unless_they_are_asked_for():
    assert prompt_logprobs([LOGITS.expand(3, -1)], [1, 2, 3], 0)[2] == [[], []]


def test_a_prompt_of_one_token_has_no_log_probabilities():
    last, logprobs, top = prompt_logprobs([LOGITS[None]], [1], 5)
    assert torch.equal(last, LOGITS[None])
    assert (logprobs, top) == ([], [])


@pytest.mark.parametrize("spoilt", [math.nan, INF])
def test_a_prompt_whose_logits_are_no_numbers_fails(spoilt):
    logits = LOGITS.expand(4, -1).clone()
    logits[1, 4] = spoilt
    with pytest.raises(SamplingError, match="not a number"):
        prompt_logprobs(chunked(logits, [2]), [1, 2, 3, 4], 0)


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        (Sampling(), (1, 1.0, 1.0)),
        (Sampling(temperature=0.5, top_k=7, top_p=0.2), (1, 1.0, 1.0)),  # greedy, because there is no seed
        (Sampling(seed=5), (0, 1.0, 1.0)),
        (Sampling(seed=5, temperature=0.5, top_k=7, top_p=0.2), (7, 0.2, 0.5)),
    ],
)
def test_a_device_is_told_what_it_can_do(sampling, told):
    assert device_parameters(sampling) == told


def test_what_the_device_chose_is_taken_unless_it_is_no_token():
    first, negative, last, beyond = drawn(torch.tensor([0, -1, VOCABULARY - 1, VOCABULARY]), VOCABULARY)
    assert (first, last) == (0, VOCABULARY - 1)
    assert [str(refused) for refused in (negative, beyond)] == ["the device chose a token that does not exist"] * 2
    assert isinstance(negative, SamplingError)


def plain_cumulative(scores: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Over the whole vocabulary in float64, step by step: the ids that may be drawn, and their cumulative weight. Where only
    some of the likeliest may be drawn they come likeliest first, else in the order of their ids."""
    ids = np.arange(len(scores))
    if sampling.top_k or sampling.top_p < 1.0:
        ids = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(scores):
        ids = ids[scores[ids] >= np.sort(scores)[-sampling.top_k]]
    weights = np.exp((scores[ids].astype(np.float64) - float(scores.max())) / sampling.temperature)

    def first(order, share):
        cumulative = np.cumsum(weights[order])
        return np.sort(order[: np.searchsorted(cumulative, share * cumulative[-1]) + 1])

    if sampling.top_p < 1.0:
        kept = first(np.arange(len(ids)), sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    if sampling.typical_p < 1.0:
        shares = weights / weights.sum()
        surprise = -np.log(shares)
        entropy = np.sum(shares * surprise, where=shares > 0)
        kept = first(np.argsort(np.abs(surprise - entropy), kind="stable"), sampling.typical_p)
        ids, weights = ids[kept], weights[kept]
    return ids, np.cumsum(weights)


def plain_choice(scores: np.ndarray, sampling: Sampling, draw: float) -> int:
    ids, cumulative = plain_cumulative(scores, sampling)
    return int(ids[np.searchsorted(cumulative, draw * cumulative[-1], side="right")])


def is_by_rejection(sampling: Sampling, possible: np.ndarray) -> bool:
    """Whether its token need not be that at the draw's place."""
    return len(possible) > SHORTLIST and sampling.top_k == 0 and sampling.typical_p == 1.0


def draws_of(seed: int, count: int) -> list[float]:
    """SplitMix64's numbers (Steele, Lea and Flood 2014), whose state is the seed."""
    return [mixed((seed + n * 0x9E3779B97F4A7C15) % 2**64) / 2**53 for n in range(1, count + 1)]


def mixed(state: int) -> int:
    """53 bits."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return (state ^ (state >> 31)) >> 11


def seed_of(bits: int) -> int:
    """The seed whose first draw has these bits: what SplitMix64 does, backwards."""

    def unshifted(state: int, by: int) -> int:
        found = state
        for _ in range(64 // by):
            found = state ^ (found >> by)
        return found

    state = unshifted(bits << 11, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    state = unshifted(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (unshifted(state, 30) - 0x9E3779B97F4A7C15) % 2**64


SHAPES = ("normal", "plateaus", "two values", "equal", "ranks", "one peak", "rising", "peaks in one block")


def large_row(shape: str, size: int, seed: int, scale: float = 2.0, offset: float = 0.0, impossible: float = 0.0) -> np.ndarray:
    """float32 [size]: that shape, stretched by `scale`, moved by `offset`, a share of it -inf."""
    random = np.random.default_rng(seed)
    row = {
        "normal": lambda: random.standard_normal(size),
        "plateaus": lambda: np.round(random.standard_normal(size)),
        "two values": lambda: (random.random(size) < 0.01).astype(float),
        "equal": lambda: np.zeros(size),
        "ranks": lambda: -np.log(random.permutation(size) + 1.0),
        "one peak": lambda: np.where(np.arange(size) == random.integers(size), 9.0, random.standard_normal(size)),
        "rising": lambda: np.linspace(-5, 5, size),
        "peaks in one block": lambda: (
            random.standard_normal(size) + 5.0 * (np.arange(size) // ABREAST == size // (2 * ABREAST))
        ),
    }[shape]()
    row = (row * scale + offset).astype(np.float32)
    row[random.random(size) < impossible] = -INF
    if row.max() == -INF:
        row[random.integers(size)] = offset
    return row


sizes = st.sampled_from([1, 2, ABREAST - 1, ABREAST, ABREAST + 1, 1000, 5120, 20000, 33001])
large_rows = st.builds(
    large_row,
    shape=st.sampled_from(SHAPES),
    size=sizes,
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 2.5, 10.0, 300.0]),
    offset=st.sampled_from([0.0, 20.0, -70.0, 95.0, -1000.0, 1e6]),
    impossible=st.sampled_from([0.0, 0.0, 0.01, 0.5, 0.999]),
)
temperatures = st.sampled_from([0.01, 0.3, 0.8, 1.0, 1.5, 5.0]) | st.floats(1e-300, 1e300) | st.floats(0.1, 2.0)
shares = st.sampled_from([1e-300, 1e-6, 0.25, 0.5, 0.9, 0.95, 0.99999, 1 - 1e-16]) | st.floats(0.01, 0.999)
filters = st.one_of(
    st.fixed_dictionaries({"top_k": st.integers(1, 600)}),
    st.fixed_dictionaries({"top_p": shares}),
    st.fixed_dictionaries({"top_k": st.integers(1, 600), "top_p": shares}),
    st.fixed_dictionaries({"top_k": st.integers(0, 100), "top_p": shares, "typical_p": shares}),
)


@given(row=large_rows, temperature=temperatures, filters=filters, seed=st.integers(0, 2**64 - 1))
@settings(max_examples=200)
def test_few_candidates_choose_the_very_token_that_the_whole_vocabulary_would(row, temperature, filters, seed):
    sampling = Sampling(seed=seed, temperature=temperature, **filters)
    sampler = Sampler(sampling, [0])
    with np.errstate(all="ignore"):
        possible, _ = plain_cumulative(row, sampling)
        expected = [plain_choice(row, sampling, draw) for draw in draws_of(seed, 4)]
    drawn = [tokens_of(sample(torch.from_numpy(row)[None], [sampler]))[0] for _ in range(4)]
    if is_by_rejection(sampling, possible):
        assert set(drawn) <= set(possible.tolist())
    else:
        assert drawn == expected


@pytest.mark.parametrize("shape", ["ranks", "normal"])
@pytest.mark.parametrize("off", [0.0, 1e-9, -1e-9, 3e-6, -3e-6, 2e-5, -2e-5])
def test_a_nucleus_whose_border_float32_cannot_tell_is_drawn_from_exactly(shape, off):
    """And as a rule without a look at the whole vocabulary: to most draws it does not matter."""
    row = large_row(shape, 20000, 7, scale=1.5 if shape == "ranks" else 4.0)
    shares = np.sort(torch.softmax(torch.from_numpy(row).double(), dim=-1).numpy())[::-1].cumsum()
    in_full = 0
    for last in range(3, 40, 4):
        sampling = Sampling(seed=last, top_p=float(shares[last] * (1.0 + off)))
        sampler = Sampler(sampling, [0])
        drawn = [tokens_of(sample(torch.from_numpy(row)[None], [sampler]))[0] for _ in range(30)]
        assert drawn == [plain_choice(row, sampling, draw) for draw in draws_of(last, 30)]
        in_full += sampler.in_full
    assert in_full < 0.2 * 10 * 30


def by_token(logits: torch.Tensor) -> torch.Tensor:
    """The same, with what all rows have for a token side by side in memory."""
    return logits.t().contiguous().t()


MIXED = [{"top_k": 20}, {}, {"top_p": 0.8, "temperature": 0.5}, {"repetition_penalty": 1.5, "top_k": 5}, {"typical_p": 0.5}]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 12, 20, 32, 33, 64])
@pytest.mark.parametrize("size", [1, 63, 700, 4096, 20001])
def test_logits_may_lie_in_memory_row_by_row_or_token_by_token(rows, size):
    logits = torch.from_numpy(np.stack([large_row("normal", size, seed) for seed in range(rows)]))
    assert choose(by_token(logits), Plan([Sampler(Sampling(), [0])] * rows))[0] == logits.argmax(dim=1).tolist()
    kinds = [Sampling(seed=row, **MIXED[row % len(MIXED)]) for row in range(rows)]
    samplers = [[Sampler(kind, [0], top_n_tokens=3) for kind in kinds] for _ in range(3)]
    among_others = by_token(torch.cat([logits, torch.zeros(3, size)]))[:rows]
    assert sample(among_others, samplers[0]) == sample(by_token(logits), samplers[1]) == sample(logits, samplers[2])


@given(
    crowd=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([*MIXED, None])), min_size=1, max_size=9),
    size=st.sampled_from([1, 63, 700, 20000, 20001]),
    shape=st.sampled_from(SHAPES),
    laid=st.sampled_from([torch.Tensor.contiguous, by_token]),
)
@settings(max_examples=100)
def test_bfloat16_yield_what_the_same_logits_yield_in_float32(crowd, size, shape, laid):
    rows = [torch.from_numpy(large_row(shape, size, seed)) for seed, _parameters in crowd]
    kinds = [Sampling() if parameters is None else Sampling(seed=seed, **parameters) for seed, parameters in crowd]
    narrow, wide = ([Sampler(kind, [0], top_n_tokens=3) for kind in kinds] for _ in range(2))
    for turn in range(3):
        logits = laid(torch.stack(rows).to(torch.bfloat16).roll(turn, dims=1))
        before = logits.clone()
        assert sample(logits, narrow) == sample(laid(logits.float()), wide)
        assert torch.equal(logits, before)


def test_nuclei_and_whole_distributions_may_be_asked_for_side_by_side():
    logits = by_token(torch.from_numpy(np.stack([large_row("ranks", 20000, seed) for seed in range(6)])))
    kinds = [Sampling(seed=row, **({"top_p": 0.9} if row < 3 else {})) for row in range(6)]
    together, _ = choose(logits, Plan([Sampler(kind, [0]) for kind in kinds]))
    assert together == [choose(logits[[row]], Plan([Sampler(kind, [0])]))[0][0] for row, kind in enumerate(kinds)]


@given(
    crowd=st.lists(st.tuples(st.integers(0, 2**32 - 1), temperatures, filters | st.just({})), min_size=2, max_size=6),
    size=st.sampled_from([20000, 33001]),
    shape=st.sampled_from(SHAPES),
    offset=st.sampled_from([0.0, 95.0, -1000.0]),
    laid=st.sampled_from([torch.Tensor.contiguous, by_token]),
)
@settings(max_examples=80)
def test_a_crowd_of_large_rows_chooses_what_each_of_them_would_choose_alone(crowd, size, shape, offset, laid):
    logits = torch.from_numpy(np.stack([large_row(shape, size, seed, offset=offset) for seed, _temperature, _filters in crowd]))
    kinds = [Sampling(seed=seed, temperature=temperature, **filters) for seed, temperature, filters in crowd]
    together = [Sampler(sampling, [0]) for sampling in kinds]
    alone = [Sampler(sampling, [0]) for sampling in kinds]
    for turn in range(2):
        turned = logits.roll(turn, dims=0)
        tokens, _ = choose(laid(turned), Plan(together))
        assert tokens == [choose(turned[[row]], Plan([sampler]))[0][0] for row, sampler in enumerate(alone)]
        for row, sampling in enumerate(kinds):
            if sampling.top_k or sampling.top_p < 1.0 or sampling.typical_p < 1.0:
                with np.errstate(all="ignore"):
                    possible, _ = plain_cumulative(turned[row].numpy(), sampling)
                    if is_by_rejection(sampling, possible):
                        assert tokens[row] in possible
                        continue
                    draw = draws_of(sampling.seed, turn + 1)[turn]
                    assert tokens[row] == plain_choice(turned[row].numpy(), sampling, draw)


@given(row=large_rows)
@settings(max_examples=200)
def test_a_list_made_anew_is_the_list_that_was_found(row):
    """So that it does not matter for how many there happens to be room."""
    found, anew = (Logits(torch.from_numpy(row)[None], [SHORTLIST]) for _ in range(2))
    anew.list_anew(0, SHORTLIST)
    count = anew.counts[0]
    assert count == min(SHORTLIST, (row > -INF).sum())
    if found.counts[0] > 0:
        assert found.ids[0, :count].tolist() == anew.ids[0, :count].tolist()
        assert found.scores[0, :count].tolist() == anew.scores[0, :count].tolist()


@given(row=large_rows, temperature=temperatures, seed=st.integers(0, 2**64 - 1))
@settings(max_examples=200)
def test_a_temperature_alone_never_gives_an_impossible_token(row, temperature, seed):
    sampler = Sampler(Sampling(seed=seed, temperature=temperature), [0])
    for _ in range(4):
        (token,) = tokens_of(sample(torch.from_numpy(row)[None], [sampler]))
        assert row[token] > -INF


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("size", [SHORTLIST - 1, SHORTLIST, SHORTLIST + 1, 300, 20000])
@pytest.mark.parametrize("shape", SHAPES)
def test_with_a_temperature_alone_every_token_is_drawn_as_often_as_it_should_be(shape, size, temperature):
    """Those beyond the likeliest, and those that are as likely as the last of them, too."""
    row = large_row(shape, size, 5, scale=0.7, impossible=0.1)
    logits, sampler = torch.from_numpy(row)[None], Sampler(Sampling(seed=3, temperature=temperature), [0])
    plan, draws = Plan([sampler]), 8000 if size < 1000 else 2000
    counts = Counter(choose(logits, plan)[0][0] for _ in range(draws))
    expected = torch.softmax(torch.from_numpy(row).double() / temperature, dim=-1).numpy()
    groups = np.arange(size) if size < 1000 else np.argsort(np.argsort(-row, kind="stable")).clip(max=SHORTLIST * 4) // 2
    grouped = Counter()
    for token, count in counts.items():
        grouped[int(groups[token])] += count
    assert chi_square_excess(grouped, np.bincount(groups, expected)) < 1


@given(row=large_rows, temperature=st.floats(1e-3, 1e3) | st.sampled_from([1e-12, 1e-9, 1e-6, 1e-5, 1e-4, 1e9]))
@settings(max_examples=300)
def test_a_total_is_as_right_as_the_proof_of_a_shortlist_needs(row, temperature):
    exact = np.exp((row.astype(np.float64) - float(row.max())) / temperature).sum()
    assert Logits(torch.from_numpy(row)[None], [1]).totals(np.array([temperature])) == pytest.approx(exact, rel=FAST_ERROR / 2)


@given(row=large_rows, temperature=st.floats(1e-3, 1e3), ranks=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=300)
def test_masses_are_as_right_as_the_proof_of_a_nucleus_needs(row, temperature, ranks):
    floors = np.sort(row)[[int(rank * (len(row) - 1)) for rank in ranks]]
    weights = np.exp((row.astype(np.float64) - float(row.max())) / temperature)
    above, reaching = Logits(torch.from_numpy(row)[None], [1]).masses(np.array([temperature]), floors[:, None])
    for n, floor in enumerate(floors):
        if reaching[n, 0] == INF:
            assert above[n, 0] == 0 and abs(row[row > -INF]).max() / temperature > 1e5, "float32 could have told"
            continue
        assert above[n, 0] == pytest.approx(weights[row > floor].sum(), rel=FAST_ERROR, abs=1e-30 * len(row))
        assert reaching[n, 0] == pytest.approx(weights[row >= floor].sum(), rel=FAST_ERROR, abs=1e-30 * len(row))


@given(row=large_rows)
@settings(max_examples=200)
def test_log_probabilities_of_a_large_vocabulary_are_right_to_a_hundred_thousandth(row):
    (choice,) = sample(torch.from_numpy(row)[None], [Sampler(Sampling(), [0], top_n_tokens=9)])
    exact = row.astype(np.float64) - float(row.max())
    exact -= math.log(np.exp(exact).sum())
    assert choice.logprob == pytest.approx(exact[choice.token], abs=1e-5)
    assert choice.logprob <= 0
    ranking = np.argsort(-row, kind="stable")[:9]
    assert [token for token, _ in choice.top] == ranking.tolist()
    assert [logprob for _, logprob in choice.top] == pytest.approx(exact[ranking], abs=1e-5)


COMMON = [{"top_k": 50}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.95}, {"top_p": 0.5}, {"top_k": 1}, {}]


@pytest.mark.parametrize("filters", COMMON, ids=str)
@pytest.mark.parametrize("size", [32000, 50257, 128256])
def test_what_is_usual_is_decided_by_few_candidates(size, filters):
    row = torch.from_numpy(large_row("ranks", size, 1, scale=1.5, offset=18.0))
    samplers = [Sampler(Sampling(seed=seed, temperature=0.8, **filters), [0]) for seed in range(50)]
    tokens_of(sample(row.expand(50, -1), samplers))
    assert sum(sampler.in_full for sampler in samplers) == 0


@pytest.mark.parametrize("top_p", [0.6, 0.95])
def test_a_nucleus_of_thousands_is_decided_without_sorting_the_whole_vocabulary(top_p, monkeypatch):
    row = large_row("normal", 128256, 2, scale=2.5)
    sampling = Sampling(seed=8, temperature=0.8, top_p=top_p)
    sampler = Sampler(sampling, [0])
    monkeypatch.setattr(sampler, "choose", None)  # nobody asks it
    drawn = {tokens_of(sample(torch.from_numpy(row)[None], [sampler]))[0] for _ in range(20)}
    assert drawn <= set(plain_cumulative(row, sampling)[0].tolist())
    assert len(drawn) > 10


@pytest.mark.parametrize(("shape", "scale"), [("normal", 0.7), ("plateaus", 0.2), ("ranks", 0.5), ("rising", 0.3)])
@pytest.mark.parametrize("top_p", [0.2, 0.9])
@pytest.mark.parametrize("by_token_with", [0, 2])  # other rows
def test_every_token_of_a_large_nucleus_is_drawn_as_often_as_it_should_be(shape, scale, top_p, by_token_with):
    """Those at its border, too, of which there are many that are equally likely where scores are rounded."""
    row = large_row(shape, 3000, 5, scale=scale, impossible=0.1)
    sampling = Sampling(seed=3, temperature=0.9, top_p=top_p)
    possible, cumulative = plain_cumulative(row, sampling)
    assert len(possible) > SHORTLIST
    logits = by_token(torch.from_numpy(row).expand(1 + by_token_with, -1))
    sampler = Sampler(sampling, [0])
    plan = Plan([sampler] + [Sampler(Sampling(), [0])] * by_token_with)
    counts = Counter(choose(logits, plan)[0][0] for _ in range(4000))
    groups = np.full(len(row), -1)
    groups[possible] = np.arange(len(possible)) * 30 // len(possible)
    grouped = Counter()
    for token, count in counts.items():
        grouped[int(groups[token])] += count
    assert -1 not in grouped, "tokens that are not in the nucleus"
    assert chi_square_excess(grouped, np.bincount(groups[possible], np.diff(cumulative, prepend=0.0)) / cumulative[-1]) < 1


def test_a_large_nucleus_does_not_depend_on_who_else_is_in_the_batch():
    rows = np.stack([large_row("normal", 5000, seed, scale=1.5) for seed in range(4)])
    kinds = [Sampling(seed=row, temperature=1.0, top_p=0.9) for row in range(4)]
    together, _ = choose(by_token(torch.from_numpy(rows)), Plan([Sampler(kind, [0]) for kind in kinds]))
    alone = [choose(torch.from_numpy(row)[None], Plan([Sampler(kind, [0])]))[0][0] for row, kind in zip(rows, kinds)]
    assert together == alone


@pytest.mark.parametrize("size", [5120, 20000])
def test_top_k_takes_the_highest_even_where_a_temperature_makes_all_of_them_equally_likely(size):
    row = np.arange(size, dtype=np.float32) * np.float32(1e-30)
    row[5] = 1.0
    sampler = Sampler(Sampling(seed=2, top_k=2, temperature=1e20), [0])
    drawn = {tokens_of(sample(torch.from_numpy(row)[None], [sampler]))[0] for _ in range(30)}
    assert drawn == {5, size - 1}


def test_a_random_stream_goes_on_whoever_else_is_in_the_batch():
    row = torch.from_numpy(large_row("normal", 1000, 9))
    one, other, late = (Sampler(Sampling(seed=seed), [0]) for seed in (7, 8, 9))
    companies = [other, one], [one], [one, other, late], [late, one], [one], [other, one]
    lonely = Sampler(Sampling(seed=7), [0])
    alone = [tokens_of(sample(row[None], [lonely]))[0] for _ in companies]
    drawn = [tokens_of(sample(row.expand(len(company), -1), company))[company.index(one)] for company in companies]
    assert drawn == alone and len(set(alone)) == len(alone)


@pytest.mark.parametrize("bits", [0, 2**53 - 1])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.01}, {"top_p": 0.999}, {"top_k": 700}, {"typical_p": 0.9}], ids=str)
def test_the_smallest_and_the_largest_draw_fall_on_a_possible_token(filters, bits):
    row = large_row("normal", 1000, 9)
    row[:300] = row[900:] = -INF
    assert draws_of(seed_of(bits), 1) == [bits / 2**53]
    sampler = Sampler(Sampling(seed=seed_of(bits), **filters), [0])
    (token,) = tokens_of(sample(torch.from_numpy(row)[None], [sampler]))
    assert row[token] > -INF


@pytest.mark.parametrize(
    ("shape", "filters"),
    [
        ("equal", {"top_p": 0.5}),
        ("ranks", {"typical_p": 0.5}),
    ],
    ids=str,
)
def test_what_few_candidates_cannot_decide_is_computed_in_full_and_counted(shape, filters):
    row = large_row(shape, 128256, 3)
    sampling = Sampling(seed=5, **filters)
    sampler = Sampler(sampling, [0])
    (token,) = tokens_of(sample(torch.from_numpy(row)[None], [sampler]))
    possible, _ = plain_cumulative(row, sampling)
    assert token in possible
    assert is_by_rejection(sampling, possible) or token == plain_choice(row, sampling, draws_of(5, 1)[0])
    assert sampler.in_full == 1


def test_a_row_is_computed_in_full_once_also_where_its_scores_are_changed():
    row = torch.from_numpy(large_row("normal", 20000, 4))
    sampler = Sampler(Sampling(seed=3, typical_p=0.9, logit_bias=[(1, 0.5)]), [0])
    tokens_of(sample(row[None], [sampler]))
    assert sampler.in_full == 1


def test_a_penalized_row_is_drawn_from_like_any_other():
    row = large_row("ranks", 128256, 4, scale=1.5, offset=18.0)
    prompt = np.argsort(-row)[:40].tolist()
    sampling = Sampling(seed=3, temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.3)
    penalized = row.copy()
    penalized[prompt] = np.where(row[prompt] > 0, row[prompt].astype(float) / 1.3, row[prompt].astype(float) * 1.3)
    sampler = Sampler(sampling, prompt)
    assert tokens_of(sample(torch.from_numpy(row)[None], [sampler])) == [plain_choice(penalized, sampling, draws_of(3, 1)[0])]
    assert sampler.in_full == 0


def test_the_draws_of_many_seeds_follow_the_distribution_of_a_large_row_and_no_near_one():
    row = large_row("normal", 700, 6, scale=1.0)
    samplers = [Sampler(Sampling(seed=seed, temperature=0.7), [0]) for seed in range(8000)]
    counts = Counter(tokens_of(sample(torch.from_numpy(row).expand(8000, -1), samplers)))
    expected = torch.softmax(torch.from_numpy(row).double() / 0.7, dim=-1).numpy()
    assert chi_square_excess(counts, expected) < 1
    tilted = torch.softmax(torch.from_numpy(row).double() / 0.8, dim=-1).numpy()
    assert chi_square_excess(counts, tilted) > 1


def kinds_on(logits: torch.Tensor, order: list[int]) -> list[Choice | Exception]:
    """What row `i` of the logits yields with the parameters of its own, for each `i` of `order`, in one batch."""
    samplers = [Sampler(MANY_KINDS[i % len(MANY_KINDS)], [1, 2, 3], top_n_tokens=i % 7) for i in order]
    return sample(logits[order], samplers)


@given(
    size=st.sampled_from([700, 5120, 20001]),
    seed=st.integers(0, 2**32 - 1),
    crowd=st.integers(1, 70),
    temperature=st.floats(1e-3, 1e3),
)
@settings(max_examples=25)
def test_not_a_bit_of_a_total_depends_on_how_many_rows_there_are(size, seed, crowd, temperature):
    logits = by_token(torch.from_numpy(np.stack([large_row("normal", size, seed + row) for row in range(crowd)])))

    def totals(logits: torch.Tensor) -> np.ndarray:
        return Logits(logits, [1] * len(logits)).totals(np.full(len(logits), temperature))

    together = totals(logits)
    for count in range(1, crowd, 9):
        assert np.array_equal(totals(by_token(logits[:count])), together[:count])
        assert np.array_equal(totals(logits[:count]), together[:count])
        assert np.array_equal(totals(logits[:count].contiguous()), together[:count])
    for row in range(0, crowd, 13):
        exact = np.exp((logits[row].double().numpy() - float(logits[row].max())) / temperature).sum()
        assert together[row] == pytest.approx(exact, rel=FAST_ERROR / 2)


@pytest.mark.parametrize("size", [32001, 50257, 128256])
def test_not_a_bit_of_a_large_row_depends_on_its_neighbours_its_place_or_the_threads(size):
    logits = torch.from_numpy(np.stack([large_row("normal", size, seed, offset=3.0 * seed) for seed in range(16)]))
    threads = torch.get_num_threads()
    together = kinds_on(logits, list(range(16)))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert kinds_on(logits, list(range(15, -1, -1))) == together[::-1]
            assert [kinds_on(logits, [i])[0] for i in range(16)] == together
    finally:
        torch.set_num_threads(threads)


def test_a_prompt_is_told_the_same_whatever_its_chunks():
    logits = torch.from_numpy(np.stack([large_row("normal", 50257, seed) for seed in range(6)]))
    results = [prompt_logprobs(chunked(logits, [size]), [1, 2, 3, 4, 5, 6], 4)[1:] for size in (1, 2, 6)]
    assert results[0] == results[1] == results[2]


def test_the_first_choices_wait_for_no_compiler():
    """In a process of its own, where no other test has had anything compiled."""
    code = """
import torch, logits, sampling
from protocol import Sampling
from sampling import Plan, Sampler, choose, compile_loops, describe

def compiled():
    loops = {**vars(logits), **vars(sampling)}
    return {name: len(loop.signatures) for name, loop in loops.items() if hasattr(loop, "signatures")}

compile_loops([torch.float32, torch.bfloat16])
torch.manual_seed(0)
before = compiled()
filters = {}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.2}, {"typical_p": 0.5}, {"top_k": 700}, {"repetition_penalty": 2.0}
for vocabulary in 40, 1000, 4096:
    flat = torch.randn(len(filters) + 1, vocabulary)
    for scores in flat, 5 * flat, torch.zeros_like(flat), flat.round(), flat.bfloat16():
        for laid in scores, scores.t().contiguous().t():
            samplers = [Sampler(Sampling(), [0]), *(Sampler(Sampling(seed=1, **each), [0]) for each in filters)]
            chosen, looked_at = choose(laid, Plan(samplers))
            describe(looked_at, chosen, range(len(samplers)))
print({name: count for name, count in compiled().items() if count != before[name]})
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "{}"
