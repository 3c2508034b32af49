// What the kernels need from a GPU, in a dozen functions: thread indices, barriers, shuffles, byte permutes,
// dot4, the int8 tensor-core product, asynchronous copies, atomics. Compiled by nvcc they are the device's
// instructions; compiled by a host compiler they run on the emulator (emulator.h), so that the kernels' own
// source is tested without a GPU.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

#if defined(__CUDACC__)
#define DSV41_DEVICE __device__ __forceinline__
#define DSV41_UNROLL _Pragma("unroll")
#else
#include <cmath>
#include <cstring>

#include "kernels/cuda/emulator.h"
#define DSV41_DEVICE inline
#define DSV41_UNROLL
#endif

namespace dsv41::cuda {

inline constexpr unsigned kWarp = 32;

/// Sixteen bytes that move as one.
struct alignas(16) Quad {
  std::uint32_t x, y, z, w;
};
struct alignas(8) Pair {
  std::uint32_t x, y;
};

#if defined(__CUDACC__)

DSV41_DEVICE unsigned thread_index() {
  return threadIdx.x;
}
DSV41_DEVICE unsigned lane_index() {
  return threadIdx.x % kWarp;
}
DSV41_DEVICE unsigned warp_index() {
  return threadIdx.x / kWarp;
}

DSV41_DEVICE std::byte* shared_memory() {
  extern __shared__ std::byte dsv41_shared[] __attribute__((aligned(16)));
  return dsv41_shared;
}

DSV41_DEVICE void sync_block() {
  __syncthreads();
}
DSV41_DEVICE bool any_in_warp(bool value) {
  return __any_sync(0xFFFFFFFFu, value) != 0;
}
DSV41_DEVICE std::uint32_t shuffle_xor(std::uint32_t value, unsigned mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, static_cast<int>(mask));
}

/// Byte i of the result is byte (selector nibble i) & 7 of high:low, or that byte's sign repeated if the
/// nibble is > 7.
DSV41_DEVICE std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

/// sum + the dot product of four signed bytes.
DSV41_DEVICE std::int32_t dot4(std::uint32_t a, std::uint32_t b, std::int32_t sum) {
  std::int32_t result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
}

/// c [16, 8] += a [16, 32] * b [32, 8] in signed bytes, spread over the warp as PTX mma.m16n8k32 defines:
/// with g = lane/4, t = lane%4: a[0] holds row g, k 4t…4t+3; a[1] row g+8; a[2], a[3] the same at k+16;
/// b0 column g, k 4t…4t+3; b1 k+16; c[0], c[1] row g, columns 2t, 2t+1; c[2], c[3] row g+8.
DSV41_DEVICE void multiply_tile(std::int32_t (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // sm_75 has the quarter of it, m8n8k16, with the same assignment of lanes
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a[0]), "r"(b0));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a[2]), "r"(b1));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c[2]), "+r"(c[3])
      : "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c[2]), "+r"(c[3])
      : "r"(a[3]), "r"(b1));
#endif
}

/// Starts copying 16 aligned bytes to shared memory; they are there after commit_copies, wait_copies and a
/// barrier.
DSV41_DEVICE void copy16(void* shared, const void* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<Quad*>(shared) = *static_cast<const Quad*>(global);
#endif
}
/// Closes a group of copies.
DSV41_DEVICE void commit_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
DSV41_DEVICE void wait_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

/// Returns the old value.
DSV41_DEVICE std::uint32_t take_ticket(std::uint32_t* counter) {
  return atomicAdd(counter, 1u);
}
/// Adds one; everything this thread has seen written is visible to whoever acquires the sum.
DSV41_DEVICE void release_one(std::uint32_t* counter) {
  __threadfence();
  atomicAdd(counter, 1u);
}
DSV41_DEVICE std::uint32_t acquire(const std::uint32_t* counter) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
DSV41_DEVICE void pause() {
  __nanosleep(64);
}

// Single operations with one rounding each, which no compiler flag can fuse.
DSV41_DEVICE float add(float a, float b) {
  return __fadd_rn(a, b);
}
DSV41_DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
DSV41_DEVICE float multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
DSV41_DEVICE float to_float_rounded(std::int32_t value) {
  return __int2float_rn(value);
}
DSV41_DEVICE unsigned trailing_zeros(std::uint32_t value) {
  return static_cast<unsigned>(__ffs(static_cast<int>(value)) - 1);
}

#else

inline unsigned thread_index() {
  return emulation::thread_index();
}
inline unsigned lane_index() {
  return emulation::thread_index() % kWarp;
}
inline unsigned warp_index() {
  return emulation::thread_index() / kWarp;
}
inline std::byte* shared_memory() {
  return emulation::shared_memory();
}
inline void sync_block() {
  emulation::sync_block();
}

inline bool any_in_warp(bool value) {
  std::uint32_t all[kWarp];
  const std::uint32_t mine = value ? 1u : 0u;
  emulation::exchange(emulation::Collective::Any, &mine, sizeof mine, all);
  bool any = false;
  for (const std::uint32_t one : all) any = any || one != 0;
  return any;
}

inline std::uint32_t shuffle_xor(std::uint32_t value, unsigned mask) {
  std::uint32_t all[kWarp];
  emulation::exchange(emulation::Collective::Shuffle, &value, sizeof value, all);
  return all[(lane_index() ^ mask) % kWarp];
}

inline std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const std::uint32_t nibble = (selector >> (4 * i)) & 0xFu;
    const auto byte = static_cast<std::uint32_t>(bytes >> (8 * (nibble & 7u))) & 0xFFu;
    result |= ((nibble & 8u) != 0 ? ((byte & 0x80u) != 0 ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return result;
}

inline std::int32_t signed_byte(std::uint32_t word, unsigned index) {
  return static_cast<std::int8_t>(static_cast<std::uint8_t>(word >> (8 * index)));
}

inline std::int32_t dot4(std::uint32_t a, std::uint32_t b, std::int32_t sum) {
  for (unsigned i = 0; i < 4; ++i) sum += signed_byte(a, i) * signed_byte(b, i);
  return sum;
}

inline void multiply_tile(std::int32_t (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                          std::uint32_t b1) {
  struct Fragments {
    std::uint32_t a[4], b[2];
  } all[kWarp];
  const Fragments mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulation::exchange(emulation::Collective::Multiply, &mine, sizeof mine, all);
  const unsigned row = lane_index() / 4, column = lane_index() % 4 * 2;
  for (unsigned half = 0; half < 2; ++half)    // rows g and g+8
    for (unsigned side = 0; side < 2; ++side)  // columns 2t and 2t+1
      for (unsigned quarter = 0; quarter < 4; ++quarter)
        for (unsigned high = 0; high < 2; ++high)  // k and k+16
          c[half * 2 + side] = dot4(all[row * 4 + quarter].a[high * 2 + half],
                                    all[(column + side) * 4 + quarter].b[high], c[half * 2 + side]);
}

inline void copy16(void* shared, const void* global) {
  emulation::copy_later(shared, global, 16);
}
inline void commit_copies() {
  emulation::commit_copies();
}
template <int kPending>
inline void wait_copies() {
  emulation::wait_copies(kPending);
}

inline std::uint32_t take_ticket(std::uint32_t* counter) {
  return (*counter)++;
}
inline void release_one(std::uint32_t* counter) {
  ++*counter;
}
inline std::uint32_t acquire(const std::uint32_t* counter) {
  return *counter;
}
inline void pause() {
  emulation::pause();
}

inline float add(float a, float b) {
  return a + b;
}
inline float multiply(float a, float b) {
  return a * b;
}
inline float multiply_add(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float to_float_rounded(std::int32_t value) {
  return static_cast<float>(value);
}
inline unsigned trailing_zeros(std::uint32_t value) {
  return static_cast<unsigned>(std::countr_zero(value));
}

#endif

}  // namespace dsv41::cuda
