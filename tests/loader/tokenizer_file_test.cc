// tokenizer.json that is damaged, contradictory or asks for what is not implemented; flags of added tokens;
// the pattern subset.
#include "loader/tokenizer_file.h"

#include <gtest/gtest.h>

#include <functional>

#include "loader/error.h"
#include "loader/split_pattern.h"
#include "loader/tokenizer.h"
#include "loader/utf8.h"
#include "tests/support/golden_text.h"

namespace dsv41 {
namespace {

using nlohmann::json;
using Ids = std::vector<std::uint32_t>;

json mini_file() {
  return json::parse(
      testing::read_text(std::filesystem::path(DSV41_TEST_CHECKPOINTS) / "mini" / "tokenizer.json"));
}

json added(std::uint32_t id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", false}};
}

struct Damage {
  const char* name;
  std::function<void(json&)> apply;
  const char* message;  // part of it
};

class RefusedFiles : public ::testing::TestWithParam<Damage> {};

TEST_P(RefusedFiles, NameTheReason) {
  json file = mini_file();
  GetParam().apply(file);
  try {
    Tokenizer::from_json(file.dump(), "damaged.json");
    FAIL() << "accepted";
  } catch (const CheckpointError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("damaged.json: ", 0), 0u) << message;
    EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

json& split(json& file, int i) {
  return file["pre_tokenizer"]["pretokenizers"][i];
}

const Damage kDamages[] = {
    {"NoModel", [](json& f) { f.erase("model"); }, "required"},
    {"NoDecoder", [](json& f) { f.erase("decoder"); }, "required"},
    {"NotAnObject", [](json& f) { f = json::array(); }, "not an object"},
    {"UnknownMember", [](json& f) { f["extra"] = 1; }, "\"extra\""},
    {"Version", [](json& f) { f["version"] = "2.0"; }, "version"},
    {"Truncation", [](json& f) { f["truncation"] = json::object(); }, "truncation"},
    {"Normalizer",
     [](json& f) {
       f["normalizer"] = {{"type", "NFC"}};
     },
     "normalizer"},
    {"NormalizerSequence",
     [](json& f) {
       f["normalizer"]["normalizers"] = json::array({{{"type", "NFC"}}});
     },
     "normalizers"},
    {"PostProcessor",
     [](json& f) {
       f["post_processor"] = {{"type", "TemplateProcessing"}};
     },
     "TemplateProcessing"},
    {"Decoder", [](json& f) { f["decoder"]["type"] = "Metaspace"; }, "Metaspace"},
    {"PreTokenizer",
     [](json& f) {
       f["pre_tokenizer"] = {{"type", "Whitespace"}};
     },
     "Whitespace"},
    {"NoByteLevel", [](json& f) { f["pre_tokenizer"]["pretokenizers"].erase(3); }, "ByteLevel"},
    {"ByteLevelFirst", [](json& f) { std::swap(split(f, 0), split(f, 3)); }, "last"},
    {"ByteLevelRegex", [](json& f) { split(f, 3)["use_regex"] = true; }, "use_regex"},
    {"ByteLevelRegexByDefault", [](json& f) { split(f, 3).erase("use_regex"); }, "use_regex"},
    {"SplitBehavior", [](json& f) { split(f, 0)["behavior"] = "Removed"; }, "Removed"},
    {"SplitInverted", [](json& f) { split(f, 0)["invert"] = true; }, "invert"},
    {"SplitString",
     [](json& f) {
       split(f, 0)["pattern"] = {{"String", " "}};
     },
     "String"},
    {"SplitSyntax", [](json& f) { split(f, 0)["pattern"]["Regex"] = "(?<=a)b"; }, "(?<=a)b"},
    {"SplitManySteps",
     [](json& f) {
       json& steps = f["pre_tokenizer"]["pretokenizers"];
       for (int i = 0; i < 20; ++i) steps.insert(steps.begin(), steps[0]);
     },
     "more than 16"},
    {"ModelType", [](json& f) { f["model"]["type"] = "Unigram"; }, "Unigram"},
    {"Dropout", [](json& f) { f["model"]["dropout"] = 0.1; }, "dropout"},
    {"UnknownToken", [](json& f) { f["model"]["unk_token"] = "<unk>"; }, "unk_token"},
    {"ByteFallback", [](json& f) { f["model"]["byte_fallback"] = true; }, "byte_fallback"},
    {"Prefix", [](json& f) { f["model"]["continuing_subword_prefix"] = "##"; }, "continuing_subword_prefix"},
    {"ModelMember", [](json& f) { f["model"]["surprise"] = 0; }, "surprise"},
    {"ByteMissing", [](json& f) { f["model"]["vocab"].erase("Ġ"); }, "0x20"},
    {"IdTaken", [](json& f) { f["model"]["vocab"]["new"] = 5; }, "id 5"},
    {"IdNegative", [](json& f) { f["model"]["vocab"]["new"] = -1; }, "-1"},
    {"IdFractional", [](json& f) { f["model"]["vocab"]["new"] = 1.5; }, "1.5"},
    {"IdHuge", [](json& f) { f["model"]["vocab"]["new"] = 4'000'000'000u; }, "4000000000"},
    {"IdBeyond64Bits", [](json& f) { f["model"]["vocab"]["new"] = 1e300; }, "new"},
    {"EmptySpelling", [](json& f) { f["model"]["vocab"][""] = 800; }, "empty"},
    {"MergeOfUnknown", [](json& f) { f["model"]["merges"].push_back("qqq zzz"); }, "\"qqq\""},
    {"MergeIntoUnknown", [](json& f) { f["model"]["merges"].push_back("! !"); }, "\"!!\""},
    {"MergeOfOne", [](json& f) { f["model"]["merges"].push_back("a"); }, "not two tokens"},
    {"MergeOfThree", [](json& f) { f["model"]["merges"].push_back("a b c"); }, "not two tokens"},
    {"MergeList", [](json& f) { f["model"]["merges"].push_back({"a"}); }, "1 tokens"},
    {"MergeTwice", [](json& f) { f["model"]["merges"].push_back(f["model"]["merges"][0]); }, "are the same"},
    {"MergesNoList", [](json& f) { f["model"]["merges"] = 3; }, "not a list"},
    {"AddedEmpty", [](json& f) { f["added_tokens"].push_back(added(800, "")); }, "needs"},
    {"AddedLong", [](json& f) { f["added_tokens"].push_back(added(800, std::string(1025, 'x'))); },
     "added token 800 has 1025 bytes"},
    {"AddedTwice", [](json& f) { f["added_tokens"].push_back(added(800, "<think>")); }, "comes twice"},
    {"AddedIdTaken", [](json& f) { f["added_tokens"].push_back(added(5, "<new>")); }, "id 5"},
    {"AddedContradictsVocab", [](json& f) { f["added_tokens"].push_back(added(800, "a")); },
     "the vocabulary says"},
    {"AddedIdHuge", [](json& f) { f["added_tokens"].push_back(added(1u << 30, "<new>")); }, "1073741824"},
    {"AddedFlagMissing", [](json& f) { f["added_tokens"][0].erase("lstrip"); }, "flags"},
    {"AddedMember", [](json& f) { f["added_tokens"][0]["color"] = 1; }, "color"},
};

INSTANTIATE_TEST_SUITE_P(Tokenizer, RefusedFiles, ::testing::ValuesIn(kDamages),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(TokenizerFile, RefusesTextThatIsNoJson) {
  const std::string deep(1000, '[');
  const std::string twice = R"({"version": "1.0", "version": "1.0"})";
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("\xFF\xFE"), deep, twice, std::string("null")})
    EXPECT_THROW(Tokenizer::from_json(text, "t"), CheckpointError) << text;
  const std::string whole = mini_file().dump();
  for (std::size_t length = 0; length < whole.size(); length += 997)
    EXPECT_THROW(Tokenizer::from_json(whole.substr(0, length), "t"), CheckpointError) << length;
}

TEST(TokenizerFile, VocabularyKeyTwice) {
  std::string text = mini_file().dump();
  const std::string entry = "\"vocab\":{";
  text.insert(text.find(entry) + entry.size(), "\"a\":799,");
  EXPECT_THROW(Tokenizer::from_json(text, "t"), CheckpointError);
}

TEST(TokenizerFile, AcceptsBothSpellingsOfMergesAndAGapInIds) {
  json file = mini_file();
  const Tokenizer before = Tokenizer::from_json(file.dump(), "t");
  for (json& merge : file["model"]["merges"])
    merge = merge.is_string() ? json(merge)
                              : json(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  file["added_tokens"].push_back(added(1000, "<far>"));
  const Tokenizer after = Tokenizer::from_json(file.dump(), "t");
  const std::string text = "The host rank runs, the other waits.";
  EXPECT_EQ(before.encode(text), after.encode(text));
  EXPECT_EQ(after.vocab_size(), 1001u);
  EXPECT_EQ(after.decode(Ids{900, 1000}), "<far>");
  EXPECT_EQ(after.encode("<far>"), Ids{1000});
}

// Expected ids were made with the tokenizers library (0.23.3) from the same file; ids from 768 on are the
// tokens added here.
TEST(AddedTokens, FlagsAsInTheLibrary) {
  json file = mini_file();
  const auto add = [&](std::uint32_t id, const char* content, std::initializer_list<const char*> flags) {
    json token = added(id, content);
    for (const char* flag : flags) token[flag] = true;
    file["added_tokens"].push_back(token);
  };
  add(768, "<word>", {"single_word"});
  add(769, "<left>", {"lstrip"});
  add(770, "<right>", {"rstrip"});
  add(771, "<both>", {"lstrip", "rstrip", "normalized"});
  add(772, "<bo", {});
  add(773, " <space>", {});
  const Tokenizer tokenizer = Tokenizer::from_json(file.dump(), "t");
  for (const json& entry : testing::golden_lines("tokenizer/flags.jsonl"))
    EXPECT_EQ(tokenizer.encode(entry["text"].get<std::string>()), entry["ids"].get<Ids>()) << entry;
}

TEST(SplitPattern, RefusesWhatTheEnginesMayReadDifferently) {
  for (const char* regex :
       {"(?<=a)b", "(?i)a",  "a++",    "a{2}?", "a{,3}",      "\\d",     "\\w+", "\\p{Lu}", "\\P{L}",
        "\\p{^L}", "[a[b]]", "[a&&b]", "[]a]",  "[a",         "(a",      "a)",   "*a",      "a.b",
        "^a",      "a$",     "\\h",    "[\\S]", "a{1000000}", "(*UTF)a", "\\Ka", "[z-a]",   "[a-\\s]",
        "a*",      "",       "(?=a)",  "a|",    "\\",         "[\\",     "{1}",  "(?"})
    EXPECT_THROW(SplitPattern{regex}, CheckpointError) << regex;
}

TEST(SplitPattern, FindsWhatItShould) {
  struct Case {
    const char *regex, *text, *pieces;  // pieces joined by '|'
  };
  const Case cases[] = {
      {"\\p{N}{1,3}", "a12345b", "a|123|45|b"},
      {"\\s+(?!\\S)|\\s+", "a   b  ", "a|  | |b|  "},
      {"[a-c\\-]+", "xa-bx", "x|a-b|x"},
      {"[-x]+", "a-xb", "a|-x|b"},
      {"(?:ab)+?|b", "ababb", "ab|ab|b"},
      {"\\s", "a\u180E\u00A0b", "a\u180E|\u00A0|b"},            // U+180E is no white space since Unicode 6.3
      {"\\p{L}+", "\U00010D4A1\u1C89", "\U00010D4A|1|\u1C89"},  // letters of Unicode 16
      {"[^\\p{L}]+", "a12\u1C89", "a|12|\u1C89"},
  };
  for (const Case& entry : cases) {
    const SplitPattern pattern(entry.regex);
    SplitPattern::Workspace workspace(pattern);
    std::string pieces;
    pattern.split(entry.text, workspace, [&](std::string_view piece) {
      if (!pieces.empty()) pieces += '|';
      pieces += piece;
    });
    EXPECT_EQ(pieces, entry.pieces) << entry.regex;
  }
}

TEST(SplitPattern, StopsAPatternThatBacktracksWithoutBound) {
  const SplitPattern pattern("(?:(?:a+)+)+[bc]");
  SplitPattern::Workspace workspace(pattern);
  EXPECT_THROW(pattern.find(std::string(200, 'a'), 0, workspace), CheckpointError);
}

TEST(Utf8, OneReplacementPerMaximalInvalidPrefix) {
  struct Case {
    std::string bytes, text;
  };
  const Case cases[] = {
      {"\xE4\xBD", "\uFFFD"},
      {"\xE4\xBDz", "\uFFFDz"},
      {"\xF0\x9F\x91", "\uFFFD"},
      {"\xC0\x80", "\uFFFD\uFFFD"},
      {"\xE0\x80\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xF4\x90\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xF5", "\uFFFD"},
      {"\x80\xBF", "\uFFFD\uFFFD"},
      {"\xE4\xE4\xBD\xA0", "\uFFFD你"},
      {"a\xF4\x8F\xBF\xBF", "a\U0010FFFF"},
  };
  for (const Case& entry : cases) {
    std::string text;
    EXPECT_EQ(append_lossy(text, entry.bytes, false), entry.bytes.size());
    EXPECT_EQ(text, entry.text);
    EXPECT_EQ(is_valid_utf8(entry.bytes), entry.text.find("\uFFFD") == std::string::npos);
  }
}

}  // namespace
}  // namespace dsv41
