// Ranks that talk to each other: the few operations the runtime needs from a message layer.
// mpi_communicator.cc is the only file that includes mpi.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace dsv41 {

/// Handle of a non-blocking operation; the buffer must stay in place until it is complete.
struct Request {
  std::size_t slot = kEmpty;
  static constexpr std::size_t kEmpty = static_cast<std::size_t>(-1);
  bool empty() const { return slot == kEmpty; }
};

/// Used from one thread. Everything but abort() throws PeerError when the message layer fails.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Name of the machine a rank runs on.
  virtual std::string host_of(int rank) const = 0;
  std::string host() const { return host_of(rank()); }
  /// What carries the messages, for the start line: for example "Open MPI 4.1.4, ob1 (vader, tcp)".
  virtual std::string transport() const = 0;
  /// Whether this machine holds more ranks than cores: then a rank that waits had better sleep.
  virtual bool oversubscribed() const = 0;

  virtual Request send(std::span<const std::byte> buffer, int destination, int tag) = 0;
  virtual Request receive(std::span<std::byte> buffer, int source, int tag) = 0;
  /// Whether the operation is complete; then `bytes` (if given) is what was received and the handle is free
  /// again. A message longer than its buffer is a PeerError that names the rank.
  virtual bool test(Request& request, std::size_t* bytes = nullptr) = 0;
  /// Gives up a receive, or stops caring about a send. Nothing for an empty handle.
  virtual void cancel(Request& request) = 0;

  /// Ends the whole job at once with this exit code. Does not return.
  [[noreturn]] virtual void abort(int exit_code) = 0;

  // Collectives over point-to-point messages, used at start and end only. They throw PeerError naming the
  // ranks that have not arrived within the timeout, so that a stopped rank never hangs the others.
  void barrier();
  void broadcast(std::span<std::byte> buffer, int root);
  /// On the root: size() strings in rank order; elsewhere empty. At most kMaxText bytes each.
  std::vector<std::string> gather(const std::string& text, int root);

  static constexpr std::size_t kMaxText = 1 << 16;
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  void wait_all(std::span<Request> requests, std::span<const int> peers, std::span<std::size_t> bytes,
                const char* what);
  std::chrono::milliseconds timeout_ = std::chrono::seconds(60);
};

/// Initializes the message layer (MPI_Init_thread) on first use; finalized at destruction. Ends the process
/// when the other ranks do not come, or at the end do not go, within the timeout.
std::unique_ptr<Communicator> make_mpi_communicator(
    std::chrono::milliseconds timeout = std::chrono::seconds(60));
/// A single rank without any message layer.
std::unique_ptr<Communicator> make_single_communicator();
/// Whether this process was started by an MPI launcher.
bool started_by_launcher();

}  // namespace dsv41
