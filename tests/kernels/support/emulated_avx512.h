// The AVX-512 instructions that kernels/avx512 uses, in plain C++ on arrays, so that its source runs on any
// x86-64 machine. Semantics from the instruction set reference; only what is used is here.
#pragma once

#include <emmintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace dsv41::emulated {

template <std::size_t Bytes>
struct Vector {
  std::uint8_t bytes[Bytes];
};
// Distinct types, as the real ones are: mixing up integers and floats must not compile.
struct I512 : Vector<64> {};
struct F512 : Vector<64> {};
struct D512 : Vector<64> {};
struct I256 : Vector<32> {};
struct F256 : Vector<32> {};
struct D256 : Vector<32> {};

template <class T, class V>
std::array<T, sizeof(V) / sizeof(T)> lanes(const V& v) {
  return std::bit_cast<std::array<T, sizeof(V) / sizeof(T)>>(v);
}
template <class V, class T, std::size_t N>
V vector(const std::array<T, N>& values) {
  static_assert(sizeof(V) == sizeof values);
  V v;
  std::memcpy(&v, values.data(), sizeof v);
  return v;
}
template <class V, class T, class F>
V map(const V& a, F f) {
  auto x = lanes<T>(a);
  for (T& value : x) value = static_cast<T>(f(value));
  return vector<V>(x);
}
template <class V, class T, class F>
V zip(const V& a, const V& b, F f) {
  auto x = lanes<T>(a);
  const auto y = lanes<T>(b);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(f(x[i], y[i]));
  return vector<V>(x);
}
template <class V, class T>
V fill(T value) {
  std::array<T, sizeof(V) / sizeof(T)> x;
  x.fill(value);
  return vector<V>(x);
}
/// Interleaves the lower (High false) or upper halves of every 128-bit part.
template <class T, bool High>
I512 unpack(const I512& a, const I512& b) {
  constexpr std::size_t kPart = 16 / sizeof(T);
  const auto x = lanes<T>(a), y = lanes<T>(b);
  auto out = x;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t from = i / kPart * kPart + i % kPart / 2 + (High ? kPart / 2 : 0);
    out[i] = i % 2 == 0 ? x[from] : y[from];
  }
  return vector<I512>(out);
}
template <class To, class From>
To reinterpret(const From& v) {
  To out{};
  std::memcpy(&out, &v, std::min(sizeof out, sizeof v));
  return out;
}
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;

inline I512 loadu_i(const void* p) {
  I512 v;
  std::memcpy(&v, p, 64);
  return v;
}
inline void storeu_i(void* p, I512 v) {
  std::memcpy(p, &v, 64);
}
inline F512 loadu_ps(const float* p) {
  F512 v;
  std::memcpy(&v, p, 64);
  return v;
}
inline void storeu_ps(float* p, F512 v) {
  std::memcpy(p, &v, 64);
}
inline I512 setr(i32 a, i32 b, i32 c, i32 d, i32 e, i32 f, i32 g, i32 h, i32 i, i32 j, i32 k, i32 l, i32 m,
                 i32 n, i32 o, i32 p) {
  return vector<I512>(std::array<i32, 16>{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p});
}
inline I512 add32(I512 a, I512 b) {
  return zip<I512, u32>(a, b, [](u32 x, u32 y) { return x + y; });
}
inline I512 sub32(I512 a, I512 b) {
  return zip<I512, u32>(a, b, [](u32 x, u32 y) { return x - y; });
}
inline I512 add8(I512 a, I512 b) {
  return zip<I512, u8>(a, b, [](u8 x, u8 y) { return x + y; });
}
inline I512 bits_and(I512 a, I512 b) {
  return zip<I512, u32>(a, b, [](u32 x, u32 y) { return x & y; });
}
inline I512 bits_or(I512 a, I512 b) {
  return zip<I512, u32>(a, b, [](u32 x, u32 y) { return x | y; });
}
inline I512 bits_xor(I512 a, I512 b) {
  return zip<I512, u32>(a, b, [](u32 x, u32 y) { return x ^ y; });
}
inline I512 max32(I512 a, I512 b) {
  return zip<I512, i32>(a, b, [](i32 x, i32 y) { return std::max(x, y); });
}
inline I512 min32(I512 a, I512 b) {
  return zip<I512, i32>(a, b, [](i32 x, i32 y) { return std::min(x, y); });
}
inline I512 abs32(I512 a) {
  return map<I512, i32>(a, [](i32 x) { return x < 0 ? 0u - static_cast<u32>(x) : static_cast<u32>(x); });
}
inline I512 min8(I512 a, I512 b) {
  return zip<I512, u8>(a, b, [](u8 x, u8 y) { return std::min(x, y); });
}
inline I512 slli32(I512 a, unsigned n) {
  return map<I512, u32>(a, [n](u32 x) { return n > 31 ? 0 : x << n; });
}
inline I512 srli32(I512 a, unsigned n) {
  return map<I512, u32>(a, [n](u32 x) { return n > 31 ? 0 : x >> n; });
}
inline I512 srai32(I512 a, unsigned n) {
  return map<I512, i32>(a, [n](i32 x) { return x >> std::min(n, 31u); });
}
inline I512 srli16(I512 a, unsigned n) {
  return map<I512, u16>(a, [n](u16 x) { return n > 15 ? 0 : x >> n; });
}
inline I512 sllv32(I512 a, I512 n) {
  return zip<I512, u32>(a, n, [](u32 x, u32 c) { return c > 31 ? 0 : x << c; });
}
inline I512 srlv32(I512 a, I512 n) {
  return zip<I512, u32>(a, n, [](u32 x, u32 c) { return c > 31 ? 0 : x >> c; });
}
inline I512 srav32(I512 a, I512 n) {
  return zip<I512, i32>(a, n, [](i32 x, i32 c) { return x >> std::min(static_cast<u32>(c), 31u); });
}
inline I512 shuffle8(I512 a, I512 index) {
  const auto x = lanes<u8>(a), n = lanes<u8>(index);
  auto out = x;
  for (std::size_t i = 0; i < 64; ++i) out[i] = (n[i] & 0x80) != 0 ? 0 : x[i / 16 * 16 + (n[i] & 15)];
  return vector<I512>(out);
}
inline I512 permutexvar32(I512 index, I512 a) {
  const auto x = lanes<i32>(a), n = lanes<i32>(index);
  auto out = x;
  for (std::size_t i = 0; i < 16; ++i) out[i] = x[static_cast<std::size_t>(n[i] & 15)];
  return vector<I512>(out);
}
inline I512 shuffle_parts(I512 a, I512 b, unsigned control) {
  I512 out;
  for (std::size_t part = 0; part < 4; ++part)
    std::memcpy(out.bytes + 16 * part, (part < 2 ? a : b).bytes + 16 * (control >> (2 * part) & 3), 16);
  return out;
}
/// acc + the sum of four unsigned times signed bytes; no saturation.
inline I512 dpbusd(I512 acc, I512 a, I512 b) {
  auto sum = lanes<u32>(acc);
  const auto x = lanes<u8>(a);
  const auto y = lanes<i8>(b);
  for (std::size_t i = 0; i < 64; ++i) sum[i / 4] += static_cast<u32>(i32{x[i]} * i32{y[i]});
  return vector<I512>(sum);
}
inline I512 dpwssd(I512 acc, I512 a, I512 b) {
  auto sum = lanes<u32>(acc);
  const auto x = lanes<i16>(a), y = lanes<i16>(b);
  for (std::size_t i = 0; i < 32; ++i) sum[i / 2] += static_cast<u32>(i32{x[i]} * i32{y[i]});
  return vector<I512>(sum);
}
inline I512 widen_u8(__m128i a) {
  const auto x = lanes<u8>(a);
  std::array<i32, 16> out;
  std::copy(x.begin(), x.end(), out.begin());
  return vector<I512>(out);
}
inline __m128i narrow_i8(I512 a) {
  const auto x = lanes<u32>(a);
  std::array<u8, 16> out;
  for (std::size_t i = 0; i < 16; ++i) out[i] = static_cast<u8>(x[i]);
  return std::bit_cast<__m128i>(out);
}
inline I256 narrow_i16(I512 a) {
  const auto x = lanes<u32>(a);
  std::array<u16, 16> out;
  for (std::size_t i = 0; i < 16; ++i) out[i] = static_cast<u16>(x[i]);
  return vector<I256>(out);
}
inline __m128i part128(I256 a, std::size_t n) {
  __m128i out;
  std::memcpy(&out, a.bytes + 16 * n, 16);
  return out;
}
inline I512 insert_part(I512 a, __m128i b, std::size_t n) {
  std::memcpy(a.bytes + 16 * n, &b, 16);
  return a;
}
inline I512 broadcast_part(__m128i a) {
  I512 out;
  for (std::size_t n = 0; n < 4; ++n) std::memcpy(out.bytes + 16 * n, &a, 16);
  return out;
}
inline I256 half(I512 a, std::size_t n) {
  I256 out;
  std::memcpy(&out, a.bytes + 32 * n, 32);
  return out;
}
inline D512 insert_half(D512 a, D256 b, std::size_t n) {
  std::memcpy(a.bytes + 32 * n, &b, 32);
  return a;
}
inline i32 reduce_add(I512 a) {
  u32 sum = 0;
  for (const u32 x : lanes<u32>(a)) sum += x;
  return static_cast<i32>(sum);
}
inline i32 reduce_or(I512 a) {
  i32 sum = 0;
  for (const i32 x : lanes<i32>(a)) sum |= x;
  return sum;
}
inline I512 maskz(unsigned mask, I512 a) {
  auto x = lanes<i32>(a);
  for (std::size_t i = 0; i < 16; ++i)
    if ((mask >> i & 1) == 0) x[i] = 0;
  return vector<I512>(x);
}
template <class F>
std::uint64_t mask8(I512 a, I512 b, F f) {
  const auto x = lanes<u8>(a), y = lanes<u8>(b);
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < 64; ++i) mask |= std::uint64_t{f(x[i], y[i])} << i;
  return mask;
}
inline unsigned mask_greater(I512 a, I512 b) {
  const auto x = lanes<i32>(a), y = lanes<i32>(b);
  unsigned mask = 0;
  for (std::size_t i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x[i] > y[i]) << i;
  return mask;
}
inline F512 to_float(I512 a) {
  const auto x = lanes<i32>(a);
  std::array<float, 16> out;
  std::transform(x.begin(), x.end(), out.begin(), [](i32 value) { return static_cast<float>(value); });
  return vector<F512>(out);
}
inline D512 to_double(I256 a) {
  const auto x = lanes<i32>(a);
  std::array<double, 8> out;
  std::copy(x.begin(), x.end(), out.begin());
  return vector<D512>(out);
}
inline F256 round_down_size(D512 a) {
  const auto x = lanes<double>(a);
  std::array<float, 8> out;
  std::transform(x.begin(), x.end(), out.begin(), [](double value) { return static_cast<float>(value); });
  return vector<F256>(out);
}
inline F512 add_ps(F512 a, F512 b) {
  return zip<F512, float>(a, b, [](float x, float y) { return x + y; });
}
inline F512 mul_ps(F512 a, F512 b) {
  return zip<F512, float>(a, b, [](float x, float y) { return x * y; });
}

using u64 = std::uint64_t;

template <std::size_t Bytes>
std::array<u8, Bytes> load_some(u64 mask, const void* p) {
  std::array<u8, Bytes> out{};
  for (std::size_t i = 0; i < Bytes; ++i)
    if ((mask >> i & 1) != 0) out[i] = static_cast<const u8*>(p)[i];
  return out;
}
inline I512 maskz_loadu8(u64 mask, const void* p) {
  return vector<I512>(load_some<64>(mask, p));
}
inline __m128i maskz_loadu8_small(u64 mask, const void* p) {
  return std::bit_cast<__m128i>(load_some<16>(mask, p));
}
inline I256 loadu_half(const void* p) {
  return vector<I256>(load_some<32>(~u64{0}, p));
}
template <class T>
I512 blend(u64 mask, I512 a, I512 b) {
  auto x = lanes<T>(a);
  const auto y = lanes<T>(b);
  for (std::size_t i = 0; i < x.size(); ++i)
    if ((mask >> i & 1) != 0) x[i] = y[i];
  return vector<I512>(x);
}
template <class T>
unsigned test_mask(I512 a, I512 b) {
  const auto x = lanes<T>(a), y = lanes<T>(b);
  unsigned mask = 0;
  for (std::size_t i = 0; i < x.size(); ++i) mask |= static_cast<unsigned>((x[i] & y[i]) != 0) << i;
  return mask;
}
inline I512 compress32(unsigned mask, I512 a) {
  const auto x = lanes<u32>(a);
  std::array<u32, 16> out{};
  for (std::size_t i = 0, n = 0; i < x.size(); ++i)
    if ((mask >> i & 1) != 0) out[n++] = x[i];
  return vector<I512>(out);
}
inline I512 andnot(I512 a, I512 b) {
  return zip<I512, u64>(a, b, [](u64 x, u64 y) { return ~x & y; });
}
inline I512 srav16(I512 a, I512 n) {
  return zip<I512, i16>(a, n, [](i16 x, i16 y) { return x >> std::min<u16>(static_cast<u16>(y), 15); });
}
inline i32 reduce_max(I512 a) {
  const auto x = lanes<i32>(a);
  return *std::max_element(x.begin(), x.end());
}
inline D512 fma_pd(D512 a, D512 b, D512 c) {
  auto sum = lanes<double>(c);
  const auto x = lanes<double>(a), y = lanes<double>(b);
  for (std::size_t i = 0; i < 8; ++i) sum[i] = std::fma(x[i], y[i], sum[i]);
  return vector<D512>(sum);
}
inline F512 fma_ps(F512 a, F512 b, F512 c) {
  auto sum = lanes<float>(c);
  const auto x = lanes<float>(a), y = lanes<float>(b);
  for (std::size_t i = 0; i < 16; ++i) sum[i] = std::fma(x[i], y[i], sum[i]);
  return vector<F512>(sum);
}
inline I512 to_integer(F512 a) {
  const auto x = lanes<float>(a);
  std::array<i32, 16> out;
  std::transform(x.begin(), x.end(), out.begin(),
                 [](float value) { return static_cast<i32>(std::nearbyint(value)); });
  return vector<I512>(out);
}
inline D512 widen_ps(F256 a) {
  const auto x = lanes<float>(a);
  std::array<double, 8> out;
  std::copy(x.begin(), x.end(), out.begin());
  return vector<D512>(out);
}
inline F256 half_ps(F512 a, std::size_t n) {
  F256 out;
  std::memcpy(&out, a.bytes + 32 * n, 32);
  return out;
}
inline I512 permutexvar8(I512 index, I512 a) {
  const auto x = lanes<u8>(a);
  return map<I512, u8>(index, [&x](u8 i) { return x[i % 64]; });
}
/// Every byte of `a` times the 8 x 8 bit matrix in the qword of `matrix`: byte 7 - i gives bit i.
inline I512 bit_product(I512 a, I512 matrix, u8 constant) {
  auto x = lanes<u8>(a);
  const auto rows = lanes<u8>(matrix);
  for (std::size_t i = 0; i < 64; ++i) {
    unsigned out = constant;
    for (unsigned bit = 0; bit < 8; ++bit)
      out ^= (static_cast<unsigned>(std::popcount(static_cast<u8>(x[i] & rows[i / 8 * 8 + 7 - bit]))) & 1)
             << bit;
    x[i] = static_cast<u8>(out);
  }
  return vector<I512>(x);
}

}  // namespace dsv41::emulated

#define __m512i ::dsv41::emulated::I512
#define __m512 ::dsv41::emulated::F512
#define __m512d ::dsv41::emulated::D512
#define __m256i ::dsv41::emulated::I256
#define __mmask64 std::uint64_t
#define __mmask16 std::uint16_t
#define __mmask8 std::uint8_t
#define _mm512_loadu_si512 ::dsv41::emulated::loadu_i
#define _mm512_storeu_si512 ::dsv41::emulated::storeu_i
#define _mm512_loadu_ps ::dsv41::emulated::loadu_ps
#define _mm512_storeu_ps ::dsv41::emulated::storeu_ps
#define _mm512_set1_epi32(x) ::dsv41::emulated::fill<__m512i, std::int32_t>(x)
#define _mm512_set1_epi8(x) ::dsv41::emulated::fill<__m512i, std::int8_t>(x)
#define _mm512_set1_ps(x) ::dsv41::emulated::fill<__m512, float>(x)
#define _mm512_setzero_si512() _mm512_set1_epi32(0)
#define _mm512_setzero_ps() _mm512_set1_ps(0.0f)
#define _mm512_setr_epi32 ::dsv41::emulated::setr
#define _mm512_add_epi32 ::dsv41::emulated::add32
#define _mm512_sub_epi32 ::dsv41::emulated::sub32
#define _mm512_add_epi8 ::dsv41::emulated::add8
#define _mm512_and_si512 ::dsv41::emulated::bits_and
#define _mm512_or_si512 ::dsv41::emulated::bits_or
#define _mm512_xor_si512 ::dsv41::emulated::bits_xor
#define _mm512_max_epi32 ::dsv41::emulated::max32
#define _mm512_min_epi32 ::dsv41::emulated::min32
#define _mm512_abs_epi32 ::dsv41::emulated::abs32
#define _mm512_min_epu8 ::dsv41::emulated::min8
#define _mm512_slli_epi32 ::dsv41::emulated::slli32
#define _mm512_srli_epi32 ::dsv41::emulated::srli32
#define _mm512_srai_epi32 ::dsv41::emulated::srai32
#define _mm512_srli_epi16 ::dsv41::emulated::srli16
#define _mm512_sllv_epi32 ::dsv41::emulated::sllv32
#define _mm512_srlv_epi32 ::dsv41::emulated::srlv32
#define _mm512_srav_epi32 ::dsv41::emulated::srav32
#define _mm512_shuffle_epi8 ::dsv41::emulated::shuffle8
#define _mm512_permutexvar_epi32 ::dsv41::emulated::permutexvar32
#define _mm512_shuffle_i32x4 ::dsv41::emulated::shuffle_parts
#define _mm512_unpacklo_epi8 ::dsv41::emulated::unpack<std::uint8_t, false>
#define _mm512_unpackhi_epi8 ::dsv41::emulated::unpack<std::uint8_t, true>
#define _mm512_unpacklo_epi32 ::dsv41::emulated::unpack<std::uint32_t, false>
#define _mm512_unpackhi_epi32 ::dsv41::emulated::unpack<std::uint32_t, true>
#define _mm512_unpacklo_epi64 ::dsv41::emulated::unpack<std::uint64_t, false>
#define _mm512_unpackhi_epi64 ::dsv41::emulated::unpack<std::uint64_t, true>
#define _mm512_dpbusd_epi32 ::dsv41::emulated::dpbusd
#define _mm512_dpwssd_epi32 ::dsv41::emulated::dpwssd
#define _mm512_cvtepu8_epi32 ::dsv41::emulated::widen_u8
#define _mm512_cvtepi32_epi8 ::dsv41::emulated::narrow_i8
#define _mm512_cvtepi32_epi16 ::dsv41::emulated::narrow_i16
#define _mm256_castsi256_si128(a) ::dsv41::emulated::part128(a, 0)
#define _mm256_extracti128_si256 ::dsv41::emulated::part128
#define _mm512_castsi128_si512 ::dsv41::emulated::reinterpret<__m512i, __m128i>
#define _mm512_inserti32x4 ::dsv41::emulated::insert_part
#define _mm512_broadcast_i32x4 ::dsv41::emulated::broadcast_part
#define _mm512_castsi512_si256(a) ::dsv41::emulated::half(a, 0)
#define _mm512_extracti64x4_epi64 ::dsv41::emulated::half
#define _mm512_insertf64x4 ::dsv41::emulated::insert_half
#define _mm512_reduce_add_epi32 ::dsv41::emulated::reduce_add
#define _mm512_reduce_or_epi32 ::dsv41::emulated::reduce_or
#define _mm512_maskz_mov_epi32 ::dsv41::emulated::maskz
#define _mm512_cmpeq_epi8_mask(a, b) ::dsv41::emulated::mask8(a, b, [](auto x, auto y) { return x == y; })
#define _mm512_cmple_epu8_mask(a, b) ::dsv41::emulated::mask8(a, b, [](auto x, auto y) { return x <= y; })
#define _mm512_cmpgt_epi32_mask ::dsv41::emulated::mask_greater
#define _mm512_castsi512_ps ::dsv41::emulated::reinterpret<__m512, __m512i>
#define _mm512_castpd_ps ::dsv41::emulated::reinterpret<__m512, __m512d>
#define _mm512_castpd256_pd512 ::dsv41::emulated::reinterpret<__m512d, ::dsv41::emulated::D256>
#define _mm256_castps_pd ::dsv41::emulated::reinterpret<::dsv41::emulated::D256, ::dsv41::emulated::F256>
#define _mm512_cvtepi32_ps ::dsv41::emulated::to_float
#define _mm512_cvtepi32_pd ::dsv41::emulated::to_double
#define _mm512_cvtpd_ps ::dsv41::emulated::round_down_size
#define _mm512_add_ps ::dsv41::emulated::add_ps
#define _mm512_mul_ps ::dsv41::emulated::mul_ps
#define _mm512_maskz_loadu_epi8 ::dsv41::emulated::maskz_loadu8
#define _mm_maskz_loadu_epi8 ::dsv41::emulated::maskz_loadu8_small
#define _mm256_loadu_si256 ::dsv41::emulated::loadu_half
#define _mm512_mask_blend_epi32 ::dsv41::emulated::blend<std::uint32_t>
#define _mm512_test_epi32_mask ::dsv41::emulated::test_mask<std::uint32_t>
#define _mm512_test_epi64_mask(a, b) \
  static_cast<std::uint8_t>(::dsv41::emulated::test_mask<std::uint64_t>(a, b))
#define _mm512_maskz_compress_epi32 ::dsv41::emulated::compress32
#define _mm512_set1_epi64(x) ::dsv41::emulated::fill<__m512i, std::int64_t>(x)
#define _mm512_andnot_si512 ::dsv41::emulated::andnot
#define _mm512_srav_epi16 ::dsv41::emulated::srav16
#define _mm512_reduce_max_epi32 ::dsv41::emulated::reduce_max
#define _mm512_mask_reduce_add_epi32(mask, a) _mm512_reduce_add_epi32(_mm512_maskz_mov_epi32(mask, a))
#define _mm512_fmadd_pd ::dsv41::emulated::fma_pd
#define _mm512_castps_si512 ::dsv41::emulated::reinterpret<__m512i, __m512>
#define _mm512_fmadd_ps ::dsv41::emulated::fma_ps
#define _mm512_cvtps_epi32 ::dsv41::emulated::to_integer
#define _mm512_cvtps_pd ::dsv41::emulated::widen_ps
#define _mm512_castps512_ps256(a) ::dsv41::emulated::half_ps(a, 0)
#define _mm512_extractf32x8_ps ::dsv41::emulated::half_ps
#define _mm512_mask_add_epi32(kept, mask, a, b) _mm512_mask_blend_epi32(mask, kept, _mm512_add_epi32(a, b))
#define _mm512_permutexvar_epi8 ::dsv41::emulated::permutexvar8
#define _mm512_gf2p8affine_epi64_epi8(a, m, c) ::dsv41::emulated::bit_product(a, m, c)
