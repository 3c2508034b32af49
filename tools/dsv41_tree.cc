// dsv41-tree: writes checkpoints in the release layout from a config: sparse trees of full size, trees of
// headers, small random models, any of them incomplete or damaged. Uses the loader's tree writer
// (loader/tree_writer.h).
#include <fmt/format.h>

#include <boost/program_options.hpp>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "loader/config.h"
#include "loader/error.h"
#include "loader/tree_mutations.h"
#include "loader/tree_writer.h"

namespace dsv41 {
namespace {

namespace options = boost::program_options;

/// "1-20,43" of at most `count` shards.
std::vector<std::uint32_t> shard_list(const std::string& text, std::size_t count) {
  std::vector<std::uint32_t> shards;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto refuse = [&] {
    throw UsageError(
        fmt::format("--shards {}: give numbers of 1 … {} and ranges, as in 1-20,43", text, count));
  };
  const auto number = [&] {
    std::uint32_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc{} || value == 0 || value > count) refuse();
    at = next;
    return value;
  };
  while (true) {
    const std::uint32_t first = number();
    std::uint32_t last = first;
    if (at != end && *at == '-') {
      ++at;
      last = number();
    }
    for (std::uint32_t shard = first; shard <= last; ++shard) shards.push_back(shard);
    if (at == end) return shards;
    if (*at++ != ',') refuse();
  }
}

Payload payload_named(const std::string& name) {
  if (name == "sparse") return Payload::Sparse;
  if (name == "random") return Payload::Random;
  if (name == "headers") return Payload::HeaderOnly;
  throw UsageError(fmt::format("--payload {}: one of sparse, random, headers", name));
}

int run(int argc, char** argv) {
  options::options_description described("Options");
  described.add_options()("help,h", "this text")("config", options::value<std::string>()->value_name("FILE"),
                                                 "config of either layout (required)")(
      "out", options::value<std::string>()->value_name("DIR"), "where to write (required)")(
      "payload", options::value<std::string>()->default_value("sparse")->value_name("KIND"),
      "sparse: zeros that take no space; random: valid codes; headers: files end after the header")(
      "seed", options::value<std::uint64_t>()->default_value(1)->value_name("N"), "of a random payload")(
      "shards", options::value<std::string>()->value_name("LIST"), "write only these, as in 1-20,43")(
      "file-names", options::value<std::string>()->value_name("PREFIX"),
      "name the shards PREFIX00001.bin … instead; implies --no-index")("no-index", "write no index")(
      "tokenizer", options::value<std::string>()->value_name("FILE"), "copied to tokenizer.json")(
      "mutate", options::value<std::vector<std::string>>()->composing()->value_name("DAMAGE"),
      "damage the tree, may be repeated; see below");
  options::variables_map given;
  try {
    options::store(options::parse_command_line(argc, argv, described), given);
    options::notify(given);
  } catch (const options::error& error) {
    throw UsageError(fmt::format("{} (--help lists the options)", error.what()));
  }
  if (given.count("help") != 0) {
    std::cout << "Usage: dsv41-tree --config FILE --out DIR [options]\n\n"
              << described << "\nDamage:\n"
              << kMutations;
    return 0;
  }
  for (const char* required : {"config", "out"})
    if (given.count(required) == 0)
      throw UsageError(fmt::format("--{} is required (--help lists the options)", required));

  Tree tree = plan_tree(read_config(given["config"].as<std::string>()));
  TreeOptions write;
  write.payload = payload_named(given["payload"].as<std::string>());
  write.seed = given["seed"].as<std::uint64_t>();
  if (given.count("shards") != 0)
    write.shards = shard_list(given["shards"].as<std::string>(), tree.shards.size());
  if (given.count("tokenizer") != 0) write.tokenizer = given["tokenizer"].as<std::string>();
  if (given.count("mutate") != 0)
    for (const std::string& damage : given["mutate"].as<std::vector<std::string>>()) mutate(tree, damage);
  tree.write_index = given.count("no-index") == 0 && given.count("file-names") == 0;
  if (given.count("file-names") != 0)
    for (std::size_t i = 0; i < tree.shards.size(); ++i)
      tree.shards[i].file = fmt::format("{}{:05}.bin", given["file-names"].as<std::string>(), i + 1);
  write_tree(tree, given["out"].as<std::string>(), write);
  return 0;
}

}  // namespace
}  // namespace dsv41

int main(int argc, char** argv) {
  try {
    return dsv41::run(argc, argv);
  } catch (const dsv41::Error& error) {
    std::cerr << "dsv41-tree: " << error.what() << "\n";
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::cerr << "dsv41-tree: " << error.what() << "\n";
    return static_cast<int>(dsv41::ExitCode::Resources);
  }
}
