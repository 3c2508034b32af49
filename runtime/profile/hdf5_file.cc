// The only file that includes hdf5.h: the C API behind hdf5_file.h. Earliest format, no timestamps, no file
// locks.
#include "runtime/profile/hdf5_file.h"

#include <endian.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <utility>

#include "loader/error.h"

namespace dsv41::hdf5 {
namespace {

/// Identifier of an HDF5 object, released with the function of its kind.
class Id {
 public:
  Id() = default;
  Id(hid_t id, herr_t (*release)(hid_t)) : id_(id), release_(release) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)), release_(other.release_) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(release_, other.release_);
    return *this;
  }
  ~Id() { close(); }

  operator hid_t() const { return id_; }
  bool valid() const { return id_ >= 0; }
  void abandon() { id_ = -1; }
  bool close() {
    const hid_t id = std::exchange(id_, -1);
    return id < 0 || release_(id) >= 0;
  }

 private:
  hid_t id_ = -1;
  herr_t (*release_)(hid_t) = nullptr;
};

/// Whether a file was given up that could not be written to its end: closing the library would write to it.
bool abandoned = false;

void prepare_library() {
  static std::once_flag once;
  std::call_once(once, [] {
    H5dont_atexit();
    std::atexit([] {
      if (!abandoned) H5close();
    });
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // errors become exceptions, not prints
  });
}

/// What went wrong, from the innermost record of the library's error stack.
std::string last_error() {
  std::string reason;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned, const H5E_error2_t* record, void* text) -> herr_t {
        auto& first = *static_cast<std::string*>(text);
        if (first.empty() && record->desc) first = record->desc;
        return 0;
      },
      &reason);
  // The file driver puts the system's reason in the middle of a long line.
  constexpr std::string_view mark = "error message = '";
  if (const std::size_t at = reason.find(mark); at != std::string::npos) {
    const std::size_t begin = at + mark.size();
    reason = reason.substr(begin, reason.find('\'', begin) - begin);
  }
  return reason.empty() ? "unknown HDF5 error" : reason;
}

hid_t memory_type(Type type) {
  switch (type) {
    case Type::UInt8:
      return H5T_NATIVE_UINT8;
    case Type::UInt16:
      return H5T_NATIVE_UINT16;
    case Type::Int32:
      return H5T_NATIVE_INT32;
    case Type::UInt32:
      return H5T_NATIVE_UINT32;
    case Type::Int64:
      return H5T_NATIVE_INT64;
    case Type::UInt64:
      return H5T_NATIVE_UINT64;
    case Type::Float32:
      return H5T_NATIVE_FLOAT;
    case Type::Float64:
      return H5T_NATIVE_DOUBLE;
  }
  return -1;
}

Id string_type() {
  Id type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type, H5T_VARIABLE);
  H5Tset_cset(type, H5T_CSET_UTF8);
  return type;
}

/// Access shared by writers and readers: a reader may look at a file while its writer runs.
Id access_without_locks() {
  Id access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_file_locking(access, false, true);
  H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
  return access;
}

}  // namespace

std::size_t type_bytes(Type type) {
  constexpr std::size_t bytes[] = {1, 2, 4, 4, 8, 8, 4, 8};
  return bytes[static_cast<std::size_t>(type)];
}

// ---- Writer
// ---------------------------------------------------------------------------------------------------

struct Writer::Impl {
  struct Dataset {
    Id id;
    hid_t type = -1;             // in memory
    std::vector<hsize_t> shape;  // rows first
  };

  ~Impl() {
    if (failed) {
      // Writing on would leave less than what the last flush left; closing writes.
      for (Dataset& dataset : datasets) dataset.id.abandon();
      file.abandon();
      abandoned = true;
    }
    close();
    if (descriptor >= 0) ::close(descriptor);
  }

  std::string path;
  mutable bool failed = false;
  int descriptor = -1;  // the same file, for the end-of-file address
  Id file;
  std::vector<Dataset> datasets;

  template <class T>
  T check(T result, const char* what) const {
    if (result >= 0) return result;
    failed = true;
    throw ResourceError(fmt::format("{}: cannot {}: {}", path, what, last_error()));
  }
  Id own(hid_t id, herr_t (*release)(hid_t), const char* what) const { return Id(check(id, what), release); }

  Id creation(hid_t kind) const {
    Id properties = own(H5Pcreate(kind), H5Pclose, "create a property list");
    H5Pset_obj_track_times(properties, false);  // equal content, equal bytes
    return properties;
  }

  Table add(const std::string& name, Type type, std::vector<hsize_t> shape, const Id& space,
            const Id& properties) {
    Id id =
        own(H5Dcreate2(file, name.c_str(), memory_type(type), space, H5P_DEFAULT, properties, H5P_DEFAULT),
            H5Dclose, "create a dataset");
    datasets.push_back({std::move(id), memory_type(type), std::move(shape)});
    return datasets.size() - 1;
  }

  // The library writes new structures before the superblock that says how far the file reaches: killed in
  // between, it would leave references beyond the end, and a reader that comes in between would see them. So
  // the end that the superblock names, and the file itself, lie ahead of what is used until the file is
  // closed. The address of the end of file is 8 bytes at 40 of superblock version 0, the only one that the
  // earliest format uses.
  static constexpr off_t kEndOfFileField = 40;
  static constexpr std::uint64_t kAhead = 32 << 20;
  std::uint64_t end_ahead = 0, end_used = 0;

  bool write_end(std::uint64_t end) const {
    const std::uint64_t little_endian = htole64(end);
    return pwrite(descriptor, &little_endian, sizeof little_endian, kEndOfFileField) == sizeof little_endian;
  }
  /// After a flush. Where the file cannot reach ahead (a limit on file sizes) only the protection is missing.
  void move_end_ahead() {
    hsize_t used = 0;
    check(H5Fget_filesize(file, &used), "read the file size");
    end_used = used;
    if (end_ahead < end_used + kAhead / 2) end_ahead = end_used + kAhead;
    if (ftruncate(descriptor, static_cast<off_t>(end_ahead)) == 0) write_end(end_ahead);
  }
  /// After the library has closed the file.
  bool move_end_back() const {
    std::uint64_t end = 0;
    if (end_ahead == 0) return true;
    if (pread(descriptor, &end, sizeof end, kEndOfFileField) != sizeof end) return false;
    end = le64toh(end);
    if (end == end_ahead) end = end_used;  // the library had no reason to write its superblock again
    return write_end(end) && ftruncate(descriptor, static_cast<off_t>(end)) == 0;
  }
  bool close() {
    datasets.clear();
    if (!file.valid()) return true;
    const bool closed = file.close();
    return move_end_back() && closed;
  }

  void write_attribute(const std::string& object, const char* name, hid_t type, const Id& space,
                       const void* data) const {
    if (H5Aexists_by_name(file, object.c_str(), name, H5P_DEFAULT) > 0)
      check(H5Adelete_by_name(file, object.c_str(), name, H5P_DEFAULT), "replace an attribute");
    Id attribute =
        own(H5Acreate_by_name(file, object.c_str(), name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
            H5Aclose, "create an attribute");
    check(H5Awrite(attribute, type, data), "write an attribute");
  }
  Id scalar() const { return own(H5Screate(H5S_SCALAR), H5Sclose, "create a data space"); }
  Id vector(std::size_t count) const {
    const hsize_t extent = count;
    return own(H5Screate_simple(1, &extent, nullptr), H5Sclose, "create a data space");
  }
};

Writer::Writer(const std::filesystem::path& path) : impl_(std::make_unique<Impl>()) {
  prepare_library();
  impl_->path = path.string();
  // The system's own words about a bad path are clearer than the library's.
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    const std::string message = fmt::format("cannot write {}: {}", path.string(), std::strerror(errno));
    if (errno == ENOSPC || errno == EDQUOT || errno == EIO) throw ResourceError(message);
    throw UsageError(message);
  }
  impl_->descriptor = descriptor;

  const Id access = access_without_locks();
  H5Pset_libver_bounds(access, H5F_LIBVER_EARLIEST, H5F_LIBVER_EARLIEST);
  Id creation = impl_->creation(H5P_FILE_CREATE);
  impl_->file = Id(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose);
  if (!impl_->file.valid())
    throw ResourceError(fmt::format("cannot write {}: {}", path.string(), last_error()));
}

Writer::~Writer() = default;
Writer::Writer(Writer&&) noexcept = default;
Writer& Writer::operator=(Writer&&) noexcept = default;

void Writer::create_group(std::string_view name) {
  const Id properties = impl_->creation(H5P_GROUP_CREATE);
  impl_->own(H5Gcreate2(impl_->file, std::string(name).c_str(), H5P_DEFAULT, properties, H5P_DEFAULT),
             H5Gclose, "create a group");
}

Writer::Table Writer::create_table(const std::string& name, const TableOptions& options) {
  std::vector<hsize_t> shape{0}, limit{H5S_UNLIMITED}, chunk{options.chunk_rows};
  for (const std::uint64_t extent : options.row_shape) {
    shape.push_back(extent);
    limit.push_back(extent);
    chunk.push_back(extent);
  }
  const int rank = static_cast<int>(shape.size());
  const Id space =
      impl_->own(H5Screate_simple(rank, shape.data(), limit.data()), H5Sclose, "create a data space");
  const Id properties = impl_->creation(H5P_DATASET_CREATE);
  H5Pset_fill_time(properties, H5D_FILL_TIME_ALLOC);
  impl_->check(H5Pset_chunk(properties, rank, chunk.data()), "choose a chunk shape");
  if (options.compress) {
    impl_->check(H5Pset_shuffle(properties), "add a filter");
    impl_->check(H5Pset_deflate(properties, 1), "add a filter");
  }
  return impl_->add(name, options.type, std::move(shape), space, properties);
}

Writer::Table Writer::create_array(const std::string& name, Type type, std::vector<std::uint64_t> shape) {
  std::vector<hsize_t> extents(shape.begin(), shape.end());
  const Id space = impl_->own(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr),
                              H5Sclose, "create a data space");
  const Id properties = impl_->creation(H5P_DATASET_CREATE);
  H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY);
  H5Pset_fill_time(properties, H5D_FILL_TIME_ALLOC);
  return impl_->add(name, type, std::move(extents), space, properties);
}

void Writer::append(Table table, const void* rows, std::uint64_t count) {
  if (count == 0) return;
  Impl::Dataset& dataset = impl_->datasets.at(table);
  std::vector<hsize_t> start(dataset.shape.size(), 0), extent = dataset.shape;
  start[0] = dataset.shape[0];
  extent[0] = count;
  dataset.shape[0] += count;
  impl_->check(H5Dset_extent(dataset.id, dataset.shape.data()), "extend a dataset");
  const int rank = static_cast<int>(extent.size());
  const Id memory =
      impl_->own(H5Screate_simple(rank, extent.data(), nullptr), H5Sclose, "create a data space");
  const Id space = impl_->own(H5Dget_space(dataset.id), H5Sclose, "read a data space");
  impl_->check(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, extent.data(), nullptr),
               "select rows");
  impl_->check(H5Dwrite(dataset.id, dataset.type, memory, space, H5P_DEFAULT, rows), "write rows");
}

void Writer::overwrite(Table array, const void* elements) {
  const Impl::Dataset& dataset = impl_->datasets.at(array);
  impl_->check(H5Dwrite(dataset.id, dataset.type, H5S_ALL, H5S_ALL, H5P_DEFAULT, elements), "write an array");
}

void Writer::attribute(const std::string& object, const char* name, std::string_view text) {
  const std::string copy(text);
  const char* pointer = copy.c_str();
  impl_->write_attribute(object, name, string_type(), impl_->scalar(), &pointer);
}
void Writer::attribute(const std::string& object, const char* name, std::span<const std::string> texts) {
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  impl_->write_attribute(object, name, string_type(), impl_->vector(texts.size()), pointers.data());
}
void Writer::attribute(const std::string& object, const char* name, std::int64_t value) {
  impl_->write_attribute(object, name, H5T_NATIVE_INT64, impl_->scalar(), &value);
}
void Writer::attribute(const std::string& object, const char* name, double value) {
  impl_->write_attribute(object, name, H5T_NATIVE_DOUBLE, impl_->scalar(), &value);
}
void Writer::attribute(const std::string& object, const char* name, std::span<const std::int64_t> values) {
  impl_->write_attribute(object, name, H5T_NATIVE_INT64, impl_->vector(values.size()), values.data());
}
void Writer::attribute(const std::string& object, const char* name, std::span<const double> values) {
  impl_->write_attribute(object, name, H5T_NATIVE_DOUBLE, impl_->vector(values.size()), values.data());
}

void Writer::flush() {
  impl_->check(H5Fflush(impl_->file, H5F_SCOPE_LOCAL), "flush");
  impl_->move_end_ahead();
}

void Writer::close() {
  if (!impl_->file.valid()) return;
  impl_->check(H5Fflush(impl_->file, H5F_SCOPE_LOCAL), "flush");
  if (!impl_->close()) throw ResourceError(fmt::format("{}: cannot close: {}", impl_->path, last_error()));
}

// ---- Reader
// ---------------------------------------------------------------------------------------------------

struct Reader::Impl {
  std::string path;
  Id file;

  template <class T>
  T check(T result, const std::string& what) const {
    if (result < 0)
      throw UsageError(fmt::format("{}: cannot read {}: {} (damaged file?)", path, what, last_error()));
    return result;
  }
  Id own(hid_t id, herr_t (*release)(hid_t), const std::string& what) const {
    return Id(check(id, what), release);
  }

  Id open_dataset(const std::string& name) const {
    return own(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose, name);
  }

  std::vector<hsize_t> shape(hid_t dataset, const std::string& name) const {
    const Id space = own(H5Dget_space(dataset), H5Sclose, name);
    const int rank = check(H5Sget_simple_extent_ndims(space), name);
    std::vector<hsize_t> extents(static_cast<std::size_t>(rank));
    check(H5Sget_simple_extent_dims(space, extents.data(), nullptr), name);
    return extents;
  }

  /// Bytes of the selected rows after checking that the file can hold them: extents are untrusted.
  std::uint64_t checked_elements(hid_t dataset, const std::vector<hsize_t>& extents,
                                 const std::string& name) const {
    const Id properties = own(H5Dget_create_plist(dataset), H5Pclose, name);
    constexpr std::uint64_t largest = std::uint64_t{1} << 40;
    const auto product = [&](const std::vector<hsize_t>& factors) {
      std::uint64_t elements = 1;
      for (const hsize_t factor : factors) {
        if (factor != 0 && elements > largest / factor)
          throw UsageError(
              fmt::format("{}: {} claims more than {} elements (damaged file?)", path, name, largest));
        elements *= factor;
      }
      return elements;
    };
    const std::uint64_t elements = product(extents);
    std::uint64_t chunk_elements = 0;
    if (H5Pget_layout(properties) == H5D_CHUNKED) {
      std::vector<hsize_t> chunk(extents.size());
      check(H5Pget_chunk(properties, static_cast<int>(chunk.size()), chunk.data()), name);
      chunk_elements = product(chunk);
    }
    // Deflate reaches at most 1032:1.
    const std::uint64_t stored = H5Dget_storage_size(dataset);
    if (stored > largest || elements > 1100 * stored || chunk_elements > (std::uint64_t{1} << 28))
      throw UsageError(fmt::format("{}: {} claims {} elements but stores {} bytes (damaged file?)", path,
                                   name, elements, stored));
    return elements;
  }

  template <class T>
  std::vector<T> read(const std::string& name, std::uint64_t rows, hid_t type) const {
    const Id dataset = open_dataset(name);
    std::vector<hsize_t> extents = shape(dataset, name);
    const Id stored_type = own(H5Dget_type(dataset), H5Tclose, name);
    const H5T_class_t kind = H5Tget_class(stored_type);
    if (extents.empty() || rows > extents[0] || (kind != H5T_INTEGER && kind != H5T_FLOAT))
      throw UsageError(fmt::format("{}: {} is not a table of numbers with {} rows", path, name, rows));
    extents[0] = rows;
    if (rows == 0) return {};
    std::vector<T> values(checked_elements(dataset, extents, name));
    if (values.empty()) return values;
    const std::vector<hsize_t> start(extents.size(), 0);
    const Id memory =
        own(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose, name);
    const Id space = own(H5Dget_space(dataset), H5Sclose, name);
    check(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, extents.data(), nullptr), name);
    check(H5Dread(dataset, type, memory, space, H5P_DEFAULT, values.data()), name);
    return values;
  }

  struct Attribute {
    Id id, space;
    std::size_t count = 0;
  };
  Attribute attribute(const std::string& object, const char* name, bool text) const {
    const std::string label = fmt::format("attribute {} of {}", name, object);
    Attribute result;
    result.id = own(H5Aopen_by_name(file, object.c_str(), name, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, label);
    result.space = own(H5Aget_space(result.id), H5Sclose, label);
    const Id type = own(H5Aget_type(result.id), H5Tclose, label);
    const H5T_class_t kind = H5Tget_class(type);
    const bool is_text = kind == H5T_STRING && H5Tis_variable_str(type) > 0;
    const hssize_t points = check(H5Sget_simple_extent_npoints(result.space), label);
    if (text ? !is_text : (kind != H5T_INTEGER && kind != H5T_FLOAT))
      throw UsageError(fmt::format("{}: {} is not {}", path, label, text ? "text" : "a number"));
    if (points > 1 << 20)
      throw UsageError(fmt::format("{}: {} claims {} values (damaged file?)", path, label, points));
    result.count = static_cast<std::size_t>(points);
    return result;
  }
  template <class T>
  std::vector<T> numbers(const std::string& object, const char* name, hid_t type) const {
    const Attribute found = attribute(object, name, false);
    std::vector<T> values(found.count);
    if (!values.empty())
      check(H5Aread(found.id, type, values.data()), fmt::format("attribute {} of {}", name, object));
    return values;
  }
  template <class T>
  T single(const std::vector<T>& values, const std::string& object, const char* name) const {
    if (values.size() != 1)
      throw UsageError(
          fmt::format("{}: attribute {} of {} has {} values, not one", path, name, object, values.size()));
    return values.front();
  }
};

Reader::Reader(const std::filesystem::path& path) : impl_(std::make_unique<Impl>()) {
  prepare_library();
  impl_->path = path.string();
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0)
    throw UsageError(fmt::format("cannot open {}: {}", path.string(), std::strerror(errno)));
  ::close(descriptor);
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored))
    throw UsageError(fmt::format("{} is not a file", path.string()));

  const Id access = access_without_locks();
  if (H5Fis_hdf5(path.c_str()) <= 0)
    throw UsageError(
        fmt::format("{} is not an HDF5 file ({} bytes)", path.string(), std::filesystem::file_size(path)));
  impl_->file = Id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), H5Fclose);
  if (!impl_->file.valid())
    throw UsageError(
        fmt::format("cannot open {}: {} (truncated or damaged HDF5 file)", path.string(), last_error()));
}

Reader::~Reader() = default;
Reader::Reader(Reader&&) noexcept = default;

bool Reader::has(const std::string& object) const {
  // H5Lexists wants every group on the way to exist.
  for (std::size_t slash = object.find('/', 1);; slash = object.find('/', slash + 1)) {
    if (H5Lexists(impl_->file, object.substr(0, slash).c_str(), H5P_DEFAULT) <= 0) return false;
    if (slash == std::string::npos) return H5Oexists_by_name(impl_->file, object.c_str(), H5P_DEFAULT) > 0;
  }
}

bool Reader::has_attribute(const std::string& object, const char* name) const {
  return has(object) && H5Aexists_by_name(impl_->file, object.c_str(), name, H5P_DEFAULT) > 0;
}

std::vector<std::uint64_t> Reader::shape(const std::string& dataset) const {
  const auto extents = impl_->shape(impl_->open_dataset(dataset), dataset);
  return {extents.begin(), extents.end()};
}

std::vector<std::int64_t> Reader::read_int64(const std::string& dataset, std::uint64_t rows) const {
  return impl_->read<std::int64_t>(dataset, rows, H5T_NATIVE_INT64);
}
std::vector<float> Reader::read_float(const std::string& dataset, std::uint64_t rows) const {
  return impl_->read<float>(dataset, rows, H5T_NATIVE_FLOAT);
}

std::vector<std::string> Reader::texts(const std::string& object, const char* name) const {
  const Impl::Attribute found = impl_->attribute(object, name, true);
  std::vector<char*> pointers(found.count, nullptr);
  std::vector<std::string> texts;
  if (pointers.empty()) return texts;
  const Id type = string_type();
  impl_->check(H5Aread(found.id, type, pointers.data()), fmt::format("attribute {} of {}", name, object));
  for (const char* pointer : pointers) texts.emplace_back(pointer ? pointer : "");
  H5Dvlen_reclaim(type, found.space, H5P_DEFAULT, pointers.data());
  return texts;
}
std::vector<std::int64_t> Reader::int64s(const std::string& object, const char* name) const {
  return impl_->numbers<std::int64_t>(object, name, H5T_NATIVE_INT64);
}
std::vector<double> Reader::doubles(const std::string& object, const char* name) const {
  return impl_->numbers<double>(object, name, H5T_NATIVE_DOUBLE);
}
std::string Reader::text(const std::string& object, const char* name) const {
  return impl_->single(texts(object, name), object, name);
}
std::int64_t Reader::int64(const std::string& object, const char* name) const {
  return impl_->single(int64s(object, name), object, name);
}
double Reader::real(const std::string& object, const char* name) const {
  return impl_->single(doubles(object, name), object, name);
}

}  // namespace dsv41::hdf5
