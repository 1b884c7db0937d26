/* Log gains: the formulas of coba_core/kernels/numpy_backend.py, block by block. */
#ifndef COBA_GAINS_H
#define COBA_GAINS_H

#include "elementary.h"
#include "kernels.h"

#define BLOCK 256 /* prompts a block: its arrays stay in the first-level cache */

#if defined(_OPENMP) || defined(__GNUC__)
#define PRAGMA(text) _Pragma(#text)
#else
#define PRAGMA(text)
#endif

#define S1 (1.0 / 24)
#define S2 (-1.0 / 2880)
#define S3 (1.0 / 181440)
#define S4 (-1.0 / 9676800)
#define S5 (1.0 / 479001600)
#define S6 (-691.0 / 15692092416000.0)

/* ln((1 - e^-k) / k): the series, good to k = 1/2, and the closed form. */
INLINE double log_share_series(double k) {
    const double kk = k * k;
    return -0.5 * k + kk * (S1 + kk * (S2 + kk * (S3 + kk * (S4 + kk * (S5 + kk * S6)))));
}

INLINE double log_share(double k) {
    const double decay = exponential(-k);
    const double rest = 1.0 - decay;
    return log_sum(rest, (1.0 - rest) - decay) - logarithm(k);
}

typedef struct {
    double p_exponent[BLOCK], q_exponent[BLOCK], log_scale[BLOCK], rate[BLOCK];
} block_parameters;

/* Coefficients of one block; `uniform` (a constant where this is inlined) says that each parameter is one number. */
INLINE void coefficients_loop(const int saturation, const int uniform, int64_t n, const double *restrict p,
                              const block_parameters *restrict par, double *restrict a, double *restrict k,
                              double *restrict d) {
    const double pe = par->p_exponent[0], qe = par->q_exponent[0], ls = par->log_scale[0], ra = par->rate[0];
    double steepest = 0.0;
    PRAGMA(omp simd reduction(max : steepest))
    for (int64_t i = 0; i < n; i++) {
        const double x = p[i], q = 1.0 - x, lost = (1.0 - q) - x; /* q + lost is 1 - p without rounding */
        const double log_p = logarithm(x), log_q = log_sum(q, lost);
        const double p_exponent = uniform ? pe : par->p_exponent[i], q_exponent = uniform ? qe : par->q_exponent[i];
        const double scale = uniform ? ls : par->log_scale[i], rate = uniform ? ra : par->rate[i];
        double intercept = (p_exponent * log_p + q_exponent * log_q) - scale, slope = 0.0, gap = 0.0;
        int edge = (x == 0.0) | (x == 1.0);
        if (saturation == EXPONENTIAL) {
            slope = (x * q) * rate;
            steepest = slope > steepest ? slope : steepest;
            intercept = intercept + log_share_series(slope);
        } else if (saturation == FIRST_SUCCESS) {
            const double solved = q_exponent == 0.0 ? -scale : (q_exponent > 0.0 ? -INFINITY : INFINITY);
            slope = x == 1.0 ? INFINITY : -log_q;
            intercept = x == 1.0 ? solved : intercept;
            edge = x == 0.0;
        } else if (saturation == MIXED_GROUP) {
            const double big = log_p > log_q ? log_p : log_q, small = log_p > log_q ? log_q : log_p;
            slope = -big;
            gap = big - small;
        }
        a[i] = edge ? -INFINITY : intercept;
        k[i] = edge ? 0.0 : slope;
        if (saturation == MIXED_GROUP) d[i] = edge ? 0.0 : gap;
    }
    if (saturation == EXPONENTIAL && steepest > 0.5) {
        for (int64_t i = 0; i < n; i++) {
            if (!(k[i] > 0.5)) continue;
            const double q = 1.0 - p[i], lost = (1.0 - q) - p[i];
            const double p_exponent = uniform ? pe : par->p_exponent[i], q_exponent = uniform ? qe : par->q_exponent[i];
            const double scale = uniform ? ls : par->log_scale[i];
            a[i] = ((p_exponent * logarithm(p[i]) + q_exponent * log_sum(q, lost)) - scale) + log_share(k[i]);
        }
    }
}

INLINE void parameter_block(const double *x, int64_t step, int64_t from, int64_t n, double *restrict out) {
    if (step == 0) {
        const double value = x[0];
        for (int64_t i = 0; i < n; i++) out[i] = value;
    } else {
        for (int64_t i = 0; i < n; i++) out[i] = x[from + i];
    }
}

/* (a, k, d) of prompts from .. from+n, n <= BLOCK; d is written for MIXED_GROUP only. */
INLINE void coefficients(const coba_gains *g, const int saturation, int64_t from, int64_t n, double *a, double *k,
                         double *d) {
    block_parameters par;
    if (g->p_step + g->q_step + g->scale_step + g->rate_step == 0) {
        par.p_exponent[0] = *g->p_exponent;
        par.q_exponent[0] = *g->q_exponent;
        par.log_scale[0] = *g->log_scale;
        par.rate[0] = *g->rate;
        coefficients_loop(saturation, 1, n, g->p + from, &par, a, k, d);
        return;
    }
    parameter_block(g->p_exponent, g->p_step, from, n, par.p_exponent);
    parameter_block(g->q_exponent, g->q_step, from, n, par.q_exponent);
    parameter_block(g->log_scale, g->scale_step, from, n, par.log_scale);
    parameter_block(g->rate, g->rate_step, from, n, par.rate);
    coefficients_loop(saturation, 0, n, g->p + from, &par, a, k, d);
}

/* The log gain of one more rollout at `budget`. */
INLINE double log_gain(const int saturation, double a, double k, double d, double budget) {
    if (saturation == EXPONENTIAL) return a - k * budget;
    if (saturation == FIRST_SUCCESS) return budget == 0.0 ? a : (k < INFINITY ? a - k * budget : -INFINITY);
    if (saturation == MIXED_GROUP) {
        const double share = exponential(-(d * (budget - 1.0))), sum = 1.0 + share;
        return (a - k * (budget - 1.0)) + log_sum(sum, share - (sum - 1.0));
    }
    return a - logarithm(budget * (budget + 1.0));
}

/* Calls BODY with the constant `saturation` of a form, so that each case is compiled on its own. */
#define FOR_SATURATION(which, BODY)                                                                                  \
    switch (which) {                                                                                                 \
    case EXPONENTIAL: { enum { saturation = EXPONENTIAL }; BODY; break; }                                            \
    case FIRST_SUCCESS: { enum { saturation = FIRST_SUCCESS }; BODY; break; }                                        \
    case MIXED_GROUP: { enum { saturation = MIXED_GROUP }; BODY; break; }                                            \
    default: { enum { saturation = INVERSE_VARIANCE }; BODY; break; }                                                \
    }

INLINE void log_gains_case(const coba_gains *g, const int saturation, const int64_t *budgets, double *out,
                           int exponentiate) {
    double a[BLOCK], k[BLOCK], d[BLOCK];
    for (int64_t from = 0; from < g->prompts; from += BLOCK) {
        const int64_t n = g->prompts - from < BLOCK ? g->prompts - from : BLOCK;
        const int64_t *restrict budget = budgets + from;
        double *restrict result = out + from;
        coefficients(g, saturation, from, n, a, k, d);
        PRAGMA(omp simd)
        for (int64_t i = 0; i < n; i++) result[i] = log_gain(saturation, a[i], k[i], d[i], to_double(budget[i]));
        if (exponentiate) {
            PRAGMA(omp simd)
            for (int64_t i = 0; i < n; i++) result[i] = exponential(result[i]);
        }
    }
}

static int log_gains(const coba_gains *g, const int64_t *budgets, double *out, int exponentiate) {
    FOR_SATURATION(g->saturation, log_gains_case(g, saturation, budgets, out, exponentiate))
    return 0;
}

INLINE void log_gain_table_case(const coba_gains *g, const int saturation, int64_t low, int64_t high, double *out) {
    double a[BLOCK], k[BLOCK], d[BLOCK];
    const int64_t width = high - low;
    for (int64_t from = 0; from < g->prompts; from += BLOCK) {
        const int64_t n = g->prompts - from < BLOCK ? g->prompts - from : BLOCK;
        coefficients(g, saturation, from, n, a, k, d);
        for (int64_t i = 0; i < n; i++) {
            double *restrict row = out + (from + i) * width;
            PRAGMA(omp simd)
            for (int64_t j = 0; j < width; j++) row[j] = log_gain(saturation, a[i], k[i], d[i], to_double(low + j));
        }
    }
}

static int log_gain_table(const coba_gains *g, int64_t low, int64_t high, double *out) {
    FOR_SATURATION(g->saturation, log_gain_table_case(g, saturation, low, high, out))
    return 0;
}

#endif
