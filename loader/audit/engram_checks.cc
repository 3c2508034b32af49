// Five claims about the Engram tables and their projections (checks.h).
#include <algorithm>
#include <set>

#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

constexpr std::string_view kTable = "engram.embed.weight";

Check tables_sit_on_their_layers(const Evidence& evidence) {
  const std::string layers = list_text(evidence.config().engram_layer_ids);
  Claim claim(evidence, "engram: the tables sit on exactly engram_layer_ids");
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (tensor.name.in_block() && tensor.name.part == kTable) claim.require(tensor);
  }
  for (const StrayState& stray : evidence.strays())
    if (stray.name.is_engram()) claim.contradict("{}: no Engram layer of {}", stray.full_name, layers);
  return claim.conclude(fmt::format("engram_layer_ids {}", layers));
}

Check gate_and_value_projections(const Evidence& evidence) {
  const ModelConfig& config = evidence.config();
  Claim claim(evidence, "engram: each Engram layer has its gate and value projection");
  if (config.engram_layer_ids.empty()) return claim.does_not_apply("the config has no Engram layer");
  const Shape gate{config.hc_mult, config.dim};
  const std::uint64_t value_rows = (std::uint64_t{config.hc_mult} + 1) * config.dim;
  std::set<std::uint64_t> value_widths;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (!tensor.name.is_engram() || tensor.name.part.starts_with("engram.embed.")) continue;
    const TensorInfo* header = claim.read(tensor, Claim::IfAbsent::Contradicts);
    if (header == nullptr || tensor.name.part == "engram.wkv.scale")
      continue;  // the scale is judged as a block size
    if (tensor.name.part == "engram.wkv.weight") {
      // How many columns hashing yields is a claim about the table ranges; here they must be whole rows.
      const bool fits = header->shape.size() == 2 && header->shape[0] == value_rows && header->shape[1] > 0 &&
                        config.engram_head_dim > 0 && header->shape[1] % config.engram_head_dim == 0;
      if (!fits)
        claim.contradict("{}: {} instead of [{}, a multiple of engram_head_dim {}]", header->name,
                         header->shape.text(), value_rows, config.engram_head_dim);
      else
        value_widths.insert(header->shape[1]);
    } else if (header->shape != gate) {
      claim.contradict("{}: {} instead of {}", header->name, header->shape.text(), gate.text());
    }
  }
  std::string widths;
  for (const std::uint64_t width : value_widths)
    widths +=
        fmt::format(", wkv reads {} columns of {}", width / config.engram_head_dim, config.engram_head_dim);
  return claim.conclude(fmt::format("q_weight and k_weight {}{}", gate.text(), widths));
}

/// Two claims, so that a table too small and a table too large read differently.
void tables_against_hashing(const Evidence& evidence, const DerivedRows& derived, Checks& checks) {
  const std::vector<std::uint64_t>& declared = evidence.config().engram_num_embeddings;
  Claim large_enough(evidence, "engram: the tables are at least as large as the derived bucket ranges");
  Claim no_larger(evidence, "engram: the tables are no larger than the derived bucket ranges");
  if (evidence.config().engram_layer_ids.empty()) {
    checks.push_back(large_enough.does_not_apply("the config has no Engram layer"));
    checks.push_back(no_larger.does_not_apply("the config has no Engram layer"));
    return;
  }
  const std::string both =
      fmt::format("declared {} against derived {}", list_text(declared), list_text(derived.rows));
  if (!derived.failure.empty()) {
    large_enough.contradict("{}", derived.failure);
  } else {
    const std::size_t count = std::min(declared.size(), derived.rows.size());
    const auto smaller = [&](std::size_t i) { return declared[i] < derived.rows[i]; };
    const auto larger = [&](std::size_t i) { return declared[i] > derived.rows[i]; };
    bool any_smaller = false, any_larger = false;
    for (std::size_t i = 0; i < count; ++i) {
      any_smaller = any_smaller || smaller(i);
      any_larger = any_larger || larger(i);
    }
    if (any_smaller) large_enough.contradict("too few rows: {}", both);
    if (any_larger) no_larger.contradict("rows that no id reaches: {}", both);
  }
  checks.push_back(large_enough.conclude(large_enough.contradicted() ? "" : both));
  checks.push_back(no_larger.conclude(no_larger.contradicted() || !derived.failure.empty() ? "" : both));
}

Check table_formats(const Evidence& evidence) {
  Claim claim(evidence, "engram: the tables are F8_E4M3 with one E8M0 scale per 32 channels");
  if (evidence.config().engram_layer_ids.empty())
    return claim.does_not_apply("the config has no Engram layer");
  std::uint64_t rows = 0;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& tensor = evidence.tensors()[i];
    if (!tensor.name.is_engram() || !tensor.name.part.starts_with("engram.embed.")) continue;
    const TensorInfo* header = claim.read(tensor, Claim::IfAbsent::Contradicts);
    if (header == nullptr) continue;
    if (header->dtype != tensor.expected->dtype || header->shape != tensor.expected->shape)
      claim.contradict("{}: {} {} instead of {} {}", header->name, dtype_name(header->dtype),
                       header->shape.text(), dtype_name(tensor.expected->dtype),
                       tensor.expected->shape.text());
    else if (tensor.name.part == kTable)
      rows += header->shape[0];
  }
  return claim.conclude(rows == 0 ? "" : fmt::format("{} rows read", grouped(rows)));
}

}  // namespace

void check_engram(const Evidence& evidence, const DerivedRows& derived_rows, Checks& checks) {
  checks.push_back(tables_sit_on_their_layers(evidence));
  checks.push_back(gate_and_value_projections(evidence));
  tables_against_hashing(evidence, derived_rows, checks);
  checks.push_back(table_formats(evidence));
}

}  // namespace dsv41::audit
