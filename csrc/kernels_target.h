/* Included once a target, after its instruction set is switched on; defines coba_kernels_<TARGET>. */
#include "classes.h"
#include "heap.h"

#define JOIN(x, y) x##y
#define NAMED(x, y) JOIN(x, y)
#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)

static int64_t first_invalid(const double *p, int64_t prompts) {
    int64_t valid = 0;
    PRAGMA(omp simd reduction(+ : valid))
    for (int64_t i = 0; i < prompts; i++) valid += ((p[i] >= 0.0) & (p[i] <= 1.0)) ? 1 : 0;
    if (valid == prompts) return -1;
    for (int64_t i = 0;; i++)
        if (!(p[i] >= 0.0 && p[i] <= 1.0)) return i;
}

/* Coefficients of every prompt, [prompts] each; 0 if memory runs out. */
static double *all_coefficients(const coba_gains *g, coba_units *u) {
    const int64_t prompts = g->prompts;
    double *a = malloc((size_t)prompts * 3 * sizeof *a);
    if (!a) return 0;
    u->a = a;
    u->k = a + prompts;
    u->d = a + 2 * prompts;
    for (int64_t from = 0; from < prompts; from += BLOCK) {
        const int64_t n = prompts - from < BLOCK ? prompts - from : BLOCK;
        FOR_SATURATION(g->saturation, coefficients(g, saturation, from, n, a + from, a + prompts + from,
                                                   a + 2 * prompts + from))
    }
    return a;
}

static int heap(const coba_gains *g, int64_t low, int64_t high, int64_t total, int64_t *budgets) {
    coba_units u = {g->prompts, low, high, g->table, 0, 0, g->width};
    if (g->saturation == TABLE) return heap_case(TABLE, &u, total, budgets);
    double *memory = all_coefficients(g, &u);
    int result = -1;
    if (!memory) return result;
    FOR_SATURATION(g->saturation, result = heap_case(saturation, &u, total, budgets))
    free(memory);
    return result;
}

static int threshold(const coba_gains *g, int64_t low, int64_t high, int64_t total, int64_t *budgets, int threads) {
    const int64_t prompts = g->prompts;
    if (total == prompts * low || total == prompts * high) {
        for (int64_t i = 0; i < prompts; i++) budgets[i] = total == prompts * low ? low : high;
        return 0;
    }
    coba_units u = {prompts, low, high, g->table, 0, 0, g->width};
    if (g->saturation == TABLE) return threshold_bisection(TABLE, &u, total, budgets);
    int result = -1, solved = 0; /* p = 1 has one unit of FIRST_SUCCESS and then none: no root */
    if (g->saturation == FIRST_SUCCESS)
        for (int64_t i = 0; i < prompts; i++) solved |= g->p[i] == 1.0;
    if (!solved) {
        FOR_SATURATION(g->saturation, if (threshold_classes(g, saturation, low, high, total, budgets)) return 0;
                       result = threshold_newton(g, saturation, low, high, total, budgets, threads))
        return result;
    }
    double *memory = all_coefficients(g, &u);
    if (!memory) return result;
    result = threshold_bisection(FIRST_SUCCESS, &u, total, budgets);
    free(memory);
    return result;
}

const coba_kernels NAMED(coba_kernels_, TARGET) = {TEXT_OF(TARGET), first_invalid, log_gains, log_gain_table, heap, threshold};
