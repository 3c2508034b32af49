// Speculation never changes the output: whatever drafts say, tokens, logits and the state of the sequence are
// those of serial decoding.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/drafter.h"
#include "runtime/scheduler.h"
#include "tests/runtime/support/local_model.h"

namespace dsv41::test {
namespace {

using Mode = SpeculationOptions::Mode;

struct Outcome {
  std::vector<std::uint32_t> ids;
  std::string text;
  FinishReason finish;
  std::vector<float> logits;
  std::uint32_t drafted, accepted, steps;
};

struct Served {
  std::map<std::string, Outcome> outcomes;
  SpeculationCounts counts;
};

Served run(LocalModel& model, const std::vector<GenerationRequest>& requests, SchedulerOptions options,
           DraftSource* drafts, bool logits = true) {
  Served result;
  Scheduler scheduler(model.backbone, model.config(), model.host.tokenizer(), options, drafts);
  for (const GenerationRequest& request : requests) {
    Outcome& outcome = result.outcomes[request.id];
    RequestCallbacks callbacks;
    if (logits)
      callbacks.on_logits = [&outcome](std::span<const std::uint32_t>, std::span<const float> rows) {
        outcome.logits.insert(outcome.logits.end(), rows.begin(), rows.end());
      };
    callbacks.on_finish = [&outcome](const GenerationResult& done) {
      outcome.ids = done.output_ids;
      outcome.text = done.text;
      outcome.finish = done.finish;
      outcome.drafted = done.drafted;
      outcome.accepted = done.accepted;
      outcome.steps = done.decode_steps;
    };
    scheduler.submit(request, callbacks);
  }
  while (scheduler.step()) {
  }
  result.counts = scheduler.speculation();
  return result;
}

void expect_equal(const Served& got, const Served& expected, const std::string& what) {
  for (const auto& [id, outcome] : expected.outcomes) {
    const Outcome& other = got.outcomes.at(id);
    EXPECT_EQ(other.ids, outcome.ids) << what << " " << id;
    EXPECT_EQ(other.text, outcome.text) << what << " " << id;
    EXPECT_EQ(other.finish, outcome.finish) << what << " " << id;
    ASSERT_EQ(other.logits.size(), outcome.logits.size()) << what << " " << id;
    EXPECT_EQ(std::memcmp(other.logits.data(), outcome.logits.data(), outcome.logits.size() * sizeof(float)),
              0)
        << what << " " << id;
  }
}

/// Prompts of a bundled checkpoint, greedy and at several temperatures; some with stop texts.
std::vector<GenerationRequest> requests(const LocalModel& model, std::size_t count, std::uint32_t tokens,
                                        bool ignore_eos) {
  const char* prompts[] = {"The capital of France is",  "Canada is in", "The",
                           "What colour is the grass?", "2 plus 3 is",  "Experts are sharded by id."};
  std::vector<GenerationRequest> all;
  for (std::size_t i = 0; i < count; ++i) {
    GenerationRequest request;
    request.id = std::to_string(i);
    request.prompt = model.host.tokenizer().encode(prompts[i % std::size(prompts)]);
    request.prompt.insert(request.prompt.begin(), 0u);
    request.max_tokens = tokens - static_cast<std::uint32_t>(i % 5);
    request.ignore_eos = ignore_eos;
    request.sampling = {std::array{0.0, 0.3, 0.8, 1.3}[i % 4], i % 8 < 4 ? 1.0 : 0.9, i};
    if (i % 7 == 6) request.stop = {"a", "is the"};
    all.push_back(request);
  }
  return all;
}

class Speculating : public ::testing::TestWithParam<const char*> {};

TEST_P(Speculating, ChangesNothing) {
  LocalModel model(bundled(GetParam()), 96, 2, "auto");
  Drafter drafter(model.host.context(), *model.experts, 8);
  const auto all = requests(model, 24, 24, true);
  SchedulerOptions options{1, 96, 64};
  const Served serial = run(model, all, options, nullptr);
  for (const std::size_t length : {1u, 3u, 5u}) {
    for (const std::size_t batch : {1u, 8u}) {
      options.batch = batch;
      options.chunk = batch == 1 ? 64 : 5;
      options.speculation = {Mode::Fixed, length};
      const Served speculative = run(model, all, options, &drafter);
      expect_equal(speculative, serial, std::to_string(length) + " drafts, batch " + std::to_string(batch));
      EXPECT_GT(speculative.counts.drafted, 0u);
    }
  }
  options.speculation = {Mode::Auto, 0};
  expect_equal(run(model, all, options, &drafter), serial, "auto");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Speculating, ::testing::Values("mini", "capitals"));

TEST(Speculation, TrainedDraftsSaveMostSteps) {
  LocalModel model(bundled("capitals"), 160, 2, "auto");
  Drafter drafter(model.host.context(), *model.experts, 1);
  std::ifstream file(std::filesystem::path(DSV41_TEST_DATA) / "forward/capitals.json");
  std::vector<GenerationRequest> all;
  const nlohmann::json golden = nlohmann::json::parse(file);
  for (const auto& one : golden["greedy"]) {
    GenerationRequest request;
    request.id = std::to_string(all.size());
    request.prompt = one["prompt_ids"].get<std::vector<std::uint32_t>>();
    request.max_tokens = 64;
    all.push_back(request);
  }
  SchedulerOptions options{1, 160, 128};
  options.speculation = {Mode::Fixed, 5};
  std::size_t tokens = 0, steps = 0;
  for (const auto& [id, outcome] : run(model, all, options, &drafter, false).outcomes) {
    tokens += outcome.ids.size();
    steps += outcome.steps;
  }
  EXPECT_LT(steps * 2, tokens);
}

// ---- drafts from outside: always right, always wrong, and the state of the sequence after every step
// ---------------

/// Everything that a sequence's future depends on.
void expect_same_state(Sequence& a, Sequence& b, const ModelConfig& config, std::uint32_t blocks) {
  ASSERT_EQ(a.length(), b.length());
  const std::uint32_t length = a.length(), dim = config.head_dim;
  const auto same = [](const auto* x, const auto* y, std::size_t count) {
    return std::memcmp(x, y, count * sizeof *x) == 0;
  };
  for (std::uint32_t block = 0; block < blocks; ++block)
    for (std::uint32_t position = length - std::min(length, config.window_size); position < length;
         ++position) {
      const auto x = a.window(block).entry(position), y = b.window(block).entry(position);
      ASSERT_TRUE(same(x.codes, y.codes, dim) && same(x.scales, y.scales, dim / 32))
          << "block " << block << " at " << position;
    }
  for (const std::uint32_t layer : config.kv_source_layers) {
    CompressedCache &x = a.compressed(layer), &y = b.compressed(layer);
    ASSERT_EQ(x.groups(), y.groups());
    for (std::size_t group = 0; group < x.groups(); ++group) {
      ASSERT_TRUE(same(x.codes(group), y.codes(group), dim / 2) &&
                  same(x.scales(group), y.scales(group), dim / 16));
      const auto k = x.keys(group, 1), l = y.keys(group, 1);
      ASSERT_TRUE(same(k.codes, l.codes, config.index_head_dim / 2) &&
                  same(k.scales, l.scales, config.index_head_dim / 32));
    }
    for (std::uint32_t position = length - length % x.ratio(); position < length; ++position) {
      ASSERT_TRUE(same(x.pending_u(position).data(), y.pending_u(position).data(), dim));
      ASSERT_TRUE(same(x.pending_z(position).data(), y.pending_z(position).data(), dim));
    }
  }
  HashedToken p[4], q[4];
  ASSERT_EQ(a.recent(length - 1, p), b.recent(length - 1, q));
  for (std::size_t i = 0; i < std::min<std::size_t>(4, length); ++i)
    ASSERT_EQ(p[i].compressed, q[i].compressed);
}

/// Knows what serial decoding says, and proposes it: all of it, none of it, or a mixture.
class Oracle : public DraftSource {
 public:
  enum class Kind { Right, Wrong, Mixed };
  Oracle(LocalModel& model, std::vector<std::uint32_t> all, Kind kind)
      : model_(model), all_(std::move(all)), kind_(kind), serial_(model.config()) {}

  std::size_t block_size() const override { return 5; }
  std::size_t capacity() const override { return 1; }
  void seed(const Step&, std::span<const BFloat16>) override {}
  void draft(std::uint64_t, std::span<const Ask> asks) override {
    Sequence& sequence = *asks[0].sequence;
    while (serial_.length() < sequence.length()) {
      step_.clear();
      step_.add(serial_, std::span(all_).subspan(serial_.length(), 1), 0);
      model_.backbone.forward(step_);
    }
    expect_same_state(sequence, serial_, model_.config(), model_.config().n_layers);
    ++checks;
    for (std::size_t i = 0; i < 5; ++i) {
      const std::size_t at = sequence.length() + 1 + i;
      const std::uint32_t right = at < all_.size() ? all_[at] : 3;
      const bool wrong = kind_ == Kind::Wrong || (kind_ == Kind::Mixed && (sequence.length() + i) % 4 == 3);
      tokens_[i] = wrong ? (right + 1) % 768 : right;
    }
  }
  std::span<const std::uint32_t> tokens(std::size_t) const override { return tokens_; }
  std::span<const float> confidence(std::size_t) const override { return confidence_; }
  std::size_t checks = 0;

 private:
  LocalModel& model_;
  std::vector<std::uint32_t> all_;
  Kind kind_;
  Sequence serial_;
  Step step_;
  std::array<std::uint32_t, 5> tokens_{};
  std::array<float, 5> confidence_{};
};

TEST(Speculation, StateAndOutputAreSerialWhateverTheDrafts) {
  LocalModel model(bundled("mini"), 96, 2, "auto");
  GenerationRequest request;
  request.id = "x";
  request.prompt = {0, 54, 262, 344, 489, 431, 618, 85, 281, 467, 638};
  request.max_tokens = 60;
  request.ignore_eos = true;
  request.sampling = {0.8, 1, 4};
  SchedulerOptions options{1, 96, 64};
  const Served serial = run(model, {request}, options, nullptr);
  std::vector<std::uint32_t> all = request.prompt;
  all.insert(all.end(), serial.outcomes.at("x").ids.begin(), serial.outcomes.at("x").ids.end());

  options.speculation = {Mode::Fixed, 5};
  for (const auto kind : {Oracle::Kind::Right, Oracle::Kind::Wrong, Oracle::Kind::Mixed}) {
    Oracle oracle(model, all, kind);
    const Served speculative = run(model, {request}, options, &oracle);
    expect_equal(speculative, serial, "oracle");
    EXPECT_GE(oracle.checks, 10u);
    const auto& outcome = speculative.outcomes.at("x");
    if (kind == Oracle::Kind::Right) {
      EXPECT_EQ(outcome.accepted, outcome.drafted);
    } else if (kind == Oracle::Kind::Wrong) {
      EXPECT_EQ(outcome.accepted, 0u);
    }
  }
}

}  // namespace
}  // namespace dsv41::test
