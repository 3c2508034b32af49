// The AVX2 backend's entries, one declaration per operation of kernels/ops.h that it replaces.
#pragma once

#include "kernels/ops.h"

namespace dsv41 {

/// plain_ops() with every entry replaced that AVX2 makes faster. Call only on a CPU with AVX2, FMA, F16C and
/// BMI.
const Ops& avx2_ops();

namespace avx2 {

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);

}  // namespace avx2
}  // namespace dsv41
