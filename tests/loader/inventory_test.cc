// The inventory against the released numbers and against the headers of the bundled checkpoints.
#include "loader/inventory.h"

#include <gtest/gtest.h>

#include <map>

#include "loader/checkpoint.h"
#include "loader/error.h"
#include "loader/weight_index.h"

namespace dsv41 {
namespace {

const std::string kRelease = DSV41_TEST_DATA "/release/";

TEST(Inventory, ReleasedConfigGivesTheReleasedNumbers) {
  for (const char* file : {"config.json", "inference_config.json"}) {
    const ModelConfig config = read_config(kRelease + file);
    const Inventory all = inventory(config);
    EXPECT_EQ(all.size(), 96085u);
    EXPECT_EQ(tensor_count(config), 96085u);
    EXPECT_EQ(shard_count(config), 48u);
    std::uint64_t bytes = 0;
    std::map<std::uint32_t, std::size_t> shards;
    std::map<Category, std::pair<std::size_t, std::uint64_t>> categories;
    NameIndex names;
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_FALSE(names.insert(all[i].name, 0)) << all[i].name;
      bytes += all[i].bytes();
      ++shards[all[i].shard];
      ++categories[all[i].category].first;
      categories[all[i].category].second += all[i].bytes();
      if (i > 0) {
        EXPECT_LE(all[i - 1].shard, all[i].shard);
      }
    }
    EXPECT_EQ(bytes, 510286023000u);
    const std::map<std::uint32_t, std::size_t> known = {
        {1, 263},   {2, 4},  {3, 2334}, {4, 2334}, {5, 2342}, {17, 2342}, {23, 2341},
        {27, 2337}, {43, 2}, {44, 801}, {45, 798}, {46, 802}, {47, 6},    {48, 6}};
    for (const auto& [shard, tensors] : known) EXPECT_EQ(shards[shard], tensors) << "shard " << shard;
    // GiB to two decimals, as published.
    const std::map<Category, std::pair<std::size_t, double>> published = {
        {Category::RoutedExperts, {94464, 275.67}},
        {Category::EngramTables, {12, 189.13}},
        {Category::Attention, {603, 4.80}},
        {Category::EmbeddingAndHead, {3, 2.47}},
        {Category::SharedExperts, {240, 1.32}},
        {Category::Vision, {266, 0.90}},
        {Category::Draft, {97, 0.66}},
        {Category::Norms, {400, 0.29}}};
    for (const auto& [category, numbers] : published) {
      EXPECT_EQ(categories[category].first, numbers.first);
      EXPECT_NEAR(static_cast<double>(categories[category].second) / (1u << 30), numbers.second, 0.005);
    }
  }
}

TEST(Inventory, NamedShapesOfTheReleasedConfig) {
  const Inventory all = inventory(read_config(kRelease + "config.json"));
  std::map<std::string_view, const ExpectedTensor*> by_name;
  for (const ExpectedTensor& tensor : all) by_name[tensor.name] = &tensor;
  struct Known {
    const char* name;
    DType dtype;
    Shape shape;
  };
  for (const Known& known : {Known{"layers.2.attn.wq_b.weight", DType::F8E4M3, {32768, 1280}},
                             Known{"layers.2.attn.wq_b.scale", DType::F8E8M0, {1024, 40}},
                             Known{"layers.2.attn.wo_a.weight", DType::F8E4M3, {8192, 4096}},
                             Known{"layers.2.attn.compressor.wgate.weight", DType::BF16, {512, 5120}},
                             Known{"layers.2.attn.indexer.wq_b.weight", DType::F8E4M3, {4096, 1280}},
                             Known{"layers.2.ffn.experts.383.w1.weight", DType::I8, {2304, 2560}},
                             Known{"layers.2.ffn.experts.0.w2.scale", DType::F8E8M0, {5120, 72}},
                             Known{"layers.2.hc_attn_fn", DType::F32, {24, 20480}},
                             Known{"layers.14.engram.embed.weight", DType::F8E4M3, {384016682, 256}},
                             Known{"layers.14.engram.embed.scale", DType::F8E8M0, {384016682, 8}},
                             Known{"layers.1.engram.wkv.weight", DType::F8E4M3, {25600, 6144}},
                             Known{"mtp.0.main_proj.weight", DType::F8E4M3, {5120, 15360}},
                             Known{"mtp.2.confidence_head.proj.weight", DType::BF16, {1, 5376}},
                             Known{"vision.blocks.31.mlp.w1.weight", DType::BF16, {5632, 1024}},
                             Known{"aligner.w1.weight", DType::BF16, {5120, 9216}}}) {
    ASSERT_TRUE(by_name.contains(known.name)) << known.name;
    EXPECT_EQ(by_name[known.name]->dtype, known.dtype) << known.name;
    EXPECT_EQ(by_name[known.name]->shape, known.shape) << known.name;
  }
  EXPECT_FALSE(by_name.contains("layers.20.attn.compressor.wgate.weight"));
  EXPECT_FALSE(by_name.contains("layers.24.attn.indexer.wk.weight"));
  EXPECT_FALSE(by_name.contains("mtp.1.norm.weight"));
}

/// Same names, dtypes, shapes and shard grouping as files that another program wrote.
TEST(Inventory, EqualsTheHeadersOfTheBundledCheckpoints) {
  for (const char* name : {"mini", "capitals"}) {
    const std::filesystem::path directory = std::filesystem::path(DSV41_TEST_CHECKPOINTS) / name;
    const ModelConfig config = read_config(directory / "config.json");
    std::map<std::pair<std::uint32_t, std::string>, std::pair<DType, std::string>> expected, found;
    const Inventory all = inventory(config);
    for (const ExpectedTensor& tensor : all)
      expected[{tensor.shard, std::string(tensor.name)}] = {tensor.dtype, tensor.shape.text()};
    for (std::uint32_t shard = 1; shard <= shard_count(config); ++shard) {
      const MappedFile file(directory / shard_file_name(shard, shard_count(config)));
      const SafetensorsHeader header =
          parse_safetensors(file.bytes(), file.bytes().size(), file.path().string());
      for (const TensorInfo& tensor : header.tensors)
        found[{shard, std::string(tensor.name)}] = {tensor.dtype, tensor.shape.text()};
    }
    EXPECT_EQ(expected, found) << name;
    EXPECT_EQ(tensor_count(config), all.size());
  }
}

TEST(Inventory, CountsEveryGeometryAsItBuildsIt) {
  ModelConfig c = read_config(kRelease + "config.json");
  c.n_routed_experts = 3;
  c.dspark_n_routed_experts = 2;
  c.vision_n_layers = 1;
  for (std::uint32_t stages = 0; stages <= 3; ++stages) {
    c.n_mtp_layers = stages;
    EXPECT_EQ(inventory(c).size(), tensor_count(c)) << stages;
    EXPECT_EQ(shard_count(c), 45 + stages);
  }
  c.engram_layer_ids.clear();
  EXPECT_EQ(inventory(c).size(), tensor_count(c));
}

TEST(Inventory, RefusesMoreTensorsThanMemoryShouldHold) {
  ModelConfig c = read_config(kRelease + "config.json");
  c.n_routed_experts = 2'000'000'000;
  EXPECT_THROW(inventory(c), CheckpointError);
  c.n_layers = 2'000'000'000;
  EXPECT_EQ(tensor_count(c), ~std::uint64_t{0});
  EXPECT_THROW(inventory(c), CheckpointError);
}

}  // namespace
}  // namespace dsv41
