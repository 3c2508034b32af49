// Cosine and sine of every row of a step, for one set of frequencies.
#pragma once

#include <span>
#include <vector>

#include "kernels/rope.h"
#include "loader/config.h"

namespace dsv41 {

class RopeTable {
 public:
  RopeTable(const RopeParameters& parameters, std::size_t max_rows)
      : frequencies_(rope_frequencies(parameters)),
        cosine_(max_rows * frequencies_.size()),
        sine_(max_rows * frequencies_.size()) {}

  std::size_t pairs() const { return frequencies_.size(); }

  /// Fills the rows of a step; they keep their numbers when rows are left out between layers.
  void fill(std::span<const std::uint32_t> positions) {
    for (std::size_t row = 0; row < positions.size(); ++row)
      rope_row(frequencies_, positions[row], {cosine_.data() + row * pairs(), pairs()},
               {sine_.data() + row * pairs(), pairs()});
  }
  const float* cosine(std::size_t row) const { return cosine_.data() + row * pairs(); }
  const float* sine(std::size_t row) const { return sine_.data() + row * pairs(); }
  std::span<const float> frequencies() const { return frequencies_; }

 private:
  std::vector<float> frequencies_, cosine_, sine_;
};

/// Frequencies of window-only layers, and of layers with compressed positions (YaRN).
inline RopeParameters window_rope(const ModelConfig& config) {
  return {static_cast<float>(config.rope_theta), config.rope_head_dim, 0, 1.0f, 32.0f, 1.0f};
}
inline RopeParameters compressed_rope(const ModelConfig& config) {
  return {static_cast<float>(config.compress_rope_theta),
          config.rope_head_dim,
          config.original_seq_len,
          static_cast<float>(config.rope_factor),
          static_cast<float>(config.beta_fast),
          static_cast<float>(config.beta_slow)};
}

}  // namespace dsv41
