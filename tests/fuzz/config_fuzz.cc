// Any bytes as config.json: what parses must be judged, counted and printed without harm, and read back equal.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "loader/config.h"
#include "loader/error.h"
#include "loader/inventory.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  dsv41::ModelConfig config;
  try {
    config = dsv41::parse_config(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  } catch (const dsv41::CheckpointError&) {
    return 0;
  }
  dsv41::config_findings(config);
  const std::string flat = dsv41::to_flat_json(config);
  if (dsv41::to_flat_json(dsv41::parse_config(flat, "flat")) != flat) std::abort();
  try {
    if (dsv41::tensor_count(config) < 20'000) dsv41::inventory(config);
  } catch (const dsv41::CheckpointError&) {
  }
  return 0;
}
