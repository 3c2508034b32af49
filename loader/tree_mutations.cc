// Applying mutations (tree_mutations.h).
#include "loader/tree_mutations.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <vector>

#include "loader/error.h"

namespace dsv41 {
namespace {

class Mutation {
 public:
  Mutation(Tree& tree, std::string_view text) : tree_(tree), text_(text) {
    const auto equals = text.find('=');
    kind_ = text.substr(0, equals);
    for (std::size_t at = equals; at < text.size();) {
      const std::size_t end = std::min(text.find(':', at + 1), text.size());
      arguments_.push_back(text.substr(at + 1, end - at - 1));
      at = end;
    }
  }

  void apply() {
    if (kind_ == "drop") {
      expect_arguments(1);
      drop_from_header();
      drop_from_index();
    } else if (kind_ == "drop-header") {
      expect_arguments(1);
      drop_from_header();
    } else if (kind_ == "drop-index") {
      expect_arguments(1);
      drop_from_index();
    } else if (kind_ == "rename" || kind_ == "rename-header") {
      expect_arguments(2);
      if (kind_ == "rename") indexed().first = arguments_[1];
      tensor().name = arguments_[1];
    } else if (kind_ == "reshape") {
      expect_arguments(2);
      tensor().shape = shape(arguments_[1]);
      home().lay_out();
    } else if (kind_ == "retype") {
      expect_arguments(2);
      tensor().dtype = dtype(arguments_[1]);
      home().lay_out();
    } else if (kind_ == "add") {
      expect_arguments(4);
      TreeShard& target = shard(arguments_[3]);
      target.tensors.push_back({name(), dtype(arguments_[1]), shape(arguments_[2])});
      target.lay_out();
      tree_.index.emplace_back(name(), target.file);
    } else if (kind_ == "overlap") {
      expect_arguments(2);
      const std::uint64_t bytes = number(arguments_[1]);
      if (bytes > tensor().begin) fail("the tensor begins at {} already", tensor().begin);
      tensor().begin -= bytes;
      tensor().end -= bytes;
    } else if (kind_ == "extend") {
      expect_arguments(2);
      tensor().end += number(arguments_[1]);
      home().payload_bytes = std::max(home().payload_bytes, tensor().end);
    } else if (kind_ == "move" || kind_ == "copy") {
      expect_arguments(2);
      const TreeTensor copied = tensor();
      TreeShard& target = shard(arguments_[1]);
      if (kind_ == "move") drop_from_header();
      target.tensors.push_back(copied);
      target.lay_out();
    } else if (kind_ == "index") {
      expect_arguments(2);
      indexed().second = shard(arguments_[1]).file;
    } else if (kind_ == "promise") {
      expect_arguments(2);
      tree_.index.emplace_back(name(), shard(arguments_[1]).file);
    } else if (kind_ == "truncate") {
      expect_arguments(2);
      TreeShard& target = shard(arguments_[0]);
      target.payload_bytes -= std::min(target.payload_bytes, number(arguments_[1]));
    } else {
      fail("no such kind of damage");
    }
  }

 private:
  template <typename... Arguments>
  [[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    throw UsageError(fmt::format("mutation \"{}\": {}", text_,
                                 fmt::format(format, std::forward<Arguments>(arguments)...)));
  }

  void expect_arguments(std::size_t count) const {
    if (arguments_.size() != count)
      fail("takes {} arguments separated by colons, not {}", count, arguments_.size());
  }

  std::string name() const { return std::string(arguments_.at(0)); }

  TreeShard& home() {
    for (TreeShard& candidate : tree_.shards)
      if (candidate.find(arguments_.at(0)) != nullptr) return candidate;
    fail("no shard holds such a tensor");
  }

  TreeTensor& tensor() { return *home().find(arguments_.at(0)); }

  std::pair<std::string, std::string>& indexed() {
    for (auto& entry : tree_.index)
      if (entry.first == arguments_.at(0)) return entry;
    fail("the index lists no such tensor");
  }

  void drop_from_header() {
    TreeShard& from = home();
    std::erase_if(from.tensors, [&](const TreeTensor& candidate) { return candidate.name == arguments_[0]; });
    from.lay_out();
  }

  void drop_from_index() {
    indexed();
    std::erase_if(tree_.index, [&](const auto& entry) { return entry.first == arguments_[0]; });
  }

  std::uint64_t number(std::string_view text) const {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size()) fail("\"{}\" is not a number", text);
    return value;
  }

  TreeShard& shard(std::string_view text) {
    const std::uint64_t position = number(text);
    if (position == 0 || position > tree_.shards.size()) fail("there are shards 1 … {}", tree_.shards.size());
    return tree_.shards[position - 1];
  }

  DType dtype(std::string_view text) const {
    const auto found = dtype_from_name(text);
    if (!found) fail("\"{}\" is not a dtype", text);
    return *found;
  }

  Shape shape(std::string_view text) const {
    Shape result;
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t end = std::min(text.find('x', at), text.size());
      if (result.size() == Shape::kMaxRank) fail("more than {} dimensions", Shape::kMaxRank);
      result.push_back(number(text.substr(at, end - at)));
      at = end + 1;
    }
    return result;
  }

  Tree& tree_;
  std::string_view text_, kind_;
  std::vector<std::string_view> arguments_;
};

}  // namespace

void mutate(Tree& tree, std::string_view mutation) {
  Mutation(tree, mutation).apply();
}

}  // namespace dsv41
