// The functions of kernels/avx512, compiled against emulated_avx512.h.
#pragma once

#include "kernels/ops.h"

namespace dsv41::avx512_emulated {

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);

}  // namespace dsv41::avx512_emulated
namespace dsv41::avx512_vbmi_emulated {

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);

}  // namespace dsv41::avx512_vbmi_emulated
