"""The logits of a step as the choice of tokens sees them: the likeliest tokens of each row, and the sums of all weights.

A vocabulary is large, and few of its tokens can be drawn. So the logits are read from memory once, for the highest of each 16
tokens (a leaf) and of each 16 leaves (a branch). The k likeliest are in the k branches with the highest, and in these in the
few leaves that have one as high. Weights are summed where a parameter asks for it (`totals`, `masses`), in float32. A
row's sums are taken over the same numbers in the same order whatever else is in the batch and however it lies in memory, so
that not a bit of a row depends on its neighbours.

These are loops over millions of numbers while a device waits, so numba compiles them for this processor, and keeps what it
made (in NUMBA_CACHE_DIR, beside this file or in the user's cache). They run without the interpreter's lock; the search for the
likeliest tokens, and the sums that are wanted with it, in two threads, if there is a `Helper`. Logits in bfloat16 are widened
as they are read: what is found, and each sum, is the same to the last bit as of the same logits in float32.

This layer knows neither parameters nor draws: sampling.py does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

ABREAST = 32  # neighbouring tokens that are looked at side by side: they fill the processor's vectors also for a single row
LEAF = 16  # tokens, and leaves to a branch
SUM_STEPS = 8  # times ABREAST are the neighbouring tokens whose weights are summed in float32
PART_STEPS = 128  # whose sums a thread takes at a time
MASS_STEPS = 64  # the same for `masses`, a little less exactly
LINE = 16  # numbers that come together from memory
AHEAD = 16 * ABREAST  # how many numbers before they are needed memory is asked for them
FEW_ROWS = 4
FEW_BRANCHES = 2  # that a thread takes at a time
MUCH = 2**17  # logits; to share out fewer takes longer than to look at them alone
LEAD_NS, PATIENCE_NS = 300_000, 1_000_000  # how long before, and after, the time at which it is expected
# What two threads that look together have in common, in words; those that both change are on lines of their own.
INSIDE, OPEN, TAKEN, DONE, FOUND, DUE, CPU, ENDS, HELPED, SEMAPHORE, TOLD = 0, 8, 16, 24, 32, 40, 41, 42, 43, 44, 48
CODE, LISTED, WEIGHED, SUMMED, WORDS = 71, 72, 80, 88, 96  # the semaphore has four words, and 20 are told of
NO_WORDS, NO_TEMPERATURES = np.empty(0, np.int64), np.empty(0, np.float64)
NO_LANES = {torch.float32: np.empty((0, 0, 0), np.float32), torch.bfloat16: np.empty((0, 0, 0), np.int16)}
IMPOSSIBLE = {np.dtype(np.float32): -np.inf, np.dtype(np.int16): np.int16(-0x80)}  # the bits of bfloat16's -inf
LOWEST = np.finfo(np.float32).min
LEAST_POWER = np.float32(-115.0)  # of 2: exp(-80), which is next to nothing, and in float32 still a normal number
LOG2_E = math.log2(math.e)
MOST_BIAS = 2.0**20  # what is added to exponents may be; with more, float32 has no room for their fractions
# 2 ** x for |x| <= 1/2 is 1 and the polynomial with these, wrong by less than 3e-6 (Remez's algorithm).
POWER_1, POWER_2, POWER_3, POWER_4 = (np.float32(factor) for factor in (0.6931242, 0.24024099, 0.05590637, 0.00958282))
# The same for 0 <= x < 1, less wrong than 1e-7.
FRACTION_POWERS = 1.0, 0.693151312, 0.24016445, 0.0557999131, 0.00901703032, 0.00186713007
# With this added a float32 has no room for a fraction, and its last bits are the whole number.
TO_WHOLE = np.float32(1.5 * 2**23)


OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}}  # a product and a sum are one operation
HAS_AVX512 = {"+avx512f", "+avx512dq"} <= set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def compiled(loops):
    """A function of numpy arrays and numbers as machine code. What divides by nothing gets an infinity, as in numpy.

    What was kept is made anew when its own file has changed. So it must not take a constant or a function from another one.
    """
    try:
        return numba.njit(loops, cache=True, nogil=True, **OPTIONS)
    except RuntimeError:  # nowhere to keep it
        return numba.njit(loops, nogil=True, **OPTIONS)


def _ask_ahead(builder, address):
    """Asks memory for what is at an address without waiting for it. What comes step by step the processor would ask for
    itself, but by far not as early as can be when nothing of it is in its caches. An address that is none does no harm."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, into_second_cache, data = (ir.Constant(number, value) for value in (0, 2, 1))
    builder.call(function, [builder.bitcast(address, byte), to_read, into_second_cache, data])


@intrinsic
def _prefetch(_context, flat, index):
    """`_ask_ahead` for flat[index]."""

    def generate(context, builder, signature, arguments):
        _ask_ahead(builder, _pointer(context, builder, signature.args[0], arguments[0], arguments[1:]))
        return context.get_dummy_value()

    return types.void(flat, index), generate


def _pointer(context, builder, kind, array, indices):
    values = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, values, indices, wraparound=False)


def _widened(builder, number, count=None):
    """The float32 of a number in memory, or of `count` of them: of a float32 or, as its bits, of a bfloat16."""
    bits, wide, places = ir.IntType(32), ir.FloatType(), 16
    if count:
        bits, wide, places = ir.VectorType(bits, count), ir.VectorType(wide, count), [places] * count
    if number.type == wide:
        return number
    return builder.bitcast(builder.shl(builder.zext(number, bits), bits(places)), wide)


@intrinsic
def _item(_context, flat, index):
    """flat[index], widened. Of an index in brackets numba asks whether it counts from the end: a quarter of the time that it
    takes to go through numbers far apart."""

    def generate(context, builder, signature, arguments):
        place = _pointer(context, builder, signature.args[0], arguments[0], arguments[1:])
        return _widened(builder, builder.load(place))

    return types.float32(flat, index), generate


@intrinsic
def _wide(_context, number):
    """`_widened`, of one."""

    def generate(_context, builder, _signature, arguments):
        return _widened(builder, arguments[0])

    return types.float32(number), generate


def _vector_at(context, builder, kind, array, indices):
    """Where LINE numbers of an array begin."""
    vector = ir.VectorType(context.get_data_type(kind.dtype), LINE)
    return builder.bitcast(_pointer(context, builder, kind, array, indices), vector.as_pointer())


def _leaf_of(abreast: int):
    """What looks at a leaf of so many neighbouring lanes: a function for compiled loops.

    The processor's vectors are spelled out here: with so few lanes, what the compiler makes of loops spends more time on asking
    whether the arrays overlap than on their numbers.
    """

    @intrinsic
    def look(_context, lanes, plane, step, lane, leaves, leaf, total):
        """The highest of lanes[plane, step : step + LEAF], of each lane from `lane` on, to leaves[plane, leaf], and their sums
        onto `total`."""

        def generate(context, builder, signature, arguments):
            _lanes, plane, step, lane, _leaves, leaf, _total = arguments
            ahead = ir.Constant(ir.IntType(32), AHEAD // LINE)

            def at(argument, *indices):
                return _vector_at(context, builder, signature.args[argument], arguments[argument], indices)

            def higher(a, b):
                return builder.select(builder.fcmp_ordered(">", a, b), a, b)

            parts = [builder.add(lane, ir.Constant(lane.type, part)) for part in range(0, abreast, LINE)]
            highest, sums = [None] * len(parts), [None] * len(parts)
            for further in range(LEAF):
                now = builder.add(step, ir.Constant(step.type, further))
                for number, part in enumerate(parts):
                    address = at(0, plane, now, part)
                    _ask_ahead(builder, builder.gep(address, [ahead]))
                    value = _widened(builder, builder.load(address, align=2), LINE)
                    highest[number] = higher(highest[number], value) if further else value
                    sums[number] = builder.fadd(sums[number], value) if further else value
            for part, most, added in zip(parts, highest, sums):
                builder.store(most, at(4, plane, leaf, part), align=4)
                builder.store(builder.fadd(builder.load(at(6, part), align=4), added), at(6, part), align=4)
            return context.get_dummy_value()

        return types.void(lanes, plane, step, lane, leaves, leaf, total), generate

    return look


_narrow_leaf, _wide_leaf = _leaf_of(ABREAST), _leaf_of(2 * ABREAST)


@intrinsic
def _lowest_bit(_context, number):
    """The place of the lowest bit of an int64 that is not 0."""

    def generate(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def _fused(_context, a, b, c):
    """a * b + c, rounded once."""

    def generate(_context, builder, _signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _power_of_2(builder, power):
    """2 ** power of a vector of LINE float32, or what is next to nothing, as `_weight` has it."""
    vector = ir.VectorType(ir.FloatType(), LINE)
    bits, word = ir.VectorType(ir.IntType(32), LINE), ir.IntType(32)

    def of(name, *arguments):
        kind = ir.FunctionType(vector, [argument.type for argument in arguments])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    def polynomial(x, factors):
        total = vector([factors[-1]] * LINE)
        for factor in factors[-2::-1]:
            total = of("llvm.fma.v16f32", total, x, vector([factor] * LINE))
        return total

    # What is no number because nothing times an infinity is none counts as nothing, too.
    least = vector([float(LEAST_POWER)] * LINE)
    power = builder.select(builder.fcmp_ordered(">", power, least), power, least)
    if HAS_AVX512:  # two instructions for what takes six otherwise: the fraction, and times 2 to the whole number below
        everywhere, as_is = ir.IntType(16)(-1), word(4)
        x = of("llvm.x86.avx512.mask.reduce.ps.512", power, word(1), power, everywhere, as_is)
        scaled = polynomial(x, [float(np.float32(factor)) for factor in FRACTION_POWERS])
        return of("llvm.x86.avx512.mask.scalef.ps.512", scaled, power, scaled, everywhere, as_is)
    to_whole = vector([float(TO_WHOLE)] * LINE)
    rounded = builder.fadd(power, to_whole)
    x = builder.fsub(power, builder.fsub(rounded, to_whole))
    scaled = polynomial(x, [1.0, *(float(factor) for factor in (POWER_1, POWER_2, POWER_3, POWER_4))])
    whole = builder.shl(builder.bitcast(rounded, bits), bits([23] * LINE))
    return builder.bitcast(builder.add(builder.bitcast(scaled, bits), whole), vector)


@intrinsic
def _weigh(_context, flat, first, apart, scale, bias, lane, sums):
    """The weights of LINE lanes from `lane` on, whose scores are flat[first + lane] and so on: sums of SUM_STEPS, which are
    `apart` from each other, to `sums`. scale, bias, sums: [lanes]."""

    def generate(context, builder, signature, arguments):
        _flat, first, apart, _scale, _bias, lane, _sums = arguments

        def at(argument, index):
            return _vector_at(context, builder, signature.args[argument], arguments[argument], [index])

        factor, common, total = builder.load(at(3, lane), align=4), builder.load(at(4, lane), align=4), None
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(factor.type, [factor.type] * 3), "llvm.fma.v16f32")
        for step in range(SUM_STEPS):
            place = builder.add(builder.add(first, lane), builder.mul(apart, ir.Constant(apart.type, step)))
            score = _widened(builder, builder.load(at(0, place), align=2), LINE)
            power = builder.call(fma, [score, factor, common])
            weight = _power_of_2(builder, power)
            total = builder.fadd(total, weight) if step else weight
        builder.store(total, at(6, lane), align=4)
        return context.get_dummy_value()

    return types.void(flat, first, apart, scale, bias, lane, sums), generate


@intrinsic
def _at(_context, address, kind):
    """A pointer to the numbers of a kind at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(address, kind), generate


@intrinsic
def _call(_context, code, argument):
    """Calls the function of C at an address, with another one."""

    def generate(_context, builder, _signature, arguments):
        pointer = ir.IntType(64).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [pointer]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), [builder.inttoptr(arguments[1], pointer)])
        return _context.get_dummy_value()

    return types.void(types.int64, argument), generate


@intrinsic
def _add(_context, words, index, number):
    """Adds to a word that other threads add to, too. Returns what it was before. Nothing is moved over this by the compiler
    or the processor."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, signature.args[0], array, [arguments[1]], wraparound=False)
        return builder.atomic_rmw("add", address, arguments[2], "seq_cst")

    return types.int64(words, types.int64, types.int64), generate


# Of the C library.
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.CPointer(types.int64)))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.CPointer(types.int64)))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@compiled
def _higher(a, b):
    return a if a > b else b


@compiled
def _climb(lanes, plane, first, end, leaves, total):
    """The highest of each LEAF steps of each lane, from leaf `first` to `end`, to leaves[plane], and the sums of all to
    `total`. lanes: of any kind, [planes, steps, lanes]; leaves: [planes, steps / LEAF, lanes]; total: [lanes]."""
    steps, width = lanes.shape[1:]
    total[:] = 0.0
    for leaf in range(first, end):
        step = leaf * LEAF
        if step + LEAF <= steps:
            for lane in range(0, width - ABREAST, 2 * ABREAST):
                _wide_leaf(lanes, plane, step, lane, leaves, leaf, total)
            if width % (2 * ABREAST) > 0:
                _narrow_leaf(lanes, plane, step, width - ABREAST, leaves, leaf, total)
        else:
            leaves[plane, leaf] = -np.inf
            for late in range(step, steps):
                for lane in range(width):
                    score = _wide(lanes[plane, late, lane])
                    leaves[plane, leaf, lane] = _higher(leaves[plane, leaf, lane], score)
                    total[lane] += score


@compiled
def _peaks(words, lanes, rows, leaves, branches, suspects):
    """The highest of each leaf and branch of each lane, and which rows may have NaN, because the sum of some is none.

    lanes: [planes, steps, lanes], of `rows` rows a plane; leaves, branches: as many lanes; suspects: [all rows]. Takes
    a few branches after the other, as long as no other thread has taken them.
    """
    planes, width = len(lanes), lanes.shape[2]
    parts = (branches.shape[1] + FEW_BRANCHES - 1) // FEW_BRANCHES
    total, no_total = np.empty(width, np.float32), np.empty(width, np.float32)
    while True:
        part = _add(words, TAKEN, 1)
        if part >= planes * parts:
            break
        plane, first = part // parts, part % parts * FEW_BRANCHES
        end = min(first + FEW_BRANCHES, branches.shape[1])
        _climb(lanes, plane, first * LEAF, min(end * LEAF, leaves.shape[1]), leaves, total)
        _climb(leaves, plane, first, end, branches, no_total)
        for lane in range(width):
            if math.isnan(total[lane]):
                suspects[plane * rows + lane % rows] = 1
        _add(words, DONE, 1)
    while _add(words, DONE, 0) < planes * parts:  # the other thread is at the last of them
        _sched_yield()


@compiled
def nth_highest(numbers, n):
    """The n-th highest, 1 <= n <= len(numbers) (Hoare's algorithm). None of them may be NaN. Their order is lost."""
    low, high, wanted = 0, len(numbers) - 1, n - 1
    while low < high:
        pivot = numbers[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while numbers[i] > pivot:
                i += 1
            while numbers[j] < pivot:
                j -= 1
            if i <= j:
                numbers[i], numbers[j] = numbers[j], numbers[i]
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    return numbers[wanted]


@compiled
def _order(score):
    """An int32 that is the higher the higher the float32 is; of both noughts the same."""
    bits = np.float32(score + np.float32(0.0)).view(np.int32)
    return np.int32(bits ^ 0x7FFFFFFF) if bits < 0 else bits


@compiled
def _ordered(order):
    """The float32 that `_order` gives this for."""
    return np.int32(order ^ 0x7FFFFFFF if order < 0 else order).view(np.float32)


@compiled
def _orders_of(numbers, first, apart, orders):
    """Every so many-th of the numbers, from the first on, as `_order` has them, to orders: int32 [n]. Returns the lowest and
    the highest."""
    lowest, highest = np.int32(2**31 - 1), np.int32(-(2**31))
    for i in range(len(orders)):
        orders[i] = _order(_item(numbers, first + i * apart))
        lowest, highest = min(lowest, orders[i]), max(highest, orders[i])
    return lowest, highest


@compiled
def _floor(orders, lowest, highest, n):
    """The n-th highest, 1 <= n <= len(orders), or a little less: what at least n reach, and few more."""
    low, high = np.int64(lowest), np.int64(highest) + 1
    while high - low > 1:
        middle, reach_it = np.int32((low + high) >> 1), 0
        for i in range(len(orders)):
            reach_it += orders[i] >= middle
        if reach_it < n:
            high = np.int64(middle)
        else:
            low = np.int64(middle)
            if reach_it <= n + n // 8:
                break
    return np.int32(low)


@compiled
def _find(words, lanes, rows, leaves, branches, suspects, wanted, scores, ids, counts, highest, likeliest):
    """The likeliest tokens of each row, likeliest first: at least as many as are wanted, if as many are possible.

    rows: of a plane; wanted: int64 [all rows], at least 1; scores, ids: [all rows, room]; the others: [all rows]. A count is -1
    where there is no room for them; the highest of a row with NaN is NaN. Takes one row after the other, as long as no other
    thread has taken them.
    """
    steps, width = lanes.shape[1:]
    all_leaves, all_branches, across, room = leaves.shape[1], branches.shape[1], width // rows, scores.shape[1]
    # In memory the tokens of a row are `rows` numbers apart, and so are its leaves, and its branches.
    tokens, flat_leaves, flat_branches = lanes.reshape(-1), leaves.reshape(-1), branches.reshape(-1)
    own_branches, own_leaves = np.empty(all_branches * across, np.int32), np.empty(all_leaves * across, np.int32)
    rows_taken = 0
    reaching_branches, reaching_leaves = np.empty(len(own_branches) + 1, np.int64), np.empty(len(own_leaves), np.int64)
    listed, keys = np.empty(room, np.int64), np.empty(room, np.int64)
    while True:
        at = _add(words, FOUND, 1)
        if at >= len(wanted):
            break
        rows_taken += 1
        plane, row = at // rows, at % rows
        first_token, first_leaf = plane * steps * width + row, plane * all_leaves * width + row
        bottom, top = _orders_of(flat_branches, plane * all_branches * width + row, rows, own_branches)
        highest[at], counts[at], likeliest[at] = _higher(_ordered(top), LOWEST), 0, 0
        if suspects[at]:  # or there are infinities of both kinds
            for token in range(steps * across):
                if math.isnan(_item(tokens, first_token + token * rows)):
                    highest[at] = np.nan
        if math.isnan(highest[at]):
            continue
        n = wanted[at]
        least = _order(LOWEST)
        if n == 1:
            least = max(least, top)
        elif 4 * n <= 3 * len(own_branches):
            least = max(least, _floor(own_branches, bottom, top, n))
        elif 4 * n <= 3 * len(own_leaves):
            bottom, top = _orders_of(flat_leaves, first_leaf, rows, own_leaves)
            least = max(least, _floor(own_leaves, bottom, top, n))
        floor, found = _ordered(least), 0
        for branch in range(len(own_branches)):  # noted first, and counted only if it reaches the floor
            reaching_branches[found] = branch
            found += own_branches[branch] >= least
        above = reaching_branches[:found]
        found = _reach(flat_leaves, first_leaf, rows, len(own_leaves), across, floor, above, reaching_leaves)
        above = reaching_leaves[:found]
        found = _reach(tokens, first_token, rows, steps * across, across, floor, above, listed)
        if found == 0:  # the highest is as impossible as the rest
            highest[at] = -np.inf
            continue
        counts[at] = found if found <= room else -1
        if found > room:
            while _item(tokens, first_token + likeliest[at] * rows) < highest[at]:
                likeliest[at] += 1
            continue
        for i in range(found):
            keys[i] = _key(_item(tokens, first_token + listed[i] * rows), listed[i])
        for i in range(found):
            place = 0
            for j in range(found):  # for so few faster than to sort them
                place += keys[j] > keys[i]
            scores[at, place], ids[at, place] = _score(keys[i]), _token(keys[i])
        likeliest[at] = ids[at, 0]
    _add(words, LISTED, rows_taken)


@compiled
def _reach(numbers, first, apart, tokens, across, floor, above, reaching):
    """Which of the numbers under those `above` reach the floor: their places, in the order of `above`, to `reaching`, int64
    [most]. Returns how many there are, or most + 1 if there are more.

    A row has so many `tokens` (or leaves) in all, `apart` numbers from each other from the `first` on. Under a leaf (or branch)
    there are LEAF of them, `across` (a power of 2) tokens from each other.
    """
    found = 0
    for one in above:
        lane = one & (across - 1)
        begin = (one - lane) * LEAF + lane
        if begin + (LEAF - 1) * across < tokens:  # a number that the compiler knows makes a faster loop
            bits = _which_reach(numbers, first + begin * apart, across * apart, LEAF, floor)
        else:
            bits = _which_reach(numbers, first + begin * apart, across * apart, (tokens - begin + across - 1) // across, floor)
        while bits:
            if found == len(reaching):
                return found + 1
            reaching[found] = begin + _lowest_bit(bits) * across
            found += 1
            bits &= bits - 1
    return found


@compiled
def _which_reach(numbers, first, apart, count, floor):
    """A bit for each of so many numbers: to jump at each, which nobody can foresee, would take longer than to read them."""
    bits = 0
    for i in range(count):
        bits |= np.int64(_item(numbers, first + i * apart) >= floor) << i
    return bits


@compiled
def _key(score, token):
    """An int64 that is the higher the higher the score, and of equal scores for the lower token."""
    return (np.int64(_order(score)) << 32) | (0xFFFFFFFF - token)


@compiled
def _token(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@compiled
def _score(key):
    return _ordered(key >> 32)


@compiled
def _keys(scores, floor):
    keys = np.empty(len(scores), np.int64)
    count = 0
    for token in range(len(scores)):
        if scores[token] >= floor:
            keys[count] = _key(scores[token], token)
            count += 1
    return keys[:count]


def ranked(scores: np.ndarray, floor: float) -> np.ndarray:
    """The tokens of a row whose scores reach `floor`, likeliest first, of equals the lowest id: float32 [vocab] → int64 [n]."""
    keys = _keys(scores, float(floor))
    keys.sort()
    return 0xFFFFFFFF - (keys[::-1] & 0xFFFFFFFF)


@compiled
def _weight(score, scale, bias):
    """2 ** (score * scale + bias), or what is next to nothing."""
    power = _fused(score, scale, bias)
    power = power if power > LEAST_POWER else LEAST_POWER
    rounded = np.float32(power + TO_WHOLE)
    x = power - (rounded - TO_WHOLE)
    factor = np.float32(1.0) + x * (POWER_1 + x * (POWER_2 + x * (POWER_3 + x * POWER_4)))
    # Times 2 to the whole number: that is added to the exponent.
    bits = np.float32(factor).view(np.int32) + (rounded.view(np.int32) << np.int32(23))
    return np.int32(bits).view(np.float32)


@compiled
def _any_is_set(numbers):
    """Whether one of them is less than infinity, which stands for none."""
    is_set = False
    for number in numbers:
        is_set |= number < np.inf
    return is_set


@compiled
def _set_scales(scale, bias, first, rows, highest, temperatures):
    """By what scores become exponents of 2 in each lane, float32 [lanes], of the rows from `first` on."""
    for lane in range(len(scale)):
        row = first + lane % rows
        scale[lane] = min(LOG2_E / temperatures[row], 1e38)
        bias[lane] = -highest[row] * np.float64(scale[lane])


@compiled
def _unrounded(scale, bias, highest):
    """What a sum of weights has to be multiplied with because the bias was rounded."""
    return 2.0 ** -(highest * np.float64(scale) + np.float64(bias))


@compiled
def _parts_of(tokens):
    """How many parts of PART_STEPS so many tokens are."""
    return (tokens + ABREAST * PART_STEPS - 1) // (ABREAST * PART_STEPS)


@compiled
def _sum(words, lanes, rows, highest, temperatures, sums):
    """The sums of all weights of each part, to sums: float64 [planes, parts, rows]. highest, temperatures: float64 [all rows].
    Takes one part after the other, as long as no other thread has taken them."""
    planes, steps, width = lanes.shape
    flat, ahead, parts = lanes.reshape(-1), AHEAD // width, sums.shape[1]
    some, scale, bias = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    while _add(words, LISTED, 0) < len(highest):  # the other thread is at the last of them
        _sched_yield()
    scaled = -1
    while True:
        part = _add(words, WEIGHED, 1)
        if part >= planes * parts:
            break
        plane, first = part // parts, part % parts * PART_STEPS
        own, end = sums[plane, part % parts], min(first + PART_STEPS, steps)
        own[:] = 0.0
        if _any_is_set(temperatures[plane * rows : (plane + 1) * rows]):
            if plane != scaled:
                _set_scales(scale, bias, plane * rows, rows, highest, temperatures)
                scaled = plane
            for step in range(first, end, SUM_STEPS):
                if width < AHEAD and step + ahead + SUM_STEPS <= steps:  # of wide ones the processor asks early enough itself
                    for coming in range(step + ahead, step + ahead + SUM_STEPS):
                        for lane in range(0, width, LINE):
                            _prefetch(flat, (plane * steps + coming) * width + lane)
                if step + SUM_STEPS <= steps:
                    for lane in range(0, width, LINE):
                        _weigh(flat, (plane * steps + step) * width, width, scale, bias, lane, some)
                else:
                    some[:] = 0.0
                    for late in range(step, steps):
                        for lane in range(width):
                            some[lane] += _weight(_wide(lanes[plane, late, lane]), scale[lane], bias[lane])
                half = width // 2
                while half >= rows:
                    for lane in range(half):
                        some[lane] += some[half + lane]
                    half //= 2
                for row in range(rows):
                    own[row] += some[row]
            for row in range(rows):
                at = plane * rows + row
                if abs(bias[row]) > MOST_BIAS and math.isfinite(highest[at]):  # float32 cannot tell
                    own[row] = 0.0
                    for step in range(first, end):
                        for lane in range(row, width, rows):
                            score = np.float64(_wide(lanes[plane, step, lane]))
                            own[row] += math.exp((score - highest[at]) / temperatures[at])
        _add(words, SUMMED, 1)
    while _add(words, SUMMED, 0) < planes * parts:
        _sched_yield()


@compiled
def _total(highest, temperatures, sums):
    """What the sums of all parts add up to: float64 [all rows]."""
    planes, parts, rows = sums.shape
    totals, scale, bias = np.zeros(len(highest), np.float64), np.empty(rows, np.float32), np.empty(rows, np.float32)
    for plane in range(planes):
        _set_scales(scale, bias, plane * rows, rows, highest, temperatures)
        for row in range(rows):
            at = plane * rows + row
            for part in range(parts):
                totals[at] += sums[plane, part, row]
            if abs(bias[row]) <= MOST_BIAS:
                totals[at] *= _unrounded(scale[row], bias[row], highest[at])
                totals[at] = max(1.0, totals[at])  # the highest weighs as much
    return totals


def _look_by(number: type):
    """What looks at float32 or, as their bits, bfloat16."""

    def look(told):
        """One thread's part of all that is told of in words."""
        words = carray(told, WORDS)
        planes, steps, width, rows, all_leaves, all_branches, room, parts = words[TOLD : TOLD + 8]
        addresses, all_rows, abreast = words[TOLD + 8 : TOLD + 20], planes * rows, ABREAST * rows
        highest = carray(_at(addresses[1], np.float64), all_rows)
        if all_leaves > 0:
            lanes = carray(_at(addresses[0], number), (planes, steps, width))
            leaves = carray(_at(addresses[2], np.float32), (planes, all_leaves, width))
            branches = carray(_at(addresses[3], np.float32), (planes, all_branches, width))
            suspects, wanted = carray(_at(addresses[4], np.int64), all_rows), carray(_at(addresses[5], np.int64), all_rows)
            scores = carray(_at(addresses[6], np.float32), (all_rows, room))
            ids = carray(_at(addresses[7], np.int64), (all_rows, room))
            counts, likeliest = carray(_at(addresses[8], np.int64), all_rows), carray(_at(addresses[9], np.int64), all_rows)
            _peaks(words, lanes, rows, leaves, branches, suspects)
            _find(words, lanes, rows, leaves, branches, suspects, wanted, scores, ids, counts, highest, likeliest)
        if parts > 0:
            lanes = carray(_at(addresses[0], number), (planes, steps * width // abreast, abreast))
            temperatures = carray(_at(addresses[10], np.float64), all_rows)
            _sum(words, lanes, rows, highest, temperatures, carray(_at(addresses[11], np.float64), (planes, parts, rows)))

    return look


@functools.cache
def _code_for(dtype: torch.dtype):
    """`_look_by` as machine code, whose address is good as long as it is kept. Who calls it by that has it compiled once for
    all, and not once more for each place where it is called."""
    signature, look = types.void(types.CPointer(types.int64)), _look_by(NO_LANES[dtype].dtype.type)
    try:
        return numba.cfunc(signature, cache=True, **OPTIONS)(look)
    except (RuntimeError, OSError):  # nowhere to keep it, or no room
        return numba.cfunc(signature, **OPTIONS)(look)


@compiled
def _look(code, address, tokens, rows, wanted, temperatures, words):
    """The arrays of `Logits`, its totals at the temperatures, if there are any, and whether there are broken rows. At the
    address there are planes of `rows` rows each, of which as many tokens lie; code: the address of what looks at such numbers;
    wanted: int64 [all rows]; words: a helper's, or none."""
    planes, room = len(wanted) // rows, 64
    for n in wanted:
        room = max(room, 2 * n + 64)
    # What a leaf has lies together in memory if as few tokens as fill the vectors are abreast; `_wide_leaf` takes two of them.
    few = ABREAST // math.gcd(rows, ABREAST)
    if few * rows == ABREAST and tokens % (2 * few) == 0:
        few *= 2
    steps, width = tokens // few, few * rows
    leaves = np.empty((planes, (steps + LEAF - 1) // LEAF, width), np.float32)
    branches = np.empty((planes, (leaves.shape[1] + LEAF - 1) // LEAF, width), np.float32)
    suspects = np.zeros(len(wanted), np.int64)
    scores, ids = np.empty((len(wanted), room), np.float32), np.empty((len(wanted), room), np.int64)
    counts, likeliest = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    highest = np.empty(len(wanted), np.float64)
    sums = np.empty((planes, _parts_of(tokens) if len(temperatures) > 0 else 0, rows), np.float64)
    if len(words) > 0:
        words[CPU] = _sched_getcpu()
    is_shared = len(words) > 0 and len(wanted) * tokens >= MUCH
    if not is_shared:
        words = np.zeros(WORDS, np.int64)
    told = words[TOLD:]
    told[0], told[1], told[2], told[3] = planes, steps, width, rows
    told[4], told[5], told[6], told[7] = leaves.shape[1], branches.shape[1], room, sums.shape[1]
    told[8], told[9], told[10], told[11] = address, highest.ctypes.data, leaves.ctypes.data, branches.ctypes.data
    told[12], told[13], told[14], told[15] = suspects.ctypes.data, wanted.ctypes.data, scores.ctypes.data, ids.ctypes.data
    told[16], told[17] = counts.ctypes.data, likeliest.ctypes.data
    told[18], told[19] = temperatures.ctypes.data, sums.ctypes.data
    words[CODE] = code
    words[TAKEN] = words[DONE] = words[FOUND] = words[LISTED] = words[WEIGHED] = words[SUMMED] = 0
    _add(words, OPEN, 1)
    _call(code, words.ctypes.data)
    _add(words, OPEN, -1)
    while _add(words, INSIDE, 0) > 0:  # to the end of what it has taken
        _sched_yield()
    told[8] = leaves.size + branches.size + suspects.size + sums.size  # asked for, so that they are not given back before
    totals = _total(highest, temperatures, sums) if len(temperatures) > 0 else np.zeros(len(wanted), np.float64)
    has_broken = False
    for each in highest:
        has_broken |= not math.isfinite(each)
    return (scores, ids, counts, highest, likeliest), totals, has_broken


@compiled
def _weigh_anew(code, address, tokens, rows, highest, temperatures):
    """The totals at other temperatures, by one thread. Arguments as of `_look`."""
    planes, words = len(highest) // rows, np.zeros(WORDS, np.int64)
    sums = np.empty((planes, _parts_of(tokens), rows), np.float64)
    told = words[TOLD:]
    told[0], told[1], told[2], told[3], told[7] = planes, tokens, rows, rows, sums.shape[1]
    told[8], told[9], told[18], told[19] = address, highest.ctypes.data, temperatures.ctypes.data, sums.ctypes.data
    words[LISTED] = len(highest)
    _call(code, words.ctypes.data)
    told[8] = sums.size + temperatures.size  # as above
    return _total(highest, temperatures, sums)


@compiled
def _logprobs(no_lanes, address, tokens, rows, chosen, highest, normalizers):
    """Of one token of each row, `chosen`, int64 [all rows]: float64 [all rows]. The others as of `_look` and `Logits`."""
    numbers = carray(_at(address, no_lanes.dtype), len(highest) * tokens)
    logprobs = np.empty(len(highest), np.float64)
    for row in range(len(highest)):
        token = chosen[row]
        if not 0 <= token < tokens:
            raise IndexError("there is no such token")
        at = (row // rows * tokens + token) * rows + row % rows
        logprobs[row] = _item(numbers, at) - highest[row] - normalizers[row]
    return logprobs


@compiled
def _now_ns(time):
    """Of CLOCK_MONOTONIC. time: int64 [2], to write into."""
    _clock_gettime(np.int32(1), time.ctypes)
    return time[0] * 1_000_000_000 + time[1]


@compiled
def _stand_by(words):
    """Helps with every look that it is awake for, until it is told to end."""
    time = np.empty(2, np.int64)
    while True:
        while _sem_wait(words[SEMAPHORE:].ctypes) != 0:  # a signal came
            pass
        if _add(words, ENDS, 0):
            return
        early_ns = _add(words, DUE, 0) - LEAD_NS - _now_ns(time)
        if early_ns > 0:
            _usleep(np.uint32(early_ns // 1000))
        until = _add(words, DUE, 0) + PATIENCE_NS
        is_done = False
        while not is_done and _now_ns(time) < until:
            if _add(words, OPEN, 0):
                _add(words, INSIDE, 1)
                if _add(words, OPEN, 0):  # still: who looks waits for those inside from now on
                    _call(words[CODE], words.ctypes.data)
                    is_done = True
                    words[HELPED] += 1
                _add(words, INSIDE, -1)
            _sched_yield()


class Helper:
    """A second thread that takes its part of the look at logits, if it is awake when that begins.

    One that had to be woken would come too late. So it is told when to expect the look, and is there a moment before, for a
    moment: it polls, and yields to who wants its processor. Who looks never waits for it, except for the end of what it has
    taken. It needs neither the interpreter nor its lock.
    """

    @staticmethod
    def can_help() -> bool:
        """Whether there is a processor for it."""
        return len(os.sched_getaffinity(0)) > 1

    def __init__(self):
        self.words = np.zeros(WORDS, np.int64)
        self.words[CPU] = -1
        self._libc = ctypes.CDLL(None)
        self._semaphore = ctypes.c_void_p(self.words[SEMAPHORE:].ctypes.data)
        self._libc.sem_init(self._semaphore, 0, 0)
        self._cpus, self._shunned = os.sched_getaffinity(0), -1
        _stand_by.compile((numba.typeof(self.words),))  # here: it takes a second, which nobody would know of there
        self._thread = threading.Thread(target=_stand_by, args=(self.words,), name="helper", daemon=True)
        self._thread.start()

    @property
    def helped(self) -> int:
        """How often it has taken a part."""
        return int(self.words[HELPED])

    @property
    def cpu(self) -> int:
        """The processor of who looked last; -1 before the first look."""
        return int(self.words[CPU])

    def expect(self, logits: int, at: float) -> None:
        """The next look is at so many, and expected at that time: CLOCK_MONOTONIC, in seconds."""
        if logits < MUCH:
            return
        self.words[DUE] = int(at * 1e9)
        # Linux wakes who looks on the processor where it fell asleep, also if this polls there and another one is idle.
        if self.words[CPU] != self._shunned:
            self._shunned = int(self.words[CPU])
            with contextlib.suppress(OSError):  # where that is forbidden, it helps less often
                os.sched_setaffinity(self._thread.native_id, self._cpus - {self._shunned})
        self._libc.sem_post(self._semaphore)

    def end(self) -> None:
        """Ends the thread: at once, unless it sleeps until what it expects."""
        self.words[ENDS] = 1
        self._libc.sem_post(self._semaphore)
        self._thread.join(1.0)


@compiled
def _if(holds, weight):
    return weight if holds else np.float32(0.0)


@compiled
def _masses(lanes, rows, highest, temperatures, floors, above, reaching):
    """Adds the weights of the tokens that are above two floors to `above`, and of those that reach them to `reaching`: float64
    [2, all rows]. floors: float32 [2, all rows], inf for rows that need none."""
    planes, steps, width = lanes.shape
    scale, bias = np.empty(width, np.float32), np.empty(width, np.float32)
    low, high = np.empty(width, np.float32), np.empty(width, np.float32)
    sums = np.empty((4, width), np.float32)
    above_low, reaching_low, above_high, reaching_high = sums[0], sums[1], sums[2], sums[3]
    for plane in range(planes):
        first = plane * rows
        if not (_any_is_set(floors[0, first : first + rows]) or _any_is_set(floors[1, first : first + rows])):
            continue
        _set_scales(scale, bias, first, rows, highest, temperatures)
        for lane in range(width):
            low[lane], high[lane] = floors[0, first + lane % rows], floors[1, first + lane % rows]
        for begin in range(0, steps, MASS_STEPS):
            sums[:] = 0.0
            step, end = begin, min(begin + MASS_STEPS, steps)
            while step + 4 <= end:
                one, two = lanes[plane, step], lanes[plane, step + 1]
                three, four = lanes[plane, step + 2], lanes[plane, step + 3]
                for lane in range(width):
                    own, common, floor, other = scale[lane], bias[lane], low[lane], high[lane]
                    a, b, c, d = _wide(one[lane]), _wide(two[lane]), _wide(three[lane]), _wide(four[lane])
                    u, v = _weight(a, own, common), _weight(b, own, common)
                    x, y = _weight(c, own, common), _weight(d, own, common)
                    above_low[lane] += (_if(a > floor, u) + _if(b > floor, v)) + (_if(c > floor, x) + _if(d > floor, y))
                    reaching_low[lane] += (_if(a >= floor, u) + _if(b >= floor, v)) + (_if(c >= floor, x) + _if(d >= floor, y))
                    above_high[lane] += (_if(a > other, u) + _if(b > other, v)) + (_if(c > other, x) + _if(d > other, y))
                    reaching_high[lane] += (_if(a >= other, u) + _if(b >= other, v)) + (_if(c >= other, x) + _if(d >= other, y))
                step += 4
            while step < end:
                one = lanes[plane, step]
                for lane in range(width):
                    a, floor, other = _wide(one[lane]), low[lane], high[lane]
                    u = _weight(a, scale[lane], bias[lane])
                    above_low[lane] += _if(a > floor, u)
                    reaching_low[lane] += _if(a >= floor, u)
                    above_high[lane] += _if(a > other, u)
                    reaching_high[lane] += _if(a >= other, u)
                step += 1
            for row in range(rows):
                for lane in range(row, width, rows):
                    above[0, first + row] += above_low[lane]
                    above[1, first + row] += above_high[lane]
                    reaching[0, first + row] += reaching_low[lane]
                    reaching[1, first + row] += reaching_high[lane]
        for row in range(rows):
            at = first + row
            if abs(bias[row]) <= MOST_BIAS:
                factor = _unrounded(scale[row], bias[row], highest[at])
                for n in range(len(floors)):
                    above[n, at] *= factor
                    reaching[n, at] *= factor
            else:  # float32 cannot tell
                for n in range(len(floors)):
                    above[n, at], reaching[n, at] = 0.0, np.inf


def _as_float32(numbers: np.ndarray) -> np.ndarray:
    return numbers if numbers.dtype == np.float32 else (numbers.astype(np.int32) << 16).view(np.float32)


class Logits:
    """The logits of a step. logits: float32 or bfloat16 [rows, vocab], on the CPU, which must stay as they are; wanted: for
    each row how many of the likeliest tokens are wanted, at least 1.

    They may lie in memory row by row, as they do on a CPU, or token by token, as a sharded device brings them; to turn that
    round would take longer than all the rest. Of both kinds ABREAST tokens are looked at together: `lanes`, [planes, steps,
    lanes], where a plane has one row or all of them, and lane `l` of a plane of `n` rows has row `l % n`. Numpy knows no
    bfloat16: those are there as their bits, int16.

    no_lanes      an empty array like `lanes`
    rows_abreast  int: the `n` of above
    highest       float64 [rows]: NaN where one of them is, -inf or inf where no other can be chosen
    likeliest     int64 [rows]: of equals the lowest id; of a row that has no highest it means nothing
    counts        int64 [rows]: of likeliest tokens; fewer than wanted where no others are possible, -1 where there are too many
    scores, ids   float32, int64 [rows, >= counts]: theirs, likeliest first, of equals the lowest id first
    found         scores, ids, counts, highest and likeliest, for compiled loops
    weighed       `totals` of the temperatures, if they were given; else noughts
    """

    def __init__(
        self,
        logits: torch.Tensor,
        wanted: Sequence[int],
        helper: Helper | None = None,
        temperatures: np.ndarray = NO_TEMPERATURES,
    ):
        assert logits.is_cpu and logits.dtype in NO_LANES, "they are read where they lie"
        self._logits, self.no_lanes = logits, NO_LANES[logits.dtype]
        rows, self.vocab_size = logits.size(0), logits.size(1)
        self._missing = -self.vocab_size % ABREAST  # up to whole lanes
        self.rows_abreast = rows if rows > 1 and logits.stride(0) == 1 else 1
        if self.rows_abreast > 1:
            is_dense = logits.stride(1) == rows
        else:
            is_dense = logits.stride(1) == 1 and (rows == 1 or logits.stride(0) == self.vocab_size)
        # To make an array of them would take longer than all else here: its code is in no cache when a device has just ended.
        address = logits.data_ptr() if is_dense and not self._missing else self.lanes.ctypes.data
        self._turned: np.ndarray | None = None
        self._fetched = 0
        # Told of by addresses, which are good as long as this is.
        self._where = _code_for(logits.dtype).address, address, self.vocab_size + self._missing, self.rows_abreast
        words = helper.words if helper else NO_WORDS
        self.found, self.weighed, self._has_broken = _look(*self._where, np.asarray(wanted), temperatures, words)
        self.scores, self.ids, self.counts, self.highest, self.likeliest = self.found

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        logits = self._logits.detach()
        return (logits if logits.dtype == torch.float32 else logits.view(torch.int16)).numpy()

    @functools.cached_property
    def lanes(self) -> np.ndarray:
        by_token = self.rows_abreast > 1
        abreast = self._numbers.T if by_token else self._numbers
        if self._missing:
            added = [(0, self._missing * by_token), (0, self._missing * (not by_token))]
            abreast = np.pad(abreast, added, constant_values=IMPOSSIBLE[abreast.dtype])
        return np.ascontiguousarray(abreast).reshape(len(self._logits) // self.rows_abreast, -1, ABREAST * self.rows_abreast)

    @property
    def broken(self) -> list[int]:
        """The rows that have no highest score which is a number."""
        return (~np.isfinite(self.highest)).nonzero()[0].tolist() if self._has_broken else []

    def totals(self, temperatures: np.ndarray) -> np.ndarray:
        """The sums of all weights: float64 [rows] → float64 [rows]. Where a row is broken or its temperature infinite they mean
        nothing. A token's weight is exp((its score - the highest) / temperature)."""
        return _weigh_anew(*self._where, self.highest, temperatures)

    def masses(self, temperatures: np.ndarray, floors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums of the weights of those tokens whose scores are above each of two floors, and of those that reach them:
        float32 [2, rows] → float64 [2, rows] each. Rows with floors of inf are left out; where float32 cannot tell, they are 0
        and inf. temperatures: as for `totals`."""
        above, reaching = np.zeros(floors.shape), np.zeros(floors.shape)
        _masses(self.lanes, self.rows_abreast, self.highest, temperatures, floors, above, reaching)
        return above, reaching

    def row(self, index: int) -> np.ndarray:
        """float32 [vocab], contiguous. Some are fetched one by one, but many by turning the whole round."""
        self._fetched += 1
        if self._turned is None and (self.rows_abreast == 1 or self._fetched > FEW_ROWS):
            self._turned = np.ascontiguousarray(self._numbers)
        return _as_float32(np.ascontiguousarray(self._numbers[index]) if self._turned is None else self._turned[index])

    def list_anew(self, row: int, n: int) -> None:
        """Finds the `n` likeliest tokens of a row for which there was no room: more are as likely as the last of them."""
        scores = self.row(row)
        ids = ranked(scores, nth_highest(scores.copy(), min(n, len(scores))))[:n]
        ids = ids[scores[ids] > -np.inf]
        self.counts[row], self.ids[row, : len(ids)], self.scores[row, : len(ids)] = len(ids), ids, scores[ids]

    @functools.cached_property
    def _normalizers(self) -> np.ndarray:
        return np.log(self.totals(np.ones(len(self.highest))))

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of one token of each row, float64 [rows]."""
        return _logprobs(self.no_lanes, *self._where[1:], np.asarray(tokens, np.int64), self.highest, self._normalizers)

    def top(self, row: int, n: int) -> list[tuple[int, float]]:
        """The `n` likeliest (token id, log-probability) of a row, likeliest first; of equals the lowest id first."""
        n = min(n, self.vocab_size)
        if n == 0:
            return []
        if self.counts[row] >= n:
            ids, scores = self.ids[row, :n], self.scores[row, :n]
        else:
            whole = self.row(row)
            ids = ranked(whole, -np.inf)[:n]
            scores = whole[ids]
        logprobs = scores - self.highest[row] - self._normalizers[row]
        return list(zip(ids.tolist(), logprobs.tolist()))
