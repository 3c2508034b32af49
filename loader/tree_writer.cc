// Planning and writing trees (tree_writer.h).
#include "loader/tree_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "loader/error.h"
#include "loader/inventory.h"
#include "loader/weight_index.h"

namespace dsv41 {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kChunkBytes = 4u << 20;  // of payload made and written at a time

/// A file being written; every failure names it.
class Output {
 public:
  explicit Output(const fs::path& path) : path_(path), file_(std::fopen(path.c_str(), "wb")) {
    if (file_ == nullptr) fail("cannot create");
  }
  void write(const void* data, std::size_t bytes) {
    if (bytes != 0 && std::fwrite(data, 1, bytes, file_.get()) != bytes) fail("cannot write");
  }
  void write(std::string_view text) { write(text.data(), text.size()); }
  void close() {
    if (std::fclose(file_.release()) != 0) fail("cannot finish");
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw ResourceError(
        fmt::format("{}: {}: {}", path_.string(), what, std::generic_category().message(errno)));
  }
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  fs::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump();
}

void write_text(const fs::path& path, std::string_view text) {
  Output out(path);
  out.write(text);
  out.close();
}

void write_random(Output& out, const TreeShard& shard, std::uint64_t seed) {
  std::vector<const TreeTensor*> order;
  for (const TreeTensor& tensor : shard.tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return a->begin < b->begin; });
  for (const TreeTensor* tensor : order) {
    const std::uint64_t rows = tensor->shape.empty() ? 1 : tensor->shape[0];
    if (rows == 0 || tensor->begin == tensor->end) continue;
    const std::uint64_t row_bytes = (tensor->end - tensor->begin) / rows;
    const std::uint64_t step =
        std::max<std::uint64_t>(1, kChunkBytes / std::max<std::uint64_t>(row_bytes, 1));
    for (std::uint64_t row = 0; row < rows; row += step) {
      const std::vector<std::uint8_t> bytes = random_rows(*tensor, seed, row, std::min(step, rows - row));
      out.write(bytes.data(), bytes.size());
    }
  }
}

void write_shard(const TreeShard& shard, const fs::path& path, const TreeOptions& options) {
  const std::string header = render_header(shard.tensors);
  Output out(path);
  out.write(header);
  if (options.payload == Payload::Random) write_random(out, shard, options.seed);
  out.close();
  if (options.payload == Payload::HeaderOnly) return;
  std::error_code error;
  fs::resize_file(path, header.size() + shard.payload_bytes, error);
  if (error)
    throw ResourceError(fmt::format("{}: cannot extend to {} bytes: {}", path.string(),
                                    header.size() + shard.payload_bytes, error.message()));
}

}  // namespace

void TreeShard::lay_out() {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TreeTensor& a, const TreeTensor& b) {
    return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
  });
  payload_bytes = 0;
  for (TreeTensor& tensor : tensors) {
    tensor.begin = payload_bytes;
    payload_bytes += tensor.shape.elements().value_or(0) * dtype_bytes(tensor.dtype);
    tensor.end = payload_bytes;
  }
}

TreeTensor* TreeShard::find(std::string_view name) {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const TreeTensor& tensor) { return tensor.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

Tree plan_tree(const ModelConfig& config) {
  Tree tree;
  const std::uint32_t shards = shard_count(config);
  tree.shards.resize(shards);
  for (std::uint32_t shard = 1; shard <= shards; ++shard)
    tree.shards[shard - 1].file = shard_file_name(shard, shards);
  for (const ExpectedTensor& expected : inventory(config)) {
    TreeShard& shard = tree.shards[expected.shard - 1];
    shard.tensors.push_back({std::string(expected.name), expected.dtype, expected.shape});
    tree.index.emplace_back(expected.name, shard.file);
  }
  for (TreeShard& shard : tree.shards) {
    shard.lay_out();
    tree.index_total_size += shard.payload_bytes;
  }
  std::sort(tree.index.begin(), tree.index.end());
  tree.nested_config = to_nested_json(config);
  tree.flat_config = to_flat_json(config);
  return tree;
}

std::string render_header(std::span<const TreeTensor> tensors) {
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  for (const TreeTensor& tensor : tensors)
    json += fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", quoted(tensor.name),
                        dtype_name(tensor.dtype), tensor.shape.text(), tensor.begin, tensor.end);
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string header;
  for (int byte = 0; byte < 8; ++byte) header.push_back(static_cast<char>(json.size() >> 8 * byte & 0xFF));
  return header + json;
}

void write_tree(const Tree& tree, const fs::path& directory, const TreeOptions& options) {
  std::error_code error;
  fs::create_directories(directory / "inference", error);
  if (error) throw ResourceError(fmt::format("{}: cannot create: {}", directory.string(), error.message()));
  for (std::size_t i = 0; i < tree.shards.size(); ++i) {
    const bool chosen = options.shards.empty() || std::find(options.shards.begin(), options.shards.end(),
                                                            i + 1) != options.shards.end();
    if (tree.shards[i].present && chosen)
      write_shard(tree.shards[i], directory / tree.shards[i].file, options);
  }
  if (tree.write_index) {
    Output out(directory / kWeightIndexFile);
    out.write(fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{",
                          tree.index_total_size));
    std::string_view separator = "\n";
    for (const auto& [tensor, file] : tree.index) {
      out.write(fmt::format("{}    {}: {}", separator, quoted(tensor), quoted(file)));
      separator = ",\n";
    }
    out.write("\n  }\n}\n");
    out.close();
  }
  if (!tree.nested_config.empty()) write_text(directory / "config.json", tree.nested_config);
  if (!tree.flat_config.empty()) write_text(directory / "inference/config.json", tree.flat_config);
  if (!options.tokenizer.empty()) {
    fs::copy_file(options.tokenizer, directory / "tokenizer.json", fs::copy_options::overwrite_existing,
                  error);
    if (error)
      throw ResourceError(fmt::format("{}: cannot copy: {}", options.tokenizer.string(), error.message()));
  }
}

void write_tree(const ModelConfig& config, const fs::path& directory, const TreeOptions& options) {
  write_tree(plan_tree(config), directory, options);
}

}  // namespace dsv41
