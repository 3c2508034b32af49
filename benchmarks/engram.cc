// dsv41-bench engram: the Engram rows of a chunk of 512 tokens, gathered directly, through the mapping and by
// one pread after the other, from a file that is not in the page cache and from one that is; beside it what
// fio says that the device can read at random (docs/residency.md).
#include "engram/rows.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <system_error>

#include "benchmarks/bench.h"
#include "loader/weights.h"

namespace dsv41::bench {
namespace {

namespace fs = std::filesystem;

// Of the released model.
constexpr std::size_t kTables = 2, kTokens = 512, kColumns = 24, kWidth = 256, kScales = kWidth / kBlock;
constexpr std::size_t kIds = kTokens * kColumns;

/// A file of this process's own in a directory, gone at the end.
class BigFile {
 public:
  /// Random bytes throughout: neither holes nor repetitions that a device could shorten.
  BigFile(const fs::path& directory, std::uint64_t bytes)
      : path_(directory / fmt::format("dsv41-bench-{}", getpid())) {
    const auto space = fs::space(directory);
    if (space.available < bytes + (bytes >> 3))
      throw std::runtime_error(fmt::format("{}: {} bytes are free, {} are wanted; try a smaller --file-gib",
                                           directory.string(), space.available, bytes));
    std::vector<std::uint64_t> block((4 << 20) / sizeof(std::uint64_t));
    std::mt19937_64 draw(1);
    for (std::uint64_t& word : block) word = draw();
    std::ofstream file(path_, std::ios::binary);
    for (std::uint64_t at = 0; at < bytes; at += 4 << 20) {
      const std::uint64_t change = draw();
      for (std::uint64_t& word : block) word ^= change;
      file.write(reinterpret_cast<const char*>(block.data()), 4 << 20);
    }
    file.close();
    if (!file) {
      fs::remove(path_);
      throw std::runtime_error(path_.string() + ": cannot be written");
    }
  }
  ~BigFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  BigFile(const BigFile&) = delete;
  BigFile& operator=(const BigFile&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// Takes the file out of the page cache; says whether the system dropped everything else, too.
bool drop_caches(const MappedFile& file) {
  ::fsync(file.descriptor());
  ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
  std::ofstream all("/proc/sys/vm/drop_caches");
  all << "3" << std::flush;
  return static_cast<bool>(all);
}

/// Two tables, one behind the other, codes before scales.
ModelWeights tables_in(const MappedFile& file) {
  ModelWeights weights;
  const std::uint64_t rows = file.bytes().size() / kTables / (kWidth + kScales) / 64 * 64;
  const auto* const data = reinterpret_cast<const std::uint8_t*>(file.bytes().data());
  std::uint64_t at = 0;
  for (std::size_t table = 0; table < kTables; ++table) {
    EngramWeights& engram = weights.engram.emplace_back();
    engram.rows = rows;
    engram.table_codes = {data + at, rows * kWidth};
    engram.codes_location = {&file, at, rows * kWidth};
    at += rows * kWidth;
    engram.table_scales = {data + at, rows * kScales};
    engram.scales_location = {&file, at, rows * kScales};
    at += rows * kScales;
  }
  return weights;
}

using Chunk = std::array<std::vector<std::uint64_t>, kTables>;

/// Every column has its own range of rows; within it the hash is as good as random.
Chunk random_chunk(std::uint64_t rows, std::uint64_t seed) {
  std::mt19937_64 draw(seed);
  Chunk chunk;
  for (auto& ids : chunk)
    for (std::size_t i = 0; i < kIds; ++i)
      ids.push_back(i % kColumns * (rows / kColumns) + draw() % (rows / kColumns));
  return chunk;
}

double gather(EngramRows& source, const Chunk& chunk, std::vector<BFloat16>& rows) {
  const auto start = Clock::now();
  for (std::size_t table = 0; table < kTables; ++table) source.request(table, chunk[table]);
  for (std::size_t table = 0; table < kTables; ++table) source.collect(table, rows);
  return seconds_since(start);
}

double serial_pread(const ModelWeights& weights, const Chunk& chunk) {
  const auto start = Clock::now();
  std::array<std::uint8_t, kWidth> row;
  for (std::size_t table = 0; table < kTables; ++table) {
    const TensorLocation &codes = weights.engram[table].codes_location,
                         &scales = weights.engram[table].scales_location;
    const auto read = [&](const TensorLocation& from, std::uint64_t offset, std::size_t bytes) {
      if (::pread(from.file->descriptor(), row.data(), bytes, static_cast<off_t>(from.offset + offset)) !=
          static_cast<ssize_t>(bytes))
        throw std::runtime_error("pread: " + std::generic_category().message(errno));
    };
    for (const std::uint64_t id : chunk[table]) {
      read(codes, id * kWidth, kWidth);
      read(scales, id * kScales, kScales);
    }
  }
  return seconds_since(start);
}

/// Random direct reads per second of the file, 256 in flight; null where there is no fio.
Json fio_limit(const fs::path& file, std::size_t bytes) {
  const std::string command = fmt::format(
      "fio --name=limit --filename='{}' --readonly --rw=randread --bs={} --direct=1 --ioengine=io_uring "
      "--iodepth=256 --runtime=4 --time_based --norandommap --output-format=json 2>/dev/null",
      file.string(), bytes);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
  if (!pipe) return nullptr;
  std::string text;
  std::array<char, 4096> part;
  for (std::size_t count; (count = std::fread(part.data(), 1, part.size(), pipe.get())) > 0;)
    text.append(part.data(), count);
  const Json report = Json::parse(text, nullptr, false);
  if (!report.is_object() || !report.contains("jobs")) return nullptr;
  return report["jobs"][0]["read"]["iops"];
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

Json run_engram(const Options& options) {
  fmt::print(stderr, "writing {} GiB to {}\n", options.file_gib, options.directory);
  const BigFile big(options.directory, options.file_gib << 30);
  const MappedFile file(big.path());
  const ModelWeights weights = tables_in(file);
  const std::uint64_t rows = weights.engram.front().rows;
  Compute compute(find_backend(options.backend.c_str()), thread_counts(options).back());
  std::vector<BFloat16> out(kIds * kWidth);
  ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_RANDOM);

  constexpr int kRounds = 5;
  bool dropped = true;
  std::uint64_t seed = 1;
  Json results = Json::array();
  const auto add = [&](const std::string& name, const std::vector<double>& cold,
                       const std::vector<double>& warm, std::uint64_t reads, const std::string& how) {
    const double cold_s = median(cold), warm_s = median(warm);
    fmt::print(stderr, "{:<24} cold {:9.2f} ms, warm {:8.2f} ms, {:.0f} reads/s cold ({})\n", name,
               cold_s * 1e3, warm_s * 1e3, static_cast<double>(reads) / cold_s, how);
    results.push_back({{"way", name},
                       {"how", how},
                       {"reads", reads},
                       {"cold_ms", cold_s * 1e3},
                       {"warm_ms", warm_s * 1e3},
                       {"cold_reads_per_s", static_cast<double>(reads) / cold_s}});
    return cold_s;
  };

  std::vector<double> cold, warm;
  for (int round = 0; round < 2; ++round) {  // it takes seconds
    const Chunk chunk = random_chunk(rows, seed++);
    dropped &= drop_caches(file);
    cold.push_back(serial_pread(weights, chunk));
    warm.push_back(serial_pread(weights, chunk));
  }
  const double serial_s =
      add("serial pread", cold, warm, 2 * kTables * kIds, "one after the other, FADV_RANDOM");

  double direct_s = 0;
  struct Way {
    const char* name;
    EngramMode mode;
    ReadQueueOptions::Method method;
  };
  for (const Way& way : {Way{"direct, io_uring", EngramMode::Direct, ReadQueueOptions::Method::Auto},
                         Way{"direct, threads", EngramMode::Direct, ReadQueueOptions::Method::Threads},
                         Way{"mmap", EngramMode::Mmap, ReadQueueOptions::Method::Auto}}) {
    EngramOptions how;
    how.mode = way.mode;
    how.method = way.method;
    const auto source = engram_rows(weights, compute, how, kIds);
    source->load({});
    cold.clear();
    warm.clear();
    gather(*source, random_chunk(rows, seed++), out);  // buffers are sized by a first one
    std::uint64_t reads = source->counters().reads;
    for (int round = 0; round < (way.mode == EngramMode::Mmap ? 2 : kRounds); ++round) {
      const Chunk chunk = random_chunk(rows, seed++);
      dropped &= drop_caches(file);
      const std::uint64_t before = source->counters().reads;
      cold.push_back(gather(*source, chunk, out));
      reads = source->counters().reads - before;
      warm.push_back(gather(*source, chunk, out));
    }
    const double cold_s = add(way.name, cold, warm, way.mode == EngramMode::Mmap ? 2 * kTables * kIds : reads,
                              source->describe());
    if (direct_s == 0) direct_s = cold_s;
    results.back()["faster_than_serial_cold"] = serial_s / cold_s;
  }

  Json limits = Json::object();
  double most = 0;
  for (const std::size_t bytes : {std::size_t{512}, std::size_t{4096}}) {
    const Json limit = fio_limit(big.path(), bytes);
    if (limit.is_null()) continue;
    limits[fmt::format("fio_randread_{}_per_s", bytes)] = limit;
    most = std::max(most, limit.get<double>());
  }
  if (most == 0) fmt::print(stderr, "fio is not installed or failed: the device's limit is unknown\n");
  Json summary{{"file_gib", options.file_gib},
               {"page_cache_dropped", dropped},
               {"rows", kTables * kIds},
               {"direct_faster_than_serial_cold", serial_s / direct_s},
               {"device", limits}};
  if (most > 0)
    summary["direct_fraction_of_device_limit"] = results[1]["cold_reads_per_s"].get<double>() / most;
  fmt::print(stderr, "{}\n", summary.dump());
  return {{"ways", results}, {"summary", summary}};
}

}  // namespace dsv41::bench
