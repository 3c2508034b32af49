// UTF-8 one character at a time, for bytes that may be invalid or end too early. No allocation but in
// append_utf8. Invalid input is split by the maximal-subpart rule: what U+FFFD replaces is the longest prefix
// of a valid sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dsv41 {

struct Utf8Unit {
  enum class Kind : std::uint8_t { Character, Invalid, Incomplete };
  Kind kind = Kind::Invalid;
  std::size_t length = 0;   // bytes it takes; Incomplete: all that is left
  char32_t code_point = 0;  // of a Character
};

/// The unit at the start of `bytes`, which is not empty. Incomplete: `bytes` end inside a sequence valid so
/// far.
Utf8Unit read_utf8(std::string_view bytes);

void append_utf8(std::string& text, char32_t code_point);

/// Appends `bytes` with one U+FFFD per maximal invalid prefix. With `hold_back`, stops before an incomplete
/// end. Returns the number of bytes consumed.
std::size_t append_lossy(std::string& text, std::string_view bytes, bool hold_back);

}  // namespace dsv41
