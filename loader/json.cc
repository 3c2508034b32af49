// Shared JSON plumbing (json.h).
#include "loader/json.h"

#include <fmt/format.h>

#include <algorithm>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr std::size_t kKeepBytes = 16u << 20;  // a thread's parser is given back after a larger document

/// Buffers of one thread, reused: headers come by the dozen.
struct Reader {
  Reader() = default;
  simdjson::ondemand::parser parser;
  std::string text;
};

Reader& reader() {
  thread_local Reader instance;
  return instance;
}

}  // namespace

bool has_control_characters(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; });
}

std::string printable(std::string_view text) {
  constexpr std::size_t kQuoted = 120;
  std::string out(text.substr(0, kQuoted));
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  if (text.size() > kQuoted) out += "…";
  return out;
}

JsonDocument::JsonDocument(std::string_view json, std::size_t readable, std::string_view file) : file_(file) {
  Reader& own = reader();
  const std::size_t needed = json.size() + simdjson::SIMDJSON_PADDING;
  if (readable < needed) {
    own.text.reserve(needed);
    own.text = json;
    json = own.text;
  }
  const auto error = own.parser.iterate(json.data(), json.size(), needed).get(document_);
  if (error != simdjson::SUCCESS)
    throw CheckpointError(fmt::format("{}: malformed JSON: {}", file_, simdjson::error_message(error)));
}

JsonDocument::~JsonDocument() {
  if (reader().parser.capacity() > kKeepBytes) reader() = Reader();
}

simdjson::ondemand::object JsonDocument::root_object(std::string_view what) {
  simdjson::ondemand::object object;
  const auto error = document_.get_object().get(object);
  if (error != simdjson::SUCCESS)
    throw CheckpointError(fmt::format("{}: {} is not a JSON object", file_, what));
  return object;
}

void JsonDocument::expect_end() {
  if (document_.current_location().error() != simdjson::OUT_OF_BOUNDS)
    throw CheckpointError(fmt::format("{}: text after the end of the JSON object", file_));
}

}  // namespace dsv41
