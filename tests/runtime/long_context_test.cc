// A million tokens of context: state of the specified size, and the same bits whatever the backend and the
// rows of a step. The state holds random codes where a prompt of that length would have left its own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "tests/runtime/support/local_model.h"

namespace dsv41::test {
namespace {

constexpr std::uint32_t kContext = 1048570;  // the last positions of the released model's context

std::vector<std::uint8_t> random_codes(std::size_t count, std::mt19937& random) {
  std::vector<std::uint8_t> codes(count);
  for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random() % 0x70 + (random() & 0x80));
  return codes;
}

void fill(Sequence& sequence, const ModelConfig& config) {
  std::mt19937 random(3);
  const std::size_t head = config.head_dim, key = config.index_head_dim;
  const std::vector<std::uint8_t> pool = random_codes(1 << 20, random);
  const std::vector<std::uint8_t> scales(head / kBlock, 120), key_scales(key / kBlock, 127),
      group_scales(head / kGroupBlock, 0x30);
  const auto some = [&] { return pool.data() + random() % (pool.size() - head); };
  for (std::uint32_t block = 0; block < config.n_blocks(); ++block)
    for (std::uint32_t position = kContext - config.window_size; position < kContext; ++position)
      sequence.window(block).store(position, some(), scales.data());
  for (const std::uint32_t layer : config.kv_source_layers) {
    CompressedCache& cache = sequence.compressed(layer);
    for (std::size_t group = 0; group < kContext / cache.ratio(); ++group)
      cache.append(some(), group_scales.data(), some(), key_scales.data());
  }
  for (std::uint32_t position = kContext - config.engram_max_ngram_size; position < kContext; ++position)
    sequence.remember(position, {position % config.engram_compressed_vocab_size, false});
  sequence.advance(kContext);
}

/// Logits of the tokens after the context, some of them per step.
std::vector<float> decode(LocalModel& model, Sequence sequence, std::size_t rows) {
  const std::vector<std::uint32_t> tokens{54, 262, 344, 489};
  std::vector<float> all;
  for (std::size_t done = 0; done < tokens.size(); done += rows) {
    Step step;
    step.add(sequence, std::span(tokens).subspan(done, rows), rows);
    const std::span<const float> logits = model.backbone.forward(step);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

TEST(LongContext, AMillionTokens) {
  LocalModel model(bundled("mini"), 8, 2, "auto");
  Sequence sequence(model.config());
  fill(sequence, model.config());
  EXPECT_EQ(sequence.bytes(), Sequence::bytes_for(model.config(), kContext));

  const std::vector<float> one_by_one = decode(model, sequence, 1);
  for (const float value : one_by_one) ASSERT_TRUE(std::isfinite(value));
  const auto same = [&](const std::vector<float>& other) {
    return other.size() == one_by_one.size() &&
           std::memcmp(other.data(), one_by_one.data(), other.size() * sizeof(float)) == 0;
  };
  EXPECT_TRUE(same(decode(model, sequence, 4)));
  LocalModel plain(bundled("mini"), 8, 2, "plain");
  EXPECT_TRUE(same(decode(plain, sequence, 2)));
}

}  // namespace
}  // namespace dsv41::test
