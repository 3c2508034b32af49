// Reads the golden tensors of tests/data/ops: a few lines of safetensors, so that the kernels' tests need no
// loader.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace dsv41::testing {

struct GoldenTensor {
  std::string dtype;
  std::vector<std::size_t> shape;
  std::vector<char> bytes;

  /// The values as T (checked by size only).
  template <class T>
  std::vector<T> as() const {
    std::size_t count = 1;
    for (const std::size_t extent : shape) count *= extent;
    if (count * sizeof(T) != bytes.size()) throw std::runtime_error("golden tensor read as the wrong type");
    std::vector<T> values(count);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& name);  // "linear" is tests/data/ops/linear.safetensors
  const GoldenTensor& operator[](const std::string& name) const;
  template <class T>
  std::vector<T> get(const std::string& name) const {
    return (*this)[name].as<T>();
  }

 private:
  std::map<std::string, GoldenTensor> tensors_;
};

}  // namespace dsv41::testing
