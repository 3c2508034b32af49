// Everything but linear layers: every backend against the plain one, bit for bit, over shapes that are no
// multiple of a vector, with zeros, huge and tiny values. What the plain one computes is judged by
// golden_ops_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Codes;
using testing::Inputs;
using testing::Scales;

/// The bits of all results of one operation; NaNs count as equal.
class Results {
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    for (const T& value : values)
      bits_.push_back(testing::is_nan(value) ? ~std::uint64_t{0} : testing::bits_of(value));
  }
  friend bool operator==(const Results&, const Results&) = default;
  const std::vector<std::uint64_t>& bits() const { return bits_; }

 private:
  std::vector<std::uint64_t> bits_;
};

constexpr double kSizes[] = {1.0, 1e-3, 1e4, 1e-38, 1e30};

/// Finite bf16 values of every exponent, both signs, zeros and subnormals.
std::vector<BFloat16> any_finite(Inputs& inputs, std::size_t count) {
  std::vector<BFloat16> values(count);
  for (BFloat16& value : values) do
      value = {static_cast<std::uint16_t>(inputs.below(65536))};
    while ((value.bits & 0x7F80u) == 0x7F80u);
  return values;
}

using Quantizer = void (*Ops::*)(const BFloat16*, std::size_t, std::size_t, std::uint8_t*, std::uint8_t*);

void quantize(const Ops& ops, Results& results, Quantizer quantizer, std::size_t codes_per_byte,
              std::size_t block) {
  Inputs inputs(11);
  const auto run = [&](const std::vector<BFloat16>& x, std::size_t k) {
    std::vector<std::uint8_t> codes(x.size() / codes_per_byte), scales(x.size() / block);
    (ops.*quantizer)(x.data(), x.size() / k, k, codes.data(), scales.data());
    results.add(codes);
    results.add(scales);
  };
  for (const std::size_t k : {32, 64, 96, 160, 5120}) {
    for (const double size : kSizes) run(inputs.bfloat16(3 * k, size), k);
    run(any_finite(inputs, 4 * k), k);
    run(std::vector<BFloat16>(k), k);
    run(std::vector<BFloat16>(k, BFloat16{0x8000}), k);
    run(std::vector<BFloat16>(k, BFloat16{0x7F7F}), k);
    run(std::vector<BFloat16>(k, BFloat16{0x0001}), k);
  }
  // Every finite value beside a maximum that sets the scale: all roundings, all ties.
  for (const std::uint16_t largest : {0x3F80, 0x43E0, 0x40C0, 0x3FFF, 0x4240, 0x0100, 0x7F00}) {
    std::vector<BFloat16> x;
    for (unsigned bits = 0; bits < 65536; ++bits) {
      if ((bits & 0x7FFFu) > largest) continue;
      if (x.size() % block == 0) x.push_back({largest});
      x.push_back({static_cast<std::uint16_t>(bits)});
    }
    x.resize(x.size() / kBlock * kBlock);
    run(x, kBlock);
  }
}

void quantize_rows(const Ops& ops, Results& results) {
  quantize(ops, results, &Ops::quantize_rows, 1, kBlock);
}
void quantize_index(const Ops& ops, Results& results) {
  quantize(ops, results, &Ops::quantize_index, 2, kBlock);
}
void quantize_group(const Ops& ops, Results& results) {
  quantize(ops, results, &Ops::quantize_group, 2, kGroupBlock);
}

void dequantize_window(const Ops& ops, Results& results) {
  Inputs inputs(12);
  for (const std::size_t k : {32, 64, 160, 512})
    for (const Scales kind : {Scales::Usual, Scales::Extreme}) {
      const auto codes = inputs.e4m3(k, Codes::Uniform), scales = inputs.e8m0(k / kBlock, kind);
      std::vector<float> out(k);
      ops.dequantize_window(codes.data(), scales.data(), k, out.data());
      results.add(out);
    }
}

void dequantize_group(const Ops& ops, Results& results) {
  Inputs inputs(13);
  for (const std::size_t k : {16, 32, 48, 64, 512}) {
    const auto codes = inputs.e2m1(k, Codes::Uniform), scales = inputs.e4m3(k / kGroupBlock, Codes::Uniform);
    std::vector<float> out(k);
    ops.dequantize_group(codes.data(), scales.data(), k, out.data());
    results.add(out);
  }
}

void rms_norm(const Ops& ops, Results& results) {
  Inputs inputs(14);
  for (const std::size_t k : {1, 15, 16, 17, 64, 100, 1280, 5120})
    for (const std::size_t rows : {1, 3})
      for (const double size : kSizes) {
        auto x = inputs.bfloat16(rows * k, size);
        if (rows == 3) std::fill_n(x.begin(), k, BFloat16{});
        const auto weight = inputs.bfloat16(k);
        std::vector<BFloat16> out(x.size());
        ops.rms_norm(x.data(), weight.data(), 1e-20f, rows, k, out.data());
        results.add(out);
        ops.rms_norm(x.data(), weight.data(), 1e-6f, rows, k, x.data());
        results.add(x);
      }
}

void rotate(const Ops& ops, Results& results) {
  Inputs inputs(15);
  for (const std::size_t pairs : {1, 3, 8, 32})
    for (const std::size_t heads : {1, 3, 64})
      for (const std::size_t before : {0, 6, 64})
        for (const bool inverse : {false, true}) {
          const std::size_t dim = before + 2 * pairs;
          auto x = inputs.bfloat16(heads * dim);
          const auto cosine = inputs.fp32(pairs), sine = inputs.fp32(pairs);
          ops.rotate(x.data(), heads, dim, pairs, cosine.data(), sine.data(), inverse);
          results.add(x);
        }
}

void swiglu(const Ops& ops, Results& results) {
  Inputs inputs(16);
  for (const std::size_t n : {1, 7, 32, 33, 2304})
    for (const float limit : {0.0f, 10.0f})
      for (const float weight : {1.0f, 0.3f})
        for (const double size : {1.0, 30.0, 1e-4, 1e6}) {
          const auto gate = inputs.bfloat16(n, size), up = inputs.bfloat16(n, size);
          std::vector<BFloat16> out(n);
          ops.swiglu(gate.data(), up.data(), weight, limit, n, out.data());
          results.add(out);
        }
}

void collapse(const Ops& ops, Results& results) {
  Inputs inputs(17);
  for (const std::size_t copies : {1, 2, 4, 5})
    for (const std::size_t dim : {1, 31, 64, 65, 5120}) {
      const auto x = inputs.bfloat16(copies * dim);
      auto pre = inputs.fp32(copies);
      for (int i = 0; i < 2; ++i) {
        std::vector<BFloat16> out(dim);
        ops.collapse(x.data(), pre.data(), copies, dim, out.data());
        results.add(out);
        std::fill(pre.begin(), pre.end(), 0.0f);  // the first sub-block: [1, 0, 0, 0]
        pre[0] = 1.0f;
      }
    }
}

void expand(const Ops& ops, Results& results) {
  Inputs inputs(18);
  for (const std::size_t copies : {1, 2, 4, 5})
    for (const std::size_t dim : {1, 31, 64, 65, 200, 5120}) {
      auto x = inputs.bfloat16(copies * dim);
      const auto y = inputs.bfloat16(dim);
      const auto post = inputs.fp32(copies), comb = inputs.fp32(copies * copies);
      std::vector<BFloat16> out(x.size());
      ops.expand(y.data(), x.data(), post.data(), comb.data(), copies, dim, out.data());
      results.add(out);
      ops.expand(y.data(), x.data(), post.data(), comb.data(), copies, dim, x.data());
      EXPECT_EQ(x, out) << ops.name << ": in place";
    }
}

void mix_projections(const Ops& ops, Results& results) {
  Inputs inputs(19);
  for (const std::size_t k : {4, 60, 512, 768, 20480})
    for (const double size : {1.0, 1e-20, 1e10})
      for (const std::size_t rows : {1, 2, 3, 4, 5}) {
        const std::size_t n = 24;
        const auto x = inputs.bfloat16(rows * k, size);
        const auto fn = inputs.fp32(n * k);
        std::vector<double> out(rows * n);
        ops.mix_projections(x.data(), rows, {fn.data(), n, k}, 1e-20f, {0, 7}, out.data());
        ops.mix_projections(x.data(), rows, {fn.data(), n, k}, 1e-20f, {7, n}, out.data());
        results.add(out);
      }
}

void compress_group(const Ops& ops, Results& results) {
  Inputs inputs(20);
  for (const std::size_t members : {1, 2, 3, 4})
    for (const std::size_t dim : {1, 30, 64, 512})
      for (const double size : {1.0, 100.0}) {
        const auto u = inputs.fp32(members * dim), z = inputs.fp32(members * dim, size);
        std::vector<BFloat16> out(dim);
        ops.compress_group(u.data(), z.data(), members, dim, out.data());
        results.add(out);
      }
}

void engram_gate(const Ops& ops, Results& results) {
  Inputs inputs(21);
  for (const std::size_t copies : {1, 4})
    for (const std::size_t dim : {1, 33, 128, 5120})
      for (const double size : {1.0, 1e-10, 1e5}) {
        auto x = inputs.bfloat16(copies * dim, size);
        const auto key = inputs.bfloat16(copies * dim), value = inputs.bfloat16(dim, size);
        const auto q_weight = inputs.bfloat16(copies * dim), k_weight = inputs.bfloat16(copies * dim);
        std::vector<float> gate(copies);
        ops.engram_gate(x.data(), key.data(), value.data(), q_weight.data(), k_weight.data(), 1e-20f, copies,
                        dim, gate.data());
        results.add(x);
        results.add(gate);
      }
}

void sum_experts(const Ops& ops, Results& results) {
  Inputs inputs(22);
  for (const std::size_t count : {0, 1, 3, 6})
    for (const std::size_t dim : {1, 33, 5120}) {
      const auto experts = inputs.bfloat16(count * dim), shared = inputs.bfloat16(dim);
      std::vector<BFloat16> out(dim);
      ops.sum_experts(experts.data(), count, shared.data(), dim, out.data());
      results.add(out);
    }
}

void attention(const Ops& ops, Results& results) {
  Inputs inputs(23);
  struct Shape {
    std::size_t heads, dim, slots;
  };
  for (const auto [heads, dim, slots] : {Shape{1, 16, 0}, Shape{1, 16, 1}, Shape{3, 24, 5}, Shape{4, 64, 150},
                                         Shape{5, 40, 17}, Shape{64, 512, 33}, Shape{8, 512, 640}})
    for (const double size : {1.0, 30.0}) {
      const auto q = inputs.bfloat16(heads * dim, size);
      const auto sink = inputs.fp32(heads, 3.0);
      std::vector<float> values(slots * dim);
      for (float& value : values) value = to_float(to_bfloat16(inputs.gaussian()));
      std::vector<const float*> kv(slots);
      for (std::size_t slot = 0; slot < slots; ++slot) kv[slot] = values.data() + (slots - 1 - slot) * dim;
      const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
      std::vector<BFloat16> out(q.size());
      ops.attention(q.data(), kv.data(), slots, sink.data(), scale, heads, dim, out.data());
      results.add(out);
      // Heads are independent: a thread may take some of them.
      std::vector<BFloat16> parts(q.size());
      for (std::size_t head = 0; head < heads; head += 3)
        ops.attention(&q[head * dim], kv.data(), slots, &sink[head], scale,
                      std::min<std::size_t>(3, heads - head), dim, &parts[head * dim]);
      EXPECT_EQ(parts, out) << ops.name << ": heads in parts";
    }
}

void index_scores(const Ops& ops, Results& results) {
  Inputs inputs(24);
  struct Shape {
    std::size_t heads, dim, keys;
  };
  for (const auto [heads, dim, keys] :
       {Shape{1, 32, 1}, Shape{4, 32, 40}, Shape{5, 96, 33}, Shape{32, 128, 257}})
    for (const Codes codes : {Codes::Gaussian, Codes::Uniform, Codes::AllMaximal, Codes::AllZero})
      for (const Scales kind : {Scales::Usual, Scales::Extreme}) {
        const auto query = inputs.e2m1(heads * dim, codes), key = inputs.e2m1(keys * dim, codes);
        const auto query_scales = inputs.e8m0(heads * dim / kBlock, kind);
        const auto key_scales = inputs.e8m0(keys * dim / kBlock, Scales::Usual);
        const auto weights = inputs.bfloat16(heads);
        std::vector<BFloat16> out(keys);
        ops.index_scores({query.data(), query_scales.data(), weights.data(), heads, dim}, key.data(),
                         key_scales.data(), keys, out.data());
        results.add(out);
      }
}

/// What an operation prepared of a named query serves that one again, and no other.
TEST(BackendOperations, NamedQueriesAreKnownByNameOnly) {
  constexpr std::size_t kHeads = 5, kDim = 96, kKeys = 33;
  Inputs inputs(25);
  const auto key = inputs.e2m1(kKeys * kDim, Codes::Gaussian);
  const auto key_scales = inputs.e8m0(kKeys * kDim / kBlock, Scales::Usual);
  const auto weights = inputs.bfloat16(kHeads);
  const std::vector<std::uint8_t> queries[] = {inputs.e2m1(kHeads * kDim, Codes::Gaussian),
                                               inputs.e2m1(kHeads * kDim, Codes::Gaussian)};
  const auto query_scales = inputs.e8m0(kHeads * kDim / kBlock, Scales::Usual);
  std::vector<std::uint8_t> codes(queries[0].size());  // where both lie in turn
  for (std::size_t i = 0; i < backend_count(); ++i) {
    if (!backend(i).usable) continue;
    std::uint64_t name = (std::uint64_t{1} << 62) + i * 10;
    for (const auto& [which, number] :
         {std::pair{0, name}, {1, name + 1}, {0, name}, {0, 0}, {1, 0}, {1, name + 1}}) {
      codes = queries[which];
      const auto scores = [&](const Ops& ops, std::uint64_t called) {
        std::vector<BFloat16> out(kKeys);
        ops.index_scores({codes.data(), query_scales.data(), weights.data(), kHeads, kDim, called},
                         key.data(), key_scales.data(), kKeys, out.data());
        return out;
      };
      EXPECT_EQ(scores(*backend(i).ops, number), scores(plain_ops(), 0))
          << backend(i).ops->name << ", name " << number;
    }
  }
}

struct Operation {
  const char* name;
  void (*run)(const Ops& ops, Results& results);
};

void PrintTo(const Operation& operation, std::ostream* out) {
  *out << operation.name;
}

class BackendOperations : public ::testing::TestWithParam<Operation> {};

TEST_P(BackendOperations, EqualPlain) {
  Results expected;
  GetParam().run(plain_ops(), expected);
  ASSERT_FALSE(expected.bits().empty());
  for (std::size_t i = 0; i < backend_count(); ++i) {
    if (!backend(i).usable) continue;
    Results results;
    GetParam().run(*backend(i).ops, results);
    ASSERT_EQ(results.bits().size(), expected.bits().size());
    const auto [a, b] = std::mismatch(results.bits().begin(), results.bits().end(), expected.bits().begin());
    ASSERT_TRUE(results == expected) << backend(i).ops->name << ": result " << a - results.bits().begin()
                                     << " has bits " << std::hex << *a << " instead of " << *b;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, BackendOperations,
    ::testing::Values(Operation{"quantize_rows", quantize_rows}, Operation{"quantize_index", quantize_index},
                      Operation{"quantize_group", quantize_group},
                      Operation{"dequantize_window", dequantize_window},
                      Operation{"dequantize_group", dequantize_group}, Operation{"rms_norm", rms_norm},
                      Operation{"rotate", rotate}, Operation{"swiglu", swiglu},
                      Operation{"collapse", collapse}, Operation{"expand", expand},
                      Operation{"mix_projections", mix_projections},
                      Operation{"compress_group", compress_group}, Operation{"engram_gate", engram_gate},
                      Operation{"sum_experts", sum_experts}, Operation{"attention", attention},
                      Operation{"index_scores", index_scores}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace dsv41
