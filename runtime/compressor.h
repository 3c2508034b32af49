// Compressed KV and index keys of Full layers (docs/model.md 3, "latent of a group"): from the tokens of a
// step to the groups they complete. Incomplete groups wait in the sequence as u and z.
#pragma once

#include <vector>

#include "runtime/context.h"
#include "runtime/step.h"

namespace dsv41 {

class Compressor {
 public:
  explicit Compressor(const ModelContext& context);

  /// Appends every group that these rows complete to the cache of `layer`. x: bf16 [rows, D],
  /// attention input.
  void append_groups(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x);

 private:
  /// Latents before the norm, [groups, Dh] into latents_; returns how many groups each segment completes in
  /// counts_.
  void pool_pairs(const RowSet& rows, std::uint32_t layer);
  void store(const RowSet& rows, std::uint32_t layer);

  const ModelContext& context_;
  std::vector<float> frequencies_;
  std::vector<float> u_, z_;                                           // fp32 [max_rows, Dh]
  std::vector<float> members_u_, members_z_;                           // one group gathered: [ratio, Dh]
  std::vector<BFloat16> latents_;                                      // [max_rows, Dh]
  std::vector<BFloat16> keys_;                                         // [max_rows, index_head_dim]
  std::vector<std::uint8_t> codes_, scales_, key_codes_, key_scales_;  // of one group
  std::vector<float> cosine_, sine_;
};

}  // namespace dsv41
