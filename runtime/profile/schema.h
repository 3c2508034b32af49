// What a profile holds: phases, columns, units and meanings in one place, for writer, reader and reports
// (docs/runtime.md, "HDF5 profile"; for users: tools/profile.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/profile/hdf5_file.h"

namespace dsv41 {

/// Raised when a reader of the previous version would misread the file.
inline constexpr std::int64_t kProfileSchemaVersion = 1;
inline constexpr std::string_view kProfileFormat = "dsv41-mpi profile";

/// Where the host's time goes. A phase holds its own time only: the indexer runs inside attention and is not
/// part of it.
enum class Phase : std::uint8_t {
  Embed,
  EngramHash,
  EngramGather,
  Engram,
  HyperConnections,
  Attention,
  Indexer,
  Routing,
  ExchangeSend,
  SharedExpert,
  ExchangeWait,
  Head,
  Sampling,
  Draft,
  Other,
};
inline constexpr std::size_t kPhases = 15;

struct PhaseInfo {
  std::string_view name;
  bool in_layers;  // whether it occurs inside a block, and so in /layers
  std::string_view meaning;
};
inline constexpr std::array<PhaseInfo, kPhases> kPhaseInfo = {{
    {"embed", false, "token embedding and expansion to the residual stream"},
    {"engram_hash", false, "n-gram ids of the rows"},
    {"engram_gather", true, "waiting for Engram rows"},
    {"engram", true, "arithmetic of the Engram layers"},
    {"hyper_connections", true, "mixes, collapse and expansion of the residual stream, normalization"},
    {"attention", true, "attention without the indexer"},
    {"indexer", true, "scores and selection of compressed groups"},
    {"routing", true, "gate scores and choice of experts"},
    {"exchange_send", true, "packing and posting requests to expert ranks"},
    {"shared_expert", true, "shared expert, computed while expert ranks work"},
    {"exchange_wait", true, "waiting for replies and adding them; with one rank: the experts themselves"},
    {"head", false, "final normalization and logits"},
    {"sampling", false, "choice of the next token"},
    {"draft", false, "taking hidden states over and proposing tokens, outside of the draft stages"},
    {"other", true, "the rest of the step"},
}};
inline constexpr std::string_view phase_name(Phase phase) {
  return kPhaseInfo[static_cast<std::size_t>(phase)].name;
}

enum class StepKind : std::uint8_t { Prefill, Decode, Mixed };
inline constexpr std::array<std::string_view, 3> kStepKindNames = {"prefill", "decode", "mixed"};

struct Column {
  std::string_view name;
  hdf5::Type type;
  std::string_view unit, meaning;
};

/// /steps/NAME [steps]; followed by PHASE_ns of every phase.
enum class StepColumn : std::uint8_t {
  Step,
  Kind,
  Tokens,
  Emitted,
  Start,
  Total,
  BytesOut,
  BytesIn,
  EngramRows,
  EngramDistinct,
  EngramCached,
  EngramBytes,
  Drafted,
  Accepted,
};
inline constexpr std::array<Column, 14> kStepColumns = {{
    {"step", hdf5::Type::Int64, "1", "number of the step, from 1"},
    {"kind", hdf5::Type::UInt8, "1", "0 prefill, 1 decode, 2 both in one step"},
    {"tokens", hdf5::Type::UInt32, "tokens", "rows that the step processed"},
    {"emitted", hdf5::Type::UInt32, "tokens", "tokens that the step added to the output"},
    {"start_ns", hdf5::Type::Int64, "ns", "begin of the step, from the start of the run, clock of rank 0"},
    {"total_ns", hdf5::Type::Int64, "ns", "duration of the step; the phases of the step sum to it"},
    {"bytes_out", hdf5::Type::Int64, "bytes", "request messages to all expert ranks"},
    {"bytes_in", hdf5::Type::Int64, "bytes", "reply messages from all expert ranks"},
    {"engram_rows", hdf5::Type::Int64, "rows", "Engram table rows that the step asked for"},
    {"engram_distinct", hdf5::Type::Int64, "rows",
     "of these without repetition; 0 where rows are mapped or resident"},
    {"engram_cached", hdf5::Type::Int64, "rows", "of the distinct ones already in memory"},
    {"engram_bytes", hdf5::Type::Int64, "bytes", "read from files for the others"},
    {"drafted", hdf5::Type::UInt32, "tokens", "rows of the step that were drafts"},
    {"accepted", hdf5::Type::UInt32, "tokens", "of these the ones that agreed with serial decoding"},
}};

/// /layers/NAME [steps, blocks]; followed by PHASE_ns of the phases that occur in blocks.
enum class LayerColumn : std::uint8_t { Start, Total, Rows };
inline constexpr std::array<Column, 3> kLayerColumns = {{
    {"start_ns", hdf5::Type::Int64, "ns",
     "begin of the block, from the start of the run, clock of rank 0; -1: not run"},
    {"total_ns", hdf5::Type::Int64, "ns",
     "time in the block; its phases sum to it. Large steps run as two halves, which take turns"},
    {"rows", hdf5::Type::Int64, "tokens", "rows that chose experts: those whose result is needed further on"},
}};

/// /ranks/NAME [steps, blocks, ranks].
enum class RankColumn : std::uint8_t {
  Sent,
  Received,
  Replied,
  Wait,
  Receive,
  Compute,
  Send,
  Requests,
  Tokens,
  Routes,
  Experts,
  CacheHits,
  CacheMisses,
  BytesRead,
  BytesOut,
  BytesIn,
};
inline constexpr std::array<Column, 16> kRankColumns = {{
    {"sent_ns", hdf5::Type::Int64, "ns",
     "request posted, from the start of the run, clock of rank 0; -1: no request"},
    {"received_ns", hdf5::Type::Int64, "ns",
     "request complete on the rank, from the start of the run in the rank's own clock: add clock_offset_ns "
     "of /run"},
    {"replied_ns", hdf5::Type::Int64, "ns",
     "reply complete on rank 0, from the start of the run; -1: no request"},
    {"wait_ns", hdf5::Type::Int64, "ns", "rank idle before the request"},
    {"receive_ns", hdf5::Type::Int64, "ns", "rank validates and unpacks the request"},
    {"compute_ns", hdf5::Type::Int64, "ns", "rank computes its experts"},
    {"send_ns", hdf5::Type::Int64, "ns", "rank hands over its previous reply"},
    {"requests", hdf5::Type::UInt32, "1", "requests: two where a large step runs as two halves"},
    {"tokens", hdf5::Type::UInt32, "tokens", "rows sent to the rank"},
    {"routes", hdf5::Type::UInt32, "1", "(token, expert) pairs computed by the rank"},
    {"experts", hdf5::Type::UInt32, "experts", "different experts touched"},
    {"cache_hits", hdf5::Type::UInt32, "experts", "experts found resident"},
    {"cache_misses", hdf5::Type::UInt32, "experts", "experts that had to be read"},
    {"bytes_read", hdf5::Type::Int64, "bytes", "weight bytes that the computation read"},
    {"bytes_out", hdf5::Type::Int64, "bytes", "request message"},
    {"bytes_in", hdf5::Type::Int64, "bytes", "reply message"},
}};

}  // namespace dsv41
