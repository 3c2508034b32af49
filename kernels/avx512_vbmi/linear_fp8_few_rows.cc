// kernels/avx512/linear_fp8_few_rows.cc once more, with the instructions of VBMI and GFNI
// (kernels/avx512/target_begin.h).
#define DSV41_AVX512_VBMI
#define avx512 avx512_vbmi
#include "kernels/avx512/linear_fp8_few_rows.cc"  // NOLINT: a second build of the same source
