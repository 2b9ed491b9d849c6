"""Bounds, divisors and values of numbers in JSON schemas, so that llguidance takes none for another."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Context, Decimal

Number = int | float
Range = tuple[Number | None, Number | None]  # the least and the most, None: without a bound

LAST_EXACT = 2**53  # up to it float64 has every integer
LAST_BOUND = 9 * 10**18  # llguidance counts in int64
DIGITS = 15  # of a decimal that it is sure to read as the float64 next to it
LEAST_POSITIVE = Decimal("1e-14")  # not less: a model that has written 0.00 should not go on for long
MAX_CUTS = 4  # of a range
MAX_NUMERATOR = 1_000  # of `multipleOf`: the lexer has a state for each remainder after each digit of a bound


def first_allowed(given: Number, is_lower: bool, is_open: bool) -> Number:
    """Returns the first number that a bound allows: the bound itself, or the next number if the bound
    `is_open`.

    Numbers have 15 digits here: the next one above 1 is 1.00000000000001, and the next one above 0 is 1e-14.
    A lower bound is rounded up, an upper bound down. A lower bound is at least -LAST_BOUND, an upper bound at
    most LAST_BOUND. A whole number is an int.

    llguidance has open bounds, but allows no zeros at the end of a number just beyond such a bound: no 0.50
    above 0.
    """
    context = Context(DIGITS, ROUND_CEILING if is_lower else ROUND_FLOOR)
    exact = Decimal(str(given))
    if is_open and not given:
        near = LEAST_POSITIVE if is_lower else -LEAST_POSITIVE
    elif is_open:
        near = context.next_plus(exact) if is_lower else context.next_minus(exact)
    elif given == int(given) and abs(given) < LAST_EXACT:
        near = exact
    else:
        near = context.plus(exact)
    near = max(near, Decimal(-LAST_BOUND)) if is_lower else min(near, Decimal(LAST_BOUND))
    return int(near) if near == int(near) else float(near)


def ranges(least: Number | None, most: Number | None) -> list[Range]:
    """Returns the same range in one part or several, those of negative numbers first. In each part,
    llguidance allows every way to write a number.

    llguidance treats zero as an open bound of negative numbers, so a range is cut there: the numbers between
    -1e-14 and 0 are lost. In a range up to 0.15 llguidance does not let 0.1 end, so a range is also cut at
    each decimal of its upper bound with up to MAX_CUTS places, if shorter. A negative range is cut so at its
    lower bound, and its parts are in descending order. Example: None to 0.15 becomes None to -1e-14, 0 to
    0.1, and 0.1 to 0.15.
    """
    if least is None and most is None:
        return [(least, most)]
    if (least is None or least < 0) and (most is None or most >= 0):
        return ranges(least, float(-LEAST_POSITIVE)) + ranges(0, most)
    if least is None or least < 0:
        return [(end and -end, -begin) for begin, end in ranges(-most, least and -least)]
    result = []
    exact = Decimal(str(most or 0))
    for places in range(1, min(-exact.normalize().as_tuple().exponent, MAX_CUTS + 1)):
        cut = float(exact.quantize(Decimal(1).scaleb(-places), ROUND_DOWN))
        if cut and cut >= least:
            result.append((least, cut))
            least = cut
    return [*result, (least, most)]


def is_exact(value: Number) -> bool:
    """Whether llguidance reads a number in `const` or `enum` exactly: whole numbers up to LAST_BOUND that
    float64 has, and others of at most 15 digits."""
    if value == int(value):
        return abs(value) <= LAST_BOUND and float(value) == value
    return len(Decimal(str(value)).as_tuple().digits) <= DIGITS


def has_few_remainders(divisor: Number) -> bool:
    """Whether llguidance's lexer can track the remainders of this `multipleOf`, which is above 0: up to
    MAX_NUMERATOR as a whole number, without its decimal point. 0.25 counts as 25; 0.07 does not fit, because
    of its rounding error."""
    if divisor > MAX_NUMERATOR:
        return False
    numerator = float(divisor)
    places = 0
    while numerator % 1:  # as llguidance counts them: 0.07 has seventeen
        numerator *= 10
        places += 1
    return numerator <= MAX_NUMERATOR and Decimal(str(divisor)) == Decimal(numerator).scaleb(-places)
