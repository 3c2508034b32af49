// Experts on other ranks give the bits of experts in this process: any ranks, placement, rows, blocks and
// reply order.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "runtime/expert_rank.h"
#include "runtime/experts.h"
#include "tests/mpi/support/world.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using testing::RandomCall;
using testing::RandomExperts;
using testing::small_config;
using testing::world;

std::vector<std::uint16_t> bits(std::span<const BFloat16> values) {
  std::vector<std::uint16_t> all;
  for (const BFloat16 value : values) all.push_back(value.bits);
  return all;
}

/// Computes on the CPU, later than it could: ranks with low numbers answer last.
class SlowEngine final : public ExpertEngine {
 public:
  SlowEngine(std::unique_ptr<ExpertEngine> inner, std::chrono::microseconds delay)
      : inner_(std::move(inner)), delay_(delay) {}
  const ExpertGeometry& geometry() const override { return inner_->geometry(); }
  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override {
    std::this_thread::sleep_for(delay_);
    inner_->compute(call, outputs, timing, alive);
  }
  std::string describe() const override { return inner_->describe(); }

 private:
  std::unique_ptr<ExpertEngine> inner_;
  std::chrono::microseconds delay_;
};

struct Trial {
  ModelConfig config = small_config();
  std::string placement = "cyclic";
  std::uint32_t max_rows = 64;
  std::chrono::microseconds delay_per_rank{0};
};

/// Runs body(remote, local) on rank 0 and the loop of an expert rank elsewhere.
template <class Body>
void run(const Trial& trial, Body&& body) {
  Communicator& communicator = world();
  const auto ranks = static_cast<std::uint32_t>(communicator.size() - 1);
  const auto placement = Placement::make(trial.placement, trial.config, ranks);
  const auto limits = ExpertLimits::of(trial.config, trial.max_rows);
  RandomExperts source(trial.config);
  Compute compute(plain_ops(), 1);
  if (communicator.rank() > 0) {
    SlowEngine engine(cpu_engine(source, compute, limits),
                      trial.delay_per_rank * (communicator.size() - communicator.rank()));
    EXPECT_EQ(run_expert_rank(communicator, placement, engine, limits), ExitCode::Ok);
  } else {
    const auto remote = remote_experts(communicator, placement, source.geometry(), limits);
    const auto local = local_experts(source, compute, limits);
    body(*remote, *local);
    remote->close(ExitCode::Ok);
  }
}

std::vector<std::uint16_t> outputs_of(Experts& experts, const RandomCall& call) {
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  experts.begin(call.view());
  experts.finish(outputs);
  return bits(outputs);
}

void all_blocks(const Trial& trial, std::initializer_list<std::uint32_t> row_counts) {
  run(trial, [&](Experts& remote, Experts& local) {
    std::uint64_t step = 0;
    for (const std::uint32_t rows : row_counts) {
      for (std::uint32_t block = 0; block < trial.config.n_blocks(); ++block) {
        ++step;
        const RandomCall call(trial.config, block, rows, step, step % 2 == 0);
        ASSERT_EQ(outputs_of(remote, call), outputs_of(local, call))
            << "block " << block << ", rows " << rows;
      }
    }
  });
}

TEST(Exchange, Cyclic) {
  all_blocks({}, {1, 2, 5, 64});
}

TEST(Exchange, Contiguous) {
  Trial trial;
  trial.placement = "contiguous";
  all_blocks(trial, {1, 3, 33});
}

TEST(Exchange, RandomPlacementFile) {
  Trial trial;
  const auto ranks = static_cast<std::uint32_t>(world().size() - 1);
  // Every rank writes a file of its own: same bytes, no race.
  const auto directory =
      std::filesystem::temp_directory_path() / fmt::format("dsv41-{}-{}", getpid(), world().rank());
  std::filesystem::create_directory(directory);
  trial.placement = "file:" + testing::write_random_placement(trial.config, ranks, 11, directory).string();
  all_blocks(trial, {1, 16});
  std::filesystem::remove_all(directory);
}

TEST(Exchange, RanksWithoutExperts) {
  Trial trial;
  const auto ranks = static_cast<std::uint32_t>(world().size() - 1);
  trial.config = small_config(ranks, 1);  // the draft expert lives on the first rank
  all_blocks(trial, {1, 7});
}

TEST(Exchange, WideRowsAndManyOfThem) {
  Trial trial;
  trial.config = small_config(6, 2, 2560, 32);
  trial.config.n_layers = 1;
  trial.max_rows = 300;  // messages of megabytes: beyond every eager limit
  all_blocks(trial, {300, 1, 299});
}

TEST(Exchange, RepliesInDescendingOrder) {
  Trial trial;
  trial.delay_per_rank = std::chrono::milliseconds(2);
  all_blocks(trial, {8, 1});
}

TEST(Exchange, TwoCallsInFlight) {
  Trial trial;
  trial.config = small_config(11, 4, 1024, 32);
  trial.delay_per_rank = std::chrono::microseconds(300);
  run(trial, [&](Experts& remote, Experts& local) {
    std::vector<RandomCall> calls;
    for (std::uint64_t step = 0; step < 12; ++step)
      calls.emplace_back(trial.config, static_cast<std::uint32_t>(step % trial.config.n_blocks()),
                         step % 3 == 0 ? 64u : 1u, step);
    remote.begin(calls[0].view());
    for (std::size_t index = 0; index < calls.size(); ++index) {
      if (index + 1 < calls.size()) remote.begin(calls[index + 1].view());
      std::vector<BFloat16> outputs(calls[index].routes.size() * calls[index].dim);
      remote.finish(outputs);
      ASSERT_EQ(bits(outputs), outputs_of(local, calls[index])) << "call " << index;
    }
  });
}

}  // namespace
}  // namespace dsv41
