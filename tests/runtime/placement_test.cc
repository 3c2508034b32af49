// Owners of experts: the three ways to place them, and every way a placement file can be wrong.
#include "runtime/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "loader/error.h"
#include "tests/loader/support/temporary_directory.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = process_directory() / name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(Placement, CyclicIsIdModuloRanks) {
  const auto placement = Placement::make("cyclic", testing::small_config(), 4);
  EXPECT_THAT(placement.experts_of(0, 0), ElementsAre(0, 4, 8));
  EXPECT_THAT(placement.experts_of(3, 0), ElementsAre(3, 7));
  EXPECT_THAT(placement.experts_of(1, 4), ElementsAre(1)) << "draft stages have four experts";
}

TEST(Placement, ContiguousIsBlocksOfTheCeiling) {
  const auto placement = Placement::make("contiguous", testing::small_config(), 4);
  EXPECT_THAT(placement.experts_of(0, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(placement.experts_of(3, 0), ElementsAre(9, 10));
}

TEST(Placement, ContiguousMayLeaveTheLastRankEmpty) {
  const auto placement = Placement::make("contiguous", testing::small_config(8), 5);
  EXPECT_THAT(placement.experts_of(3, 0), ElementsAre(6, 7));
  EXPECT_THAT(placement.experts_of(4, 0), IsEmpty());
}

TEST(Placement, MoreRanksThanDraftExpertsAreFine) {
  const auto placement = Placement::make("cyclic", testing::small_config(), 11);
  EXPECT_THAT(placement.experts_of(10, 0), ElementsAre(10));
  EXPECT_THAT(placement.experts_of(10, 3), IsEmpty());
}

TEST(Placement, EveryExpertHasExactlyOneOwner) {
  const auto config = testing::small_config();
  for (std::uint32_t ranks = 1; ranks <= config.n_routed_experts; ++ranks) {
    const auto file = testing::write_random_placement(config, ranks, 5, process_directory());
    for (const std::string& specification :
         {std::string("cyclic"), std::string("contiguous"), "file:" + file.string()}) {
      const auto placement = Placement::make(specification, config, ranks);
      EXPECT_EQ(placement.ranks(), ranks);
      for (std::uint32_t block = 0; block < config.n_blocks(); ++block) {
        std::map<std::uint32_t, std::uint32_t> owner_of;
        for (std::uint32_t rank = 0; rank < ranks; ++rank)
          for (const std::uint32_t expert : placement.experts_of(rank, block)) {
            EXPECT_TRUE(owner_of.emplace(expert, rank).second);
            EXPECT_EQ(placement.owner(block, expert), rank);
          }
        EXPECT_EQ(owner_of.size(), config.experts_of(block)) << specification;
      }
    }
  }
}

TEST(Placement, WhatItWritesItReads) {
  const auto config = testing::small_config();
  const auto cyclic = Placement::make("cyclic", config, 3);
  const auto again = Placement::make("file:" + write_file("cyclic.json", cyclic.to_json()), config, 3);
  EXPECT_EQ(again.to_json(), cyclic.to_json());
  EXPECT_EQ(again.fingerprint(), cyclic.fingerprint()) << "the digest is of owners, not of names";
}

TEST(Placement, FingerprintTellsPlacementsApart) {
  const auto config = testing::small_config();
  EXPECT_NE(Placement::make("cyclic", config, 3).fingerprint(),
            Placement::make("cyclic", config, 4).fingerprint());
  EXPECT_NE(Placement::make("cyclic", config, 3).fingerprint(),
            Placement::make("contiguous", config, 3).fingerprint());
}

struct Refusal {
  const char* name;
  std::string specification;
  std::uint32_t ranks;
  const char* message;
};
void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << refusal.name;
}

class PlacementRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(PlacementRefuses, WithOneLine) {
  std::string specification = GetParam().specification;
  if (specification.starts_with("{") || specification.starts_with("["))
    specification = "file:" + write_file(std::string(GetParam().name) + ".json", specification);
  try {
    Placement::make(specification, testing::small_config(3, 2), GetParam().ranks);
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr(GetParam().message));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, PlacementRefuses,
    ::testing::Values(
        Refusal{"UnknownWord", "random", 2, "unknown placement \"random\""},
        Refusal{"Empty", "", 2, "unknown placement"},
        Refusal{"NoRanks", "cyclic", 0, "at least one expert rank"},
        Refusal{"MoreRanksThanExperts", "cyclic", 4, "4 expert ranks for 3 experts: start at most 4 ranks"},
        Refusal{"NoFile", "file:/nonexistent/owners.json", 2, "/nonexistent/owners.json: No such file"},
        Refusal{"Directory", "file:/", 2, "placement file /:"},
        Refusal{"NotJson", "{\"ranks\": 2, ", 2, "not JSON"},
        Refusal{"NotAnObject", "[1, 2]", 2, "no number \"ranks\""},
        Refusal{"NoRanksKey", R"({"blocks": []})", 2, "no number \"ranks\""},
        Refusal{"NegativeRanks", R"({"ranks": -2, "blocks": []})", 2, "no number \"ranks\""},
        Refusal{"OtherRanks", R"({"ranks": 3, "blocks": []})", 2,
                "made for 3 expert ranks, this job has 2 (start it with -np 4)"},
        Refusal{"NoBlocks", R"({"ranks": 2})", 2, "no array \"blocks\""},
        Refusal{"FewBlocks", R"({"ranks": 2, "blocks": [[0, 1, 0]]})", 2, "1 blocks, the model has 5"},
        Refusal{"BlockNoArray", R"({"ranks": 2, "blocks": [0, [0,1,0], [0,1,0], [0,1], [0,1]]})", 2,
                "block 0 is not an array"},
        Refusal{"MissingExpert", R"({"ranks": 2, "blocks": [[0,1,0], [0,1], [0,1,0], [0,1], [0,1]]})", 2,
                "block 1 lists 2 owners for 3 experts"},
        Refusal{"OwnerOutOfRange", R"({"ranks": 2, "blocks": [[0,1,0], [0,1,2], [0,1,0], [0,1], [0,1]]})", 2,
                "block 1, expert 2: owner 2 is not one of 0"},
        Refusal{"NegativeOwner", R"({"ranks": 2, "blocks": [[0,1,-1], [0,1,1], [0,1,0], [0,1], [0,1]]})", 2,
                "owner -1"},
        Refusal{"OwnerIsText", R"({"ranks": 2, "blocks": [[0,1,"1"], [0,1,1], [0,1,0], [0,1], [0,1]]})", 2,
                "owner \"1\""},
        Refusal{"HugeOwner", R"({"ranks": 2, "blocks": [[0,1,4294967296], [0,1,1], [0,1,0], [0,1], [0,1]]})",
                2, "owner 4294967296"},
        Refusal{"DeepNesting", std::string(5000, '['), 2, "not JSON"}),
    [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace dsv41
