// UTF-8 decoding of untrusted bytes (Unicode 16, table 3-7: well-formed byte sequences).
#include "loader/utf8.h"

namespace dsv41 {

Utf8Unit read_utf8(std::string_view bytes) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(bytes[i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return {Utf8Unit::Kind::Character, 1, lead};
  std::size_t length = 0;
  char32_t code_point = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    code_point = lead & 0x1Fu;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    code_point = lead & 0x0Fu;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    code_point = lead & 0x07u;
  } else {
    return {Utf8Unit::Kind::Invalid, 1, 0};
  }
  // The second byte has a narrower range after four leads: no overlong forms, no surrogates, nothing past
  // U+10FFFF.
  std::uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  std::uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Utf8Unit::Kind::Incomplete, i, 0};
    if (byte(i) < low || byte(i) > high) return {Utf8Unit::Kind::Invalid, i, 0};
    code_point = (code_point << 6) | (byte(i) & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Unit::Kind::Character, length, code_point};
}

void append_utf8(std::string& text, char32_t code_point) {
  const auto put = [&](char32_t value) { text.push_back(static_cast<char>(value)); };
  const auto tail = [&](unsigned shift) { put(0x80u | ((code_point >> shift) & 0x3Fu)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0u | (code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    put(0xE0u | (code_point >> 12));
    tail(6);
    tail(0);
  } else {
    put(0xF0u | (code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

std::size_t append_lossy(std::string& text, std::string_view bytes, bool hold_back) {
  std::size_t position = 0;
  while (position < bytes.size()) {
    const Utf8Unit unit = read_utf8(bytes.substr(position));
    if (unit.kind == Utf8Unit::Kind::Incomplete && hold_back) break;
    if (unit.kind == Utf8Unit::Kind::Character)
      text.append(bytes, position, unit.length);
    else
      append_utf8(text, 0xFFFD);
    position += unit.length;
  }
  return position;
}

}  // namespace dsv41
