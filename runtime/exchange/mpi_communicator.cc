// The communicator over MPI: the only file that includes mpi.h (communicator.h; docs/runtime.md, "Exchange").
#include <fmt/format.h>
#define OMPI_SKIP_MPICXX 1  // the C interface only
#include <mpi.h>
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>  // MPIX_Query_cuda_support
#endif
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>

#include "loader/error.h"
#include "runtime/exchange/communicator.h"
#include "runtime/exchange/device_messages.h"
#include "runtime/exchange/raw_round_trips.h"
#include "runtime/exchange/shared_segments.h"
#include "runtime/experts.h"

namespace dsv41 {
namespace {

constexpr std::size_t kHostNameBytes = 256;
constexpr std::chrono::seconds kStartAllowance{3};  // connections are made and libraries loaded meanwhile
// The host rank takes up to 2 s to give up a rank that is lost, and is waited for.
constexpr std::chrono::milliseconds kFinalizeAllowance{2500}, kFinalizeTimeout{10'000};
constexpr std::chrono::milliseconds kAbortDelay{300};
constexpr std::chrono::milliseconds kSettleDelay{200};

std::string error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) throw PeerError(fmt::format("{}: {}", what, error_text(code)));
}

/// Names of the components of one MPI framework ("pml", "btl", …) that are still open: the library registers
/// their control variables as <framework>_<component>_<variable> and withdraws those of components it did not
/// select.
std::set<std::string> open_components(std::string_view framework) {
  std::set<std::string> components;
  int count = 0;
  if (MPI_T_cvar_get_num(&count) != MPI_SUCCESS) return components;
  const std::string prefix = std::string(framework) + "_", suffix = "_major_version";
  for (int index = 0; index < count; ++index) {
    std::array<char, 256> name{}, description{};
    int name_length = name.size(), description_length = description.size(), verbosity = 0, bind = 0,
        scope = 0;
    MPI_Datatype type{};
    MPI_T_enum values{};
    if (MPI_T_cvar_get_info(index, name.data(), &name_length, &verbosity, &type, &values, description.data(),
                            &description_length, &bind, &scope) != MPI_SUCCESS)
      continue;
    const std::string_view variable = name.data();
    if (variable.size() <= prefix.size() + suffix.size() || !variable.starts_with(prefix) ||
        !variable.ends_with(suffix))
      continue;
    components.emplace(variable.substr(prefix.size(), variable.size() - prefix.size() - suffix.size()));
  }
  components.erase("base");
  return components;
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> version{};
  int length = 0;
  MPI_Get_library_version(version.data(), &length);
  const std::string text(version.data(), static_cast<std::size_t>(length));
  return text.substr(0, text.find_first_of(",\n"));  // "Open MPI v4.1.4, package: …"
}

std::string describe_transport() {
  std::string text = library_version();

  int provided = 0;
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS) return text;
  const auto pml = open_components("pml");
  const auto btl = open_components("btl");
  MPI_T_finalize();
  if (!pml.empty()) text += fmt::format(", {}", fmt::join(pml, " "));
  if (pml.contains("ob1") && !btl.empty()) {
    text += fmt::format(" ({})", fmt::join(btl, ", "));
  } else if (pml.contains("ucx")) {
    const char* transports = std::getenv("UCX_TLS");
    text += fmt::format(" (UCX_TLS={})", transports != nullptr ? transports : "all");
  }
  return text;
}

/// "rank 2 (node7)" as far as the launcher's environment tells, for messages before the message layer is up.
std::string own_name() {
  std::array<char, kHostNameBytes> host{};
  gethostname(host.data(), host.size() - 1);
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (const char* rank = std::getenv(name)) return fmt::format("rank {} ({})", rank, host.data());
  return host.data();
}

/// By mpirun's daemons, not by srun.
bool started_by_mpirun() {
  return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr;
}

/// Ends this process with one line unless the object is gone in time: the start and the end of the message
/// layer wait for all ranks without a limit, and when one of them is stopped or lost the others must still
/// end.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds timeout, const char* what)
      : thread_([this, timeout, what] {
          std::unique_lock lock(mutex_);
          if (finished_.wait_for(lock, timeout, [this] { return done_; })) return;
          fmt::print(stderr, "dsv41-mpi: {}: other ranks did not {} within {} s\n", own_name(), what,
                     std::chrono::duration<double>(timeout).count());
          std::fflush(stderr);
          std::this_thread::sleep_for(kAbortDelay);
          std::_Exit(static_cast<int>(ExitCode::Peer));
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    finished_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the others
};

/// What another rank calls its machine becomes part of messages: anything but a name is a rank that talks
/// nonsense.
void check_host_name(std::string_view name, int sender) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (name.empty() || name.size() >= kHostNameBytes || !plain)
    throw PeerError(fmt::format("malformed message from rank {}: {} bytes that are not a host name", sender,
                                name.size()));
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(std::chrono::milliseconds timeout) {
    set_timeout(timeout);
    {
      const Watchdog watchdog(timeout + kStartAllowance, "start");
      int provided = 0;
      if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        throw ResourceError(
            "MPI_Init_thread failed: is the program started by the launcher of the same MPI library?");
    }
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    // Under srun the tcp transport of Open MPI 4.1.4 crashes when a message reaches a rank that is still
    // inside MPI_Init, which ranks leave at slightly different times.
    if (size_ > 1 && !started_by_mpirun()) std::this_thread::sleep_for(kSettleDelay);
    exchange_host_names();
    transport_ = describe_transport();
  }

  ~MpiCommunicator() override { finalize(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host_of(int rank) const override { return hosts_.at(static_cast<std::size_t>(rank)); }
  std::string transport() const override { return transport_; }
  bool oversubscribed() const override { return oversubscribed_; }

  Request send(std::span<const std::byte> buffer, int destination, int tag) override {
    const std::size_t slot = free_slot(destination, false);
    const int code = MPI_Isend(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, destination, tag,
                               MPI_COMM_WORLD, &slots_[slot].request);
    return started(slot, code, "sending to");
  }

  Request receive(std::span<std::byte> buffer, int source, int tag) override {
    const std::size_t slot = free_slot(source, true);
    const int code = MPI_Irecv(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, source, tag,
                               MPI_COMM_WORLD, &slots_[slot].request);
    return started(slot, code, "receiving from");
  }

  bool test(Request& request, std::size_t* bytes) override {
    if (request.empty()) {
      if (bytes != nullptr) *bytes = 0;
      return true;
    }
    Slot& slot = slots_[request.slot];
    int complete = 0;
    MPI_Status status{};
    const int code = MPI_Test(&slot.request, &complete, &status);
    if (code != MPI_SUCCESS) {
      const std::string text = fmt::format("message exchange with rank {} ({}): {}", slot.peer,
                                           host_of(slot.peer), error_text(code));
      release(request);
      throw PeerError(text);
    }
    if (complete == 0) return false;
    if (bytes != nullptr) {
      int count = 0;
      MPI_Get_count(&status, MPI_BYTE, &count);
      *bytes = count > 0 ? static_cast<std::size_t>(count) : 0;
    }
    release(request);
    return true;
  }

  void cancel(Request& request) override {
    if (request.empty()) return;
    Slot& slot = slots_[request.slot];
    if (slot.receiving) {
      MPI_Cancel(&slot.request);
      int complete = 0;  // at once, unless the message is just arriving
      for (int attempt = 0; attempt < 1000 && complete == 0; ++attempt)
        if (MPI_Test(&slot.request, &complete, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
    }
    if (slot.request != MPI_REQUEST_NULL) MPI_Request_free(&slot.request);
    release(request);
  }

  void abort(int exit_code) override {
    std::fflush(nullptr);
    // The launcher drops output that it has not read when a job aborts: the line that says why must get
    // through.
    std::this_thread::sleep_for(kAbortDelay);
    // The launcher of Open MPI ends a job whose rank leaves without MPI_Finalize, with that rank's code. It
    // does so after MPI_Abort, too, but version 4.1.4 hangs or crashes in one of twenty such jobs with a
    // stopped rank.
    if (!started_by_mpirun()) MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }

 private:
  struct Slot {
    MPI_Request request = MPI_REQUEST_NULL;
    int peer = 0;
    bool receiving = false;
  };

  std::size_t free_slot(int peer, bool receiving) {
    if (free_.empty()) {
      free_.push_back(slots_.size());
      slots_.emplace_back();
    }
    const std::size_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = {MPI_REQUEST_NULL, peer, receiving};
    return slot;
  }

  Request started(std::size_t slot, int code, const char* what) {
    if (code == MPI_SUCCESS) return {slot};
    const int peer = slots_[slot].peer;
    free_.push_back(slot);
    throw PeerError(fmt::format("{} rank {} ({}): {}", what, peer, host_of(peer), error_text(code)));
  }

  void release(Request& request) {
    free_.push_back(request.slot);
    request = {};
  }

  /// Tells every rank where the others are, and removes the names of shared memory once every rank has mapped
  /// the segments of all ranks of its machine. Messages go to and from rank 0 only, as later in the run.
  void exchange_host_names() {
    std::array<char, kHostNameBytes> mine{};
    gethostname(mine.data(), mine.size() - 1);
    hosts_.assign(static_cast<std::size_t>(size_), "host not known yet");
    hosts_[static_cast<std::size_t>(rank_)] = mine.data();
    const std::vector<std::string> names = gather(mine.data(), 0);
    std::vector<char> all(static_cast<std::size_t>(size_) * kHostNameBytes);
    for (std::size_t rank = 0; rank < names.size(); ++rank) {
      check_host_name(names[rank], static_cast<int>(rank));
      names[rank].copy(all.data() + rank * kHostNameBytes, kHostNameBytes - 1);
    }
    broadcast(std::as_writable_bytes(std::span(all)), 0);
    for (std::size_t rank = 0; rank < hosts_.size(); ++rank) {
      const std::string_view block(all.data() + rank * kHostNameBytes, kHostNameBytes);
      hosts_[rank] = block.substr(0, block.find('\0'));
      check_host_name(hosts_[rank], 0);
    }

    const auto ranks_here = std::count(hosts_.begin(), hosts_.end(), hosts_[static_cast<std::size_t>(rank_)]);
    oversubscribed_ =
        ranks_here > static_cast<std::ptrdiff_t>(std::max(1u, std::thread::hardware_concurrency()));
    const std::vector<std::string> mapped = mapped_segments();
    const std::vector<std::string> complete = gather(std::ssize(mapped) == ranks_here ? "all" : "", 0);
    auto remove = static_cast<std::byte>(std::find(complete.begin(), complete.end(), "") == complete.end());
    broadcast({&remove, 1}, 0);
    if (remove != std::byte{0}) removed_segment_ = remove_segment_name(mapped, rank_);
  }

  void finalize() {
    const Watchdog watchdog(
        std::min<std::chrono::milliseconds>(timeout() + kFinalizeAllowance, kFinalizeTimeout), "end");
    restore_segment_name(removed_segment_);
    MPI_Finalize();
  }

  int rank_ = 0, size_ = 1;
  bool oversubscribed_ = true;  // as long as nobody knows
  std::vector<std::string> hosts_;
  std::string transport_, removed_segment_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(std::chrono::milliseconds timeout) {
  return std::make_unique<MpiCommunicator>(timeout);
}

std::vector<std::uint64_t> raw_round_trips(std::size_t bytes_out, std::size_t bytes_in, std::size_t trips) {
  constexpr int tag = 5;  // of no message of a job
  int rank = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  std::vector<char> out(bytes_out, 1), in(bytes_in, 1);
  std::vector<std::uint64_t> times;
  times.reserve(trips);
  const auto send = [&](const std::vector<char>& buffer) {
    check(MPI_Send(buffer.data(), static_cast<int>(buffer.size()), MPI_CHAR, 1 - rank, tag, MPI_COMM_WORLD),
          "MPI_Send");
  };
  const auto receive = [&](std::vector<char>& buffer) {
    check(MPI_Recv(buffer.data(), static_cast<int>(buffer.size()), MPI_CHAR, 1 - rank, tag, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE),
          "MPI_Recv");
  };
  for (std::size_t trip = 0; trip < trips && rank < 2; ++trip) {
    const std::uint64_t begin = monotonic_ns();
    if (rank == 0) {
      send(out);
      receive(in);
    } else {
      receive(out);
      send(in);
    }
    times.push_back(monotonic_ns() - begin);
  }
  return times;
}

CudaSupport mpi_cuda_support() {
  CudaSupport support{false, library_version()};
#if defined(MPIX_CUDA_AWARE_SUPPORT)
  support.yes = MPIX_Query_cuda_support() == 1;
#endif
  return support;
}

namespace {

std::string send_device_pattern(cuda::Device& device) {
  // Longer than what MPI libraries send eagerly, and of odd length.
  constexpr std::size_t kBytes = (std::size_t{1} << 17) + 13;
  using Kind = cuda::DeviceBuffer::Kind;
  const cuda::DeviceBuffer from(device, Kind::Device, kBytes), to(device, Kind::Device, kBytes);
  const cuda::DeviceBuffer sent(device, Kind::Pinned, kBytes), received(device, Kind::Pinned, kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) sent.data()[i] = static_cast<std::byte>(i * 131 + (i >> 8));
  std::memset(received.data(), 0, kBytes);
  device.upload(cuda::Queue::Compute, from.data(), sent.data(), kBytes);
  device.upload(cuda::Queue::Compute, to.data(), received.data(), kBytes);
  device.synchronize(device.record(cuda::Queue::Compute));

  std::array<MPI_Request, 2> requests{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  int code = MPI_Irecv(to.data(), static_cast<int>(kBytes), MPI_BYTE, 0, 1, MPI_COMM_SELF, &requests[0]);
  if (code == MPI_SUCCESS)
    code = MPI_Isend(from.data(), static_cast<int>(kBytes), MPI_BYTE, 0, 1, MPI_COMM_SELF, &requests[1]);
  if (code == MPI_SUCCESS)
    code = MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  if (code != MPI_SUCCESS) return error_text(code);

  device.download(cuda::Queue::Compute, received.data(), to.data(), kBytes);
  device.synchronize(device.record(cuda::Queue::Compute));
  if (std::memcmp(sent.data(), received.data(), kBytes) != 0)
    return "a message in device memory arrived damaged";
  return {};
}

}  // namespace

std::string exchange_device_pattern(const std::function<std::unique_ptr<cuda::Device>()>& open) {
  if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS) return "MPI_Init failed";
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  std::string failure;
  std::exception_ptr thrown;
  try {
    failure = send_device_pattern(*open());
  } catch (...) {
    thrown = std::current_exception();
  }
  MPI_Finalize();
  if (thrown) std::rethrow_exception(thrown);
  return failure;
}

}  // namespace dsv41
