#include "runtime/attention.h"

#include <algorithm>
#include <cmath>

namespace dsv41 {

Attention::Attention(const ModelContext& context)
    : context_(context),
      heads_(context.config.n_heads),
      dim_(context.config.head_dim),
      window_(context.config.window_size),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim_)))),
      window_rope_(window_rope(context.config), context.max_rows),
      compressed_rope_(compressed_rope(context.config), context.max_rows),
      compressor_(context),
      selection_(context) {
  const ModelConfig& config = context.config;
  const std::size_t rows = context.max_rows;
  const std::size_t group_width = std::size_t{config.o_groups} * config.o_lora_rank;
  const std::size_t widest = std::max<std::size_t>(config.dim, group_width);
  x_codes_.resize(rows * widest);
  x_scales_.resize(rows * widest / kBlock);
  qr_.resize(rows * config.q_lora_rank);
  qr_codes_.resize(rows * config.q_lora_rank);
  qr_scales_.resize(rows * config.q_lora_rank / kBlock);
  q_.resize(rows * heads_ * dim_);
  kv_.resize(rows * dim_);
  kv_codes_.resize(rows * dim_);
  kv_scales_.resize(rows * dim_ / kBlock);
  window_values_.resize((window_ + rows) * dim_);
  group_values_.resize(std::size_t{config.index_topk} * dim_);
  slots_.resize(window_ + std::max(config.index_topk, config.dspark_block_size));
  heads_out_.resize(rows * heads_ * dim_);
  groups_out_.resize(rows * group_width);
}

void Attention::prepare(const Step& step) {
  window_rope_.fill(step.positions);
  compressed_rope_.fill(step.positions);
}

void Attention::store_keys(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x) {
  PhaseTimer timer(context_.recorder, Phase::Attention);
  const ModelConfig& config = context_.config;
  const AttentionWeights& weights = context_.weights.block(layer).attention;
  const RopeTable& angles = rope(layer);
  const std::size_t count = rows.rows();
  const auto kv = first(kv_, count * dim_);

  context_.compute.quantize_rows(x, config.dim, x_codes_, x_scales_);
  context_.compute.linear(QuantizedRows{x_codes_.data(), x_scales_.data(), count, config.dim}, weights.wkv,
                          kv);
  context_.compute.rms_norm(kv, weights.kv_norm, static_cast<float>(config.norm_eps), kv);
  for (std::size_t row = 0; row < count; ++row)
    context_.compute.ops().rotate(kv.data() + row * dim_, 1, dim_, angles.pairs(),
                                  angles.cosine(rows.origins[row]), angles.sine(rows.origins[row]), false);
  context_.compute.quantize_rows(kv, dim_, kv_codes_, kv_scales_);
  if (weights.compressor) compressor_.append_groups(rows, layer, x);
}

void Attention::attend(const RowSet& stored, const RowSet& rows, std::uint32_t layer,
                       std::span<const BFloat16> x, std::span<BFloat16> out) {
  PhaseTimer timer(context_.recorder, Phase::Attention);
  if (rows.rows() > 0) attend_rows(stored, rows, layer, x, out);
  for (const Segment& segment : stored.segments) store_window(segment, layer);
}

void Attention::attend_rows(const RowSet& stored, const RowSet& rows, std::uint32_t layer,
                            std::span<const BFloat16> x, std::span<BFloat16> out) {
  const ModelConfig& config = context_.config;
  const AttentionWeights& weights = context_.weights.block(layer).attention;
  const RopeTable& angles = rope(layer);
  const std::size_t count = rows.rows();

  // The codes of store_keys() are still there unless rows have been left out since.
  if (count != stored.rows()) context_.compute.quantize_rows(x, config.dim, x_codes_, x_scales_);
  queries(rows, weights, angles);
  context_.observe<BFloat16>("attn.q", static_cast<int>(layer), first(q_, count * heads_ * dim_));
  if (weights.index_query)
    selection_.select(rows, layer, x, {qr_codes_.data(), qr_scales_.data(), count, config.q_lora_rank},
                      angles);
  for (std::size_t i = 0; i < rows.segments.size(); ++i)
    attend_segment(stored.segments[i], rows.segments[i], rows.origins, layer);
  context_.observe<BFloat16>("attn.core_out", static_cast<int>(layer),
                             first(heads_out_, count * heads_ * dim_));

  rotate_back(rows, angles);
  project(count, weights, out);
}

void Attention::rotate_back(const RowSet& rows, const RopeTable& angles) {
  context_.compute.threads().parallel_for(rows.rows(), 1, [&](Range range) {
    for (std::size_t row = range.begin; row < range.end; ++row)
      context_.compute.ops().rotate(heads_out_.data() + row * heads_ * dim_, heads_, dim_, angles.pairs(),
                                    angles.cosine(rows.origins[row]), angles.sine(rows.origins[row]), true);
  });
}

void Attention::queries(const RowSet& rows, const AttentionWeights& weights, const RopeTable& angles) {
  const std::size_t rank = context_.config.q_lora_rank, count = rows.rows();
  const auto qr = first(qr_, count * rank);
  const auto q = first(q_, count * heads_ * dim_);
  context_.compute.linear(QuantizedRows{x_codes_.data(), x_scales_.data(), count, context_.config.dim},
                          weights.wq_a, qr);
  context_.compute.rms_norm(qr, weights.q_norm, static_cast<float>(context_.config.norm_eps), qr);
  context_.compute.quantize_rows(qr, rank, qr_codes_, qr_scales_);
  context_.compute.linear(QuantizedRows{qr_codes_.data(), qr_scales_.data(), count, rank}, weights.wq_b, q);
  context_.compute.threads().parallel_for(count, 1, [&](Range range) {
    for (std::size_t row = range.begin; row < range.end; ++row)
      context_.compute.ops().rotate(q.data() + row * heads_ * dim_, heads_, dim_, angles.pairs(),
                                    angles.cosine(rows.origins[row]), angles.sine(rows.origins[row]), false);
  });
}

// Entry i is position segment.start - (W-1) + i, up to the last row that comes in; those before the
// sequence's first token stay untouched and unused.
void Attention::decode_window(const Segment& stored, const Segment& segment, std::uint32_t layer) {
  const Ops& ops = context_.compute.ops();
  const WindowCache& cache = segment.sequence->window(layer);
  context_.compute.threads().parallel_for(window_ - 1 + segment.rows, 64, [&](Range range) {
    for (std::size_t i = range.begin; i < range.end; ++i) {
      if (segment.start + i < window_ - 1) continue;
      const auto position = static_cast<std::uint32_t>(segment.start + i - (window_ - 1));
      float* value = window_values_.data() + i * dim_;
      if (position >= stored.start) {
        const std::size_t row = stored.first_row + position - stored.start;
        ops.dequantize_window(kv_codes_.data() + row * dim_, kv_scales_.data() + row * dim_ / kBlock, dim_,
                              value);
      } else {
        const auto entry = cache.entry(position);
        ops.dequantize_window(entry.codes, entry.scales, dim_, value);
      }
    }
  });
}

void Attention::store_window(const Segment& stored, std::uint32_t layer) {
  WindowCache& cache = stored.sequence->window(layer);
  const std::size_t kept = std::min(stored.rows, cache.positions());
  for (std::size_t i = stored.rows - kept; i < stored.rows; ++i) {
    const std::size_t row = stored.first_row + i;
    cache.store(static_cast<std::uint32_t>(stored.start + i), kv_codes_.data() + row * dim_,
                kv_scales_.data() + row * dim_ / kBlock);
  }
}

void Attention::attend_segment(const Segment& stored, const Segment& segment,
                               std::span<const std::uint32_t> origins, std::uint32_t layer) {
  if (segment.rows == 0) return;
  const ModelConfig& config = context_.config;
  const Ops& ops = context_.compute.ops();
  decode_window(stored, segment, layer);

  for (std::size_t i = 0; i < segment.rows; ++i) {
    const std::size_t row = segment.first_row + i;
    const std::size_t position = segment.start + i;
    std::size_t slots = 0;
    const std::size_t seen = std::min(window_, position + 1);
    for (std::size_t back = seen; back-- > 0;)
      slots_[slots++] = window_values_.data() + (window_ - 1 + i - back) * dim_;

    if (config.compress_ratios[layer] > 0) {
      const CompressedCache& cache = segment.sequence->compressed(config.kv_source(layer));
      const std::span<const std::int32_t> groups = selection_.selected(origins[row]);
      context_.compute.threads().parallel_for(groups.size(), 64, [&](Range range) {
        for (std::size_t g = range.begin; g < range.end; ++g) {
          const auto group = static_cast<std::size_t>(groups[g]);
          ops.dequantize_group(cache.codes(group), cache.scales(group), dim_,
                               group_values_.data() + g * dim_);
        }
      });
      for (std::size_t g = 0; g < groups.size(); ++g) slots_[slots++] = group_values_.data() + g * dim_;
    }
    attend_heads(row, slots, layer);
  }
}

void Attention::attend_heads(std::size_t row, std::size_t slots, std::uint32_t layer) {
  const std::span<const float> sink = context_.weights.block(layer).attention.sink;
  // Every range widens the keys anew: few ranges for few threads.
  const std::size_t grain = std::clamp<std::size_t>(heads_ / (2 * context_.compute.threads().size()), 4, 16);
  context_.compute.threads().parallel_for(heads_, grain, [&](Range range) {
    const std::size_t offset = (row * heads_ + range.begin) * dim_;
    context_.compute.ops().attention(q_.data() + offset, slots_.data(), slots, sink.data() + range.begin,
                                     scale_, range.size(), dim_, heads_out_.data() + offset);
  });
}

void Attention::store_main(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> main_x) {
  store_keys(rows, layer, main_x);
  for (const Segment& segment : rows.segments) store_window(segment, layer);
}

void Attention::attend_block(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x,
                             std::span<BFloat16> out) {
  PhaseTimer timer(context_.recorder, Phase::Attention);
  const AttentionWeights& weights = context_.weights.block(layer).attention;
  const Ops& ops = context_.compute.ops();
  store_keys(rows, layer, x);
  queries(rows, weights, rope(layer));
  for (const Segment& segment : rows.segments) {
    const WindowCache& cache = segment.sequence->window(layer);
    const std::size_t seen = std::min<std::size_t>(window_, segment.start);
    for (std::size_t slot = 0; slot < seen + segment.rows; ++slot) {
      float* value = window_values_.data() + slot * dim_;
      slots_[slot] = value;
      if (slot < seen) {
        const auto entry = cache.entry(static_cast<std::uint32_t>(segment.start - seen + slot));
        ops.dequantize_window(entry.codes, entry.scales, dim_, value);
      } else {
        const std::size_t row = segment.first_row + slot - seen;
        ops.dequantize_window(kv_codes_.data() + row * dim_, kv_scales_.data() + row * dim_ / kBlock, dim_,
                              value);
      }
    }
    for (std::size_t i = 0; i < segment.rows; ++i)
      attend_heads(segment.first_row + i, seen + segment.rows, layer);
  }
  rotate_back(rows, rope(layer));
  project(rows.rows(), weights, out);
}

// Group g maps the outputs of its heads, flattened, to O features; wo_a takes unquantized activations.
void Attention::project(std::size_t rows, const AttentionWeights& weights, std::span<BFloat16> out) {
  const ModelConfig& config = context_.config;
  const std::size_t rank = config.o_lora_rank, width = config.o_groups * rank, group_k = weights.wo_a.k;
  context_.compute.threads().parallel_for(width, 16, [&](Range range) {
    while (range.begin < range.end) {
      const std::size_t group = range.begin / rank;
      const Range part{range.begin, std::min(range.end, (group + 1) * rank)};
      context_.compute.ops().linear_fp8_unquantized(heads_out_.data() + group * group_k, rows, heads_ * dim_,
                                                    weights.wo_a, part, groups_out_.data() + part.begin,
                                                    width);
      range.begin = part.end;
    }
  });
  context_.compute.quantize_rows(first(groups_out_, rows * width), width, x_codes_, x_scales_);
  context_.compute.linear(QuantizedRows{x_codes_.data(), x_scales_.data(), rows, width}, weights.wo_b, out);
}

}  // namespace dsv41
