// One claim about bytes: extents follow from shapes and dtypes, tile the payload, and the file holds them
// (checks.h).
#include "loader/audit/checks.h"

namespace dsv41::audit {

void check_packing(const Evidence& evidence, Checks& checks) {
  Claim claim(evidence, "packing: every tensor's byte extent matches its shape and dtype");
  for (const LocalShard& shard : evidence.local())
    for (const std::string& finding : shard.findings) claim.contradict("{}", finding);
  checks.push_back(claim.conclude(fmt::format("{} tensors, {} bytes", grouped(evidence.readable_tensors()),
                                              grouped(evidence.readable_bytes()))));
}

}  // namespace dsv41::audit
