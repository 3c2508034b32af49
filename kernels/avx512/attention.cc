// Sparse attention of one token with AVX-512 (docs/model.md 3; docs/numerics.md 2 to 5): scores as 16 fp64
// lanes, values summed per channel over ascending slots. Heads are handled eight at a time, each in a lane of
// its own where a sum over slots must stay in order.
#include <algorithm>
#include <vector>

#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/panels.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kHeads = 8;        // heads per vector
constexpr std::size_t kScoreHeads = 4;   // heads that share the widening of a key, and …
constexpr std::size_t kScoreSlots = 6;   // … slots that share the loads of queries: 24 sums in registers
constexpr std::size_t kValueSums = 16;   // of values, in registers
constexpr std::size_t kSlotBlock = 128;  // slots that stay in the second-level cache while all heads pass
constexpr std::size_t kChains = 4;       // exponentials side by side
constexpr float kMaximumFloor = -1e30f;  // an empty row yields zeros, not NaN

/// The low halves of two vectors plus their high ones.
inline __m512d add_halves(__m512d a, __m512d b) {
  return _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x44), _mm512_shuffle_f64x2(a, b, 0xEE));
}
/// Folds the lanes of four sums, each eight of them in `first` and eight in `second`: j + (j+8), then 4,
/// 2, 1.
inline __m256d fold_four(const __m512d* first, const __m512d* second) {
  __m512d eight[4];
  for (std::size_t i = 0; i < 4; ++i) eight[i] = _mm512_add_pd(first[i], second[i]);
  const __m512d a = add_halves(eight[0], eight[1]),
                b = add_halves(eight[2], eight[3]);  // four lanes of each sum
  const __m512d two = _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xDD));
  const __m512d one = _mm512_add_pd(two, _mm512_permute_pd(two, 0x55));
  return _mm512_castpd512_pd256(_mm512_permutexvar_pd(_mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0), one));
}

/// scores[slot * stride + head] = RN32(dot * scale) for four queries and at most six keys.
void score_tile(const PanelVector* queries, const float* const* kv, std::size_t slots, std::size_t dim,
                double scale, std::size_t stride, float* scores) {
  const float* keys[kScoreSlots];  // beyond the last slot the last one again
  for (std::size_t s = 0; s < kScoreSlots; ++s) keys[s] = kv[std::min(s, slots - 1)];
  __m512d first[kScoreSlots * kScoreHeads], second[kScoreSlots * kScoreHeads];
  float_sums<0, kScoreHeads, kScoreSlots>(queries, keys, dim, first);
  float_sums<1, kScoreHeads, kScoreSlots>(queries + padded_length(dim) / 32 * kScoreHeads, keys, dim, second);
  for (std::size_t s = 0; s < std::min(slots, kScoreSlots); ++s) {
    const __m256d dots = fold_four(first + s * kScoreHeads, second + s * kScoreHeads);
    _mm_storeu_ps(scores + s * stride, _mm256_cvtpd_ps(_mm256_mul_pd(dots, _mm256_set1_pd(scale))));
  }
}

/// Scores of eight heads and `Slots` slots, [slots][stride], become bf16(e), still fp32; adds to the
/// denominators.
template <std::size_t Slots>
inline void exponentials(float* scores, std::size_t stride, __m512d maximum, __m512d& denominator) {
  __m512d e[Slots];
#pragma GCC unroll 4
  for (std::size_t s = 0; s < Slots; ++s)
    e[s] = _mm512_sub_pd(_mm512_cvtps_pd(_mm256_loadu_ps(scores + s * stride)), maximum);
  exponential(e);
#pragma GCC unroll 4
  for (std::size_t s = 0; s < Slots; ++s) {
    const __m256 rounded = _mm512_cvtpd_ps(e[s]);
    denominator = _mm512_add_pd(denominator, _mm512_cvtps_pd(rounded));
    const __m512i bits = bfloat16_bits(_mm512_castps256_ps512(rounded));
    const __m256i probability = _mm256_and_si256(_mm512_castsi512_si256(bits), _mm256_set1_epi32(~0xFFFF));
    _mm256_storeu_ps(scores + s * stride, _mm256_castsi256_ps(probability));
  }
}
/// The same for all slots; returns the denominators.
inline __m512d exponentials(float* scores, std::size_t slots, std::size_t stride, __m256 sinks) {
  __m256 maximum = _mm256_set1_ps(kMaximumFloor);
  for (std::size_t s = 0; s < slots; ++s)
    maximum = _mm256_max_ps(_mm256_loadu_ps(scores + s * stride), maximum);
  const __m512d wide_maximum = _mm512_cvtps_pd(maximum);
  __m512d denominator = _mm512_setzero_pd();
  std::size_t s = 0;
  for (; s + kChains <= slots; s += kChains)
    exponentials<kChains>(scores + s * stride, stride, wide_maximum, denominator);
  for (; s < slots; ++s) exponentials<1>(scores + s * stride, stride, wide_maximum, denominator);
  __m512d sink[] = {_mm512_sub_pd(_mm512_cvtps_pd(sinks), wide_maximum)};
  exponential(sink);
  return _mm512_add_pd(denominator, sink[0]);
}

/// sums [Heads][dim] += probabilities [slots][kHeads] times the values of the slots, in ascending slots; dim
/// is a multiple of kSums / Heads vectors.
template <std::size_t Heads>
DSV41_OUT_OF_LINE void add_values(const double* probabilities, const float* const* kv, std::size_t slots,
                                  std::size_t dim, double* sums) {
  constexpr std::size_t kVectors = kValueSums / Heads;
  for (std::size_t d = 0; d < dim; d += 8 * kVectors) {
    __m512d sum[Heads][kVectors];
#pragma GCC unroll 8
    for (std::size_t h = 0; h < Heads; ++h)
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kVectors; ++v) sum[h][v] = _mm512_loadu_pd(sums + h * dim + d + 8 * v);
    for (std::size_t s = 0; s < slots; ++s) {
      __m512d values[kVectors];
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kVectors; ++v)
        values[v] = _mm512_cvtps_pd(_mm256_loadu_ps(kv[s] + d + 8 * v));
#pragma GCC unroll 8
      for (std::size_t h = 0; h < Heads; ++h) {
        const __m512d probability = _mm512_set1_pd(probabilities[s * kHeads + h]);
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kVectors; ++v)
          sum[h][v] = _mm512_fmadd_pd(probability, values[v], sum[h][v]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t h = 0; h < Heads; ++h)
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kVectors; ++v) _mm512_storeu_pd(sums + h * dim + d + 8 * v, sum[h][v]);
  }
}

struct Scratch {
  std::vector<PanelVector> queries;  // a panel for every four heads
  std::vector<double> sums, denominators;
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
  const std::size_t padded = ceil_div(heads, kHeads) * kHeads;  // lanes beyond `heads` hold anything
  reserve(scratch.sums, padded * dim), reserve(scratch.denominators, padded),
      reserve(scratch.scores, slots * padded);
  double* const sums = scratch.sums.data();
  float* const scores = scratch.scores.data();
  PanelVector* const queries = panel_buffer(scratch.queries, padded, dim);
  const std::size_t panel = padded_length(dim) / 16;                     // vectors of each head
  const std::size_t asked = ceil_div(heads, kScoreHeads) * kScoreHeads;  // the last head again and again
  for (std::size_t head = 0; head < asked; ++head)
    fill_panel_row<Halves>(q + std::min(head, heads - 1) * dim, dim, kScoreHeads, head % kScoreHeads,
                           queries + head / kScoreHeads * kScoreHeads * panel);
  for (std::size_t slot = 0; slot < slots; slot += kScoreSlots)
    for (std::size_t head = 0; head < asked; head += kScoreHeads)
      score_tile(queries + head * panel, kv + slot, slots - slot, dim, static_cast<double>(scale), padded,
                 scores + slot * padded + head);
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
      if (heads - head <= kHeads / 2 && dim % (2 * kWidth) == 0)
        add_values<kHeads / 2>(probabilities, kv + slot, count, dim, sums + head * dim);
      else
        add_values<kHeads>(probabilities, kv + slot, count, dim, sums + head * dim);
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
