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

/// What there is to know about a rank.
struct TransportFacts {
  bool has_device = false;
  bool alone = false;  // a job of one process sends no messages
  bool library_says_yes = false;
  std::string library;  // what was asked, for the line
  /// Empty when the self-test passed; else why not: "self-test ended by signal 11".
  std::string self_test_failure;
};

/// Throws ResourceError when cuda-aware is demanded and cannot be had. A rank without a device has nothing to
/// send from one: it is staged whatever is demanded.
TransportChoice choose_transport(TransportRequest request, const TransportFacts& facts);

/// Runs `command` in a child process without the launcher's variables, so that MPI starts as a single process
/// there. Empty when it exits with 0 within the time; else what happened. The child is killed at the
/// deadline. It is spawned, not forked: nothing of this process's message layer runs in it.
std::string run_self_test(const std::vector<std::string>& command, std::chrono::milliseconds deadline);

/// The hidden first argument by which this program becomes the child: `dsv41-mpi --transport-self-test
/// DEVICE`.
inline constexpr std::string_view kSelfTestFlag = "--transport-self-test";
/// The name of an emulated device there.
inline constexpr std::string_view kEmulatedDevice = "emulated";
/// The child's whole program: opens the device, starts MPI, sends a pattern from one device buffer to another
/// and compares. Returns the exit code; prints one line on stderr when it fails. device: a number, or
/// "emulated".
int transport_self_test(std::string_view device);

/// Whose transport is to be decided.
struct TransportQuestion {
  TransportRequest request = TransportRequest::Auto;
  std::string device;  // as transport_self_test takes it; empty: this rank has none
  bool alone = false;  // the only process of its job
  /// Take it that the library supports CUDA: for an emulated device, whose memory any library takes.
  bool assume_support = false;
  std::chrono::milliseconds deadline{0};  // of the self-test
};

/// Everything: asks the library, runs this program's self-test on the device if that makes sense, and
/// chooses.
TransportChoice decide_transport(const TransportQuestion& question);

}  // namespace dsv41
