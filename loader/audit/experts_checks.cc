// Three claims about routed experts: their packed format and how many there are (checks.h).
#include <algorithm>

#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

Check packed_format(const Evidence& evidence) {
  Claim claim(evidence, "experts: w1/w2/w3 are FP4 packed into I8 with FP4-block-32 E8M0 scales");
  std::uint64_t compared = 0;
  std::string expected;
  for (const ExpectedState& tensor : evidence.tensors()) {
    if (!tensor.name.is_expert) continue;
    if (expected.empty() && tensor.scale != kNone) {
      const ExpectedTensor& scale = *evidence.tensors()[tensor.scale].expected;
      expected = fmt::format("expected {}{} and {}{}", dtype_name(tensor.expected->dtype),
                             tensor.expected->shape.text(), dtype_name(scale.dtype), scale.shape.text());
    }
    const TensorInfo* header = claim.read(tensor, Claim::IfAbsent::IsNotCovered);
    if (header == nullptr) continue;
    ++compared;
    if (header->dtype != tensor.expected->dtype || header->shape != tensor.expected->shape)
      claim.contradict("{}: {} {} instead of {} {}", header->name, dtype_name(header->dtype),
                       header->shape.text(), dtype_name(tensor.expected->dtype),
                       tensor.expected->shape.text());
  }
  if (expected.empty()) return claim.does_not_apply("the config has no routed experts");
  return claim.conclude(fmt::format("{} tensors, {}", grouped(compared), expected));
}

Check expert_count(const Evidence& evidence, Scope scope, std::string_view blocks, std::uint32_t block_count,
                   std::uint32_t experts) {
  Claim claim(evidence, fmt::format("experts: every {} layer has {} routed experts", blocks, experts));
  if (block_count == 0) return claim.does_not_apply(fmt::format("the config has no {} layers", blocks));
  for (const ExpectedState& tensor : evidence.tensors())
    if (tensor.name.is_expert && tensor.name.scope == scope) claim.require(tensor);
  for (const StrayState& stray : evidence.strays())
    if (stray.name.is_expert && stray.name.scope == scope)
      claim.contradict("{}: not one of {} experts' tensors", stray.full_name, experts);
  return claim.conclude(fmt::format("{} layers", block_count));
}

}  // namespace

void check_experts(const Evidence& evidence, Checks& checks) {
  const ModelConfig& config = evidence.config();
  checks.push_back(packed_format(evidence));
  checks.push_back(
      expert_count(evidence, Scope::Layer, "backbone", config.n_layers, config.n_routed_experts));
  checks.push_back(
      expert_count(evidence, Scope::Draft, "MTP", config.n_mtp_layers, config.dspark_n_routed_experts));
}

}  // namespace dsv41::audit
