// From a config to the name, dtype, shape and shard of every tensor of the release layout
// (spec: docs/checkpoint.md, "Tensors"): one source for loading, audit and generated trees.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loader/config.h"
#include "loader/safetensors.h"

namespace dsv41 {

struct ExpectedTensor {
  std::string name;
  DType dtype;
  std::vector<std::uint64_t> shape;
  std::uint32_t shard;  // 1-based, the released grouping: vision, embed, layers…, head, draft stages, engram layers
};

/// All tensors in shard order. The released config gives 96,085 tensors and 510,286,023,000 bytes.
std::vector<ExpectedTensor> inventory(const ModelConfig& config);
std::uint32_t shard_count(const ModelConfig& config);

}  // namespace dsv41
