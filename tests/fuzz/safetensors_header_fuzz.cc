// Any bytes as the start of a safetensors file: refused or parsed, strictly and leniently, never more than that.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "loader/error.h"
#include "loader/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  bool strict = false;
  for (const std::uint64_t file_bytes : {std::uint64_t{0}, std::uint64_t{size}}) try {
      const dsv41::SafetensorsHeader header = dsv41::parse_safetensors(bytes, file_bytes, "fuzz");
      strict = true;
      std::uint64_t position = 0;  // what the strict parser promises: extents that follow each other
      for (const dsv41::TensorInfo& tensor : header.tensors) {
        if (tensor.begin != position || tensor.end < tensor.begin) std::abort();
        position = tensor.end;
      }
      if (position != header.payload_bytes) std::abort();
    } catch (const dsv41::CheckpointError&) {
    }
  std::vector<std::string> findings;
  try {
    dsv41::parse_safetensors_leniently(bytes, 0, "fuzz", findings);
  } catch (const dsv41::CheckpointError&) {
    if (strict) std::abort();  // leniency must not refuse more
  }
  return 0;
}
