// Three claims about the draft stages (checks.h).
#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

constexpr std::string_view kNoStages = "the config has no MTP layers";

/// Shape of each draft tensor that `wanted` picks; the scales are judged as block sizes.
template <typename Wanted>
Check shapes_of(const Evidence& evidence, std::string name, Wanted wanted) {
  Claim claim(evidence, std::move(name));
  if (evidence.config().n_mtp_layers == 0) return claim.does_not_apply(kNoStages);
  std::string observed;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (tensor.name.scope != Scope::Draft || !wanted(tensor.name.part)) continue;
    const TensorInfo* header = claim.read(tensor, Claim::IfAbsent::Contradicts);
    if (header == nullptr || tensor.name.part.ends_with(".scale")) continue;
    if (header->shape != tensor.expected->shape)
      claim.contradict("{}: {}, the config gives {} ({})", header->name, header->shape.text(),
                       tensor.expected->shape.text(), tensor.expected->fields);
    else
      observed +=
          fmt::format("{}{} {}", observed.empty() ? "" : ", ", tensor.name.part, header->shape.text());
  }
  return claim.conclude(std::move(observed));
}

Check stages_carry_their_parts(const Evidence& evidence) {
  const std::uint32_t stages = evidence.config().n_mtp_layers;
  Claim claim(evidence, "dspark: every MTP layer carries attn and ffn but only the last carries the heads");
  std::uint64_t present = 0;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (tensor.name.scope == Scope::Draft && claim.require(tensor)) ++present;
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.name.scope == Scope::Draft && !stray.name.is_expert)
      claim.contradict("{}: not a tensor of that stage", stray.full_name);
  if (stages == 0 && !claim.contradicted()) return claim.does_not_apply(kNoStages);
  return claim.conclude(fmt::format("{} stages, {} tensors beside the experts", stages, present));
}

}  // namespace

void check_dspark(const Evidence& evidence, Checks& checks) {
  checks.push_back(shapes_of(evidence, "dspark: the Markov and confidence heads match the config",
                             [](std::string_view part) {
                               return part.starts_with("markov_head.") ||
                                      part.starts_with("confidence_head.") || part == "norm.weight";
                             }));
  checks.push_back(shapes_of(evidence, "dspark: main_proj is n_mtp_layers * dim wide",
                             [](std::string_view part) { return part.starts_with("main_"); }));
  checks.push_back(stages_carry_their_parts(evidence));
}

}  // namespace dsv41::audit
