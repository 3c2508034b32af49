// Ranks as threads of one process, for tests of the exchange without a message layer.
#pragma once

#include <memory>
#include <vector>

#include "runtime/exchange/communicator.h"

namespace dsv41::testing {

/// Thrown by abort() instead of ending the process.
struct Aborted {
  int exit_code = 0;
};

/// `size` communicators that share mailboxes; each is to be used by one thread. Host names are "memory0",
/// "memory1", …
std::vector<std::unique_ptr<Communicator>> memory_communicators(int size);

}  // namespace dsv41::testing
