// The forward pass against the released reference's arithmetic (tests/data/forward), and its invariances.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/scheduler.h"
#include "tests/runtime/support/local_model.h"
#include "tests/support/golden.h"

namespace dsv41::test {
namespace {

nlohmann::json read_json(const std::string& relative) {
  std::ifstream file(std::filesystem::path(DSV41_TEST_DATA) / relative);
  return nlohmann::json::parse(file);
}

std::vector<std::uint32_t> to_ids(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

void expect_close(std::span<const float> got, std::span<const float> expected, std::uint64_t ulps,
                  const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    if (ulp_distance(got[i], expected[i]) > ulps && wrong++ == 0)
      ADD_FAILURE() << what << "[" << i << "] is " << got[i] << ", expected " << expected[i];
  EXPECT_EQ(wrong, 0u) << what << ": values that differ, of " << got.size();
}

LocalModel& mini() {
  static LocalModel model(bundled("mini"), 600);
  return model;
}

class GoldenLogits : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenLogits, EqualTheReference) {
  const Golden golden(std::string("forward/forward_") + GetParam() + ".safetensors");
  const auto ids = to_ids(golden.values<std::int32_t>("ids"));
  const auto expected = golden.values<float>("logits");
  const auto logits = mini().all_logits(ids, ids.size());
  const std::span<const float> tail =
      std::span(logits).last(expected.size());  // "long" has only its last rows
  expect_close(tail, expected, 2, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Prompts, GoldenLogits,
                         ::testing::Values("short", "one_token", "two", "trace", "mixed", "repeat", "code",
                                           "long"),
                         [](const auto& prompt) { return std::string(prompt.param); });

/// Keeps every observed tensor under "layers.L.name".
class Trace : public Observer {
 public:
  void tensor(std::string_view name, int layer, std::span<const BFloat16> values) override {
    bf16[key(name, layer)].assign(values.begin(), values.end());
  }
  void tensor(std::string_view name, int layer, std::span<const float> values) override {
    f32[key(name, layer)].assign(values.begin(), values.end());
  }
  void tensor(std::string_view name, int layer, std::span<const std::int32_t> values) override {
    i32[key(name, layer)].assign(values.begin(), values.end());
  }
  std::map<std::string, std::vector<BFloat16>> bf16;
  std::map<std::string, std::vector<float>> f32;
  std::map<std::string, std::vector<std::int32_t>> i32;

 private:
  static std::string key(std::string_view name, int layer) {
    return layer < 0 ? std::string(name) : "layers." + std::to_string(layer) + "." + std::string(name);
  }
};

TEST(GoldenTrace, EveryIntermediateEqualsTheReference) {
  const Golden golden("forward/forward_trace.safetensors");
  const auto ids = to_ids(golden.values<std::int32_t>("ids"));
  LocalModel& model = mini();
  Trace trace;
  model.host.observe(&trace);
  model.all_logits(ids, ids.size());
  model.host.observe(nullptr);

  // Which tensors a layer must have shown; the rest depends on its mode.
  for (std::uint32_t layer = 0; layer < model.config().n_layers; ++layer)
    for (const char* name :
         {"x_in", "x_mid", "x_out", "attn_in", "attn_out", "ffn_in", "ffn_out", "attn.q", "attn.core_out"})
      EXPECT_TRUE(trace.bf16.contains("layers." + std::to_string(layer) + "." + name))
          << layer << " " << name;
  EXPECT_TRUE(trace.bf16.contains("main_hidden"));
  EXPECT_TRUE(trace.bf16.contains("final.collapsed"));
  EXPECT_TRUE(trace.i32.contains("layers.8.index.selected"));
  EXPECT_TRUE(trace.i32.contains("layers.6.index.candidates"));

  for (const auto& [name, values] : trace.bf16) {
    const auto expected = golden.values<BFloat16>(name);
    ASSERT_EQ(values.size(), expected.size()) << name;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) wrong += to_float(values[i]) != to_float(expected[i]);
    EXPECT_EQ(wrong, 0u) << name << " of " << values.size();
  }
  for (const auto& [name, values] : trace.f32) expect_close(values, golden.values<float>(name), 2, name);
  for (const auto& [name, values] : trace.i32)
    if (!name.ends_with("index.candidates")) {
      EXPECT_EQ(values, golden.values<std::int32_t>(name)) << name;
    }

  // The reference marks candidate groups of every token; the runtime keeps the candidate blocks.
  const auto mask = golden.values<std::uint8_t>("layers.6.index.candidates");
  const auto& blocks = trace.i32["layers.6.index.candidates"];
  const std::size_t groups = ids.size(), block = model.config().candidate_block_size;
  const std::size_t slots = model.config().candidate_topk_blocks;
  for (std::size_t row = 0; row < ids.size(); ++row)
    for (std::size_t group = 0; group <= row; ++group) {
      bool chosen = false;
      for (std::size_t i = 0; i < slots; ++i)
        chosen |= blocks[row * slots + i] == static_cast<std::int32_t>(group / block);
      EXPECT_EQ(chosen, mask[row * groups + group] != 0) << "row " << row << " group " << group;
    }
}

void expect_greedy(LocalModel& model, const nlohmann::json& cases) {
  ASSERT_FALSE(cases.empty());
  for (const auto& one : cases) {
    const auto prompt = one["prompt_ids"].get<std::vector<std::uint32_t>>();
    const auto expected = one["output_ids"].get<std::vector<std::uint32_t>>();
    GenerationRequest request;
    request.prompt = prompt;
    request.max_tokens = static_cast<std::uint32_t>(expected.size());
    request.ignore_eos = expected.back() != model.config().eos_id();
    Scheduler scheduler(model.backbone, model.config(), model.host.tokenizer(), {});
    GenerationResult result;
    std::string text;
    RequestCallbacks callbacks;
    callbacks.on_text = [&](const std::string& piece) { text += piece; };
    callbacks.on_finish = [&](const GenerationResult& finished) { result = finished; };
    scheduler.submit(request, callbacks);
    while (scheduler.step()) {
    }
    EXPECT_EQ(result.text, text);
    EXPECT_EQ(result.output_ids, expected);
    EXPECT_EQ(text, one["text"].get<std::string>());
    if (one.contains("prompt")) {
      auto ids = model.host.tokenizer().encode(one["prompt"].get<std::string>());
      ids.insert(ids.begin(), model.config().bos_id());
      EXPECT_EQ(ids, prompt);
    }
  }
}

TEST(GoldenGreedy, MiniEqualsTheReference) {
  expect_greedy(mini(), read_json("forward/prompts.json")["greedy"]);
}

TEST(GoldenGreedy, CapitalsEqualsTheReference) {
  LocalModel model(bundled("capitals"));
  expect_greedy(model, read_json("forward/capitals.json")["greedy"]);
  const Golden golden("forward/capitals_logits.safetensors");
  const auto ids = to_ids(golden.values<std::int32_t>("ids"));
  expect_close(model.all_logits(ids, ids.size()), golden.values<float>("logits"), 2, "capitals");
}

// ---- invariances: equalities of bits, not tolerances
// --------------------------------------------------------------

std::vector<std::uint32_t> long_prompt() {
  return to_ids(Golden("forward/forward_mixed.safetensors").values<std::int32_t>("ids"));
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

TEST(Invariance, AnyChunkGivesTheSameBits) {
  const auto ids = long_prompt();
  const auto whole = mini().all_logits(ids, ids.size());
  for (const std::size_t chunk : {1u, 2u, 3u, 7u, 16u, 17u, 64u})
    EXPECT_TRUE(same_bits(mini().all_logits(ids, chunk), whole)) << "chunk " << chunk;
}

TEST(Invariance, AnyNumberOfThreadsGivesTheSameBits) {
  const auto ids = long_prompt();
  LocalModel one(bundled("mini"), 600, 1), three(bundled("mini"), 600, 3);
  EXPECT_TRUE(same_bits(one.all_logits(ids, 16), three.all_logits(ids, 16)));
}

TEST(Invariance, EveryBackendGivesTheSameBits) {
  const auto ids = long_prompt();
  const auto plain = mini().all_logits(ids, 16);
  for (std::size_t i = 0; i < backend_count(); ++i) {
    if (!backend(i).usable) continue;
    LocalModel model(bundled("mini"), 600, 2, backend(i).ops->name);
    EXPECT_TRUE(same_bits(model.all_logits(ids, 16), plain)) << backend(i).ops->name;
    EXPECT_TRUE(same_bits(model.all_logits(ids, 1), plain)) << backend(i).ops->name;
  }
}

TEST(Invariance, SequencesOfABatchGetTheBitsTheyGetAlone) {
  LocalModel& model = mini();
  const auto a = long_prompt();
  const auto b = to_ids(Golden("forward/forward_code.safetensors").values<std::int32_t>("ids"));
  const auto alone_a = model.all_logits(a, a.size());
  const auto alone_b = model.all_logits(b, b.size());

  // Uneven chunks of both in every step: decode rows of one beside prefill rows of the other.
  Sequence first_sequence(model.config()), second_sequence(model.config());
  std::vector<float> got_a, got_b;
  Step step;
  std::size_t done_a = 0, done_b = 0;
  for (std::size_t turn = 0; done_a < a.size() || done_b < b.size(); ++turn) {
    const std::size_t take_a = std::min<std::size_t>(turn % 3 == 0 ? 1 : 5, a.size() - done_a);
    const std::size_t take_b = std::min<std::size_t>(turn % 2 == 0 ? 7 : 1, b.size() - done_b);
    step.clear();
    if (take_b > 0) step.add(second_sequence, std::span(b).subspan(done_b, take_b), take_b);
    if (take_a > 0) step.add(first_sequence, std::span(a).subspan(done_a, take_a), take_a);
    const auto logits = model.backbone.forward(step);
    const std::size_t split = take_b * model.config().vocab_size;
    got_b.insert(got_b.end(), logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(split));
    got_a.insert(got_a.end(), logits.begin() + static_cast<std::ptrdiff_t>(split), logits.end());
    done_a += take_a;
    done_b += take_b;
  }
  EXPECT_TRUE(same_bits(got_a, alone_a));
  EXPECT_TRUE(same_bits(got_b, alone_b));
}

TEST(Invariance, StepsInTwoHalvesGiveTheSameBits) {
  LocalModel& model = mini();
  const auto ids = long_prompt();
  const auto expected = model.all_logits(ids, ids.size());
  model.backbone.set_overlap(Overlap::Mode::Always);
  for (const std::size_t chunk : {2u, 3u, 16u, 600u})
    EXPECT_TRUE(same_bits(model.all_logits(ids, chunk), expected)) << "chunk " << chunk;
  model.backbone.set_overlap(Overlap::Mode::Never);
}

TEST(Invariance, RolledBackTokensLeaveNoTrace) {
  LocalModel& model = mini();
  const auto ids = long_prompt();
  const std::size_t width = model.config().vocab_size;
  const auto expected = model.all_logits(ids, ids.size());
  Sequence sequence(model.config());
  Step step;
  const std::vector<std::uint32_t> wrong = {7, 300, 7, 41, 500};
  for (std::size_t done = 0; done < ids.size(); ++done) {
    const std::size_t detour = done % (wrong.size() + 1);  // 0 … 5 wrong tokens, taken back
    if (detour > 0) {
      step.clear();
      step.add(sequence, std::span(wrong).first(detour), 0);
      model.backbone.forward(step);
      sequence.rollback(static_cast<std::uint32_t>(done));
    }
    step.clear();
    step.add(sequence, std::span(ids).subspan(done, 1), 1);
    ASSERT_TRUE(same_bits(model.backbone.forward(step), std::span(expected).subspan(done * width, width)))
        << done;
  }
}

}  // namespace
}  // namespace dsv41::test
