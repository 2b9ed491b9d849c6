"""The compiled kernels give what torch's own calls do, rounded once, and nobody's company or thread changes a bit of it."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from config import HERE
from kernels import Kernels, multiplies, packed_bytes

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # of the largest; half a step of bfloat16 is 2 ** -9


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def compiled(request):
    made = Kernels(request.param)
    made.dtype = request.param
    return made


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    expected, tolerance = expected.float(), TOLERANCE[found.dtype]
    return torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance * max(1.0, expected.abs().max().item()))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, of whatever kind."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


sizes = st.sampled_from([1, 2, 7, 16, 31, 64, 576, 1000])
seeds = st.integers(0, 2**31)


@given(tokens=st.integers(1, 40), hidden=sizes, seed=seeds, epsilon=st.sampled_from([1e-6, 1e-5, 0.5]))
@settings(max_examples=60)
def test_the_sum_is_torchs_and_its_norm_is_near(compiled, tokens, hidden, seed, epsilon):
    x, delta = normal(seed, 2, tokens, hidden, dtype=compiled.dtype)
    weight = normal(seed + 1, hidden, dtype=compiled.dtype)
    expected = x + delta
    found = compiled.add_norm(x, delta, weight, epsilon)
    assert same(x, expected)
    assert near(found, F.rms_norm(expected.float(), (hidden,), weight.float(), epsilon))


@given(seed=seeds, scale=st.sampled_from([1e-38, 1.0, 1e37]))
@settings(max_examples=60)
def test_a_number_is_rounded_to_the_nearest_and_of_two_to_the_even_one(seed, scale):
    a, b = normal(seed, 8, 100, dtype=torch.bfloat16) * scale, normal(seed + 1, 8, 100, dtype=torch.bfloat16) * scale * 2**-8
    expected = a + b
    Kernels(torch.bfloat16).add_norm(a, b, torch.ones(100, dtype=torch.bfloat16), 1e-6)
    assert same(a, expected)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [13, 33])
def test_what_is_no_number_spoils_its_token_and_no_other(compiled, at, spoilt):
    x = normal(1, 6, 40, dtype=compiled.dtype)
    x[2, at] = spoilt
    expected, only_that = x.clone(), [True, True, False, True, True, True]
    assert compiled.gate(x).isfinite().all(1).tolist() == only_that
    normed = compiled.add_norm(x, torch.zeros_like(x), torch.ones(40, dtype=compiled.dtype), 1e-6)
    assert torch.equal(x.nan_to_num(12.0), expected.nan_to_num(12.0))
    assert normed.isfinite().all(1).tolist() == only_that


@given(tokens=st.integers(1, 40), size=sizes, seed=seeds, scale=st.sampled_from([1.0, 30.0, 1e4]))
@settings(max_examples=60)
def test_the_gate_is_silu_times_the_other_half(compiled, tokens, size, seed, scale):
    gate_up = normal(seed, tokens, 2 * size, dtype=compiled.dtype) * scale
    gate, up = gate_up.float().chunk(2, -1)
    assert near(compiled.gate(gate_up), F.silu(gate) * up)


@given(tokens=st.integers(1, 40), size=sizes, seed=seeds, scale=st.sampled_from([1e-37, 1e-3, 1.0, 1e37]))
@settings(max_examples=60)
def test_a_token_is_rounded_in_steps_of_a_127th_of_its_largest_number(compiled, tokens, size, seed, scale):
    x = normal(seed, tokens, size, dtype=compiled.dtype) * scale
    rounded = torch.zeros(tokens + 1, size, dtype=torch.uint8)
    largest = compiled.round(x, rounded)
    assert torch.equal(largest, x.abs().amax(1, keepdim=True).float().clamp_min(1e-30))
    exact = x.double() * 127 / largest
    assert ((rounded[:tokens].double() - 128 - exact).abs() <= 0.50002).all()
    assert not rounded[tokens].any()


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_the_largest_number_of_what_has_one_that_is_none_is_none(compiled, spoilt):
    x = normal(0, 3, 100, dtype=compiled.dtype)
    x[1, 40] = spoilt
    largest = compiled.round(x, torch.empty(3, 100, dtype=torch.uint8))
    assert largest.isfinite().flatten().tolist() == [True, False, True]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return x.float() * cos.float()[:, None] + torch.cat((-second, first), -1) * sin.float()[:, None]


def attention(query, keys, values, scaling):
    """Of one token. query: [heads, head size]; keys, values: [kv heads, positions, head size] → [heads, head size]."""
    group = len(query) // len(keys)
    keys, values = (t.float().repeat_interleave(group, 0) for t in (keys, values))
    weights = torch.softmax((keys @ query.float()[:, :, None])[..., 0] * scaling, -1)
    return (weights[:, None] @ values)[:, 0]


heads_of = st.tuples(st.sampled_from([1, 2, 3, 4, 5, 8]), st.sampled_from([1, 2, 3]))  # of a group, and groups


@given(
    heads=heads_of,
    size=st.sampled_from([2, 6, 16, 64, 80]),
    window=st.sampled_from([1, 7, 16, 40]),
    looks_back=st.sampled_from([None, 1, 5, 16, 1000]),
    slots=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=120)
def test_a_step_stores_its_keys_and_values_and_attends_to_what_its_slots_hold(
    compiled, heads, size, window, looks_back, slots, data
):
    (group, kv_heads), dtype = heads, compiled.dtype
    first = data.draw(st.integers(0, slots - 1), "first slot")
    rows = data.draw(st.integers(1, slots - first), "rows")
    places = torch.tensor(data.draw(st.lists(st.integers(0, window - 1), min_size=rows, max_size=rows), "places"))
    held = normal(1, 2, slots, kv_heads, window, size, dtype=dtype)
    for row, place in enumerate(places):
        held[:, first + row, :, place:] = float("nan")  # what is not filled yet may hold anything
    store, qkv = held.clone(), normal(2, rows, (group + 2) * kv_heads, size, dtype=dtype)
    angles = normal(3, rows, size, dtype=dtype), normal(4, rows, size, dtype=dtype)
    expected = qkv.clone().float()
    turned = (group + 1) * kv_heads
    expected[:, :turned] = rotated(qkv[:, :turned], *angles)

    compiled.rotate(qkv, angles, places, store, first, 1)
    out = compiled.attend(qkv, places, store, first, 0.3, looks_back).view(rows, group * kv_heads, size)

    assert near(qkv[:, : group * kv_heads], expected[:, : group * kv_heads])
    for row, place in enumerate(places.tolist()):
        slot = first + row
        assert near(store[0, slot, :, place], expected[row, group * kv_heads : turned])
        assert same(store[1, slot, :, place], qkv[row, turned:])
        held[:, slot, :, place] = store[:, slot, :, place]
        begin = max(0, place + 1 - (looks_back or window))
        keys, values = store[:, slot, :, begin : place + 1]
        assert near(out[row], attention(qkv[row, : group * kv_heads], keys, values, 0.3))
    assert same(store, held)  # elsewhere it is as it was


@given(heads=heads_of, length=st.integers(1, 30), begin=st.integers(0, 10), slot=st.integers(0, 2))
@settings(max_examples=40)
def test_a_part_of_a_prompt_is_stored_where_it_belongs(compiled, heads, length, begin, slot):
    (group, kv_heads), size = heads, 16
    store = torch.zeros(2, 3, kv_heads, 40, size, dtype=compiled.dtype)
    qkv = normal(2, length, (group + 2) * kv_heads, size, dtype=compiled.dtype)
    angles = normal(3, 2, length, size, dtype=compiled.dtype)
    keys, values = qkv[:, group * kv_heads :].clone().split(kv_heads, 1)
    compiled.rotate(qkv, tuple(angles), torch.arange(begin, begin + length), store, slot, length)
    assert near(store[0, slot, :, begin : begin + length].transpose(0, 1), rotated(keys, *angles))
    assert same(store[1, slot, :, begin : begin + length].transpose(0, 1), values)
    store[:, slot, :, begin : begin + length] = 0
    assert not store.any()


def test_a_score_that_is_no_number_is_not_taken_for_one(compiled):
    """Neither one of the query's, nor one of a key that others outweigh."""
    for query, key in [(float("nan"), 1.0), (1.0, float("nan")), (float("inf"), 1.0), (1.0, float("-inf"))]:
        store = torch.ones(2, 2, 1, 50, 16, dtype=compiled.dtype)
        qkv = torch.ones(2, 3, 16, dtype=compiled.dtype)
        qkv[0, 0, 3], store[0, 0, 0, 20, 3] = query, key
        out = compiled.attend(qkv, torch.tensor([49, 49]), store, 0, 1.0, None)
        assert out[0].isnan().all() and near(out[1], torch.ones(16))


in_pairs = pytest.mark.skipif(not multiplies(torch.bfloat16), reason="this CPU has no instruction for products of bfloat16")


def packed(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16 [outside, inside], pairs of inputs of 64 outputs side by side."""
    outside, inside = weight.shape
    filled = F.pad(weight, (0, -inside % 32, 0, -outside % 64))
    return filled.view(len(filled) // 64, 64, -1, 2).transpose(1, 2).contiguous()


@in_pairs
@given(
    tokens=st.sampled_from([1, 2, 5, 6, 7, 12, 13, 64, 129]),
    inside=st.sampled_from([2, 32, 34, 128, 130, 576]),
    outside=st.sampled_from([1, 5, 63, 64, 65, 200]),
    has_bias=st.booleans(),
    seed=seeds,
)
@settings(max_examples=60)
def test_a_few_rows_are_multiplied_with_a_packed_weight(tokens, inside, outside, has_bias, seed):
    weight, x = normal(seed, outside, inside, dtype=torch.bfloat16), normal(seed + 1, tokens, inside, dtype=torch.bfloat16)
    bias = normal(seed + 2, outside, dtype=torch.bfloat16) if has_bias else None
    laid_out = packed(weight)
    assert laid_out.nbytes == packed_bytes(outside, inside // 2)
    found = Kernels(torch.bfloat16).multiply(x, laid_out.data_ptr(), bias, outside)
    assert near(found, F.linear(x.double(), weight.double(), bias.double() if has_bias else None))


@pytest.mark.skipif(not multiplies(torch.int8), reason="this CPU has no instruction for products of int8")
@given(
    tokens=st.sampled_from([1, 2, 6, 7, 64, 129]),
    inside=st.sampled_from([4, 64, 68, 256, 260, 576]),
    outside=st.sampled_from([1, 5, 64, 65, 200]),
    has_bias=st.booleans(),
    seed=seeds,
)
@settings(max_examples=60)
def test_a_few_rows_of_bytes_are_multiplied_with_a_packed_weight(compiled, tokens, inside, outside, has_bias, seed):
    x = normal(seed, tokens, inside, dtype=compiled.dtype)
    rounded = torch.empty(tokens, inside, dtype=torch.uint8)
    largest = compiled.round(x, rounded)
    weight = torch.randint(-127, 128, (outside, inside), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    filled = F.pad(weight, (0, -inside % 64, 0, -outside % 64))
    laid_out = filled.view(len(filled) // 64, 64, -1, 4).transpose(1, 2).contiguous()
    assert laid_out.nbytes == packed_bytes(outside, inside // 4)
    steps, bias = normal(seed + 1, outside).abs(), normal(seed + 2, outside, dtype=compiled.dtype) if has_bias else None
    told = laid_out.data_ptr(), steps, 128 * weight.sum(1, dtype=torch.int32), bias
    found = compiled.multiply_bytes(rounded, largest, *told)
    exact = (rounded.double() - 128) @ weight.double().T * steps * largest
    assert near(found, exact if bias is None else exact + bias.double())


@in_pairs
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_spoils_its_own_product_alone(spoilt):
    weight, x = packed(normal(1, 70, 40, dtype=torch.bfloat16)), normal(2, 9, 40, dtype=torch.bfloat16)
    x[4, 33] = spoilt
    found = Kernels(torch.bfloat16).multiply(x, weight.data_ptr(), None, 70)
    assert found.isfinite().all(1).tolist() == [row != 4 for row in range(9)]
    assert not found[4].isfinite().any()


@in_pairs
@given(
    heads=heads_of,
    size=st.sampled_from([2, 6, 16, 64, 80, 128]),
    begin=st.sampled_from([0, 1, 63, 64, 100, 300]),
    tokens=st.sampled_from([1, 2, 7, 63, 64, 65, 130]),
    looks_back=st.sampled_from([None, 1, 5, 70, 1000]),
    slot=st.integers(0, 2),
    seed=seeds,
)
@settings(max_examples=100)
def test_each_token_of_a_prompt_attends_to_what_comes_before_it(heads, size, begin, tokens, looks_back, slot, seed):
    (group, kv_heads), end = heads, begin + tokens
    store = normal(seed, 2, 3, kv_heads, end + 70, size, dtype=torch.bfloat16)
    store[:, slot, :, end:] = float("nan")  # what is not filled yet may hold anything
    qkv = normal(seed + 1, tokens, (group + 2) * kv_heads, size, dtype=torch.bfloat16)
    out = Kernels(torch.bfloat16).attend_prompt(qkv, begin, store, slot, 0.3, looks_back)
    for token, found in enumerate(out.view(tokens, group * kv_heads, size)):
        first = max(0, begin + token + 1 - (looks_back or end))
        keys, values = store[:, slot, :, first : begin + token + 1]
        expected = attention(qkv[token, : group * kv_heads], keys, values, 0.3)
        assert torch.allclose(found.float(), expected, rtol=0.02, atol=0.02)


@in_pairs
@pytest.mark.parametrize("looks_back", [None, 50])
def test_neither_parts_nor_threads_change_a_bit_of_a_prompts_attention(looks_back, threads):
    compiled, store = Kernels(torch.bfloat16), normal(1, 2, 2, 3, 300, 64, dtype=torch.bfloat16)
    qkv = normal(2, 300, 15, 64, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    whole = compiled.attend_prompt(qkv, 0, store, 1, 0.1, looks_back)
    torch.set_num_threads(threads)
    ends = [0, 1, 50, 178, 299, 300]
    parts = [compiled.attend_prompt(qkv[a:b], a, store, 1, 0.1, looks_back) for a, b in itertools.pairwise(ends)]
    assert same(torch.cat(parts), whole)


@in_pairs
def test_a_score_in_a_prompt_that_is_no_number_is_not_taken_for_one():
    store = torch.ones(2, 1, 1, 200, 16, dtype=torch.bfloat16)
    qkv = torch.ones(200, 3, 16, dtype=torch.bfloat16)
    qkv[20, 0, 3] = store[0, 0, 0, 90, 5] = float("nan")
    out = Kernels(torch.bfloat16).attend_prompt(qkv, 0, store, 0, 1.0, None)
    assert [token for token, row in enumerate(out) if not row.isfinite().all()] == [20, *range(90, 200)]


def everything(compiled: Kernels, rows: slice) -> list[torch.Tensor]:
    """What all kernels make of these of 70 rows."""
    x, delta, gate_up = (normal(i, 70, n, dtype=compiled.dtype)[rows] for i, n in enumerate((320, 320, 640)))
    qkv, cos, sin = (normal(i, 70, *shape, dtype=compiled.dtype)[rows] for i, shape in enumerate([(8, 32), (32,), (32,)]))
    store, places = normal(5, 2, 70, 2, 90, 32, dtype=compiled.dtype)[:, rows].clone(), torch.arange(70)[rows] + 20
    x, qkv = x.clone(), qkv.clone()
    rounded = torch.empty(delta.shape, dtype=torch.uint8)
    out = [compiled.round(delta, rounded), rounded]
    if multiplies(torch.int8):
        weight, steps = torch.arange(1024 * 320).to(torch.int8), torch.full((1000,), 0.01)
        out.append(compiled.multiply_bytes(rounded, out[0], weight.data_ptr(), steps, steps.int(), None))
    out += [compiled.add_norm(x, delta, normal(4, 320, dtype=compiled.dtype), 1e-6), compiled.gate(gate_up)]
    compiled.rotate(qkv, (cos, sin), places, store, 0, 1)
    if compiled.dtype == torch.bfloat16 and multiplies(torch.bfloat16):
        weight = packed(normal(6, 1000, 320, dtype=compiled.dtype))
        out.append(compiled.multiply(delta, weight.data_ptr(), None, 1000))
    return [*out, x, qkv, store.transpose(0, 1), compiled.attend(qkv, places, store, 0, 0.2, 64)]


def test_threads_and_company_change_no_bit(compiled, threads):
    torch.set_num_threads(1)
    alone = [everything(compiled, slice(row, row + 1)) for row in range(70)]
    torch.set_num_threads(threads)
    for together, apart in zip(everything(compiled, slice(0, 70)), zip(*alone)):
        assert same(together, torch.cat(apart))


def test_they_run_on_the_threads_of_torchs_own_openmp_and_without(compiled, threads, monkeypatch):
    expected = everything(compiled, slice(0, 70))
    if compiled._openmp is None:
        pytest.skip("this torch has no libgomp")
    asked = []
    monkeypatch.setattr(compiled, "_openmp", lambda *told, run=compiled._openmp: (asked.append(told[2]), run(*told)))
    assert all(same(a, b) for a, b in zip(expected, everything(compiled, slice(0, 70))))
    assert asked == [threads] * len(asked) and bool(asked) == (threads > 1)
    monkeypatch.setattr(compiled, "_openmp", None)
    assert all(same(a, b) for a, b in zip(expected, everything(compiled, slice(0, 70))))


@pytest.mark.parametrize("because", ["no folder may be written", "there is no room"])
def test_they_are_compiled_also_where_they_cannot_be_kept(tmp_path, because):
    """As in a container whose files may not be written, and on a full disk."""
    shutil.copy(HERE / "kernels.py", tmp_path)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    if because == "no folder may be written":
        (tmp_path / "__pycache__").write_text("no folder")
        (tmp_path / "home").write_text("no folder")
        environment |= {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": ""}
    code = "import kernels, torch; print(kernels.Kernels(torch.float32).gate(torch.ones(1, 2)).item())"
    limit = "unlimited" if because == "no folder may be written" else 4  # KB a file
    told = subprocess.run(
        ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (round(float(told.stdout), 6), told.stderr) == (0.731059, "")
