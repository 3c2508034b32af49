// Two ranks as threads of one process: a message goes from the sender's buffer into the receiver's in one
// copy, by the receiver, as between processes of one machine at best.
#pragma once

#include <memory>
#include <utility>

#include "runtime/exchange/communicator.h"

namespace dsv41::bench {

/// Rank 0 and rank 1; each for one thread.
std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> thread_communicators();

}  // namespace dsv41::bench
