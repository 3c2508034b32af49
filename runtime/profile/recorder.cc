// Buffers behind the recorder (recorder.h): columns of the next write, sized once.
#include "runtime/profile/recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "loader/error.h"
#include "runtime/profile/profile_file.h"

namespace dsv41 {
namespace {

constexpr std::size_t kBufferBytes = 32 << 20;          // all columns of buffered steps
constexpr std::uint64_t kMostSteps = 512;               // buffered
constexpr std::int64_t kLongestWaitNs = 1'000'000'000;  // between writes
constexpr std::int64_t kWriteShare = 400;               // writes may take one part in this many of the run
constexpr std::int64_t kFreeWriteNs = 3'000'000;        // … after this much

}  // namespace

struct Recorder::Buffers {
  RecorderShape shape;
  std::unique_ptr<ProfileFile> file;
  std::function<void(const std::string&)> warn;
  std::int64_t zero_ns = 0;        // clock zero of the run
  std::uint64_t capacity = 0;      // steps
  std::uint64_t steps = 0;         // buffered
  std::int64_t written_at_ns = 0;  // end of the last write
  std::int64_t write_ns = 0;       // all writes so far
  bool even = false;

  // Columns, [capacity, …] each. What is large is filled from the cells at a write, when it is done for many
  // steps at once: between two calls the model leaves little of the caches.
  std::vector<std::int64_t> step_number, start, total, step_bytes_out, step_bytes_in;
  std::array<std::vector<std::int64_t>, 4> step_engram;  // rows, distinct, cached, bytes
  std::vector<std::uint8_t> kind;
  std::vector<std::uint32_t> tokens, emitted, drafted, accepted;
  std::array<std::vector<std::int64_t>, kPhases> step_phase, layer_phase;
  std::vector<std::int64_t> layer_start, layer_total, layer_rows;
  std::array<std::vector<std::int64_t>, kRankColumns.size()> rank_wide;     // the columns of 8 bytes
  std::array<std::vector<std::uint32_t>, kRankColumns.size()> rank_narrow;  // and of 4

  using RankCells = std::array<std::int64_t, kRankColumns.size()>;
  std::vector<std::int64_t> cells;    // [capacity, blocks + 1, kPhases]; the last row is outside of blocks
  std::vector<RankCells> rank_cells;  // [capacity, blocks, ranks]
  std::vector<std::int64_t> counts, even_counts;
  std::uint64_t routes = 0, route_capacity = 0;
  std::vector<std::int64_t> route_step;
  std::vector<std::uint32_t> route_layer, route_row;
  std::vector<std::int32_t> route_ids;
  std::vector<float> route_weights;
  ProfileBatch batch;

  std::size_t layer_cell(std::uint32_t block) const { return steps * shape.blocks + block; }
  std::int64_t* phase_cells(std::size_t step, std::size_t block) {
    return &cells[(step * (shape.blocks + 1) + block) * kPhases];
  }
  std::size_t ranks_per_step() const { return std::size_t{shape.blocks} * shape.ranks; }

  Buffers(const RecorderShape& given, std::unique_ptr<ProfileFile> target,
          std::function<void(const std::string&)> say);
  void clear_step();
  void spread_phases();
  void spread_ranks();
  void add_routes(std::uint32_t block, std::span<const Route> chosen, std::span<const std::uint32_t> origins);
  void keep_routes_from(std::uint64_t first);
};

Recorder::Buffers::Buffers(const RecorderShape& given, std::unique_ptr<ProfileFile> target,
                           std::function<void(const std::string&)> say)
    : shape(given), file(std::move(target)), warn(std::move(say)) {
  const std::size_t blocks = shape.blocks, cells_per_step = blocks * shape.ranks;
  const std::size_t step_bytes = 16 * (kPhases + blocks * kPhases + cells_per_step * kRankColumns.size());
  capacity = file ? std::clamp<std::uint64_t>(kBufferBytes / step_bytes, 1, kMostSteps) : 1;
  if (capacity > ProfileFile::kChunkSteps) capacity -= capacity % ProfileFile::kChunkSteps;
  zero_ns = file ? file->clock_zero_ns() : profile_clock_ns();

  for (auto* column : {&step_number, &start, &total, &step_bytes_out, &step_bytes_in})
    column->resize(capacity);
  for (auto& column : step_engram) column.resize(capacity);
  kind.resize(capacity);
  tokens.resize(capacity);
  emitted.resize(capacity);
  drafted.resize(capacity);
  accepted.resize(capacity);
  layer_start.resize(capacity * blocks);
  layer_total.resize(capacity * blocks);
  layer_rows.resize(capacity * blocks);
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    step_phase[phase].resize(capacity);
    if (kPhaseInfo[phase].in_layers) layer_phase[phase].resize(capacity * blocks);
  }
  for (std::size_t column = 0; column < kRankColumns.size(); ++column) {
    if (hdf5::type_bytes(kRankColumns[column].type) == 8)
      rank_wide[column].resize(capacity * cells_per_step);
    else
      rank_narrow[column].resize(capacity * cells_per_step);
  }
  cells.resize(capacity * (blocks + 1) * kPhases);
  rank_cells.resize(capacity * cells_per_step);
  counts.resize(blocks * shape.experts);
  even_counts.resize(blocks * shape.experts);
  if (shape.routes) {
    route_capacity =
        ProfileFile::kChunkRoutes + 2 * blocks * std::max<std::uint64_t>(shape.max_rows, capacity);
    route_step.resize(route_capacity);
    route_layer.resize(route_capacity);
    route_row.resize(route_capacity);
    route_ids.resize(route_capacity * shape.experts_per_token);
    route_weights.resize(route_capacity * shape.experts_per_token);
  }

  batch.step_columns = {step_number.data(), kind.data(),  tokens.data(),         emitted.data(),
                        start.data(),       total.data(), step_bytes_out.data(), step_bytes_in.data()};
  for (const auto& column : step_engram) batch.step_columns.push_back(column.data());
  for (const auto* column : {&drafted, &accepted}) batch.step_columns.push_back(column->data());
  for (const Phase phase : step_phases())
    batch.step_columns.push_back(step_phase[static_cast<std::size_t>(phase)].data());
  batch.layer_columns = {layer_start.data(), layer_total.data(), layer_rows.data()};
  for (const Phase phase : layer_phases())
    batch.layer_columns.push_back(layer_phase[static_cast<std::size_t>(phase)].data());
  for (std::size_t column = 0; column < kRankColumns.size(); ++column)
    batch.rank_columns.push_back(rank_wide[column].empty()
                                     ? static_cast<const void*>(rank_narrow[column].data())
                                     : rank_wide[column].data());
  batch.route_step = route_step.data();
  batch.route_layer = route_layer.data();
  batch.route_row = route_row.data();
  batch.route_ids = route_ids.data();
  batch.route_weights = route_weights.data();
  batch.counts = counts.data();
  batch.even_counts = even_counts.data();
}

void Recorder::Buffers::clear_step() {
  std::fill_n(phase_cells(steps, 0), (shape.blocks + 1) * kPhases, 0);
  RankCells none{};
  for (const RankColumn column : {RankColumn::Sent, RankColumn::Received, RankColumn::Replied})
    none[static_cast<std::size_t>(column)] = -1;
  std::fill_n(rank_cells.begin() + static_cast<std::ptrdiff_t>(steps * ranks_per_step()), ranks_per_step(),
              none);
  const auto first_layer = static_cast<std::ptrdiff_t>(layer_cell(0));
  std::fill_n(layer_start.begin() + first_layer, shape.blocks, -1);
  std::fill_n(layer_rows.begin() + first_layer, shape.blocks, 0);
  step_bytes_out[steps] = step_bytes_in[steps] = 0;
  for (auto& column : step_engram) column[steps] = 0;
}

void Recorder::Buffers::spread_phases() {
  const std::size_t blocks = shape.blocks;
  for (std::size_t step = 0; step < steps; ++step) {
    std::array<std::int64_t, kPhases> sums;
    std::copy_n(phase_cells(step, blocks), kPhases, sums.begin());
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::int64_t* phases = phase_cells(step, block);
      std::int64_t sum = 0, elsewhere = 0;  // elsewhere: of phases that have no column here
      for (std::size_t phase = 0; phase < kPhases; ++phase) {
        sum += phases[phase];
        sums[phase] += phases[phase];
        if (kPhaseInfo[phase].in_layers)
          layer_phase[phase][step * blocks + block] = phases[phase];
        else
          elsewhere += phases[phase];
      }
      layer_phase[static_cast<std::size_t>(Phase::Other)][step * blocks + block] += elsewhere;
      layer_total[step * blocks + block] = sum;
    }
    for (std::size_t phase = 0; phase < kPhases; ++phase) step_phase[phase][step] = sums[phase];
  }
}

void Recorder::Buffers::spread_ranks() {
  constexpr std::size_t tile = 64;  // cells that stay in the nearest cache while all columns take theirs
  const std::size_t count = steps * ranks_per_step();
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const std::size_t end = std::min(count, begin + tile);
    for (std::size_t column = 0; column < kRankColumns.size(); ++column) {
      if (!rank_wide[column].empty()) {
        for (std::size_t i = begin; i < end; ++i) rank_wide[column][i] = rank_cells[i][column];
      } else {
        for (std::size_t i = begin; i < end; ++i)
          rank_narrow[column][i] = static_cast<std::uint32_t>(rank_cells[i][column]);
      }
    }
  }
}

Recorder::~Recorder() {
  close();
}

Recorder::Recorder(const RecorderShape& shape, std::unique_ptr<ProfileFile> file,
                   std::function<void(const std::string&)> warn)
    : buffers_(std::make_unique<Buffers>(shape, std::move(file), std::move(warn))) {
  totals_.ranks.resize(shape.ranks);
}

void Recorder::begin_step(StepKind kind, std::uint64_t step, std::uint32_t tokens) {
  Buffers& buffers = *buffers_;
  buffers.clear_step();
  buffers.step_number[buffers.steps] = static_cast<std::int64_t>(step);
  buffers.kind[buffers.steps] = static_cast<std::uint8_t>(kind);
  buffers.tokens[buffers.steps] = tokens;
  buffers.even = step % 2 == 0;
  cells_ = buffers.phase_cells(buffers.steps, buffers.shape.blocks);
  phase_ = Phase::Other;
  in_step_ = true;
  mark_ = profile_clock_ns();
  buffers.start[buffers.steps] = mark_ - buffers.zero_ns;
}

void Recorder::enter_block(std::uint32_t block) {
  if (!in_step_ || block >= buffers_->shape.blocks) return;
  charge(profile_clock_ns());
  cells_ = buffers_->phase_cells(buffers_->steps, block);
  std::int64_t& start = buffers_->layer_start[buffers_->layer_cell(block)];
  if (start < 0) start = mark_ - buffers_->zero_ns;
}

void Recorder::leave_block() {
  if (!in_step_) return;
  charge(profile_clock_ns());
  cells_ = buffers_->phase_cells(buffers_->steps, buffers_->shape.blocks);
}

void Recorder::end_step(const StepOutcome& outcome) {
  if (!in_step_) return;
  charge(profile_clock_ns());
  in_step_ = false;
  Buffers& buffers = *buffers_;
  const std::uint64_t step = buffers.steps;
  buffers.total[step] = mark_ - buffers.zero_ns - buffers.start[step];
  buffers.emitted[step] = outcome.emitted;
  buffers.drafted[step] = outcome.drafted;
  buffers.accepted[step] = outcome.accepted;

  ProfileTotals::Kind& totals = totals_.kinds[buffers.kind[step]];
  totals.steps += 1;
  totals.tokens += buffers.tokens[step];
  totals.emitted += outcome.emitted;
  totals.total_ns += buffers.total[step];
  const std::size_t blocks = buffers.shape.blocks;
  for (std::size_t block = 0; block <= blocks; ++block) {
    const std::int64_t* phases = buffers.phase_cells(step, block);
    for (std::size_t phase = 0; phase < kPhases; ++phase) totals.phase_ns[phase] += phases[phase];
  }
  ++buffers.steps;

  if (!buffers.file) {
    buffers.steps = buffers.routes = 0;  // totals are all that is kept
    return;
  }
  const std::uint64_t whole_routes = buffers.routes - buffers.routes % ProfileFile::kChunkRoutes;
  const std::int64_t allowed_ns = kFreeWriteNs + (mark_ - buffers.zero_ns) / kWriteShare;
  if (buffers.steps == buffers.capacity ||
      (buffers.steps % ProfileFile::kChunkSteps == 0 &&
       (buffers.write_ns < allowed_ns || mark_ - buffers.written_at_ns > kLongestWaitNs)))
    write(buffers.steps, whole_routes);
  else if (buffers.shape.routes &&
           buffers.route_capacity - buffers.routes < blocks * std::size_t{buffers.shape.max_rows})
    write(0, whole_routes);
}

void Recorder::exchange(std::uint32_t block, std::span<const RankReport> reports) {
  if (!in_step_ || block >= buffers_->shape.blocks) return;
  Buffers& buffers = *buffers_;
  double slowest = 0, sum = 0;
  for (const RankReport& report : reports) {
    const std::size_t rank = report.rank == 0 ? 0 : report.rank - 1;
    if (rank >= buffers.shape.ranks) continue;
    const RankTiming& timing = report.timing;
    Buffers::RankCells& cells = buffers.rank_cells[buffers.layer_cell(block) * buffers.shape.ranks + rank];
    const auto cell = [&](RankColumn column) -> std::int64_t& {
      return cells[static_cast<std::size_t>(column)];
    };
    const auto add = [&](RankColumn column, std::uint64_t value) {
      cell(column) += static_cast<std::int64_t>(value);
    };
    const auto since_start = [&](std::uint64_t clock) {
      return static_cast<std::int64_t>(clock) - buffers.zero_ns;
    };
    if (cell(RankColumn::Replied) < 0) {  // a block that runs twice in a step keeps its first begin
      cell(RankColumn::Sent) = since_start(report.sent_at_ns);
      cell(RankColumn::Received) = since_start(timing.received_at_ns);
    }
    cell(RankColumn::Replied) = since_start(report.replied_at_ns);
    add(RankColumn::Wait, timing.wait_ns);
    add(RankColumn::Receive, timing.receive_ns);
    add(RankColumn::Compute, timing.compute_ns);
    add(RankColumn::Send, timing.send_ns);
    add(RankColumn::Requests, 1);
    add(RankColumn::Tokens, report.rows);
    add(RankColumn::Routes, report.routes);
    add(RankColumn::Experts, timing.experts_touched);
    add(RankColumn::CacheHits, timing.cache_hits);
    add(RankColumn::CacheMisses, timing.cache_misses);
    add(RankColumn::BytesRead, timing.bytes_read);
    add(RankColumn::BytesOut, report.bytes_out);
    add(RankColumn::BytesIn, report.bytes_in);
    buffers.step_bytes_out[buffers.steps] += static_cast<std::int64_t>(report.bytes_out);
    buffers.step_bytes_in[buffers.steps] += static_cast<std::int64_t>(report.bytes_in);

    ProfileTotals::Rank& totals = totals_.ranks[rank];
    totals.compute_ns += static_cast<std::int64_t>(timing.compute_ns);
    totals.wait_ns += static_cast<std::int64_t>(timing.wait_ns);
    totals.receive_ns += static_cast<std::int64_t>(timing.receive_ns);
    totals.send_ns += static_cast<std::int64_t>(timing.send_ns);
    totals.tokens += report.rows;
    totals.routes += report.routes;
    totals.cache_hits += timing.cache_hits;
    totals.cache_misses += timing.cache_misses;
    totals.bytes_read += timing.bytes_read;
    totals.bytes_out += report.bytes_out;
    totals.bytes_in += report.bytes_in;
    slowest = std::max(slowest, static_cast<double>(timing.compute_ns));
    sum += static_cast<double>(timing.compute_ns);
  }
  totals_.slowest_compute_ns += slowest;
  totals_.mean_compute_ns += sum / buffers.shape.ranks;
}

void Recorder::engram(std::uint64_t asked, std::uint64_t distinct, std::uint64_t cached,
                      std::uint64_t bytes) {
  if (!in_step_) return;
  const std::uint64_t values[] = {asked, distinct, cached, bytes};
  for (std::size_t i = 0; i < std::size(values); ++i)
    buffers_->step_engram[i][buffers_->steps] += static_cast<std::int64_t>(values[i]);
}

void Recorder::routes(std::uint32_t block, std::span<const Route> routes,
                      std::span<const std::uint32_t> origins) {
  if (!in_step_ || block >= buffers_->shape.blocks) return;
  Buffers& buffers = *buffers_;
  std::int64_t* counts = &buffers.counts[std::size_t{block} * buffers.shape.experts];
  std::int64_t* even = &buffers.even_counts[std::size_t{block} * buffers.shape.experts];
  std::int64_t& rows = buffers.layer_rows[buffers.layer_cell(block)];
  for (std::size_t i = 0; i < routes.size(); ++i) rows += i == 0 || routes[i].row != routes[i - 1].row;
  for (const Route& route : routes) {
    if (route.expert >= buffers.shape.experts) continue;
    counts[route.expert] += 1;
    even[route.expert] += buffers.even;
  }
  if (buffers.file && buffers.shape.routes) buffers.add_routes(block, routes, origins);
}

void Recorder::Buffers::add_routes(std::uint32_t block, std::span<const Route> chosen,
                                   std::span<const std::uint32_t> origins) {
  const std::size_t width = shape.experts_per_token;
  for (std::size_t begin = 0; begin < chosen.size() && routes < route_capacity; ++routes) {
    route_step[routes] = step_number[steps];
    route_layer[routes] = block;
    route_row[routes] = chosen[begin].row < origins.size() ? origins[chosen[begin].row] : chosen[begin].row;
    std::int32_t* ids = &route_ids[routes * width];
    float* weights = &route_weights[routes * width];
    std::fill_n(ids, width, -1);
    std::fill_n(weights, width, 0.0f);
    std::size_t end = begin;
    for (; end < chosen.size() && chosen[end].row == chosen[begin].row && end - begin < width; ++end) {
      ids[end - begin] = static_cast<std::int32_t>(chosen[end].expert);
      weights[end - begin] = chosen[end].weight;
    }
    begin = end;
  }
}

void Recorder::Buffers::keep_routes_from(std::uint64_t first) {
  const auto move = [&](auto& column, std::uint64_t width) {
    std::copy(column.begin() + static_cast<std::ptrdiff_t>(first * width),
              column.begin() + static_cast<std::ptrdiff_t>(routes * width), column.begin());
  };
  move(route_step, 1);
  move(route_layer, 1);
  move(route_row, 1);
  move(route_ids, shape.experts_per_token);
  move(route_weights, shape.experts_per_token);
  routes -= first;
}

void Recorder::write(std::uint64_t steps, std::uint64_t routes) {
  Buffers& buffers = *buffers_;
  if (!buffers.file || steps + routes == 0) return;
  const std::int64_t begin = profile_clock_ns();
  if (steps > 0) {  // all of them
    buffers.spread_phases();
    buffers.spread_ranks();
  }
  buffers.batch.steps = steps;
  buffers.batch.routes = routes;
  try {
    buffers.file->write(buffers.batch);
  } catch (const Error& error) {
    // Batches of routes alone (steps 0) are written while steps wait, so there is always a first one.
    const std::string line =
        fmt::format("profile stopped before step {}: {}", buffers.step_number[0], error.what());
    buffers.file.reset();
    if (buffers.warn) buffers.warn(line);
  }
  buffers.steps -= steps;
  buffers.keep_routes_from(routes);
  buffers.written_at_ns = profile_clock_ns();
  buffers.write_ns += buffers.written_at_ns - begin;
}

void Recorder::flush() {
  in_step_ = false;
  write(buffers_->steps, buffers_->routes);
}

void Recorder::close() {
  flush();
  if (!buffers_->file) return;
  try {
    buffers_->file->close();
  } catch (const Error& error) {
    if (buffers_->warn) buffers_->warn(fmt::format("profile is incomplete: {}", error.what()));
  }
  buffers_->file.reset();
}

}  // namespace dsv41
