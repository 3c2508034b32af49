// Every operation against tests/data/ops (what the released arithmetic gives under docs/numerics.md), for
// every backend: codes, bf16 values and ids are equal, fp32 values within one unit in the last place.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/compute.h"
#include "kernels/hyper_connections.h"
#include "kernels/ops.h"
#include "kernels/rope.h"
#include "kernels/selection.h"
#include "tests/kernels/support/golden.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::GoldenFile;

constexpr float kEps = 1e-20f;
constexpr float kSwigluLimit = 10.0f;
constexpr float kRouteScale = 1.5f;

template <class T>
void expect_equal(const std::vector<T>& out, const std::vector<T>& expected, const char* what) {
  ASSERT_EQ(out.size(), expected.size()) << what;
  const std::size_t i = testing::first_difference<T>(out, expected);
  if (i < out.size())
    ADD_FAILURE() << what << "[" << i << "] has bits " << std::hex << testing::bits_of(out[i])
                  << " instead of " << testing::bits_of(expected[i]);
}

void expect_equal(const std::vector<std::int32_t>& out, const std::vector<std::int32_t>& expected,
                  const char* what) {
  EXPECT_EQ(out, expected) << what;
}

/// Equal or neighbouring fp32 values.
void expect_close(const std::vector<float>& out, const std::vector<float>& expected, const char* what) {
  ASSERT_EQ(out.size(), expected.size()) << what;
  for (std::size_t i = 0; i < out.size(); ++i)
    ASSERT_TRUE(out[i] == expected[i] || std::nextafterf(out[i], expected[i]) == expected[i])
        << what << "[" << i << "] is " << out[i] << " instead of " << expected[i];
}

std::vector<BFloat16> narrowed(const std::vector<float>& values) {
  std::vector<BFloat16> result;
  for (const float value : values) result.push_back(to_bfloat16(value));
  return result;
}

/// Activations [rows, k] with their codes.
struct Quantized {
  Quantized(const Ops& ops, const std::vector<BFloat16>& x, std::size_t row_count, std::size_t row_size)
      : codes(x.size()), scales(x.size() / kBlock), rows(row_count), k(row_size) {
    ops.quantize_rows(x.data(), rows, k, codes.data(), scales.data());
  }
  QuantizedRows view() const { return {codes.data(), scales.data(), rows, k}; }
  std::vector<std::uint8_t> codes, scales;
  std::size_t rows, k;
};

/// A quantized weight of a golden file: NAME.weight and NAME.scale.
struct Weight {
  Weight(const GoldenFile& file, const std::string& name)
      : codes(file.get<std::uint8_t>(name + ".weight")),
        scales(file.get<std::uint8_t>(name + ".scale")),
        n(file[name + ".weight"].shape[0]),
        columns(file[name + ".weight"].shape[1]) {}
  Fp8Matrix fp8() const { return {codes.data(), scales.data(), n, columns}; }
  Fp4Matrix fp4() const { return {codes.data(), scales.data(), n, 2 * columns}; }
  std::vector<std::uint8_t> codes, scales;
  std::size_t n, columns;
};

std::vector<BFloat16> fp8_linear(const Ops& ops, const std::vector<BFloat16>& x, const Weight& weight) {
  const Fp8Matrix w = weight.fp8();
  const Quantized rows(ops, x, x.size() / w.k, w.k);
  std::vector<BFloat16> out(rows.rows * w.n);
  ops.linear_fp8(rows.view(), w, {0, w.n}, out.data());
  return out;
}

std::vector<BFloat16> fp4_linear(const Ops& ops, const std::vector<BFloat16>& x, const Weight& weight) {
  const Fp4Matrix w = weight.fp4();
  const Quantized rows(ops, x, x.size() / w.k, w.k);
  std::vector<BFloat16> out(rows.rows * w.n);
  ops.linear_fp4(rows.view(), w, {0, w.n}, out.data());
  return out;
}

std::vector<BFloat16> bf16_linear(const Ops& ops, const std::vector<BFloat16>& x,
                                  const std::vector<BFloat16>& weight, std::size_t k) {
  const Bf16Matrix w{weight.data(), weight.size() / k, k};
  std::vector<BFloat16> out(x.size() / k * w.n);
  ops.linear_bf16(x.data(), x.size() / k, k, w, {0, w.n}, out.data());
  return out;
}

std::vector<float> fp32_linear(const Ops& ops, const std::vector<BFloat16>& x,
                               const std::vector<BFloat16>& weight, std::size_t k) {
  const Bf16Matrix w{weight.data(), weight.size() / k, k};
  std::vector<float> out(x.size() / k * w.n);
  ops.linear_wide(x.data(), x.size() / k, w, {0, w.n}, out.data());
  return out;
}

// ---- the operations
// -------------------------------------------------------------------------------------------------

void formats(const Ops&) {
  const GoldenFile file("formats");
  std::vector<float> e4m3, e8m0, e2m1;
  for (unsigned code = 0; code < 256; ++code) {
    e4m3.push_back(decode_e4m3(static_cast<std::uint8_t>(code)));
    e8m0.push_back(decode_e8m0(static_cast<std::uint8_t>(code)));
    if (code < 16) e2m1.push_back(decode_e2m1(static_cast<std::uint8_t>(code)));
    const auto round_trip = encode_e4m3(decode_e4m3(static_cast<std::uint8_t>(code)));
    EXPECT_EQ(round_trip, code == 0xFF ? 0x7F : code);
  }
  expect_equal(e4m3, file.get<float>("e4m3"), "e4m3");
  expect_equal(e8m0, file.get<float>("e8m0"), "e8m0");
  expect_equal(e2m1, file.get<float>("e2m1"), "e2m1");
}

void act_quant(const Ops& ops) {
  const GoldenFile file("act_quant");
  const auto x = file.get<BFloat16>("x");
  const Quantized rows(ops, x, file["x"].shape[0], file["x"].shape[1]);
  expect_equal(rows.codes, file.get<std::uint8_t>("codes"), "codes");
  expect_equal(rows.scales, file.get<std::uint8_t>("scales"), "scales");
  std::vector<float> qdq(x.size());
  ops.dequantize_window(rows.codes.data(), rows.scales.data(), x.size(), qdq.data());
  expect_equal(narrowed(qdq), file.get<BFloat16>("qdq"), "qdq");
}

void fp4_quant(const Ops& ops) {
  const GoldenFile file("fp4_quant");
  const auto x = file.get<BFloat16>("x");
  const std::size_t rows = file["x"].shape[0], k = file["x"].shape[1];
  std::vector<std::uint8_t> codes(x.size() / 2), scales(x.size() / kGroupBlock);
  std::vector<float> qdq(x.size());

  ops.quantize_index(x.data(), rows, k, codes.data(), scales.data());
  for (std::size_t i = 0; i < x.size(); ++i)
    qdq[i] =
        decode_e2m1(static_cast<std::uint8_t>(codes[i / 2] >> (i % 2 * 4))) * decode_e8m0(scales[i / kBlock]);
  expect_equal(narrowed(qdq), file.get<BFloat16>("qdq_e8m0_32"), "E8M0 scales");

  ops.quantize_group(x.data(), rows, k, codes.data(), scales.data());
  ops.dequantize_group(codes.data(), scales.data(), x.size(), qdq.data());
  expect_equal(narrowed(qdq), file.get<BFloat16>("qdq_e4m3_16"), "E4M3 scales");
}

void linears(const Ops& ops) {
  const GoldenFile file("linear");
  for (const std::string prefix : {"0.", "1.", "2.", "3."}) {
    SCOPED_TRACE(prefix);
    const auto x = file.get<BFloat16>(prefix + "x");
    const auto weight = file.get<BFloat16>(prefix + "bf16.weight");
    const std::size_t k = file[prefix + "x"].shape[1];
    expect_equal(fp8_linear(ops, x, Weight(file, prefix + "fp8")), file.get<BFloat16>(prefix + "fp8.y"),
                 "fp8");
    expect_equal(fp4_linear(ops, x, Weight(file, prefix + "fp4")), file.get<BFloat16>(prefix + "fp4.y"),
                 "fp4");
    expect_equal(bf16_linear(ops, x, weight, k), file.get<BFloat16>(prefix + "bf16.y"), "bf16");
    expect_close(fp32_linear(ops, x, weight, k), file.get<float>(prefix + "fp32.y"), "fp32");
  }
}

void expert(const Ops& ops) {
  const GoldenFile file("expert");
  const auto x = file.get<BFloat16>("x");
  const auto route_weights = file.get<float>("weights");
  const std::size_t rows = file["x"].shape[0], dim = file["x"].shape[1];

  // A routed expert: every row is a route, outputs in reverse to see that they are followed.
  const Weight w1(file, "fp4.w1"), w2(file, "fp4.w2"), w3(file, "fp4.w3");
  std::vector<std::uint32_t> row_ids(rows), output_ids(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    row_ids[i] = static_cast<std::uint32_t>(i);
    output_ids[i] = static_cast<std::uint32_t>(rows - 1 - i);
  }
  const ExpertTask task{{w1.fp4(), w3.fp4(), w2.fp4()}, row_ids, route_weights, output_ids};
  const Quantized quantized(ops, x, rows, dim);
  std::vector<BFloat16> reversed(x.size()), out(x.size());
  Compute(ops, 1).experts(quantized.view(), {&task, 1}, kSwigluLimit, reversed);
  for (std::size_t i = 0; i < rows; ++i) std::copy_n(&reversed[(rows - 1 - i) * dim], dim, &out[i * dim]);
  expect_equal(out, file.get<BFloat16>("fp4.y"), "routed expert");

  // The shared expert: FP8 weights, no routing weight.
  const auto gate = fp8_linear(ops, x, Weight(file, "fp8.w1")),
             up = fp8_linear(ops, x, Weight(file, "fp8.w3"));
  std::vector<BFloat16> hidden(gate.size());
  ops.swiglu(gate.data(), up.data(), 1.0f, kSwigluLimit, gate.size(), hidden.data());
  expect_equal(fp8_linear(ops, hidden, Weight(file, "fp8.w2")), file.get<BFloat16>("fp8.y"), "shared expert");
}

void gate(const Ops& ops) {
  const GoldenFile file("gate");
  const std::size_t rows = file["scores"].shape[0], experts = file["scores"].shape[1],
                    k = file["ids"].shape[1];
  const auto logits =
      fp32_linear(ops, file.get<BFloat16>("x"), file.get<BFloat16>("weight"), file["x"].shape[1]);
  const auto bias = file.get<float>("bias"), bias_vl = file.get<float>("bias_vl");
  const auto image = file.get<std::uint8_t>("image");
  std::vector<float> scores(logits.size()), weights(rows * k);
  std::vector<std::int32_t> ids(rows * k);
  gate_scores(logits, scores);
  expect_close(scores, file.get<float>("scores"), "scores");
  for (std::size_t row = 0; row < rows; ++row)
    choose_experts(std::span(scores).subspan(row * experts, experts), image[row] != 0 ? bias_vl : bias,
                   kRouteScale, std::span(ids).subspan(row * k, k), std::span(weights).subspan(row * k, k));
  expect_equal(ids, file.get<std::int32_t>("ids"), "ids");
  expect_close(weights, file.get<float>("weights"), "weights");
}

void hyper_connections(const Ops& ops) {
  const GoldenFile file("hyper_connections");
  const std::size_t rows = file["x"].shape[0], copies = file["x"].shape[1], dim = file["x"].shape[2];
  const std::size_t mixes = (2 + copies) * copies;
  const auto x = file.get<BFloat16>("x");
  const auto fn = file.get<float>("fn"), scale = file.get<float>("scale");
  for (const std::string prefix : {"", "extreme."}) {
    SCOPED_TRACE("prefix '" + prefix + "'");
    const auto base = file.get<float>(prefix + "base");
    const auto y = file.get<BFloat16>(prefix + "y");
    std::vector<float> pre(rows * copies), post(rows * copies), comb(rows * copies * copies);
    std::vector<BFloat16> collapsed(rows * dim), expanded(rows * copies * dim);
    for (std::size_t row = 0; row < rows; ++row) {
      const BFloat16* const stream = &x[row * copies * dim];
      std::vector<double> projections(mixes);
      ops.mix_projections(stream, 1, {fn.data(), mixes, copies * dim}, kEps, {0, mixes}, projections.data());
      const auto row_pre = std::span(pre).subspan(row * copies, copies);
      const auto row_post = std::span(post).subspan(row * copies, copies);
      const auto row_comb = std::span(comb).subspan(row * copies * copies, copies * copies);
      finish_mixes(projections, scale, base, copies, 20, 1e-6, row_pre, row_post, row_comb);
      ops.collapse(stream, row_pre.data(), copies, dim, &collapsed[row * dim]);
      ops.expand(&y[row * dim], stream, row_post.data(), row_comb.data(), copies, dim,
                 &expanded[row * copies * dim]);
    }
    expect_close(pre, file.get<float>(prefix + "pre"), "pre");
    expect_close(post, file.get<float>(prefix + "post"), "post");
    expect_close(comb, file.get<float>(prefix + "comb"), "comb");
    expect_equal(collapsed, file.get<BFloat16>(prefix + "collapsed"), "collapsed");
    expect_equal(expanded, file.get<BFloat16>(prefix + "expanded"), "expanded");
  }
}

std::vector<std::int32_t> present(std::vector<std::int32_t> slots) {
  std::erase(slots, -1);
  return slots;
}

void index(const Ops& ops) {
  const GoldenFile file("index");
  const auto q = file.get<BFloat16>("q"), k = file.get<BFloat16>("k"),
             weights = file.get<BFloat16>("weights");
  const std::size_t rows = file["q"].shape[0], heads = file["q"].shape[1], dim = file["q"].shape[2];
  const std::size_t groups = file["k"].shape[0], count = file["selected_top12"].shape[1], block = 4;
  std::vector<std::uint8_t> query_codes(q.size() / 2), query_scales(q.size() / kBlock);
  std::vector<std::uint8_t> key_codes(k.size() / 2), key_scales(k.size() / kBlock);
  ops.quantize_index(q.data(), rows * heads, dim, query_codes.data(),
                     query_scales.data());  // already on the grid
  ops.quantize_index(k.data(), groups, dim, key_codes.data(), key_scales.data());

  std::vector<BFloat16> all_scores(rows * groups, BFloat16{0xFF80});
  std::vector<std::int32_t> selected, masked;  // without the -1 of absent slots
  std::vector<std::uint8_t> candidates(rows * groups, 0);
  const auto visible = file.get<std::int32_t>("visible");
  std::vector<std::int32_t> chosen;
  std::vector<std::uint8_t> mask;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto seen = static_cast<std::size_t>(visible[row]);
    const auto scores = std::span(all_scores).subspan(row * groups, seen);
    ops.index_scores({&query_codes[row * heads * dim / 2], &query_scales[row * heads * dim / kBlock],
                      &weights[row * heads], heads, dim},
                     key_codes.data(), key_scales.data(), seen, scores.data());
    select_groups(scores, count, {}, 0, chosen);
    selected.insert(selected.end(), chosen.begin(), chosen.end());
    select_blocks(scores, block, 3, mask);
    select_groups(scores, count, mask, block, chosen);
    masked.insert(masked.end(), chosen.begin(), chosen.end());
    // The golden mask marks whole blocks, visible or not.
    for (std::size_t j = 0; j < mask.size() * block; ++j) candidates[row * groups + j] = mask[j / block];
  }
  expect_equal(all_scores, file.get<BFloat16>("scores"), "scores");
  expect_equal(selected, present(file.get<std::int32_t>("selected_top12")), "selected");
  expect_equal(candidates, file.get<std::uint8_t>("candidates_top3x4"), "candidates");
  expect_equal(masked, present(file.get<std::int32_t>("masked_selected_top12")), "selected candidates");
}

void sparse_attention(const Ops& ops) {
  const GoldenFile file("sparse_attention");
  const std::size_t rows = file["q"].shape[0], heads = file["q"].shape[1], dim = file["q"].shape[2];
  const std::size_t width = file["slots"].shape[1];
  const auto stored = file.get<BFloat16>("kv");
  const auto sink = file.get<float>("sink"), scale = file.get<float>("scale");
  const auto slots = file.get<std::int32_t>("slots");
  std::vector<float> kv;
  for (const BFloat16 value : stored) kv.push_back(to_float(value));
  for (const auto& [query, result] : {std::pair("q", "out"), std::pair("q_large", "out_large")}) {
    const auto q = file.get<BFloat16>(query);
    std::vector<BFloat16> out(q.size());
    for (std::size_t row = 0; row < rows; ++row) {
      std::vector<const float*> present;
      for (std::size_t i = 0; i < width; ++i)
        if (slots[row * width + i] >= 0)
          present.push_back(&kv[static_cast<std::size_t>(slots[row * width + i]) * dim]);
      ops.attention(&q[row * heads * dim], present.data(), present.size(), sink.data(), scale[0], heads, dim,
                    &out[row * heads * dim]);
    }
    expect_equal(out, file.get<BFloat16>(result), result);
  }
}

RopeParameters compressed_rope(std::size_t dim, std::uint32_t original_length) {
  return {.base = 160000.0f,
          .dim = dim,
          .original_length = original_length,
          .factor = 16.0f,
          .beta_fast = 32.0f,
          .beta_slow = 1.0f};
}

/// RoPE of a group's last channels at its first position, then fp4_quant E4M3/16.
std::vector<BFloat16> stored_groups(const Ops& ops, std::vector<BFloat16> latent, std::size_t dim,
                                    std::size_t rope_dim, std::size_t ratio) {
  const auto frequencies = rope_frequencies(compressed_rope(rope_dim, 64));
  std::vector<float> cosine(frequencies.size()), sine(frequencies.size()), values(latent.size());
  for (std::size_t j = 0; j < latent.size() / dim; ++j) {
    rope_row(frequencies, static_cast<std::uint32_t>(j * ratio), cosine, sine);
    ops.rotate(&latent[j * dim], 1, dim, frequencies.size(), cosine.data(), sine.data(), false);
  }
  std::vector<std::uint8_t> codes(latent.size() / 2), scales(latent.size() / kGroupBlock);
  ops.quantize_group(latent.data(), latent.size() / dim, dim, codes.data(), scales.data());
  ops.dequantize_group(codes.data(), scales.data(), latent.size(), values.data());
  return narrowed(values);
}

void compressor(const Ops& ops) {
  const GoldenFile file("compressor");
  const std::size_t k = file["r1.x"].shape[1], dim = file["r1.wkv"].shape[0];
  const std::size_t rope_dim = 16;  // the geometry of the small checkpoint: original length 64

  std::vector<BFloat16> latent =
      bf16_linear(ops, file.get<BFloat16>("r1.x"), file.get<BFloat16>("r1.wkv"), k);
  ops.rms_norm(latent.data(), file.get<BFloat16>("r1.norm").data(), kEps, latent.size() / dim, dim,
               latent.data());
  expect_equal(latent, file.get<BFloat16>("r1.latent"), "r1.latent");
  expect_equal(stored_groups(ops, latent, dim, rope_dim, 1), file.get<BFloat16>("r1.stored"), "r1.stored");

  const auto u = fp32_linear(ops, file.get<BFloat16>("r2.x"), file.get<BFloat16>("r2.wkv"), k);
  const auto z = fp32_linear(ops, file.get<BFloat16>("r2.x"), file.get<BFloat16>("r2.wgate"), k);
  latent.resize(file["r2.latent"].shape[0] * dim);
  for (std::size_t j = 0; j < latent.size() / dim; ++j)
    ops.compress_group(&u[2 * j * dim], &z[2 * j * dim], 2, dim, &latent[j * dim]);
  ops.rms_norm(latent.data(), file.get<BFloat16>("r2.norm").data(), kEps, latent.size() / dim, dim,
               latent.data());
  expect_equal(latent, file.get<BFloat16>("r2.latent"), "r2.latent");
  expect_equal(stored_groups(ops, latent, dim, rope_dim, 2), file.get<BFloat16>("r2.stored"), "r2.stored");
}

void engram(const Ops& ops) {
  const GoldenFile file("engram");
  const Weight table(file, "table");
  const auto ids = file.get<std::int64_t>("ids");
  const std::size_t width = table.columns;
  std::vector<float> decoded(ids.size() * width);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = static_cast<std::size_t>(ids[i]);
    ops.dequantize_window(&table.codes[row * width], &table.scales[row * width / kBlock], width,
                          &decoded[i * width]);
  }
  const auto rows = narrowed(decoded);
  expect_equal(rows, file.get<BFloat16>("rows"), "rows");
  const auto kv = fp8_linear(ops, rows, Weight(file, "wkv"));
  expect_equal(kv, file.get<BFloat16>("kv"), "kv");

  auto x = file.get<BFloat16>("x");
  const std::size_t copies = file["x"].shape[1], dim = file["x"].shape[2], streams = file["x"].shape[0];
  const auto q_weight = file.get<BFloat16>("q_weight"), k_weight = file.get<BFloat16>("k_weight");
  const auto alive = file.get<std::uint8_t>("alive");
  std::vector<float> gates(streams * copies);
  for (std::size_t t = 0; t < streams; ++t) {
    if (alive[t] == 0) continue;  // inside an image span: gate 0
    const BFloat16* const key = &kv[t * (copies + 1) * dim];
    ops.engram_gate(&x[t * copies * dim], key, key + copies * dim, q_weight.data(), k_weight.data(), kEps,
                    copies, dim, &gates[t * copies]);
  }
  expect_close(gates, file.get<float>("gate"), "gate");
  expect_equal(x, file.get<BFloat16>("y"), "y");
}

void rope(const Ops& ops) {
  const GoldenFile file("rope");
  const auto positions = file.get<std::int32_t>("positions");
  for (const std::string kind : {"window", "compressed"}) {
    SCOPED_TRACE(kind);
    const std::size_t heads = file[kind + ".x"].shape[1], dim = file[kind + ".x"].shape[2];
    const auto frequencies = rope_frequencies(kind == "window" ? RopeParameters{.base = 10000.0f, .dim = dim}
                                                               : compressed_rope(dim, 65536));
    auto forward = file.get<BFloat16>(kind + ".x"), inverse = forward;
    std::vector<float> table;
    for (std::size_t t = 0; t < positions.size(); ++t) {
      std::vector<float> cosine(dim / 2), sine(dim / 2);
      rope_row(frequencies, static_cast<std::uint32_t>(positions[t]), cosine, sine);
      for (std::size_t i = 0; i < dim / 2; ++i) table.insert(table.end(), {cosine[i], sine[i]});
      ops.rotate(&forward[t * heads * dim], heads, dim, dim / 2, cosine.data(), sine.data(), false);
      ops.rotate(&inverse[t * heads * dim], heads, dim, dim / 2, cosine.data(), sine.data(), true);
    }
    expect_close(table, file.get<float>(kind + ".cos_sin"), "cosine and sine");
    expect_equal(forward, file.get<BFloat16>(kind + ".forward"), "forward");
    expect_equal(inverse, file.get<BFloat16>(kind + ".inverse"), "inverse");
  }
}

void rms_norm(const Ops& ops) {
  const GoldenFile file("rms_norm");
  auto x = file.get<BFloat16>("x");
  ops.rms_norm(x.data(), file.get<BFloat16>("weight").data(), kEps, file["x"].shape[0], file["x"].shape[1],
               x.data());
  expect_equal(x, file.get<BFloat16>("y"), "y");
}

struct GoldenCase {
  const char* name;
  void (*check)(const Ops& ops);
};

void PrintTo(const GoldenCase& golden_case, std::ostream* out) {
  *out << golden_case.name;
}

class GoldenOps : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenOps, AreReproduced) {
  for (std::size_t i = 0; i < backend_count(); ++i) {
    if (!backend(i).usable) continue;
    SCOPED_TRACE(backend(i).ops->name);
    GetParam().check(*backend(i).ops);
  }
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenOps,
                         ::testing::Values(GoldenCase{"formats", formats}, GoldenCase{"act_quant", act_quant},
                                           GoldenCase{"fp4_quant", fp4_quant}, GoldenCase{"linear", linears},
                                           GoldenCase{"expert", expert}, GoldenCase{"gate", gate},
                                           GoldenCase{"hyper_connections", hyper_connections},
                                           GoldenCase{"index", index},
                                           GoldenCase{"sparse_attention", sparse_attention},
                                           GoldenCase{"compressor", compressor}, GoldenCase{"engram", engram},
                                           GoldenCase{"rope", rope}, GoldenCase{"rms_norm", rms_norm}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace dsv41
