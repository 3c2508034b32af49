// Gathering evidence and running the groups of checks (audit.h).
#include "loader/audit/audit.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <ostream>
#include <set>
#include <system_error>

#include "loader/audit/report.h"
#include "loader/error.h"

namespace dsv41::audit {
namespace {

namespace fs = std::filesystem;

struct CategoryNames {
  std::string_view title, key;
};

/// In the order of Category, then what the config does not call for.
constexpr CategoryNames kCategoryNames[] = {
    {"Routed experts", "routed_experts"},
    {"Engram tables", "engram_tables"},
    {"Attention", "attention"},
    {"Embedding and head", "embedding_and_head"},
    {"Shared experts", "shared_experts"},
    {"Vision and aligner", "vision_and_aligner"},
    {"MTP and DSpark", "mtp_and_dspark"},
    {"Layer norms and hyper-connections", "norms_and_hyper_connections"},
    {"Other", "other"}};
constexpr std::size_t kOther = std::size(kCategoryNames) - 1;

/// The config as far as it can be read.
struct ReadConfig {
  ModelConfig config;
  std::string failure;  // why it cannot be judged
};

ReadConfig read(const AuditOptions& options) {
  std::error_code error;
  if (!fs::is_directory(options.directory, error))
    throw CheckpointError(fmt::format("{}: no such checkpoint directory", options.directory.string()));
  const fs::path file = options.config ? *options.config : find_config(options.directory);
  if (!fs::is_regular_file(file, error))
    throw CheckpointError(fmt::format("{}: no such config file", file.string()));
  ReadConfig result;
  try {
    result.config = read_config(file);
    if (tensor_count(with_regular_lists(result.config)) > kMaxTensors)
      throw CheckpointError(fmt::format("{}: asks for {} tensors, more than {}", file.string(),
                                        tensor_count(with_regular_lists(result.config)), kMaxTensors));
  } catch (const CheckpointError& failure) {
    result = {ModelConfig{}, failure.what()};
  }
  return result;
}

std::optional<fs::path> index_file(const AuditOptions& options) {
  if (options.index) return options.index;
  const fs::path file = options.directory / kWeightIndexFile;
  std::error_code error;
  if (fs::exists(file, error)) return file;
  return std::nullopt;
}

/// Files whose headers are equal byte for byte count once: a mirror may serve one file under two names.
void drop_duplicates(std::vector<LocalShard>& shards) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  const auto repeated = [&](const LocalShard& shard) {
    return shard.readable && !seen.insert({shard.header.header_bytes, shard.header_digest}).second;
  };
  shards.erase(std::remove_if(shards.begin(), shards.end(), repeated), shards.end());
}

EvidenceInput gather(const AuditOptions& options, const ModelConfig& config, bool expect) {
  EvidenceInput input;
  input.config = config;
  input.header_prefix = options.header_prefix;
  input.threads = options.threads;
  const std::vector<std::string> files = find_shards(options.directory, options.header_prefix);
  if (files.empty())
    throw CheckpointError(fmt::format("{}: no *.safetensors shard in it{}", options.directory.string(),
                                      options.header_prefix
                                          ? " and no file that starts like one"
                                          : " (--header-prefix reads headers under any name)"));
  const auto index = index_file(options);
  input.local.resize(files.size());
  // The two long jobs first: index and inventory take as long as all headers together.
  run_in_parallel(files.size() + 2, options.threads, [&](std::size_t job) {
    if (job == 0) {
      if (!index) return;
      const MappedFile mapped(*index);
      input.index = parse_weight_index(mapped.text(), index->string(), mapped.readable());
    } else if (job == 1) {
      if (expect) input.expected = Expectation(inventory(with_regular_lists(config)));
    } else {
      input.local[job - 2] = read_shard(options.directory, files[job - 2], options.header_prefix);
    }
  });
  if (options.header_prefix) drop_duplicates(input.local);
  return input;
}

DerivedRows derive(const AuditOptions& options, const ModelConfig& config) {
  DerivedRows derived;
  // The prime search is as long as the config asks for; nothing near these bounds is a model.
  constexpr std::uint64_t kMaxColumns = 65'536, kMaxVocabulary = std::uint64_t{1} << 40;
  const std::uint64_t columns = std::uint64_t{config.engram_max_ngram_size} * config.engram_n_heads;
  if (config.engram_max_ngram_size < 2 || columns > kMaxColumns ||
      columns * config.engram_layer_ids.size() > kMaxColumns || config.engram_vocab_size > kMaxVocabulary) {
    derived.failure = fmt::format(
        "cannot derive bucket ranges from engram_max_ngram_size {}, engram_n_heads {}, "
        "engram_vocab_size {} for {} layers",
        config.engram_max_ngram_size, config.engram_n_heads, config.engram_vocab_size,
        config.engram_layer_ids.size());
    return derived;
  }
  try {
    derived.rows = options.derive_engram_rows(config);
  } catch (const CheckpointError& error) {
    derived.failure = error.what();
  }
  return derived;
}

Checks run_checks(const AuditOptions& options, const Evidence& evidence, const std::string& config_failure) {
  Checks checks;
  check_config(evidence, checks);
  check_engram(evidence,
               config_failure.empty() && !evidence.config().engram_layer_ids.empty()
                   ? derive(options, evidence.config())
                   : DerivedRows{},
               checks);
  check_packing(evidence, checks);
  check_scales(evidence, options.expect_fp8_block.value_or(BlockSize{}), checks);
  check_inventory(evidence, checks);
  check_experts(evidence, checks);
  check_csa2(evidence, checks);
  check_vision(evidence, checks);
  check_dspark(evidence, checks);
  check_index(evidence, checks);
  if (config_failure.empty()) return checks;
  // Without a config only bytes, counts and the index can be judged.
  for (Check& check : checks) {
    const std::string_view name = check.name;
    if (name.starts_with("packing:") || name.starts_with("index:") || name.find("non-zero") != name.npos)
      continue;
    check.outcome = Outcome::Undecided;
    check.detail = "needs a config that can be read";
  }
  checks.front().outcome = Outcome::Fail;
  checks.front().detail = config_failure;
  return checks;
}

void count_categories(const Evidence& evidence, AuditReport& report) {
  for (const CategoryNames& names : kCategoryNames) report.categories.push_back({names.title, names.key});
  const auto count = [&](const TensorInfo* header, std::size_t category) {
    if (header == nullptr) return;
    ++report.categories[category].tensors;
    report.categories[category].bytes += header->bytes();
    if (header->bytes() <= report.largest.bytes) return;
    report.largest = {std::string(header->name), std::string(dtype_name(header->dtype)), header->shape.text(),
                      header->bytes()};
  };
  for (const ExpectedState& tensor : evidence.tensors())
    count(tensor.header, static_cast<std::size_t>(tensor.expected->category));
  for (const StrayState& stray : evidence.strays()) count(stray.header, kOther);
  // A tensor that two shards hold is counted once.
  for (const CategoryTotal& category : report.categories) {
    report.tensors += category.tensors;
    report.bytes += category.bytes;
  }
}

AuditReport judge(const AuditOptions& options, const Evidence& evidence, const std::string& config_failure) {
  AuditReport report;
  report.directory = options.directory.string();
  report.header_prefix = options.header_prefix;
  report.checks = run_checks(options, evidence, config_failure);
  if (options.require_complete)
    for (Check& check : report.checks)
      if (check.outcome == Outcome::Undecided) {
        check.outcome = Outcome::Fail;
        check.detail = "undecided, and completeness is required: " + check.detail;
      }
  count_categories(evidence, report);
  report.shards =
      static_cast<std::size_t>(std::count_if(evidence.local().begin(), evidence.local().end(),
                                             [](const LocalShard& shard) { return shard.readable; }));
  report.complete = evidence.complete();
  report.indexed = evidence.index().has_value();
  if (report.indexed) {
    report.shipped_tensors = evidence.index()->entries.size();
    for (const Shard& shard : evidence.shards())
      (shard.local ? report.local_shards : report.pending_shards).push_back(shard.file);
  }
  return report;
}

void list_tensors(const Evidence& evidence, const std::string& glob, std::ostream& out) {
  std::string text;
  for (const LocalShard& shard : evidence.local())
    for (const TensorInfo& tensor : shard.header.tensors) {
      const std::string name(tensor.name);
      if (::fnmatch(glob.c_str(), name.c_str(), 0) == 0)
        fmt::format_to(std::back_inserter(text), "{}\t{}\t{}\t{}\t{}\n", name, dtype_name(tensor.dtype),
                       tensor.shape.text(), tensor.bytes(), shard.file_name);
    }
  out << text;
}

void write_json(const fs::path& file, const std::string& text, std::ostream& out) {
  if (file == "-") {
    out << text;
    return;
  }
  std::ofstream stream(file, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream)
    throw ResourceError(fmt::format("{}: cannot write the report: {}", file.string(),
                                    std::generic_category().message(errno)));
}

std::atomic<int> stop_signal{0};

/// Turns SIGINT and SIGTERM into a wish to stop, for as long as it lives.
class StopOnSignal {
 public:
  StopOnSignal() {
    stop_signal = 0;
    struct sigaction action {};
    action.sa_handler = [](int number) { stop_signal = number; };
    ::sigaction(SIGINT, &action, &interrupt_);
    ::sigaction(SIGTERM, &action, &terminate_);
  }
  ~StopOnSignal() {
    ::sigaction(SIGINT, &interrupt_, nullptr);
    ::sigaction(SIGTERM, &terminate_, nullptr);
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

 private:
  struct sigaction interrupt_ {
  }, terminate_{};
};

PayloadReport verify(const AuditOptions& options, const Evidence& evidence, std::ostream& err) {
  const StopOnSignal guard;
  PayloadOptions payload;
  payload.directory = options.directory;
  payload.manifest = options.manifest.value_or(options.directory / "payload-manifest.jsonl");
  payload.threads = options.threads;
  payload.quiet = options.quiet;
  payload.progress_bar = options.progress_bar;
  payload.stop = &stop_signal;
  return verify_payload(evidence.local(), payload, err);
}

}  // namespace

std::size_t AuditReport::count(Outcome outcome) const {
  return static_cast<std::size_t>(std::count_if(
      checks.begin(), checks.end(), [&](const Check& check) { return check.outcome == outcome; }));
}

AuditReport audit(const AuditOptions& options) {
  const ReadConfig config = read(options);
  const Evidence evidence(gather(options, config.config, config.failure.empty()));
  return judge(options, evidence, config.failure);
}

int run_audit(const AuditOptions& options, std::ostream& out, std::ostream& err) {
  if (options.verify_payload && options.header_prefix)
    throw UsageError("--verify-payload needs whole shards; it does not go with --header-prefix");
  const ReadConfig config = read(options);
  const Evidence evidence(gather(options, config.config, config.failure.empty()));
  AuditReport report = judge(options, evidence, config.failure);
  if (options.list_tensors) list_tensors(evidence, *options.list_tensors, out);
  // A listing or a JSON report on the output stream is for programs; people read the other stream then.
  const bool out_is_taken = options.list_tensors || (options.json && *options.json == "-");
  std::ostream& people = out_is_taken ? err : out;
  people << text_report(report, options.quiet, options.colour) << std::flush;
  bool failed = report.count(Outcome::Fail) > 0;
  if (options.verify_payload) {
    report.payload = verify(options, evidence, err);
    people << payload_text(*report.payload, options.quiet);
    failed = failed || report.payload->failed();
  }
  if (options.json) write_json(*options.json, json_report(report), out);
  if (report.payload && report.payload->interrupted) return 128 + stop_signal;
  return static_cast<int>(failed ? ExitCode::CheckFailed : ExitCode::Ok);
}

}  // namespace dsv41::audit
