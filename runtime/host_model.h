// What the host rank holds: tokenizer, weights other than routed experts, Engram rows, and the backbone over
// them.
#pragma once

#include <memory>

#include "engram/rows.h"
#include "loader/checkpoint.h"
#include "loader/tokenizer.h"
#include "runtime/backbone.h"
#include "runtime/context.h"
#include "runtime/drafter.h"

namespace dsv41 {

class HostModel {
 public:
  /// checkpoint and compute must outlive the object. Throws CheckpointError.
  HostModel(const Checkpoint& checkpoint, Compute& compute, std::size_t max_rows,
            const EngramOptions& engram = {});

  const ModelConfig& config() const { return checkpoint_.config(); }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const ModelWeights& weights() const { return weights_; }
  const ModelContext& context() const { return context_; }
  void observe(Observer* observer) { context_.observer = observer; }
  void record(Recorder* recorder) { context_.recorder = recorder; }
  /// To be loaded before the first step, unless they are mapped.
  EngramRows& engram_rows() { return *rows_; }
  const EngramRows& engram_rows() const { return *rows_; }

  /// Joins the experts, which must outlive the backbone. Once.
  Backbone& connect(Experts& experts);
  /// The draft stages for up to that many sequences; null when the model has none. After connect(), once.
  Drafter* connect_drafter(Experts& experts, std::size_t sequences);

 private:
  const Checkpoint& checkpoint_;
  Tokenizer tokenizer_;
  ModelWeights weights_;
  ModelContext context_;
  std::unique_ptr<EngramRows> rows_;
  std::unique_ptr<Backbone> backbone_;
  std::unique_ptr<Drafter> drafter_;
};

}  // namespace dsv41
