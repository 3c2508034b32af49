// The AVX-512 backend's entries, one declaration per operation of kernels/ops.h that it replaces.
#pragma once

#include "kernels/ops.h"

namespace dsv41 {

/// avx2_ops() with every entry replaced that AVX-512 makes faster. Call only on a CPU with AVX-512 F, BW, DQ,
/// VL and VNNI.
const Ops& avx512_ops();

namespace avx512 {

void dequantize_group(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);
void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);
// The words of three rows leave the first-level cache where K is large.
inline constexpr std::size_t kFewFp8Rows = 2;
/// linear_fp8 of at most kFewFp8Rows rows whose codes and scales are numbers.
void linear_fp8_few_rows(const QuantizedRows& rows, const Fp8Matrix& w, Range range, BFloat16* out);

void linear_bf16(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w, Range range,
                 BFloat16* out);
void linear_wide(const BFloat16* x, std::size_t rows, const Bf16Matrix& w, Range range, float* out);
void linear_fp8_unquantized(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Fp8Matrix& w,
                            Range range, BFloat16* out, std::size_t out_stride);
void swiglu(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n,
            BFloat16* out);
void collapse(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out);
void expand(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
            std::size_t dim, BFloat16* out);
void mix_projections(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range,
                     double* out);
void attention(const BFloat16* q, const float* const* kv, std::size_t slots, const float* sink, float scale,
               std::size_t heads, std::size_t dim, BFloat16* out);
void index_scores(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                  std::size_t keys, BFloat16* scores);

}  // namespace avx512
}  // namespace dsv41
