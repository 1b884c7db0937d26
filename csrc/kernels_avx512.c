/* The kernels for x86-64 with AVX512. */
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define TARGET avx512
#include "kernels_target.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int coba_no_avx512; /* a file may not be empty */
#endif
