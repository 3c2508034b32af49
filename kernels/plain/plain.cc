// The table of the plain backend: the definition of every operation (docs/model.md, docs/numerics.md).
#include "kernels/plain/plain.h"

namespace dsv41 {

const Ops& plain_ops() {
  static constexpr Ops ops{
      .name = "plain",
      .quantize_rows = plain::quantize_rows,
      .quantize_index = plain::quantize_index,
      .quantize_group = plain::quantize_group,
      .dequantize_window = plain::dequantize_window,
      .dequantize_group = plain::dequantize_group,
      .linear_fp8 = plain::linear_fp8,
      .linear_fp4 = plain::linear_fp4,
      .linear_bf16 = plain::linear_bf16,
      .linear_wide = plain::linear_wide,
      .linear_fp8_unquantized = plain::linear_fp8_unquantized,
      .rms_norm = plain::rms_norm,
      .rotate = plain::rotate,
      .swiglu = plain::swiglu,
      .collapse = plain::collapse,
      .expand = plain::expand,
      .mix_projections = plain::mix_projections,
      .compress_group = plain::compress_group,
      .engram_gate = plain::engram_gate,
      .sum_experts = plain::sum_experts,
      .attention = plain::attention,
      .index_scores = plain::index_scores,
  };
  return ops;
}

}  // namespace dsv41
