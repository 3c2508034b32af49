#include "tools/requests.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <simdjson.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "loader/error.h"

namespace dsv41 {
namespace {

namespace json = simdjson::dom;

template <class T>
T value_of(json::element element, const char* key, const char* kind) {
  T value;
  if (element.get(value) != simdjson::SUCCESS) throw UsageError(fmt::format("\"{}\" must be {}", key, kind));
  return value;
}

double number_of(json::element element, const char* key, double least, double most) {
  const double value = value_of<double>(element, key, "a number");
  if (!(value >= least && value <= most))
    throw UsageError(fmt::format("\"{}\" must lie between {} and {}", key, least, most));
  return value;
}

std::uint64_t count_of(json::element element, const char* key, std::uint64_t most) {
  const auto value = value_of<std::uint64_t>(element, key, "a whole number");
  if (value > most) throw UsageError(fmt::format("\"{}\" is {}, the most is {}", key, value, most));
  return value;
}

std::vector<std::string> texts_of(json::element element, const char* key) {
  std::vector<std::string> texts;
  if (element.is_string()) {
    texts.emplace_back(value_of<std::string_view>(element, key, "a text"));
    return texts;
  }
  for (const json::element text : value_of<json::array>(element, key, "a text or a list of texts"))
    texts.emplace_back(value_of<std::string_view>(text, key, "a text or a list of texts"));
  return texts;
}

}  // namespace

LineReader::LineReader(const std::filesystem::path& path)
    : name_(path == "-" ? "standard input" : path.string()) {
  descriptor_ = path == "-" ? dup(STDIN_FILENO) : open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0)
    throw UsageError(fmt::format("--requests {}: cannot be opened: {}", name_, std::strerror(errno)));
}

LineReader::~LineReader() {
  close(descriptor_);
}

LineReader::State LineReader::next(std::string& line, bool wait) {
  while (true) {
    const std::size_t newline = buffer_.find('\n', searched_);
    if (newline != std::string::npos || (at_end_ && !buffer_.empty())) {
      line = buffer_.substr(0, newline);
      buffer_.erase(0, newline == std::string::npos ? newline : newline + 1);
      searched_ = 0;
      ++line_number_;
      return State::Line;
    }
    if (at_end_) return State::End;
    searched_ = buffer_.size();
    if (buffer_.size() > kLongestLine)
      throw UsageError(
          fmt::format("{}: line {} is longer than {} bytes", name_, line_number_ + 1, kLongestLine));
    pollfd ready{descriptor_, POLLIN, 0};
    if (!wait && poll(&ready, 1, 0) == 0) return State::NotYet;
    char bytes[1 << 16];
    const ssize_t count = read(descriptor_, bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) return State::NotYet;  // a signal may have asked to stop
    if (count < 0) throw UsageError(fmt::format("{}: cannot be read: {}", name_, std::strerror(errno)));
    if (count == 0) at_end_ = true;
    buffer_.append(bytes, static_cast<std::size_t>(count));
  }
}

GenerationRequest parse_request(std::string_view line, const GenerationRequest& defaults,
                                const Tokenizer& tokenizer, const ModelConfig& config) {
  thread_local json::parser parser;
  json::object object;
  if (const auto error = parser.parse(line.data(), line.size()).get(object))
    throw UsageError(fmt::format("not a JSON object: {}", simdjson::error_message(error)));
  GenerationRequest request = defaults;
  int prompts = 0;
  for (const auto [key, value] : object) {
    if (key == "id") {
      request.id = std::string(value_of<std::string_view>(value, "id", "a text"));
    } else if (key == "prompt") {
      const auto text = value_of<std::string_view>(value, "prompt", "a text");
      request.prompt = tokenizer.encode(text);
      request.prompt.insert(request.prompt.begin(), config.bos_id());
      ++prompts;
    } else if (key == "prompt_ids") {
      request.prompt.clear();
      for (const json::element id : value_of<json::array>(value, "prompt_ids", "a list of token ids"))
        request.prompt.push_back(
            static_cast<std::uint32_t>(count_of(id, "prompt_ids", config.vocab_size - 1)));
      ++prompts;
    } else if (key == "max_tokens") {
      request.max_tokens = static_cast<std::uint32_t>(count_of(value, "max_tokens", 1u << 30));
    } else if (key == "temperature") {
      request.sampling.temperature = number_of(value, "temperature", 0, 1000);
    } else if (key == "top_p") {
      request.sampling.top_p = number_of(value, "top_p", 1e-9, 1);
    } else if (key == "seed") {
      request.sampling.seed = count_of(value, "seed", std::numeric_limits<std::uint64_t>::max());
    } else if (key == "ignore_eos") {
      request.ignore_eos = value_of<bool>(value, "ignore_eos", "true or false");
    } else if (key == "stop") {
      request.stop = texts_of(value, "stop");
    } else {
      throw UsageError(fmt::format("unknown key \"{}\"", key.substr(0, 64)));
    }
  }
  if (prompts != 1) throw UsageError("give either \"prompt\" or \"prompt_ids\"");
  return request;
}

std::string result_line(const std::string& id, std::uint64_t line, const GenerationResult& result) {
  nlohmann::ordered_json object;
  if (!id.empty()) object["id"] = id;
  object["line"] = line;
  object["finish"] = finish_name(result.finish);
  object["prompt_tokens"] = result.prompt_tokens;
  object["reused_tokens"] = result.reused_tokens;
  object["output_ids"] = result.output_ids;
  object["text"] = result.text;
  object["timings"] = {{"queue_s", result.queue_seconds},
                       {"prefill_s", result.prefill_seconds},
                       {"decode_s", result.decode_seconds},
                       {"decode_steps", result.decode_steps}};
  object["speculation"] = {{"drafted", result.drafted}, {"accepted", result.accepted}};
  return object.dump() + "\n";
}

std::string error_line(const std::string& id, std::uint64_t line, std::string_view reason) {
  nlohmann::ordered_json object;
  if (!id.empty()) object["id"] = id;
  object["line"] = line;
  object["error"] = reason;
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace dsv41
