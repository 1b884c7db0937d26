/* The cut: θ* = the smallest gain taken. Every unit above it is given, units that equal it by the canonical order.

   Lines (EXPONENTIAL, FIRST_SUCCESS) find it by Newton steps on the piecewise-linear count of units above θ, the first
   ones on a sample; everything else by bisection with counts that stay bracketed prompt by prompt. Both end exactly:
   whatever brings θ near, the last units are decided on the gains themselves. */
#ifndef COBA_THRESHOLD_H
#define COBA_THRESHOLD_H

#include "units.h"

/* ---- any concave gain ---------------------------------------------------------------------------------------- */

/* Position of a number among the floating-point numbers, and back. */
INLINE int64_t ordinal(double x) {
    const int64_t bits = (int64_t)bits_of(x);
    return bits >= 0 ? bits : -(bits & INT64_MAX) - 1;
}

INLINE double number(int64_t place) {
    return from_bits(place >= 0 ? (uint64_t)place : ((uint64_t)(-(place + 1)) | (UINT64_C(1) << 63)));
}

/* The budget from which the gains of prompt i are no longer above θ, known to lie in [fewest, most]. */
INLINE int64_t count_above(const int saturation, const coba_units *u, int64_t i, double theta, int64_t fewest,
                           int64_t most) {
    while (fewest < most) {
        const int64_t middle = fewest + (most - fewest) / 2;
        if (unit_gain(saturation, u, i, middle) > theta) fewest = middle + 1;
        else most = middle;
    }
    return fewest;
}

INLINE int threshold_bisection(const int saturation, const coba_units *u, int64_t total, int64_t *budgets) {
    const int64_t prompts = u->prompts, few = 64 + prompts / 64;
    int32_t *most = malloc((size_t)prompts * 2 * sizeof *most), *trial = most + prompts;
    coba_unit *units = malloc((size_t)few * sizeof *units);
    if (!most || !units) {
        free(most);
        free(units);
        return -1;
    }
    double largest = -INFINITY, smallest = INFINITY;
    for (int64_t i = 0; i < prompts; i++) {
        const double first = unit_gain(saturation, u, i, u->low), last = unit_gain(saturation, u, i, u->high - 1);
        largest = first > largest ? first : largest;
        smallest = last < smallest ? last : smallest;
        budgets[i] = u->low;
        most[i] = (int32_t)u->high;
    }
    int64_t up = ordinal(largest), down = ordinal(smallest + 0.0) - 1; /* no unit above the first, all above the second */
    int64_t sum_up = prompts * u->low, sum_down = prompts * u->high;
    for (int step = 0; up - down > 1 && sum_down - sum_up > few; step++) {
        int64_t place = down + (up - down) / 2;
        if (step % 2 == 0) { /* by interpolation every other time */
            const double a = number(up), b = number(down);
            const double guess = a + (b - a) * ((double)(total - sum_up) / (double)(sum_down - sum_up));
            const int64_t at = ordinal(guess);
            if (guess == guess && at > down && at < up) place = at;
        }
        const double theta = number(place);
        int64_t sum = 0;
        for (int64_t i = 0; i < prompts; i++) {
            trial[i] = (int32_t)count_above(saturation, u, i, theta, budgets[i], most[i]);
            sum += trial[i];
        }
        if (sum <= total) {
            for (int64_t i = 0; i < prompts; i++) budgets[i] = trial[i];
            up = place;
            sum_up = sum;
        } else {
            memcpy(most, trial, (size_t)prompts * sizeof *most);
            down = place;
            sum_down = sum;
        }
    }
    if (up - down > 1) {
        int64_t count = 0;
        for (int64_t i = 0; i < prompts; i++) {
            for (int64_t b = budgets[i]; b < most[i]; b++) {
                units[count].gain = unit_gain(saturation, u, i, b);
                units[count].budget = (int32_t)b;
                units[count++].prompt = (int32_t)i;
            }
        }
        select_first(units, count, total - sum_up);
        give(units, total - sum_up, budgets);
    } else {
        share_ties(prompts, budgets, most, total - sum_up);
    }
    free(most);
    free(units);
    return 0;
}

/* ---- lines ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t units;  /* Σ budgets at θ */
    double slope;   /* units a step of θ: Σ 1/k over prompts strictly between low and high */
    double next;    /* the largest gain not above θ (exact counts only) */
} coba_count;

/* Σ clip((a-θ)/k rounded up, low, high), to one unit a prompt. */
INLINE coba_count count_lines(int64_t n, const double *restrict a, const double *restrict inverse, double low,
                              double high, double theta) {
    int64_t units = 0;
    double slope = 0.0;
    PRAGMA(omp simd reduction(+ : units, slope))
    for (int64_t i = 0; i < n; i++) {
        double x = (a[i] - theta) * inverse[i] + 0.5;
        x = x > low ? x : low;
        x = x < high ? x : high;
        units += (int64_t)(bits_of(x + ROUND) - ROUND_BITS);
        slope += ((x > low) & (x < high)) ? inverse[i] : 0.0;
    }
    return (coba_count){units, slope, 0.0};
}

/* The same, exactly, written to budgets. A prompt's estimate may be off by one; where it is off by more (gains so flat
   that they round together), `count_above` settles it. */
INLINE coba_count settle_lines(const int saturation, const coba_units *u, const double *restrict inverse, int64_t from,
                               int64_t n, double theta, int64_t *restrict budgets) {
    const double *restrict a = u->a + from, *restrict k = u->k + from;
    const double low = (double)u->low, high = (double)u->high;
    int64_t units = 0, wrong = 0;
    double slope = 0.0, next = -INFINITY;
    inverse += from;
    budgets += from;
    PRAGMA(omp simd reduction(+ : units, slope) reduction(| : wrong) reduction(max : next))
    for (int64_t i = 0; i < n; i++) {
        double x = (a[i] - theta) * inverse[i] + 0.5;
        x = x > low ? x : low;
        x = x < high ? x : high;
        x = (x + ROUND) - ROUND;
        const double here = log_gain(saturation, a[i], k[i], 0.0, x);
        const double last = log_gain(saturation, a[i], k[i], 0.0, x - 1.0);
        x = ((here > theta) & (x < high)) ? x + 1.0 : (((last <= theta) & (x > low)) ? x - 1.0 : x);
        const double now = log_gain(saturation, a[i], k[i], 0.0, x);
        const double then = log_gain(saturation, a[i], k[i], 0.0, x - 1.0);
        wrong |= ((now > theta) & (x < high)) | ((then <= theta) & (x > low));
        next = ((x < high) & (now > next)) ? now : next;
        slope += ((x > low) & (x < high)) ? inverse[i] : 0.0;
        const int64_t budget = (int64_t)(bits_of(x + ROUND) - ROUND_BITS);
        units += budget;
        budgets[i] = budget;
    }
    if (!wrong) return (coba_count){units, slope, next};
    units = 0;
    next = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        budgets[i] = count_above(saturation, u, from + i, theta, u->low, u->high);
        units += budgets[i];
        if (budgets[i] < u->high) {
            const double now = unit_gain(saturation, u, from + i, budgets[i]);
            next = now > next ? now : next;
        }
    }
    return (coba_count){units, slope, next};
}

#define FOR_BLOCKS(BODY)                                                                                             \
    for (int64_t block = 0; block < blocks; block++) {                                                               \
        const int64_t from = block * BLOCK, n = prompts - from < BLOCK ? prompts - from : BLOCK;                     \
        BODY                                                                                                         \
    }

#ifdef _OPENMP
#define FOR_BLOCKS_IN_THREADS(BODY)                                                                                  \
    if (threads > 1) {                                                                                               \
        PRAGMA(omp parallel for schedule(static) num_threads(threads) reduction(+ : units, slope, edges)             \
               reduction(max : next))                                                                                \
        FOR_BLOCKS(BODY)                                                                                             \
    } else {                                                                                                         \
        FOR_BLOCKS(BODY)                                                                                             \
    }
#else
#define FOR_BLOCKS_IN_THREADS(BODY) FOR_BLOCKS(BODY)
#endif

/* Coefficients of a block, and 1/k held within what stays finite when multiplied. */
INLINE int64_t prepare_lines(const coba_gains *g, const int saturation, int64_t from, int64_t n, double *restrict a,
                             double *restrict k, double *restrict inverse) {
    int64_t edges = 0;
    coefficients(g, saturation, from, n, a + from, k + from, (double *)0);
    a += from;
    k += from;
    inverse += from;
    PRAGMA(omp simd reduction(+ : edges))
    for (int64_t i = 0; i < n; i++) {
        const double x = 1.0 / k[i];
        inverse[i] = x < 1e300 ? (x > 1e-300 ? x : 1e-300) : 1e300;
        edges += a[i] == -INFINITY;
    }
    return edges;
}

#define SAMPLE 4096 /* at most so many prompts bring θ near before all are counted */

/* θ at which a sample has about `target` units: safeguarded Newton steps. */
INLINE double sample_theta(const double *a, const double *inverse, int64_t n, double low, double high, double target) {
    double theta = -4.0, up = INFINITY, down = -INFINITY, reach = 2.0;
    const double enough = 0.5 + 0.002 * (double)n;
    for (int step = 0; step < 24; step++) {
        const coba_count c = count_lines(n, a, inverse, low, high, theta);
        const double excess = (double)c.units - target;
        if (excess <= enough && excess >= -enough) break;
        if (excess > 0.0) down = theta;
        else up = theta;
        double to = c.slope > 0.0 ? theta + excess / c.slope : (excess > 0.0 ? INFINITY : -INFINITY);
        if (!(to > down && to < up)) {
            if (up < INFINITY && down > -INFINITY) to = 0.5 * (up + down);
            else to = excess > 0.0 ? theta + reach : theta - reach;
            reach *= 4.0;
        }
        if (to == theta) break;
        theta = to;
    }
    return theta;
}

INLINE int threshold_lines(const coba_gains *g, const int saturation, int64_t low, int64_t high, int64_t total,
                           int64_t *budgets, int threads) {
    const int64_t prompts = g->prompts, blocks = (prompts + BLOCK - 1) / BLOCK;
    const int64_t few = 64 + (prompts < 65536 ? prompts / 8 : 8192 + prompts / 256);
    const int64_t sampled = prompts < 128 ? prompts : (prompts / 8 < SAMPLE ? (prompts / 8 > 64 ? prompts / 8 : 64) : SAMPLE);
    double *a = malloc((size_t)(3 * prompts + 2 * sampled) * sizeof *a), *k = a + prompts, *inverse = k + prompts;
    double *sample_a = inverse + prompts, *sample_inverse = sample_a + sampled;
    coba_unit *units_near = malloc((size_t)few * sizeof *units_near);
    int result = -1;
    if (!a || !units_near) goto done;
    const coba_units u = {prompts, low, high, a, k, 0, 0};
    int64_t units = 0, edges = 0;
    double slope = 0.0, next = -INFINITY, theta;

    if (prompts <= 4 * SAMPLE) {
        FOR_BLOCKS(edges += prepare_lines(g, saturation, from, n, a, k, inverse);)
        for (int64_t i = 0; i < sampled; i++) {
            const int64_t at = (int64_t)(((uint64_t)i * (uint64_t)prompts) / (uint64_t)sampled);
            sample_a[i] = a[at];
            sample_inverse[i] = inverse[at];
        }
    } else { /* whole blocks, so that their coefficients come cheaply; they are computed again with the rest */
        for (int64_t i = 0; i < sampled / BLOCK; i++) {
            const int64_t from = i * (blocks - 1) / (sampled / BLOCK) * BLOCK;
            prepare_lines(g, saturation, from, BLOCK, a, k, inverse);
            memcpy(sample_a + i * BLOCK, a + from, BLOCK * sizeof *a);
            memcpy(sample_inverse + i * BLOCK, inverse + from, BLOCK * sizeof *a);
        }
    }
    theta = sample_theta(sample_a, sample_inverse, sampled, (double)low, (double)high,
                         (double)total * ((double)sampled / (double)prompts));
    if (prompts <= 4 * SAMPLE) {
        const coba_count c = count_lines(prompts, a, inverse, (double)low, (double)high, theta);
        units = c.units;
        slope = c.slope;
    } else {
        FOR_BLOCKS_IN_THREADS(edges += prepare_lines(g, saturation, from, n, a, k, inverse);
                              const coba_count c = count_lines(n, a + from, inverse + from, (double)low, (double)high, theta);
                              units += c.units; slope += c.slope;)
    }

    if (total >= (prompts - edges) * high + edges * low) { /* even θ = -inf leaves units over: equal gains of 0 */
        result = threshold_bisection(saturation, &u, total, budgets);
        goto done;
    }
    double up = INFINITY, down = -INFINITY; /* θ known to give at most, and at least, the total */
    const double room = 1.0 + 0.25 * (double)few;
    for (int step = 0; step < 12; step++) {
        /* aim `room` units short of the total, so that the rest is found among a few candidates */
        double to = slope > 0.0 ? theta + ((double)(units - total) + room) / slope : NAN;
        if (!(to > down && to < up)) {
            if (up < INFINITY && down > -INFINITY) to = 0.5 * (up + down);
            else if (!(to == to)) to = units > total ? theta + 1.0 : theta - 1.0;
        }
        theta = to;
        units = 0;
        slope = 0.0;
        next = -INFINITY;
        FOR_BLOCKS_IN_THREADS(const coba_count c = settle_lines(saturation, &u, inverse, from, n, theta, budgets);
                              units += c.units; slope += c.slope; next = c.next > next ? c.next : next;)
        if (units > total) {
            down = theta > down ? theta : down;
            continue;
        }
        up = theta < up ? theta : up;
        const int64_t spare = total - units;
        if (spare == 0) {
            result = 0;
            goto done;
        }
        if (spare > few / 2) continue;
        /* the largest gains not above θ, down to where there should be enough of them */
        for (double margin = (double)spare + 4.0 + 0.5 * room; margin < 64.0 * (double)few; margin *= 2.0) {
            const double edge = slope > 0.0 ? theta - margin / slope : next;
            int64_t count = 0;
            for (int64_t i = 0; i < prompts && count <= few; i += 8) {
                int some = 0;
                const int64_t end = i + 8 < prompts ? i + 8 : prompts;
                for (int64_t j = i; j < end; j++)
                    some |= (a[j] - k[j] * to_double(budgets[j]) >= edge) & (budgets[j] < high);
                if (!some) continue;
                for (int64_t j = i; j < end; j++) {
                    for (int64_t b = budgets[j]; b < high && count <= few; b++) {
                        const double gain = unit_gain(saturation, &u, j, b);
                        if (!(gain >= edge)) break;
                        if (count < few) units_near[count] = (coba_unit){gain, (int32_t)b, (int32_t)j};
                        count++;
                    }
                }
            }
            if (count > few) break; /* many ties: leave them to the bisection */
            if (count >= spare) {
                select_first(units_near, count, spare);
                give(units_near, spare, budgets);
                result = 0;
                goto done;
            }
            if (!(slope > 0.0)) break;
        }
        break;
    }
    result = threshold_bisection(saturation, &u, total, budgets);
done:
    free(a);
    free(units_near);
    return result;
}

#endif
