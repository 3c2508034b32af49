// Requests as JSON lines: one object a line in, one object a line out as each finishes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "loader/config.h"
#include "loader/tokenizer.h"
#include "runtime/scheduler.h"

namespace dsv41 {

/// Lines of a file, or of standard input ("-"), which may still be growing.
class LineReader {
 public:
  /// Throws UsageError when the file cannot be opened.
  explicit LineReader(const std::filesystem::path& path);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  enum class State { Line, NotYet, End };
  /// The next line without its newline. wait: block until there is one; otherwise NotYet while nothing has
  /// arrived. Throws UsageError when reading fails or a line is longer than kLongestLine.
  State next(std::string& line, bool wait);
  std::uint64_t line_number() const { return line_number_; }

  static constexpr std::size_t kLongestLine = std::size_t{64} << 20;

 private:
  std::string name_;
  int descriptor_ = -1;
  bool at_end_ = false;
  std::string buffer_;
  std::size_t searched_ = 0;  // bytes of buffer_ known to hold no newline
  std::uint64_t line_number_ = 0;
};

/// Reads one object: prompt | prompt_ids, max_tokens, temperature, top_p, seed, stop, ignore_eos, id. Absent
/// values come from `defaults`. Throws UsageError with the reason (without the line number).
GenerationRequest parse_request(std::string_view line, const GenerationRequest& defaults,
                                const Tokenizer& tokenizer, const ModelConfig& config);

/// {"id", "line", "finish", "prompt_tokens", "reused_tokens", "output_ids", "text", "timings", "speculation"}.
std::string result_line(const std::string& id, std::uint64_t line, const GenerationResult& result);
/// {"id", "line", "error"} of a request that was refused.
std::string error_line(const std::string& id, std::uint64_t line, std::string_view reason);

}  // namespace dsv41
