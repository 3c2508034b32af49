// Any bytes as model.safetensors.index.json.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "loader/error.h"
#include "loader/weight_index.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const dsv41::WeightIndex index =
        dsv41::parse_weight_index(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    for (const dsv41::WeightIndex::Entry& entry : index.entries)
      if (entry.shard >= index.shards.size()) std::abort();
    for (const std::string& shard : index.shards)
      if (shard.empty() || shard.find('/') != shard.npos) std::abort();
  } catch (const dsv41::CheckpointError&) {
  }
  return 0;
}
