// Opening directories: the bundled checkpoints, a sparse tree of full size, and everything that is refused.
#include "loader/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "loader/error.h"
#include "loader/tree_writer.h"
#include "loader/weight_index.h"
#include "loader/weights.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

const fs::path kMini = fs::path(DSV41_TEST_CHECKPOINTS) / "mini";
const fs::path kCapitals = fs::path(DSV41_TEST_CHECKPOINTS) / "capitals";

std::string refusal(const fs::path& directory) {
  try {
    Checkpoint checkpoint(directory);
  } catch (const CheckpointError& error) {
    EXPECT_EQ(error.code(), ExitCode::Checkpoint);
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    return error.what();
  }
  return "accepted";
}

ModelConfig mini_config() {
  return read_config(kMini / "config.json");
}

TEST(Checkpoint, OpensTheBundledOnes) {
  const Checkpoint mini(kMini), capitals(kCapitals);
  EXPECT_EQ(mini.tensor_count(), 1019u);
  EXPECT_EQ(mini.payload_bytes(), 5023168u);
  EXPECT_EQ(capitals.tensor_count(), 1308u);
  EXPECT_EQ(capitals.payload_bytes(), 10963550u);
  EXPECT_NE(mini.fingerprint(), capitals.fingerprint());
  EXPECT_EQ(mini.fingerprint(), Checkpoint(kMini).fingerprint());
  EXPECT_EQ(mini.directory(), kMini);
}

TEST(Checkpoint, ViewsPointAtTheBytesOfTheFile) {
  const Checkpoint mini(kMini);
  const Fp8Matrix wo_a = mini.fp8("layers.0.attn.wo_a");
  EXPECT_EQ(wo_a.n, 64u);
  EXPECT_EQ(wo_a.k, 128u);
  const Fp4Matrix w2 = mini.fp4("layers.9.ffn.experts.7.w2");
  EXPECT_EQ(w2.n, 128u);
  EXPECT_EQ(w2.k, 64u);
  const Bf16Matrix embed = mini.bf16_matrix("embed.weight");
  EXPECT_EQ(embed.n, 768u);
  EXPECT_EQ(mini.bf16("norm.weight").size(), 128u);
  EXPECT_EQ(mini.f32("layers.0.attn.attn_sink").size(), 4u);
  EXPECT_EQ(mini.f32_matrix("layers.0.hc_attn_fn").k, 512u);

  // The location, read back by other means, holds the same bytes as the view.
  const TensorLocation location = mini.location("embed.weight");
  std::ifstream file(location.file->path(), std::ios::binary);
  file.seekg(static_cast<std::streamoff>(location.offset));
  std::string bytes(location.bytes, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  EXPECT_EQ(std::memcmp(bytes.data(), embed.values, bytes.size()), 0);
  EXPECT_EQ(mini.bytes("embed.weight").size(), bytes.size());

  EXPECT_THROW(mini.bytes("nothing"), CheckpointError);
  EXPECT_THROW(mini.fp8("embed"), CheckpointError);                // another dtype
  EXPECT_THROW(mini.bf16_matrix("norm.weight"), CheckpointError);  // another rank
  EXPECT_THROW(mini.fp8(std::string(300, 'x')), CheckpointError);
}

TEST(Weights, FollowTheModesOfTheLayers) {
  const Checkpoint mini(kMini);
  const ModelConfig& c = mini.config();
  const ModelWeights weights = host_weights(mini);
  ASSERT_EQ(weights.blocks.size(), c.n_layers);
  for (std::uint32_t layer = 0; layer < c.n_layers; ++layer) {
    const AttentionWeights& attention = weights.blocks[layer].attention;
    const AttentionMode mode = c.mode(layer);
    EXPECT_EQ(attention.compressor.has_value(), mode == AttentionMode::Full);
    EXPECT_EQ(attention.index_query.has_value(),
              mode == AttentionMode::Full || mode == AttentionMode::Reindex);
    if (attention.compressor) {
      EXPECT_EQ(attention.compressor->wgate.has_value(), c.compress_ratios[layer] > 1);
    }
  }
  ASSERT_EQ(weights.engram.size(), 2u);
  EXPECT_EQ(weights.engram[1].rows, 3424u);
  EXPECT_EQ(weights.engram[1].table_codes.size(), 3424u * 32);
  EXPECT_EQ(weights.engram[1].table_scales.size(), 3424u);
  EXPECT_EQ(weights.engram[1].codes_location.bytes, 3424u * 32);
  ASSERT_TRUE(weights.draft);
  EXPECT_EQ(weights.draft->stages.size(), 3u);
  EXPECT_EQ(weights.draft->main_proj.k, 3u * c.dim);
  EXPECT_EQ(weights.draft->confidence.size(), c.dim + c.dspark_markov_rank);
  const ExpertMatrices backbone = expert_weights(mini, 0, 7), draft = expert_weights(mini, c.n_layers + 2, 3);
  EXPECT_EQ(backbone.w1.codes, mini.fp4("layers.0.ffn.experts.7.w1").codes);
  EXPECT_EQ(draft.w2.codes, mini.fp4("mtp.2.ffn.experts.3.w2").codes);
  EXPECT_THROW(expert_weights(mini, 0, 8), CheckpointError);
}

TEST(Checkpoint, OpensASparseTreeOfFullSize) {
  const TemporaryDirectory directory;
  write_tree(read_config(DSV41_TEST_DATA "/release/config.json"), directory.path());
  const Checkpoint checkpoint(directory.path());
  EXPECT_EQ(checkpoint.tensor_count(), 96085u);
  EXPECT_EQ(checkpoint.payload_bytes(), 510286023000u);
  const ModelWeights weights = host_weights(checkpoint);
  const EngramWeights& table = weights.engram.at(1);
  EXPECT_EQ(table.rows, 384016682u);
  EXPECT_EQ(table.table_codes.back(), 0u);
  EXPECT_EQ(expert_weights(checkpoint, 42, 127).w2.k, 2304u);
}

TEST(Checkpoint, TheIndexIsOptionalAndExtraTensorsAreTolerated) {
  const TemporaryDirectory with_extra;
  Tree tree = plan_tree(mini_config());
  tree.shards[1].tensors.push_back({"some.future.tensor", DType::F16, {2, 2, 2}});
  tree.shards[1].lay_out();
  tree.write_index = false;
  tree.nested_config.clear();  // inference/config.json serves as well
  write_tree(tree, with_extra.path());
  const Checkpoint checkpoint(with_extra.path());
  EXPECT_EQ(checkpoint.tensor_count(), 1020u);
  EXPECT_EQ(checkpoint.info("some.future.tensor").shape, (Shape{2, 2, 2}));
}

TEST(Checkpoint, RefusesDirectoriesThatAreNone) {
  const TemporaryDirectory directory;
  const fs::path& path = directory.path();
  EXPECT_THAT(refusal(path / "absent"), HasSubstr("no such directory"));
  EXPECT_THAT(refusal(path), HasSubstr("the directory is empty"));
  fs::create_symlink("loop", path / "loop");
  EXPECT_THAT(refusal(path / "loop"), HasSubstr("symbolic links"));
  std::ofstream(path / "readme.txt") << "hello";
  EXPECT_THAT(refusal(path / "readme.txt"), HasSubstr("not a directory"));
  EXPECT_THAT(refusal(path), HasSubstr("neither config.json nor inference/config.json"));
  fs::create_symlink("config.json", path / "config.json");
  EXPECT_THAT(refusal(path), HasSubstr("symbolic links"));
  fs::remove(path / "config.json");
  fs::create_directory(path / "config.json");
  EXPECT_THAT(refusal(path), HasSubstr("not a regular file"));
  fs::remove(path / "config.json");
  std::ofstream(path / "config.json") << R"({"model_type":"llama"})";
  EXPECT_THAT(refusal(path), HasSubstr("not a DeepSeek-V4.1 config (model_type llama)"));
  fs::copy_file(kMini / "config.json", path / "config.json", fs::copy_options::overwrite_existing);
  EXPECT_THAT(refusal(path), HasSubstr("no *.safetensors shard"));
  const TreeTensor foreign{"model.embed_tokens.weight", DType::BF16, {0}, 0, 0};
  std::ofstream(path / "model.safetensors", std::ios::binary) << render_header(std::span(&foreign, 1));
  EXPECT_THAT(refusal(path), HasSubstr("hold none of the 1019 tensors"));
}

struct Damage {
  const char* label;
  std::function<void(Tree&)> damage;
  std::vector<const char*> complaints;
};

class DamagedTree : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedTree, IsRefusedAndNamed) {
  const TemporaryDirectory directory;
  Tree tree = plan_tree(mini_config());
  GetParam().damage(tree);
  write_tree(tree, directory.path());
  const std::string message = refusal(directory.path());
  for (const char* complaint : GetParam().complaints) EXPECT_THAT(message, HasSubstr(complaint));
}

TreeTensor& tensor_of(Tree& tree, std::string_view name) {
  for (TreeShard& shard : tree.shards)
    if (TreeTensor* tensor = shard.find(name)) return *tensor;
  throw std::logic_error("no such tensor");
}

void reshape(Tree& tree, std::string_view name, DType dtype, Shape shape) {
  TreeTensor& tensor = tensor_of(tree, name);
  tensor.dtype = dtype;
  tensor.shape = shape;
  for (TreeShard& shard : tree.shards)
    if (shard.find(name) != nullptr) return shard.lay_out();
}

INSTANTIATE_TEST_SUITE_P(
    Trees, DamagedTree,
    ::testing::Values(
        Damage{"missing_shards",
               [](Tree& tree) { tree.shards[4].present = tree.shards[8].present = false; },
               {"2 of 18 shards are missing: model-00005-of-00018.safetensors; "
                "model-00009-of-00018.safetensors"}},
        Damage{"missing_shard_without_index",
               [](Tree& tree) { tree.write_index = tree.shards[4].present = false; },
               {"layers.2.attn.wq_a.weight: no shard holds it",
                "model-00005-of-00018.safetensors, which is missing", "and 81 more"}},
        Damage{
            "dropped",
            [](Tree& tree) {
              auto& all = tree.shards[2].tensors;
              std::erase_if(all, [](const auto& x) { return x.name == "layers.0.attn.wkv.scale"; });
              tree.shards[2].lay_out();
            },
            {"layers.0.attn.wkv.scale: no shard holds it, the config demands F8_E8M0 [2, 4] (head_dim, dim)",
             "the index places layers.0.attn.wkv.scale in model-00003-of-00018.safetensors, which does not "
             "hold it"}},
        Damage{"renamed",
               [](Tree& tree) { tensor_of(tree, "norm.weight").name = "norms.weight"; },
               {"norm.weight: no shard holds it"}},
        Damage{"reshaped",
               [](Tree& tree) {
                 reshape(tree, "layers.3.attn.wq_b.weight", DType::F8E4M3, {320, 64});
               },
               {"layers.3.attn.wq_b.weight is F8_E4M3 [320, 64] in model-00006-of-00018.safetensors",
                "the config demands F8_E4M3 [256, 64] (n_heads*head_dim, q_lora_rank)"}},
        Damage{"retyped",
               [](Tree& tree) { reshape(tree, "norm.weight", DType::F32, {128}); },
               {"norm.weight is F32 [128]", "demands BF16 [128] (dim)"}},
        Damage{"transposed",
               [](Tree& tree) {
                 reshape(tree, "layers.0.attn.wo_b.weight", DType::F8E4M3, {64, 128});
               },
               {"demands F8_E4M3 [128, 64]"}},
        Damage{"twice",
               [](Tree& tree) {
                 tree.shards[3].tensors.push_back(tensor_of(tree, "norm.weight"));
                 tree.shards[3].lay_out();
               },
               {"norm.weight lies in two shards", "model-00004-of-00018.safetensors",
                "model-00013-of-00018.safetensors"}},
        Damage{"index_lies",
               [](Tree& tree) {
                 for (auto& [tensor, file] : tree.index)
                   if (tensor == "norm.weight") file = tree.shards[0].file;
               },
               {"the index places norm.weight in model-00001-of-00018.safetensors, it lies in "
                "model-00013-of-00018.safetensors"}},
        Damage{"index_escapes",
               [](Tree& tree) { tree.index[0].second = "../model.safetensors"; },
               {"\"../model.safetensors\" is not a plain shard file name"}},
        Damage{
            "truncated",
            [](Tree& tree) { tree.shards[0].payload_bytes -= 1; },
            {"model-00001-of-00018.safetensors: the header describes a payload of", "truncated download?"}},
        Damage{"overlap",
               [](Tree& tree) {
                 auto& all = tree.shards[12].tensors;
                 all[1].begin -= 2;
                 all[1].end -= 2;
               },
               {"overlaps"}},
        Damage{"misaligned",
               [](Tree& tree) {
                 auto& s = tree.shards[12];
                 s.tensors.insert(s.tensors.begin(), {"odd", DType::U8, {1}, 0, 1});
                 for (std::size_t i = 1; i < s.tensors.size(); ++i) {
                   s.tensors[i].begin += 1;
                   s.tensors[i].end += 1;
                 }
                 s.payload_bytes += 1;
               },
               {"head.weight starts at byte", "which is not a multiple of its 2-byte elements"}},
        Damage{"config_value",
               [](Tree& tree) {
                 tree.nested_config.replace(tree.nested_config.find("\"hidden_size\": 128"), 18,
                                            "\"hidden_size\": 129");
               },
               {"config.json: dim is 129; it must be a multiple of 32"}},
        Damage{"config_against_tensors",
               [](Tree& tree) {
                 tree.nested_config.replace(tree.nested_config.find("\"n_routed_experts\": 8"), 21,
                                            "\"n_routed_experts\": 9");
               },
               {"layers.0.ffn.gate.weight is BF16 [8, 128]", "demands BF16 [9, 128] (n_routed_experts, dim)",
                "tensors contradict"}}),
    [](const auto& test) { return std::string(test.param.label); });

TEST(Checkpoint, RefusesShardsAndIndexesThatAreNoFiles) {
  const TemporaryDirectory directory;
  write_tree(mini_config(), directory.path());
  const fs::path shard = directory.path() / "model-00007-of-00018.safetensors",
                 index = directory.path() / kWeightIndexFile;
  fs::remove(shard);
  fs::create_symlink(shard.filename(), shard);
  EXPECT_THAT(refusal(directory.path()), HasSubstr("model-00007-of-00018.safetensors: cannot open"));
  fs::remove(shard);
  fs::create_directory(shard);
  EXPECT_THAT(refusal(directory.path()), HasSubstr("model-00007-of-00018.safetensors: not a regular file"));
  fs::remove(shard);
  std::ofstream(shard, std::ios::binary) << "";
  EXPECT_THAT(refusal(directory.path()), HasSubstr("0 bytes are too few"));
  fs::remove(index);
  fs::create_symlink(index.filename(), index);
  EXPECT_THAT(refusal(directory.path()), HasSubstr("model.safetensors.index.json: cannot open"));
}

TEST(WeightIndex, RefusesHostileText) {
  const auto refused = [](const std::string& json) -> std::string {
    try {
      parse_weight_index(json, "index");
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "accepted";
  };
  const WeightIndex index = parse_weight_index(
      R"({"metadata":{"total_size":7,"format":"pt"},"weight_map":{"b":"x.safetensors","a":"y.safetensors","c":"x.safetensors"}})",
      "i");
  EXPECT_EQ(index.total_size, 7u);
  ASSERT_EQ(index.entries.size(), 3u);
  EXPECT_EQ(index.shards[index.entries[2].shard], "x.safetensors");
  EXPECT_EQ(index.entries[1].tensor, "a");
  for (const auto& [json, complaint] : std::initializer_list<std::pair<const char*, const char*>>{
           {"", "malformed JSON"},
           {"[]", "not a JSON object"},
           {"{}", "there is no \"weight_map\""},
           {R"({"weight_map":[]})", "weight_map"},
           {R"({"weight_map":{"a":1}})", "a: "},
           {R"({"weight_map":{"a":"x"},"weight_map":{}})", "given twice"},
           {R"({"weight_map":{"a":"x","b":"x","a":"x"}})", "tensor a appears twice"},
           {R"({"weight_map":{"a":"x","a":"x"}})", "tensor a appears twice"},
           {R"({"weight_map":{"a":"/etc/passwd"}})", "not a plain shard file name"},
           {R"({"weight_map":{"a":".."}})", "not a plain shard file name"},
           {R"({"weight_map":{"a":""}})", "not a plain shard file name"},
           {R"({"weight_map":{"a\n":"x"}})", "not printable"},
           {R"({"metadata":{"total_size":-1},"weight_map":{}})", "total_size is not"},
           {R"({"metadata":{"x":[[[[]]]]},"weight_map":{}})", "metadata.x is not a scalar"},
           {R"({"weight_map":{}} {})", "text after the end"}})
    EXPECT_THAT(refused(json), HasSubstr(complaint)) << json;
  EXPECT_NE(refused(R"({"weight_map":)" + std::string(100000, '{')), "accepted");
}

}  // namespace
}  // namespace dsv41
