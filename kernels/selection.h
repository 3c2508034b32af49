// Choosing: experts of a token, groups of a query, blocks of candidates. Integer results, ties to the lowest index
// (docs/numerics.md 8), time linear in the number of candidates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/views.h"

namespace dsv41 {

/// Gate of one token (model.md 4): logits fp32 [experts] of gate.weight -> scores = RN32(sqrt(softplus(logit))).
void gate_scores(std::span<const float> logits, std::span<float> scores);

/// The `ids.size()` experts with the largest RN32(score + bias), in order of choice, and their weights
/// (score / (sum + 1e-20) when more than one is chosen, times route_scale). Throws nothing; sizes are the caller's duty.
void choose_experts(std::span<const float> scores, std::span<const float> bias, float route_scale,
                    std::span<std::int32_t> ids, std::span<float> weights);

/// The `count` best scores above -infinity, their indices in ascending order (fewer when fewer qualify).
/// mask: one byte per block of mask_block scores, 0 = exclude; empty = no mask. `out` is cleared, its capacity reused.
void select_groups(std::span<const BFloat16> scores, std::size_t count, std::span<const std::uint8_t> mask,
                   std::size_t mask_block, std::vector<std::int32_t>& out);

/// First level (model.md 3): marks the `count` best blocks of `block` visible scores; the block of the newest visible
/// group (the last score) is pinned in. mask: one byte per block, resized to ceil(scores/block).
void select_blocks(std::span<const BFloat16> scores, std::size_t block, std::size_t count, std::vector<std::uint8_t>& mask);

}  // namespace dsv41
