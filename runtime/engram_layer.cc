#include "runtime/engram_layer.h"

#include <fmt/format.h>

#include <algorithm>

#include "loader/error.h"

namespace dsv41 {

EngramLayers::EngramLayers(const ModelContext& context, TokenMap map, EngramRows& rows)
    : context_(context), map_(std::move(map)), rows_source_(rows), layers_(hash_layout(context.config)) {
  const ModelConfig& config = context.config;
  if (!layers_.empty() && map_.size != config.engram_compressed_vocab_size)
    throw CheckpointError(
        fmt::format("the tokenizer gives {} compressed tokens, but engram_compressed_vocab_size is {}: "
                    "tokenizer.json and config.json do not belong together",
                    map_.size, config.engram_compressed_vocab_size));
  if (layers_.empty()) return;
  const std::size_t width = std::size_t{config.n_hash_columns()} * config.engram_head_dim;
  ids_.resize(layers_.size() * context.max_rows * config.n_hash_columns());
  recent_.resize(config.engram_max_ngram_size);
  rows_.resize(context.max_rows * width);
  codes_.resize(context.max_rows * width);
  scales_.resize(context.max_rows * width / kBlock);
  kv_.resize(context.max_rows * (config.hc_mult + 1) * config.dim);
  gates_.resize(context.max_rows * config.hc_mult);
}

void EngramLayers::prepare(const Step& step) {
  if (layers_.empty()) return;
  step_rows_ = step.rows();
  const std::size_t columns = context_.config.n_hash_columns();
  const std::uint32_t pad = map_.compressed[context_.config.engram_pad_id];
  const std::size_t count = step.rows() * columns;
  for (const Segment& segment : step.segments) {
    for (std::size_t row = segment.first_row; row < segment.first_row + segment.rows; ++row) {
      const std::uint32_t position = step.positions[row];
      segment.sequence->remember(position, {map_.compressed[step.tokens[row]], false});
      // The sequence keeps only the newest tokens, so all tables hash a token while its history is there.
      const auto recent = std::span(recent_).first(segment.sequence->recent(position, recent_));
      for (std::size_t table = 0; table < layers_.size(); ++table)
        hash_row_ids(layers_[table], recent, pad, {ids_.data() + table * count + row * columns, columns});
    }
  }
  for (std::size_t table = 0; table < layers_.size(); ++table)
    rows_source_.request(table, std::span(ids_).subspan(table * count, count));
  if (context_.recorder) {
    const EngramCounters now = rows_source_.counters();
    context_.recorder->engram(now.asked - counted_.asked, now.distinct - counted_.distinct,
                              now.cached - counted_.cached, now.read_bytes - counted_.read_bytes);
    counted_ = now;
  }
}

void EngramLayers::forward(const RowSet& active, std::size_t table, Stream& stream) {
  const ModelConfig& config = context_.config;
  const EngramWeights& weights = context_.weights.engram[table];
  const std::uint32_t layer = config.engram_layer_ids[table];
  const std::size_t rows = active.rows(), dim = config.dim, copies = config.hc_mult;
  const std::size_t width = std::size_t{config.n_hash_columns()} * config.engram_head_dim;
  const auto gathered = first(rows_, rows * width);
  const auto kv = first(kv_, rows * (copies + 1) * dim);

  PhaseTimer timer(context_.recorder, Phase::Engram);
  {
    PhaseTimer gather(context_.recorder, Phase::EngramGather);
    rows_source_.collect(table, first(rows_, step_rows_ * width));
  }
  for (std::size_t row = 0; row < rows; ++row)  // rows that have been left out since move aside
    if (active.origins[row] != row)
      std::copy_n(rows_.data() + active.origins[row] * width, width, rows_.data() + row * width);
  context_.observe<BFloat16>("engram.rows", static_cast<int>(layer), gathered);
  context_.compute.quantize_rows(gathered, width, codes_, scales_);
  context_.compute.linear(QuantizedRows{codes_.data(), scales_.data(), rows, width}, weights.wkv, kv);
  context_.observe<BFloat16>("engram.kv", static_cast<int>(layer), kv);
  context_.compute.threads().parallel_for(rows, 1, [&](Range range) {
    for (std::size_t row = range.begin; row < range.end; ++row) {
      const BFloat16* keys = kv.data() + row * (copies + 1) * dim;
      context_.compute.ops().engram_gate(stream.x.data() + row * copies * dim, keys, keys + copies * dim,
                                         weights.q_weight.data(), weights.k_weight.data(),
                                         static_cast<float>(config.norm_eps), copies, dim,
                                         gates_.data() + row * copies);
    }
  });
  context_.observe<float>("engram.gate", static_cast<int>(layer), first(gates_, rows * copies));
}

}  // namespace dsv41
