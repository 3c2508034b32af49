// The intrinsics, and the opening of a region whose functions are compiled for AVX-512 F, BW, DQ, VL and
// VNNI, with DSV41_AVX512_VBMI also for VBMI and GFNI; target_end.h closes it. Include it after every other
// header: see kernels/avx2/target_begin.h. Tests define DSV41_EMULATED_AVX512 to run the same source on any
// machine: a header with the instructions in plain C++.
#if defined(DSV41_EMULATED_AVX512)
#include DSV41_EMULATED_AVX512
#else
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // _mm512_undefined_epi32 inside the intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__clang__) && defined(DSV41_AVX512_VBMI)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"))), \
    apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#if defined(DSV41_AVX512_VBMI)
#pragma GCC target("avx512vbmi,gfni")
#endif
#endif
#endif
// For functions that stay out of line. GCC 12.2 specializes them across calls (IPA constant propagation and
// scalar replacement), and such copies with vector arguments returned zeros: no such analysis.
#if defined(__clang__)
#define DSV41_OUT_OF_LINE [[gnu::noinline]]
#else
#define DSV41_OUT_OF_LINE [[gnu::noipa]]
#endif
