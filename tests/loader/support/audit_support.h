// What tests of the audit share: check names, directories of their own, the released tree, an independent
// derivation of the Engram table sizes.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "loader/audit/audit.h"
#include "loader/tree_writer.h"

namespace dsv41::audit {

namespace fs = std::filesystem;

inline const std::string kScales32 = "scales: all non-Engram FP8 weights use a 32x32 block";
inline const std::string kScalesTables = "scales: the Engram tables use a 1x32 per-row block";
inline const std::string kPairs = "scales: every weight/scale pair blocks evenly";
inline const std::string kExpertFormat =
    "experts: w1/w2/w3 are FP4 packed into I8 with FP4-block-32 E8M0 scales";
inline const std::string kExperts384 = "experts: every backbone layer has 384 routed experts";
inline const std::string kExperts128 = "experts: every MTP layer has 128 routed experts";
inline const std::string kLayers = "inventory: every backbone layer has its full tensor set";
inline const std::string kShapes = "inventory: the known shapes match the config";
inline const std::string kPlain = "inventory: the F32/BF16 tensors are not quantized";
inline const std::string kCounts = "inventory: the tensor count and byte total are non-zero";
inline const std::string kPacking = "packing: every tensor's byte extent matches its shape and dtype";
inline const std::string kTables = "engram: the tables are F8_E4M3 with one E8M0 scale per 32 channels";
inline const std::string kGate = "engram: each Engram layer has its gate and value projection";
inline const std::string kTableLayers = "engram: the tables sit on exactly engram_layer_ids";
inline const std::string kNoLarger = "engram: the tables are no larger than the derived bucket ranges";
inline const std::string kLargeEnough =
    "engram: the tables are at least as large as the derived bucket ranges";
inline const std::string kHeads = "dspark: the Markov and confidence heads match the config";
inline const std::string kMainProj = "dspark: main_proj is n_mtp_layers * dim wide";
inline const std::string kStages =
    "dspark: every MTP layer carries attn and ffn but only the last carries the heads";
inline const std::string kVisionBlocks = "vision: all 32 blocks are present";
inline const std::string kVisionShapes = "vision: the encoder and projector shapes match the config";
inline const std::string kIndex = "index: every local shard holds exactly the tensors the index assigns it";
inline const std::string kModes = "csa2: Full/Reindex/Reuse partition the backbone";

/// A directory of its own, removed with everything in it.
class Directory {
 public:
  Directory() {
    std::string name = fs::temp_directory_path() / "dsv41-audit-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~Directory() { fs::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// The bucket ranges of docs/engram.md, written down a second time and as plainly as possible.
inline std::vector<std::uint64_t> derive_rows(const ModelConfig& config) {
  const auto is_prime = [](std::uint64_t n) {
    for (std::uint64_t d = 2; d * d <= n; ++d)
      if (n % d == 0) return false;
    return n > 1;
  };
  std::vector<std::uint64_t> rows;
  std::uint64_t next = config.engram_vocab_size;
  for (std::size_t layer = 0; layer < config.engram_layer_ids.size(); ++layer) {
    std::uint64_t sum = 0;
    for (std::uint32_t column = 0; column < config.n_hash_columns(); ++column) {
      while (!is_prime(next)) ++next;
      sum += next++;
    }
    rows.push_back(sum);
  }
  return rows;
}

inline ModelConfig released() {
  return read_config(fs::path(DSV41_TEST_DATA) / "release/config.json");
}

/// The released tree, planned once; tests copy it and damage the copy.
inline const Tree& released_tree() {
  static const Tree tree = plan_tree(released());
  return tree;
}

inline AuditOptions options_for(const fs::path& directory) {
  AuditOptions options;
  options.directory = directory;
  options.derive_engram_rows = derive_rows;
  return options;
}

inline std::vector<std::string> named(const AuditReport& report, Outcome outcome) {
  std::vector<std::string> names;
  for (const Check& check : report.checks)
    if (check.outcome == outcome) names.push_back(check.name);
  return names;
}

inline const Check& find(const AuditReport& report, const std::string& name) {
  for (const Check& check : report.checks)
    if (check.name == name) return check;
  throw std::out_of_range(name);
}

inline std::vector<std::uint32_t> first_shards(std::uint32_t count) {
  std::vector<std::uint32_t> shards;
  for (std::uint32_t shard = 1; shard <= count; ++shard) shards.push_back(shard);
  return shards;
}

inline void replace_in_file(const fs::path& file, const std::string& from, const std::string& to) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  std::string content = text.str();
  const auto at = content.find(from);
  ASSERT_NE(at, content.npos) << from;
  content.replace(at, from.size(), to);
  std::ofstream(file) << content;
}

}  // namespace dsv41::audit
