"""Arithmetic of sizes."""

import math


def largest_divisor(n: int, at_most: int) -> int:
    """The largest divisor of n that is no larger than `at_most`."""
    return next(d for d in range(min(n, at_most), 0, -1) if n % d == 0)


def divisor(n: int, at_least: int) -> int:
    """The smallest divisor of n that is so large at least."""
    pairs = ((i, n // i) for i in range(1, math.isqrt(n) + 1) if n % i == 0)
    return min(d for pair in pairs for d in pair if d >= at_least)
