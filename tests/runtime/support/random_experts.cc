// Random numbers are a mix of their index, so that every rank makes the same ones.
#include "tests/runtime/support/random_experts.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <thread>

namespace dsv41::testing {

std::uint64_t mix(std::uint64_t key) {
  key += 0x9E3779B97F4A7C15u;
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
  return key ^ (key >> 31);
}

ModelConfig small_config(std::uint32_t experts, std::uint32_t draft_experts, std::uint32_t dim,
                         std::uint32_t inter_dim) {
  ModelConfig config;
  config.dim = dim;
  config.moe_inter_dim = inter_dim;
  config.n_layers = 3;
  config.n_mtp_layers = 2;
  config.n_routed_experts = experts;
  config.n_activated_experts = std::min(3u, experts);
  config.dspark_n_routed_experts = draft_experts;
  config.dspark_n_activated_experts = std::min(2u, draft_experts);
  config.swiglu_limit = 10;
  return config;
}

RandomExperts::RandomExperts(const ModelConfig& config) : geometry_(ExpertGeometry::of(config)) {
  std::size_t experts = 0;
  for (const std::uint32_t count : geometry_.experts_per_block) {
    first_expert_.push_back(experts);
    experts += count;
  }
  const std::size_t values = std::size_t{3} * config.dim * config.moe_inter_dim;
  codes_.resize(experts * values / 2);
  scales_.resize(experts * values / kBlock);
  for (std::size_t index = 0; index < codes_.size(); ++index)
    codes_[index] = static_cast<std::uint8_t>(mix(index));
  for (std::size_t index = 0; index < scales_.size(); ++index)
    scales_[index] = static_cast<std::uint8_t>(120 + mix(~index) % 6);
}

ExpertMatrices RandomExperts::expert(std::uint32_t block, std::uint32_t expert) {
  if (block >= first_expert_.size() || expert >= geometry_.experts_per_block[block])
    throw CheckpointError("no such expert");
  const std::size_t values = std::size_t{geometry_.dim} * geometry_.inter_dim;
  const std::size_t at = (first_expert_[block] + expert) * 3;
  const auto matrix = [&](std::size_t which, std::size_t n, std::size_t k) {
    return Fp4Matrix{codes_.data() + (at + which) * values / 2,
                     scales_.data() + (at + which) * values / kBlock, n, k};
  };
  return {matrix(0, geometry_.inter_dim, geometry_.dim), matrix(1, geometry_.inter_dim, geometry_.dim),
          matrix(2, geometry_.dim, geometry_.inter_dim)};
}

void DigestEngine::compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
                           const std::function<void()>& alive) {
  for (std::uint32_t waited_us = 0; waited_us < delay_us_; waited_us += 1000) {
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(1000u, delay_us_ - waited_us)));
    alive();
  }
  const std::size_t dim = call.x.k;
  for (std::size_t index = 0; index < call.routes.size(); ++index) {
    const Route& route = call.routes[index];
    std::uint64_t digest = mix((std::uint64_t{call.block} << 32) | route.expert);
    digest = mix(digest ^ std::bit_cast<std::uint32_t>(route.weight));
    for (std::size_t k = 0; k < dim; ++k) digest = mix(digest ^ call.x.codes[route.row * dim + k]);
    for (std::size_t k = 0; k < dim / kBlock; ++k)
      digest = mix(digest ^ call.x.scales[route.row * (dim / kBlock) + k]);
    for (std::size_t k = 0; k < dim; ++k)
      outputs[index * dim + k].bits = static_cast<std::uint16_t>(mix(digest + k));
  }
  timing.compute_ns += 1;
}

RandomCall::RandomCall(const ModelConfig& config, std::uint32_t block_index, std::uint32_t rows,
                       std::uint64_t seed, bool gaps)
    : step(seed), block(block_index), dim(config.dim) {
  const std::uint64_t base = mix(seed * 1000003 + block);
  codes.resize(std::size_t{rows} * dim);
  scales.resize(codes.size() / kBlock);
  for (std::size_t index = 0; index < codes.size(); ++index) {
    codes[index] = static_cast<std::uint8_t>(mix(base + index));
    if ((codes[index] & 0x7F) == 0x7F) codes[index] = 0x38;  // no NaN
  }
  for (std::size_t index = 0; index < scales.size(); ++index)
    scales[index] = static_cast<std::uint8_t>(118 + mix(base ^ ~index) % 8);
  const std::uint32_t experts = config.experts_of(block);
  for (std::uint32_t row = 0; row < rows; ++row) {
    if (gaps && mix(base + row * 7919) % 8 == 0) continue;
    std::vector<std::uint32_t> chosen;
    for (std::uint64_t draw = 0; chosen.size() < config.experts_per_token(block); ++draw) {
      const auto expert = static_cast<std::uint32_t>(mix(base ^ (std::uint64_t{row} << 20) ^ draw) % experts);
      if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
    }
    std::sort(chosen.begin(), chosen.end());
    for (const std::uint32_t expert : chosen)
      routes.push_back({row, expert, static_cast<float>(mix(base + row * 31 + expert) % 1000) / 700.0f});
  }
}

ExpertCall RandomCall::view() const {
  return {step, block, {codes.data(), scales.data(), codes.size() / dim, dim}, routes};
}

std::filesystem::path write_random_placement(const ModelConfig& config, std::uint32_t ranks,
                                             std::uint64_t seed, const std::filesystem::path& directory) {
  std::string text = "{\"ranks\": " + std::to_string(ranks) + ", \"blocks\": [";
  for (std::uint32_t block = 0; block < config.n_blocks(); ++block) {
    text += block == 0 ? "[" : ", [";
    for (std::uint32_t expert = 0; expert < config.experts_of(block); ++expert)
      text += (expert == 0 ? "" : ", ") +
              std::to_string(mix(seed ^ (std::uint64_t{block} << 32) ^ expert) % ranks);
    text += "]";
  }
  text += "]}\n";
  const auto path = directory / ("placement-" + std::to_string(ranks) + "-" + std::to_string(seed) + ".json");
  std::ofstream(path) << text;
  return path;
}

}  // namespace dsv41::testing
