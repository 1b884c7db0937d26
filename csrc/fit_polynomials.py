"""Fit the polynomials of csrc/elementary.h and coba_core/kernels/numpy_backend.py.

    python csrc/fit_polynomials.py        # needs mpmath; prints coefficients and the relative error of each fit

log: ln((1+s)/(1-s)) = s (2 + z P(z)), z = s², for |s| <= (sqrt(2)-1)/(sqrt(2)+1).
exp: e^r = 1 + r + r² Q(r) for |r| <= ln(2)/2.
Interpolation at Chebyshev nodes, weighted so that the relative error of the function is level; the double nearest
to each coefficient is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 60


def fit(f: Callable[[mp.mpf], mp.mpf], low: mp.mpf, high: mp.mpf, degree: int) -> list[float]:
    nodes = [
        (low + high) / 2 + (high - low) / 2 * mp.cos(mp.pi * (2 * i + 1) / (2 * degree + 2)) for i in range(degree + 1)
    ]
    matrix = mp.matrix([[x**j for j in range(degree + 1)] for x in nodes])
    return [float(c) for c in mp.lu_solve(matrix, mp.matrix([f(x) for x in nodes]))]


def horner(coefficients: list[float], x: mp.mpf) -> mp.mpf:
    value = mp.mpf(0)
    for c in reversed(coefficients):
        value = value * x + mp.mpf(c)
    return value


def log_tail(z: mp.mpf) -> mp.mpf:
    """(2 atanh(s) - 2 s) / (s z) at z = s²."""
    if z < mp.mpf(10) ** -12:
        return 2 * sum(z**j / (2 * j + 3) for j in range(6))
    s = mp.sqrt(z)
    return (2 * mp.atanh(s) - 2 * s) / (s * z)


def exp_tail(r: mp.mpf) -> mp.mpf:
    """(e^r - 1 - r) / r²."""
    if abs(r) < mp.mpf(10) ** -12:
        return sum(r**j / mp.factorial(j + 2) for j in range(6))
    return (mp.exp(r) - 1 - r) / r**2


def main() -> None:
    s_max = (mp.sqrt(2) - 1) / (mp.sqrt(2) + 1)
    log_coefficients = fit(log_tail, mp.mpf(0), s_max**2 * mp.mpf("1.0001"), 6)
    grid = [s_max * i / 997 for i in range(1, 998)]
    worst = max(abs((s * (2 + s * s * horner(log_coefficients, s * s))) / (2 * mp.atanh(s)) - 1) for s in grid)
    print("log:", *map(repr, log_coefficients), f"relative error {float(worst):.2e}", sep="\n  ")

    half = mp.log(2) / 2 * mp.mpf("1.0001")
    exp_coefficients = fit(exp_tail, -half, half, 9)
    grid = [half * i / 997 for i in range(-997, 998)]
    worst = max(abs((1 + r + r * r * horner(exp_coefficients, r)) / mp.exp(r) - 1) for r in grid)
    print("exp:", *map(repr, exp_coefficients), f"relative error {float(worst):.2e}", sep="\n  ")


if __name__ == "__main__":
    main()
