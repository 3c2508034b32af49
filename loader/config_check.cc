// What the forward pass relies on, checked once and all at a time (config_findings of config.h).
// Limits exist only where arithmetic would overflow or memory would be asked for without reason.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/views.h"
#include "loader/config.h"
#include "loader/inventory.h"

namespace dsv41 {
namespace {

using u64 = std::uint64_t;

constexpr u64 kMaxDimension = u64{1} << 24;    // of any matrix side made of one config field
constexpr u64 kMaxMatrixSide = u64{1} << 31;   // of a product of fields
constexpr u64 kMaxTableRows = u64{1} << 40;    // of an Engram table
constexpr std::uint32_t kMaxPatch = 1024;      // pixels
constexpr std::uint32_t kMaxRatio = 1u << 16;  // tokens per compressed group

class Findings {
 public:
  template <typename... Arguments>
  void require(bool holds, fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    if (!holds) list_.push_back(fmt::format(format, std::forward<Arguments>(arguments)...));
  }
  std::vector<std::string> take() { return std::move(list_); }

 private:
  std::vector<std::string> list_;
};

bool ascending(const std::vector<std::uint32_t>& list) {
  return std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end();
}

bool contains(const std::vector<std::uint32_t>& list, std::uint32_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

void check_sizes(const ModelConfig& c, Findings& found) {
  struct Size {
    const char* name;
    u64 value;
  };
  for (const Size& size : {Size{"vocab_size", c.vocab_size},
                           {"dim", c.dim},
                           {"moe_inter_dim", c.moe_inter_dim},
                           {"n_layers", c.n_layers},
                           {"n_heads", c.n_heads},
                           {"n_routed_experts", c.n_routed_experts},
                           {"q_lora_rank", c.q_lora_rank},
                           {"head_dim", c.head_dim},
                           {"o_groups", c.o_groups},
                           {"o_lora_rank", c.o_lora_rank},
                           {"window_size", c.window_size},
                           {"hc_mult", c.hc_mult},
                           {"hc_sinkhorn_iters", c.hc_sinkhorn_iters},
                           {"vision_dim", c.vision_dim},
                           {"vision_n_heads", c.vision_n_heads},
                           {"vision_inter_dim", c.vision_inter_dim},
                           {"vision_patch_size", c.vision_patch_size},
                           {"vision_downsample_ratio", c.vision_downsample_ratio},
                           {"vision_max_n_token", c.vision_max_n_token}})
    found.require(size.value >= 1 && size.value <= kMaxDimension, "{} is {}; it must be 1 … {}", size.name,
                  size.value, kMaxDimension);
  found.require(c.vision_patch_size <= kMaxPatch && c.vision_downsample_ratio <= kMaxPatch,
                "vision_patch_size {} and vision_downsample_ratio {} must not exceed {}", c.vision_patch_size,
                c.vision_downsample_ratio, kMaxPatch);

  const auto side = [&](const char* name, u64 a, u64 b) {
    found.require(a <= kMaxMatrixSide && b <= kMaxMatrixSide && a * b <= kMaxMatrixSide,
                  "{} = {} * {} exceeds {}", name, a, b, kMaxMatrixSide);
  };
  side("n_heads*head_dim", c.n_heads, c.head_dim);
  side("o_groups*o_lora_rank", c.o_groups, c.o_lora_rank);
  side("hc_mult*dim", u64{c.hc_mult} + 1, c.dim);
  side("hc_mult*(hc_mult+2)", c.hc_mult, u64{c.hc_mult} + 2);
  side("index_n_heads*index_head_dim", c.index_n_heads, c.index_head_dim);
  const u64 tensors = tensor_count(c);
  found.require(tensors <= kMaxTensors,
                "n_layers {}, n_mtp_layers {}, n_routed_experts {}: {} tensors are more than {}", c.n_layers,
                c.n_mtp_layers, c.n_routed_experts, tensors, kMaxTensors);
}

void check_formats(const ModelConfig& c, Findings& found) {
  found.require(c.dtype == "fp8", "dtype is \"{}\"; only \"fp8\" is implemented", c.dtype);
  found.require(c.expert_dtype == "fp4", "expert_dtype is \"{}\"; only \"fp4\" is implemented",
                c.expert_dtype);
  // Inputs of quantized linears come in blocks of 32; outputs may have any number of features.
  struct Inputs {
    const char* name;
    u64 value;
  };
  for (const Inputs& inputs : {Inputs{"dim", c.dim},
                               {"q_lora_rank", c.q_lora_rank},
                               {"moe_inter_dim", c.moe_inter_dim},
                               {"o_groups*o_lora_rank", u64{c.o_groups} * c.o_lora_rank},
                               {"head_dim", c.head_dim}})
    found.require(inputs.value % kBlock == 0, "{} is {}; it must be a multiple of {}", inputs.name,
                  inputs.value, kBlock);
}

void check_numbers(const ModelConfig& c, Findings& found) {
  struct Number {
    const char* name;
    double value, least, most;
  };
  constexpr double kMost = 1e30, kTiny = 1e-37;  // both are normal in fp32
  for (const Number& number : {Number{"norm_eps", c.norm_eps, kTiny, 1},
                               {"hc_eps", c.hc_eps, kTiny, 1},
                               {"route_scale", c.route_scale, -kMost, kMost},
                               {"swiglu_limit", c.swiglu_limit, 0, kMost},
                               {"rope_theta", c.rope_theta, 1, kMost},
                               {"compress_rope_theta", c.compress_rope_theta, 1 + 1e-6, kMost},
                               {"rope_factor", c.rope_factor, kTiny, kMost},
                               {"beta_fast", c.beta_fast, kTiny, kMost},
                               {"beta_slow", c.beta_slow, kTiny, kMost},
                               {"vision_rope_theta", c.vision_rope_theta, 1, kMost},
                               {"vision_max_wh_ratio", c.vision_max_wh_ratio.value_or(1), kTiny, kMost}})
    found.require(number.value >= number.least && number.value <= number.most, "{} is {}; it must be {} … {}",
                  number.name, number.value, number.least, number.most);
}

void check_attention(const ModelConfig& c, Findings& found) {
  found.require(c.rope_head_dim % 2 == 0 && c.rope_head_dim <= c.head_dim,
                "rope_head_dim is {}; it must be even and at most head_dim {}", c.rope_head_dim, c.head_dim);
  found.require(c.o_groups == 0 || c.n_heads % c.o_groups == 0, "n_heads {} is not a multiple of o_groups {}",
                c.n_heads, c.o_groups);

  if (c.compress_ratios.size() != c.n_blocks()) {
    found.require(false, "compress_ratios has {} entries, n_layers + n_mtp_layers is {}",
                  c.compress_ratios.size(), c.n_blocks());
    return;
  }
  for (std::uint32_t stage = c.n_layers; stage < c.n_blocks(); ++stage)
    found.require(c.compress_ratios[stage] == 0,
                  "compress_ratios[{}] is {}; draft stages attend to their window only (0)", stage,
                  c.compress_ratios[stage]);
  struct Sources {
    const char* name;
    const std::vector<std::uint32_t>& layers;
  };
  bool usable = true;
  for (const Sources& sources :
       {Sources{"kv_source_layers", c.kv_source_layers}, {"index_source_layers", c.index_source_layers}}) {
    if (!ascending(sources.layers))
      found.require(usable = false, "{} must ascend without repeating", sources.name);
    for (const std::uint32_t layer : sources.layers) {
      if (layer >= c.n_layers)
        found.require(usable = false, "{} names layer {} of {}", sources.name, layer, c.n_layers);
      else
        found.require(c.compress_ratios[layer] > 0, "{} names layer {}, whose compress_ratio is 0",
                      sources.name, layer);
    }
  }
  for (const std::uint32_t layer : c.kv_source_layers)
    found.require(contains(c.index_source_layers, layer), "KV source {} is not in index_source_layers",
                  layer);
  bool compresses = false;
  for (std::uint32_t layer = 0; layer < c.n_layers; ++layer) {
    const std::uint32_t ratio = c.compress_ratios[layer];
    if (ratio == 0) continue;
    compresses = true;
    found.require(ratio <= kMaxRatio, "compress_ratios[{}] is {}, above {}", layer, ratio, kMaxRatio);
    if (!usable) continue;
    if (c.kv_source_layers.empty() || c.kv_source_layers.front() > layer) {
      found.require(false, "layer {} has compress_ratio {} but no KV source at or below it", layer, ratio);
      continue;
    }
    const std::uint32_t source = c.kv_source(layer);
    found.require(c.compress_ratios[source] == ratio,
                  "layer {} has compress_ratio {}, its KV source {} has {}", layer, ratio, source,
                  c.compress_ratios[source]);
  }
  if (!compresses) return;

  found.require(c.index_n_heads >= 1 && c.index_topk >= 1 && c.candidate_topk_blocks >= 1 &&
                    c.candidate_block_size >= 1,
                "index_n_heads {}, index_topk {}, candidate_topk_blocks {} and candidate_block_size {} must "
                "be at least 1",
                c.index_n_heads, c.index_topk, c.candidate_topk_blocks, c.candidate_block_size);
  found.require(c.index_head_dim >= 1 && c.index_head_dim % kBlock == 0,
                "index_head_dim is {}; it must be a positive multiple of {}", c.index_head_dim, kBlock);
  found.require(c.rope_head_dim <= c.index_head_dim, "rope_head_dim {} exceeds index_head_dim {}",
                c.rope_head_dim, c.index_head_dim);
  // Otherwise the mask could leave fewer groups than index_topk although more are visible (docs/model.md 3).
  found.require(
      u64{c.candidate_topk_blocks} * c.candidate_block_size >= u64{c.index_topk} + c.candidate_block_size,
      "candidate_topk_blocks {} * candidate_block_size {} is below index_topk {} + candidate_block_size",
      c.candidate_topk_blocks, c.candidate_block_size, c.index_topk);
  const std::uint32_t candidates = c.candidate_source_layer;
  found.require(contains(c.index_source_layers, candidates),
                "candidate_source_layer {} is not in index_source_layers", candidates);
  if (candidates >= c.n_layers) return;
  for (const std::uint32_t layer : c.index_source_layers)
    if (layer > candidates && layer < c.n_layers)
      found.require(c.compress_ratios[layer] == c.compress_ratios[candidates],
                    "index source {} has compress_ratio {}, but its candidates come from layer {} with {}",
                    layer, c.compress_ratios[layer], candidates, c.compress_ratios[candidates]);
}

void check_experts(const ModelConfig& c, Findings& found) {
  found.require(c.score_func == "sqrtsoftplus", "score_func is \"{}\"; only \"sqrtsoftplus\" is implemented",
                c.score_func);
  found.require(c.n_shared_experts == 1, "n_shared_experts is {}; the forward pass has exactly 1",
                c.n_shared_experts);
  found.require(c.n_activated_experts >= 1 && c.n_activated_experts <= c.n_routed_experts,
                "n_activated_experts is {}; it must be 1 … n_routed_experts {}", c.n_activated_experts,
                c.n_routed_experts);
}

void check_engram(const ModelConfig& c, Findings& found) {
  found.require(c.engram_num_embeddings.size() == c.engram_layer_ids.size(),
                "engram_num_embeddings has {} entries for {} engram_layer_ids",
                c.engram_num_embeddings.size(), c.engram_layer_ids.size());
  if (c.engram_layer_ids.empty()) return;
  found.require(ascending(c.engram_layer_ids), "engram_layer_ids must ascend without repeating");
  for (const std::uint32_t layer : c.engram_layer_ids)
    found.require(layer < c.n_layers, "engram_layer_ids names layer {} of {}", layer, c.n_layers);
  for (const u64 rows : c.engram_num_embeddings)
    found.require(rows >= 1 && rows <= kMaxTableRows, "engram_num_embeddings holds {}; it must be 1 … {}",
                  rows, kMaxTableRows);
  found.require(c.engram_max_ngram_size >= 2 && c.engram_max_ngram_size <= 64,
                "engram_max_ngram_size is {}; it must be 2 … 64", c.engram_max_ngram_size);
  found.require(c.engram_n_heads >= 1 && c.engram_n_heads <= 1024,
                "engram_n_heads is {}; it must be 1 … 1024", c.engram_n_heads);
  found.require(c.engram_head_dim >= 1 && c.engram_head_dim % kBlock == 0 && c.engram_head_dim <= (1u << 16),
                "engram_head_dim is {}; it must be a multiple of {} up to {}", c.engram_head_dim, kBlock,
                1u << 16);
  found.require(c.engram_vocab_size >= 1 && c.engram_vocab_size <= kMaxTableRows,
                "engram_vocab_size is {}; it must be 1 … {}", c.engram_vocab_size, kMaxTableRows);
  found.require(c.engram_compressed_vocab_size >= 1 && c.engram_compressed_vocab_size <= c.vocab_size,
                "engram_compressed_vocab_size is {}; it must be 1 … vocab_size {}",
                c.engram_compressed_vocab_size, c.vocab_size);
  found.require(c.engram_pad_id < c.vocab_size, "engram_pad_id {} is not below vocab_size {}",
                c.engram_pad_id, c.vocab_size);
}

void check_draft(const ModelConfig& c, Findings& found) {
  if (c.n_mtp_layers == 0) return;
  found.require(c.dspark_block_size >= 1 && c.dspark_block_size <= 1024,
                "dspark_block_size is {}; it must be 1 … 1024", c.dspark_block_size);
  found.require(c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id {} is not below vocab_size {}",
                c.dspark_noise_token_id, c.vocab_size);
  found.require(!c.dspark_target_layer_ids.empty() && ascending(c.dspark_target_layer_ids) &&
                    c.dspark_target_layer_ids.back() < c.n_layers,
                "dspark_target_layer_ids must name layers below {} in ascending order", c.n_layers);
  found.require(c.dspark_markov_rank >= 1 && c.dspark_markov_rank <= kMaxDimension,
                "dspark_markov_rank is {}; it must be 1 … {}", c.dspark_markov_rank, kMaxDimension);
  found.require(
      c.dspark_n_activated_experts >= 1 && c.dspark_n_activated_experts <= c.dspark_n_routed_experts,
      "dspark_n_activated_experts is {}; it must be 1 … dspark_n_routed_experts {}",
      c.dspark_n_activated_experts, c.dspark_n_routed_experts);
}

void check_vision_and_tokens(const ModelConfig& c, Findings& found) {
  // Two-dimensional RoPE rotates channel pairs with row angles on one half and column angles on the other.
  found.require(c.vision_n_heads == 0 ||
                    (c.vision_dim % c.vision_n_heads == 0 && c.vision_dim / c.vision_n_heads % 4 == 0),
                "vision_dim {} over vision_n_heads {} must give heads of a multiple of 4 channels",
                c.vision_dim, c.vision_n_heads);
  found.require(c.image_token_id < c.vocab_size, "image_token_id {} is not below vocab_size {}",
                c.image_token_id, c.vocab_size);
  found.require(c.bos_id() < c.vocab_size && c.eos_id() < c.vocab_size,
                "bos_token_id {} or eos_token_id {} is not below vocab_size {}", c.bos_id(), c.eos_id(),
                c.vocab_size);
  found.require(c.max_positions() >= 1, "max_position_embeddings is 0");
}

}  // namespace

std::vector<std::string> config_findings(const ModelConfig& config) {
  Findings found;
  check_sizes(config, found);
  check_formats(config, found);
  check_numbers(config, found);
  check_attention(config, found);
  check_experts(config, found);
  check_engram(config, found);
  check_draft(config, found);
  check_vision_and_tokens(config, found);
  return found.take();
}

}  // namespace dsv41
