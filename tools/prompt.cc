#include "tools/prompt.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "loader/error.h"
#include "runtime/scheduler.h"

namespace dsv41 {
namespace {

// A token is at most a few dozen bytes of text; more than this cannot fit the longest context.
constexpr std::size_t kLongestPrompt = std::size_t{256} << 20;

std::string read_all(std::istream& stream, const std::string& name) {
  std::string text;
  char buffer[1 << 16];
  while (stream.read(buffer, sizeof buffer) || stream.gcount() > 0) {
    text.append(buffer, static_cast<std::size_t>(stream.gcount()));
    if (text.size() > kLongestPrompt)
      throw UsageError(fmt::format("{}: more than {} bytes of prompt", name, kLongestPrompt));
  }
  if (stream.bad()) throw UsageError(fmt::format("{}: cannot be read: {}", name, std::strerror(errno)));
  return text;
}

std::string read_prompt_file(const std::filesystem::path& path) {
  const std::string name = fmt::format("--prompt-file {}", path.string());
  if (path == "-") return read_all(std::cin, name);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) throw UsageError(fmt::format("{}: is a directory", name));
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError(fmt::format("{}: cannot be opened: {}", name, std::strerror(errno)));
  std::string text = read_all(file, name);
  if (text.empty()) throw UsageError(fmt::format("{}: the file is empty", name));
  return text;
}

}  // namespace

std::vector<std::uint32_t> prompt_tokens(const Options& options, const Tokenizer& tokenizer,
                                         const ModelConfig& config) {
  std::vector<std::uint32_t> ids;
  if (options.prompt_ids) {
    ids = *options.prompt_ids;
  } else {
    const std::string text = options.prompt ? *options.prompt : read_prompt_file(*options.prompt_file);
    if (!is_valid_utf8(text)) throw UsageError("the prompt is not valid UTF-8");
    ids = tokenizer.encode(text);
    ids.insert(ids.begin(), config.bos_id());
  }
  check_prompt(config, ids);
  return ids;
}

}  // namespace dsv41
