// The model's shape in types: one struct of views per block. Views point into the checkpoint, which must outlive them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kernels/compute.h"
#include "kernels/views.h"
#include "loader/checkpoint.h"

namespace dsv41 {

struct CompressorWeights {  // Full layers
  Bf16Matrix wkv;                  // [Dh, D]
  std::optional<Bf16Matrix> wgate; // [Dh, D], only where the ratio is > 1
  std::span<const BFloat16> norm;  // [Dh]
  Bf16Matrix index_wk;             // [index_head_dim, Dh]
  std::span<const BFloat16> index_k_norm;  // [index_head_dim]
};

struct IndexQueryWeights {  // Full and Reindex layers
  Fp8Matrix wq_b;           // [index_n_heads*index_head_dim, Q]
  Bf16Matrix weights_proj;  // [index_n_heads, D]
};

struct AttentionWeights {
  Fp8Matrix wq_a, wq_b, wkv, wo_a, wo_b;
  std::span<const BFloat16> q_norm, kv_norm;
  std::span<const float> sink;
  std::optional<CompressorWeights> compressor;
  std::optional<IndexQueryWeights> index_query;
};

struct HyperConnectionWeights {
  F32Matrix fn;                  // [24, M*D]
  std::span<const float> base;   // [24]
  std::span<const float> scale;  // [3]
};

struct MoeWeights {
  Bf16Matrix gate;                        // [E, D]
  std::span<const float> bias, bias_vl;   // [E]
  Fp8Matrix shared_w1, shared_w3, shared_w2;
};

struct EngramWeights {
  Fp8Matrix wkv;                                 // [(M+1)*D, columns*width]
  std::span<const BFloat16> q_weight, k_weight;  // [M, D]
  std::span<const std::uint8_t> table_codes;     // [rows, width]
  std::span<const std::uint8_t> table_scales;    // [rows, width/32]
  TensorLocation codes_location, scales_location;
  std::uint64_t rows = 0;
};

struct BlockWeights {
  std::span<const BFloat16> attention_norm, ffn_norm;
  HyperConnectionWeights hc_attention, hc_ffn;
  AttentionWeights attention;
  MoeWeights moe;
};

struct DraftWeights {  // mtp.*
  std::vector<BlockWeights> stages;
  Fp8Matrix main_proj;
  std::span<const BFloat16> main_norm, norm;
  Bf16Matrix markov_embed, markov_head;
  std::span<const BFloat16> confidence;  // [D + rank]
};

struct ModelWeights {
  Bf16Matrix embed, head;
  std::span<const BFloat16> norm;
  std::vector<BlockWeights> blocks;
  std::vector<EngramWeights> engram;  // in the order of engram_layer_ids
  std::optional<DraftWeights> draft;  // n_mtp_layers > 0

  /// Backbone layers, then draft stages.
  const BlockWeights& block(std::size_t index) const {
    return index < blocks.size() ? blocks[index] : draft->stages[index - blocks.size()];
  }
};

/// Views of everything the host rank uses (all but routed experts).
ModelWeights host_weights(const Checkpoint& checkpoint);
/// Where a tensor of a routed expert lies: "w1.weight", "w1.scale", …
TensorLocation expert_tensor(const Checkpoint& checkpoint, std::uint32_t block, std::uint32_t expert,
                             std::string_view tensor);
/// Views of one routed expert; block counts backbone layers, then draft stages.
ExpertMatrices expert_weights(const Checkpoint& checkpoint, std::uint32_t block, std::uint32_t expert);

}  // namespace dsv41
