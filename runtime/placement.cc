// Owners of experts: contiguous, cyclic, or read from a file (placement.h; docs/runtime.md, "Roles").
#include "runtime/placement.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr std::uintmax_t kMaxFileBytes = 64u << 20;

std::string read_text(const std::string& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) throw UsageError(fmt::format("placement file {}: {}", path, error.message()));
  if (bytes > kMaxFileBytes)
    throw UsageError(fmt::format("placement file {}: {} bytes, more than {} are not a placement", path, bytes,
                                 kMaxFileBytes));
  std::ifstream stream(path, std::ios::binary);
  std::string text(bytes, '\0');
  if (!stream.read(text.data(), static_cast<std::streamsize>(bytes)))
    throw UsageError(fmt::format("placement file {}: cannot be read", path));
  return text;
}

std::vector<std::vector<std::uint32_t>> read_owners(const std::string& path, const ModelConfig& config,
                                                    std::uint32_t ranks) {
  const auto refuse = [&](const std::string& what) -> UsageError {
    return UsageError(fmt::format("placement file {}: {}", path, what));
  };
  const std::string text = read_text(path);
  simdjson::dom::parser parser;
  simdjson::dom::element document;
  if (const auto error = parser.parse(text).get(document))
    throw refuse(fmt::format("not JSON: {}", simdjson::error_message(error)));
  std::uint64_t file_ranks = 0;
  if (document["ranks"].get(file_ranks)) throw refuse("no number \"ranks\"");
  if (file_ranks != ranks)
    throw refuse(fmt::format("made for {} expert ranks, this job has {} (start it with -np {})", file_ranks,
                             ranks, file_ranks + 1));
  simdjson::dom::array blocks;
  if (document["blocks"].get(blocks)) throw refuse("no array \"blocks\"");
  if (blocks.size() != config.n_blocks())
    throw refuse(fmt::format("{} blocks, the model has {} ({} layers and {} draft stages)", blocks.size(),
                             config.n_blocks(), config.n_layers, config.n_mtp_layers));
  std::vector<std::vector<std::uint32_t>> owners(config.n_blocks());
  std::uint32_t block = 0;
  for (const simdjson::dom::element element : blocks) {
    simdjson::dom::array entries;
    if (element.get(entries)) throw refuse(fmt::format("block {} is not an array of owners", block));
    if (entries.size() != config.experts_of(block))
      throw refuse(fmt::format("block {} lists {} owners for {} experts", block, entries.size(),
                               config.experts_of(block)));
    for (const simdjson::dom::element entry : entries) {
      std::uint64_t owner = 0;
      if (entry.get(owner) || owner >= ranks)
        throw refuse(fmt::format("block {}, expert {}: owner {} is not one of 0 … {}", block,
                                 owners[block].size(), simdjson::minify(entry), ranks - 1));
      owners[block].push_back(static_cast<std::uint32_t>(owner));
    }
    ++block;
  }
  return owners;
}

}  // namespace

Placement Placement::make(std::string_view specification, const ModelConfig& config, std::uint32_t ranks) {
  if (ranks == 0) throw UsageError("placement needs at least one expert rank");
  if (ranks > config.n_routed_experts)
    throw UsageError(fmt::format("{} expert ranks for {} experts: start at most {} ranks (-np {})", ranks,
                                 config.n_routed_experts, config.n_routed_experts + 1,
                                 config.n_routed_experts + 1));
  Placement placement;
  placement.ranks_ = ranks;
  placement.name_ = specification;
  if (specification.starts_with("file:")) {
    placement.owners_ = read_owners(std::string(specification.substr(5)), config, ranks);
    return placement;
  }
  const bool contiguous = specification == "contiguous";
  if (!contiguous && specification != "cyclic")
    throw UsageError(fmt::format("unknown placement \"{}\": contiguous, cyclic or file:PATH", specification));
  placement.owners_.resize(config.n_blocks());
  for (std::uint32_t block = 0; block < config.n_blocks(); ++block) {
    const std::uint32_t experts = config.experts_of(block);
    const std::uint32_t share = (experts + ranks - 1) / ranks;
    for (std::uint32_t expert = 0; expert < experts; ++expert)
      placement.owners_[block].push_back(contiguous ? expert / share : expert % ranks);
  }
  return placement;
}

std::vector<std::uint32_t> Placement::experts_of(std::uint32_t rank, std::uint32_t block) const {
  std::vector<std::uint32_t> experts;
  for (std::uint32_t expert = 0; expert < owners_[block].size(); ++expert)
    if (owners_[block][expert] == rank) experts.push_back(expert);
  return experts;
}

std::uint64_t Placement::fingerprint() const {
  std::uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a over the numbers, lengths included
  const auto add = [&](std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((value >> shift) & 0xFFu)) * 0x100000001B3u;
  };
  add(ranks_);
  for (const auto& block : owners_) {
    add(block.size());
    for (const std::uint32_t owner : block) add(owner);
  }
  return hash;
}

std::string Placement::to_json() const {
  nlohmann::ordered_json document;
  document["ranks"] = ranks_;
  document["blocks"] = owners_;
  return document.dump() + "\n";
}

}  // namespace dsv41
