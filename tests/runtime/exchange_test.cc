// The exchange with ranks as threads: remote equals local for any ranks, placement and reply order; every
// kind of failure ends all ranks with the right code and a line that names rank and host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "runtime/exchange/messages.h"
#include "runtime/exchange/silence.h"
#include "runtime/expert_rank.h"
#include "runtime/experts.h"
#include "tests/loader/support/temporary_directory.h"
#include "tests/runtime/support/memory_communicator.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::DigestEngine;
using ::testing::HasSubstr;
using testing::RandomCall;
using testing::small_config;

std::vector<std::uint16_t> bits(std::span<const BFloat16> values) {
  std::vector<std::uint16_t> all;
  for (const BFloat16 value : values) all.push_back(value.bits);
  return all;
}

std::vector<std::uint16_t> local_result(const ModelConfig& config, const RandomCall& call) {
  DigestEngine engine(config);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  RankTiming timing;
  engine.compute(call.view(), outputs, timing, [] {});
  return bits(outputs);
}

/// Expert ranks as threads; joined at destruction, exit codes kept.
class Job {
 public:
  Job(const ModelConfig& config, const std::string& placement, std::uint32_t ranks, std::uint32_t max_rows,
      std::chrono::milliseconds timeout = 10s)
      : config_(config),
        limits_(ExpertLimits::of(config, max_rows)),
        geometry_(ExpertGeometry::of(config)),
        placement_(Placement::make(placement, config, ranks)),
        timeout_(timeout),
        communicators_(testing::memory_communicators(static_cast<int>(ranks) + 1)),
        codes_(ranks + 1, ExitCode::Ok) {}
  ~Job() { join(); }

  void start_rank(int rank, std::unique_ptr<ExpertEngine> engine) {
    threads_.emplace_back([this, rank, engine = std::move(engine)] {
      try {
        codes_[static_cast<std::size_t>(rank)] =
            run_expert_rank(communicator(rank), placement_, *engine, limits_, {timeout_});
      } catch (const testing::Aborted& aborted) {
        codes_[static_cast<std::size_t>(rank)] = static_cast<ExitCode>(aborted.exit_code);
      }
    });
  }
  /// Every rank, slower the lower its number, so that replies come in descending order.
  void start_all(std::uint32_t delay_us = 0) {
    for (int rank = 1; rank <= static_cast<int>(placement_.ranks()); ++rank)
      start_rank(rank, std::make_unique<DigestEngine>(
                           config_, delay_us * (placement_.ranks() - static_cast<std::uint32_t>(rank))));
  }
  std::unique_ptr<Experts> host() {
    return remote_experts(communicator(0), placement_, geometry_, limits_, timeout_);
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  Communicator& communicator(int rank) { return *communicators_[static_cast<std::size_t>(rank)]; }
  ExitCode code(int rank) const { return codes_[static_cast<std::size_t>(rank)]; }
  const Placement& placement() const { return placement_; }

 private:
  ModelConfig config_;
  ExpertLimits limits_;
  ExpertGeometry geometry_;
  Placement placement_;
  std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<ExitCode> codes_;
  std::vector<std::thread> threads_;
};

void expect_equal_to_local(Experts& experts, const ModelConfig& config, const RandomCall& call) {
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  experts.begin(call.view());
  experts.finish(outputs);
  EXPECT_EQ(bits(outputs), local_result(config, call)) << "block " << call.block << ", step " << call.step;
}

TEST(Exchange, RemoteEqualsLocal) {
  const auto config = small_config();
  for (const std::uint32_t ranks : {1u, 2u, 4u, 7u, 11u}) {
    const auto file = testing::write_random_placement(config, ranks, ranks, process_directory());
    for (const std::string& placement :
         {std::string("cyclic"), std::string("contiguous"), "file:" + file.string()}) {
      SCOPED_TRACE(placement + ", ranks " + std::to_string(ranks));
      Job job(config, placement, ranks, 20);
      job.start_all();
      const auto experts = job.host();
      std::uint64_t step = 0;
      for (const std::uint32_t rows : {1u, 2u, 20u, 7u})
        for (std::uint32_t block = 0; block < config.n_blocks(); ++block)
          expect_equal_to_local(*experts, config, RandomCall(config, block, rows, ++step, true));
      experts->close(ExitCode::Ok);
      job.join();
      for (int rank = 1; rank <= static_cast<int>(ranks); ++rank) EXPECT_EQ(job.code(rank), ExitCode::Ok);
    }
  }
}

TEST(Exchange, RepliesArriveInAnyOrder) {
  const auto config = small_config();
  Job job(config, "cyclic", 5, 8);
  job.start_all(3000);  // rank 5 answers first
  const auto experts = job.host();
  for (std::uint64_t step = 1; step <= 3; ++step)
    expect_equal_to_local(*experts, config, RandomCall(config, 1, 8, step));
  experts->close(ExitCode::Ok);
}

TEST(Exchange, TwoCallsInFlight) {
  const auto config = small_config();
  Job job(config, "cyclic", 4, 8);
  job.start_all(1000);
  const auto experts = job.host();
  const RandomCall first(config, 0, 8, 1), second(config, 3, 1, 2), third(config, 1, 5, 3);
  const auto finish = [&](const RandomCall& call) {
    std::vector<BFloat16> outputs(call.routes.size() * call.dim);
    experts->finish(outputs);
    EXPECT_EQ(bits(outputs), local_result(config, call));
  };
  experts->begin(first.view());
  experts->begin(second.view());
  EXPECT_THROW(experts->begin(third.view()), std::invalid_argument);
  finish(first);
  experts->begin(third.view());
  finish(second);
  finish(third);
  EXPECT_THROW(finish(third), std::logic_error);
  experts->close(ExitCode::Ok);
}

TEST(Exchange, ACallWithoutRoutesSendsNothing) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4);
  job.start_all();
  const auto experts = job.host();
  ExpertCall call;
  call.x.k = config.dim;
  experts->begin(call);
  experts->finish({});
  EXPECT_TRUE(experts->reports().empty());
  experts->close(ExitCode::Ok);
}

TEST(Exchange, ReportsCountRowsOncePerRankAndExactBytes) {
  const auto config = small_config();
  Job job(config, "cyclic", 3, 8);
  job.start_all();
  const auto experts = job.host();
  const RandomCall call(config, 0, 8, 9);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  experts->begin(call.view());
  experts->finish(outputs);
  std::uint64_t routes = 0;
  for (const RankReport& report : experts->reports()) {
    routes += report.routes;
    EXPECT_LE(report.rows, 8u);
    EXPECT_EQ(report.bytes_out, wire::RequestLayout(report.rows, report.routes, call.dim).bytes);
    EXPECT_EQ(report.bytes_in, wire::ReplyLayout(report.routes, call.dim).bytes);
    EXPECT_LT(report.sent_at_ns, report.replied_at_ns);
    EXPECT_GT(report.timing.compute_ns, 0u);
  }
  EXPECT_EQ(routes, call.routes.size());
  experts->close(ExitCode::Ok);
}

TEST(Exchange, CallsBeyondTheLimitsAreRefusedBeforeAnythingIsSent) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4);
  job.start_all();
  const auto experts = job.host();
  EXPECT_THROW(experts->begin(RandomCall(config, 0, 5, 1).view()), std::invalid_argument);
  RandomCall call(config, 0, 4, 1);
  std::swap(call.routes[0], call.routes[1]);
  EXPECT_THROW(experts->begin(call.view()), std::invalid_argument);
  call = RandomCall(config, 0, 4, 1);
  call.routes[2].expert = 11;
  EXPECT_THROW(experts->begin(call.view()), std::invalid_argument);
  expect_equal_to_local(*experts, config, RandomCall(config, 0, 4, 1));
  experts->close(ExitCode::Ok);
}

// ---- failures
// -------------------------------------------------------------------------------------------------

/// An engine that fails on its second call.
class FailingEngine final : public ExpertEngine {
 public:
  explicit FailingEngine(const ModelConfig& config) : inner_(config) {}
  const ExpertGeometry& geometry() const override { return inner_.geometry(); }
  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override {
    if (++calls_ == 2) throw ResourceError("the device is gone");
    inner_.compute(call, outputs, timing, alive);
  }
  std::string describe() const override { return "failing"; }

 private:
  DigestEngine inner_;
  int calls_ = 0;
};

TEST(ExchangeFailure, AnExpertRankThatFailsTellsTheHost) {
  const auto config = small_config();
  Job job(config, "cyclic", 3, 4);
  job.start_rank(1, std::make_unique<DigestEngine>(config));
  job.start_rank(2, std::make_unique<FailingEngine>(config));
  job.start_rank(3, std::make_unique<DigestEngine>(config));
  const auto experts = job.host();
  experts->set_phase("prefill");
  expect_equal_to_local(*experts, config, RandomCall(config, 0, 4, 1));
  try {
    for (std::uint64_t step = 2; step < 5; ++step)
      expect_equal_to_local(*experts, config, RandomCall(config, 1, 4, step));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::Resources);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 2 (memory2): the device is gone"),
                                    HasSubstr("prefill, block 1, step 2")));
    experts->close(error.code());
  }
  job.join();
  for (int rank = 1; rank <= 3; ++rank) EXPECT_EQ(job.code(rank), ExitCode::Resources);
}

TEST(ExchangeFailure, AMalformedRequestEndsEverybody) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4);
  job.start_all();
  const auto experts = job.host();
  const std::vector<std::byte> garbage(100, std::byte{0x5A});
  job.communicator(0).send(garbage, 2, wire::kRequestTag);
  try {
    for (std::uint64_t step = 1; step < 100; ++step) {
      expect_equal_to_local(*experts, config, RandomCall(config, 0, 4, step));
      std::this_thread::sleep_for(1ms);
    }
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::Peer);
    EXPECT_THAT(error.what(),
                HasSubstr("rank 2 (memory2): malformed message from rank 0 (memory0): magic 0x5a5a5a5a"));
    experts->close(error.code());
  }
  job.join();
  EXPECT_EQ(job.code(1), ExitCode::Peer);
  EXPECT_EQ(job.code(2), ExitCode::Peer);
}

/// Plays rank 1 by hand: takes one request, answers with `reply`, then waits for the end of the job.
void play_rank(Communicator& communicator, const std::vector<std::byte>& reply, int tag, bool farewell) {
  std::vector<std::byte> buffer(1 << 20);
  const auto wait = [&](int from_tag) {
    Request request = communicator.receive(buffer, 0, from_tag);
    std::size_t bytes = 0;
    while (!communicator.test(request, &bytes)) std::this_thread::sleep_for(100us);
    return bytes;
  };
  wait(wire::kRequestTag);
  communicator.send(reply, 0, tag);
  for (;;) {
    const std::size_t bytes = wait(wire::kControlTag);
    if (wire::read_control(std::span(buffer).first(bytes), "host").kind == wire::Kind::Shutdown) break;
  }
  if (!farewell) return;
  std::vector<std::byte> control(wire::kControlBytes);
  communicator.send(wire::write_control(control, wire::Kind::Farewell), 0, wire::kControlTag);
}

struct BadReply {
  const char* name;
  std::size_t bytes;
  int tag;
  const char* message;
};
class ReplyEndsTheJob : public ::testing::TestWithParam<BadReply> {};
TEST_P(ReplyEndsTheJob, WithCodeFive) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4);
  std::thread bad([&] {
    play_rank(job.communicator(1), std::vector<std::byte>(GetParam().bytes, std::byte{1}), GetParam().tag,
              true);
  });
  job.start_rank(2, std::make_unique<DigestEngine>(config));
  const auto experts = job.host();
  const RandomCall call(config, 0, 4, 77);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  experts->set_phase("decode");
  experts->begin(call.view());
  try {
    experts->finish(outputs);
    ADD_FAILURE() << "no error";
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(GetParam().message), HasSubstr("step 77")));
  }
  experts->close(ExitCode::Peer);
  bad.join();
  job.join();
  EXPECT_EQ(job.code(2), ExitCode::Peer);
}
INSTANTIATE_TEST_SUITE_P(
    Cases, ReplyEndsTheJob,
    ::testing::Values(BadReply{"EmptyReply", 0, wire::kReplyTag, "from rank 1 (memory1): 0 bytes"},
                      BadReply{"GarbageReply", 200, wire::kReplyTag, "from rank 1 (memory1): magic"},
                      BadReply{"HugeReply", 1 << 20, wire::kReplyTag, "rank 1"},
                      BadReply{"GarbageControl", 64, wire::kControlTag, "from rank 1 (memory1): magic"},
                      BadReply{"HugeControl", 1 << 16, wire::kControlTag, "rank 1"}),
    [](const auto& instance) { return instance.param.name; });

TEST(ExchangeFailure, ASilentRankIsNamedAfterTheTimeout) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4, 300ms);
  job.start_rank(1, std::make_unique<DigestEngine>(config));
  const auto experts = job.host();  // nobody plays rank 2
  const RandomCall call(config, 0, 4, 5);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  experts->begin(call.view());
  try {
    experts->finish(outputs);
    ADD_FAILURE() << "no error";
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("rank 2 (memory2) has been silent"), HasSubstr("block 0, step 5")));
  }
  try {
    experts->close(ExitCode::Peer);
    ADD_FAILURE() << "the silent rank cannot have confirmed";
  } catch (const testing::Aborted& aborted) {
    EXPECT_EQ(aborted.exit_code, 5);
  }
  job.join();
  EXPECT_EQ(job.code(1), ExitCode::Peer);
}

TEST(ExchangeFailure, ALongComputationIsNotSilence) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4, 400ms);
  job.start_rank(1, std::make_unique<DigestEngine>(config, 1'500'000));
  job.start_rank(2, std::make_unique<DigestEngine>(config));
  const auto experts = job.host();
  expect_equal_to_local(*experts, config, RandomCall(config, 0, 4, 1));
  experts->close(ExitCode::Ok);
  job.join();
  EXPECT_EQ(job.code(1), ExitCode::Ok);
  EXPECT_EQ(job.code(2), ExitCode::Ok) << "the host kept the idle rank informed";
}

TEST(ExchangeFailure, TimeInWhichNobodyLookedIsNotSilence) {
  Silence silence(1600);
  silence.end(1000);
  EXPECT_FALSE(silence.lasts_too_long(1'000'000)) << "stopped meanwhile: counts as 100";
  for (std::uint64_t now = 1'000'100; now <= 1'001'500; now += 100)
    EXPECT_FALSE(silence.lasts_too_long(now)) << now;
  EXPECT_TRUE(silence.lasts_too_long(1'001'501));
  silence.end(1'001'600);
  EXPECT_FALSE(silence.lasts_too_long(1'001'601));
}

/// One long computation and many short ones; a process of its own.
[[noreturn]] void run_job_that_is_stopped() {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4, 400ms);
  job.start_rank(1, std::make_unique<DigestEngine>(config, 1'500'000));
  job.start_rank(2, std::make_unique<DigestEngine>(config));
  try {
    const auto experts = job.host();
    expect_equal_to_local(*experts, config, RandomCall(config, 0, 4, 1));
    experts->close(ExitCode::Ok);
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    _exit(1);
  }
  job.join();
  _exit(job.code(1) == ExitCode::Ok && job.code(2) == ExitCode::Ok && !::testing::Test::HasFailure() ? 0 : 2);
}

TEST(ExchangeFailure, AJobThatWasSuspendedGoesOn) {
  const pid_t job = fork();
  if (job == 0) run_job_that_is_stopped();
  for (int pause = 0; pause < 3; ++pause) {
    std::this_thread::sleep_for(200ms);
    kill(job, SIGSTOP);
    std::this_thread::sleep_for(600ms);
    kill(job, SIGCONT);
  }
  int status = 0;
  ASSERT_EQ(waitpid(job, &status, 0), job);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ExchangeFailure, AHostAtWorkIsNotSilence) {
  const auto config = small_config();
  Job job(config, "cyclic", 1, 4, 400ms);
  job.start_all();
  const auto experts = job.host();
  for (int tick = 0; tick < 100; ++tick) {
    std::this_thread::sleep_for(10ms);
    experts->keep_alive();
  }
  expect_equal_to_local(*experts, config, RandomCall(config, 0, 4, 1));
  experts->close(ExitCode::Ok);
  job.join();
  EXPECT_EQ(job.code(1), ExitCode::Ok);
}

TEST(ExchangeFailure, ASilentHostEndsTheExpertRanks) {
  const auto config = small_config();
  Job job(config, "cyclic", 2, 4, 200ms);
  job.start_all();
  job.join();
  EXPECT_EQ(job.code(1), ExitCode::Peer);
  EXPECT_EQ(job.code(2), ExitCode::Peer);
}

TEST(ExchangeFailure, CloseInterruptsALongComputation) {
  const auto config = small_config();
  Job job(config, "cyclic", 1, 4, 400ms);
  job.start_rank(1, std::make_unique<DigestEngine>(config, 60'000'000));
  const auto experts = job.host();
  const RandomCall call(config, 0, 4, 5);
  experts->begin(call.view());
  experts->close(ExitCode::Usage);
  job.join();
  EXPECT_EQ(job.code(1), ExitCode::Usage);
}

}  // namespace
}  // namespace dsv41
