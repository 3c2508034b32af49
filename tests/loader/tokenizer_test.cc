// The tokenizer against vectors of the tokenizers library: the bundled checkpoints and the released
// vocabulary.
#include "loader/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "loader/error.h"
#include "tests/support/golden_text.h"

namespace dsv41 {
namespace {

using nlohmann::json;
using testing::golden_json;
using testing::golden_lines;
using Ids = std::vector<std::uint32_t>;

std::filesystem::path bundled(const std::string& name) {
  return std::filesystem::path(DSV41_TEST_CHECKPOINTS) / name / "tokenizer.json";
}

std::string stream(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  StreamingDecoder decoder(tokenizer, skip_special);
  std::string text;
  for (const std::uint32_t id : ids) {
    const std::string piece = decoder.push(id);
    EXPECT_TRUE(is_valid_utf8(piece));
    text += piece;
  }
  return text + decoder.finish();
}

void expect_decodes(const Tokenizer& tokenizer, const Ids& ids, const json& entry) {
  const std::string skipped = entry.value("decoded_skip_special", entry["decoded"].get<std::string>());
  EXPECT_EQ(tokenizer.decode(ids), entry["decoded"]) << entry;
  EXPECT_EQ(stream(tokenizer, ids, false), entry["decoded"]) << entry;
  EXPECT_EQ(stream(tokenizer, ids, true), tokenizer.decode(ids, true)) << entry;
  if (entry.contains("decoded_skip_special")) {
    EXPECT_EQ(tokenizer.decode(ids, true), skipped) << entry;
  }
}

void expect_case(const Tokenizer& tokenizer, const json& entry) {
  EXPECT_EQ(tokenizer.encode(entry["text"].get<std::string>()), entry["ids"].get<Ids>()) << entry;
  expect_decodes(tokenizer, entry["ids"], entry);
}

TEST(Tokenizer, EqualsTheLibraryOnBundledTokenizers) {
  std::map<std::string, Tokenizer> tokenizers;
  for (const json& entry : golden_lines("tokenizer/bundled.jsonl")) {
    const std::string name = entry["tokenizer"];
    expect_case(tokenizers.try_emplace(name, bundled(name)).first->second, entry);
  }
  EXPECT_EQ(tokenizers.at("mini").vocab_size(), 768u);
  EXPECT_EQ(tokenizers.at("capitals").vocab_size(), 1280u);
}

TEST(Tokenizer, PromptsOfTheForwardPass) {
  const Tokenizer mini(bundled("mini"));
  const json golden = golden_json("forward/prompts.json");
  for (const json& prompt : golden["prompts"]) {
    Ids ids = {*mini.id_of("<｜begin▁of▁sentence｜>")};
    const Ids text = mini.encode(prompt["text"].get<std::string>());
    ids.insert(ids.end(), text.begin(), text.end());
    EXPECT_EQ(ids, prompt["ids"].get<Ids>()) << prompt["name"];
  }
}

TEST(Tokenizer, PlainTextFormsNoMarker) {
  const Tokenizer tokenizer(bundled("capitals"));
  const std::uint32_t user = *tokenizer.id_of("<｜User｜>");
  EXPECT_EQ(tokenizer.encode("<｜User｜>"), Ids{user});
  const Ids plain = tokenizer.encode_plain("<｜User｜>");
  EXPECT_GT(plain.size(), 1u);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), user), 0);
  EXPECT_EQ(tokenizer.decode(plain), "<｜User｜>");
}

TEST(Tokenizer, StreamingHoldsBackIncompleteCharacters) {
  const Tokenizer tokenizer(bundled("mini"));
  const auto byte = [&](std::string_view spelling) { return *tokenizer.id_of(spelling); };
  StreamingDecoder decoder(tokenizer, false);  // U+1F44D is F0 9F 91 8D
  EXPECT_EQ(decoder.push(byte("ð")), "");
  EXPECT_EQ(decoder.push(byte("Ł")), "");
  EXPECT_EQ(decoder.push(byte("ĳ")), "");
  EXPECT_EQ(decoder.push(byte("į")), "👍");
  EXPECT_EQ(decoder.push(byte("ð")), "");
  EXPECT_EQ(decoder.push(byte("a")), "\uFFFDa");
  EXPECT_EQ(decoder.push(byte("ð")), "");
  EXPECT_EQ(decoder.push(4'000'000'000u), "") << "ids out of range contribute nothing";
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
}

/// Byte pair encoding by its definition: over the whole piece, the best pair first. For pieces without
/// spaces.
Ids merged_by_definition(const json& file, const Tokenizer& tokenizer, const std::string& letters) {
  std::map<std::pair<std::string, std::string>, std::size_t> ranks;
  for (const json& merge : file["model"]["merges"]) {
    const std::string line = merge.is_string()
                                 ? merge.get<std::string>()
                                 : merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    ranks.emplace(std::pair(line.substr(0, line.find(' ')), line.substr(line.find(' ') + 1)), ranks.size());
  }
  std::vector<std::string> symbols;
  for (const char c : letters) symbols.emplace_back(1, c);
  while (true) {
    std::size_t best = symbols.size(), rank = ranks.size();
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ranks.find({symbols[i], symbols[i + 1]});
      if (found == ranks.end() || found->second >= rank) continue;
      rank = found->second;
      best = i;
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  Ids ids;
  for (const std::string& symbol : symbols) ids.push_back(*tokenizer.id_of(symbol));
  return ids;
}

TEST(Tokenizer, LongPiecesMergeByDefinition) {
  const json file = json::parse(testing::read_text(bundled("capitals")));
  const Tokenizer tokenizer(bundled("capitals"));
  std::mt19937 random(7);
  for (const std::size_t length : {1, 2, 3, 17, 300}) {
    std::string letters;
    while (letters.size() < length) letters += "aeinorst"[random() % 8];
    EXPECT_EQ(tokenizer.encode(letters), merged_by_definition(file, tokenizer, letters)) << letters;
  }
  // A megabyte in one piece: a quadratic method would not come back.
  const std::string huge(1 << 20, 'e');
  const Ids ids = tokenizer.encode(huge);
  EXPECT_EQ(tokenizer.decode(ids), huge);
}

TEST(Tokenizer, RefusesInvalidUtf8) {
  const Tokenizer tokenizer(bundled("mini"));
  for (const char* text : {"ab\xFF", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "abc\xE4\xBD", "\x80"}) {
    EXPECT_THROW(tokenizer.encode(text), UsageError);
    EXPECT_THROW(tokenizer.encode_plain(text), UsageError);
  }
  try {
    tokenizer.encode("ab\xFFz");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("0xFF at offset 2"), std::string::npos) << error.what();
  }
}

TEST(Tokenizer, MissingFileIsNamed) {
  try {
    Tokenizer tokenizer(std::filesystem::path("/nowhere/tokenizer.json"));
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("/nowhere/tokenizer.json"), std::string::npos);
  }
}

// ---- the released vocabulary
// ------------------------------------------------------------------------------------

using testing::ReleasedTokenizer;

TEST_F(ReleasedTokenizer, EncodesAndDecodesEveryCase) {
  const Tokenizer tokenizer(testing::real_tokenizer());
  EXPECT_EQ(tokenizer.vocab_size(), 129280u);
  const std::vector<json> cases = golden_lines("tokenizer/cases.jsonl");
  EXPECT_EQ(cases.size(), 1194u);
  for (const json& entry : cases) expect_case(tokenizer, entry);
  const std::vector<json> decode = golden_lines("tokenizer/decode.jsonl");
  EXPECT_EQ(decode.size(), 724u);
  for (const json& entry : decode) expect_decodes(tokenizer, entry["ids"], entry);
}

/// The released names of nine added tokens, which the package does not have yet.
Tokenizer with_release_names() {
  json file = json::parse(testing::read_text(testing::real_tokenizer()));
  const json names = golden_json("tokenizer/v41_names.json");
  std::size_t renamed = 0;
  for (json& token : file["added_tokens"])
    for (const json& name : names["renamed"])
      if (token["id"] == name["id"]) {
        token.update(name["v41"]);
        ++renamed;
      }
  EXPECT_EQ(renamed, 9u);
  return Tokenizer::from_json(file.dump(), "renamed");
}

TEST_F(ReleasedTokenizer, NamesOfTheRelease) {
  const Tokenizer tokenizer = with_release_names();
  const json names = golden_json("tokenizer/v41_names.json");
  for (const auto& [marker, id] : names["markers"].items())
    EXPECT_EQ(tokenizer.id_of(marker), id.get<std::uint32_t>()) << marker;
  const std::vector<json> cases = golden_lines("tokenizer/cases_v41_names.jsonl");
  EXPECT_EQ(cases.size(), 92u);
  for (const json& entry : cases) expect_case(tokenizer, entry);
}

TEST_F(ReleasedTokenizer, PlainTextFormsNoMarker) {
  const Tokenizer tokenizer = with_release_names();
  for (const json& entry : golden_lines("tokenizer/plain.jsonl")) {
    const std::string text = entry["text"];
    EXPECT_EQ(tokenizer.encode_plain(text), entry["ids_plain"].get<Ids>()) << entry;
    EXPECT_EQ(tokenizer.encode(text), entry["ids_markers"].get<Ids>()) << entry;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode_plain(text)), entry["decoded_plain"]) << entry;
  }
}

}  // namespace
}  // namespace dsv41
