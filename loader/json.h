// simdjson's on-demand reader with this project's manners: padding, one-line errors, printable quotes of
// input. Internal to loader/; headers that others include do not need it.
#pragma once

#include <simdjson.h>

#include <string>
#include <string_view>

namespace dsv41 {

bool has_control_characters(std::string_view text);
/// Untrusted text fit for one line of a message: control characters become '?', long text is cut.
std::string printable(std::string_view text);

/// A JSON text being read front to back. Holds a per-thread parser: at most one per thread at a time.
class JsonDocument {
 public:
  /// readable: bytes that may be read from json.data() on; simdjson reads a little past the end, so that text
  /// with less room than that behind it is copied. Throws CheckpointError naming `file` for malformed text.
  JsonDocument(std::string_view json, std::size_t readable, std::string_view file);
  ~JsonDocument();
  JsonDocument(const JsonDocument&) = delete;
  JsonDocument& operator=(const JsonDocument&) = delete;

  simdjson::ondemand::object root_object(std::string_view what);
  /// After everything was read: refuses trailing content.
  void expect_end();

 private:
  std::string_view file_;
  simdjson::ondemand::document document_;
};

}  // namespace dsv41
