/* Units of budget, their order, and the two ways to finish an allocation: among a few candidates, and among ties. */
#ifndef COBA_UNITS_H
#define COBA_UNITS_H

#include <stdlib.h>

#include "gains.h"

/* Everything a solver needs to ask for a gain. */
typedef struct {
    int64_t prompts, low, high;
    const double *a, *k, *d; /* [prompts]; for a table a is the table and width its row length */
    int64_t width;
} coba_units;

INLINE double unit_gain(const int saturation, const coba_units *u, int64_t i, int64_t budget) {
    if (saturation == TABLE) return u->a[i * u->width + budget];
    return log_gain(saturation, u->a[i], u->k[i], saturation == MIXED_GROUP ? u->d[i] : 0.0, (double)budget);
}

typedef struct {
    double gain;
    int32_t budget, prompt;
} coba_unit;

/* The canonical order: larger gain, then smaller budget, then lower index. */
INLINE int before(const coba_unit *x, const coba_unit *y) {
    if (x->gain != y->gain) return x->gain > y->gain;
    if (x->budget != y->budget) return x->budget < y->budget;
    return x->prompt < y->prompt;
}

/* Reorders units so that the first `wanted` of them are the first in the canonical order (quickselect). */
static void select_first(coba_unit *units, int64_t count, int64_t wanted) {
    int64_t from = 0, to = count - 1;
    while (from < to) {
        const coba_unit pivot = units[from + (to - from) / 2];
        int64_t i = from, j = to;
        while (i <= j) {
            while (before(&units[i], &pivot)) i++;
            while (before(&pivot, &units[j])) j--;
            if (i <= j) {
                const coba_unit swap = units[i];
                units[i++] = units[j];
                units[j--] = swap;
            }
        }
        if (wanted <= j + 1 && wanted > from) {
            if (wanted == j + 1) return;
            to = j;
        } else if (wanted > i) {
            from = i;
        } else {
            return;
        }
    }
}

INLINE void give(const coba_unit *units, int64_t count, int64_t *budgets) {
    for (int64_t j = 0; j < count; j++) budgets[units[j].prompt]++;
}

/* Units of equal gain: all that can go from budgets[i] towards most[i] are filled to one level, which is returned. One
   of them stands for count[i] prompts, or for one where count is null. */
INLINE int64_t fill_ties(int64_t n, int64_t *budgets, const int32_t *most, const int64_t *count, int64_t *spare) {
    int64_t lowest = INT32_MAX, highest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (most[i] <= budgets[i]) continue;
        if (budgets[i] < lowest) lowest = budgets[i];
        if (most[i] > highest) highest = most[i];
    }
    while (lowest < highest) { /* the largest level that the spare units still pay for */
        const int64_t level = lowest + (highest - lowest + 1) / 2;
        int64_t cost = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t to = level < most[i] ? level : most[i];
            cost += to > budgets[i] ? (to - budgets[i]) * (count ? count[i] : 1) : 0;
        }
        if (cost <= *spare) lowest = level;
        else highest = level - 1;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t to = lowest < most[i] ? lowest : most[i];
        if (to <= budgets[i]) continue;
        *spare -= (to - budgets[i]) * (count ? count[i] : 1);
        budgets[i] = to;
    }
    return lowest;
}

/* The same for prompts, and what is left goes to those at the level by index. */
static void share_ties(int64_t prompts, int64_t *budgets, const int32_t *most, int64_t spare) {
    const int64_t lowest = fill_ties(prompts, budgets, most, 0, &spare);
    for (int64_t i = 0; i < prompts && spare > 0; i++) {
        if (budgets[i] != lowest || most[i] <= lowest) continue;
        budgets[i]++;
        spare--;
    }
}

#endif
