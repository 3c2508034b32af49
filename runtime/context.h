// What every part of the model shares: config, weights, the machine it computes on, and an observer for
// tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/compute.h"
#include "loader/config.h"
#include "loader/weights.h"
#include "runtime/profile/recorder.h"

namespace dsv41 {

/// Sees intermediate tensors under the names of tests/data/forward (forward_trace). Off (null) outside tests.
class Observer {
 public:
  static constexpr int kNoLayer = -1;
  virtual ~Observer() = default;
  /// Spans are valid during the call only.
  virtual void tensor(std::string_view name, int layer, std::span<const BFloat16> values) = 0;
  virtual void tensor(std::string_view name, int layer, std::span<const float> values) = 0;
  virtual void tensor(std::string_view name, int layer, std::span<const std::int32_t> values) = 0;
};

struct ModelContext {
  const ModelConfig& config;
  const ModelWeights& weights;
  Compute& compute;
  std::size_t max_rows;  // of one step; buffers are sized by it once
  Observer* observer = nullptr;
  Recorder* recorder = nullptr;  // null: nothing is measured

  /// layer: Observer::kNoLayer for tensors of the whole pass.
  template <class T>
  void observe(std::string_view name, int layer, std::span<const T> values) const {
    if (observer != nullptr) observer->tensor(name, layer, values);
  }
};

/// The first `count` elements of a buffer that was sized for the largest step.
template <class T>
std::span<T> first(std::vector<T>& buffer, std::size_t count) {
  return std::span<T>(buffer).first(count);
}

}  // namespace dsv41
