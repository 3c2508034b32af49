#include "benchmarks/gpu/thread_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "loader/error.h"

namespace dsv41::bench {
namespace {

struct Message {
  std::span<const std::byte> bytes;
  std::atomic<bool> taken = false;
};

/// What is on its way, by destination and tag.
struct Mailboxes {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> queues;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Mailboxes> boxes, int rank) : boxes_(std::move(boxes)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return 2; }
  std::string host_of(int) const override { return "this process"; }
  std::string transport() const override { return "threads"; }
  bool oversubscribed() const override { return std::thread::hardware_concurrency() < 2; }

  Request send(std::span<const std::byte> buffer, int destination, int tag) override {
    auto message = std::make_shared<Message>();
    message->bytes = buffer;
    const std::lock_guard lock(boxes_->mutex);
    boxes_->queues[{destination, tag}].push_back(message);
    return add({std::move(message), {}, tag});
  }
  Request receive(std::span<std::byte> buffer, int, int tag) override {
    const Request request = add({nullptr, buffer, tag});
    posted_[tag].push_back(request.slot);
    return request;
  }
  bool test(Request& request, std::size_t* bytes) override {
    if (request.empty()) return true;
    Pending& pending = pending_[request.slot];
    if (pending.message == nullptr) match(pending.tag);
    if (pending.message == nullptr) return false;
    Message& message = *pending.message;
    if (pending.receiving()) {
      const std::size_t size = message.bytes.size();
      if (size > pending.buffer.size()) throw PeerError("a message is longer than its buffer");
      std::memcpy(pending.buffer.data(), message.bytes.data(), size);
      message.taken.store(true, std::memory_order_release);
      if (bytes != nullptr) *bytes = size;
    } else if (!message.taken.load(std::memory_order_acquire)) {
      return false;
    }
    cancel(request);
    return true;
  }
  void cancel(Request& request) override {
    if (request.empty()) return;
    auto& posted = posted_[pending_[request.slot].tag];
    posted.erase(std::remove(posted.begin(), posted.end(), request.slot), posted.end());
    pending_[request.slot] = {};
    free_.push_back(request.slot);
    request = {};
  }
  void abort(int exit_code) override { std::_Exit(exit_code); }

 private:
  struct Pending {
    std::shared_ptr<Message> message;  // of a receive: once it is there
    std::span<std::byte> buffer;       // of a receive
    int tag = 0;
    bool receiving() const { return buffer.data() != nullptr; }
  };

  Request add(Pending pending) {
    if (free_.empty()) {
      pending_.push_back(std::move(pending));
      return {pending_.size() - 1};
    }
    const std::size_t slot = free_.back();
    free_.pop_back();
    pending_[slot] = std::move(pending);
    return {slot};
  }

  /// Gives messages to receives in the order of both.
  void match(int tag) {
    const std::lock_guard lock(boxes_->mutex);
    auto& queue = boxes_->queues[{rank_, tag}];
    auto& posted = posted_[tag];
    for (; !queue.empty() && !posted.empty(); queue.pop_front(), posted.pop_front())
      pending_[posted.front()].message = std::move(queue.front());
  }

  std::shared_ptr<Mailboxes> boxes_;
  const int rank_;
  std::vector<Pending> pending_;
  std::vector<std::size_t> free_;
  std::map<int, std::deque<std::size_t>> posted_;
};

}  // namespace

std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> thread_communicators() {
  const auto boxes = std::make_shared<Mailboxes>();
  return {std::make_unique<ThreadCommunicator>(boxes, 0), std::make_unique<ThreadCommunicator>(boxes, 1)};
}

}  // namespace dsv41::bench
