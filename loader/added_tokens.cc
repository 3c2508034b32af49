// Search for added tokens in a sorted list: the candidates that share the bytes read so far are one range of
// it.
#include "loader/added_tokens.h"

#include <unicode/uchar.h>

#include <algorithm>

#include "loader/utf8.h"

namespace dsv41 {
namespace {

bool is_space(char32_t c) {
  return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0;
}

/// UTS 18, annex C: \w.
bool is_word(char32_t c) {
  const auto code_point = static_cast<UChar32>(c);
  constexpr std::uint32_t kWordCategories = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_hasBinaryProperty(code_point, UCHAR_ALPHABETIC) != 0 ||
         (U_MASK(u_charType(code_point)) & kWordCategories) != 0 ||
         u_hasBinaryProperty(code_point, UCHAR_JOIN_CONTROL) != 0;
}

Utf8Unit last_unit(std::string_view text) {
  std::size_t start = text.size() - 1;
  while (start > 0 && (static_cast<std::uint8_t>(text[start]) & 0xC0u) == 0x80u) --start;
  return read_utf8(text.substr(start));
}

bool touches_word(std::string_view before, std::string_view after) {
  return (!before.empty() && is_word(last_unit(before).code_point)) ||
         (!after.empty() && is_word(read_utf8(after).code_point));
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), starts_(256, false) {
  std::sort(tokens_.begin(), tokens_.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) starts_[static_cast<std::uint8_t>(token.content[0])] = true;
}

const AddedToken* AddedTokenMatcher::longest_at(std::string_view text) const {
  auto first = tokens_.begin(), last = tokens_.end();
  const AddedToken* longest = nullptr;
  for (std::size_t depth = 0; depth < text.size() && first != last; ++depth) {
    const auto byte = static_cast<std::uint8_t>(text[depth]);
    const auto byte_at_depth = [depth](const AddedToken& token) {
      return token.content.size() > depth ? static_cast<std::uint8_t>(token.content[depth]) : -1;
    };
    first = std::partition_point(first, last, [&](const AddedToken& t) { return byte_at_depth(t) < byte; });
    last = std::partition_point(first, last, [&](const AddedToken& t) { return byte_at_depth(t) <= byte; });
    // The shortest of a range with a common prefix sorts first.
    if (first != last && first->content.size() == depth + 1) longest = &*first;
  }
  return longest;
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::find(std::string_view input, std::size_t from,
                                                                std::size_t done) const {
  for (std::size_t at = from; at < input.size(); ++at) {
    if (!starts_[static_cast<std::uint8_t>(input[at])]) continue;
    const AddedToken* token = longest_at(input.substr(at));
    if (token == nullptr) continue;
    Match match{token->id, at, at + token->content.size(), at + token->content.size()};
    if (token->single_word && touches_word(input.substr(0, match.begin), input.substr(match.end))) {
      at = match.end - 1;
      continue;
    }
    while (token->left_strip && match.begin > done) {
      const Utf8Unit unit = last_unit(input.substr(0, match.begin));
      if (!is_space(unit.code_point)) break;
      match.begin -= unit.length;
    }

    while (token->right_strip && match.end < input.size()) {
      const Utf8Unit unit = read_utf8(input.substr(match.end));
      if (!is_space(unit.code_point)) break;
      match.end += unit.length;
    }
    return match;
  }
  return std::nullopt;
}

}  // namespace dsv41
