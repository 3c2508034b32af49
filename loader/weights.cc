// Collecting views under the names of docs/checkpoint.md (weights.h).
#include "loader/weights.h"

#include <fmt/format.h>

namespace dsv41 {
namespace {

/// Reads tensors below one prefix, for example "layers.3.".
class Scope {
 public:
  Scope(const Checkpoint& checkpoint, std::string prefix)
      : checkpoint_(checkpoint), prefix_(std::move(prefix)) {}
  Fp8Matrix fp8(std::string_view name) const { return checkpoint_.fp8(full(name)); }
  Fp4Matrix fp4(std::string_view name) const { return checkpoint_.fp4(full(name)); }
  Bf16Matrix matrix(std::string_view name) const { return checkpoint_.bf16_matrix(full(name)); }
  std::span<const BFloat16> bf16(std::string_view name) const { return checkpoint_.bf16(full(name)); }
  std::span<const float> f32(std::string_view name) const { return checkpoint_.f32(full(name)); }
  F32Matrix f32_matrix(std::string_view name) const { return checkpoint_.f32_matrix(full(name)); }
  std::span<const std::uint8_t> codes(std::string_view name) const {
    const auto bytes = checkpoint_.bytes(full(name));
    return {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
  }
  TensorLocation location(std::string_view name) const { return checkpoint_.location(full(name)); }

 private:
  std::string full(std::string_view name) const { return fmt::format("{}{}", prefix_, name); }
  const Checkpoint& checkpoint_;
  std::string prefix_;
};

std::string block_prefix(const ModelConfig& config, std::uint32_t block) {
  return block < config.n_layers ? fmt::format("layers.{}.", block)
                                 : fmt::format("mtp.{}.", block - config.n_layers);
}

AttentionWeights attention_weights(const Scope& in, const ModelConfig& config, std::uint32_t block) {
  AttentionWeights out;
  out.wq_a = in.fp8("attn.wq_a");
  out.wq_b = in.fp8("attn.wq_b");
  out.wkv = in.fp8("attn.wkv");
  out.wo_a = in.fp8("attn.wo_a");
  out.wo_b = in.fp8("attn.wo_b");
  out.q_norm = in.bf16("attn.q_norm.weight");
  out.kv_norm = in.bf16("attn.kv_norm.weight");
  out.sink = in.f32("attn.attn_sink");
  const AttentionMode mode = config.mode(block);
  if (mode == AttentionMode::Full) {
    CompressorWeights& compressor = out.compressor.emplace();
    compressor.wkv = in.matrix("attn.compressor.wkv.weight");
    if (config.compress_ratios[block] > 1) compressor.wgate = in.matrix("attn.compressor.wgate.weight");
    compressor.norm = in.bf16("attn.compressor.norm.weight");
    compressor.index_wk = in.matrix("attn.indexer.wk.weight");
    compressor.index_k_norm = in.bf16("attn.indexer.k_norm.weight");
  }
  if (mode == AttentionMode::Full || mode == AttentionMode::Reindex)
    out.index_query =
        IndexQueryWeights{in.fp8("attn.indexer.wq_b"), in.matrix("attn.indexer.weights_proj.weight")};
  return out;
}

BlockWeights block_weights(const Checkpoint& checkpoint, std::uint32_t block) {
  const Scope in(checkpoint, block_prefix(checkpoint.config(), block));
  const auto hyper_connection = [&](std::string_view half) {
    return HyperConnectionWeights{in.f32_matrix(fmt::format("hc_{}_fn", half)),
                                  in.f32(fmt::format("hc_{}_base", half)),
                                  in.f32(fmt::format("hc_{}_scale", half))};
  };
  BlockWeights out;
  out.attention_norm = in.bf16("attn_norm.weight");
  out.ffn_norm = in.bf16("ffn_norm.weight");
  out.hc_attention = hyper_connection("attn");
  out.hc_ffn = hyper_connection("ffn");
  out.attention = attention_weights(in, checkpoint.config(), block);
  out.moe.gate = in.matrix("ffn.gate.weight");
  out.moe.bias = in.f32("ffn.gate.bias");
  out.moe.bias_vl = in.f32("ffn.gate.bias_vl");
  out.moe.shared_w1 = in.fp8("ffn.shared_experts.w1");
  out.moe.shared_w3 = in.fp8("ffn.shared_experts.w3");
  out.moe.shared_w2 = in.fp8("ffn.shared_experts.w2");
  return out;
}

EngramWeights engram_weights(const Checkpoint& checkpoint, std::uint32_t layer) {
  const Scope in(checkpoint, fmt::format("layers.{}.engram.", layer));
  EngramWeights out;
  out.wkv = in.fp8("wkv");
  out.q_weight = in.bf16("q_weight");
  out.k_weight = in.bf16("k_weight");
  out.table_codes = in.codes("embed.weight");
  out.table_scales = in.codes("embed.scale");
  out.codes_location = in.location("embed.weight");
  out.scales_location = in.location("embed.scale");
  out.rows = out.table_codes.size() / checkpoint.config().engram_head_dim;
  return out;
}

DraftWeights draft_weights(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  const Scope first(checkpoint, "mtp.0."), last(checkpoint, fmt::format("mtp.{}.", config.n_mtp_layers - 1));
  DraftWeights out;
  for (std::uint32_t stage = 0; stage < config.n_mtp_layers; ++stage)
    out.stages.push_back(block_weights(checkpoint, config.n_layers + stage));
  out.main_proj = first.fp8("main_proj");
  out.main_norm = first.bf16("main_norm.weight");
  out.norm = last.bf16("norm.weight");
  out.markov_embed = last.matrix("markov_head.embed.weight");
  out.markov_head = last.matrix("markov_head.head.weight");
  out.confidence = last.bf16("confidence_head.proj.weight");
  return out;
}

}  // namespace

ModelWeights host_weights(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  ModelWeights out;
  out.embed = checkpoint.bf16_matrix("embed.weight");
  out.head = checkpoint.bf16_matrix("head.weight");
  out.norm = checkpoint.bf16("norm.weight");
  for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
    out.blocks.push_back(block_weights(checkpoint, layer));
  for (const std::uint32_t layer : config.engram_layer_ids)
    out.engram.push_back(engram_weights(checkpoint, layer));
  if (config.n_mtp_layers > 0) out.draft = draft_weights(checkpoint);
  return out;
}

TensorLocation expert_tensor(const Checkpoint& checkpoint, std::uint32_t block, std::uint32_t expert,
                             std::string_view tensor) {
  return checkpoint.location(
      fmt::format("{}ffn.experts.{}.{}", block_prefix(checkpoint.config(), block), expert, tensor));
}

ExpertMatrices expert_weights(const Checkpoint& checkpoint, std::uint32_t block, std::uint32_t expert) {
  const Scope in(checkpoint,
                 fmt::format("{}ffn.experts.{}.", block_prefix(checkpoint.config(), block), expert));
  return {in.fp4("w1"), in.fp4("w3"), in.fp4("w2")};
}

}  // namespace dsv41
