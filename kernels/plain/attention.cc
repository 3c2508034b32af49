// Sparse attention and index scores of one token (docs/model.md 3; docs/numerics.md 2 to 5).
#include <algorithm>
#include <vector>

#include "kernels/exact_math.h"
#include "kernels/plain/plain.h"
#include "kernels/plain/sums.h"

namespace dsv41::plain {
namespace {

constexpr std::size_t kHeadTile = 4;     // heads that share one pass over the slots when values are summed
constexpr float kMaximumFloor = -1e30f;  // an empty row yields zeros, not NaN

void widen(const float* values, std::size_t count, double* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = values[i];
}

void widen(const BFloat16* values, std::size_t count, double* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = to_float(values[i]);
}

/// scores [heads, slots] = RN32(dot * scale).
void attention_scores(const double* q, const float* const* kv, std::size_t slots, float scale,
                      std::size_t heads, std::size_t dim, double* key, float* scores) {
  for (std::size_t slot = 0; slot < slots; ++slot) {
    widen(kv[slot], dim, key);
    for (std::size_t head = 0; head < heads; ++head)
      scores[head * slots + slot] =
          static_cast<float>(wide_dot(q + head * dim, key, dim) * static_cast<double>(scale));
  }
}

/// Replaces the scores of one head by bf16(e) and returns the denominator.
double exponentials(float* scores, std::size_t slots, float sink) {
  float maximum = kMaximumFloor;
  for (std::size_t slot = 0; slot < slots; ++slot) maximum = scores[slot] > maximum ? scores[slot] : maximum;
  double denominator = 0.0;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const auto e =
        static_cast<float>(exact::exp(static_cast<double>(scores[slot]) - static_cast<double>(maximum)));
    denominator += static_cast<double>(e);
    scores[slot] = to_float(to_bfloat16(e));
  }
  return denominator + exact::exp(static_cast<double>(sink) - static_cast<double>(maximum));
}

void decode_index_vector(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t dim,
                         double* out) {
  for (std::size_t i = 0; i < dim; ++i) {
    const auto nibble = static_cast<std::uint8_t>(codes[i / 2] >> (i % 2 * 4));
    out[i] = to_float(to_bfloat16(decode_e2m1(nibble) * decode_e8m0(scales[i / kBlock])));
  }
}

}  // namespace

void attention(const BFloat16* q, const float* const* kv, std::size_t slots, const float* sink, float scale,
               std::size_t heads, std::size_t dim, BFloat16* out) {
  thread_local std::vector<double> wide;
  thread_local std::vector<float> probabilities;  // [heads, slots]
  wide.resize(std::max(wide.size(), (heads + 1 + kHeadTile) * dim));
  probabilities.resize(std::max(probabilities.size(), heads * slots));
  double* const queries = wide.data();  // [heads, dim]
  double* const key = queries + heads * dim;
  double* const sums = key + dim;  // [kHeadTile, dim]

  widen(q, heads * dim, queries);
  attention_scores(queries, kv, slots, scale, heads, dim, key, probabilities.data());
  for (std::size_t first = 0; first < heads; first += kHeadTile) {
    const std::size_t count = std::min(kHeadTile, heads - first);
    double denominators[kHeadTile];
    for (std::size_t head = 0; head < count; ++head)
      denominators[head] =
          exponentials(probabilities.data() + (first + head) * slots, slots, sink[first + head]);
    std::fill(sums, sums + kHeadTile * dim, 0.0);
    for (std::size_t slot = 0; slot < slots; ++slot) {
      widen(kv[slot], dim, key);
      for (std::size_t head = 0; head < count; ++head) {
        const double probability = probabilities[(first + head) * slots + slot];
        double* const sum = sums + head * dim;
        for (std::size_t d = 0; d < dim; ++d) sum[d] += probability * key[d];
      }
    }
    for (std::size_t head = 0; head < count; ++head)
      for (std::size_t d = 0; d < dim; ++d)
        out[(first + head) * dim + d] = to_bfloat16(sums[head * dim + d] / denominators[head]);
  }
}

void index_scores(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                  std::size_t keys, BFloat16* scores) {
  const std::size_t heads = query.heads, dim = query.dim;
  thread_local std::vector<double> scratch;
  scratch.resize(std::max(scratch.size(), (heads + 1) * dim + heads));
  double* const queries = scratch.data();  // [heads, dim]
  double* const key = queries + heads * dim;
  double* const terms = key + dim;  // [heads]
  for (std::size_t head = 0; head < heads; ++head)
    decode_index_vector(query.codes + head * (dim / 2), query.scales + head * (dim / kBlock), dim,
                        queries + head * dim);
  for (std::size_t j = 0; j < keys; ++j) {
    decode_index_vector(key_codes + j * (dim / 2), key_scales + j * (dim / kBlock), dim, key);
    for (std::size_t head = 0; head < heads; ++head) {
      const float match = to_float(to_bfloat16(wide_dot(queries + head * dim, key, dim)));
      const float weighted = (match > 0.0f ? match : 0.0f) * to_float(query.head_weights[head]);
      terms[head] = to_float(to_bfloat16(weighted));
    }
    scores[j] = to_bfloat16(wide_sum(heads, [=](std::size_t head) { return terms[head]; }));
  }
}

}  // namespace dsv41::plain
