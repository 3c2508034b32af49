// N-gram hashing of Engram (spec: docs/engram.md): bucket primes, NumPy's generator for the multipliers, row
// ids. Exact integer arithmetic throughout.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "loader/config.h"

namespace dsv41 {

/// NumPy's default_rng(seed).integers(0, bound, size=count, dtype=int64): SeedSequence -> PCG64 -> Lemire.
std::vector<std::uint64_t> numpy_integers(std::uint64_t seed, std::uint64_t bound, std::size_t count);

struct HashColumn {
  std::uint64_t prime, offset;
};

struct HashLayer {
  std::vector<HashColumn> columns;         // n-gram size major, heads minor
  std::vector<std::uint64_t> multipliers;  // [max_ngram_size]
  std::uint64_t rows = 0;                  // sum of primes
};

/// Layout of all Engram layers. Throws CheckpointError when primes do not sum to engram_num_embeddings (names
/// both lists).
std::vector<HashLayer> hash_layout(const ModelConfig& config);
/// The same without the comparison: what the config derives (the audit shows declared against derived).
std::vector<HashLayer> derive_hash_layout(const ModelConfig& config);

/// One token of history.
struct HashedToken {
  std::uint32_t compressed = 0;
  bool dead = false;  // inside an image span
};

/// Row ids of the token `recent[0]`; recent[i] is the token i positions earlier, missing ones lie before the
/// start. ids: [columns]. pad: compressed id of engram_pad_id.
void hash_row_ids(const HashLayer& layer, std::span<const HashedToken> recent, std::uint32_t pad,
                  std::span<std::uint64_t> ids);

}  // namespace dsv41
