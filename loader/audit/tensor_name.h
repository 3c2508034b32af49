// The parts of a tensor's name: which block it belongs to, which expert, and what is left under that prefix.
// Uses the standard library only. Specified in docs/checkpoint.md, "Tensors".
#pragma once

#include <cstdint>
#include <string_view>

namespace dsv41::audit {

enum class Scope : std::uint8_t { Top, Layer, Draft, VisionBlock, Vision, Aligner };

struct TensorName {
  Scope scope = Scope::Top;
  std::uint32_t block = 0;  // layer, draft stage or vision block
  bool is_expert = false;   // a routed expert
  std::uint32_t expert = 0;
  std::string_view part;  // "attn.wq_a.weight", "w1.scale" of an expert, "embed.weight"; a view into the name

  bool in_block() const { return scope == Scope::Layer || scope == Scope::Draft; }
  bool is_engram() const { return in_block() && !is_expert && part.starts_with("engram."); }
  bool is_vision() const {
    return scope == Scope::VisionBlock || scope == Scope::Vision || scope == Scope::Aligner ||
           (scope == Scope::Top && part.starts_with("image_"));
  }
};

/// A name that has no indexed prefix of the layout is Scope::Top with the whole name as its part.
TensorName parse_tensor_name(std::string_view name);

}  // namespace dsv41::audit
