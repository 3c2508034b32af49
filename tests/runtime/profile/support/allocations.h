// Number of C++ allocations of the test program so far.
#pragma once

#include <atomic>
#include <cstdint>

namespace dsv41 {
extern std::atomic<std::uint64_t> allocations;
}
