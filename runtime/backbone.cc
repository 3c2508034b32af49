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
      hidden_(context.max_rows * context.config.dim) {}

std::span<const float> Backbone::forward(const Step& step) {
  const ModelConfig& config = context_.config;
  if (step.rows() == 0 || step.rows() > context_.max_rows)
    throw std::invalid_argument("a step must have between one and max_rows rows");

  {
    PhaseTimer timer(context_.recorder, Phase::EngramHash);
    engram_.prepare(step);
  }
  attention_.prepare(step);
  main_hidden_.resize(step.rows() * config.dspark_target_layer_ids.size() * config.dim);
  const bool halves = overlap_.wanted(step.rows());
  const std::span<Lane> lanes = make_lanes(step, halves ? kCallsInFlight : 1);
  for (Lane& lane : lanes) embed(step, lane);
  const std::uint64_t computed_before = row_counts_.computed, started_at = monotonic_ns();
  run_layers(step, lanes);
  overlap_.step_took(step.rows(), halves, row_counts_.computed - computed_before,
                     static_cast<double>(monotonic_ns() - started_at) * 1e-9);
  halved_steps_ += halves;
  const std::span<const float> logits = head(step, lanes);

  for (const Segment& segment : step.segments)
    segment.sequence->advance(static_cast<std::uint32_t>(segment.rows));
  total_rows_ += step.rows();
  row_counts_.skipped = total_rows_ * config.n_layers - row_counts_.computed;
  return logits;
}

void Backbone::run_layers(const Step& step, std::span<Lane> lanes) {
  const std::uint32_t layers = context_.config.n_layers;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    for (Lane& lane : lanes) {
      if (layer > 0) finish_block(layer - 1, lane);
      begin_block(step, layer, lane);
    }
  }
  for (Lane& lane : lanes) finish_block(layers - 1, lane);
}

std::span<Backbone::Lane> Backbone::make_lanes(const Step& step, std::size_t count) {
  const std::size_t rows = step.rows();
  for (std::size_t i = 0; i < count; ++i) {
    Lane& lane = lanes_[i];
    if (lane.x.empty()) {
      lane.stream = hyper_connections_.make_stream();
      lane.mixes = hyper_connections_.make_mixes();
      lane.x.resize(context_.max_rows * context_.config.dim);
      lane.y.resize(context_.max_rows * context_.config.dim);
      lane.moe = moe_.make_call();
    }
    lane.active.assign(step, rows * i / count, rows * (i + 1) / count);
  }
  return std::span(lanes_).first(count);
}

void Backbone::embed(const Step& step, Lane& lane) {
  PhaseTimer timer(context_.recorder, Phase::Embed);
  const std::size_t dim = context_.config.dim;
  for (std::size_t row = 0; row < lane.active.rows(); ++row)
    std::copy_n(context_.weights.embed.values + std::size_t{step.tokens[lane.active.origins[row]]} * dim, dim,
                lane.x.data() + row * dim);
  hyper_connections_.start(lane.x, lane.active.rows(), lane.stream);
}

// Both halves take their mixes from the stream as it enters them; a half's own pre-mix belongs to the next
// half.
void Backbone::begin_block(const Step& step, std::uint32_t index, Lane& lane) {
  if (lane.active.rows() == 0) return;
  BlockTimer in_block(context_.recorder, index);
  PhaseTimer timer(context_.recorder, Phase::HyperConnections);  // what no part below takes for itself
  const BlockWeights& weights = context_.weights.blocks[index];
  const auto layer = static_cast<int>(index);
  const std::size_t dim = context_.config.dim, copies = context_.config.hc_mult;
  std::size_t rows = lane.active.rows();
  const auto x = [&] { return first(lane.x, rows * dim); };
  const auto y = [&] { return first(lane.y, rows * dim); };
  const auto stream = [&] { return first(lane.stream.x, rows * copies * dim); };
  const auto mix = [&](std::vector<float>& values) { return first(values, rows * copies); };

  if (const auto table = context_.config.engram_index(index))
    engram_.forward(lane.active, *table, lane.stream);
  collect_main_hidden(index, lane);

  context_.observe<BFloat16>("x_in", layer, stream());
  context_.observe<float>("pre_mix_in", layer, mix(lane.stream.pre));
  hyper_connections_.collapse_and_normalize(lane.stream, lane.stream.pre, rows, weights.attention_norm, x());
  context_.observe<BFloat16>("attn_in", layer, x());
  attention_.store_keys(lane.active, index, x());

  // Every row has left its keys. From here on only the rows whose output somebody needs go on.
  drop_rows(index, lane);
  rows = lane.active.rows();
  row_counts_.computed += rows;
  hyper_connections_.mixes(lane.stream, rows, weights.hc_attention, lane.mixes);
  context_.observe<float>("attn_pre", layer, mix(lane.mixes.pre));
  context_.observe<float>("attn_post", layer, mix(lane.mixes.post));
  context_.observe<float>("attn_comb", layer, first(lane.mixes.comb, rows * copies * copies));
  attention_.attend(lane.stored, lane.active, index, x(), y());
  if (rows == 0) return;
  context_.observe<BFloat16>("attn_out", layer, y());
  hyper_connections_.expand(y(), lane.mixes, rows, lane.stream);
  std::swap(lane.stream.pre, lane.mixes.pre);
  context_.observe<BFloat16>("x_mid", layer, stream());

  hyper_connections_.mixes(lane.stream, rows, weights.hc_ffn, lane.mixes);
  hyper_connections_.collapse_and_normalize(lane.stream, lane.stream.pre, rows, weights.ffn_norm, x());
  context_.observe<BFloat16>("ffn_in", layer, x());
  moe_.begin(step.number, index, weights.moe, x(), rows, lane.moe, lane.active.origins);
}

void Backbone::finish_block(std::uint32_t index, Lane& lane) {
  const std::size_t rows = lane.active.rows(), dim = context_.config.dim, copies = context_.config.hc_mult;
  if (rows == 0) return;
  BlockTimer in_block(context_.recorder, index);
  PhaseTimer timer(context_.recorder, Phase::HyperConnections);
  const auto layer = static_cast<int>(index);
  const auto y = first(lane.y, rows * dim);

  moe_.finish(index, lane.moe, y);
  context_.observe<BFloat16>("ffn_out", layer, y);
  hyper_connections_.expand(y, lane.mixes, rows, lane.stream);
  std::swap(lane.stream.pre, lane.mixes.pre);
  context_.observe<BFloat16>("x_out", layer, first(lane.stream.x, rows * copies * dim));
  context_.observe<float>("pre_mix_out", layer, first(lane.stream.pre, rows * copies));
}

void Backbone::drop_rows(std::uint32_t layer, Lane& lane) {
  lane.stored = lane.active;
  plan_.narrow(lane.stored, layer, lane.active);
  if (lane.active.rows() == lane.stored.rows()) return;
  const std::size_t dim = context_.config.dim, copies = context_.config.hc_mult;
  for (std::size_t i = 0; i < lane.active.segments.size(); ++i) {
    const Segment& to = lane.active.segments[i];
    const Segment& from = lane.stored.segments[i];
    const std::size_t source = from.first_row + (from.rows - to.rows);
    if (source == to.first_row) continue;
    const auto move = [&](auto& values, std::size_t width) {  // rows only ever move towards the front
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(source * width), to.rows * width,
                  values.begin() + static_cast<std::ptrdiff_t>(to.first_row * width));
    };
    move(lane.stream.x, copies * dim);
    move(lane.stream.pre, copies);
    move(lane.x, dim);
  }
}

void Backbone::collect_main_hidden(std::uint32_t layer, const Lane& lane) {
  const auto& targets = context_.config.dspark_target_layer_ids;
  const auto found = std::find(targets.begin(), targets.end(), layer);
  if (found == targets.end()) return;
  const std::size_t dim = context_.config.dim, width = targets.size() * dim;
  BFloat16* column = main_hidden_.data() + static_cast<std::size_t>(found - targets.begin()) * dim;
  for (std::size_t row = 0; row < lane.active.rows(); ++row)
    hyper_connections_.mean(lane.stream, row, column + lane.active.origins[row] * width);
  if (found + 1 == targets.end()) context_.observe<BFloat16>("main_hidden", Observer::kNoLayer, main_hidden_);
}

std::span<const float> Backbone::head(const Step& step, std::span<const Lane> lanes) {
  PhaseTimer timer(context_.recorder, Phase::Head);
  const ModelConfig& config = context_.config;
  const std::size_t dim = config.dim, copies = config.hc_mult, wanted = step.logit_rows.size();
  if (wanted == 0) return {};
  const auto hidden = first(hidden_, wanted * dim);
  std::size_t i = 0;
  for (const Lane& lane : lanes)
    for (std::size_t row = 0; row < lane.active.rows() && i < wanted; ++row)
      if (lane.active.origins[row] == step.logit_rows[i])
        context_.compute.ops().collapse(lane.stream.x.data() + row * copies * dim,
                                        lane.stream.pre.data() + row * copies, copies, dim,
                                        hidden.data() + i++ * dim);
  context_.observe<BFloat16>("final.collapsed", Observer::kNoLayer, hidden);
  context_.compute.rms_norm(hidden, context_.weights.norm, static_cast<float>(config.norm_eps), hidden);
  if (logits_.size() < wanted * config.vocab_size) logits_.resize(wanted * config.vocab_size);
  const auto logits = first(logits_, wanted * config.vocab_size);
  context_.compute.linear_wide(hidden, context_.weights.head, logits);
  return logits;
}

}  // namespace dsv41
