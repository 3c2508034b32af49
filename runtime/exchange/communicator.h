// Ranks that talk to each other: the few operations the runtime needs from a message layer.
// mpi_communicator.cc is the only file that includes mpi.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace dsv41 {

/// Handle of a non-blocking operation; the buffer must stay in place until it is complete.
struct Request {
  std::size_t slot = static_cast<std::size_t>(-1);
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string host() const = 0;
  /// What carries the messages, for the start line: for example "Open MPI 4.1.4, ob1 (vader, tcp)".
  virtual std::string transport() const = 0;

  virtual Request send(std::span<const std::byte> buffer, int destination, int tag) = 0;
  virtual Request receive(std::span<std::byte> buffer, int source, int tag) = 0;
  /// Whether the operation is complete; then `bytes` (if given) is what was received and the handle is free again.
  virtual bool test(Request& request, std::size_t* bytes = nullptr) = 0;
  virtual void cancel(Request& request) = 0;

  // Collectives, used at start and end only.
  virtual void barrier() = 0;
  virtual void broadcast(std::span<std::byte> buffer, int root) = 0;
  /// On the root: size() strings in rank order; elsewhere empty.
  virtual std::vector<std::string> gather(const std::string& text, int root) = 0;

  /// Ends the whole job at once with this exit code. Does not return.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

/// Initializes the message layer (MPI_Init_thread) on first use; finalized at destruction.
std::unique_ptr<Communicator> make_mpi_communicator();
/// A single rank without any message layer.
std::unique_ptr<Communicator> make_single_communicator();
/// Whether this process was started by an MPI launcher.
bool started_by_launcher();

}  // namespace dsv41
