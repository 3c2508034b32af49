// Choosing (docs/model.md 3 and 4, docs/numerics.md 8). Scores of groups and blocks are bf16: 65,536 ordered
// keys, so that the best `count` are found by counting keys, upper byte first, then the lower byte of the one
// that decides.
#include "kernels/selection.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/exact_math.h"

namespace dsv41 {
namespace {

constexpr std::uint16_t kExcluded = 0;          // no score has this key
constexpr std::uint16_t kInfinityKey = 0xFF80;  // of +infinity

/// Orders bf16 values as unsigned integers; -0 counts as +0; -infinity and NaN are excluded.
std::uint16_t ordered_key(BFloat16 score) {
  const std::uint32_t bits = score.bits;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude > 0x7F80u || bits == 0xFF80u) return kExcluded;
  return static_cast<std::uint16_t>(bits <= 0x7FFFu ? 0x8000u + magnitude : 0x8000u - magnitude);
}

/// The best `count` keys are those above `key` and the first `ties` that equal it.
struct Cut {
  std::uint32_t key = 0;
  std::size_t ties = 0;
};

/// for_each(visit) calls visit(index, key) in ascending index, without those excluded, the same sequence
/// every time.
template <class ForEach>
Cut find_cut(std::size_t count, const ForEach& for_each) {
  // Four counters per byte: neighbouring scores are often close, and a counter cannot be raised every cycle.
  std::array<std::array<std::uint32_t, 256>, 4> counters{};
  const auto take = [&](std::uint32_t& byte,
                        std::size_t& wanted) {  // false: all of them together are too few
    for (byte = 256; byte-- > 0;) {
      const std::size_t here =
          std::size_t{counters[0][byte]} + counters[1][byte] + counters[2][byte] + counters[3][byte];
      if (here >= wanted) return true;
      wanted -= here;
    }
    return false;
  };
  for_each([&](std::size_t index, std::uint16_t key) { ++counters[index % 4][key >> 8]; });
  std::uint32_t upper = 0, lower = 0;
  std::size_t wanted = count;
  if (!take(upper, wanted)) return {.key = kExcluded, .ties = 0};
  for (auto& lane : counters) lane.fill(0);
  for_each([&](std::size_t index, std::uint16_t key) {
    if (key >> 8 == upper) ++counters[index % 4][key & 255u];
  });
  take(lower, wanted);
  return {.key = upper << 8 | lower, .ties = wanted};
}

/// Calls chosen(index) for the best `count` keys in ascending index.
template <class ForEach, class Chosen>
void choose(std::size_t count, const ForEach& for_each, const Chosen& chosen) {
  if (count == 0) return;
  Cut cut = find_cut(count, for_each);
  for_each([&](std::size_t index, std::uint16_t key) {
    if (key < cut.key) return;
    if (key == cut.key) {
      if (cut.ties == 0) return;
      --cut.ties;
    }
    chosen(index);
  });
}

}  // namespace

void gate_scores(std::span<const float> logits, std::span<float> scores) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double v = logits[i];
    const double softplus = v > 20.0 ? v : exact::log1p(exact::exp(v));
    scores[i] = static_cast<float>(std::sqrt(softplus));
  }
}

void choose_experts(std::span<const float> scores, std::span<const float> bias, float route_scale,
                    std::span<std::int32_t> ids, std::span<float> weights) {
  const auto key = [&](std::size_t expert) { return scores[expert] + bias[expert]; };
  std::size_t count = 0;
  for (std::size_t expert = 0; expert < scores.size(); ++expert) {
    std::size_t place =
        count;  // insertion into the sorted list of the best so far; equal keys keep their order
    while (place > 0 && key(expert) > key(static_cast<std::size_t>(ids[place - 1]))) --place;
    if (place == ids.size()) continue;
    if (count < ids.size()) ++count;
    for (std::size_t i = count - 1; i > place; --i) ids[i] = ids[i - 1];
    ids[place] = static_cast<std::int32_t>(expert);
  }
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i)
    sum += static_cast<double>(scores[static_cast<std::size_t>(ids[i])]);
  for (std::size_t i = 0; i < count; ++i) {
    double weight = scores[static_cast<std::size_t>(ids[i])];
    if (ids.size() > 1) weight /= sum + 1e-20;
    weights[i] = static_cast<float>(weight * static_cast<double>(route_scale));
  }
}

void select_groups(std::span<const BFloat16> scores, std::size_t count, std::span<const std::uint8_t> mask,
                   std::size_t mask_block, std::vector<std::int32_t>& out) {
  out.clear();
  const std::size_t block = mask.empty() ? std::max<std::size_t>(scores.size(), 1) : mask_block;
  const auto for_each = [&](const auto& visit) {
    for (std::size_t begin = 0, b = 0; begin < scores.size(); begin += block, ++b) {
      if (!mask.empty() && mask[b] == 0) continue;
      const std::size_t end = std::min(begin + block, scores.size());
      for (std::size_t i = begin; i < end; ++i) {
        const std::uint16_t key = ordered_key(scores[i]);
        if (key != kExcluded) visit(i, key);
      }
    }
  };
  choose(count, for_each, [&](std::size_t index) { out.push_back(static_cast<std::int32_t>(index)); });
}

void select_blocks(std::span<const BFloat16> scores, std::size_t block, std::size_t count,
                   std::vector<std::uint8_t>& mask) {
  const std::size_t blocks = ceil_div(scores.size(), block);
  mask.assign(blocks, 0);
  thread_local std::vector<std::uint16_t> keys;
  keys.resize(blocks);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t end = std::min((b + 1) * block, scores.size());
    std::uint16_t best = kExcluded;
    for (std::size_t i = b * block; i < end; ++i) best = std::max(best, ordered_key(scores[i]));
    keys[b] = best;
  }
  // The newest block is only partly filled: a full, older one could outscore the most recent tokens.
  if (blocks > 0) keys[blocks - 1] = kInfinityKey;
  const auto for_each = [&](const auto& visit) {
    for (std::size_t b = 0; b < blocks; ++b) {
      if (keys[b] != kExcluded) visit(b, keys[b]);
    }
  };
  choose(count, for_each, [&](std::size_t b) { mask[b] = 1; });
}

}  // namespace dsv41
