// The model's configuration: two file layouts, one schema (spec: docs/checkpoint.md, "Two config layouts").
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41 {

enum class AttentionMode { Window, Full, Reindex, Reuse };

/// Every value under its flat name. Fields that exist only in the nested layout are in `nested` and optional.
struct ModelConfig {
  std::uint32_t vocab_size = 0, dim = 0, moe_inter_dim = 0, n_layers = 0, n_mtp_layers = 0;
  std::uint32_t dspark_block_size = 0, dspark_noise_token_id = 0;
  std::vector<std::uint32_t> dspark_target_layer_ids;
  std::uint32_t dspark_markov_rank = 0, dspark_n_routed_experts = 0, dspark_n_activated_experts = 0;
  std::uint32_t n_heads = 0, n_routed_experts = 0, n_shared_experts = 0, n_activated_experts = 0;
  std::string score_func;
  double route_scale = 0, swiglu_limit = 0;
  std::uint32_t q_lora_rank = 0, head_dim = 0, rope_head_dim = 0;
  double norm_eps = 0;
  std::uint32_t o_groups = 0, o_lora_rank = 0, window_size = 0;
  std::vector<std::uint32_t> kv_source_layers, index_source_layers;
  std::uint32_t original_seq_len = 0;
  double rope_theta = 0, rope_factor = 0, beta_fast = 0, beta_slow = 0;
  std::uint32_t index_n_heads = 0, index_head_dim = 0, index_topk = 0;
  std::uint32_t candidate_source_layer = 0, candidate_topk_blocks = 0, candidate_block_size = 0;
  std::uint32_t hc_mult = 0, hc_sinkhorn_iters = 0;
  double hc_eps = 0;
  std::vector<std::uint32_t> engram_layer_ids;
  std::uint64_t engram_vocab_size = 0;
  std::vector<std::uint64_t> engram_num_embeddings;
  std::uint32_t engram_max_ngram_size = 0, engram_pad_id = 0, engram_compressed_vocab_size = 0;
  std::string dtype, expert_dtype;
  double compress_rope_theta = 0;
  std::vector<std::uint32_t> compress_ratios;  // n_layers + n_mtp_layers entries
  std::uint32_t vision_n_layers = 0, vision_dim = 0, vision_n_heads = 0, vision_inter_dim = 0,
                vision_patch_size = 0;
  std::uint32_t vision_downsample_ratio = 0, vision_max_n_token = 0, vision_min_pixels = 0;
  std::optional<double> vision_max_wh_ratio;
  std::uint32_t image_token_id = 0, engram_n_heads = 0, engram_head_dim = 0;
  double vision_rope_theta = 0;

  /// The twelve fields of the nested layout that the flat one lacks.
  struct Nested {
    std::optional<std::string> dtype, model_type, hidden_act, topk_method;
    std::vector<std::string> architectures;
    std::optional<std::uint32_t> bos_token_id, eos_token_id, pad_token_id, max_position_embeddings,
        num_key_value_heads;
    std::optional<bool> tie_word_embeddings, norm_topk_prob;
  } nested;

  std::uint32_t bos_id() const { return nested.bos_token_id.value_or(0); }
  std::uint32_t eos_id() const { return nested.eos_token_id.value_or(1); }
  /// Positions a sequence may have; 1,048,576 (the released value) where the file does not say.
  std::uint32_t max_positions() const { return nested.max_position_embeddings.value_or(1048576); }

  std::uint32_t n_blocks() const { return n_layers + n_mtp_layers; }  // backbone layers, then draft stages
  std::uint32_t experts_of(std::uint32_t block) const {
    return block < n_layers ? n_routed_experts : dspark_n_routed_experts;
  }
  std::uint32_t experts_per_token(std::uint32_t block) const {
    return block < n_layers ? n_activated_experts : dspark_n_activated_experts;
  }
  std::uint32_t n_hash_columns() const { return (engram_max_ngram_size - 1) * engram_n_heads; }

  /// Mode of a backbone layer or draft stage (model.md 3).
  AttentionMode mode(std::uint32_t block) const;
  /// The nearest KV / index source layer at or below `layer`; only for layers with compress_ratios > 0.
  std::uint32_t kv_source(std::uint32_t layer) const;
  std::uint32_t index_source(std::uint32_t layer) const;
  /// Position of an engram layer in engram_layer_ids, or nothing.
  std::optional<std::size_t> engram_index(std::uint32_t layer) const;
};

/// Reads one config file of either layout. Throws CheckpointError with the file and the key that is missing
/// or wrong.
ModelConfig read_config(const std::filesystem::path& file);
ModelConfig parse_config(std::string_view json, std::string_view name_for_messages);
/// config.json of a checkpoint directory, else inference/config.json. Throws CheckpointError when neither is
/// there.
std::filesystem::path find_config(const std::filesystem::path& directory);

/// The flat layout, 64 keys in the released order; reading it back gives the same schema (without `nested`).
std::string to_flat_json(const ModelConfig& config);
/// The nested layout; of the twelve nested-only fields those that are set. Reading it back gives the same
/// config.
std::string to_nested_json(const ModelConfig& config);

/// Names of the fields on which two configs differ, nested-only fields included (as released pair: exactly
/// twelve).
std::vector<std::string> differing_fields(const ModelConfig& a, const ModelConfig& b);

/// Everything the forward pass relies on (divisibility, ranges, sources in order, list lengths, topk against
/// candidates, …). Returns all findings, each one line; empty when the config can be run.
std::vector<std::string> config_findings(const ModelConfig& config);

}  // namespace dsv41
