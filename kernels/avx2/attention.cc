// Sparse attention of one token with AVX2 (docs/model.md 3; docs/numerics.md 2 to 5): scores as 16 fp64
// lanes, values summed per channel over ascending slots. Heads are handled four at a time, each in a lane of
// its own where a sum over slots must stay in order.
#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "kernels/avx2/avx2.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/vectors.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kSlots = 4;        // slots whose keys are widened together
constexpr std::size_t kHeads = 4;        // heads per vector
constexpr std::size_t kHeadTile = 3;     // 3 heads x 4 slots: 12 sums in registers
constexpr std::size_t kSlotBlock = 64;   // slots that stay in the second-level cache while all heads pass
constexpr float kMaximumFloor = -1e30f;  // an empty row yields zeros, not NaN

/// Dot products of `Heads` queries with four keys, all fp64 [dim]; scores[slot * stride + head] = RN32(dot *
/// scale).
template <std::size_t Heads>
DSV41_OUT_OF_LINE void score_tile(const double* q, const double* keys, std::size_t dim, double scale,
                                  std::size_t stride, std::size_t slots, float* scores) {
  __m256d parts[Heads][kSlots][4];
  for (std::size_t p = 0; p < 4; ++p) {
    __m256d sum[Heads][kSlots];
    for (auto& head : sum)
      for (__m256d& value : head) value = _mm256_setzero_pd();
    for (std::size_t i = 4 * p; i < dim; i += 16) {
      __m256d key[kSlots];
      for (std::size_t s = 0; s < kSlots; ++s) key[s] = _mm256_loadu_pd(keys + s * dim + i);
      for (std::size_t h = 0; h < Heads; ++h) {
        const __m256d query = _mm256_loadu_pd(q + h * dim + i);
        for (std::size_t s = 0; s < kSlots; ++s) sum[h][s] = _mm256_fmadd_pd(query, key[s], sum[h][s]);
      }
    }
    for (std::size_t h = 0; h < Heads; ++h)
      for (std::size_t s = 0; s < kSlots; ++s) parts[h][s][p] = sum[h][s];
  }
  for (std::size_t h = 0; h < Heads; ++h)
    for (std::size_t s = 0; s < slots; ++s) {
      Lanes lanes;
      std::copy_n(parts[h][s], 4, lanes.part);
      scores[s * stride + h] = static_cast<float>(fold(lanes) * scale);
    }
}

/// Scores of four heads [slots][stride] become bf16(e), still fp32; the denominators are returned.
inline __m256d exponentials(float* scores, std::size_t slots, std::size_t stride, __m128 sinks) {
  __m128 maximum = _mm_set1_ps(kMaximumFloor);
  for (std::size_t s = 0; s < slots; ++s) maximum = _mm_max_ps(_mm_loadu_ps(scores + s * stride), maximum);
  const __m256d wide_maximum = _mm256_cvtps_pd(maximum);
  __m256d denominator = _mm256_setzero_pd();
  for (std::size_t s = 0; s < slots; ++s) {
    const __m256d score = _mm256_cvtps_pd(_mm_loadu_ps(scores + s * stride));
    const __m128 e = _mm256_cvtpd_ps(exponential(_mm256_sub_pd(score, wide_maximum)));
    denominator = _mm256_add_pd(denominator, _mm256_cvtps_pd(e));
    _mm_storeu_ps(scores + s * stride, _mm256_castps256_ps128(round_to_bfloat16(_mm256_castps128_ps256(e))));
  }
  return _mm256_add_pd(denominator, exponential(_mm256_sub_pd(_mm256_cvtps_pd(sinks), wide_maximum)));
}

/// sums [kHeads][dim] += probabilities [slots][kHeads] times the values of the slots, in ascending slots.
DSV41_OUT_OF_LINE void add_values(const double* probabilities, const float* const* kv, std::size_t slots,
                                  std::size_t dim, double* sums) {
  for (std::size_t d = 0; d < dim; d += 8) {
    __m256d sum[kHeads][2];
    for (std::size_t h = 0; h < kHeads; ++h)
      for (std::size_t half = 0; half < 2; ++half)
        sum[h][half] = _mm256_loadu_pd(sums + h * dim + d + 4 * half);
    for (std::size_t s = 0; s < slots; ++s) {
      const __m256d low = _mm256_cvtps_pd(_mm_loadu_ps(kv[s] + d)),
                    high = _mm256_cvtps_pd(_mm_loadu_ps(kv[s] + d + 4));
      for (std::size_t h = 0; h < kHeads; ++h) {
        const __m256d probability = _mm256_broadcast_sd(probabilities + s * kHeads + h);
        sum[h][0] = _mm256_fmadd_pd(probability, low, sum[h][0]);
        sum[h][1] = _mm256_fmadd_pd(probability, high, sum[h][1]);
      }
    }
    for (std::size_t h = 0; h < kHeads; ++h)
      for (std::size_t half = 0; half < 2; ++half)
        _mm256_storeu_pd(sums + h * dim + d + 4 * half, sum[h][half]);
  }
}

struct Scratch {
  std::vector<double> queries, keys, sums, denominators;
  std::vector<float> scores;  // [slots][padded heads]
};

template <class T>
void reserve(std::vector<T>& buffer, std::size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

}  // namespace

void attention(const BFloat16* q, const float* const* kv, std::size_t slots, const float* sink, float scale,
               std::size_t heads, std::size_t dim, BFloat16* out) {
  if (dim % 16 != 0) return plain_ops().attention(q, kv, slots, sink, scale, heads, dim, out);
  static thread_local Scratch scratch;
  const std::size_t padded = (heads + kHeads - 1) / kHeads * kHeads;  // lanes beyond `heads` hold zeros
  reserve(scratch.queries, heads * dim), reserve(scratch.keys, kSlots * dim),
      reserve(scratch.sums, padded * dim);
  reserve(scratch.denominators, padded), reserve(scratch.scores, slots * padded);
  double *const queries = scratch.queries.data(), *const keys = scratch.keys.data(),
                *const sums = scratch.sums.data();
  float* const scores = scratch.scores.data();
  for (std::size_t i = 0; i < heads * dim; i += 8) {
    const __m256 values = widen8(q + i);
    _mm256_storeu_pd(queries + i, low_half(values));
    _mm256_storeu_pd(queries + i + 4, high_half(values));
  }
  std::fill_n(scores, slots * padded, 0.0f);
  for (std::size_t slot = 0; slot < slots; slot += kSlots) {
    const std::size_t count = std::min(kSlots, slots - slot);
    for (std::size_t s = 0; s < kSlots; ++s) {
      const float* const key = kv[slot + std::min(s, count - 1)];
      for (std::size_t i = 0; i < dim; i += 4)
        _mm256_storeu_pd(keys + s * dim + i, _mm256_cvtps_pd(_mm_loadu_ps(key + i)));
    }
    float* const tile = scores + slot * padded;
    std::size_t head = 0;
    for (; head + kHeadTile <= heads; head += kHeadTile)
      score_tile<kHeadTile>(queries + head * dim, keys, dim, scale, padded, count, tile + head);
    for (; head < heads; ++head)
      score_tile<1>(queries + head * dim, keys, dim, scale, padded, count, tile + head);
  }
  for (std::size_t head = 0; head < padded; head += kHeads) {
    float sinks[kHeads] = {};
    std::copy_n(sink + head, std::min(kHeads, heads - head), sinks);
    _mm256_storeu_pd(scratch.denominators.data() + head,
                     exponentials(scores + head, slots, padded, _mm_loadu_ps(sinks)));
  }
  std::fill_n(sums, padded * dim, 0.0);
  for (std::size_t slot = 0; slot < slots; slot += kSlotBlock) {
    const std::size_t count = std::min(kSlotBlock, slots - slot);
    for (std::size_t head = 0; head < padded; head += kHeads) {
      alignas(32) double probabilities[kSlotBlock * kHeads];
      for (std::size_t s = 0; s < count; ++s)
        _mm256_store_pd(probabilities + s * kHeads,
                        _mm256_cvtps_pd(_mm_loadu_ps(scores + (slot + s) * padded + head)));
      add_values(probabilities, kv + slot, count, dim, sums + head * dim);
    }
  }
  for (std::size_t head = 0; head < heads; ++head) {
    const __m256d denominator = _mm256_set1_pd(scratch.denominators[head]);
    for (std::size_t d = 0; d < dim; d += 8) {
      const double* const from = sums + head * dim + d;
      store8(out + head * dim + d, narrow(_mm256_div_pd(_mm256_loadu_pd(from), denominator),
                                          _mm256_div_pd(_mm256_loadu_pd(from + 4), denominator)));
    }
  }
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
