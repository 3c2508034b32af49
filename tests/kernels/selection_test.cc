// Selections against sorting, with many ties (docs/numerics.md 8).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/selection.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Inputs;

constexpr float kNone = -std::numeric_limits<float>::infinity();

/// The `count` best values above -infinity, ties to the lowest index, ascending.
std::vector<std::int32_t> best_by_sorting(const std::vector<float>& values, std::size_t count) {
  std::vector<std::int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](std::int32_t i) { return values[static_cast<std::size_t>(i)]; };
  std::erase_if(order, [&](std::int32_t i) { return value(i) == kNone; });
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return value(a) > value(b); });
  order.resize(std::min(order.size(), count));
  std::sort(order.begin(), order.end());
  return order;
}

enum class Spread { Wide, Ties, Equal, Zeros, NegativeHuge, Absent };

std::vector<BFloat16> scores(Inputs& inputs, std::size_t count, Spread spread) {
  std::vector<BFloat16> result(count);
  for (BFloat16& score : result) {
    switch (spread) {
      case Spread::Wide:
        score = to_bfloat16(inputs.gaussian() * std::exp2(inputs.gaussian() * 20));
        break;
      case Spread::Ties:
        score = to_bfloat16(static_cast<float>(inputs.below(5)) - 2.0f);
        break;
      case Spread::Equal:
        score = to_bfloat16(0.25f);
        break;
      case Spread::Zeros:
        score = {static_cast<std::uint16_t>(inputs.below(2) << 15)};
        break;  // -0 equals +0
      case Spread::NegativeHuge:
        score = {static_cast<std::uint16_t>(0xFF7F - inputs.below(300))};
        break;
      case Spread::Absent:
        score = inputs.below(3) == 0 ? to_bfloat16(inputs.gaussian()) : to_bfloat16(kNone);
        break;
    }
  }
  return result;
}

std::vector<float> widened(const std::vector<BFloat16>& values) {
  std::vector<float> result;
  for (const BFloat16 value : values) result.push_back(to_float(value));
  return result;
}

class Selection : public ::testing::TestWithParam<Spread> {};

TEST_P(Selection, GroupsEqualSorting) {
  Inputs inputs(7);
  std::vector<std::int32_t> chosen{42};
  for (const std::size_t groups : {0, 1, 2, 7, 100, 511, 512, 513, 5000}) {
    const auto all = scores(inputs, groups, GetParam());
    for (const std::size_t count : {0, 1, 12, 512}) {
      select_groups(all, count, {}, 0, chosen);
      ASSERT_EQ(chosen, best_by_sorting(widened(all), count)) << count << " of " << groups;
    }
  }
}

TEST_P(Selection, MaskedGroupsEqualSorting) {
  Inputs inputs(8);
  std::vector<std::int32_t> chosen;
  for (const std::size_t groups : {1, 7, 8, 9, 100, 1001}) {
    for (const std::size_t block : {1, 3, 8}) {
      const auto all = scores(inputs, groups, GetParam());
      std::vector<std::uint8_t> mask(ceil_div(groups, block));
      for (std::uint8_t& bit : mask) bit = static_cast<std::uint8_t>(inputs.below(2));
      std::vector<float> visible = widened(all);
      for (std::size_t i = 0; i < groups; ++i)
        if (mask[i / block] == 0) visible[i] = kNone;
      select_groups(all, 20, mask, block, chosen);
      ASSERT_EQ(chosen, best_by_sorting(visible, 20)) << groups << " in blocks of " << block;
    }
  }
}

TEST_P(Selection, BlocksEqualSorting) {
  Inputs inputs(9);
  for (const std::size_t groups : {0, 1, 4, 8, 9, 100, 3001}) {
    for (const std::size_t block : {1, 4, 8}) {
      for (const std::size_t count : {1, 3, 64}) {
        const auto all = scores(inputs, groups, GetParam());
        std::vector<float> best(ceil_div(groups, block), kNone);
        for (std::size_t i = 0; i < groups; ++i)
          best[i / block] = std::max(best[i / block], to_float(all[i]));
        if (!best.empty()) best.back() = std::numeric_limits<float>::infinity();
        std::vector<std::uint8_t> mask(3, 1), expected(best.size(), 0);
        for (const std::int32_t b : best_by_sorting(best, count)) expected[static_cast<std::size_t>(b)] = 1;
        select_blocks(all, block, count, mask);
        ASSERT_EQ(mask, expected) << groups << " in blocks of " << block << ", best " << count;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Spreads, Selection,
                         ::testing::Values(Spread::Wide, Spread::Ties, Spread::Equal, Spread::Zeros,
                                           Spread::NegativeHuge, Spread::Absent),
                         [](const auto& test) { return "Case" + std::to_string(test.index); });

TEST(ChooseExperts, EqualsSorting) {
  Inputs inputs(10);
  for (const std::size_t experts : {1, 3, 16, 384}) {
    for (std::size_t chosen = 1; chosen <= std::min<std::size_t>(experts, 8); ++chosen) {
      std::vector<float> values(experts), bias(experts);
      for (std::size_t e = 0; e < experts; ++e) {
        values[e] = static_cast<float>(1 + inputs.below(6)) / 4;  // ties
        bias[e] = static_cast<float>(inputs.below(4)) / 4;
      }
      std::vector<std::int32_t> order(experts), ids(chosen);
      std::iota(order.begin(), order.end(), 0);
      const auto key = [&](std::int32_t e) {
        return values[static_cast<std::size_t>(e)] + bias[static_cast<std::size_t>(e)];
      };
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return key(a) > key(b); });
      order.resize(chosen);
      std::vector<float> weights(chosen);
      choose_experts(values, bias, 1.5f, ids, weights);
      ASSERT_EQ(ids, order);
      double sum = 0.0;
      for (const std::int32_t e : order) sum += static_cast<double>(values[static_cast<std::size_t>(e)]);
      for (std::size_t i = 0; i < chosen; ++i) {
        const double score = values[static_cast<std::size_t>(order[i])];
        EXPECT_EQ(weights[i], static_cast<float>((chosen > 1 ? score / (sum + 1e-20) : score) * 1.5));
      }
    }
  }
}

TEST(GateScores, SwitchAtTwenty) {
  const std::vector<float> logits{-1000.0f, -100.0f, 0.0f, 20.0f, 20.5f, 1e30f};
  std::vector<float> result(logits.size());
  gate_scores(logits, result);
  EXPECT_EQ(result[0], 0.0f);
  EXPECT_EQ(result[1], static_cast<float>(std::exp(-50.0)));
  EXPECT_EQ(result[2], static_cast<float>(std::sqrt(std::log(2.0))));
  EXPECT_GT(result[3], std::sqrt(20.0f) - 1e-6f);
  EXPECT_EQ(result[4], std::sqrt(20.5f));
  EXPECT_EQ(result[5], static_cast<float>(std::sqrt(static_cast<double>(1e30f))));
}

}  // namespace
}  // namespace dsv41
