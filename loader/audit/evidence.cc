// Joining expectation, index and headers (evidence.h).
#include "loader/audit/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <utility>

namespace dsv41::audit {
namespace {

/// "43/48" of "model-00043-of-00048.safetensors"; the name itself when it is built otherwise.
std::string shard_label(const std::string& file) {
  const std::string_view view(file);
  const auto dash = view.find('-');
  const auto of = view.find("-of-");
  const auto dot = view.rfind(".safetensors");
  unsigned number = 0, count = 0;
  if (dash == view.npos || of == view.npos || dot == view.npos || of <= dash || dot <= of) return file;
  const auto whole = [&](std::size_t from, std::size_t to, unsigned& value) {
    const auto [end, error] = std::from_chars(view.data() + from, view.data() + to, value);
    return error == std::errc{} && end == view.data() + to;
  };
  if (!whole(dash + 1, of, number) || !whole(of + 4, dot, count)) return file;
  return fmt::format("{}/{}", number, count);
}

}  // namespace

ModelConfig with_regular_lists(ModelConfig config) {
  config.compress_ratios.resize(config.n_blocks(), 0);
  config.engram_num_embeddings.resize(config.engram_layer_ids.size(), 0);
  return config;
}

Expectation::Expectation(Inventory inventory)
    : inventory_(std::move(inventory)), names_(inventory_.size()), states_(inventory_.size()) {
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    const ExpectedTensor& expected = inventory_[i];
    states_[i].expected = &expected;
    states_[i].name = parse_tensor_name(expected.name);
    names_.insert(expected.name, i);
    if (!states_[i].name.is_expert) others_.push_back(i);
  }
  find_scales();
}

void Expectation::find_scales() {
  constexpr std::string_view kWeight = ".weight", kScale = ".scale";
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    const std::string_view name = inventory_[i].name;
    const DType dtype = inventory_[i].dtype;
    if ((dtype != DType::F8E4M3 && dtype != DType::I8) || !name.ends_with(kWeight)) continue;
    const std::string_view stem = name.substr(0, name.size() - kWeight.size());
    const auto is_scale = [&](std::string_view other) {
      return other.size() == stem.size() + kScale.size() && other.starts_with(stem) &&
             other.ends_with(kScale);
    };
    if (i + 1 < states_.size() && is_scale(inventory_[i + 1].name))  // the usual order
      states_[i].scale = i + 1;
    else if (const auto found = names_.find(std::string(stem) + std::string(kScale)))
      states_[i].scale = *found;
  }
}

Evidence::Evidence(EvidenceInput input)
    : input_(std::move(input)),
      tensors_(input_.expected.take_states()),
      others_(input_.expected.take_others()),
      found_in_(tensors_.size(), kNone) {
  look_up_names();
  name_shards();
  match_local_shards();
  read_headers();
  if (input_.index)
    compare_with_index();
  else
    note_local_layout_shards();
}

/// Most of the audit's time: two look-ups for each of 96,085 names, so they are shared among threads.
void Evidence::look_up_names() {
  constexpr std::size_t kEntriesAtOnce = 8192;
  const std::size_t files = input_.local.size();
  positions_.resize(files);
  if (input_.index) index_positions_.resize(input_.index->entries.size());
  const auto position_of = [&](std::string_view name, std::uint32_t last) {
    // Names tend to follow the order of the inventory, weights and scales together, apart or the other way
    // round: comparing with the likely next ones saves most of the hashing.
    for (const std::uint32_t step : {1u, 2u, 3u, ~0u}) {
      const std::uint32_t guess = last + step;
      if (guess < tensors_.size() && tensors_[guess].expected->name == name) return guess;
    }
    return input_.expected.names().find(name).value_or(kNone);
  };
  const std::size_t batches = (index_positions_.size() + kEntriesAtOnce - 1) / kEntriesAtOnce;
  run_in_parallel(files + batches, input_.threads, [&](std::size_t job) {
    std::uint32_t last = kNone;
    if (job < files) {
      const std::vector<TensorInfo>& tensors = input_.local[job].header.tensors;
      positions_[job].reserve(tensors.size());
      for (const TensorInfo& tensor : tensors)
        positions_[job].push_back(last = position_of(tensor.name, last));
      return;
    }
    const std::size_t begin = (job - files) * kEntriesAtOnce;
    const std::size_t end = std::min(begin + kEntriesAtOnce, index_positions_.size());
    for (std::size_t i = begin; i < end; ++i)
      index_positions_[i] = last = position_of(input_.index->entries[i].tensor, last);
  });
}

void Evidence::name_shards() {
  if (input_.index) {
    const std::vector<std::string>& files = input_.index->shards;
    std::vector<std::uint32_t> order(files.size());
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t a, std::uint32_t b) { return files[a] < files[b]; });
    shard_of_index_.resize(files.size());
    for (const std::uint32_t i : order) {
      shard_of_index_[i] = static_cast<std::uint32_t>(shards_.size());
      shards_.push_back({files[i], shard_label(files[i]), false});
    }
    return;
  }
  std::uint32_t count = 0;
  for (ExpectedState& state : tensors_) {
    state.home = state.expected->shard - 1;
    count = std::max(count, state.expected->shard);
  }
  for (std::uint32_t i = 1; i <= count; ++i) shards_.push_back({"", fmt::format("{}/{}", i, count), false});
}

void Evidence::match_local_shards() {
  shard_of_local_.assign(input_.local.size(), kNone);
  if (!input_.index) return;
  NameIndex home_of;
  bool home_of_built = false;
  for (std::size_t i = 0; i < input_.local.size(); ++i) {
    const LocalShard& shard = input_.local[i];
    if (!shard.readable) continue;
    const auto found =
        std::lower_bound(shards_.begin(), shards_.end(), shard.file_name,
                         [](const Shard& s, const std::string& file) { return s.file < file; });
    if (found != shards_.end() && found->file == shard.file_name) {
      shard_of_local_[i] = static_cast<std::uint32_t>(found - shards_.begin());
    } else if (input_.header_prefix) {  // free names: the shard is the one that most of the tensors are
                                        // assigned to
      if (!std::exchange(home_of_built, true))
        for (const WeightIndex::Entry& entry : input_.index->entries)
          home_of.insert(entry.tensor, shard_of_index_[entry.shard]);
      std::map<std::uint32_t, std::size_t> votes;
      for (const TensorInfo& tensor : shard.header.tensors)
        if (const auto home = home_of.find(tensor.name)) ++votes[*home];
      const auto best = std::max_element(votes.begin(), votes.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; });
      if (best != votes.end()) shard_of_local_[i] = best->first;
    }
    if (shard_of_local_[i] != kNone) shards_[shard_of_local_[i]].local = true;
  }
}

StrayState& Evidence::stray(std::string_view name) {
  const auto known = stray_names_.insert(name, static_cast<std::uint32_t>(strays_.size()));
  if (known) return strays_[*known];
  return strays_.emplace_back(StrayState{name, parse_tensor_name(name), nullptr});
}

void Evidence::read_headers() {
  for (std::uint32_t file = 0; file < input_.local.size(); ++file) {
    const LocalShard& shard = input_.local[file];
    for (std::size_t i = 0; i < shard.header.tensors.size(); ++i) {
      const TensorInfo& tensor = shard.header.tensors[i];
      const std::uint32_t position = positions_[file][i];
      ++readable_tensors_;
      readable_bytes_ += tensor.bytes();
      const TensorInfo*& header = position != kNone ? tensors_[position].header : stray(tensor.name).header;
      if (header != nullptr) {
        duplicates_.add("{} is also in {}", tensor.name, shard.file_name);
        continue;
      }
      header = &tensor;
      if (position != kNone) found_in_[position] = file;
    }
  }
}

void Evidence::compare_with_index() {
  Contradictions& found = index_contradictions_;
  NameIndex strays_listed;
  for (std::size_t i = 0; i < input_.index->entries.size(); ++i) {
    const WeightIndex::Entry& entry = input_.index->entries[i];
    const std::uint32_t position = index_positions_[i];
    const std::uint32_t home_number = shard_of_index_[entry.shard];
    const Shard& home = shards_[home_number];
    const TensorInfo* header = nullptr;
    if (position != kNone) {
      ExpectedState& state = tensors_[position];
      state.indexed = true;
      state.home = home_number;
      header = state.header;
      const std::uint32_t file = found_in_[position];
      if (header != nullptr && shard_of_local_[file] != home_number)
        found.add("{}: the index assigns it to {}, {} holds it", entry.tensor, home.file,
                  input_.local[file].file_name);
    } else {
      strays_listed.insert(entry.tensor, 0);
      header = stray(entry.tensor).header;
    }
    if (header == nullptr && home.local)
      found.add("{}: the index assigns it to {}, whose header lacks it", entry.tensor, home.file);
  }
  for (std::uint32_t i = 0; i < tensors_.size(); ++i)
    if (tensors_[i].header != nullptr && !tensors_[i].indexed)
      found.add("{}: in {}, but the index does not list it", tensors_[i].expected->name,
                input_.local[found_in_[i]].file_name);
  for (const StrayState& state : strays_)
    if (state.header != nullptr && !strays_listed.find(state.full_name))
      found.add("{}: in a header, but the index does not list it", state.full_name);
  for (std::size_t i = 0; i < input_.local.size(); ++i)
    if (input_.local[i].readable && shard_of_local_[i] == kNone)
      found.add("{} is a shard that the index does not name", input_.local[i].file_name);
  found.add(duplicates_);
}

void Evidence::note_local_layout_shards() {
  // Without an index a shard counts as here when any of its tensors is: only a whole shard can still be on
  // its way.
  for (const ExpectedState& state : tensors_)
    if (state.header != nullptr) shards_[state.home].local = true;
}

Presence Evidence::presence(const ExpectedState& tensor) const {
  if (tensor.header != nullptr || tensor.indexed) return Presence::Present;
  return pending(tensor) ? Presence::Unknown : Presence::Absent;
}

bool Evidence::pending(const ExpectedState& tensor) const {
  return tensor.header == nullptr && tensor.home != kNone && !shards_[tensor.home].local;
}

bool Evidence::complete() const {
  return !shards_.empty() &&
         std::all_of(shards_.begin(), shards_.end(), [](const Shard& s) { return s.local; });
}

}  // namespace dsv41::audit
