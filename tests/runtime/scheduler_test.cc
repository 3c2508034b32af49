// Continuous batching: whatever runs beside a request, it gets the bits it would get alone.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "loader/error.h"
#include "runtime/scheduler.h"
#include "tests/runtime/support/local_model.h"

namespace dsv41::test {
namespace {

LocalModel& mini() {
  static LocalModel model(bundled("mini"), 700, 2, "auto");
  return model;
}

struct Outcome {
  GenerationResult result;
  std::string streamed;
  std::vector<float> logits;
  bool operator==(const Outcome& other) const {
    return result.output_ids == other.result.output_ids && result.text == other.result.text &&
           result.finish == other.result.finish && streamed == other.streamed &&
           logits.size() == other.logits.size() &&
           (logits.empty() ||
            std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0);
  }
};

using Outcomes = std::map<std::string, Outcome>;

Outcomes run(const std::vector<GenerationRequest>& requests, const SchedulerOptions& options, bool logits) {
  LocalModel& model = mini();
  Scheduler scheduler(model.backbone, model.config(), model.host.tokenizer(), options);
  Outcomes outcomes;
  for (const GenerationRequest& request : requests) {
    Outcome& outcome = outcomes[request.id];
    RequestCallbacks callbacks;
    callbacks.on_text = [&outcome](const std::string& piece) { outcome.streamed += piece; };
    callbacks.on_finish = [&outcome](const GenerationResult& result) { outcome.result = result; };
    if (logits)
      callbacks.on_logits = [&outcome](std::span<const std::uint32_t>, std::span<const float> rows) {
        outcome.logits.insert(outcome.logits.end(), rows.begin(), rows.end());
      };
    scheduler.submit(request, callbacks);
  }
  while (scheduler.step()) {
  }
  EXPECT_EQ(scheduler.pending(), 0u);
  return outcomes;
}

/// Mixed lengths, sampling and stop texts; several prompts begin alike.
std::vector<GenerationRequest> mixed_requests(std::size_t count, std::size_t longest) {
  std::mt19937 random(11);
  std::vector<std::uint32_t> shared;
  for (std::size_t i = 0; i < 150; ++i) shared.push_back(3 + random() % 760);
  std::vector<GenerationRequest> requests;
  for (std::size_t i = 0; i < count; ++i) {
    GenerationRequest request;
    request.id = "request " + std::to_string(i);
    request.prompt = {0};
    if (i % 3 == 0)
      request.prompt.insert(request.prompt.end(), shared.begin(), shared.begin() + 20 + random() % 130);
    const std::size_t more = random() % (i % 7 == 0 ? longest : 24);
    for (std::size_t j = 0; j < more; ++j) request.prompt.push_back(3 + random() % 760);
    request.max_tokens = 1 + random() % 12;
    request.ignore_eos = i % 2 == 0;
    if (i % 4 == 1) request.sampling = {0.9, 0.95, i};
    if (i % 5 == 2) request.stop = {"e", "th"};
    requests.push_back(request);
  }
  return requests;
}

void expect_equal(const Outcomes& got, const Outcomes& expected, const char* what) {
  for (const auto& [id, outcome] : expected) EXPECT_TRUE(got.at(id) == outcome) << what << ": " << id;
}

TEST(Scheduler, AnyBatchGivesEveryRequestItsOwnBits) {
  const auto requests = mixed_requests(24, 200);
  const Outcomes expected = run(requests, {1, 512, 512, ~std::size_t{0}, false, false}, true);
  expect_equal(run(requests, {4, 64, 32, ~std::size_t{0}, true, true}, true), expected, "batch 4");
  expect_equal(run(requests, {32, 300, 300, ~std::size_t{0}, true, true}, true), expected, "batch 32");
  expect_equal(run(requests, {32, 7, 3, ~std::size_t{0}, true, true}, true), expected,
               "fewer rows than sequences");
}

TEST(Scheduler, SkippingAndSharingPrefixesChangeNothing) {
  const auto requests = mixed_requests(32, 500);
  const Outcomes expected = run(requests, {1, 512, 512, ~std::size_t{0}, false, false}, false);
  expect_equal(run(requests, {1, 512, 512, ~std::size_t{0}, true, false}, false), expected, "skipping");
  expect_equal(run(requests, {3, 64, 17, ~std::size_t{0}, false, true}, false), expected, "sharing");
  const Outcomes both = run(requests, {8, 128, 64, ~std::size_t{0}, true, true}, false);
  expect_equal(both, expected, "both");
  std::uint32_t reused = 0;
  for (const auto& [id, outcome] : both) reused += outcome.result.reused_tokens;
  EXPECT_GT(reused, 200u);
}

TEST(Scheduler, OrderOfArrivalDoesNotMatter) {
  auto requests = mixed_requests(16, 100);
  const Outcomes expected = run(requests, {4, 64, 32}, false);
  std::shuffle(requests.begin(), requests.end(), std::mt19937(5));
  expect_equal(run(requests, {4, 64, 32}, false), expected, "shuffled");
}

TEST(Scheduler, WaitsForContextMemoryAndRefusesWhatCanNeverFit) {
  const auto requests = mixed_requests(12, 60);
  const Outcomes expected = run(requests, {1, 64, 64}, false);
  SchedulerOptions tight{12, 64, 64};
  tight.context_bytes = 3 * Sequence::bytes_for(mini().config(), 300);
  expect_equal(run(requests, tight, false), expected, "tight memory");

  tight.context_bytes = Sequence::bytes_for(mini().config(), 1) - 1;
  Scheduler scheduler(mini().backbone, mini().config(), mini().host.tokenizer(), tight);
  EXPECT_THROW(scheduler.submit(requests[0], {}), UsageError);
}

TEST(Scheduler, StopEndsEverything) {
  LocalModel& model = mini();
  Scheduler scheduler(model.backbone, model.config(), model.host.tokenizer(), {2, 64, 16});
  std::size_t stopped = 0;
  for (const GenerationRequest& request : mixed_requests(6, 50)) {
    RequestCallbacks callbacks;
    callbacks.on_finish = [&](const GenerationResult& result) {
      stopped += result.finish == FinishReason::Stopped;
    };
    scheduler.submit(request, callbacks);
  }
  scheduler.step();
  scheduler.stop();
  EXPECT_EQ(stopped, 6u);
  EXPECT_EQ(scheduler.pending(), 0u);
  EXPECT_FALSE(scheduler.step());
}

TEST(Scheduler, StopTextsCutTheOutputWhereverTheyAppear) {
  GenerationRequest request;
  request.id = "a";
  request.prompt = {0, 54, 262, 344, 489, 431, 618, 85};
  request.max_tokens = 24;
  request.ignore_eos = true;
  const std::string text = run({request}, {}, false)["a"].result.text;
  ASSERT_GT(text.size(), 20u);
  for (const std::size_t length : {1u, 3u, 9u}) {
    for (std::size_t at = 4; at + length < text.size(); at += 5) {
      request.stop = {text.substr(at, length), "never in the text"};
      const Outcome outcome = run({request}, {}, false)["a"];
      EXPECT_EQ(outcome.result.text, text.substr(0, text.find(request.stop[0])));
      EXPECT_EQ(outcome.streamed, outcome.result.text);
      EXPECT_EQ(outcome.result.finish, FinishReason::Stop);
    }
  }
}

TEST(Scheduler, StateOfASequenceIsAsSmallAsSpecified) {
  const ModelConfig released = read_config(std::filesystem::path(DSV41_TEST_DATA) / "release/config.json");
  const std::size_t few = Sequence::bytes_for(released, 0), many = Sequence::bytes_for(released, 1 << 20);
  EXPECT_EQ((many - few) / (1 << 20), 890u);  // bytes per token over all Full layers
}

}  // namespace
}  // namespace dsv41::test
