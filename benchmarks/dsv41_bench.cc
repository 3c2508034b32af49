// dsv41-bench: measures this program on this machine. Subcommands are one file each; every one prints a line
// per figure on stderr and one JSON document with the machine's description on stdout.
#include <boost/program_options.hpp>
#include <exception>
#include <iostream>

#include "benchmarks/bench.h"

namespace {

using dsv41::bench::Json;
using dsv41::bench::Options;

struct Subcommand {
  const char *name, *help;
  Json (*run)(const Options&);
};

constexpr Subcommand kSubcommands[] = {
    {"read", "read bandwidth of one and of all threads", dsv41::bench::run_read},
    {"linears", "products by shape, format and number of rows, beside the read bandwidth",
     dsv41::bench::run_linears},
    {"engram", "rows of a chunk from a file that is not cached, beside serial pread and fio",
     dsv41::bench::run_engram},
    {"exchange", "round trips of one layer's experts, beside raw messages (mpirun -np 2)",
     dsv41::bench::run_exchange},
    {"ops", "attention, index scores, quantizers, norms, ... on one thread", dsv41::bench::run_ops},
    {"decode", "whole decode steps of a synthetic model by context, sequences and rows (also mpirun -np N)",
     dsv41::bench::run_decode},
    {"prefill", "chunks of a long prompt, with and without skipped layer-rows", dsv41::bench::run_prefill},
    {"speculation", "cost of drafting and verifying, and the acceptance from which it pays",
     dsv41::bench::run_speculation},
};

void print_help(const boost::program_options::options_description& description) {
  std::cout << "usage: dsv41-bench SUBCOMMAND [options]\n\n";
  for (const Subcommand& subcommand : kSubcommands)
    std::cout << "  " << subcommand.name << "\t" << subcommand.help << "\n";
  std::cout << "\n" << description;
}

}  // namespace

int main(int argc, char** argv) try {
  namespace po = boost::program_options;
  Options options;
  std::string subcommand;
  po::options_description visible("Options");
  visible.add_options()("help,h", "this text")(
      "backend", po::value(&options.backend)->default_value(options.backend), "CPU backend")(
      "threads", po::value(&options.threads)->default_value(0), "0: one thread, then all of the machine")(
      "seconds", po::value(&options.seconds)->default_value(options.seconds), "time for each figure")(
      "buffer-mib", po::value(&options.buffer_mib)->default_value(options.buffer_mib),
      "memory that weights pass through")("rows", po::value(&options.rows)->multitoken(),
                                          "activation rows (default 1 2 4 8 32 128)")(
      "only", po::value(&options.only)->default_value(""), "cases whose name contains this")(
      "config", po::value(&options.config)->default_value(DSV41_RELEASED_CONFIG),
      "config.json of the synthetic model")(
      "pool-mib", po::value(&options.pool_mib)->default_value(options.pool_mib),
      "memory of its FP8 codes; its experts take as much, BF16 half of it")(
      "contexts", po::value(&options.contexts)->multitoken(), "tokens a sequence already has (default 1024)")(
      "sequences", po::value(&options.sequences)->multitoken(), "sequences in one step (default 1)")(
      "prompts", po::value(&options.prompts)->multitoken(), "prompt lengths (default 16384)")(
      "directory", po::value(&options.directory)->default_value(options.directory), "for the file of engram")(
      "file-gib", po::value(&options.file_gib)->default_value(options.file_gib), "its size");
  po::options_description all;
  all.add(visible).add_options()("subcommand", po::value(&subcommand));
  po::positional_options_description positions;
  positions.add("subcommand", 1);
  po::variables_map values;
  po::store(po::command_line_parser(argc, argv).options(all).positional(positions).run(), values);
  po::notify(values);
  if (values.count("help") != 0 || subcommand.empty()) {
    print_help(visible);
    return values.count("help") != 0 ? 0 : 2;
  }
  if (options.buffer_mib < 64 || options.buffer_mib > (std::size_t{1} << 20))
    throw std::invalid_argument("--buffer-mib " + std::to_string(options.buffer_mib) +
                                " is not between 64 and 1048576");
  if (options.pool_mib < 128 || options.pool_mib > (std::size_t{1} << 20))
    throw std::invalid_argument("--pool-mib " + std::to_string(options.pool_mib) +
                                " is not between 128 and 1048576");
  for (const Subcommand& candidate : kSubcommands) {
    if (subcommand != candidate.name) continue;
    Json document{{"benchmark", subcommand}, {"machine", dsv41::bench::describe_machine(options)}};
    document["results"] = candidate.run(options);
    if (document["results"].is_null()) return 0;  // a rank that only helped
    std::cout << document.dump(1) << "\n";
    return 0;
  }
  throw std::invalid_argument("no subcommand is called '" + subcommand + "'; see --help");
} catch (const std::exception& error) {
  std::cerr << "dsv41-bench: " << error.what() << "\n";
  return 2;
}
