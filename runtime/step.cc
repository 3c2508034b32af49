#include "runtime/step.h"

#include <algorithm>
#include <numeric>

namespace dsv41 {

void Step::clear() {
  segments.clear();
  tokens.clear();
  positions.clear();
  logit_rows.clear();
}

void Step::add(Sequence& sequence, std::span<const std::uint32_t> next, std::size_t logits,
               std::uint32_t prompt_end) {
  const std::uint32_t start = sequence.length();
  segments.push_back({&sequence, rows(), next.size(), start, prompt_end > 0 ? prompt_end - 1 : 0});
  for (std::size_t i = 0; i < next.size(); ++i) {
    if (i + logits >= next.size()) logit_rows.push_back(static_cast<std::uint32_t>(rows()));
    tokens.push_back(next[i]);
    positions.push_back(start + static_cast<std::uint32_t>(i));
  }
}

void RowSet::assign(const Step& step, std::size_t begin, std::size_t end) {
  segments.clear();
  for (Segment segment : step.segments) {
    const std::size_t from = std::max(begin, segment.first_row);
    const std::size_t to = std::min(end, segment.first_row + segment.rows);
    if (from >= to) continue;
    segment.start += static_cast<std::uint32_t>(from - segment.first_row);
    segment.first_row = from - begin;
    segment.rows = to - from;
    segments.push_back(segment);
  }
  positions.assign(step.positions.begin() + static_cast<std::ptrdiff_t>(begin),
                   step.positions.begin() + static_cast<std::ptrdiff_t>(end));
  origins.resize(end - begin);
  std::iota(origins.begin(), origins.end(), static_cast<std::uint32_t>(begin));
}

RowPlan::RowPlan(const ModelConfig& config, bool draft_windows) : reach_(config.n_layers) {
  std::uint64_t reach = 0;  // of the output of the layer at hand
  for (std::uint32_t layer = config.n_layers; layer-- > 0;) {
    reach_[layer] = reach;
    // What this layer takes in is the output of the layer below.
    const auto& targets = config.dspark_target_layer_ids;
    if (reach != kAll) reach += config.window_size - 1;
    if (draft_windows && std::find(targets.begin(), targets.end(), layer) != targets.end())
      reach = std::max<std::uint64_t>(reach, config.window_size - 1);
    if (config.mode(layer) == AttentionMode::Full) reach = kAll;
  }
}

void RowPlan::narrow(const RowSet& in, std::uint32_t layer, RowSet& out) const {
  out.segments.clear();
  out.positions.clear();
  out.origins.clear();
  for (const Segment& segment : in.segments) {
    std::size_t skipped = 0;
    while (skipped < segment.rows &&
           !needed(layer, segment.start + static_cast<std::uint32_t>(skipped), segment.wanted_from))
      ++skipped;
    // A segment stays even when no row of it does: segments of the rows that come in and go out correspond.
    Segment kept = segment;
    kept.first_row = out.rows();
    kept.rows = segment.rows - skipped;
    kept.start = segment.start + static_cast<std::uint32_t>(skipped);
    out.segments.push_back(kept);
    const auto from = static_cast<std::ptrdiff_t>(segment.first_row + skipped);
    const auto to = static_cast<std::ptrdiff_t>(segment.first_row + segment.rows);
    out.positions.insert(out.positions.end(), in.positions.begin() + from, in.positions.begin() + to);
    out.origins.insert(out.origins.end(), in.origins.begin() + from, in.origins.begin() + to);
  }
}

}  // namespace dsv41
