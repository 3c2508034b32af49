#include "runtime/step.h"

namespace dsv41 {

void Step::clear() {
  segments.clear();
  tokens.clear();
  positions.clear();
  logit_rows.clear();
}

void Step::add(Sequence& sequence, std::span<const std::uint32_t> next, std::size_t logits) {
  segments.push_back({&sequence, rows(), next.size(), sequence.length()});
  for (std::size_t i = 0; i < next.size(); ++i) {
    if (i + logits >= next.size()) logit_rows.push_back(static_cast<std::uint32_t>(rows()));
    tokens.push_back(next[i]);
    positions.push_back(sequence.length() + static_cast<std::uint32_t>(i));
  }
}

}  // namespace dsv41
