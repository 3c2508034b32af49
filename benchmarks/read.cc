// dsv41-bench read: the rate at which memory can be read, the limit of every product of one row.
#include <algorithm>

#include "benchmarks/bench.h"

namespace dsv41::bench {

Json run_read(const Options& options) {
  const Buffer buffer(options.buffer_mib << 20, random_bytes(1 << 20, 1));
  Json results = Json::array();
  for (const std::size_t threads : thread_counts(options)) {
    ThreadPool pool(threads);
    double best = 0;
    time_calls(options.seconds * 4,
               [&](std::size_t) { best = std::max(best, read_rate(pool, buffer.data(), buffer.size())); });
    results.push_back({{"threads", threads}, {"gb_per_s", best / 1e9}});
  }
  return results;
}

}  // namespace dsv41::bench
