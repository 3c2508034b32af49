// The host rank's part of a run: prompts in, text out.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "runtime/experts.h"
#include "runtime/host_model.h"
#include "runtime/profile/logits_file.h"
#include "runtime/scheduler.h"
#include "tools/options.h"
#include "tools/requests.h"

namespace dsv41 {

class HostRank {
 public:
  /// Everything that can be refused before the job starts is refused here. References must outlive the
  /// object.
  HostRank(const Options& options, const Checkpoint& checkpoint, Compute& compute);

  /// Generates and writes the output. recorder: null unless a profile is wanted. load_seconds is only
  /// reported. Throws Error.
  void run(Experts& experts, Recorder* recorder, double load_seconds);
  const EngramRows& engram_rows() const { return model_.engram_rows(); }

 private:
  /// Tells the experts and, at times, the user that it goes on.
  void load_engram(Experts& experts);
  void print_residency(const Experts& experts) const;
  void run_prompt(Scheduler& scheduler, Experts& experts, double load_seconds);
  void run_requests(Scheduler& scheduler, Experts& experts);
  /// Takes in what has arrived; returns whether more may come.
  bool read_requests(Scheduler& scheduler);
  void submit_line(Scheduler& scheduler, const std::string& line, std::uint64_t number);
  void write_line(const std::string& line);
  GenerationRequest defaults() const;

  const Options& options_;
  HostModel model_;
  std::vector<std::uint32_t> prompt_;
  std::unique_ptr<LogitsFile> logits_file_;
  std::unique_ptr<LineReader> requests_;
  std::FILE* results_ = nullptr;  // stdout, or owned by results_file_
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> results_file_{nullptr, &std::fclose};
  std::uint64_t finished_ = 0, refused_ = 0, output_tokens_ = 0;
};

}  // namespace dsv41
