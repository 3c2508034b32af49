// The header audit on generated full-size trees: what complete and partial checkpoints give
// (spec: docs/checkpoint.md, "dsv41-mpi --audit-only"). The trees are sparse: 475 GiB that take no space.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "loader/audit/audit.h"
#include "loader/error.h"
#include "tests/loader/support/audit_support.h"

namespace dsv41::audit {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
