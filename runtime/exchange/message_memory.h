// Where an expert rank keeps its messages: in host memory, or in memory of its device that the message layer
// takes as well (docs/cuda.md, "Transport"). Messages are the same on the wire.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace dsv41 {

/// What of a message its reader on the host looks at: all but the rows, which may lie on a device.
struct MessageEnds {
  std::span<const std::byte> head, tail;  // the first and last bytes; they overlap in a short message
  std::size_t bytes = 0;                  // of the whole message
};

class MessageMemory {
 public:
  virtual ~MessageMemory() = default;
  /// Valid as long as the object.
  virtual std::span<std::byte> allocate(std::size_t bytes) = 0;
  /// The first `head` and last `tail` bytes, fewer where the message is shorter; valid until the next call.
  /// `alive` as in ExpertEngine::compute.
  virtual MessageEnds read_ends(std::span<const std::byte> message, std::size_t head, std::size_t tail,
                                const std::function<void()>& alive) = 0;
  /// Copies `bytes` to the beginning of `message`.
  virtual void write_head(std::span<std::byte> message, std::span<const std::byte> bytes,
                          const std::function<void()>& alive) = 0;
};

/// The ends of a message in host memory.
MessageEnds ends_of(std::span<const std::byte> message, std::size_t head, std::size_t tail);

}  // namespace dsv41
