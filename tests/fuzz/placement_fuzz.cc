// Any bytes as a placement file; one that is accepted must place every expert on a rank that exists.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "loader/error.h"
#include "runtime/placement.h"

namespace {

dsv41::ModelConfig small_config() {
  dsv41::ModelConfig config;
  config.n_layers = 2;
  config.n_mtp_layers = 1;
  config.n_routed_experts = 3;
  config.dspark_n_routed_experts = 2;
  config.compress_ratios = {0, 0, 0};
  return config;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const dsv41::ModelConfig config = small_config();
  static const int descriptor = ::memfd_create("placement", MFD_CLOEXEC);
  if (descriptor < 0 || ::ftruncate(descriptor, 0) != 0 ||
      ::pwrite(descriptor, data, size, 0) != static_cast<ssize_t>(size))
    std::abort();
  try {
    const dsv41::Placement placement =
        dsv41::Placement::make("file:/proc/self/fd/" + std::to_string(descriptor), config, 2);
    for (std::uint32_t block = 0; block < config.n_blocks(); ++block)
      for (std::uint32_t expert = 0; expert < config.experts_of(block); ++expert)
        if (placement.owner(block, expert) >= 2) std::abort();
  } catch (const dsv41::Error&) {
  }
  return 0;
}
