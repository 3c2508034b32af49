// Checksum and statistics of one chunk of payload, and the checksum of a tensor from those of its chunks.
// Arithmetic on plain bytes. Specified in docs/checkpoint.md, "Payload manifest".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "loader/safetensors.h"

namespace dsv41::audit {

constexpr std::uint64_t kChunkBytes =
    4u << 20;  // fixed by the manifest format: another size gives other checksums

/// What one chunk's bytes show.
struct ChunkFacts {
  std::uint64_t digest = 0;  // XXH3-64 of the bytes
  std::uint64_t nan_codes = 0;
  std::uint8_t lowest = 0xFF, highest = 0;  // E8M0 codes; of other types unused
  bool all_zero = true;
};

ChunkFacts examine(std::span<const std::byte> bytes, DType dtype);

/// The facts of that many zero bytes. Only the first chunk of each length costs time: holes are gigabytes of
/// zeros.
class ZeroChunks {
 public:
  ChunkFacts of(std::uint64_t bytes, DType dtype);

 private:
  struct Known {
    std::uint64_t bytes, digest;
  };
  std::vector<Known> known_;
};

/// XXH3-64 of the chunk digests as little-endian 64-bit words, in order. The empty tensor has no chunks.
std::uint64_t tensor_checksum(std::span<const std::uint64_t> chunk_digests);

}  // namespace dsv41::audit
