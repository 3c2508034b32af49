// Whether messages may be handed to MPI in device memory (docs/cuda.md, "Transport"). Asking the library is
// not enough: a copy between device buffers is tried in a child process, whose crash harms nobody.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace dsv41 {

enum class Transport { Staged, CudaAware };
enum class TransportRequest { Auto, CudaAware, Staged };

/// "auto", "cuda-aware", "staged"; throws UsageError.
TransportRequest parse_transport(std::string_view text);
std::string_view name_of(Transport transport);

struct TransportChoice {
  Transport transport = Transport::Staged;
  std::string why;  // for the start line: "the MPI library was built without CUDA support"
};

/// Whether expert ranks can hand device memory to the communicator. They cannot yet: what is asked and tested
/// shows what a machine could do, and every choice is staged.
inline constexpr bool kMessagesInDeviceMemory = false;

/// What the two questions answered.
struct TransportFacts {
  bool has_device = false;
  bool library_says_yes = false;
  std::string library;  // what was asked, for the line
  /// Empty when the self-test passed; else why not: "self-test ended by signal 11".
  std::string self_test_failure;
  bool messages_in_device_memory = kMessagesInDeviceMemory;
};

/// Throws ResourceError when cuda-aware is demanded and cannot be had.
TransportChoice choose_transport(TransportRequest request, const TransportFacts& facts);

/// Runs `command` in a child process without the launcher's variables, so that MPI starts as a single process
/// there. Empty when it exits with 0 within the time; else what happened. The child is killed at the
/// deadline. It is spawned, not forked: nothing of this process's message layer runs in it.
std::string run_self_test(const std::vector<std::string>& command, std::chrono::milliseconds deadline);

/// The hidden first argument by which this program becomes the child: `dsv41-mpi --transport-self-test
/// DEVICE`.
inline constexpr std::string_view kSelfTestFlag = "--transport-self-test";
/// The child's whole program: opens the device, starts MPI, sends a pattern from one device buffer to another
/// and compares. Returns the exit code; prints one line on stderr when it fails. device: a number, or
/// "emulated".
int transport_self_test(std::string_view device);

/// Everything: asks the library, runs this program's self-test on `device` (as above; empty: this rank has
/// none) if that makes sense and at most for `deadline`, and chooses.
TransportChoice decide_transport(TransportRequest request, const std::string& device,
                                 std::chrono::milliseconds deadline);

}  // namespace dsv41
