// Preloaded into ranks by fault_matrix.py, which thereby recognises phases and makes a rank send nonsense;
// the program itself knows nothing of it. Environment: FAULT_DIRECTORY. There, files "start.RANK" and
// "shutdown.RANK" appear when a rank is about to enter and to leave the message layer (and waits
// FAULT_HOLD_MS then), and once the file "corrupt.RANK.TAG" exists the next message of that rank with that
// tag is nonsense; "corrupt.RANK.TAG.N" means the Nth of them.
#include <fcntl.h>
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

std::string file(const std::string& name) {
  const char* directory = std::getenv("FAULT_DIRECTORY");
  return directory == nullptr ? std::string() : std::string(directory) + "/" + name;
}

std::string rank() {
  const char* text = std::getenv("OMPI_COMM_WORLD_RANK");
  return text == nullptr ? "none" : text;
}

void mark(const std::string& phase) {
  const int descriptor = ::open(file(phase + "." + rank()).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
  if (descriptor >= 0) ::close(descriptor);
  const char* hold = std::getenv("FAULT_HOLD_MS");
  if (hold != nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(hold)));
}

}  // namespace

extern "C" {

int MPI_Init_thread(int* count, char*** arguments, int required, int* provided) {
  mark("start");
  return PMPI_Init_thread(count, arguments, required, provided);
}

int MPI_Finalize() {
  mark("shutdown");
  return PMPI_Finalize();
}

int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int destination, int tag,
              MPI_Comm communicator, MPI_Request* request) {
  static std::vector<char> nonsense;  // stays: the message may be under way for long
  static std::map<int, int> sent;     // by tag
  const std::string order = file("corrupt." + rank() + "." + std::to_string(tag));
  const std::string numbered = order + "." + std::to_string(++sent[tag]);
  if (nonsense.empty() && (::unlink(order.c_str()) == 0 || ::unlink(numbered.c_str()) == 0)) {
    nonsense.assign(static_cast<std::size_t>(count), '\xEE');
    buffer = nonsense.data();
  }
  return PMPI_Isend(buffer, count, type, destination, tag, communicator, request);
}

}  // extern "C"
