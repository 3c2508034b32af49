// Keys of the compressed token map, numbered in the order in which they are first seen.
// Unicode comes from ICU; texts that are plain ASCII take a short cut with the same result.
#include "engram/token_map.h"

#include <fmt/format.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>

#include "loader/error.h"
#include "loader/names.h"

namespace dsv41 {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

/// The white space of which a run becomes one space; other white space is only trimmed.
constexpr bool is_collapsed(char32_t c) {
  return c == U' ' || c == U'\t' || c == U'\r' || c == U'\n';
}

std::string ascii_key(std::string_view text) {
  std::string key;
  key.reserve(text.size());
  for (const char c : text) {
    if (!is_collapsed(static_cast<unsigned char>(c)))
      key += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    else if (key.empty() || key.back() != ' ')
      key += ' ';
  }
  if (key == " ") return key;
  const auto is_space = [](char c) { return (c >= 0x09 && c <= 0x0D) || c == ' '; };
  const auto begin = std::find_if_not(key.begin(), key.end(), is_space);
  const auto end = std::find_if_not(key.rbegin(), std::make_reverse_iterator(begin), is_space).base();
  return std::string(begin, end);
}

const icu::Normalizer2& compatibility_decomposition() {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* instance = icu::Normalizer2::getNFKDInstance(status);
  if (U_FAILURE(status) || instance == nullptr)
    throw ResourceError(fmt::format("ICU has no normalization data: {}", u_errorName(status)));
  return *instance;
}

std::string unicode_key(std::string_view text) {
  // NFKC, then NFD, is NFKD: composing and decomposing canonically again is the identity on decomposed text.
  UErrorCode status = U_ZERO_ERROR;
  const icu::UnicodeString decomposed = compatibility_decomposition().normalize(
      icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<std::int32_t>(text.size()))),
      status);
  if (U_FAILURE(status)) throw ResourceError(fmt::format("ICU cannot normalize: {}", u_errorName(status)));

  icu::UnicodeString kept;
  for (std::int32_t i = 0; i < decomposed.length(); i = decomposed.moveIndex32(i, 1)) {
    const UChar32 c = decomposed.char32At(i);
    if ((U_GET_GC_MASK(c) & U_GC_M_MASK) != 0) continue;
    if (!is_collapsed(static_cast<char32_t>(c)))
      kept.append(u_tolower(c));  // U+0130, whose full mapping is longer, does not survive decomposition
    else if (kept.isEmpty() || kept.charAt(kept.length() - 1) != u' ')
      kept.append(u' ');
  }
  if (kept != icu::UnicodeString(u' ')) {
    std::int32_t begin = 0, end = kept.length();  // all White_Space lies in the basic plane
    while (begin < end && u_isUWhiteSpace(kept.charAt(begin))) ++begin;
    while (begin < end && u_isUWhiteSpace(kept.charAt(end - 1))) --end;
    kept = icu::UnicodeString(kept, begin, end - begin);
  }
  // The library marks a lone space by U+E000 while it trims; one in the text itself becomes a space, too.
  kept.findAndReplace(icu::UnicodeString(u'\uE000'), icu::UnicodeString(u' '));
  std::string key;
  return kept.toUTF8String(key);
}

}  // namespace

std::string engram_key(std::string_view text) {
  std::string key = is_ascii(text) ? ascii_key(text) : unicode_key(text);
  return key.empty() ? std::string(text) : key;
}

TokenMap build_token_map(const Tokenizer& tokenizer, std::uint32_t vocab_size) {
  if (tokenizer.vocab_size() > vocab_size)
    throw CheckpointError(fmt::format("the tokenizer has {} ids, the config says vocab_size {}",
                                      tokenizer.vocab_size(), vocab_size));
  TokenMap map;
  map.compressed.reserve(vocab_size);
  NameArena keys;
  NameIndex numbers(vocab_size);
  for (std::uint32_t id = 0; id < vocab_size; ++id) {
    const std::string text = tokenizer.decode({&id, 1});
    const bool partial = text.find(kReplacement) != std::string::npos;
    const std::string key = partial ? std::string(tokenizer.token_spelling(id)) : engram_key(text);
    std::optional<std::uint32_t> number = numbers.find(key);
    if (!number) {
      number = map.size++;
      numbers.insert(keys.add(key), *number);
    }
    map.compressed.push_back(*number);
  }
  return map;
}

}  // namespace dsv41
