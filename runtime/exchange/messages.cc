// Layout and strict checks of the messages between ranks (messages.h; docs/runtime.md, "Exchange").
#include "runtime/exchange/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace dsv41::wire {
namespace {

template <class... Values>
[[noreturn]] void malformed(std::string_view sender, fmt::format_string<Values...> format,
                            Values&&... values) {
  throw PeerError(fmt::format("malformed message from {}: {}", sender,
                              fmt::format(format, std::forward<Values>(values)...)));
}

/// The part of the check that requests and replies share: after it the header's own numbers may be read.
Header read_header(std::span<const std::byte> head, std::size_t bytes, Kind kind, std::string_view sender) {
  if (bytes < sizeof(Header))
    malformed(sender, "{} bytes, shorter than a header of {}", bytes, sizeof(Header));
  const auto header = load<Header>(head.data());
  if (header.magic != kMagic) malformed(sender, "magic {:#x} instead of {:#x}", header.magic, kMagic);
  if (header.protocol != kProtocol)
    malformed(sender, "protocol version {}, this program speaks {}", header.protocol, kProtocol);
  if (header.kind != kind)
    malformed(sender, "kind {} where {} is due", static_cast<unsigned>(header.kind),
              static_cast<unsigned>(kind));
  if (header.bytes != bytes) malformed(sender, "header says {} bytes, {} arrived", header.bytes, bytes);
  return header;
}

}  // namespace

void check_limits(const ExpertLimits& limits) {
  const std::uint64_t largest = std::max(RequestLayout(limits.max_rows, limits.max_routes, limits.dim).bytes,
                                         ReplyLayout(limits.max_routes, limits.dim).bytes);
  if (largest > static_cast<std::uint64_t>(std::numeric_limits<int>::max()))
    throw UsageError(fmt::format(
        "a step of {} rows makes messages of up to {} bytes, more than 2 GiB: use fewer rows per step",
        limits.max_rows, largest));
}

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t kAlignment = 64;
  data_.reset(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, ceil_div(bytes + 1, kAlignment) * kAlignment)));
  if (!data_)
    throw ResourceError(
        fmt::format("no memory for a message buffer of {} bytes: use fewer rows per step", bytes));
}

void Buffer::Free::operator()(std::byte* data) const {
  std::free(data);
}

Header read_request(std::span<const std::byte> message, const RequestRules& rules,
                    std::uint64_t expected_call, std::string_view sender, std::vector<Route>& routes) {
  return read_request(ends_of(message, kRequestHead, request_tail(rules.limits)), rules, expected_call,
                      sender, routes);
}

Header read_request(const MessageEnds& message, const RequestRules& rules, std::uint64_t expected_call,
                    std::string_view sender, std::vector<Route>& routes) {
  const Header header = read_header(message.head, message.bytes, Kind::Request, sender);
  if (header.call != expected_call) malformed(sender, "call {} where {} is due", header.call, expected_call);
  if (header.dim != rules.limits.dim)
    malformed(sender, "rows of {} values, the model has {}", header.dim, rules.limits.dim);
  const auto& experts_per_block = rules.geometry.experts_per_block;
  if (header.block >= experts_per_block.size())
    malformed(sender, "block {} of a model with {}", header.block, experts_per_block.size());
  if (header.rows == 0 || header.rows > rules.limits.max_rows)
    malformed(sender, "{} rows, a step has 1 to {}", header.rows, rules.limits.max_rows);
  if (header.routes < header.rows || header.routes > rules.limits.max_routes)
    malformed(sender, "{} routes for {} rows, a step has at most {}", header.routes, header.rows,
              rules.limits.max_routes);
  const RequestLayout layout(header.rows, header.routes, header.dim);
  if (layout.bytes != message.bytes)
    malformed(sender, "{} bytes, but {} rows and {} routes make {}", message.bytes, header.rows,
              header.routes, layout.bytes);

  const std::uint32_t experts = experts_per_block[header.block];
  routes.resize(header.routes);
  const std::byte* const route_bytes =
      message.tail.data() + message.tail.size() - (layout.bytes - layout.routes);
  for (std::uint32_t index = 0; index < header.routes; ++index) {
    const auto route = load<WireRoute>(route_bytes + index * sizeof(WireRoute));
    if (route.slot >= header.rows)
      malformed(sender, "route {} names row {} of {}", index, route.slot, header.rows);
    if (route.expert >= experts)
      malformed(sender, "route {} names expert {}, block {} has {}", index, route.expert, header.block,
                experts);
    const std::uint32_t owner = rules.placement.owner(header.block, route.expert);
    if (owner != rules.owner)
      malformed(sender, "route {} asks for expert {} of block {}, which rank {} owns", index, route.expert,
                header.block, owner + 1);
    // Every slot is used, in order, and no (slot, expert) twice.
    const bool first = index == 0;
    const Route previous = first ? Route{} : routes[index - 1];
    const bool next_slot = first ? route.slot == 0 : route.slot == previous.row + 1;
    const bool same_slot = !first && route.slot == previous.row && route.expert > previous.expert;
    if (!next_slot && !same_slot)
      malformed(sender, "route {} (row {}, expert {}) is out of order", index, route.slot, route.expert);
    routes[index] = {route.slot, route.expert, route.weight};
  }
  if (routes.back().row + 1 != header.rows)
    malformed(sender, "{} rows, but routes use only {}", header.rows, routes.back().row + 1);
  return header;
}

QuantizedRows request_rows(std::span<const std::byte> message, const Header& header) {
  const RequestLayout layout(header.rows, header.routes, header.dim);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(message.data());
  return {bytes + layout.codes, bytes + layout.scales, header.rows, header.dim};
}

RankTiming read_reply(std::span<const std::byte> message, const Header& request, std::string_view sender) {
  const Header header = read_header(message, message.size(), Kind::Reply, sender);
  const auto same = [&](const char* what, std::uint64_t got, std::uint64_t due) {
    if (got != due) malformed(sender, "a reply with {} {}, {} was asked", what, got, due);
  };
  same("call", header.call, request.call);
  same("step", header.step, request.step);
  same("block", header.block, request.block);
  same("rows", header.rows, request.rows);
  same("routes", header.routes, request.routes);
  same("dim", header.dim, request.dim);
  same("bytes", message.size(), ReplyLayout(header.routes, header.dim).bytes);
  return load<RankTiming>(message.data() + sizeof(Header));
}

std::span<const std::byte> write_control(std::span<std::byte> buffer, Kind kind, ExitCode code,
                                         std::string_view text) {
  text = text.substr(0, std::min(kMaxControlText, buffer.size() - sizeof(ControlHeader)));
  ControlHeader header;
  header.kind = kind;
  header.code = static_cast<std::uint32_t>(code);
  header.text_bytes = static_cast<std::uint32_t>(text.size());
  store(buffer.data(), header);
  if (!text.empty()) std::memcpy(buffer.data() + sizeof header, text.data(), text.size());
  return buffer.first(sizeof header + text.size());
}

Control read_control(std::span<const std::byte> message, std::string_view sender) {
  if (message.size() < sizeof(ControlHeader))
    malformed(sender, "{} bytes, shorter than a control header of {}", message.size(), sizeof(ControlHeader));
  const auto header = load<ControlHeader>(message.data());
  if (header.magic != kMagic) malformed(sender, "magic {:#x} instead of {:#x}", header.magic, kMagic);
  if (header.protocol != kProtocol)
    malformed(sender, "protocol version {}, this program speaks {}", header.protocol, kProtocol);
  if (header.kind < Kind::KeepAlive || header.kind > Kind::Ready)
    malformed(sender, "kind {} on the control channel", static_cast<unsigned>(header.kind));
  if (header.code > static_cast<std::uint32_t>(ExitCode::Peer))
    malformed(sender, "exit code {}", header.code);
  if (header.text_bytes != message.size() - sizeof header)
    malformed(sender, "text of {} bytes in a message of {}", header.text_bytes, message.size());
  Control control{header.kind, static_cast<ExitCode>(header.code), {}};
  const auto* text = reinterpret_cast<const char*>(message.data() + sizeof header);
  control.text.assign(text, header.text_bytes);
  for (char& letter : control.text)  // it is printed as one line
    if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7F) letter = ' ';
  return control;
}

std::string write_progress(const LoadProgress& progress) {
  return fmt::format("{} {}", progress.done_bytes, progress.total_bytes);
}

LoadProgress read_progress(std::string_view text, std::string_view sender) {
  LoadProgress progress;
  const char* const end = text.data() + text.size();
  const auto [space, first] = std::from_chars(text.data(), end, progress.done_bytes);
  if (first == std::errc() && space != end && *space == ' ') {
    const auto [stop, second] = std::from_chars(space + 1, end, progress.total_bytes);
    if (second == std::errc() && stop == end && progress.done_bytes <= progress.total_bytes) return progress;
  }
  malformed(sender, "progress '{}'", text);
}

}  // namespace dsv41::wire

namespace dsv41 {

MessageEnds ends_of(std::span<const std::byte> message, std::size_t head, std::size_t tail) {
  return {message.first(std::min(head, message.size())), message.last(std::min(tail, message.size())),
          message.size()};
}

}  // namespace dsv41
