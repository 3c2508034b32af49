// Reading the weight index (weight_index.h).
#include "loader/weight_index.h"

#include <fmt/format.h>

#include "loader/error.h"
#include "loader/json.h"

namespace dsv41 {
namespace {

constexpr std::size_t kIndexBytes = 512u << 20;  // the released index has 9 MB
constexpr std::size_t kEntries = 4'000'000;
constexpr std::size_t kTypicalLineBytes = 78;  // of one tensor
constexpr std::size_t kShards = 100'000;
constexpr std::size_t kFileNameBytes = 255;

using simdjson::ondemand::object;
using simdjson::ondemand::value;

class IndexParser {
 public:
  IndexParser(std::string_view file, WeightIndex& index) : file_(file), index_(index) {}

  void parse(std::string_view json, std::size_t readable) {
    JsonDocument document(json, readable, file_);
    json_bytes_ = json.size();
    bool has_map = false, has_metadata = false;
    object root = document.root_object("the index");
    for (auto field : root) {
      const std::string_view key = checked<std::string_view>(field.unescaped_key(), "a key");
      value content = checked<value>(field.value(), key);
      if (key == "weight_map" && !std::exchange(has_map, true))
        read_map(checked<object>(content.get_object(), "weight_map"));
      else if (key == "metadata" && !std::exchange(has_metadata, true))
        read_metadata(checked<object>(content.get_object(), "metadata"));
      else
        fail(fmt::format("\"{}\" is unknown or given twice", printable(key)));
    }
    document.expect_end();
    if (!has_map) fail("there is no \"weight_map\"");
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw CheckpointError(fmt::format("{}: {}", file_, what));
  }

  template <typename Value>
  Value checked(simdjson::simdjson_result<Value>&& result, std::string_view what) {
    if (result.error() != simdjson::SUCCESS)
      fail(fmt::format("{}: {}", printable(what), simdjson::error_message(result.error())));
    return std::move(result).value_unsafe();
  }

  void read_metadata(object metadata) {
    for (auto field : metadata) {
      const std::string_view key = checked<std::string_view>(field.unescaped_key(), "metadata");
      value content = checked<value>(field.value(), "metadata");
      if (key != "total_size") {  // libraries add scalars of their own
        if (checked(content.is_scalar(), "metadata")) continue;
        fail(fmt::format("metadata.{} is not a scalar", printable(key)));
      }
      if (index_.total_size) fail("metadata.total_size is given twice");
      std::uint64_t bytes = 0;
      if (content.get_uint64().get(bytes) != simdjson::SUCCESS)
        fail("metadata.total_size is not a non-negative integer");
      index_.total_size = bytes;
    }
  }

  void read_map(object map) {
    index_.entries.reserve(json_bytes_ / kTypicalLineBytes);
    NameIndex shard_numbers;
    std::uint32_t shard = 0;
    bool sorted = true;  // strictly: then no name can appear twice
    for (auto field : map) {
      const std::string_view key = checked<std::string_view>(field.unescaped_key(), "weight_map");
      value content = checked<value>(field.value(), key);
      const std::string_view file = checked<std::string_view>(content.get_string(), key);
      if (index_.entries.size() == kEntries) fail(fmt::format("more than {} tensors", kEntries));
      if (has_control_characters(key))
        fail(fmt::format("tensor name \"{}\" is not printable", printable(key)));
      if (index_.shards.empty() || file != index_.shards[shard]) shard = number_of(file, shard_numbers);
      const std::string_view tensor = index_.names.add(key);
      sorted = sorted && (index_.entries.empty() || index_.entries.back().tensor < tensor);
      index_.entries.push_back({tensor, shard});
    }
    if (!sorted) refuse_duplicates();
  }

  void refuse_duplicates() {
    NameIndex tensors(index_.entries.size());
    for (const WeightIndex::Entry& entry : index_.entries)
      if (tensors.insert(entry.tensor, 0)) fail(fmt::format("tensor {} appears twice", entry.tensor));
  }

  std::uint32_t number_of(std::string_view file, NameIndex& shard_numbers) {
    if (const auto known = shard_numbers.find(file)) return *known;
    // A shard must lie beside the index: no directories, no parents.
    if (file.empty() || file.size() > kFileNameBytes || file.find('/') != file.npos || file.front() == '.' ||
        has_control_characters(file))
      fail(fmt::format("\"{}\" is not a plain shard file name", printable(file)));
    if (index_.shards.size() == kShards) fail(fmt::format("more than {} shards", kShards));
    const auto number = static_cast<std::uint32_t>(index_.shards.size());
    index_.shards.emplace_back(file);
    shard_numbers.insert(index_.names.add(file), number);
    return number;
  }

  std::string_view file_;
  WeightIndex& index_;
  std::size_t json_bytes_ = 0;
};

}  // namespace

WeightIndex parse_weight_index(std::string_view json, std::string_view name, std::size_t readable) {
  if (json.size() > kIndexBytes)
    throw CheckpointError(
        fmt::format("{}: {} bytes are too many for an index (limit {})", name, json.size(), kIndexBytes));
  WeightIndex index;
  IndexParser(name, index).parse(json, readable);
  return index;
}

std::string shard_file_name(std::uint32_t shard, std::uint32_t shards) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard, shards);
}

}  // namespace dsv41
