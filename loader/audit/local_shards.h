// The shard files of a directory and their headers, read in parallel; damage becomes findings, not
// exceptions. Uses the safetensors parser. Specified in docs/checkpoint.md, "dsv41-mpi --audit-only".
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "loader/safetensors.h"

namespace dsv41::audit {

struct LocalShard {
  std::string file_name;
  std::uint64_t file_bytes = 0;
  bool readable = false;              // the header could be parsed; otherwise one finding says why
  SafetensorsHeader header;           // names and shapes as they stand, however wrong their extents are
  std::uint64_t header_digest = 0;    // XXH3 of the header's bytes
  std::vector<std::string> findings;  // extents, overlaps, truncation; each names the file
};

/// Shard files in name order. Plain mode: "*.safetensors". Header-prefix mode: every regular file that starts
/// with a plausible header length. Throws CheckpointError when the directory cannot be read.
std::vector<std::string> find_shards(const std::filesystem::path& directory, bool header_prefix);

/// One shard. header_prefix: the file may end anywhere after its header.
LocalShard read_shard(const std::filesystem::path& directory, const std::string& file_name,
                      bool header_prefix);

/// Calls work(0) … work(count - 1) on up to `threads` threads (0: one per processor); the first exception is
/// rethrown.
void run_in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace dsv41::audit
