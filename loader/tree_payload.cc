// Random payloads for generated checkpoints (tree_writer.h): every element is a function of seed, name and
// position.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>

#include "kernels/formats.h"
#include "kernels/views.h"
#include "loader/tree_writer.h"

namespace dsv41 {
namespace {

struct Distribution {
  std::string_view suffix;
  float mean, deviation;
  bool by_fan_in;  // deviation is divided by sqrt(inputs)
};

// Sub-layer outputs are kept small against the residual stream, so that a random model neither explodes nor
// forgets.
constexpr Distribution kDistributions[] = {
    {"attn_sink", 0, 0.4f, false},
    {"hc_attn_fn", 0, 0.6f, true},
    {"hc_ffn_fn", 0, 0.6f, true},
    {"hc_attn_base", 0, 0.9f, false},
    {"hc_ffn_base", 0, 0.9f, false},
    {"hc_attn_scale", 1, 0.1f, false},
    {"hc_ffn_scale", 1, 0.1f, false},
    {"gate.bias", 0, 0.05f, false},
    {"gate.bias_vl", 0, 0.05f, false},
    {"gate.weight", 0, 1.5f, true},
    {"norm.weight", 1, 0.15f, false},
    {"norm1.weight", 1, 0.15f, false},
    {"norm2.weight", 1, 0.15f, false},
    {"engram.q_weight", 1, 0.3f, false},
    {"engram.k_weight", 1, 0.3f, false},
    {"engram.embed.weight", 0, 0.6f, false},
    {"engram.wkv.weight", 0, 0.5f, true},
    {"markov_head.embed.weight", 0, 0.7f, false},
    {"embed.weight", 0, 1, false},
    {"image_start", 0, 1, false},
    {"image_newline", 0, 1, false},
    {"image_end", 0, 1, false},
    {"markov_head.head.weight", 0, 1, true},
    {"head.weight", 0, 3, true},
    {".bias", 0, 0.05f, false},
    {"attn.wo_b.weight", 0, 0.25f, true},
    {"shared_experts.w2.weight", 0, 0.25f, true},
    {".w2.weight", 0, 0.5f, true},
    {"", 0, 1, true},
};

constexpr float kLargest = 3.4642f;  // of |gaussian()|, just above sqrt(12)

std::uint64_t mix(std::uint64_t x) {  // a bijection in which every input bit reaches every output bit
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Mean 0, deviation 1, bounded: the sum of four 16-bit uniforms. Integer up to one product, so equal
/// everywhere.
float gaussian(std::uint64_t random) {
  const auto sum = static_cast<std::int32_t>((random & 0xFFFF) + (random >> 16 & 0xFFFF) +
                                             (random >> 32 & 0xFFFF) + (random >> 48));
  return static_cast<float>(sum - 2 * 65535) * (1.7320508f / 65536.0f);
}

/// What a tensor's values are drawn from; a scale shares all of it with its weight.
struct Source {
  Source(const TreeTensor& tensor, std::uint64_t seed) {
    std::string weight = tensor.name;
    const bool scale = tensor.dtype == DType::F8E8M0;
    if (scale && weight.ends_with(".scale")) weight.replace(weight.size() - 6, 6, ".weight");
    const std::uint64_t columns = tensor.shape.empty() ? 1 : tensor.shape[tensor.shape.size() - 1];
    packed = tensor.dtype == DType::I8;
    inputs = columns * (packed ? 2 : scale ? kBlock : 1);
    const bool table = weight.ends_with("engram.embed.weight");
    const bool expert = weight.find(".ffn.experts.") != weight.npos;
    tile_rows = table || expert ? 1 : kBlock;
    for (const Distribution& candidate : kDistributions)
      if (weight.ends_with(candidate.suffix)) {
        mean = candidate.mean;
        deviation =
            candidate.by_fan_in
                ? candidate.deviation / std::sqrt(static_cast<float>(std::max<std::uint64_t>(inputs, 1)))
                : candidate.deviation;
        break;
      }
    key = XXH64(weight.data(), weight.size(), seed);
    const float largest_code = expert ? 6.0f : 448.0f;
    exponent = static_cast<int>(std::ceil(std::log2(deviation * kLargest / largest_code)));
  }

  float value(std::uint64_t element) const {
    return mean + deviation * gaussian(mix(key + element * 0x9E3779B97F4A7C15u));
  }

  /// Exponent of a tile's scale: the smallest that fits every value, or up to two more, so that codes differ
  /// in size.
  int tile_exponent(std::uint64_t row, std::uint64_t column_block) const {
    const std::uint64_t tile = row / tile_rows * ((inputs + kBlock - 1) / kBlock) + column_block;
    return exponent + static_cast<int>(mix(~key + tile * 0x9E3779B97F4A7C15u) % 3);
  }

  std::uint64_t key = 0, inputs = 1, tile_rows = kBlock;
  float mean = 0, deviation = 1;
  int exponent = 0;
  bool packed = false;
};

void put(std::uint8_t*& out, float value) {
  std::memcpy(out, &value, sizeof(value));
  out += sizeof(value);
}

void put(std::uint8_t*& out, BFloat16 value) {
  std::memcpy(out, &value.bits, sizeof(value.bits));
  out += sizeof(value.bits);
}

}  // namespace

std::vector<std::uint8_t> random_rows(const TreeTensor& tensor, std::uint64_t seed, std::uint64_t first_row,
                                      std::uint64_t rows) {
  const Source source(tensor, seed);
  const std::uint64_t all_rows = tensor.shape.empty() ? 1 : std::max<std::uint64_t>(tensor.shape[0], 1);
  const std::uint64_t elements = tensor.shape.elements().value_or(0) / all_rows;  // stored ones, per row
  std::vector<std::uint8_t> bytes(rows * elements * dtype_bytes(tensor.dtype));
  std::uint8_t* out = bytes.data();
  for (std::uint64_t row = first_row; row < first_row + rows; ++row)
    for (std::uint64_t column = 0; column < elements; ++column) {
      const std::uint64_t element = row * elements + column;
      const auto scaled = [&](std::uint64_t input) {
        const std::uint64_t position = row * source.inputs + input;
        return std::ldexp(source.value(position), -source.tile_exponent(row, input / kBlock));
      };
      switch (tensor.dtype) {
        case DType::F32:
          put(out, source.value(element));
          break;
        case DType::BF16:
          put(out, to_bfloat16(source.value(element)));
          break;
        case DType::F8E4M3:
          *out++ = encode_e4m3(scaled(column));
          break;
        case DType::I8:
          *out++ = static_cast<std::uint8_t>(encode_e2m1(scaled(2 * column)) |
                                             encode_e2m1(scaled(2 * column + 1)) << 4);
          break;
        case DType::F8E8M0:
          *out++ = static_cast<std::uint8_t>(127 + source.tile_exponent(row * source.tile_rows, column));
          break;
        default:  // dtypes that no released tensor has: plain random bytes
          for (std::size_t byte = 0; byte < dtype_bytes(tensor.dtype); ++byte)
            *out++ = static_cast<std::uint8_t>(mix(source.key + element) >> 8 * byte);
      }
    }
  return bytes;
}

}  // namespace dsv41
