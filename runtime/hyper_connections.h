// The residual stream of M copies and the mixes that move a sub-block's input and output through it
// (docs/model.md 2).
#pragma once

#include <span>
#include <vector>

#include "kernels/hyper_connections.h"
#include "runtime/context.h"

namespace dsv41 {

/// X [rows, M, D] and the pre-mix that the next sub-block uses, fp32 [rows, M].
struct Stream {
  std::vector<BFloat16> x;
  std::vector<float> pre;
};

/// What one half-block computes from the stream: pre, post fp32 [rows, M], comb fp32 [rows, M, M].
struct Mixes {
  std::vector<float> pre, post, comb;
};

class HyperConnections {
 public:
  explicit HyperConnections(const ModelContext& context);

  /// A stream, or mixes, sized for the largest step.
  Stream make_stream() const;
  Mixes make_mixes() const;

  /// X = M copies of each row of embeddings [rows, D]; pre = [1, 0, …].
  void start(std::span<const BFloat16> embeddings, std::size_t rows, Stream& stream) const;
  void mixes(const Stream& stream, std::size_t rows, const HyperConnectionWeights& weights, Mixes& out);
  /// hc_pre followed by rms_norm: out [rows, D].
  void collapse_and_normalize(const Stream& stream, std::span<const float> pre, std::size_t rows,
                              std::span<const BFloat16> norm, std::span<BFloat16> out) const;
  /// hc_pre alone.
  void collapse(const Stream& stream, std::span<const float> pre, std::size_t rows,
                std::span<BFloat16> out) const;
  /// hc_post in place: y [rows, D].
  void expand(std::span<const BFloat16> y, const Mixes& mixes, std::size_t rows, Stream& stream) const;
  /// Mean over the M copies of one row -> bf16 [D] (main_hidden).
  void mean(const Stream& stream, std::size_t row, BFloat16* out) const;

 private:
  const ModelContext& context_;
  std::size_t copies_, dim_;
  std::vector<double> projections_;  // [max_rows, (2 + M) * M]
};

}  // namespace dsv41
