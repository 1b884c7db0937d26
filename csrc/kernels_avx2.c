/* The kernels for x86-64 with AVX2. */
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define TARGET avx2
#include "kernels_target.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int coba_no_avx2; /* a file may not be empty */
#endif
