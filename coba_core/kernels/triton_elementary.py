"""ln, exp, ln B(α, β) and the order of the floating-point numbers, as Triton functions in float64.

`log_sum` and `exp` are the operations of numpy_backend.py in the same order: compiled without contraction to fused
multiply-add (``enable_fp_fusion=False``) they round alike, so that ties fall alike. No libdevice: what the interpreter
computes, a card computes.

A Python number beside a float64 tensor becomes a float64 constant; one that stands alone, or in `tl.where`, would
become a float32. So constants that float32 cannot hold stand only in arithmetic with a tensor.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from coba_core.kernels import numpy_backend as reference

LN2_HIGH = tl.constexpr(reference.LN2_HIGH)
LN2_LOW = tl.constexpr(reference.LN2_LOW)
LOG2_E = tl.constexpr(reference.LOG2_E)
ROUND = tl.constexpr(reference.ROUND)
SMALLEST_NORMAL = tl.constexpr(2.0**-1022)
TWO_54 = tl.constexpr(2.0**54)
MANTISSA = tl.constexpr(int(reference.MANTISSA))
ROOT_HALF = tl.constexpr(int(reference.ROOT_HALF))
ONE_LESS_ROOT_HALF = tl.constexpr(int(reference.ONE) - int(reference.ROOT_HALF))
L1, L2, L3, L4, L5, L6, L7 = (
    tl.constexpr(x)
    for x in (reference.L1, reference.L2, reference.L3, reference.L4, reference.L5, reference.L6, reference.L7)
)
E0, E1, E2, E3, E4, E5, E6, E7, E8, E9 = (tl.constexpr(x) for x in reference.EXP)
SIGN = tl.constexpr(-(2**63))
MAGNITUDE = tl.constexpr(2**63 - 1)
TWO_PI = tl.constexpr(6.283185307179586)
G1, G2, G3, G4, G5, G6, G7 = (
    tl.constexpr(x) for x in (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
)


@triton.jit
def log_sum(x, tail):
    """ln(x + tail) for x > 0, to about one ulp; a tail other than 0 asks for x in [1/2, 2] and |tail| <= ulp(x)."""
    small = x < SMALLEST_NORMAL
    bits = tl.where(small, x * TWO_54, x).to(tl.int64, bitcast=True) + ONE_LESS_ROOT_HALF
    exponent = bits >> 52
    k = exponent.to(tl.float64) - 1023.0
    f = (((bits & MANTISSA) + ROOT_HALF).to(tl.float64, bitcast=True) - 1.0) + tail * ((2046 - exponent) << 52).to(
        tl.float64, bitcast=True
    )
    k = tl.where(small, k - 54.0, k)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = z * (L1 + w * (L3 + w * (L5 + w * L7))) + w * (L2 + w * (L4 + w * L6))
    half = 0.5 * f * f
    return (((s * (half + r) + k * LN2_LOW) - half) + f) + k * LN2_HIGH


@triton.jit
def log(x):
    """ln x for x > 0, subnormal or not: `log_sum` with no tail."""
    small = x < SMALLEST_NORMAL
    bits = tl.where(small, x * TWO_54, x).to(tl.int64, bitcast=True) + ONE_LESS_ROOT_HALF
    k = (bits >> 52).to(tl.float64) - 1023.0
    f = ((bits & MANTISSA) + ROOT_HALF).to(tl.float64, bitcast=True) - 1.0
    k = tl.where(small, k - 54.0, k)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = z * (L1 + w * (L3 + w * (L5 + w * L7))) + w * (L2 + w * (L4 + w * L6))
    half = 0.5 * f * f
    return (((s * (half + r) + k * LN2_LOW) - half) + f) + k * LN2_HIGH


@triton.jit
def log1p(x):
    """ln(1 + x) for 0 <= x <= 1."""
    y = 1.0 + x
    return log_sum(y, x - (y - 1.0))


@triton.jit
def exp_rest(r):
    """(e^r - 1 - r)/r² for |r| <= ln(2)/2."""
    q = r * E9 + E8
    q = q * r + E7
    q = q * r + E6
    q = q * r + E5
    q = q * r + E4
    q = q * r + E3
    q = q * r + E2
    q = q * r + E1
    return q * r + E0


@triton.jit
def exp(x):
    """e^x to about one ulp, 0 below -745.2 and inf above 709.8."""
    y = tl.where(x > -746.0, x, -746.0)
    y = tl.where(y < 710.0, y, 710.0)
    n = (y * LOG2_E + ROUND) - ROUND
    high = y - n * LN2_HIGH
    low = n * LN2_LOW
    r = high - low
    lost = (high - r) - low
    half = ((n * 0.5 + ROUND) - ROUND).to(tl.int64)  # 2^n in two factors: the result may be subnormal
    rest = n.to(tl.int64) - half
    scaled = (1.0 + (r + ((r * r) * exp_rest(r) + lost))) * ((half + 1023) << 52).to(tl.float64, bitcast=True)
    return scaled * ((rest + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def expm1(x):
    """e^x - 1 for x <= 0, to about two ulp."""
    near = tl.where(x > -0.25, x, 0.0)
    return tl.where(x > -0.25, near + (near * near) * exp_rest(near), exp(x) - 1.0)


@triton.jit
def stirling_rest(x):
    """ln Γ(x) - ((x - ½) ln x - x + ½ ln 2π) for x >= 10."""
    inverse = 1.0 / x
    z = inverse * inverse
    return inverse * (G1 + z * (G2 + z * (G3 + z * (G4 + z * (G5 + z * (G6 + z * G7))))))


@triton.jit
def log_beta(alpha, beta):
    """ln B(α, β). Small arguments climb by B(α, β) = B(α+1, β) (α+β)/α until Stirling's series holds for both."""
    a, b = alpha, beta
    climbed = a * 0.0 + 1.0
    for _ in tl.static_range(10):
        climbed = climbed * tl.where(a < 10.0, (a + b) / a, 1.0)
        a = tl.where(a < 10.0, a + 1.0, a)
    for _ in tl.static_range(10):
        climbed = climbed * tl.where(b < 10.0, (a + b) / b, 1.0)
        b = tl.where(b < 10.0, b + 1.0, b)
    total = a + b
    big = tl.where(a > b, a, b)
    small = tl.where(a > b, b, a)
    return (
        (0.5 * log((TWO_PI * total) / (a * b)) - (big * log1p(small / big) + small * log(total / small)))
        + ((stirling_rest(a) + stirling_rest(b)) - stirling_rest(total))
    ) + log(climbed)


@triton.jit
def ordinal(x):
    """Position of x among the floating-point numbers, int64; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int64, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & MAGNITUDE) - 1)


@triton.jit
def number(place):
    """The floating-point number at a position; NaN beyond the infinities."""
    return tl.where(place >= 0, place, (-(place + 1)) | SIGN).to(tl.float64, bitcast=True)
