// Two claims about the vision tower, its aligner and the image delimiters (checks.h).
#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

Check blocks_are_present(const Evidence& evidence) {
  const std::uint32_t blocks = evidence.config().vision_n_layers;
  Claim claim(evidence, fmt::format("vision: all {} blocks are present", blocks));
  if (blocks == 0) return claim.does_not_apply("vision_n_layers is 0");
  std::uint64_t present = 0;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (tensor.name.scope == Scope::VisionBlock && claim.require(tensor)) ++present;
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.name.scope == Scope::VisionBlock)
      claim.contradict("{}: not a tensor of that block", stray.full_name);
  return claim.conclude(fmt::format("{} tensors", present));
}

Check shapes_match(const Evidence& evidence) {
  Claim claim(evidence, "vision: the encoder and projector shapes match the config");
  if (evidence.config().vision_n_layers == 0) return claim.does_not_apply("vision_n_layers is 0");
  std::uint64_t compared = 0;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (!tensor.name.is_vision()) continue;
    const TensorInfo* header =
        claim.read(tensor, tensor.name.scope == Scope::VisionBlock ? Claim::IfAbsent::IsNotCovered
                                                                   : Claim::IfAbsent::Contradicts);
    if (header == nullptr) continue;
    ++compared;
    if (header->shape != tensor.expected->shape)
      claim.contradict("{}: {}, the config gives {} ({})", header->name, header->shape.text(),
                       tensor.expected->shape.text(), tensor.expected->fields);
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.name.is_vision() && stray.name.scope != Scope::VisionBlock)
      claim.contradict("{}: no tensor of this model", stray.full_name);
  return claim.conclude(fmt::format("{} tensors", compared));
}

}  // namespace

void check_vision(const Evidence& evidence, Checks& checks) {
  checks.push_back(blocks_are_present(evidence));
  checks.push_back(shapes_match(evidence));
}

}  // namespace dsv41::audit
