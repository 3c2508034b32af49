// Damage for generated trees, one line of text per mutation: what audits and loaders must notice.
// Works on the plan of a tree (tree_writer.h), before it is written.
#pragma once

#include <string_view>

#include "loader/tree_writer.h"

namespace dsv41 {

/// What mutate() understands; shards are 1-based numbers.
inline constexpr std::string_view kMutations =
    "drop=NAME                  from its header and the index\n"
    "drop-header=NAME           from its header; the index still promises it\n"
    "drop-index=NAME            from the index\n"
    "rename=NAME:NEW            in header and index\n"
    "rename-header=NAME:NEW     in the header only\n"
    "reshape=NAME:AxB           another shape; bytes follow\n"
    "retype=NAME:DTYPE          another dtype, as safetensors spells it; bytes follow\n"
    "add=NAME:DTYPE:AxB:SHARD   a tensor that the config does not call for\n"
    "overlap=NAME:BYTES         its bytes begin and end that much earlier\n"
    "extend=NAME:BYTES          its bytes end that much later\n"
    "move=NAME:SHARD            to another header; the index does not follow\n"
    "copy=NAME:SHARD            into another header as well\n"
    "index=NAME:SHARD           the index names another shard\n"
    "promise=NAME:SHARD         the index names a tensor that no header holds\n"
    "truncate=SHARD:BYTES       the file ends that much earlier\n";

/// Throws UsageError for a mutation that cannot be read or applied (unknown kind, no such tensor or shard).
void mutate(Tree& tree, std::string_view mutation);

}  // namespace dsv41
