#include "runtime/hyper_connections.h"

#include <algorithm>

namespace dsv41 {

HyperConnections::HyperConnections(const ModelContext& context)
    : context_(context),
      copies_(context.config.hc_mult),
      dim_(context.config.dim),
      projections_(context.max_rows * (2 + copies_) * copies_) {}

Stream HyperConnections::make_stream() const {
  return {std::vector<BFloat16>(context_.max_rows * copies_ * dim_),
          std::vector<float>(context_.max_rows * copies_)};
}

Mixes HyperConnections::make_mixes() const {
  const std::size_t count = context_.max_rows * copies_;
  return {std::vector<float>(count), std::vector<float>(count), std::vector<float>(count * copies_)};
}

void HyperConnections::start(std::span<const BFloat16> embeddings, std::size_t rows, Stream& stream) const {
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t copy = 0; copy < copies_; ++copy) {
      std::copy_n(embeddings.data() + row * dim_, dim_, stream.x.data() + (row * copies_ + copy) * dim_);
      stream.pre[row * copies_ + copy] = copy == 0 ? 1.0f : 0.0f;
    }
  }
}

void HyperConnections::mixes(const Stream& stream, std::size_t rows, const HyperConnectionWeights& weights,
                             Mixes& out) {
  const std::size_t width = copies_ * dim_;
  const std::size_t count = weights.fn.n;
  const auto eps = static_cast<float>(context_.config.norm_eps);
  const Ops& ops = context_.compute.ops();
  ThreadPool& threads = context_.compute.threads();

  // One row leaves only the 24 projections to share out; several rows are shared out whole, some together,
  // since they share the weights.
  if (rows == 1) {
    threads.parallel_for(count, 4, [&](Range range) {
      ops.mix_projections(stream.x.data(), 1, weights.fn, eps, range, projections_.data());
    });
  } else {
    constexpr std::size_t kTogether = 4;
    const std::size_t grain = std::min(ceil_div(rows, threads.size()), kTogether);
    threads.parallel_for(rows, grain, [&](Range range) {
      ops.mix_projections(stream.x.data() + range.begin * width, range.size(), weights.fn, eps, {0, count},
                          projections_.data() + range.begin * count);
    });
  }
  for (std::size_t row = 0; row < rows; ++row)
    finish_mixes({projections_.data() + row * count, count}, weights.scale, weights.base, copies_,
                 context_.config.hc_sinkhorn_iters, static_cast<float>(context_.config.hc_eps),
                 {out.pre.data() + row * copies_, copies_}, {out.post.data() + row * copies_, copies_},
                 {out.comb.data() + row * copies_ * copies_, copies_ * copies_});
}

void HyperConnections::collapse(const Stream& stream, std::span<const float> pre, std::size_t rows,
                                std::span<BFloat16> out) const {
  context_.compute.threads().parallel_for(rows, 1, [&](Range range) {
    for (std::size_t row = range.begin; row < range.end; ++row)
      context_.compute.ops().collapse(stream.x.data() + row * copies_ * dim_, pre.data() + row * copies_,
                                      copies_, dim_, out.data() + row * dim_);
  });
}

void HyperConnections::collapse_and_normalize(const Stream& stream, std::span<const float> pre,
                                              std::size_t rows, std::span<const BFloat16> norm,
                                              std::span<BFloat16> out) const {
  collapse(stream, pre, rows, out);
  context_.compute.rms_norm(out.first(rows * dim_), norm, static_cast<float>(context_.config.norm_eps),
                            out.first(rows * dim_));
}

void HyperConnections::expand(std::span<const BFloat16> y, const Mixes& mixes, std::size_t rows,
                              Stream& stream) const {
  context_.compute.threads().parallel_for(rows, 1, [&](Range range) {
    for (std::size_t row = range.begin; row < range.end; ++row) {
      BFloat16* x = stream.x.data() + row * copies_ * dim_;
      context_.compute.ops().expand(y.data() + row * dim_, x, mixes.post.data() + row * copies_,
                                    mixes.comb.data() + row * copies_ * copies_, copies_, dim_, x);
    }
  });
}

void HyperConnections::mean(const Stream& stream, std::size_t row, BFloat16* out) const {
  const BFloat16* x = stream.x.data() + row * copies_ * dim_;
  for (std::size_t i = 0; i < dim_; ++i) {
    double sum = 0;
    for (std::size_t copy = 0; copy < copies_; ++copy)
      sum += static_cast<double>(to_float(x[copy * dim_ + i]));
    out[i] = to_bfloat16(sum / static_cast<double>(copies_));
  }
}

}  // namespace dsv41
