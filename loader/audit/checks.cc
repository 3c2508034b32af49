// Claims and their conclusions (checks.h).
#include "loader/audit/checks.h"

#include <algorithm>

namespace dsv41::audit {
namespace {

/// "47/48, 48/48", or "27 shards (21-42, 44-48 of 48)" when there are many.
std::string waiting_text(const std::vector<Shard>& shards, const std::set<std::uint32_t>& waiting) {
  constexpr std::size_t kListed = 4;
  std::vector<std::string> labels;
  for (const std::uint32_t shard : waiting) labels.push_back(shards[shard].label);
  if (labels.size() <= kListed) return fmt::format("{}", fmt::join(labels, ", "));
  const auto slash = labels.front().find('/');
  if (slash == std::string::npos) return fmt::format("{} shards: {}", labels.size(), fmt::join(labels, ", "));
  std::vector<std::string> ranges;
  // Shards are in name order, so positions that follow each other are numbers that follow each other.
  for (auto first = waiting.begin(); first != waiting.end();) {
    auto last = first, next = std::next(first);
    while (next != waiting.end() && *next == *last + 1) last = next++;
    const auto number = [&](std::uint32_t shard) {
      return shards[shard].label.substr(0, shards[shard].label.find('/'));
    };
    ranges.push_back(first == last ? number(*first) : fmt::format("{}-{}", number(*first), number(*last)));
    first = next;
  }
  return fmt::format("{} shards ({} of {})", labels.size(), fmt::join(ranges, ", "),
                     labels.front().substr(slash + 1));
}

}  // namespace

std::string_view outcome_name(Outcome outcome) {
  switch (outcome) {
    case Outcome::Pass:
      return "pass";
    case Outcome::Fail:
      return "fail";
    case Outcome::Undecided:
      return "undecided";
  }
  return "undecided";
}

const TensorInfo* Claim::read(const ExpectedState& tensor, IfAbsent if_absent) {
  if (tensor.header != nullptr) return tensor.header;
  if (evidence_.pending(tensor))
    wait_for(tensor.home);
  else if (tensor.indexed)
    contradict("{}: promised by the index, absent from the header of {}", tensor.expected->name,
               evidence_.shards()[tensor.home].file);
  else if (if_absent == IfAbsent::Contradicts)
    contradict("{} is missing", tensor.expected->name);
  return nullptr;
}

bool Claim::require(const ExpectedState& tensor) {
  switch (evidence_.presence(tensor)) {
    case Presence::Present:
      return true;
    case Presence::Absent:
      contradict("{} is missing", tensor.expected->name);
      return false;
    case Presence::Unknown:
      wait_for(tensor.home);
      return false;
  }
  return false;
}

Check Claim::conclude(std::string observed) const {
  Check check{name_, Outcome::Pass, std::move(observed)};
  std::string more;
  if (contradicted_ > 0) {
    check.outcome = Outcome::Fail;
    more = fmt::format("{}", fmt::join(contradictions_, "; "));
    if (contradicted_ > contradictions_.size())
      more += fmt::format("; and {} more", contradicted_ - contradictions_.size());
  } else if (!waiting_.empty()) {
    check.outcome = Outcome::Undecided;
    more = "waiting on " + waiting_text(evidence_.shards(), waiting_);
  }
  if (!more.empty()) check.detail = check.detail.empty() ? more : fmt::format("{} ({})", more, check.detail);
  return check;
}

Check Claim::does_not_apply(std::string_view why) const {
  return {name_, Outcome::Pass, fmt::format("does not apply: {}", why)};
}

std::string list_text(const std::vector<std::uint64_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}
std::string list_text(const std::vector<std::uint32_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

std::string grouped(std::uint64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

std::string binary_size(std::uint64_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / (1 << 20);
  if (mebibytes < 1) return fmt::format("{} B", bytes);
  if (mebibytes < 1024) return fmt::format("{:.2f} MiB", mebibytes);
  return fmt::format("{:.2f} GiB", mebibytes / 1024);
}

}  // namespace dsv41::audit
