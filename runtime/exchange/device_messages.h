// Questions to the MPI library about device memory; answered in mpi_communicator.cc, the only file that
// includes mpi.h.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "kernels/cuda/device.h"

namespace dsv41 {

struct CudaSupport {
  bool yes = false;
  std::string library;  // "Open MPI v4.1.4"
};

/// What MPIX_Query_cuda_support says. May be called before MPI_Init.
CudaSupport mpi_cuda_support();

/// Starts MPI, opens a device (in this order, as a rank does) and sends a pattern between two device buffers
/// of this process; empty when it arrived. Ends MPI. Throws what `open` throws.
std::string exchange_device_pattern(const std::function<std::unique_ptr<cuda::Device>()>& open);

}  // namespace dsv41
