/* 2602.03048 Algorithm 1 on log gains: the largest gain next, from a binary heap. O(M + R log M). */
#ifndef COBA_HEAP_H
#define COBA_HEAP_H

#include "units.h"

INLINE void sift_down(coba_unit *heap, int64_t size, int64_t at, coba_unit moving) {
    int64_t child;
    while ((child = 2 * at + 1) < size) {
        if (child + 1 < size && before(&heap[child + 1], &heap[child])) child++;
        if (before(&moving, &heap[child])) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

INLINE int heap_case(const int saturation, const coba_units *u, int64_t total, int64_t *budgets) {
    int64_t size = u->low < u->high ? u->prompts : 0;
    coba_unit *heap = malloc((size_t)(size + 1) * sizeof *heap);
    if (!heap) return -1;
    for (int64_t i = 0; i < u->prompts; i++) budgets[i] = u->low;
    for (int64_t i = 0; i < size; i++) {
        heap[i].gain = unit_gain(saturation, u, i, u->low);
        heap[i].budget = (int32_t)u->low;
        heap[i].prompt = (int32_t)i;
    }
    for (int64_t i = size / 2 - 1; i >= 0; i--) sift_down(heap, size, i, heap[i]);
    for (int64_t spare = total - u->low * u->prompts; spare > 0; spare--) {
        coba_unit top = heap[0];
        budgets[top.prompt] = ++top.budget;
        if (top.budget < u->high) {
            top.gain = unit_gain(saturation, u, top.prompt, top.budget);
        } else {
            top = heap[--size];
        }
        sift_down(heap, size, 0, top);
    }
    free(heap);
    return 0;
}

#endif
