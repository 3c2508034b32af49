// Experts in a bounded amount of memory: the bits of mapped ones for every amount, whatever was announced,
// and counts of what had to be read.
#include "runtime/expert_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "loader/weights.h"
#include "tests/loader/support/temporary_directory.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using Method = ReadQueueOptions::Method;
using testing::RandomCall;
namespace fs = std::filesystem;

const fs::path kMini = fs::path(DSV41_TEST_CHECKPOINTS) / "mini";

std::vector<std::uint16_t> bits(std::span<const BFloat16> values) {
  std::vector<std::uint16_t> all;
  for (const BFloat16 value : values) all.push_back(value.bits);
  return all;
}

std::vector<std::uint16_t> outputs_of(
    ExpertEngine& engine, const RandomCall& call, RankTiming& timing,
    const std::function<void()>& alive = [] {}) {
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  engine.compute(call.view(), outputs, timing, alive);
  return bits(outputs);
}

/// Memory for that many experts of a store that takes `each` bytes for one.
std::uint64_t slot_bytes(const Checkpoint& checkpoint) {
  ExpertStoreOptions options;
  options.memory_bytes = std::uint64_t{1} << 40;
  const auto store = cached_expert_store(checkpoint, nullptr, 0, options);
  return store->memory_bytes() / store->resident_experts();
}

struct Amount {
  std::uint64_t experts;
  Method method;
};
class BoundedMemory : public ::testing::TestWithParam<Amount> {};

TEST_P(BoundedMemory, GivesTheBitsOfMappedExperts) {
  const Checkpoint checkpoint(kMini);
  const ModelConfig& config = checkpoint.config();
  const auto limits = ExpertLimits::of(config, 40);
  Compute compute(plain_ops(), 2);
  const auto source = checkpoint_experts(checkpoint);
  const auto mapped = cpu_engine(*source, compute, limits);
  ExpertStoreOptions options;
  options.memory_bytes = GetParam().experts * slot_bytes(checkpoint);
  options.method = GetParam().method;
  auto store = cached_expert_store(checkpoint, nullptr, 0, options);
  store->load();
  const ExpertStore::Counters& counters = store->counters();
  const auto engine = cpu_engine(std::move(store), compute, limits);

  std::mt19937_64 draw(GetParam().experts);
  std::uint64_t touched = 0;
  for (int i = 0; i < 120; ++i) {
    const auto block = static_cast<std::uint32_t>(draw() % config.n_blocks());
    const RandomCall call(config, block, 1 + static_cast<std::uint32_t>(draw() % 40), i, true);
    const RandomCall next(config, (block + 1) % config.n_blocks(), 2, i + 1000);
    RankTiming timing, reference;
    if (i % 3 == 1) engine->announce(call.block, call.routes);  // its own routing was known early
    const auto announce_next = [&] {
      if (i % 4 == 2) engine->announce(next.block, next.routes);
    };
    EXPECT_EQ(outputs_of(*engine, call, timing, announce_next), outputs_of(*mapped, call, reference)) << i;
    if (i % 4 == 2) {
      EXPECT_EQ(outputs_of(*engine, next, timing), outputs_of(*mapped, next, reference)) << i;
    }
    EXPECT_EQ(timing.experts_touched, reference.experts_touched);
    EXPECT_EQ(timing.cache_hits + timing.cache_misses, timing.experts_touched);
    EXPECT_EQ(reference.cache_misses, 0u);
    touched += timing.experts_touched;
  }
  EXPECT_EQ(counters.hits + counters.misses, touched);
  EXPECT_GT(counters.misses, 0u);
  EXPECT_GE(counters.read_bytes, counters.misses * source->geometry().expert_bytes());
  if (GetParam().experts >= 92) {  // everything fits: read once
    EXPECT_LE(counters.misses, 92u);
    EXPECT_LT(counters.read_bytes, 92 * 2 * slot_bytes(checkpoint));
  }
}
INSTANTIATE_TEST_SUITE_P(Amounts, BoundedMemory,
                         ::testing::Values(Amount{1, Method::Auto}, Amount{2, Method::Auto},
                                           Amount{5, Method::Auto}, Amount{5, Method::Threads},
                                           Amount{30, Method::Auto}, Amount{92, Method::Auto},
                                           Amount{1000, Method::Threads}),
                         [](const auto& amount) {
                           return std::to_string(amount.param.experts) +
                                  (amount.param.method == Method::Threads ? "_threads" : "");
                         });

TEST(CachedStore, KeepsWhatWasUsedLast) {
  const Checkpoint checkpoint(kMini);
  ExpertStoreOptions options;
  options.memory_bytes = 3 * slot_bytes(checkpoint) + 100;
  const auto store = cached_expert_store(checkpoint, nullptr, 0, options);
  EXPECT_EQ(store->resident_experts(), 3u);
  store->load();
  const auto call = [&](std::uint32_t block, std::vector<std::uint32_t> experts) {
    const ExpertStore::Counters before = store->counters();
    store->begin(block, experts);
    std::vector<std::uint32_t> seen;
    for (auto ready = store->take([] {}); !ready.empty(); ready = store->take([] {})) {
      seen.insert(seen.end(), ready.begin(), ready.end());
      for (const std::uint32_t expert : ready) {
        const ExpertMatrices here = store->matrices(expert),
                             there = expert_weights(checkpoint, block, expert);
        EXPECT_EQ(std::memcmp(here.w2.codes, there.w2.codes, here.w2.n * here.w2.k / 2), 0);
      }
      store->release();
    }
    EXPECT_THAT(seen, ::testing::UnorderedElementsAreArray(experts));
    return std::pair(store->counters().hits - before.hits, store->counters().misses - before.misses);
  };
  using Counts = std::pair<std::uint64_t, std::uint64_t>;
  EXPECT_EQ(call(0, {0, 1}), Counts(0, 2));
  EXPECT_EQ(call(0, {0, 2}), Counts(1, 1));
  EXPECT_EQ(call(1, {0}), Counts(0, 1));  // drives out (0, 1)
  EXPECT_EQ(call(0, {0, 2}), Counts(2, 0));
  EXPECT_EQ(call(0, {1}), Counts(0, 1));  // drives out (1, 0)
  EXPECT_EQ(call(0, {0, 1, 2}), Counts(3, 0));
  EXPECT_EQ(call(0, {0, 1, 2, 3, 4, 5, 6, 7}), Counts(3, 5));
  // Read ahead, and so counted as read, once.
  store->announce(2, std::vector<std::uint32_t>{4});
  EXPECT_EQ(call(2, {4}), Counts(0, 1));
  EXPECT_EQ(call(2, {4}), Counts(1, 0));
}

TEST(CachedStore, ServesTheExpertsOfItsRankOnly) {
  const Checkpoint checkpoint(kMini);
  const Placement placement = Placement::make("cyclic", checkpoint.config(), 2);
  ExpertStoreOptions options;
  options.memory_bytes = 1 << 30;
  const auto store = cached_expert_store(checkpoint, &placement, 1, options);
  EXPECT_EQ(store->resident_experts(), 46u);
  store->load();
  EXPECT_THROW(store->begin(0, std::vector<std::uint32_t>{2}), std::invalid_argument);
  EXPECT_NO_THROW(store->begin(0, std::vector<std::uint32_t>{1, 3}));
}

TEST(CachedStore, SaysWithNumbersThatNothingFits) {
  const Checkpoint checkpoint(kMini);
  ExpertStoreOptions options;
  options.memory_bytes = 2048;
  try {
    cached_expert_store(checkpoint, nullptr, 0, options);
    FAIL() << "2 KiB hold no expert";
  } catch (const ResourceError& error) {
    EXPECT_THAT(error.what(), ::testing::ContainsRegex("--expert-memory: 0.00 MiB .* 0.02 MiB.* 92 "));
  }
}

TEST(CachedStore, NamesAFileThatWasCut) {
  TemporaryDirectory directory;
  fs::copy(kMini, directory.path() / "mini", fs::copy_options::recursive);
  const Checkpoint checkpoint(directory.path() / "mini");
  const fs::path shard = expert_tensor(checkpoint, 3, 5, "w2.weight").file->path();
  ExpertStoreOptions options;
  options.memory_bytes = 1 << 30;
  const auto store = cached_expert_store(checkpoint, nullptr, 0, options);
  store->load();
  fs::permissions(shard, fs::perms::owner_all);
  fs::resize_file(shard, 20000);
  const auto serve = [&] {
    std::vector<std::uint32_t> all = {0, 1, 2, 3, 4, 5, 6, 7};
    store->begin(3, all);
    while (!store->take([] {}).empty()) store->release();
  };
  for (int i = 0; i < 2; ++i) {  // nothing is served afterwards
    try {
      serve();
      FAIL() << "the expert is gone";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(shard.string()));
    }
  }
}

TEST(LocalExperts, AnnounceWhatTheyBegin) {
  const Checkpoint checkpoint(kMini);
  const auto limits = ExpertLimits::of(checkpoint.config(), 8);
  Compute compute(plain_ops(), 1);
  ExpertStoreOptions options;
  options.memory_bytes = 4 * slot_bytes(checkpoint);
  auto store = cached_expert_store(checkpoint, nullptr, 0, options);
  store->load();
  const auto experts = local_experts(cpu_engine(std::move(store), compute, limits));
  const auto source = checkpoint_experts(checkpoint);
  const auto mapped = local_experts(*source, compute, limits);
  const RandomCall first(checkpoint.config(), 0, 8, 1), second(checkpoint.config(), 4, 3, 2);
  for (Experts* one : {experts.get(), mapped.get()}) {
    one->begin(first.view());
    one->begin(second.view());
  }
  for (const RandomCall* call : {&first, &second}) {
    std::vector<BFloat16> got(call->routes.size() * call->dim), expected(got.size());
    experts->finish(got);
    mapped->finish(expected);
    EXPECT_EQ(bits(got), bits(expected));
  }
  EXPECT_GT(experts->residency().misses, 0u);
  EXPECT_EQ(mapped->residency().misses, 0u);
}

}  // namespace
}  // namespace dsv41
