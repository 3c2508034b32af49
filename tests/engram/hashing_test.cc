// Hash layout and row ids against NumPy's generator, the released layout and the bundled checkpoints.
#include "engram/hashing.h"

#include <gtest/gtest.h>

#include "loader/error.h"
#include "tests/support/golden_text.h"

namespace dsv41 {
namespace {

using nlohmann::json;
using testing::golden_json;
using Words = std::vector<std::uint64_t>;

ModelConfig released() {
  return read_config(std::filesystem::path(DSV41_TEST_DATA) / "release" / "config.json");
}
ModelConfig bundled(const char* name) {
  return read_config(std::filesystem::path(DSV41_TEST_CHECKPOINTS) / name / "config.json");
}

Words rows_of(const std::vector<HashLayer>& layers) {
  Words rows;
  for (const HashLayer& layer : layers) rows.push_back(layer.rows);
  return rows;
}

TEST(NumpyIntegers, EqualsNumpy) {
  const json golden = golden_json("ops/numpy_integers.json");
  EXPECT_EQ(golden["cases"].size(), 90u);
  for (const json& entry : golden["cases"])
    EXPECT_EQ(numpy_integers(entry["seed"], entry["bound"], entry["draws"].size()),
              entry["draws"].get<Words>())
        << entry["seed"] << " " << entry["bound"];
}

TEST(HashLayout, Released) {
  const json golden = golden_json("ops/engram_released.json");
  const std::vector<HashLayer> layers = hash_layout(released());
  ASSERT_EQ(layers.size(), 2u);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    Words primes, offsets, expected_primes;
    for (const json& heads : golden["primes"][l])
      for (const json& prime : heads) expected_primes.push_back(prime);
    for (const HashColumn& column : layers[l].columns) {
      primes.push_back(column.prime);
      offsets.push_back(column.offset);
    }
    EXPECT_EQ(primes, expected_primes);
    EXPECT_EQ(offsets, golden["offsets"][l].get<Words>());
    EXPECT_EQ(layers[l].multipliers, golden["multipliers"][l].get<Words>());
  }
  EXPECT_EQ(rows_of(layers), golden["rows"].get<Words>());
}

TEST(HashLayout, BundledCheckpoints) {
  for (const char* name : {"mini", "capitals"}) {
    const ModelConfig config = bundled(name);
    EXPECT_EQ(rows_of(hash_layout(config)), config.engram_num_embeddings) << name;
  }
}

TEST(HashLayout, DeclaredAgainstDerived) {
  ModelConfig config = released();
  config.engram_n_heads = 7;
  EXPECT_EQ(rows_of(derive_hash_layout(config)), (Words{336004849, 336012883}));
  try {
    hash_layout(config);
    FAIL();
  } catch (const CheckpointError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("[384006168, 384016682]"), std::string::npos) << message;
    EXPECT_NE(message.find("[336004849, 336012883]"), std::string::npos) << message;
  }
}

TEST(HashLayout, SmallPrimesByHand) {
  ModelConfig config;
  config.engram_layer_ids = {0, 3};
  config.engram_vocab_size = 2;  // the search starts above 1
  config.engram_max_ngram_size = 3;
  config.engram_n_heads = 2;
  config.engram_compressed_vocab_size = 10;
  EXPECT_EQ(rows_of(derive_hash_layout(config)), (Words{2 + 3 + 5 + 7, 11 + 13 + 17 + 19}));
  config.engram_vocab_size = 1u << 20;  // 1048573 is prime and below: not used
  EXPECT_EQ(derive_hash_layout(config)[0].columns[0].prime, 1048583u);
  config.engram_vocab_size = 3215031751;  // a strong pseudoprime to the bases 2, 3, 5, 7
  EXPECT_EQ(derive_hash_layout(config)[0].columns[0].prime, 3215031767u);
}

TEST(HashLayout, RefusesSizesThatCannotBe) {
  const auto refuses = [](auto change) {
    ModelConfig config = released();
    change(config);
    EXPECT_THROW(derive_hash_layout(config), CheckpointError);
  };
  refuses([](ModelConfig& c) { c.engram_vocab_size = 0; });
  refuses([](ModelConfig& c) { c.engram_vocab_size = ~std::uint64_t{0}; });
  refuses([](ModelConfig& c) { c.engram_max_ngram_size = 1; });
  refuses([](ModelConfig& c) { c.engram_max_ngram_size = 4'000'000; });
  refuses([](ModelConfig& c) { c.engram_n_heads = 0; });
  refuses([](ModelConfig& c) { c.engram_n_heads = 4'000'000'000u; });
  refuses([](ModelConfig& c) { c.engram_compressed_vocab_size = 0; });
  refuses([](ModelConfig& c) {  // 2,621,440 primes, each size by itself permitted
    c.engram_layer_ids.assign(1024, 1);
    c.engram_max_ngram_size = 11;
    c.engram_n_heads = 256;
  });
}

/// Row ids of a whole sequence, oldest first, through the four-token window that a sequence keeps.
std::vector<Words> row_ids(const HashLayer& layer, const std::vector<HashedToken>& tokens,
                           std::uint32_t pad) {
  std::vector<Words> all;
  std::vector<HashedToken> recent;  // newest first
  for (const HashedToken& token : tokens) {
    recent.insert(recent.begin(), token);
    if (recent.size() > layer.multipliers.size()) recent.pop_back();
    all.emplace_back(layer.columns.size());
    hash_row_ids(layer, recent, pad, all.back());
  }
  return all;
}

TEST(HashRowIds, Released) {
  const json golden = golden_json("ops/engram_released.json");
  const std::vector<HashLayer> layers = hash_layout(released());
  std::vector<HashedToken> tokens, with_dead;
  for (std::size_t t = 0; t < golden["compressed"].size(); ++t) {
    const std::uint32_t compressed = golden["compressed"][t];
    const json& alive = golden["alive"][t];
    tokens.push_back({compressed, false});
    with_dead.push_back({compressed, !(alive.is_boolean() ? alive.get<bool>() : alive.get<int>() != 0)});
  }
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::vector<Words> ids = row_ids(layers[l], tokens, 2), dead_ids = row_ids(layers[l], with_dead, 2);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      EXPECT_EQ(ids[t], golden["hash_ids"][t][l].get<Words>()) << "layer " << l << " token " << t;
      EXPECT_EQ(dead_ids[t], golden["hash_ids_with_dead"][t][l].get<Words>())
          << "layer " << l << " token " << t;
    }
  }
}

TEST(HashRowIds, DeadTokensHideEverythingBeforeThem) {
  const HashLayer layer = hash_layout(bundled("mini"))[0];
  const std::uint32_t pad = 2;
  Words hidden(layer.columns.size()), short_history(layer.columns.size());
  hash_row_ids(layer, std::vector<HashedToken>{{9, false}, {8, false}, {7, true}, {6, false}}, pad, hidden);
  hash_row_ids(layer, std::vector<HashedToken>{{9, false}, {8, false}}, pad, short_history);
  EXPECT_EQ(hidden, short_history);
}

}  // namespace
}  // namespace dsv41
