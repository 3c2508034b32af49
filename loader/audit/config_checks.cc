// Twelve claims about the config alone (checks.h).
#include <algorithm>
#include <numeric>

#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

bool contains(const std::vector<std::uint32_t>& values, std::uint32_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

Check ratios_cover_every_block(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: len(compress_ratios) == n_layers + n_mtp_layers");
  const std::size_t length = config.compress_ratios.size();
  if (length != config.n_blocks())
    claim.contradict("compress_ratios has {} entries, n_layers {} + n_mtp_layers {} = {}", length,
                     config.n_layers, config.n_mtp_layers, config.n_blocks());
  return claim.conclude(claim.contradicted() ? "" : fmt::format("{} entries", length));
}

Check draft_stages_compress_nothing(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: MTP layers compress nothing");
  for (std::size_t block = config.n_layers; block < config.compress_ratios.size(); ++block)
    if (config.compress_ratios[block] != 0)
      claim.contradict("compress_ratios[{}] is {} instead of 0", block, config.compress_ratios[block]);
  return claim.conclude(
      fmt::format("compress_ratios[{}:{}]", config.n_layers, config.compress_ratios.size()));
}

Check kv_sources_are_index_sources(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: kv_source_layers is a subset of index_source_layers");
  for (const std::uint32_t layer : config.kv_source_layers)
    if (!contains(config.index_source_layers, layer)) claim.contradict("{} is a KV source only", layer);
  return claim.conclude(
      fmt::format("{} in {}", list_text(config.kv_source_layers), list_text(config.index_source_layers)));
}

Check sources_read_compressed_positions(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: every source layer reads compressed positions");
  const auto judge = [&](const char* list, const std::vector<std::uint32_t>& layers) {
    for (const std::uint32_t layer : layers)
      if (layer >= config.n_layers)
        claim.contradict("{} {} is outside the {} layers", list, layer, config.n_layers);
      else if (layer < config.compress_ratios.size() && config.compress_ratios[layer] == 0)
        claim.contradict("{} {} has compress_ratios 0", list, layer);
  };
  judge("kv_source_layers", config.kv_source_layers);
  judge("index_source_layers", config.index_source_layers);
  return claim.conclude("");
}

Check index_sources_have_a_kv_source(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: every index source has a KV source at or below it");
  const auto lowest = std::min_element(config.kv_source_layers.begin(), config.kv_source_layers.end());
  const std::string kv_sources = list_text(config.kv_source_layers);
  for (const std::uint32_t layer : config.index_source_layers)
    if (lowest == config.kv_source_layers.end() || layer < *lowest)
      claim.contradict("index source {} lies below every KV source of {}", layer, kv_sources);
  return claim.conclude("");
}

Check candidate_source_follows_the_last_kv_source(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence,
              "config: candidate_source_layer is the first index source from the last KV source on");
  if (config.kv_source_layers.empty()) return claim.does_not_apply("no layer is a KV source");
  const std::uint32_t last = config.kv_source_layers.back();
  const std::vector<std::uint32_t>& sources = config.index_source_layers;
  const auto first =
      std::find_if(sources.begin(), sources.end(), [&](std::uint32_t layer) { return layer >= last; });
  if (first == sources.end())
    claim.contradict("no index source at or after KV source {}", last);
  else if (*first != config.candidate_source_layer)
    claim.contradict("candidate_source_layer is {}, the first index source from {} on is {}",
                     config.candidate_source_layer, last, *first);
  return claim.conclude(fmt::format("candidate_source_layer {}", config.candidate_source_layer));
}

Check dspark_targets_are_the_last_layers(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: dspark_target_layer_ids are the last n_mtp_layers backbone layers");
  std::vector<std::uint32_t> last(std::min(config.n_mtp_layers, config.n_layers));
  std::iota(last.begin(), last.end(), config.n_layers - static_cast<std::uint32_t>(last.size()));
  if (config.dspark_target_layer_ids != last)
    claim.contradict("declared {}, the last {} of {} layers are {}",
                     list_text(config.dspark_target_layer_ids), last.size(), config.n_layers,
                     list_text(last));
  return claim.conclude(claim.contradicted() ? "" : list_text(last));
}

Check one_size_per_engram_layer(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: one Engram table size per Engram layer");
  if (config.engram_num_embeddings.size() != config.engram_layer_ids.size())
    claim.contradict("engram_num_embeddings has {} entries, engram_layer_ids {}",
                     config.engram_num_embeddings.size(), config.engram_layer_ids.size());
  return claim.conclude(fmt::format("{} for layers {}", list_text(config.engram_num_embeddings),
                                    list_text(config.engram_layer_ids)));
}

Check engram_layers_are_inside_the_backbone(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: engram_layer_ids are inside the backbone");
  for (const std::uint32_t layer : config.engram_layer_ids)
    if (layer >= config.n_layers) claim.contradict("layer {} of {}", layer, config.n_layers);
  return claim.conclude(list_text(config.engram_layer_ids));
}

Check compressed_vocabulary_is_set(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: engram_compressed_vocab_size is set");
  if (config.engram_layer_ids.empty()) return claim.does_not_apply("the config has no Engram layer");
  if (config.engram_compressed_vocab_size == 0) claim.contradict("engram_compressed_vocab_size is 0");
  if (config.engram_compressed_vocab_size > config.vocab_size)
    claim.contradict("engram_compressed_vocab_size {} is above vocab_size {}",
                     config.engram_compressed_vocab_size, config.vocab_size);
  return claim.conclude(grouped(config.engram_compressed_vocab_size));
}

Check formats_and_widths(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "config: FP8 weights, FP4 experts, and widths that fill whole blocks of 32");
  if (config.dtype != "fp8") claim.contradict("dtype is \"{}\" instead of \"fp8\"", config.dtype);
  if (config.expert_dtype != "fp4")
    claim.contradict("expert_dtype is \"{}\" instead of \"fp4\"", config.expert_dtype);
  const std::uint64_t heads_per_group = config.o_groups == 0 ? 0 : config.n_heads / config.o_groups;
  if (config.o_groups == 0 || config.n_heads % config.o_groups != 0)
    claim.contradict("n_heads {} does not divide into o_groups {}", config.n_heads, config.o_groups);
  struct Width {
    const char* name;
    std::uint64_t value;
  };
  const Width widths[] = {
      {"dim", config.dim},
      {"moe_inter_dim", config.moe_inter_dim},
      {"q_lora_rank", config.q_lora_rank},
      {"head_dim", config.head_dim},
      {"n_heads / o_groups * head_dim", heads_per_group * config.head_dim},
      {"o_groups * o_lora_rank", std::uint64_t{config.o_groups} * config.o_lora_rank},
      {"engram_head_dim", config.engram_layer_ids.empty() ? 32 : config.engram_head_dim},
  };
  for (const Width& width : widths)
    if (width.value == 0 || width.value % 32 != 0)
      claim.contradict("{} = {} is no positive multiple of 32", width.name, width.value);
  return claim.conclude(fmt::format("dtype {}, expert_dtype {}", config.dtype, config.expert_dtype));
}

}  // namespace

void check_config(const Evidence& evidence, Checks& checks) {
  // A config that lacks a required field cannot be read: the caller has replaced this check by that failure
  // then.
  checks.push_back(Claim(evidence, "config: every required field is present")
                       .conclude(fmt::format("{} layers, {} MTP layers, dim {}", evidence.config().n_layers,
                                             evidence.config().n_mtp_layers, evidence.config().dim)));
  checks.push_back(ratios_cover_every_block(evidence));
  checks.push_back(draft_stages_compress_nothing(evidence));
  checks.push_back(kv_sources_are_index_sources(evidence));
  checks.push_back(sources_read_compressed_positions(evidence));
  checks.push_back(index_sources_have_a_kv_source(evidence));
  checks.push_back(candidate_source_follows_the_last_kv_source(evidence));
  checks.push_back(dspark_targets_are_the_last_layers(evidence));
  checks.push_back(one_size_per_engram_layer(evidence));
  checks.push_back(engram_layers_are_inside_the_backbone(evidence));
  checks.push_back(compressed_vocabulary_is_set(evidence));
  checks.push_back(formats_and_widths(evidence));
}

}  // namespace dsv41::audit
