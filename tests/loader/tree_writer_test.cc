// Generated trees: they open, they repeat, their values are valid and of a sane size, for several geometries.
#include "loader/tree_writer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>

#include "loader/checkpoint.h"
#include "loader/error.h"
#include "loader/weights.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

namespace fs = std::filesystem;

std::string content(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

ModelConfig mini_config() {
  return read_config(fs::path(DSV41_TEST_CHECKPOINTS) / "mini/config.json");
}

/// Nothing round: odd head and expert counts, ratio 3, Engram on layer 0, one draft stage.
ModelConfig odd_config() {
  ModelConfig c = mini_config();
  c.n_layers = 5;
  c.n_mtp_layers = 1;
  c.vocab_size = 771;
  c.n_heads = 3;
  c.o_groups = 1;
  c.o_lora_rank = 96;
  c.dim = 96;
  c.n_routed_experts = 5;
  c.dspark_n_routed_experts = 3;
  c.compress_ratios = {0, 3, 3, 1, 1, 0};
  c.kv_source_layers = {1, 3};
  c.index_source_layers = {1, 2, 3, 4};
  c.candidate_source_layer = 3;
  c.dspark_target_layer_ids = {2, 4};
  c.engram_layer_ids = {0};
  c.engram_num_embeddings = {1001};
  return c;
}

TEST(TreeWriter, RandomTreesOpenAndRepeat) {
  for (const ModelConfig& config : {mini_config(), odd_config()}) {
    const TemporaryDirectory a, b, other;
    write_tree(config, a.path(),
               {.payload = Payload::Random,
                .seed = 5,
                .tokenizer = fs::path(DSV41_TEST_CHECKPOINTS) / "mini/tokenizer.json"});
    write_tree(config, b.path(), {.payload = Payload::Random, .seed = 5});
    write_tree(config, other.path(), {.payload = Payload::Random, .seed = 6});
    const Checkpoint checkpoint(a.path());
    EXPECT_TRUE(differing_fields(checkpoint.config(), config).empty());
    EXPECT_EQ(differing_fields(read_config(a.path() / "inference/config.json"), config).size(), 12u);
    EXPECT_EQ(content(a.path() / "tokenizer.json"),
              content(fs::path(DSV41_TEST_CHECKPOINTS) / "mini/tokenizer.json"));
    for (const TreeShard& shard : plan_tree(config).shards) {
      EXPECT_EQ(content(a.path() / shard.file), content(b.path() / shard.file));
      EXPECT_NE(content(a.path() / shard.file), content(other.path() / shard.file));
    }
  }
}

/// No NaN code anywhere; every matrix has the deviation that its fan-in asks for, through codes and scales
/// together.
TEST(TreeWriter, RandomValuesAreValidAndSane) {
  const TemporaryDirectory directory;
  write_tree(odd_config(), directory.path(), {.payload = Payload::Random});
  const Checkpoint checkpoint(directory.path());
  const Inventory all = inventory(checkpoint.config());
  for (const ExpectedTensor& tensor : all) {
    const auto bytes = checkpoint.bytes(tensor.name);
    for (const std::byte value : bytes) {
      const auto code = std::to_integer<std::uint8_t>(value);
      const bool valid = tensor.dtype == DType::F8E4M3   ? (code & 0x7F) != 0x7F
                         : tensor.dtype == DType::F8E8M0 ? code > 60 && code < 160
                                                         : true;
      ASSERT_TRUE(valid) << tensor.name << " holds code " << int{code};
    }
    float largest = 0;
    if (tensor.dtype == DType::F32) {
      for (const float value : checkpoint.f32(tensor.name)) largest = std::max(largest, std::abs(value));
    } else if (tensor.dtype == DType::BF16) {
      for (const BFloat16 value : checkpoint.bf16(tensor.name))
        largest = std::max(largest, std::abs(to_float(value)));
    }
    EXPECT_LT(largest, 8) << tensor.name;
  }
  const auto deviation = [](std::size_t n, std::size_t k, const auto& value) {
    double squares = 0;
    for (std::size_t row = 0; row < n; ++row)
      for (std::size_t column = 0; column < k; ++column) squares += std::pow(value(row, column), 2);
    return std::sqrt(squares / static_cast<double>(n * k));
  };
  const Fp8Matrix wq_b = checkpoint.fp8("layers.1.attn.wq_b");
  EXPECT_NEAR(deviation(wq_b.n, wq_b.k,
                        [&](std::size_t row, std::size_t column) {
                          return decode_e4m3(wq_b.codes[row * wq_b.k + column]) *
                                 decode_e8m0(wq_b.scales[row / 32 * ceil_div(wq_b.k, 32) + column / 32]);
                        }),
              1 / std::sqrt(static_cast<double>(wq_b.k)), 0.01);
  const Fp4Matrix w1 = checkpoint.fp4("layers.4.ffn.experts.4.w1");
  EXPECT_NEAR(deviation(w1.n, w1.k,
                        [&](std::size_t row, std::size_t column) {
                          const std::uint8_t pair = w1.codes[(row * w1.k + column) / 2];
                          return decode_e2m1(column % 2 == 0 ? pair : pair >> 4) *
                                 decode_e8m0(w1.scales[row * (w1.k / 32) + column / 32]);
                        }),
              1 / std::sqrt(static_cast<double>(w1.k)), 0.02);
  const ModelWeights weights = host_weights(checkpoint);
  const EngramWeights& table = weights.engram.at(0);
  EXPECT_NEAR(deviation(table.rows, 32,
                        [&](std::size_t row, std::size_t column) {
                          return decode_e4m3(table.table_codes[row * 32 + column]) *
                                 decode_e8m0(table.table_scales[row]);
                        }),
              0.6, 0.01);
}

TEST(TreeWriter, RandomRowsAreTheSameHoweverTheyAreCut) {
  const TreeTensor tensor{"layers.0.ffn.experts.1.w2.weight", DType::I8, {64, 16}, 0, 1024};
  const std::vector<std::uint8_t> whole = random_rows(tensor, 9, 0, 64);
  std::vector<std::uint8_t> pieces;
  for (std::uint64_t row = 0; row < 64; row += 16) {
    const auto part = random_rows(tensor, 9, row, 16);
    pieces.insert(pieces.end(), part.begin(), part.end());
  }
  EXPECT_EQ(whole, pieces);
}

TEST(TreeWriter, WritesChosenShardsAndHeadersAlone) {
  const TemporaryDirectory directory;
  write_tree(mini_config(), directory.path(), {.payload = Payload::HeaderOnly, .shards = {1, 18}});
  std::size_t shards = 0;
  for (const auto& entry : fs::directory_iterator(directory.path()))
    shards += entry.path().extension() == ".safetensors";
  EXPECT_EQ(shards, 2u);
  const MappedFile prefix(directory.path() / "model-00018-of-00018.safetensors");
  const SafetensorsHeader header = parse_safetensors(prefix.bytes(), 0, "prefix");
  EXPECT_EQ(header.tensors.size(), 6u);
  EXPECT_EQ(prefix.bytes().size(), header.payload_offset());
}

TEST(TreeWriter, SparsePayloadTakesNoSpaceAndReadsAsZero) {
  const TemporaryDirectory directory;
  write_tree(mini_config(), directory.path(), {.shards = {2}});
  const MappedFile file(directory.path() / "model-00002-of-00018.safetensors");
  const SafetensorsHeader header = parse_safetensors(file.bytes(), file.bytes().size(), "sparse");
  for (std::size_t i = header.payload_offset(); i < file.bytes().size(); ++i)
    ASSERT_EQ(file.bytes()[i], std::byte{0});
}

TEST(TreeWriter, NamesWhatItCannotWrite) {
  EXPECT_THROW(write_tree(mini_config(), "/proc/dsv41_no_such_place"), ResourceError);
  const TemporaryDirectory directory;
  EXPECT_THROW(write_tree(mini_config(), directory.path(),
                          {.shards = {2}, .tokenizer = "/nonexistent/tokenizer.json"}),
               ResourceError);
}

}  // namespace
}  // namespace dsv41
