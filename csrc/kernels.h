/* What each target (baseline, AVX2, AVX-512) exports: the same functions, compiled for other instructions. */
#ifndef COBA_KERNELS_H
#define COBA_KERNELS_H

#include <stdint.h>

enum { EXPONENTIAL, FIRST_SUCCESS, MIXED_GROUP, INVERSE_VARIANCE, TABLE };

/* What is allocated: the log gains of a form (numpy_backend.Form), or a table of gains. A parameter whose step is 0 is
   one number for all prompts, else one a prompt. */
typedef struct {
    int saturation;
    int64_t prompts;
    const double *p; /* [prompts] pass rates; unused for a table */
    const double *p_exponent, *q_exponent, *log_scale, *rate;
    int64_t p_step, q_step, scale_step, rate_step;
    const double *table; /* [prompts, width] */
    int64_t width;
} coba_gains;

/* Each returns 0, or -1 if memory runs out. */
typedef struct {
    const char *name;
    int64_t (*first_invalid)(const double *p, int64_t prompts); /* the first pass rate outside [0, 1] or NaN, or -1 */
    int (*log_gains)(const coba_gains *, const int64_t *budgets, double *out, int exponentiate);
    int (*log_gain_table)(const coba_gains *, int64_t low, int64_t high, double *out);
    int (*heap)(const coba_gains *, int64_t low, int64_t high, int64_t total, int64_t *budgets);
    int (*threshold)(const coba_gains *, int64_t low, int64_t high, int64_t total, int64_t *budgets, int threads);
} coba_kernels;

extern const coba_kernels coba_kernels_baseline, coba_kernels_avx2, coba_kernels_avx512;

/* The best target that this processor runs, or the named one; a null pointer if it cannot. */
const coba_kernels *coba_select(const char *name);

#endif
