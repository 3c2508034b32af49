// Experts, calls and placements made of random numbers: the exchange is tested without a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "runtime/experts.h"

namespace dsv41::testing {

/// Numbers that depend on their key only.
std::uint64_t mix(std::uint64_t key);

/// A config with what placement and experts need: 3 layers of `experts`, 2 draft stages of `draft_experts`.
ModelConfig small_config(std::uint32_t experts = 11, std::uint32_t draft_experts = 4, std::uint32_t dim = 96,
                         std::uint32_t inter_dim = 64);

/// FP4 matrices of every expert in memory; every rank that makes one with the same config gets the same
/// bytes.
class RandomExperts final : public ExpertSource {
 public:
  explicit RandomExperts(const ModelConfig& config);
  const ExpertGeometry& geometry() const override { return geometry_; }
  ExpertMatrices expert(std::uint32_t block, std::uint32_t expert) override;

 private:
  ExpertGeometry geometry_;
  std::vector<std::uint8_t> codes_, scales_;
  std::vector<std::size_t> first_expert_;  // of each block
};

/// An engine without arithmetic: every output is a digest of block, expert, weight and activation row.
class DigestEngine final : public ExpertEngine {
 public:
  explicit DigestEngine(const ModelConfig& config, std::uint32_t delay_us = 0)
      : geometry_(ExpertGeometry::of(config)), delay_us_(delay_us) {}
  const ExpertGeometry& geometry() const override { return geometry_; }
  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override;
  std::string describe() const override { return "digest"; }

 private:
  ExpertGeometry geometry_;
  std::uint32_t delay_us_;
};

/// A call that owns its arrays.
struct RandomCall {
  /// Each row chooses experts_per_token(block) experts, or none with probability 1/8 when `gaps`.
  RandomCall(const ModelConfig& config, std::uint32_t block, std::uint32_t rows, std::uint64_t seed,
             bool gaps = false);
  ExpertCall view() const;
  std::uint64_t step = 0;
  std::uint32_t block = 0;
  std::uint32_t dim = 0;
  std::vector<std::uint8_t> codes, scales;
  std::vector<Route> routes;
};

/// Writes a random placement file; every owner is in range, some ranks may own nothing.
std::filesystem::path write_random_placement(const ModelConfig& config, std::uint32_t ranks,
                                             std::uint64_t seed, const std::filesystem::path& directory);

}  // namespace dsv41::testing
