// Counts every C++ allocation of the test program. In a file of its own: where the compiler can inline both
// sides it takes the pair for a mismatch.
#include "tests/runtime/profile/support/allocations.h"

#include <cstdlib>
#include <new>

namespace dsv41 {
std::atomic<std::uint64_t> allocations{0};
}

void* operator new(std::size_t bytes) {
  dsv41::allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  dsv41::allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes ? bytes : 1);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
