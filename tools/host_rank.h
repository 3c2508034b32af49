// The host rank's part of a run: prompt in, text out.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/experts.h"
#include "runtime/generate.h"
#include "runtime/host_model.h"
#include "runtime/profile/logits_file.h"
#include "tools/options.h"

namespace dsv41 {

class HostRank {
 public:
  /// Everything that can be refused before the job starts is refused here. References must outlive the
  /// object.
  HostRank(const Options& options, const Checkpoint& checkpoint, Compute& compute);

  /// Generates and writes the output. load_seconds is only reported. Throws Error.
  void run(Experts& experts, double load_seconds);

  std::size_t prompt_size() const { return prompt_.size(); }

 private:
  void write_json(const GenerationResult& result, const std::string& text, double load_seconds) const;
  void write_summary(const GenerationResult& result, double load_seconds) const;

  const Options& options_;
  HostModel model_;
  std::vector<std::uint32_t> prompt_;
  std::unique_ptr<LogitsFile> logits_file_;
};

/// Makes SIGUSR1 end the generation after the step in progress.
void install_stop_signal();

}  // namespace dsv41
