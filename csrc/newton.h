/* The cut by Newton steps, for log gains that have a root in closed form or nearly so: every form.

   θ comes near by Newton steps on the count of units above it, the first ones on a sample. A last pass sets every
   budget exactly at a θ that leaves a few units over; these go to the best of the units just below. Nothing that
   brings θ near needs to be exact. */
#ifndef COBA_NEWTON_H
#define COBA_NEWTON_H

#include "threshold.h"

typedef struct {
    int64_t units; /* Σ budgets at θ */
    double slope;  /* units a step of θ: Σ 1/k over prompts strictly between low and high */
} coba_count;

/* 1/k, held within what stays finite when multiplied; returns how many prompts can gain nothing. */
INLINE int64_t invert(int64_t n, const double *restrict a, const double *restrict k, double *restrict inverse) {
    int64_t edges = 0;
    PRAGMA(omp simd reduction(+ : edges))
    for (int64_t i = 0; i < n; i++) {
        const double x = 1.0 / k[i];
        inverse[i] = x < 1e300 ? x : 1e300;
        edges += a[i] == -INFINITY;
    }
    return edges;
}

/* Where the log gain crosses θ, and there 1/|its derivative|: units a step of θ. */
INLINE double root(const int saturation, double a, double k, double d, double inverse, double theta, double *slope) {
    *slope = inverse;
    if (saturation == MIXED_GROUP) { /* a line and a term that dies out: a fixed point, from the line */
        double share = 0.0, b = 1.0;
        for (int step = 0; step < 3; step++) {
            share = step == 0 ? 0.0 : exponential(-(d * (b - 1.0)));
            const double sum = 1.0 + share;
            b = ((a + (step == 0 ? 0.0 : log_sum(sum, share - (sum - 1.0)))) - theta) * inverse + 1.0;
            b = b > 1.0 ? b : 1.0;
        }
        *slope = 1.0 / (k + d * share / (1.0 + share));
        return b;
    }
    if (saturation == INVERSE_VARIANCE) { /* B(B+1) = e^(a-θ) */
        const double root = sqrt(exponential(a - theta) + 0.25);
        *slope = 0.5 * root;
        return root - 0.5;
    }
    return (a - theta) * inverse;
}

/* Σ clip(root rounded up, low, high), to about one unit a prompt. */
INLINE coba_count count_units(const int saturation, int64_t n, const double *restrict a, const double *restrict k,
                              const double *restrict d, const double *restrict inverse, double low, double high,
                              double theta) {
    int64_t units = 0;
    double slope = 0.0;
    PRAGMA(omp simd reduction(+ : units, slope))
    for (int64_t i = 0; i < n; i++) {
        double step;
        double x = root(saturation, a[i], k[i], saturation == MIXED_GROUP ? d[i] : 0.0, inverse[i], theta, &step) + 0.5;
        x = x > low ? x : low;
        x = x < high ? x : high;
        units += (int64_t)(bits_of(x + ROUND) - ROUND_BITS);
        slope += ((x > low) & (x < high)) ? step : 0.0;
    }
    return (coba_count){units, slope};
}

/* The same, exactly: writes budgets, and in `gains` the next gain of each prompt (-inf at high); returns Σ budgets. An
   estimate that rounding has put beside the truth is seen by its gains, and settled one by one. */
INLINE int64_t settle(const int saturation, int64_t n, const double *restrict a, const double *restrict k,
                      const double *restrict d, const double *restrict inverse, int64_t low, int64_t high, double theta,
                      int64_t *restrict budgets, double *restrict gains) {
    const double least = (double)low, most = (double)high;
    int64_t units = 0;
    double wrong = 0.0;
    PRAGMA(omp simd reduction(+ : units, wrong))
    for (int64_t i = 0; i < n; i++) {
        const double gap = saturation == MIXED_GROUP ? d[i] : 0.0;
        double step;
        double x = root(saturation, a[i], k[i], gap, inverse[i], theta, &step) + 0.5;
        x = x > least ? x : least;
        x = x < most ? x : most;
        x = (x + ROUND) - ROUND;
        const double now = log_gain(saturation, a[i], k[i], gap, x);
        const double then = log_gain(saturation, a[i], k[i], gap, x - 1.0);
        const double more = now > theta ? 1.0 : 0.0, fewer = then <= theta ? 1.0 : 0.0;
        wrong += (x < most ? more : 0.0) + (x > least ? fewer : 0.0);
        gains[i] = x < most ? now : -INFINITY;
        const int64_t budget = (int64_t)(bits_of(x + ROUND) - ROUND_BITS);
        units += budget;
        budgets[i] = budget;
    }
    if (wrong == 0.0) return units;
    const coba_units u = {n, low, high, a, k, d, 0};
    units = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t b = budgets[i];
        if (b < high && unit_gain(saturation, &u, i, b) > theta) b++;
        else if (b > low && !(unit_gain(saturation, &u, i, b - 1) > theta)) b--;
        if ((b < high && unit_gain(saturation, &u, i, b) > theta) ||
            (b > low && !(unit_gain(saturation, &u, i, b - 1) > theta)))
            b = count_above(saturation, &u, i, theta, low, high); /* so flat that gains round together */
        budgets[i] = b;
        gains[i] = b < high ? unit_gain(saturation, &u, i, b) : -INFINITY;
        units += b;
    }
    return units;
}

INLINE double largest_of(const double *restrict x, int64_t n) {
    double largest = -INFINITY;
    PRAGMA(omp simd reduction(max : largest))
    for (int64_t i = 0; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* Units not yet given with gains of at least `edge`: adds those of prompts first .. first+n to `near`, which holds
   `few`; returns how many there are now, or more than few. */
INLINE int64_t gather(const int saturation, int64_t first, int64_t n, const double *a, const double *k,
                      const double *d, const int64_t *budgets, const double *restrict gains, int64_t high, double edge,
                      coba_unit *near, int64_t count, int64_t few) {
    for (int64_t from = 0; from < n && count <= few; from += 16) {
        const int64_t to = from + 16 < n ? from + 16 : n;
        if (largest_of(gains + from, to - from) < edge) continue;
        for (int64_t i = from; i < to; i++) {
            double gain = gains[i];
            for (int64_t b = budgets[i]; gain >= edge && b < high && count <= few; count++) {
                if (count < few) near[count] = (coba_unit){gain, (int32_t)b, (int32_t)(first + i)};
                b++;
                gain = log_gain(saturation, a[i], k[i], saturation == MIXED_GROUP ? d[i] : 0.0, (double)b);
            }
        }
    }
    return count;
}

/* θ at which n prompts have about `target` units, from a first guess: safeguarded Newton steps. */
INLINE double newton(const int saturation, const double *a, const double *k, const double *d, const double *inverse,
                     int64_t n, double low, double high, double target) {
    double theta = -4.0, up = INFINITY, down = -INFINITY, reach = 2.0;
    const double enough = 0.5 + 0.002 * (double)n;
    for (int step = 0; step < 24; step++) {
        const coba_count c = count_units(saturation, n, a, k, d, inverse, low, high, theta);
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

/* How far short of the total to aim: some deviations of the rounding of all prompts. */
INLINE double shortfall(int64_t prompts) { return 2.0 + 0.5 * sqrt((double)prompts); }

/* ---- coefficients kept ------------------------------------------------------------------------------------------- */

INLINE int newton_kept(const coba_gains *g, const int saturation, int64_t low, int64_t high, int64_t total,
                      int64_t *budgets) {
    const int64_t prompts = g->prompts;
    const double room = shortfall(prompts);
    const int64_t few = 64 + (int64_t)(8.0 * room);
    const int64_t sampled = prompts < 512 ? (prompts < 64 ? prompts : 64) : (prompts < 32768 ? prompts / 8 : 4096);
    const int gaps = saturation == MIXED_GROUP; /* the only form with a third coefficient */
    double *a = malloc((size_t)((4 + gaps) * prompts + (3 + gaps) * sampled) * sizeof *a), *k = a + prompts;
    double *inverse = k + prompts, *gains = inverse + prompts, *d = gains + prompts;
    double *sample_a = d + gaps * prompts, *sample_k = sample_a + sampled, *sample_inverse = sample_k + sampled;
    double *sample_d = sample_inverse + sampled;
    coba_unit *near = malloc((size_t)few * sizeof *near);
    int32_t *most = 0;
    int result = -1;
    if (!a || !near) goto done;
    const coba_units u = {prompts, low, high, a, k, d, 0};

    int64_t edges = 0;
    for (int64_t from = 0; from < prompts; from += BLOCK) {
        const int64_t n = prompts - from < BLOCK ? prompts - from : BLOCK;
        coefficients(g, saturation, from, n, a + from, k + from, d + from);
        edges += invert(n, a + from, k + from, inverse + from);
    }
    if (total >= (prompts - edges) * high + edges * low) { /* the rest goes to prompts that gain nothing */
        result = threshold_bisection(saturation, &u, total, budgets);
        goto done;
    }
    for (int64_t i = 0; i < sampled; i++) {
        const int64_t at = i * prompts / sampled;
        sample_a[i] = a[at];
        sample_k[i] = k[at];
        sample_inverse[i] = inverse[at];
        if (gaps) sample_d[i] = d[at];
    }
    double theta = newton(saturation, sample_a, sample_k, sample_d, sample_inverse, sampled, (double)low, (double)high,
                          (double)total * ((double)sampled / (double)prompts));
    coba_count c;
    for (int step = 0;; step++) { /* counts cost less than budgets */
        c = count_units(saturation, prompts, a, k, d, inverse, (double)low, (double)high, theta);
        const double excess = (double)(c.units - total);
        if (step == 1 || !(c.slope > 0.0) || (excess < 4.0 * room && excess > -4.0 * room)) break;
        theta += excess / c.slope;
    }
    double up = INFINITY, down = -INFINITY; /* θ known to give at most, and at least, the total */
    for (int step = 0; step < 24; step++) {
        double to = c.slope > 0.0 ? theta + ((double)(c.units - total) + room) / c.slope : NAN;
        if (!(to > down && to < up)) {
            if (up < INFINITY && down > -INFINITY) to = 0.5 * (up + down);
            else if (!(to == to)) to = c.units > total ? theta + 1.0 : theta - 1.0;
        }
        if (step > 0) c.slope = count_units(saturation, prompts, a, k, d, inverse, (double)low, (double)high, to).slope;
        theta = to;
        c.units = 0;
        for (int64_t from = 0; from < prompts; from += BLOCK) { /* a wrong estimate costs its block a second look */
            const int64_t n = prompts - from < BLOCK ? prompts - from : BLOCK;
            c.units += settle(saturation, n, a + from, k + from, d + (gaps ? from : 0), inverse + from, low, high, theta,
                              budgets + from, gains + from);
        }
        if (c.units > total) {
            down = theta > down ? theta : down;
            continue;
        }
        up = theta < up ? theta : up;
        const int64_t spare = total - c.units;
        if (spare == 0) {
            result = 0;
            goto done;
        }
        if (spare <= few / 2) {
            int64_t count = 0;
            for (double margin = (double)spare + 2.0 + 2.0 * sqrt((double)spare); count < spare; margin *= 2.0) {
                const int sloped = c.slope > 0.0 && margin < 8.0 * (double)few;
                const double edge = sloped ? theta - margin / c.slope : largest_of(gains, prompts);
                count = gather(saturation, 0, prompts, a, k, d, budgets, gains, high, edge, near, 0, few);
                if (!sloped) break;
            }
            if (count >= spare && count <= few) {
                select_first(near, count, spare);
                give(near, spare, budgets);
                result = 0;
                goto done;
            }
        }
        if (step == 0 && spare > few / 2) continue;
        const double next = largest_of(gains, prompts);
        int64_t ties = 0; /* many prompts alike: are the units of the next gain enough? */
        if (!most && !(most = malloc((size_t)prompts * sizeof *most))) goto done;
        for (int64_t i = 0; i < prompts; i++) {
            int64_t b = budgets[i];
            for (double gain = gains[i]; gain == next && b < high; gain = unit_gain(saturation, &u, i, b)) b++;
            most[i] = (int32_t)b;
            ties += b - budgets[i];
        }
        if (ties >= spare) {
            share_ties(prompts, budgets, most, spare);
            result = 0;
            goto done;
        }
        theta = next; /* the next step looks below it */
        up = theta;
        c.units += ties;
    }
    result = threshold_bisection(saturation, &u, total, budgets);
done:
    free(a);
    free(near);
    free(most);
    return result;
}

/* ---- lines of more prompts than fit in a cache ----------------------------------------------------------------------- */

#define STREAMED 32768 /* from so many prompts on, coefficients are not kept */

/* Slopes again, which cost less than to keep them. */
INLINE void slopes(const coba_gains *g, const int saturation, int64_t from, int64_t n, const double *restrict a,
                   double *restrict k) {
    const double *restrict p = g->p + from;
    for (int64_t i = 0; i < n; i++) {
        const double q = 1.0 - p[i];
        const double rate = g->rate[g->rate_step ? from + i : 0];
        const double slope = saturation == EXPONENTIAL ? (p[i] * q) * rate : -log_sum(q, (1.0 - q) - p[i]);
        k[i] = a[i] == -INFINITY ? 0.0 : slope;
    }
}

/* What both passes need, and one thread's part of one. */
typedef struct {
    const coba_gains *gains;
    int64_t low, high, few;
    double theta, edge;
    int64_t *budgets;
} coba_pass;

typedef struct {
    int64_t from, to, units, edges, count;
    double slope;
    coba_unit *near;
} coba_part;

/* Intercepts, kept where the budgets will be, and a count at θ. */
INLINE void pass_intercepts(const coba_pass *pass, const int saturation, coba_part *part) {
    for (int64_t from = part->from; from < part->to; from += BLOCK) {
        const int64_t n = part->to - from < BLOCK ? part->to - from : BLOCK;
        double a[BLOCK], k[BLOCK], inverse[BLOCK];
        coefficients(pass->gains, saturation, from, n, a, k, (double *)0);
        part->edges += invert(n, a, k, inverse);
        const coba_count c =
            count_units(saturation, n, a, k, (double *)0, inverse, (double)pass->low, (double)pass->high, pass->theta);
        part->units += c.units;
        part->slope += c.slope;
        memcpy(pass->budgets + from, a, (size_t)n * sizeof *a);
    }
}

/* Budgets at θ, and the units down to `edge`. */
INLINE void pass_budgets(const coba_pass *pass, const int saturation, coba_part *part) {
    for (int64_t from = part->from; from < part->to; from += BLOCK) {
        const int64_t n = part->to - from < BLOCK ? part->to - from : BLOCK;
        double a[BLOCK], k[BLOCK], inverse[BLOCK], gains[BLOCK];
        int64_t *budgets = pass->budgets + from;
        memcpy(a, budgets, (size_t)n * sizeof *a);
        slopes(pass->gains, saturation, from, n, a, k);
        invert(n, a, k, inverse);
        part->units +=
            settle(saturation, n, a, k, (double *)0, inverse, pass->low, pass->high, pass->theta, budgets, gains);
        part->count = gather(saturation, from, n, a, k, (double *)0, budgets, gains, pass->high, pass->edge, part->near,
                             part->count, pass->few);
    }
}

/* Runs a pass in `threads` threads. (The loops stand outside the parallel region: inside it they are not vectorised.) */
NOINLINE static void run_part(const coba_pass *pass, int second, coba_part *part) {
    if (pass->gains->saturation == EXPONENTIAL) {
        if (second) pass_budgets(pass, EXPONENTIAL, part);
        else pass_intercepts(pass, EXPONENTIAL, part);
    } else {
        if (second) pass_budgets(pass, FIRST_SUCCESS, part);
        else pass_intercepts(pass, FIRST_SUCCESS, part);
    }
}

static void run_pass(const coba_pass *pass, int second, coba_part *parts, int threads) {
    const int64_t prompts = pass->gains->prompts, blocks = (prompts + BLOCK - 1) / BLOCK;
    for (int t = 0; t < threads; t++) {
        coba_part *part = &parts[t];
        *part = (coba_part){blocks * t / threads * BLOCK, blocks * (t + 1) / threads * BLOCK, 0, 0, 0, 0.0, part->near};
        if (part->to > prompts) part->to = prompts;
    }
    if (threads == 1) {
        run_part(pass, second, parts);
        return;
    }
    PRAGMA(omp parallel for num_threads(threads))
    for (int t = 0; t < threads; t++) run_part(pass, second, &parts[t]);
}

/* Two passes over the pass rates and nothing kept but the budgets. 1 if that did it, 0 if not (many prompts alike, and
   then budgets are undefined), -1 if memory runs out. */
INLINE int newton_streamed(const coba_gains *g, const int saturation, int64_t low, int64_t high, int64_t total,
                           int64_t *budgets, int threads) {
    const int64_t prompts = g->prompts, blocks = (prompts + BLOCK - 1) / BLOCK;
    const int64_t sampled = blocks / 16 < 256 ? blocks / 16 : 256; /* blocks, spread over all prompts */
    const int64_t few = 64 + (int64_t)(64.0 * shortfall(prompts));
    double *sample_a = malloc((size_t)(3 * sampled * BLOCK) * sizeof *sample_a), *sample_k = sample_a + sampled * BLOCK;
    double *sample_inverse = sample_k + sampled * BLOCK;
    coba_unit *near = malloc((size_t)(few * threads) * sizeof *near);
    coba_part *parts = calloc((size_t)threads, sizeof *parts);
    int result = -1;
    if (!sample_a || !near || !parts) goto done;
    for (int64_t i = 0; i < sampled; i++) {
        const int64_t to = i * BLOCK;
        coefficients(g, saturation, i * (blocks - 1) / sampled * BLOCK, BLOCK, sample_a + to, sample_k + to,
                     (double *)0);
        invert(BLOCK, sample_a + to, sample_k + to, sample_inverse + to);
    }
    for (int t = 0; t < threads; t++) parts[t].near = near + t * few;
    coba_pass pass = {g, low, high, few, 0.0, 0.0, budgets};
    pass.theta = newton(saturation, sample_a, sample_k, (double *)0, sample_inverse, sampled * BLOCK, (double)low,
                        (double)high, (double)total * ((double)(sampled * BLOCK) / (double)prompts));
    result = 0;
    for (int attempt = 0; attempt < 3 && result == 0; attempt++) {
        int64_t units = 0, edges = 0, count = 0;
        double slope = 0.0;
        run_pass(&pass, 0, parts, threads);
        for (int t = 0; t < threads; t++) {
            units += parts[t].units;
            edges += parts[t].edges;
            slope += parts[t].slope;
        }
        if (total >= (prompts - edges) * high + edges * low || !(slope > 0.0)) goto done;
        /* what one Newton step from there may miss by: rounding, and the curvature of the count */
        const double excess = (double)(units - total), curved = 12.0 * excess * excess / (double)total;
        double room = 4.0 * shortfall(prompts) + curved;
        room = room < (double)few / 3.0 ? room : (double)few / 3.0;
        pass.theta += (excess + room) / slope;
        pass.edge = pass.theta - 2.0 * room / slope;
        run_pass(&pass, 1, parts, threads);
        units = 0;
        for (int t = 0; t < threads; t++) {
            if (parts[t].count > few) goto done;
            units += parts[t].units;
            memmove(near + count, parts[t].near, (size_t)parts[t].count * sizeof *near);
            count += parts[t].count;
        }
        if (units <= total && count >= total - units) {
            select_first(near, count, total - units);
            give(near, total - units, budgets);
            result = 1;
        } else if (count < total - units && count < (int64_t)(0.5 * room)) {
            goto done; /* hardly a unit where there should be many: ties */
        }
    }
done:
    free(sample_a);
    free(near);
    free(parts);
    return result;
}

INLINE int threshold_newton(const coba_gains *g, const int saturation, int64_t low, int64_t high, int64_t total,
                           int64_t *budgets, int threads) {
    if (g->prompts >= STREAMED && (saturation == EXPONENTIAL || saturation == FIRST_SUCCESS)) {
        const int found = newton_streamed(g, saturation, low, high, total, budgets, threads);
        if (found) return found < 0 ? found : 0;
    }
    return newton_kept(g, saturation, low, high, total, budgets);
}

#endif
