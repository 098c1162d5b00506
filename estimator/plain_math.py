"""Logarithms, powers and sums that use only ``+ - * /``: the same bits on every machine.

IEEE 754 defines the results of these four and of the square root, but not of ``exp`` or ``log``, of which a C
library has several versions, chosen by CPU. It also does not define in which order numpy or BLAS add, or
whether ``sum`` compensates (Python 3.12 began to). So every value that a decision depends on is computed here
or with ``math.fsum``: a trace written on one machine is replayed on another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
"""The logarithm of 2 to 33 bits, so that its product with an exponent is exact."""
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_HALF_LN_2PI = float.fromhex("0x1.d67f1c864beb5p-1")
_LARGEST_EXP = 709.0
_SMALLEST_EXP = -745.0

_ATANH = [1.0 / (2 * k + 1) for k in range(12, -1, -1)]
"""Coefficients of s**24 .. s**0 in atanh(s) / s."""
_EXP = [1.0 / math.factorial(k) for k in range(14, -1, -1)]
_STIRLING = [1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12]
"""Coefficients of x**-13 .. x**-1 in the Stirling series."""


def _polynomial(coefficients: list[float], x: float) -> float:
    """Evaluates a polynomial by Horner's rule; the highest power's coefficient comes first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def log(x: float) -> float:
    """ln x to a few units in the last place, for a finite x > 0."""
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.70710678:
        mantissa = mantissa * 2
        exponent = exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    return exponent * _LN2_HIGH + (2 * s * _polynomial(_ATANH, s * s) + exponent * _LN2_LOW)


def log1p(x: float) -> float:
    """ln(1 + x) for x > -1, also if 1 + x rounds to 1."""
    one_more = 1.0 + x
    if one_more == 1.0:
        return x
    return log(one_more) - ((one_more - 1.0) - x) / one_more


def exp(x: float) -> float:
    """e**x to a few units in the last place; at most e**709."""
    if x < _SMALLEST_EXP:
        return 0.0
    x = min(x, _LARGEST_EXP)
    exponent = round(x / LN2)
    return math.ldexp(_polynomial(_EXP, (x - exponent * _LN2_HIGH) - exponent * _LN2_LOW), exponent)


def halved(times: float) -> float:
    """0.5**times."""
    return exp(-times * LN2)


def lgamma(x: float) -> float:
    """ln of the gamma function for x > 0, by Stirling's series where that is exact to a double."""
    product = 1.0
    while x < 16:
        product *= x
        x += 1
    series = _polynomial(_STIRLING, 1 / (x * x)) / x
    return (x - 0.5) * log(x) - x + _HALF_LN_2PI + series - log(product)


def geometric(first: float, last: float, count: int) -> list[float]:
    """Geometric spacing: ``count`` values from ``first`` to ``last``, both > 0, at a constant ratio."""
    start = log(first)
    step = (log(last) - log(first)) / (count - 1)
    return [first, *(exp(start + step * place) for place in range(1, count - 1)), last]


def dot(xs: Iterable[float], ys: Iterable[float]) -> float:
    """The sum of the products, rounded only once."""
    return math.fsum(map(mul, xs, ys))
