/* The kernels for any processor, and the choice among the targets. */
#define TARGET baseline
#include "kernels_target.h"

const coba_kernels *coba_select(const char *name) {
    const coba_kernels *targets[] = {
#if defined(__x86_64__) && defined(__GNUC__)
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
            ? &coba_kernels_avx512 : 0,
        __builtin_cpu_supports("avx2") ? &coba_kernels_avx2 : 0,
#endif
        &coba_kernels_baseline,
    };
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++)
        if (targets[i] && (!name || strcmp(name, targets[i]->name) == 0)) return targets[i];
    return 0;
}
