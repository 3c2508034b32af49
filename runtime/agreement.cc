// Collects what every rank opened and judges it once, on rank 0 (agreement.h; docs/runtime.md, "Roles",
// "Behaviour").
#include "runtime/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/exchange/messages.h"

namespace dsv41 {
namespace {

constexpr std::size_t kVerdictText = 4096;
struct VerdictBytes {
  std::uint32_t code = 0;
  std::uint32_t text_bytes = 0;
  std::array<char, kVerdictText> text{};
};

std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char letter) { return letter < 0x20 || letter == 0x7F; }, ' ');
  return text.substr(0, kVerdictText);
}

std::string to_text(const StartReport& report) {
  nlohmann::ordered_json json;
  json["code"] = static_cast<int>(report.code);
  json["message"] = report.message.substr(0, kVerdictText);
  json["protocol"] = report.protocol;
  json["program"] = report.program_version;
  json["config"] = report.config_fingerprint;
  json["placement"] = report.placement_fingerprint;
  json["max_rows"] = report.max_rows;
  json["experts"] = report.held.experts;
  json["bytes"] = report.held.bytes;
  json["host"] = report.host;
  json["device"] = report.device;
  json["gpu"] = report.gpu;
  json["share_gpu"] = report.share_gpu ? 1u : 0u;
  json["expert_memory"] = report.expert_memory;
  json["engram_memory"] = report.engram_memory;
  json["available_memory"] = report.available_memory;
  json["resident_experts"] = report.resident_experts;
  json["note"] = report.note.substr(0, kVerdictText);
  json["transport"] = report.transport.substr(0, kVerdictText);
  json["residency"] = report.residency.substr(0, kVerdictText);
  json["needs_device"] = report.needs_device ? 1u : 0u;
  json["has_device"] = report.has_device ? 1u : 0u;
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Another program version may send another set of fields: what is missing stays empty and shows up as a
/// difference.
StartReport from_text(const std::string& text, const std::string& sender) {
  StartReport report;
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object())
    throw PeerError(
        fmt::format("malformed start report from {}: {} bytes that are not JSON", sender, text.size()));
  const auto number = [&](const char* key) {
    const auto at = json.find(key);
    return at != json.end() && at->is_number_unsigned() ? at->template get<std::uint64_t>() : 0;
  };
  const auto string = [&](const char* key) {
    const auto at = json.find(key);
    return at != json.end() && at->is_string() ? at->template get<std::string>() : std::string();
  };
  const std::uint64_t code = number("code");
  report.code =
      code <= static_cast<std::uint64_t>(ExitCode::Peer) ? static_cast<ExitCode>(code) : ExitCode::Peer;
  report.message = string("message");
  report.protocol = static_cast<std::uint32_t>(number("protocol"));
  report.program_version = string("program");
  report.config_fingerprint = number("config");
  report.placement_fingerprint = number("placement");
  report.max_rows = static_cast<std::uint32_t>(number("max_rows"));
  report.held = {number("experts"), number("bytes")};
  report.host = string("host");
  report.device = string("device");
  report.gpu = string("gpu");
  report.share_gpu = number("share_gpu") != 0;
  report.expert_memory = number("expert_memory");
  report.engram_memory = number("engram_memory");
  report.available_memory = number("available_memory");
  report.resident_experts = number("resident_experts");
  report.note = one_line(string("note"));
  report.transport = string("transport");
  report.residency = string("residency");
  report.needs_device = number("needs_device") != 0;
  report.has_device = number("has_device") != 0;
  return report;
}

double gib(std::uint64_t bytes) {
  return static_cast<double>(bytes) / (std::uint64_t{1} << 30);
}

/// The first machine whose ranks want more than it has, in one line; empty: none.
std::string memory_shortage(const std::vector<StartReport>& all) {
  for (std::size_t first = 0; first < all.size(); ++first) {
    const std::string& host = all[first].host;
    std::uint64_t wanted = 0, available = 0;
    std::string parts;
    bool seen = false;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const StartReport& report = all[rank];
      if (report.host != host) continue;
      seen = seen || rank < first;
      const auto add = [&](std::uint64_t bytes, std::string_view what, std::string_view option) {
        if (bytes == 0) return;
        wanted += bytes;
        parts += fmt::format("{}rank {} {:.2f} GiB for {} ({})", parts.empty() ? "" : ", ", rank, gib(bytes),
                             what, option);
      };
      add(report.engram_memory, "engram rows", "--engram");
      add(report.expert_memory, "experts", "--expert-memory");
      // Of several numbers the smallest: they were read at different moments, or under different limits.
      if (report.available_memory > 0 && (available == 0 || report.available_memory < available))
        available = report.available_memory;
    }
    if (!seen && available > 0 && wanted > available)
      return fmt::format(
          "{}: {:.2f} GiB of memory are asked for, {:.2f} GiB are available: {}; ask for less, or let "
          "--engram "
          "mmap and experts without --expert-memory be read through the page cache",
          host, gib(wanted), gib(available), parts);
  }
  return {};
}

/// The first GPU that several ranks have taken though not all of them may share it, in one line; empty: none.
/// Only here it shows: a launcher may show every process one GPU, the same one or another.
std::string gpu_conflict(const std::vector<StartReport>& all) {
  for (const StartReport& report : all) {
    if (report.gpu.empty()) continue;
    std::vector<std::size_t> takers;
    std::set<std::string> gpus;  // of this machine
    std::size_t ranks = 0;       // that have taken them
    bool shared = true;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const StartReport& other = all[rank];
      if (other.host != report.host || other.gpu.empty()) continue;
      ++ranks;
      gpus.insert(other.gpu);
      if (other.gpu != report.gpu) continue;
      takers.push_back(rank);
      shared = shared && other.share_gpu;
    }
    if (takers.size() < 2 || shared) continue;
    return fmt::format(
        "{} ranks on {} compute on {} GPU{}: ranks {} have taken the same one ({}); start fewer ranks there, "
        "let them share it with --share-gpu, or name what each computes on with --devices",
        ranks, report.host, gpus.size(), gpus.size() == 1 ? "" : "s", fmt::join(takers, ", "), report.gpu);
  }
  return {};
}

}  // namespace

HeldExperts held_experts(ExpertSource& source, const Placement& placement, std::uint32_t owner) {
  HeldExperts held;
  const auto& geometry = source.geometry();
  for (std::uint32_t block = 0; block < geometry.experts_per_block.size(); ++block) {
    for (std::uint32_t expert = 0; expert < geometry.experts_per_block[block]; ++expert) {
      if (placement.owner(block, expert) != owner) continue;
      source.expert(block, expert);
      ++held.experts;
      held.bytes += geometry.expert_bytes();
    }
  }
  return held;
}

StartReport start_report(const Communicator& communicator, std::string program_version) {
  StartReport report;
  report.protocol = wire::kProtocol;
  report.program_version = std::move(program_version);
  report.host = communicator.host();
  return report;
}

StartVerdict judge(std::vector<StartReport> reports) {
  StartVerdict verdict;
  verdict.reports = std::move(reports);
  const auto& all = verdict.reports;
  const auto name = [&](std::size_t rank) { return fmt::format("rank {} ({})", rank, all[rank].host); };
  const auto refuse = [&](ExitCode code, const std::string& message) {
    verdict.code = code;
    verdict.message = one_line(message);
  };

  const auto failed =
      std::find_if(all.begin(), all.end(), [](const auto& report) { return report.code != ExitCode::Ok; });
  if (failed != all.end()) {
    // What the host rank sees, everybody sees as a rule: then no rank is to blame.
    if (failed == all.begin()) {
      refuse(failed->code, failed->message);
    } else {
      refuse(failed->code,
             fmt::format("{}: {}", name(static_cast<std::size_t>(failed - all.begin())), failed->message));
    }
    return verdict;
  }
  const StartReport& host = all.front();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const StartReport& other = all[rank];
    const auto differ = [&](ExitCode code, const char* what, const auto& theirs, const auto& ours,
                            const char* advice) {
      refuse(code, fmt::format("{} has {} {}, rank 0 ({}) has {}: {}", name(rank), what, theirs, host.host,
                               ours, advice));
    };
    if (other.protocol != host.protocol || other.program_version != host.program_version) {
      differ(ExitCode::Usage, "program version",
             fmt::format("{} (protocol {})", other.program_version, other.protocol),
             fmt::format("{} (protocol {})", host.program_version, host.protocol),
             "install the same build on every host");
    } else if (other.config_fingerprint != host.config_fingerprint) {
      differ(ExitCode::Checkpoint, "a checkpoint with fingerprint",
             fmt::format("{:016x}", other.config_fingerprint),
             fmt::format("{:016x}", host.config_fingerprint), "give every host the same --model directory");
    } else if (other.placement_fingerprint != host.placement_fingerprint) {
      differ(ExitCode::Usage, "a placement with fingerprint",
             fmt::format("{:016x}", other.placement_fingerprint),
             fmt::format("{:016x}", host.placement_fingerprint), "give every host the same --placement file");
    } else if (other.max_rows != host.max_rows) {
      differ(ExitCode::Usage, "rows per step", other.max_rows, host.max_rows,
             "start every rank with the same options");
    } else {
      continue;
    }
    break;
  }
  if (verdict.code != ExitCode::Ok) return verdict;
  if (const std::string shortage = memory_shortage(all); !shortage.empty()) {
    refuse(ExitCode::Resources, shortage);
    return verdict;
  }
  if (host.needs_device &&
      std::none_of(all.begin(), all.end(), [](const auto& report) { return report.has_device; })) {
    refuse(ExitCode::Resources,
           "--transport cuda-aware: no rank computes on a GPU (see --devices); use --transport auto");
    return verdict;
  }
  if (const std::string conflict = gpu_conflict(all); !conflict.empty()) refuse(ExitCode::Usage, conflict);
  return verdict;
}

StartVerdict agree(Communicator& communicator, const StartReport& mine) {
  const std::vector<std::string> texts = communicator.gather(to_text(mine), 0);
  StartVerdict verdict;
  VerdictBytes bytes;
  if (communicator.rank() == 0) {
    try {
      std::vector<StartReport> reports;
      for (std::size_t rank = 0; rank < texts.size(); ++rank)
        reports.push_back(from_text(
            texts[rank], fmt::format("rank {} ({})", rank, communicator.host_of(static_cast<int>(rank)))));
      verdict = judge(std::move(reports));
    } catch (const PeerError& error) {
      verdict.code = error.code();
      verdict.message = one_line(error.what());
    }
    bytes.code = static_cast<std::uint32_t>(verdict.code);
    bytes.text_bytes = static_cast<std::uint32_t>(verdict.message.size());
    std::memcpy(bytes.text.data(), verdict.message.data(), verdict.message.size());
  }
  communicator.broadcast(std::as_writable_bytes(std::span(&bytes, 1)), 0);
  if (bytes.code > static_cast<std::uint32_t>(ExitCode::Peer) || bytes.text_bytes > kVerdictText)
    throw PeerError("malformed start verdict from rank 0");
  verdict.code = static_cast<ExitCode>(bytes.code);
  verdict.message.assign(bytes.text.data(), bytes.text_bytes);
  return verdict;
}

}  // namespace dsv41
