/* The cut: θ* = the smallest gain taken. Every unit above it is given, units that equal it by the canonical order.

   For any concave gain: bisection on θ, with counts that stay bracketed prompt by prompt. Forms have a faster
   way (newton.h). */
#ifndef COBA_THRESHOLD_H
#define COBA_THRESHOLD_H

#include "units.h"

/* Position of a number among the floating-point numbers, and back. */
INLINE int64_t ordinal(double x) {
    const int64_t bits = (int64_t)bits_of(x);
    return bits >= 0 ? bits : -(bits & INT64_MAX) - 1;
}

/* How many numbers lie between two places; their difference may not fit a signed integer. */
INLINE uint64_t apart(int64_t up, int64_t down) { return (uint64_t)up - (uint64_t)down; }

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
    for (int step = 0; apart(up, down) > 1 && sum_down - sum_up > few; step++) {
        int64_t place = down + (int64_t)(apart(up, down) / 2);
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
    if (apart(up, down) > 1) {
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

#endif
