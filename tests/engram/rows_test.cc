// Rows gathered from a mapped table against the golden rows and the bundled checkpoint's own bytes.
#include "engram/rows.h"

#include <gtest/gtest.h>

#include <cstring>

#include "engram/hashing.h"
#include "loader/checkpoint.h"
#include "loader/error.h"
#include "tests/support/golden_text.h"

namespace dsv41 {
namespace {

/// One tensor of a golden file, by the format's definition: length, JSON header, payload.
template <class T>
std::vector<T> golden_tensor(const std::string& file, const char* name) {
  const std::string bytes = testing::read_text(std::filesystem::path(DSV41_TEST_DATA) / file);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  const auto range = nlohmann::json::parse(bytes.substr(8, header))
                         .at(name)
                         .at("data_offsets")
                         .get<std::vector<std::size_t>>();
  std::vector<T> values((range[1] - range[0]) / sizeof(T));
  std::memcpy(values.data(), bytes.data() + 8 + header + range[0], range[1] - range[0]);
  return values;
}

struct Golden {
  std::vector<std::uint8_t> codes = golden_tensor<std::uint8_t>("ops/engram.safetensors", "table.weight");
  std::vector<std::uint8_t> scales = golden_tensor<std::uint8_t>("ops/engram.safetensors", "table.scale");
  std::vector<std::int64_t> ids = golden_tensor<std::int64_t>("ops/engram.safetensors", "ids");
  std::vector<BFloat16> rows = golden_tensor<BFloat16>("ops/engram.safetensors", "rows");
  ModelWeights weights;
  Golden() {
    EngramWeights& table = weights.engram.emplace_back();
    table.table_codes = codes;
    table.table_scales = scales;
    table.rows = 50;
  }
};

TEST(MappedRows, EqualGoldenRows) {
  const Golden golden;
  const std::vector<std::uint64_t> ids(golden.ids.begin(), golden.ids.end());
  for (const std::size_t threads : {1, 3}) {
    Compute compute(plain_ops(), threads);
    const std::unique_ptr<EngramRows> source = mapped_engram_rows(golden.weights, compute);
    source->request(0, ids);
    std::vector<BFloat16> rows(ids.size() * 32);
    source->collect(0, rows);
    EXPECT_EQ(rows, golden.rows);
  }
}

TEST(MappedRows, RefusesRowsThatDoNotExist) {
  const Golden golden;
  Compute compute(plain_ops(), 1);
  const std::unique_ptr<EngramRows> source = mapped_engram_rows(golden.weights, compute);
  EXPECT_THROW(source->request(0, std::vector<std::uint64_t>{0, 50}), CheckpointError);
  source->request(0, std::vector<std::uint64_t>{0, 49});
  std::vector<BFloat16> too_small(32);
  EXPECT_THROW(source->collect(0, too_small), std::invalid_argument);
}

TEST(MappedRows, TablesOfABundledCheckpoint) {
  const Checkpoint checkpoint(std::filesystem::path(DSV41_TEST_CHECKPOINTS) / "mini");
  const ModelWeights weights = host_weights(checkpoint);
  Compute compute(plain_ops(), 2);
  const std::unique_ptr<EngramRows> source = mapped_engram_rows(weights, compute);
  ASSERT_EQ(weights.engram.size(), 2u);
  const std::size_t width = checkpoint.config().engram_head_dim;
  for (std::size_t table = 0; table < 2; ++table) {
    const EngramWeights& engram = weights.engram[table];
    EXPECT_EQ(engram.rows, checkpoint.config().engram_num_embeddings[table]);
    const std::vector<std::uint64_t> ids = {engram.rows - 1, 0, 77, 0};
    source->request(table, ids);
    std::vector<BFloat16> rows(ids.size() * width);
    source->collect(table, rows);
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::size_t k = 0; k < width; ++k)
        EXPECT_EQ(to_float(rows[i * width + k]),
                  decode_e4m3(engram.table_codes[ids[i] * width + k]) *
                      decode_e8m0(engram.table_scales[ids[i] * width / 32 + k / 32]));
  }
}

}  // namespace
}  // namespace dsv41
