// Choosing (docs/model.md 3 and 4, docs/numerics.md 8). Scores of groups and blocks are bf16: 65,536 ordered
// keys, so that the best `count` are found by counting keys, upper byte first, then the lower byte of the one
// that decides. Of many groups only those are counted whose block may hold one of the best.
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

/// Orders bf16 values as integers; -0 counts as +0; -infinity and NaN come last.
constexpr std::int16_t kLast = -0x8000;
constexpr std::int16_t signed_key(BFloat16 score) {  // no branches: loops over it become vectors
  const auto magnitude = static_cast<std::int16_t>(score.bits & 0x7FFF);
  const auto sign = static_cast<std::int16_t>(-(score.bits >> 15));  // 0 or -1
  const auto value = static_cast<std::int16_t>((magnitude ^ sign) - sign);
  const bool last = (magnitude > 0x7F80) | (value == -0x7F80);
  return last ? kLast : value;
}
/// The same as unsigned integers; what comes last is excluded.
constexpr std::uint16_t unsigned_key(std::int16_t key) {
  return static_cast<std::uint16_t>(key - kLast);
}
static_assert(unsigned_key(kLast) == kExcluded);
static_assert(unsigned_key(signed_key({0x7F80})) == kInfinityKey);

std::uint16_t ordered_key(BFloat16 score) {
  return unsigned_key(signed_key(score));
}
std::uint16_t largest_key(std::span<const BFloat16> scores) {
  std::int16_t largest = kLast;
  for (const BFloat16 score : scores) largest = std::max(largest, signed_key(score));
  return unsigned_key(largest);
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

/// Visits keys that are there already.
template <class Visit>
void visit_keys(std::span<const std::uint16_t> keys, const Visit& visit) {
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (keys[i] != kExcluded) visit(i, keys[i]);
}

/// Block `index` of scores, of which the last one may be shorter.
std::span<const BFloat16> part_of(std::span<const BFloat16> scores, std::size_t block, std::size_t index) {
  return scores.subspan(index * block, std::min(block, scores.size() - index * block));
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
  constexpr std::size_t kBlockOfGroups = 128;
  out.clear();
  const std::size_t block = mask.empty() ? kBlockOfGroups : mask_block;
  thread_local std::vector<std::uint16_t> largest;  // of each block
  largest.resize(ceil_div(scores.size(), block));
  for (std::size_t b = 0; b < largest.size(); ++b)
    largest[b] = mask.empty() || mask[b] != 0 ? largest_key(part_of(scores, block, b)) : kExcluded;
  // As many groups as are wanted have at least the key that this many blocks reach.
  const std::uint32_t bound = find_cut(count, [](const auto& visit) { visit_keys(largest, visit); }).key;
  const auto for_each = [&](const auto& visit) {
    for (std::size_t b = 0; b < largest.size(); ++b) {
      if (largest[b] == kExcluded || largest[b] < bound) continue;
      for (std::size_t i = b * block; i < std::min((b + 1) * block, scores.size()); ++i)
        if (const std::uint16_t key = ordered_key(scores[i]); key != kExcluded) visit(i, key);
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
  for (std::size_t b = 0; b < blocks; ++b) keys[b] = largest_key(part_of(scores, block, b));
  // The newest block is only partly filled: a full, older one could outscore the most recent tokens.
  if (blocks > 0) keys[blocks - 1] = kInfinityKey;
  choose(
      count, [](const auto& visit) { visit_keys(keys, visit); }, [&](std::size_t b) { mask[b] = 1; });
}

}  // namespace dsv41
