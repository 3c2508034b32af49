// Collectives over point-to-point messages, with a timeout that names the ranks that are missing
// (communicator.h).
#include "runtime/exchange/communicator.h"

#include <fmt/format.h>

#include <cstdlib>

#include "loader/error.h"
#include "runtime/exchange/backoff.h"

namespace dsv41 {
namespace {

constexpr int kGatherTag = 1000, kBroadcastTag = 1001;

}  // namespace

void Communicator::wait_all(std::span<Request> requests, std::span<const int> peers,
                            std::span<std::size_t> bytes, const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  Backoff backoff(oversubscribed());
  std::vector<bool> complete(requests.size(), false);
  for (std::size_t done = 0; done < requests.size();) {
    bool progress = false;
    for (std::size_t index = 0; index < requests.size(); ++index) {
      if (complete[index] || !test(requests[index], bytes.empty() ? nullptr : &bytes[index])) continue;
      complete[index] = progress = true;
      ++done;
    }
    if (progress) {
      backoff.reset();
      continue;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      std::string missing;
      for (std::size_t index = 0; index < requests.size(); ++index) {
        if (complete[index]) continue;
        missing +=
            fmt::format("{}rank {} ({})", missing.empty() ? "" : ", ", peers[index], host_of(peers[index]));
        cancel(requests[index]);
      }
      throw PeerError(fmt::format("{}: no sign of {} for {} s (raise --rank-timeout if it is only slow)",
                                  what, missing,
                                  std::chrono::duration_cast<std::chrono::seconds>(timeout_).count()));
    }
    backoff.wait();
  }
}

std::vector<std::string> Communicator::gather(const std::string& text, int root) {
  if (text.size() > kMaxText) throw std::length_error("gather: text too long");
  std::vector<Request> requests;
  std::vector<int> peers;
  if (rank() != root) {
    requests.push_back(send(std::as_bytes(std::span(text)), root, kGatherTag));
    peers.push_back(root);
    wait_all(requests, peers, {}, "start");
    return {};
  }
  std::vector<std::string> texts(static_cast<std::size_t>(size()));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == root) continue;
    auto& buffer = texts[static_cast<std::size_t>(peer)];
    buffer.resize(kMaxText);
    requests.push_back(receive(std::as_writable_bytes(std::span(buffer)), peer, kGatherTag));
    peers.push_back(peer);
  }
  std::vector<std::size_t> bytes(requests.size());
  wait_all(requests, peers, bytes, "start");
  for (std::size_t index = 0; index < peers.size(); ++index)
    texts[static_cast<std::size_t>(peers[index])].resize(bytes[index]);
  texts[static_cast<std::size_t>(root)] = text;
  return texts;
}

void Communicator::broadcast(std::span<std::byte> buffer, int root) {
  std::vector<Request> requests;
  std::vector<int> peers;
  if (rank() != root) {
    requests.push_back(receive(buffer, root, kBroadcastTag));
    peers.push_back(root);
  } else {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == root) continue;
      requests.push_back(send(buffer, peer, kBroadcastTag));
      peers.push_back(peer);
    }
  }
  std::vector<std::size_t> bytes(requests.size(), buffer.size());
  wait_all(requests, peers, bytes, "start");
  if (rank() != root && bytes.front() != buffer.size())
    throw PeerError(fmt::format("rank {} ({}) broadcast {} bytes where {} are due", root, host_of(root),
                                bytes.front(), buffer.size()));
}

void Communicator::barrier() {
  gather({}, 0);
  std::byte signal{};
  broadcast({&signal, 1}, 0);
}

bool started_by_launcher() {
  // Open MPI, PMIx (srun --mpi=pmix), PMI-1/2 (srun --mpi=pmi2, MPICH).
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

}  // namespace dsv41
