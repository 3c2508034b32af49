// Planning chunks and windows, keeping progress (payload_plan.h).
#include "loader/audit/payload_plan.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>

#include "loader/error.h"

namespace dsv41::audit {
namespace {

struct Record {
  std::uint64_t shard_identity;
  std::uint32_t chunk;  // counted within the shard
  std::uint8_t lowest, highest, all_zero, unused;
  std::uint64_t digest, nan_codes;
  std::uint64_t check;  // XXH3-64 of the fields before

  std::uint64_t expected_check() const { return XXH3_64bits(this, offsetof(Record, check)); }
};
static_assert(sizeof(Record) == 40);

std::uint64_t identity_of(const std::filesystem::path& file, const LocalShard& shard) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0)
    throw ResourceError(
        fmt::format("{}: cannot inspect: {}", file.string(), std::generic_category().message(errno)));
  const std::string text = fmt::format("{}\n{}\n{}.{}\n{}", shard.file_name, shard.file_bytes,
                                       status.st_mtim.tv_sec, status.st_mtim.tv_nsec, shard.header_digest);
  return XXH3_64bits(text.data(), text.size());
}

void plan_windows(PayloadPlan& plan, const PlannedShard& shard, std::uint32_t number) {
  for (std::uint32_t i = shard.first_chunk; i < shard.first_chunk + shard.chunks; ++i) {
    const Chunk& chunk = plan.chunks[i];
    Window* last =
        plan.windows.empty() || plan.windows.back().shard != number ? nullptr : &plan.windows.back();
    if (last == nullptr || last->bytes + chunk.bytes > kWindowBytes ||
        last->offset + last->bytes != chunk.offset)
      last = &plan.windows.emplace_back(Window{number, i, 0, chunk.offset, 0});
    ++last->chunks;
    last->bytes += chunk.bytes;
  }
}

}  // namespace

PayloadPlan plan_payload(const std::filesystem::path& directory, const std::vector<LocalShard>& shards) {
  PayloadPlan plan;
  for (const LocalShard& shard : shards) {
    if (!shard.readable || !shard.findings.empty()) continue;
    const auto number = static_cast<std::uint32_t>(plan.shards.size());
    PlannedShard planned{&shard, static_cast<std::uint32_t>(plan.chunks.size()), 0,
                         identity_of(directory / shard.file_name, shard)};
    for (const TensorInfo& tensor : shard.header.tensors) {
      PlannedTensor entry{&tensor, number, static_cast<std::uint32_t>(plan.chunks.size()), 0};
      for (std::uint64_t at = 0; at < tensor.bytes(); at += kChunkBytes, ++entry.chunks)
        plan.chunks.push_back({static_cast<std::uint32_t>(plan.tensors.size()),
                               static_cast<std::uint32_t>(std::min(kChunkBytes, tensor.bytes() - at)),
                               shard.header.payload_offset() + tensor.begin + at});
      plan.tensors.push_back(entry);
      plan.bytes += tensor.bytes();
    }
    planned.chunks = static_cast<std::uint32_t>(plan.chunks.size()) - planned.first_chunk;
    plan.shards.push_back(planned);
    plan_windows(plan, planned, number);
  }
  return plan;
}

ProgressFile::ProgressFile(const std::filesystem::path& file, const PayloadPlan& plan,
                           std::span<ChunkFacts> facts, std::span<std::uint8_t> done)
    : file_(file), plan_(plan) {
  const auto fail = [&](std::string_view what) {
    const std::string reason = std::generic_category().message(errno);
    if (descriptor_ >= 0) ::close(descriptor_);
    throw ResourceError(
        fmt::format("{}: cannot {} the progress file: {} (choose another place with --manifest)",
                    file.string(), what, reason));
  };
  descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (descriptor_ < 0) fail("open");
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("inspect");
  std::map<std::uint64_t, const PlannedShard*> shard_of;
  for (const PlannedShard& shard : plan.shards) shard_of[shard.identity] = &shard;
  Record record;
  const auto whole = static_cast<std::uint64_t>(status.st_size) / sizeof record;
  for (std::uint64_t i = 0; i < whole; ++i) {
    if (::pread(descriptor_, &record, sizeof record, static_cast<off_t>(i * sizeof record)) != sizeof record)
      break;
    const auto shard = shard_of.find(record.shard_identity);
    if (shard == shard_of.end() || record.chunk >= shard->second->chunks ||
        record.check != record.expected_check())
      continue;
    const std::uint32_t chunk = shard->second->first_chunk + record.chunk;
    facts[chunk] = {record.digest, record.nan_codes, record.lowest, record.highest, record.all_zero != 0};
    done[chunk] = 1;
  }
  if (::ftruncate(descriptor_, static_cast<off_t>(whole * sizeof record)) != 0) fail("shorten");
}

ProgressFile::~ProgressFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void ProgressFile::append(const Window& window, std::span<const ChunkFacts> facts) {
  const PlannedShard& shard = plan_.shards[window.shard];
  std::vector<Record> records;
  for (std::uint32_t i = 0; i < window.chunks; ++i) {
    Record record{};
    const ChunkFacts& fact = facts[window.first_chunk + i];
    record.shard_identity = shard.identity;
    record.chunk = window.first_chunk + i - shard.first_chunk;
    record.lowest = fact.lowest;
    record.highest = fact.highest;
    record.all_zero = fact.all_zero;
    record.digest = fact.digest;
    record.nan_codes = fact.nan_codes;
    record.check = record.expected_check();
    records.push_back(record);
  }
  const std::span<const std::byte> bytes = std::as_bytes(std::span(records));
  const std::lock_guard lock(guard_);
  if (::write(descriptor_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    throw ResourceError(fmt::format("{}: cannot append to the progress file: {}", file_.string(),
                                    std::generic_category().message(errno)));
}

void ProgressFile::remove() {
  std::error_code ignored;
  std::filesystem::remove(file_, ignored);
}

}  // namespace dsv41::audit
