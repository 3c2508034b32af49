// Four claims about which tensors there are, their shapes and their unquantized types (checks.h).
#include <algorithm>
#include <map>
#include <set>

#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

/// "2,334 tensors each, 2,340 in layer 1, 2,342 in layers 2, 8"
std::string counts_text(const std::vector<std::uint64_t>& per_layer) {
  std::map<std::uint64_t, std::vector<std::size_t>> layers_of;
  for (std::size_t layer = 0; layer < per_layer.size(); ++layer) layers_of[per_layer[layer]].push_back(layer);
  const auto usual = std::max_element(layers_of.begin(), layers_of.end(), [](const auto& a, const auto& b) {
    return a.second.size() < b.second.size();
  });
  if (usual == layers_of.end()) return "no layers";
  std::string text = fmt::format("{} tensors each", grouped(usual->first));
  for (const auto& [count, layers] : layers_of)
    if (count != usual->first)
      text += fmt::format(", {} in layer{} {}", grouped(count), layers.size() == 1 ? "" : "s",
                          fmt::join(layers, ", "));
  return text;
}

Check layers_are_whole(const Evidence& evidence) {
  Claim claim(evidence, "inventory: every backbone layer has its full tensor set");
  std::vector<std::uint64_t> present(evidence.config().n_layers);
  for (const ExpectedState& tensor : evidence.tensors())
    if (tensor.name.scope == Scope::Layer && claim.require(tensor)) ++present[tensor.name.block];
  for (const StrayState& stray : evidence.strays())
    if (stray.name.scope == Scope::Layer) claim.contradict("{}: not a tensor of that layer", stray.full_name);
  return claim.conclude(counts_text(present));
}

/// Tensors whose shapes other groups judge: experts, Engram, vision, the heads of the draft stages, scales.
bool judged_elsewhere(const TensorName& name) {
  if (name.is_expert || name.is_engram() || name.is_vision() || name.part.ends_with(".scale")) return true;
  return name.scope == Scope::Draft &&
         (name.part.starts_with("main_") || name.part.starts_with("markov_head.") ||
          name.part.starts_with("confidence_head.") || name.part == "norm.weight");
}

/// A shape is known per name, whatever the layer: one layer of a kind settles it, every readable layer must
/// agree.
Check shapes_match(const Evidence& evidence) {
  Claim claim(evidence, "inventory: the known shapes match the config");
  std::map<std::string_view, bool> settled;  // part -> some header shows it
  std::uint64_t compared = 0;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (judged_elsewhere(tensor.name)) continue;
    bool& is_settled = settled[tensor.name.part];
    if (tensor.header == nullptr) continue;
    is_settled = true;
    ++compared;
    if (tensor.header->shape != tensor.expected->shape)
      claim.contradict("{}: {}, the config gives {} ({})", tensor.expected->name, tensor.header->shape.text(),
                       tensor.expected->shape.text(), tensor.expected->fields);
  }
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (judged_elsewhere(tensor.name) || settled[tensor.name.part]) continue;
    claim.read(tensor, tensor.name.scope == Scope::Top ? Claim::IfAbsent::Contradicts
                                                       : Claim::IfAbsent::IsNotCovered);
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.name.scope == Scope::Top && !stray.name.is_vision())
      claim.contradict("{}: no tensor of this model", stray.full_name);
  const auto seen =
      std::count_if(settled.begin(), settled.end(), [](const auto& entry) { return entry.second; });
  return claim.conclude(
      fmt::format("{} shapes compared, {} of {} kinds seen", grouped(compared), seen, settled.size()));
}

Check plain_tensors_are_not_quantized(const Evidence& evidence) {
  Claim claim(evidence, "inventory: the F32/BF16 tensors are not quantized");
  std::uint64_t compared = 0;
  std::set<std::string_view> plain_stems;
  constexpr std::string_view kWeight = ".weight", kScale = ".scale";
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    const DType dtype = tensor.expected->dtype;
    if (dtype != DType::F32 && dtype != DType::BF16) continue;
    if (tensor.expected->name.ends_with(kWeight))
      plain_stems.insert(tensor.expected->name.substr(0, tensor.expected->name.size() - kWeight.size()));
    if (tensor.header == nullptr) continue;
    ++compared;
    if (tensor.header->dtype != dtype)
      claim.contradict("{}: {} instead of {}", tensor.expected->name, dtype_name(tensor.header->dtype),
                       dtype_name(dtype));
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.full_name.ends_with(kScale) &&
        plain_stems.count(stray.full_name.substr(0, stray.full_name.size() - kScale.size())) != 0)
      claim.contradict("{}: a scale for a tensor that has none", stray.full_name);
  return claim.conclude(fmt::format("{} tensors", grouped(compared)));
}

Check counts_are_not_zero(const Evidence& evidence) {
  Claim claim(evidence, "inventory: the tensor count and byte total are non-zero");
  if (evidence.readable_tensors() == 0 || evidence.readable_bytes() == 0)
    claim.contradict("nothing could be read");
  claim.contradict(evidence.duplicates(), "counted twice: ");
  return claim.conclude(fmt::format("{} tensors, {} bytes", grouped(evidence.readable_tensors()),
                                    grouped(evidence.readable_bytes())));
}

}  // namespace

void check_inventory(const Evidence& evidence, Checks& checks) {
  checks.push_back(layers_are_whole(evidence));
  checks.push_back(shapes_match(evidence));
  checks.push_back(plain_tensors_are_not_quantized(evidence));
  checks.push_back(counts_are_not_zero(evidence));
}

}  // namespace dsv41::audit
