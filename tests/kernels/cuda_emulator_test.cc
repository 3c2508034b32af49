// The emulator finds what it is there to find: missing barriers, missing waits, divergent warps, endless
// polling.
#include "kernels/cuda/emulator.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "kernels/cuda/portable.h"

namespace dsv41::cuda {
namespace {

using emulation::Order;

/// Every thread writes its index to shared memory and reads its neighbour's.
std::vector<unsigned> neighbours(Order order, bool barrier) {
  std::vector<unsigned> seen(64);
  emulation::run({.blocks = 1, .threads = 64, .shared_bytes = 64 * sizeof(unsigned), .order = order}, [&] {
    auto* const shared = reinterpret_cast<unsigned*>(shared_memory());
    shared[thread_index()] = thread_index();
    if (barrier) sync_block();
    seen[thread_index()] = shared[(thread_index() + 1) % 64];
  });
  return seen;
}

TEST(Emulator, BarriersMakeTheOrderOfThreadsIrrelevant) {
  EXPECT_EQ(neighbours(Order::Ascending, true), neighbours(Order::Descending, true));
  EXPECT_EQ(neighbours(Order::Ascending, true), neighbours(Order::Shuffled, true));
  EXPECT_EQ(neighbours(Order::Ascending, true)[3], 4u);
}

TEST(Emulator, AMissingBarrierShows) {
  EXPECT_NE(neighbours(Order::Ascending, false), neighbours(Order::Descending, false));
}

TEST(Emulator, CopiesArriveNoEarlierThanTheWait) {
  alignas(16) std::uint32_t source[4] = {1, 2, 3, 4};
  std::vector<std::uint32_t> before(32), after(32);
  emulation::run({.threads = 32, .shared_bytes = 32 * 16}, [&] {
    auto* const mine = reinterpret_cast<std::uint32_t*>(shared_memory()) + thread_index() * 4;
    mine[1] = 0;
    copy16(mine, source);
    commit_copies();
    commit_copies();
    wait_copies<2>();
    before[thread_index()] = mine[1];
    wait_copies<1>();
    after[thread_index()] = mine[1];
    wait_copies<0>();
  });
  EXPECT_EQ(before, std::vector<std::uint32_t>(32, 0));
  EXPECT_EQ(after, std::vector<std::uint32_t>(32, 2));
}

TEST(Emulator, RefusesWhatADeviceWouldNotSurvive) {
  alignas(16) std::byte bytes[32];
  EXPECT_THROW(emulation::run({.threads = 33}, [] {}), std::logic_error);
  // Lanes of one warp at different operations.
  EXPECT_THROW(
      emulation::run({.threads = 32},
                     [] { thread_index() == 0 ? void(any_in_warp(true)) : void(shuffle_xor(1, 1)); }),
      std::logic_error);
  // One lane leaves, the others wait for it.
  EXPECT_THROW(emulation::run({.threads = 32},
                              [] {
                                if (thread_index() != 5) any_in_warp(true);
                              }),
               std::logic_error);
  EXPECT_THROW(emulation::run({.threads = 64},
                              [] {
                                if (warp_index() == 0) sync_block();
                              }),
               std::logic_error);
  // Copies that nobody waits for, or that are not aligned.
  EXPECT_THROW(emulation::run({.threads = 32, .shared_bytes = 512},
                              [&] {
                                copy16(shared_memory(), bytes);
                                commit_copies();
                              }),
               std::logic_error);
  EXPECT_THROW(
      emulation::run({.threads = 32, .shared_bytes = 512}, [&] { copy16(shared_memory() + 4, bytes); }),
      std::logic_error);
  EXPECT_THROW(emulation::run({.threads = 32},
                              [] {
                                for (;;) pause();
                              }),
               std::logic_error);
}

TEST(Emulator, ShufflesAndProductsFollowTheDocumentedLanes) {
  // a [16, 32] and b [32, 8] from a pattern; c from the definition.
  const auto a_at = [](unsigned row, unsigned k) { return static_cast<int>((row * 7 + k * 3) % 25); };
  const auto b_at = [](unsigned k, unsigned column) {
    return static_cast<int>((k * 11 + column * 5) % 255) - 127;
  };
  std::vector<std::int32_t> c(16 * 8);
  emulation::run({.threads = 32}, [&] {
    const unsigned group = lane_index() / 4, quarter = lane_index() % 4;
    const auto word = [](auto&& at) {
      std::uint32_t bytes = 0;
      for (unsigned j = 0; j < 4; ++j)
        bytes |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(at(j))) << (8 * j);
      return bytes;
    };
    std::uint32_t a[4];
    for (unsigned i = 0; i < 4; ++i)
      a[i] = word([&](unsigned j) { return a_at(group + i % 2 * 8, i / 2 * 16 + quarter * 4 + j); });
    std::int32_t mine[4] = {1, 1, 1, 1};
    multiply_tile(mine, a, word([&](unsigned j) { return b_at(quarter * 4 + j, group); }),
                  word([&](unsigned j) { return b_at(16 + quarter * 4 + j, group); }));
    for (unsigned i = 0; i < 4; ++i) c[(group + i / 2 * 8) * 8 + quarter * 2 + i % 2] = mine[i];
    EXPECT_EQ(shuffle_xor(lane_index(), 5), lane_index() ^ 5u);
  });
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned column = 0; column < 8; ++column) {
      std::int32_t expected = 1;
      for (unsigned k = 0; k < 32; ++k) expected += a_at(row, k) * b_at(k, column);
      ASSERT_EQ(c[row * 8 + column], expected) << row << ", " << column;
    }
}

}  // namespace
}  // namespace dsv41::cuda
