// See golden.h. The files are part of the repository: nothing here distrusts them.
#include "tests/kernels/support/golden.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

namespace dsv41::testing {

GoldenFile::GoldenFile(const std::string& name) {
  const std::string path = std::string(DSV41_TEST_DATA) + "/ops/" + name + ".safetensors";
  std::ifstream file(path, std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::uint64_t header_bytes = 0;
  if (all.size() < sizeof header_bytes) throw std::runtime_error("cannot read " + path);
  std::memcpy(&header_bytes, all.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(all.substr(sizeof header_bytes, header_bytes));
  const std::size_t payload = sizeof header_bytes + header_bytes;
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") continue;
    GoldenTensor& tensor = tensors_[key];
    tensor.dtype = entry.at("dtype");
    tensor.shape = entry.at("shape").get<std::vector<std::size_t>>();
    const std::size_t begin = entry.at("data_offsets").at(0), end = entry.at("data_offsets").at(1);
    tensor.bytes.assign(all.begin() + static_cast<std::ptrdiff_t>(payload + begin),
                        all.begin() + static_cast<std::ptrdiff_t>(payload + end));
  }
}

const GoldenTensor& GoldenFile::operator[](const std::string& name) const {
  return tensors_.at(name);
}

}  // namespace dsv41::testing
