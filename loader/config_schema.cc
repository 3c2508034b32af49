// The table of config fields (config_schema.h): what config.h declares, once, with its two spellings.
#include "loader/config_schema.h"

namespace dsv41 {
namespace {

using C = ModelConfig;
using N = ModelConfig::Nested;

template <typename Type>
ConfigField both(std::string_view flat, std::string_view nested, Type ModelConfig::*member) {
  return {flat, nested, MemberOf<ModelConfig>(member)};
}

template <typename Type>
ConfigField only(std::string_view name, std::string_view nested, Type ModelConfig::Nested::*member) {
  return {name, nested, MemberOf<ModelConfig::Nested>(member)};
}

}  // namespace

std::span<const ConfigField> config_fields() {
  static const ConfigField kFields[] = {
      both("vocab_size", "text_config.vocab_size", &C::vocab_size),
      both("dim", "text_config.hidden_size", &C::dim),
      both("moe_inter_dim", "text_config.moe_intermediate_size", &C::moe_inter_dim),
      both("n_layers", "text_config.num_hidden_layers", &C::n_layers),
      both("n_mtp_layers", "text_config.num_nextn_predict_layers", &C::n_mtp_layers),
      both("dspark_block_size", "text_config.dspark_block_size", &C::dspark_block_size),
      both("dspark_noise_token_id", "text_config.dspark_noise_token_id", &C::dspark_noise_token_id),
      both("dspark_target_layer_ids", "text_config.dspark_target_layer_ids", &C::dspark_target_layer_ids),
      both("dspark_markov_rank", "text_config.dspark_markov_rank", &C::dspark_markov_rank),
      both("dspark_n_routed_experts", "text_config.dspark_n_routed_experts", &C::dspark_n_routed_experts),
      both("dspark_n_activated_experts", "text_config.dspark_num_experts_per_tok",
           &C::dspark_n_activated_experts),
      both("n_heads", "text_config.num_attention_heads", &C::n_heads),
      both("n_routed_experts", "text_config.n_routed_experts", &C::n_routed_experts),
      both("n_shared_experts", "text_config.n_shared_experts", &C::n_shared_experts),
      both("n_activated_experts", "text_config.num_experts_per_tok", &C::n_activated_experts),
      both("score_func", "text_config.scoring_func", &C::score_func),
      both("route_scale", "text_config.routed_scaling_factor", &C::route_scale),
      both("swiglu_limit", "text_config.swiglu_limit", &C::swiglu_limit),
      both("q_lora_rank", "text_config.q_lora_rank", &C::q_lora_rank),
      both("head_dim", "text_config.head_dim", &C::head_dim),
      both("rope_head_dim", "text_config.qk_rope_head_dim", &C::rope_head_dim),
      both("norm_eps", "text_config.rms_norm_eps", &C::norm_eps),
      both("o_groups", "text_config.o_groups", &C::o_groups),
      both("o_lora_rank", "text_config.o_lora_rank", &C::o_lora_rank),
      both("window_size", "text_config.sliding_window", &C::window_size),
      both("kv_source_layers", "text_config.kv_source_layer_ids", &C::kv_source_layers),
      both("index_source_layers", "text_config.index_source_layer_ids", &C::index_source_layers),
      both("original_seq_len", "text_config.rope_scaling.original_max_position_embeddings",
           &C::original_seq_len),
      both("rope_theta", "text_config.rope_theta", &C::rope_theta),
      both("rope_factor", "text_config.rope_scaling.factor", &C::rope_factor),
      both("beta_fast", "text_config.rope_scaling.beta_fast", &C::beta_fast),
      both("beta_slow", "text_config.rope_scaling.beta_slow", &C::beta_slow),
      both("index_n_heads", "text_config.index_n_heads", &C::index_n_heads),
      both("index_head_dim", "text_config.index_head_dim", &C::index_head_dim),
      both("index_topk", "text_config.index_topk", &C::index_topk),
      both("candidate_source_layer", "text_config.candidate_source_layer_id", &C::candidate_source_layer),
      both("candidate_topk_blocks", "text_config.candidate_topk_blocks", &C::candidate_topk_blocks),
      both("candidate_block_size", "text_config.candidate_block_size", &C::candidate_block_size),
      both("hc_mult", "text_config.hc_mult", &C::hc_mult),
      both("hc_sinkhorn_iters", "text_config.hc_sinkhorn_iters", &C::hc_sinkhorn_iters),
      both("hc_eps", "text_config.hc_eps", &C::hc_eps),
      both("engram_layer_ids", "text_config.engram_layer_ids", &C::engram_layer_ids),
      both("engram_vocab_size", "text_config.engram_vocab_size", &C::engram_vocab_size),
      both("engram_num_embeddings", "text_config.engram_num_embeddings", &C::engram_num_embeddings),
      both("engram_max_ngram_size", "text_config.engram_max_ngram_size", &C::engram_max_ngram_size),
      both("engram_pad_id", "text_config.engram_pad_token_id", &C::engram_pad_id),
      both("engram_compressed_vocab_size", "text_config.engram_compressed_vocab_size",
           &C::engram_compressed_vocab_size),
      both("dtype", "quantization_config.quant_method", &C::dtype),
      both("expert_dtype", "quantization_config.expert_dtype", &C::expert_dtype),
      both("compress_rope_theta", "text_config.compress_rope_theta", &C::compress_rope_theta),
      both("compress_ratios", "text_config.compress_ratios", &C::compress_ratios),
      both("vision_n_layers", "vision_config.num_hidden_layers", &C::vision_n_layers),
      both("vision_dim", "vision_config.hidden_size", &C::vision_dim),
      both("vision_n_heads", "vision_config.num_attention_heads", &C::vision_n_heads),
      both("vision_inter_dim", "vision_config.intermediate_size", &C::vision_inter_dim),
      both("vision_patch_size", "vision_config.patch_size", &C::vision_patch_size),
      both("vision_downsample_ratio", "vision_config.downsample_ratio", &C::vision_downsample_ratio),
      both("vision_max_n_token", "vision_config.max_image_tokens", &C::vision_max_n_token),
      both("vision_min_pixels", "vision_config.min_pixels", &C::vision_min_pixels),
      both("vision_max_wh_ratio", "vision_config.max_wh_ratio", &C::vision_max_wh_ratio),
      both("image_token_id", "image_token_id", &C::image_token_id),
      both("engram_n_heads", "text_config.engram_n_heads", &C::engram_n_heads),
      both("engram_head_dim", "text_config.engram_head_dim", &C::engram_head_dim),
      both("vision_rope_theta", "vision_config.rope_theta", &C::vision_rope_theta),
      only("param_dtype", "dtype", &N::dtype),
      only("model_type", "model_type", &N::model_type),
      only("architectures", "architectures", &N::architectures),
      only("bos_token_id", "bos_token_id", &N::bos_token_id),
      only("eos_token_id", "eos_token_id", &N::eos_token_id),
      only("pad_token_id", "pad_token_id", &N::pad_token_id),
      only("hidden_act", "text_config.hidden_act", &N::hidden_act),
      only("max_position_embeddings", "text_config.max_position_embeddings", &N::max_position_embeddings),
      only("num_key_value_heads", "text_config.num_key_value_heads", &N::num_key_value_heads),
      only("tie_word_embeddings", "text_config.tie_word_embeddings", &N::tie_word_embeddings),
      only("topk_method", "text_config.topk_method", &N::topk_method),
      only("norm_topk_prob", "text_config.norm_topk_prob", &N::norm_topk_prob),
  };
  return kFields;
}

}  // namespace dsv41
