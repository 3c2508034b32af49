// Splitting tensor names (tensor_name.h).
#include "loader/audit/tensor_name.h"

#include <charconv>
#include <cstddef>

namespace dsv41::audit {
namespace {

/// Takes "<number>." off the front of text; false when it does not start that way.
bool take_index(std::string_view& text, std::uint32_t& index) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc{} || end == text.data() + text.size() || *end != '.') return false;
  if (text[0] == '0' && end != text.data() + 1) return false;  // "layers.01." is not layer 1
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return true;
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

TensorName parse_tensor_name(std::string_view name) {
  TensorName result;
  result.part = name;
  std::string_view rest = name;
  const auto indexed = [&](std::string_view prefix, Scope scope) {
    if (!take_prefix(rest, prefix)) return false;
    if (!take_index(rest, result.block)) {
      rest = name;
      return false;
    }
    result.scope = scope;
    result.part = rest;
    return true;
  };
  if (indexed("layers.", Scope::Layer) || indexed("mtp.", Scope::Draft)) {
    if (take_prefix(rest, "ffn.experts.") && take_index(rest, result.expert)) {
      result.is_expert = true;
      result.part = rest;
    }
  } else if (indexed("vision.blocks.", Scope::VisionBlock)) {
    // the part is set
  } else if (take_prefix(rest, "vision.")) {
    result.scope = Scope::Vision;
    result.part = rest;
  } else if (take_prefix(rest, "aligner.")) {
    result.scope = Scope::Aligner;
    result.part = rest;
  }
  return result;
}

}  // namespace dsv41::audit
