// All state of one sequence (docs/model.md 3, "State per sequence"), on the quantized grid: codes, never bf16
// copies. Rolling it back to a shorter length is one call. Memory grows in blocks; nothing large is ever
// reallocated.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engram/hashing.h"
#include "kernels/views.h"
#include "loader/config.h"

namespace dsv41 {

/// The last window entries of one layer or draft stage, addressed by position. An entry is E4M3 codes [Dh]
/// and E8M0 scales [Dh/32]. Keeps `window + rollback` positions, so that a rollback finds what it needs.
class WindowCache {
 public:
  WindowCache(std::size_t positions, std::size_t head_dim);
  struct Entry {
    const std::uint8_t* codes;
    const std::uint8_t* scales;
  };
  Entry entry(std::uint32_t position) const;
  void store(std::uint32_t position, const std::uint8_t* codes, const std::uint8_t* scales);
  std::size_t positions() const { return positions_; }
  std::size_t bytes() const { return storage_.size(); }

 private:
  std::size_t positions_, head_dim_, entry_bytes_;
  std::vector<std::uint8_t> storage_;
};

/// What a Full layer keeps: compressed KV (E2M1 codes, E4M3 scale per 16) and index keys (E2M1, E8M0 per 32)
/// of every group, and u and z (fp32) of the last tokens, from which an incomplete group is finished or a
/// rollback resumes.
class CompressedCache {
 public:
  static constexpr std::size_t kGroupsPerBlock = 1024;

  CompressedCache(std::uint32_t ratio, std::size_t head_dim, std::size_t index_dim,
                  std::size_t pending_tokens);

  std::uint32_t ratio() const { return ratio_; }
  std::size_t groups() const { return groups_; }
  std::size_t pending_tokens() const { return pending_tokens_; }

  /// Appends one group: codes [Dh/2], scales [Dh/16], key codes [index_dim/2], key scales [index_dim/32].
  void append(const std::uint8_t* codes, const std::uint8_t* scales, const std::uint8_t* key_codes,
              const std::uint8_t* key_scales);
  void truncate(std::size_t groups);

  const std::uint8_t* codes(std::size_t group) const;
  const std::uint8_t* scales(std::size_t group) const;

  /// Index keys of a run of groups that lies inside one block.
  struct KeyRun {
    const std::uint8_t* codes;
    const std::uint8_t* scales;
    std::size_t groups;
  };
  /// The run that starts at `group`, at most `limit` groups long.
  KeyRun keys(std::size_t group, std::size_t limit) const;

  /// u and z of a recent token, fp32 [Dh] each; only where ratio > 1.
  std::span<float> pending_u(std::uint32_t position);
  std::span<float> pending_z(std::uint32_t position);

  std::size_t bytes() const;
  std::size_t bytes_for(std::size_t tokens) const;

 private:
  std::uint32_t ratio_;
  std::size_t head_dim_, index_dim_, pending_tokens_;
  std::size_t groups_ = 0;
  std::vector<std::shared_ptr<std::uint8_t[]>>
      blocks_;  // shared between forks; whoever appends to a shared one copies it
  std::vector<float> pending_;
  std::size_t block_bytes() const;
  std::size_t scales_offset() const, key_codes_offset() const, key_scales_offset() const;
};

/// Copying one forks it: the copies share full blocks of compressed KV and go on independently.
class Sequence {
 public:
  /// `rollback`: how many of the newest positions may be taken back (docs/model.md 3: dspark_block_size).
  explicit Sequence(const ModelConfig& config);

  std::uint32_t length() const { return length_; }

  WindowCache& window(std::uint32_t block) { return windows_[block]; }
  /// Of a Full layer.
  CompressedCache& compressed(std::uint32_t kv_source);

  /// Compressed ids of recent tokens: recent[i] is i positions before `position`; fewer near the start.
  void remember(std::uint32_t position, HashedToken token);
  std::size_t recent(std::uint32_t position, std::span<HashedToken> out) const;

  /// Called once per step, after all layers have stored their part.
  void advance(std::uint32_t tokens) { length_ += tokens; }
  /// Takes back everything from `length` on. Throws std::logic_error beyond the kept positions (length 0
  /// always works).
  void rollback(std::uint32_t length);

  /// Bytes of state held now, and those that a sequence of `tokens` positions will hold.
  std::size_t bytes() const;
  static std::size_t bytes_for(const ModelConfig& config, std::size_t tokens);

 private:
  std::uint32_t length_ = 0;
  std::uint32_t rollback_limit_;
  std::vector<WindowCache> windows_;         // [n_blocks]
  std::vector<CompressedCache> compressed_;  // in the order of kv_source_layers
  std::vector<std::uint32_t> kv_source_layers_;
  std::vector<HashedToken> history_;  // ring by position
};

}  // namespace dsv41
