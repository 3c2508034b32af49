// Messages between the host and expert ranks: layout, sizes and the check of everything received
// (docs/runtime.md, "Exchange"). Plain bytes in, plain bytes out; no message layer here.
//
//   request  Header | E4M3 codes [rows, D] | E8M0 scales [rows, D/32] | WireRoute [routes]     host -> expert
//   rank reply    Header | RankTiming | bf16 [routes, D], in the order of the request's routes      expert
//   rank -> host control  ControlHeader | text both ways
//
// A row of a request is numbered by its slot: the rows that this rank needs, each once, in ascending row
// order.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loader/error.h"
#include "runtime/exchange/message_memory.h"
#include "runtime/experts.h"
#include "runtime/placement.h"

namespace dsv41::wire {

static_assert(std::endian::native == std::endian::little,
              "headers and bf16 rows travel in little-endian order");

inline constexpr std::uint32_t kMagic = 0x31343144;  // "D141"
inline constexpr std::uint16_t kProtocol = 2;        // raised with every change of this file's layout

enum Tag : int {
  kRequestTag = 1,
  kReplyTag = 2,
  kControlTag = 3
};  // 1000 and up: collectives (communicator.cc)

enum class Kind : std::uint16_t {
  Request = 1,
  Reply = 2,
  KeepAlive = 3,  // host: at work; expert rank: still computing
  Failure = 4,    // expert rank -> host: code and text, the rank's last words
  Shutdown = 5,   // host -> expert rank: end with this code
  Farewell = 6,   // expert rank -> host: will send nothing more
  Loading = 7,    // expert rank -> host: loads experts; text: bytes done and bytes there will be
  Ready = 8,      // expert rank -> host: has loaded, serves
};

/// First 48 bytes of requests and replies; a reply repeats what it answers.
struct Header {
  std::uint32_t magic = kMagic;
  std::uint16_t protocol = kProtocol;
  Kind kind = Kind::Request;
  std::uint64_t step = 0;
  std::uint64_t call = 0;   // counts the requests of the host to this rank, from 1
  std::uint64_t bytes = 0;  // of the whole message
  std::uint32_t block = 0;
  std::uint32_t rows = 0;
  std::uint32_t routes = 0;
  std::uint32_t dim = 0;
};
static_assert(sizeof(Header) == 48);

struct WireRoute {
  std::uint32_t slot = 0;
  std::uint32_t expert = 0;
  float weight = 0;
};
static_assert(sizeof(WireRoute) == 12);
static_assert(sizeof(RankTiming) == 64, "travels as it lies in memory");

struct ControlHeader {
  std::uint32_t magic = kMagic;
  std::uint16_t protocol = kProtocol;
  Kind kind = Kind::KeepAlive;
  std::uint32_t code = 0;        // ExitCode of Failure and Shutdown
  std::uint32_t text_bytes = 0;  // of Failure and Loading
};
static_assert(sizeof(ControlHeader) == 16);
inline constexpr std::size_t kMaxControlText = 4080;
inline constexpr std::size_t kControlBytes = sizeof(ControlHeader) + kMaxControlText;

/// Where the parts of a request lie; the whole is a pure function of (rows, routes, dim).
struct RequestLayout {
  RequestLayout(std::uint64_t row_count, std::uint64_t route_count, std::uint64_t dim)
      : codes(sizeof(Header)),
        scales(codes + row_count * dim),
        routes(scales + row_count * (dim / kBlock)),
        bytes(routes + route_count * sizeof(WireRoute)) {}
  std::uint64_t codes, scales, routes, bytes;  // offsets, then the total
};
struct ReplyLayout {
  ReplyLayout(std::uint64_t route_count, std::uint64_t dim)
      : timing(sizeof(Header)),
        rows(timing + sizeof(RankTiming)),
        bytes(rows + route_count * dim * sizeof(BFloat16)) {}
  std::uint64_t timing, rows, bytes;
};

/// Throws UsageError when the largest message of these limits would not fit the message layer (2 GiB).
void check_limits(const ExpertLimits& limits);

/// What comes first in a reply and is written last.
struct ReplyHead {
  Header header;
  RankTiming timing;
};
static_assert(sizeof(ReplyHead) == sizeof(Header) + sizeof(RankTiming), "travels as it lies in memory");

/// Bytes aligned to a cache line, not touched before use: a buffer for the largest message costs what is used
/// of it.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes);
  std::span<std::byte> all() const { return {data_.get(), bytes_}; }
  std::span<std::byte> first(std::size_t bytes) const { return all().first(bytes); }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_;
};

template <class T>
void store(std::byte* at, const T& value) {
  std::memcpy(at, &value, sizeof value);
}
template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

/// What an expert rank accepts.
struct RequestRules {
  const ExpertLimits& limits;
  const ExpertGeometry& geometry;
  const Placement& placement;
  std::uint32_t owner = 0;  // whose experts may be asked for
};

/// How much of a request read_request() looks at: its first and, at most, its last bytes.
inline constexpr std::size_t kRequestHead = sizeof(Header);
constexpr std::size_t request_tail(const ExpertLimits& limits) {
  return std::size_t{limits.max_routes} * sizeof(WireRoute);
}

/// Checks a request and fills `routes` (row = slot). `sender` names the peer in messages. Throws PeerError.
Header read_request(const MessageEnds& message, const RequestRules& rules, std::uint64_t expected_call,
                    std::string_view sender, std::vector<Route>& routes);
Header read_request(std::span<const std::byte> message, const RequestRules& rules,
                    std::uint64_t expected_call, std::string_view sender, std::vector<Route>& routes);
/// The activations of a checked request; views into the message, whose bytes are not touched.
QuantizedRows request_rows(std::span<const std::byte> message, const Header& header);

/// Checks that a reply answers `request`. Throws PeerError.
RankTiming read_reply(std::span<const std::byte> message, const Header& request, std::string_view sender);

struct Control {
  Kind kind = Kind::KeepAlive;
  ExitCode code = ExitCode::Ok;
  std::string text;  // one line of printable characters
};
/// Writes a control message and returns its bytes; longer text is cut.
std::span<const std::byte> write_control(std::span<std::byte> buffer, Kind kind, ExitCode code = ExitCode::Ok,
                                         std::string_view text = {});
Control read_control(std::span<const std::byte> message, std::string_view sender);

/// Messages in host memory, the usual case.
class HostMessages final : public MessageMemory {
 public:
  std::span<std::byte> allocate(std::size_t bytes) override { return buffers_.emplace_back(bytes).all(); }
  MessageEnds read_ends(std::span<const std::byte> message, std::size_t head, std::size_t tail,
                        const std::function<void()>&) override {
    return ends_of(message, head, tail);
  }
  void write_head(std::span<std::byte> message, std::span<const std::byte> bytes,
                  const std::function<void()>&) override {
    std::memcpy(message.data(), bytes.data(), bytes.size());
  }

 private:
  std::vector<Buffer> buffers_;
};

/// The text of Loading.
std::string write_progress(const LoadProgress& progress);
/// Throws PeerError when the text is not one that write_progress makes.
LoadProgress read_progress(std::string_view text, std::string_view sender);

}  // namespace dsv41::wire
