// The table of the AVX2 backend: the plain one with faster entries (docs/numerics.md holds for both).
#include "kernels/avx2/avx2.h"

namespace dsv41 {

const Ops& avx2_ops() {
  static const Ops ops = [] {
    Ops table = plain_ops();
    table.name = "avx2";
    table.quantize_rows = avx2::quantize_rows;
    table.dequantize_window = avx2::dequantize_window;
    table.dequantize_group = avx2::dequantize_group;
    table.linear_fp8 = avx2::linear_fp8;
    table.linear_fp4 = avx2::linear_fp4;
    table.linear_bf16 = avx2::linear_bf16;
    table.linear_wide = avx2::linear_wide;
    table.linear_fp8_unquantized = avx2::linear_fp8_unquantized;
    table.rms_norm = avx2::rms_norm;
    table.swiglu = avx2::swiglu;
    table.collapse = avx2::collapse;
    table.expand = avx2::expand;
    table.mix_projections = avx2::mix_projections;
    table.sum_experts = avx2::sum_experts;
    table.attention = avx2::attention;
    table.index_scores = avx2::index_scores;
    return table;
  }();
  return ops;
}

}  // namespace dsv41
