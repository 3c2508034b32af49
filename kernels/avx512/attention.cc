// Sparse attention of one token with AVX-512 (docs/model.md 3; docs/numerics.md 2 to 5): scores as 16 fp64
// lanes, values summed per channel over ascending slots. Heads are handled eight at a time, each in a lane of
// its own where a sum over slots must stay in order.
#include <algorithm>
#include <vector>

#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/vectors.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kSlots = 4;        // slots whose keys are widened together
constexpr std::size_t kHeads = 8;        // heads per vector
constexpr std::size_t kHeadTile = 4;     // 4 heads x 4 slots: 16 sums in registers
constexpr std::size_t kSlotBlock = 64;   // slots that stay in the second-level cache while all heads pass
constexpr float kMaximumFloor = -1e30f;  // an empty row yields zeros, not NaN

/// Dot products of four queries with four keys, all fp64 [dim]; scores[slot * stride + head] = RN32(dot *
/// scale). Queries beyond `heads` repeat the last one, keys beyond `slots` are not stored.
DSV41_OUT_OF_LINE void score_tile(const double* const* q, std::size_t heads, const double* keys,
                                  std::size_t slots, std::size_t dim, double scale, std::size_t stride,
                                  float* scores) {
  __m512d first[kHeadTile][kSlots];
  for (std::size_t p = 0; p < 2; ++p) {
    __m512d sum[kHeadTile][kSlots];
#pragma GCC unroll 4
    for (std::size_t h = 0; h < kHeadTile; ++h)
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kSlots; ++s) sum[h][s] = _mm512_setzero_pd();
    for (std::size_t i = 8 * p; i < dim; i += kWidth) {
      __m512d key[kSlots];
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kSlots; ++s) key[s] = _mm512_loadu_pd(keys + s * dim + i);
#pragma GCC unroll 4
      for (std::size_t h = 0; h < kHeadTile; ++h) {
        const __m512d query = _mm512_loadu_pd(q[h] + i);
#pragma GCC unroll 4
        for (std::size_t s = 0; s < kSlots; ++s) sum[h][s] = _mm512_fmadd_pd(query, key[s], sum[h][s]);
      }
    }
    for (std::size_t h = 0; h < kHeadTile; ++h)
      for (std::size_t s = 0; s < kSlots; ++s) {
        if (p == 0)
          first[h][s] = sum[h][s];
        else if (h < heads && s < slots)
          scores[s * stride + h] = static_cast<float>(fold(first[h][s], sum[h][s]) * scale);
      }
  }
}

/// Scores of eight heads [slots][stride] become bf16(e), still fp32; the denominators are returned.
inline __m512d exponentials(float* scores, std::size_t slots, std::size_t stride, __m256 sinks) {
  __m256 maximum = _mm256_set1_ps(kMaximumFloor);
  for (std::size_t s = 0; s < slots; ++s)
    maximum = _mm256_max_ps(_mm256_loadu_ps(scores + s * stride), maximum);
  const __m512d wide_maximum = _mm512_cvtps_pd(maximum);
  __m512d denominator = _mm512_setzero_pd();
  for (std::size_t s = 0; s < slots; ++s) {
    const __m512d score = _mm512_cvtps_pd(_mm256_loadu_ps(scores + s * stride));
    const __m256 e = _mm512_cvtpd_ps(exponential(_mm512_sub_pd(score, wide_maximum)));
    denominator = _mm512_add_pd(denominator, _mm512_cvtps_pd(e));
    const __m512i bits = bfloat16_bits(_mm512_castps256_ps512(e));
    const __m256i rounded = _mm256_and_si256(_mm512_castsi512_si256(bits), _mm256_set1_epi32(~0xFFFF));
    _mm256_storeu_ps(scores + s * stride, _mm256_castsi256_ps(rounded));
  }
  return _mm512_add_pd(denominator, exponential(_mm512_sub_pd(_mm512_cvtps_pd(sinks), wide_maximum)));
}

/// sums [kHeads][dim] += probabilities [slots][kHeads] times the values of the slots, in ascending slots.
DSV41_OUT_OF_LINE void add_values(const double* probabilities, const float* const* kv, std::size_t slots,
                                  std::size_t dim, double* sums) {
  for (std::size_t d = 0; d < dim; d += kWidth) {
    __m512d sum[kHeads][2];
#pragma GCC unroll 8
    for (std::size_t h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
      for (std::size_t half = 0; half < 2; ++half)
        sum[h][half] = _mm512_loadu_pd(sums + h * dim + d + 8 * half);
    for (std::size_t s = 0; s < slots; ++s) {
      const __m512d low = _mm512_cvtps_pd(_mm256_loadu_ps(kv[s] + d));
      const __m512d high = _mm512_cvtps_pd(_mm256_loadu_ps(kv[s] + d + 8));
#pragma GCC unroll 8
      for (std::size_t h = 0; h < kHeads; ++h) {
        const __m512d probability = _mm512_set1_pd(probabilities[s * kHeads + h]);
        sum[h][0] = _mm512_fmadd_pd(probability, low, sum[h][0]);
        sum[h][1] = _mm512_fmadd_pd(probability, high, sum[h][1]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
      for (std::size_t half = 0; half < 2; ++half)
        _mm512_storeu_pd(sums + h * dim + d + 8 * half, sum[h][half]);
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
  if (dim % kWidth != 0) return plain_ops().attention(q, kv, slots, sink, scale, heads, dim, out);
  static thread_local Scratch scratch;
  const std::size_t padded = ceil_div(heads, kHeads) * kHeads;  // lanes beyond `heads` hold zeros
  reserve(scratch.queries, heads * dim), reserve(scratch.keys, kSlots * dim),
      reserve(scratch.sums, padded * dim);
  reserve(scratch.denominators, padded), reserve(scratch.scores, slots * padded);
  double *const queries = scratch.queries.data(), *const keys = scratch.keys.data(),
                *const sums = scratch.sums.data();
  float* const scores = scratch.scores.data();
  for (std::size_t i = 0; i < heads * dim; i += kWidth) store_sixteen(queries + i, widen(q + i, 0xFFFF));
  std::fill_n(scores, slots * padded, 0.0f);
  for (std::size_t slot = 0; slot < slots; slot += kSlots) {
    const std::size_t count = std::min(kSlots, slots - slot);
    for (std::size_t s = 0; s < kSlots; ++s) {
      const float* const key = kv[slot + std::min(s, count - 1)];
      for (std::size_t i = 0; i < dim; i += 8)
        _mm512_storeu_pd(keys + s * dim + i, _mm512_cvtps_pd(_mm256_loadu_ps(key + i)));
    }
    for (std::size_t head = 0; head < heads; head += kHeadTile) {
      const double* rows[kHeadTile];
      for (std::size_t h = 0; h < kHeadTile; ++h) rows[h] = queries + std::min(head + h, heads - 1) * dim;
      score_tile(rows, std::min(kHeadTile, heads - head), keys, count, dim, static_cast<double>(scale),
                 padded, scores + slot * padded + head);
    }
  }
  for (std::size_t head = 0; head < padded; head += kHeads) {
    float sinks[kHeads] = {};
    std::copy_n(sink + head, std::min(kHeads, heads - head), sinks);
    _mm512_storeu_pd(scratch.denominators.data() + head,
                     exponentials(scores + head, slots, padded, _mm256_loadu_ps(sinks)));
  }
  std::fill_n(sums, padded * dim, 0.0);
  for (std::size_t slot = 0; slot < slots; slot += kSlotBlock) {
    const std::size_t count = std::min(kSlotBlock, slots - slot);
    for (std::size_t head = 0; head < padded; head += kHeads) {
      alignas(64) double probabilities[kSlotBlock * kHeads];
      for (std::size_t s = 0; s < count; ++s)
        _mm512_store_pd(probabilities + s * kHeads,
                        _mm512_cvtps_pd(_mm256_loadu_ps(scores + (slot + s) * padded + head)));
      add_values(probabilities, kv + slot, count, dim, sums + head * dim);
    }
  }
  for (std::size_t head = 0; head < heads; ++head) {
    const __m512d denominator = _mm512_set1_pd(scratch.denominators[head]);
    for (std::size_t d = 0; d < dim; d += kWidth) {
      const double* const from = sums + head * dim + d;
      store_sixteen(out + head * dim + d, join_floats(_mm512_div_pd(_mm512_loadu_pd(from), denominator),
                                                      _mm512_div_pd(_mm512_loadu_pd(from + 8), denominator)));
    }
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
