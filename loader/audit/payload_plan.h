// What to read in which pieces: chunks of tensors, gathered into windows of neighbouring bytes, and the
// record of chunks that an interrupted run has already examined. Specified in docs/checkpoint.md, "Payload
// manifest".
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "loader/audit/local_shards.h"
#include "loader/audit/payload_digest.h"

namespace dsv41::audit {

struct Chunk {
  std::uint32_t tensor = 0;  // position in PayloadPlan::tensors
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;  // in the file
};

struct PlannedTensor {
  const TensorInfo* info = nullptr;
  std::uint32_t shard = 0;
  std::uint32_t first_chunk = 0, chunks = 0;
};

struct Window {
  std::uint32_t shard = 0;
  std::uint32_t first_chunk = 0, chunks = 0;  // neighbours in the file
  std::uint64_t offset = 0, bytes = 0;
};

struct PlannedShard {
  const LocalShard* shard = nullptr;
  std::uint32_t first_chunk = 0, chunks = 0;
  std::uint64_t identity = 0;  // of name, size, modification time and header
};

/// Holds pointers into the shards, which must outlive it.
struct PayloadPlan {
  std::vector<PlannedShard> shards;
  std::vector<PlannedTensor> tensors;
  std::vector<Chunk> chunks;
  std::vector<Window> windows;  // in the order of shards and offsets
  std::uint64_t bytes = 0;
};

constexpr std::uint64_t kWindowBytes = 16u << 20;

/// Shards whose header cannot be trusted with offsets are left out. Throws ResourceError when a file cannot
/// be inspected.
PayloadPlan plan_payload(const std::filesystem::path& directory, const std::vector<LocalShard>& shards);

/// The progress file: fixed-size records, appended as windows are finished. A torn or foreign record is
/// ignored, so is every record of a shard that has changed since.
class ProgressFile {
 public:
  /// Opens or creates it; facts and done (one per chunk) receive what earlier runs have examined. Throws
  /// ResourceError.
  ProgressFile(const std::filesystem::path& file, const PayloadPlan& plan, std::span<ChunkFacts> facts,
               std::span<std::uint8_t> done);
  ~ProgressFile();
  ProgressFile(const ProgressFile&) = delete;
  ProgressFile& operator=(const ProgressFile&) = delete;

  /// Thread-safe.
  void append(const Window& window, std::span<const ChunkFacts> facts);
  /// Everything is done and recorded elsewhere.
  void remove();

 private:
  std::filesystem::path file_;
  const PayloadPlan& plan_;
  int descriptor_ = -1;
  std::mutex guard_;
};

}  // namespace dsv41::audit
