// The communicator of a test program under mpirun.
#pragma once

#include "runtime/exchange/communicator.h"

namespace dsv41::testing {

/// All ranks of the run; every rank executes every test, in the same order.
Communicator& world();

}  // namespace dsv41::testing
