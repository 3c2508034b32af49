#include "runtime/sequence.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace dsv41 {

WindowCache::WindowCache(std::size_t positions, std::size_t head_dim)
    : positions_(positions),
      head_dim_(head_dim),
      entry_bytes_(head_dim + head_dim / kBlock),
      storage_(positions * entry_bytes_) {}

WindowCache::Entry WindowCache::entry(std::uint32_t position) const {
  const std::uint8_t* start = storage_.data() + position % positions_ * entry_bytes_;
  return {start, start + head_dim_};
}

void WindowCache::store(std::uint32_t position, const std::uint8_t* codes, const std::uint8_t* scales) {
  std::uint8_t* start = storage_.data() + position % positions_ * entry_bytes_;
  std::memcpy(start, codes, head_dim_);
  std::memcpy(start + head_dim_, scales, head_dim_ / kBlock);
}

// A block holds its groups' codes, then scales, then key codes, then key scales, each contiguous: index
// scoring streams the keys of a block without touching anything else.
CompressedCache::CompressedCache(std::uint32_t ratio, std::size_t head_dim, std::size_t index_dim,
                                 std::size_t pending_tokens)
    : ratio_(ratio),
      head_dim_(head_dim),
      index_dim_(index_dim),
      pending_tokens_(ratio > 1 ? pending_tokens : 0),
      pending_(pending_tokens_ * 2 * head_dim) {}

std::size_t CompressedCache::scales_offset() const {
  return kGroupsPerBlock * (head_dim_ / 2);
}
std::size_t CompressedCache::key_codes_offset() const {
  return scales_offset() + kGroupsPerBlock * (head_dim_ / kGroupBlock);
}
std::size_t CompressedCache::key_scales_offset() const {
  return key_codes_offset() + kGroupsPerBlock * (index_dim_ / 2);
}
std::size_t CompressedCache::block_bytes() const {
  return key_scales_offset() + kGroupsPerBlock * (index_dim_ / kBlock);
}

void CompressedCache::append(const std::uint8_t* codes, const std::uint8_t* scales,
                             const std::uint8_t* key_codes, const std::uint8_t* key_scales) {
  const std::size_t slot = groups_ % kGroupsPerBlock;
  if (groups_ / kGroupsPerBlock == blocks_.size()) {
    blocks_.push_back(std::make_shared<std::uint8_t[]>(block_bytes()));
  } else if (auto& last = blocks_[groups_ / kGroupsPerBlock]; last.use_count() > 1) {
    auto copy = std::make_shared<std::uint8_t[]>(block_bytes());
    std::memcpy(copy.get(), last.get(), block_bytes());
    last = std::move(copy);
  }
  std::uint8_t* block = blocks_[groups_ / kGroupsPerBlock].get();
  const auto put = [slot](std::uint8_t* area, const std::uint8_t* from, std::size_t bytes) {
    std::memcpy(area + slot * bytes, from, bytes);
  };
  put(block, codes, head_dim_ / 2);
  put(block + scales_offset(), scales, head_dim_ / kGroupBlock);
  put(block + key_codes_offset(), key_codes, index_dim_ / 2);
  put(block + key_scales_offset(), key_scales, index_dim_ / kBlock);
  ++groups_;
}

void CompressedCache::truncate(std::size_t groups) {
  groups_ = std::min(groups_, groups);
  blocks_.resize(ceil_div(groups_, kGroupsPerBlock));
}

std::size_t CompressedCache::bytes_for(std::size_t tokens) const {
  return ceil_div(tokens / ratio_, kGroupsPerBlock) * block_bytes() + pending_.size() * sizeof(float);
}

const std::uint8_t* CompressedCache::codes(std::size_t group) const {
  return blocks_[group / kGroupsPerBlock].get() + group % kGroupsPerBlock * (head_dim_ / 2);
}

const std::uint8_t* CompressedCache::scales(std::size_t group) const {
  return blocks_[group / kGroupsPerBlock].get() + scales_offset() +
         group % kGroupsPerBlock * (head_dim_ / kGroupBlock);
}

CompressedCache::KeyRun CompressedCache::keys(std::size_t group, std::size_t limit) const {
  const std::uint8_t* block = blocks_[group / kGroupsPerBlock].get();
  const std::size_t slot = group % kGroupsPerBlock;
  return {block + key_codes_offset() + slot * (index_dim_ / 2),
          block + key_scales_offset() + slot * (index_dim_ / kBlock),
          std::min(limit, kGroupsPerBlock - slot)};
}

std::span<float> CompressedCache::pending_u(std::uint32_t position) {
  return {pending_.data() + position % pending_tokens_ * 2 * head_dim_, head_dim_};
}

std::span<float> CompressedCache::pending_z(std::uint32_t position) {
  return {pending_.data() + (position % pending_tokens_ * 2 + 1) * head_dim_, head_dim_};
}

std::size_t CompressedCache::bytes() const {
  return blocks_.size() * block_bytes() + pending_.size() * sizeof(float);
}

Sequence::Sequence(const ModelConfig& config)
    : rollback_limit_(config.dspark_block_size + 1), kv_source_layers_(config.kv_source_layers) {
  windows_.reserve(config.n_blocks());
  for (std::uint32_t block = 0; block < config.n_blocks(); ++block)
    windows_.emplace_back(config.window_size + rollback_limit_, config.head_dim);
  for (const std::uint32_t layer : kv_source_layers_) {
    const std::uint32_t ratio = config.compress_ratios[layer];
    compressed_.emplace_back(ratio, config.head_dim, config.index_head_dim, ratio + rollback_limit_);
  }
  history_.resize(config.engram_max_ngram_size + rollback_limit_);
}

CompressedCache& Sequence::compressed(std::uint32_t kv_source) {
  const auto found = std::find(kv_source_layers_.begin(), kv_source_layers_.end(), kv_source);
  return compressed_[static_cast<std::size_t>(found - kv_source_layers_.begin())];
}

void Sequence::remember(std::uint32_t position, HashedToken token) {
  history_[position % history_.size()] = token;
}

std::size_t Sequence::recent(std::uint32_t position, std::span<HashedToken> out) const {
  const std::size_t count = std::min<std::size_t>(out.size(), std::size_t{position} + 1);
  for (std::size_t back = 0; back < count; ++back) out[back] = history_[(position - back) % history_.size()];
  return count;
}

void Sequence::rollback(std::uint32_t length) {
  if (length > length_ || (length != 0 && length_ - length > rollback_limit_))
    throw std::logic_error("a sequence can only be rolled back by its kept positions");
  for (CompressedCache& cache : compressed_) cache.truncate(length / cache.ratio());
  length_ = length;
}

std::size_t Sequence::bytes() const {
  std::size_t total = history_.size() * sizeof(HashedToken);
  for (const WindowCache& cache : windows_) total += cache.bytes();
  for (const CompressedCache& cache : compressed_) total += cache.bytes();
  return total;
}

std::size_t Sequence::bytes_for(const ModelConfig& config, std::size_t tokens) {
  const Sequence empty(config);
  std::size_t total = empty.bytes();
  for (const CompressedCache& cache : empty.compressed_) total += cache.bytes_for(tokens) - cache.bytes();
  return total;
}

}  // namespace dsv41
