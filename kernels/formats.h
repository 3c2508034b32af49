// Number formats of the released checkpoint (spec: docs/model.md 1): BF16, E4M3, E8M0, E2M1.
// Header-only and free of library calls, so that the same source serves host and device code.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define DSV41_HOST_DEVICE __host__ __device__
#else
#define DSV41_HOST_DEVICE
#endif

namespace dsv41 {

/// The upper half of an IEEE single. Arithmetic happens in float or double; this is storage only.
struct BFloat16 {
  std::uint16_t bits = 0;
  friend bool operator==(BFloat16, BFloat16) = default;
};

DSV41_HOST_DEVICE inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Round to nearest even; NaN stays a (quiet) NaN, overflow becomes infinity.
DSV41_HOST_DEVICE inline BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  const std::uint32_t odd = (bits >> 16) & 1u;
  return {static_cast<std::uint16_t>((bits + 0x7FFFu + odd) >> 16)};
}

/// The contract's RNbf16 of a wider value goes through fp32 (numerics.md, first paragraph).
DSV41_HOST_DEVICE inline BFloat16 to_bfloat16(double value) { return to_bfloat16(static_cast<float>(value)); }

/// E4M3 (1-4-3, bias 7, no infinities; 0x7F and 0xFF are NaN) -> fp32, exact.
DSV41_HOST_DEVICE constexpr float decode_e4m3(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t exponent = (code >> 3) & 0xFu;
  const std::uint32_t mantissa = code & 0x7u;
  if ((code & 0x7Fu) == 0x7Fu) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent == 0) {  // subnormal: a multiple of 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

/// fp32 -> E4M3, round to nearest even, saturating at +-448. NaN becomes 0x7F.
DSV41_HOST_DEVICE inline std::uint8_t encode_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return static_cast<std::uint8_t>(sign | 0x7Eu);  // >= 448
  if (magnitude < 0x3C800000u) {                                                 // below 2^-6: subnormal codes
    // Adding 2^14 (ulp 2^-9) leaves the rounded multiple of 2^-9 in the low mantissa bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) & 0xFu));
  }
  magnitude += 0x7FFFFu + ((magnitude >> 20) & 1u);  // round at mantissa bit 20
  const std::uint32_t code = (magnitude >> 20) - (120u << 3);
  return static_cast<std::uint8_t>(sign | (code > 0x7Eu ? 0x7Eu : code));
}

/// E8M0: 2^(code-127); 0 is 2^-127 (an fp32 subnormal), 255 is NaN.
DSV41_HOST_DEVICE constexpr float decode_e8m0(std::uint8_t code) {
  if (code == 255) return std::bit_cast<float>(0x7FC00000u);
  if (code == 0) return std::bit_cast<float>(0x00400000u);
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 23);
}

/// E2M1: codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Only the low nibble is read.
DSV41_HOST_DEVICE constexpr float decode_e2m1(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 8u) << 28;
  const std::uint32_t exponent = (code >> 1) & 3u;
  const std::uint32_t mantissa = code & 1u;
  if (exponent == 0) return std::bit_cast<float>(sign | (mantissa != 0 ? 0x3F000000u : 0u));
  return std::bit_cast<float>(sign | ((exponent + 126u) << 23) | (mantissa << 22));
}

/// fp32 in [-6, 6] -> E2M1, ties to the even code.
DSV41_HOST_DEVICE inline std::uint8_t encode_e2m1(float value) {
  const std::uint8_t sign = (std::bit_cast<std::uint32_t>(value) >> 31) != 0 ? 8 : 0;
  const float magnitude = value < 0 ? -value : value;
  // Midpoints between neighbours; a midpoint belongs to the even code, hence > above odd and >= above even codes.
  std::uint8_t code = 0;
  if (magnitude > 5.0f) code = 7;
  else if (magnitude >= 3.5f) code = 6;
  else if (magnitude > 2.5f) code = 5;
  else if (magnitude >= 1.75f) code = 4;
  else if (magnitude > 1.25f) code = 3;
  else if (magnitude >= 0.75f) code = 2;
  else if (magnitude > 0.25f) code = 1;
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace dsv41
