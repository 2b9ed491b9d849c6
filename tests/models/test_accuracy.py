"""Which differences from transformers' logits are rounding, and which are a fault."""

import numpy as np
import pytest

from models.accuracy import MAX_KL_DIVERGENCE, find_fault

EXPECTED = np.random.default_rng(0).normal(0, 3, (80, 300)).astype(np.float32)
# How far rounding moves a logit, in each precision.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.1, "u8": 0.1, "int8": 0.2, "int4": 0.8}
EVERY_SECOND = range(0, 80, 2)


def moved(by, tokens=slice(None), logits=EXPECTED):
    """The logits of some tokens, each moved by about so much."""
    found = logits.copy()
    found[tokens] += np.random.default_rng(1).normal(0, by, found[tokens].shape)
    return found


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("precision", MAX_KL_DIVERGENCE)
def test_rounding_is_no_fault_and_what_moves_many_tokens_more_is_one(precision, has_experts):
    found = moved(ROUNDING[precision])
    assert find_fault(found, EXPECTED, precision, has_experts) is None
    assert find_fault(moved(4, EVERY_SECOND, found), EXPECTED, precision, has_experts)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "int8"])
def test_a_token_that_differs_is_a_fault_but_where_it_may_come_from_swapped_experts(precision):
    found = moved(2, [7], moved(ROUNDING[precision]))
    assert find_fault(found, EXPECTED, precision, has_experts=True) is None
    assert find_fault(found, EXPECTED, precision, has_experts=False)


@pytest.mark.parametrize("has_experts", [False, True])
def test_in_float32_no_logit_may_differ_however_unlikely_its_token(has_experts):
    found = EXPECTED.copy()
    found[:, -1] = EXPECTED.min(-1) - 1
    fault = find_fault(found, EXPECTED, "float32", has_experts)
    assert fault.startswith("its logits differ from those of transformers by")


def test_a_difference_counts_as_much_as_it_changes_the_distribution_however_small_all_logits_are():
    """Gemma's, of random weights, hardly reach 2."""
    assert find_fault(moved(0.1, logits=EXPECTED / 8), EXPECTED / 8, "bfloat16", has_experts=False) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_a_fault_also_of_one_token(value):
    found = EXPECTED.copy()
    found[7, 7] = value
    assert find_fault(found, EXPECTED, "bfloat16", has_experts=True) == "the model produced NaN or infinite logits"


def test_the_line_has_the_figures_and_their_limits():
    line = find_fault(EXPECTED[:, ::-1], EXPECTED, "bfloat16", has_experts=True)
    assert "nats per token on average and " in line and line.endswith("(limits 0.2, 0.1)")
