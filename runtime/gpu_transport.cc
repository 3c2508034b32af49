// The decision about device memory in messages (gpu_transport.h). The questions to MPI itself are in
// exchange/mpi_communicator.cc.
#include "runtime/gpu_transport.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstring>
#include <thread>

#include "kernels/cuda/device.h"
#include "kernels/cuda/emulated_device.h"
#include "loader/error.h"
#include "runtime/exchange/device_messages.h"

namespace dsv41 {
namespace {

/// The environment without what tells MPI that a launcher started this process.
std::vector<std::string> plain_environment() {
  std::vector<std::string> kept;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    bool launcher = false;
    for (const std::string_view prefix :
         {"OMPI_COMM_WORLD", "OMPI_UNIVERSE", "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_APP", "OMPI_FIRST",
          "OMPI_NUM", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE", "PMIX_", "PMI_", "PRTE_", "ORTE_", "HYDRA_",
          "MPI_LOCAL", "SLURM_"})
      launcher = launcher || text.starts_with(prefix);
    if (!launcher) kept.emplace_back(text);
  }
  return kept;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

TransportRequest parse_transport(std::string_view text) {
  if (text == "auto") return TransportRequest::Auto;
  if (text == "cuda-aware") return TransportRequest::CudaAware;
  if (text == "staged") return TransportRequest::Staged;
  throw UsageError(fmt::format("--transport {}: expected auto, cuda-aware or staged", text));
}

std::string_view name_of(Transport transport) {
  return transport == Transport::Staged ? "staged" : "cuda-aware";
}

TransportChoice choose_transport(TransportRequest request, const TransportFacts& facts) {
  if (request == TransportRequest::Staged) return {Transport::Staged, "as asked"};
  std::string obstacle;
  if (!facts.has_device)
    obstacle = "no GPU on this rank";
  else if (facts.alone)
    obstacle = "a single process sends no messages";
  else if (!facts.library_says_yes)
    obstacle = fmt::format("{} has no CUDA support", facts.library);
  else if (!facts.self_test_failure.empty())
    obstacle = facts.self_test_failure;
  if (obstacle.empty())
    return {Transport::CudaAware, fmt::format("{} supports CUDA and the self-test passed", facts.library)};
  if (request == TransportRequest::CudaAware && facts.has_device)
    throw ResourceError(fmt::format("--transport cuda-aware: {}; use --transport staged", obstacle));
  return {Transport::Staged, obstacle};
}

std::string run_self_test(const std::vector<std::string>& command, std::chrono::milliseconds deadline) {
  std::vector<std::string> arguments = command, environment = plain_environment();
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // What a dying child prints is not the user's business; the exit status is.
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = -1;
  const int error = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return fmt::format("self-test not started: {}", std::strerror(error));

  const auto end = std::chrono::steady_clock::now() + deadline;
  int status = 0;
  for (;;) {
    const pid_t done = waitpid(child, &status, WNOHANG);
    if (done == child) break;
    if (done < 0 && errno != EINTR) return fmt::format("self-test lost: {}", std::strerror(errno));
    if (std::chrono::steady_clock::now() > end) {
      kill(child, SIGKILL);
      while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
      }
      return fmt::format("self-test did not end within {} ms", deadline.count());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (WIFSIGNALED(status)) return fmt::format("self-test ended by signal {}", WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return fmt::format("self-test failed with exit code {}", WEXITSTATUS(status));
  return {};
}

int transport_self_test(std::string_view device) {
  try {
    const std::string failure = exchange_device_pattern([&] {
      if (device == kEmulatedDevice) return cuda::emulated_device({.guarded = false});
      int index = -1;
      std::from_chars(device.data(), device.data() + device.size(), index);
      return cuda::open_device(index);
    });
    if (failure.empty()) return 0;
    fmt::print(stderr, "transport self-test: {}\n", failure);
  } catch (const std::exception& error) {
    fmt::print(stderr, "transport self-test: {}\n", error.what());
  }
  return static_cast<int>(ExitCode::Resources);
}

TransportChoice decide_transport(const TransportQuestion& question) {
  TransportFacts facts;
  facts.has_device = !question.device.empty();
  facts.alone = question.alone;
  if (question.request != TransportRequest::Staged && facts.has_device && !facts.alone) {
    const CudaSupport support = mpi_cuda_support();
    facts.library = support.library;
    facts.library_says_yes = support.yes;
    if (!support.yes && question.assume_support) {
      facts.library = "by mpi=cuda in --devices " + facts.library;
      facts.library_says_yes = true;
    }
    if (facts.library_says_yes)
      facts.self_test_failure =
          run_self_test({"/proc/self/exe", std::string(kSelfTestFlag), question.device}, question.deadline);
  }
  return choose_transport(question.request, facts);
}

}  // namespace dsv41
