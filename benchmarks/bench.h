// What the subcommands of dsv41-bench share: options, cold weights, the read loop they are compared with,
// timing.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "kernels/compute.h"

namespace dsv41::bench {

using Json = nlohmann::ordered_json;

struct Options {
  std::string backend = "auto";
  std::size_t threads = 0;                  // 0: both one thread and all of the machine
  std::size_t buffer_mib = 1024;            // weights pass through a buffer that no cache holds
  double seconds = 0.5;                     // spent on each figure
  std::vector<std::size_t> rows;            // activation rows; empty: 1, 2, 4, 8, 32, 128
  std::string only;                         // part of a case's name; empty: all cases
  std::string config;                       // of the synthetic model; the released geometry unless given
  std::size_t pool_mib = 2048;              // synthetic weights: FP8 codes, as much FP4, half of it BF16
  std::vector<std::size_t> contexts{1024};  // tokens that a sequence already has
  std::vector<std::size_t> sequences{1};    // in one step
  std::vector<std::size_t> prompts{16384};  // lengths
  std::string directory = "/var/tmp";       // for the file of `engram`
  std::size_t file_gib = 8;                 // its size
};

/// Anonymous memory with huge pages, filled by copies of `pattern`.
class Buffer {
 public:
  Buffer(std::size_t bytes, const std::vector<std::uint8_t>& pattern);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  const std::uint8_t* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Bytes per second of a loop that loads every byte of [data, data + bytes) once, split over the pool.
double read_rate(ThreadPool& pool, const std::uint8_t* data, std::size_t bytes);

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Best and median time of body(i), repeated with i = 0, 1, ... for `seconds` (three times at least). The
/// best one is what the code can do; the distance to the median says how busy the machine was.
struct Timing {
  double best_s = 0, median_s = 0;
  std::size_t repetitions = 0;
};
template <class Body>
Timing time_calls(double seconds, const Body& body) {
  std::vector<double> times;
  body(0);  // the first call sizes scratch memory
  for (const auto start = Clock::now(); times.size() < 3 || seconds_since(start) < seconds;) {
    const auto call = Clock::now();
    body(times.size() + 1);
    times.push_back(seconds_since(call));
  }
  std::sort(times.begin(), times.end());
  return {times.front(), times[times.size() / 2], times.size()};
}

/// CPU, cores, memory, commit, backend: where the figures come from.
Json describe_machine(const Options& options);
/// One and all, or what --threads says.
std::vector<std::size_t> thread_counts(const Options& options);
bool selected(const Options& options, const std::string& name);

/// Random valid codes as released checkpoints have them: E4M3 blocks that fill the range, E2M1 codes, E8M0
/// near 2^-8.
std::vector<std::uint8_t> gaussian_e4m3(std::size_t count, std::uint64_t seed);
std::vector<std::uint8_t> random_bytes(std::size_t count, std::uint64_t seed);

Json run_read(const Options& options);
Json run_linears(const Options& options);
Json run_ops(const Options& options);
Json run_decode(const Options& options);
Json run_prefill(const Options& options);
Json run_speculation(const Options& options);
Json run_engram(const Options& options);
/// Under mpirun -np 2. Null on rank 1.
Json run_exchange(const Options& options);

}  // namespace dsv41::bench
