// Writing of --dump-logits (logits_file.h). Rows are gathered to whole chunks first, so that the sequence of
// writes, and with it the layout of the file, depends only on the number of rows.
#include "runtime/profile/logits_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "loader/error.h"

namespace dsv41 {
namespace {
constexpr std::uint64_t kChunkBytes = 1 << 16, kIdsPerChunk = 4096, kRowsPerFlush = 256;
}

LogitsFile::LogitsFile(const std::filesystem::path& path, std::uint32_t vocab)
    : file_(path),
      vocab_(vocab),
      chunk_rows_(std::max<std::uint64_t>(1, kChunkBytes / (sizeof(float) * vocab))) {
  ids_table_ = file_.create_table("/ids", {hdf5::Type::Int32, {}, kIdsPerChunk, false});
  logits_table_ = file_.create_table("/logits", {hdf5::Type::Float32, {vocab}, chunk_rows_, false});
  file_.attribute("/ids", "meaning", "token id processed at each position");
  file_.attribute("/logits", "meaning", "logits after each position");
  file_.flush();
}

LogitsFile::~LogitsFile() {
  try {
    close();
  } catch (const Error&) {  // reported by whoever called close()
  }
}

void LogitsFile::append(std::span<const std::uint32_t> ids, std::span<const float> logits) {
  if (logits.size() != ids.size() * vocab_)
    throw UsageError(
        fmt::format("{} ids with {} logits of vocabulary {}", ids.size(), logits.size(), vocab_));
  for (std::size_t row = 0; row < ids.size(); ++row) {
    ids_.push_back(static_cast<std::int32_t>(ids[row]));
    const auto values = logits.subspan(row * vocab_, vocab_);
    logits_.insert(logits_.end(), values.begin(), values.end());
    if (ids_.size() == chunk_rows_) write(chunk_rows_);
  }
}

void LogitsFile::write(std::uint64_t rows) {
  file_.append(ids_table_, ids_.data(), rows);
  file_.append(logits_table_, logits_.data(), rows);
  ids_.clear();
  logits_.clear();
  const std::uint64_t before = written_rows_ / kRowsPerFlush;
  written_rows_ += rows;
  if (written_rows_ / kRowsPerFlush != before) file_.flush();
}

void LogitsFile::close() {
  if (!ids_.empty()) write(ids_.size());
  file_.close();
}

}  // namespace dsv41
