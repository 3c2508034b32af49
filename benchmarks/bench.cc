// Buffers, the read loop and the description of the machine for dsv41-bench.
#include "benchmarks/bench.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <thread>

namespace dsv41::bench {

Buffer::Buffer(std::size_t bytes, const std::vector<std::uint8_t>& pattern) : bytes_(bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw std::runtime_error("cannot map " + std::to_string(bytes >> 20) +
                             " MiB; try a smaller --buffer-mib");
  madvise(memory, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::uint8_t*>(memory);
  for (std::size_t at = 0; at < bytes; at += pattern.size())
    std::memcpy(data_ + at, pattern.data(), std::min(pattern.size(), bytes - at));
}

Buffer::~Buffer() {
  munmap(data_, bytes_);
}

double read_rate(ThreadPool& pool, const std::uint8_t* data, std::size_t bytes) {
  std::atomic<std::uint64_t> sink{0};
  const auto start = Clock::now();
  pool.parallel_for(bytes / 4096, 64, [&](Range pages) {
    std::uint64_t sums[16] = {};
    for (const std::uint8_t *p = data + pages.begin * 4096, *end = data + pages.end * 4096; p < end;
         p += sizeof sums)
      for (std::size_t i = 0; i < 16; ++i) {
        std::uint64_t word;
        std::memcpy(&word, p + 8 * i, 8);
        sums[i] ^= word;
      }
    for (const std::uint64_t sum : sums) sink.fetch_xor(sum, std::memory_order_relaxed);
  });
  const double seconds = seconds_since(start);
  return static_cast<double>(bytes) / seconds + (sink.load() == 1 ? 1e-9 : 0.0);  // the sum is used
}

std::vector<std::size_t> thread_counts(const Options& options) {
  if (options.threads != 0) return {options.threads};
  const std::size_t all = std::max(1u, std::thread::hardware_concurrency());
  return all == 1 ? std::vector<std::size_t>{1} : std::vector<std::size_t>{1, all};
}

bool selected(const Options& options, const std::string& name) {
  return name.find(options.only) != std::string::npos;
}

std::vector<std::uint8_t> gaussian_e4m3(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<std::uint8_t> codes(count);
  for (std::size_t first = 0; first < count; first += kBlock) {
    double values[kBlock], largest = 0;
    for (double& value : values) value = normal(engine), largest = std::max(largest, std::fabs(value));
    const double scale = std::exp2(std::ceil(std::log2(largest / 448)));
    for (std::size_t i = 0; i < std::min(kBlock, count - first); ++i)
      codes[first + i] = encode_e4m3(static_cast<float>(values[i] / scale));
  }
  return codes;
}

std::vector<std::uint8_t> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(engine() >> 32);
  return bytes;
}

Json describe_machine(const Options& options) {
  std::string model = "unknown";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  double loads[1] = {0};
  const bool known = getloadavg(loads, 1) == 1;
  return {{"cpu", model},
          {"logical_cpus", std::thread::hardware_concurrency()},
          {"memory_gib", static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                             static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 30)},
          {"load_average_at_start", known ? Json(loads[0]) : Json(nullptr)},
          {"backend", find_backend(options.backend.c_str()).name},
          {"commit", DSV41_COMMIT}};
}

}  // namespace dsv41::bench
