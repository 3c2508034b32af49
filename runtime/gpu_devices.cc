// Rank to GPU mapping (gpu_devices.h).
#include "runtime/gpu_devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "kernels/cuda/emulated_device.h"
#include "loader/error.h"

namespace dsv41 {
namespace {

std::optional<std::uint32_t> number_of(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  const std::string_view view = text;
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  // SLURM_NTASKS_PER_NODE and the like may say "4(x2)"; the leading number is what is meant here.
  if (error != std::errc() || end == view.data()) return std::nullopt;
  return value;
}

}  // namespace

GpuRequest parse_gpu_request(std::string_view text, bool share) {
  GpuRequest request{text == "emulated", {}, share};
  if (text == "auto" || text == "emulated") return request;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    int value = -1;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (part.empty() || error != std::errc() || end != part.data() + part.size() || value < 0)
      throw UsageError(fmt::format("--devices {}: expected auto or device numbers such as 0,1,2", text));
    request.devices.push_back(value);
    if (comma == std::string_view::npos) return request;
    rest.remove_prefix(comma + 1);
  }
}

LocalPlace local_place(const Communicator& communicator) {
  LocalPlace place{0, 0};
  const std::string mine = communicator.host();
  for (int rank = 1; rank < communicator.size(); ++rank) {
    if (communicator.host_of(rank) != mine) continue;
    if (rank < communicator.rank()) ++place.index;
    ++place.count;
  }
  return place;
}

std::optional<LocalPlace> local_place_of_environment() {
  struct Names {
    const char *index, *count;
  };
  for (const Names names :
       {Names{"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
        Names{"SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"}, Names{"MPI_LOCALRANKID", "MPI_LOCALNRANKS"}}) {
    const auto index = number_of(names.index);
    if (!index) continue;
    return LocalPlace{*index, std::max(number_of(names.count).value_or(0), *index + 1)};
  }
  return std::nullopt;
}

cuda::DeviceDescription choose_device(const cuda::Discovery& found, LocalPlace place,
                                      const GpuRequest& request) {
  if (found.devices.empty()) throw ResourceError(found.why_none);
  std::vector<cuda::DeviceDescription> candidates;
  for (const int index : request.devices) {
    const auto at =
        std::find_if(found.devices.begin(), found.devices.end(),
                     [&](const cuda::DeviceDescription& device) { return device.index == index; });
    if (at == found.devices.end())
      throw UsageError(
          fmt::format("--devices names GPU {}, this process sees {} ({})", index, found.devices.size(),
                      std::getenv("CUDA_VISIBLE_DEVICES") != nullptr ? "CUDA_VISIBLE_DEVICES is set"
                                                                     : "all that the driver shows"));
    candidates.push_back(*at);
  }
  if (candidates.empty()) candidates = found.devices;
  // One visible device may be another one for every rank; whether ranks share it shows in the start
  // agreement.
  if (place.index >= candidates.size() && candidates.size() > 1 && !request.share)
    throw UsageError(
        fmt::format("{} expert ranks on this machine and {} GPUs: start fewer ranks, or let them share with "
                    "--share-gpu",
                    place.count, candidates.size()));
  const cuda::DeviceDescription& device = candidates[place.index % candidates.size()];
  if (device.major < cuda::kOldestMajor ||
      (device.major == cuda::kOldestMajor && device.minor < cuda::kOldestMinor))
    throw ResourceError(fmt::format(
        "GPU {} ({}) has compute capability {}.{}, the kernels need {}.{} or later: choose "
        "another with --devices",
        device.index, device.name, device.major, device.minor, cuda::kOldestMajor, cuda::kOldestMinor));
  return device;
}

RankDevice open_rank_device(const Communicator& communicator, const GpuRequest& request) {
  if (request.emulated) return {cuda::emulated_device(), {}};
  const cuda::DeviceDescription chosen =
      choose_device(cuda::discover_devices(), local_place(communicator), request);
  try {
    return {cuda::open_device(chosen.index), chosen.bus_id};
  } catch (const cuda::DeviceError& error) {
    throw ResourceError(error.what());
  }
}

}  // namespace dsv41
