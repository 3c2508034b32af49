// Streaming, progress, comparison (payload.h).
#include "loader/audit/payload.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <ostream>
#include <thread>

#include "loader/audit/checks.h"
#include "loader/audit/payload_manifest.h"
#include "loader/audit/payload_plan.h"
#include "loader/audit/payload_reader.h"
#include "loader/error.h"
#include "loader/names.h"

namespace dsv41::audit {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::uint64_t>(seconds + 0.5);
  if (whole >= 3600) return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} s", whole);
}

/// Examines the windows of a plan on several threads while the calling thread shows progress.
class Stream {
 public:
  Stream(const PayloadPlan& plan, const PayloadOptions& options, ProgressFile& progress,
         std::vector<ChunkFacts>& facts, const std::vector<std::uint8_t>& done)
      : plan_(plan), options_(options), progress_(progress), facts_(facts), done_(done) {}

  void run(PayloadReport& report, std::ostream& err) {
    start_ = Clock::now();
    // Threads wait for the disk most of the time; a few per processor keep it busy while others sum up.
    const unsigned wanted =
        options_.threads != 0 ? options_.threads : std::max(4u, std::thread::hardware_concurrency());
    const auto count = static_cast<unsigned>(std::min<std::size_t>({wanted, 64, plan_.windows.size()}));
    running_ = count;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < count; ++t) threads.emplace_back([this] { work(); });
    show_progress(err);
    for (std::thread& thread : threads) thread.join();
    if (failure_) std::rethrow_exception(failure_);
    report.read_bytes = read_;
    report.hole_bytes = holes_;
    report.resumed_bytes = resumed_;
    report.interrupted = stopped();
    report.seconds = seconds_since(start_);
  }

 private:
  bool stopped() const { return options_.stop != nullptr && options_.stop->load() != 0; }

  void work() {
    try {
      PayloadReader reader;
      ZeroChunks zeros;
      for (std::size_t i; !stopped() && (i = next_.fetch_add(1)) < plan_.windows.size();)
        examine_window(i, reader, zeros);
    } catch (...) {
      const std::lock_guard lock(guard_);
      if (!failure_) failure_ = std::current_exception();
      next_ = plan_.windows.size();
    }
    const std::lock_guard lock(guard_);
    --running_;
    finished_.notify_all();
  }

  void examine_window(std::size_t number, PayloadReader& reader, ZeroChunks& zeros) {
    const Window& window = plan_.windows[number];
    const auto first = done_.begin() + window.first_chunk;
    if (std::all_of(first, first + window.chunks, [](std::uint8_t done) { return done != 0; })) {
      resumed_ += window.bytes;
      return;
    }
    const std::filesystem::path file = options_.directory / plan_.shards[window.shard].shard->file_name;
    const auto bytes = reader.read(file, window.offset, window.bytes);
    for (std::uint32_t i = window.first_chunk; i < window.first_chunk + window.chunks; ++i) {
      const Chunk& chunk = plan_.chunks[i];
      const DType dtype = plan_.tensors[chunk.tensor].info->dtype;
      facts_[i] = bytes ? examine(bytes->subspan(chunk.offset - window.offset, chunk.bytes), dtype)
                        : zeros.of(chunk.bytes, dtype);
    }
    progress_.append(window, facts_);
    (bytes ? read_ : holes_) += window.bytes;
  }

  void show_progress(std::ostream& err) {
    const auto interval =
        options_.progress_bar ? std::chrono::milliseconds(200) : std::chrono::milliseconds(5000);
    std::unique_lock lock(guard_);
    while (!finished_.wait_for(lock, interval, [this] { return running_ == 0; }))
      if (!options_.quiet) err << line() << std::flush;
    if (!options_.quiet && options_.progress_bar) err << "\r\x1b[K" << std::flush;
  }

  std::string line() const {
    const std::uint64_t read = read_, passed = read + holes_ + resumed_;
    const double seconds = std::max(seconds_since(start_), 1e-3);
    const double rate = static_cast<double>(read) / seconds;
    // Holes cost nothing, so the rate of what is read alone tells how long the rest takes at most.
    const std::string left =
        read == 0 ? "?" : duration_text(static_cast<double>(plan_.bytes - passed) / rate);
    const std::uint64_t percent =
        plan_.bytes == 0 ? 100 : passed / std::max<std::uint64_t>(1, plan_.bytes / 100);
    std::string bar;
    if (options_.progress_bar) {
      constexpr std::uint64_t kCells = 30;
      const std::uint64_t filled = std::min(kCells, percent * kCells / 100);
      bar = fmt::format("[{:#<{}}{:.<{}}] ", "", filled, "", kCells - filled);
    }
    return fmt::format("{}payload: {}{}% ({} of {}), {}/s, at most {} left{}",
                       options_.progress_bar ? "\r" : "", bar, percent, binary_size(passed),
                       binary_size(plan_.bytes), binary_size(static_cast<std::uint64_t>(rate)), left,
                       options_.progress_bar ? "\x1b[K" : "\n");
  }

  const PayloadPlan& plan_;
  const PayloadOptions& options_;
  ProgressFile& progress_;
  std::vector<ChunkFacts>& facts_;  // each chunk is written by the one thread that has its window
  const std::vector<std::uint8_t>& done_;
  Clock::time_point start_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::uint64_t> read_{0}, holes_{0}, resumed_{0};
  std::mutex guard_;
  std::condition_variable finished_;
  unsigned running_ = 0;
  std::exception_ptr failure_;
};

std::vector<ManifestEntry> entries_of(const PayloadPlan& plan, const std::vector<ChunkFacts>& facts) {
  std::vector<ManifestEntry> entries;
  std::vector<std::uint64_t> digests;
  for (const PlannedTensor& tensor : plan.tensors) {
    ManifestEntry entry;
    entry.tensor = tensor.info->name;
    entry.shard = plan.shards[tensor.shard].shard->file_name;
    entry.dtype = dtype_name(tensor.info->dtype);
    entry.shape = tensor.info->shape.text();
    entry.bytes = tensor.info->bytes();
    entry.all_zero = true;
    std::uint8_t lowest = 0xFF, highest = 0;
    digests.clear();
    for (std::uint32_t i = tensor.first_chunk; i < tensor.first_chunk + tensor.chunks; ++i) {
      digests.push_back(facts[i].digest);
      entry.nan_codes += facts[i].nan_codes;
      entry.all_zero = entry.all_zero && facts[i].all_zero;
      lowest = std::min(lowest, facts[i].lowest);
      highest = std::max(highest, facts[i].highest);
    }
    entry.checksum = tensor_checksum(digests);
    if (tensor.info->dtype == DType::F8E8M0 && entry.bytes > 0) {
      entry.min_exponent = lowest;
      entry.max_exponent = highest;
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

void note_findings(const std::vector<ManifestEntry>& entries, PayloadReport& report) {
  for (const ManifestEntry& entry : entries) {
    if (entry.nan_codes > 0)
      report.nan_tensors.push_back(
          fmt::format("{} in {}: {} NaN codes", entry.tensor, entry.shard, grouped(entry.nan_codes)));
    if (entry.all_zero && entry.bytes > 0)
      (entry.min_exponent ? report.zero_scales : report.zero_tensors).push_back(entry.tensor);
  }
}

/// Returns the manifest that holds both: what was known and what is new.
std::vector<ManifestEntry> compare(std::vector<ManifestEntry> earlier, std::vector<ManifestEntry> now,
                                   const std::vector<LocalShard>& shards, PayloadReport& report) {
  NameIndex position(now.size());
  for (std::uint32_t i = 0; i < now.size(); ++i) position.insert(now[i].tensor, i);
  std::vector<std::uint8_t> known(now.size());
  for (const ManifestEntry& then : earlier) {
    const auto found = position.find(then.tensor);
    if (!found) {
      const bool here = std::any_of(shards.begin(), shards.end(),
                                    [&](const LocalShard& shard) { return shard.file_name == then.shard; });
      if (here)
        report.mismatches.push_back(
            fmt::format("{}: in the manifest, no longer in {}", then.tensor, then.shard));
      else
        ++report.not_here;
      continue;
    }
    known[*found] = 1;
    const ManifestEntry& entry = now[*found];
    if (entry.dtype != then.dtype || entry.shape != then.shape || entry.bytes != then.bytes)
      report.mismatches.push_back(fmt::format("{} in {}: {} {}, the manifest has {} {}", entry.tensor,
                                              entry.shard, entry.dtype, entry.shape, then.dtype, then.shape));
    else if (entry.checksum != then.checksum)
      report.mismatches.push_back(fmt::format("{} in {}: checksum {:016x}, the manifest has {:016x}",
                                              entry.tensor, entry.shard, entry.checksum, then.checksum));
  }
  for (std::size_t i = 0; i < now.size(); ++i)
    if (known[i] == 0) {
      earlier.push_back(std::move(now[i]));
      ++report.added;
    }
  return earlier;
}

}  // namespace

PayloadReport verify_payload(const std::vector<LocalShard>& shards, const PayloadOptions& options,
                             std::ostream& err) {
  PayloadReport report;
  report.manifest = options.manifest;
  std::error_code error;
  std::vector<ManifestEntry> earlier;
  report.compared = std::filesystem::exists(options.manifest, error);
  if (report.compared) earlier = read_manifest(options.manifest);  // before hours of reading
  const PayloadPlan plan = plan_payload(options.directory, shards);
  for (const LocalShard& shard : shards)
    if (!shard.readable || !shard.findings.empty()) report.skipped.push_back(shard.file_name);
  report.tensors = plan.tensors.size();
  report.bytes = plan.bytes;

  std::vector<ChunkFacts> facts(plan.chunks.size());
  std::vector<std::uint8_t> done(plan.chunks.size());
  ProgressFile progress(options.manifest.string() + ".progress", plan, facts, done);
  Stream(plan, options, progress, facts, done).run(report, err);
  if (report.interrupted) return report;

  std::vector<ManifestEntry> now = entries_of(plan, facts);
  note_findings(now, report);
  if (report.compared) now = compare(std::move(earlier), std::move(now), shards, report);
  const bool changed = !report.compared || (report.mismatches.empty() && report.added > 0);
  if (changed) write_manifest(now, options.manifest);
  progress.remove();
  return report;
}

namespace {

void list(std::string& text, std::string_view title, const std::vector<std::string>& lines) {
  constexpr std::size_t kListed = 20;
  if (lines.empty()) return;
  text += fmt::format("  {}: {}\n", title, grouped(lines.size()));
  for (std::size_t i = 0; i < std::min(lines.size(), kListed); ++i) text += "    " + lines[i] + "\n";
  if (lines.size() > kListed) text += fmt::format("    and {} more\n", grouped(lines.size() - kListed));
}

}  // namespace

std::string payload_text(const PayloadReport& report, bool quiet) {
  std::string text;
  if (report.interrupted) {
    return fmt::format("payload: interrupted after {} of {}; the same command goes on from there\n",
                       binary_size(report.read_bytes + report.hole_bytes + report.resumed_bytes),
                       binary_size(report.bytes));
  }
  if (!quiet || report.failed()) {
    text += fmt::format("\npayload: {} tensors, {} ({} read, {} holes, {} from an earlier run) in {}, {}/s\n",
                        grouped(report.tensors), binary_size(report.bytes), binary_size(report.read_bytes),
                        binary_size(report.hole_bytes), binary_size(report.resumed_bytes),
                        duration_text(report.seconds),
                        binary_size(static_cast<std::uint64_t>(static_cast<double>(report.read_bytes) /
                                                               std::max(report.seconds, 1e-3))));
    if (report.compared)
      text += fmt::format("  compared with {}: {} differ, {} new, {} in shards that are not here\n",
                          report.manifest.string(), grouped(report.mismatches.size()), grouped(report.added),
                          grouped(report.not_here));
    else
      text += fmt::format("  manifest written: {}\n", report.manifest.string());
  }
  list(text, "DIFFER from the manifest", report.mismatches);
  list(text, "NaN codes", report.nan_tensors);
  list(text, "not verified, damaged header", report.skipped);
  list(text, "scales that are all zero (a hole in the file?)", report.zero_scales);
  if (!quiet) list(text, "other tensors that are all zero", report.zero_tensors);
  return text;
}

}  // namespace dsv41::audit
