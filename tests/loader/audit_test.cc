// The header audit on generated full-size trees: what complete, partial and damaged checkpoints give
// (spec: docs/checkpoint.md, "dsv41-mpi --audit-only"). The trees are sparse: 475 GiB that take no space.
#include "loader/audit/audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "loader/error.h"
#include "loader/tree_writer.h"

namespace dsv41::audit {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kScales32 = "scales: all non-Engram FP8 weights use a 32x32 block";
const std::string kScalesTables = "scales: the Engram tables use a 1x32 per-row block";
const std::string kPairs = "scales: every weight/scale pair blocks evenly";
const std::string kExpertFormat = "experts: w1/w2/w3 are FP4 packed into I8 with FP4-block-32 E8M0 scales";
const std::string kExperts384 = "experts: every backbone layer has 384 routed experts";
const std::string kExperts128 = "experts: every MTP layer has 128 routed experts";
const std::string kLayers = "inventory: every backbone layer has its full tensor set";
const std::string kShapes = "inventory: the known shapes match the config";
const std::string kPlain = "inventory: the F32/BF16 tensors are not quantized";
const std::string kCounts = "inventory: the tensor count and byte total are non-zero";
const std::string kPacking = "packing: every tensor's byte extent matches its shape and dtype";
const std::string kTables = "engram: the tables are F8_E4M3 with one E8M0 scale per 32 channels";
const std::string kGate = "engram: each Engram layer has its gate and value projection";
const std::string kTableLayers = "engram: the tables sit on exactly engram_layer_ids";
const std::string kNoLarger = "engram: the tables are no larger than the derived bucket ranges";
const std::string kLargeEnough = "engram: the tables are at least as large as the derived bucket ranges";
const std::string kHeads = "dspark: the Markov and confidence heads match the config";
const std::string kMainProj = "dspark: main_proj is n_mtp_layers * dim wide";
const std::string kStages =
    "dspark: every MTP layer carries attn and ffn but only the last carries the heads";
const std::string kVisionBlocks = "vision: all 32 blocks are present";
const std::string kVisionShapes = "vision: the encoder and projector shapes match the config";
const std::string kIndex = "index: every local shard holds exactly the tensors the index assigns it";
const std::string kModes = "csa2: Full/Reindex/Reuse partition the backbone";

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
std::vector<std::uint64_t> derive_rows(const ModelConfig& config) {
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

ModelConfig released() {
  return read_config(fs::path(DSV41_TEST_DATA) / "release/config.json");
}

/// The released tree, planned once; tests copy it and damage the copy.
const Tree& released_tree() {
  static const Tree tree = plan_tree(released());
  return tree;
}

AuditOptions options_for(const fs::path& directory) {
  AuditOptions options;
  options.directory = directory;
  options.derive_engram_rows = derive_rows;
  return options;
}

std::vector<std::string> named(const AuditReport& report, Outcome outcome) {
  std::vector<std::string> names;
  for (const Check& check : report.checks)
    if (check.outcome == outcome) names.push_back(check.name);
  return names;
}

const Check& find(const AuditReport& report, const std::string& name) {
  for (const Check& check : report.checks)
    if (check.name == name) return check;
  throw std::out_of_range(name);
}

std::vector<std::uint32_t> first_shards(std::uint32_t count) {
  std::vector<std::uint32_t> shards;
  for (std::uint32_t shard = 1; shard <= count; ++shard) shards.push_back(shard);
  return shards;
}

void replace_in_file(const fs::path& file, const std::string& from, const std::string& to) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  std::string content = text.str();
  const auto at = content.find(from);
  ASSERT_NE(at, content.npos) << from;
  content.replace(at, from.size(), to);
  std::ofstream(file) << content;
}

TEST(Audit, CompleteTreePassesEverything) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  AuditOptions options = options_for(directory.path());
  options.require_complete = true;
  const AuditReport report = audit(options);
  EXPECT_EQ(report.checks.size(), 39u);
  for (const Check& check : report.checks)
    EXPECT_EQ(check.outcome, Outcome::Pass) << check.name << ": " << check.detail;
  EXPECT_EQ(report.tensors, 96'085u);
  EXPECT_EQ(report.bytes, 510'286'023'000u);
  EXPECT_EQ(report.shards, 48u);
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.shipped_tensors, 96'085u);
  EXPECT_EQ(report.largest.name, "layers.14.engram.embed.weight");
  EXPECT_EQ(report.largest.shape, "[384016682, 256]");
  EXPECT_THAT(find(report, kScales32).detail, HasSubstr("{(32, 32): 355}"));
  EXPECT_THAT(find(report, kScalesTables).detail, HasSubstr("{(1, 32): 2}"));
  EXPECT_THAT(find(report, kTables).detail, HasSubstr("768,022,850 rows"));
  EXPECT_THAT(find(report, kExpertFormat).detail,
              HasSubstr("94,464 tensors, expected I8[2304, 2560] and F8_E8M0[2304, 160]"));
  EXPECT_THAT(
      find(report, kLayers).detail,
      HasSubstr("2,334 tensors each, 2,337 in layers 24, 28, 32, 36, 2,340 in layer 1, 2,341 in layer 20, "
                "2,342 in layers 2, 8, 2,348 in layer 14"));
  EXPECT_THAT(find(report, kModes).detail,
              HasSubstr("Full [2, 8, 14, 20], Reindex [24, 28, 32, 36], Reuse the other 32"));
}

struct CategoryCase {
  std::string_view key;
  std::uint64_t tensors_at_20, tensors_at_46, tensors;
};

TEST(Audit, ByteTableByCategory) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  const CategoryCase cases[] = {{"routed_experts", 41'472, 94'464, 94'464},
                                {"engram_tables", 0, 0, 12},
                                {"attention", 276, 603, 603},
                                {"embedding_and_head", 1, 3, 3},
                                {"shared_experts", 108, 240, 240},
                                {"vision_and_aligner", 266, 266, 266},
                                {"mtp_and_dspark", 0, 97, 97},
                                {"norms_and_hyper_connections", 180, 400, 400},
                                {"other", 0, 0, 0}};
  for (const std::uint32_t shards : {48u, 46u, 20u}) {
    for (std::uint32_t gone = shards + 1; gone <= 48; ++gone)
      fs::remove(directory.path() / released_tree().shards[gone - 1].file);
    const AuditReport report = audit(options_for(directory.path()));
    std::uint64_t tensors = 0, bytes = 0;
    for (std::size_t i = 0; i < std::size(cases); ++i) {
      const CategoryTotal& total = report.categories.at(i);
      EXPECT_EQ(total.key, cases[i].key);
      EXPECT_EQ(total.tensors, shards == 48   ? cases[i].tensors
                               : shards == 46 ? cases[i].tensors_at_46
                                              : cases[i].tensors_at_20)
          << total.key << " at " << shards;
      tensors += total.tensors;
      bytes += total.bytes;
    }
    EXPECT_EQ(tensors, report.tensors);
    EXPECT_EQ(bytes, report.bytes);
  }
}

TEST(Audit, TwentyShardsLeaveEightUndecidedAndNameTheirShards) {
  const Directory directory;
  TreeOptions tree;
  tree.shards = first_shards(20);
  write_tree(released_tree(), directory.path(), tree);
  const AuditReport report = audit(options_for(directory.path()));
  EXPECT_EQ(report.tensors, 42'303u);
  EXPECT_EQ(report.count(Outcome::Pass), 31u);
  EXPECT_EQ(report.count(Outcome::Fail), 0u);
  EXPECT_THAT(named(report, Outcome::Undecided), ElementsAre(kGate, kTables, kScales32, kScalesTables,
                                                             kShapes, kExpertFormat, kHeads, kMainProj));
  EXPECT_THAT(find(report, kScales32).detail,
              AllOf(HasSubstr("27 shards (21-42, 44-48 of 48)"), HasSubstr("{(32, 32): 147}")));
  EXPECT_THAT(find(report, kExpertFormat).detail, HasSubstr("25 shards (21-42, 44-46 of 48)"));
  EXPECT_THAT(find(report, kShapes).detail, HasSubstr("waiting on 43/48 "));
  EXPECT_THAT(find(report, kTables).detail, HasSubstr("waiting on 47/48, 48/48"));
  EXPECT_THAT(find(report, kGate).detail, HasSubstr("waiting on 47/48, 48/48"));
  EXPECT_THAT(find(report, kScalesTables).detail,
              AllOf(HasSubstr("waiting on 47/48, 48/48"), HasSubstr("blocks {}")));
  EXPECT_THAT(find(report, kHeads).detail, HasSubstr("waiting on 46/48"));
  EXPECT_THAT(find(report, kMainProj).detail, HasSubstr("waiting on 44/48"));
  EXPECT_FALSE(report.complete);
  EXPECT_EQ(report.local_shards.size(), 20u);
  EXPECT_EQ(report.pending_shards.size(), 28u);

  AuditOptions strict = options_for(directory.path());
  strict.require_complete = true;
  EXPECT_EQ(audit(strict).count(Outcome::Fail), 8u);
  std::ostringstream out, err;
  EXPECT_EQ(run_audit(strict, out, err), 1);
  EXPECT_EQ(run_audit(options_for(directory.path()), out, err), 0);
  EXPECT_THAT(out.str(), HasSubstr("42,303 of 96,085 tensors (44.0%)"));
}

TEST(Audit, FortySixShardsWaitForTheEngramTables) {
  const Directory directory;
  TreeOptions tree;
  tree.shards = first_shards(46);
  write_tree(released_tree(), directory.path(), tree);
  const AuditReport report = audit(options_for(directory.path()));
  EXPECT_EQ(report.tensors, 96'073u);
  EXPECT_EQ(report.count(Outcome::Pass), 35u);
  EXPECT_EQ(report.count(Outcome::Fail), 0u);
  EXPECT_THAT(named(report, Outcome::Undecided), ElementsAre(kGate, kTables, kScales32, kScalesTables));
  EXPECT_THAT(find(report, kScales32).detail, AllOf(HasSubstr("47/48, 48/48"), HasSubstr("{(32, 32): 353}")));
  std::ostringstream out, err;
  EXPECT_EQ(run_audit(options_for(directory.path()), out, err), 0);
  EXPECT_THAT(out.str(), HasSubstr("96,073 of 96,085 tensors (99.9%)"));  // rounded down: not complete
}

TEST(Audit, HeaderPrefixesUnderAnyNameWithoutAnIndex) {
  const Directory directory;
  Tree tree = released_tree();
  tree.write_index = false;
  for (std::size_t i = 0; i < tree.shards.size(); ++i)
    tree.shards[i].file = "h" + std::to_string(10000 + i) + ".bin";
  TreeOptions tree_options;
  tree_options.payload = Payload::HeaderOnly;
  write_tree(tree, directory.path(), tree_options);
  fs::copy_file(directory.path() / "h10003.bin",
                directory.path() / "h10003-again.bin");  // one file under two names
  AuditOptions options = options_for(directory.path());
  options.header_prefix = true;
  const AuditReport report = audit(options);
  EXPECT_EQ(report.checks.size(), 38u);
  EXPECT_EQ(report.count(Outcome::Pass), 38u);
  EXPECT_EQ(report.shards, 48u);
  EXPECT_EQ(report.tensors, 96'085u);
  EXPECT_EQ(report.bytes, 510'286'023'000u);
  EXPECT_FALSE(report.indexed);
  std::size_t in_group = 0;
  for (const Check& check : report.checks) in_group += check.name.starts_with("config: ");
  EXPECT_EQ(in_group, 12u);

  // With an index given beside it, free names are matched by what they hold.
  const Directory elsewhere;
  TreeOptions none;
  none.shards = {99};
  write_tree(released_tree(), elsewhere.path(), none);
  options.index = elsewhere.path() / "model.safetensors.index.json";
  const AuditReport indexed = audit(options);
  EXPECT_EQ(indexed.count(Outcome::Pass), 39u);
  EXPECT_TRUE(indexed.complete);

  // A whole shard that is gone is waited for; a single tensor that is gone is not.
  options.index.reset();
  fs::remove(directory.path() / "h10003.bin");
  fs::remove(directory.path() / "h10003-again.bin");
  const AuditReport partial = audit(options);
  EXPECT_EQ(partial.count(Outcome::Fail), 0u);
  EXPECT_THAT(find(partial, kLayers).detail, HasSubstr("waiting on 4/48"));
}

TEST(Audit, EngramHeadsSevenIsOneFailureWithFourNumbers) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  AuditOptions options = options_for(directory.path());
  options.config = directory.path() / "copied.json";
  fs::copy_file(directory.path() / "config.json", *options.config);
  replace_in_file(*options.config, "\"engram_n_heads\": 8", "\"engram_n_heads\": 7");
  const AuditReport report = audit(options);
  EXPECT_THAT(named(report, Outcome::Fail), ElementsAre(kNoLarger));
  EXPECT_EQ(report.count(Outcome::Pass), 38u);
  EXPECT_THAT(find(report, kNoLarger).detail,
              HasSubstr("declared [384006168, 384016682] against derived [336004849, 336012883]"));

  options.config = directory.path() / "inference/config.json";  // either layout
  EXPECT_EQ(audit(options).count(Outcome::Pass), 39u);
}

struct ConfigCase {
  const char* name;
  const char* from;
  const char* to;
  std::vector<std::string> failed;
};

class AuditOfChangedConfig : public ::testing::TestWithParam<ConfigCase> {};

TEST_P(AuditOfChangedConfig, FailsWhatItTouches) {
  const Directory directory;
  TreeOptions tree;
  tree.payload = Payload::HeaderOnly;
  write_tree(released_tree(), directory.path(), tree);
  AuditOptions options = options_for(directory.path());
  options.header_prefix = true;
  options.config = directory.path() / "inference/config.json";
  replace_in_file(*options.config, GetParam().from, GetParam().to);
  const AuditReport report = audit(options);
  EXPECT_EQ(named(report, Outcome::Fail), GetParam().failed);
}

INSTANTIATE_TEST_SUITE_P(
    Config, AuditOfChangedConfig,
    ::testing::Values(
        ConfigCase{"unused", "\"norm_eps\": 1e-20", "\"norm_eps\": 1e-06", {}},
        ConfigCase{"too_few_ratios",
                   "0, 0, 0]",
                   "0, 0]",
                   {"config: len(compress_ratios) == n_layers + n_mtp_layers"}},
        ConfigCase{"draft_ratio", "0, 0, 0]", "0, 0, 2]", {"config: MTP layers compress nothing"}},
        ConfigCase{"targets",
                   "[37, 38, 39]",
                   "[36, 38, 39]",
                   {"config: dspark_target_layer_ids are the last n_mtp_layers backbone layers"}},
        ConfigCase{"candidate",
                   "\"candidate_source_layer\": 20",
                   "\"candidate_source_layer\": 24",
                   {"config: candidate_source_layer is the first index source from the last KV source on"}},
        ConfigCase{"compressed_vocabulary",
                   "\"engram_compressed_vocab_size\": 99092",
                   "\"engram_compressed_vocab_size\": 0",
                   {"config: engram_compressed_vocab_size is set"}},
        ConfigCase{"expert_dtype",
                   "\"expert_dtype\": \"fp4\"",
                   "\"expert_dtype\": \"fp8\"",
                   {"config: FP8 weights, FP4 experts, and widths that fill whole blocks of 32"}},
        ConfigCase{"table_rows", "[384006168, 384016682]", "[384006168, 384016681]", {kLargeEnough, kTables}},
        ConfigCase{
            "vision_width", "\"vision_inter_dim\": 2816", "\"vision_inter_dim\": 2848", {kVisionShapes}},
        ConfigCase{"vocabulary", "\"vocab_size\": 129280", "\"vocab_size\": 129281", {kShapes, kHeads}},
        ConfigCase{"experts",
                   "\"dspark_n_routed_experts\": 128",
                   "\"dspark_n_routed_experts\": 127",
                   {kShapes, "experts: every MTP layer has 127 routed experts"}}),
    [](const auto& info) { return std::string(info.param.name); });

struct MutationCase {
  const char* name;
  std::function<void(Tree&)> damage;
  std::vector<std::string> failed;
  const char* evidence;  // in the detail of the first failure
};

TreeShard& shard_of(Tree& tree, std::uint32_t number) {
  return tree.shards.at(number - 1);
}

void drop_from_header(Tree& tree, std::uint32_t shard, const std::string& name) {
  std::erase_if(shard_of(tree, shard).tensors, [&](const TreeTensor& tensor) { return tensor.name == name; });
  shard_of(tree, shard).lay_out();
}

void drop_from_index(Tree& tree, const std::string& name) {
  std::erase_if(tree.index, [&](const auto& entry) { return entry.first == name; });
}

void drop_everywhere(Tree& tree, std::uint32_t shard, const std::string& name) {
  drop_from_header(tree, shard, name);
  drop_from_index(tree, name);
}

/// Renamed consistently: the index follows.
void rename(Tree& tree, std::uint32_t shard, const std::string& name, const std::string& to) {
  shard_of(tree, shard).find(name)->name = to;
  for (auto& [tensor, file] : tree.index)
    if (tensor == name) tensor = to;
}

void reshape(Tree& tree, std::uint32_t shard, const std::string& name, Shape shape) {
  shard_of(tree, shard).find(name)->shape = shape;
  shard_of(tree, shard).lay_out();
}

void retype(Tree& tree, std::uint32_t shard, const std::string& name, DType dtype) {
  shard_of(tree, shard).find(name)->dtype = dtype;
  shard_of(tree, shard).lay_out();
}

class AuditOfDamagedTree : public ::testing::TestWithParam<MutationCase> {};

TEST_P(AuditOfDamagedTree, FailsExactlyWhatTheDamageTouches) {
  const Directory directory;
  Tree tree = released_tree();
  GetParam().damage(tree);
  write_tree(tree, directory.path());
  const AuditReport report = audit(options_for(directory.path()));
  ASSERT_EQ(named(report, Outcome::Fail), GetParam().failed);
  EXPECT_EQ(report.count(Outcome::Undecided), 0u);
  EXPECT_THAT(find(report, GetParam().failed.front()).detail, HasSubstr(GetParam().evidence));
}

INSTANTIATE_TEST_SUITE_P(
    Mutations, AuditOfDamagedTree,
    ::testing::Values(
        MutationCase{"drop_norm_from_header", [](Tree& t) { drop_from_header(t, 8, "layers.5.attn.q_norm.weight"); },
                     {kIndex}, "layers.5.attn.q_norm.weight: the index assigns it to model-00008-of-00048"},
        MutationCase{"drop_expert_from_header",
                     [](Tree& t) { drop_from_header(t, 8, "layers.5.ffn.experts.7.w1.weight"); },
                     {kExpertFormat, kIndex}, "layers.5.ffn.experts.7.w1.weight: promised by the index"},
        MutationCase{"drop_norm", [](Tree& t) { drop_everywhere(t, 8, "layers.5.attn.q_norm.weight"); },
                     {kLayers}, "layers.5.attn.q_norm.weight is missing"},
        MutationCase{"drop_expert", [](Tree& t) { drop_everywhere(t, 8, "layers.5.ffn.experts.7.w1.weight"); },
                     {kLayers, kExperts384}, "layers.5.ffn.experts.7.w1.weight is missing"},
        MutationCase{"drop_draft_expert", [](Tree& t) { drop_everywhere(t, 45, "mtp.1.ffn.experts.127.w2.scale"); },
                     {kExperts128}, "mtp.1.ffn.experts.127.w2.scale is missing"},
        MutationCase{"drop_head", [](Tree& t) { drop_everywhere(t, 43, "head.weight"); },
                     {kShapes}, "head.weight is missing"},
        MutationCase{"drop_compressor", [](Tree& t) { drop_everywhere(t, 11, "layers.8.attn.compressor.wkv.weight"); },
                     {kLayers, "csa2: compressor.wkv exactly on kv_source_layers"}, "layers.8.attn.compressor.wkv"},
        MutationCase{"drop_index_queries", [](Tree& t) { drop_everywhere(t, 27, "layers.24.attn.indexer.wq_b.weight"); },
                     {kLayers, "csa2: indexer.wq_b exactly on index_source_layers", kModes}, "layers.24.attn.indexer"},
        MutationCase{"gate_on_ratio_one",
                     [](Tree& t) {
                       shard_of(t, 23).tensors.push_back(
                           {"layers.20.attn.compressor.wgate.weight", DType::BF16, {512, 5120}});
                       shard_of(t, 23).lay_out();
                       t.index.emplace_back("layers.20.attn.compressor.wgate.weight", shard_of(t, 23).file);
                     },
                     {kLayers, "csa2: compressor.wgate exactly on the ratio>1 KV sources"}, "layers.20.attn.compressor"},
        MutationCase{"drop_vision_block", [](Tree& t) { drop_everywhere(t, 1, "vision.blocks.31.mlp.w2.weight"); },
                     {kVisionBlocks}, "vision.blocks.31.mlp.w2.weight is missing"},
        MutationCase{"drop_aligner", [](Tree& t) { drop_everywhere(t, 1, "aligner.w2.bias"); },
                     {kVisionShapes}, "aligner.w2.bias is missing"},
        MutationCase{"drop_table", [](Tree& t) { drop_everywhere(t, 47, "layers.1.engram.embed.weight"); },
                     {kTableLayers, kTables, kLayers}, "layers.1.engram.embed.weight is missing"},
        MutationCase{"drop_markov_head", [](Tree& t) { drop_everywhere(t, 46, "mtp.2.markov_head.head.weight"); },
                     {kHeads, kStages}, "mtp.2.markov_head.head.weight is missing"},
        MutationCase{"head_on_first_stage",
                     [](Tree& t) { rename(t, 46, "mtp.2.confidence_head.proj.weight", "mtp.0.confidence_head.proj.weight"); },
                     {kHeads, kStages}, "mtp.2.confidence_head.proj.weight is missing"},
        MutationCase{"rename_in_layer",
                     [](Tree& t) { rename(t, 8, "layers.5.ffn_norm.weight", "layers.5.ffn_norms.weight"); },
                     {kLayers}, "layers.5.ffn_norm.weight is missing"},
        MutationCase{"rename_outside_layers", [](Tree& t) { rename(t, 43, "norm.weight", "final_norm.weight"); },
                     {kShapes}, "norm.weight is missing"},
        MutationCase{"rename_in_header_only",
                     [](Tree& t) { shard_of(t, 8).find("layers.5.ffn_norm.weight")->name = "layers.5.ffn_norms.weight"; },
                     {kLayers, kIndex}, "layers.5.ffn_norms.weight: not a tensor of that layer"},
        MutationCase{"expert_beyond_the_last",
                     [](Tree& t) { rename(t, 8, "layers.5.ffn.experts.383.w1.weight", "layers.5.ffn.experts.384.w1.weight"); },
                     {kLayers, kExperts384}, "layers.5.ffn.experts.383.w1.weight is missing"},
        MutationCase{"reshape_norm", [](Tree& t) { reshape(t, 8, "layers.5.attn.q_norm.weight", {1281}); },
                     {kShapes}, "layers.5.attn.q_norm.weight: [1281], the config gives [1280]"},
        MutationCase{"transpose_fp8", [](Tree& t) { reshape(t, 8, "layers.5.attn.wq_a.weight", {5120, 1280}); },
                     {kScales32, kShapes}, "layers.5.attn.wq_a.weight"},
        MutationCase{"reshape_expert", [](Tree& t) { reshape(t, 8, "layers.5.ffn.experts.7.w2.weight", {5120, 1156}); },
                     {kPairs, kExpertFormat}, "layers.5.ffn.experts.7.w2.weight"},
        MutationCase{"reshape_main_proj", [](Tree& t) { reshape(t, 44, "mtp.0.main_proj.weight", {5120, 10240}); },
                     {kScales32, kMainProj}, "mtp.0.main_proj.weight"},
        MutationCase{"wrong_scale_shape", [](Tree& t) { reshape(t, 8, "layers.5.attn.wq_a.scale", {40, 80}); },
                     {kScales32}, "layers.5.attn.wq_a.weight: [1280, 5120] with scales [40, 80]"},
        MutationCase{"uneven_scale_shape", [](Tree& t) { reshape(t, 8, "layers.5.attn.wq_a.scale", {39, 160}); },
                     {kPairs, kScales32}, "layers.5.attn.wq_a.weight: [1280, 5120] does not divide into [39, 160]"},
        MutationCase{"wrong_table_scale", [](Tree& t) { reshape(t, 47, "layers.1.engram.embed.scale", {384006168, 4}); },
                     {kTables, kScalesTables}, "layers.1.engram.embed.scale"},
        MutationCase{"retype_norm", [](Tree& t) { retype(t, 8, "layers.5.attn.q_norm.weight", DType::F16); },
                     {kPlain}, "layers.5.attn.q_norm.weight: F16 instead of BF16"},
        MutationCase{"retype_fp8", [](Tree& t) { retype(t, 8, "layers.5.attn.wq_a.weight", DType::F8E5M2); },
                     {kScales32}, "layers.5.attn.wq_a.weight: F8_E5M2"},
        MutationCase{"retype_expert", [](Tree& t) { retype(t, 8, "layers.5.ffn.experts.7.w1.weight", DType::U8); },
                     {kPairs, kExpertFormat}, "layers.5.ffn.experts.7.w1.weight"},
        MutationCase{"retype_table", [](Tree& t) { retype(t, 48, "layers.14.engram.embed.weight", DType::U8); },
                     {kTables, kScalesTables}, "layers.14.engram.embed.weight: U8"},
        MutationCase{"quantized_norm",
                     [](Tree& t) {
                       shard_of(t, 43).tensors.push_back({"norm.scale", DType::F8E8M0, {160}});
                       shard_of(t, 43).lay_out();
                       t.index.emplace_back("norm.scale", shard_of(t, 43).file);
                     },
                     {kShapes, kPlain}, "norm.scale: no tensor of this model"},
        MutationCase{"overlap",
                     [](Tree& t) {
                       TreeTensor& tensor = shard_of(t, 8).tensors.back();
                       tensor.begin -= 64;
                       tensor.end -= 64;
                     },
                     {kPacking}, "overlaps"},
        MutationCase{"extent",
                     [](Tree& t) {
                       TreeTensor& tensor = shard_of(t, 8).tensors.back();
                       tensor.end += 64;
                       shard_of(t, 8).payload_bytes += 64;
                     },
                     {kPacking}, "bytes, data_offsets"},
        MutationCase{"truncated", [](Tree& t) { shard_of(t, 8).payload_bytes -= 1; },
                     {kPacking}, "model-00008-of-00048.safetensors: the header describes a payload of"},
        MutationCase{"moved_shard",
                     [](Tree& t) {
                       const TreeTensor moved = *shard_of(t, 8).find("layers.5.ffn_norm.weight");
                       drop_from_header(t, 8, moved.name);
                       shard_of(t, 9).tensors.push_back(moved);
                       shard_of(t, 9).lay_out();
                     },
                     {kIndex}, "assigns it to model-00008-of-00048.safetensors, model-00009-of-00048.safetensors holds it"},
        MutationCase{"tensor_in_two_shards",
                     [](Tree& t) {
                       shard_of(t, 9).tensors.push_back(*shard_of(t, 8).find("layers.5.ffn_norm.weight"));
                       shard_of(t, 9).lay_out();
                     },
                     {kCounts, kIndex}, "layers.5.ffn_norm.weight is also in model-00009"},
        MutationCase{"index_omits", [](Tree& t) { drop_from_index(t, "layers.5.ffn_norm.weight"); },
                     {kIndex}, "layers.5.ffn_norm.weight: in model-00008-of-00048.safetensors, but the index does not list it"},
        MutationCase{"index_names_another_shard",
                     [](Tree& t) {
                       for (auto& [tensor, file] : t.index)
                         if (tensor == "layers.5.ffn_norm.weight") file = shard_of(t, 9).file;
                     },
                     {kIndex}, "assigns it to model-00009-of-00048.safetensors, model-00008-of-00048.safetensors holds it"},
        MutationCase{"index_invents",
                     [](Tree& t) { t.index.emplace_back("layers.5.extra.weight", shard_of(t, 8).file); },
                     {kLayers, kIndex}, "layers.5.extra.weight: not a tensor of that layer"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Audit, FailureIsNotDeferredByMissingShards) {
  const Directory directory;
  Tree tree = released_tree();
  reshape(tree, 8, "layers.5.attn.wq_a.scale", {40, 80});
  TreeOptions options;
  options.shards = first_shards(20);
  write_tree(tree, directory.path(), options);
  const AuditReport report = audit(options_for(directory.path()));
  EXPECT_THAT(named(report, Outcome::Fail), ElementsAre(kScales32));
  EXPECT_EQ(report.count(Outcome::Undecided), 7u);
}

TEST(Audit, UnreadableShardFailsPackingAndIsWaitedFor) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  const fs::path shard = directory.path() / released_tree().shards[45].file;
  for (const std::string& content : {std::string(), std::string("12345"), std::string(64, '\xff'),
                                     std::string("\x08\0\0\0\0\0\0\0garbage!", 16)}) {
    std::ofstream(shard, std::ios::trunc) << content;
    const AuditReport report = audit(options_for(directory.path()));
    EXPECT_THAT(named(report, Outcome::Fail), ElementsAre(kPacking));
    EXPECT_THAT(find(report, kPacking).detail, HasSubstr("model-00046-of-00048.safetensors: "));
    EXPECT_THAT(find(report, kHeads).detail, HasSubstr("waiting on 46/48"));
  }
}

TEST(Audit, ExpectedBlockCanBeChosen) {
  const Directory directory;
  TreeOptions tree;
  tree.payload = Payload::HeaderOnly;
  write_tree(released_tree(), directory.path(), tree);
  AuditOptions options = options_for(directory.path());
  options.header_prefix = true;
  options.expect_fp8_block = BlockSize{128, 128};
  const AuditReport report = audit(options);
  EXPECT_THAT(named(report, Outcome::Fail),
              ElementsAre("scales: all non-Engram FP8 weights use a 128x128 block"));
}

TEST(Audit, ConfigThatCannotBeReadFailsItsCheckOnly) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  replace_in_file(directory.path() / "config.json", "\"hidden_size\": 5120", "\"hidden_sizes\": 5120");
  const AuditReport report = audit(options_for(directory.path()));
  EXPECT_THAT(named(report, Outcome::Fail), ElementsAre("config: every required field is present"));
  EXPECT_THAT(report.checks.front().detail, HasSubstr("hidden_size"));
  EXPECT_THAT(named(report, Outcome::Pass), ElementsAre(kPacking, kCounts, kIndex));
}

TEST(Audit, NothingToJudgeIsRefused) {
  const Directory directory;
  std::ostringstream out, err;
  EXPECT_THROW(run_audit(options_for(directory.path() / "absent"), out, err), CheckpointError);
  EXPECT_THROW(run_audit(options_for(directory.path()), out, err), CheckpointError);
  write_tree(released_tree(), directory.path());
  AuditOptions options = options_for(directory.path());
  options.config = directory.path() / "absent.json";
  EXPECT_THROW(run_audit(options, out, err), CheckpointError);
  options = options_for(directory.path());
  std::ofstream(directory.path() / "model.safetensors.index.json", std::ios::trunc) << "{\"weight_map\": [";
  EXPECT_THROW(run_audit(options, out, err), CheckpointError);
}

TEST(Audit, SmallCheckpointsPassWhatApplies) {
  for (const char* name : {"mini", "capitals"}) {
    AuditOptions options = options_for(fs::path(DSV41_TEST_CHECKPOINTS) / name);
    options.require_complete = true;
    const AuditReport report = audit(options);
    EXPECT_EQ(report.checks.size(), 39u);
    for (const Check& check : report.checks)
      EXPECT_EQ(check.outcome, Outcome::Pass) << name << ": " << check.name << ": " << check.detail;
  }
}

TEST(Audit, WhatDoesNotApplySaysWhy) {
  ModelConfig config = read_config(fs::path(DSV41_TEST_CHECKPOINTS) / "mini/config.json");
  config.engram_layer_ids.clear();
  config.engram_num_embeddings.clear();
  config.compress_ratios.resize(config.n_layers);
  config.n_mtp_layers = 0;
  config.dspark_target_layer_ids.clear();
  const Directory directory;
  write_tree(config, directory.path());
  const AuditReport report = audit(options_for(directory.path()));
  EXPECT_EQ(report.count(Outcome::Pass), 39u);
  EXPECT_EQ(find(report, kScalesTables).detail, "does not apply: the config has no Engram layer");
  EXPECT_EQ(find(report, kHeads).detail, "does not apply: the config has no MTP layers");
}

TEST(Audit, ListsTensorsByGlob) {
  std::ostringstream out, err;
  const Directory directory;
  TreeOptions tree;
  tree.shards = {5};
  write_tree(released_tree(), directory.path(), tree);
  AuditOptions options = options_for(directory.path());
  options.list_tensors = "layers.2.attn.wq_a.*";
  EXPECT_EQ(run_audit(options, out, err), 0);
  EXPECT_EQ(out.str(),
            "layers.2.attn.wq_a.weight\tF8_E4M3\t[1280, 5120]\t6553600\tmodel-00005-of-00048.safetensors\n"
            "layers.2.attn.wq_a.scale\tF8_E8M0\t[40, 160]\t6400\tmodel-00005-of-00048.safetensors\n");
  EXPECT_THAT(err.str(), HasSubstr("header audit"));
}

TEST(Audit, QuietPrintsOnlyWhatIsNotAPass) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  AuditOptions options = options_for(directory.path());
  options.quiet = true;
  std::ostringstream out, err;
  EXPECT_EQ(run_audit(options, out, err), 0);
  EXPECT_EQ(out.str(), "");
  fs::remove(directory.path() / released_tree().shards[43].file);
  EXPECT_EQ(run_audit(options, out, err), 0);
  EXPECT_THAT(out.str(), HasSubstr("wait  dspark: main_proj is n_mtp_layers * dim wide: waiting on 44/48"));
  EXPECT_EQ(out.str().find("pass"), std::string::npos);
}

}  // namespace
}  // namespace dsv41::audit
