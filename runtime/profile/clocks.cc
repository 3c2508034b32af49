// Ping-pong behind clocks.h: of many round trips the shortest bounds the offset best.
#include "runtime/profile/clocks.h"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <thread>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr std::int64_t kPatienceNs = 10'000'000'000;
constexpr int kSpins = 1 << 14;  // then make room for other ranks of an oversubscribed machine

class PingPong {
 public:
  PingPong(Communicator& communicator, int tag, std::int64_t (*clock)())
      : communicator_(communicator), tag_(tag), clock_(clock) {}

  void send(std::int64_t value, int rank) {
    Request request = communicator_.send(std::as_bytes(std::span(&value, 1)), rank, tag_);
    wait(request, rank);
  }
  std::int64_t receive(int rank) {
    std::int64_t value = 0;
    Request request = communicator_.receive(std::as_writable_bytes(std::span(&value, 1)), rank, tag_);
    wait(request, rank);
    return value;
  }

 private:
  void wait(Request& request, int rank) {
    const std::int64_t deadline = clock_() + kPatienceNs;
    for (int spins = 0; !communicator_.test(request); ++spins) {
      if (spins < kSpins) continue;
      std::this_thread::yield();
      if (clock_() > deadline) {
        communicator_.cancel(request);
        throw PeerError(fmt::format("rank {} did not answer while clocks were compared", rank));
      }
    }
  }

  Communicator& communicator_;
  int tag_;
  std::int64_t (*clock_)();
};

}  // namespace

std::vector<ClockRelation> relate_clocks(Communicator& communicator, int tag, std::int64_t (*clock)(),
                                         int rounds) {
  PingPong ping(communicator, tag, clock);
  if (communicator.rank() != 0) {
    for (int round = 0; round < rounds; ++round) {
      ping.receive(0);
      ping.send(clock(), 0);
    }
    return {};
  }
  std::vector<ClockRelation> relations(static_cast<std::size_t>(communicator.size()));
  for (int rank = 1; rank < communicator.size(); ++rank) {
    std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
    for (int round = 0; round < rounds; ++round) {
      const std::int64_t sent = clock();
      ping.send(sent, rank);
      const std::int64_t there = ping.receive(rank);
      const std::int64_t back = clock();
      if (back - sent >= shortest) continue;
      shortest = back - sent;
      relations[static_cast<std::size_t>(rank)] = {sent + shortest / 2 - there, (shortest + 1) / 2};
    }
  }
  return relations;
}

}  // namespace dsv41
