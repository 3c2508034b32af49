// Messages between ranks: what is written is read, and every damaged message is refused by name.
#include "runtime/exchange/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/runtime/support/random_experts.h"

namespace dsv41::wire {
namespace {

using dsv41::testing::mix;
using dsv41::testing::small_config;
using ::testing::HasSubstr;

constexpr std::uint32_t kDim = 96;
constexpr std::uint64_t kCall = 7;

/// Two rows for the rank that owns experts 1, 5, 9 of four cyclic ranks.
struct Fixture {
  ModelConfig config = small_config();
  ExpertLimits limits{16, 48, kDim};
  ExpertGeometry geometry = ExpertGeometry::of(config);
  Placement placement = Placement::make("cyclic", config, 4);
  RequestRules rules{limits, geometry, placement, 1};

  Header header() const {
    Header header;
    header.step = 3;
    header.call = kCall;
    header.block = 2;
    header.rows = 2;
    header.routes = 3;
    header.dim = kDim;
    header.bytes = RequestLayout(2, 3, kDim).bytes;
    return header;
  }
  std::vector<std::byte> request() const {
    const RequestLayout layout(2, 3, kDim);
    std::vector<std::byte> message(layout.bytes);
    for (std::size_t at = 0; at < message.size(); ++at) message[at] = static_cast<std::byte>(mix(at));
    store(message.data(), header());
    store(message.data() + layout.routes, WireRoute{0, 1, 0.5f});
    store(message.data() + layout.routes + 12, WireRoute{0, 9, 0.25f});
    store(message.data() + layout.routes + 24, WireRoute{1, 5, 0.75f});
    return message;
  }
  std::vector<std::byte> reply() const {
    Header answer = header();
    answer.kind = Kind::Reply;
    answer.bytes = ReplyLayout(3, kDim).bytes;
    std::vector<std::byte> message(answer.bytes);
    store(message.data(), answer);
    RankTiming timing;
    timing.compute_ns = 42;
    store(message.data() + sizeof(Header), timing);
    return message;
  }
};

TEST(Messages, ReleasedDecodeStepIsSmall) {
  // One token, all six experts on one rank: 5.3 KB out, 6 x 10 KB back (docs/runtime.md).
  EXPECT_EQ(RequestLayout(1, 6, 5120).bytes, 48 + 5120 + 160 + 72);
  EXPECT_EQ(ReplyLayout(6, 5120).bytes, 48 + 64 + 6 * 10240);
}

TEST(Messages, RequestIsReadAsWritten) {
  const Fixture fixture;
  const auto message = fixture.request();
  std::vector<Route> routes;
  const Header header = read_request(message, fixture.rules, kCall, "rank 0 (here)", routes);
  EXPECT_EQ(header.step, 3u);
  ASSERT_EQ(routes.size(), 3u);
  EXPECT_EQ(routes[1].row, 0u);
  EXPECT_EQ(routes[1].expert, 9u);
  EXPECT_EQ(routes[2].weight, 0.75f);
  const QuantizedRows rows = request_rows(message, header);
  EXPECT_EQ(rows.rows, 2u);
  EXPECT_EQ(rows.k, kDim);
  EXPECT_EQ(rows.codes, reinterpret_cast<const std::uint8_t*>(message.data()) + 48);
  EXPECT_EQ(rows.scales, rows.codes + 2 * kDim);
}

TEST(Messages, ReplyIsReadAsWritten) {
  const Fixture fixture;
  EXPECT_EQ(read_reply(fixture.reply(), fixture.header(), "rank 2 (there)").compute_ns, 42u);
}

TEST(Messages, MessagesBeyondTwoGibibytesAreRefusedAtStart) {
  EXPECT_NO_THROW(check_limits({4096, 4096 * 6, 5120}));
  EXPECT_THROW(check_limits({65536, 65536 * 6, 5120}), UsageError);
}

struct Damage {
  const char* name;
  std::function<void(std::vector<std::byte>&)> apply;
  const char* message;
};
void PrintTo(const Damage& damage, std::ostream* out) {
  *out << damage.name;
}

std::function<void(std::vector<std::byte>&)> edit_header(std::function<void(Header&)> edit) {
  return [edit](std::vector<std::byte>& message) {
    auto header = load<Header>(message.data());
    edit(header);
    store(message.data(), header);
  };
}
std::function<void(std::vector<std::byte>&)> edit_route(std::size_t index, WireRoute route) {
  return [=](std::vector<std::byte>& message) {
    store(message.data() + RequestLayout(2, 3, kDim).routes + index * sizeof(WireRoute), route);
  };
}
std::function<void(std::vector<std::byte>&)> resize(std::ptrdiff_t change) {
  return [=](std::vector<std::byte>& message) {
    message.resize(static_cast<std::size_t>(static_cast<std::ptrdiff_t>(message.size()) + change));
  };
}

class RequestRefused : public ::testing::TestWithParam<Damage> {};
TEST_P(RequestRefused, NamesSenderAndCause) {
  const Fixture fixture;
  auto message = fixture.request();
  GetParam().apply(message);
  std::vector<Route> routes;
  try {
    read_request(message, fixture.rules, kCall, "rank 0 (here)", routes);
    FAIL() << "accepted";
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("malformed message from rank 0 (here): "));
    EXPECT_THAT(error.what(), HasSubstr(GetParam().message));
  }
}
INSTANTIATE_TEST_SUITE_P(
    Cases, RequestRefused,
    ::testing::Values(
        Damage{"Empty", [](auto& message) { message.clear(); }, "0 bytes, shorter than a header"},
        Damage{"HalfAHeader", [](auto& message) { message.resize(47); }, "47 bytes, shorter than a header"},
        Damage{"HeaderOnly", [](auto& message) { message.resize(48); }, "header says"},
        Damage{"OneByteShort", resize(-1), "header says"}, Damage{"OneByteLong", resize(1), "header says"},
        Damage{"Magic", edit_header([](Header& header) { header.magic = 0; }), "magic 0x0"},
        Damage{"Protocol", edit_header([](Header& header) { header.protocol = 99; }), "protocol version 99"},
        Damage{"WrongKind", edit_header([](Header& header) { header.kind = Kind::Reply; }),
               "kind 2 where 1 is due"},
        Damage{"UnknownKind", edit_header([](Header& header) { header.kind = static_cast<Kind>(777); }),
               "kind 777"},
        Damage{"Bytes", edit_header([](Header& header) { header.bytes = ~0ull; }),
               "header says 18446744073709551615"},
        Damage{"CallRepeated", edit_header([](Header& header) { header.call = kCall - 1; }),
               "call 6 where 7 is due"},
        Damage{"Dim", edit_header([](Header& header) { header.dim = 64; }),
               "rows of 64 values, the model has 96"},
        Damage{"Block", edit_header([](Header& header) { header.block = 5; }), "block 5 of a model with 5"},
        Damage{"BlockHuge", edit_header([](Header& header) { header.block = ~0u; }), "block 4294967295"},
        Damage{"NoRows", edit_header([](Header& header) { header.rows = 0; }), "0 rows"},
        Damage{"ManyRows", edit_header([](Header& header) { header.rows = 17; }),
               "17 rows, a step has 1 to 16"},
        Damage{"HugeRows", edit_header([](Header& header) { header.rows = ~0u; }), "4294967295 rows"},
        Damage{"NoRoutes", edit_header([](Header& header) { header.routes = 0; }), "0 routes for 2 rows"},
        Damage{"HugeRoutes", edit_header([](Header& header) { header.routes = ~0u; }), "4294967295 routes"},
        Damage{"RowsThatDoNotFit", edit_header([](Header& header) { header.rows = 3; }),
               "but 3 rows and 3 routes make"},
        Damage{"RoutesThatDoNotFit", edit_header([](Header& header) { header.routes = 4; }),
               "but 2 rows and 4 routes make"},
        Damage{"Slot", edit_route(2, {2, 5, 0}), "route 2 names row 2 of 2"},
        Damage{"Expert", edit_route(1, {0, 11, 0}), "route 1 names expert 11, block 2 has 11"},
        Damage{"ForeignExpert", edit_route(1, {0, 2, 0}), "expert 2 of block 2, which rank 3 owns"},
        Damage{"Twice", edit_route(1, {0, 1, 0}), "route 1 (row 0, expert 1) is out of order"},
        Damage{"Descending", edit_route(0, {0, 9, 0}), "route 1 (row 0, expert 9) is out of order"},
        Damage{"FirstRowSkipped", edit_route(0, {1, 1, 0}), "route 0 (row 1, expert 1) is out of order"},
        Damage{"RowBack", edit_route(1, {1, 9, 0}), "is out of order"},
        Damage{"RowUnused", edit_route(2, {0, 13, 0}), "names expert 13"}),
    [](const auto& instance) { return instance.param.name; });

TEST(Messages, ARowWithoutARouteIsRefused) {
  const Fixture fixture;
  auto message = fixture.request();
  // Experts 1, 5, 9 all for row 0: row 1 travels for nothing.
  const RequestLayout layout(2, 3, kDim);
  store(message.data() + layout.routes + 12, WireRoute{0, 5, 0});
  store(message.data() + layout.routes + 24, WireRoute{0, 9, 0});
  std::vector<Route> routes;
  EXPECT_THROW(read_request(message, fixture.rules, kCall, "rank 0", routes), PeerError);
}

class ReplyRefused : public ::testing::TestWithParam<Damage> {};
TEST_P(ReplyRefused, NamesSenderAndCause) {
  const Fixture fixture;
  auto message = fixture.reply();
  GetParam().apply(message);
  try {
    read_reply(message, fixture.header(), "rank 2 (there)");
    FAIL() << "accepted";
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("malformed message from rank 2 (there): "));
    EXPECT_THAT(error.what(), HasSubstr(GetParam().message));
  }
}
INSTANTIATE_TEST_SUITE_P(
    Cases, ReplyRefused,
    ::testing::Values(
        Damage{"Empty", [](auto& message) { message.clear(); }, "0 bytes"},
        Damage{"Short", resize(-1), "header says"},
        Damage{"Request", edit_header([](Header& header) { header.kind = Kind::Request; }),
               "kind 1 where 2 is due"},
        Damage{"OldCall", edit_header([](Header& header) { --header.call; }), "call 6, 7 was asked"},
        Damage{"OtherStep", edit_header([](Header& header) { ++header.step; }), "step 4, 3 was asked"},
        Damage{"OtherBlock", edit_header([](Header& header) { header.block = 0; }), "block 0, 2 was asked"},
        Damage{"OtherRows", edit_header([](Header& header) { header.rows = 1; }), "rows 1, 2 was asked"},
        Damage{"OtherRoutes", edit_header([](Header& header) { header.routes = 2; }),
               "routes 2, 3 was asked"},
        Damage{"OtherDim", edit_header([](Header& header) { header.dim = 32; }), "dim 32, 96 was asked"},
        Damage{"OneRowShort",
               [](auto& message) {
                 message.resize(message.size() - 2 * kDim);
                 edit_header([&](Header& header) { header.bytes = message.size(); })(message);
               },
               "bytes"}),
    [](const auto& instance) { return instance.param.name; });

TEST(Messages, ControlIsReadAsWrittenOnOneLine) {
  std::vector<std::byte> buffer(kControlBytes);
  const auto message = write_control(buffer, Kind::Failure, ExitCode::Resources, "no\nmemory\x1b[31m");
  const Control control = read_control(message, "rank 1");
  EXPECT_EQ(control.kind, Kind::Failure);
  EXPECT_EQ(control.code, ExitCode::Resources);
  EXPECT_EQ(control.text, "no memory [31m");
}

TEST(Messages, LongControlTextIsCut) {
  std::vector<std::byte> buffer(kControlBytes);
  const auto message = write_control(buffer, Kind::Failure, ExitCode::Peer, std::string(10000, 'x'));
  EXPECT_EQ(read_control(message, "rank 1").text, std::string(kMaxControlText, 'x'));
}

TEST(Messages, DamagedControlIsRefused) {
  const auto refused = [](const std::function<void(std::vector<std::byte>&)>& damage) {
    std::vector<std::byte> message(kControlBytes);
    message.resize(write_control(message, Kind::Failure, ExitCode::Peer, "text").size());
    damage(message);
    EXPECT_THROW(read_control(message, "rank 1"), PeerError);
  };
  const auto edit = [](auto change) {
    return [=](std::vector<std::byte>& message) {
      auto header = load<ControlHeader>(message.data());
      change(header);
      store(message.data(), header);
    };
  };
  refused([](auto& message) { message.clear(); });
  refused([](auto& message) { message.resize(15); });
  refused([](auto& message) { message.pop_back(); });
  refused([](auto& message) { message.resize(message.size() + 1); });
  refused(edit([](ControlHeader& header) { header.magic ^= 1; }));
  refused(edit([](ControlHeader& header) { header.protocol = 0; }));
  refused(edit([](ControlHeader& header) { header.kind = Kind::Reply; }));
  refused(edit([](ControlHeader& header) { header.kind = static_cast<Kind>(9); }));
  refused(edit([](ControlHeader& header) { header.code = 6; }));
  refused(edit([](ControlHeader& header) { header.text_bytes = ~0u; }));
}

TEST(Messages, ProgressIsReadAsWritten) {
  const LoadProgress progress = read_progress(write_progress({5, std::uint64_t{1} << 40}), "rank 1");
  EXPECT_EQ(progress.done_bytes, 5u);
  EXPECT_EQ(progress.total_bytes, std::uint64_t{1} << 40);
  for (const char* text : {"", "1", "1 ", " 1", "1  2", "2 1", "1 2 ", "-1 2", "1 99999999999999999999"})
    EXPECT_THROW(read_progress(text, "rank 1"), PeerError) << text;
}

TEST(Messages, RandomBytesNeverPass) {
  const Fixture fixture;
  std::vector<Route> routes;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    // Flip a few bytes of the header of a good message; whatever is accepted must be consistent.
    auto message = fixture.request();
    for (std::uint64_t flip = 0; flip < 1 + seed % 3; ++flip)
      message[mix(seed * 8 + flip) % sizeof(Header)] ^=
          static_cast<std::byte>(1 + mix(seed * 8 + flip + 4) % 255);
    try {
      const Header header = read_request(message, fixture.rules, kCall, "rank 0", routes);
      EXPECT_EQ(routes.size(), 3u);
      EXPECT_EQ(header.rows, 2u);
    } catch (const PeerError&) {
    }
  }
}

}  // namespace
}  // namespace dsv41::wire
