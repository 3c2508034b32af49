// Values at the edges of the formats, every rounding, scales far apart and the released shapes: every
// operation that is not a linear layer, on every backend this CPU can run, against the plain one bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Codes;
using testing::first_difference;
using testing::Inputs;
using testing::Scales;

using Bytes = std::vector<std::uint8_t>;
using Halves = std::vector<BFloat16>;

/// Runs compute(ops) for every usable backend; each must return the bits that the plain one returns.
template <class Compute>
void expect_equal(const Compute& compute) {
  const auto expected = compute(plain_ops());
  using Value = typename decltype(compute(plain_ops()))::value_type;
  for (std::size_t i = 0; i < backend_count(); ++i) {
    if (!backend(i).usable) continue;
    const auto out = compute(*backend(i).ops);
    const std::size_t at = first_difference<Value>(out, expected);
    ASSERT_EQ(at, expected.size()) << backend(i).ops->name << " element " << at << ": "
                                   << +testing::bits_of(out[at]) << " instead of "
                                   << +testing::bits_of(expected[at]);
  }
}

/// Values of every size: usual, tiny, huge, zero of both signs, subnormal; infinite and NaN ones when
/// `special`.
Halves mixed(Inputs& inputs, std::size_t count, bool special) {
  static constexpr std::uint16_t kSpecial[] = {0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7F7F};
  Halves values(count);
  for (BFloat16& value : values) {
    static constexpr double kSizes[] = {1, 1, 1, 1e-3, 1e-5, 300, 1e30, 1e-38, 1e-40, 0, -0.0};
    value = to_bfloat16(inputs.gaussian() * kSizes[inputs.below(std::size(kSizes))]);
    if (special && inputs.below(200) == 0) value.bits = kSpecial[inputs.below(std::size(kSpecial))];
  }
  return values;
}

std::vector<float> to_floats(const Halves& values) {
  std::vector<float> wide(values.size());
  std::transform(values.begin(), values.end(), wide.begin(), [](BFloat16 value) { return to_float(value); });
  return wide;
}

TEST(BackendEdges, Quantizers) {
  for (const bool special : {false, true}) {
    for (const double size : {1.0, 1e-4, 1e-7, 1e4, 1e37, 0.0}) {
      Inputs inputs(7);
      const std::size_t rows = 3, k = 288;
      Halves x = inputs.bfloat16(rows * k, size);
      const Halves others = mixed(inputs, rows * k, special);
      for (std::size_t i = 0; i < x.size(); i += 3 + inputs.below(80)) x[i] = others[i];
      struct Quantizer {
        decltype(Ops::quantize_rows) Ops::*function;
        std::size_t code_bytes, scale_bytes;
      };
      for (const Quantizer& quantizer :
           {Quantizer{&Ops::quantize_rows, k, k / kBlock}, Quantizer{&Ops::quantize_index, k / 2, k / kBlock},
            Quantizer{&Ops::quantize_group, k / 2, k / kGroupBlock}}) {
        expect_equal([&](const Ops& ops) {
          Bytes out(rows * (quantizer.code_bytes + quantizer.scale_bytes), 0x55);
          (ops.*quantizer.function)(x.data(), rows, k, out.data(), out.data() + rows * quantizer.code_bytes);
          return out;
        });
      }
    }
  }
}

/// Every bf16 value once, beside one that sets the scale: all roundings of the encoder, ties included.
TEST(BackendEdges, QuantizerRoundsEveryValue) {
  for (const double largest : {448.0, 300.0, 1.0}) {
    Halves x;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      if (x.size() % kBlock == 0) x.push_back(to_bfloat16(largest));
      const BFloat16 value{static_cast<std::uint16_t>(bits)};
      if (std::fabs(to_float(value)) <= largest) x.push_back(value);
    }
    x.resize(ceil_div(x.size(), kBlock) * kBlock);
    expect_equal([&](const Ops& ops) {
      Bytes out(x.size() + x.size() / kBlock);
      ops.quantize_rows(x.data(), 1, x.size(), out.data(), out.data() + x.size());
      return out;
    });
  }
}

TEST(BackendEdges, StoredKeyValues) {
  Inputs inputs(11);
  Bytes every_code(512);
  for (std::size_t i = 0; i < every_code.size(); ++i) every_code[i] = static_cast<std::uint8_t>(i);
  const Bytes numbers = inputs.e4m3(512, Codes::Uniform), packed = inputs.e2m1(1024, Codes::Uniform);
  for (const Scales kind : {Scales::Usual, Scales::Extreme}) {
    const Bytes scales = inputs.e8m0(16, kind);
    for (const Bytes& codes : {every_code, numbers})
      expect_equal([&](const Ops& ops) {
        std::vector<float> out(512);
        ops.dequantize_window(codes.data(), scales.data(), out.size(), out.data());
        return out;
      });
  }
  const Bytes group_scales = inputs.e4m3(64, Codes::Uniform);
  for (const std::uint8_t last : {std::uint8_t{0x30}, std::uint8_t{0x7F}}) {
    Bytes scales = group_scales;
    scales.back() = last;
    expect_equal([&](const Ops& ops) {
      std::vector<float> out(1024);
      ops.dequantize_group(packed.data(), scales.data(), out.size(), out.data());
      return out;
    });
  }
}

TEST(BackendEdges, Elementwise) {
  for (const bool special : {false, true}) {
    for (const std::size_t dim : {8, 16, 64, 192, 5120, 100}) {
      Inputs inputs(dim + special);
      const std::size_t copies = 4, rows = 2;
      const Halves x = special ? mixed(inputs, copies * dim, true) : inputs.bfloat16(copies * dim, 3.0);
      const Halves y = inputs.bfloat16(copies * dim, 0.5), weight = inputs.bfloat16(dim);
      const std::vector<float> pre = inputs.fp32(copies), post = inputs.fp32(copies),
                               comb = inputs.fp32(copies * copies);
      SCOPED_TRACE("dim " + std::to_string(dim));
      expect_equal([&](const Ops& ops) {
        Halves out = x;
        ops.rms_norm(out.data(), weight.data(), 1e-6f, rows, dim, out.data());
        return out;
      });
      for (const float limit : {0.0f, 1.5f})
        expect_equal([&](const Ops& ops) {
          Halves out(x.size());
          ops.swiglu(x.data(), y.data(), 0.37f, limit, out.size(), out.data());
          return out;
        });
      expect_equal([&](const Ops& ops) {
        Halves out(dim);
        ops.collapse(x.data(), pre.data(), copies, dim, out.data());
        return out;
      });
      expect_equal([&](const Ops& ops) {
        Halves out = x;
        ops.expand(y.data(), out.data(), post.data(), comb.data(), copies, dim, out.data());
        return out;
      });
      for (const std::size_t count : {0, 1, 3})
        expect_equal([&](const Ops& ops) {
          Halves out(dim);
          ops.sum_experts(x.data(), count, y.data(), dim, out.data());
          return out;
        });
      expect_equal([&](const Ops& ops) {
        Halves out = x;
        const std::size_t pairs = dim / 4;
        ops.rotate(out.data(), copies, dim, pairs, to_floats(y).data(), to_floats(weight).data(),
                   dim % 3 == 0);
        return out;
      });
      expect_equal([&](const Ops& ops) {
        Halves out = x;
        std::vector<float> gate(copies);
        ops.engram_gate(out.data(), y.data(), weight.data(), y.data(), y.data(), 1e-20f, copies, dim,
                        gate.data());
        for (const float value : gate) out.push_back(to_bfloat16(value));
        return out;
      });
    }
  }
}

TEST(BackendEdges, MixProjections) {
  for (const std::size_t k : {16, 64, 1000, 1008, 20480}) {
    Inputs inputs(k);
    const std::size_t rows = 7;
    const Halves x = inputs.bfloat16(rows * k);
    Halves special = x;
    special[k].bits = 0x7F80;
    special[3 * k + 5].bits = 0xFFC0;
    std::fill_n(special.begin() + static_cast<std::ptrdiff_t>(4 * k), k, BFloat16{0x8000});
    const std::vector<float> weights = inputs.fp32(24 * k);
    for (const Halves& values : {x, special})
      for (const Range range : {Range{0, 24}, Range{3, 8}})
        expect_equal([&](const Ops& ops) {
          std::vector<double> out(rows * 24);
          ops.mix_projections(values.data(), rows, {weights.data(), 24, k}, 1e-6f, range, out.data());
          return out;
        });
  }
}

TEST(BackendEdges, CompressGroup) {
  Inputs inputs(5);
  const std::vector<float> u = inputs.fp32(2 * 512), z = inputs.fp32(2 * 512, 10.0);
  for (const std::size_t dim : {512, 100, 7})
    expect_equal([&](const Ops& ops) {
      Halves out(dim);
      ops.compress_group(u.data(), z.data(), 2, dim, out.data());
      return out;
    });
}

struct AttentionCase {
  std::size_t heads, slots, dim;
  double size = 1.0;
};

TEST(BackendEdges, Attention) {
  for (const auto& [heads, slots, dim, size] :
       {AttentionCase{1, 1, 16}, AttentionCase{4, 0, 32}, AttentionCase{5, 7, 64},
        AttentionCase{8, 65, 64, 30.0}, AttentionCase{64, 130, 512}, AttentionCase{3, 4, 40},
        AttentionCase{2, 640, 128, 5.0}, AttentionCase{4, 13, 48}, AttentionCase{4, 129, 96, 10.0},
        AttentionCase{12, 6, 80}, AttentionCase{13, 260, 16, 20.0}}) {
    SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(slots) + " slots, dim " +
                 std::to_string(dim));
    Inputs inputs(heads + slots + dim);
    const Halves q = inputs.bfloat16(heads * dim, size), values = inputs.bfloat16(slots * dim);
    const std::vector<float> wide = to_floats(values), sink = inputs.fp32(heads);
    std::vector<const float*> kv(slots);
    for (std::size_t s = 0; s < slots; ++s) kv[s] = wide.data() + s * dim;
    expect_equal([&](const Ops& ops) {
      Halves out(heads * dim);
      ops.attention(q.data(), kv.data(), slots, sink.data(),
                    static_cast<float>(1 / std::sqrt(static_cast<double>(dim))), heads, dim, out.data());
      return out;
    });
  }
}

/// Queries, values and sinks that are infinite, NaN or of any size; values with more bits than BF16 has.
TEST(BackendEdges, AttentionSpecialValues) {
  for (const auto& [heads, slots, dim, size] :
       {AttentionCase{9, 20, 64}, AttentionCase{4, 9, 48}, AttentionCase{8, 133, 32}}) {
    for (int kind = 0; kind < 4; ++kind) {
      SCOPED_TRACE(std::to_string(heads) + " heads, kind " + std::to_string(kind));
      Inputs inputs(heads + slots + dim);
      const Halves q = kind == 0 ? mixed(inputs, heads * dim, true) : inputs.bfloat16(heads * dim, size);
      std::vector<float> values = inputs.fp32(slots * dim), sink = inputs.fp32(heads);
      if (kind == 1) values = to_floats(mixed(inputs, slots * dim, true));
      if (kind == 2) sink = to_floats(mixed(inputs, heads, true));
      if (kind == 3) std::fill_n(values.begin(), dim, std::numeric_limits<float>::quiet_NaN());
      std::vector<const float*> kv(slots);
      for (std::size_t s = 0; s < slots; ++s) kv[s] = values.data() + s * dim;
      expect_equal([&](const Ops& ops) {
        Halves out(heads * dim);
        ops.attention(q.data(), kv.data(), slots, sink.data(), 0.125f, heads, dim, out.data());
        return out;
      });
    }
  }
}

struct IndexCase {
  std::size_t heads, keys, dim;
};

TEST(BackendEdges, IndexScores) {
  for (const auto& [heads, keys, dim] : {IndexCase{32, 100, 128}, IndexCase{1, 8, 32}, IndexCase{5, 17, 64},
                                         IndexCase{37, 33, 256}, IndexCase{2, 9, 288}}) {
    for (int kind = 0; kind < 4; ++kind) {
      SCOPED_TRACE(std::to_string(heads) + " heads, dim " + std::to_string(dim) + ", kind " +
                   std::to_string(kind));
      Inputs inputs(heads + keys + dim);
      const Codes codes = kind == 1 ? Codes::AllMaximal : Codes::Uniform;
      const Bytes query = inputs.e2m1(heads * dim, codes), key = inputs.e2m1(keys * dim, codes);
      Bytes query_scales(heads * dim / kBlock), key_scales(keys * dim / kBlock);
      for (std::uint8_t& scale : query_scales)
        scale = static_cast<std::uint8_t>(118 + inputs.below(kind == 1 ? 5 : 2));
      for (std::uint8_t& scale : key_scales) scale = static_cast<std::uint8_t>(118 + inputs.below(4));
      if (kind == 2)  // some keys with scales far apart
        for (std::size_t i = 0; i < key_scales.size(); i += 50)
          key_scales[i] = static_cast<std::uint8_t>(60 + inputs.below(100));
      if (kind == 3) query_scales = inputs.e8m0(query_scales.size(), Scales::Extreme);
      const Halves weights = inputs.bfloat16(heads, 0.02);
      expect_equal([&](const Ops& ops) {
        Halves out(keys);
        ops.index_scores({query.data(), query_scales.data(), weights.data(), heads, dim}, key.data(),
                         key_scales.data(), keys, out.data());
        return out;
      });
    }
  }
}

}  // namespace
}  // namespace dsv41
