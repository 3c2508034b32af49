// SHA-256 (FIPS 180-4). The round constants are computed from their definition: fractions of roots of primes.
#include "tests/engram/support/sha256.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace dsv41::testing {
namespace {

struct Constants {
  std::array<std::uint32_t, 8> start{};    // square roots of the first 8 primes
  std::array<std::uint32_t, 64> rounds{};  // cube roots of the first 64 primes
};

Constants constants() {
  const auto fraction = [](long double root) {
    return static_cast<std::uint32_t>((root - std::floor(root)) * 4294967296.0L);
  };
  Constants result;
  std::size_t found = 0;
  for (unsigned n = 2; found < 64; ++n) {
    bool prime = true;
    for (unsigned d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (!prime) continue;
    if (found < 8) result.start[found] = fraction(std::sqrt(static_cast<long double>(n)));
    result.rounds[found++] = fraction(std::cbrt(static_cast<long double>(n)));
  }
  return result;
}

}  // namespace

std::string sha256(std::string_view bytes) {
  const Constants table = constants();
  std::array<std::uint32_t, 8> hash = table.start;
  std::string message(bytes);
  message.push_back('\x80');
  while (message.size() % 64 != 56) message.push_back('\0');
  for (int shift = 56; shift >= 0; shift -= 8)
    message.push_back(static_cast<char>(std::uint64_t{bytes.size()} * 8 >> shift));

  for (std::size_t block = 0; block < message.size(); block += 64) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < 64; ++i)
      w[i / 4] = w[i / 4] << 8 | static_cast<std::uint8_t>(message[block + i]);
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = hash;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                  ((e & f) ^ (~e & g)) + table.rounds[i] + w[i];
      const std::uint32_t second =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const std::array<std::uint32_t, 8> add = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) hash[i] += add[i];
  }
  std::string text;
  for (const std::uint32_t word : hash) text += fmt::format("{:08x}", word);
  return text;
}

}  // namespace dsv41::testing
