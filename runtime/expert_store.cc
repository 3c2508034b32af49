// Bounded residency of experts (expert_store.h): slots of equal size, one LRU over all blocks, several reads
// in flight, and no slot given away that a call or a read still uses.
#include "runtime/expert_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>

#include "kernels/slot_cache.h"
#include "loader/memory.h"
#include "loader/weights.h"

namespace dsv41 {
namespace {

constexpr std::uint64_t kPieceBytes = 512 << 10;  // of one read
/// Tensors of an expert that lie closer together than this are read in one go.
constexpr std::uint64_t kGapBytes = 64 << 10;
constexpr std::chrono::milliseconds kAliveInterval{20};
constexpr double kGiB = 1073741824.0, kMiB = 1048576.0;
constexpr std::array kTensors = {"w1.weight", "w1.scale", "w3.weight", "w3.scale", "w2.weight", "w2.scale"};

/// A stretch of a file, and where it goes in a slot; both aligned.
struct Stretch {
  const DirectFile* file = nullptr;
  std::uint64_t offset = 0, needed = 0;  // needed: up to the end of the last tensor
  std::uint64_t slot_offset = 0;
};

/// How an expert is read.
struct Layout {
  std::uint32_t first_stretch = 0, stretches = 0;
  std::array<std::uint64_t, kTensors.size()> tensors{};  // offsets in the slot, in the order of kTensors
};

enum class SlotState : std::uint8_t { Empty, Reading, Ready };

struct SlotInfo {
  ReadBatch batch;
  SlotState state = SlotState::Empty;
  bool in_use = false;          // by the call under way
  bool read_ahead = false;      // by an announcement, and not used since
  std::uint64_t announced = 0;  // number of the last announcement that wants it
};

class CachedStore final : public ExpertStore {
 public:
  CachedStore(const Checkpoint& checkpoint, const Placement* placement, std::uint32_t owner,
              const ExpertStoreOptions& options)
      : geometry_(ExpertGeometry::of(checkpoint.config())) {
    std::uint64_t most = 0;
    for (std::uint32_t block = 0; block < geometry_.experts_per_block.size(); ++block) {
      auto& layouts = layouts_.emplace_back(geometry_.experts_per_block[block]);
      for (std::uint32_t expert = 0; expert < layouts.size(); ++expert) {
        if (placement != nullptr && placement->owner(block, expert) != owner) continue;
        most = std::max(most, lay_out(checkpoint, block, expert, layouts[expert]));
        ++owned_;
      }
    }
    slot_bytes_ = (most + DirectFile::kLargestAlignment - 1) / DirectFile::kLargestAlignment *
                  DirectFile::kLargestAlignment;
    slots_ = slot_bytes_ == 0 ? 0 : std::min(owned_, options.memory_bytes / slot_bytes_);
    if (owned_ > 0 && slots_ == 0)
      throw ResourceError(fmt::format(
          "--expert-memory: {:.2f} MiB hold no expert: one takes {:.2f} MiB, and {} are to be served ({:.2f} "
          "GiB)",
          static_cast<double>(options.memory_bytes) / kMiB, static_cast<double>(slot_bytes_) / kMiB, owned_,
          static_cast<double>(owned_ * slot_bytes_) / kGiB));
    ReadQueueOptions queue;
    queue.method = options.method;
    queue.depth = options.depth;
    queue_ = std::make_unique<ReadQueue>(queue);
  }

  const ExpertGeometry& geometry() const override { return geometry_; }
  std::string describe() const override {
    return fmt::format("{} of {} in {:.3f} GiB of memory ({})", slots_, owned_,
                       static_cast<double>(memory_bytes()) / kGiB, queue_->describe());
  }
  std::string note() const override {
    if (!queue_->refusal().empty()) return fmt::format("experts are read by threads: {}", queue_->refusal());
    for (const auto& [mapped, file] : files_)
      if (!file.direct())
        return fmt::format("{}: the file system takes no direct reads: experts go through the page cache",
                           file.path().string());
    return {};
  }
  std::uint64_t memory_bytes() const override { return slots_ * slot_bytes_; }
  std::uint64_t resident_experts() const override { return slots_; }

  void load() override {
    memory_ = LargeMemory(memory_bytes());
    cache_.emplace(static_cast<SlotCache::Slot>(slots_));
    infos_ = std::vector<SlotInfo>(slots_);
  }

  bool reads_ahead() const override { return true; }
  void announce(std::uint32_t block, std::span<const std::uint32_t> experts) override {
    if (!cache_) return;
    check();
    ++announcement_;
    // What is there first: it must not be driven out by what is not.
    for (const std::uint32_t expert : experts)
      if (const auto slot = cache_->find(key_of(block, expert))) infos_[*slot].announced = announcement_;
    for (const std::uint32_t expert : experts) {
      if (cache_->contains(key_of(block, expert))) continue;
      const auto slot = read(block, expert, [&](SlotCache::Slot candidate) {
        return infos_[candidate].announced != announcement_;
      });
      if (!slot) return;
      infos_[*slot].announced = announcement_;
      infos_[*slot].read_ahead = true;
    }
  }

  void begin(std::uint32_t block, std::span<const std::uint32_t> experts) override {
    if (!cache_) throw std::logic_error("the expert store has not been loaded");
    check();
    for (const std::uint32_t expert : experts)
      if (layouts_.at(block).at(expert).stretches == 0)
        throw std::invalid_argument(
            fmt::format("expert {} of block {} lives on another rank", expert, block));
    for (SlotInfo& info : infos_) info.in_use = false;  // a call that failed has released nothing
    block_ = block;
    waiting_.clear();
    taken_.clear();
    for (const std::uint32_t expert : experts) {
      const auto slot = cache_->find(key_of(block, expert));
      ++(slot && !infos_[*slot].read_ahead ? counters_.hits : counters_.misses);
      if (slot) {
        infos_[*slot].in_use = true;
        infos_[*slot].read_ahead = false;
      }
      waiting_.push_back({expert, slot});
    }
    read_more();
  }

  std::span<const std::uint32_t> take(const std::function<void()>& alive) override {
    taken_.clear();
    check();
    while (!waiting_.empty()) {
      const std::uint64_t seen = queue_->ended_batches();
      settle();
      read_more();
      for (const Waiting& one : waiting_)
        if (one.slot && infos_[*one.slot].state == SlotState::Ready) taken_.push_back(one.expert);
      if (!taken_.empty()) {
        std::erase_if(waiting_, [&](const Waiting& one) {
          return one.slot && infos_[*one.slot].state == SlotState::Ready;
        });
        break;
      }
      queue_->wait_for_any(seen, kAliveInterval);
      alive();
    }
    return taken_;
  }

  ExpertMatrices matrices(std::uint32_t expert) override {
    const auto slot = cache_->find(key_of(block_, expert));
    if (!slot) throw std::logic_error("an expert that was not taken");
    const auto* const memory = reinterpret_cast<const std::uint8_t*>(memory_.data()) + *slot * slot_bytes_;
    const Layout& layout = layouts_[block_][expert];
    const auto matrix = [&](std::size_t which, std::size_t n, std::size_t k) {
      return Fp4Matrix{memory + layout.tensors[2 * which], memory + layout.tensors[2 * which + 1], n, k};
    };
    const std::size_t dim = geometry_.dim, inter = geometry_.inter_dim;
    return {matrix(0, inter, dim), matrix(1, inter, dim), matrix(2, dim, inter)};
  }

  void release() override {
    for (const std::uint32_t expert : taken_)
      if (const auto slot = cache_->find(key_of(block_, expert))) infos_[*slot].in_use = false;
    taken_.clear();
    read_more();
  }

  const Counters& counters() const override { return counters_; }

 private:
  struct Waiting {
    std::uint32_t expert = 0;
    std::optional<SlotCache::Slot> slot;  // none yet: all slots are in use
  };

  static SlotCache::Key key_of(std::uint32_t block, std::uint32_t expert) {
    return std::uint64_t{block} << 32 | expert;
  }

  /// Plans the reads of one expert; returns the bytes it takes in a slot.
  std::uint64_t lay_out(const Checkpoint& checkpoint, std::uint32_t block, std::uint32_t expert,
                        Layout& layout) {
    struct Part {
      std::size_t which;
      TensorLocation at;
    };
    std::array<Part, kTensors.size()> parts;
    for (std::size_t which = 0; which < kTensors.size(); ++which)
      parts[which] = {which, expert_tensor(checkpoint, block, expert, kTensors[which])};
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return std::pair(a.at.file, a.at.offset) < std::pair(b.at.file, b.at.offset);
    });
    layout.first_stretch = static_cast<std::uint32_t>(stretches_.size());
    std::uint64_t used = 0;
    const MappedFile* last_file = nullptr;
    for (const Part& part : parts) {
      const DirectFile& file = files_.try_emplace(part.at.file, *part.at.file).first->second;
      Stretch* stretch = last_file == part.at.file ? &stretches_.back() : nullptr;
      if (stretch == nullptr || part.at.offset - (stretch->offset + stretch->needed) > kGapBytes) {
        used = (used + DirectFile::kLargestAlignment - 1) / DirectFile::kLargestAlignment *
               DirectFile::kLargestAlignment;
        stretch = &stretches_.emplace_back(Stretch{&file, file.round_down(part.at.offset), 0, used});
        last_file = part.at.file;
      }
      stretch->needed = part.at.offset + part.at.bytes - stretch->offset;
      layout.tensors[part.which] = stretch->slot_offset + (part.at.offset - stretch->offset);
      used = stretch->slot_offset + file.round_up(stretch->offset + stretch->needed) - stretch->offset;
    }
    layout.stretches = static_cast<std::uint32_t>(stretches_.size()) - layout.first_stretch;
    return used;
  }

  /// Starts reading an expert into a slot that nobody uses and that `evictable` allows; none: there is none.
  template <class Evictable>
  std::optional<SlotCache::Slot> read(std::uint32_t block, std::uint32_t expert, const Evictable& evictable) {
    const auto slot = cache_->place_if(key_of(block, expert), [&](SlotCache::Slot candidate) {
      SlotInfo& info = infos_[candidate];
      if (info.state == SlotState::Reading && ReadQueue::ended(info.batch)) settle(info);
      return info.state != SlotState::Reading && !info.in_use && evictable(candidate);
    });
    if (!slot) return std::nullopt;
    SlotInfo& info = infos_[*slot];
    info.announced = 0;
    info.read_ahead = false;
    info.batch.pieces.clear();
    const Layout& layout = layouts_[block][expert];
    std::byte* const memory = memory_.data() + *slot * slot_bytes_;
    for (std::uint32_t i = 0; i < layout.stretches; ++i) {
      const Stretch& stretch = stretches_[layout.first_stretch + i];
      const std::uint64_t end = stretch.file->round_up(stretch.offset + stretch.needed) - stretch.offset;
      for (std::uint64_t at = 0; at < end; at += kPieceBytes) {
        const std::uint64_t bytes = std::min(kPieceBytes, end - at);
        info.batch.pieces.push_back({stretch.file, stretch.offset + at, static_cast<std::uint32_t>(bytes),
                                     static_cast<std::uint32_t>(std::min(bytes, stretch.needed - at)),
                                     memory + stretch.slot_offset + at});
        counters_.read_bytes += bytes;
      }
    }
    info.state = SlotState::Reading;
    queue_->submit(info.batch);
    return slot;
  }

  /// Slots for experts of the call that have none yet, as far as there are any.
  void read_more() {
    for (Waiting& one : waiting_) {
      if (one.slot) continue;
      // An announcement may have begun to read it meanwhile.
      one.slot = cache_->find(key_of(block_, one.expert));
      if (!one.slot) one.slot = read(block_, one.expert, [](SlotCache::Slot) { return true; });
      if (!one.slot) return;
      infos_[*one.slot].in_use = true;
    }
  }

  /// After a failed read nothing is served any more: what the slot holds is anybody's guess.
  void check() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  /// Ends the reads of a slot; throws what went wrong with them.
  void settle(SlotInfo& info) {
    try {
      queue_->wait(info.batch);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    info.state = SlotState::Ready;
  }
  void settle() {
    for (const Waiting& one : waiting_)
      if (one.slot && infos_[*one.slot].state == SlotState::Reading &&
          ReadQueue::ended(infos_[*one.slot].batch))
        settle(infos_[*one.slot]);
  }

  ExpertGeometry geometry_;
  std::map<const MappedFile*, DirectFile> files_;
  std::vector<std::vector<Layout>> layouts_;  // [blocks][experts]; no stretches: of another rank
  std::vector<Stretch> stretches_;
  std::uint64_t owned_ = 0, slots_ = 0, slot_bytes_ = 0;
  LargeMemory memory_;
  std::optional<SlotCache> cache_;
  std::vector<SlotInfo> infos_;
  std::uint32_t block_ = 0;
  std::vector<Waiting> waiting_;  // experts of the call that have not been taken
  std::vector<std::uint32_t> taken_;
  std::uint64_t announcement_ = 0;
  Counters counters_;
  std::exception_ptr failure_;
  std::unique_ptr<ReadQueue> queue_;  // last: it goes before what it writes to
};

class MappedStore final : public ExpertStore {
 public:
  explicit MappedStore(ExpertSource& source) : source_(source) {}
  const ExpertGeometry& geometry() const override { return source_.geometry(); }
  std::string describe() const override { return "mapped"; }
  void begin(std::uint32_t block, std::span<const std::uint32_t> experts) override {
    block_ = block;
    experts_ = experts;
    counters_.hits += experts.size();
  }
  std::span<const std::uint32_t> take(const std::function<void()>&) override {
    return std::exchange(experts_, {});
  }
  ExpertMatrices matrices(std::uint32_t expert) override { return source_.expert(block_, expert); }
  void release() override {}
  const Counters& counters() const override { return counters_; }

 private:
  ExpertSource& source_;
  std::uint32_t block_ = 0;
  std::span<const std::uint32_t> experts_;
  Counters counters_;
};

}  // namespace

std::unique_ptr<ExpertStore> mapped_expert_store(ExpertSource& source) {
  return std::make_unique<MappedStore>(source);
}

std::unique_ptr<ExpertStore> cached_expert_store(const Checkpoint& checkpoint, const Placement* placement,
                                                 std::uint32_t owner, const ExpertStoreOptions& options) {
  return std::make_unique<CachedStore>(checkpoint, placement, owner, options);
}

}  // namespace dsv41
