// A whole call of one layer as the host sees it: a host rank and an expert rank with a GPU as two threads,
// with everything that the runtime does between the host's routes and its outputs.
#pragma once

#include <functional>
#include <memory>

#include "kernels/compute.h"
#include "kernels/cuda/device.h"

namespace dsv41::bench {

struct LayerShape {
  std::uint32_t dim = 0, inter = 0;
  std::uint32_t experts = 0;   // of the layer, all on the GPU
  std::uint32_t per_call = 0;  // that every row of a call takes
  std::uint32_t max_rows = 0;
};

/// In microseconds.
struct LayerTimes {
  double exchange = 0, exchange_p90 = 0;  // routing, packing, request, the rank's work, reply, unpacking
  double rank = 0;                        // of that: upload, launch, download
};

class LayerExchange {
 public:
  /// `open` is called by the expert rank's thread; all experts have the same `matrices`, which must stay.
  /// Returns when the experts are on the device. Throws what opening and loading throw.
  LayerExchange(const std::function<std::unique_ptr<cuda::Device>()>& open, const LayerShape& shape,
                const ExpertMatrices& matrices);
  ~LayerExchange();
  LayerExchange(const LayerExchange&) = delete;
  LayerExchange& operator=(const LayerExchange&) = delete;

  /// All rows of a call take the same experts, those of consecutive calls differ.
  LayerTimes time(const QuantizedRows& x, std::uint32_t repeats);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace dsv41::bench
