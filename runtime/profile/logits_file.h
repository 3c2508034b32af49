// The file of --dump-logits: /ids int32 [T] and /logits float32 [T, V], one row per processed position, in
// order. Files of equal content are equal byte for byte, however the rows arrived.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "runtime/profile/hdf5_file.h"

namespace dsv41 {

class LogitsFile {
 public:
  /// Creates or replaces the file. UsageError: the path cannot be written; ResourceError: no space.
  LogitsFile(const std::filesystem::path& path, std::uint32_t vocab);
  ~LogitsFile();
  LogitsFile(const LogitsFile&) = delete;
  LogitsFile& operator=(const LogitsFile&) = delete;

  /// ids: the tokens that were processed [rows]; logits: what the model said after each, [rows, vocab].
  /// Throws ResourceError when the disk is full.
  void append(std::span<const std::uint32_t> ids, std::span<const float> logits);
  /// Writes what is left and closes, reporting errors; the destructor does the same without reporting.
  void close();

 private:
  void write(std::uint64_t rows);

  hdf5::Writer file_;
  std::uint32_t vocab_ = 0;
  std::uint64_t chunk_rows_ = 0, written_rows_ = 0;
  hdf5::Writer::Table ids_table_ = 0, logits_table_ = 0;
  std::vector<std::int32_t> ids_;  // rows that do not fill a chunk yet
  std::vector<float> logits_;
};

}  // namespace dsv41
