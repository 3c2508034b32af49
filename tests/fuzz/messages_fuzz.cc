// Any bytes as what a rank receives: the first byte says as which kind of message. What is accepted keeps
// every number inside the step and the model.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "loader/error.h"
#include "runtime/exchange/messages.h"

namespace {

using namespace dsv41;

ModelConfig small_config() {
  ModelConfig config;
  config.n_layers = 2;
  config.n_mtp_layers = 1;
  config.n_routed_experts = 5;
  config.dspark_n_routed_experts = 3;
  config.compress_ratios = {0, 0, 0};
  return config;
}

void read_as_request(std::span<const std::byte> message) {
  static const ModelConfig config = small_config();
  static const Placement placement = Placement::make("cyclic", config, 2);
  static const ExpertLimits limits{4, 12, 32};
  static const ExpertGeometry geometry = [] {
    ExpertGeometry made;
    made.experts_per_block = {5, 5, 3};
    return made;
  }();
  std::vector<Route> routes;
  const wire::Header header =
      wire::read_request(message, {limits, geometry, placement, 1}, 7, "fuzz", routes);
  if (header.rows > limits.max_rows || routes.size() > limits.max_routes) std::abort();
  for (const Route& route : routes)
    if (route.row >= header.rows || placement.owner(header.block, route.expert) != 1) std::abort();
  const QuantizedRows rows = wire::request_rows(message, header);
  const auto* end = reinterpret_cast<const std::uint8_t*>(message.data()) + message.size();
  if (rows.scales + header.rows * (header.dim / kBlock) > end) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  // A copy of its own: reading past the end is to be seen.
  const std::vector<std::byte> message(reinterpret_cast<const std::byte*>(data) + 1,
                                       reinterpret_cast<const std::byte*>(data) + size);
  try {
    if (data[0] % 3 == 0) {
      read_as_request(message);
    } else if (data[0] % 3 == 1) {
      wire::Header asked;
      asked.call = 7;
      asked.rows = 2;
      asked.routes = 3;
      asked.dim = 32;
      wire::read_reply(message, asked, "fuzz");
    } else {
      const wire::Control control = wire::read_control(message, "fuzz");
      for (const char letter : control.text)
        if (letter == '\n') std::abort();
    }
  } catch (const PeerError&) {
  }
  return 0;
}
