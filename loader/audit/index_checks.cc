// One claim about the index, made only where there is one (checks.h).
#include <algorithm>

#include "loader/audit/checks.h"

namespace dsv41::audit {

void check_index(const Evidence& evidence, Checks& checks) {
  if (!evidence.index()) return;
  Claim claim(evidence, "index: every local shard holds exactly the tensors the index assigns it");
  claim.contradict(evidence.index_contradictions());
  const auto local = std::count_if(evidence.shards().begin(), evidence.shards().end(),
                                   [](const Shard& shard) { return shard.local; });
  std::string observed = fmt::format("{} of {} shards are here", local, evidence.shards().size());
  const auto total = evidence.index()->total_size;
  if (evidence.complete() && total && *total != evidence.readable_bytes())
    observed += fmt::format(", metadata.total_size says {} bytes, the headers {}", grouped(*total),
                            grouped(evidence.readable_bytes()));
  checks.push_back(claim.conclude(std::move(observed)));
}

}  // namespace dsv41::audit
