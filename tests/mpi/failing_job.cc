// A job that ends badly in the way its argument names; the way it ends is that of the real program.
#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <thread>

#include "runtime/agreement.h"
#include "runtime/exchange/messages.h"
#include "runtime/expert_rank.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using namespace std::chrono_literals;
using testing::DigestEngine;
using testing::RandomCall;

constexpr auto kTimeout = 1s;
constexpr int kVictim = 2;

class FailingEngine final : public ExpertEngine {
 public:
  FailingEngine(const ModelConfig& config, std::function<void(const ExpertCall&)> at_call)
      : inner_(config), at_call_(std::move(at_call)) {}
  const ExpertGeometry& geometry() const override { return inner_.geometry(); }
  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override {
    at_call_(call);
    inner_.compute(call, outputs, timing, alive);
  }
  std::string describe() const override { return inner_.describe(); }

 private:
  DigestEngine inner_;
  std::function<void(const ExpertCall&)> at_call_;
};

void post(Communicator& communicator, std::span<const std::byte> message, int destination, int tag) {
  Request request = communicator.send(message, destination, tag);
  while (!communicator.test(request)) std::this_thread::yield();
}

int expert_rank(Communicator& communicator, const ModelConfig& config, const Placement& placement,
                const ExpertLimits& limits, const std::string& kind) {
  std::vector<std::byte> garbage;
  Request garbage_send;
  FailingEngine engine(config, [&](const ExpertCall& call) {
    if (communicator.rank() != kVictim || call.step != 3) return;
    if (kind == "bad-reply" || kind == "long-reply") {
      garbage.assign(kind == "bad-reply" ? 1000 : 1 << 20, std::byte{1});
      garbage_send = communicator.send(garbage, 0, wire::kReplyTag);
      std::this_thread::sleep_for(100ms);
    }
    if (kind == "engine-fails") throw ResourceError("the device is gone");
    if (kind == "silent-rank") std::this_thread::sleep_for(1h);
  });
  const ExitCode code = run_expert_rank(communicator, placement, engine, limits, {kTimeout});
  communicator.cancel(garbage_send);
  return static_cast<int>(code);
}

void host_steps(Communicator& communicator, Experts& experts, const ModelConfig& config,
                const std::string& kind) {
  experts.set_phase("decode");
  for (std::uint64_t step = 1;; ++step) {
    const RandomCall call(config, 1, 8, step);
    std::vector<BFloat16> outputs(call.routes.size() * call.dim);
    experts.begin(call.view());
    experts.finish(outputs);
    if (step == 2 && kind == "bad-request") {
      wire::Header header;
      header.kind = wire::Kind::Reply;
      header.bytes = sizeof header;
      post(communicator, std::as_bytes(std::span(&header, 1)), kVictim, wire::kRequestTag);
    }
    if (step == 2 && kind == "foreign-expert") {
      wire::Header header;
      header.step = step;
      header.call = step + 1;
      header.rows = header.routes = 1;
      header.dim = config.dim;
      const wire::RequestLayout layout(1, 1, config.dim);
      header.bytes = layout.bytes;
      std::vector<std::byte> message(layout.bytes);
      wire::store(message.data(), header);  // expert 0 belongs to rank 1
      post(communicator, message, kVictim, wire::kRequestTag);
    }
    if (step == 3 && kind == "host-gives-up") throw UsageError("no such option");
    if (step == 3 && kind == "silent-host") std::this_thread::sleep_for(1h);
  }
}

int run(const std::string& kind) {
  const auto communicator = make_mpi_communicator();
  communicator->set_timeout(kTimeout);
  const auto config = testing::small_config();
  const auto limits = ExpertLimits::of(config, 8);
  const bool victim = communicator->rank() == kVictim;
  const auto tell = [&](const std::string& message) {
    if (communicator->rank() == 0) fmt::print(stderr, "dsv41-mpi: {}\n", message);
  };

  StartReport mine = start_report(*communicator, "test");
  if (victim && kind == "bad-checkpoint") mine.fail(CheckpointError("no such shard"));
  if (victim && kind == "late-rank") std::this_thread::sleep_for(1h);
  try {
    const StartVerdict verdict = agree(*communicator, mine);
    if (verdict.code != ExitCode::Ok) {
      tell(verdict.message);
      return static_cast<int>(verdict.code);
    }
  } catch (const Error& error) {
    tell(error.what());
    communicator->abort(static_cast<int>(error.code()));
  }

  const auto placement =
      Placement::make("cyclic", config, static_cast<std::uint32_t>(communicator->size() - 1));
  if (communicator->rank() > 0) return expert_rank(*communicator, config, placement, limits, kind);
  const auto experts = remote_experts(*communicator, placement, ExpertGeometry::of(config), limits, kTimeout);
  try {
    host_steps(*communicator, *experts, config, kind);
  } catch (const Error& error) {
    tell(error.what());
    experts->close(error.code());
    return static_cast<int>(error.code());
  }
  return 0;
}

}  // namespace
}  // namespace dsv41

int main(int count, char** arguments) {
  return dsv41::run(count > 1 ? arguments[1] : "");
}
