// The release layout as code (inventory.h): reads like the table of docs/checkpoint.md, "Tensors".
#include "loader/inventory.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/views.h"
#include "loader/error.h"

namespace dsv41 {
namespace {

using u64 = std::uint64_t;

class Builder {
 public:
  explicit Builder(const ModelConfig& config) : c_(config) {}

  Inventory build() {
    out_.tensors.reserve(tensor_count(c_));
    shard_ = 1;
    vision();
    ++shard_;
    embedding();
    for (std::uint32_t layer = 0; layer < c_.n_layers; ++layer) {
      ++shard_;
      backbone_layer(layer);
    }
    ++shard_;
    head();
    for (std::uint32_t stage = 0; stage < c_.n_mtp_layers; ++stage) {
      ++shard_;
      draft_stage(stage);
    }
    for (std::size_t table = 0; table < c_.engram_layer_ids.size(); ++table) {
      ++shard_;
      engram_layer(table);
    }
    return std::move(out_);
  }

 private:
  void at(Category category) { category_ = category; }

  void add(std::string_view name, std::string_view suffix, DType dtype, Shape shape, const char* fields) {
    text_.resize(prefix_bytes_);
    text_.append(name).append(suffix);
    out_.tensors.push_back({out_.names.add(text_), shape, dtype, category_, shard_, fields});
  }

  void bf16(std::string_view name, Shape shape, const char* fields) {
    add(name, "", DType::BF16, shape, fields);
  }
  void f32(std::string_view name, Shape shape, const char* fields) {
    add(name, "", DType::F32, shape, fields);
  }

  /// A weight [n, k] in E4M3 and its scales, one per 32 x 32 tile.
  void fp8(std::string_view name, u64 n, u64 k, const char* fields) {
    add(name, ".weight", DType::F8E4M3, {n, k}, fields);
    add(name, ".scale", DType::F8E8M0, {ceil_div(n, kBlock), ceil_div(k, kBlock)}, fields);
  }

  /// A weight [n, k] in E2M1, two per byte, and its scales, one per row per 32.
  void fp4(std::string_view name, u64 n, u64 k, const char* fields) {
    add(name, ".weight", DType::I8, {n, k / 2}, fields);
    add(name, ".scale", DType::F8E8M0, {n, k / kBlock}, fields);
  }

  void prefix(std::string_view text) {
    text_ = text;
    prefix_bytes_ = text_.size();
  }

  void block(std::string_view name, std::uint32_t index, bool draft, std::uint32_t experts) {
    const u64 dim = c_.dim, heads_dim = u64{c_.n_heads} * c_.head_dim,
              group_dim = u64{c_.o_groups} * c_.o_lora_rank;
    const u64 mixes = (2 + u64{c_.hc_mult}) * c_.hc_mult, stream = u64{c_.hc_mult} * dim,
              inner = c_.moe_inter_dim;
    prefix(name);

    at(draft ? Category::Draft : Category::Attention);
    fp8("attn.wq_a", c_.q_lora_rank, dim, "q_lora_rank, dim");
    fp8("attn.wq_b", heads_dim, c_.q_lora_rank, "n_heads*head_dim, q_lora_rank");
    fp8("attn.wkv", c_.head_dim, dim, "head_dim, dim");
    fp8("attn.wo_a", group_dim, c_.o_groups == 0 ? 0 : heads_dim / c_.o_groups,
        "o_groups*o_lora_rank, n_heads*head_dim/o_groups");
    fp8("attn.wo_b", dim, group_dim, "dim, o_groups*o_lora_rank");
    bf16("attn.q_norm.weight", {c_.q_lora_rank}, "q_lora_rank");
    bf16("attn.kv_norm.weight", {c_.head_dim}, "head_dim");
    f32("attn.attn_sink", {c_.n_heads}, "n_heads");
    bf16("attn_norm.weight", {dim}, "dim");
    const AttentionMode mode = c_.mode(index);
    if (mode == AttentionMode::Full) compressor(index);
    if (mode == AttentionMode::Full || mode == AttentionMode::Reindex) index_query();

    at(draft ? Category::Draft : Category::Norms);
    bf16("ffn_norm.weight", {dim}, "dim");
    f32("hc_attn_fn", {mixes, stream}, "(2+hc_mult)*hc_mult, hc_mult*dim");
    f32("hc_attn_base", {mixes}, "(2+hc_mult)*hc_mult");
    f32("hc_attn_scale", {3}, "always 3");
    f32("hc_ffn_fn", {mixes, stream}, "(2+hc_mult)*hc_mult, hc_mult*dim");
    f32("hc_ffn_base", {mixes}, "(2+hc_mult)*hc_mult");
    f32("hc_ffn_scale", {3}, "always 3");
    const char* experts_field = draft ? "dspark_n_routed_experts" : "n_routed_experts";
    bf16("ffn.gate.weight", {experts, dim}, draft ? "dspark_n_routed_experts, dim" : "n_routed_experts, dim");
    f32("ffn.gate.bias", {experts}, experts_field);
    f32("ffn.gate.bias_vl", {experts}, experts_field);

    at(draft ? Category::Draft : Category::SharedExperts);
    fp8("ffn.shared_experts.w1", inner, dim, "moe_inter_dim, dim");
    fp8("ffn.shared_experts.w2", dim, inner, "dim, moe_inter_dim");
    fp8("ffn.shared_experts.w3", inner, dim, "moe_inter_dim, dim");

    at(Category::RoutedExperts);
    const std::string experts_prefix = fmt::format("{}ffn.experts.", name);
    for (std::uint32_t expert = 0; expert < experts; ++expert) {
      text_ = experts_prefix;
      text_.append(fmt::format_int(expert).c_str()).push_back('.');
      prefix_bytes_ = text_.size();
      fp4("w1", inner, dim, "moe_inter_dim, dim");
      fp4("w2", dim, inner, "dim, moe_inter_dim");
      fp4("w3", inner, dim, "moe_inter_dim, dim");
    }
    prefix(name);
  }

  void compressor(std::uint32_t layer) {
    bf16("attn.compressor.wkv.weight", {c_.head_dim, c_.dim}, "head_dim, dim");
    if (c_.compress_ratios[layer] > 1)
      bf16("attn.compressor.wgate.weight", {c_.head_dim, c_.dim}, "head_dim, dim");
    bf16("attn.compressor.norm.weight", {c_.head_dim}, "head_dim");
    bf16("attn.indexer.wk.weight", {c_.index_head_dim, c_.head_dim}, "index_head_dim, head_dim");
    bf16("attn.indexer.k_norm.weight", {c_.index_head_dim}, "index_head_dim");
  }

  void index_query() {
    fp8("attn.indexer.wq_b", u64{c_.index_n_heads} * c_.index_head_dim, c_.q_lora_rank,
        "index_n_heads*index_head_dim, q_lora_rank");
    bf16("attn.indexer.weights_proj.weight", {c_.index_n_heads, c_.dim}, "index_n_heads, dim");
  }

  void backbone_layer(std::uint32_t layer) {
    block(fmt::format("layers.{}.", layer), layer, false, c_.n_routed_experts);
  }

  void draft_stage(std::uint32_t stage) {
    block(fmt::format("mtp.{}.", stage), c_.n_layers + stage, true, c_.dspark_n_routed_experts);
    at(Category::Draft);
    if (stage == 0) {
      fp8("main_proj", c_.dim, c_.dspark_target_layer_ids.size() * u64{c_.dim},
          "dim, entries of dspark_target_layer_ids*dim");
      bf16("main_norm.weight", {c_.dim}, "dim");
    }
    if (stage + 1 == c_.n_mtp_layers) {
      bf16("norm.weight", {c_.dim}, "dim");
      bf16("markov_head.embed.weight", {c_.vocab_size, c_.dspark_markov_rank},
           "vocab_size, dspark_markov_rank");
      bf16("markov_head.head.weight", {c_.vocab_size, c_.dspark_markov_rank},
           "vocab_size, dspark_markov_rank");
      bf16("confidence_head.proj.weight", {1, u64{c_.dim} + c_.dspark_markov_rank},
           "1, dim+dspark_markov_rank");
    }
  }

  void engram_layer(std::size_t table) {
    at(Category::EngramTables);
    prefix(fmt::format("layers.{}.engram.", c_.engram_layer_ids[table]));
    const u64 rows = table < c_.engram_num_embeddings.size() ? c_.engram_num_embeddings[table] : 0,
              width = c_.engram_head_dim;
    add("embed", ".weight", DType::F8E4M3, {rows, width}, "engram_num_embeddings, engram_head_dim");
    add("embed", ".scale", DType::F8E8M0, {rows, width / kBlock},
        "engram_num_embeddings, engram_head_dim/32");
    fp8("wkv", (u64{c_.hc_mult} + 1) * c_.dim, u64{c_.n_hash_columns()} * width,
        "(hc_mult+1)*dim, (engram_max_ngram_size-1)*engram_n_heads*engram_head_dim");
    bf16("q_weight", {c_.hc_mult, c_.dim}, "hc_mult, dim");
    bf16("k_weight", {c_.hc_mult, c_.dim}, "hc_mult, dim");
  }

  void vision() {
    at(Category::Vision);
    const u64 width = c_.vision_dim, inner = c_.vision_inter_dim, patch = c_.vision_patch_size,
              down = c_.vision_downsample_ratio;
    prefix("vision.");
    bf16("patch_embed.proj.weight", {width, 3 * patch * patch}, "vision_dim, 3*vision_patch_size^2");
    bf16("patch_embed.proj.bias", {width}, "vision_dim");
    for (std::uint32_t i = 0; i < c_.vision_n_layers; ++i) {
      prefix(fmt::format("vision.blocks.{}.", i));
      bf16("norm1.weight", {width}, "vision_dim");
      bf16("norm2.weight", {width}, "vision_dim");
      bf16("attn.wqkv.weight", {3 * width, width}, "3*vision_dim, vision_dim");
      bf16("attn.wqkv.bias", {3 * width}, "3*vision_dim");
      bf16("attn.wo.weight", {width, width}, "vision_dim, vision_dim");
      bf16("attn.wo.bias", {width}, "vision_dim");
      bf16("mlp.w1.weight", {2 * inner, width}, "2*vision_inter_dim, vision_dim");
      bf16("mlp.w2.weight", {width, inner}, "vision_dim, vision_inter_dim");
    }
    prefix("");
    bf16("vision.norm.weight", {width}, "vision_dim");
    bf16("aligner.w1.weight", {c_.dim, down * down * width}, "dim, vision_downsample_ratio^2*vision_dim");
    bf16("aligner.w1.bias", {c_.dim}, "dim");
    bf16("aligner.w2.weight", {c_.dim, c_.dim}, "dim, dim");
    bf16("aligner.w2.bias", {c_.dim}, "dim");
  }

  void embedding() {
    prefix("");
    at(Category::EmbeddingAndHead);
    bf16("embed.weight", {c_.vocab_size, c_.dim}, "vocab_size, dim");
    at(Category::Vision);
    for (const char* name : {"image_start", "image_newline", "image_end"}) bf16(name, {c_.dim}, "dim");
  }

  void head() {
    prefix("");
    at(Category::EmbeddingAndHead);
    bf16("head.weight", {c_.vocab_size, c_.dim}, "vocab_size, dim");
    bf16("norm.weight", {c_.dim}, "dim");
  }

  const ModelConfig& c_;
  Inventory out_;
  std::uint32_t shard_ = 0;
  Category category_ = Category::Norms;
  std::string text_;  // the current prefix, then the name being built
  std::size_t prefix_bytes_ = 0;
};

}  // namespace

std::uint64_t tensor_count(const ModelConfig& config) {
  __extension__ using Wide = unsigned __int128;
  Wide count = 7 + 8 * Wide{config.vision_n_layers} + 4 +
               2;  // vision and aligner, embed and delimiters, head and norm
  count += config.n_layers * (30 + 6 * Wide{config.n_routed_experts});
  count += config.n_mtp_layers * (30 + 6 * Wide{config.dspark_n_routed_experts});
  for (std::uint32_t layer = 0; layer < std::min<std::size_t>(config.n_layers, config.compress_ratios.size());
       ++layer) {
    const AttentionMode mode = config.mode(layer);
    if (mode == AttentionMode::Full) count += config.compress_ratios[layer] > 1 ? 5 : 4;
    if (mode == AttentionMode::Full || mode == AttentionMode::Reindex) count += 3;
  }
  if (config.n_mtp_layers > 0) count += 3 + 4;  // main_proj and main_norm, final norm and the two heads
  count += 6 * Wide{config.engram_layer_ids.size()};
  return static_cast<std::uint64_t>(std::min<Wide>(count, std::numeric_limits<std::uint64_t>::max()));
}

Inventory inventory(const ModelConfig& config) {
  if (config.compress_ratios.size() < config.n_blocks())
    throw CheckpointError(fmt::format("compress_ratios has {} entries for n_layers {} + n_mtp_layers {}",
                                      config.compress_ratios.size(), config.n_layers, config.n_mtp_layers));
  if (tensor_count(config) > kMaxTensors)
    throw CheckpointError(
        fmt::format("the config asks for {} tensors, more than {} (n_layers {}, n_routed_experts {})",
                    tensor_count(config), kMaxTensors, config.n_layers, config.n_routed_experts));
  return Builder(config).build();
}

std::uint32_t shard_count(const ModelConfig& config) {
  return 3 + config.n_blocks() + static_cast<std::uint32_t>(config.engram_layer_ids.size());
}

}  // namespace dsv41
