// RoPE tables (docs/model.md 3, docs/numerics.md 7): frequencies in fp32 with the YaRN blend, cosine and sine of
// RN32(position * frequency).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dsv41 {

struct RopeParameters {
  float base = 10000.0f;
  std::size_t dim = 64;             // R, channels that rotate
  std::uint32_t original_length = 0;  // 0 switches YaRN off
  float factor = 1.0f, beta_fast = 32.0f, beta_slow = 1.0f;
};

/// fp32 frequencies [dim/2].
std::vector<float> rope_frequencies(const RopeParameters& parameters);

/// cosine, sine [frequencies.size()] of one position.
void rope_row(std::span<const float> frequencies, std::uint32_t position, std::span<float> cosine, std::span<float> sine);

}  // namespace dsv41
