// Exact products of FP4 weights with blocks of E4M3 activations on a thread block of four warps: digits, the
// dot4 and the tensor-core path, and the accumulation over blocks in order (docs/numerics.md 1; the reasoning
// is in docs/cuda.md). Device code through portable.h only.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/portable.h"

namespace dsv41::cuda {

DSV41_DEVICE std::uint32_t float_bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
DSV41_DEVICE float bits_float(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
DSV41_DEVICE float magnitude(float value) {
  return bits_float(float_bits(value) & 0x7FFFFFFFu);
}
DSV41_DEVICE bool is_special(const BlockScale& block) {
  return (float_bits(block.unit) >> 31) != 0;
}

// ---- weights
// --------------------------------------------------------------------------------------------------

/// Eight E2M1 codes -> two words of four bytes 12 + (value in half units), 0…24. The two tables hold the
/// values of positive and negative codes; a selector nibble above 7 repeats the sign of a positive byte,
/// which is 0.
struct WeightBytes {
  std::uint32_t low, high;  // weights 0…3 and 4…7
};
DSV41_DEVICE WeightBytes decode_weights(std::uint32_t codes) {
  const std::uint32_t flipped = codes ^ 0x88888888u;
  const auto four = [](std::uint32_t plus, std::uint32_t minus) {
    return permute_bytes(0x0F0E0D0Cu, 0x18141210u, plus) | permute_bytes(0x090A0B0Cu, 0x00040608u, minus);
  };
  return {four(codes, flipped), four(codes >> 16, flipped >> 16)};
}

DSV41_DEVICE float decode_scale(std::uint32_t code) {
  const std::uint32_t bits = code << 23;
  return bits_float(code == 255 ? 0x7FC00000u : bits > 0x00400000u ? bits : 0x00400000u);
}

// ---- activations
// ----------------------------------------------------------------------------------------------

/// Lane i holds code i of a block; the warp writes the block's digits. Called by whole warps.
DSV41_DEVICE void expand_block(std::uint32_t code, std::uint32_t scale_code, const Expanded& out,
                               std::size_t block) {
  const std::uint32_t exponent = (code >> 3) & 15u, mantissa = code & 7u;
  const bool nan = any_in_warp((code & 0x7Fu) == 0x7Fu);
  const std::uint32_t size = exponent == 0 ? mantissa : (mantissa | 8u) << (exponent - 1);
  std::uint32_t all = size;
  for (unsigned mask = 16; mask != 0; mask >>= 1) all |= shuffle_xor(all, mask);
  const unsigned shift = all == 0 ? 0 : trailing_zeros(all);
  const auto shifted = static_cast<std::int32_t>(size >> shift);
  const std::int32_t value = (code & 0x80u) != 0 ? -shifted : shifted;

  const std::int32_t low = ((value + 128) & 255) - 128;
  const std::int32_t rest = (value - low) / 256;
  const std::int32_t high = ((rest + 128) & 255) - 128;
  const std::int32_t top = (rest - high) / 256;
  const bool has_top = any_in_warp(top != 0);
  // Both sums in one word: 32 digits of at most 128 need 13 bits with sign.
  std::uint32_t sums = static_cast<std::uint32_t>(low) + (static_cast<std::uint32_t>(high) << 16);
  for (unsigned mask = 16; mask != 0; mask >>= 1) sums += shuffle_xor(sums, mask);
  const std::int32_t low_sum = static_cast<std::int16_t>(static_cast<std::uint16_t>(sums));
  const std::int32_t high_sum = static_cast<std::int16_t>(
      static_cast<std::uint16_t>((sums - static_cast<std::uint32_t>(low_sum)) >> 16));

  const unsigned lane = lane_index();
  out.digits[block * 64 + lane] = static_cast<std::uint8_t>(low);
  out.digits[block * 64 + 32 + lane] = static_cast<std::uint8_t>(high);
  out.top[block * 32 + lane] = static_cast<std::uint8_t>(top);
  if (lane == 0) {
    const bool special = has_top || scale_code < kRegularActivationLow || scale_code > kRegularActivationHigh;
    // A step of v is 2^(shift-9), a half unit of E2M1 another 2^-1.
    const std::uint32_t unit = nan ? 0x7FC00000u : (127u - 10u + shift) << 23;
    out.scales[block] = {kMagicBits - 12 * low_sum, kMagicBits - 12 * high_sum, decode_scale(scale_code),
                         bits_float(unit | (special ? 0x80000000u : 0u))};
  }
}

// ---- one block's contribution
// ----------------------------------------------------------------------------------

/// RN32 of low + 256 high from two sums that started at kMagic: every step but the last is exact.
DSV41_DEVICE float combine(std::int32_t low, std::int32_t high) {
  const float low_part = add(bits_float(static_cast<std::uint32_t>(low)), -kMagic);
  const float high_part = add(bits_float(static_cast<std::uint32_t>(high)), -kMagic);
  return multiply_add(high_part, 256.0f, low_part);
}
/// The same with top digits; the whole dot product is below 2^28.
DSV41_DEVICE float combine(std::int32_t low, std::int32_t high, std::int32_t top) {
  return to_float_rounded((low - kMagicBits) + 256 * (high - kMagicBits) + 65536 * top);
}

/// The contract, word by word: RN32(d * RN32(s_x * s_w)).
DSV41_DEVICE float contribution(float dot, const BlockScale& block, float weight_scale) {
  return multiply(multiply(dot, magnitude(block.unit)), multiply(block.scale, weight_scale));
}

/// Results leave as bf16; NaN has one pattern.
DSV41_DEVICE std::uint16_t round_result(float sum) {
  return sum != sum ? std::uint16_t{0x7FC0} : to_bfloat16(sum).bits;
}

// ---- a tile: 64 weight rows times up to kRows activation rows
// ---------------------------------------------------

/// Until `counter` has reached `count`; then everything released into it is visible to the block.
DSV41_DEVICE void wait_for(const std::uint32_t* counter, std::uint32_t count) {
  if (thread_index() == 0)
    while (acquire(counter) < count) pause();
  sync_block();
}

/// Where a tile's operands lie.
struct TileSource {
  // Two halves of 32 weight rows: codes and scales of their first rows, and how many rows exist from there
  // (1…32).
  const std::uint8_t *first_codes, *second_codes;
  const std::uint8_t *first_scales, *second_scales;
  std::uint32_t first_valid, second_valid;
  bool regular;
  std::uint32_t blocks;  // K / 32
  Expanded x;
  const std::uint32_t* gather;  // activation row of route i, or null: row first + i
  std::uint32_t first, rows;
  std::uint32_t dot_rows;
  const std::uint32_t* ready;  // the activations exist when this counter has reached ready_count
  std::uint32_t ready_count;

  /// The first half starts at row `row` of `one`, the second at row `row + skip` of `two`; rows of `count`
  /// blocks.
  DSV41_DEVICE void set_matrices(const DeviceMatrix& one, const DeviceMatrix& two, std::uint32_t row,
                                 std::uint32_t skip, std::uint32_t one_valid, std::uint32_t two_valid,
                                 std::uint32_t count) {
    const std::size_t one_blocks = std::size_t{row} * count, two_blocks = std::size_t{row + skip} * count;
    first_codes = one.codes + one_blocks * 16;
    second_codes = two.codes + two_blocks * 16;
    first_scales = one.scales + one_blocks;
    second_scales = two.scales + two_blocks;
    first_valid = one_valid;
    second_valid = two_valid;
    regular = one.regular != 0 && two.regular != 0;
    blocks = count;
  }

  /// Rows beyond the matrix read its last row again; their results are dropped.
  DSV41_DEVICE unsigned inside(unsigned row) const {
    const unsigned valid = row < kHalf ? first_valid : second_valid;
    return row % kHalf < valid ? row % kHalf : valid - 1;
  }
};

template <unsigned kRows, unsigned kStages>
struct Tile {
  static constexpr SharedLayout kLayout{kRows, kStages};

  TileSource source;

  DSV41_DEVICE std::byte* stage(unsigned index) const {
    return shared_memory() + SharedLayout::kBroadcast + index * kLayout.stage_bytes();
  }
  DSV41_DEVICE std::byte* weight_scales(unsigned half) const {
    return shared_memory() + kLayout.weight_scales() + half * ((kHalf * source.blocks + 15) / 16 * 16);
  }

  DSV41_DEVICE std::uint32_t blocks_of(std::uint32_t chunk) const {
    const std::uint32_t left = source.blocks - chunk * kStageBlocks;
    return left < kStageBlocks ? left : kStageBlocks;
  }

  DSV41_DEVICE void load_weights(std::uint32_t chunk) const {
    const std::uint32_t count = blocks_of(chunk);
    std::byte* const target = stage(chunk % kStages);
    for (unsigned i = thread_index(); i < kTileFeatures * kStageBlocks; i += kThreads) {
      const unsigned row = i / kStageBlocks, block = i % kStageBlocks;
      if (block >= count) continue;
      copy16(target + row * SharedLayout::kWeightStride + block * 16,
             (row < kHalf ? source.first_codes : source.second_codes) +
                 (std::size_t{source.inside(row)} * source.blocks + chunk * kStageBlocks + block) * 16);
    }
  }

  DSV41_DEVICE void load_weight_scales() const {
    const std::uint32_t first_quads = (source.first_valid * source.blocks + 15) / 16;
    const std::uint32_t second_quads = (source.second_valid * source.blocks + 15) / 16;
    for (std::uint32_t i = thread_index(); i < first_quads; i += kThreads)
      copy16(weight_scales(0) + i * 16, source.first_scales + i * 16);
    for (std::uint32_t i = thread_index(); i < second_quads; i += kThreads)
      copy16(weight_scales(1) + i * 16, source.second_scales + i * 16);
  }

  DSV41_DEVICE void load_activations(std::uint32_t chunk) const {
    const std::uint32_t count = blocks_of(chunk);
    std::byte* const target = stage(chunk % kStages);
    constexpr unsigned kPieces = 5;  // four of digits, one of scales
    // Tiles are filled to whole products; the rows beyond repeat the last one.
    const unsigned rows = (source.rows + kRowsPerProduct - 1) / kRowsPerProduct * kRowsPerProduct;
    for (unsigned i = thread_index(); i < rows * kStageBlocks * kPieces; i += kThreads) {
      const unsigned piece = i % kPieces, block = i / kPieces % kStageBlocks,
                     row = i / (kPieces * kStageBlocks);
      if (block >= count) continue;
      const std::uint32_t route = source.first + (row < source.rows ? row : source.rows - 1);
      const std::size_t from =
          std::size_t{source.gather != nullptr ? source.gather[route] : route} * source.blocks +
          chunk * kStageBlocks + block;
      if (piece < 4)
        copy16(target + kLayout.digits() + row * SharedLayout::kDigitStride + block * 64 + piece * 16,
               source.x.digits + from * 64 + piece * 16);
      else
        copy16(target + kLayout.scales() + row * SharedLayout::kScaleStride + block * sizeof(BlockScale),
               source.x.scales + from);
    }
  }

  DSV41_DEVICE float weight_scale(unsigned row, std::uint32_t block) const {
    return decode_scale(
        static_cast<std::uint32_t>(weight_scales(row / kHalf)[source.inside(row) * source.blocks + block]));
  }

  DSV41_DEVICE const std::uint8_t* top_digits(unsigned row, std::uint32_t block) const {
    const std::uint32_t route = source.first + (row < source.rows ? row : source.rows - 1);
    const std::uint32_t from = source.gather != nullptr ? source.gather[route] : route;
    return source.x.top + (std::size_t{from} * source.blocks + block) * 32;
  }

  /// The pipeline: copies run kStages - 1 chunks ahead of `compute(stage, chunk)`. Weights are under way
  /// before the block waits for the activations.
  template <class Compute>
  DSV41_DEVICE void for_each_chunk(Compute&& compute) const {
    const std::uint32_t chunks = (source.blocks + kStageBlocks - 1) / kStageBlocks;
    for (std::uint32_t chunk = 0; chunk < kStages - 1 && chunk < chunks; ++chunk) load_weights(chunk);
    load_weight_scales();
    wait_for(source.ready, source.ready_count);
    for (std::uint32_t chunk = 0; chunk < kStages - 1; ++chunk) {
      if (chunk < chunks) load_activations(chunk);
      commit_copies();
    }
    for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
      wait_copies<static_cast<int>(kStages) - 2>();
      sync_block();  // this chunk is there for all threads, and all have left the stage that is filled next
      const std::uint32_t next = chunk + kStages - 1;
      if (next < chunks) {
        load_weights(next);
        load_activations(next);
      }
      commit_copies();
      compute(stage(chunk % kStages), chunk);
    }
    wait_copies<0>();
    sync_block();  // stages may be reused
  }

  /// Results as bf16 in shared memory (over the stages): [row][kResultStride], features 0…63.
  static constexpr unsigned kResultStride = kTileFeatures + 2;
  DSV41_DEVICE std::uint16_t* results() const { return reinterpret_cast<std::uint16_t*>(stage(0)); }

  /// One weight row is shared by two lanes, which take even and odd blocks; the sums stay in block order by
  /// exchange.
  DSV41_DEVICE void compute_dot4() const {
    const unsigned row = warp_index() * 16 + lane_index() % 16, odd = lane_index() / 16;
    float sums[kDotRows] = {};
    for_each_chunk([&](const std::byte* stage, std::uint32_t chunk) {
      const std::uint32_t count = blocks_of(chunk);
      for (std::uint32_t pair = 0; pair < count; pair += 2) {
        const std::uint32_t block = pair + odd;
        const bool valid = block < count;
        std::uint32_t weights[8];
        float weight_scale_value = 0;
        if (valid) {
          const Quad codes =
              *reinterpret_cast<const Quad*>(stage + row * SharedLayout::kWeightStride + block * 16);
          const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
          for (unsigned i = 0; i < 4; ++i) {
            const WeightBytes bytes = decode_weights(words[i]);
            weights[2 * i] = bytes.low;
            weights[2 * i + 1] = bytes.high;
          }
          weight_scale_value = weight_scale(row, chunk * kStageBlocks + block);
        }
        DSV41_UNROLL
        for (unsigned m = 0; m < kDotRows; ++m) {
          if (m >= source.rows) break;
          float mine = 0;
          if (valid) mine = dot4_block(stage, m, chunk, block, weights, weight_scale_value);
          const float other = bits_float(shuffle_xor(float_bits(mine), 16));
          sums[m] = add(sums[m], odd != 0 ? other : mine);
          if (pair + 1 < count) sums[m] = add(sums[m], odd != 0 ? mine : other);
        }
      }
    });
    if (odd == 0) DSV41_UNROLL
    for (unsigned m = 0; m < kDotRows; ++m)
      if (m < source.rows) results()[m * kResultStride + row] = round_result(sums[m]);
    sync_block();
  }

  DSV41_DEVICE float dot4_block(const std::byte* stage, unsigned m, std::uint32_t chunk, std::uint32_t block,
                                const std::uint32_t (&weights)[8], float weight_scale_value) const {
    const BlockScale scale = *reinterpret_cast<const BlockScale*>(
        stage + kLayout.scales() + m * SharedLayout::kScaleStride + block * sizeof(BlockScale));
    const auto* digits =
        reinterpret_cast<const Quad*>(stage + kLayout.digits() + m * SharedLayout::kDigitStride + block * 64);
    std::int32_t low = scale.start_low, high = scale.start_high;
    for (unsigned half = 0; half < 2; ++half) {
      const Quad l = digits[half], h = digits[2 + half];
      const std::uint32_t lows[4] = {l.x, l.y, l.z, l.w}, highs[4] = {h.x, h.y, h.z, h.w};
      for (unsigned i = 0; i < 4; ++i) {
        low = dot4(weights[half * 4 + i], lows[i], low);
        high = dot4(weights[half * 4 + i], highs[i], high);
      }
    }
    if (!is_special(scale)) return contribution(combine(low, high), scale, weight_scale_value);
    const auto* words = reinterpret_cast<const std::uint32_t*>(top_digits(m, chunk * kStageBlocks + block));
    std::int32_t top = 0;
    for (unsigned i = 0; i < 8; ++i) {
      top = dot4(weights[i], words[i], top);
      top = dot4(0xF4F4F4F4u, words[i], top);  // -12: the weights' offset
    }
    return contribution(combine(low, high, top), scale, weight_scale_value);
  }

  /// Sixteen weight rows per warp; a product's eight columns are the low and high digits of four activation
  /// rows, so that each lane ends up with both sums of "its" two outputs and adds the blocks in order by
  /// itself.
  template <unsigned kProducts>
  DSV41_DEVICE void compute_products() const {
    const unsigned group = lane_index() / 4, quarter = lane_index() % 4;
    const unsigned row = warp_index() * 16 + group;
    float sums[kProducts][2] = {};
    for_each_chunk([&](const std::byte* stage, std::uint32_t chunk) {
      const std::uint32_t count = blocks_of(chunk);
      const auto* weights =
          reinterpret_cast<const std::uint32_t*>(stage + row * SharedLayout::kWeightStride) + quarter;
      for (std::uint32_t block = 0; block < count; ++block) {
        // K may be permuted inside a block: this lane's eight weights are k 8t…8t+7 of the block.
        const WeightBytes first = decode_weights(weights[block * 4]);
        const WeightBytes second = decode_weights(weights[block * 4 + 8 * SharedLayout::kWeightStride / 4]);
        const std::uint32_t a[4] = {first.low, second.low, first.high, second.high};
        const float scales[2] = {weight_scale(row, chunk * kStageBlocks + block),
                                 weight_scale(row + 8, chunk * kStageBlocks + block)};
        DSV41_UNROLL
        for (unsigned product = 0; product < kProducts; ++product) {
          if (product * kRowsPerProduct >= source.rows) break;
          const BlockScale scale = *reinterpret_cast<const BlockScale*>(
              stage + kLayout.scales() + (product * kRowsPerProduct + quarter) * SharedLayout::kScaleStride +
              block * sizeof(BlockScale));
          const Pair b = *reinterpret_cast<const Pair*>(stage + kLayout.digits() +
                                                        (product * kRowsPerProduct + group / 2) *
                                                            SharedLayout::kDigitStride +
                                                        block * 64 + group % 2 * 32 + quarter * 8);
          std::int32_t c[4] = {scale.start_low, scale.start_high, scale.start_low, scale.start_high};
          multiply_tile(c, a, b.x, b.y);
          if (!any_in_warp(is_special(scale)) && source.regular) {
            const float factor = multiply(scale.scale, scale.unit);
            for (unsigned half = 0; half < 2; ++half)
              sums[product][half] = multiply_add(combine(c[half * 2], c[half * 2 + 1]),
                                                 multiply(factor, scales[half]), sums[product][half]);
          } else {
            std::int32_t top[4] = {};
            top_products(top, a, product * kRowsPerProduct, chunk * kStageBlocks + block);
            for (unsigned half = 0; half < 2; ++half)
              sums[product][half] = add(
                  sums[product][half],
                  contribution(combine(c[half * 2], c[half * 2 + 1], top[half * 2]), scale, scales[half]));
          }
        }
      }
    });
    DSV41_UNROLL
    for (unsigned product = 0; product < kProducts; ++product)
      for (unsigned half = 0; half < 2; ++half)
        results()[(product * kRowsPerProduct + quarter) * kResultStride + row + half * 8] =
            round_result(sums[product][half]);
    sync_block();
  }

  /// The third digits of four rows, in the even columns of another product.
  DSV41_DEVICE void top_products(std::int32_t (&top)[4], const std::uint32_t (&a)[4], unsigned first_row,
                                 std::uint32_t block) const {
    const unsigned group = lane_index() / 4, quarter = lane_index() % 4;
    Pair b = {0, 0};
    if (group % 2 == 0)
      b = *reinterpret_cast<const Pair*>(top_digits(first_row + group / 2, block) + quarter * 8);
    const auto* words = reinterpret_cast<const std::uint32_t*>(top_digits(first_row + quarter, block));
    std::int32_t offset = 0;
    for (unsigned i = 0; i < 8; ++i)
      offset = dot4(0xF4F4F4F4u, words[i], offset);  // -12: the weights' offset
    top[0] = top[2] = offset;
    multiply_tile(top, a, b.x, b.y);
  }

  /// Fills results() with source.rows rows.
  DSV41_DEVICE void compute() const {
    if (source.rows <= source.dot_rows) {
      compute_dot4();
      return;
    }
    if (source.rows <= 4) return compute_products<1>();
    if constexpr (kRows == 8) return compute_products<2>();
    if constexpr (kRows > 8) {
      if (source.rows <= 8) return compute_products<2>();
      if constexpr (kRows == 16) return compute_products<4>();
      if constexpr (kRows > 16) {
        if (source.rows <= 16) return compute_products<4>();
        return compute_products<8>();
      }
    }
  }
};

}  // namespace dsv41::cuda
