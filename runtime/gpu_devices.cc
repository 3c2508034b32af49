// Rank to device mapping (gpu_devices.h).
#include "runtime/gpu_devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "loader/error.h"
#include "runtime/gpu_transport.h"

namespace dsv41 {
namespace {

using Kind = DeviceEntry::Kind;

template <class Number>
bool parse_number(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

/// "emulated", or "emulated:memory=1048576:fail=3:mpi=cuda".
bool parse_emulated(std::string_view text, DeviceEntry& entry) {
  cuda::EmulatedOptions& options = entry.emulated;
  constexpr std::string_view kName = "emulated";
  if (!text.starts_with(kName)) return false;
  for (text.remove_prefix(kName.size()); !text.empty();) {
    if (text.front() != ':') return false;
    text.remove_prefix(1);
    const std::string_view setting = text.substr(0, text.find(':'));
    text.remove_prefix(setting.size());
    if (setting == "mpi=cuda") {
      entry.mpi_takes_memory = true;
      continue;
    }
    const std::size_t equals = setting.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view name = setting.substr(0, equals);
    std::uint64_t value = 0;
    if (!parse_number(setting.substr(equals + 1), value) || value == 0) return false;
    if (name == "memory")
      options.memory_bytes = value;
    else if (name == "fail")
      options.fail_launch = value;
    else if (name == "hang")
      options.hang_launch = value;
    else if (name == "hang_copy")
      options.hang_copy = value;
    else
      return false;
  }
  return true;
}

bool parse_entry(std::string_view text, DeviceEntry& entry) {
  if (text == "cpu" || text == "none") {
    entry.kind = Kind::Cpu;
  } else if (parse_emulated(text, entry)) {
    entry.kind = Kind::Emulated;
  } else {
    entry.kind = Kind::Gpu;
    return parse_number(text, entry.index) && entry.index >= 0;
  }
  return true;
}

void refuse_old(const cuda::DeviceDescription& device) {
  if (device.major > cuda::kOldestMajor ||
      (device.major == cuda::kOldestMajor && device.minor >= cuda::kOldestMinor))
    return;
  throw ResourceError(fmt::format(
      "GPU {} ({}) has compute capability {}.{}, the kernels need {}.{} or later: choose others with "
      "--devices, or the CPU with --devices none",
      device.index, device.name, device.major, device.minor, cuda::kOldestMajor, cuda::kOldestMinor));
}

const cuda::DeviceDescription& find_device(const cuda::Discovery& found, int index) {
  if (found.devices.empty())
    throw ResourceError(
        fmt::format("--devices names GPU {}: {}; --devices none computes on the CPU", index, found.why_none));
  const auto at = std::find_if(found.devices.begin(), found.devices.end(),
                               [&](const cuda::DeviceDescription& device) { return device.index == index; });
  if (at == found.devices.end())
    throw UsageError(
        fmt::format("--devices names GPU {}, this process sees {} ({})", index, found.devices.size(),
                    std::getenv("CUDA_VISIBLE_DEVICES") != nullptr ? "CUDA_VISIBLE_DEVICES is set"
                                                                   : "all that the driver shows"));
  return *at;
}

}  // namespace

GpuRequest parse_gpu_request(std::string_view text, bool share) {
  GpuRequest request{{}, share};
  if (text == "auto") return request;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    if (!parse_entry(rest.substr(0, comma), request.entries.emplace_back()))
      throw UsageError(fmt::format(
          "--devices takes auto, none, or device numbers and cpu such as 0,2,cpu, not '{}'", text));
    if (comma == std::string_view::npos) return request;
    rest.remove_prefix(comma + 1);
  }
}

LocalPlace local_place(const Communicator& communicator) {
  if (communicator.size() == 1) return {0, 1};
  LocalPlace place{0, 0};
  const std::string mine = communicator.host();
  for (int rank = 1; rank < communicator.size(); ++rank) {
    if (communicator.host_of(rank) != mine) continue;
    if (rank < communicator.rank()) ++place.index;
    ++place.count;
  }
  return place;
}

DeviceChoice choose_device(const cuda::Discovery& found, LocalPlace place, const GpuRequest& request) {
  DeviceChoice choice;
  std::vector<DeviceEntry> entries = request.entries;
  if (entries.empty()) {
    if (found.devices.empty()) {
      choice.why_cpu = found.why_none;
      return choice;
    }
    for (const cuda::DeviceDescription& device : found.devices)
      entries.push_back({Kind::Gpu, device.index, {}, false});
  }
  // A single device may be another one for every rank; whether ranks share it shows in the start agreement.
  if (place.count > entries.size() && entries.size() > 1 && !request.share)
    throw UsageError(
        fmt::format("{} expert ranks on this machine and {} {}: start fewer ranks, let them share with "
                    "--share-gpu, or name what each computes on with --devices",
                    place.count, entries.size(), request.entries.empty() ? "GPUs" : "entries of --devices"));
  const auto entry_of = [&](std::uint32_t index) -> const DeviceEntry& {
    return entries[index % entries.size()];
  };
  const DeviceEntry& mine = entry_of(place.index);
  choice.kind = mine.kind;
  choice.emulated = mine.emulated;
  choice.mpi_takes_memory = mine.mpi_takes_memory;
  if (mine.kind != Kind::Gpu) return choice;
  choice.gpu = find_device(found, mine.index);
  refuse_old(choice.gpu);
  if (entries.size() == 1 && !request.share) return choice;
  choice.sharers = 0;
  for (std::uint32_t index = 0; index < place.count; ++index)
    choice.sharers += entry_of(index).kind == Kind::Gpu && entry_of(index).index == mine.index;
  return choice;
}

RankDevice open_rank_device(const Communicator& communicator, const GpuRequest& request) {
  const bool asks_driver = request.entries.empty() ||
                           std::any_of(request.entries.begin(), request.entries.end(),
                                       [](const DeviceEntry& entry) { return entry.kind == Kind::Gpu; });
  const cuda::Discovery found = asks_driver ? cuda::discover_devices() : cuda::Discovery{};
  DeviceChoice choice = choose_device(found, local_place(communicator), request);
  RankDevice taken;
  switch (choice.kind) {
    case Kind::Cpu:
      taken.why_cpu = choice.why_cpu;
      return taken;
    case Kind::Emulated:
      taken.mpi_takes_memory = choice.mpi_takes_memory;
      choice.emulated.guarded = !taken.mpi_takes_memory;
      taken.device = cuda::emulated_device(choice.emulated);
      taken.number = kEmulatedDevice;
      return taken;
    case Kind::Gpu:
      break;
  }
  try {
    taken.device = cuda::open_device(choice.gpu.index);
  } catch (const cuda::DeviceError& error) {
    throw ResourceError(error.what());
  }
  taken.gpu = choice.gpu.bus_id;
  taken.number = std::to_string(choice.gpu.index);
  taken.sharers = choice.sharers;
  return taken;
}

}  // namespace dsv41
