// Tensors, experts, Engram rows and sequence state out of shared pools (synthetic_model.h).
#include "benchmarks/synthetic_model.h"

#include <algorithm>
#include <random>
#include <stdexcept>

namespace dsv41::bench {
namespace {

// Scales that keep random products near the size of their input: E4M3 codes spread over the range have a
// standard deviation of about 150, E2M1 codes of about 3.
constexpr std::uint8_t kFp8Scale = 127 - 13, kFp4Scale = 127 - 8;

std::vector<std::uint8_t> bf16_bytes(std::size_t count, double deviation, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0, deviation);
  std::vector<std::uint8_t> bytes(2 * count);
  for (std::size_t i = 0; i < count; ++i) {
    const BFloat16 value = to_bfloat16(normal(engine));
    bytes[2 * i] = static_cast<std::uint8_t>(value.bits);
    bytes[2 * i + 1] = static_cast<std::uint8_t>(value.bits >> 8);
  }
  return bytes;
}

/// Codes around `middle`, as scales of trained weights vary.
std::vector<std::uint8_t> scale_bytes(std::size_t count, std::uint8_t middle, std::uint64_t seed) {
  std::vector<std::uint8_t> bytes = random_bytes(count, seed);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(middle - 1 + byte % 3);
  return bytes;
}

std::size_t head_bytes(const ModelConfig& config) {
  return std::size_t{config.vocab_size} * config.dim * sizeof(BFloat16);
}

class PooledExperts final : public ExpertSource {
 public:
  PooledExperts(const ModelConfig& config, std::size_t pool_bytes)
      : geometry_(ExpertGeometry::of(config)),
        codes_(pool_bytes, random_bytes(std::size_t{1} << 22, 2)),
        scales_(pool_bytes / 16, scale_bytes(1 << 20, kFp4Scale, 5)) {}

  const ExpertGeometry& geometry() const override { return geometry_; }

  ExpertMatrices expert(std::uint32_t block, std::uint32_t expert) override {
    const std::size_t values = std::size_t{geometry_.dim} * geometry_.inter_dim;
    std::size_t number = expert;
    for (std::uint32_t b = 0; b < block; ++b) number += geometry_.experts_per_block[b];
    const auto part = [&](std::size_t n, std::size_t k, std::size_t matrix) {
      const std::size_t at = (3 * number + matrix) * values;
      return Fp4Matrix{slice(codes_, at / 2, values / 2), slice(scales_, at / kBlock, values / kBlock), n, k};
    };
    const std::size_t dim = geometry_.dim, inner = geometry_.inter_dim;
    return {part(inner, dim, 0), part(inner, dim, 1), part(dim, inner, 2)};
  }

 private:
  static const std::uint8_t* slice(const Buffer& buffer, std::size_t at, std::size_t bytes) {
    return buffer.data() + at % (buffer.size() - bytes) / 64 * 64;
  }
  ExpertGeometry geometry_;
  Buffer codes_, scales_;
};

class PooledRows final : public EngramRows {
 public:
  PooledRows(const ModelConfig& config, const Buffer& values)
      : width_(config.engram_head_dim), values_(values), ids_(config.engram_layer_ids.size()) {}

  void request(std::size_t table, std::span<const std::uint64_t> ids) override {
    ids_.at(table).assign(ids.begin(), ids.end());
  }
  void collect(std::size_t table, std::span<BFloat16> rows) override {
    const std::size_t row_bytes = width_ * sizeof(BFloat16), places = values_.size() / row_bytes;
    const auto& ids = ids_.at(table);
    if (rows.size() != ids.size() * width_) throw std::invalid_argument("engram rows: wrong room");
    for (std::size_t i = 0; i < ids.size(); ++i)
      std::copy_n(reinterpret_cast<const BFloat16*>(values_.data() + ids[i] % places * row_bytes), width_,
                  rows.data() + i * width_);
  }

 private:
  std::size_t width_;
  const Buffer& values_;
  std::vector<std::vector<std::uint64_t>> ids_;
};

}  // namespace

const std::uint8_t* Pool::take(std::size_t bytes) {
  if (bytes > buffer_.size())
    throw std::runtime_error("a tensor is larger than its pool; try a larger --pool-mib");
  if (bytes > buffer_.size() - next_) next_ = 0;
  const std::uint8_t* const data = buffer_.data() + next_;
  next_ += ceil_div(bytes, 64) * 64;
  next_ = std::min(next_, buffer_.size());
  return data;
}

std::unique_ptr<ExpertSource> synthetic_experts(const ModelConfig& config, std::size_t pool_bytes) {
  return std::make_unique<PooledExperts>(config, pool_bytes);
}

SyntheticModel::SyntheticModel(const std::filesystem::path& config_file, std::size_t pool_bytes,
                               bool experts_here)
    : config_(read_config(config_file)),
      fp8_(pool_bytes, gaussian_e4m3(std::size_t{1} << 22, 1)),
      bf16_(std::max(pool_bytes / 2, head_bytes(config_)), bf16_bytes(std::size_t{1} << 21, 0.02, 3)),
      fp8_scales_(std::max<std::size_t>(pool_bytes / 256, 1 << 20), scale_bytes(1 << 20, kFp8Scale, 4)) {
  const std::size_t widest = std::size_t{config_.dim} * config_.hc_mult;
  ones_.assign(widest, to_bfloat16(1.0f));
  zeros_.assign(std::max<std::size_t>({std::size_t{config_.n_heads}, config_.n_routed_experts,
                                       config_.dspark_n_routed_experts, 64}),
                0.0f);
  std::mt19937_64 engine(6);
  std::normal_distribution<double> normal(0, 0.01);
  const std::size_t outputs = (2 + std::size_t{config_.hc_mult}) * config_.hc_mult;
  mixes_.resize(outputs * widest);
  for (float& value : mixes_) value = static_cast<float>(normal(engine));

  for (std::uint32_t layer = 0; layer < config_.n_layers; ++layer) weights_.blocks.push_back(block(layer));
  for (std::size_t i = 0; i < config_.engram_layer_ids.size(); ++i) {
    EngramWeights& engram = weights_.engram.emplace_back();
    engram.wkv = fp8((std::size_t{config_.hc_mult} + 1) * config_.dim,
                     std::size_t{config_.n_hash_columns()} * config_.engram_head_dim);
    engram.q_weight = engram.k_weight = ones(widest);
    engram.rows = config_.engram_num_embeddings[i];
  }
  bytes_.layers = taken_;
  weights_.embed = weights_.head = bf16(config_.vocab_size, config_.dim);
  weights_.norm = ones(config_.dim);
  bytes_.head = taken_ - bytes_.layers;
  if (config_.n_mtp_layers > 0) {
    DraftWeights& draft = weights_.draft.emplace();
    for (std::uint32_t stage = 0; stage < config_.n_mtp_layers; ++stage)
      draft.stages.push_back(block(config_.n_layers + stage));
    draft.main_proj = fp8(config_.dim, config_.dspark_target_layer_ids.size() * config_.dim);
    draft.main_norm = draft.norm = ones(config_.dim);
    draft.markov_embed = bf16(config_.vocab_size, config_.dspark_markov_rank);
    draft.markov_head = bf16(config_.vocab_size, config_.dspark_markov_rank);
    const Bf16Matrix confidence = bf16(1, std::size_t{config_.dim} + config_.dspark_markov_rank);
    draft.confidence = {confidence.values, confidence.k};
    bytes_.drafts = taken_ - bytes_.layers - bytes_.head;
  }
  if (experts_here) experts_ = synthetic_experts(config_, pool_bytes);
}

Fp8Matrix SyntheticModel::fp8(std::size_t n, std::size_t k) {
  const std::size_t scales = ceil_div(n, kBlock) * (k / kBlock);
  taken_ += static_cast<double>(n * k + scales);
  return {fp8_.take(n * k), fp8_scales_.take(scales), n, k};
}

Bf16Matrix SyntheticModel::bf16(std::size_t n, std::size_t k) {
  taken_ += static_cast<double>(n * k * sizeof(BFloat16));
  return {reinterpret_cast<const BFloat16*>(bf16_.take(n * k * sizeof(BFloat16))), n, k};
}

std::span<const BFloat16> SyntheticModel::ones(std::size_t count) const {
  return std::span(ones_).first(count);
}
std::span<const float> SyntheticModel::zeros(std::size_t count) const {
  return std::span(zeros_).first(count);
}

BlockWeights SyntheticModel::block(std::uint32_t index) {
  const std::size_t dim = config_.dim, head = config_.head_dim, heads = config_.n_heads,
                    rank = config_.q_lora_rank,
                    group_width = std::size_t{config_.o_groups} * config_.o_lora_rank,
                    index_width = std::size_t{config_.index_n_heads} * config_.index_head_dim,
                    shared = std::size_t{config_.moe_inter_dim} * config_.n_shared_experts,
                    copies = config_.hc_mult;
  BlockWeights out;
  out.attention_norm = out.ffn_norm = ones(dim);
  const std::size_t outputs = (2 + copies) * copies;
  for (HyperConnectionWeights* const half : {&out.hc_attention, &out.hc_ffn}) {
    *half = {{mixes_.data(), outputs, copies * dim}, zeros(outputs), zeros(3)};
    taken_ += static_cast<double>(outputs * copies * dim * sizeof(float));
  }
  AttentionWeights& attention = out.attention;
  attention.wq_a = fp8(rank, dim);
  attention.wq_b = fp8(heads * head, rank);
  attention.wkv = fp8(head, dim);
  attention.wo_a = fp8(group_width, heads * head / config_.o_groups);
  attention.wo_b = fp8(dim, group_width);
  attention.q_norm = ones(rank);
  attention.kv_norm = ones(head);
  attention.sink = zeros(heads);
  const AttentionMode mode = config_.mode(index);
  if (mode == AttentionMode::Full) {
    CompressorWeights& compressor = attention.compressor.emplace();
    compressor.wkv = bf16(head, dim);
    if (config_.compress_ratios[index] > 1) compressor.wgate = bf16(head, dim);
    compressor.norm = ones(head);
    compressor.index_wk = bf16(config_.index_head_dim, head);
    compressor.index_k_norm = ones(config_.index_head_dim);
  }
  if (mode == AttentionMode::Full || mode == AttentionMode::Reindex)
    attention.index_query = IndexQueryWeights{fp8(index_width, rank), bf16(config_.index_n_heads, dim)};
  out.moe.gate = bf16(config_.experts_of(index), dim);
  out.moe.bias = out.moe.bias_vl = zeros(config_.experts_of(index));
  out.moe.shared_w1 = fp8(shared, dim);
  out.moe.shared_w3 = fp8(shared, dim);
  out.moe.shared_w2 = fp8(dim, shared);
  return out;
}

std::unique_ptr<EngramRows> SyntheticModel::engram_rows() const {
  return std::make_unique<PooledRows>(config_, bf16_.buffer());
}

TokenMap SyntheticModel::token_map() const {
  TokenMap map;
  map.size = config_.engram_compressed_vocab_size;
  map.compressed.resize(config_.vocab_size);
  for (std::uint32_t token = 0; token < config_.vocab_size; ++token)
    map.compressed[token] = token % std::max(map.size, 1u);
  return map;
}

void SyntheticModel::fill(Sequence& sequence, std::uint32_t tokens) const {
  const std::size_t head = config_.head_dim, key = config_.index_head_dim;
  const std::uint8_t* const codes = fp8_.buffer().data();
  const std::vector<std::uint8_t> scales(head / kBlock, 127 - 8), key_scales(key / kBlock, 127);
  const std::vector<std::uint8_t> group_scales(head / kGroupBlock, 0x30);  // E4M3 of 0.5
  std::mt19937_64 engine(tokens);
  const auto offset = [&](std::size_t bytes) { return engine() % (fp8_.buffer().size() - bytes); };
  const std::uint32_t kept = std::min(tokens, config_.window_size + config_.dspark_block_size);
  for (std::uint32_t block = 0; block < config_.n_blocks(); ++block)
    for (std::uint32_t position = tokens - kept; position < tokens; ++position)
      sequence.window(block).store(position, codes + offset(head), scales.data());
  for (const std::uint32_t layer : config_.kv_source_layers) {
    CompressedCache& cache = sequence.compressed(layer);
    const std::size_t groups = tokens / cache.ratio();
    for (std::size_t group = 0; group < groups; ++group)
      cache.append(codes + offset(head / 2), group_scales.data(), codes + offset(key / 2), key_scales.data());
  }
  for (std::uint32_t position = tokens - std::min(tokens, config_.engram_max_ngram_size); position < tokens;
       ++position)
    sequence.remember(position, {position, false});
  sequence.advance(tokens);
}

}  // namespace dsv41::bench
