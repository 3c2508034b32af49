// The header audit on changed configs and damaged trees: each fails exactly the checks that the damage
// touches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "loader/audit/audit.h"
#include "loader/error.h"
#include "loader/tree_mutations.h"
#include "tests/loader/support/audit_support.h"

namespace dsv41::audit {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct ConfigCase {
  std::string name;
  const char* from;
  const char* to;
  std::vector<std::string> failed;
};

void PrintTo(const ConfigCase& test, std::ostream* out) {
  *out << test.name;
}

class AuditOfChangedConfig : public ::testing::TestWithParam<ConfigCase> {};

TEST_P(AuditOfChangedConfig, FailsWhatItTouches) {
  const Directory directory;
  TreeOptions tree;
  tree.payload = Payload::HeaderOnly;
  write_tree(released_tree(), directory.path(), tree);
  AuditOptions options = options_for(directory.path());
  options.header_prefix = true;
  options.config = directory.path() / "changed.json";
  fs::copy_file(fs::path(DSV41_TEST_DATA) / "release/inference_config.json", *options.config);
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
        // 8 GiB for their ratios alone: refused before anything is made for them.
        ConfigCase{"absurd_layers",
                   "\"n_layers\": 40",
                   "\"n_layers\": 2147483647",
                   {"config: every required field is present"}},
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
    [](const auto& test) { return test.param.name; });

struct MutationCase {
  std::string name;
  const char* damage;
  std::vector<std::string> failed;
  const char* evidence;  // in the detail of the first failure
};

void PrintTo(const MutationCase& test, std::ostream* out) {
  *out << test.damage;
}

class AuditOfDamagedTree : public ::testing::TestWithParam<MutationCase> {};

TEST_P(AuditOfDamagedTree, FailsExactlyWhatTheDamageTouches) {
  const Directory directory;
  Tree tree = released_tree();
  mutate(tree, GetParam().damage);
  write_tree(tree, directory.path());
  const AuditReport report = audit(options_for(directory.path()));
  ASSERT_EQ(named(report, Outcome::Fail), GetParam().failed);
  EXPECT_EQ(report.count(Outcome::Undecided), 0u);
  EXPECT_THAT(find(report, GetParam().failed.front()).detail, HasSubstr(GetParam().evidence));
}

INSTANTIATE_TEST_SUITE_P(
    Mutations, AuditOfDamagedTree,
    ::testing::Values(
        MutationCase{"drop_norm_from_header",
                     "drop-header=layers.5.attn.q_norm.weight",
                     {kIndex},
                     "layers.5.attn.q_norm.weight: the index assigns it to model-00008-of-00048"},
        MutationCase{"drop_expert_from_header",
                     "drop-header=layers.5.ffn.experts.7.w1.weight",
                     {kExpertFormat, kIndex},
                     "layers.5.ffn.experts.7.w1.weight: promised by the index"},
        MutationCase{"drop_norm",
                     "drop=layers.5.attn.q_norm.weight",
                     {kLayers},
                     "layers.5.attn.q_norm.weight is missing"},
        MutationCase{"drop_expert",
                     "drop=layers.5.ffn.experts.7.w1.weight",
                     {kLayers, kExperts384},
                     "layers.5.ffn.experts.7.w1.weight is missing"},
        MutationCase{"drop_draft_expert",
                     "drop=mtp.1.ffn.experts.127.w2.scale",
                     {kExperts128},
                     "mtp.1.ffn.experts.127.w2.scale is missing"},
        MutationCase{"drop_head", "drop=head.weight", {kShapes}, "head.weight is missing"},
        MutationCase{"drop_compressor",
                     "drop=layers.8.attn.compressor.wkv.weight",
                     {kLayers, "csa2: compressor.wkv exactly on kv_source_layers"},
                     "layers.8.attn.compressor.wkv"},
        MutationCase{"drop_index_keys",
                     "drop=layers.14.attn.indexer.wk.weight",
                     {kLayers, "csa2: indexer.wk exactly on kv_source_layers", kModes},
                     "layers.14.attn.indexer.wk"},
        MutationCase{"drop_index_queries",
                     "drop=layers.24.attn.indexer.wq_b.weight",
                     {kLayers, "csa2: indexer.wq_b exactly on index_source_layers", kModes},
                     "layers.24.attn.indexer"},
        MutationCase{"gate_on_ratio_one",
                     "add=layers.20.attn.compressor.wgate.weight:BF16:512x5120:23",
                     {kLayers, "csa2: compressor.wgate exactly on the ratio>1 KV sources"},
                     "layers.20.attn.compressor"},
        MutationCase{"drop_vision_block",
                     "drop=vision.blocks.31.mlp.w2.weight",
                     {kVisionBlocks},
                     "vision.blocks.31.mlp.w2.weight is missing"},
        MutationCase{"drop_aligner", "drop=aligner.w2.bias", {kVisionShapes}, "aligner.w2.bias is missing"},
        MutationCase{"drop_table",
                     "drop=layers.1.engram.embed.weight",
                     {kTableLayers, kTables, kLayers},
                     "layers.1.engram.embed.weight is missing"},
        MutationCase{"drop_markov_head",
                     "drop=mtp.2.markov_head.head.weight",
                     {kHeads, kStages},
                     "mtp.2.markov_head.head.weight is missing"},
        MutationCase{"head_on_first_stage",
                     "rename=mtp.2.confidence_head.proj.weight:mtp.0.confidence_head.proj.weight",
                     {kHeads, kStages},
                     "mtp.2.confidence_head.proj.weight is missing"},
        MutationCase{"rename_in_layer",
                     "rename=layers.5.ffn_norm.weight:layers.5.ffn_norms.weight",
                     {kLayers},
                     "layers.5.ffn_norm.weight is missing"},
        MutationCase{"rename_outside_layers",
                     "rename=norm.weight:final_norm.weight",
                     {kShapes},
                     "norm.weight is missing"},
        MutationCase{"rename_in_header_only",
                     "rename-header=layers.5.ffn_norm.weight:layers.5.ffn_norms.weight",
                     {kLayers, kIndex},
                     "layers.5.ffn_norms.weight: not a tensor of that layer"},
        MutationCase{"expert_beyond_the_last",
                     "rename=layers.5.ffn.experts.383.w1.weight:layers.5.ffn.experts.384.w1.weight",
                     {kLayers, kExperts384},
                     "layers.5.ffn.experts.383.w1.weight is missing"},
        MutationCase{"reshape_norm",
                     "reshape=layers.5.attn.q_norm.weight:1281",
                     {kShapes},
                     "layers.5.attn.q_norm.weight: [1281], the config gives [1280]"},
        MutationCase{"transpose_fp8",
                     "reshape=layers.5.attn.wq_a.weight:5120x1280",
                     {kScales32, kShapes},
                     "layers.5.attn.wq_a.weight"},
        MutationCase{"reshape_expert",
                     "reshape=layers.5.ffn.experts.7.w2.weight:5120x1160",
                     {kPairs, kExpertFormat},
                     "layers.5.ffn.experts.7.w2.weight"},
        MutationCase{"reshape_main_proj",
                     "reshape=mtp.0.main_proj.weight:5120x10240",
                     {kPairs, kScales32, kMainProj},
                     "mtp.0.main_proj.weight"},
        MutationCase{"wrong_scale_shape",
                     "reshape=layers.5.attn.wq_a.scale:40x80",
                     {kScales32},
                     "layers.5.attn.wq_a.weight: [1280, 5120] with scales [40, 80]"},
        MutationCase{"uneven_scale_shape",
                     "reshape=layers.5.attn.wq_a.scale:39x160",
                     {kPairs, kScales32},
                     "layers.5.attn.wq_a.weight: [1280, 5120] does not divide into [39, 160]"},
        MutationCase{"wrong_table_scale",
                     "reshape=layers.1.engram.embed.scale:384006168x4",
                     {kTables, kScalesTables},
                     "layers.1.engram.embed.scale"},
        MutationCase{"retype_norm",
                     "retype=layers.5.attn.q_norm.weight:F16",
                     {kPlain},
                     "layers.5.attn.q_norm.weight: F16 instead of BF16"},
        MutationCase{"retype_fp8",
                     "retype=layers.5.attn.wq_a.weight:F8_E5M2",
                     {kScales32},
                     "layers.5.attn.wq_a.weight: F8_E5M2"},
        MutationCase{"retype_expert",
                     "retype=layers.5.ffn.experts.7.w1.weight:U8",
                     {kExpertFormat},
                     "layers.5.ffn.experts.7.w1.weight: U8"},
        MutationCase{"retype_table",
                     "retype=layers.14.engram.embed.weight:U8",
                     {kTables, kScalesTables},
                     "layers.14.engram.embed.weight: U8"},
        MutationCase{"quantized_norm",
                     "add=norm.scale:F8_E8M0:160:43",
                     {kShapes, kPlain},
                     "norm.scale: no tensor of this model"},
        MutationCase{"overlap", "overlap=layers.5.ffn.experts.7.w1.scale:64", {kPacking}, "overlaps"},
        MutationCase{"extent",
                     "extend=layers.5.ffn.experts.7.w1.scale:64",
                     {kPacking},
                     "layers.5.ffn.experts.7.w1.scale: F8_E8M0 [2304, 160] takes 368640 bytes"},
        MutationCase{"truncated",
                     "truncate=8:1",
                     {kPacking},
                     "model-00008-of-00048.safetensors: the header describes a payload of"},
        MutationCase{
            "moved_shard",
            "move=layers.5.ffn_norm.weight:9",
            {kIndex},
            "assigns it to model-00008-of-00048.safetensors, model-00009-of-00048.safetensors holds it"},
        MutationCase{"tensor_in_two_shards",
                     "copy=layers.5.ffn_norm.weight:9",
                     {kCounts, kIndex},
                     "layers.5.ffn_norm.weight is also in model-00009"},
        MutationCase{
            "index_omits",
            "drop-index=layers.5.ffn_norm.weight",
            {kIndex},
            "layers.5.ffn_norm.weight: in model-00008-of-00048.safetensors, but the index does not list it"},
        MutationCase{
            "index_names_another_shard",
            "index=layers.5.ffn_norm.weight:9",
            {kIndex},
            "assigns it to model-00009-of-00048.safetensors, model-00008-of-00048.safetensors holds it"},
        MutationCase{"index_invents",
                     "promise=layers.5.extra.weight:8",
                     {kLayers, kIndex},
                     "layers.5.extra.weight: not a tensor of that layer"}),
    [](const auto& test) { return test.param.name; });

TEST(Audit, FailureIsNotDeferredByMissingShards) {
  const Directory directory;
  Tree tree = released_tree();
  mutate(tree, "reshape=layers.5.attn.wq_a.scale:40x80");
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

}  // namespace
}  // namespace dsv41::audit
