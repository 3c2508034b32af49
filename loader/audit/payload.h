// Payload verification: every byte of every local tensor is read once, summed and compared with a manifest.
// Specified in docs/checkpoint.md, "Payload manifest".
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "loader/audit/local_shards.h"

namespace dsv41::audit {

struct PayloadOptions {
  std::filesystem::path directory;
  std::filesystem::path manifest;  // compared with when it exists, else written; progress is kept beside it
  unsigned threads = 0;            // 0: enough to keep a disk busy
  bool quiet = false;
  bool progress_bar = false;  // redraw one line instead of printing lines
  /// A signal number, once it arrives: finish the windows in flight, keep the progress, return.
  const std::atomic<int>* stop = nullptr;
};

struct PayloadReport {
  std::filesystem::path manifest;
  std::uint64_t tensors = 0, bytes = 0;
  std::uint64_t read_bytes = 0, hole_bytes = 0,
                resumed_bytes = 0;  // of bytes: read now, known zeros, read earlier
  double seconds = 0;
  bool interrupted = false;
  bool compared = false;                  // with an earlier manifest
  std::uint64_t added = 0;                // tensors that the earlier manifest did not have
  std::uint64_t not_here = 0;             // tensors of the manifest whose shard is not here
  std::vector<std::string> skipped;       // shards whose header is damaged
  std::vector<std::string> mismatches;    // one line per tensor
  std::vector<std::string> nan_tensors;   // one line per tensor
  std::vector<std::string> zero_scales;   // names
  std::vector<std::string> zero_tensors;  // names of other tensors without a single set bit

  bool failed() const { return !mismatches.empty() || !nan_tensors.empty() || !skipped.empty(); }
};

/// Throws CheckpointError for a malformed manifest or unreadable payload, ResourceError when progress or
/// manifest cannot be written.
PayloadReport verify_payload(const std::vector<LocalShard>& shards, const PayloadOptions& options,
                             std::ostream& err);

std::string payload_text(const PayloadReport& report, bool quiet);

}  // namespace dsv41::audit
