// Opens a region whose functions are compiled for AVX2 + FMA + BMI; target_end.h closes it. Include it
// after every other header: a per-file -mavx2 would also compile the inline functions of those headers, and
// the linker could keep that copy for the whole program. (No include guard: it is a bracket.)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2")
#endif
// For functions that stay out of line. GCC 12.2 specializes them across calls (IPA constant propagation and scalar
// replacement), and such copies with vector arguments returned zeros; asan and ubsan find nothing: no such analysis.
#if defined(__clang__)
#define DSV41_OUT_OF_LINE [[gnu::noinline]]
#else
#define DSV41_OUT_OF_LINE [[gnu::noipa]]
#endif
