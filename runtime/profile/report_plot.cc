// The picture of a profile (reports.h): one SVG without scripts, fonts or references; colours follow the
// reader's choice of light or dark.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "runtime/profile/reports.h"
#include "runtime/profile/statistics.h"

namespace dsv41 {
namespace {

constexpr double kWidth = 1200, kLeft = 70, kRight = 20, kChartHeight = 240, kLowChartHeight = 110;
constexpr double kInner = kWidth - kLeft - kRight;
constexpr std::size_t kMostBars = 180, kLevels = 8;

constexpr std::array<std::string_view, kPhases> kColours = {
    "#b98f72", "#a06a1f", "#d08a20", "#e6bd45", "#5f7fb8", "#2f6fd6", "#74b4f4", "#8f5fd6",
    "#c2529d", "#35a25a", "#d64b41", "#22a39a", "#86a33a", "#3d4f9e", "#9aa0a8"};

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '&')
      result += "&amp;";
    else if (c == '"')
      result += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20)
      result += c;
  }
  return result;
}

/// 1, 2 or 5 times a power of ten, so that about four of them reach `largest`.
double tick_distance(double largest) {
  const double power = std::pow(10, std::floor(std::log10(largest / 4)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (largest / (factor * power) <= 5) return factor * power;
  return 10 * power;
}

class Drawing {
 public:
  void text(double x, double y, std::string_view style, std::string_view content) {
    add(R"(<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>)", x, y, style, escaped(content));
  }
  void rectangle(double x, double y, double width, double height, std::string_view style,
                 std::string_view title = {}) {
    if (title.empty())
      add(R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}"/>)", x, y, width, height,
          style);
    else
      add(R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}"><title>{}</title></rect>)",
          x, y, width, height, style, escaped(title));
  }
  void line(double x1, double y1, double x2, double y2, std::string_view style) {
    add(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>)", x1, y1, x2, y2, style);
  }
  void path(std::string_view commands, std::string_view style) {
    add(R"(<path d="{}" class="{}"/>)", commands, style);
  }

  std::string finish(double height) const {
    std::string colours;
    for (std::size_t phase = 0; phase < kPhases; ++phase)
      fmt::format_to(std::back_inserter(colours), ".p{}{{fill:{}}}", phase, kColours[phase]);
    for (std::size_t level = 0; level <= kLevels; ++level)
      fmt::format_to(std::back_inserter(colours), ".h{}{{fill:var(--heat);fill-opacity:{:.3f}}}", level,
                     0.04 + 0.96 * static_cast<double>(level) / kLevels);
    return fmt::format(
        R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" font-family="system-ui,sans-serif" font-size="13">
<style>svg{{--back:#ffffff;--ink:#1d2126;--faint:#5d6670;--rule:#d9dde2;--heat:#1f5fc4;background:var(--back)}}
@media (prefers-color-scheme:dark){{svg{{--back:#14171a;--ink:#e8eaed;--faint:#a3acb5;--rule:#343a41;--heat:#7fb4ff}}}}
.back{{fill:var(--back)}}text{{fill:var(--ink)}}.title{{font-size:18px;font-weight:600}}.part{{font-size:15px;font-weight:600}}.faint{{fill:var(--faint);font-size:12px}}.left{{fill:var(--faint);font-size:12px;text-anchor:end}}.right{{fill:var(--faint);font-size:12px;text-anchor:end}}.middle{{fill:var(--faint);font-size:12px;text-anchor:middle}}.rule{{stroke:var(--rule);stroke-width:1}}.cut{{fill:var(--ink)}}.owner{{fill:none;stroke:var(--rule)}}{2}</style>
<rect class="back" width="{0:.0f}" height="{1:.0f}"/>
{3}</svg>
)",
        kWidth, height, colours, body_);
  }

 private:
  template <class... Values>
  void add(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(body_), format, std::forward<Values>(values)...);
    body_ += '\n';
  }
  std::string body_;
};

/// Mean phase times of neighbouring steps of one kind.
struct Bar {
  std::int64_t first_step = 0, last_step = 0;
  std::array<double, kPhases> ms{};
  double total_ms = 0;
};

std::vector<Bar> bars_of(const Profile& profile, StepKind kind) {
  std::vector<std::size_t> steps;
  for (std::size_t s = 0; s < profile.steps; ++s)
    if (profile.kind(s) == kind) steps.push_back(s);
  std::vector<Bar> bars;
  const std::size_t count = std::min(steps.size(), kMostBars);
  for (std::size_t b = 0; b < count; ++b) {
    const std::size_t begin = steps.size() * b / count, end = steps.size() * (b + 1) / count;
    Bar bar;
    bar.first_step = profile.step(StepColumn::Step, steps[begin]);
    bar.last_step = profile.step(StepColumn::Step, steps[end - 1]);
    const double scale = 1e-6 / static_cast<double>(end - begin);
    for (std::size_t i = begin; i < end; ++i) {
      for (std::size_t phase = 0; phase < kPhases; ++phase)
        bar.ms[phase] += static_cast<double>(profile.step_phases[phase][steps[i]]) * scale;
      bar.total_ms += static_cast<double>(profile.step(StepColumn::Total, steps[i])) * scale;
    }
    bars.push_back(bar);
  }
  return bars;
}

/// One outlier would flatten all other bars: the scale follows the bulk, and longer bars are cut with a mark.
double scale_of(const std::vector<Bar>& bars) {
  std::vector<double> totals;
  for (const Bar& bar : bars) totals.push_back(bar.total_ms);
  std::sort(totals.begin(), totals.end());
  const double bulk = totals[totals.size() * 9 / 10];
  return std::max(1e-6, std::min(totals.back(), 1.5 * bulk)) * 1.05;
}

double draw_bars(Drawing& drawing, const Profile& profile, StepKind kind, double top) {
  const std::vector<Bar> bars = bars_of(profile, kind);
  if (bars.empty()) return top;
  const double chart = bars.size() < 8 ? kLowChartHeight : kChartHeight;
  const double largest = scale_of(bars), bottom = top + 34 + chart;
  const auto height_of = [&](double ms) { return ms / largest * chart; };
  drawing.text(kLeft, top + 16, "part",
               fmt::format("Time of {} steps, ms", kStepKindNames[static_cast<std::size_t>(kind)]));
  if (std::any_of(bars.begin(), bars.end(), [&](const Bar& bar) { return bar.total_ms > largest; }))
    drawing.text(kLeft + kInner, top + 16, "right", "▴ longer than shown");
  const double tick = tick_distance(largest);
  for (double value = 0; value <= largest; value += tick) {
    drawing.line(kLeft, bottom - height_of(value), kLeft + kInner, bottom - height_of(value), "rule");
    drawing.text(kLeft - 8, bottom - height_of(value) + 4, "left", fmt::format("{:g}", value));
  }
  const double pitch = std::min(kInner / static_cast<double>(bars.size()), 60.0), gap = pitch > 4 ? 1 : 0;
  for (std::size_t b = 0; b < bars.size(); ++b) {
    const Bar& bar = bars[b];
    const double x = kLeft + pitch * static_cast<double>(b);
    double used = 0;
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      const double ms = std::min(bar.ms[phase], largest - used);
      if (ms <= 0) continue;
      used += ms;
      if (height_of(ms) < 0.05) continue;
      drawing.rectangle(
          x, bottom - height_of(used), pitch - gap, height_of(ms), fmt::format("p{}", phase),
          fmt::format("step {}{}: {} {:.3f} of {:.3f} ms", bar.first_step,
                      bar.last_step > bar.first_step ? fmt::format(" to {}", bar.last_step) : "",
                      kPhaseInfo[phase].name, bar.ms[phase], bar.total_ms));
    }
    if (bar.total_ms > largest)
      drawing.path(fmt::format("M{:.1f} {:.1f}h{:.1f}l{:.1f} -6z", x, bottom - chart - 1, pitch - gap,
                               -(pitch - gap) / 2),
                   "cut");
  }
  drawing.line(kLeft, bottom, kLeft + kInner, bottom, "rule");
  drawing.text(kLeft, bottom + 18, "faint", fmt::format("step {}", bars.front().first_step));
  if (bars.size() > 1)
    drawing.text(kLeft + pitch * static_cast<double>(bars.size()), bottom + 18, "right",
                 fmt::format("{}", bars.back().last_step));
  return bottom + 34;
}

double draw_legend(Drawing& drawing, const Profile& profile, double top) {
  double x = kLeft, y = top;
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    const auto& column = profile.step_phases[phase];
    if (std::all_of(column.begin(), column.end(), [](std::int64_t ns) { return ns == 0; })) continue;
    const double width = 30 + 7.4 * static_cast<double>(kPhaseInfo[phase].name.size());
    if (x + width > kLeft + kInner) {
      x = kLeft;
      y += 20;
    }
    drawing.rectangle(x, y, 12, 12, fmt::format("p{}", phase));
    drawing.text(x + 18, y + 11, "faint", kPhaseInfo[phase].name);
    x += width;
  }
  return y + 36;
}

double draw_experts(Drawing& drawing, const Profile& profile, double top) {
  const std::int64_t most = *std::max_element(profile.counts.begin(), profile.counts.end());
  if (most == 0) return top;
  drawing.text(kLeft, top + 16, "part", fmt::format("Rows per expert, 0 (pale) to {} (full colour)", most));
  const double cell = std::min(24.0, kInner / static_cast<double>(profile.experts)),
               row = std::clamp(cell, 7.0, 16.0);
  const double y0 = top + 30;
  std::array<std::string, kLevels + 1> paths;  // one path per level: thousands of cells stay a small file
  for (std::size_t block = 0; block < profile.blocks; ++block)
    for (std::size_t e = 0; e < profile.experts; ++e) {
      if (profile.owners[block * profile.experts + e] < 0) continue;
      const double share =
          static_cast<double>(profile.counts[block * profile.experts + e]) / static_cast<double>(most);
      const auto level = static_cast<std::size_t>(std::ceil(share * kLevels));
      fmt::format_to(std::back_inserter(paths[level]), "M{:.2f} {:.1f}h{:.2f}v{:.1f}h{:.2f}z",
                     kLeft + cell * static_cast<double>(e), y0 + row * static_cast<double>(block), cell - 0.4,
                     row - 0.6, -(cell - 0.4));
    }
  for (std::size_t level = 0; level <= kLevels; ++level)
    if (!paths[level].empty()) drawing.path(paths[level], fmt::format("h{}", level));
  const double bottom = y0 + row * static_cast<double>(profile.blocks);
  const std::size_t every = std::max<std::size_t>(1, static_cast<std::size_t>(std::ceil(14 / row)));
  for (std::size_t block = 0; block < profile.blocks; block += every)
    drawing.text(kLeft - 8, y0 + row * (static_cast<double>(block) + 0.5) + 4, "left",
                 block < profile.run.layers ? fmt::format("{}", block)
                                            : fmt::format("draft {}", block - profile.run.layers));
  drawing.text(kLeft, bottom + 18, "faint", "expert 0");
  drawing.text(kLeft + cell * static_cast<double>(profile.experts), bottom + 18, "right",
               fmt::format("{}", profile.experts - 1));
  drawing.text(14, y0 - 8, "faint", "layer");
  return bottom + 34;
}

}  // namespace

std::string plot_svg(const Profile& profile) {
  Drawing drawing;
  drawing.text(kLeft, 30, "title", "dsv41-mpi profile");
  drawing.text(
      kLeft, 50, "faint",
      fmt::format("{} ranks, transport {}, placement {}, {} steps, {}", profile.run.hosts.size(),
                  profile.run.transport, profile.run.placement, profile.steps, profile.run.start_time));
  double y = draw_legend(drawing, profile, 66);
  for (std::size_t kind = 0; kind < kStepKindNames.size(); ++kind)
    y = draw_bars(drawing, profile, static_cast<StepKind>(kind), y);
  y = draw_experts(drawing, profile, y);
  return drawing.finish(y);
}

}  // namespace dsv41
