// model.safetensors.index.json: which shard holds which tensor (spec: docs/checkpoint.md, "Tensors").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "loader/names.h"

namespace dsv41 {

struct WeightIndex {
  struct Entry {
    std::string_view tensor;  // lives in `names`
    std::uint32_t shard;      // position in `shards`
  };
  std::optional<std::uint64_t> total_size;  // metadata.total_size, bytes
  std::vector<Entry> entries;               // in file order
  std::vector<std::string> shards;          // file names, in order of first mention
  NameArena names;
};

/// Throws CheckpointError naming `name`: malformed JSON, duplicate tensors, shard names that are no plain
/// file names. readable: bytes that may be read from json.data() on, when the caller knows
/// (MappedFile::readable()); saves a copy.
WeightIndex parse_weight_index(std::string_view json, std::string_view name, std::size_t readable = 0);

/// File name of a shard of the release layout: shard_file_name(7, 48) is "model-00007-of-00048.safetensors".
std::string shard_file_name(std::uint32_t shard, std::uint32_t shards);
inline constexpr std::string_view kWeightIndexFile = "model.safetensors.index.json";

}  // namespace dsv41
