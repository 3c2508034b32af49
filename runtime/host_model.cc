#include "runtime/host_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "engram/token_map.h"
#include "loader/error.h"

namespace dsv41 {

HostModel::HostModel(const Checkpoint& checkpoint, Compute& compute, std::size_t max_rows,
                     const EngramOptions& engram)
    : checkpoint_(checkpoint),
      tokenizer_(checkpoint.directory() / "tokenizer.json"),
      weights_(host_weights(checkpoint)),
      context_{checkpoint.config(), weights_, compute, max_rows},
      rows_(dsv41::engram_rows(weights_, compute, engram, max_rows * checkpoint.config().n_hash_columns())) {
  if (tokenizer_.vocab_size() > config().vocab_size)
    throw CheckpointError(fmt::format("tokenizer.json has ids up to {}, but vocab_size is {}",
                                      tokenizer_.vocab_size() - 1, config().vocab_size));
}

Backbone& HostModel::connect(Experts& experts) {
  backbone_ =
      std::make_unique<Backbone>(context_, build_token_map(tokenizer_, config().vocab_size), experts, *rows_);
  return *backbone_;
}

Drafter* HostModel::connect_drafter(Experts& experts, std::size_t sequences) {
  if (config().n_mtp_layers == 0) return nullptr;
  sequences = std::min<std::size_t>(sequences, context_.max_rows / config().dspark_block_size);
  if (sequences > 0) drafter_ = std::make_unique<Drafter>(context_, experts, sequences);
  return drafter_.get();
}

}  // namespace dsv41
