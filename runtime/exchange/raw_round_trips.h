// Round trips without this project's layers, for the benchmark that compares with them; answered in
// mpi_communicator.cc, the only file that includes mpi.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dsv41 {

/// Between ranks 0 and 1 while a communicator exists and is idle: rank 0 sends `bytes_out` and rank 1 answers
/// with `bytes_in`, blocking calls on buffers that were used before. Times of every trip in ns, on rank 0.
std::vector<std::uint64_t> raw_round_trips(std::size_t bytes_out, std::size_t bytes_in, std::size_t trips);

}  // namespace dsv41
