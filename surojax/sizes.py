"""Arithmetic of sizes."""

import math


def divisor(n: int, at_least: int) -> int:
    """The smallest divisor of n that is so large at least."""
    pairs = ((i, n // i) for i in range(1, math.isqrt(n) + 1) if n % i == 0)
    return min(d for pair in pairs for d in pair if d >= at_least)
