// Layout of the Engram tables and the hash that finds rows in them. All of it is exact integer arithmetic.
#include "engram/hashing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "loader/error.h"

namespace dsv41 {
namespace {

using Wide = unsigned __int128;

constexpr std::uint64_t kMaxBuckets = std::uint64_t{1}
                                      << 40;  // per column; bounds the search and every sum of primes
constexpr std::uint32_t kMaxColumns = 4096;   // of a layer
constexpr std::uint64_t kMaxPrimes = 65'536;  // of all layers: a second of searching
constexpr std::uint64_t kSeedPerLayer = 10007;

/// NumPy's SeedSequence for one integer: hashes its 32-bit words into a pool of four, then into as many as
/// asked.
class SeedSequence {
 public:
  explicit SeedSequence(std::uint64_t seed) {
    const std::uint32_t words[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    std::uint32_t multiplier = 0x43B0D7E5u;
    const auto scramble = [&multiplier](std::uint32_t value) {
      value ^= multiplier;
      multiplier *= 0x931E8875u;
      value *= multiplier;
      return value ^ (value >> 16);
    };
    for (std::size_t i = 0; i < pool_.size(); ++i) pool_[i] = scramble(i < 2 ? words[i] : 0);
    for (std::size_t source = 0; source < pool_.size(); ++source)
      for (std::size_t target = 0; target < pool_.size(); ++target)
        if (source != target) {
          const std::uint32_t mixed = 0xCA01F9DDu * pool_[target] - 0x4973F715u * scramble(pool_[source]);
          pool_[target] = mixed ^ (mixed >> 16);
        }
  }

  std::array<std::uint64_t, 4> state() const {
    std::array<std::uint32_t, 8> words{};
    std::uint32_t multiplier = 0x8B51F9DDu;
    for (std::size_t i = 0; i < words.size(); ++i) {
      std::uint32_t value = pool_[i % pool_.size()] ^ multiplier;
      multiplier *= 0x58F38DEDu;
      value *= multiplier;
      words[i] = value ^ (value >> 16);
    }
    std::array<std::uint64_t, 4> result{};
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = std::uint64_t{words[2 * i + 1]} << 32 | words[2 * i];
    return result;
  }

 private:
  std::array<std::uint32_t, 4> pool_{};
};

/// PCG64 (XSL-RR 128/64) as NumPy seeds and reads it: a 32-bit draw takes half of a 64-bit one and keeps the
/// other.
class Pcg64 {
 public:
  explicit Pcg64(std::uint64_t seed) {
    const std::array<std::uint64_t, 4> words = SeedSequence(seed).state();
    increment_ = (Wide{words[2]} << 64 | words[3]) << 1 | 1u;
    step();
    state_ += Wide{words[0]} << 64 | words[1];
    step();
  }

  std::uint64_t next() {
    step();
    const auto value = static_cast<std::uint64_t>(state_ >> 64) ^ static_cast<std::uint64_t>(state_);
    const auto rotation = static_cast<unsigned>(state_ >> 122);
    return value >> rotation | value << ((64 - rotation) & 63);
  }

  std::uint32_t next_half() {
    if (has_half_) {
      has_half_ = false;
      return half_;
    }
    const std::uint64_t value = next();
    half_ = static_cast<std::uint32_t>(value >> 32);
    has_half_ = true;
    return static_cast<std::uint32_t>(value);
  }

 private:
  void step() { state_ = state_ * (Wide{0x2360ED051FC65DA4u} << 64 | 0x4385DF649FCCF645u) + increment_; }

  Wide state_ = 0, increment_ = 0;
  std::uint32_t half_ = 0;
  bool has_half_ = false;
};

/// Lemire's draw from [0, bound): the high word of draw * bound, redrawn where the low word would be biased.
template <class Word, class Product, class Draw>
Word bounded(Word bound, Draw&& draw) {
  constexpr unsigned kBits = std::numeric_limits<Word>::digits;
  Product product = Product{draw()} * bound;
  if (static_cast<Word>(product) < bound) {
    const Word threshold = static_cast<Word>(Word{0} - bound) % bound;
    while (static_cast<Word>(product) < threshold) product = Product{draw()} * bound;
  }
  return static_cast<Word>(product >> kBits);
}

std::uint64_t power_modulo(std::uint64_t base, std::uint64_t exponent, std::uint64_t modulus) {
  std::uint64_t result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = static_cast<std::uint64_t>(Wide{result} * base % modulus);
    base = static_cast<std::uint64_t>(Wide{base} * base % modulus);
  }
  return result;
}

/// Miller-Rabin; the first twelve primes as bases decide every 64-bit number.
bool is_prime(std::uint64_t n) {
  constexpr std::uint64_t kBases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
  if (n < 2) return false;
  for (const std::uint64_t base : kBases)
    if (n % base == 0) return n == base;
  std::uint64_t odd = n - 1;
  unsigned halvings = 0;
  for (; odd % 2 == 0; odd /= 2) ++halvings;
  for (const std::uint64_t base : kBases) {
    std::uint64_t x = power_modulo(base, odd, n);
    bool witness = x != 1 && x != n - 1;
    for (unsigned i = 1; witness && i < halvings; ++i) {
      x = static_cast<std::uint64_t>(Wide{x} * x % n);
      witness = x != n - 1;
    }
    if (witness) return false;
  }
  return true;
}

void require_layout(const ModelConfig& config) {
  const auto refuse = [](const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
    if (value < low || value > high)
      throw CheckpointError(fmt::format("config: {} is {}, must be from {} to {}", field, value, low, high));
  };
  refuse("engram_vocab_size", config.engram_vocab_size, 1, kMaxBuckets);
  refuse("engram_max_ngram_size", config.engram_max_ngram_size, 2, 16);
  refuse("engram_n_heads", config.engram_n_heads, 1, kMaxColumns / 16);
  refuse("engram_compressed_vocab_size", config.engram_compressed_vocab_size, 1,
         std::numeric_limits<std::uint32_t>::max());
  refuse("length of engram_layer_ids", config.engram_layer_ids.size(), 0, 1024);
  refuse("entries of engram_layer_ids * (engram_max_ngram_size-1) * engram_n_heads",
         config.engram_layer_ids.size() * std::uint64_t{config.n_hash_columns()}, 0, kMaxPrimes);
}

}  // namespace

std::vector<std::uint64_t> numpy_integers(std::uint64_t seed, std::uint64_t bound, std::size_t count) {
  std::vector<std::uint64_t> draws(count, 0);
  if (bound <= 1) return draws;  // nothing is drawn
  constexpr std::uint64_t kHalfRange = std::uint64_t{1} << 32;
  Pcg64 generator(seed);
  for (std::uint64_t& draw : draws) {
    if (bound > kHalfRange)
      draw = bounded<std::uint64_t, Wide>(bound, [&] { return generator.next(); });
    else if (bound == kHalfRange)
      draw = generator.next_half();
    else
      draw = bounded<std::uint32_t, std::uint64_t>(static_cast<std::uint32_t>(bound),
                                                   [&] { return generator.next_half(); });
  }
  return draws;
}

std::vector<HashLayer> derive_hash_layout(const ModelConfig& config) {
  require_layout(config);
  std::vector<HashLayer> layers;
  // Each prime is used once over all columns and layers, ascending: one search that never goes back.
  std::uint64_t prime = config.engram_vocab_size - 1;
  const std::uint64_t bound =
      std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) /
                                     config.engram_compressed_vocab_size / 2);
  for (const std::uint32_t layer_id : config.engram_layer_ids) {
    HashLayer& layer = layers.emplace_back();
    for (std::uint32_t column = 0; column < config.n_hash_columns(); ++column) {
      do ++prime;
      while (!is_prime(prime));
      layer.columns.push_back({prime, layer.rows});
      layer.rows += prime;
    }
    layer.multipliers = numpy_integers(kSeedPerLayer * layer_id, bound, config.engram_max_ngram_size);
    for (std::uint64_t& multiplier : layer.multipliers) multiplier = 2 * multiplier + 1;
  }
  return layers;
}

std::vector<HashLayer> hash_layout(const ModelConfig& config) {
  std::vector<HashLayer> layers = derive_hash_layout(config);
  std::vector<std::uint64_t> derived;
  for (const HashLayer& layer : layers) derived.push_back(layer.rows);
  if (derived != config.engram_num_embeddings)
    throw CheckpointError(
        fmt::format("config: engram_num_embeddings [{}], but the bucket primes add up to [{}]",
                    fmt::join(config.engram_num_embeddings, ", "), fmt::join(derived, ", ")));
  return layers;
}

void hash_row_ids(const HashLayer& layer, std::span<const HashedToken> recent, std::uint32_t pad,
                  std::span<std::uint64_t> ids) {
  const std::size_t sizes = layer.multipliers.size();  // 1-gram, which has no columns, … max_ngram_size-gram
  const std::size_t heads = layer.columns.size() / (sizes - 1);
  std::uint64_t hash = 0;
  bool alive = true;  // a dead or missing token hides everything before it, too
  for (std::size_t back = 0; back < sizes; ++back) {
    alive = alive && back < recent.size() && !recent[back].dead;
    hash ^= (alive ? recent[back].compressed : pad) * layer.multipliers[back];
    if (back == 0) continue;
    for (std::size_t column = (back - 1) * heads; column < back * heads; ++column)
      ids[column] = hash % layer.columns[column].prime + layer.columns[column].offset;
  }
}

}  // namespace dsv41
