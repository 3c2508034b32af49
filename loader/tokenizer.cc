// The tokenizer's pipeline: added tokens, Split patterns, byte pairs; and back. Spec: docs/tokenizer.md.
#include "loader/tokenizer.h"

#include <fmt/format.h>
#include <simdjson.h>

#include "loader/error.h"
#include "loader/names.h"
#include "loader/split_pattern.h"
#include "loader/tokenizer_file.h"
#include "loader/utf8.h"

namespace dsv41 {
namespace {

constexpr std::size_t kMaxTextBytes = std::size_t{1} << 30;

std::vector<AddedToken> select(const std::vector<AddedToken>& tokens, bool normalized) {
  std::vector<AddedToken> chosen;
  for (const AddedToken& token : tokens)
    if (token.normalized == normalized) chosen.push_back(token);
  return chosen;
}

/// Strings by number, in one allocation.
class StringTable {
 public:
  void reserve(std::size_t count, std::size_t bytes) {
    ends_.reserve(count);
    text_.reserve(bytes);
  }
  void add(std::string_view text) {
    text_ += text;
    ends_.push_back(text_.size());
  }
  std::size_t size() const { return ends_.size(); }
  std::string_view operator[](std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(text_).substr(begin, ends_[i] - begin);
  }

 private:
  std::string text_;
  std::vector<std::size_t> ends_;
};

void require_text(std::string_view text) {
  if (text.size() > kMaxTextBytes)
    throw UsageError(
        fmt::format("text of {} bytes, at most {} can be tokenized at once", text.size(), kMaxTextBytes));
  if (!is_valid_utf8(text)) {
    std::size_t at = 0;
    while (true) {
      const Utf8Unit unit = read_utf8(text.substr(at));
      if (unit.kind != Utf8Unit::Kind::Character) break;
      at += unit.length;
    }
    throw UsageError(fmt::format("text is not valid UTF-8: byte 0x{:02X} at offset {}",
                                 static_cast<std::uint8_t>(text[at]), at));
  }
}

Tokenizer load(const std::filesystem::path& file) {
  simdjson::padded_string json;
  if (const auto error = simdjson::padded_string::load(file.string()).get(json); error != simdjson::SUCCESS)
    throw CheckpointError(
        fmt::format("{}: cannot be read; a model directory holds tokenizer.json", file.string()));
  return Tokenizer::from_json(std::string_view(json), file.string());
}

}  // namespace

bool is_valid_utf8(std::string_view bytes) {
  return simdjson::validate_utf8(bytes.data(), bytes.size());
}

struct Tokenizer::Impl {
  explicit Impl(const TokenizerFile& file)
      : first_pass(select(file.added, false)),
        second_pass(select(file.added, true)),
        byte_pairs(file.byte_ids, file.merges) {
    for (const std::string& pattern : file.patterns) patterns.emplace_back(pattern);
    for (const std::string& spelling : file.spellings) {
      spellings.add(spelling);
      bytes.add(spelled_bytes(spelling));
    }
    special.resize(spellings.size());
    for (const AddedToken& token : file.added) special[token.id] = token.special;
    by_spelling = NameIndex(spellings.size());
    for (std::uint32_t id = 0; id < spellings.size(); ++id)
      if (!spellings[id].empty()) by_spelling.insert(spellings[id], id);
  }

  /// Everything one call of encode needs.
  struct Workspace {
    explicit Workspace(const Impl& impl) {
      for (const SplitPattern& pattern : impl.patterns) searches.emplace_back(pattern);
    }
    std::vector<SplitPattern::Workspace> searches;
    BytePairs::Workspace byte_pairs;
  };

  /// Text without added tokens, from Split pattern number `level` on.
  void encode_text(std::string_view text, std::size_t level, Workspace& workspace,
                   std::vector<std::uint32_t>& ids) const {
    if (level == patterns.size()) {
      byte_pairs.encode(text, workspace.byte_pairs, ids);
      return;
    }
    patterns[level].split(text, workspace.searches[level],
                          [&](std::string_view piece) { encode_text(piece, level + 1, workspace, ids); });
  }

  AddedTokenMatcher first_pass, second_pass;  // tokens with normalized = false are looked for first
  std::vector<SplitPattern> patterns;
  BytePairs byte_pairs;
  StringTable spellings, bytes;
  std::vector<bool> special;
  NameIndex by_spelling;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

Tokenizer::Tokenizer(const std::filesystem::path& tokenizer_json) : Tokenizer(load(tokenizer_json)) {}

Tokenizer Tokenizer::from_json(std::string_view json, std::string_view name_for_messages) {
  const TokenizerFile file = parse_tokenizer_file(json, name_for_messages);
  try {
    return Tokenizer(std::make_unique<Impl>(file));
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("{}: {}", name_for_messages, error.what()));
  }
}

std::size_t Tokenizer::vocab_size() const {
  return impl_->spellings.size();
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text) const {
  require_text(text);
  Impl::Workspace workspace(*impl_);
  std::vector<std::uint32_t> ids;
  const auto token = [&](std::uint32_t id) { ids.push_back(id); };
  impl_->first_pass.split(
      text,
      [&](std::string_view between) {
        impl_->second_pass.split(
            between, [&](std::string_view plain) { impl_->encode_text(plain, 0, workspace, ids); }, token);
      },
      token);
  return ids;
}

std::vector<std::uint32_t> Tokenizer::encode_plain(std::string_view text) const {
  require_text(text);
  Impl::Workspace workspace(*impl_);
  std::vector<std::uint32_t> ids;
  impl_->encode_text(text, 0, workspace, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const std::uint32_t> ids, bool skip_special) const {
  std::string raw;
  for (const std::uint32_t id : ids)
    if (!skip_special || !is_special(id)) raw += token_bytes(id);
  if (is_valid_utf8(raw)) return raw;
  std::string text;
  append_lossy(text, raw, false);
  return text;
}

std::string_view Tokenizer::token_bytes(std::uint32_t id) const {
  return id < impl_->bytes.size() ? impl_->bytes[id] : std::string_view();
}

std::string_view Tokenizer::token_spelling(std::uint32_t id) const {
  return id < impl_->spellings.size() ? impl_->spellings[id] : std::string_view();
}

bool Tokenizer::is_special(std::uint32_t id) const {
  return id < impl_->special.size() && impl_->special[id];
}

std::optional<std::uint32_t> Tokenizer::id_of(std::string_view spelling) const {
  return impl_->by_spelling.find(spelling);
}

std::string StreamingDecoder::push(std::uint32_t id) {
  if (skip_special_ && tokenizer_.is_special(id)) return {};
  pending_ += tokenizer_.token_bytes(id);
  std::string text;
  pending_.erase(0, append_lossy(text, pending_, true));
  return text;
}

std::string StreamingDecoder::finish() {
  std::string text;
  append_lossy(text, pending_, false);
  pending_.clear();
  return text;
}

}  // namespace dsv41
