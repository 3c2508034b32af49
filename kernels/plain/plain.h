// The functions behind plain_ops(); shapes and contracts stand in kernels/ops.h, one declaration per member
// of Ops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace dsv41::plain {

// quantizers.cc
void quantize_rows(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                   std::uint8_t* scales);
void quantize_index(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                    std::uint8_t* scales);
void quantize_group(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                    std::uint8_t* scales);
void dequantize_window(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);
void dequantize_group(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);

// linears.cc
void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);
void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
void linear_bf16(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w, Range range,
                 BFloat16* out);
void linear_wide(const BFloat16* x, std::size_t rows, const Bf16Matrix& w, Range range, float* out);
void linear_fp8_unquantized(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Fp8Matrix& w,
                            Range range, BFloat16* out, std::size_t out_stride);

// elementwise.cc
void rms_norm(const BFloat16* x, const BFloat16* weight, float eps, std::size_t rows, std::size_t k,
              BFloat16* out);
void rotate(BFloat16* x, std::size_t heads, std::size_t dim, std::size_t pairs, const float* cosine,
            const float* sine, bool inverse);
void swiglu(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n,
            BFloat16* out);
void compress_group(const float* u, const float* z, std::size_t members, std::size_t dim, BFloat16* out);
void sum_experts(const BFloat16* experts, std::size_t count, const BFloat16* shared, std::size_t dim,
                 BFloat16* out);

// streams.cc
void collapse(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out);
void expand(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
            std::size_t dim, BFloat16* out);
void mix_projections(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range, double* out);
void engram_gate(BFloat16* x, const BFloat16* key, const BFloat16* value, const BFloat16* q_weight,
                 const BFloat16* k_weight, float eps, std::size_t copies, std::size_t dim, float* gate);

// attention.cc
void attention(const BFloat16* q, const float* const* kv, std::size_t slots, const float* sink, float scale,
               std::size_t heads, std::size_t dim, BFloat16* out);
void index_scores(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                  std::size_t keys, BFloat16* scores);

}  // namespace dsv41::plain
