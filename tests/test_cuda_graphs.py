"""A replayed step gives what the step gives, on the smallest graph that it fits into. Without a GPU, what is replayed is the
step itself; what a GPU makes of it is looked at where there is one (test_model.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_graphs import RecordedSteps, RecordingError, lengths_for, sizes_for

VOCAB = 11


class Forward:
    """Logits that depend on everything, and what was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, tokens, positions, length):
        self.asked.append((len(tokens), length))
        return tokens * 100.0 + positions + torch.arange(VOCAB) / 16 + 0.0 * length


def recorded(forward, sizes, lengths, record=lambda run, pool: run):
    return RecordedSteps(forward, sizes, lengths, VOCAB, "cpu", 0.0, record)


@given(batch_size=st.integers(1, 100), data=st.data())
def test_every_batch_has_a_size_that_is_less_than_twice_as_large(batch_size, data):
    sizes = sizes_for(batch_size, None)
    rows = data.draw(st.integers(min(2, batch_size), batch_size))
    assert sizes[-1] == batch_size
    assert min(size for size in sizes if size >= rows) < 2 * rows


@pytest.mark.parametrize(
    ("batch_size", "wanted", "sizes"),
    [(8, (), []), (8, (1, 4, 16), [4]), (8, (1, 2, 4, 8), [2, 4, 8]), (1, None, [1]), (1, (2,), []), (6, None, [2, 4, 6])],
)
def test_only_sizes_that_can_come_are_recorded(batch_size, wanted, sizes):
    assert sizes_for(batch_size, wanted) == sizes


@pytest.mark.parametrize(
    ("window", "lengths"), [(2, [2]), (511, [511]), (512, [256, 512]), (2048, [256, 512, 1024, 2048]), (1001, [501, 1001])]
)
def test_lengths_are_halves_of_the_window_down_to_what_still_pays(window, lengths):
    assert lengths_for(window) == lengths


@given(rows=st.integers(1, 8), longest=st.integers(1, 64), seed=st.integers(0, 99))
def test_a_step_takes_the_smallest_graph_that_it_fits_into_and_gives_the_same(rows, longest, seed):
    forward = Forward()
    steps = recorded(forward, [2, 8, 4], [64, 16])
    assert len(steps) == 6
    padded = steps.rows_for(rows)
    random = torch.Generator().manual_seed(seed)
    tokens, positions = (torch.randint(0, most, (padded,), generator=random) for most in (VOCAB, longest))
    forward.asked.clear()
    found = steps(tokens, positions, longest)
    assert forward.asked == [(min(size for size in (2, 4, 8) if size >= rows), 16 if longest <= 16 else 64)]
    assert torch.equal(found, Forward()(tokens[:, None], positions[:, None], longest))


def test_a_batch_that_is_larger_than_all_that_was_recorded_has_none():
    assert recorded(Forward(), [2, 4], [16]).rows_for(5) is None


def test_the_largest_is_recorded_first_because_the_others_use_its_memory():
    sizes = []

    def record(run, pool):
        forward.asked.clear()
        run()
        sizes.extend(forward.asked)
        return run

    forward = Forward()
    recorded(forward, [2, 4], [16, 64], record)
    assert sizes == [(4, 64), (4, 16), (2, 64), (2, 16)]


def test_a_replay_that_gives_something_else_is_an_error():
    def record(run, pool):
        run()
        return lambda: None  # leaves the logits of the tokens that were there when it was recorded

    with pytest.raises(RecordingError, match="a step of 4 rows gives logits that differ by"):
        recorded(Forward(), [4], [16], record)
