// The safetensors header parser and read-only file mappings (safetensors.h).
#include "loader/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <simdjson.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "loader/error.h"
#include "loader/json.h"

namespace dsv41 {
namespace {

struct DTypeFacts {
  DType dtype;
  std::string_view name;
  std::size_t bytes;
};

constexpr DTypeFacts kDTypes[] = {
    {DType::F32, "F32", 4},        {DType::F16, "F16", 2},        {DType::BF16, "BF16", 2},
    {DType::F64, "F64", 8},        {DType::I8, "I8", 1},          {DType::U8, "U8", 1},
    {DType::I16, "I16", 2},        {DType::U16, "U16", 2},        {DType::I32, "I32", 4},
    {DType::U32, "U32", 4},        {DType::I64, "I64", 8},        {DType::U64, "U64", 8},
    {DType::Bool, "BOOL", 1},      {DType::F8E4M3, "F8_E4M3", 1}, {DType::F8E5M2, "F8_E5M2", 1},
    {DType::F8E8M0, "F8_E8M0", 1},
};

constexpr std::size_t kTypicalEntryBytes = 112;  // of a tensor in a header; untouched reserve costs nothing
constexpr std::size_t kNameBytes = 1024;         // the longest released name has 44

using simdjson::ondemand::object;
using simdjson::ondemand::value;

/// One parse: knows the file's name for messages and fills a header.
class HeaderParser {
 public:
  /// findings: where damage to extents is reported; nullptr: it is refused like everything else.
  HeaderParser(std::string_view file, const HeaderLimits& limits, SafetensorsHeader& header,
               std::vector<std::string>* findings)
      : file_(file), limits_(limits), header_(header), findings_(findings) {}

  void parse(std::string_view json, std::size_t readable) {
    header_.tensors.reserve(json.size() / kTypicalEntryBytes + 1);
    JsonDocument document(json, readable, file_);
    object root = document.root_object("the header");
    for (auto field : root) {
      const std::string_view key = checked(field.unescaped_key(), "a tensor name");
      value entry = checked(field.value(), key);
      if (key == "__metadata__")
        skip_metadata(entry);
      else
        add_tensor(key, entry);
    }
    document.expect_end();
    check_layout();
  }

  /// file_bytes: 0 when unknown.
  void check_payload(std::uint64_t file_bytes) {
    const std::uint64_t at_hand = file_bytes == 0 ? 0 : file_bytes - header_.payload_offset();
    if (file_bytes != 0 && header_.payload_bytes != at_hand)
      report("the header describes a payload of {} bytes, the file holds {} ({})", header_.payload_bytes,
             at_hand, at_hand < header_.payload_bytes ? "truncated download?" : "trailing bytes");
  }

 private:
  template <typename Value>
  Value checked(simdjson::simdjson_result<Value>&& result, std::string_view what) {
    if (result.error() != simdjson::SUCCESS)
      fail("header: {}: {}", printable(what), simdjson::error_message(result.error()));
    return std::move(result).value_unsafe();
  }

  template <typename... Arguments>
  [[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    throw CheckpointError(
        fmt::format("{}: {}", file_, fmt::format(format, std::forward<Arguments>(arguments)...)));
  }

  /// Damage that leaves names and shapes readable.
  template <typename... Arguments>
  void report(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    constexpr std::size_t kFindings = 1000;  // one bad entry can shift every later one
    if (findings_ == nullptr) fail(format, std::forward<Arguments>(arguments)...);
    if (findings_->size() < kFindings)
      findings_->push_back(
          fmt::format("{}: {}", file_, fmt::format(format, std::forward<Arguments>(arguments)...)));
  }

  void skip_metadata(value& entry) {
    if (std::exchange(metadata_seen_, true)) fail("header: __metadata__ appears twice");
    object pairs = checked(entry.get_object(), "__metadata__ is not an object of strings");
    for (auto field : pairs) {
      checked(field.unescaped_key(), "__metadata__");
      value text = checked(field.value(), "__metadata__");
      checked(text.get_string(), "__metadata__ is not an object of strings");
    }
  }

  void add_tensor(std::string_view key, value& entry) {
    if (header_.tensors.size() >= limits_.tensors) fail("header: more than {} tensors", limits_.tensors);
    if (key.empty() || key.size() > kNameBytes || has_control_characters(key))
      fail("header: a tensor name of {} bytes that is empty, longer than {} bytes or not printable",
           key.size(), kNameBytes);
    TensorInfo& tensor = header_.tensors.emplace_back();
    tensor.name = key;  // the parser's buffer, until the arena owns it
    bool has_dtype = false, has_shape = false, has_offsets = false;
    object facts = checked(entry.get_object(), key);
    for (auto field : facts) {
      const std::string_view fact = checked(field.unescaped_key(), key);
      value content = checked(field.value(), key);
      if (fact == "dtype" && !std::exchange(has_dtype, true))
        read_dtype(content, tensor);
      else if (fact == "shape" && !std::exchange(has_shape, true))
        read_shape(content, tensor);
      else if (fact == "data_offsets" && !std::exchange(has_offsets, true))
        read_offsets(content, tensor);
      else
        fail("{}: \"{}\" is unknown or given twice", key, printable(fact));
    }
    if (!has_dtype || !has_shape || !has_offsets)
      fail("{}: lacks {}", key, !has_dtype ? "dtype" : !has_shape ? "shape" : "data_offsets");
    check_extent(tensor);
    tensor.name = header_.names.add(key);
  }

  void read_dtype(value& content, TensorInfo& tensor) {
    const std::string_view text = checked(content.get_string(), tensor.name);
    const auto dtype = dtype_from_name(text);
    if (!dtype) fail("{}: unknown dtype \"{}\"", tensor.name, printable(text));
    tensor.dtype = *dtype;
  }

  void read_shape(value& content, TensorInfo& tensor) {
    auto dimensions = checked(content.get_array(), tensor.name);
    for (auto dimension : dimensions) {
      if (tensor.shape.size() == Shape::kMaxRank)
        fail("{}: more than {} dimensions", tensor.name, Shape::kMaxRank);
      tensor.shape.push_back(number(dimension, tensor.name, "shape"));
    }
  }

  void read_offsets(value& content, TensorInfo& tensor) {
    std::uint64_t offsets[2] = {};
    std::size_t count = 0;
    auto numbers = checked(content.get_array(), tensor.name);
    for (auto entry : numbers) {
      const std::uint64_t offset = number(entry, tensor.name, "data_offsets");
      if (count < 2) offsets[count] = offset;
      ++count;
    }
    if (count != 2) fail("{}: data_offsets has {} entries instead of 2", tensor.name, count);
    if (offsets[0] > offsets[1])
      fail("{}: data_offsets [{}, {}] run backwards", tensor.name, offsets[0], offsets[1]);
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
  }

  template <typename Entry>
  std::uint64_t number(Entry& entry, std::string_view tensor, std::string_view what) {
    auto result = entry.get_uint64();
    if (result.error() != simdjson::SUCCESS)
      fail("{}: {} holds something other than an integer of 0 … 2^64-1", tensor, what);
    return result.value_unsafe();
  }

  void check_extent(const TensorInfo& tensor) {
    const auto elements = tensor.shape.elements();
    std::uint64_t bytes = 0;
    if (!elements || __builtin_mul_overflow(*elements, dtype_bytes(tensor.dtype), &bytes))
      return report("{}: the size of shape {} overflows 64 bits", tensor.name, tensor.shape.text());
    if (bytes != tensor.bytes())
      report("{}: {} {} takes {} bytes, data_offsets [{}, {}] give {}", tensor.name, dtype_name(tensor.dtype),
             tensor.shape.text(), bytes, tensor.begin, tensor.end, tensor.bytes());
  }

  /// Unique names, and bytes that follow each other without a hole or an overlap.
  void check_layout() {
    std::vector<TensorInfo>& tensors = header_.tensors;
    NameIndex seen(tensors.size());
    for (const TensorInfo& tensor : tensors)
      if (seen.insert(tensor.name, 0)) fail("{}: the name appears twice in the header", tensor.name);

    const auto before = [](const TensorInfo& a, const TensorInfo& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    };
    if (!std::is_sorted(tensors.begin(), tensors.end(), before))
      std::stable_sort(tensors.begin(), tensors.end(), before);
    std::uint64_t position = 0;
    std::string_view previous = "the start of the payload";
    for (const TensorInfo& tensor : tensors) {
      if (tensor.begin < position)
        report("{} at [{}, {}] overlaps {}, which ends at {}", tensor.name, tensor.begin, tensor.end,
               previous, position);
      if (tensor.begin > position)
        report("a hole of {} bytes at {} between {} and {}", tensor.begin - position, position, previous,
               tensor.name);
      if (tensor.end < position) continue;
      position = tensor.end;
      previous = tensor.name;
    }
    header_.payload_bytes = position;
  }

  std::string_view file_;
  const HeaderLimits& limits_;
  SafetensorsHeader& header_;
  std::vector<std::string>* findings_;
  bool metadata_seen_ = false;
};

}  // namespace

std::string_view dtype_name(DType dtype) {
  for (const DTypeFacts& facts : kDTypes)
    if (facts.dtype == dtype) return facts.name;
  return "?";
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeFacts& facts : kDTypes)
    if (facts.name == name) return facts.dtype;
  return std::nullopt;
}

std::size_t dtype_bytes(DType dtype) {
  for (const DTypeFacts& facts : kDTypes)
    if (facts.dtype == dtype) return facts.bytes;
  return 0;
}

std::optional<std::uint64_t> Shape::elements() const {
  std::uint64_t product = 1;
  for (const std::uint64_t dimension : *this)
    if (__builtin_mul_overflow(product, dimension, &product)) return std::nullopt;
  return product;
}

std::string Shape::text() const {
  std::string out = "[";
  for (std::size_t axis = 0; axis < size(); ++axis)
    out += (axis == 0 ? "" : ", ") + std::to_string(dimensions_[axis]);
  return out + "]";
}

namespace {

SafetensorsHeader parse(std::span<const std::byte> start_of_file, std::uint64_t file_bytes,
                        std::string_view name, const HeaderLimits& limits,
                        std::vector<std::string>* findings) {
  const std::uint64_t at_hand = start_of_file.size();
  if (at_hand < 8)
    throw CheckpointError(
        fmt::format("{}: {} bytes are too few for a safetensors file (truncated download?)", name, at_hand));
  SafetensorsHeader header;
  for (int i = 7; i >= 0; --i)
    header.header_bytes = header.header_bytes << 8 | std::to_integer<std::uint64_t>(start_of_file[i]);
  if (header.header_bytes > limits.header_bytes)
    throw CheckpointError(
        fmt::format("{}: header length of {} bytes is above the limit of {} (not a safetensors file?)", name,
                    header.header_bytes, limits.header_bytes));
  if (header.header_bytes > at_hand - 8)
    throw CheckpointError(fmt::format("{}: header of {} bytes in a file of {} (truncated download?)", name,
                                      header.header_bytes, at_hand));
  const std::string_view json(reinterpret_cast<const char*>(start_of_file.data()) + 8, header.header_bytes);
  HeaderParser parser(name, limits, header, findings);
  parser.parse(json, at_hand - 8);
  parser.check_payload(file_bytes);
  return header;
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> start_of_file, std::uint64_t file_bytes,
                                    std::string_view name, const HeaderLimits& limits) {
  return parse(start_of_file, file_bytes, name, limits, nullptr);
}

SafetensorsHeader parse_safetensors_leniently(std::span<const std::byte> start_of_file,
                                              std::uint64_t file_bytes, std::string_view name,
                                              std::vector<std::string>& findings,
                                              const HeaderLimits& limits) {
  return parse(start_of_file, file_bytes, name, limits, &findings);
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const auto fail = [&](std::string_view what, int error) {
    if (descriptor_ >= 0) ::close(descriptor_);
    throw CheckpointError(
        fmt::format("{}: {}: {}", path.string(), what, std::generic_category().message(error)));
  };
  // O_NONBLOCK: opening a named pipe must not wait for a writer.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail("cannot open", errno);
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("cannot inspect", errno);
  if (!S_ISREG(status.st_mode)) fail("not a regular file", S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (data == MAP_FAILED) fail(fmt::format("cannot map {} bytes", size_), errno);
  data_ = static_cast<const std::byte*>(data);
}

std::size_t MappedFile::readable() const {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (size_ + page - 1) / page * page;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

}  // namespace dsv41
