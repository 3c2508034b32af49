#include "runtime/host_model.h"

#include <fmt/format.h>

#include "engram/token_map.h"
#include "loader/error.h"

namespace dsv41 {

HostModel::HostModel(const Checkpoint& checkpoint, Compute& compute, std::size_t max_rows)
    : checkpoint_(checkpoint),
      tokenizer_(checkpoint.directory() / "tokenizer.json"),
      weights_(host_weights(checkpoint)),
      context_{checkpoint.config(), weights_, compute, max_rows},
      rows_(mapped_engram_rows(weights_, compute)) {
  if (tokenizer_.vocab_size() > config().vocab_size)
    throw CheckpointError(fmt::format("tokenizer.json has ids up to {}, but vocab_size is {}",
                                      tokenizer_.vocab_size() - 1, config().vocab_size));
}

Backbone& HostModel::connect(Experts& experts) {
  backbone_ =
      std::make_unique<Backbone>(context_, build_token_map(tokenizer_, config().vocab_size), experts, *rows_);
  return *backbone_;
}

}  // namespace dsv41
