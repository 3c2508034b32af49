// Mailboxes in memory: one queue per (source, destination, tag), messages copied when they are sent and,
// whatever their receiver asks for, when there is a receive for them: as message layers do.
#include "tests/runtime/support/memory_communicator.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "loader/error.h"

namespace dsv41::testing {
namespace {

using Message = std::vector<std::byte>;

struct Mailboxes {
  std::mutex mutex;
  std::map<std::tuple<int, int, int>, std::deque<Message>> queues;
};

class MemoryCommunicator final : public Communicator {
 public:
  MemoryCommunicator(std::shared_ptr<Mailboxes> boxes, int rank, int size)
      : boxes_(std::move(boxes)), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host_of(int rank) const override { return "memory" + std::to_string(rank); }
  std::string transport() const override { return "memory"; }
  bool oversubscribed() const override { return true; }

  Request send(std::span<const std::byte> buffer, int destination, int tag) override {
    const std::lock_guard lock(boxes_->mutex);
    boxes_->queues[{rank_, destination, tag}].emplace_back(buffer.begin(), buffer.end());
    return add({});
  }

  Request receive(std::span<std::byte> buffer, int source, int tag) override {
    Pending pending{true, buffer, source, 0, false};
    const Request request = add(pending);
    posted_[{source, tag}].push_back(request.slot);
    return request;
  }

  bool test(Request& request, std::size_t* bytes) override {
    if (bytes != nullptr) *bytes = 0;
    if (request.empty()) return true;
    Pending& pending = pending_[request.slot];
    deliver();
    if (pending.receiving && !pending.complete) return false;
    request = {};
    if (pending.bytes > pending.buffer.size())
      throw PeerError("message of rank " + std::to_string(pending.source) +
                      " truncated: " + std::to_string(pending.bytes) + " bytes");
    if (bytes != nullptr) *bytes = pending.bytes;
    return true;
  }

  void cancel(Request& request) override {
    if (!request.empty()) pending_[request.slot].complete = true;
    request = {};
  }

  void abort(int exit_code) override { throw Aborted{exit_code}; }

 private:
  struct Pending {
    bool receiving = false;
    std::span<std::byte> buffer;
    int source = 0;
    std::size_t bytes = 0;  // of the message
    bool complete = false;
  };

  Request add(Pending pending) {
    pending_.push_back(std::move(pending));
    return {pending_.size() - 1};
  }

  /// Gives messages that have arrived to the receives in the order in which they were posted.
  void deliver() {
    const std::lock_guard lock(boxes_->mutex);
    for (auto& [from, posted] : posted_) {
      auto& queue = boxes_->queues[{from.first, rank_, from.second}];
      for (; !posted.empty(); posted.pop_front()) {
        Pending& first = pending_[posted.front()];
        if (first.complete) continue;  // cancelled
        if (queue.empty()) break;
        const Message& message = queue.front();
        first.bytes = message.size();
        first.complete = true;
        const std::size_t fitting = std::min(first.buffer.size(), message.size());
        if (fitting > 0) std::memcpy(first.buffer.data(), message.data(), fitting);
        queue.pop_front();
      }
    }
  }

  std::shared_ptr<Mailboxes> boxes_;
  int rank_, size_;
  std::deque<Pending> pending_;
  std::map<std::pair<int, int>, std::deque<std::size_t>> posted_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> memory_communicators(int size) {
  const auto boxes = std::make_shared<Mailboxes>();
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < size; ++rank)
    communicators.push_back(std::make_unique<MemoryCommunicator>(boxes, rank, size));
  return communicators;
}

}  // namespace dsv41::testing
