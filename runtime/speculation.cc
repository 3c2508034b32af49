#include "runtime/speculation.h"

#include <algorithm>
#include <cmath>

namespace dsv41 {
namespace {

constexpr double kFade = 0.97;        // of older measurements, per step
constexpr std::uint32_t kTrial = 16;  // steps that a resumed trial lasts at least
constexpr std::uint32_t kLongestPause = 512;
/// Before two different row counts were seen: what a further row is assumed to cost, as a share of a one-row
/// step.
constexpr double kAssumedRowShare = 0.05;

}  // namespace

Speculation::Speculation(const SpeculationOptions& options, std::size_t block_size) : options_(options) {
  counts_.drafted_at.resize(block_size);
  counts_.accepted_at.resize(block_size);
}

bool Speculation::wanted() {
  if (options_.mode == SpeculationOptions::Mode::Off) return false;
  if (options_.mode == SpeculationOptions::Mode::Fixed) return options_.length > 0;
  if (pause_ > 0) {
    --pause_;
    return false;
  }
  if (++trial_ >= kTrial && !pays()) {
    pause_ = next_pause_;
    next_pause_ = std::min(next_pause_ * 2, kLongestPause);
    trial_ = 0;
    return false;
  }
  return true;
}

std::size_t Speculation::length(std::span<const float> confidence, std::size_t most) const {
  most = std::min(most, confidence.size());
  if (options_.mode == SpeculationOptions::Mode::Fixed) return std::min(most, options_.length);
  // A further row pays while the chance that it counts is worth more time than it costs.
  const double token_seconds =
      (step_seconds(sequences_ * (1 + drafted_)) + draft_time_) / std::max(1.0, sequences_ * (1 + accepted_));
  double chance = 1;
  std::size_t length = 0;
  while (length < most) {
    chance /= 1 + std::exp(-static_cast<double>(confidence[length]));
    if (chance * token_seconds < row_seconds()) break;
    ++length;
  }
  return length;
}

void Speculation::step_took(std::size_t rows, std::size_t sequences, double seconds) {
  if (rows > sequences) counts_.verify_seconds += seconds;
  const auto r = static_cast<double>(rows);
  weight_ = weight_ * kFade + 1;
  rows_ = rows_ * kFade + r;
  rows2_ = rows2_ * kFade + r * r;
  time_ = time_ * kFade + seconds;
  rows_time_ = rows_time_ * kFade + r * seconds;
  sequences_ += (static_cast<double>(sequences) - sequences_) * (1 - kFade);
}

void Speculation::draft_took(double seconds) {
  counts_.draft_seconds += seconds;
  draft_time_ += (seconds - draft_time_) * (1 - kFade);
}

void Speculation::verified(std::size_t drafted, std::size_t accepted) {
  for (std::size_t i = 0; i < drafted; ++i) {
    ++counts_.drafted_at[i];
    counts_.accepted_at[i] += i < accepted;
  }
  counts_.drafted += drafted;
  counts_.accepted += accepted;
  drafted_ += (static_cast<double>(drafted) - drafted_) * (1 - kFade);
  accepted_ += (static_cast<double>(accepted) - accepted_) * (1 - kFade);
}

double Speculation::row_seconds() const {
  const double spread = weight_ * rows2_ - rows_ * rows_;
  const double mean = weight_ > 0 ? time_ / weight_ : 0;
  if (spread < 1e-3 * weight_ * weight_) return kAssumedRowShare * mean;
  return std::max(0.0, (weight_ * rows_time_ - rows_ * time_) / spread);
}

double Speculation::step_seconds(double rows) const {
  if (weight_ == 0) return 0;
  return std::max(0.0, time_ / weight_ + (rows - rows_ / weight_) * row_seconds());
}

bool Speculation::pays() const {
  const double with = step_seconds(sequences_ * (1 + drafted_)) + draft_time_;
  const double without = step_seconds(sequences_);
  return (1 + accepted_) * without >= with;
}

}  // namespace dsv41
