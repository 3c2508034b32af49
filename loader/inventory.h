// From a config to the name, dtype, shape and shard of every tensor of the release layout
// (spec: docs/checkpoint.md, "Tensors"): one source for loading, audit and generated trees.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "loader/config.h"
#include "loader/names.h"
#include "loader/safetensors.h"

namespace dsv41 {

/// What kind of weights a tensor belongs to: the lines of the audit's byte table.
enum class Category : std::uint8_t {
  RoutedExperts,     // of backbone layers and draft stages
  EngramTables,      // all tensors of an Engram layer
  Attention,         // of backbone layers: projections, compressor, indexer, sink
  EmbeddingAndHead,  // embed, head, norm
  SharedExperts,     // of backbone layers
  Vision,            // tower, aligner, image delimiters
  Draft,             // mtp.*, without its routed experts
  Norms,             // layer norms, hyper-connections and gates of backbone layers
};

struct ExpectedTensor {
  std::string_view name;  // lives in the inventory's arena
  Shape shape;
  DType dtype = DType::U8;
  Category category = Category::Norms;
  std::uint32_t shard =
      0;  // 1-based, the released grouping: vision, embed, layers…, head, draft stages, Engram
  const char* fields = "";  // the config fields that give the shape, for messages
  std::uint64_t bytes() const { return shape.elements().value_or(0) * dtype_bytes(dtype); }
};

/// All tensors in shard order. The released config gives 96,085 tensors and 510,286,023,000 bytes.
struct Inventory {
  std::vector<ExpectedTensor> tensors;
  NameArena names;
  auto begin() const { return tensors.begin(); }
  auto end() const { return tensors.end(); }
  std::size_t size() const { return tensors.size(); }
  const ExpectedTensor& operator[](std::size_t i) const { return tensors[i]; }
};

/// Number of tensors, without building them; saturates instead of overflowing.
std::uint64_t tensor_count(const ModelConfig& config);
/// Throws CheckpointError when the config asks for more than kMaxTensors tensors.
inline constexpr std::uint64_t kMaxTensors = 4'000'000;
Inventory inventory(const ModelConfig& config);
std::uint32_t shard_count(const ModelConfig& config);

}  // namespace dsv41
