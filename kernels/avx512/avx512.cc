// The table of the AVX-512 backend: the AVX2 one with faster entries (docs/numerics.md holds for both).
#include "kernels/avx512/avx512.h"

#include "kernels/avx2/avx2.h"

namespace dsv41 {

const Ops& avx512_ops() {
  static const Ops ops = [] {
    Ops table = avx2_ops();
    table.name = "avx512";
    table.dequantize_group = avx512::dequantize_group;
    table.linear_fp8 = avx512::linear_fp8;
    table.linear_fp4 = avx512::linear_fp4;
    table.linear_bf16 = avx512::linear_bf16;
    table.linear_wide = avx512::linear_wide;
    table.linear_fp8_unquantized = avx512::linear_fp8_unquantized;
    table.swiglu = avx512::swiglu;
    table.collapse = avx512::collapse;
    table.expand = avx512::expand;
    table.mix_projections = avx512::mix_projections;
    table.attention = avx512::attention;
    table.index_scores = avx512::index_scores;
    return table;
  }();
  return ops;
}

}  // namespace dsv41
