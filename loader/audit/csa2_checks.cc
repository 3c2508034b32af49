// Five claims about which layers own which parts of compressed attention (checks.h).
#include <algorithm>
#include <iterator>
#include <set>

#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

using Layers = std::set<std::uint32_t>;

struct Placement {
  Layers present;
  std::set<std::pair<std::uint32_t, std::uint32_t>> unknown;  // layer, shard that would tell
};

/// Backbone layers that own a tensor with this part of the name.
Placement placement_of(const Evidence& evidence, std::string_view part) {
  Placement placement;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (tensor.name.scope != Scope::Layer || tensor.name.part != part) continue;
    const Presence presence = evidence.presence(tensor);
    if (presence == Presence::Present) placement.present.insert(tensor.name.block);
    if (presence == Presence::Unknown) placement.unknown.insert({tensor.name.block, tensor.home});
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.name.scope == Scope::Layer && !stray.name.is_expert && stray.name.part == part)
      placement.present.insert(stray.name.block);
  return placement;
}

std::string text(const Layers& layers) {
  return fmt::format("[{}]", fmt::join(layers, ", "));
}

Layers difference(const Layers& a, const Layers& b) {
  Layers result;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::inserter(result, result.end()));
  return result;
}

void compare(Claim& claim, const Placement& placement, const Layers& expected, std::string_view what) {
  Layers waiting;
  for (const auto& [layer, shard] : placement.unknown) {
    if (expected.count(layer) == 0) continue;
    claim.wait_for(shard);
    waiting.insert(layer);
  }
  const Layers missing = difference(difference(expected, placement.present), waiting);
  const Layers extra = difference(placement.present, expected);
  if (!missing.empty()) claim.contradict("{} is missing in layers {}", what, text(missing));
  if (!extra.empty())
    claim.contradict("{} in layers {}, which the config does not call for", what, text(extra));
}

Check exactly_on(const Evidence& evidence, std::string_view tensor, std::string_view where,
                 const Layers& expected) {
  Claim claim(evidence, fmt::format("csa2: {} exactly on {}", tensor, where));
  compare(claim, placement_of(evidence, fmt::format("attn.{}.weight", tensor)), expected, tensor);
  return claim.conclude(text(expected));
}

Check modes_partition_the_backbone(const Evidence& evidence, const Layers& kv_sources,
                                   const Layers& index_sources) {
  Claim claim(evidence, "csa2: Full/Reindex/Reuse partition the backbone");
  // Read off the tensors: index keys make a layer Full, index queries alone Reindex, neither Reuse (or window
  // only).
  const Placement keys = placement_of(evidence, "attn.indexer.wk.weight");
  Placement queries = placement_of(evidence, "attn.indexer.wq_b.weight");
  compare(claim, keys, kv_sources, "the Full set");
  queries.present = difference(queries.present, keys.present);
  compare(claim, queries, difference(index_sources, kv_sources), "the Reindex set");
  const std::uint64_t owners = keys.present.size() + queries.present.size();
  const std::uint64_t others =
      evidence.config().n_layers - std::min<std::uint64_t>(owners, evidence.config().n_layers);
  return claim.conclude(fmt::format("Full {}, Reindex {}, Reuse the other {}", text(keys.present),
                                    text(queries.present), others));
}

}  // namespace

void check_csa2(const Evidence& evidence, Checks& checks) {
  const ModelConfig& config = evidence.config();
  const Layers kv_sources(config.kv_source_layers.begin(), config.kv_source_layers.end());
  const Layers index_sources(config.index_source_layers.begin(), config.index_source_layers.end());
  Layers gated;
  for (const std::uint32_t layer : kv_sources)
    if (layer < config.compress_ratios.size() && config.compress_ratios[layer] > 1) gated.insert(layer);
  checks.push_back(exactly_on(evidence, "compressor.wkv", "kv_source_layers", kv_sources));
  checks.push_back(exactly_on(evidence, "compressor.wgate", "the ratio>1 KV sources", gated));
  checks.push_back(exactly_on(evidence, "indexer.wk", "kv_source_layers", kv_sources));
  checks.push_back(exactly_on(evidence, "indexer.wq_b", "index_source_layers", index_sources));
  checks.push_back(modes_partition_the_backbone(evidence, kv_sources, index_sources));
}

}  // namespace dsv41::audit
