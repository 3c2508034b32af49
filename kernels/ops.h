// The table of operations (spec: docs/model.md; order of every sum: docs/numerics.md).
// A backend is one folder that fills this table. kernels/plain defines what is right; every other backend is
// compared with it bit for bit by one table-driven test (tests/kernels/backends_test.cc).
//
// Conventions: matrices are row-major; `rows` is the number of activation rows; results never depend on how many
// rows or output features one call computes, nor on the thread that computes them. Functions are single-threaded
// and reentrant; they may keep thread-local scratch. Outputs do not alias inputs unless a line says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/views.h"

namespace dsv41 {

struct Ops {
  const char* name;  // "plain", "avx2", "avx512"

  // ---- quantizers (model.md 1) -------------------------------------------------------------------------------

  /// act_quant: x [rows, k] -> E4M3 codes [rows, k], E8M0 scales [rows, k/32]. k % 32 == 0.
  void (*quantize_rows)(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes, std::uint8_t* scales);
  /// fp4_quant with E8M0 scales, block 32 (index queries and keys): packed codes [rows, k/2], scales [rows, k/32].
  void (*quantize_index)(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes, std::uint8_t* scales);
  /// fp4_quant with E4M3 scales, block 16 (compressed KV): packed codes [rows, k/2], scales [rows, k/16].
  void (*quantize_group)(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes, std::uint8_t* scales);
  /// bf16(code * scale) of E4M3 codes [k] with one E8M0 scale per 32, widened to fp32 (exact).
  void (*dequantize_window)(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);
  /// bf16(code * scale) of packed E2M1 codes [k/2] with one E4M3 scale per 16, widened to fp32 (exact).
  void (*dequantize_group)(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out);

  // ---- linears: out [rows, w.n], only the features of `range` are written ------------------------------------

  /// fp8_linear on quantized rows (numerics.md 1).
  void (*linear_fp8)(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out);
  /// fp4_linear on quantized rows (numerics.md 1).
  void (*linear_fp4)(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out);
  /// bf16_linear: wide sum -> fp32 -> bf16. x [rows, w.k] with rows `x_stride` elements apart.
  void (*linear_bf16)(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w, Range range,
                      BFloat16* out);
  /// fp32_linear of values stored as bf16: wide sum -> fp32.
  void (*linear_wide)(const BFloat16* x, std::size_t rows, const Bf16Matrix& w, Range range, float* out);
  /// bf16_linear with an FP8 weight dequantized to bf16 (attn.wo_a): activations stay bf16.
  /// Feature j of the range goes to out[row * out_stride + j - range.begin]; x rows are `x_stride` elements apart.
  void (*linear_fp8_unquantized)(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Fp8Matrix& w,
                                 Range range, BFloat16* out, std::size_t out_stride);

  // ---- element-wise and short sums ---------------------------------------------------------------------------

  /// rms_norm over rows of k: weight [k]; out may alias x.
  void (*rms_norm)(const BFloat16* x, const BFloat16* weight, float eps, std::size_t rows, std::size_t k, BFloat16* out);
  /// RoPE in place on the last 2*pairs channels of each of `heads` vectors of `dim`; cosine, sine [pairs] of the row's
  /// position. inverse rotates by the conjugate angle.
  void (*rotate)(BFloat16* x, std::size_t heads, std::size_t dim, std::size_t pairs, const float* cosine,
                 const float* sine, bool inverse);
  /// out = bf16(silu(min(g, limit)) * clamp(u, -limit, limit) * weight) for n values; limit 0: no clamp.
  /// The shared expert passes weight 1 (exact).
  void (*swiglu)(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n, BFloat16* out);
  /// hc_pre: X [copies, dim], pre [copies] -> bf16 [dim].
  void (*collapse)(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out);
  /// hc_post: out[k] = bf16(post[k]*y + sum_j comb[j,k]*X[j]); comb [copies, copies]. out may alias x.
  void (*expand)(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
                 std::size_t dim, BFloat16* out);
  /// The projections of mixes(): out[i] = (fn[i] . x) * 1/sqrt(mean(x^2) + eps), fp64, for i in range; x [rows, fn.k],
  /// out [rows, fn.n].
  void (*mix_projections)(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range,
                          double* out);
  /// Group softmax of the compressor: u, z fp32 [members, dim] -> bf16 [dim].
  void (*compress_group)(const float* u, const float* z, std::size_t members, std::size_t dim, BFloat16* out);
  /// Engram gate of one token: x [copies, dim] in place, key [copies, dim], value [dim], q_weight/k_weight
  /// [copies, dim]; gate fp32 [copies] is also returned.
  void (*engram_gate)(BFloat16* x, const BFloat16* key, const BFloat16* value, const BFloat16* q_weight,
                      const BFloat16* k_weight, float eps, std::size_t copies, std::size_t dim, float* gate);
  /// Layer output of MoE: fp32 sum of `count` expert rows [count, dim] in order, plus shared [dim] -> bf16 [dim].
  void (*sum_experts)(const BFloat16* experts, std::size_t count, const BFloat16* shared, std::size_t dim, BFloat16* out);

  // ---- attention ----------------------------------------------------------------------------------------------

  /// Sparse attention of one token over `slots` decoded key/values (pointers to fp32 [dim], in slot order).
  /// q, out: bf16 [heads, dim]; sink fp32 [heads]; scale = RN32(dim^-0.5).
  void (*attention)(const BFloat16* q, const float* const* kv, std::size_t slots, const float* sink, float scale,
                    std::size_t heads, std::size_t dim, BFloat16* out);
  /// Index scores of one token against `keys` stored keys: codes [keys, dim/2] with scales [keys, dim/32] -> bf16
  /// scores [keys].
  void (*index_scores)(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                       std::size_t keys, BFloat16* scores);
};

/// The definition of every operation, in plain C++.
const Ops& plain_ops();

/// Names of the backends this program holds, best first; only those this CPU can run when `usable_only`.
struct BackendChoice {
  const Ops* ops;
  const char* requires_features;  // for the start line and refusals, for example "AVX2 FMA F16C"
  bool usable;
};
std::size_t backend_count();
BackendChoice backend(std::size_t index);
/// The named backend, or the best usable one for "auto". Throws std::invalid_argument saying what exists.
const Ops& find_backend(const char* name);

}  // namespace dsv41
