// Payload verification: checksums, findings, holes, comparison, resuming
// (spec: docs/checkpoint.md, "Payload manifest").
#include "loader/audit/payload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "loader/audit/payload_digest.h"
#include "loader/audit/payload_manifest.h"
#include "loader/audit/payload_plan.h"
#include "loader/error.h"
#include "loader/tree_mutations.h"
#include "tests/loader/support/audit_support.h"

namespace dsv41::audit {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::byte> random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
  return bytes;
}

TEST(ChunkFacts, CountsNansLikeTheFormatsSay) {
  for (const std::size_t count : {0u, 2u, 62u, 64u, 66u, 4096u, 70'000u}) {
    const std::vector<std::byte> bytes = random_bytes(count, static_cast<std::uint32_t>(count));
    std::uint64_t e4m3 = 0, e8m0 = 0, bf16 = 0;
    int lowest = 255, highest = 0;
    for (const std::byte byte : bytes) {
      const int code = std::to_integer<int>(byte);
      e4m3 += (code & 0x7F) == 0x7F;
      e8m0 += code == 0xFF;
      lowest = std::min(lowest, code);
      highest = std::max(highest, code);
    }
    for (std::size_t i = 0; i + 1 < count; i += 2) {
      const int word = std::to_integer<int>(bytes[i]) | std::to_integer<int>(bytes[i + 1]) << 8;
      bf16 += (word >> 7 & 0xFF) == 0xFF && (word & 0x7F) != 0;
    }
    EXPECT_EQ(examine(bytes, DType::F8E4M3).nan_codes, e4m3);
    EXPECT_EQ(examine(bytes, DType::BF16).nan_codes, bf16);
    const ChunkFacts scale = examine(bytes, DType::F8E8M0);
    EXPECT_EQ(scale.nan_codes, e8m0);
    EXPECT_EQ(scale.lowest, lowest);
    EXPECT_EQ(scale.highest, highest);
    EXPECT_EQ(scale.all_zero, count == 0);
  }
  const float numbers[] = {0.0f, -0.0f, 1e38f, std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(examine(std::as_bytes(std::span(numbers)), DType::F32).nan_codes, 1u);
}

TEST(ChunkFacts, ZerosAreWhatReadingZerosGives) {
  ZeroChunks zeros;
  for (const DType dtype : {DType::F8E8M0, DType::BF16, DType::I8})
    for (const std::uint64_t bytes :
         {std::uint64_t{1}, std::uint64_t{368'640}, kChunkBytes, std::uint64_t{1}}) {
      const ChunkFacts read = examine(std::vector<std::byte>(bytes), dtype), known = zeros.of(bytes, dtype);
      EXPECT_EQ(read.digest, known.digest);
      EXPECT_EQ(read.all_zero, known.all_zero);
      EXPECT_EQ(read.lowest, known.lowest);
      EXPECT_EQ(read.highest, known.highest);
      EXPECT_EQ(read.nan_codes, known.nan_codes);
    }
}

/// A small checkpoint with a random payload, and a place for its manifest.
class Payload : public ::testing::Test {
 protected:
  Payload() {
    fs::copy(fs::path(DSV41_TEST_CHECKPOINTS) / "mini", directory_.path() / "model",
             fs::copy_options::recursive);
    options_.directory = directory_.path() / "model";
    options_.manifest = directory_.path() / "manifest.jsonl";
    options_.quiet = true;
  }

  PayloadReport verify() {
    std::vector<LocalShard> shards;
    for (const std::string& file : find_shards(options_.directory, false))
      shards.push_back(read_shard(options_.directory, file, false));
    std::ostringstream err;
    return verify_payload(shards, options_, err);
  }

  /// Changes one byte of a tensor.
  void poke(const std::string& shard, const std::string& tensor, std::uint64_t at, std::uint8_t value) {
    const LocalShard read = read_shard(options_.directory, shard, false);
    for (const TensorInfo& info : read.header.tensors)
      if (info.name == tensor) {
        std::fstream file(options_.directory / shard, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(static_cast<std::streamoff>(read.header.payload_offset() + info.begin + at));
        file.put(static_cast<char>(value));
        return;
      }
    FAIL() << tensor;
  }

  Directory directory_;
  PayloadOptions options_;
};

TEST_F(Payload, WritesAManifestThatTheSameBytesPass) {
  const PayloadReport first = verify();
  EXPECT_FALSE(first.compared);
  EXPECT_FALSE(first.failed());
  EXPECT_EQ(first.read_bytes + first.hole_bytes, first.bytes);
  const std::vector<ManifestEntry> entries = read_manifest(options_.manifest);
  EXPECT_EQ(entries.size(), first.tensors);
  for (const ManifestEntry& entry : entries)
    EXPECT_EQ(entry.min_exponent.has_value(), entry.dtype == "F8_E8M0");
  options_.threads = 1;
  const PayloadReport second = verify();
  EXPECT_TRUE(second.compared);
  EXPECT_THAT(second.mismatches, IsEmpty());
  EXPECT_EQ(second.added, 0u);
  EXPECT_FALSE(fs::exists(options_.manifest.string() + ".progress"));
}

TEST_F(Payload, FlippedBitIsNamedByTensor) {
  verify();
  const std::string shard = "model-00005-of-00018.safetensors", tensor = "layers.2.attn.wq_a.weight";
  const LocalShard read = read_shard(options_.directory, shard, false);
  std::ifstream file(options_.directory / shard, std::ios::binary);
  for (const TensorInfo& info : read.header.tensors)
    if (info.name == tensor)
      file.seekg(static_cast<std::streamoff>(read.header.payload_offset() + info.begin + 77));
  poke(shard, tensor, 77, static_cast<std::uint8_t>(file.get() ^ 0x10));
  const PayloadReport report = verify();
  ASSERT_EQ(report.mismatches.size(), 1u);
  EXPECT_THAT(report.mismatches[0],
              HasSubstr("layers.2.attn.wq_a.weight in model-00005-of-00018.safetensors: checksum"));
  EXPECT_TRUE(report.failed());
  EXPECT_THAT(verify().mismatches, ElementsAre(report.mismatches[0]));  // the manifest stays as it was
}

TEST_F(Payload, NanCodesAndZeroScalesAreFlagged) {
  poke("model-00005-of-00018.safetensors", "layers.2.attn.wq_a.weight", 3, 0xFF);
  poke("model-00005-of-00018.safetensors", "layers.2.attn.wq_b.scale", 0, 0xFF);
  const LocalShard read = read_shard(options_.directory, "model-00005-of-00018.safetensors", false);
  for (const TensorInfo& info : read.header.tensors)
    if (info.name == "layers.2.attn.wkv.scale")
      for (std::uint64_t i = 0; i < info.bytes(); ++i) poke(read.file_name, "layers.2.attn.wkv.scale", i, 0);
  const PayloadReport report = verify();
  EXPECT_THAT(report.nan_tensors, ::testing::UnorderedElementsAre(HasSubstr("layers.2.attn.wq_a.weight"),
                                                                  HasSubstr("layers.2.attn.wq_b.scale")));
  EXPECT_THAT(report.zero_scales, ElementsAre("layers.2.attn.wkv.scale"));
  EXPECT_TRUE(report.failed());
}

TEST_F(Payload, ShardsThatArriveLaterAreAdded) {
  const fs::path shard = options_.directory / "model-00018-of-00018.safetensors",
                 aside = directory_.path() / "aside";
  fs::rename(shard, aside);
  const std::uint64_t before = verify().tensors;
  fs::rename(aside, shard);
  const PayloadReport report = verify();
  EXPECT_EQ(report.added, report.tensors - before);
  EXPECT_EQ(read_manifest(options_.manifest).size(), report.tensors);
  fs::rename(shard, aside);
  const PayloadReport without = verify();
  EXPECT_EQ(without.not_here, report.added);
  EXPECT_FALSE(without.failed());
}

TEST_F(Payload, GoesOnWhereItWasInterrupted) {
  verify();
  const std::string whole = render_manifest(read_manifest(options_.manifest));
  fs::remove(options_.manifest);
  std::atomic<int> stop{SIGINT};
  options_.stop = &stop;
  const PayloadReport nothing = verify();
  EXPECT_TRUE(nothing.interrupted);
  EXPECT_FALSE(fs::exists(options_.manifest));

  // What an interrupted run leaves behind: records of some windows, the last one torn.
  std::vector<LocalShard> shards;
  for (const std::string& file : find_shards(options_.directory, false))
    shards.push_back(read_shard(options_.directory, file, false));
  const PayloadPlan plan = plan_payload(options_.directory, shards);
  std::vector<ChunkFacts> facts(plan.chunks.size());
  std::vector<std::uint8_t> done(plan.chunks.size());
  const fs::path progress = options_.manifest.string() + ".progress";
  std::uint64_t recorded = 0;
  {
    ProgressFile file(progress, plan, facts, done);
    for (std::size_t w = 0; w < plan.windows.size(); w += 2) {
      const Window& window = plan.windows[w];
      std::ifstream in(options_.directory / shards[window.shard].file_name, std::ios::binary);
      for (std::uint32_t c = window.first_chunk; c < window.first_chunk + window.chunks; ++c) {
        std::vector<std::byte> bytes(plan.chunks[c].bytes);
        in.seekg(static_cast<std::streamoff>(plan.chunks[c].offset));
        in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
        facts[c] = examine(bytes, plan.tensors[plan.chunks[c].tensor].info->dtype);
      }
      file.append(window, facts);
      recorded += window.bytes;
    }
  }
  std::ofstream(progress, std::ios::app | std::ios::binary) << "torn record";
  stop = 0;
  const PayloadReport rest = verify();
  EXPECT_EQ(rest.resumed_bytes, recorded);
  EXPECT_EQ(rest.read_bytes + rest.hole_bytes, rest.bytes - recorded);
  EXPECT_EQ(render_manifest(read_manifest(options_.manifest)), whole);

  // Records of a shard that has changed since do not count.
  fs::remove(options_.manifest);
  {
    ProgressFile file(progress, plan, facts, done);
    file.append(plan.windows.front(), facts);
  }
  fs::last_write_time(options_.directory / shards.front().file_name,
                      fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(verify().resumed_bytes, 0u);
}

TEST_F(Payload, ForeignProgressIsIgnored) {
  const std::vector<std::byte> noise = random_bytes(4000, 5);
  std::ofstream(options_.manifest.string() + ".progress", std::ios::binary)
      .write(reinterpret_cast<const char*>(noise.data()), static_cast<std::streamsize>(noise.size()));
  const PayloadReport report = verify();
  EXPECT_EQ(report.resumed_bytes, 0u);
  EXPECT_FALSE(report.failed());
}

TEST_F(Payload, TruncatedShardIsNotVerified) {
  fs::resize_file(options_.directory / "model-00005-of-00018.safetensors", 100'000);
  const PayloadReport report = verify();
  EXPECT_THAT(report.skipped, ElementsAre("model-00005-of-00018.safetensors"));
  EXPECT_TRUE(report.failed());
}

TEST_F(Payload, UnwritableManifestIsSaidBeforeReading) {
  options_.manifest = directory_.path() / "absent/manifest.jsonl";
  EXPECT_THROW(verify(), ResourceError);
}

// Half a terabyte of holes in a time that no disk could read it in; the checksums are those of zeros.
TEST(PayloadOfSparseTree, HolesAreNotRead) {
  const Directory directory;
  write_tree(released_tree(), directory.path());
  AuditOptions options = options_for(directory.path());
  options.verify_payload = true;
  options.quiet = true;
  options.manifest = directory.path() / "manifest.jsonl";
  std::ostringstream out, err;
  EXPECT_EQ(run_audit(options, out, err), 0);
  EXPECT_THAT(out.str(), HasSubstr("scales that are all zero"));
  const std::vector<ManifestEntry> entries = read_manifest(*options.manifest);
  ASSERT_EQ(entries.size(), 96'085u);
  const std::uint64_t digest = examine(std::vector<std::byte>(368'640), DType::F8E8M0).digest;
  for (const ManifestEntry& entry : entries)
    if (entry.tensor == "layers.5.ffn.experts.7.w1.scale") {
      EXPECT_EQ(entry.checksum, tensor_checksum({&digest, 1}));
      EXPECT_EQ(entry.max_exponent, 0);
    }
  options.header_prefix = true;
  EXPECT_THROW(run_audit(options, out, err), UsageError);
}

struct ManifestCase {
  const char* text;
  const char* complaint;
};

class HostileManifest : public ::testing::TestWithParam<ManifestCase> {};

constexpr char kHeader[] =
    R"({"format":"dsv41-payload-manifest","version":1,"checksum":"xxh3-64 of xxh3-64 per 4 MiB"})"
    "\n";

TEST_P(HostileManifest, IsRefusedInOneLine) {
  const std::string text =
      std::string(GetParam().text[0] == '+' ? kHeader : "") + (GetParam().text + (GetParam().text[0] == '+'));
  try {
    parse_manifest(text, "m");
    FAIL() << text;
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), HasSubstr(GetParam().complaint));
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Manifest, HostileManifest,
    ::testing::Values(ManifestCase{"", "empty"}, ManifestCase{"\n", "line 1"},
                      ManifestCase{"{}", "not the first line"},
                      ManifestCase{R"({"format":"other"})", "format \"other\""},
                      ManifestCase{R"({"format":"dsv41-payload-manifest","version":2})", "version 2"},
                      ManifestCase{R"({"format":"dsv41-payload-manifest","version":1,"checksum":"md5"})",
                                   "checksum \"md5\""},
                      ManifestCase{"+[1]", "line 2"}, ManifestCase{"+{\"tensor\":\"a\"}", "lacks one of"},
                      ManifestCase{"+{\"tensor\":\"a\",\"tensor\":\"b\"}", "given twice"},
                      ManifestCase{"+{\"colour\":\"a\"}", "\"colour\" is unknown"},
                      ManifestCase{"+{\"tensor\":\"\"}", "tensor is empty"},
                      ManifestCase{"+{\"bytes\":-1}", "bytes"},
                      ManifestCase{"+{\"checksum\":\"12\"}", "not 16 hexadecimal digits"},
                      ManifestCase{"+{\"checksum\":\"000000000000000g\"}", "not 16 hexadecimal digits"},
                      ManifestCase{"+{\"min_exponent\":256}", "256, more than 255"},
                      ManifestCase{"+{\"tensor\":[[[[[[[[", "line 2"}));

}  // namespace
}  // namespace dsv41::audit
