// main() of test programs under mpirun: all ranks run all tests; a failure on any rank fails the run. Rank 0
// prints as usual, other ranks print their failures only.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <exception>

#include "tests/mpi/support/world.h"

namespace dsv41::testing {
namespace {

Communicator* the_world = nullptr;

class FailuresOnly final : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    fmt::print(stderr, "rank {}: {}.{}: {}:{}: {}\n", world().rank(),
               test != nullptr ? test->test_suite_name() : "", test != nullptr ? test->name() : "",
               result.file_name() != nullptr ? result.file_name() : "", result.line_number(),
               result.message());
    std::fflush(stderr);
  }
};

}  // namespace

Communicator& world() {
  return *the_world;
}

}  // namespace dsv41::testing

int main(int count, char** arguments) {
  ::testing::InitGoogleTest(&count, arguments);
  const auto communicator = dsv41::make_mpi_communicator();
  dsv41::testing::the_world = communicator.get();
  if (communicator->rank() == 0) {
    fmt::print("{} ranks, {}\n", communicator->size(), communicator->transport());
  } else {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new dsv41::testing::FailuresOnly);
  }
  int failed = RUN_ALL_TESTS();
  try {
    std::uint8_t any_failed = 0;
    for (const std::string& text : communicator->gather(failed != 0 ? "failed" : "", 0))
      any_failed |= !text.empty();
    communicator->broadcast(std::as_writable_bytes(std::span(&any_failed, 1)), 0);
    return any_failed;
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", communicator->rank(), error.what());
    communicator->abort(1);
  }
}
