// Any bytes as a payload manifest; one that is read must be written and read back the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "loader/audit/payload_manifest.h"
#include "loader/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto entries =
        dsv41::audit::parse_manifest(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    const std::string text = dsv41::audit::render_manifest(entries);
    if (dsv41::audit::render_manifest(dsv41::audit::parse_manifest(text, "again")) != text) std::abort();
  } catch (const dsv41::CheckpointError&) {
  }
  return 0;
}
