// The vocabulary of checks: a claim gathers contradictions, observations and shards it waits for, and
// concludes with pass, fail or undecided. One function per group; names and groups as in docs/checkpoint.md.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loader/audit/evidence.h"

namespace dsv41::audit {

enum class Outcome { Pass, Fail, Undecided };
std::string_view outcome_name(Outcome outcome);  // "pass", "fail", "undecided"

struct Check {
  std::string name;  // "group: claim"
  Outcome outcome = Outcome::Undecided;
  std::string detail;
};

/// A contradiction decides at once; a missing shard only where nothing contradicts.
class Claim {
 public:
  Claim(const Evidence& evidence, std::string name) : evidence_(evidence), name_(std::move(name)) {}

  /// Counts every contradiction, keeps the first few; formatted only when kept.
  template <typename... Arguments>
  void contradict(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    if (contradictions_.size() < kKept)
      contradictions_.push_back(fmt::format(format, std::forward<Arguments>(arguments)...));
    ++contradicted_;
  }
  /// Takes over contradictions that were noted while the evidence was gathered.
  void contradict(const Contradictions& noted, std::string_view what = "") {
    for (const std::string& line : noted.first)
      if (contradictions_.size() < kKept) contradictions_.push_back(fmt::format("{}{}", what, line));
    contradicted_ += noted.count;
  }
  void wait_for(std::uint32_t shard) {
    if (shard != kNone) waiting_.insert(shard);
  }
  bool contradicted() const { return contradicted_ > 0; }

  enum class IfAbsent { Contradicts, IsNotCovered };
  /// The header of a tensor whose shape the claim needs. nullptr after noting why it is not there: its shard
  /// is not here, the shard is here without it, or the checkpoint does not have it.
  const TensorInfo* read(const ExpectedState& tensor, IfAbsent if_absent);
  /// True when the checkpoint has the tensor; otherwise the claim is contradicted or waits.
  bool require(const ExpectedState& tensor);

  /// observed: what the evidence shows, whatever the outcome.
  Check conclude(std::string observed) const;
  /// A pass that says why the claim does not concern this checkpoint.
  Check does_not_apply(std::string_view why) const;

 private:
  static constexpr std::size_t kKept = 4;
  const Evidence& evidence_;
  std::string name_;
  std::vector<std::string> contradictions_;
  std::size_t contradicted_ = 0;
  std::set<std::uint32_t> waiting_;
};

/// "[2, 8, 14]"
std::string list_text(const std::vector<std::uint64_t>& values);
std::string list_text(const std::vector<std::uint32_t>& values);
/// "96,085"
std::string grouped(std::uint64_t value);
/// "1.23 GiB", or plain bytes below 1 MiB.
std::string binary_size(std::uint64_t bytes);

struct BlockSize {
  std::uint64_t rows = 32, columns = 32;
};

using Checks = std::vector<Check>;
void check_config(const Evidence& evidence, Checks& checks);
/// derived_rows: rows of each Engram table as hashing derives them, or why they cannot be derived.
struct DerivedRows {
  std::vector<std::uint64_t> rows;
  std::string failure;
};
void check_engram(const Evidence& evidence, const DerivedRows& derived_rows, Checks& checks);
void check_packing(const Evidence& evidence, Checks& checks);
void check_scales(const Evidence& evidence, BlockSize fp8_block, Checks& checks);
void check_inventory(const Evidence& evidence, Checks& checks);
void check_experts(const Evidence& evidence, Checks& checks);
void check_csa2(const Evidence& evidence, Checks& checks);
void check_vision(const Evidence& evidence, Checks& checks);
void check_dspark(const Evidence& evidence, Checks& checks);
void check_index(const Evidence& evidence, Checks& checks);  // nothing without an index

}  // namespace dsv41::audit
