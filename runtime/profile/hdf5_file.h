// HDF5 files as the runtime needs them: groups, growing tables, attributes. hdf5_file.cc is the only file
// that includes hdf5.h. Files are in the earliest format: after kill -9 between two flushes they open without
// repair (docs/runtime.md, "HDF5 profile").
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41::hdf5 {

enum class Type : std::uint8_t { UInt8, UInt16, Int32, UInt32, Int64, UInt64, Float32, Float64 };

std::size_t type_bytes(Type type);

/// A dataset that grows along its first dimension.
struct TableOptions {
  Type type = Type::Int64;
  std::vector<std::uint64_t> row_shape;  // empty: a row is one element
  std::uint64_t chunk_rows = 1;
  bool compress = false;  // byte shuffle, then deflate at its fastest level
};

/// A file being written. Every operation throws ResourceError with the system's reason; after that the file
/// should only be destroyed (which never throws).
class Writer {
 public:
  using Table = std::size_t;  // index into the tables of this file

  /// Creates or replaces the file. UsageError: the path cannot be written; ResourceError: no space.
  explicit Writer(const std::filesystem::path& path);
  ~Writer();
  Writer(Writer&&) noexcept;
  Writer& operator=(Writer&&) noexcept;

  void create_group(std::string_view name);
  /// name: full path; the groups above it must exist.
  Table create_table(const std::string& name, const TableOptions& options);
  /// A dataset of fixed shape, written as a whole each time.
  Table create_array(const std::string& name, Type type, std::vector<std::uint64_t> shape);

  void append(Table table, const void* rows, std::uint64_t count);
  void overwrite(Table array, const void* elements);

  // Attributes of a group or dataset; an attribute that exists is replaced.
  void attribute(const std::string& object, const char* name, std::string_view text);
  void attribute(const std::string& object, const char* name, std::span<const std::string> texts);
  void attribute(const std::string& object, const char* name, std::int64_t value);
  void attribute(const std::string& object, const char* name, double value);
  void attribute(const std::string& object, const char* name, std::span<const std::int64_t> values);
  void attribute(const std::string& object, const char* name, std::span<const double> values);

  /// Hands everything to the operating system, so that a kill of this process cannot lose it.
  void flush();
  /// Flushes and closes, reporting errors; the destructor does the same without reporting.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A file being read, which may be foreign, damaged, or still being written. Throws UsageError with one line.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path);
  ~Reader();
  Reader(Reader&&) noexcept;

  bool has(const std::string& object) const;
  bool has_attribute(const std::string& object, const char* name) const;
  std::vector<std::uint64_t> shape(const std::string& dataset) const;
  /// The first `rows` rows in row-major order; numbers are converted to the type asked for.
  std::vector<std::int64_t> read_int64(const std::string& dataset, std::uint64_t rows) const;
  std::vector<float> read_float(const std::string& dataset, std::uint64_t rows) const;

  std::string text(const std::string& object, const char* name) const;
  std::vector<std::string> texts(const std::string& object, const char* name) const;
  std::vector<std::int64_t> int64s(const std::string& object, const char* name) const;
  std::vector<double> doubles(const std::string& object, const char* name) const;
  std::int64_t int64(const std::string& object, const char* name) const;
  double real(const std::string& object, const char* name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dsv41::hdf5
