// Draft stages against the released reference's arithmetic (tests/data/forward/dspark.safetensors).
#include <gtest/gtest.h>

#include "runtime/drafter.h"
#include "tests/runtime/support/local_model.h"
#include "tests/support/golden.h"

namespace dsv41::test {
namespace {

std::vector<std::uint32_t> to_ids(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

class GoldenDrafts : public ::testing::TestWithParam<std::size_t> {};  // rows per prefill step

TEST_P(GoldenDrafts, EqualTheReference) {
  const Golden golden("forward/dspark.safetensors");
  LocalModel model(bundled("mini"), 64, 2, "auto");
  Drafter drafter(model.host.context(), *model.experts, 3);
  Sequence sequence(model.config());
  const auto prompt = to_ids(golden.values<std::int32_t>("prompt_ids"));
  Step step;
  for (std::size_t done = 0; done < prompt.size();) {
    const std::size_t rows = std::min(GetParam(), prompt.size() - done);
    step.clear();
    step.add(sequence, std::span(prompt).subspan(done, rows), 0, static_cast<std::uint32_t>(prompt.size()));
    model.backbone.forward(step);
    drafter.seed(step, model.backbone.main_hidden());
    done += rows;
  }
  for (std::size_t i = 0; i < 10; ++i) {
    const std::string name = "step" + std::to_string(i) + ".";
    const auto input = to_ids(golden.values<std::int32_t>(name + "input_token"));
    ASSERT_EQ(sequence.length(),
              static_cast<std::uint32_t>(golden.values<std::int32_t>(name + "position")[0]));
    step.clear();
    step.add(sequence, input, 1);
    model.backbone.forward(step);
    EXPECT_EQ(std::vector<BFloat16>(model.backbone.main_hidden().begin(), model.backbone.main_hidden().end()),
              golden.values<BFloat16>(name + "main_hidden"));
    drafter.seed(step, model.backbone.main_hidden());

    // Other sequences may draft in the same call.
    Sequence other = sequence;
    const auto next = to_ids(golden.values<std::int32_t>(name + "next_token"))[0];
    const std::vector<Drafter::Ask> asks = {{&other, next + 1, {}}, {&sequence, next, {}}};
    drafter.draft(i, asks);
    std::vector<std::uint32_t> ids = {next};
    ids.insert(ids.end(), drafter.tokens(1).begin(), drafter.tokens(1).end());
    EXPECT_EQ(ids, to_ids(golden.values<std::int32_t>(name + "draft_ids"))) << name;
    const auto expect_close = [&](std::span<const float> got, const std::string& what) {
      const auto expected = golden.values<float>(name + what);
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t j = 0; j < got.size(); ++j)
        ASSERT_LE(ulp_distance(got[j], expected[j]), 2u)
            << name << what << " " << j << ": " << got[j] << " " << expected[j];
    };
    expect_close(drafter.logits(1), "draft_logits");
    expect_close(drafter.confidence(1), "confidence");
  }
}

INSTANTIATE_TEST_SUITE_P(Chunks, GoldenDrafts, ::testing::Values(60, 7, 1));

}  // namespace
}  // namespace dsv41::test
