// Opening a checkpoint directory: find files, parse headers, compare with what the config demands
// (checkpoint.h).
#include "loader/checkpoint.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <system_error>

#include "loader/error.h"
#include "loader/names.h"
#include "loader/weight_index.h"

namespace dsv41 {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kShownFindings = 5;  // of how many contradictions the message shows the text

struct Shard {
  MappedFile file;
  SafetensorsHeader header;
};

/// Throws when there are findings: the first few and how many more.
void refuse(const std::string& subject, const std::vector<std::string>& findings) {
  if (findings.empty()) return;
  std::string message = subject + ": ";
  for (std::size_t i = 0; i < std::min(findings.size(), kShownFindings); ++i)
    message += (i == 0 ? "" : "; ") + findings[i];
  if (findings.size() > kShownFindings)
    message += fmt::format("; and {} more", findings.size() - kShownFindings);
  throw CheckpointError(message);
}

fs::path checked_directory(const fs::path& directory) {
  std::error_code error;
  const fs::file_status status = fs::status(directory, error);
  if (status.type() == fs::file_type::not_found)
    throw CheckpointError(
        fmt::format("{}: no such directory; give the model directory with --model", directory.string()));
  if (error) throw CheckpointError(fmt::format("{}: {}", directory.string(), error.message()));
  if (status.type() != fs::file_type::directory)
    throw CheckpointError(
        fmt::format("{}: not a directory; give the directory that holds config.json", directory.string()));
  return directory;
}

/// Names of the *.safetensors files of a directory, sorted.
std::vector<std::string> shard_files(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error))
    if (entry->path().extension() == ".safetensors") names.push_back(entry->path().filename().string());
  if (error)
    throw CheckpointError(
        fmt::format("{}: cannot list the directory: {}", directory.string(), error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

std::string expectation(const ExpectedTensor& expected) {
  return fmt::format("{} {} ({})", dtype_name(expected.dtype), expected.shape.text(), expected.fields);
}

}  // namespace

struct Checkpoint::Impl {
  explicit Impl(const fs::path& where) : directory(checked_directory(where)) {
    const fs::path config_file = find_config(directory);
    config = read_config(config_file);
    refuse(config_file.string(), config_findings(config));
    open_shards();
    compare(config_file);
    seal();
  }

  void open_shards() {
    const fs::path index_file = directory / kWeightIndexFile;
    std::vector<std::string> files;
    std::error_code ignored;
    if (fs::symlink_status(index_file, ignored).type() != fs::file_type::not_found) {
      const MappedFile mapped(index_file);
      index = parse_weight_index(mapped.text(), index_file.string(), mapped.readable());
      files = index->shards;
      std::sort(files.begin(), files.end());
    } else {
      files = shard_files(directory);
    }
    if (files.empty())
      throw CheckpointError(
          fmt::format("{}: there is a config but no *.safetensors shard", directory.string()));

    std::vector<std::string> missing;
    for (const std::string& file : files)
      if (fs::symlink_status(directory / file, ignored).type() == fs::file_type::not_found)
        missing.push_back(file);
    if (!missing.empty())
      refuse(fmt::format("{}: {} of {} shards are missing", directory.string(), missing.size(), files.size()),
             missing);

    shards.reserve(files.size());
    for (const std::string& file : files) {
      MappedFile mapped(directory / file);
      SafetensorsHeader header =
          parse_safetensors(mapped.bytes(), mapped.bytes().size(), mapped.path().string());
      shards.push_back({std::move(mapped), std::move(header)});
    }
    number_tensors();
  }

  void number_tensors() {
    for (const Shard& shard : shards) tensors += shard.header.tensors.size();
    entries.reserve(tensors);
    names = NameIndex(tensors);
    for (const Shard& shard : shards) {
      payload += shard.header.payload_bytes;
      for (const TensorInfo& tensor : shard.header.tensors) {
        if (const auto other = names.insert(tensor.name, static_cast<std::uint32_t>(entries.size())))
          throw CheckpointError(fmt::format("{} lies in two shards: {} and {}", tensor.name,
                                            file_name(*entries[*other].shard), file_name(shard)));
        entries.push_back({&shard, &tensor});
      }
    }
  }

  /// Every tensor of the inventory against its header, every line of the index against the shards.
  void compare(const fs::path& config_file) {
    std::vector<std::string> findings;
    std::size_t absent = 0;
    const Inventory wanted = inventory(config);
    for (const ExpectedTensor& expected : wanted) {
      const auto number = names.find(expected.name);
      if (!number) {
        ++absent;
        findings.push_back(fmt::format("{}: no shard holds it, the config demands {}{}", expected.name,
                                       expectation(expected), hint(expected)));
        continue;
      }
      const auto& [shard, tensor] = entries[*number];
      if (tensor->dtype != expected.dtype || tensor->shape != expected.shape)
        findings.push_back(fmt::format("{} is {} {} in {}, the config demands {}", expected.name,
                                       dtype_name(tensor->dtype), tensor->shape.text(), file_name(*shard),
                                       expectation(expected)));
      else if ((shard->header.payload_offset() + tensor->begin) % dtype_bytes(tensor->dtype) != 0)
        findings.push_back(fmt::format(
            "{} starts at byte {} of {}, which is not a multiple of its {}-byte elements", expected.name,
            shard->header.payload_offset() + tensor->begin, file_name(*shard), dtype_bytes(tensor->dtype)));
    }
    if (absent == wanted.size())
      throw CheckpointError(fmt::format(
          "{}: not a DeepSeek-V4.1 checkpoint: its {} shards hold none of the {} tensors of the config",
          directory.string(), shards.size(), wanted.size()));
    if (index) compare_index(findings);
    refuse(fmt::format("{}: tensors contradict {}", directory.string(), config_file.string()), findings);
  }

  void compare_index(std::vector<std::string>& findings) const {
    for (const WeightIndex::Entry& line : index->entries) {
      const std::string& promised = index->shards[line.shard];
      const auto number = names.find(line.tensor);
      if (!number)
        findings.push_back(
            fmt::format("the index places {} in {}, which does not hold it", line.tensor, promised));
      else if (const std::string holder = file_name(*entries[*number].shard); holder != promised)
        findings.push_back(
            fmt::format("the index places {} in {}, it lies in {}", line.tensor, promised, holder));
    }
  }

  /// Names the shard of the release layout that should hold a tensor, when the files are named that way and
  /// it is not there.
  std::string hint(const ExpectedTensor& expected) const {
    const std::string file = shard_file_name(expected.shard, shard_count(config));
    std::error_code ignored;
    return fs::exists(directory / file, ignored) ? "" : fmt::format(" in {}, which is missing", file);
  }

  void seal() {
    std::string text = to_flat_json(config);
    text += fmt::format("{} {} {}", config.bos_id(), config.eos_id(), config.max_positions());
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, text.data(), text.size());
    for (const Shard& shard : shards) {
      const std::string name = file_name(shard);
      XXH3_64bits_update(&state, name.data(), name.size() + 1);
      XXH3_64bits_update(&state, shard.file.bytes().data(), shard.header.payload_offset());
    }
    fingerprint = XXH3_64bits_digest(&state);
  }

  static std::string file_name(const Shard& shard) { return shard.file.path().filename().string(); }

  struct Entry {
    const Shard* shard;
    const TensorInfo* tensor;
  };

  const Entry& entry(std::string_view name) const {
    const auto number = names.find(name);
    if (!number) throw CheckpointError(fmt::format("{}: there is no tensor {}", directory.string(), name));
    return entries[*number];
  }

  /// The tensor `prefix` + `suffix`, of the given dtype and rank.
  const Entry& entry(std::string_view prefix, std::string_view suffix, DType dtype, std::size_t rank) const {
    char buffer[256];
    const std::size_t size = prefix.size() + suffix.size();
    if (size > sizeof(buffer))
      throw CheckpointError(fmt::format("{}: there is no tensor {}{}", directory.string(), prefix, suffix));
    std::copy(prefix.begin(), prefix.end(), buffer);
    std::copy(suffix.begin(), suffix.end(), buffer + prefix.size());
    const Entry& found = entry(std::string_view(buffer, size));
    if (found.tensor->dtype != dtype || (rank != 0 && found.tensor->shape.size() != rank))
      throw CheckpointError(fmt::format("{}{} is {} {}, not {} of rank {}", prefix, suffix,
                                        dtype_name(found.tensor->dtype), found.tensor->shape.text(),
                                        dtype_name(dtype), rank));
    return found;
  }

  template <typename Element>
  const Element* data(const Entry& entry) const {
    const std::uint64_t offset = entry.shard->header.payload_offset() + entry.tensor->begin;
    return reinterpret_cast<const Element*>(entry.shard->file.bytes().data() + offset);
  }

  fs::path directory;
  ModelConfig config;
  std::optional<WeightIndex> index;
  std::vector<Shard> shards;
  std::vector<Entry> entries;
  NameIndex names;
  std::uint64_t tensors = 0, payload = 0, fingerprint = 0;
};

Checkpoint::Checkpoint(const fs::path& directory) : impl_(std::make_unique<Impl>(directory)) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;

const ModelConfig& Checkpoint::config() const {
  return impl_->config;
}
const fs::path& Checkpoint::directory() const {
  return impl_->directory;
}
std::uint64_t Checkpoint::tensor_count() const {
  return impl_->tensors;
}
std::uint64_t Checkpoint::payload_bytes() const {
  return impl_->payload;
}
std::uint64_t Checkpoint::fingerprint() const {
  return impl_->fingerprint;
}
const TensorInfo& Checkpoint::info(std::string_view name) const {
  return *impl_->entry(name).tensor;
}

std::span<const std::byte> Checkpoint::bytes(std::string_view name) const {
  const Impl::Entry& entry = impl_->entry(name);
  return {impl_->data<std::byte>(entry), entry.tensor->bytes()};
}

TensorLocation Checkpoint::location(std::string_view name) const {
  const Impl::Entry& entry = impl_->entry(name);
  return {&entry.shard->file, entry.shard->header.payload_offset() + entry.tensor->begin,
          entry.tensor->bytes()};
}

Fp8Matrix Checkpoint::fp8(std::string_view prefix) const {
  const Impl::Entry& codes = impl_->entry(prefix, ".weight", DType::F8E4M3, 2);
  const Impl::Entry& scales = impl_->entry(prefix, ".scale", DType::F8E8M0, 2);
  return {impl_->data<std::uint8_t>(codes), impl_->data<std::uint8_t>(scales), codes.tensor->shape[0],
          codes.tensor->shape[1]};
}

Fp4Matrix Checkpoint::fp4(std::string_view prefix) const {
  const Impl::Entry& codes = impl_->entry(prefix, ".weight", DType::I8, 2);
  const Impl::Entry& scales = impl_->entry(prefix, ".scale", DType::F8E8M0, 2);
  return {impl_->data<std::uint8_t>(codes), impl_->data<std::uint8_t>(scales), codes.tensor->shape[0],
          2 * codes.tensor->shape[1]};
}

Bf16Matrix Checkpoint::bf16_matrix(std::string_view name) const {
  const Impl::Entry& entry = impl_->entry(name, "", DType::BF16, 2);
  return {impl_->data<BFloat16>(entry), entry.tensor->shape[0], entry.tensor->shape[1]};
}

std::span<const BFloat16> Checkpoint::bf16(std::string_view name) const {
  const Impl::Entry& entry = impl_->entry(name, "", DType::BF16, 0);
  return {impl_->data<BFloat16>(entry), entry.tensor->bytes() / sizeof(BFloat16)};
}

std::span<const float> Checkpoint::f32(std::string_view name) const {
  const Impl::Entry& entry = impl_->entry(name, "", DType::F32, 0);
  return {impl_->data<float>(entry), entry.tensor->bytes() / sizeof(float)};
}

F32Matrix Checkpoint::f32_matrix(std::string_view name) const {
  const Impl::Entry& entry = impl_->entry(name, "", DType::F32, 2);
  return {impl_->data<float>(entry), entry.tensor->shape[0], entry.tensor->shape[1]};
}

}  // namespace dsv41
