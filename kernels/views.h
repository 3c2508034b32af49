// Typed views of weights and activations in the formats they are stored in. Views own nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/formats.h"

namespace dsv41 {

inline constexpr std::size_t kBlock = 32;         // elements per scale along K of every quantized linear
inline constexpr std::size_t kGroupBlock = 16;    // elements per E4M3 scale of compressed KV

constexpr std::size_t ceil_div(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }

/// Weight [n, k] in E4M3 with one E8M0 scale per 32 x 32 tile: scales [ceil(n/32), k/32]. k % 32 == 0.
struct Fp8Matrix {
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  std::size_t n = 0, k = 0;
};

/// Weight [n, k] in E2M1, two per byte (even k in the low nibble): codes [n, k/2], E8M0 scales [n, k/32].
struct Fp4Matrix {
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  std::size_t n = 0, k = 0;
};

/// Weight [n, k] in BF16.
struct Bf16Matrix {
  const BFloat16* values = nullptr;
  std::size_t n = 0, k = 0;
};

/// Weight [n, k] in IEEE single.
struct F32Matrix {
  const float* values = nullptr;
  std::size_t n = 0, k = 0;
};

/// Activations after act_quant: E4M3 codes [rows, k] and E8M0 scales [rows, k/32].
struct QuantizedRows {
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  std::size_t rows = 0, k = 0;
  /// A number that no other contents have or had in this process, or 0. A product that meets it again may go on
  /// with what it prepared: one call for each of many ranges need not begin anew.
  std::uint64_t name = 0;
};

/// Remembers the name of the contents that something was prepared from.
class PreparedName {
 public:
  /// Whether it was prepared from contents of this name. If not, it counts as prepared from none until set().
  bool is(std::uint64_t name) {
    if (name != 0 && name == name_) return true;
    name_ = 0;
    return false;
  }
  void set(std::uint64_t name) { name_ = name; }

 private:
  std::uint64_t name_ = 0;
};

/// The index query of one token: codes [heads, dim/2] with scales [heads, dim/32], head weights bf16 [heads].
struct IndexQuery {
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  const BFloat16* head_weights = nullptr;
  std::size_t heads = 0, dim = 0;
  std::uint64_t name = 0;  // as of QuantizedRows
};

/// Half-open range of output features; how work is split over threads.
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
};

}  // namespace dsv41
