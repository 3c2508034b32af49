// One safetensors file: 8-byte header length, JSON header, payload (spec: docs/checkpoint.md, "Tensors").
// Reading the header is reading untrusted input: every number is checked before it is used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loader/names.h"

namespace dsv41 {

enum class DType : std::uint8_t {
  F32,
  F16,
  BF16,
  F64,
  I8,
  U8,
  I16,
  U16,
  I32,
  U32,
  I64,
  U64,
  Bool,
  F8E4M3,
  F8E5M2,
  F8E8M0
};

std::string_view dtype_name(DType dtype);  // as safetensors spells it: "F8_E4M3"
std::optional<DType> dtype_from_name(std::string_view name);
std::size_t dtype_bytes(DType dtype);

/// Up to six dimensions, stored inline: a shape costs no allocation.
class Shape {
 public:
  static constexpr std::size_t kMaxRank = 6;
  Shape() = default;
  Shape(std::initializer_list<std::uint64_t> dimensions) {
    for (const std::uint64_t dimension : dimensions) push_back(dimension);
  }
  void push_back(std::uint64_t dimension) { dimensions_.at(rank_++) = dimension; }
  std::size_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  const std::uint64_t* begin() const { return dimensions_.data(); }
  const std::uint64_t* end() const { return dimensions_.data() + rank_; }
  std::uint64_t operator[](std::size_t axis) const { return dimensions_[axis]; }
  std::uint64_t& operator[](std::size_t axis) { return dimensions_[axis]; }
  friend bool operator==(const Shape& a, const Shape& b) {
    return a.rank_ == b.rank_ && a.dimensions_ == b.dimensions_;
  }
  /// Number of elements (1 for a scalar), or nothing when the product does not fit in 64 bits.
  std::optional<std::uint64_t> elements() const;
  std::string text() const;  // "[64, 128]"

 private:
  std::array<std::uint64_t, kMaxRank> dimensions_{};  // unused ones stay 0
  std::uint8_t rank_ = 0;
};

struct TensorInfo {
  std::string_view name;  // lives in the header's arena
  DType dtype = DType::U8;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // byte range relative to the payload
  std::uint64_t bytes() const { return end - begin; }
};

/// A parsed header. `tensors` are in the order of their bytes. Move-only: it owns the names.
struct SafetensorsHeader {
  std::uint64_t header_bytes = 0;   // JSON length
  std::uint64_t payload_bytes = 0;  // end of the last tensor
  std::vector<TensorInfo> tensors;
  NameArena names;
  std::uint64_t payload_offset() const { return 8 + header_bytes; }  // in the file
};

struct HeaderLimits {
  std::uint64_t header_bytes = 100u << 20;
  std::size_t tensors = 4'000'000;
};

/// Parses and checks a header: lengths, JSON depth, unknown dtypes, overflowing products, shape against
/// bytes, overlaps, holes, duplicate names. file_bytes: size of the file, or 0 when only the header is at
/// hand (then truncation of the payload is not judged). Throws CheckpointError naming `name`.
SafetensorsHeader parse_safetensors(std::span<const std::byte> start_of_file, std::uint64_t file_bytes,
                                    std::string_view name, const HeaderLimits& limits = {});

/// The same for a reader that reports damage instead of refusing it: extents that contradict shape and dtype,
/// overlaps, holes and a payload of another size than the file's go to `findings`, one line each; the rest
/// still throws.
SafetensorsHeader parse_safetensors_leniently(std::span<const std::byte> start_of_file,
                                              std::uint64_t file_bytes, std::string_view name,
                                              std::vector<std::string>& findings,
                                              const HeaderLimits& limits = {});

/// A file mapped read-only. Only regular files (through symbolic links) are accepted; an empty one has no
/// bytes.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);  // throws CheckpointError
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  /// Bytes that may be read from the start on: a mapping ends with its last page, zeros behind the file.
  std::size_t readable() const;
  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int descriptor_ = -1;
};

}  // namespace dsv41
