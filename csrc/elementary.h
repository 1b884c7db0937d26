/* ln and exp in plain IEEE operations, branch-free so that loops over them vectorise.

   The same operations in the same order stand in coba_core/kernels/numpy_backend.py: every backend and every
   instruction set rounds alike, so budgets are the same bit for bit. For that, no contraction to fused multiply-add
   (-ffp-contract=off). Coefficients: csrc/fit_polynomials.py. Both functions are within one ulp (tests/kernels/test_elementary.py). */
#ifndef COBA_ELEMENTARY_H
#define COBA_ELEMENTARY_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define INLINE static __forceinline
#define NOINLINE __declspec(noinline)
#else
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#endif

#define LN2_HIGH 0x1.62e42fee00000p-1 /* short enough that k * LN2_HIGH is exact */
#define LN2_LOW 0x1.a39ef35793c76p-33
#define LOG2_E 0x1.71547652b82fep+0
#define ROUND 6755399441055744.0 /* 1.5 * 2^52: adding and taking it away rounds to an integer */
#define ROUND_BITS UINT64_C(0x4338000000000000)
#define MANTISSA UINT64_C(0x000FFFFFFFFFFFFF)
#define ONE UINT64_C(0x3FF0000000000000)
#define ROOT_HALF UINT64_C(0x3FE6A09E667F3BCD)
#define TWO_52 UINT64_C(0x4330000000000000)

INLINE uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* An integer below 2^51 as a double, and back: SSE2 and AVX2 have no instruction for 64-bit integers. */
INLINE double to_double(int64_t n) { return from_bits((uint64_t)n + ROUND_BITS) - ROUND; }
INLINE int64_t to_integer(double x) { return (int64_t)(bits_of(x + ROUND) - ROUND_BITS); }

/* ln of (1 + f) 2^k, f in [sqrt(1/2) - 1, sqrt(2) - 1]. */
INLINE double log_of(double f, double k) {
    const double s = f / (2.0 + f);
    const double z = s * s;
    const double w = z * z;
    const double r =
        z * (0.666666666666667 +
             w * (0.2857142862600327 + w * (0.18182889455674947 + w * 0.14616585424888623))) +
        w * (0.39999999999899444 + w * (0.22222211130259878 + w * 0.15331710618210773));
    const double half = 0.5 * f * f;
    return (((s * (half + r) + k * LN2_LOW) - half) + f) + k * LN2_HIGH;
}

/* ln x for x > 0, subnormal or not. */
INLINE double logarithm(double x) {
    const int small = x < 0x1p-1022;
    const uint64_t bits = bits_of(small ? x * 0x1p54 : x) + (ONE - ROOT_HALF);
    const double k = from_bits((bits >> 52) | TWO_52) - (small ? 0x1p52 + 1077.0 : 0x1p52 + 1023.0);
    return log_of(from_bits((bits & MANTISSA) + ROOT_HALF) - 1.0, k);
}

/* ln(x + tail) for a normal x > 0; a tail other than 0 asks for x in [1/2, 2] and |tail| <= ulp(x). */
INLINE double log_sum(double x, double tail) {
    const uint64_t bits = bits_of(x) + (ONE - ROOT_HALF);
    const uint64_t exponent = bits >> 52;
    const double f =
        (from_bits((bits & MANTISSA) + ROOT_HALF) - 1.0) + tail * from_bits((UINT64_C(2046) - exponent) << 52);
    return log_of(f, from_bits(exponent | TWO_52) - (0x1p52 + 1023.0));
}

/* e^x, 0 below -745.2 and inf above 709.8. */
INLINE double exponential(double x) {
    double y = x > -746.0 ? x : -746.0;
    y = y < 710.0 ? y : 710.0;
    const double n = (y * LOG2_E + ROUND) - ROUND;
    const double high = y - n * LN2_HIGH, low = n * LN2_LOW, r = high - low, lost = (high - r) - low;
    double q = 2.510038549551032e-08;
    q = q * r + 2.7620088445409746e-07;
    q = q * r + 2.7557268459997064e-06;
    q = q * r + 2.4801521295954376e-05;
    q = q * r + 0.00019841269863053618;
    q = q * r + 0.0013888888917213717;
    q = q * r + 0.008333333333330062;
    q = q * r + 0.04166666666662413;
    q = q * r + 0.16666666666666669;
    q = q * r + 0.5000000000000001;
    /* 2^n in two factors: the result may be subnormal */
    const double half = (n * 0.5 + ROUND) - ROUND;
    const double scaled = (1.0 + (r + ((r * r) * q + lost))) * from_bits((bits_of(half + ROUND) << 52) + ONE);
    return scaled * from_bits((bits_of((n - half) + ROUND) << 52) + ONE);
}

#endif
