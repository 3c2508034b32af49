// The header parser against well-formed files and a table of hostile ones.
#include "loader/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "loader/error.h"
#include "loader/tree_writer.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

using ::testing::HasSubstr;

/// Length field, JSON and `payload` zero bytes.
std::string file_of(const std::string& json, std::size_t payload,
                    std::uint64_t declared = ~std::uint64_t{0}) {
  if (declared == ~std::uint64_t{0}) declared = json.size();
  std::string out;
  for (int byte = 0; byte < 8; ++byte) out.push_back(static_cast<char>(declared >> 8 * byte & 0xFF));
  return out + json + std::string(payload, '\0');
}

SafetensorsHeader parse(const std::string& file, std::uint64_t file_bytes, const HeaderLimits& limits = {}) {
  return parse_safetensors(std::as_bytes(std::span(file)), file_bytes, "shard", limits);
}

std::string refusal(const std::string& file, std::uint64_t file_bytes, const HeaderLimits& limits = {}) {
  try {
    parse(file, file_bytes, limits);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "accepted";
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}";
}

TEST(Safetensors, ReadsTensorsInTheOrderOfTheirBytes) {
  const std::string json =
      "{" + tensor("b", "F32", "[2,3]", "[4,28]") + R"(,"__metadata__":{"format":"pt","x":"y"},)" +
      tensor("a\\u00e9", "F8_E8M0", "[4]", "[0,4]") + "," + tensor("empty", "BF16", "[0,7]", "[28,28]") +
      "," + tensor("scalar", "I64", "[]", "[28,36]") + "}   ";
  const SafetensorsHeader header = parse(file_of(json, 36), 8 + json.size() + 36);
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.tensors[0].name, "a\u00e9");
  EXPECT_EQ(header.tensors[0].dtype, DType::F8E8M0);
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(header.tensors[1].shape, (Shape{2, 3}));
  EXPECT_EQ(header.tensors[1].begin, 4u);
  EXPECT_EQ(header.tensors[1].bytes(), 24u);
  EXPECT_EQ(header.tensors[2].bytes(), 0u);
  EXPECT_TRUE(header.tensors[3].shape.empty());
  EXPECT_EQ(header.payload_bytes, 36u);
  EXPECT_EQ(header.payload_offset(), 8 + json.size());
}

TEST(Safetensors, AcceptsAFileWithoutTensors) {
  EXPECT_TRUE(parse(file_of("{}", 0), 10).tensors.empty());
  EXPECT_TRUE(parse(file_of(R"({"__metadata__":{}})", 0), 0).tensors.empty());
}

TEST(Safetensors, EveryDtypeIsSpelledAndSized) {
  for (const auto& [name, bytes] :
       std::initializer_list<std::pair<const char*, std::size_t>>{{"F32", 4},
                                                                  {"F16", 2},
                                                                  {"BF16", 2},
                                                                  {"F64", 8},
                                                                  {"I8", 1},
                                                                  {"U8", 1},
                                                                  {"I16", 2},
                                                                  {"U16", 2},
                                                                  {"I32", 4},
                                                                  {"U32", 4},
                                                                  {"I64", 8},
                                                                  {"U64", 8},
                                                                  {"BOOL", 1},
                                                                  {"F8_E4M3", 1},
                                                                  {"F8_E5M2", 1},
                                                                  {"F8_E8M0", 1}}) {
    const auto dtype = dtype_from_name(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(dtype_name(*dtype), name);
    EXPECT_EQ(dtype_bytes(*dtype), bytes);
  }
  EXPECT_FALSE(dtype_from_name("F4"));
}

struct HostileJson {
  const char* label;
  std::string json;
  std::size_t payload;
  const char* complaint;
};

class HostileHeader : public ::testing::TestWithParam<HostileJson> {};

TEST_P(HostileHeader, IsRefusedWithTheReason) {
  const HostileJson& c = GetParam();
  EXPECT_THAT(refusal(file_of(c.json, c.payload), 8 + c.json.size() + c.payload), HasSubstr(c.complaint));
  EXPECT_THAT(refusal(file_of(c.json, c.payload), 8 + c.json.size() + c.payload), HasSubstr("shard: "));
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  std::string json = "{";
  json += tensor("w", dtype, shape, offsets);
  return json += "}";
}

INSTANTIATE_TEST_SUITE_P(
    Json, HostileHeader,
    ::testing::Values(
        HostileJson{"empty", "", 0, "malformed JSON"},                             //
        HostileJson{"not_json", "garbage!", 0, "not a JSON object"},               //
        HostileJson{"list", "[]", 0, "not a JSON object"},                         //
        HostileJson{"null_bytes", std::string(64, '\0'), 0, "not a JSON object"},  //
        HostileJson{"unclosed", R"({"w":{"dtype":"U8")", 0, "shard: "},            //
        HostileJson{"unclosed_string", R"({"w)", 0, "malformed JSON"},             //
        HostileJson{"bad_utf8", "{\"\xff\xfe\":1}", 0, "malformed JSON"},          //
        HostileJson{"trailing_text", "{} {}", 0, "text after the end"},            //
        HostileJson{"trailing_comma", "{" + tensor("w", "U8", "[1]", "[0,1]") + ",}", 1, "header: "},
        HostileJson{"depth_bomb", std::string(100000, '['), 0, "not a JSON object"},  //
        HostileJson{"depth_bomb_inside", R"({"w":{"dtype":)" + std::string(100000, '[') + "}}", 0,
                    "header: w"},
        HostileJson{"object_bomb", R"({"__metadata__":)" + std::string(50000, '{') + "}", 0, "__metadata__"},
        HostileJson{"metadata_number", R"({"__metadata__":{"a":1}})", 0, "__metadata__ is not"},
        HostileJson{"metadata_twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "appears twice"},
        HostileJson{"entry_is_list", R"({"w":[1]})", 0, "header: w"},  //
        HostileJson{"unknown_fact", R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", 1,
                    "\"x\" is unknown"},
        HostileJson{"fact_twice", R"({"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
                    "given twice"},
        HostileJson{"no_dtype", R"({"w":{"shape":[1],"data_offsets":[0,1]}})", 1, "lacks dtype"},
        HostileJson{"no_shape", R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1, "lacks shape"},
        HostileJson{"no_offsets", R"({"w":{"dtype":"U8","shape":[1]}})", 1, "lacks data_offsets"},
        HostileJson{"unknown_dtype", one("Q4_K", "[1]", "[0,1]"), 1, "unknown dtype \"Q4_K\""},
        HostileJson{"dtype_number", R"({"w":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "header: w"},
        HostileJson{"shape_negative", one("U8", "[-1]", "[0,1]"), 1, "shape holds something other"},
        HostileJson{"shape_float", one("U8", "[1.0]", "[0,1]"), 1, "shape holds something other"},
        HostileJson{"shape_2_64", one("U8", "[18446744073709551616]", "[0,1]"), 1,
                    "shape holds something other"},
        HostileJson{"shape_string", one("U8", R"(["1"])", "[0,1]"), 1, "shape holds something other"},
        HostileJson{"shape_rank", one("U8", "[1,1,1,1,1,1,1]", "[0,1]"), 1, "more than 6 dimensions"},
        HostileJson{"product_2_64", one("U8", "[4294967296,4294967296]", "[0,0]"), 0, "overflows 64 bits"},
        HostileJson{"product_wraps_to_0", one("U8", "[9223372036854775808,2]", "[0,0]"), 0,
                    "overflows 64 bits"},
        HostileJson{"bytes_2_64", one("F64", "[2305843009213693952]", "[0,0]"), 0, "overflows 64 bits"},
        HostileJson{"offsets_negative", one("U8", "[1]", "[-1,0]"), 1, "data_offsets holds something other"},
        HostileJson{"offsets_float", one("U8", "[1]", "[0,1e0]"), 1, "data_offsets holds something other"},
        HostileJson{"offsets_backwards", one("U8", "[1]", "[1,0]"), 1, "run backwards"},
        HostileJson{"offsets_three", one("U8", "[1]", "[0,1,2]"), 1, "3 entries instead of 2"},
        HostileJson{"offsets_one", one("U8", "[1]", "[0]"), 1, "1 entries instead of 2"},
        HostileJson{"extent_small", one("F32", "[2]", "[0,4]"), 4,
                    "F32 [2] takes 8 bytes, data_offsets [0, 4] give 4"},
        HostileJson{"extent_large", one("U8", "[2]", "[0,3]"), 3, "takes 2 bytes"},
        HostileJson{"duplicate",
                    "{" + tensor("w", "U8", "[1]", "[0,1]") + "," + tensor("w", "U8", "[1]", "[1,2]") + "}",
                    2, "w: the name appears twice"},
        HostileJson{
            "duplicate_by_escape",
            "{" + tensor("w", "U8", "[1]", "[0,1]") + "," + tensor("\\u0077", "U8", "[1]", "[1,2]") + "}", 2,
            "w: the name appears twice"},
        HostileJson{"overlap",
                    "{" + tensor("a", "U8", "[4]", "[0,4]") + "," + tensor("b", "U8", "[4]", "[3,7]") + "}",
                    7, "b at [3, 7] overlaps a, which ends at 4"},
        HostileJson{"same_bytes",
                    "{" + tensor("a", "U8", "[4]", "[0,4]") + "," + tensor("b", "U8", "[4]", "[0,4]") + "}",
                    4, "overlaps"},
        HostileJson{"hole",
                    "{" + tensor("a", "U8", "[4]", "[0,4]") + "," + tensor("b", "U8", "[4]", "[5,9]") + "}",
                    9, "a hole of 1 bytes at 4 between a and b"},
        HostileJson{"hole_at_start", one("U8", "[4]", "[4,8]"), 8, "a hole of 4 bytes at 0"},
        HostileJson{"offsets_at_2_64", one("U8", "[1]", "[18446744073709551614,18446744073709551615]"), 1,
                    "a hole of"},
        HostileJson{"name_empty", "{" + tensor("", "U8", "[1]", "[0,1]") + "}", 1,
                    "a tensor name of 0 bytes"},
        HostileJson{"name_newline", "{" + tensor("a\\nb", "U8", "[1]", "[0,1]") + "}", 1, "not printable"},
        HostileJson{"name_long", "{" + tensor(std::string(1025, 'n'), "U8", "[1]", "[0,1]") + "}", 1,
                    "a tensor name of 1025 bytes"},
        HostileJson{"truncated", one("U8", "[10]", "[0,10]"), 9,
                    "describes a payload of 10 bytes, the file holds 9 (truncated"},
        HostileJson{"trailing_bytes", one("U8", "[10]", "[0,10]"), 11, "the file holds 11 (trailing bytes)"}),
    [](const auto& test) { return std::string(test.param.label); });

TEST(Safetensors, RefusesImpossibleLengths) {
  EXPECT_THAT(refusal("", 0), HasSubstr("0 bytes are too few"));
  EXPECT_THAT(refusal("1234567", 7), HasSubstr("7 bytes are too few"));
  EXPECT_THAT(refusal(file_of("{}", 0, 3), 10), HasSubstr("header of 3 bytes in a file of 10"));
  EXPECT_THAT(refusal(file_of("{}", 0, std::uint64_t{1} << 63), 10), HasSubstr("above the limit"));
  EXPECT_THAT(refusal(file_of("{}", 0, 0xFFFFFFFFFFFFFFFE), 10), HasSubstr("above the limit"));
  EXPECT_THAT(refusal(file_of("{}  ", 0), 12, {.header_bytes = 3}), HasSubstr("above the limit of 3"));
  EXPECT_THAT(refusal(file_of(one("U8", "[1]", "[0,1]"), 1), 0, {.tensors = 0}),
              HasSubstr("more than 0 tensors"));
}

TEST(Safetensors, JudgesThePayloadOnlyWhenTheFileSizeIsKnown) {
  const std::string prefix = file_of(one("U8", "[1000]", "[0,1000]"), 0);
  EXPECT_EQ(parse(prefix, 0).payload_bytes, 1000u);
  EXPECT_THAT(refusal(prefix, prefix.size()), HasSubstr("truncated download?"));
}

/// Every cut of a valid file is refused, none crashes.
TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string json = "{" + tensor("a", "F32", "[2,3]", "[0,24]") + R"(,"__metadata__":{"k":"v"}})";
  const std::string file = file_of(json, 24);
  for (std::size_t size = 0; size < file.size(); ++size) {
    std::string cut = file.substr(0, size);
    EXPECT_NE(refusal(cut, std::max<std::size_t>(size, 1)), "accepted") << size;
    if (size > 8) {  // the same cut with a length field that fits it
      const std::uint64_t length = size - 8;
      std::memcpy(cut.data(), &length, 8);
      if (size < 8 + json.size()) {
        EXPECT_NE(refusal(cut, size), "accepted") << size;
      }
    }
  }
  EXPECT_EQ(refusal(file, file.size()), "accepted");
}

TEST(MappedFile, AcceptsOnlyRegularFiles) {
  const std::filesystem::path directory = process_directory() / "mapped_file_test";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  EXPECT_THROW(MappedFile{directory}, CheckpointError);
  EXPECT_THROW(MappedFile{directory / "absent"}, CheckpointError);
  EXPECT_THROW(MappedFile{"/dev/null"}, CheckpointError);
  std::filesystem::create_symlink("loop", directory / "loop");
  EXPECT_THROW(MappedFile{directory / "loop"}, CheckpointError);
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(MappedFile{directory / "pipe"}, CheckpointError);  // and does not wait for a writer

  const TreeTensor tensor{"w", DType::U8, {3}, 0, 3};
  const std::string header = render_header(std::span(&tensor, 1));
  ASSERT_EQ(header.size() % 8, 0u);
  std::FILE* file = std::fopen((directory / "file").c_str(), "wb");
  std::fwrite(header.data(), 1, header.size(), file);
  std::fclose(file);
  std::filesystem::resize_file(directory / "file", header.size() + 3);
  std::filesystem::create_symlink("file", directory / "link");
  MappedFile mapped(directory / "link");
  MappedFile moved(std::move(mapped));
  EXPECT_EQ(moved.bytes().size(), header.size() + 3);
  EXPECT_EQ(parse_safetensors(moved.bytes(), moved.bytes().size(), "link").tensors.at(0).name, "w");
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace dsv41
