#include "runtime/drafter.h"

#include <algorithm>

namespace dsv41 {
namespace {

ModelContext draft_context(const ModelContext& model, std::size_t rows) {
  return {model.config, model.weights, model.compute, rows, model.observer, model.recorder};
}

}  // namespace

Drafter::Drafter(const ModelContext& model, Experts& experts, std::size_t sequences)
    : context_(draft_context(model, sequences * model.config.dspark_block_size)),
      weights_(*model.weights.draft),
      block_size_(model.config.dspark_block_size),
      hyper_connections_(context_),
      attention_(context_),
      seeding_(model),
      moe_(context_, experts),
      moe_call_(moe_.make_call()),
      stream_(hyper_connections_.make_stream()),
      mixes_(hyper_connections_.make_mixes()) {
  const ModelConfig& config = model.config;
  const std::size_t width = config.dspark_target_layer_ids.size() * config.dim, rows = context_.max_rows;
  main_rows_.resize(model.max_rows * width);
  main_codes_.resize(model.max_rows * width);
  main_scales_.resize(model.max_rows * width / kBlock);
  main_x_.resize(model.max_rows * config.dim);
  x_.resize(rows * config.dim);
  y_.resize(rows * config.dim);
  collapsed_.resize(rows * config.dim);
  logits_.resize(rows * config.vocab_size);
  markov_embeds_.resize(sequences * config.dspark_markov_rank);
  markov_logits_.resize(sequences * config.vocab_size);
  confidence_input_.resize(config.dim + config.dspark_markov_rank);
  tokens_.resize(rows);
  confidence_.resize(rows);
}

// Only tokens inside the window of what comes next are kept; rows that were left out of the backbone are
// never among them.
void Drafter::seed(const Step& step, std::span<const BFloat16> main_hidden) {
  const ModelConfig& config = context_.config;
  const std::size_t width = config.dspark_target_layer_ids.size() * config.dim;
  seeded_.assign(step, 0, step.rows());
  std::size_t count = 0;
  for (Segment& segment : seeded_.segments) {
    const std::uint32_t margin = config.window_size - 1;
    const std::uint32_t from = segment.wanted_from > margin ? segment.wanted_from - margin : 0;
    const std::size_t skipped =
        std::min<std::size_t>(segment.rows, from > segment.start ? from - segment.start : 0);
    for (std::size_t row = segment.first_row + skipped; row < segment.first_row + segment.rows;
         ++row, ++count) {
      std::copy_n(main_hidden.data() + row * width, width, main_rows_.data() + count * width);
      seeded_.origins[count] = static_cast<std::uint32_t>(row);
      seeded_.positions[count] = step.positions[row];
    }
    segment.rows -= skipped;
    segment.first_row = count - segment.rows;
    segment.start += static_cast<std::uint32_t>(skipped);
  }
  seeded_.origins.resize(count);
  seeded_.positions.resize(count);
  if (count == 0) return;

  const auto main_x = first(main_x_, count * config.dim);
  context_.compute.quantize_rows(first(main_rows_, count * width), width, main_codes_, main_scales_);
  context_.compute.linear(QuantizedRows{main_codes_.data(), main_scales_.data(), count, width},
                          weights_.main_proj, main_x);
  context_.compute.rms_norm(main_x, weights_.main_norm, static_cast<float>(config.norm_eps), main_x);
  seeding_.prepare(step);
  for (std::uint32_t stage = 0; stage < config.n_mtp_layers; ++stage)
    seeding_.store_main(seeded_, config.n_layers + stage, main_x);
}

void Drafter::draft(std::uint64_t step, std::span<const Ask> asks) {
  const ModelConfig& config = context_.config;
  const std::size_t dim = config.dim;
  draft_step_.clear();
  for (const Ask& ask : asks) {
    std::vector<std::uint32_t> ids(block_size_, config.dspark_noise_token_id);
    ids[0] = ask.next;
    draft_step_.add(*ask.sequence, ids, block_size_);
  }
  rows_.assign(draft_step_, 0, draft_step_.rows());
  attention_.prepare(draft_step_);
  for (std::size_t row = 0; row < rows_.rows(); ++row)
    std::copy_n(context_.weights.embed.values + std::size_t{draft_step_.tokens[row]} * dim, dim,
                x_.data() + row * dim);
  hyper_connections_.start(x_, rows_.rows(), stream_);
  for (std::uint32_t index = 0; index < config.n_mtp_layers; ++index) stage(step, index);
  propose(asks);
}

void Drafter::stage(std::uint64_t step, std::uint32_t index) {
  const BlockWeights& weights = weights_.stages[index];
  const std::uint32_t block = context_.config.n_layers + index;
  BlockTimer in_block(context_.recorder, block);
  PhaseTimer timer(context_.recorder, Phase::HyperConnections);
  const std::size_t rows = rows_.rows(), dim = context_.config.dim;
  const auto x = first(x_, rows * dim);
  const auto y = first(y_, rows * dim);

  hyper_connections_.mixes(stream_, rows, weights.hc_attention, mixes_);
  hyper_connections_.collapse_and_normalize(stream_, stream_.pre, rows, weights.attention_norm, x);
  attention_.attend_block(rows_, block, x, y);
  hyper_connections_.expand(y, mixes_, rows, stream_);
  std::swap(stream_.pre, mixes_.pre);

  hyper_connections_.mixes(stream_, rows, weights.hc_ffn, mixes_);
  hyper_connections_.collapse_and_normalize(stream_, stream_.pre, rows, weights.ffn_norm, x);
  moe_.begin(step, block, weights.moe, x, rows, moe_call_);
  moe_.finish(block, moe_call_, y);
  hyper_connections_.expand(y, mixes_, rows, stream_);
  std::swap(stream_.pre, mixes_.pre);
}

// Each token conditions the next one through the Markov head, so the tokens of a block are drawn in order,
// for all asks at once.
void Drafter::propose(std::span<const Ask> asks) {
  const ModelConfig& config = context_.config;
  const std::size_t rows = rows_.rows(), dim = config.dim, rank = config.dspark_markov_rank,
                    vocab = config.vocab_size;
  const auto x = first(x_, rows * dim);
  hyper_connections_.collapse(stream_, stream_.pre, rows, collapsed_);
  context_.compute.rms_norm(first(collapsed_, rows * dim), weights_.norm, static_cast<float>(config.norm_eps),
                            x);
  context_.compute.linear_wide(x, context_.weights.head, first(logits_, rows * vocab));

  for (std::size_t i = 0; i < block_size_; ++i) {
    for (std::size_t ask = 0; ask < asks.size(); ++ask) {
      const std::uint32_t id = i == 0 ? asks[ask].next : tokens_[ask * block_size_ + i - 1];
      std::copy_n(weights_.markov_embed.values + std::size_t{id} * rank, rank,
                  markov_embeds_.data() + ask * rank);
    }
    const auto bias = first(markov_logits_, asks.size() * vocab);
    context_.compute.linear_wide(first(markov_embeds_, asks.size() * rank), weights_.markov_head, bias);
    for (std::size_t ask = 0; ask < asks.size(); ++ask) {
      const std::size_t row = ask * block_size_ + i;
      const std::span<float> logits(logits_.data() + row * vocab, vocab);
      for (std::size_t id = 0; id < vocab; ++id) logits[id] += bias[ask * vocab + id];
      tokens_[row] = sampler_.sample(logits, asks[ask].sampling, draft_step_.positions[row]);

      std::copy_n(collapsed_.data() + row * dim, dim, confidence_input_.data());
      std::copy_n(markov_embeds_.data() + ask * rank, rank, confidence_input_.data() + dim);
      context_.compute.ops().linear_wide(confidence_input_.data(), 1,
                                         {weights_.confidence.data(), 1, dim + rank}, {0, 1},
                                         &confidence_[row]);
    }
  }
}

std::span<const float> Drafter::logits(std::size_t ask) const {
  const std::size_t width = block_size_ * context_.config.vocab_size;
  return std::span(logits_).subspan(ask * width, width);
}

}  // namespace dsv41
