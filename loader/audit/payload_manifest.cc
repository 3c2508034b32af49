// Reading and writing manifests (payload_manifest.h).
#include "loader/audit/payload_manifest.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "loader/error.h"
#include "loader/json.h"
#include "loader/names.h"
#include "loader/safetensors.h"

namespace dsv41::audit {
namespace {

constexpr std::string_view kFormat = "dsv41-payload-manifest";
constexpr std::string_view kChecksum = "xxh3-64 of xxh3-64 per 4 MiB";
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kMaxBytes = 1u << 30, kMaxLine = 16384,
                      kMaxEntries = 4'000'000;  // released: 19 MB, 96,085

using simdjson::ondemand::value;

/// One line: an object whose every field must be asked for exactly once.
class Line {
 public:
  Line(std::string_view text, std::size_t readable, const std::string& where)
      : where_(where), document_(text, readable, where) {}

  template <typename Field>
  void each(Field field) {
    for (auto entry : document_.root_object("the line")) {
      const std::string_view key = get<std::string_view>(entry.unescaped_key(), "a key");
      value content = get<value>(entry.value(), key);
      if (!field(key, content)) fail("\"{}\" is unknown or given twice", printable(key));
    }
    document_.expect_end();
  }

  std::string text(value& content, std::string_view key, std::size_t limit = 1024) {
    const std::string_view result = get<std::string_view>(content.get_string(), key);
    if (result.empty() || result.size() > limit || has_control_characters(result))
      fail("{} is empty, longer than {} bytes or not printable", key, limit);
    return std::string(result);
  }
  std::uint64_t number(value& content, std::string_view key, std::uint64_t limit = ~std::uint64_t{0}) {
    const auto result = get<std::uint64_t>(content.get_uint64(), key);
    if (result > limit) fail("{} is {}, more than {}", key, result, limit);
    return result;
  }
  bool flag(value& content, std::string_view key) { return get<bool>(content.get_bool(), key); }

  template <typename... Arguments>
  [[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    throw CheckpointError(
        fmt::format("{}: {}", where_, fmt::format(format, std::forward<Arguments>(arguments)...)));
  }

 private:
  template <typename Value>
  Value get(simdjson::simdjson_result<Value>&& result, std::string_view what) const {
    if (result.error() != simdjson::SUCCESS)
      fail("{}: {}", printable(what), simdjson::error_message(result.error()));
    return std::move(result).value_unsafe();
  }

  const std::string& where_;
  JsonDocument document_;
};

void read_header_line(Line& line) {
  bool format = false, version = false, checksum = false;
  line.each([&](std::string_view key, value& content) {
    if (key == "format" && !std::exchange(format, true)) {
      if (const std::string text = line.text(content, key); text != kFormat)
        line.fail("format \"{}\", not \"{}\"", text, kFormat);
    } else if (key == "version" && !std::exchange(version, true)) {
      if (const auto number = line.number(content, key); number != kVersion)
        line.fail("version {} of the manifest format; this program reads {}", number, kVersion);
    } else if (key == "checksum" && !std::exchange(checksum, true)) {
      if (const std::string text = line.text(content, key); text != kChecksum)
        line.fail("checksum \"{}\", not \"{}\"", text, kChecksum);
    } else {
      return false;
    }
    return true;
  });
  if (!format || !version || !checksum) line.fail("not the first line of a payload manifest");
}

std::uint64_t parse_checksum(const Line& line, const std::string& text) {
  std::uint64_t result = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result, 16);
  if (text.size() != 16 || error != std::errc{} || end != text.data() + text.size())
    line.fail("checksum \"{}\" is not 16 hexadecimal digits", text);
  return result;
}

ManifestEntry read_entry(Line& line) {
  ManifestEntry entry;
  bool bytes = false, checksum = false, nans = false, zero = false;
  line.each([&](std::string_view key, value& content) {
    if (key == "tensor" && entry.tensor.empty())
      entry.tensor = line.text(content, key);
    else if (key == "shard" && entry.shard.empty())
      entry.shard = line.text(content, key);
    else if (key == "dtype" && entry.dtype.empty())
      entry.dtype = line.text(content, key, 32);
    else if (key == "shape" && entry.shape.empty())
      entry.shape = line.text(content, key, 256);
    else if (key == "bytes" && !std::exchange(bytes, true))
      entry.bytes = line.number(content, key);
    else if (key == "checksum" && !std::exchange(checksum, true))
      entry.checksum = parse_checksum(line, line.text(content, key, 32));
    else if (key == "nan_codes" && !std::exchange(nans, true))
      entry.nan_codes = line.number(content, key);
    else if (key == "all_zero" && !std::exchange(zero, true))
      entry.all_zero = line.flag(content, key);
    else if (key == "min_exponent" && !entry.min_exponent)
      entry.min_exponent = static_cast<std::uint8_t>(line.number(content, key, 255));
    else if (key == "max_exponent" && !entry.max_exponent)
      entry.max_exponent = static_cast<std::uint8_t>(line.number(content, key, 255));
    else
      return false;
    return true;
  });
  if (entry.tensor.empty() || entry.shard.empty() || entry.dtype.empty() || entry.shape.empty() || !bytes ||
      !checksum || !nans || !zero)
    line.fail("lacks one of tensor, shard, dtype, shape, bytes, checksum, nan_codes, all_zero");
  return entry;
}

}  // namespace

std::vector<ManifestEntry> parse_manifest(std::string_view text, std::string_view name_for_messages) {
  if (text.size() > kMaxBytes)
    throw CheckpointError(fmt::format("{}: {} bytes are too many for a manifest (limit {})",
                                      name_for_messages, text.size(), kMaxBytes));
  std::vector<ManifestEntry> entries;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string where = fmt::format("{}: line {}", name_for_messages, ++number);
    if (end - begin > kMaxLine)
      throw CheckpointError(fmt::format("{}: longer than {} bytes", where, kMaxLine));
    Line line(text.substr(begin, end - begin), text.size() - begin, where);
    if (number == 1)
      read_header_line(line);
    else if (entries.size() == kMaxEntries)
      line.fail("more than {} tensors", kMaxEntries);
    else
      entries.push_back(read_entry(line));
    begin = end + 1;
  }
  if (number == 0) throw CheckpointError(fmt::format("{}: empty, not a payload manifest", name_for_messages));
  NameIndex seen(entries.size());
  for (const ManifestEntry& entry : entries)
    if (seen.insert(entry.tensor, 0))
      throw CheckpointError(fmt::format("{}: {} is listed twice", name_for_messages, entry.tensor));
  return entries;
}

std::vector<ManifestEntry> read_manifest(const std::filesystem::path& file) {
  return parse_manifest(MappedFile(file).text(), file.string());
}

std::string render_manifest(const std::vector<ManifestEntry>& entries) {
  using Json = nlohmann::ordered_json;
  std::string text = Json{{"format", kFormat}, {"version", kVersion}, {"checksum", kChecksum}}.dump() + "\n";
  for (const ManifestEntry& entry : entries) {
    Json line = {{"tensor", entry.tensor},       {"shard", entry.shard},
                 {"dtype", entry.dtype},         {"shape", entry.shape},
                 {"bytes", entry.bytes},         {"checksum", fmt::format("{:016x}", entry.checksum)},
                 {"nan_codes", entry.nan_codes}, {"all_zero", entry.all_zero}};
    if (entry.min_exponent) line["min_exponent"] = *entry.min_exponent;
    if (entry.max_exponent) line["max_exponent"] = *entry.max_exponent;
    text += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return text;
}

void write_manifest(const std::vector<ManifestEntry>& entries, const std::filesystem::path& file) {
  const std::string text = render_manifest(entries);
  const std::filesystem::path beside = file.string() + ".new";
  const auto fail = [&](std::string_view what) {
    throw ResourceError(fmt::format("{}: cannot {} the manifest: {}", file.string(), what,
                                    std::generic_category().message(errno)));
  };
  std::FILE* out = std::fopen(beside.c_str(), "wb");
  if (out == nullptr) fail("create");
  const bool written = std::fwrite(text.data(), 1, text.size(), out) == text.size() &&
                       std::fflush(out) == 0 && ::fsync(::fileno(out)) == 0;
  if (std::fclose(out) != 0 || !written) fail("write");
  if (std::rename(beside.c_str(), file.c_str()) != 0) fail("rename");
}

}  // namespace dsv41::audit
