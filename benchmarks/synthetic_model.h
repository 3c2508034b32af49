// A model of any config's full geometry without its files: views of random valid codes in pools of a few GiB
// that the tensors share. Every tensor takes the next part of its pool, so that no cache holds what a step
// comes back to. Routes, selections and values are as irregular as those of a real model; the text is noise.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "benchmarks/bench.h"
#include "engram/rows.h"
#include "engram/token_map.h"
#include "loader/weights.h"
#include "runtime/experts.h"
#include "runtime/sequence.h"

namespace dsv41::bench {

/// Hands out parts of one buffer in turn.
class Pool {
 public:
  Pool(std::size_t bytes, const std::vector<std::uint8_t>& pattern) : buffer_(bytes, pattern) {}
  /// 64-byte aligned. Throws std::runtime_error when the pool is smaller than that.
  const std::uint8_t* take(std::size_t bytes);
  const Buffer& buffer() const { return buffer_; }

 private:
  Buffer buffer_;
  std::size_t next_ = 0;
};

/// Bytes of weights that one row of a step goes through on the host, and so do many rows.
struct HostBytes {
  double layers = 0, head = 0;
  double drafts = 0;  // of one draft() beyond its head: stages, main_proj, Markov head
};

/// Experts in a pool of pool_bytes of FP4 codes: the same in every process that asks for the same.
std::unique_ptr<ExpertSource> synthetic_experts(const ModelConfig& config, std::size_t pool_bytes);

class SyntheticModel {
 public:
  /// pool_bytes: of FP8 codes, and as much again of FP4 where the experts are here, and half of it of BF16
  /// (at least the head).
  SyntheticModel(const std::filesystem::path& config_file, std::size_t pool_bytes, bool experts_here = true);

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  const HostBytes& host_bytes() const { return bytes_; }
  /// Only where they are here.
  ExpertSource& experts() { return *experts_; }
  std::unique_ptr<EngramRows> engram_rows() const;
  TokenMap token_map() const;
  /// The pool that is read for comparison.
  const Buffer& codes() const { return fp8_.buffer(); }

  /// Gives an empty sequence the state that `tokens` tokens would have left behind, with random contents.
  void fill(Sequence& sequence, std::uint32_t tokens) const;

 private:
  Fp8Matrix fp8(std::size_t n, std::size_t k);
  Bf16Matrix bf16(std::size_t n, std::size_t k);
  std::span<const BFloat16> ones(std::size_t count) const;
  std::span<const float> zeros(std::size_t count) const;
  BlockWeights block(std::uint32_t index);

  ModelConfig config_;
  Pool fp8_, bf16_, fp8_scales_;
  std::vector<BFloat16> ones_;
  std::vector<float> zeros_, mixes_;
  double taken_ = 0;  // bytes of all tensors so far
  ModelWeights weights_;
  HostBytes bytes_;
  std::unique_ptr<ExpertSource> experts_;
};

}  // namespace dsv41::bench
