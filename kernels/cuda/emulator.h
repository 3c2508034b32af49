// Runs a kernel on the host: every CUDA thread is a fiber of the calling thread, so that barriers, shuffles
// and polling work as written. Copies become visible as late as the kernel allows and shared memory starts as
// rubbish, to make missing waits show. Used through portable.h; knows nothing of the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace dsv41::cuda::emulation {

/// The order in which runnable threads take turns: a kernel's result must not depend on it.
enum class Order { Ascending, Descending, Shuffled };

struct Launch {
  unsigned blocks = 1;
  unsigned threads = 32;  // per block, a multiple of 32
  std::size_t shared_bytes = 0;
  Order order = Order::Ascending;
};

/// Returns when every thread has returned. Throws std::logic_error if threads of a warp meet at different
/// operations, or wait for each other without end; rethrows what a thread throws.
void run(const Launch& launch, const std::function<void()>& kernel);

// ---- What a running thread can do; portable.h gives these their device names.
// ---------------------------------

unsigned thread_index();
std::byte* shared_memory();
void sync_block();
void pause();

enum class Collective : std::uint32_t { None, Any, Shuffle, Multiply };
/// Hands `bytes` (at most 32) of this lane to all lanes of its warp: all [32 * bytes], in lane order.
void exchange(Collective operation, const void* mine, std::size_t bytes, void* all);

/// Remembers a copy of at most 16 bytes; wait_copies performs it.
void copy_later(void* destination, const void* source, std::size_t bytes);
void commit_copies();
void wait_copies(int pending);

}  // namespace dsv41::cuda::emulation
