// Chunk digests and statistics (payload_digest.h). The loops are plain so that compilers vectorize them.
#include "loader/audit/payload_digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

namespace dsv41::audit {
namespace {

static_assert(std::endian::native == std::endian::little,
              "payload and digests are read as little-endian words");

bool all_zero(std::span<const std::byte> bytes) {
  // memcmp against itself, shifted by one: equal means that every byte equals the first.
  return bytes.empty() ||
         (bytes[0] == std::byte{0} && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

/// Bytes b with (b & mask) == code. Sums of at most 255 ones fit in a byte, which keeps the inner loop
/// narrow.
std::uint64_t count_codes(std::span<const std::byte> bytes, std::uint8_t mask, std::uint8_t code) {
  constexpr std::size_t kLanes = 64, kRounds = 255;
  const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
  std::uint64_t total = 0;
  std::size_t at = 0;
  while (bytes.size() - at >= kLanes) {
    const std::size_t rounds = std::min((bytes.size() - at) / kLanes, kRounds);
    std::array<std::uint8_t, kLanes> counts{};
    for (std::size_t round = 0; round < rounds; ++round, at += kLanes)
      for (std::size_t lane = 0; lane < kLanes; ++lane)
        counts[lane] = static_cast<std::uint8_t>(counts[lane] + ((data[at + lane] & mask) == code));
    for (const std::uint8_t count : counts) total += count;
  }
  for (; at < bytes.size(); ++at) total += (data[at] & mask) == code;
  return total;
}

template <typename Word>
std::uint64_t count_nans(std::span<const std::byte> bytes, Word exponent_mask) {
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  std::uint64_t total = 0;
  for (std::size_t at = 0; at + sizeof(Word) <= bytes.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    total += static_cast<Word>(word & static_cast<Word>(~kSign)) > exponent_mask;
  }
  return total;
}

}  // namespace

ChunkFacts examine(std::span<const std::byte> bytes, DType dtype) {
  ChunkFacts facts;
  facts.digest = XXH3_64bits(bytes.data(), bytes.size());
  facts.all_zero = all_zero(bytes);
  switch (dtype) {
    case DType::F8E4M3:
      facts.nan_codes = count_codes(bytes, 0x7F, 0x7F);
      break;
    case DType::F8E8M0: {
      std::uint8_t lowest = 0xFF, highest = 0;
      for (const std::byte byte : bytes) {
        lowest = std::min(lowest, std::to_integer<std::uint8_t>(byte));
        highest = std::max(highest, std::to_integer<std::uint8_t>(byte));
      }
      facts.lowest = lowest;
      facts.highest = highest;
      if (highest == 0xFF) facts.nan_codes = count_codes(bytes, 0xFF, 0xFF);
      break;
    }
    case DType::BF16:
      facts.nan_codes = count_nans<std::uint16_t>(bytes, 0x7F80);
      break;
    case DType::F16:
      facts.nan_codes = count_nans<std::uint16_t>(bytes, 0x7C00);
      break;
    case DType::F32:
      facts.nan_codes = count_nans<std::uint32_t>(bytes, 0x7F800000);
      break;
    case DType::F64:
      facts.nan_codes = count_nans<std::uint64_t>(bytes, 0x7FF0000000000000);
      break;
    default:
      break;  // every code is a number
  }
  return facts;
}

ChunkFacts ZeroChunks::of(std::uint64_t bytes, DType dtype) {
  ChunkFacts facts;
  facts.lowest = dtype == DType::F8E8M0 && bytes > 0 ? 0 : 0xFF;
  const auto found =
      std::find_if(known_.begin(), known_.end(), [&](const Known& k) { return k.bytes == bytes; });
  if (found != known_.end()) {
    facts.digest = found->digest;
    return facts;
  }
  static const std::vector<std::byte> zeros(kChunkBytes);
  facts.digest = XXH3_64bits(zeros.data(), bytes);
  if (known_.size() >= 64) known_.clear();  // a model has few lengths; a hostile header may have any number
  known_.push_back({bytes, facts.digest});
  return facts;
}

std::uint64_t tensor_checksum(std::span<const std::uint64_t> chunk_digests) {
  return XXH3_64bits(chunk_digests.data(), chunk_digests.size_bytes());
}

}  // namespace dsv41::audit
