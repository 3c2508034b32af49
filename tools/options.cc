#include "tools/options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "engram/hashing.h"
#include "loader/error.h"
#include "runtime/exchange/communicator.h"

namespace dsv41 {
namespace {

namespace po = boost::program_options;

// Numbers are taken as text and checked here: Boost would accept "-1" for an unsigned value and "12abc"
// silently.
template <class Number>
Number number(const std::string& text, const std::string& flag, Number least, Number most) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= least) || !(value <= most))
    throw UsageError(fmt::format("--{} takes a number from {} to {}, not '{}'", flag, least, most, text));
  return value;
}

/// Bytes, with an optional K, M, G or T (powers of 1024).
std::uint64_t byte_size(const std::string& text, const std::string& flag) {
  const std::size_t unit = std::string_view("KMGT").find(text.empty() ? '\0' : text.back());
  if (unit == std::string_view::npos) return number<std::uint64_t>(text, flag, 1, std::uint64_t{1} << 60);
  const unsigned shift = 10 * (static_cast<unsigned>(unit) + 1);
  return number<std::uint64_t>(text.substr(0, text.size() - 1), flag, 1, std::uint64_t{1} << (60 - shift))
         << shift;
}

SpeculationOptions speculation(const std::string& text) {
  using Mode = SpeculationOptions::Mode;
  if (text == "auto") return {Mode::Auto, 0};
  if (text == "off") return {Mode::Off, 0};
  return {Mode::Fixed, number<std::size_t>(text, "speculate", 0, 64)};
}

Overlap::Mode overlap(const std::string& text) {
  if (text == "auto") return Overlap::Mode::Measured;
  if (text == "on") return Overlap::Mode::Always;
  if (text == "off") return Overlap::Mode::Never;
  throw UsageError(fmt::format("--overlap takes auto, on or off, not '{}'", text));
}

EngramMode engram_mode(const std::string& text) {
  if (text == "mmap") return EngramMode::Mmap;
  if (text == "direct") return EngramMode::Direct;
  if (text == "resident") return EngramMode::Resident;
  throw UsageError(fmt::format("--engram takes mmap, direct or resident, not '{}'", text));
}

std::vector<std::uint32_t> id_list(const std::string& text) {
  std::vector<std::uint32_t> ids;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t comma = std::min(text.find(',', start), text.size());
    ids.push_back(number<std::uint32_t>(text.substr(start, comma - start), "prompt-ids", 0,
                                        std::numeric_limits<std::uint32_t>::max()));
    start = comma + 1;
  }
  return ids;
}

/// --json takes a file with --audit-only, and nothing without.
po::options_description descriptions(bool audit) {
  po::options_description model("Model"), prompt("Prompt (exactly one, unless --dry-run)"),
      generation("Generation"), batch("Many prompts"), machine("Machine"), output("Output"),
      checks("Audit (--audit-only)"),
      all("dsv41-mpi: DeepSeek-V4.1-Flash on one host rank and any number of expert ranks\n\n"
          "  mpirun -np N+1 dsv41-mpi --model DIR --prompt TEXT\n");
  const auto text = [] { return po::value<std::string>(); };
  model.add_options()(
      "model", text()->value_name("DIR"),
      "checkpoint directory in the released layout (default: $DSV41_MODEL, else the bundled small one)");
  prompt.add_options()("prompt", text()->value_name("TEXT"), "text, BOS is put in front")(
      "prompt-file", text()->value_name("FILE"), "the same, read from a file ('-': standard input)")(
      "prompt-ids", text()->value_name("0,17,…"), "token ids as they are");
  generation.add_options()("max-tokens,n", text()->value_name("N"), "tokens to generate at most (128)")(
      "temperature", text()->value_name("T"), "0 takes the most likely token (0)")(
      "top-p", text()->value_name("P"), "sample from the most likely tokens that reach P together (1)")(
      "seed", text()->value_name("S"), "of the sampler (0)")("ignore-eos",
                                                             "go on after the end-of-sentence token")(
      "stop", po::value<std::vector<std::string>>()->value_name("TEXT"),
      "end the output before this text; may be repeated")(
      "chunk", text()->value_name("ROWS"),
      "prompt tokens of a sequence per step; any value gives the same bits (512)")(
      "speculate", text()->value_name("N|auto|off"),
      "verify up to N drafts per step; never changes the output (auto)")(
      "no-skip", "compute prompt rows that cannot reach the result, too (for comparison)");
  batch.add_options()("requests", text()->value_name("IN.jsonl"),
                      "one object a line: prompt | prompt_ids, max_tokens, temperature, top_p, seed, stop, "
                      "ignore_eos, id ('-': standard input)")(
      "out", text()->value_name("OUT.jsonl"), "results, as they finish ('-', the default: standard output)")(
      "batch", text()->value_name("N"), "sequences that run together (1)")(
      "step-tokens", text()->value_name("N"),
      "rows per step, prompt chunks and decoding together (chunk + batch)")(
      "context-memory", text()->value_name("SIZE"),
      "for the state of all sequences, for example 4G; others wait (no limit)")(
      "no-prefix-sharing", "compute common prefixes of prompts again for each (for comparison)");
  machine.add_options()("placement", text()->value_name("HOW"), "contiguous | cyclic | file:PATH (cyclic)")(
      "backend", text()->value_name("NAME"),
      "kernels to use: auto | plain | avx2 | avx512 | avx512vbmi (auto)")(
      "threads", text()->value_name("N"), "per rank (the cores of the machine, shared among its ranks)")(
      "devices", text()->value_name("auto|none|LIST"),
      "what the expert ranks of each machine compute on, in rank order: GPU numbers and cpu, for example "
      "0,1,cpu (auto: one GPU each if there are any)")("share-gpu", "several ranks may take one GPU")(
      "expert-memory", text()->value_name("SIZE"),
      "per rank that computes experts, for example 20G: keep so many of them in memory, of its GPU if it has "
      "one, "
      "and read the others as they are needed (all are mapped; of a GPU, what is free)")(
      "pinned-memory", text()->value_name("SIZE"),
      "per GPU, of this machine, for experts that do not fit on it (none: they are read from the files)")(
      "transport", text()->value_name("auto|cuda-aware|staged"),
      "whether messages leave from GPU memory (auto)")(
      "engram", text()->value_name("HOW"),
      "n-gram rows: mmap | direct (gathered past the page cache) | resident (loaded at start) (mmap)")(
      "engram-cache", text()->value_name("SIZE"), "with --engram direct: for rows read earlier (256M)")(
      "overlap", text()->value_name("auto|on|off"),
      "run steps as two halves, one computing here while the experts of the other are away; never changes "
      "the output (auto: where it is measured to be faster)")(
      "rank-timeout", text()->value_name("SECONDS"), "end the job when a rank is silent for so long (60)");
  output.add_options()("dump-logits", text()->value_name("F.h5"),
                       "write /ids and /logits of every processed position")(
      "profile", text()->value_name("F.h5"),
      "measure every step; dsv41-profile F.h5 says where the time went")(
      "profile-routes", "with --profile: also the experts of every row")(
      "dry-run", "open and check everything, print what each rank would hold, stop")(
      "colour", text()->value_name("auto|always|never"), "of the audit's report (auto)")(
      "quiet", "no messages but errors; of an audit: only what is not a pass")(
      "version", "print the version")("help,h", "print this text");
  if (audit)
    output.add_options()("json", text()->value_name("OUT"),
                         "also write the audit's report as JSON ('-': instead)");
  else
    output.add_options()("json", "one JSON object on standard output instead of the text");
  checks.add_options()("audit-only",
                       "check what the headers of DIR say, without loading anything; needs no mpirun")(
      "header-prefix", "files may end after their header and have any name")(
      "config", text()->value_name("FILE"), "audit against this config instead of the directory's")(
      "index", text()->value_name("FILE"), "use this index instead of the directory's")(
      "list-tensors", text()->value_name("GLOB"), "list matching tensors instead of the report")(
      "expect-fp8-block", po::value<std::vector<std::string>>()->multitoken()->value_name("R C"),
      "block that every FP8 scale must describe")("require-complete",
                                                  "what cannot be decided counts as failed")(
      "verify-payload", "also read every payload byte, and write or compare a manifest")(
      "manifest", text()->value_name("FILE"), "of --verify-payload (DIR/payload-manifest.jsonl)");
  all.add(model).add(prompt).add(generation).add(batch).add(machine).add(output).add(checks);
  return all;
}

audit::AuditOptions read_audit(const po::variables_map& flags, const Options& options) {
  const auto given = [&](const char* flag) { return flags.count(flag) > 0; };
  const auto path = [&](const char* flag) -> std::optional<std::filesystem::path> {
    if (!given(flag)) return std::nullopt;
    return std::filesystem::path(flags[flag].as<std::string>());
  };
  audit::AuditOptions audit;
  audit.directory = options.model;
  audit.header_prefix = given("header-prefix");
  audit.config = path("config");
  audit.index = path("index");
  audit.json = path("json");
  audit.manifest = path("manifest");
  if (given("list-tensors")) audit.list_tensors = flags["list-tensors"].as<std::string>();
  if (given("expect-fp8-block")) {
    const auto sizes = flags["expect-fp8-block"].as<std::vector<std::string>>();
    if (sizes.size() != 2) throw UsageError("--expect-fp8-block takes two numbers, rows and columns");
    audit.expect_fp8_block =
        audit::BlockSize{number<std::uint64_t>(sizes[0], "expect-fp8-block", 1, 1u << 20),
                         number<std::uint64_t>(sizes[1], "expect-fp8-block", 1, 1u << 20)};
  }
  audit.require_complete = given("require-complete");
  audit.verify_payload = given("verify-payload");
  audit.quiet = options.quiet;
  audit.threads = static_cast<unsigned>(options.threads);
  // Under a launcher every standard output is a terminal of the launcher's making.
  const bool launched = started_by_launcher();
  audit.progress_bar = !launched && isatty(STDERR_FILENO) == 1;
  const std::string colour = given("colour") ? flags["colour"].as<std::string>() : "auto";
  if (colour != "auto" && colour != "always" && colour != "never")
    throw UsageError(fmt::format("--colour takes auto, always or never, not '{}'", colour));
  audit.colour = colour == "always" || (colour == "auto" && !launched && isatty(STDOUT_FILENO) == 1);
  audit.derive_engram_rows = [](const ModelConfig& config) {
    std::vector<std::uint64_t> rows;
    for (const HashLayer& layer : derive_hash_layout(config)) rows.push_back(layer.rows);
    return rows;
  };
  return audit;
}

Options read_options(const po::variables_map& flags) {
  Options options;
  const auto given = [&](const char* flag) { return flags.count(flag) > 0; };
  const auto text = [&](const char* flag) { return flags[flag].as<std::string>(); };

  const char* from_environment = std::getenv("DSV41_MODEL");
  if (given("model"))
    options.model = text("model");
  else if (from_environment != nullptr && *from_environment != '\0')
    options.model = from_environment;
  else {
    options.model = DSV41_BUNDLED_CHECKPOINT;
    options.bundled_model = true;
  }

  if (given("prompt")) options.prompt = text("prompt");
  if (given("prompt-file")) options.prompt_file = text("prompt-file");
  if (given("prompt-ids")) options.prompt_ids = id_list(text("prompt-ids"));
  if (given("max-tokens"))
    options.max_tokens = number<std::uint32_t>(text("max-tokens"), "max-tokens", 0, 1u << 30);
  if (given("temperature")) options.temperature = number<double>(text("temperature"), "temperature", 0, 1000);
  if (given("top-p")) options.top_p = number<double>(text("top-p"), "top-p", 1e-9, 1);
  if (given("seed"))
    options.seed = number<std::uint64_t>(text("seed"), "seed", 0, std::numeric_limits<std::uint64_t>::max());
  if (given("chunk")) options.chunk = number<std::uint32_t>(text("chunk"), "chunk", 1, 1u << 16);
  if (given("placement")) options.placement = text("placement");
  if (given("backend")) options.backend = text("backend");
  if (given("expert-memory")) options.expert_memory = byte_size(text("expert-memory"), "expert-memory");
  if (given("engram")) options.engram.mode = engram_mode(text("engram"));
  if (given("engram-cache")) {
    if (options.engram.mode != EngramMode::Direct)
      throw UsageError("--engram-cache belongs to --engram direct");
    options.engram.cache_bytes = byte_size(text("engram-cache"), "engram-cache");
  }
  options.devices =
      parse_gpu_request(given("devices") ? text("devices") : std::string("auto"), given("share-gpu"));
  if (given("transport")) options.transport = parse_transport(text("transport"));
  if (given("pinned-memory")) options.pinned_memory = byte_size(text("pinned-memory"), "pinned-memory");
  if (given("threads")) options.threads = number<std::size_t>(text("threads"), "threads", 1, 1024);
  if (given("rank-timeout"))
    options.rank_timeout = std::chrono::milliseconds(
        std::llround(number<double>(text("rank-timeout"), "rank-timeout", 0.1, 1e6) * 1000));
  if (given("dump-logits")) options.dump_logits = text("dump-logits");
  if (given("stop")) options.stop = flags["stop"].as<std::vector<std::string>>();
  if (given("requests")) options.requests = text("requests");
  if (given("out")) options.out = text("out");
  if (given("batch")) options.batch = number<std::uint32_t>(text("batch"), "batch", 1, 1u << 16);
  if (given("step-tokens"))
    options.step_tokens = number<std::uint32_t>(text("step-tokens"), "step-tokens", 1, 1u << 17);
  if (given("context-memory")) options.context_bytes = byte_size(text("context-memory"), "context-memory");
  if (given("overlap")) options.overlap = overlap(text("overlap"));
  if (given("speculate")) options.speculation = speculation(text("speculate"));
  options.no_skip = given("no-skip");
  options.no_prefix_sharing = given("no-prefix-sharing");
  if (given("profile")) options.profile = text("profile");
  options.profile_routes = given("profile-routes");
  if (options.profile_routes && !options.profile) throw UsageError("--profile-routes needs --profile F.h5");
  options.ignore_eos = given("ignore-eos");
  options.dry_run = given("dry-run");
  options.audit_only = given("audit-only");
  options.json = given("json") && !options.audit_only;
  options.quiet = given("quiet");

  if (options.audit_only) {
    options.audit = read_audit(flags, options);
    return options;
  }
  for (const char* flag : {"header-prefix", "config", "index", "list-tensors", "expect-fp8-block",
                           "require-complete", "verify-payload", "manifest"})
    if (given(flag)) throw UsageError(fmt::format("--{} belongs to --audit-only", flag));
  const int prompts =
      int{given("prompt")} + int{given("prompt-file")} + int{given("prompt-ids")} + int{given("requests")};
  if (prompts > 1)
    throw UsageError("give one of --prompt, --prompt-file, --prompt-ids and --requests, not several");
  if (prompts == 0 && !options.dry_run)
    throw UsageError(
        "nothing to do: give --prompt TEXT, --prompt-file FILE, --prompt-ids LIST or --requests FILE (see "
        "--help)");
  if (!given("requests") && (given("out") || given("batch")))
    throw UsageError("--out and --batch belong to --requests");
  if (given("requests") && options.json)
    throw UsageError("--json is for one prompt: --requests always writes JSON lines");
  return options;
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  po::variables_map flags;
  const bool audit = std::any_of(argv, argv + argc,
                                 [](const char* word) { return std::string_view(word) == "--audit-only"; });
  try {
    po::store(po::command_line_parser(argc, argv)
                  .options(descriptions(audit))
                  .positional({})
                  .style(po::command_line_style::default_style & ~po::command_line_style::allow_guessing)
                  .run(),
              flags);
  } catch (const po::error& error) {
    throw UsageError(fmt::format("{} (see --help)", error.what()));
  }
  if (flags.count("help") > 0) return {Action::Help, {}};
  if (flags.count("version") > 0) return {Action::Version, {}};
  return {Action::Run, read_options(flags)};
}

std::string help_text() {
  std::ostringstream text;
  text << descriptions(false);
  return text.str();
}

std::string version_text() {
  return fmt::format("dsv41-mpi {}\n", DSV41_VERSION);
}

}  // namespace dsv41
