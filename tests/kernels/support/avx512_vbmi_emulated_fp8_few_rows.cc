// kernels/avx512/linear_fp8_few_rows.cc with VBMI and GFNI, its instructions emulated.
#if defined(__x86_64__)
#define DSV41_AVX512_VBMI
#define DSV41_EMULATED_AVX512 "tests/kernels/support/emulated_avx512.h"
#define avx512 avx512_vbmi_emulated
#include "kernels/avx512/linear_fp8_few_rows.cc"  // NOLINT: a second build of the same source
#endif
