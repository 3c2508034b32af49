// The AVX-512 backend for CPUs that also permute bytes (VBMI) and multiply bit matrices (GFNI): the same
// source, compiled once more.
#pragma once

#include "kernels/ops.h"

namespace dsv41 {

/// avx512_ops() with faster products. Call only on a CPU that has VBMI and GFNI besides.
const Ops& avx512_vbmi_ops();

namespace avx512_vbmi {

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);

}  // namespace avx512_vbmi
}  // namespace dsv41
