#include "runtime/backbone.h"

#include <algorithm>
#include <stdexcept>

namespace dsv41 {

Backbone::Backbone(const ModelContext& context, TokenMap token_map, Experts& experts, EngramRows& rows)
    : context_(context),
      hyper_connections_(context),
      attention_(context),
      moe_(context, experts),
      engram_(context, std::move(token_map), rows),
      plan_(context.config, context.config.n_mtp_layers > 0),
      stream_(hyper_connections_.make_stream()),
      mixes_(hyper_connections_.make_mixes()),
      x_(context.max_rows * context.config.dim),
      y_(context.max_rows * context.config.dim) {}

std::span<const float> Backbone::forward(const Step& step) {
  const ModelConfig& config = context_.config;
  if (step.rows() == 0 || step.rows() > context_.max_rows)
    throw std::invalid_argument("a step must have between one and max_rows rows");

  total_rows_ += step.rows();
  engram_.prepare(step);
  active_.assign(step);
  attention_.set_rows(active_);
  embed(step);
  main_hidden_.resize(step.rows() * config.dspark_target_layer_ids.size() * config.dim);
  for (std::uint32_t layer = 0; layer < config.n_layers && active_.rows() > 0; ++layer) {
    if (const auto table = config.engram_index(layer)) engram_.forward(active_, *table, stream_);
    collect_main_hidden(layer);
    block(step, layer);
    row_counts_.computed += active_.rows();
  }
  const std::span<const float> logits = head(step);
  for (const Segment& segment : step.segments)
    segment.sequence->advance(static_cast<std::uint32_t>(segment.rows));
  row_counts_.skipped = total_rows_ * config.n_layers - row_counts_.computed;
  return logits;
}

void Backbone::embed(const Step& step) {
  const std::size_t dim = context_.config.dim;
  for (std::size_t row = 0; row < step.rows(); ++row)
    std::copy_n(context_.weights.embed.values + std::size_t{step.tokens[row]} * dim, dim,
                x_.data() + row * dim);
  hyper_connections_.start(x_, step.rows(), stream_);
}

// Both halves take their mixes from the stream as it enters them; a half's own pre-mix belongs to the next
// half.
void Backbone::block(const Step& step, std::uint32_t index) {
  const BlockWeights& weights = context_.weights.blocks[index];
  const auto layer = static_cast<int>(index);
  const std::size_t dim = context_.config.dim, copies = context_.config.hc_mult;
  std::size_t rows = active_.rows();
  const auto x = [&] { return first(x_, rows * dim); };
  const auto y = [&] { return first(y_, rows * dim); };
  const auto stream = [&] { return first(stream_.x, rows * copies * dim); };
  const auto mix = [&](std::vector<float>& values) { return first(values, rows * copies); };

  context_.observe<BFloat16>("x_in", layer, stream());
  context_.observe<float>("pre_mix_in", layer, mix(stream_.pre));
  hyper_connections_.collapse_and_normalize(stream_, stream_.pre, rows, weights.attention_norm, x());
  context_.observe<BFloat16>("attn_in", layer, x());
  attention_.store_keys(active_, index, x());

  // Every row has left its keys. From here on only the rows whose output somebody needs go on.
  stored_ = active_;
  drop_rows(index);
  rows = active_.rows();
  hyper_connections_.mixes(stream_, rows, weights.hc_attention, mixes_);
  context_.observe<float>("attn_pre", layer, mix(mixes_.pre));
  context_.observe<float>("attn_post", layer, mix(mixes_.post));
  context_.observe<float>("attn_comb", layer, first(mixes_.comb, rows * copies * copies));
  attention_.attend(stored_, active_, index, x(), y());
  if (rows == 0) return;
  context_.observe<BFloat16>("attn_out", layer, y());
  hyper_connections_.expand(y(), mixes_, rows, stream_);
  std::swap(stream_.pre, mixes_.pre);
  context_.observe<BFloat16>("x_mid", layer, stream());

  hyper_connections_.mixes(stream_, rows, weights.hc_ffn, mixes_);
  hyper_connections_.collapse_and_normalize(stream_, stream_.pre, rows, weights.ffn_norm, x());
  context_.observe<BFloat16>("ffn_in", layer, x());
  moe_.forward(step.number, index, weights.moe, x(), rows, y());
  context_.observe<BFloat16>("ffn_out", layer, y());
  hyper_connections_.expand(y(), mixes_, rows, stream_);
  std::swap(stream_.pre, mixes_.pre);
  context_.observe<BFloat16>("x_out", layer, stream());
  context_.observe<float>("pre_mix_out", layer, mix(stream_.pre));
}

void Backbone::drop_rows(std::uint32_t layer) {
  plan_.narrow(stored_, layer, active_);
  if (active_.rows() == stored_.rows()) return;
  const std::size_t dim = context_.config.dim, copies = context_.config.hc_mult;
  for (std::size_t i = 0; i < active_.segments.size(); ++i) {
    const Segment& to = active_.segments[i];
    const Segment& from = stored_.segments[i];
    const std::size_t source = from.first_row + (from.rows - to.rows);
    if (source == to.first_row) continue;
    const auto move = [&](auto& values, std::size_t width) {  // rows only ever move towards the front
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(source * width), to.rows * width,
                  values.begin() + static_cast<std::ptrdiff_t>(to.first_row * width));
    };
    move(stream_.x, copies * dim);
    move(stream_.pre, copies);
    move(x_, dim);
  }
  attention_.set_rows(active_);
}

void Backbone::collect_main_hidden(std::uint32_t layer) {
  const auto& targets = context_.config.dspark_target_layer_ids;
  const auto found = std::find(targets.begin(), targets.end(), layer);
  if (found == targets.end()) return;
  const std::size_t dim = context_.config.dim, width = targets.size() * dim;
  BFloat16* column = main_hidden_.data() + static_cast<std::size_t>(found - targets.begin()) * dim;
  for (std::size_t row = 0; row < active_.rows(); ++row)
    hyper_connections_.mean(stream_, row, column + active_.origins[row] * width);
  if (found + 1 == targets.end()) context_.observe<BFloat16>("main_hidden", Observer::kNoLayer, main_hidden_);
}

std::span<const float> Backbone::head(const Step& step) {
  const ModelConfig& config = context_.config;
  const std::size_t dim = config.dim, copies = config.hc_mult, wanted = step.logit_rows.size();
  if (wanted == 0) return {};
  // Only the wanted rows go on: they move to the front of the stream, which nobody needs any more.
  std::size_t row = 0;
  for (std::size_t i = 0; i < wanted; ++i) {
    while (active_.origins[row] != step.logit_rows[i]) ++row;
    if (row == i) continue;
    std::copy_n(stream_.x.data() + row * copies * dim, copies * dim, stream_.x.data() + i * copies * dim);
    std::copy_n(stream_.pre.data() + row * copies, copies, stream_.pre.data() + i * copies);
  }
  hyper_connections_.collapse(stream_, stream_.pre, wanted, x_);
  context_.observe<BFloat16>("final.collapsed", Observer::kNoLayer, first(x_, wanted * dim));
  context_.compute.rms_norm(first(x_, wanted * dim), context_.weights.norm,
                            static_cast<float>(config.norm_eps), x_);
  if (logits_.size() < wanted * config.vocab_size) logits_.resize(wanted * config.vocab_size);
  const auto logits = first(logits_, wanted * config.vocab_size);
  context_.compute.linear_wide(first(x_, wanted * dim), context_.weights.head, logits);
  return logits;
}

}  // namespace dsv41
