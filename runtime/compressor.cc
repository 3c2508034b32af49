#include "runtime/compressor.h"

#include <algorithm>

#include "runtime/rope_table.h"

namespace dsv41 {
namespace {

/// Groups of `ratio` tokens that a segment completes: the first one, and how many.
struct Completed {
  std::size_t first, count;
};
Completed completed_groups(const Segment& segment, std::uint32_t ratio) {
  const std::size_t first = segment.start / ratio;
  return {first, (segment.start + segment.rows) / ratio - first};
}

std::uint32_t largest_ratio(const ModelConfig& config) {
  return *std::max_element(config.compress_ratios.begin(), config.compress_ratios.end());
}

}  // namespace

Compressor::Compressor(const ModelContext& context) : context_(context) {
  const ModelConfig& config = context.config;
  const std::size_t dim = config.head_dim;
  if (config.kv_source_layers.empty()) return;
  frequencies_ = rope_frequencies(compressed_rope(config));
  u_.resize(context.max_rows * dim);
  z_.resize(context.max_rows * dim);
  members_u_.resize(largest_ratio(config) * dim);
  members_z_.resize(largest_ratio(config) * dim);
  latents_.resize(context.max_rows * dim);
  keys_.resize(context.max_rows * config.index_head_dim);
  codes_.resize(dim / 2);
  scales_.resize(dim / kGroupBlock);
  key_codes_.resize(config.index_head_dim / 2);
  key_scales_.resize(config.index_head_dim / kBlock);
  cosine_.resize(frequencies_.size());
  sine_.resize(frequencies_.size());
}

void Compressor::append_groups(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x) {
  const CompressorWeights& weights = *context_.weights.blocks[layer].attention.compressor;
  const std::size_t dim = context_.config.head_dim;
  const auto eps = static_cast<float>(context_.config.norm_eps);
  const std::uint32_t ratio = context_.config.compress_ratios[layer];

  if (ratio == 1) {
    context_.compute.linear(x, weights.wkv, first(latents_, rows.rows() * dim));
  } else {
    context_.compute.linear_wide(x, weights.wkv, first(u_, rows.rows() * dim));
    context_.compute.linear_wide(x, *weights.wgate, first(z_, rows.rows() * dim));
    pool_pairs(rows, layer);
  }

  std::size_t groups = 0;
  for (const Segment& segment : rows.segments) groups += completed_groups(segment, ratio).count;
  if (groups == 0) return;
  const auto latents = first(latents_, groups * dim);
  const auto keys = first(keys_, groups * context_.config.index_head_dim);
  context_.compute.rms_norm(latents, weights.norm, eps, latents);
  context_.compute.linear(latents, weights.index_wk, keys);
  context_.compute.rms_norm(keys, weights.index_k_norm, eps, keys);
  store(rows, layer);
}

void Compressor::pool_pairs(const RowSet& rows, std::uint32_t layer) {
  const std::size_t dim = context_.config.head_dim;
  const std::uint32_t ratio = context_.config.compress_ratios[layer];
  std::size_t group_row = 0;
  for (const Segment& segment : rows.segments) {
    CompressedCache& cache = segment.sequence->compressed(layer);
    const Completed completed = completed_groups(segment, ratio);
    for (std::size_t group = completed.first; group < completed.first + completed.count;
         ++group, ++group_row) {
      for (std::uint32_t member = 0; member < ratio; ++member) {
        const auto position = static_cast<std::uint32_t>(group * ratio + member);
        const std::size_t row =
            segment.first_row + position - segment.start;  // meaningful for tokens of this step
        const bool earlier = position < segment.start;
        std::copy_n(earlier ? cache.pending_u(position).data() : u_.data() + row * dim, dim,
                    members_u_.data() + member * dim);
        std::copy_n(earlier ? cache.pending_z(position).data() : z_.data() + row * dim, dim,
                    members_z_.data() + member * dim);
      }
      context_.compute.ops().compress_group(members_u_.data(), members_z_.data(), ratio, dim,
                                            latents_.data() + group_row * dim);
    }
    // The newest tokens stay: an incomplete group needs them, and so does a rollback into a complete one.
    const std::size_t kept = std::min<std::size_t>(segment.rows, cache.pending_tokens());
    for (std::size_t row = segment.rows - kept; row < segment.rows; ++row) {
      const auto position = static_cast<std::uint32_t>(segment.start + row);
      std::copy_n(u_.data() + (segment.first_row + row) * dim, dim, cache.pending_u(position).data());
      std::copy_n(z_.data() + (segment.first_row + row) * dim, dim, cache.pending_z(position).data());
    }
  }
}

void Compressor::store(const RowSet& rows, std::uint32_t layer) {
  const std::size_t dim = context_.config.head_dim, index_dim = context_.config.index_head_dim;
  const std::size_t pairs = frequencies_.size();
  const std::uint32_t ratio = context_.config.compress_ratios[layer];
  const Ops& ops = context_.compute.ops();
  std::size_t row = 0;
  for (const Segment& segment : rows.segments) {
    CompressedCache& cache = segment.sequence->compressed(layer);
    const Completed completed = completed_groups(segment, ratio);
    for (std::size_t group = completed.first; group < completed.first + completed.count; ++group, ++row) {
      BFloat16* latent = latents_.data() + row * dim;
      BFloat16* key = keys_.data() + row * index_dim;
      rope_row(frequencies_, static_cast<std::uint32_t>(group * ratio), cosine_, sine_);
      ops.rotate(latent, 1, dim, pairs, cosine_.data(), sine_.data(), false);
      ops.rotate(key, 1, index_dim, pairs, cosine_.data(), sine_.data(), false);
      ops.quantize_group(latent, 1, dim, codes_.data(), scales_.data());
      ops.quantize_index(key, 1, index_dim, key_codes_.data(), key_scales_.data());
      cache.append(codes_.data(), scales_.data(), key_codes_.data(), key_scales_.data());
    }
  }
}

}  // namespace dsv41
