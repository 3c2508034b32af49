// FP8 weights times unquantized activations in fp64 (docs/numerics.md 2), what the fast backends have in
// common: E4M3 codes enter as code * 2^-1016 and activations as x * s * 2^516, so that sums are 2^-500 of the
// true ones, far from both ends of the range, and rounded at the same places.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace dsv41::unquantized_fp8 {

inline constexpr double kActivationFactor = 0x1p516, kSumFactor = 0x1p500;

/// Whether bf16(code * scale) rounds nothing with any of the E8M0 scales.
inline bool usual_scales(const std::uint8_t* scales, std::size_t count) {
  constexpr std::uint8_t kSmallest = 17, kLargest = 246;
  return std::all_of(scales, scales + count,
                     [](std::uint8_t code) { return code >= kSmallest && code <= kLargest; });
}

}  // namespace dsv41::unquantized_fp8
