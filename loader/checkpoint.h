// A checkpoint directory: its config, its shards mapped read-only, and an index from tensor name to bytes.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/views.h"
#include "loader/config.h"
#include "loader/inventory.h"
#include "loader/safetensors.h"

namespace dsv41 {

/// Where the bytes of a tensor lie, for readers that bypass the mapping (io_uring, payload verification).
struct TensorLocation {
  const MappedFile* file = nullptr;
  std::uint64_t offset = 0;  // in the file
  std::uint64_t bytes = 0;
};

class Checkpoint {
 public:
  /// Opens a directory. Throws CheckpointError: no directory, no config, a config the forward pass cannot
  /// run, missing shards (named), a tensor that the config demands but no shard holds, a shape or dtype that
  /// contradicts the config (names both), misalignment. Tensors the config does not know are tolerated.
  explicit Checkpoint(const std::filesystem::path& directory);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;

  const ModelConfig& config() const;
  const std::filesystem::path& directory() const;
  std::uint64_t tensor_count() const;   // in all shards
  std::uint64_t payload_bytes() const;  // likewise
  /// Digest of config and all headers: ranks compare it to see that they opened the same checkpoint.
  std::uint64_t fingerprint() const;

  /// Bytes of a tensor; for those of the inventory the shape was checked when the directory was opened.
  std::span<const std::byte> bytes(std::string_view name) const;
  TensorLocation location(std::string_view name) const;
  const TensorInfo& info(std::string_view name) const;

  // Typed views. The name is without ".weight"/".scale"; throws CheckpointError for an unknown name or
  // another dtype.
  Fp8Matrix fp8(std::string_view prefix) const;
  Fp4Matrix fp4(std::string_view prefix) const;
  // Names of these are complete: "embed.weight", "layers.0.hc_attn_fn".
  Bf16Matrix bf16_matrix(std::string_view name) const;
  std::span<const BFloat16> bf16(std::string_view name) const;
  std::span<const float> f32(std::string_view name) const;
  F32Matrix f32_matrix(std::string_view name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dsv41
