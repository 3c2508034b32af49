// PCRE2 behind SplitPattern: translation of the pattern, compilation, limits.
// The tokenizers library searches with Oniguruma and Unicode 16; the differences are resolved here, not in
// callers.
#include "loader/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "loader/error.h"
#include "loader/utf8.h"

namespace dsv41 {
namespace {

constexpr std::size_t kMaxPatternBytes = 1 << 16;

struct CategoryAdditions {
  char category;
  const char* ranges;  // code points of the category that Unicode 15, 15.1 and 16 added to Unicode 14
};

// Systems ship PCRE2 with Unicode 14 and later; a range that an engine knows already does no harm.
constexpr CategoryAdditions kAdditions[] = {
    {'L',
     R"(\x{1C89}-\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D4A}-\x{10D65})"
     R"(\x{10D6F}-\x{10D85}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389}\x{1138B}\x{1138E})"
     R"(\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10})"
     R"(\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D}\x{16D40}-\x{16D6C})"
     R"(\x{18CFF}\x{1B132}\x{1B155}\x{1DF25}-\x{1DF2A}\x{1E030}-\x{1E06D}\x{1E4D0}-\x{1E4EB}\x{1E5D0}-\x{1E5ED})"
     R"(\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})"},
    {'M',
     R"(\x{897}\x{CF3}\x{ECE}\x{10D69}-\x{10D6D}\x{10EFC}-\x{10EFF}\x{11241}\x{113B8}-\x{113C0}\x{113C2})"
     R"(\x{113C5}\x{113C7}-\x{113CA}\x{113CC}-\x{113D0}\x{113D2}\x{113E1}-\x{113E2}\x{11F00}-\x{11F01}\x{11F03})"
     R"(\x{11F34}-\x{11F3A}\x{11F3E}-\x{11F42}\x{11F5A}\x{13440}\x{13447}-\x{13455}\x{1611E}-\x{1612F}\x{1E08F})"
     R"(\x{1E4EC}-\x{1E4EF}\x{1E5EE}-\x{1E5EF})"},
    {'N',
     R"(\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})"
     R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})"},
    {'P',
     R"(\x{1B4E}-\x{1B4F}\x{1B7F}\x{10D6E}\x{113D4}-\x{113D5}\x{113D7}-\x{113D8}\x{11B00}-\x{11B09}\x{11BE1})"
     R"(\x{11F43}-\x{11F4F}\x{16D6D}-\x{16D6F}\x{1E5FF})"},
    {'S',
     R"(\x{2427}-\x{2429}\x{2FFC}-\x{2FFF}\x{31E4}-\x{31E5}\x{31EF}\x{10D8E}-\x{10D8F}\x{1CC00}-\x{1CCEF})"
     R"(\x{1CD00}-\x{1CEB3}\x{1F6DC}\x{1F774}-\x{1F776}\x{1F77B}-\x{1F77F}\x{1F7D9}\x{1F8B2}-\x{1F8BB})"
     R"(\x{1F8C0}-\x{1F8C1}\x{1FA75}-\x{1FA77}\x{1FA87}-\x{1FA89}\x{1FA8F}\x{1FAAD}-\x{1FAAF}\x{1FABB}-\x{1FABF})"
     R"(\x{1FAC6}\x{1FACE}-\x{1FACF}\x{1FADA}-\x{1FADC}\x{1FADF}\x{1FAE8}-\x{1FAE9}\x{1FAF7}-\x{1FAF8})"
     R"(\x{1FBCB}-\x{1FBEF})"},
};

const char* additions(char category) {
  for (const CategoryAdditions& entry : kAdditions)
    if (entry.category == category) return entry.ranges;
  return nullptr;
}

bool is_ascii_punctuation(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

/// Copies a pattern token by token; anything it does not know is refused.
class Translator {
 public:
  explicit Translator(std::string_view regex) : regex_(regex) {}

  std::string run() {
    bool can_repeat = false;  // whether the last token was something a quantifier applies to
    while (!at_end()) {
      const char c = peek();
      if (c == '[') {
        bracket_class();
      } else if (c == '\\') {
        escape_outside();
      } else if (c == '(') {
        open_group();
        can_repeat = false;
        continue;
      } else if (c == '?' || c == '*' || c == '+' || c == '{') {
        if (!can_repeat) refuse("a quantifier with nothing to repeat");
        quantifier();
        can_repeat = false;
        continue;
      } else if (c == '|') {
        take();
        can_repeat = false;
        continue;
      } else if (c == '.' || c == '^' || c == '$' || c == ']' || c == '}') {
        refuse(fmt::format("'{}'", c));
      } else {
        out_ += literal();
      }
      can_repeat = true;
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw CheckpointError(
        fmt::format("pattern \"{}\": {} at byte {} is outside the supported syntax", regex_, what, at_));
  }
  bool at_end() const { return at_ >= regex_.size(); }
  char peek(std::size_t ahead = 0) const { return at_ + ahead < regex_.size() ? regex_[at_ + ahead] : '\0'; }
  void take() { out_ += regex_[at_++]; }

  /// One character that stands for itself, as UTF-8.
  std::string_view literal() {
    const Utf8Unit unit = read_utf8(regex_.substr(at_));
    const std::string_view text = regex_.substr(at_, unit.length);
    at_ += unit.length;
    return text;
  }

  /// \r, \n, \t or an escaped punctuation mark; empty when it is another escape.
  std::string_view escaped_literal() {
    const char c = peek(1);
    if (c != 'r' && c != 'n' && c != 't' && !is_ascii_punctuation(c)) return {};
    const std::string_view text = regex_.substr(at_, 2);
    at_ += 2;
    return text;
  }

  /// The category letter of \p{X} at the current position, consumed; 0 when something else stands there.
  char category_escape() {
    if (peek(1) != 'p' || peek(2) != '{' || peek(4) != '}' || additions(peek(3)) == nullptr) return 0;
    const char category = peek(3);
    at_ += 5;
    return category;
  }

  static std::string category_items(char category) {
    return fmt::format("\\p{{{}}}{}", category, additions(category));
  }

  void escape_outside() {
    if (const std::string_view text = escaped_literal(); !text.empty()) {
      out_ += text;
    } else if (const char category = category_escape(); category != 0) {
      out_ += fmt::format("[{}]", category_items(category));
    } else if (peek(1) == 's' || peek(1) == 'S') {
      // PCRE2's own \s also holds U+180E.
      out_ += peek(1) == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      at_ += 2;
    } else {
      refuse(fmt::format("escape '\\{}'", peek(1)));
    }
  }

  void bracket_class() {
    take();
    if (peek() == '^') take();
    if (peek() == ']') refuse("an empty class");
    bool first = true;
    while (true) {
      if (at_end()) refuse("a class without end");
      if (peek() == ']') break;
      if (peek() == '[' || (peek() == '&' && peek(1) == '&')) refuse("a nested class or intersection");
      if (peek() == '-') {
        if (!first && peek(1) != ']') refuse("'-' that is neither a range nor at the edge of a class");
        out_ += "\\-";
        ++at_;
        first = false;
        continue;
      }
      first = false;
      if (!class_character()) continue;
      if (peek() == '-' && peek(1) != ']' && peek(1) != '\0') {
        take();
        if (peek() == '-' || peek() == '[' || !class_character()) refuse("the end of a range");
      }
    }
    take();
  }

  /// Consumes one item of a class; false when it is a set (which cannot start or end a range).
  bool class_character() {
    if (peek() != '\\') {
      out_ += literal();
      return true;
    }
    if (const std::string_view text = escaped_literal(); !text.empty()) {
      out_ += text;
      return true;
    }
    if (const char category = category_escape(); category != 0) {
      out_ += category_items(category);
    } else if (peek(1) == 's') {
      out_ += "\\p{White_Space}";
      at_ += 2;
    } else {
      refuse(fmt::format("escape '\\{}' in a class", peek(1)));
    }
    return false;
  }

  void open_group() {
    take();
    if (peek() != '?') return;
    if (peek(1) != ':' && peek(1) != '!' && peek(1) != '=') refuse("this kind of group");
    take();
    take();
  }

  void quantifier() {
    const bool braces = peek() == '{';
    if (!braces) {
      take();
    } else {
      const std::size_t close = regex_.find('}', at_);
      if (close == std::string_view::npos || close - at_ > 10) refuse("'{'");
      const std::string_view body = regex_.substr(at_ + 1, close - at_ - 1);
      if (body.empty() || body.front() == ',' ||
          body.find_first_not_of("0123456789,") != std::string_view::npos ||
          std::count(body.begin(), body.end(), ',') > 1)
        refuse("this repetition count");
      out_ += regex_.substr(at_, close + 1 - at_);
      at_ = close + 1;
    }
    if (!braces && peek() == '?') take();
    if (peek() == '?' || peek() == '*' || peek() == '+' || peek() == '{')
      refuse("a quantifier of a quantifier");
  }

  std::string_view regex_;
  std::size_t at_ = 0;
  std::string out_;
};

template <auto Free>
struct Deleter {
  template <class T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};

}  // namespace

std::string translate_pattern(std::string_view regex) {
  return Translator(regex).run();
}

struct SplitPattern::Impl {
  std::string regex;  // as written, for messages
  std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>> code;
};

struct SplitPattern::Workspace::Impl {
  std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>> match;
  std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>> context;
};

SplitPattern::SplitPattern(std::string_view regex) : impl_(std::make_unique<Impl>()) {
  if (regex.size() > kMaxPatternBytes)
    throw CheckpointError(
        fmt::format("pattern of {} bytes, at most {} are supported", regex.size(), kMaxPatternBytes));
  impl_->regex = regex;
  const std::string translated = translate_pattern(regex);
  int error = 0;
  std::size_t offset = 0;
  impl_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
  if (!impl_->code) {
    char message[256] = {};
    pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(message), sizeof message);
    throw CheckpointError(fmt::format("pattern \"{}\": {}", regex, message));
  }
  std::uint32_t matches_empty = 0;
  pcre2_pattern_info(impl_->code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0)
    throw CheckpointError(fmt::format("pattern \"{}\" can match nothing; it would not split", regex));
  // Where executable memory is forbidden this fails and the interpreter is used.
  pcre2_jit_compile(impl_->code.get(), PCRE2_JIT_COMPLETE);
}

SplitPattern::~SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;

SplitPattern::Workspace::Workspace(const SplitPattern& pattern) : impl_(std::make_unique<Impl>()) {
  impl_->match.reset(pcre2_match_data_create_from_pattern(pattern.impl_->code.get(), nullptr));
  impl_->context.reset(pcre2_match_context_create(nullptr));
  if (!impl_->match || !impl_->context) throw ResourceError("no memory for a pattern search");
}

SplitPattern::Workspace::~Workspace() = default;
SplitPattern::Workspace::Workspace(Workspace&&) noexcept = default;

std::optional<SplitPattern::Match> SplitPattern::find(std::string_view text, std::size_t from,
                                                      Workspace& workspace) const {
  pcre2_match_data* match = workspace.impl_->match.get();
  pcre2_match_context* context = workspace.impl_->context.get();
  // Room for one linear scan of the text; a pattern that backtracks without bound is stopped.
  const std::uint64_t limit = 10'000'000 + 4 * static_cast<std::uint64_t>(text.size());
  pcre2_set_match_limit(context, static_cast<std::uint32_t>(std::min<std::uint64_t>(
                                     limit, std::numeric_limits<std::uint32_t>::max())));
  const auto search = [&](std::uint32_t options) {
    return pcre2_match(impl_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       options, match, context);
  };
  int result = search(PCRE2_NO_UTF_CHECK);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = search(PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0)
    throw CheckpointError(fmt::format("pattern \"{}\" gave up on a text of {} bytes (PCRE2 error {})",
                                      impl_->regex, text.size(), result));
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match);
  return Match{ends[0], ends[1]};
}

}  // namespace dsv41
