// Reading, printing and comparing configs: loops over the schema table (config_schema.h).
#include "loader/config.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "loader/config_schema.h"
#include "loader/error.h"
#include "loader/json.h"
#include "loader/safetensors.h"

namespace dsv41 {
namespace {

using simdjson::dom::element;
using simdjson::dom::element_type;

constexpr std::size_t kConfigBytes = 4u << 20;  // the released files have 3 KB
constexpr std::size_t kConfigDepth = 16;        // the released files nest 3 deep
constexpr std::size_t kMaxListEntries = 4096;   // the released lists have 43 at most; checks compare lists

/// Reads values out of one file; every refusal names the file, the key as that file spells it, and what was
/// found.
class ConfigReader {
 public:
  ConfigReader(std::string_view file, bool nested) : file_(file), nested_(nested) {}

  void read(const ConfigField& field, element root, ModelConfig& config) {
    key_ = nested_ ? field.nested : field.flat;
    visit_member(field, config, [&](auto& member) {
      element found;
      if (find(root, found))
        read(found, member);
      else if (!field.nested_only())
        fail("is missing");
    });
  }

 private:
  /// Follows the dotted path; false when a step is absent.
  bool find(element root, element& found) {
    std::string_view path = key_;
    found = root;
    while (!path.empty()) {
      const std::size_t dot = std::min(path.find('.'), path.size());
      simdjson::dom::object object;
      if (found.get_object().get(object) != simdjson::SUCCESS)
        fail("is missing: a step of this path is not an object");
      if (object.at_key(path.substr(0, dot)).get(found) != simdjson::SUCCESS) return false;
      path.remove_prefix(std::min(dot + 1, path.size()));
    }
    return true;
  }

  [[noreturn]] void fail(std::string_view what) {
    throw CheckpointError(fmt::format("{}: config key \"{}\" {}", file_, key_, what));
  }

  [[noreturn]] void fail_type(std::string_view wanted, element found) {
    fail(fmt::format("should be {}, it is {}", wanted, printable(simdjson::to_string(found))));
  }

  void read(element found, std::uint64_t& member) {
    if (found.get_uint64().get(member) != simdjson::SUCCESS) fail_type("a non-negative integer", found);
  }

  void read(element found, std::uint32_t& member) {
    std::uint64_t wide = 0;
    read(found, wide);
    if (wide >= (std::uint64_t{1} << 31)) fail_type("an integer below 2^31", found);
    member = static_cast<std::uint32_t>(wide);
  }

  void read(element found, double& member) {
    if (found.get_double().get(member) != simdjson::SUCCESS) fail_type("a number", found);
  }

  void read(element found, bool& member) {
    if (found.get_bool().get(member) != simdjson::SUCCESS) fail_type("true or false", found);
  }

  void read(element found, std::string& member) {
    std::string_view text;
    if (found.get_string().get(text) != simdjson::SUCCESS) fail_type("a string", found);
    member = text;
  }

  template <typename Type>
  void read(element found, std::optional<Type>& member) {
    if (found.is_null()) return;
    Type value{};
    read(found, value);
    member = std::move(value);
  }

  template <typename Type>
  void read(element found, std::vector<Type>& member) {
    simdjson::dom::array array;
    if (found.get_array().get(array) != simdjson::SUCCESS) fail_type("a list", found);
    if (array.size() > kMaxListEntries)
      fail(fmt::format("has {} entries; at most {} are read", array.size(), kMaxListEntries));
    member.clear();
    for (const element entry : array) read(entry, member.emplace_back());
  }

  std::string_view file_;
  bool nested_;
  std::string_view key_;
};

/// A key written twice would make two readers see two configs.
void refuse_duplicate_keys(element value, std::string_view file) {
  simdjson::dom::array array;
  simdjson::dom::object object;
  if (value.get_array().get(array) == simdjson::SUCCESS) {
    for (const element entry : array) refuse_duplicate_keys(entry, file);
  } else if (value.get_object().get(object) == simdjson::SUCCESS) {
    std::set<std::string_view> keys;
    for (const auto& field : object) {
      if (!keys.insert(field.key).second)
        throw CheckpointError(fmt::format("{}: config key \"{}\" appears twice", file, printable(field.key)));
      refuse_duplicate_keys(field.value, file);
    }
  }
}

}  // namespace

ModelConfig parse_config(std::string_view json, std::string_view name) {
  if (json.size() > kConfigBytes)
    throw CheckpointError(
        fmt::format("{}: {} bytes are too many for a config (limit {})", name, json.size(), kConfigBytes));
  simdjson::dom::parser parser;
  element root;
  auto error = parser.allocate(std::max<std::size_t>(json.size(), 1), kConfigDepth);
  if (error == simdjson::SUCCESS) error = parser.parse(json.data(), json.size()).get(root);
  if (error != simdjson::SUCCESS)
    throw CheckpointError(fmt::format("{}: malformed JSON: {}", name, simdjson::error_message(error)));
  if (!root.is_object()) throw CheckpointError(fmt::format("{}: the config is not a JSON object", name));
  refuse_duplicate_keys(root, name);

  const bool nested = root.at_key("text_config").error() == simdjson::SUCCESS;
  if (!nested && root.at_key("dim").error() != simdjson::SUCCESS) {
    std::string_view type;
    if (root.at_key("model_type").get_string().get(type) != simdjson::SUCCESS) type = "unknown";
    throw CheckpointError(fmt::format(
        "{}: not a DeepSeek-V4.1 config (model_type {}): it has neither \"text_config\" nor \"dim\"", name,
        printable(type)));
  }
  ModelConfig config;
  ConfigReader reader(name, nested);
  for (const ConfigField& field : config_fields())
    if (nested || !field.nested_only()) reader.read(field, root, config);
  // Whatever is kept per block is as long as compress_ratios should be.
  if (config.n_blocks() > kMaxListEntries)
    throw CheckpointError(fmt::format("{}: n_layers {} + n_mtp_layers {} are more than {} blocks", name,
                                      config.n_layers, config.n_mtp_layers, kMaxListEntries));
  return config;
}

ModelConfig read_config(const std::filesystem::path& file) {
  const MappedFile mapped(file);
  return parse_config(mapped.text(), file.string());
}

std::filesystem::path find_config(const std::filesystem::path& directory) {
  std::error_code ignored;
  for (const char* candidate : {"config.json", "inference/config.json"})
    // Not exists(): a symbolic link that leads nowhere is to be reported by whoever opens it.
    if (std::filesystem::symlink_status(directory / candidate, ignored).type() !=
        std::filesystem::file_type::not_found)
      return directory / candidate;
  if (std::filesystem::is_empty(directory, ignored))
    throw CheckpointError(
        fmt::format("{}: the directory is empty; download the checkpoint into it", directory.string()));
  throw CheckpointError(fmt::format(
      "{}: not a DeepSeek-V4.1 checkpoint: neither config.json nor inference/config.json is there",
      directory.string()));
}

namespace {

using nlohmann::ordered_json;

template <typename Type>
ordered_json to_json(const Type& value) {
  return value;
}

/// Whole numbers without ".0", as the released files have them for all but swiglu_limit (equal as JSON
/// numbers).
ordered_json to_json(double value) {
  if (value == std::floor(value) && std::abs(value) < 0x1p53) return static_cast<std::int64_t>(value);
  return value;
}

template <typename Type>
ordered_json to_json(const std::optional<Type>& value) {
  return value ? to_json(*value) : ordered_json(nullptr);
}

ordered_json member_json(const ConfigField& field, const ModelConfig& config) {
  return visit_member(field, config, [](const auto& member) { return to_json(member); });
}

}  // namespace

std::string to_flat_json(const ModelConfig& config) {
  ordered_json out = ordered_json::object();
  for (const ConfigField& field : config_fields())
    if (!field.nested_only()) out[std::string(field.flat)] = member_json(field, config);
  return out.dump(2) + "\n";
}

std::string to_nested_json(const ModelConfig& config) {
  // What the layout states beside the fields of the schema: facts of the format, the same for every model.
  ordered_json out = {
      {"quantization_config",
       {{"activation_scheme", "dynamic"}, {"weight_block_size", {32, 32}}, {"scale_fmt", "ue8m0"}}},
      {"text_config", {{"model_type", "deepseek_v41_text"}, {"rope_scaling", {{"rope_type", "yarn"}}}}},
      {"vision_config", {{"model_type", "deepseek_v41_vision"}}}};
  for (const ConfigField& field : config_fields()) {
    ordered_json value = member_json(field, config);
    if (field.nested_only() && (value.is_null() || (value.is_array() && value.empty()))) continue;
    std::string pointer = "/" + std::string(field.nested);
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    out[ordered_json::json_pointer(pointer)] = std::move(value);
  }
  return out.dump(2) + "\n";
}

std::vector<std::string> differing_fields(const ModelConfig& a, const ModelConfig& b) {
  std::vector<std::string> names;
  for (const ConfigField& field : config_fields())
    visit_member(field, a, [&](const auto& left) {
      visit_member(field, b, [&](const auto& right) {
        if constexpr (std::is_same_v<decltype(left), decltype(right)>)
          if (left != right) names.emplace_back(field.flat);
      });
    });
  return names;
}

AttentionMode ModelConfig::mode(std::uint32_t block) const {
  const auto holds = [&](const std::vector<std::uint32_t>& list) {
    return std::find(list.begin(), list.end(), block) != list.end();
  };
  if (block >= n_layers || compress_ratios.at(block) == 0) return AttentionMode::Window;
  if (holds(kv_source_layers)) return AttentionMode::Full;
  return holds(index_source_layers) ? AttentionMode::Reindex : AttentionMode::Reuse;
}

namespace {

std::uint32_t nearest_source(const std::vector<std::uint32_t>& sources, std::uint32_t layer,
                             std::string_view what) {
  const auto above = std::upper_bound(sources.begin(), sources.end(), layer);
  if (above == sources.begin())
    throw CheckpointError(fmt::format("layer {} has no {} at or below it", layer, what));
  return *(above - 1);
}

}  // namespace

std::uint32_t ModelConfig::kv_source(std::uint32_t layer) const {
  return nearest_source(kv_source_layers, layer, "KV source (kv_source_layers)");
}

std::uint32_t ModelConfig::index_source(std::uint32_t layer) const {
  return nearest_source(index_source_layers, layer, "index source (index_source_layers)");
}

std::optional<std::size_t> ModelConfig::engram_index(std::uint32_t layer) const {
  const auto found = std::find(engram_layer_ids.begin(), engram_layer_ids.end(), layer);
  if (found == engram_layer_ids.end()) return std::nullopt;
  return static_cast<std::size_t>(found - engram_layer_ids.begin());
}

}  // namespace dsv41
