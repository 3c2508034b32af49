// The compressed token map: the normalizer, the bundled checkpoints, and the whole released vocabulary.
#include "engram/token_map.h"

#include <gtest/gtest.h>

#include "loader/config.h"
#include "loader/error.h"
#include "tests/engram/support/sha256.h"
#include "tests/support/golden_text.h"

namespace dsv41 {
namespace {

using nlohmann::json;
using testing::golden_json;
using testing::golden_lines;

TEST(EngramKey, NormalizesAsTheLibrary) {
  for (const json& entry : golden_lines("engram/normalizer.jsonl"))
    EXPECT_EQ(engram_key(entry["text"].get<std::string>()), entry["key"]) << entry;
}

TEST(EngramKey, KeysOfReleasedTokens) {
  for (const json& entry : golden_lines("engram/keys.jsonl"))
    EXPECT_EQ(engram_key(entry["text"].get<std::string>()), entry["key"]) << entry;
}

TEST(EngramKey, Details) {
  struct Case {
    const char *text, *key;
  };
  const Case cases[] = {
      {"A B", "a b"},
      {" \t\r\n ", " "},
      {"a\t\tb \n", "a b"},
      {"\v", "\v"},            // nothing left: the text itself
      {" \v ", " \v "},        // the same, not one space
      {"\x1C", "\x1C"},        // no White_Space
      {"\u0085x\u2028", "x"},  // trimmed, not collapsed
      {"x\u2028\u2028y", "x\u2028\u2028y"},
      {"x\u00A0\u3000y", "x y"},  // become spaces by NFKC
      {"\u0903", "\u0903"},       // a spacing mark alone
      {"k\u0903", "k"},           // category Mc is dropped
      {"\u20DD", "\u20DD"},       // Me
      {"\u0130", "i"},
      {"\u1E9E", "\u00DF"},
      {"\u03A3\u03A3", "\u03C3\u03C3"},  // no final sigma
      {"\uFF21\uFB01", "afi"},
      {"\u1100\u1161", "\u1100\u1161"},  // composed by NFKC, taken apart by NFD
      {"\uAC00", "\u1100\u1161"},
      {"\U00010400", "\U00010428"},
  };
  for (const Case& entry : cases) EXPECT_EQ(engram_key(entry.text), entry.key) << entry.text;
}

TEST(TokenMap, BundledCheckpoints) {
  for (const char* name : {"mini", "capitals"}) {
    const std::filesystem::path directory = std::filesystem::path(DSV41_TEST_CHECKPOINTS) / name;
    const ModelConfig config = read_config(directory / "config.json");
    const Tokenizer tokenizer(directory / "tokenizer.json");
    const TokenMap map = build_token_map(tokenizer, config.vocab_size);
    EXPECT_EQ(map.size, config.engram_compressed_vocab_size) << name;
    EXPECT_EQ(map.compressed.size(), config.vocab_size) << name;
    EXPECT_THROW(build_token_map(tokenizer, config.vocab_size - 1), CheckpointError);
    EXPECT_EQ(build_token_map(tokenizer, config.vocab_size + 5).compressed.size(), config.vocab_size + 5);
  }
}

using testing::ReleasedTokenizer;

TEST_F(ReleasedTokenizer, WholeMap) {
  const json golden = golden_json("engram/map_sample.json");
  const Tokenizer tokenizer(testing::real_tokenizer());
  const TokenMap map = build_token_map(tokenizer, golden["vocab_size"]);
  EXPECT_EQ(map.size, golden["compressed_vocab_size"]);
  for (const json& pair : golden["pairs"]) EXPECT_EQ(map.compressed.at(pair[0]), pair[1]) << pair;
  EXPECT_EQ(map.compressed.at(golden["pad_id"]), golden["pad_compressed"]);
  std::string bytes;
  for (const std::uint32_t value : map.compressed)
    for (unsigned shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  for (const auto& [count, digest] : golden["prefix_sha256"].items())
    EXPECT_EQ(testing::sha256(std::string_view(bytes).substr(0, 4 * std::stoul(count))), digest) << count;
  EXPECT_EQ(testing::sha256(bytes), golden["map_sha256_int32_le"]);
}

/// A token that is part of a character has its spelling as key, whatever text happens to spell the same.
TEST(TokenMap, PartialCharactersAreKeptApart) {
  const Tokenizer tokenizer(std::filesystem::path(DSV41_TEST_CHECKPOINTS) / "mini" / "tokenizer.json");
  const TokenMap map = build_token_map(tokenizer, 768);
  const auto number = [&](const char* spelling) { return map.compressed[tokenizer.id_of(spelling).value()]; };
  EXPECT_NE(number("ð"), number("Ł"));  // bytes 0xF0 and 0x9F: both decode to U+FFFD
  EXPECT_EQ(number("A"), number("a"));
  EXPECT_EQ(number("Ċ"), number("Ġ"));  // line feed and space
}

}  // namespace
}  // namespace dsv41
