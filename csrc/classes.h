/* Prompts of equal pass rate have equal gains: counted pass rates (k of n rollouts) take few values, and the cut is
   found on these, each weighted by its prompts. Gains, their order and the rule for ties are those of every prompt by
   itself, so budgets are too. */
#ifndef COBA_CLASSES_H
#define COBA_CLASSES_H

#include "newton.h"

#define MOST_CLASSES 200 /* fewer than BLOCK, and than what a byte holds */
#define SLOTS 512        /* of the hash; a power of two */
#define TRIED 32         /* prompts looked at first: without a value twice among them, nothing is grouped */

typedef struct {
    int64_t count;
    uint8_t slots[SLOTS]; /* class + 1, or 0 */
    uint64_t keys[MOST_CLASSES];
    int64_t prompts[MOST_CLASSES];
} coba_classes;

/* The class of a pass rate, by its bits; -1 if it would be one class more than `limit`. */
INLINE int64_t class_of(coba_classes *c, double p, int64_t limit) {
    const uint64_t key = bits_of(p);
    uint64_t slot = ((key ^ (key >> 32)) * UINT64_C(0x9E3779B97F4A7C15)) >> 55;
    while (c->slots[slot] && c->keys[c->slots[slot] - 1] != key) slot = (slot + 1) % SLOTS;
    if (c->slots[slot]) return c->slots[slot] - 1;
    if (c->count == limit) return -1;
    c->keys[c->count] = key;
    c->prompts[c->count++] = 0;
    c->slots[slot] = (uint8_t)c->count;
    return c->count - 1;
}

/* Groups the prompts, and leaves in budgets the class of each; 0 if pass rates are too many. */
static int classify(const coba_gains *g, coba_classes *c, int64_t *budgets) {
    const int64_t prompts = g->prompts, limit = prompts / 2 < MOST_CLASSES ? prompts / 2 : MOST_CLASSES;
    if (prompts < 2 * TRIED) return 0;
    c->count = 0;
    memset(c->slots, 0, sizeof c->slots);
    for (int64_t i = 0; i < TRIED; i++) class_of(c, g->p[i * prompts / TRIED], limit);
    if (c->count == TRIED) return 0;
    for (int64_t i = 0; i < prompts; i++) {
        const int64_t at = class_of(c, g->p[i], limit);
        if (at < 0) return 0;
        c->prompts[at]++;
        budgets[i] = at;
    }
    return 1;
}

/* Σ weight · budget at θ as if budgets were not rounded, which leaves no steps to stumble on, and its slope. */
INLINE double weigh_units(const int saturation, int64_t n, const double *restrict weight, const double *restrict a,
                          const double *restrict k, const double *restrict d, const double *restrict inverse, double low,
                          double high, double theta, double *slope) {
    double units = 0.0, slopes = 0.0;
    PRAGMA(omp simd reduction(+ : units, slopes))
    for (int64_t i = 0; i < n; i++) {
        double step;
        double x = root(saturation, a[i], k[i], saturation == MIXED_GROUP ? d[i] : 0.0, inverse[i], theta, &step) + 0.5;
        x = x > low ? x : low;
        x = x < high ? x : high;
        units += weight[i] * x;
        slopes += ((x > low) & (x < high)) ? weight[i] * step : 0.0;
    }
    *slope = slopes;
    return units;
}

/* 1 if the prompts could be grouped and have their budgets, 0 if not; budgets are then undefined. */
INLINE int threshold_classes(const coba_gains *g, const int saturation, int64_t low, int64_t high, int64_t total,
                             int64_t *budgets) {
    coba_classes c;
    if (g->p_step + g->q_step + g->scale_step + g->rate_step != 0 || !classify(g, &c, budgets)) return 0;
    const int64_t n = c.count;
    double p[MOST_CLASSES], weight[MOST_CLASSES], squares = 0.0;
    double a[MOST_CLASSES], k[MOST_CLASSES], d[MOST_CLASSES], inverse[MOST_CLASSES], gains[MOST_CLASSES];
    int64_t level[MOST_CLASSES];
    int32_t most[MOST_CLASSES];
    for (int64_t i = 0; i < n; i++) {
        p[i] = from_bits(c.keys[i]);
        weight[i] = (double)c.prompts[i];
        squares += weight[i] * weight[i];
    }
    coba_gains classes = *g;
    classes.prompts = n;
    classes.p = p;
    coefficients(&classes, saturation, 0, n, a, k, d);
    invert(n, a, k, inverse);
    const coba_units u = {n, low, high, a, k, d, 0};

    /* θ that leaves a few units over: some deviations of what rounding does to the sum */
    double theta = -4.0, margin = 0.5 * sqrt(squares);
    int64_t spare = -1;
    for (int attempt = 0; spare < 0; attempt++, margin *= 4.0) {
        if (attempt == 4) return 0;
        double up = INFINITY, down = -INFINITY, reach = 2.0;
        for (int step = 0; step < 24; step++) {
            double slope;
            const double excess = weigh_units(saturation, n, weight, a, k, d, inverse, (double)low, (double)high, theta,
                                              &slope) - ((double)total - margin);
            if (excess <= 0.25 * margin && excess >= -0.25 * margin) break;
            if (excess > 0.0) down = theta;
            else up = theta;
            double to = slope > 0.0 ? theta + excess / slope : (excess > 0.0 ? INFINITY : -INFINITY);
            if (!(to > down && to < up)) {
                if (up < INFINITY && down > -INFINITY) to = 0.5 * (up + down);
                else to = excess > 0.0 ? theta + reach : theta - reach;
                reach *= 4.0;
            }
            if (to == theta) break;
            theta = to;
        }
        settle(saturation, n, a, k, d, inverse, low, high, theta, level, gains);
        spare = total;
        for (int64_t i = 0; i < n; i++) spare -= c.prompts[i] * level[i];
    }

    for (int step = 0; spare > 0; step++) { /* all units of the next gain, as long as they can be paid for */
        if (step == 4 * MOST_CLASSES) return 0;
        double next = -INFINITY;
        int64_t cost = 0;
        for (int64_t i = 0; i < n; i++) next = gains[i] > next ? gains[i] : next;
        for (int64_t i = 0; i < n; i++) {
            int64_t b = level[i];
            double gain = gains[i];
            if (gain == next) /* at high it is -inf, as it is for prompts that gain nothing */
                while (b < high && gain == next) gain = ++b < high ? unit_gain(saturation, &u, i, b) : -INFINITY;
            most[i] = (int32_t)b;
            cost += c.prompts[i] * (b - level[i]);
            if (b > level[i]) gains[i] = gain;
        }
        if (cost > spare) break;
        if (cost == 0) return 0;
        for (int64_t i = 0; i < n; i++) level[i] = most[i];
        spare -= cost;
    }
    const int64_t even = spare > 0 ? fill_ties(n, level, most, c.prompts, &spare) : 0;
    for (int64_t i = 0; i < n; i++) most[i] = spare > 0 && level[i] == even && most[i] > even;
    for (int64_t i = 0; i < g->prompts; i++) { /* and one unit more by index */
        const int64_t at = budgets[i], more = most[at] & (spare > 0);
        budgets[i] = level[at] + more;
        spare -= more;
    }
    return 1;
}

#endif
