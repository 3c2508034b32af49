// Golden tensors of tests/data, and how close fp32 results must be to them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "loader/safetensors.h"

namespace dsv41::test {

/// One safetensors file of tests/data.
class Golden {
 public:
  explicit Golden(const std::filesystem::path& relative)
      : file_(std::filesystem::path(DSV41_TEST_DATA) / relative),
        header_(parse_safetensors(file_.bytes(), file_.bytes().size(), relative.string())) {}

  bool has(std::string_view name) const { return find(name) != nullptr; }
  template <class T>
  std::vector<T> values(std::string_view name) const {
    const TensorInfo* info = find(name);
    if (info == nullptr) throw std::out_of_range("no golden tensor " + std::string(name));
    std::vector<T> values(info->bytes() / sizeof(T));
    std::memcpy(values.data(), file_.bytes().data() + 8 + header_.header_bytes + info->begin, info->bytes());
    return values;
  }

 private:
  const TensorInfo* find(std::string_view name) const {
    for (const TensorInfo& info : header_.tensors)
      if (info.name == name) return &info;
    return nullptr;
  }

  MappedFile file_;
  SafetensorsHeader header_;
};

/// Distance of two fp32 values in units in the last place; huge when one is a NaN.
inline std::uint64_t ulp_distance(float a, float b) {
  const auto ordered = [](float value) {
    const auto bits = std::bit_cast<std::int32_t>(value);
    return bits < 0 ? std::int64_t{std::bit_cast<std::int32_t>(0x80000000u)} - bits : std::int64_t{bits};
  };
  if (a != a || b != b) return ~std::uint64_t{0};
  const std::int64_t distance = ordered(a) - ordered(b);
  return static_cast<std::uint64_t>(distance < 0 ? -distance : distance);
}

}  // namespace dsv41::test
