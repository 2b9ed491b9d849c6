"""What the compiled loops find in logits is what a plain look at every one of them finds, however they lie in memory."""

import math
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import logits
import sampling
from config import HERE
from logits import MUCH, NO_TEMPERATURES, Helper, Logits, nth_highest, ranked

KINDS = ("normal", "few values", "rising", "falling", "equal", "one apart")


def scores_of(kind: str, rows: int, vocab: int, seed: int, impossible: float = 0.0) -> np.ndarray:
    """float32 [rows, vocab], a share of it -inf."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal((rows, vocab)) * 3.0
    scores = {
        "normal": normal,
        "few values": np.round(normal) * 0.0 + np.round(normal / 4),
        "rising": np.sort(normal, axis=1),
        "falling": -np.sort(-normal, axis=1),
        "equal": np.full((rows, vocab), 1.5),
        "one apart": np.where(np.arange(vocab) == random.integers(vocab, size=(rows, 1)), 2.0, -1e30),
    }[kind].astype(np.float32)
    scores[random.random(scores.shape) < impossible] = -np.inf
    return scores


def by_token(scores: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(scores.T.copy()).to(dtype).t()


def by_row(scores: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(scores.copy()).to(dtype)


def among_others(scores: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some of the rows of a pool."""
    return by_token(np.concatenate((scores, np.full_like(scores, np.nan))), dtype)[: len(scores)]


layouts = st.sampled_from([by_row, by_token, among_others])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
tables = st.builds(
    scores_of,
    kind=st.sampled_from(KINDS),
    rows=st.sampled_from([1, 2, 3, 8, 16, 32, 33]),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 500, 512, 513, 2048, 8191, 8192, 20001]),
    seed=st.integers(0, 2**32 - 1),
    impossible=st.sampled_from([0.0, 0.0, 0.3, 0.99, 1.0]),
)


@given(scores=tables, wanted=st.lists(st.integers(1, 300), min_size=33, max_size=33), lie=layouts)
@settings(max_examples=300)
def test_the_likeliest_tokens_are_found_in_their_order(scores, wanted, lie):
    rows = len(scores)
    found = Logits(lie(scores), wanted[:rows])
    assert np.array_equal(found.highest, scores.max(axis=1).astype(np.float64))
    for row in range(rows):
        order = np.argsort(-scores[row], kind="stable")
        order = order[scores[row, order] > -np.inf]
        count = int(found.counts[row])
        if len(order):
            assert found.likeliest[row] == order[0]
        if count >= 0:  # else there are too many, which `top` can do with
            assert count >= min(wanted[row], len(order))
            assert found.ids[row, :count].tolist() == order[:count].tolist()
            assert np.array_equal(found.scores[row, :count], scores[row, order[:count]])


@pytest.mark.parametrize("lie", [by_row, by_token])
@pytest.mark.parametrize("vocab", [32000, 50257, 128256])
def test_there_is_room_for_the_likeliest_tokens_of_a_language_model(vocab, lie):
    assert (Logits(lie(scores_of("normal", 8, vocab, 1)), [50, 64, 1, 5, 256, 2, 100, 20]).counts > 0).all()


@given(scores=tables, n=st.integers(0, 400), lie=layouts)
@settings(max_examples=100)
def test_as_many_of_the_likeliest_are_told_as_are_asked_for_also_where_fewer_were_wanted(scores, n, lie):
    found = Logits(lie(scores), [1] * len(scores))
    for row in range(len(scores)):
        if scores[row].max() > -np.inf:
            with np.errstate(divide="ignore"):
                told = found.top(row, n)
            assert [token for token, _logprob in told] == np.argsort(-scores[row], kind="stable")[:n].tolist()


@given(
    scores=tables,
    row=st.integers(0, 32),
    spoilt=st.sampled_from([[np.nan], [np.inf], [np.inf, -np.inf], [np.nan, np.inf], [-np.nan]]),
    lie=layouts,
    data=st.data(),
)
@settings(max_examples=150)
def test_a_row_with_what_is_no_number_is_broken_and_no_other(scores, row, spoilt, lie, data):
    row %= len(scores)
    for value in spoilt:
        scores[row, data.draw(st.integers(0, scores.shape[1] - 1))] = value
    broken = [at for at in range(len(scores)) if not np.isfinite(scores[at].max())]
    with np.errstate(invalid="ignore"):
        assert Logits(lie(scores), [5] * len(scores)).broken == broken


@pytest.mark.parametrize("lie", [by_row, by_token])
def test_scores_whose_sum_is_no_number_may_be_numbers_all_the_same(lie):
    scores = np.full((3, 700), -3e38, dtype=np.float32)
    scores[1, 5], scores[1, 600] = 3e38, -np.inf
    scores[2, 300:] = 3e38
    found = Logits(lie(scores), [3] * 3)
    assert found.broken == []
    assert found.likeliest.tolist() == [0, 5, 300]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 0.5, 1e30, 1e38, 1e44, 1e46, 1e300])
@pytest.mark.parametrize("lie", [by_row, by_token])
def test_impossible_tokens_weigh_nothing_at_any_temperature(lie, temperature):
    scores = np.zeros((2, 700), dtype=np.float32)
    scores[0, ::2] = scores[1, 13] = -np.inf
    scores[1, 99] = -1.0
    expected = [350.0, 698.0 + math.exp(-1.0 / temperature)]
    assert Logits(lie(scores), [1, 1]).totals(np.full(2, temperature)) == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def helper():
    if not Helper.can_help():
        pytest.skip("there is no second processor for it")
    helper = Helper()
    yield helper
    helper.end()


def looked_at_together(helper: Helper, logits: torch.Tensor, wanted: list[int], temperatures: np.ndarray) -> Logits:
    """A look that the helper has taken a part of. A busy machine may have it come too late, but not forever."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = helper.helped
        helper.expect(logits.numel(), time.monotonic())
        time.sleep(0.0002)
        found = Logits(logits, wanted, helper, temperatures)
        if helper.helped > before:
            return found
    raise AssertionError("it never helped")


@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(1, 150_000), (2, 80_000), (8, 20_001), (32, 8192), (33, 8191), (64, 4096), (300, 512)]),
    seed=st.integers(0, 2**32 - 1),
    impossible=st.sampled_from([0.0, 0.3, 1.0]),
    spoilt=st.sampled_from([0.0, np.nan, np.inf]),
    lie=layouts,
    dtype=dtypes,
    data=st.data(),
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_two_threads_find_what_one_does(helper, kind, shape, seed, impossible, spoilt, lie, dtype, data):
    scores = scores_of(kind, *shape, seed, impossible)
    if spoilt:
        scores[seed % shape[0], seed % shape[1]] = spoilt
    logits = lie(scores, dtype)
    wanted = data.draw(st.lists(st.integers(1, 100), min_size=5, max_size=5)) * shape[0]
    temperatures = data.draw(st.just(NO_TEMPERATURES) | st.floats(0.01, 100).map(lambda t: np.full(shape[0], t)))
    temperatures[: data.draw(st.integers(0, shape[0]))] = np.inf
    together = looked_at_together(helper, logits, wanted[: shape[0]], temperatures)
    alone = Logits(logits, wanted[: shape[0]])
    assert together.broken == alone.broken
    if len(temperatures):
        weighed = np.isfinite(alone.highest) & np.isfinite(temperatures)
        assert np.array_equal(together.weighed[weighed], alone.totals(temperatures)[weighed])
    assert np.array_equal(together.counts, alone.counts)
    assert np.array_equal(together.likeliest, alone.likeliest)
    assert np.array_equal(together.highest, alone.highest, equal_nan=True)
    for row, count in enumerate(alone.counts.tolist()):
        if count > 0:
            assert np.array_equal(together.ids[row, :count], alone.ids[row, :count])
            assert np.array_equal(together.scores[row, :count], alone.scores[row, :count])


def test_a_helper_comes_and_goes_at_any_moment_of_a_look(helper):
    """It may wake while nobody looks, in the midst of a look, or when that is over; and one look follows on another."""
    tables = [torch.from_numpy(scores_of("normal", 8, 32_768, seed)) for seed in range(4)]
    expected = [table.argmax(dim=1).tolist() for table in tables]
    random = np.random.default_rng(0)
    for turn in range(2000):
        if turn % 3 != 2:
            helper.expect(tables[0].numel(), time.monotonic() + random.uniform(-0.001, 0.002))
        if turn % 7 == 0:
            time.sleep(random.uniform(0, 0.001))
        assert Logits(tables[turn % 4], [1 + turn % 60] * 8, helper).likeliest.tolist() == expected[turn % 4]


@given(scores=tables, wanted=st.integers(1, 100), temperature=st.floats(1e-3, 1e3), lie=layouts)
@settings(max_examples=200)
def test_bfloat16_are_looked_at_as_the_float32_that_they_are(scores, wanted, temperature, lie):
    """Also where some are no numbers; and sums are the same to the last bit."""
    scores[0, len(scores) % scores.shape[1]] = [np.nan, np.inf, -np.inf, 0.0][wanted % 4]
    scores = by_row(scores, torch.bfloat16).float().numpy()
    narrow, wide = (Logits(lie(scores, dtype), [wanted] * len(scores)) for dtype in (torch.bfloat16, torch.float32))
    assert narrow.broken == wide.broken
    assert np.array_equal(narrow.counts, wide.counts)
    assert np.array_equal(narrow.likeliest, wide.likeliest)
    assert np.array_equal(narrow.highest, wide.highest, equal_nan=True)
    temperatures = np.full(len(scores), temperature)
    floors = np.stack((scores[:, 0], scores[:, -1]))
    with np.errstate(invalid="ignore", divide="ignore"):
        assert np.array_equal(narrow.totals(temperatures), wide.totals(temperatures), equal_nan=True)
        assert np.array_equal(narrow.masses(temperatures, floors), wide.masses(temperatures, floors), equal_nan=True)
        assert np.array_equal(narrow.logprobs([0] * len(scores)), wide.logprobs([0] * len(scores)), equal_nan=True)
        for row, count in enumerate(wide.counts.tolist()):
            assert narrow.ids[row, : max(0, count)].tolist() == wide.ids[row, : max(0, count)].tolist()
            assert narrow.scores[row, : max(0, count)].tolist() == wide.scores[row, : max(0, count)].tolist()
            assert np.array_equal(narrow.row(row), scores[row], equal_nan=True)
            if row not in wide.broken:
                assert narrow.top(row, 7) == wide.top(row, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_is_neither_float32_nor_bfloat16_is_not_read_as_if_it_were(dtype):
    with pytest.raises(AssertionError, match="read where they lie"):
        Logits(torch.zeros(2, 64, dtype=dtype), [1, 1])


def test_a_look_at_little_expects_no_help(helper):
    before = helper.helped
    for _ in range(20):
        helper.expect(MUCH - 1, time.monotonic())
        time.sleep(0.0002)
        Logits(torch.from_numpy(scores_of("normal", 1, MUCH // 2, 1)), [1], helper)
    assert helper.helped == before


def test_a_helper_ends_when_it_is_told_to():
    threads = threading.active_count()
    idle, waiting = Helper(), Helper()
    waiting.expect(MUCH, time.monotonic() + 0.05)
    idle.end(), waiting.end()
    assert threading.active_count() == threads


@given(numbers=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=200), data=st.data())
def test_the_nth_highest_is_the_nth_of_the_sorted(numbers, data):
    n = data.draw(st.integers(1, len(numbers)))
    assert nth_highest(np.array(numbers, dtype=np.float32), n) == sorted(numbers, reverse=True)[n - 1]


@given(scores=tables, share=st.floats(0, 1))
@settings(max_examples=100)
def test_a_ranking_is_a_stable_sort_of_those_that_reach_the_floor(scores, share):
    floor = np.quantile(scores[0], share, method="lower")
    order = np.argsort(-scores[0], kind="stable")
    assert ranked(scores[0], floor).tolist() == order[scores[0, order] >= floor].tolist()


def test_loops_are_compiled_also_where_they_cannot_be_kept(tmp_path):
    """As in a container whose files may not be written."""
    shutil.copy(HERE / "logits.py", tmp_path)
    (tmp_path / "__pycache__").write_text("no folder")
    (tmp_path / "home").write_text("no folder")
    nowhere = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": ""}
    code = "import logits, torch; print(logits.Logits(torch.tensor([[1.0, 3.0, 2.0]]), [3]).ids[0, :3])"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | nowhere, capture_output=True, text=True, check=True
    )
    assert (told.stdout, told.stderr) == ("[1 2 0]\n", "")


def test_the_loops_of_sampling_take_nothing_from_those_of_logits():
    """What numba has kept of one is made anew when its own file changes, and not when another does."""
    loops = {name: loop for name, loop in vars(sampling).items() if hasattr(loop, "py_func") and not hasattr(logits, name)}
    assert len(loops) > 3
    for name, loop in loops.items():
        used = {used for used in loop.py_func.__code__.co_names if getattr(logits, used, None) is getattr(sampling, used, 0)}
        assert used <= {"np", "math"}, name
