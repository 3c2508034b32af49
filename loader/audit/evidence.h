// What is known about a checkpoint: what the config expects, what the index promises, what local headers
// show. Uses config, inventory and headers. Specified in docs/checkpoint.md, "dsv41-mpi --audit-only".
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loader/audit/local_shards.h"
#include "loader/audit/tensor_name.h"
#include "loader/config.h"
#include "loader/inventory.h"
#include "loader/names.h"
#include "loader/weight_index.h"

namespace dsv41::audit {

/// A shard that the index names or, without an index, that the config's layout has.
struct Shard {
  std::string file;   // empty without an index
  std::string label;  // "43/48", or the file name where it has no such number
  bool local = false;
};

constexpr std::uint32_t kNone = 0xFFFFFFFF;

/// A tensor that the config calls for.
struct ExpectedState {
  const ExpectedTensor* expected = nullptr;
  TensorName name;
  const TensorInfo* header = nullptr;  // where a local header holds it
  std::uint32_t home = kNone;          // shard that holds it according to the index, else to the layout
  std::uint32_t scale = kNone;         // of a quantized weight: position of its scale
  bool indexed = false;                // the index lists it
};

/// A tensor that the config does not call for.
struct StrayState {
  std::string_view full_name;
  TensorName name;
  const TensorInfo* header = nullptr;
};

/// Lines about what contradicts: all are counted, the first few kept. A damaged index can make millions.
struct Contradictions {
  std::vector<std::string> first;
  std::size_t count = 0;

  template <typename... Arguments>
  void add(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    if (first.size() < kKept) first.push_back(fmt::format(format, std::forward<Arguments>(arguments)...));
    ++count;
  }
  void add(const Contradictions& others) {
    for (const std::string& line : others.first)
      if (first.size() < kKept) first.push_back(line);
    count += others.count;
  }
  static constexpr std::size_t kKept = 16;
};

/// All tensors that the config calls for, with an index of their names.
class Expectation {
 public:
  Expectation() = default;
  explicit Expectation(Inventory inventory);

  const Inventory& inventory() const { return inventory_; }
  /// In the inventory's order, whose tensors they point to; nothing is known yet about where they are.
  std::vector<ExpectedState> take_states() { return std::move(states_); }
  /// Positions of everything but routed experts.
  std::vector<std::uint32_t> take_others() { return std::move(others_); }
  const NameIndex& names() const { return names_; }

 private:
  void find_scales();

  Inventory inventory_;
  NameIndex names_;
  std::vector<ExpectedState> states_;
  std::vector<std::uint32_t> others_;
};

enum class Presence { Present, Absent, Unknown };

struct EvidenceInput {
  ModelConfig config;
  std::vector<LocalShard> local;
  std::optional<WeightIndex> index;
  Expectation expected;
  bool header_prefix = false;
  unsigned threads = 0;  // for the look-ups; 0: one per processor
};

/// Owns all inputs; everything it points to stays in place (not movable).
class Evidence {
 public:
  explicit Evidence(EvidenceInput input);
  Evidence(const Evidence&) = delete;
  Evidence& operator=(const Evidence&) = delete;

  const ModelConfig& config() const { return input_.config; }
  const std::vector<LocalShard>& local() const { return input_.local; }
  const std::optional<WeightIndex>& index() const { return input_.index; }
  const std::vector<Shard>& shards() const { return shards_; }
  const std::vector<ExpectedState>& tensors() const { return tensors_; }
  /// Positions in tensors() of everything but routed experts: 1,621 of the released 96,085.
  const std::vector<std::uint32_t>& other_than_experts() const { return others_; }
  const std::vector<StrayState>& strays() const { return strays_; }
  /// Contradictions between index and local headers.
  const Contradictions& index_contradictions() const { return index_contradictions_; }
  /// Tensors that two local shards hold.
  const Contradictions& duplicates() const { return duplicates_; }

  Presence presence(const ExpectedState& tensor) const;
  /// Its header would be in a shard that is not here.
  bool pending(const ExpectedState& tensor) const;
  std::uint64_t readable_tensors() const { return readable_tensors_; }
  std::uint64_t readable_bytes() const { return readable_bytes_; }
  bool complete() const;

 private:
  void look_up_names();
  void name_shards();
  void match_local_shards();
  void read_headers();
  void compare_with_index();
  void note_local_layout_shards();
  StrayState& stray(std::string_view name);

  EvidenceInput input_;
  std::vector<ExpectedState> tensors_;
  std::vector<std::uint32_t> others_;
  std::vector<StrayState> strays_;
  NameIndex stray_names_;
  std::vector<Shard> shards_;                  // of an index: in name order
  std::vector<std::uint32_t> shard_of_index_;  // position in the index's list -> position in shards_
  std::vector<std::uint32_t> shard_of_local_;  // per local file: its position in shards_, or kNone
  std::vector<std::vector<std::uint32_t>>
      positions_;                               // per local file and header entry: in tensors_, or kNone
  std::vector<std::uint32_t> index_positions_;  // per index entry: the same
  std::vector<std::uint32_t> found_in_;         // per expected tensor: the local file that holds it, or kNone
  Contradictions index_contradictions_, duplicates_;
  std::uint64_t readable_tensors_ = 0, readable_bytes_ = 0;
};

/// The config with lists brought to the lengths that the inventory relies on; the config checks judge the
/// original.
ModelConfig with_regular_lists(ModelConfig config);

}  // namespace dsv41::audit
