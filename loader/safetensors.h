// One safetensors file: 8-byte header length, JSON header, payload (spec: docs/checkpoint.md, "Tensors").
// Reading the header is reading untrusted input: every number is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41 {

enum class DType : std::uint8_t { F32, F16, BF16, F64, I8, U8, I16, I32, I64, Bool, F8E4M3, F8E8M0 };

std::string_view dtype_name(DType dtype);  // as safetensors spells it: "F8_E4M3"
std::size_t dtype_bytes(DType dtype);

struct TensorInfo {
  std::string name;
  DType dtype = DType::U8;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  // byte range relative to the payload
  std::uint64_t bytes() const { return end - begin; }
};

/// A parsed header. `tensors` are in file order.
struct SafetensorsHeader {
  std::uint64_t header_bytes = 0;   // JSON length
  std::uint64_t payload_bytes = 0;  // end of the last tensor
  std::vector<TensorInfo> tensors;
};

struct HeaderLimits {
  std::uint64_t header_bytes = 100u << 20;
  std::size_t tensors = 4'000'000;
  std::size_t rank = 8;
};

/// Parses and checks a header: lengths, JSON depth, unknown dtypes, overflowing products, shape against bytes,
/// overlaps, holes, duplicate names. file_bytes: size of the file, or 0 when only the header is at hand (then
/// truncation of the payload is not judged). Throws CheckpointError naming `name`.
SafetensorsHeader parse_safetensors(std::span<const std::byte> start_of_file, std::uint64_t file_bytes, std::string_view name,
                                    const HeaderLimits& limits = {});

/// A file mapped read-only.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);  // throws CheckpointError
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int descriptor_ = -1;
};

}  // namespace dsv41
