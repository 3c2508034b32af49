// The header audit of a checkpoint (spec: docs/checkpoint.md, "dsv41-mpi --audit-only"): 38 claims, 39 with
// an index.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "loader/audit/checks.h"
#include "loader/audit/payload.h"

namespace dsv41::audit {

struct AuditOptions {
  std::filesystem::path directory;
  bool header_prefix = false;                   // files may end after their header and have any name
  std::optional<std::filesystem::path> config;  // instead of the directory's own
  std::optional<std::filesystem::path> index;   // instead of DIR/model.safetensors.index.json
  std::optional<std::filesystem::path> json;    // write the report there; "-" is the output stream
  std::optional<std::string> list_tensors;      // glob; the listing then takes the place of the report
  std::optional<BlockSize> expect_fp8_block;
  bool require_complete = false;  // undecided counts as failed
  bool quiet = false;             // print only what is not a pass
  bool colour = false;

  bool verify_payload = false;  // also stream every payload byte (payload.h)
  /// Compared with when it exists, else written; default: DIR/payload-manifest.jsonl.
  std::optional<std::filesystem::path> manifest;
  bool progress_bar = false;  // redraw one line instead of printing lines

  unsigned threads = 0;  // 0: one per processor
  /// Rows of each Engram table as hashing derives them from a config (engram/hashing.h is above this folder).
  std::function<std::vector<std::uint64_t>(const ModelConfig&)> derive_engram_rows;
};

/// One line of the byte table.
struct CategoryTotal {
  std::string_view title, key;  // "Routed experts", "routed_experts"
  std::uint64_t tensors = 0, bytes = 0;
};

struct AuditReport {
  std::string directory;
  bool header_prefix = false;
  std::vector<Check> checks;
  std::vector<CategoryTotal> categories;
  std::size_t shards = 0;  // local, readable
  bool complete = false;
  std::uint64_t tensors = 0, bytes = 0;
  bool indexed = false;
  std::uint64_t shipped_tensors = 0;                      // that the index lists
  std::vector<std::string> local_shards, pending_shards;  // of the index
  struct Largest {
    std::string name, dtype, shape;
    std::uint64_t bytes = 0;
  } largest;

  std::optional<PayloadReport> payload;

  std::size_t count(Outcome outcome) const;
};

/// Reads headers, index and config and judges them. Throws CheckpointError when there is nothing to judge: no
/// directory, no shard, no config, a malformed index.
AuditReport audit(const AuditOptions& options);

/// The whole of `--audit-only`: audit, report, listing, JSON, payload. Returns the exit code; throws Error.
/// While payload is verified SIGINT and SIGTERM are held: progress is kept and 128 + signal returned.
int run_audit(const AuditOptions& options, std::ostream& out, std::ostream& err);

}  // namespace dsv41::audit
