// Three claims about scale blocks: pairs block evenly, FP8 weights use one block size, Engram rows another
// (checks.h).
#include <map>
#include <optional>

#include "loader/audit/checks.h"

namespace dsv41::audit {
namespace {

using Blocks = std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t>;

std::uint64_t divide_up(std::uint64_t value, std::uint64_t by) {
  return value / by + (value % by != 0);
}

/// Channels that one scale covers along one axis; `preferred` where it explains the count, also with a
/// partial last block. Nothing when no block size does.
std::optional<std::uint64_t> block_along(std::uint64_t weights, std::uint64_t scales,
                                         std::uint64_t preferred) {
  if (scales == 0 || weights == 0) return std::nullopt;
  if (preferred != 0 && divide_up(weights, preferred) == scales) return preferred;
  if (weights % scales == 0) return weights / scales;
  return std::nullopt;
}

struct Pair {
  const TensorInfo& weight;
  const TensorInfo& scale;
  std::uint64_t rows() const { return weight.shape[0]; }
  /// Two FP4 codes share a byte along the columns.
  std::uint64_t columns() const { return weight.shape[1] * (weight.dtype == DType::I8 ? 2 : 1); }
  bool two_dimensional() const { return weight.shape.size() == 2 && scale.shape.size() == 2; }
};

std::optional<Pair> pair_of(const Evidence& evidence, const ExpectedState& weight) {
  if (weight.scale == kNone || weight.header == nullptr) return std::nullopt;
  const TensorInfo* scale = evidence.tensors()[weight.scale].header;
  if (scale == nullptr) return std::nullopt;
  return Pair{*weight.header, *scale};
}

bool is_table(const ExpectedState& tensor) {
  return tensor.name.is_engram() && tensor.name.part == "engram.embed.weight";
}

std::string blocks_text(const Blocks& blocks) {
  std::string text = "observed blocks {";
  for (const auto& [block, count] : blocks)
    text += fmt::format("{}({}, {}): {}", text.back() == '{' ? "" : ", ", block.first, block.second, count);
  return text + "}";
}

Check pairs_block_evenly(const Evidence& evidence, BlockSize fp8_block) {
  Claim claim(evidence, "scales: every weight/scale pair blocks evenly");
  std::uint64_t pairs = 0;
  for (const ExpectedState& weight : evidence.tensors()) {
    const auto pair = pair_of(evidence, weight);
    if (!pair) continue;
    ++pairs;
    const bool by_rows = weight.name.is_expert || is_table(weight);
    const bool even = pair->two_dimensional() &&
                      block_along(pair->rows(), pair->scale.shape[0], by_rows ? 1 : fp8_block.rows) &&
                      block_along(pair->columns(), pair->scale.shape[1], by_rows ? 32 : fp8_block.columns);
    if (!even)
      claim.contradict("{}: {} does not divide into {} scales", pair->weight.name, pair->weight.shape.text(),
                       pair->scale.shape.text());
  }
  return claim.conclude(fmt::format("{} pairs", grouped(pairs)));
}

/// Judges the pairs that `wanted` picks among everything but experts.
template <typename Wanted>
Check one_block_size(const Evidence& evidence, std::string name, BlockSize block, Wanted wanted) {
  Claim claim(evidence, std::move(name));
  Blocks observed;
  for (const std::uint32_t i : evidence.other_than_experts()) {
    const ExpectedState& weight = evidence.tensors()[i];
    if (weight.scale == kNone || !wanted(weight)) continue;
    const TensorInfo* header = claim.read(weight, Claim::IfAbsent::IsNotCovered);
    const TensorInfo* scale = claim.read(evidence.tensors()[weight.scale], Claim::IfAbsent::IsNotCovered);
    if (header == nullptr || scale == nullptr) continue;
    const Pair pair{*header, *scale};
    if (header->dtype != DType::F8E4M3 || scale->dtype != DType::F8E8M0) {
      claim.contradict("{}: {} with {} scales instead of F8_E4M3 with F8_E8M0", header->name,
                       dtype_name(header->dtype), dtype_name(scale->dtype));
      continue;
    }
    if (!pair.two_dimensional()) {
      claim.contradict("{}: {} with scales {}", header->name, header->shape.text(), scale->shape.text());
      continue;
    }
    const auto rows = block_along(pair.rows(), scale->shape[0], block.rows);
    const auto columns = block_along(pair.columns(), scale->shape[1], block.columns);
    ++observed[{rows.value_or(0), columns.value_or(0)}];
    if (rows != block.rows || columns != block.columns)
      claim.contradict("{}: {} with scales {} is not a {}x{} block", header->name, header->shape.text(),
                       scale->shape.text(), block.rows, block.columns);
  }
  return claim.conclude(blocks_text(observed));
}

}  // namespace

void check_scales(const Evidence& evidence, BlockSize fp8_block, Checks& checks) {
  checks.push_back(pairs_block_evenly(evidence, fp8_block));
  checks.push_back(one_block_size(
      evidence,
      fmt::format("scales: all non-Engram FP8 weights use a {}x{} block", fp8_block.rows, fp8_block.columns),
      fp8_block, [](const ExpectedState& tensor) { return !is_table(tensor); }));
  constexpr std::string_view kTables = "scales: the Engram tables use a 1x32 per-row block";
  if (evidence.config().engram_layer_ids.empty())
    checks.push_back(Claim(evidence, std::string(kTables)).does_not_apply("the config has no Engram layer"));
  else
    checks.push_back(one_block_size(evidence, std::string(kTables), {1, 32}, is_table));
}

}  // namespace dsv41::audit
