// Reads tokenizer.json, an untrusted file: every member is known or refused, every id and merge is checked.
#include "loader/tokenizer_file.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "loader/error.h"
#include "loader/names.h"
#include "loader/utf8.h"

namespace dsv41 {
namespace {

namespace dom = simdjson::dom;

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 28;
constexpr std::size_t kMaxDepth = 32;
constexpr std::uint64_t kMaxId = (1u << 22) - 1;  // far above any vocabulary; bounds what a gap can allocate
constexpr std::size_t kMaxPatterns = 16;
constexpr std::size_t kMaxAddedBytes = 1024;  // the search tries every position of a text against all of it
constexpr std::uint32_t kNoId = std::numeric_limits<std::uint32_t>::max();

/// The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order.
std::array<char32_t, 256> byte_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = itself ? byte : next++;
  }
  return alphabet;
}

class Reader {
 public:
  explicit Reader(std::string_view name) : name_(name) {}

  TokenizerFile read(std::string_view json) {
    if (json.size() > kMaxFileBytes)
      refuse(fmt::format("{} bytes, at most {} are read", json.size(), kMaxFileBytes));
    dom::parser parser;
    if (const auto error = parser.allocate(std::max<std::size_t>(json.size(), 1), kMaxDepth);
        error != simdjson::SUCCESS)
      refuse(simdjson::error_message(error));
    dom::element root;
    const simdjson::padded_string padded(json);
    if (const auto error = parser.parse(padded).get(root); error != simdjson::SUCCESS)
      refuse(fmt::format("not valid JSON: {}", simdjson::error_message(error)));

    // Order matters: added tokens and merges refer to the vocabulary.
    bool has_model = false, has_added = false, has_pre_tokenizer = false, has_decoder = false;
    dom::element model, added;
    each_member(root, "the file", [&](std::string_view key, dom::element value) {
      if (key == "version") {
        if (as_string(value, "version") != "1.0")
          refuse(fmt::format("version {} is not 1.0", text_of(value)));
      } else if (key == "truncation" || key == "padding") {
        if (!value.is_null()) refuse(fmt::format("{} must be null", key));
      } else if (key == "added_tokens") {
        added = value;
        has_added = true;
      } else if (key == "normalizer") {
        read_normalizer(value);
      } else if (key == "pre_tokenizer") {
        read_pre_tokenizer(value);
        has_pre_tokenizer = true;
      } else if (key == "post_processor") {
        // ByteLevel here only moves offsets, which ids do not have.
        if (!value.is_null()) require_type(value, "ByteLevel", "post_processor");
      } else if (key == "decoder") {
        require_type(value, "ByteLevel", "decoder");
        has_decoder = true;
      } else if (key == "model") {
        model = value;
        has_model = true;
      } else {
        refuse(fmt::format("unknown member \"{}\"", key));
      }
    });
    if (!has_model || !has_pre_tokenizer || !has_decoder)
      refuse("model, pre_tokenizer and decoder are required");
    read_model(model);
    if (has_added) read_added_tokens(added);
    return std::move(file_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw CheckpointError(fmt::format("{}: {}", name_, what));
  }

  static std::string text_of(dom::element value) {
    std::string text = simdjson::minify(value);
    if (text.size() > 80) {
      std::size_t cut = 80;
      while ((static_cast<std::uint8_t>(text[cut]) & 0xC0u) == 0x80u) --cut;  // not inside a character
      text.replace(cut, std::string::npos, "…");
    }
    return text;
  }

  /// Calls visit(key, value) for every member; a key that comes twice is refused.
  template <class Visit>
  void each_member(dom::element value, std::string_view what, Visit&& visit) const {
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) refuse(fmt::format("{} is not an object", what));
    std::vector<std::string_view> seen;  // stays short: visit refuses what it does not know
    for (const dom::key_value_pair member : object) {
      if (std::find(seen.begin(), seen.end(), member.key) != seen.end())
        refuse(fmt::format("{}: member \"{}\" comes twice", what, member.key));
      seen.push_back(member.key);
      visit(member.key, member.value);
    }
  }

  dom::array as_array(dom::element value, std::string_view what) const {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) refuse(fmt::format("{} is not a list", what));
    return array;
  }
  std::string_view as_string(dom::element value, std::string_view what) const {
    std::string_view text;
    if (value.get(text) != simdjson::SUCCESS) refuse(fmt::format("{} is not a string", what));
    return text;
  }
  bool as_bool(dom::element value, std::string_view what) const {
    bool flag = false;
    if (value.get(flag) != simdjson::SUCCESS) refuse(fmt::format("{} is not true or false", what));
    return flag;
  }
  std::uint32_t as_id(dom::element value, std::string_view what) const {
    std::uint64_t id = 0;
    if (value.get(id) != simdjson::SUCCESS || id > kMaxId)
      refuse(fmt::format("id {} of {} is not a number from 0 to {}", text_of(value), what, kMaxId));
    return static_cast<std::uint32_t>(id);
  }

  void require_type(dom::element value, std::string_view type, std::string_view what) const {
    dom::element found;
    if (value["type"].get(found) != simdjson::SUCCESS) refuse(fmt::format("{} has no type", what));
    if (as_string(found, "type") != type)
      refuse(fmt::format("{} of type {} is not supported, only {}", what, text_of(found), type));
  }

  void read_normalizer(dom::element value) const {
    if (value.is_null()) return;
    require_type(value, "Sequence", "normalizer");
    each_member(value, "normalizer", [&](std::string_view key, dom::element member) {
      if (key == "type") return;
      if (key != "normalizers") refuse(fmt::format("normalizer: unknown member \"{}\"", key));
      if (as_array(member, "normalizers").size() != 0)
        refuse("normalizers are not supported; the list must be empty");
    });
  }

  void read_pre_tokenizer(dom::element value) {
    require_type(value, "Sequence", "pre_tokenizer");
    bool byte_level = false;
    each_member(value, "pre_tokenizer", [&](std::string_view key, dom::element member) {
      if (key == "type") return;
      if (key != "pretokenizers") refuse(fmt::format("pre_tokenizer: unknown member \"{}\"", key));
      for (dom::element step : as_array(member, "pretokenizers")) {
        if (byte_level) refuse("pre_tokenizer: ByteLevel must be the last step");
        std::string_view type;
        if (step["type"].get(type) == simdjson::SUCCESS && type == "ByteLevel") {
          read_byte_level(step);
          byte_level = true;
        } else {
          read_split(step);
        }
      }
    });
    if (!byte_level) refuse("pre_tokenizer: no ByteLevel step");
  }

  void read_byte_level(dom::element step) const {
    bool has_regex = false;
    bool has_prefix = false;
    each_member(step, "ByteLevel", [&](std::string_view key, dom::element member) {
      if (key == "use_regex")
        has_regex = as_bool(member, key);
      else if (key == "add_prefix_space")
        has_prefix = as_bool(member, key);
      else if (key != "type" && key != "trim_offsets")
        refuse(fmt::format("ByteLevel: unknown member \"{}\"", key));
    });
    dom::element ignored;
    // Both default to true in the library.
    if (step["use_regex"].get(ignored) != simdjson::SUCCESS ||
        step["add_prefix_space"].get(ignored) != simdjson::SUCCESS || has_regex || has_prefix)
      refuse("pre_tokenizer: ByteLevel must have use_regex and add_prefix_space false");
  }

  void read_split(dom::element step) {
    require_type(step, "Split", "pre_tokenizer step");
    if (file_.patterns.size() == kMaxPatterns) refuse(fmt::format("more than {} Split steps", kMaxPatterns));
    bool has_pattern = false, has_behavior = false;
    each_member(step, "Split", [&](std::string_view key, dom::element member) {
      if (key == "pattern") {
        each_member(member, "Split pattern", [&](std::string_view kind, dom::element regex) {
          if (kind != "Regex")
            refuse(fmt::format("Split pattern of kind \"{}\" is not supported, only Regex", kind));
          file_.patterns.emplace_back(as_string(regex, "Regex"));
          has_pattern = true;
        });
      } else if (key == "behavior") {
        if (as_string(member, key) != "Isolated")
          refuse(fmt::format("Split behavior {} is not supported, only Isolated", text_of(member)));
        has_behavior = true;
      } else if (key == "invert") {
        if (as_bool(member, key)) refuse("Split with invert is not supported");
      } else if (key != "type") {
        refuse(fmt::format("Split: unknown member \"{}\"", key));
      }
    });
    if (!has_pattern || !has_behavior) refuse("Split needs pattern and behavior");
  }

  void read_model(dom::element model) {
    require_type(model, "BPE", "model");
    bool has_vocab = false, has_merges = false;
    dom::element merges;
    each_member(model, "model", [&](std::string_view key, dom::element member) {
      if (key == "vocab") {
        read_vocabulary(member);
        has_vocab = true;
      } else if (key == "merges") {
        merges = member;
        has_merges = true;
      } else if (key == "continuing_subword_prefix" || key == "end_of_word_suffix") {
        std::string_view text;
        if (!member.is_null() && (member.get(text) != simdjson::SUCCESS || !text.empty()))
          refuse(fmt::format("model: {} must be null", key));
      } else if (key == "dropout" || key == "unk_token") {
        if (!member.is_null()) refuse(fmt::format("model: {} must be null", key));
      } else if (key == "byte_fallback" || key == "ignore_merges") {
        if (as_bool(member, key)) refuse(fmt::format("model: {} is not supported", key));
      } else if (key == "fuse_unk") {
        as_bool(member, key);  // without an unknown token it has no effect
      } else if (key != "type") {
        refuse(fmt::format("model: unknown member \"{}\"", key));
      }
    });
    if (!has_vocab || !has_merges) refuse("model: vocab and merges are required");
    const std::array<char32_t, 256> alphabet = byte_alphabet();
    for (unsigned byte = 0; byte < 256; ++byte) {
      std::string spelling;
      append_utf8(spelling, alphabet[byte]);
      const std::optional<std::uint32_t> found = ids_.find(spelling);
      if (!found) refuse(fmt::format("model: no token for byte 0x{:02X} (\"{}\")", byte, spelling));
      file_.byte_ids[byte] = *found;
    }
    read_merges(merges);
  }

  /// Takes an id for a spelling; the id must be free.
  void claim(std::uint32_t id, std::string_view spelling) {
    if (spelling.empty()) refuse(fmt::format("the token with id {} is empty", id));
    if (id >= file_.spellings.size()) file_.spellings.resize(id + 1);
    if (!file_.spellings[id].empty())
      refuse(fmt::format("id {} belongs to both \"{}\" and \"{}\"", id, file_.spellings[id], spelling));
    file_.spellings[id] = spelling;
    ids_.insert(spelling, id);
  }

  void read_vocabulary(dom::element vocab) {
    dom::object object;
    if (vocab.get(object) != simdjson::SUCCESS) refuse("model: vocab is not an object");
    file_.spellings.reserve(std::min<std::size_t>(object.size(), kMaxId + 1));
    ids_ = NameIndex(std::min<std::size_t>(object.size(), kMaxId + 1));
    for (const dom::key_value_pair entry : object) {
      if (ids_.find(entry.key)) refuse(fmt::format("model: vocab has \"{}\" twice", entry.key));
      claim(as_id(entry.value, fmt::format("\"{}\"", entry.key)), entry.key);
    }
  }

  std::uint32_t merge_id(std::string_view spelling, std::size_t rank) const {
    const std::optional<std::uint32_t> found = ids_.find(spelling);
    if (!found) refuse(fmt::format("merge {}: \"{}\" is not in the vocabulary", rank, spelling));
    return *found;
  }

  void read_merges(dom::element value) {
    const dom::array list = as_array(value, "merges");
    std::vector<std::pair<std::uint64_t, std::size_t>> pairs;  // with rank
    std::string joined;
    std::size_t rank = 0;
    for (dom::element entry : list) {
      std::string_view left, right;
      std::string_view line;
      if (entry.get(line) == simdjson::SUCCESS) {
        const std::size_t space = line.find(' ');
        if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
          refuse(fmt::format("merge {}: \"{}\" is not two tokens", rank, line));
        left = line.substr(0, space);
        right = line.substr(space + 1);
      } else {
        const dom::array pair = as_array(entry, fmt::format("merge {}", rank));
        if (pair.size() != 2) refuse(fmt::format("merge {} has {} tokens instead of 2", rank, pair.size()));
        left = as_string(pair.at(0).value_unsafe(), "a merged token");
        right = as_string(pair.at(1).value_unsafe(), "a merged token");
      }
      joined.assign(left).append(right);
      const BytePairs::Merge merge{merge_id(left, rank), merge_id(right, rank), merge_id(joined, rank)};
      pairs.emplace_back(std::uint64_t{merge.left} << 32 | merge.right, rank);
      file_.merges.push_back(merge);
      ++rank;
    }
    std::sort(pairs.begin(), pairs.end());
    const auto twice = std::adjacent_find(pairs.begin(), pairs.end(),
                                          [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != pairs.end())
      refuse(fmt::format("merges {} and {} are the same", twice->second, std::next(twice)->second));
  }

  void read_added_tokens(dom::element value) {
    NameIndex seen;
    for (dom::element entry : as_array(value, "added_tokens")) {
      AddedToken token;
      std::string_view content;
      token.id = kNoId;
      int flags = 0;
      each_member(entry, "added token", [&](std::string_view key, dom::element member) {
        bool* flag = key == "special"       ? &token.special
                     : key == "normalized"  ? &token.normalized
                     : key == "single_word" ? &token.single_word
                     : key == "lstrip"      ? &token.left_strip
                     : key == "rstrip"      ? &token.right_strip
                                            : nullptr;
        if (flag != nullptr) {
          *flag = as_bool(member, key);
          ++flags;
        } else if (key == "id") {
          token.id = as_id(member, "an added token");
        } else if (key == "content") {
          content = as_string(member, key);
        } else {
          refuse(fmt::format("added token: unknown member \"{}\"", key));
        }
      });
      if (content.empty() || token.id == kNoId || flags != 5)
        refuse(fmt::format("added token {} needs an id, a content and five flags", text_of(entry)));
      if (content.size() > kMaxAddedBytes)
        refuse(fmt::format("added token {} has {} bytes, at most {} are supported", token.id, content.size(),
                           kMaxAddedBytes));
      if (seen.insert(content, token.id)) refuse(fmt::format("added token \"{}\" comes twice", content));
      const std::optional<std::uint32_t> known = ids_.find(content);
      if (!known)
        claim(token.id, content);
      else if (*known != token.id)
        refuse(
            fmt::format("added token \"{}\" has id {}, the vocabulary says {}", content, token.id, *known));
      token.content = content;
      file_.added.push_back(std::move(token));
    }
  }

  std::string name_;
  TokenizerFile file_;
  NameIndex ids_;  // of spellings in the parsed document
};

}  // namespace

TokenizerFile parse_tokenizer_file(std::string_view json, std::string_view name) {
  return Reader(name).read(json);
}

std::string spelled_bytes(std::string_view spelling) {
  static const std::array<std::int16_t, 0x144> byte_of = [] {
    std::array<std::int16_t, 0x144> table{};
    table.fill(-1);
    const std::array<char32_t, 256> alphabet = byte_alphabet();
    for (unsigned byte = 0; byte < 256; ++byte) table[alphabet[byte]] = static_cast<std::int16_t>(byte);
    return table;
  }();
  std::string bytes;
  for (std::size_t at = 0; at < spelling.size();) {
    const Utf8Unit unit = read_utf8(spelling.substr(at));
    if (unit.code_point >= byte_of.size() || byte_of[unit.code_point] < 0) return std::string(spelling);
    bytes.push_back(static_cast<char>(byte_of[unit.code_point]));
    at += unit.length;
  }
  return bytes;
}

}  // namespace dsv41
