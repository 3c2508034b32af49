// The AVX2 backend's entries, one declaration per operation of kernels/ops.h that it replaces.
#pragma once

#include "kernels/ops.h"

namespace dsv41 {

/// plain_ops() with every entry replaced that AVX2 makes faster. Call only on a CPU with AVX2, FMA, F16C and
/// BMI.
const Ops& avx2_ops();

namespace avx2 {

// quantizers.cc
void quantize_rows(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                   std::uint8_t* scales);
void dequantize_window(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);
void dequantize_group(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);

// linear_fp4.cc, linear_fp8.cc, linear_fp8_few.cc, wide_linears.cc
void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);
/// linear_fp8 of a few rows whose codes and scales are numbers.
void linear_fp8_few(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);
void linear_bf16(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w, Range range,
                 BFloat16* out);
void linear_wide(const BFloat16* x, std::size_t rows, const Bf16Matrix& w, Range range, float* out);
void linear_fp8_unquantized(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Fp8Matrix& w,
                            Range range, BFloat16* out, std::size_t out_stride);
void mix_projections(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range,
                     double* out);

// elementwise.cc
void rms_norm(const BFloat16* x, const BFloat16* weight, float eps, std::size_t rows, std::size_t k,
              BFloat16* out);
void swiglu(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n,
            BFloat16* out);
void collapse(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out);
void expand(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
            std::size_t dim, BFloat16* out);
void sum_experts(const BFloat16* experts, std::size_t count, const BFloat16* shared, std::size_t dim,
                 BFloat16* out);

// attention.cc, index_scores.cc
void attention(const BFloat16* q, const float* const* kv, std::size_t slots, const float* sink, float scale,
               std::size_t heads, std::size_t dim, BFloat16* out);
void index_scores(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                  std::size_t keys, BFloat16* scores);

}  // namespace avx2
}  // namespace dsv41
