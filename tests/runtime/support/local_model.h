// A bundled or generated checkpoint, run in this process.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "loader/checkpoint.h"
#include "runtime/experts.h"
#include "runtime/host_model.h"

namespace dsv41::test {

inline std::filesystem::path bundled(std::string_view name) {
  return std::filesystem::path(DSV41_TEST_CHECKPOINTS) / name;
}

struct LocalModel {
  explicit LocalModel(const std::filesystem::path& directory, std::size_t max_rows = 512,
                      std::size_t threads = 2, const char* backend = "plain")
      : checkpoint(directory),
        compute(find_backend(backend), threads),
        source(checkpoint_experts(checkpoint)),
        experts(local_experts(*source, compute,
                              ExpertLimits::of(checkpoint.config(), static_cast<std::uint32_t>(max_rows)))),
        host(checkpoint, compute, max_rows),
        backbone(host.connect(*experts)) {}

  const ModelConfig& config() const { return checkpoint.config(); }

  /// Logits of every position, processed in chunks of the given size from an empty sequence.
  std::vector<float> all_logits(std::span<const std::uint32_t> ids, std::size_t chunk) {
    Sequence sequence(config());
    std::vector<float> all;
    Step step;
    for (std::size_t done = 0; done < ids.size(); done += chunk) {
      const auto part = ids.subspan(done, std::min(chunk, ids.size() - done));
      step.clear();
      step.add(sequence, part, part.size());
      const std::span<const float> logits = backbone.forward(step);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  Checkpoint checkpoint;
  Compute compute;
  std::unique_ptr<ExpertSource> source;
  std::unique_ptr<Experts> experts;
  HostModel host;
  Backbone& backbone;
};

}  // namespace dsv41::test
