// Writes checkpoints in the release layout from a config: sparse trees of full size, small random ones that
// run. What to write is plain data first (Tree), so that tests and tools can damage it before it is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loader/config.h"
#include "loader/safetensors.h"

namespace dsv41 {

struct TreeTensor {
  std::string name;
  DType dtype = DType::U8;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // data_offsets as they will stand in the header
};

struct TreeShard {
  std::string file;  // name inside the directory
  std::vector<TreeTensor> tensors;
  std::uint64_t payload_bytes = 0;
  bool present = true;  // false: not written, though the index names it

  /// Gives every tensor its bytes, wide elements first (that keeps all of them aligned), and sets
  /// payload_bytes.
  void lay_out();
  TreeTensor* find(std::string_view name);
};

struct Tree {
  std::vector<TreeShard> shards;
  std::vector<std::pair<std::string, std::string>> index;  // tensor, shard file
  std::uint64_t index_total_size = 0;
  std::string nested_config,
      flat_config;  // texts of config.json and inference/config.json; empty: not written
  bool write_index = true;
};

/// The tree that a config describes: all shards of the inventory, laid out, with index and both configs.
Tree plan_tree(const ModelConfig& config);

enum class Payload {
  Sparse,      // holes: every byte reads as zero, no disk space is used
  Random,      // valid codes, scaled so that activations stay sane; the same for the same seed everywhere
  HeaderOnly,  // files end after the header
};

struct TreeOptions {
  Payload payload = Payload::Sparse;
  std::uint64_t seed = 1;
  std::vector<std::uint32_t> shards = {};  // 1-based: write only these; empty: all
  std::filesystem::path tokenizer = {};    // copied to tokenizer.json unless empty
};

/// Creates the directory if needed and writes into it. Throws ResourceError when something cannot be written.
void write_tree(const Tree& tree, const std::filesystem::path& directory, const TreeOptions& options = {});
void write_tree(const ModelConfig& config, const std::filesystem::path& directory,
                const TreeOptions& options = {});

/// 8-byte length and JSON, padded with spaces to a multiple of 8.
std::string render_header(std::span<const TreeTensor> tensors);
/// Random bytes of rows [first_row, first_row + rows) of a tensor, rows being slices along the first
/// dimension. The distribution follows from the name (norms near 1, linears by fan-in, scales that belong to
/// their weights).
std::vector<std::uint8_t> random_rows(const TreeTensor& tensor, std::uint64_t seed, std::uint64_t first_row,
                                      std::uint64_t rows);

}  // namespace dsv41
