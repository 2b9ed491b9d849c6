"""What a model built like Llama does between two matrix products, compiled for this CPU: RMSNorm, rotary positions, the
attention of a decode step, the gate, and rounding to 8 bits. And, where the CPU adds up products of bfloat16, the product of a
few rows with a weight, and the attention of prompts.

torch takes several calls for each, and every call reads and writes all numbers. With a small model that takes as long as the
products themselves. Here each is one pass over a token, in float32 inside, whatever the tensors hold. A token is computed by
itself, so not a bit of it depends on its company or on the number of threads.

numba compiles these loops as it does those of logits.py, for the type of number that is asked for; the two share nothing,
because what numba keeps of a file is made anew only when that file has changed. They run on the threads of torch's own OpenMP,
which it keeps awake between the products; one of ours would have to be woken each time. Where torch has none that can be asked
(it is libgomp's interface), they run in the caller's thread.

This layer knows tensors, and neither layers of a model nor slots that are free or taken.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

logger = logging.getLogger("model")

FEW = 4  # tokens that a thread takes at a time
LITTLE = 8192  # numbers; to share out so few takes longer than to do it alone
LANES = 16
TOGETHER = 4  # query heads that look at a key while it is in the processor's registers
VALUES = 8  # that are added to the sum at a time
AHEAD = 16  # keys
LINE = 64  # bytes that come together from memory
BESIDE, WHOLE = 64, 16  # outputs of a matrix product that oneDNN lays side by side, and words of inputs that it has whole
TOKENS = 6  # whose products with BESIDE outputs fit into the processor's registers
QUERIES = 64  # tokens of a prompt that look at keys together
DEPTH = 64  # words of inputs, whose weights stay in the first cache until all tokens had them
NEAR = 1024  # bytes
HALVES = 32  # numbers of 16 bits that the processor's vectors have
MOST_WORDS = 16
KERNEL_DTYPES = {torch.float32: types.float32, torch.bfloat16: types.int16}  # numba knows no bfloat16
LOG2_E = np.float32(math.log2(math.e))
LEAST_POWER, MOST_POWER = np.float32(-126.0), np.float32(127.0)  # of 2, in float32
# 2 ** x for |x| <= 1/2 is 1 and the polynomial with these, wrong by less than 1e-7 (Remez's algorithm).
POWER_1, POWER_2, POWER_3, POWER_4, POWER_5 = (
    np.float32(factor) for factor in (0.693146978, 0.240222421, 0.0555073374, 0.00967151276, 0.00132647274)
)
TO_WHOLE = np.float32(1.5 * 2**23)  # with this added a float32 has no room for a fraction
HIDDEN = np.float32(-1e30)  # the score of a key that a token may not look at; the sum of some is still finite
NOT_A_NUMBER = np.int32(0x7FC0)  # in bfloat16
INT8_MOST, INT8_ZERO = np.float32(127.0), np.int32(128)
SMALLEST = np.float32(1e-30)  # what stands for nothing but noughts, which have no largest number to be divided by

# Sums are taken in the order that suits the vectors, which is always the same. No number is taken for granted to be finite.
IN_ANY_ORDER = {"error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
AS_WRITTEN = {"error_model": "numpy", "fastmath": {"contract"}}


def _wide(number):
    """The float32 of a number in memory: of a float32 or, as its bits, of a bfloat16."""


@overload(_wide)
def _wide_for(number):
    if number == types.float32:
        return lambda number: number
    return lambda number: np.int32(np.int32(number) << np.int32(16)).view(np.float32)


def _narrow(number, like):
    """A float32 as it goes to memory, in the place of a number `like` that: the nearest, of two the even one."""


@overload(_narrow)
def _narrow_for(number, like):
    if like == types.float32:
        return lambda number, like: number

    def rounded(number, like):  # to int32 after each step: otherwise they are taken in 64 bits, half as many at a time
        bits = np.float32(number).view(np.int32)
        is_odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
        up = np.int32(np.int32(bits + np.int32(0x7FFF)) + is_odd)
        return np.int16(np.int32(up >> np.int32(16)) if number == number else NOT_A_NUMBER)

    return rounded


@intrinsic
def _words(_context, told):
    """What a kernel is told, as int64: see `Kernels._run`."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(told), generate


@intrinsic
def _numbers(_context, address, told):
    """A pointer to numbers of the kind that `told` points to."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return told(address, told), generate


@intrinsic
def _at(_context, address, kind):
    """A pointer to the numbers of a kind at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(address, kind), generate


@intrinsic
def _take(_context, words):
    """The first word, and one more for the next thread that asks."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(words), generate


def _ask_ahead(builder, address):
    """Asks memory for what is at an address without waiting for it. An address that is none does no harm."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, into_second_cache, data = (ir.Constant(number, value) for value in (0, 2, 1))
    builder.call(function, [builder.bitcast(address, byte), to_read, into_second_cache, data])


@intrinsic
def _prefetch(_context, array, row, column):
    """Asks memory for array[row, column] without waiting for it."""

    def generate(context, builder, signature, arguments):
        values = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, signature.args[0], values, arguments[1:], wraparound=False)
        _ask_ahead(builder, address)
        return context.get_dummy_value()

    return types.void(array, row, column), generate


class _Bfloat16(ir.Type):
    """As LLVM calls it; llvmlite knows none."""

    def __str__(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _Bfloat16)

    def __hash__(self):
        return hash(_Bfloat16)


def _few_by(instruction: str, totals: ir.VectorType, parts: ir.VectorType):
    """What multiplies few tokens by an instruction that adds to each total the products of what two words consist of."""
    word, offset, wide = ir.IntType(32), ir.IntType(64), LINE // 4
    words = ir.VectorType(word, wide)

    @intrinsic
    def multiply_few(_context, x, apart, tokens, depth, weights, ahead, step, sums):
        """Adds the products of 1 to TOKENS tokens with BESIDE outputs to `sums`, [tokens, BESIDE]: word after word.

        x: words of 32 bits, [tokens, depth], tokens so many words apart; weights: words, [depth, BESIDE]. Memory is asked for
        what comes next, from `ahead` on, so many bytes further with each word. Arrays are addresses.
        """

        def generate(context, builder, _signature, arguments):
            x, apart, tokens, depth, weights, ahead, step, sums = arguments
            kind = ir.FunctionType(totals, [totals, parts, parts])
            add_products = cgutils.get_or_insert_function(builder.module, kind, instruction)

            def vector_at(base, number, kind):
                return builder.bitcast(builder.gep(base, [number]), kind.as_pointer())

            def multiply(count):
                rows = [builder.gep(x, [builder.mul(apart, offset(token))]) for token in range(count)]
                places = [vector_at(sums, offset(number * wide), totals) for number in range(count * BESIDE // wide)]
                added = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
                with cgutils.for_range(builder, depth) as loop:
                    first, some = builder.mul(loop.index, offset(BESIDE)), []
                    coming = builder.gep(ahead, [builder.mul(loop.index, step)])
                    for lane in range(0, BESIDE, wide):
                        _ask_ahead(builder, builder.gep(coming, [offset(4 * lane)]))
                        place = vector_at(weights, builder.add(first, offset(lane)), parts)
                        some.append(builder.load(place, align=4))
                    for token, row in enumerate(rows):
                        own = builder.load(builder.gep(row, [loop.index]), align=1)
                        lane = builder.insert_element(words(ir.Undefined), own, word(0))
                        everywhere = builder.bitcast(builder.shuffle_vector(lane, lane, words([0] * wide)), parts)
                        for place, weight in zip(added[token * len(some) :], some):
                            builder.store(builder.call(add_products, [builder.load(place), everywhere, weight]), place)
                for place, own in zip(places, added):
                    builder.store(builder.load(own), place, align=4)

            x, weights, sums = (builder.inttoptr(address, word.as_pointer()) for address in (x, weights, sums))
            ahead = builder.inttoptr(ahead, ir.IntType(8).as_pointer())
            for count in range(1, TOKENS + 1):
                with builder.if_then(builder.icmp_signed("==", tokens, offset(count))):
                    multiply(count)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply_few


_whole, _real, _pairs = (ir.VectorType(*kind) for kind in ((ir.IntType(32), 16), (ir.FloatType(), 16), (_Bfloat16(), 32)))
_multiply_few = _few_by("llvm.x86.avx512bf16.dpbf16ps.512", _real, _pairs)
_multiply_few_bytes = _few_by("llvm.x86.avx512.vpdpbusd.512", _whole, _whole)  # tokens' are unsigned, weights' are signed


@numba.njit(**AS_WRITTEN)
def _power_of_2(x):
    x = x if x > LEAST_POWER else LEAST_POWER
    x = x if x < MOST_POWER else MOST_POWER
    rounded = np.float32(x + TO_WHOLE)
    x = x - (rounded - TO_WHOLE)
    factor = np.float32(1.0) + x * (POWER_1 + x * (POWER_2 + x * (POWER_3 + x * (POWER_4 + x * POWER_5))))
    # Times 2 to the whole number: that is added to the exponent.
    bits = np.int32(np.float32(factor).view(np.int32) + (rounded.view(np.int32) << np.int32(23)))
    return np.int32(bits).view(np.float32)


@numba.njit(**AS_WRITTEN)
def _fill(array, number):
    """The same as `array[:] = number`, which takes numba long to compile. The array must be contiguous."""
    flat = array.reshape(-1)
    for i in range(len(flat)):
        flat[i] = number


@numba.njit(**AS_WRITTEN)
def _higher(a, b):
    return a if a > b else b


@numba.njit(**IN_ANY_ORDER)
def _add_and_normalize(x, delta, weight, epsilon, out):
    squares = np.float32(0.0)
    for i in range(len(x)):
        x[i] = _narrow(_wide(x[i]) + _wide(delta[i]), x[i])
        number = _wide(x[i])
        squares += number * number
    factor = np.float32(1.0 / math.sqrt(squares / len(x) + epsilon))
    for i in range(len(x)):
        out[i] = _narrow(_wide(x[i]) * factor * _wide(weight[i]), out[i])


def _add_norm(told):
    words = _words(told)
    tokens, size = words[1], words[2]
    epsilon = np.int64(words[3]).view(np.float64)
    x, delta = carray(_numbers(words[4], told), (tokens, size)), carray(_numbers(words[5], told), (tokens, size))
    weight, out = carray(_numbers(words[6], told), size), carray(_numbers(words[7], told), (tokens, size))
    first = _take(words) * FEW
    while first < tokens:
        for t in range(first, min(first + FEW, tokens)):
            _add_and_normalize(x[t], delta[t], weight, epsilon, out[t])
        first = _take(words) * FEW


@numba.njit(**AS_WRITTEN)
def _turn(head, cos, sin, widened, out):
    half = len(head) // 2
    for i in range(len(head)):
        widened[i] = _wide(head[i])
    first, second = widened[:half], widened[half:]
    for i in range(half):  # `out` may be `head` itself
        out[i] = _narrow(first[i] * _wide(cos[i]) - second[i] * _wide(sin[i]), out[i])
    out, cos, sin = out[half:], cos[half:], sin[half:]
    for i in range(half):
        out[i] = _narrow(second[i] * _wide(cos[i]) + first[i] * _wide(sin[i]), out[i])


def _rotate(told):
    words = _words(told)
    tokens, heads, kv_heads, size, slots, window = words[1], words[2], words[3], words[4], words[5], words[6]
    first_slot, length = words[7], words[8]
    places = carray(_words(_numbers(words[9], told)), tokens)
    qkv = carray(_numbers(words[10], told), (tokens, heads + 2 * kv_heads, size))
    cos, sin = carray(_numbers(words[11], told), (tokens, size)), carray(_numbers(words[12], told), (tokens, size))
    store = carray(_numbers(words[13], told), (2, slots, kv_heads, window, size))
    widened = np.empty(size, np.float32)
    first = _take(words) * FEW
    while first < tokens:
        for t in range(first, min(first + FEW, tokens)):
            slot, place = first_slot + t // length, places[t]
            for head in range(heads):
                _turn(qkv[t, head], cos[t], sin[t], widened, qkv[t, head])
            for head in range(kv_heads):
                _turn(qkv[t, heads + head], cos[t], sin[t], widened, store[0, slot, head, place])
                own, given = store[1, slot, head, place], qkv[t, heads + kv_heads + head]
                for i in range(size):
                    own[i] = given[i]
        first = _take(words) * FEW


@numba.njit(**IN_ANY_ORDER)
def _scores(query, keys, values, scores):
    """The products of TOGETHER queries with all keys. Memory is asked for the values meanwhile: they are read next.
    query: float32 [TOGETHER, head size]; keys, values: [n, head size]; scores: float32 [TOGETHER, n]."""
    query_0, query_1, query_2, query_3 = query[0], query[1], query[2], query[3]
    scores_0, scores_1, scores_2, scores_3 = scores[0], scores[1], scores[2], scores[3]
    for p in range(len(keys)):
        key = keys[p]
        for i in range(0, len(key), LINE // key.itemsize):
            _prefetch(keys, min(p + AHEAD, len(keys) - 1), i)
            _prefetch(values, p, i)
        score_0 = score_1 = score_2 = score_3 = np.float32(0.0)
        for i in range(len(key)):
            number = _wide(key[i])
            score_0 += query_0[i] * number
            score_1 += query_1[i] * number
            score_2 += query_2[i] * number
            score_3 += query_3[i] * number
        scores_0[p], scores_1[p], scores_2[p], scores_3[p] = score_0, score_1, score_2, score_3


@numba.njit(**IN_ANY_ORDER)
def _scores_of_one(query, keys, values, scores):
    for p in range(len(keys)):
        key = keys[p]
        for i in range(0, len(key), LINE // key.itemsize):
            _prefetch(keys, min(p + AHEAD, len(keys) - 1), i)
            _prefetch(values, p, i)
        score = np.float32(0.0)
        for i in range(len(key)):
            score += query[i] * _wide(key[i])
        scores[p] = score


@numba.njit(**IN_ANY_ORDER)
def _softmax(scores, lanes):
    """In place. Is NaN throughout where one of them is no number."""
    _fill(lanes, -np.inf)
    blocks = len(scores) // LANES
    for block in range(blocks):
        some = scores[block * LANES : (block + 1) * LANES]
        for lane in range(LANES):
            lanes[lane] = _higher(some[lane], lanes[lane])
    highest, total, check = np.float32(-np.inf), np.float32(0.0), np.float32(0.0)
    for lane in range(LANES):
        highest = _higher(lanes[lane], highest)
    for p in range(blocks * LANES, len(scores)):
        highest = _higher(scores[p], highest)
    for p in range(len(scores)):
        check += scores[p] * np.float32(0.0)
        weight = _power_of_2((scores[p] - highest) * LOG2_E)
        scores[p] = weight
        total += weight
    factor = np.float32(1.0) / total + check
    for p in range(len(scores)):
        scores[p] *= factor


@numba.njit(**IN_ANY_ORDER)
def _mix(weights, values, widened, sums):
    """The sums of all values, by their weights, for several heads. weights: float32 [heads, values and VALUES more, which are
    noughts]; widened: float32 [VALUES, head size], room; sums: float32 [heads, head size]."""
    _fill(sums, 0.0)
    v_0, v_1, v_2, v_3, v_4, v_5, v_6, v_7 = (
        widened[0], widened[1], widened[2], widened[3], widened[4], widened[5], widened[6], widened[7],
    )  # fmt: skip
    for first in range(0, len(values), VALUES):
        some = values[first : first + VALUES]
        for p in range(len(some)):
            value, wide = some[p], widened[p]
            for i in range(len(value)):
                wide[i] = _wide(value[i])
        for p in range(len(some), VALUES):
            _fill(widened[p], 0.0)
        for head in range(len(sums)):
            own, w = sums[head], weights[head, first : first + VALUES]
            w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
            for i in range(len(own)):
                own[i] += ((w_0 * v_0[i] + w_1 * v_1[i]) + (w_2 * v_2[i] + w_3 * v_3[i])) + (
                    (w_4 * v_4[i] + w_5 * v_5[i]) + (w_6 * v_6[i] + w_7 * v_7[i])
                )


def _attend(told):
    words = _words(told)
    tokens, heads, kv_heads, size, slots, window = words[1], words[2], words[3], words[4], words[5], words[6]
    first_slot, looks_back = words[7], words[8]
    places = carray(_words(_numbers(words[9], told)), tokens)
    qkv = carray(_numbers(words[10], told), (tokens, heads + 2 * kv_heads, size))
    store = carray(_numbers(words[11], told), (2, slots, kv_heads, window, size))
    out = carray(_numbers(words[12], told), (tokens, heads, size))
    scaling = np.float32(np.int64(words[13]).view(np.float64))
    group = heads // kv_heads
    padded = 1 if group == 1 else (group + TOGETHER - 1) // TOGETHER * TOGETHER
    query, scores = np.zeros((padded, size), np.float32), np.empty((padded, window + VALUES), np.float32)
    sums, widened = np.empty((group, size), np.float32), np.empty((VALUES, size), np.float32)
    lanes = np.empty(LANES, np.float32)
    taken = _take(words)
    while taken < tokens * kv_heads:
        t, kv_head = taken // kv_heads, taken % kv_heads
        end = places[t] + 1
        begin = max(0, end - looks_back)
        keys, values = store[0, first_slot + t, kv_head, begin:end], store[1, first_slot + t, kv_head, begin:end]
        for head in range(group):
            own, given = query[head], qkv[t, kv_head * group + head]
            for i in range(size):
                own[i] = _wide(given[i]) * scaling
        if group == 1:
            _scores_of_one(query[0], keys, values, scores[0])
        for head in range(0, padded - 1, TOGETHER):
            _scores(query[head : head + TOGETHER], keys, values, scores[head : head + TOGETHER])
        for head in range(group):
            _softmax(scores[head, : len(keys)], lanes)
            _fill(scores[head, len(keys) : len(keys) + VALUES], 0.0)
        _mix(scores, values, widened, sums)
        for head in range(group):
            own, given = sums[head], out[t, kv_head * group + head]
            for i in range(size):
                given[i] = _narrow(own[i], given[i])
        taken = _take(words)


@numba.njit(**AS_WRITTEN)
def _gate_token(gate, up, out):
    for i in range(len(out)):
        number = _wide(gate[i])
        out[i] = _narrow(number / (np.float32(1.0) + _power_of_2(-number * LOG2_E)) * _wide(up[i]), out[i])


def _gate(told):
    words = _words(told)
    tokens, size = words[1], words[2]
    gate_up = carray(_numbers(words[3], told), (tokens, 2, size))
    out = carray(_numbers(words[4], told), (tokens, size))
    first = _take(words) * FEW
    while first < tokens:
        for t in range(first, min(first + FEW, tokens)):
            _gate_token(gate_up[t, 0], gate_up[t, 1], out[t])
        first = _take(words) * FEW


@numba.njit(**AS_WRITTEN)
def _round_token(x, out):
    most = np.int32(0)
    for i in range(len(x)):  # without their sign, the bits of numbers are in the numbers' order, and NaN's above all
        bits = np.int32(np.float32(_wide(x[i])).view(np.int32) & np.int32(0x7FFFFFFF))
        most = bits if bits > most else most
    largest = np.int32(most).view(np.float32)
    largest = SMALLEST if largest < SMALLEST else largest
    factor = np.float32(INT8_MOST / largest)
    for i in range(len(x)):
        bits = np.float32(_wide(x[i]) * factor + TO_WHOLE).view(np.int32)
        out[i] = np.uint8(np.int32(bits + INT8_ZERO) & np.int32(255))
    return largest


def _round(told):
    words = _words(told)
    tokens, size = words[1], words[2]
    x, out = carray(_numbers(words[3], told), (tokens, size)), carray(_at(words[4], np.uint8), (tokens, size))
    largest = carray(_at(words[5], np.float32), tokens)
    first = _take(words) * FEW
    while first < tokens:
        for t in range(first, min(first + FEW, tokens)):
            largest[t] = _round_token(x[t], out[t])
        first = _take(words) * FEW


@numba.njit(**AS_WRITTEN)
def _multiply_rows(x, apart, tokens, pairs, weights, sums):
    """`_multiply_few` for any number of tokens, of what is in the caches."""
    groups = (tokens + TOKENS - 1) // TOKENS
    for group in range(groups):
        first, end = tokens * group // groups, tokens * (group + 1) // groups
        _multiply_few(x + first * apart * 4, apart, end - first, pairs, weights, weights, 0, sums + first * BESIDE * 4)


@intrinsic
def _turn_words(_context, rows, apart, columns):
    """Turns a square of words round, as many as a line has each way: its rows are so many words apart, its columns go to rows
    that are BESIDE apart. Both are addresses."""

    def generate(context, builder, _signature, arguments):
        count, word, offset = LINE // 4, ir.IntType(32), ir.IntType(64)
        line = ir.VectorType(word, count)
        rows, apart, columns = arguments
        rows, columns = (builder.inttoptr(address, word.as_pointer()) for address in (rows, columns))
        lines = []
        for row in range(count):
            place = builder.gep(rows, [builder.mul(apart, offset(row))])
            lines.append(builder.load(builder.bitcast(place, line.as_pointer()), align=4))
        for half in (1, 2, 4, 8):  # squares twice as large each time, of which two quarters change places
            for upper in (row for row in range(count) if not row & half):
                above, below = lines[upper], lines[upper + half]
                left = [count + lane - half if lane & half else lane for lane in range(count)]
                right = [count + lane if lane & half else lane + half for lane in range(count)]
                lines[upper] = builder.shuffle_vector(above, below, line(left))
                lines[upper + half] = builder.shuffle_vector(above, below, line(right))
        for row, own in enumerate(lines):
            place = builder.gep(columns, [offset(row * BESIDE)])
            builder.store(own, builder.bitcast(place, line.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def _pair_up(_context, numbers, others, pairs):
    """The next of the numbers beside the next of the others, HALVES times: int16 at two addresses to a third one."""

    def generate(context, builder, _signature, arguments):
        half, word = ir.IntType(16), ir.IntType(32)
        line, both = ir.VectorType(half, HALVES), ir.VectorType(half, 2 * HALVES)
        one, other = (builder.load(builder.inttoptr(place, line.as_pointer()), align=2) for place in arguments[:2])
        in_turns = [lane // 2 + lane % 2 * HALVES for lane in range(2 * HALVES)]
        paired = builder.shuffle_vector(one, other, ir.VectorType(word, 2 * HALVES)(in_turns))
        builder.store(paired, builder.inttoptr(arguments[2], both.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@numba.njit(**AS_WRITTEN)
def _pack_keys(keys, begin, end, packed):
    """Keys from `begin` on as `_multiply_few` wants weights: int32 [window, pairs] → [pairs, BESIDE]. From `end` on noughts."""
    pairs, wide = packed.shape[0], LINE // 4
    whole = pairs // wide * wide if begin + BESIDE <= end else 0
    for key in range(0, BESIDE, wide):
        for pair in range(0, whole, wide):
            place = keys.ctypes.data + ((begin + key) * pairs + pair) * 4
            _turn_words(place, pairs, packed.ctypes.data + (pair * BESIDE + key) * 4)
    for key in range(BESIDE):
        for pair in range(whole, pairs):
            packed[pair, key] = keys[begin + key, pair] if begin + key < end else 0


@numba.njit(**AS_WRITTEN)
def _pack_values(values, begin, end, packed):
    """The same of values, of which pairs of positions are added up: int16 [window, size] → [size / BESIDE, BESIDE / 2, BESIDE,
    2]. Noughts also where a head has no more numbers."""
    size = values.shape[1]
    for part in range(packed.shape[0]):
        wide = min(BESIDE, size - part * BESIDE)
        for position in range(0, BESIDE, 2):
            own, at = packed[part, position // 2], begin + position
            whole = wide // HALVES * HALVES if at + 1 < end else 0
            for i in range(0, whole, HALVES):
                place = values.ctypes.data + (at * size + part * BESIDE + i) * 2
                _pair_up(place, place + size * 2, own.ctypes.data + i * 4)
            for i in range(whole, wide):
                own[i, 0] = values[at, part * BESIDE + i] if at < end else 0
                own[i, 1] = values[at + 1, part * BESIDE + i] if at + 1 < end else 0


@numba.njit(**IN_ANY_ORDER)
def _weigh(scores, scaling, highest, weights):
    """The weights of BESIDE scores: float32 → bfloat16, as int16. highest: of the scores before. Returns the highest now, what
    weights before have to be multiplied with, and the sum of these, which is NaN where a score is no number."""
    top, total, check = np.int32(-(2**31)), np.float32(0.0), np.float32(0.0)
    for i in range(BESIDE):
        bits = np.float32(scores[i]).view(np.int32)
        order = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        top = order if order > top else top
        check += scores[i] * np.float32(0.0)
    most = np.int32(top ^ np.int32(np.int32(top >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
    most = _higher(most * scaling, highest)
    for i in range(BESIDE):
        weight = _power_of_2(scores[i] * scaling - most)
        total += weight
        weights[i] = np.int16(np.int32(np.int32(np.float32(weight).view(np.int32) + np.int32(0x8000)) >> np.int32(16)))
    return most, _power_of_2(highest - most), total + check


def _attend_prompt(told):
    words = _words(told)
    tokens, heads, kv_heads, size, slots, window = words[1], words[2], words[3], words[4], words[5], words[6]
    slot, begin, looks_back = words[7], words[8], words[9]
    qkv, store = words[10], carray(_numbers(words[11], told), (2, slots, kv_heads, window, size))
    paired = carray(_at(words[11], np.int32), (2, slots, kv_heads, window, size // 2))
    out = carray(_numbers(words[12], told), (tokens, heads, size))
    scaling = np.float32(np.int64(words[13]).view(np.float64) * LOG2_E)
    group, apart, parts = heads // kv_heads, (heads + 2 * kv_heads) * size // 2, (size + BESIDE - 1) // BESIDE
    keys, values = np.empty((size // 2, BESIDE), np.int32), np.zeros((parts, BESIDE // 2, BESIDE, 2), np.int16)
    scores, weights = np.empty((QUERIES, BESIDE), np.float32), np.empty((QUERIES, BESIDE), np.int16)
    sums = np.empty((group, parts, QUERIES, BESIDE), np.float32)
    highest, totals = np.empty((group, QUERIES), np.float32), np.empty((group, QUERIES), np.float32)
    blocks = (tokens + QUERIES - 1) // QUERIES
    last = blocks * kv_heads - 1
    taken = _take(words)
    while taken < last + group:
        # Of blocks the last ones first, which take longest. The heads of the last kv head of all are taken one by one, so that
        # threads come to their end together.
        kv_head, first = min(taken, last) % kv_heads, (blocks - 1 - min(taken, last) // kv_heads) * QUERIES
        first_head, end_head = (0, group) if taken < last else (taken - last, taken - last + 1)
        count = min(QUERIES, tokens - first)
        _fill(sums, 0.0)
        _fill(totals, 0.0)
        _fill(highest, -np.inf)
        at = max(0, begin + first + 1 - looks_back) // BESIDE * BESIDE
        while at < begin + first + count:
            _pack_keys(paired[0, slot, kv_head], at, begin + first + count, keys)
            _pack_values(store[1, slot, kv_head], at, begin + first + count, values)
            for head in range(first_head, end_head):
                query = qkv + (first * apart * 2 + (kv_head * group + head) * size) * 2
                _fill(scores[:count], 0.0)
                _multiply_rows(query, apart, count, size // 2, keys.ctypes.data, scores.ctypes.data)
                for q in range(count):
                    place = begin + first + q
                    earliest, latest = max(0, place + 1 - looks_back - at), min(BESIDE, place + 1 - at)
                    if earliest >= latest:
                        _fill(weights[q], 0)
                        continue
                    _fill(scores[q, :earliest], HIDDEN)
                    _fill(scores[q, latest:], HIDDEN)
                    most, factor, total = _weigh(scores[q], scaling, highest[head, q], weights[q])
                    totals[head, q] = totals[head, q] * factor + total
                    highest[head, q] = most
                    if factor != 1.0:
                        for part in range(parts):
                            own = sums[head, part, q]
                            for i in range(BESIDE):
                                own[i] *= factor
                for part in range(parts):
                    own = sums[head, part].ctypes.data
                    _multiply_rows(weights.ctypes.data, BESIDE // 2, count, BESIDE // 2, values[part].ctypes.data, own)
            at += BESIDE
        for head in range(first_head, end_head):
            for q in range(count):
                factor = np.float32(1.0) / totals[head, q]
                for part in range(parts):
                    own, given = sums[head, part, q], out[first + q, kv_head * group + head, part * BESIDE :]
                    for i in range(min(BESIDE, len(given))):
                        given[i] = _narrow(own[i] * factor, given[i])
        taken = _take(words)


@numba.njit(**AS_WRITTEN)
def packed_bytes(outside, depth):
    """How much memory a weight of words of 32 bits takes: `depth` filled up to whole WHOLE, `outside` to whole BESIDE."""
    return 4 * (-(-outside // BESIDE) * BESIDE) * (-(-depth // WHOLE) * WHOLE)


def _block_by(multiply_few):
    """What multiplies all tokens with a block of BESIDE outputs."""

    @numba.njit(**AS_WRITTEN)
    def multiply_block(x, tokens, depth, weight, block, following, sums):
        """x: the address of words of 32 bits, [tokens, depth]; weight: of those of all blocks; following: the block that comes
        next; sums: [tokens, BESIDE]."""
        block_bytes, groups = packed_bytes(BESIDE, depth), (tokens + TOKENS - 1) // TOKENS
        _fill(sums, 0)
        for begin in range(0, depth, DEPTH):
            some = min(DEPTH, depth - begin)
            here, part_bytes = weight + block * block_bytes + begin * BESIDE * 4, some * BESIDE * 4
            # One group asks memory for what it reads next; several, a part each, for what all of them read after that.
            coming = here + part_bytes if begin + some < depth else weight + following * block_bytes
            coming = here + NEAR if groups == 1 else coming
            for group in range(groups):  # as large as each other
                first, end = tokens * group // groups, tokens * (group + 1) // groups
                multiply_few(
                    x + (first * depth + begin) * 4,
                    depth,
                    end - first,
                    some,
                    here,
                    coming + part_bytes * group // groups,
                    BESIDE * 4 // groups,
                    sums[first:].ctypes.data,
                )

    return multiply_block


_multiply_block, _multiply_block_of_bytes = _block_by(_multiply_few), _block_by(_multiply_few_bytes)


@numba.njit(**AS_WRITTEN)
def _put(sums, bias, block, out):
    """The sums of a block, and the bias, if there is one, to where they belong. sums: float32 [tokens, BESIDE]."""
    first = block * BESIDE
    beside = min(BESIDE, out.shape[1] - first)
    for t in range(len(out)):
        own, given, more = sums[t], out[t, first : first + beside], bias[first : first + beside]
        for i in range(len(more)):
            own[i] += _wide(more[i])
        for i in range(beside):
            given[i] = _narrow(own[i], given[i])


def _multiply(told):
    words = _words(told)
    tokens, outside, depth, x, weight = words[1], words[2], words[3], words[4], words[5]
    bias = carray(_numbers(words[6], told), outside if words[6] else 0)
    out = carray(_numbers(words[7], told), (tokens, outside))
    sums = np.empty((tokens, BESIDE), np.float32)
    block = _take(words)
    while block * BESIDE < outside:
        following = _take(words)
        _multiply_block(x, tokens, depth, weight, block, following, sums)
        _put(sums, bias, block, out)
        block = following


def _multiply_bytes(told):
    words = _words(told)
    tokens, outside, depth, x, weight = words[1], words[2], words[3], words[4], words[5]
    bias = carray(_numbers(words[6], told), outside if words[6] else 0)
    out = carray(_numbers(words[7], told), (tokens, outside))
    steps, surplus = carray(_at(words[8], np.float32), outside), carray(_at(words[9], np.int32), outside)
    largest = carray(_at(words[10], np.float32), tokens)
    whole, sums = np.empty((tokens, BESIDE), np.int32), np.empty((tokens, BESIDE), np.float32)
    block = _take(words)
    while block * BESIDE < outside:
        following = _take(words)
        _multiply_block_of_bytes(x, tokens, depth, weight, block, following, whole)
        own_steps, own_surplus = steps[block * BESIDE :], surplus[block * BESIDE :]
        for t in range(tokens):
            for i in range(min(BESIDE, len(own_steps))):
                sums[t, i] = np.float32(np.int32(whole[t, i] - own_surplus[i])) * own_steps[i] * largest[t]
        _put(sums, bias, block, out)
        block = following


def _machine_code(kernel, number):
    """The kernel for tensors of such numbers, as a function of C that takes a pointer."""
    signature = types.void(types.CPointer(number))
    try:
        return numba.cfunc(signature, cache=True, **AS_WRITTEN)(kernel)
    except (RuntimeError, OSError):  # nowhere to keep it, or no room
        return numba.cfunc(signature, **AS_WRITTEN)(kernel)


def _openmp():
    """`GOMP_parallel` of the OpenMP that torch uses: (function, its argument, threads, flags). None if it is another kind."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"):
        run = getattr(ctypes.CDLL(str(library)), "GOMP_parallel", None)
        if run:
            run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return run
    return None


def multiplies(part: torch.dtype) -> bool:
    """Whether this processor has the instruction that adds up products of bfloat16 or int8, and numba knows of it."""
    _machine, _name, features = cpu_target.target_context.codegen().magic_tuple()
    return {torch.bfloat16: "+avx512bf16", torch.int8: "+avx512vnni"}[part] in features.split(",")


@functools.cache
def kernels_for(dtype: torch.dtype) -> Kernels:
    """One for all layers. Raises KeyError for a type that there are none for."""
    return Kernels(dtype)


class Kernels:
    """The kernels for contiguous CPU tensors of one type: float32 or bfloat16. To be used by one thread at a time.

    To make the first takes seconds, unless numba kept the machine code from another time. Those that not every model needs are
    compiled when they are called first, which is at boot as well: they are tried there.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype, self._number = dtype, KERNEL_DTYPES[dtype]
        self._words = ctypes.create_string_buffer(8 * MOST_WORDS)
        self._openmp = _openmp()
        self._compiled: dict[Callable, tuple] = {}
        for kernel in (_add_norm, _rotate, _attend, _gate):
            self._compile(kernel)

    def _compile(self, kernel: Callable) -> tuple:
        """Returns its machine code, whose address is good as long as it is kept, and a function of Python's."""
        started_at = time.perf_counter()
        code = _machine_code(kernel, self._number)
        if not code.cache_hits:
            name, took_s = kernel.__name__.strip("_"), time.perf_counter() - started_at
            logger.info("Compiled %s of the forward pass for this CPU in %.1f s", name, took_s)
        self._compiled[kernel] = code, _FUNCTION(code.address)
        return self._compiled[kernel]

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Adds `delta` to `x`, in place, and returns the RMSNorm of the sum: [tokens, hidden] each; weight: [hidden]."""
        out = torch.empty_like(x)
        addresses = x.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._run(_add_norm, x.numel(), *x.shape, _bits(epsilon), *addresses)
        return out

    def rotate(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        places: torch.Tensor,
        store: torch.Tensor,
        first_slot: int,
        length: int,
    ) -> None:
        """Turns queries, in place, and keys by their angles, and stores keys and values.

        qkv: [tokens, heads and twice the kv heads, head size], of `length` tokens for each slot from the first on; angles:
        cosines and sines, [tokens, head size] each; places: int64 [tokens], in the window; store: [2, slots, kv heads, window,
        head size].
        """
        tokens, all_heads, size = qkv.shape
        _two, slots, kv_heads, window, _size = store.shape
        shape = tokens, all_heads - 2 * kv_heads, kv_heads, size, slots, window, first_slot, length
        cos, sin = angles
        addresses = places.data_ptr(), qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), store.data_ptr()
        self._run(_rotate, qkv.numel(), *shape, *addresses)

    def attend(
        self,
        qkv: torch.Tensor,
        places: torch.Tensor,
        store: torch.Tensor,
        first_slot: int,
        scaling: float,
        looks_back: int | None,
    ) -> torch.Tensor:
        """Attention of one token for each slot from the first on to all that its slot holds up to it, or to the last
        `looks_back`, itself included. Tensors as in `rotate`, by which they went. Returns [tokens, heads * head size]."""
        tokens, all_heads, size = qkv.shape
        _two, slots, kv_heads, window, _size = store.shape
        heads = all_heads - 2 * kv_heads
        out = qkv.new_empty(tokens, heads * size)
        shape = tokens, heads, kv_heads, size, slots, window, first_slot, looks_back or window
        addresses = places.data_ptr(), qkv.data_ptr(), store.data_ptr(), out.data_ptr()
        self._run(_attend, LITTLE, *shape, *addresses, _bits(scaling))
        return out

    def attend_prompt(
        self, qkv: torch.Tensor, begin: int, store: torch.Tensor, slot: int, scaling: float, looks_back: int | None
    ) -> torch.Tensor:
        """The same for the tokens of a prompt, or a part of one, in one slot, of which the first stands at `begin`, where
        `multiplies_pairs`. `head size` must be even."""
        tokens, all_heads, size = qkv.shape
        _two, slots, kv_heads, window, _size = store.shape
        heads = all_heads - 2 * kv_heads
        out = qkv.new_empty(tokens, heads * size)
        shape = tokens, heads, kv_heads, size, slots, window, slot, begin, looks_back or window
        addresses = qkv.data_ptr(), store.data_ptr(), out.data_ptr()
        self._run(_attend_prompt, LITTLE, *shape, *addresses, _bits(scaling))
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half times the second: [tokens, 2 * size] → [tokens, size]."""
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, size)
        self._run(_gate, out.numel(), tokens, size, gate_up.data_ptr(), out.data_ptr())
        return out

    def multiply(self, x: torch.Tensor, weight: int, bias: torch.Tensor | None, outside: int) -> torch.Tensor:
        """The product of a linear layer, where it `multiplies` bfloat16: [tokens, inside] → [tokens, outside].

        weight: the address of bfloat16 [outside / BESIDE, inside / 2, BESIDE, 2], as many as `packed_bytes` says; bias:
        [outside]. `inside` must be even.
        """
        tokens, inside = x.shape
        out = x.new_empty(tokens, outside)
        addresses = x.data_ptr(), weight, _address(bias), out.data_ptr()
        self._run(_multiply, outside * inside, tokens, outside, inside // 2, *addresses)
        return out

    def multiply_bytes(
        self,
        x: torch.Tensor,
        largest: torch.Tensor,
        weight: int,
        steps: torch.Tensor,
        surplus: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same of what `round` gave, where it `multiplies` int8: uint8 [tokens, inside] → [tokens, outside].

        weight: the address of int8 [outside / BESIDE, inside / 4, BESIDE, 4]; steps: float32 [outside], of weights and tokens;
        surplus: int32 [outside], what is too much because unsigned bytes are around INT8_ZERO; largest: float32 [tokens, 1].
        `inside` must be a multiple of 4.
        """
        (tokens, inside), outside = x.shape, len(steps)
        out = steps.new_empty((tokens, outside), dtype=self._dtype)
        addresses = x.data_ptr(), weight, _address(bias), out.data_ptr()
        addresses += steps.data_ptr(), surplus.data_ptr(), largest.data_ptr()
        self._run(_multiply_bytes, outside * inside, tokens, outside, inside // 4, *addresses)
        return out

    def round(self, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """Each token in steps of a 127th of its largest number, as unsigned bytes around INT8_ZERO, into `rounded`: [tokens,
        size] → uint8 [tokens or more, size]. Returns the largest numbers, float32 [tokens, 1]; what has some that is none has
        no other."""
        largest = torch.empty((len(x), 1), dtype=torch.float32)
        self._run(_round, x.numel(), *x.shape, x.data_ptr(), rounded.data_ptr(), largest.data_ptr())
        return largest

    def _run(self, kernel: Callable, numbers: int, *words: int) -> None:
        """Tells a kernel where everything is. Before the words stands what the next thread takes, counted by the kernel."""
        struct.pack_into(f"{1 + len(words)}q", self._words, 0, 0, *words)
        threads = torch.get_num_threads() if numbers >= LITTLE and self._openmp else 1
        code, function = self._compiled.get(kernel) or self._compile(kernel)
        if threads == 1:
            function(self._words)
        else:
            self._openmp(code.address, self._words, threads, 0)


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bits(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]
