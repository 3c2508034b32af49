// What the recorder keeps and what survives in the file: exact sums, records of ranks, kills, full disks.
#include "runtime/profile/recorder.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>

#include "loader/error.h"
#include "runtime/profile/profile.h"
#include "tests/loader/support/temporary_directory.h"
#include "tests/runtime/profile/support/allocations.h"

namespace dsv41 {
namespace {

constexpr std::uint32_t kBlocks = 5, kExperts = 12, kPerToken = 3, kRanks = 4;

std::string temporary(const std::string& name) {
  return process_directory() / name;
}

RecorderShape shape(bool routes) {
  return {.blocks = kBlocks,
          .experts = kExperts,
          .experts_per_token = kPerToken,
          .ranks = kRanks,
          .max_rows = 16,
          .routes = routes};
}

RunInfo run_info() {
  RunInfo run;
  run.program_version = "0.0";
  run.command_line = "dsv41-mpi --profile";
  run.config = "{}";
  run.transport = "none";
  run.placement = "cyclic";
  run.start_time = "2026-01-01T00:00:00Z";
  run.clock_zero_ns = profile_clock_ns();
  run.layers = kBlocks;
  run.blocks = kBlocks;
  run.experts = kExperts;
  run.experts_per_token = kPerToken;
  run.dim = 64;
  run.hosts.assign(kRanks + 1, "node");
  run.devices.assign(kRanks + 1, "cpu");
  run.clock_offset_ns.assign(kRanks + 1, 0);
  run.clock_error_ns.assign(kRanks + 1, 10);
  run.read_bandwidth.assign(kRanks, 1e9);
  run.expert_capacity.assign(kRanks, 0);
  for (std::uint32_t rank = 1; rank <= kRanks; ++rank) run.rank_numbers.push_back(rank);
  run.owners.assign(kBlocks, {});
  for (auto& block : run.owners)
    for (std::uint32_t expert = 0; expert < kExperts; ++expert) block.push_back(expert % kRanks);
  return run;
}

std::unique_ptr<ProfileFile> profile_file(const std::string& path, bool routes) {
  auto file = std::make_unique<ProfileFile>(path);
  file->start(run_info(), routes);
  return file;
}

std::uint64_t now() {
  return static_cast<std::uint64_t>(profile_clock_ns());
}
void spend(std::int64_t ns) {
  for (const std::int64_t end = profile_clock_ns() + ns; profile_clock_ns() < end;) {
  }
}

/// One step through everything the recorder offers. Expert ids, counts and bytes follow from the step's
/// number.
void record_step(Recorder* recorder, std::uint64_t step, std::uint32_t tokens, std::int64_t work_ns) {
  if (recorder) recorder->begin_step(tokens > 1 ? StepKind::Prefill : StepKind::Decode, step, tokens);
  {
    PhaseTimer embed(recorder, Phase::Embed);
    spend(work_ns);
  }
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    BlockTimer in_block(recorder, block);
    {
      PhaseTimer attention(recorder, Phase::Attention);
      spend(work_ns);
      PhaseTimer indexer(recorder, Phase::Indexer);
      spend(2 * work_ns);
    }
    Route routes[48];
    std::size_t count = 0;
    for (std::uint32_t row = 0; row < tokens; ++row)
      for (std::uint32_t i = 0; i < kPerToken; ++i)
        routes[count++] = {row, static_cast<std::uint32_t>((step + row + block) % 4 + 4 * i),
                           0.25f * static_cast<float>(i + 1)};
    if (recorder) recorder->routes(block, std::span(routes, count));
    PhaseTimer wait(recorder, Phase::ExchangeWait);
    RankReport reports[kRanks - 1];
    for (std::uint32_t rank = 1; rank < kRanks; ++rank) {  // the last rank has no request
      RankReport& report = reports[rank - 1];
      report = {.rank = rank,
                .rows = tokens,
                .routes = rank,
                .bytes_out = 100 * rank,
                .bytes_in = 10 * rank,
                .sent_at_ns = now(),
                .replied_at_ns = 0,
                .timing = {}};
      report.timing = {.received_at_ns = now(),
                       .wait_ns = 5,
                       .receive_ns = 6,
                       .compute_ns = 1000 * rank + step,
                       .send_ns = 7,
                       .bytes_read = 4096,
                       .experts_touched = 2,
                       .cache_hits = 1,
                       .cache_misses = rank};
      report.replied_at_ns = now();
    }
    if (recorder) recorder->exchange(block, reports);
  }
  if (recorder) recorder->end_step({1});
}

TEST(Recorder, ANullRecorderIsNothing) {
  record_step(nullptr, 0, 1, 0);
}

TEST(Recorder, TotalsWithoutAFile) {
  Recorder recorder(shape(false));
  for (std::uint64_t step = 0; step < 100; ++step) record_step(&recorder, step, step == 0 ? 7 : 1, 0);
  const ProfileTotals& totals = recorder.totals();
  EXPECT_EQ(totals.kinds[0].steps, 1u);
  EXPECT_EQ(totals.kinds[0].tokens, 7u);
  EXPECT_EQ(totals.kinds[1].steps, 99u);
  EXPECT_EQ(totals.kinds[1].emitted, 99u);
  EXPECT_EQ(totals.ranks[1].routes, 100u * kBlocks * 2);
  EXPECT_EQ(totals.ranks[3].routes, 0u);
  std::int64_t sum = 0;
  for (const std::int64_t phase : totals.kinds[1].phase_ns) sum += phase;
  EXPECT_EQ(sum, totals.kinds[1].total_ns);
  EXPECT_GT(totals.imbalance(), 1.9);  // 1, 2, 3 and 0 thousand against their mean
  EXPECT_LT(totals.imbalance(), 2.1);
}

TEST(Recorder, PhasesSumExactlyAndInnerPhasesPauseOuterOnes) {
  const std::string path = temporary("recorder_sums.h5");
  {
    Recorder recorder(shape(false), profile_file(path, false));
    for (std::uint64_t step = 0; step < 13; ++step) record_step(&recorder, step, 1, 20'000);
  }
  const Profile profile = read_profile(path);
  ASSERT_EQ(profile.steps, 13u);
  for (std::size_t s = 0; s < profile.steps; ++s) {
    std::int64_t sum = 0;
    for (std::size_t phase = 0; phase < kPhases; ++phase)
      sum += profile.phase_ns(static_cast<Phase>(phase), s);
    EXPECT_EQ(sum, profile.step(StepColumn::Total, s));
    EXPECT_GE(profile.phase_ns(Phase::Embed, s), 20'000);
    EXPECT_GE(profile.phase_ns(Phase::Attention, s), 20'000 * kBlocks);
    EXPECT_GE(profile.phase_ns(Phase::Indexer, s), 40'000 * kBlocks);
    std::int64_t end = profile.step(StepColumn::Start, s);
    for (std::size_t block = 0; block < kBlocks; ++block) {
      std::int64_t layer_sum = 0;
      for (const Phase phase : layer_phases()) layer_sum += profile.layer_phase_ns(phase, s, block);
      EXPECT_EQ(layer_sum, profile.layer(LayerColumn::Total, s, block));
      EXPECT_GE(profile.layer(LayerColumn::Start, s, block), end);
      end = profile.layer(LayerColumn::Start, s, block) + layer_sum;
    }
    EXPECT_GE(profile.step(StepColumn::Start, s) + profile.step(StepColumn::Total, s), end);
  }
}

TEST(Recorder, RankRecordsCountsAndRoutesReadBack) {
  const std::string path = temporary("recorder_ranks.h5");
  constexpr std::size_t steps = 75;
  {
    Recorder recorder(shape(true), profile_file(path, true));
    for (std::uint64_t step = 0; step < steps; ++step) record_step(&recorder, step, step == 0 ? 16 : 1, 0);
    recorder.close();
  }
  const Profile profile = read_profile(path);
  ASSERT_EQ(profile.steps, steps);
  EXPECT_EQ(profile.step(StepColumn::BytesOut, 3), kBlocks * 600);
  EXPECT_EQ(profile.step(StepColumn::BytesIn, 3), kBlocks * 60);
  for (std::size_t s = 0; s < steps; ++s)
    for (std::size_t block = 0; block < kBlocks; ++block) {
      EXPECT_EQ(profile.layer(LayerColumn::Rows, s, block), s == 0 ? 16 : 1);
      EXPECT_FALSE(profile.asked(s, block, 3));
      for (std::size_t r = 0; r < 3; ++r) {
        ASSERT_TRUE(profile.asked(s, block, r));
        EXPECT_EQ(profile.rank(RankColumn::Compute, s, block, r),
                  static_cast<std::int64_t>(1000 * (r + 1) + s));
        EXPECT_EQ(profile.rank(RankColumn::CacheMisses, s, block, r), static_cast<std::int64_t>(r + 1));
        EXPECT_LE(profile.rank(RankColumn::Sent, s, block, r),
                  profile.rank(RankColumn::Received, s, block, r));
        EXPECT_LE(profile.rank(RankColumn::Received, s, block, r),
                  profile.rank(RankColumn::Replied, s, block, r));
      }
    }

  ASSERT_EQ(profile.routes.step.size(), kBlocks * (16 + steps - 1));
  std::vector<std::int64_t> counts(kBlocks * kExperts, 0), even = counts;
  for (std::size_t entry = 0; entry < profile.routes.step.size(); ++entry)
    for (std::size_t i = 0; i < kPerToken; ++i) {
      const std::int64_t step = profile.routes.step[entry], row = profile.routes.row[entry],
                         block = profile.routes.layer[entry];
      const std::int64_t expert = profile.routes.ids[entry * kPerToken + i];
      EXPECT_EQ(expert, (step + row + block) % 4 + 4 * static_cast<std::int64_t>(i));
      EXPECT_EQ(profile.routes.weights[entry * kPerToken + i], 0.25f * static_cast<float>(i + 1));
      counts[static_cast<std::size_t>(block * kExperts + expert)] += 1;
      even[static_cast<std::size_t>(block * kExperts + expert)] += step % 2 == 0;
    }
  EXPECT_EQ(profile.counts, counts);
  EXPECT_EQ(profile.even_counts, even);
}

TEST(Recorder, ABlockThatRunsTwiceInAStepAddsUp) {
  const std::string path = temporary("recorder_twice.h5");
  {
    Recorder recorder(shape(false), profile_file(path, false));
    recorder.begin_step(StepKind::Decode, 0, 1);
    for (int i = 0; i < 2; ++i) {
      BlockTimer block(&recorder, 2);
      RankReport report;
      report.rank = 1;
      report.sent_at_ns = now();
      report.timing.received_at_ns = now();
      report.timing.compute_ns = 50;
      report.replied_at_ns = now();
      recorder.exchange(2, {&report, 1});
    }
    recorder.end_step({1});
  }
  const Profile profile = read_profile(path);
  EXPECT_EQ(profile.rank(RankColumn::Compute, 0, 2, 0), 100);
  EXPECT_LT(profile.rank(RankColumn::Sent, 0, 2, 0), profile.rank(RankColumn::Replied, 0, 2, 0));
}

TEST(Recorder, AStepThatThrowsIsForgotten) {
  const std::string path = temporary("recorder_throw.h5");
  {
    Recorder recorder(shape(false), profile_file(path, false));
    record_step(&recorder, 0, 1, 0);
    try {
      recorder.begin_step(StepKind::Decode, 1, 1);
      BlockTimer block(&recorder, 0);
      PhaseTimer phase(&recorder, Phase::Attention);
      throw PeerError("rank 2 died");
    } catch (const PeerError&) {
    }
    recorder.flush();
    record_step(&recorder, 2, 1, 0);
  }
  const Profile profile = read_profile(path);
  ASSERT_EQ(profile.steps, 2u);
  EXPECT_EQ(profile.step(StepColumn::Step, 1), 2);
}

TEST(Recorder, AStepAllocatesNothing) {
  Recorder recorder(shape(true), profile_file(temporary("recorder_allocations.h5"), true));
  for (std::uint64_t step = 0; step < 7; ++step) {  // fewer than a write takes
    const std::uint64_t before = allocations.load();
    record_step(&recorder, step, 2, 0);
    EXPECT_EQ(allocations.load(), before);
  }
}

/// Runs `body` in a child process; the counter is shared with it.
pid_t fork_child(const std::function<void(std::atomic<std::uint64_t>&)>& body,
                 std::atomic<std::uint64_t>*& counter) {
  void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  counter = new (shared) std::atomic<std::uint64_t>(0);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(60);
    body(*counter);
    _exit(0);
  }
  return child;
}

TEST(Recorder, AKilledWriterLosesAtMostTheLastSteps) {
  const std::string path = temporary("recorder_killed.h5");
  for (int attempt = 0; attempt < 8; ++attempt) {
    std::atomic<std::uint64_t>* done = nullptr;
    const pid_t child = fork_child(
        [&](std::atomic<std::uint64_t>& steps) {
          Recorder recorder(shape(true), profile_file(path, true));
          for (std::uint64_t step = 0;; ++step) {
            record_step(&recorder, step, 1, 1'000);
            steps.store(step + 1);
          }
        },
        done);
    while (done->load() < 60 + 17 * static_cast<std::uint64_t>(attempt)) usleep(50);
    // A reader that looks while the writer runs sees whole steps too.
    const Profile running = read_profile(path);
    EXPECT_GT(running.steps, 0u);
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    const std::uint64_t steps = done->load();
    const Profile profile = read_profile(path);
    EXPECT_LE(profile.steps, steps + 1);
    EXPECT_GE(profile.steps + 512, steps);  // steps of microseconds
    for (std::size_t s = 0; s < profile.steps; ++s)
      ASSERT_EQ(profile.step(StepColumn::Step, s), static_cast<std::int64_t>(s));
  }
}

TEST(Recorder, AFullDiskStopsTheProfileAndNotTheRun) {
  const std::string path = temporary("recorder_full.h5"), said = temporary("recorder_full.txt");
  std::atomic<std::uint64_t>* done = nullptr;
  const pid_t child = fork_child(
      [&](std::atomic<std::uint64_t>& steps) {
        signal(SIGXFSZ, SIG_IGN);  // the write fails instead
        auto file = profile_file(path, false);
        const rlimit limit{700'000, RLIM_INFINITY};  // the first steps take less
        setrlimit(RLIMIT_FSIZE, &limit);
        int warnings = 0;
        std::string line;
        {
          Recorder recorder(shape(false), std::move(file), [&](const std::string& text) {
            ++warnings;
            line = text;
          });
          for (std::uint64_t step = 0; step < 2000; ++step) record_step(&recorder, step, 1, 0);
          recorder.close();
          if (recorder.totals().kinds[1].steps != 2000) _exit(3);
        }
        if (warnings != 1) _exit(4);
        if (line.find("profile stopped before step ") != 0 ||
            line.find("File too large") == std::string::npos) {
          fprintf(stderr, "%s\n", line.c_str());
          _exit(5);
        }
        steps = 2000;
      },
      done);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(done->load(), 2000u);
  const Profile profile = read_profile(path);  // what was written before is there
  EXPECT_GT(profile.steps, 0u);
  for (std::size_t s = 0; s < profile.steps; ++s)
    ASSERT_EQ(profile.step(StepColumn::Step, s), static_cast<std::int64_t>(s));
}

}  // namespace
}  // namespace dsv41
