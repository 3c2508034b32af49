// The bookkeeping of bounded memory: the least recently used key goes first, whatever the order of calls.
#include "kernels/slot_cache.h"

#include <gtest/gtest.h>

#include <list>
#include <random>

namespace dsv41 {
namespace {

TEST(SlotCache, ForgetsTheLeastRecentlyUsed) {
  SlotCache cache(2);
  EXPECT_EQ(cache.place(10), 0u);
  EXPECT_EQ(cache.place(11), 1u);
  EXPECT_EQ(cache.find(10), 0u);
  EXPECT_EQ(cache.place(12), 1u);  // 11 was older
  EXPECT_FALSE(cache.find(11).has_value());
  EXPECT_EQ(cache.place(13), 0u);
  EXPECT_TRUE(cache.contains(12));
  EXPECT_EQ(cache.used(), 2u);
}

TEST(SlotCache, KeepsWhatMayNotBeForgotten) {
  SlotCache cache(3);
  for (const SlotCache::Key key : {1, 2, 3}) cache.place(key);
  EXPECT_EQ(cache.place_if(4, [](SlotCache::Slot slot) { return slot != 0; }), 1u);
  EXPECT_TRUE(cache.contains(1));
  EXPECT_FALSE(cache.contains(2));
  EXPECT_EQ(cache.place_if(5, [](SlotCache::Slot) { return false; }), std::nullopt);
  EXPECT_FALSE(cache.contains(5));
  cache.clear();
  EXPECT_EQ(cache.used(), 0u);
  EXPECT_EQ(cache.place(6), 0u);
}

/// Against a list that is searched from the front. Keys are few, and multiples of a large power of two, so
/// that many begin their search in the same bucket.
TEST(SlotCache, EqualsAListInOrderOfUse) {
  std::mt19937_64 draw(1);
  for (const SlotCache::Slot slots : {1u, 2u, 7u, 64u}) {
    SlotCache cache(slots);
    struct Place {
      SlotCache::Key key;
      SlotCache::Slot slot;
    };
    std::list<Place> model;
    for (int step = 0; step < 20000; ++step) {
      const SlotCache::Key key = draw() % (3 * slots) << 40;
      const auto found =
          std::find_if(model.begin(), model.end(), [&](const Place& p) { return p.key == key; });
      const auto slot = cache.find(key);
      ASSERT_EQ(slot.has_value(), found != model.end());
      if (slot) {
        ASSERT_EQ(*slot, found->slot);
        model.splice(model.begin(), model, found);
        continue;
      }
      SlotCache::Slot expected = cache.used();
      if (model.size() == slots) {
        expected = model.back().slot;
        model.pop_back();
      }
      ASSERT_EQ(cache.place(key), expected);
      model.push_front({key, expected});
    }
    for (const Place& place : model) EXPECT_TRUE(cache.contains(place.key));
  }
}

}  // namespace
}  // namespace dsv41
