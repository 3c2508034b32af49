// The payload manifest: one JSON object per line, a header line and then one line per tensor. Reading it is
// reading untrusted input. Specified in docs/checkpoint.md, "Payload manifest".
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41::audit {

struct ManifestEntry {
  std::string tensor, shard, dtype, shape;
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  std::uint64_t nan_codes = 0;
  bool all_zero = false;
  std::optional<std::uint8_t> min_exponent, max_exponent;  // E8M0 codes of a scale: 2^(code - 127)
};

/// Throws CheckpointError naming the line: malformed JSON, unknown checksum kind, missing or surplus fields,
/// a tensor listed twice, limits exceeded.
std::vector<ManifestEntry> parse_manifest(std::string_view text, std::string_view name_for_messages);
std::vector<ManifestEntry> read_manifest(const std::filesystem::path& file);

std::string render_manifest(const std::vector<ManifestEntry>& entries);
/// Written beside the file, then renamed: a reader never sees half of it. Throws ResourceError.
void write_manifest(const std::vector<ManifestEntry>& entries, const std::filesystem::path& file);

}  // namespace dsv41::audit
