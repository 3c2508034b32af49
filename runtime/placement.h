// Which expert rank owns which expert (docs/runtime.md, "Roles").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loader/config.h"

namespace dsv41 {

/// Owners of every (block, expert) among `ranks` expert ranks, numbered 0 … ranks-1 (MPI rank minus one).
class Placement {
 public:
  /// specification: "contiguous", "cyclic" or "file:PATH". Throws UsageError: unknown word, unreadable or
  /// malformed file, owner out of range, missing entries; no rank at all; more ranks than a backbone block
  /// has experts (N > E). Draft stages have fewer experts: there a rank may own none. A single process (-np
  /// 1) counts as one expert rank.
  static Placement make(std::string_view specification, const ModelConfig& config, std::uint32_t ranks);

  std::uint32_t ranks() const { return ranks_; }
  std::uint32_t owner(std::uint32_t block, std::uint32_t expert) const { return owners_[block][expert]; }
  std::vector<std::uint32_t> experts_of(std::uint32_t rank, std::uint32_t block) const;
  const std::string& name() const { return name_; }
  /// Digest for the agreement check at start.
  std::uint64_t fingerprint() const;
  /// The file format that `file:` reads: JSON {"ranks": N, "blocks": [[owner of expert 0, …], …]}.
  std::string to_json() const;

 private:
  std::string name_;
  std::uint32_t ranks_ = 0;
  std::vector<std::vector<std::uint32_t>> owners_;
};

}  // namespace dsv41
