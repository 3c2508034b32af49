// act_quant and fp4_quant, and the way back (docs/model.md 1). Scales and ratios are fp32; codes round to
// nearest even.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/plain/plain.h"
#include "kernels/plain/tables.h"

namespace dsv41::plain {
namespace {

template <std::size_t kCount>
float largest_magnitude(const BFloat16* x) {
  float largest = 0.0f;
  for (std::size_t i = 0; i < kCount; ++i) {
    const float magnitude = std::fabs(to_float(x[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

/// E8M0 code of 2^ceil(log2 value): the exponent field, plus one if the mantissa is non-zero.
std::uint8_t ceil_e8m0(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint8_t>((bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u));
}

float clamp(float value, float limit) {
  value = value > limit ? limit : value;
  return value < -limit ? -limit : value;
}

template <std::size_t kCount>
void encode_e2m1_block(const BFloat16* x, float scale, std::uint8_t* packed) {
  for (std::size_t i = 0; i < kCount; i += 2) {
    const std::uint8_t even = encode_e2m1(clamp(to_float(x[i]) / scale, 6.0f));
    const std::uint8_t odd = encode_e2m1(clamp(to_float(x[i + 1]) / scale, 6.0f));
    packed[i / 2] = static_cast<std::uint8_t>(even | odd << 4);
  }
}

float round_to_bfloat16(float value) {
  return to_float(to_bfloat16(value));
}

}  // namespace

void quantize_rows(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                   std::uint8_t* scales) {
  for (std::size_t block = 0; block < rows * k / kBlock; ++block, x += kBlock, codes += kBlock) {
    const float largest = std::max(largest_magnitude<kBlock>(x), 1e-4f);
    scales[block] = ceil_e8m0(largest * (1.0f / 448.0f));
    const float scale = kE8m0[scales[block]];
    for (std::size_t i = 0; i < kBlock; ++i) codes[i] = encode_e4m3(clamp(to_float(x[i]) / scale, 448.0f));
  }
}

void quantize_index(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                    std::uint8_t* scales) {
  for (std::size_t block = 0; block < rows * k / kBlock; ++block, x += kBlock, codes += kBlock / 2) {
    const float largest = std::max(largest_magnitude<kBlock>(x), 6 * 0x1p-126f);
    scales[block] = ceil_e8m0(largest * (1.0f / 6.0f));
    encode_e2m1_block<kBlock>(x, kE8m0[scales[block]], codes);
  }
}

void quantize_group(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                    std::uint8_t* scales) {
  for (std::size_t block = 0; block < rows * k / kGroupBlock;
       ++block, x += kGroupBlock, codes += kGroupBlock / 2) {
    const float largest = std::max(largest_magnitude<kGroupBlock>(x), 6 * 0x1p-9f);
    scales[block] = encode_e4m3(largest / 6.0f);
    encode_e2m1_block<kGroupBlock>(x, decode_e4m3(scales[block]), codes);
  }
}

void dequantize_window(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out) {
  for (std::size_t i = 0; i < k; ++i)
    out[i] = round_to_bfloat16(static_cast<float>(kE4m3[codes[i]]) * kE8m0[scales[i / kBlock]]);
}

void dequantize_group(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out) {
  for (std::size_t i = 0; i < k; i += 2) {
    const E2m1Pair pair = kE2m1Pairs[codes[i / 2]];
    const auto scale = static_cast<float>(kE4m3[scales[i / kGroupBlock]]);
    out[i] = round_to_bfloat16(static_cast<float>(pair.even) * scale);
    out[i + 1] = round_to_bfloat16(static_cast<float>(pair.odd) * scale);
  }
}

}  // namespace dsv41::plain
